"""Every labelled result names what gave it, by a name that has a plot or is known to have none."""

import ast
import functools
from pathlib import Path

import interp.plot  # noqa: F401 - fills the table
from interp.core.viewer import PICTURES
from tests.contract.case import WINGS, discovered, snake

PLOTS = {name.removesuffix(" over training") for name in PICTURES.draws if isinstance(name, str)}
ROOT = Path(__file__).parents[2] / "interp"
PNG = b"\x89PNG\r\n\x1a\n"
"""How a PNG file begins."""
WITHOUT_PLOT = {
    "activation_difference", "attention_kernel", "attention_paths", "bigram_table", "changed_tokens", "compare_methods",
    "cost",
    "dictionary_match", "directions", "edge_attribution", "edge_effects", "edge_heads", "edge_stability",
    "edit_table", "erasure",
    "evidence", "feature_cards", "fitting_sites", "flow_routes", "graph_interventions", "graph_scores",
    "head_tokens",
    "influence", "interchange",
    "jacobian_lens",
    "interchange_accuracy", "layer_mixing", "leave_out", "missed_effects", "name_attention", "neurons",
    "one_token_losses",
    "orders", "output_lens", "per_token_loss_pca", "phase_change", "reconstruction", "recovery",
    "dictionary_quality", "singular_directions", "skip_trigrams", "steering", "subject_spread", "tensors",
    "top_examples", "top_pairs", "train_dictionary",
}  # fmt: skip
"""Results that are read as tables: a card without a picture."""
MAKERS = ("labelled", "scored", "_probe_table")
"""What makes a labelled result of a name, its first argument."""


@functools.cache
def named() -> dict[str, str]:
    """The name of every result that is named in words, by its place; those of questions have the name of the record."""
    found = {}
    for wing in ("runs", "families", "lab", *(wing for wing in WINGS if not wing.startswith("lab."))):
        for path in sorted((ROOT / wing).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                name: ast.expr | None = None
                if isinstance(node, ast.keyword) and node.arg == "interp_analysis":
                    name = node.value
                elif isinstance(node, ast.Call) and node.args:
                    called = getattr(node.func, "id", getattr(node.func, "attr", ""))
                    name = node.args[0] if called in MAKERS else None
                if isinstance(name, ast.Constant) and isinstance(name.value, str):
                    found[f"{path.name}:{name.lineno}"] = name.value
    return found


def of_questions() -> set[str]:
    """The names of the results of all questions."""
    return {snake(question.__name__) for question in discovered()}


def test_every_result_has_a_name_that_is_known() -> None:
    names = {question: question for question in of_questions()} | named()
    known = {*PLOTS, *WITHOUT_PLOT}
    left = {place: name for place, name in names.items() if name not in known}
    assert not left, (
        "results that are neither in PLOTS (interp/plot/__init__.py, with their picture) nor in WITHOUT_PLOT (in this "
        f"file, read as a table): {left}"
    )
    assert len(names) > 50


def test_no_name_is_known_that_nothing_gives() -> None:
    given = {*named().values(), *of_questions()}
    assert {*PLOTS, *WITHOUT_PLOT} - given == set()
    assert not WITHOUT_PLOT & set(PLOTS)
