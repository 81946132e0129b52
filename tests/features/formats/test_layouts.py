"""Files are of one layout: of those of each layout here, no other layout says that they are its own."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from interp.features import formats, load, save
from interp.features.formats import files
from interp.features.formats.files import Files
from tests.features.formats import (
    test_dictionary_learning as dictionary_learning,
    test_saelens as saelens,
    test_single_files as single,
    test_sparsify as sparsify,
)
from tests.features.formats.written import EXAMPLES

WRITTEN: Mapping[str, Callable[[Path], object]] = {
    "SAELens": lambda path: save(saelens.everything()["standard"], path),
    "sparsify": lambda path: sparsify.folder(path, sparsify.config(), sparsify.state()),
    "dictionary_learning": lambda path: dictionary_learning.folder(
        path, dictionary_learning.config("AutoEncoderTopK"), dictionary_learning.state("AutoEncoderTopK")
    ),
    "OpenAI": lambda path: single.written(path / "resid_post_mlp" / "3.pt", single.openai()),
    "Goodfire": lambda path: single.written(path / "a-l3.pt", single.goodfire()),
    "Qwen Scope": lambda path: single.written(path / single.QWEN / "layer3.sae.pt", single.qwen()),
}
"""How files of each layout are written into a folder."""


@pytest.mark.parametrize("name", WRITTEN)
def test_of_all_layouts_one_fits(tmp_path: Path, name: str) -> None:
    WRITTEN[name](tmp_path)
    assert [layout.name for layout in formats.LAYOUTS if layout.fits(Files(tmp_path))] == [name]
    assert load(tmp_path).metadata["layout"] == name


def test_every_layout_is_tried() -> None:
    assert {layout.name for layout in formats.LAYOUTS} == {
        *WRITTEN,
        *(example.layout for example in EXAMPLES),
    }


def test_a_file_of_no_layout_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    torch.save({"W": torch.zeros(3)}, tmp_path / "3.pt")
    with pytest.raises(ValueError, match=r"known layout \(SAELens, .*Qwen Scope.*\), got 3\.pt"):
        load(tmp_path / "3.pt")


def test_a_folder_of_everything_is_not_searched_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MOST_FILES", 3)
    for name in "abcd":
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match="holds more than 3 files: name the folder of one dictionary"):
        load(tmp_path)
    (tmp_path / "d").unlink()
    assert Files(tmp_path).names == ("a", "b", "c")
