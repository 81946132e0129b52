"""Llama Scope and llamascopium: the rule of every config, worked out by hand, and what is refused."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import interp
from interp.features import Dictionary, NormTopK, load
from tests.features.formats.test_written import assert_says, rewritten
from tests.features.formats.written import (
    LOG,
    NORM,
    STREAM,
    Answer,
    D,
    S,
    draw,
    lengths,
    llama_scope,
    llama_scope_r1,
    llamascopium,
    llamascopium_clt,
    llamascopium_config,
    llamascopium_crosscoder,
    relu,
    save,
    top,
)

MLP_IN, MLP_OUT = "blocks.2.hook_mlp_in", "blocks.2.hook_mlp_out"


def written(
    folder: Path, rule: str, reads: str = STREAM, writes: str = STREAM, **more: object
) -> dict[str, np.ndarray]:
    """An SAE's or transcoder's files, and their tensors."""
    n = draw()
    w = {
        "W_E": n(D, S),
        "b_E": n(S),
        "W_D": n(S, D),
        NORM + reads: np.array(2.5),
        NORM + writes: np.array(0.7),
    }
    w |= {"b_D": n(D)} if more.get("use_decoder_bias", True) else {}
    w |= {LOG: n(S) - 1} if rule == "jumprelu" else {}
    save(folder / "sae_weights.safetensors", w)
    config = (
        llamascopium_config("sae", rule, hook_point_in=reads, hook_point_out=writes, use_glu_encoder=False)
        | more
    )
    (folder / "config.json").write_text(json.dumps(config))
    return w


def changed(folder: Path, **more: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("rule", ["relu", "jumprelu", "topk"])
def test_a_transcoder_scales_what_it_reads_and_what_it_writes_by_their_own_norms(
    tmp_path: Path, rule: str, include: bool
) -> None:
    w = written(tmp_path, rule, MLP_IN, MLP_OUT, sparsity_include_decoder_norm=include)
    x, c_in, c_out = draw(1)(7, D), D**0.5 / 2.5, D**0.5 / 0.7
    z, norm = (x * c_in) @ w["W_E"] + w["b_E"], lengths(w["W_D"]) if include else np.ones(S)
    f = {
        "relu": lambda: relu(z), "jumprelu": lambda: np.where(z * norm > np.exp(w[LOG]), z, 0),
        "topk": lambda: relu(top(z, 3, norm)),
    }[rule]()  # fmt: skip
    found = load(tmp_path)
    assert_says(found, Answer(x, f, (f @ w["W_D"] + w["b_D"]) / c_out))
    assert isinstance(found, Dictionary) and (found.reads, found.writes) == (MLP_IN, MLP_OUT)


def test_each_vector_may_be_scaled_by_its_own_norm(tmp_path: Path) -> None:
    w = written(tmp_path, "topk", norm_activation="token-wise", use_decoder_bias=False)
    x = draw(1)(7, D)
    c = D**0.5 / lengths(x)[:, None]
    f = relu(top((x * c) @ w["W_E"] + w["b_E"], 3, lengths(w["W_D"])))
    assert_says(load(tmp_path), Answer(x, f, f @ w["W_D"] / c))


def test_weights_with_the_scale_folded_in_are_not_scaled_again(tmp_path: Path) -> None:
    w = written(tmp_path, "jumprelu", norm_activation="inference")
    x = draw(1)(7, D)
    f = np.where((z := x @ w["W_E"] + w["b_E"]) * lengths(w["W_D"]) > np.exp(w[LOG]), z, 0)
    assert_says(load(tmp_path), Answer(x, f, f @ w["W_D"] + w["b_D"]))


@pytest.mark.parametrize("name", ["sae_weights.pt", "checkpoints/final.safetensors", "checkpoints/pruned.pt"])
def test_weights_are_found_where_checkpoints_are(tmp_path: Path, name: str) -> None:
    answer = llamascopium(tmp_path)
    held, place = tmp_path / "sae_weights.safetensors", tmp_path / name
    place.parent.mkdir(exist_ok=True)
    if name.endswith(".pt"):
        torch.save({"sae": load_file(held), "version": "2.0.0"}, place)
        held.unlink()
    else:
        held.rename(place)
    assert_says(load(tmp_path), answer)


def test_the_numbers_of_gates_that_look_at_lengths(tmp_path: Path) -> None:
    """p = (2, -3, .5, .25), lengths (1, 1, 4, 1): a threshold of .6 lets .5 pass, and of two features .5 is one."""
    p, W_D = np.array([2.0, -3.0, 0.5, 0.25]), np.diag([1.0, 1.0, 4.0, 1.0])
    w = {"W_E": np.zeros((4, 4)), "b_E": p, "W_D": W_D, "b_D": np.zeros(4)}
    common = {"hook_point_in": STREAM, "hook_point_out": STREAM, "d_model": 4, "expansion_factor": 1.0}
    for rule, more, features in (
        ("jumprelu", {}, [2, 0, 0.5, 0]), ("jumprelu", {"sparsity_include_decoder_norm": False}, [2, 0, 0, 0]),
        ("topk", {"top_k": 2}, [2, 0, 0.5, 0]), ("relu", {}, [2, 0, 0.5, 0.25]),
    ):  # fmt: skip
        log = {LOG: np.log(np.full(4, 0.6))} if rule == "jumprelu" else {}
        save(tmp_path / "sae_weights.safetensors", w | log)
        config = llamascopium_config("sae", rule, norm_activation="inference", **common) | more
        (tmp_path / "config.json").write_text(json.dumps(config))
        found = load(tmp_path)
        assert isinstance(found, Dictionary)
        assert found.encode(torch.zeros(1, 4).double())[0].tolist() == features
        assert isinstance(found.kind, NormTopK) == (rule == "topk")
    with pytest.raises(ValueError, match="is required, got"):  # SAELens has no such rule
        interp.features.save(Dictionary(NormTopK(2), dict(found.named_parameters())), tmp_path / "out")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"sae_type": "lorsa"}, "sae_type must be one of sae, crosscoder, clt, got 'lorsa'"),
        ({"act_fn": "batchtopk"}, "act_fn 'batchtopk' is not supported: which features are active depends on other"),
        ({"act_fn": "gelu"}, "act_fn must be relu, jumprelu or topk, got 'gelu'"),
        ({"use_glu_encoder": True}, "use_glu_encoder is not supported"),
        ({"norm_activation": "batch-wise"}, "norm_activation must be dataset-wise, inference or token-wise"),
        ({"norm_activation": "token-wise", "hook_point_out": MLP_OUT}, "'token-wise' of a transcoder"),
        ({"hook_point_out": MLP_OUT}, "must hold the tensor 'dataset_average_activation_norm.blocks.2.hook_mlp_out'"),
        ({"expansion_factor": 2}, "the config says d_model=6 and 12 features"),
        ({"expansion_factor": "x"}, "expansion_factor must be a positive number, got 'x'"),
        ({"d_model": None}, "d_model is required"),
        ({"d_model": 10**400}, "d_model is required, at most 2147483648"),
        ({"top_k": 11}, "k must be at most d_sae = 10"),
        ({"use_decoder_bias": False}, "hold 'b_D', which is not understood"),
    ],
)  # fmt: skip
def test_a_config_that_would_change_numbers_is_refused_by_name(
    tmp_path: Path, more: dict[str, object], message: str
) -> None:
    llamascopium(tmp_path)
    changed(tmp_path, **more)
    with pytest.raises(ValueError, match=re.escape(message)):
        load(tmp_path)


@pytest.mark.parametrize("make", [llamascopium_crosscoder, llamascopium_clt])
def test_several_layers_cannot_be_scaled_by_norms_of_their_vectors(tmp_path: Path, make: object) -> None:
    make(tmp_path)  # type: ignore[operator]
    changed(tmp_path, norm_activation="token-wise")
    with pytest.raises(ValueError, match="'token-wise' of several layers is not supported"):
        load(tmp_path)


def test_decoders_of_a_wrong_shape_are_pointed_out(tmp_path: Path) -> None:
    llamascopium_clt(tmp_path)
    rewritten(
        tmp_path / "sae_weights.safetensors", lambda held: held.update({"W_D.1": held["W_D.2"].clone()})
    )
    with pytest.raises(ValueError, match=re.escape("W_D.1 must have shape [2, 10, 6], got [3, 10, 6]")):
        load(tmp_path)


@pytest.mark.parametrize("include", [True, False])
def test_thresholds_of_llama_scope_r1_look_at_lengths_where_the_config_says_so(
    tmp_path: Path, include: bool
) -> None:
    answer = llama_scope_r1(tmp_path, include_norm=include)
    assert_says(load(tmp_path), answer)


def test_llama_scope_r1_without_a_norm_requires_the_factor(tmp_path: Path) -> None:
    answer = llama_scope_r1(tmp_path)
    rewritten(tmp_path / "sae_weights.safetensors", lambda held: held.pop(NORM + STREAM))
    with pytest.raises(ValueError, match="norm_scaling_factor is required: these files do not hold"):
        load(tmp_path)
    assert_says(load(tmp_path, norm_scaling_factor=D**0.5 / 2.5), answer)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"act_fn": "topk"}, "act_fn must be jumprelu, got 'topk'"),
        ({"norm_activation": "token-wise"}, "norm_activation must be dataset-wise, got 'token-wise'"),
        ({"d_model": 10**400}, "positive numbers, got"),
        ({"dataset_average_activation_norm": {"in": 10**400, "out": 1}}, "positive numbers, got 6"),
        ({"jump_relu_threshold": None}, "jump_relu_threshold must be a number of at least 0, got None"),
        ({"dataset_average_activation_norm": {"in": 2.5}}, "positive numbers, got 6 (int) and None"),
        ({"d_sae": 11}, "the config says d_sae=11, d_model=6, encoder.weight has shape [10, 6]"),
        ({"apply_decoder_bias_to_pre_encoder": True}, "apply_decoder_bias_to_pre_encoder must be false"),
    ],
)  # fmt: skip
def test_settings_of_llama_scope_that_would_change_numbers_are_refused(
    tmp_path: Path, more: dict[str, object], message: str
) -> None:
    llama_scope(tmp_path)
    path = tmp_path / "hyperparams.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    with pytest.raises(ValueError, match=re.escape(message)):
        load(tmp_path)
