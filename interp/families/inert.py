"""The keys of a config that transformers reads, found by searching its source text, which is never imported.

A configuration keeps every key of a `config.json`, also keys that no code uses. Importing the code of a model costs 420
MB and 3 CPU seconds; searching its files for the few keys that a family does not know costs 1 to 7 ms, and is right for
the installed version.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

SHARED = ("modeling_utils.py", "masking_utils.py", "cache_utils.py", "integrations/heterogeneity/*.py")
"""Files that every model's code uses and that read keys of a configuration."""
SOME = {"rope_parameters": "modeling_rope_utils.py", "use_experts_implementation": "integrations/moe.py"}
"""Word -> a further such file, which is searched for models with that word in their own files."""
LONGEST_NAME = 100
"""Length of the longest name that may be a folder's, whatever a config calls its kind of model."""
KINDS = frozenset({"int", "float", "bool", "str", "list", "dict"})
"""The kinds of values in a JSON file, besides null."""
CHECKS = re.compile(r"\n    def _?validate_.*?(?=\n    def |\n    @|\n\S|\Z)", re.DOTALL)
"""Matches methods of a configuration that only check it: keys that they read change no output."""


def read_keys(kind: str, keys: Iterable[str]) -> set[str]:
    """The keys that transformers' code may read of a config of a `model_type`, or of a table inside one.

    Args:
        kind: the `model_type`; for one that the installed transformers lacks, every key counts as read.
    """
    candidates = set(keys)
    sources = _sources(kind)
    if not candidates or not sources:
        return candidates
    read: set[str] = set()
    for path in sources:
        read |= (
            _names_read(path) & candidates if any(key in _text(path) for key in candidates - read) else set()
        )
    return read


@functools.cache
def usual_values(kind: str) -> Mapping[str, object]:
    """Defaults of transformers for missing keys of a config of this `model_type`, where they are literals."""
    folder = _folder(kind)
    defaults: dict[str, object] = {}
    for path in [] if folder is None else sorted(folder.glob("configuration_*.py")):
        for node in ast.parse(_text(path)).body:
            if isinstance(node, ast.ClassDef) and _class_values(node).get("model_type") == kind:
                defaults |= _class_values(node)
    return defaults


@functools.cache
def kinds_taken(kind: str) -> Mapping[str, frozenset[str]]:
    """The kinds of values ("int", "float", "list", ...) that transformers takes for keys of a `model_type`'s config.

    They are the annotations of its configuration, which it checks exactly: 2.0 is no whole number, 3 no real one. A key
    whose annotation names another class, or that is not checked, is left out.
    """
    folder = _folder(kind)
    taken: dict[str, frozenset[str]] = {}
    for path in [] if folder is None else sorted(folder.glob("configuration_*.py")):
        for node in ast.parse(_text(path)).body:
            if isinstance(node, ast.ClassDef) and _class_values(node).get("model_type") == kind:
                taken |= _annotated_kinds(node)
    return taken


def _annotated_kinds(node: ast.ClassDef) -> dict[str, frozenset[str]]:
    """The kinds of values of the fields of a class that is decorated as `strict`, and of their other names."""
    if not any("strict" in ast.unparse(decorator) for decorator in node.decorator_list):
        return {}
    fields = {
        statement.target.id: _kinds_of(statement.annotation)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
    others = _class_values(node).get("attribute_map")
    aliases = others if isinstance(others, dict) else {}
    fields |= {alias: fields[name] for alias, name in aliases.items() if name in fields}
    return {name: kinds for name, kinds in fields.items() if kinds}


def _kinds_of(annotation: ast.expr) -> frozenset[str]:
    """The kinds of JSON values of an annotation; none where it names anything else, so that it is not checked."""
    if isinstance(annotation, ast.BinOp):
        left, right = _kinds_of(annotation.left), _kinds_of(annotation.right)
        return left | right if left and right else frozenset()
    if isinstance(annotation, ast.Subscript):
        annotation = annotation.value
    if isinstance(annotation, ast.Constant) and annotation.value is None:
        return frozenset({"NoneType"})
    name = annotation.id if isinstance(annotation, ast.Name) else ""
    return frozenset({"list" if name == "tuple" else name} & KINDS)


@functools.cache
def _root() -> Path | None:
    """The folder of the installed transformers."""
    spec = importlib.util.find_spec("transformers")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]) if places else None


