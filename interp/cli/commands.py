"""The commands about one model: its pages, the demo models, the numerical contract, the circuit of a task."""

import webbrowser
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from interp.circuits import FindCircuit
from interp.cli.asking import Asking, asking, available, opened, read_data
from interp.lenses import JacobianLens

if TYPE_CHECKING:
    from interp.pages import Question

PROMPT = "When Mary and John went to the store, John gave a drink to"
"""The prompt of a report that is asked for without one: an indirect object, with the repeated name as wrong answer."""
ANSWER, WRONG = " Mary", " John"
CORRUPT = "When Mary and John went to the store, Mary gave a drink to"
"""The corrupted prompt, whose answer is the wrong one: the other person gives."""
MOST_PAIRS = 100_000
"""Pairs that are drawn in memory."""
NEEDED = ("starlette", "uvicorn", "pydantic")
"""What the live page requires."""
Task = Literal[
    "indirect_objects", "greater_than", "facts", "repeated_sequences", "copy", "docstring_arguments"
]


@dataclass(frozen=True)
class Report:
    """Write the analysis page of one prompt: HTML that opens from disk, every table as CSV and Parquet, run.json."""

    model: str = "demo-4l"
    """Demo name (see `interp models`), local folder, safetensors file or hub name."""
    prompt: str | None = None
    """Text to analyse; without it an indirect-object sentence."""
    answer: str | None = None
    """Next token to ask about, leading space included; without it the model's own most probable one."""
    wrong: str | None = None
    """Token the answer is contrasted with."""
    out: Path = Path("report")
    """Folder to write; replaced if an earlier report wrote it, refused if it holds anything else."""
    seed: int = 0
    """Seed of the random tokens on which heads are scored."""
    device: str = "cpu"
    """Where to compute: cpu, cuda, cuda:1, ..."""
    corrupt: str | None = None
    """The prompt once more, token for token, but for what changes its answer: what patching compares it with."""
    debug: bool = False
    """Show where an error was raised."""

    def run(self) -> None:
        """Load, analyse, write; the output folder is tried before any work."""
        question = self.question()
        from interp import DEMOS, zoo
        from interp.pages import About, replacing, report_of, write_report

        about = About(self.model)
        if self.model in DEMOS:
            about = About(self.model, DEMOS[self.model].summary, zoo.card(self.model))
        with replacing(self.out) as folder:
            model = opened(self.model, self.device)
            write_report(report_of(model, question, about, seed=self.seed), folder)
        print(self.out / "index.html")

    def question(self) -> "Question":
        """The prompt with its answers; the built-in ones only where nothing was given."""
        from interp.pages import Question

        if self.prompt is not None:
            return Question(self.prompt, self.answer, self.wrong, self.corrupt)
        if self.answer is not None or self.wrong is not None:
            raise ValueError("an answer requires a prompt of your own (--prompt), got none")
        if self.corrupt is not None:
            raise ValueError(
                "a corrupted prompt (--corrupt) requires a prompt of your own (--prompt), got none"
            )
        return Question(PROMPT, ANSWER, WRONG, CORRUPT)


@dataclass(frozen=True)
class Graph:
    """Draw an attribution graph, of Neuronpedia, circuit-tracer or a report of ours, as a page that opens from disk."""

    file: Annotated[Path, tyro.conf.Positional]
    """The graph's JSON file."""
    out: Path = Path("graph.html")
    """The page to write."""
    links: int = 200
    """How many of the strongest links to draw."""
    debug: bool = False
    """Show where an error was raised."""

    def run(self) -> None:
        """Read, draw, write."""
        from interp.circuits import read_attribution_graph
        from interp.core.files import check_replaceable, write_atomically
        from interp.pages import graph_page

        check_replaceable(self.out)
        text = graph_page(read_attribution_graph(self.file), most=self.links)
        write_atomically(self.out, lambda path: path.write_text(text, encoding="utf-8"))
        print(self.out)


