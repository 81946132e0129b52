"""Options that name a model, a file or a list that ships: fields whose values a command line cannot hold itself."""

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from interp.core.files import is_file, text_contents
from interp.core.wording import nearest

if TYPE_CHECKING:
    from interp import HookedTransformer
    from interp.causal import Subspace
    from interp.cli.opening import ModelCommand
    from interp.features import Crosscoder, CrossLayerTranscoder, Dictionary
    from interp.model.mounted import Mountable

    AnyDictionary = Dictionary | CrossLayerTranscoder | Crosscoder

Pairs = list[tuple[str, str]]


@dataclass(frozen=True)
class Given:
    """How the value of a field is given: the annotation of its option, what its help says, and how it is read."""

    option: object
    says: str
    read: "Callable[[ModelCommand, HookedTransformer, object], object]"
    """The value, of the command, its model and what was typed."""


def another_model(command: "ModelCommand", model: "HookedTransformer", name: object) -> "HookedTransformer":
    """Another model, opened as the command's own is, in the same precision and on the same device."""
    return replace(command, model=str(name), revision=None).opened()


def any_dictionary(command: "ModelCommand", model: "HookedTransformer", path: object) -> "AnyDictionary":
    """What a file or folder of features holds, checked against the model."""
    from interp import features

    if not str(path).strip():
        raise ValueError(f"a dictionary is required, its file or folder, got {path!r}")
    return features.load(str(path), model=model, device=command.available())


def dictionary(command: "ModelCommand", model: "HookedTransformer", path: object) -> "Dictionary":
    """The dictionary of a file or folder, fitted to the model."""
    from interp import features

    found = any_dictionary(command, model, path)
    if not isinstance(found, features.Dictionary):
        raise ValueError(f"{path}: a dictionary of one layer is required, got a {type(found).__name__}")
    return found


def mounted(command: "ModelCommand", model: "HookedTransformer", paths: Sequence[str]) -> "HookedTransformer":
    """The model with the dictionaries of some files in its blocks; ValueError for a crosscoder, which is in none."""
    from interp import features

    loaded: list[Mountable] = []
    for path in paths:
        found = any_dictionary(command, model, path)
        if isinstance(found, features.Crosscoder):
            raise ValueError(
                f"{path} is a crosscoder, which stands in no block: in Python, use its features and edits"
            )
        loaded.append(found)
    return model.with_dictionaries(loaded)


def directions(command: "ModelCommand", model: "HookedTransformer", texts: object) -> "list[str | Subspace]":
    """The names of features as they are, and the directions of files."""
    from interp.causal import Subspace

    assert isinstance(texts, tuple)
    return [Subspace.load(text, model) if is_file(text) else text for text in texts]


def prompts(command: "ModelCommand", model: "HookedTransformer", given: object) -> list[str]:
    """Texts as they are, or the lines of one file of them."""
    assert isinstance(given, tuple)
    if len(given) == 1 and is_file(given[0]):
        return [line for line in text_contents(given[0]).splitlines() if line.strip()]
    if len(given) == 1:
        check_no_missing_file(given[0])
    return [*given]


def reads_like_a_file(text: str) -> bool:
    """Whether a text is one word that ends as the name of a file of data does."""
    return re.fullmatch(r"\S+\.(txt|json|jsonl|csv|parquet)", text) is not None


def check_no_missing_file(text: str) -> None:
    """ValueError for a text that reads like the name of a file of data, which is not there."""
    if reads_like_a_file(text):
        raise ValueError(f"a text or a file of texts is required, there is no file {text}")


def labels(command: "ModelCommand", model: "HookedTransformer", texts: object) -> list[bool]:
    """Truth values of words such as 1 and 0, or of the lines of a file; ValueError for other words."""
    assert isinstance(texts, tuple)
    words = [*texts]
    if len(words) == 1 and is_file(words[0]):
        words = text_contents(words[0]).split()
    known = {"1": True, "0": False, "true": True, "false": False}
    if odd := [word for word in words if word.lower() not in known]:
        raise ValueError(f"labels must be 1 or 0 for each prompt, or a file of them, got {odd[0]!r}")
    return [known[word.lower()] for word in words]


def pairs(command: "ModelCommand", model: "HookedTransformer", text: object) -> Pairs:
    """The pairs of one task: of a list that ships, or of a file that has one."""
    found = tasks(command, model, (text,))
    if len(found) != 1:
        raise ValueError(f"pairs of one task are required, {text} has {len(found)}: {', '.join(found)}")
    return next(iter(found.values()))


def tasks(command: "ModelCommand", model: "HookedTransformer", texts: object) -> dict[str, Pairs]:
    """The pairs (input, output) of tasks by name: lists that ship (`interp.tasks.load_word_pairs`), or those of files.

    Raises:
        ValueError: neither a file nor a list that ships, a file without pairs.
    """
    from interp.tasks import load_word_pairs

    assert isinstance(texts, tuple)
    shipped, found = load_word_pairs(), dict[str, Pairs]()
    for text in texts:
        if text in shipped:
            found[text] = [*shipped[text]]
        elif is_file(text):
            found |= _pairs_of(Path(text))
        else:
            raise ValueError(
                f"a CSV file with the columns input and output is required, or one of {', '.join(shipped)}; got "
                f"{text!r}; {nearest(text, shipped)}"
            )
    return found


def _pairs_of(file: Path) -> dict[str, Pairs]:
    """The pairs of a CSV file by its column `task`, without which all are of the task that the file is called after."""
    try:
        rows = [*csv.DictReader(text_contents(file).splitlines())]
    except csv.Error as cause:
        raise ValueError(f"{file} cannot be read as CSV: {cause}") from cause
    found: dict[str, Pairs] = {}
    for number, row in enumerate(rows, 2):
        if not (row.get("input") and row.get("output")):
            raise ValueError(
                f"{file}, line {number}: the columns input and output are required, got {list(row.values())}"
            )
        found.setdefault(row.get("task") or file.stem, []).append((row["input"], row["output"]))
    if not found:
        raise ValueError(
            f"{file} has no pairs: lines below that of the columns input and output are required"
        )
    return found


LISTS = "A task that ships, such as country_capital, or a CSV file with the columns input and output"
GIVEN: Mapping[str, Given] = {
    "tuned": Given(str, "The model it is compared with: a folder, file or name, as --model.", another_model),
    "into": Given(str, "The model that reads the state, as --model; without it the same.", another_model),
    "dictionary": Given(str, "A dictionary: its file or folder, of any layout that `interp.features.load` knows.",
                        dictionary),
    "directions": Given(tuple[str, ...], "Features by name, such as L5F123 with --dictionaries, or files of "
                        "directions, as `Subspace.save` writes them; one for each layer.", directions),
    "labels": Given(tuple[str, ...], "1 or 0 for each prompt, or a file of them.", labels),
    "positive": Given(tuple[str, ...], "Prompts that have what is to be steered towards, or one file, a text a line.",
                      prompts),
    "negative": Given(tuple[str, ...], "Prompts that do not have it, or one file.", prompts),
    "pairs": Given(str, f"{LISTS}.", pairs),
    "tasks": Given(tuple[str, ...], f"{LISTS} (and task, where it has several); one or several.", tasks),
}  # fmt: skip
"""The fields that are given so, by name."""