@functools.cache
def _sources(kind: str) -> tuple[Path, ...]:
    """The files with the code of a `model_type`, imported models included; none where its own are not found."""
    folder = _folder(kind)
    root = _root()
    if folder is None or root is None:
        return ()
    folders, seen = [folder], {folder}
    for source_folder in folders:  # grows: code may come from other models' files
        for name in sorted(set(_imported_models(source_folder))):
            imported = root / "models" / name
            if imported not in seen and imported.is_dir():
                folders.append(imported)
                seen.add(imported)
    files = [path for source_folder in folders for path in _files(source_folder)]
    some = [shared for word, shared in SOME.items() if any(word in _text(path) for path in files)]
    return (*files, *(path for pattern in (*SHARED, *some) for path in sorted(root.glob(pattern))))


@functools.cache
def _folder(kind: str) -> Path | None:
    """The folder with the code of a `model_type`; None where the installed transformers has none."""
    root = _root()
    name = kind.replace("-", "_")
    for folder_name in (name, name.removesuffix("_text")):
        if root is None or not folder_name.isidentifier() or len(folder_name) > LONGEST_NAME:
            continue
        if list(_files(root / "models" / folder_name)):
            return root / "models" / folder_name
    return None


def _files(folder: Path) -> Iterator[Path]:
    """The files of a folder that hold configurations and PyTorch models."""
    yield from sorted(folder.glob("configuration_*.py"))
    yield from sorted(folder.glob("modeling_*.py"))


def _imported_models(folder: Path) -> Iterator[str]:
    """Names of the other models whose code a folder's files import; `auto`, which has no arithmetic, is left out."""
    for path in _files(folder):
        for name in re.findall(r"^\s*from \.\.(\w+)[. ]", _text(path), re.MULTILINE):
            if name != "auto":
                yield name


@functools.lru_cache(maxsize=64)
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.lru_cache(maxsize=64)
def _names_read(path: Path) -> frozenset[str]:
    """Names that a file's code may read from a config; too many rather than too few.

    They are `config.name` and `getattr(config, "name")`, in a configuration file also `self.name` and
    `kwargs.pop("name")`, and in a model's own files every quoted word, since tables and dicts are read in many ways.
    """
    configures = path.name.startswith(("configuration_", "modeling_rope_utils"))
    receiver = r"(?:config\w*|\bself)" if configures else r"config\w*"
    quoted = r"[\"'](\w+)[\"']"
    if path.parent.parent.name != "models":
        quoted = rf"(?:attr\(\s*[\w.]*{receiver},\s*|\bkwargs\.(?:pop|get)\(){quoted}"
    pattern = rf"{receiver}\.(\w+)\b(?!\s*=[^=])|{quoted}"
    text = re.sub(CHECKS, "\n", _text(path)) if configures else _text(path)
    return frozenset(name or quoted for name, quoted in re.findall(pattern, text, re.IGNORECASE))


def _class_values(node: ast.ClassDef) -> dict[str, object]:
    """The fields of a class with literal values."""
    fields = {}
    for statement in node.body:
        targets = (
            [statement.target] if isinstance(statement, ast.AnnAssign) else getattr(statement, "targets", [])
        )
        value = getattr(statement, "value", None)
        for target in targets:
            if isinstance(target, ast.Name) and value is not None:
                try:
                    fields[target.id] = ast.literal_eval(value)
                except ValueError:
                    continue
    return fields
