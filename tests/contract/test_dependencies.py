"""Who may import whom: the dependency rule of the tree, read off the source, function-local imports included."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "interp"

MODEL = {"core", "model"}
FAMILIES = MODEL | {"families"}
ANALYSES = MODEL | {"engine", "analyses"}
MAY_IMPORT: dict[str, set[str]] = {
    "core": {"core"},
    "model": MODEL,
    "engine": MODEL | {"engine"},
    "analyses": ANALYSES,
    "plot": ANALYSES | {"plot"},
    "families": FAMILIES,
    "zoo": FAMILIES | {"zoo"},
    "training": FAMILIES | {"engine", "zoo", "training"},
    "hooked": ANALYSES | FAMILIES | {"zoo", "hooked"},
    "encoder_decoder": ANALYSES | FAMILIES | {"encoder_decoder"},
    "pages": ANALYSES | {"pages"},
    "compat": ANALYSES | FAMILIES | {"zoo", "compat", "hooked"},
}
"""Part of `interp` -> the parts it may import; the doors (`__init__`, `cli`, `__main__`) may import everything."""

TO_THE_RIGHT = {"core.viewer": {"plot"}}
"""The one import against the order: a result that is asked for its picture finds who draws it, at that moment."""

RESERVED = {
    **dict.fromkeys(
        ["transformers", "tokenizers", "huggingface_hub"],
        ("families", "zoo", "compat.transformer_lens", "training.vocabulary"),
    ),
    "safetensors": (
        "families",
        "zoo",
        "analyses.tuned_lens",
        "analyses.sae_files",
        "engine.journal",
        "engine.step_files",
        "engine.store",
        "engine.store_writer",
        "training.state",
    ),
    "sklearn": ("analyses.neuron_selection",),
    "pyarrow": ("engine",),
    "matplotlib": ("plot", "core.viewer"),  # there for the type of what a plot returns
    "transformer_lens": ("compat",),
    "ray": ("engine.shard",),
}
"""Heavy or foreign package -> the only places that import it."""

FILES = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in sorted(ROOT.rglob("*.py"))}


def imports(path: Path) -> set[str]:
    """Full names of all modules that a file imports, wherever the statement stands; `from a import b` gives `a.b`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("module", FILES)
def test_only_what_stands_to_the_left_is_imported(module: str) -> None:
    part = module.partition(".")[0]
    if part in {"__init__", "__main__", "cli"}:
        return
    assert part in MAY_IMPORT, f"interp/{part} is not in the tree: give it a place in the dependency rule"
    used = {name.split(".")[1] for name in imports(FILES[module]) if name.startswith("interp.")}
    allowed = MAY_IMPORT[part] | TO_THE_RIGHT.get(module, set())
    assert used <= allowed, f"interp.{module} imports {sorted(used - allowed)}"


@pytest.mark.parametrize("module", FILES)
def test_reserved_packages_are_imported_only_where_they_belong(module: str) -> None:
    for name in imports(FILES[module]):
        places = RESERVED.get(name.partition(".")[0])
        assert places is None or f"{module}.".startswith(tuple(f"{place}." for place in places)), (
            f"interp.{module} imports {name}, which belongs to {places}"
        )


def test_no_door_is_hidden_by_a_module_of_its_name() -> None:
    doors = """
        run report heads composition copying attribute logit_lens backward_lens patch ablate path_patch causal_trace
        attribution_patch find_circuit evaluate_circuit logit_difference
    """
    assert not set(doors.split()) & {module.partition(".")[0] for module in FILES}
