"""Crosscoders of two models: every code normalisation, worked out by hand, scaled activations, and what is refused."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from interp.features import Crosscoder, ReLU, load
from tests.features.formats.test_written import assert_says, rewritten
from tests.features.formats.written import NORMALIZATIONS, Answer, D, S, crosscoder, draw, relu


@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("normalization", NORMALIZATIONS[:-1])
def test_features_are_those_whose_normalised_code_exceeds_the_threshold(
    tmp_path: Path, normalization: str, scaled: bool, prefix: str
) -> None:
    answer = crosscoder(tmp_path, normalization=normalization, scaled=scaled, prefix=prefix)
    for path in (tmp_path, tmp_path / "model.pt"):
        assert_says(load(path), answer)


def test_decoupled_codes_are_features_of_each_model(tmp_path: Path) -> None:
    answer = crosscoder(tmp_path, normalization="DECOUPLED", scaled=False)
    found = load(tmp_path)
    assert isinstance(found, Crosscoder) and found.by_source
    assert_says(found, answer)
    crosscoder(tmp_path, normalization="DECOUPLED", scaled=True)
    with pytest.raises(ValueError, match="its tool scales them twice"):
        load(tmp_path)


def test_the_normalised_code_decides_and_the_code_is_the_feature(tmp_path: Path) -> None:
    """p = (2, -3, .5, .25), lengths (1, 1, 4, 1) over both models, threshold .6: .5 passes, and stays .5."""
    W_dec = torch.diag(torch.tensor([0.5, 0.5, 2.0, 0.5])).expand(2, 4, 4).double().contiguous()
    state = {
        "encoder.weight": torch.zeros(2, 4, 4).double(), "encoder.bias": torch.tensor([2, -3, 0.5, 0.25]).double(),
        "decoder.weight": W_dec, "decoder.bias": torch.zeros(2, 4).double(), "k": torch.tensor(2),
        "threshold": torch.tensor(0.6).double(),
    }  # fmt: skip
    torch.save(state, tmp_path / "cc.pt")
    found = load(tmp_path / "cc.pt")
    assert isinstance(found, Crosscoder)
    assert found.encode(torch.zeros(1, 2, 4).double())[0].tolist() == [2, 0, 0.5, 0]
    torch.save(
        state | {"threshold": torch.tensor(-1.0).double()}, tmp_path / "cc.pt"
    )  # one that was never set
    assert load(tmp_path / "cc.pt").encode(torch.zeros(1, 2, 4).double())[0].tolist() == [2, 0, 0.5, 0.25]  # type: ignore[operator]


def hub(folder: Path, n_read: int = 3, **more: object) -> dict[str, np.ndarray]:
    """A crosscoder of the hub, of three layers and kind ReLU."""
    n = draw()
    w = {
        "encoder.weight": n(n_read, D, S),
        "encoder.bias": n(S),
        "decoder.weight": n(3, S, D),
        "decoder.bias": n(3, D),
    }
    save_file({name: torch.from_numpy(x) for name, x in w.items()}, folder / "model.safetensors")
    config = {
        "activation_dim": D,
        "dict_size": S,
        "num_layers": 3,
        "code_normalization": "CROSSCODER",
        **more,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return w


def test_a_crosscoder_without_thresholds_is_of_kind_relu(tmp_path: Path) -> None:
    w, x = hub(tmp_path), draw(1)(7, 3, D)
    f = relu(np.einsum("bld,lds->bs", x, w["encoder.weight"]) + w["encoder.bias"])
    found = load(tmp_path)
    assert isinstance(found, Crosscoder) and found.kind == ReLU()
    assert_says(found, Answer(x, f, np.einsum("bs,lsd->bld", f, w["decoder.weight"]) + w["decoder.bias"]))


def test_layers_that_are_not_encoded_are_reconstructed(tmp_path: Path) -> None:
    w, x = hub(tmp_path, 2, encoder_layers=[2, 0]), draw(1)(7, 3, D)
    f = relu(np.einsum("bld,lds->bs", x[:, [2, 0]], w["encoder.weight"]) + w["encoder.bias"])
    output = np.einsum("bs,lsd->bld", f, w["decoder.weight"]) + w["decoder.bias"]
    assert_says(load(tmp_path), Answer(x, f, output))
    hub(tmp_path, 2, encoder_layers=[2, 3])
    with pytest.raises(ValueError, match="encoder_layers must name 2 of 3 sources"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("tensor", "value", "message"),
    [
        ("code_normalization_id", torch.tensor(6), "code_normalization_id must be from 1 to 5"),
        ("threshold", torch.ones(2).double(), "threshold must have shape [], got [2]"),
        ("activation_global_scale", torch.ones(2).double(), "activation_global_scale must be target_rms over"),
        ("k", None, "must hold both 'k' and 'threshold', or neither"),
        ("target_rms", None, "must hold 'target_rms'"),
        ("extra", torch.ones(2), "'extra', which is not understood"),
    ],
)  # fmt: skip
def test_tensors_that_are_not_understood_are_refused(
    tmp_path: Path, tensor: str, value: torch.Tensor | None, message: str
) -> None:
    crosscoder(tmp_path)
    rewritten(
        tmp_path / "model.pt",
        lambda held: held.pop(tensor) if value is None else held.update({tensor: value}),
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        load(tmp_path)


def test_code_in_a_config_is_refused(tmp_path: Path) -> None:
    hub(tmp_path, latent_processor="lambda f: f * 2")
    with pytest.raises(ValueError, match="latent_processor is not supported"):
        load(tmp_path)
