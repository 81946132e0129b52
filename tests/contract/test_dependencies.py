"""Who may import whom: the dependency rule of the tree, read off the source, function-local imports included.

Each rule is one test, whose message lists every place that breaks it; `make lint` runs them too.
"""

from tests.contract.sources import none, package

MODEL = {"core", "model"}
FAMILIES = MODEL | {"wrapped", "families"}
RUNS = MODEL | {"data", "tasks", "passes", "runs"}
RESIDUAL = RUNS | {"weights", "residual"}
LENSES = RESIDUAL | {"attention", "lenses"}
WINGS = LENSES | {"causal", "tokens", "circuits", "features", "editing", "dynamics", "verify"}
MAY_IMPORT: dict[str, set[str]] = {
    "core": {"core"},
    "model": MODEL,
    "lab": LENSES | FAMILIES | {"zoo", "lab"},
    "data": MODEL | {"data"},
    "tasks": MODEL | {"data", "tasks"},
    "passes": MODEL | {"data", "passes"},
    "runs": RUNS,
    "weights": RUNS | {"weights"},
    "causal": RUNS | {"features", "causal"},
    "residual": RESIDUAL,
    "tokens": RESIDUAL | {"tokens"},
    "attention": RESIDUAL | {"attention"},
    "lenses": LENSES,
    "circuits": RESIDUAL | {"attention", "causal", "tokens", "circuits"},
    "features": RUNS | {"features"},
    "editing": LENSES | {"editing"},
    "dynamics": LENSES | {"dynamics"},
    "verify": RESIDUAL | {"verify"},
    "views": LENSES | {"views"},
    "plot": WINGS | {"views", "plot"},
    "wrapped": MODEL | {"wrapped"},
    "families": FAMILIES,
    "zoo": FAMILIES | {"tasks", "zoo"},
    "findings": WINGS | {"hooked", "findings"},
    "hooked": WINGS | FAMILIES | {"zoo", "hooked"},
    "opening": {"hooked", "opening"},
    "encoder_decoder": WINGS | FAMILIES | {"encoder_decoder"},
    "pages": WINGS | {"views", "pages"},
    "serve": WINGS | {"views", "pages", "serve"},
    "compat": WINGS | FAMILIES | {"zoo", "compat", "hooked"},
}
"""Part of `interp` -> the parts it may import; the entrances may import everything."""

RESERVED = {
    **dict.fromkeys(
        ["transformers", "tokenizers", "sentencepiece", "huggingface_hub"],
        ("families", "wrapped", "zoo", "compat.transformer_lens", "lab.training.vocabulary"),
    ),
    "safetensors": (
        "families",
        "zoo",
        "model.fitted_file",
        "causal.subspace",
        "editing.mend",
        "lenses.tuned_lens",
        "lenses.fitted_jacobian_lens",
        "features.formats",
        "runs.journal",
        "runs.state_file",
        "runs.step_files",
        "runs.store",
    ),
    "sklearn": ("features.probing",),
    "pyarrow": ("data", "runs"),
    "matplotlib": ("plot",),
    "transformer_lens": ("compat",),
    "ray": ("runs.ray_engine",),
    "torchdiffeq": ("lab.depth.integral",),
    **dict.fromkeys(["starlette", "uvicorn", "pydantic"], ("serve",)),
}
"""Heavy or foreign package -> the only places that import it."""

ENTRANCES = {"__init__", "__main__", "cli", "edits", "metrics"}
"""What starts or presents the others, and has nothing of its own."""


def test_imports_are_absolute() -> None:
    none([f"{s.path}:{i.line}: {i.name}" for s in package() for i in s.imports if i.relative])


def test_every_part_has_a_place_in_the_tree() -> None:
    parts = {source.module.partition(".")[0] for source in package()} - ENTRANCES
    assert parts - MAY_IMPORT.keys() == set(), "give it a place in the dependency rule"


def test_only_what_stands_to_the_left_is_imported() -> None:
    broken = []
    for source in package():
        part = source.module.partition(".")[0]
        allowed = MAY_IMPORT.get(part, set())
        ours = [i for i in source.imports if i.name.startswith("interp.") and part not in ENTRANCES]
        broken += [
            f"{source.path}:{i.line}: imports {i.name}" for i in ours if i.name.split(".")[1] not in allowed
        ]
    none(broken)


def test_nothing_imports_the_laboratory() -> None:
    """It is a guest: a config that names a record of it leads there by name, `interp/__init__.py` to its names."""
    outside = [
        s for s in package() if not s.path.startswith("interp/lab/") and s.path != "interp/__init__.py"
    ]
    none([f"{s.path}:{i.line}" for s in outside for i in s.imports if f"{i.name}.".startswith("interp.lab.")])


def test_reserved_packages_are_imported_only_where_they_belong() -> None:
    broken = []
    for source in package():
        for used in source.imports:
            places = RESERVED.get(used.name.partition(".")[0])
            if places is not None and not f"{source.module}.".startswith(tuple(f"{p}." for p in places)):
                broken.append(f"{source.path}:{used.line}: imports {used.name}, which belongs to {places}")
    none(broken)


def test_no_function_is_hidden_by_a_module_of_its_name() -> None:
    names = """
        run report heads composition copying attribute logit_lens backward_lens patch ablate path_patch causal_trace
        attribution_patch find_circuit evaluate_circuit logit_difference
    """
    assert not set(names.split()) & {source.module.partition(".")[0] for source in package()}
