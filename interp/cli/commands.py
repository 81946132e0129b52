"""The commands that look at one model: the report page, tables of heads, the backward lens, its numerical contract."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from interp.cli.common import available

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

    from interp import HookedTransformer
    from interp.pages import Question
    from interp.passes.observe import Subject

PROMPT = "When Mary and John went to the store, John gave a drink to"
"""The prompt of a report that is asked for without one: an indirect object, with the repeated name as wrong answer."""
ANSWER, WRONG = " Mary", " John"
CORRUPT = "When Mary and John went to the store, Mary gave a drink to"
"""Its twin, whose answer is the wrong one: the other person gives."""


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
        from interp import DEMOS, HookedTransformer, zoo
        from interp.pages import About, replacing, report_of, write_report

        about = About(self.model)
        if self.model in DEMOS:
            about = About(self.model, DEMOS[self.model].summary, zoo.card(self.model))
        with replacing(self.out) as folder:
            model = HookedTransformer.from_pretrained(self.model, device=available(self.device))
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
            raise ValueError("a twin (--corrupt) requires a prompt of your own (--prompt), got none")
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
        from interp import read_attribution_graph
        from interp.core.results import write_atomically
        from interp.pages import graph_page

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
class Heads:
    """Print what every head of a model does on repeated random tokens: scores with 95 % intervals."""

    model: Annotated[str, tyro.conf.Positional]
    """Demo name, local folder, safetensors file or hub name."""
    checkpoints: tuple[str, ...] = ()
    """Training checkpoints to compare, such as `step1200 step2850`, or `all` that a demo model ships."""
    seed: int = 0
    """Seed of the random tokens."""
    device: str = "cpu"
    """Where to compute: cpu, cuda, cuda:1, ..."""
    debug: bool = False
    """Show where an error was raised."""

    def run(self) -> None:
        """Print one line per head, best induction head first (or one per checkpoint), and what the numbers are."""
        from interp.pages.tables import heads as table_of

        device = available(self.device)
        if self.checkpoints:
            found = self._over_training(device)
        else:
            found = self._scores(self._loaded(device, None))
            table = table_of(found).sort_values("induction", ascending=False, kind="stable")
            print(_with_intervals(table).to_string(index=False))
        about = found.attrs
        tokens = f"{about['period']} x {about['repeats']} random tokens"
        print(f"attention mass, 95 % over {about['rows']} rows of {tokens}")

    def _over_training(self, device: str) -> "xr.Dataset":
        """Print the best head of every score at each checkpoint, and where induction rises fastest."""
        from interp.dynamics.checkpoints import over_checkpoints, phase_change

        found = over_checkpoints(partial(self._loaded, device), self._revisions(), self._scores)
        print(_best_heads(found).to_string(index=False))
        if found.sizes["step"] > 1:
            best = found.induction.isel(step=-1).argmax(...)
            change = phase_change(found.induction).isel(best)
            layer, head, before, after = (int(change[name]) for name in ("layer", "head", "before", "after"))
            print(
                f"induction of head {layer}.{head}, the best at the end, rises fastest between "
                f"steps {before} and {after}: {float(change.rise):+.2f}"
            )
        return found

    def _loaded(self, device: str, revision: str | None) -> "HookedTransformer":
        from interp import HookedTransformer

        return HookedTransformer.from_pretrained(self.model, revision=revision, device=device)

    def _scores(self, model: "Subject") -> "xr.Dataset":
        from interp import heads
        from interp.pages import fitting_repeats

        return heads(model, fitting_repeats(model.transformer.config, self.seed))

    def _revisions(self) -> list[str]:
        """The checkpoints asked for; `all` are those that come with the package, ValueError if none do."""
        from interp import zoo

        if self.checkpoints != ("all",):
            return list(self.checkpoints)
        shipped = zoo.revisions(self.model) if self.model in zoo.DEMOS else []
        if not shipped:
            having = [name for name in zoo.DEMOS if zoo.revisions(name)]
            raise ValueError(
                f"--checkpoints all requires a demo model with checkpoints ({', '.join(having)}), got {self.model!r}"
            )
        return shipped


@dataclass(frozen=True)
class BackwardLens:
    """Print what one training step towards a target would write into every layer, read through the vocabulary."""

    prompt: Annotated[str, tyro.conf.Positional]
    """Text whose continuation is trained."""
    target: str
    """Next token to train towards, leading space included."""
    model: str = "demo-4l"
    """Demo name (see `interp models`), local folder, safetensors file or hub name."""
    wrong: str | None = None
    """Token to train away from; with it the loss is the difference of both logits."""
    matrix: Literal["W_in", "W_gate", "W_out", "W_Q", "W_K", "W_V", "W_O"] = "W_out"
    """Which matrix of each layer."""
    every_token: bool = False
    """All tokens of the prompt instead of the last one."""
    device: str = "cpu"
    """Where to compute: cpu, cuda, cuda:1, ..."""
    debug: bool = False
    """Show where an error was raised."""

    def run(self) -> None:
        """Print one line per layer (and token), and how to read them."""
        from interp import HookedTransformer, backward_lens, frame

        model = HookedTransformer.from_pretrained(self.model, device=available(self.device))
        found = backward_lens(model, self.prompt, self.target, self.wrong, matrices=[self.matrix])
        read = "bottom" if str(found.side[0].values) == "delta" else "top"
        said = found[f"{read}_word"].values[0, 0].reshape(-1, found.sizes["rank"]).tolist()
        cells = frame(found)
        words = [" | ".join(row) if row[0] else only for row, only in zip(said, cells.word, strict=True)]
        table = cells[["layer", "pos", "token", "relative_update", "target_rank"]].assign(
            token=cells.token.map(repr),
            relative_update=cells.relative_update.map("{:.3f}".format),
            **{f"{read} tokens": [repr(word) for word in words]},
        )
        table = table if self.every_token else table[table.pos == table.pos.max()]
        print(table.to_string(index=False))
        side = "delta, which a step subtracts: read the least" if read == "bottom" else "x: read the most"
        last = model.cfg.d_vocab - 1
        print(
            f"{self.matrix}: {side} probable tokens; target rank 0 = most, {last} = least probable, -1 = no update"
        )


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
        door = HookedEncoderDecoder if pair else HookedTransformer
        revision = self.revision if self.model in DEMOS else None
        model = door.from_pretrained(source, revision=revision, dtype=dtype, device=available(self.device))
        found = model.verify()
        print(found)
        return 0 if found.passed else 1


def _best_heads(scores: "xr.Dataset") -> "pd.DataFrame":
    """For each step and score the best head: `1.7 0.81 [0.80, 0.82]`."""
    import pandas as pd

    from interp.pages.tables import heads as table_of

    rows: list[dict[str, int | str]] = []
    for step in scores.step.values:
        table = table_of(scores.sel(step=step))
        cells = _with_intervals(table)
        row: dict[str, int | str] = {"step": int(step)}
        for score in cells.columns[3:]:
            best = cells.iloc[int(table[score].to_numpy().argmax())]
            row[str(score)] = f"{best['layer']}.{best['head']} {best[score]}"
        rows.append(row)
    return pd.DataFrame(rows)


def _with_intervals(table: "pd.DataFrame") -> "pd.DataFrame":
    """Layer, head, what the head is called, and each score as `0.93 [0.91, 0.95]`."""
    out = table[["layer", "head"]].assign(called=table.label.replace("none", ""))
    for score in ("induction", "previous_token", "duplicate_token"):
        ends = zip(table[score], table[f"{score}_low"], table[f"{score}_high"], strict=True)
        out[score] = [f"{value:.2f} [{low:.2f}, {high:.2f}]" for value, low, high in ends]
    return out
