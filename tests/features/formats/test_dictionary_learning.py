"""Folders of dictionary_learning and its fork: written here by their rules, checked in NumPy, and written by itself."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from interp.features import Gated, JumpReLU, ReLU, TopK, load
from tests.features.formats.peers import assert_agrees, written_by
from tests.features.formats.reference import (
    Array,
    D,
    K,
    S,
    assert_computes,
    computed,
    jump,
    relu,
    rng,
    tensors,
    top,
    vectors,
    weights,
)

Config = dict[str, object]
THRESHOLDS = np.abs(rng(5).normal(size=S))


def config(name: str, **more: object) -> Config:
    """What training writes into config.json."""
    trainer: Config = {
        "trainer_class": "Trainer", "dict_class": name, "lr": 1e-3, "steps": 10, "seed": 0, "activation_dim": D,
        "dict_size": S, "device": "cpu", "layer": 4, "lm_name": "EleutherAI/pythia-70m-deduped", "wandb_name": "x",
        "submodule_name": "resid_post_layer_4",
    }  # fmt: skip
    buffer = {
        "d_submodule": D,
        "io": "out",
        "n_ctxs": 8,
        "ctx_len": 128,
        "refresh_batch_size": 4,
        "device": "cpu",
    }
    return {"trainer": trainer | more, "buffer": buffer}


def state(name: str) -> dict[str, Tensor]:
    """The state dict of a class."""
    w = weights()
    linear = {"encoder.weight": w["W_enc"].T, "encoder.bias": w["b_enc"], "decoder.weight": w["W_dec"].T}
    gated = {"r_mag": w["b_enc"] / 2, "gate_bias": w["b_enc"], "mag_bias": w["b_enc"] - 0.5}
    found = {
        "AutoEncoder": linear | {"bias": w["b_dec"]},
        "AutoEncoderNew": linear | {"decoder.bias": w["b_dec"]},
        "GatedAutoEncoder": linear | gated | {"decoder_bias": w["b_dec"]},
        "JumpReluAutoEncoder": w | {"threshold": THRESHOLDS},
        "AutoEncoderTopK": linear | {"b_dec": w["b_dec"], "threshold": np.array(-1.0)},
        "BatchTopKSAE": linear | {"b_dec": w["b_dec"], "threshold": np.array(0.5)},
        "MatryoshkaBatchTopKSAE": w | {"threshold": np.array(0.5)},
    }[name]
    if name == "GatedAutoEncoder":
        del found["encoder.bias"]
    stored = tensors(found)
    if "TopK" in name:
        stored["k"] = torch.tensor(K, dtype=torch.int)
    if name == "MatryoshkaBatchTopKSAE":
        stored["group_sizes"] = torch.tensor([4, S - 4])
    return stored


def folder(path: Path, cfg: object, stored: object) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(cfg))
    torch.save(stored, path / "ae.pt")
    return path


def gated(x: Array) -> tuple[Array, Array]:
    """A gated dictionary by its two affine maps."""
    w = weights()
    z = (x - w["b_dec"]) @ w["W_enc"]
    features = np.where(z + w["b_enc"] > 0, relu(np.exp(w["b_enc"] / 2) * z + w["b_enc"] - 0.5), 0)
    return features, features @ w["W_dec"] + w["b_dec"]


@pytest.mark.parametrize(
    ("name", "kind", "rule", "centred"),
    [
        ("AutoEncoder", ReLU(), relu, True),
        ("AutoEncoderNew", ReLU(), relu, False),
        ("JumpReluAutoEncoder", JumpReLU(), jump(THRESHOLDS), False),
        ("AutoEncoderTopK", TopK(K), top(K), True),
        ("BatchTopKSAE", JumpReLU(), jump(0.5), True),
        ("MatryoshkaBatchTopKSAE", JumpReLU(), jump(0.5), True),
        ("GatedAutoEncoder", Gated(), None, True),
    ],
)
def test_every_class_gives_the_numbers_of_its_rule(
    tmp_path: Path, name: str, kind: object, rule: object, centred: bool
) -> None:
    found = load(folder(tmp_path, config(name), state(name)))
    assert found.kind == kind and found.metadata["layout"] == "dictionary_learning"
    assert found.reads == found.writes == "blocks.4.hook_resid_post"
    x = vectors()
    expected = gated(x) if rule is None else computed(weights(), x, rule, centred=centred)  # type: ignore[arg-type]
    assert_computes(found, x, expected)


def test_a_prefix_of_matryoshka_groups_is_a_dictionary(tmp_path: Path) -> None:
    found = load(folder(tmp_path, config("MatryoshkaBatchTopKSAE"), state("MatryoshkaBatchTopKSAE")))
    assert found.metadata["group_sizes"] == [4, S - 4]
    w = weights()
    first = {
        "W_enc": w["W_enc"][:, :4],
        "b_enc": w["b_enc"][:4],
        "W_dec": w["W_dec"][:4],
        "b_dec": w["b_dec"],
    }
    assert_computes(found.prefix(4), vectors(), computed(first, vectors(), jump(0.5)))


def test_thresholds_below_zero_let_no_negative_feature_pass(tmp_path: Path) -> None:
    stored = {
        "W_enc": torch.zeros(2, 4), "b_enc": torch.tensor([2, -3, -0.2, 0.25]), "W_dec": torch.ones(4, 2),
        "b_dec": torch.zeros(2), "threshold": torch.full((4,), -1.0),
    }  # fmt: skip
    cfg = config("JumpReluAutoEncoder", activation_dim=2, dict_size=4)
    assert load(folder(tmp_path, cfg, stored)).encode(torch.zeros(1, 2))[0].tolist() == [2, 0, 0, 0.25]


def test_a_threshold_that_was_never_settled_is_pointed_out(tmp_path: Path) -> None:
    stored = state("BatchTopKSAE") | {"threshold": torch.tensor(-1.0)}
    with pytest.warns(UserWarning, match="the threshold of this BatchTopKSAE was not settled"):
        found = load(folder(tmp_path, config("BatchTopKSAE"), stored))
    assert_computes(found, vectors(), computed(weights(), vectors(), relu))


def scaled(x: Array, mean: Array, std: Array, rms: float) -> tuple[Array, Array]:
    """The fork's BatchTopKSAE: of x - mean times a scale, and the scale undone with what the fork adds to it."""
    scale = rms / np.sqrt((std**2).sum() + 1e-8)
    features, output = computed(weights(), (x - mean) * scale, jump(0.5))
    return features, output / (scale + 1e-8) + mean


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("hub", [False, True])
def test_the_forks_scaling_of_the_activations_is_folded(tmp_path: Path, hub: bool, compiled: bool) -> None:
    mean, std, rms = rng(8).normal(size=D), np.abs(rng(9).normal(size=D)), 3.0
    buffers = {
        "activation_mean": mean, "activation_std": std, "target_rms": np.array(rms),
        "activation_global_scale": np.array(rms / np.sqrt((std**2).sum() + 1e-8)),
    }  # fmt: skip
    stored = state("BatchTopKSAE") | tensors(buffers)
    stored = {f"_orig_mod.{name}" if compiled else name: tensor for name, tensor in stored.items()}
    cfg: Config = {
        "activation_dim": D,
        "dict_size": S,
        "k": K,
        "dict_class": "BatchTopKSAE",
        "target_rms": rms,
    }
    path = folder(tmp_path, cfg if hub else config("BatchTopKSAE"), stored)
    if hub:
        (path / "ae.pt").unlink()
        save_file(stored, path / "model.safetensors")
    found = load(path)
    assert found.reads == (None if hub else "blocks.4.hook_resid_post")
    assert_computes(found, vectors(), scaled(vectors(), mean, std, rms))


