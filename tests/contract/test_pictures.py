"""Every labelled result names what gave it, by a name that has a plot or is known to have none."""

import ast
from collections.abc import Iterator
from pathlib import Path

import interp.plot
from interp.plot import choice

ROOT = Path(__file__).parents[2] / "interp"
PNG = b"\x89PNG\r\n\x1a\n"
"""How a PNG file begins."""
WITHOUT_PLOT = {
    "attention_kernel", "bigram_table", "compare_methods",
    "dictionary_match", "directions", "edge_attribution", "edge_effects", "edge_stability", "edit_table",
    "faithfulness", "flow_routes", "gradient_cosines", "gradient_rank", "head_tokens", "late_layers",
    "layer_mixing", "name_attention", "neurons", "one_token_losses",
    "orders", "output_lens", "per_token_loss_pca", "phase_change", "reconstruction", "recovery",
    "sae_quality", "singular_directions", "subject_spread", "tensors", "top_examples", "train_sae",
}  # fmt: skip
"""Results that are read as tables: a card without a picture."""
MAKERS = ("labelled", "_labelled", "table")
"""What makes a labelled result of a name, its first argument."""


def named() -> Iterator[tuple[str, str]]:
    """Place and name of every result that the package makes; "" where the name is handed on."""
    for path in sorted([*(ROOT / "analyses").glob("*.py"), *(ROOT / "engine").glob("*.py")]):
        if path.name == "edit_scores.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.keyword)
                and node.arg == "interp_analysis"
                and isinstance(node.value, ast.Constant)
            ):
                yield f"{path.name}:{node.value.lineno}", str(node.value.value)
            if isinstance(node, ast.Call) and node.args:
                called = getattr(node.func, "id", getattr(node.func, "attr", ""))
                first = node.args[0]
                if called in MAKERS and isinstance(first, ast.Constant) and isinstance(first.value, str):
                    yield f"{path.name}:{node.lineno}", first.value
                elif called == "labelled":
                    yield f"{path.name}:{node.lineno}", first.id if isinstance(first, ast.Name) else "?"


def test_every_result_has_a_name_that_is_known() -> None:
    names = dict(named())
    known = {*choice.PLOTS, *WITHOUT_PLOT, "analysis"}
    assert {place: name for place, name in names.items() if name not in known} == {}
    assert len(names) > 50


def test_no_name_is_known_that_nothing_gives() -> None:
    given = {name for _, name in named()} | {"edit_table"}
    assert {*choice.PLOTS, *WITHOUT_PLOT} - given == set()
    assert not WITHOUT_PLOT & set(choice.PLOTS)


def test_every_door_that_gives_a_dataset_gives_one_of_its_name() -> None:
    """Doors that hand on another's result bear that one's name, and are listed."""
    handed_on = {"over_checkpoints"}
    doors = {
        name for name in interp.__all__
        if name != "report" and str(getattr(getattr(interp, name), "__annotations__", {}).get("return")) == "xr.Dataset"
    }  # fmt: skip
    assert len(doors) > 25
    assert doors - {*choice.PLOTS, *WITHOUT_PLOT} == handed_on
