"""Which models come with the package, and what is written on their cards; nothing here needs torch."""

import json
from dataclasses import dataclass
from pathlib import Path

from interp.core.files import named_path

WEIGHTS = Path(__file__).parent / "weights"


@dataclass(frozen=True)
class Demo:
    """One embedded model: what it is in a sentence, and whether code builds it (else its weights are in the wheel)."""

    name: str
    summary: str
    built: bool = False


DEMOS: dict[str, Demo] = {
    demo.name: demo
    for demo in (
        Demo("demo-4l", "trained, 4 layers with MLPs, GPT-2 shape: facts, indirect objects, induction"),
        Demo(
            "demo-attn-2l", "trained, 2 layers of attention only, rotary positions: induction by composition"
        ),
        Demo(
            "groundtruth-induction",
            "hand-built, 2 layers: L0H1 attends to the previous token, L1H2 does induction, the rest is noise",
            built=True,
        ),
        Demo(
            "demo-mlp-2l", "trained, 2 layers with MLPs, rotary positions: in-context learning and induction"
        ),
        Demo(
            "demo-memory", "trained, 4 layers: strings learned by heart in late attention, copying below it"
        ),
        Demo(
            "groundtruth-early-site",
            "hand-built, 2 layers: facts in the first MLP, at the last token of their subject",
            built=True,
        ),
        Demo(
            "groundtruth-late-suppression",
            "hand-built, 2 layers: the last one holds the right answer back",
            built=True,
        ),
    )
}


def card_of(name: str) -> dict[str, object]:
    """Measured numbers of a trained demo model on held-out material; empty for one that code builds."""
    path = WEIGHTS / named_path(name) / "card.json"
    values: dict[str, object] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return values
