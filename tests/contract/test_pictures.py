"""Every labelled result names what gave it, by a name that has a plot or is known to have none."""

import ast
from collections.abc import Iterator
from pathlib import Path

from interp.plot import choice
from tests.contract.case import discovered, snake

ROOT = Path(__file__).parents[2] / "interp"
PNG = b"\x89PNG\r\n\x1a\n"
"""How a PNG file begins."""
WITHOUT_PLOT = {
    "attention_kernel", "bigram_table", "compare_methods",
    "dictionary_match", "directions", "edge_attribution", "edge_effects", "edge_stability", "edit_table", "erasure",
    "flow_routes", "gradient_cosines", "gradient_rank", "head_tokens", "interchange", "late_layers",
    "layer_mixing", "name_attention", "neurons", "one_token_losses",
    "orders", "output_lens", "per_token_loss_pca", "phase_change", "reconstruction", "recovery",
    "sae_quality", "singular_directions", "skip_trigrams", "subject_spread", "tensors", "top_examples", "top_pairs",
    "train_sae",
}  # fmt: skip
"""Results that are read as tables: a card without a picture."""
MAKERS = ("labelled", "scored", "table")
"""What makes a labelled result of a name, its first argument."""


def named() -> Iterator[tuple[str, str]]:
    """Place and name of every result that the package names in words; those of questions have the name of the record."""
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and node.args:
                called = getattr(node.func, "id", getattr(node.func, "attr", ""))
                first = node.args[0]
                if called in MAKERS and isinstance(first, ast.Constant) and isinstance(first.value, str):
                    yield f"{path.name}:{node.lineno}", first.value


def of_questions() -> set[str]:
    """The names of the results of all questions."""
    return {snake(question.__name__) for question in discovered()}


def test_every_result_has_a_name_that_is_known() -> None:
    names = {question: question for question in of_questions()} | dict(named())
    known = {*choice.PLOTS, *WITHOUT_PLOT}
    assert {place: name for place, name in names.items() if name not in known} == {}
    assert len(names) > 50


def test_no_name_is_known_that_nothing_gives() -> None:
    given = {name for _, name in named()} | of_questions()
    assert {*choice.PLOTS, *WITHOUT_PLOT} - given == set()
    assert not WITHOUT_PLOT & set(choice.PLOTS)
