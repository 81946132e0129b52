"""Folders of circuit-tracer: which layer, which rule, where it belongs, and what is refused."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from interp.features import CrossLayerTranscoder, Dictionary, JumpReLU, TopK, load
from tests.features.formats.test_written import assert_says, rewritten
from tests.features.formats.written import CIRCUIT_TRACER, circuit_tracer, circuit_tracer_clt, save


def worked_out(folder: Path, p: list[float], more: str = "", **tensors: np.ndarray) -> list[float]:
    """The features of a transcoder whose pre-activations are these."""
    s = len(p)
    w = {
        "W_enc": np.zeros((s, 3)),
        "b_enc": np.array(p),
        "W_dec": np.ones((s, 3)),
        "b_dec": np.zeros(3),
        **tensors,
    }
    save(folder / "layer_0.safetensors", w)
    config = CIRCUIT_TRACER.format(read="hook_resid_mid", kind="transcoder_set") + more
    (folder / "config.yaml").write_text(config)
    found = load(folder)
    assert isinstance(found, Dictionary)
    return found.encode(torch.zeros(1, 3).double())[0].tolist()


def test_the_numbers_of_each_rule(tmp_path: Path) -> None:
    p = [2, -3, -0.2, 0.25]
    threshold = {"activation_function.threshold": np.full(4, -1.0)}
    assert worked_out(tmp_path, p, **threshold) == [2, 0, -0.2, 0.25]
    assert worked_out(tmp_path, p, "activation: jump_relu\n", **threshold) == [2, 0, -0.2, 0.25]
    assert worked_out(tmp_path, p) == worked_out(tmp_path, p, "activation: relu\n") == [2, 0, 0, 0.25]
    assert worked_out(tmp_path, [2, -3, -0.2, -0.5], "activation: topk\nk: 3\n") == [2, 0, -0.2, -0.5]


def test_the_skip_is_transposed(tmp_path: Path) -> None:
    w = {"W_enc": np.zeros((4, 2)), "b_enc": np.zeros(4), "W_dec": np.zeros((4, 2)), "b_dec": np.zeros(2)}
    save(tmp_path / "layer_0.safetensors", w | {"W_skip": np.array([[0.0, 1.0], [0.0, 0.0]])})
    (tmp_path / "config.yaml").write_text(CIRCUIT_TRACER.format(read="hook_resid_mid", kind="transcoder_set"))
    found = load(tmp_path)
    assert isinstance(found, Dictionary) and found(torch.tensor([[3.0, 5.0]]).double()).tolist() == [[5, 0]]


@pytest.mark.parametrize(
    ("hook", "site", "before_gain"),
    [
        ("ln2.hook_normalized", "blocks.1.ln2.hook_normalized", True),
        ("mlp.hook_in", "blocks.1.ln2.hook_normalized", False),
        ("hook_resid_mid", "blocks.1.hook_resid_mid", False),
    ],
)
def test_three_hooks_of_nearly_one_name_are_three_places(
    tmp_path: Path, hook: str, site: str, before_gain: bool
) -> None:
    answer = circuit_tracer(tmp_path, hook=hook)
    found = load(tmp_path, layer=1)
    assert isinstance(found, Dictionary) and found.kind == JumpReLU(relu=False)
    assert (found.reads, found.writes, found.before_gain) == (site, "blocks.1.hook_mlp_out", before_gain)
    assert_says(found, answer)


def test_the_layer_of_several_is_the_users(tmp_path: Path) -> None:
    circuit_tracer(tmp_path)
    for layer in (None, 3):
        with pytest.raises(
            ValueError, match=re.escape("layer must be one of [0, 1, 2], of which there are files")
        ):
            load(tmp_path, layer=layer)


def test_k_may_be_the_users_where_the_config_does_not_say_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="k is required of activation 'topk'"):
        worked_out(tmp_path, [2, -3, 0.5, 0.25], "activation: topk\n")
    found = load(tmp_path, k=1)
    assert isinstance(found, Dictionary) and found.kind == TopK(1, relu=False)
    (tmp_path / "config.yaml").write_text((tmp_path / "config.yaml").read_text() + "k: 2\n")
    with pytest.raises(ValueError, match="k=1 is given, and the files say k=2"):
        load(tmp_path, k=1)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("activation: topk\nk: 3\n", "activation is 'topk', and the files hold a threshold"),
        ("activation: tanh\n", "activation must be relu, topk or jump_relu, got 'tanh'"),
        ("transcoders: ['hf://mntss/transcoder/layer_0.safetensors']\n", "the weights are elsewhere"),
        ("- 3\n", "config.yaml is not readable YAML"),
        ("7: 3\n", "config.yaml must hold a YAML mapping of names"),
    ],
)
def test_a_config_that_is_not_understood_is_refused(tmp_path: Path, more: str, message: str) -> None:
    circuit_tracer(tmp_path)
    (tmp_path / "config.yaml").write_text((tmp_path / "config.yaml").read_text() + more)
    with pytest.raises(ValueError, match=re.escape(message)):
        load(tmp_path, layer=1)


def test_files_of_the_other_kind_of_model_are_refused(tmp_path: Path) -> None:
    circuit_tracer_clt(tmp_path)
    (tmp_path / "config.yaml").write_text("model_kind: transcoder_set\n")
    with pytest.raises(ValueError, match="model_kind must be cross_layer_transcoder of such files"):
        load(tmp_path)


def test_weights_across_layers_are_read_without_a_config(tmp_path: Path) -> None:
    answer = circuit_tracer_clt(tmp_path)
    found = load(tmp_path)
    assert isinstance(found, CrossLayerTranscoder) and found.reads[2] == "blocks.2.hook_resid_mid"
    (tmp_path / "config.yaml").unlink()
    again = load(tmp_path)
    assert isinstance(again, CrossLayerTranscoder) and not again.reads
    assert_says(again, answer)


def test_a_file_of_a_layer_that_is_missing_is_named(tmp_path: Path) -> None:
    circuit_tracer_clt(tmp_path)
    for name in ("W_dec_2", "W_enc_1"):
        (tmp_path / f"{name}.safetensors").unlink()
        with pytest.raises(ValueError, match=rf"{name}\.safetensors is missing"):
            load(tmp_path)


def test_decoders_of_a_wrong_shape_are_pointed_out(tmp_path: Path) -> None:
    circuit_tracer_clt(tmp_path)
    rewritten(
        tmp_path / "W_dec_1.safetensors", lambda held: held.update(W_dec_1=held["W_dec_1"][:, :1].clone())
    )
    with pytest.raises(ValueError, match=re.escape("W_dec_1 must have shape [s, 2, d]")):
        load(tmp_path)


def test_layers_that_read_before_a_gain_are_refused_across_layers(tmp_path: Path) -> None:
    circuit_tracer_clt(tmp_path)
    text = CIRCUIT_TRACER.format(read="ln2.hook_normalized", kind="cross_layer_transcoder")
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match="reads a norm before its gain"):
        load(tmp_path)
