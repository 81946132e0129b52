"""The command that finds the circuit of a generated task, and tries it on other pairs of prompts."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from interp.circuits import FindCircuit
from interp.cli.asking import Asking, asking, loaded
from interp.cli.common import available

Task = Literal[
    "indirect_objects", "greater_than", "facts", "repeated_sequences", "copy", "docstring_arguments"
]


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
        from interp.tasks import TASKS

        model = loaded(self.model, None, available(self.device))
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