@dataclass(frozen=True)
class Models:
    """List the demo models and what they measurably do."""

    debug: bool = False
    """Show where an error was raised."""

    def run(self) -> None:
        """Print one paragraph per model."""
        from interp import DEMOS, zoo

        for name, demo in DEMOS.items():
            print(f"{name}\n    {demo.summary}")
            measured = zoo.card(name).get("measured")
            for number, entry in measured.items() if isinstance(measured, dict) else ():
                head = f" (head {entry['head']})" if "head" in entry else ""
                print(f"    {number.replace('_', ' '):<36} {entry['value']:>7.3f}  n = {entry['n']}{head}")


@dataclass(frozen=True)
class Verify:
    """Measure the numerical contract of a model: every line with its error; exit code 1 if one does not hold."""

    model: Annotated[str, tyro.conf.Positional]
    """Demo name, local folder, file of weights or hub name."""
    revision: str | None = None
    """Branch, tag or training checkpoint."""
    dtype: Literal["float64", "float32", "bfloat16", "float16"] | None = None
    """Precision to load in; without it the checkpoint's own."""
    device: str = "cpu"
    """Where to compute: cpu, cuda, cuda:1, ..."""
    debug: bool = False
    """Show where an error was raised."""

    def run(self) -> int:
        """Load, measure, print; 1 if the contract is broken."""
        import torch

        from interp import DEMOS, HookedEncoderDecoder, HookedTransformer
        from interp.families import is_encoder_decoder
        from interp.families.hub import located

        dtype = None if self.dtype is None else getattr(torch, self.dtype)
        source: str | Path = self.model
        pair = False
        if self.model not in DEMOS:
            source = located(self.model, self.revision, f"demo models: {', '.join(DEMOS)}")
            pair = is_encoder_decoder(source)
        kind = HookedEncoderDecoder if pair else HookedTransformer
        revision = self.revision if self.model in DEMOS else None
        model = kind.from_pretrained(source, revision=revision, dtype=dtype, device=available(self.device))
        found = model.verify()
        print(found)
        return 0 if found.passed else 1


@dataclass(frozen=True)
class Serve:
    """Serve the live page of a model on this machine: type, edit by a click, and watch. Ctrl-C ends it."""

    model: Annotated[str, tyro.conf.Positional] = "demo-4l"
    """Demo name (see `interp models`), local folder, safetensors file or hub name."""
    prompt: str = PROMPT
    """Text that the page begins with."""
    second: str | None = None
    """Text that patches come from, to begin with; without it and `--prompt` the built-in corrupted prompt."""
    port: int = 0
    """Port of 127.0.0.1; 0 takes a free one."""
    open: bool = False
    """Open the page in the browser."""
    device: str = "cpu"
    """Where to compute: cpu, cuda, cuda:1, ..."""
    debug: bool = False
    """Show where an error was raised."""

    def run(self) -> None:
        """Load the model, print the address, and answer until Ctrl-C."""
        if missing := [name for name in NEEDED if find_spec(name) is None]:
            raise ValueError(
                f"interp serve requires {', '.join(missing)}: pip install 'interp[serve]' "
                "(in a clone: .venv/bin/pip install -e '.[serve]')"
            )
        if not 0 <= self.port < 65536:
            raise ValueError(f"--port requires a number from 0 to 65535, got {self.port}")
        from interp.serve.app import Subject, serve
        from interp.serve.session import Session
        from interp.serve.snippet import Origin

        second = self.second or (CORRUPT if self.prompt == PROMPT else "")
        subject = Subject(
            Session(opened(self.model, self.device)), Origin(self.model, self.device), self.prompt, second
        )
        serve(subject, self.port, self._ready)

    def _ready(self, address: str) -> None:
        print(
            f"{address}\nOnly this machine can open it, and only with this address. Ctrl-C ends it.",
            flush=True,
        )
        if self.open:
            webbrowser.open(address)