def test_nan_means_that_the_fork_does_not_scale(tmp_path: Path) -> None:
    off = {name: torch.tensor(float("nan")) for name in ("target_rms", "activation_global_scale")}
    off |= {name: torch.full((D,), float("nan")) for name in ("activation_mean", "activation_std")}
    found = load(folder(tmp_path, config("BatchTopKSAE"), state("BatchTopKSAE") | off))
    assert_computes(found, vectors(), computed(weights(), vectors(), jump(0.5)))


@pytest.mark.parametrize(
    ("module", "io", "site"),
    [
        ("resid_post_layer_4", "out", "blocks.4.hook_resid_post"),
        ("resid_pre", "out", "blocks.4.hook_resid_pre"),
        ("mlp_out_4", "out", "blocks.4.hook_mlp_out"),
        ("mlp", "out", "blocks.4.hook_mlp_out"),
        ("mlp_layer_4", "in", "blocks.4.ln2.hook_normalized"),
        ("attention", "out", "blocks.4.hook_attn_out"),
        ("gpt_neox.layers.4", "out", "blocks.4.hook_resid_post"),
        (None, "out", "blocks.4.hook_resid_post"),
        (None, "in", "blocks.4.hook_resid_pre"),
        ("resid_post", "in", None),
        ("something", "out", None),
    ],
)
def test_the_module_and_its_end_say_the_site(
    tmp_path: Path, module: str | None, io: str, site: str | None
) -> None:
    cfg = config("AutoEncoder", submodule_name=module)
    cfg["buffer"]["io"] = io  # type: ignore[index]
    assert load(folder(tmp_path, cfg, state("AutoEncoder"))).reads == site


