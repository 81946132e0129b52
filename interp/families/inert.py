"""The keys of a config that transformers reads, found in its source, which is read as text and never imported.

A configuration keeps whatever a `config.json` says, also what no code asks for. Importing the code of a model costs 420
MB and 3 CPU seconds; searching its files for the few keys that a family does not know costs 1 to 7 ms, and is right for
the version that is installed.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

SHARED = ("modeling_utils.py", "masking_utils.py", "cache_utils.py", "integrations/heterogeneity/*.py")
"""Files that every model's code uses and that ask a configuration for something."""
SOME = {"rope_parameters": "modeling_rope_utils.py", "use_experts_implementation": "integrations/moe.py"}
"""Further such files, by a word: they count for models with that word in their own files."""
CHECKS = re.compile(r"\n    def _?validate_.*?(?=\n    def |\n    @|\n\S|\Z)", re.DOTALL)
"""Methods of a configuration that only check it: what they read changes no number."""


def read_keys(kind: str, keys: Iterable[str]) -> set[str]:
    """The keys that transformers' code may read of a config of a `model_type`, or of a table inside one.

    Args:
        kind: the `model_type`; of one that this transformers does not have, every key counts as read.
    """
    left = set(keys)
    sources = _sources(kind)
    if not left or not sources:
        return left
    found: set[str] = set()
    for path in sources:
        found |= _reads(path) & left if any(key in _text(path) for key in left - found) else set()
    return found


@functools.cache
def usual_values(kind: str) -> Mapping[str, object]:
    """Defaults of transformers for keys that a config of a `model_type` lacks, as far as they are literals."""
    folder = _folder(kind)
    found: dict[str, object] = {}
    for path in [] if folder is None else sorted(folder.glob("configuration_*.py")):
        for node in ast.parse(_text(path)).body:
            if isinstance(node, ast.ClassDef) and _class_values(node).get("model_type") == kind:
                found |= _class_values(node)
    return found


@functools.cache
def _root() -> Path | None:
    """The folder of the installed transformers."""
    found = importlib.util.find_spec("transformers")
    places = list(found.submodule_search_locations or ()) if found is not None else []
    return Path(places[0]) if places else None


@functools.cache
def _sources(kind: str) -> tuple[Path, ...]:
    """The files with the code of a model of that type; none where its own are not found."""
    folder = _folder(kind)
    root = _root()
    if folder is None or root is None:
        return ()
    folders, seen = [folder], {folder}
    for each in folders:  # grows: code may come from other models' files
        for name in sorted(set(_imported(each))):
            other = root / "models" / name
            if other not in seen and other.is_dir():
                folders.append(other)
                seen.add(other)
    files = [path for each in folders for path in _files(each)]
    some = [shared for word, shared in SOME.items() if any(word in _text(path) for path in files)]
    return (*files, *(path for pattern in (*SHARED, *some) for path in sorted(root.glob(pattern))))


@functools.cache
def _folder(kind: str) -> Path | None:
    """The folder of a type's code; None where this transformers has none."""
    root = _root()
    name = kind.replace("-", "_")
    for each in (name, name.removesuffix("_text")):
        if root is not None and each.isidentifier() and list(_files(root / "models" / each)):
            return root / "models" / each
    return None


def _files(folder: Path) -> Iterator[Path]:
    """The files of a folder that hold configurations and PyTorch models."""
    yield from sorted(folder.glob("configuration_*.py"))
    yield from sorted(folder.glob("modeling_*.py"))


def _imported(folder: Path) -> Iterator[str]:
    """The other models with code that a folder's files import; `auto` only finds classes by name."""
    for path in _files(folder):
        for name in re.findall(r"^\s*from \.\.(\w+)[. ]", _text(path), re.MULTILINE):
            if name != "auto":
                yield name


@functools.lru_cache(maxsize=64)
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.lru_cache(maxsize=64)
def _reads(path: Path) -> frozenset[str]:
    """Names that a file's code reads of something called a config; too many rather than too few.

    That is `config.name` and `getattr(config, "name")`, in a configuration also `self.name` and `kwargs.pop("name")`,
    and in a model's own files every quoted word, since tables and dicts of them are read in many ways.
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
    found = {}
    for each in node.body:
        targets = [each.target] if isinstance(each, ast.AnnAssign) else getattr(each, "targets", [])
        value = getattr(each, "value", None)
        for target in targets:
            if isinstance(target, ast.Name) and value is not None:
                try:
                    found[target.id] = ast.literal_eval(value)
                except ValueError:
                    continue
    return found
