"""The commands that fit something to data: the circuit of a task, the Jacobian lens of a corpus."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from interp.circuits import FindCircuit
from interp.cli.asking import Asking, asking, read_data
from interp.core.wording import nearest
from interp.lenses import JacobianLens

if TYPE_CHECKING:
    from interp.data.tokenizers import Tokenizer
    from interp.tasks import TaskPairs

MOST_PAIRS = 100_000
"""Most pairs of prompts, which are all held in memory."""
OF_TABLES = ("checkpoints", "scores", "sort")
"""Options that these commands inherit from `Asking` and refuse."""
TaskName = Literal[
    "indirect_objects", "greater_than", "facts", "repeated_sequences", "copy", "docstring_arguments"
]


@dataclass(frozen=True, kw_only=True)
class OfTask(Asking):
    """Find the edges that carry a generated task, and print how much of the answer they keep on other prompts."""

    task: Annotated[TaskName | Path, tyro.conf.Positional]
    """Where the pairs of prompts come from: a generated task, or a file of facts (.csv, .json, .jsonl)."""
    pairs: int = 32
    """Pairs to find the circuit on, and as many others to try it on."""
    seed: int = 0
    """Seed of the pairs."""
    faithfulness: float | None = None
    """The share of the logit difference that is kept with as few edges as do; without it and other limits 0.8."""

    def run(self) -> None:
        """Print the edges from the strongest on, and the circuit's faithfulness next to random ones."""
        from interp import evaluate_circuit, find_circuit
        from interp.causal import batches
        from interp.core.files import check_replaceable

        self.refuse(*OF_TABLES, why="a circuit is found in one model and has one table")
        self.require_some("most")
        if self.out is not None:
            check_replaceable(self.out)
        if not 1 <= self.pairs <= MOST_PAIRS:
            raise ValueError(f"--pairs must be in [1, {MOST_PAIRS}], got {self.pairs}")
        if self.seed < 0:
            raise ValueError(f"--seed must be 0 or more, got {self.seed}")
        model = self.opened()
        to_find, to_try = (batches(model, pairs) for pairs in self.drawn(model.text.tokenizer))
        circuit = find_circuit(
            model,
            *to_find,
            faithfulness=self.faithfulness,
            **self.fields() | {"task": str(self.task)},  # type: ignore[arg-type]
        )
        edges = sorted(circuit.scores.items(), key=lambda item: -abs(item[1]))
        scores = evaluate_circuit(model, *to_try, circuit, subsets=1, draws=5, nodes=0)
        faithfulness = scores.sel(score="faithfulness", circuit="found")
        kept, low, high, chance = (float(faithfulness[name]) for name in ("value", "low", "high", "null"))
        lines = [f"{score:+9.3f}  {edge}" for edge, score in edges[: self.most]]
        lines.append(
            f"{len(circuit.edges)} of {len(circuit.graph)} edges keep {kept:.2f} [{low:.2f}, {high:.2f}] of the logit "
            f"difference on {self.pairs} other pairs, random ones {chance:.2f}; a score is the effect of the edge, "
            f"{self.fields()['direction']}, as {self.fields()['method']} has it"
        )
        self.tell(
            lines,
            lambda: {
                "edges": [{"edge": edge, "score": score} for edge, score in edges],
                "possible_edges": len(circuit.graph),
                "faithfulness": {"value": kept, "low": low, "high": high, "null": chance},
                "pairs": self.pairs,
            },
        )
        if self.out is not None:
            circuit.save(self.out)
            self.wrote(self.out)

    def drawn(self, tokenizer: "Tokenizer") -> "tuple[TaskPairs, TaskPairs]":
        """The pairs to find the circuit on, and others to try it on; of a file's facts one from each half."""
        from interp.core.files import is_file
        from interp.tasks import TASKS, read_facts

        first, second = 2 * self.seed, 2 * self.seed + 1  # distinct for every value of --seed
        if isinstance(self.task, str):
            task = TASKS[self.task]
            return task(rows=self.pairs, seed=first).pairs(tokenizer), task(
                rows=self.pairs, seed=second
            ).pairs(tokenizer)
        if not is_file(self.task):
            raise ValueError(
                f"there is no file {self.task} and no task of this name; {nearest(str(self.task), TASKS)}"
            )
        facts = read_facts(self.task)
        if len(facts) < 2:
            raise ValueError(
                f"{self.task}: facts to find the circuit on and others to try it on are required, got 1"
            )
        return (
            facts[::2].pairs(tokenizer, rows=self.pairs, seed=first),
            facts[1::2].pairs(tokenizer, rows=self.pairs, seed=second),
        )


CircuitCommand = asking(FindCircuit, OfTask)


@dataclass(frozen=True, kw_only=True)
class OfCorpus(Asking):
    """Fit the Jacobian lens on texts, print how precise it is, and read a prompt with it."""

    data: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Texts, or one file of them, a text a line."""
    prompt: str | None = None
    """Text to read: after every layer the words at its last token, with the ends of their ranks and their stability.
    """
    top: int = 3
    """How many words of each layer."""
    out: Path | None = None
    """File for the lens, in safetensors."""

    def run(self) -> None:
        """Print the standard error of every layer and the words of the prompt; write the lens if a file is given."""
        from interp.cli.as_json import rows_of
        from interp.core.files import check_replaceable
        from interp.core.results import frame
        from interp.lenses import jacobian_lens

        self.refuse(*OF_TABLES, why="a lens is fitted on one model and has one table")
        self.require_some("most")
        if self.out is not None:
            check_replaceable(self.out)
        lens = jacobian_lens(self.opened(), read_data(self.data), **self.fields())  # type: ignore[arg-type]
        assert lens.error is not None
        errors = dict(zip(lens.layers, lens.error.tolist(), strict=True))
        lines = [
            f"after block {layer}: standard error {error:.3f} of the norm of J"
            for layer, error in errors.items()
        ]
        lines.append(f"{lens.prompts} prompts; ended {lens.about['ended']}")
        rows: list[dict[str, object]] = []
        if self.prompt is not None:
            words = lens.read(self.prompt, top=self.top).isel(prompt=0, pos=-1)
            names = ["word", "top_prob", "low", "high", "stays"]
            table = frame(words[names])[["depth", "rank", *names]]
            rows = rows_of(table)
            lines.append(table.head(self.most).to_string(index=False, float_format="{:.3f}".format))
        self.tell(
            lines,
            lambda: {
                "standard_error": [{"layer": layer, "error": error} for layer, error in errors.items()],
                "prompts": lens.prompts,
                "ended": lens.about["ended"],
                "words": rows,
            },
        )
        if self.out is not None:
            lens.save(self.out)
            self.wrote(self.out)


JacobianLensCommand = asking(JacobianLens, OfCorpus)
