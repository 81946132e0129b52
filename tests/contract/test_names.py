"""Names in prose: what the pages, the README, the notebooks and the docstrings call by name is there.

Code on a page runs in the tests of its page; here are the names between the code, which nothing else would miss.
"""

import builtins
import functools
import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Set
from pathlib import Path

import pandas as pd
import pytest
import torch
import xarray as xr

import interp
from interp.circuits import AttributionGraph, Circuit
from interp.data import Batch
from interp.features import Dictionary
from interp.model import ModelConfig, Transformer, Weights
from interp.residual import ActivationCache
from interp.runs import ActivationStore, Record
from tests.contract.sources import ROOT, none, package

DOTTED = re.compile(r"(?<![\w/.\-@])interp((?:\.[A-Za-z_]\w*)+)")
TICKED = re.compile(r"(?<!`)`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(\([^`\n]*)?`(?!`)")
FENCED = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
FILES = {"py", "md", "ipynb", "yml"}
"""Endings after which `interp.x` is the name of a file."""
OF_OTHERS = ("docs/migration.md",)
"""Pages whose names without `interp.` before them are TransformerLens'."""

KINDS: dict[str, tuple[type, ...]] = {
    "model": (interp.HookedTransformer, Transformer, interp.HookedEncoderDecoder, Weights),
    "config": (ModelConfig,),
    "cache": (ActivationCache,),
    "batch": (Batch,),
    "sae": (Dictionary,),
    "dictionary": (Dictionary,),
    "transcoder": (Dictionary,),
    "circuit": (Circuit,),
    "graph": (AttributionGraph, xr.Dataset),
    "store": (ActivationStore,),
    "record": (Record,),
    "result": (xr.Dataset,),
    "table": (pd.DataFrame, xr.Dataset),
}
"""What the variables of prose are, by the name that they have everywhere."""
FOREIGN: dict[str, tuple[str, ...]] = {
    "config": ("json", "yaml", "name"),
    "result": ("base", "kl", "nc", "value", "attrs", "view"),
    "table": ("value", "csv", "path", "key"),
    "sae": ("safetensors",),
    "model": ("safetensors",),
}
"""Their other attributes: variables of results, endings of files, and what every module has."""


ELSEWHERE = {
    *("interp", "torch", "warnings", "einops", "transformers", "tokenizers", "peft", "plt", "np"),
    *("f", "fn", "X", "main", "make", "predicate", "back", "rearrange", "moments", "Only"),
}  # fmt: skip
"""Names before a dot that `unresolved` reads or that are other libraries', and functions that the reader writes."""


@functools.cache
def texts() -> dict[str, str]:
    """What a reader sees, by the path of its file: pages, README, cells of notebooks."""
    files = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    found = {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files}
    for file in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
        found[str(file.relative_to(ROOT))] = "\n\n".join(
            "".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"
        )
    return found


def has(kind: object, name: str) -> bool:
    """Whether an object, or the instances of a class, have an attribute of this name."""
    if hasattr(kind, name):
        return True
    return isinstance(kind, type) and any(
        name in vars(base).get("__annotations__", {}) or name in assigned(base) for base in kind.__mro__
    )


@functools.cache
def assigned(kind: type) -> frozenset[str]:
    """Names that the methods of a class of this package give to `self`."""
    if not kind.__module__.startswith("interp"):
        return frozenset()
    return frozenset(re.findall(r"\bself\.(\w+)", inspect.getsource(kind)))


def resolves(path: list[str]) -> bool:
    """Whether `interp`, followed by these names, leads to a module, an object, or an attribute of a class."""
    found: object = interp
    for depth, name in enumerate(path):
        try:
            found = getattr(found, name)
        except AttributeError:
            try:
                found = importlib.import_module(".".join(["interp", *path[: depth + 1]]))
            except ImportError:
                return has(found, name)
    return True


def unresolved(text: str) -> list[str]:
    return sorted(
        {
            found[0]
            for found in DOTTED.finditer(text)
            if (path := found[1][1:].split("."))[-1] not in FILES and not resolves(path)
        }
    )


@functools.cache
def callables() -> frozenset[str]:
    """Every name that prose may call: public ones, attributes of public classes and of what results are, built-ins."""
    found = pkgutil.walk_packages(interp.__path__, "interp.")
    packages = [each.name for each in found if each.ispkg and not each.name.startswith("interp.compat")]
    rooms = [importlib.import_module(name) for name in ("interp.edits", "interp.metrics", *packages)]
    public = {name: getattr(room, name) for room in rooms for name in getattr(room, "__all__", ())}
    public |= {name: getattr(interp, name) for name in interp.HOMES}
    kinds = [value for value in public.values() if isinstance(value, type)]
    others = (str, list, dict, Path, torch.Tensor, torch.nn.Module, torch, xr.Dataset, pd.DataFrame, builtins)
    inside = {name for kind in (*kinds, *others) for name in dir(kind)}
    return (
        frozenset(public)
        | inside
        | {name for kind in kinds for base in kind.__mro__ for name in assigned(base)}
    )


def dead(text: str, beside: Set[str] = frozenset()) -> list[str]:
    """Calls in backticks of names that nothing public has, and attributes that the variables of prose do not have.

    beside: names of functions in the same file, which its docstrings may call.
    """
    prose, found = FENCED.sub("", text), set[str]()
    made = {
        *re.findall(
            r"(?:\bdef |\bclass |\bas |^|, )(\w+)(?= = |\(|, |\n)", "\n".join(FENCED.findall(text)), re.M
        )
    }
    for said in TICKED.finditer(prose):
        head, *more = said[1].split(".")
        if head in KINDS and more:
            known = any(has(kind, more[0]) for kind in KINDS[head]) or more[0] in FOREIGN.get(head, ())
        else:
            known = not said[2] or head in ELSEWHERE or (more or [head])[-1] in callables() | made | beside
        if not known and not resolves([head, *more]):
            found.add(said[0])
    return sorted(found)


def test_every_name_after_interp_on_a_page_is_there() -> None:
    none([f"{page}: {name}" for page, text in texts().items() for name in unresolved(text)])


def test_every_name_after_interp_in_the_package_is_there() -> None:
    """In its code, its docstrings and its messages."""
    files = [(source.path, (ROOT / source.path).read_text(encoding="utf-8")) for source in package()]
    none([f"{path}: {name}" for path, text in files for name in unresolved(text)])


def test_every_call_in_the_prose_of_a_page_is_there() -> None:
    none(
        [f"{page}: {name}" for page, text in texts().items() if page not in OF_OTHERS for name in dead(text)]
    )


def test_every_call_in_the_prose_of_a_docstring_is_there() -> None:
    none(
        [
            f"{source.path}:{line}: {name}"
            for source in package()
            if not source.path.startswith("interp/compat/")
            for line, text in source.docstrings
            for name in dead(text, {function.name for function in source.functions})
        ]
    )


INVENTED = ["`sae.save(folder)`", "`interp.lenss`", "`no_such_analysis(model)`", "`model.tokenise`"]


@pytest.mark.parametrize("text", INVENTED)
def test_a_name_that_is_not_there_is_found(text: str) -> None:
    assert dead(text) or unresolved(text)