@dataclass(frozen=True, kw_only=True)
class OfTask(Asking):
    """Find the edges that carry a generated task, and print how much of the answer they keep on other prompts."""

    task: Annotated[Task, tyro.conf.Positional]
    """Where the pairs of prompts come from."""
    pairs: int = 32
    """Pairs to find the circuit on, and as many others to try it on."""
    seed: int = 0
    """Seed of the pairs."""

    def run(self) -> None:
        """Print the edges from the strongest on, and the circuit's faithfulness beside random ones."""
        from interp import evaluate_circuit, find_circuit
        from interp.causal import batches
        from interp.core.files import check_replaceable
        from interp.tasks import TASKS

        if self.out is not None:
            check_replaceable(self.out)
        if not 1 <= self.pairs <= MOST_PAIRS:
            raise ValueError(f"--pairs must be in [1, {MOST_PAIRS}], got {self.pairs}")
        if self.seed < 0:
            raise ValueError(f"--seed must be 0 or more, got {self.seed}")
        model = opened(self.model, self.device)
        seeds = 2 * self.seed, 2 * self.seed + 1  # no other seed of a user's shares them
        drawn = (TASKS[self.task](rows=self.pairs, seed=s).pairs(model.text.tokenizer) for s in seeds)
        to_find, to_try = (batches(model, pairs) for pairs in drawn)
        found = find_circuit(model, *to_find, **self.fields())  # type: ignore[arg-type]
        for edge, score in sorted(found.scores.items(), key=lambda each: -abs(each[1]))[: self.most]:
            print(f"{score:+9.3f}  {edge}")
        whole = evaluate_circuit(model, *to_try, found, subsets=1, draws=5)
        one = whole.sel(score="faithfulness", circuit="found")
        kept, low, high, chance = (float(one[name]) for name in ("value", "low", "high", "null"))
        print(
            f"{len(found.edges)} of {len(found.graph)} edges keep {kept:.2f} [{low:.2f}, {high:.2f}] of the logit "
            f"difference on {self.pairs} other pairs, random ones {chance:.2f}; a score is the effect of the edge, "
            f"{self.fields()['direction']}, as {self.fields()['method']} has it"
        )
        if self.out is not None:
            found.save(self.out)
            print(self.out)


Circuit = asking(FindCircuit, OfTask, edges=40)


@dataclass(frozen=True, kw_only=True)
class OfCorpus(Asking):
    """Fit the Jacobian lens on texts, print how precise it is, and read a prompt with it."""

    data: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Texts, or one file of them, a text a line."""
    prompt: str | None = None
    """What to read: after every layer the words at its last token, with the ends of their ranks and their stability."""
    top: int = 3
    """How many words of each layer."""
    out: Path | None = None
    """File for the lens, in safetensors."""

    def run(self) -> None:
        """Print the standard error of every layer and the words of the prompt; write the lens if asked for."""
        from interp.core.files import check_replaceable
        from interp.core.results import frame
        from interp.lenses import jacobian_lens

        if odd := [f"--{name}" for name in ("checkpoints", "scores", "sort") if getattr(self, name)]:
            raise ValueError(f"a lens is fitted on one model and has one table: leave {odd[0]} out")
        if self.out is not None:
            check_replaceable(self.out)
        lens = jacobian_lens(opened(self.model, self.device), read_data(self.data), **self.fields())  # type: ignore[arg-type]
        assert lens.error is not None
        for layer, error in zip(lens.layers, lens.error.tolist(), strict=True):
            print(f"after block {layer}: standard error {error:.3f} of the norm of J")
        print(f"{lens.prompts} prompts; ended {lens.about['ended']}")
        if self.prompt is not None:
            words = lens.read(self.prompt, top=self.top).isel(prompt=0, pos=-1)
            names = ["word", "top_prob", "low", "high", "stays"]
            table = frame(words[names])[["depth", "rank", *names]]
            print(table.head(self.most).to_string(index=False, float_format="{:.3f}".format))
        if self.out is not None:
            lens.save(self.out)
            print(self.out)


JacobianLensCommand = asking(JacobianLens, OfCorpus)
