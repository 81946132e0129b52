"""Dictionaries of the layouts of `written`: numbers by hand, one layout for each, refusals that name what is wrong."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from interp.features import Crosscoder, CrossLayerTranscoder, Dictionary, formats, load
from interp.features.formats.files import Files
from tests.features.formats.written import EXAMPLES, Answer, Example

EVERY = pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.make.__name__)
Loaded = Dictionary | CrossLayerTranscoder | Crosscoder


def said(found: Loaded, x: Tensor) -> tuple[Tensor, Tensor]:
    """Features and output; of a cross-layer transcoder with a first axis of layers."""
    if not isinstance(found, CrossLayerTranscoder):
        return found.encode(x), found(x)
    given = dict(zip(found.layers, x, strict=True))
    features = [found.encode(layer, given[layer]) for layer in found.layers]
    return torch.stack(features), torch.stack([*found(given).values()])


def assert_says(found: Loaded, answer: Answer, tolerance: float = 1e-12) -> None:
    """Features and output are those that were worked out, relative to the largest of each."""
    x, features, output = (torch.from_numpy(part) for part in answer)
    assert (features != 0).any() and (features == 0).any()
    for name, value, wanted in zip(("features", "output"), said(found, x), (features, output), strict=True):
        worst = float((value - wanted).abs().max() / wanted.abs().max())
        assert value.shape == wanted.shape and worst <= tolerance, f"{name} differ by {worst:.1e}"


def rewritten(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """A file of tensors with them changed."""
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            tensors = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        change(tensors)
        np.savez(path, **{name: value.numpy() for name, value in tensors.items()})
    elif path.suffix == ".pt":
        tensors = torch.load(path, weights_only=True)
        change(tensors)
        torch.save(tensors, path)
    else:
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)


@EVERY
def test_features_and_output_are_those_worked_out_by_hand(tmp_path: Path, example: Example) -> None:
    answer = example.make(tmp_path)
    found = load(tmp_path, **example.given)  # type: ignore[arg-type]
    assert_says(found, answer)
    assert found.metadata["layout"] == example.layout


@EVERY
def test_of_all_layouts_one_fits(tmp_path: Path, example: Example) -> None:
    example.make(tmp_path)
    assert [layout.name for layout in formats.LAYOUTS if layout.fits(Files(tmp_path))] == [example.layout]


@EVERY
def test_a_tensor_that_is_renamed_or_missing_is_named(tmp_path: Path, example: Example) -> None:
    example.make(tmp_path)
    rewritten(tmp_path / example.file, lambda held: held.update(other=held.pop(example.tensor)))
    with pytest.raises(ValueError, match=re.escape(repr(example.tensor))):
        load(tmp_path, **example.given)  # type: ignore[arg-type]
    rewritten(tmp_path / example.file, lambda held: held.pop("other"))
    with pytest.raises(ValueError, match=re.escape(repr(example.tensor))):
        load(tmp_path, **example.given)  # type: ignore[arg-type]


@EVERY
def test_a_tensor_that_holds_nan_is_refused(tmp_path: Path, example: Example) -> None:
    answer = example.make(tmp_path)
    rewritten(tmp_path / example.file, lambda held: held[example.tensor].view(-1)[:1].fill_(torch.nan))
    with pytest.raises(ValueError, match="NaN or infinite"):
        said(load(tmp_path, **example.given), torch.from_numpy(answer.x))  # type: ignore[arg-type]


@EVERY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_files_in_half_precision_are_read(tmp_path: Path, example: Example, dtype: torch.dtype) -> None:
    """Asked for in float32 they compute in float32: the answer is that of the rounded weights, not of rounded sums."""
    answer = example.make(tmp_path)
    folder = (tmp_path / example.file).parent
    for path in [*folder.glob("*.safetensors"), *folder.glob("*.pt")]:
        rewritten(
            path, lambda held: held.update({k: v.to(dtype) for k, v in held.items() if v.is_floating_point()})
        )
    if example.file.endswith(".npz"):
        dtype = torch.float16  # there is no bfloat16 in NumPy
        rewritten(tmp_path / example.file, lambda held: held.update({k: v.half() for k, v in held.items()}))
    x = torch.from_numpy(answer.x)
    found = load(tmp_path, dtype=torch.float64, **example.given)  # type: ignore[arg-type]
    features, output = said(found, x)
    assert features.dtype == output.dtype == torch.float64
    off = (features != 0) != (torch.from_numpy(answer.features) != 0)
    assert off.float().mean() < 0.1  # a threshold that is nearly met may be met after rounding
    assert (output - torch.from_numpy(answer.output)).abs().median() < 0.05
    low = load(tmp_path, **example.given)  # type: ignore[arg-type]
    assert said(low, x.to(dtype))[0].dtype in (dtype, torch.float32)


@EVERY
def test_a_key_of_the_config_that_is_not_known_is_refused_by_name(tmp_path: Path, example: Example) -> None:
    example.make(tmp_path)
    for config in tmp_path.glob("*.json"):
        config.write_text(config.read_text().replace("{", '{"use_new_rule": true, ', 1))
    for config in tmp_path.glob("*.yaml"):
        config.write_text("use_new_rule: true\n" + config.read_text())
    if not [*tmp_path.glob("*.json"), *tmp_path.glob("*.yaml")]:
        return
    with pytest.raises(ValueError, match="'use_new_rule' may change numbers"):
        load(tmp_path, **example.given)  # type: ignore[arg-type]


@EVERY
def test_what_files_say_themselves_is_not_asked_of_the_user(tmp_path: Path, example: Example) -> None:
    example.make(tmp_path)
    with pytest.raises(ValueError, match="norm_scaling_factor belongs to files that do not say it"):
        load(tmp_path, norm_scaling_factor=2.0, **example.given)  # type: ignore[arg-type]