def test_k_of_an_older_file_is_in_the_config_or_given(tmp_path: Path) -> None:
    stored = state("AutoEncoderTopK")
    del stored["k"], stored["threshold"]
    path = folder(tmp_path, config("AutoEncoderTopK", k=K), stored)
    assert load(path).kind == TopK(K)
    path = folder(tmp_path, config("AutoEncoderTopK"), stored)
    assert load(path, k=2).kind == TopK(2)
    with pytest.raises(ValueError, match="k is required, and neither"):
        load(path)


def test_half_precision_stays_so(tmp_path: Path) -> None:
    half = {n: t.half() if t.is_floating_point() else t for n, t in state("BatchTopKSAE").items()}
    found = load(folder(tmp_path, config("BatchTopKSAE"), half))
    assert found.W_enc.dtype == torch.float16
    w = {"W_enc": half["encoder.weight"].T, "b_enc": half["encoder.bias"], "W_dec": half["decoder.weight"].T,
         "b_dec": half["b_dec"]}  # fmt: skip
    rounded = {name: tensor.double().numpy() for name, tensor in w.items()}
    assert_computes(load(tmp_path, dtype=torch.float64), vectors(), computed(rounded, vectors(), jump(0.5)))


@pytest.mark.parametrize(
    ("cfg", "change", "message"),
    [
        (config("AutoEncoder"), {"bias": "biases"}, "must hold 'bias'; nearest: biases"),
        (config("AutoEncoder"), {"encoder.weight": None}, "must hold 'encoder.weight'"),
        (config("BatchTopKSAE"), {}, "must hold 'b_dec'"),
        (config("Autoencoder"), {}, "dict_class must be one of AutoEncoder, .* got 'Autoencoder'"),
        (
            config("AutoEncoder", dict_siz=3),
            {},
            "unknown key 'dict_siz' of the trainer may change numbers; nearest",
        ),
        (config("AutoEncoder", dict_size=11), {}, r"dict_size=11, the encoder has shape \[6, 10\]"),
        (config("AutoEncoder", layer=-1), {}, "layer must be an integer of at least 0, got -1"),
        (config("AutoEncoder", layer=3), {}, "layer=4 is given, and the files say layer=3"),
        ({"trainer": 3}, {}, "trainer must be a JSON object, got int"),
    ],
)
def test_what_is_missing_or_unknown_is_named(
    tmp_path: Path, cfg: Config, change: dict[str, str | None], message: str
) -> None:
    stored = state("AutoEncoder")
    for old, new in change.items():
        tensor = stored.pop(old)
        stored |= {} if new is None else {new: tensor}
    with pytest.raises(ValueError, match=message):
        load(folder(tmp_path, cfg, stored))


def test_an_interrupted_training_and_a_transcoder_are_refused_by_name(tmp_path: Path) -> None:
    run = {"step": 3, "ae": state("AutoEncoder"), "optimizer": {}, "config": {}, "norm_factor": 2.0}
    with pytest.raises(ValueError, match="state of a training that was interrupted"):
        load(folder(tmp_path, config("AutoEncoder"), run))
    cfg = config("AutoEncoder")
    cfg["buffer"]["io"] = "in_and_out"  # type: ignore[index]
    with pytest.raises(ValueError, match="io of the buffer must be in or out, got 'in_and_out'"):
        load(folder(tmp_path, cfg, state("AutoEncoder")))


@pytest.mark.parametrize("place", written_by("dictionary_learning"), ids=lambda path: path.name)
def test_what_dictionary_learning_wrote_computes_what_it_computes(place: Path) -> None:
    assert_agrees(load(place), place)
