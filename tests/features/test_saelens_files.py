"""SAELens folders: written by hand in its format, read here, and checked against a slow loop in numpy."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from interp.features import Dictionary, JumpReLU, ReLU, TopK, load, save
from interp.features.activations import DictionaryKind
from tests.features.dictionary_cases import KINDS, arrays, random_weights, slow_forward
from tests.tolerances import assert_close

D_IN, D_SAE, K = 6, 10, 3
EVERY = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: type(kind).__name__)
Config = dict[str, object]


def x() -> Tensor:
    return torch.randn(7, D_IN, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def config(architecture: str, **more: object) -> Config:
    """What SAELens 6 writes into cfg.json."""
    return {
        "d_in": D_IN, "d_sae": D_SAE, "dtype": "float64", "device": "cuda", "apply_b_dec_to_input": True,
        "normalize_activations": "none", "reshape_activations": "none",
        "metadata": {
            "sae_lens_version": "6.54.12", "sae_lens_training_version": "6.54.12", "model_name": "gpt2",
            "hook_name": "blocks.1.hook_resid_pre", "hook_head_index": None, "prepend_bos": True,
            "training_architecture_details": {"l1_coefficient": 1.0}, "model_from_pretrained_kwargs": {},
        },
        "architecture": architecture,
    } | more  # fmt: skip


def old_config(**more: object) -> Config:
    """What SAELens 3 to 5 wrote."""
    return {
        "architecture": "standard", "d_in": D_IN, "d_sae": D_SAE, "activation_fn_str": "relu",
        "apply_b_dec_to_input": False, "finetuning_scaling_factor": False, "context_size": 128,
        "model_name": "gpt2-small", "hook_name": "blocks.8.hook_resid_pre", "hook_layer": 8,
        "hook_head_index": None, "prepend_bos": True, "dataset_path": "Skylion007/openwebtext",
        "dataset_trust_remote_code": True, "normalize_activations": "none", "dtype": "torch.float64",
        "device": "cpu", "sae_lens_training_version": None, "activation_fn_kwargs": {}, "neuronpedia_id": None,
        "model_from_pretrained_kwargs": {}, "seqpos_slice": [None],
    } | more  # fmt: skip


def folder(path: Path, cfg: object, weights: dict[str, Tensor]) -> Path:
    (path / "cfg.json").write_text(json.dumps(cfg))
    save_file(
        {name: weight.contiguous() for name, weight in weights.items()}, path / "sae_weights.safetensors"
    )
    return path


def check(sae: Dictionary, features: np.ndarray, output: np.ndarray) -> None:
    assert_close(sae.encode(x()), torch.from_numpy(features))
    assert_close(sae(x()), torch.from_numpy(output))


@pytest.mark.parametrize(
    ("kind", "cfg"),
    [
        (ReLU(), config("standard")),
        (TopK(K), config("topk", k=K, rescale_acts_by_decoder_norm=False)),
        (JumpReLU(), config("jumprelu")),
        (ReLU(), config("standard", apply_b_dec_to_input=False)),
        (TopK(K), config("topk", k=K, normalize_activations="layer_norm")),
        (ReLU(), config("standard", normalize_activations="constant_norm_rescale")),
        (ReLU(), old_config()),
        (ReLU(), {"hook_point": "blocks.8.hook_resid_pre", "hook_point_layer": 8, "hook_point_head_index": None,
                  "d_in": D_IN, "d_sae": D_SAE, "dtype": "torch.float64", "lr": 4e-4, "l1_coefficient": 8e-5}),
        (TopK(K), old_config(activation_fn_str="topk", activation_fn_kwargs={"k": K})),
        (ReLU(), old_config(normalize_activations=False)),
    ],
)  # fmt: skip
def test_a_folder_gives_the_numbers_of_the_slow_loop(
    tmp_path: Path, kind: DictionaryKind, cfg: Config
) -> None:
    weights = random_weights(kind, D_IN, D_SAE)
    centred, normalize = (
        bool(cfg.get("apply_b_dec_to_input", True)),
        cfg.get("normalize_activations") or "none",
    )
    sae = load(folder(tmp_path, cfg, weights))
    assert type(sae.kind) is type(kind)
    check(sae, *slow_forward(arrays(weights), x().numpy(), kind, centred=centred, normalize=str(normalize)))
    assert str(sae.metadata["hook_name"]).endswith("hook_resid_pre")


def test_features_ranked_by_decoder_norm_stay_so(tmp_path: Path) -> None:
    weights = random_weights(TopK(K), D_IN, D_SAE)
    weights["W_dec"] *= torch.linspace(0.1, 5, D_SAE).double()[:, None]
    sae = load(folder(tmp_path, config("topk", k=K, rescale_acts_by_decoder_norm=True), weights))
    w = arrays(weights)
    features, output = np.zeros((7, D_SAE)), np.zeros((7, D_IN))
    norm = np.sqrt((w["W_dec"] ** 2).sum(1))
    for i, vector in enumerate(x().numpy()):
        z = ((vector - w["b_dec"]) @ w["W_enc"] + w["b_enc"]) * norm
        for j in np.argsort(z)[-K:]:
            features[i, j] = max(z[j], 0)
        output[i] = (features[i] / norm) @ w["W_dec"] + w["b_dec"]
    check(sae, features, output)
    plain = load(folder(tmp_path, config("topk", k=K), weights))
    with pytest.raises(
        ValueError, match=r"device must be one of this machine, float32 on xla is not possible here"
    ):
        load(tmp_path, device="xla")
    assert not torch.equal(plain.encode(x()) > 0, sae.encode(x()) > 0)


def test_norm_scaling_factor_scales_the_input_and_its_inverse_the_output(tmp_path: Path) -> None:
    weights, factor = random_weights(ReLU(), D_IN, D_SAE), 2.7
    path = folder(tmp_path, config("standard", normalize_activations="expected_average_only_in"), weights)
    features, output = slow_forward(arrays(weights), factor * x().numpy(), ReLU())
    check(load(path, norm_scaling_factor=factor), features, output / factor)
    with pytest.raises(
        ValueError, match=r"norm_scaling_factor belongs to .* got None with 'expected_average"
    ):
        load(path)
    path = folder(tmp_path, config("standard"), weights)
    with pytest.raises(ValueError, match=r"only there; got 2\.7 with 'none'"):
        load(path, norm_scaling_factor=factor)


def test_what_older_versions_stored_is_understood(tmp_path: Path) -> None:
    weights = random_weights(JumpReLU(), D_IN, D_SAE)
    stored = {name: weight for name, weight in weights.items() if name != "threshold"}
    stored["log_threshold"] = weights["threshold"].log()
    sae = load(folder(tmp_path, config("jumprelu"), stored))
    check(sae, *slow_forward(arrays(weights), x().numpy(), JumpReLU()))
    relu = random_weights(ReLU(), D_IN, D_SAE)
    ones = {"scaling_factor": torch.ones(D_SAE).double()}
    plain, with_ones = (load(folder(tmp_path, config("standard"), w)) for w in (relu, relu | ones))
    assert torch.equal(plain(x()), with_ones(x()))


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_weights_come_in_the_dtype_of_the_config_or_in_the_one_asked_for(tmp_path: Path, name: str) -> None:
    path = folder(tmp_path, config("standard", dtype=name), random_weights(ReLU(), D_IN, D_SAE))
    assert load(path).W_enc.dtype == getattr(torch, name)
    assert load(path, dtype=torch.float64).W_enc.dtype == torch.float64


@EVERY
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_is_written_is_read_back_bit_for_bit(
    tmp_path: Path, kind: DictionaryKind, dtype: torch.dtype
) -> None:
    sae = Dictionary(
        kind,
        random_weights(kind, D_IN, D_SAE),
        apply_b_dec_to_input=False,
        normalize_activations="layer_norm",
        metadata={"hook_name": "blocks.3.hook_mlp_out", "model_name": "gpt2"},
    ).to(dtype)
    save(sae, tmp_path / "new")
    again = load(tmp_path / "new")
    assert type(again.kind) is type(kind) and again.W_enc.dtype == dtype
    assert again.metadata["hook_name"] == "blocks.3.hook_mlp_out"
    assert torch.equal(again.encode(x()), sae.encode(x())) and torch.equal(again(x()), sae(x()))
    save(again, tmp_path / "twice")
    for file in ("cfg.json", "sae_weights.safetensors"):
        assert (tmp_path / "twice" / file).read_bytes() == (tmp_path / "new" / file).read_bytes()


@EVERY
def test_the_folder_has_the_keys_and_tensors_of_saelens(tmp_path: Path, kind: DictionaryKind) -> None:
    save(
        Dictionary(kind, random_weights(kind, D_IN, D_SAE), metadata={"hook_name": "blocks.0.attn.hook_z"}),
        tmp_path,
    )
    written = json.loads((tmp_path / "cfg.json").read_text())
    architecture = {"ReLU": "standard", "TopK": "topk", "JumpReLU": "jumprelu"}[type(kind).__name__]
    wanted = config(
        architecture, **({"k": 3, "rescale_acts_by_decoder_norm": False} if isinstance(kind, TopK) else {})
    )
    assert set(written) == set(wanted)
    assert written["reshape_activations"] == "hook_z" and written["dtype"] == "float64"
    # SAELens takes a config without a version for one older than 6 and forgets its metadata.
    assert written["metadata"]["sae_lens_version"].startswith("6.")
    tensors = {"W_enc": (6, 10), "b_enc": (10,), "W_dec": (10, 6), "b_dec": (6,)}
    tensors |= {"threshold": (10,)} if isinstance(kind, JumpReLU) else {}
    stored = load_file(tmp_path / "sae_weights.safetensors")
    assert {name: tuple(weight.shape) for name, weight in stored.items()} == tensors


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (config("gatd"), "architecture must be one of standard, topk, abstopk, jumprelu, gated"),
        (config("standard", activation_fn="tanh-relu"), "activation_fn must be relu, or topk of architecture topk"),
        (config("standard", reshape_activation="none"), "'reshape_activation' may change numbers; nearest: reshape_"),
        (config("standard", normalize_activations="covariance_whitening"), "requires the file activation_whiten"),
        (old_config(finetuning_scaling_factor=True), "finetuning_scaling_factor is not supported"),
        (old_config(hook_head_index=3), "hook_head_index=3"),
        (config("standard", metadata={"hook_head_index": 5}), "hook_head_index=5"),
        (config("topk"), "requires an integer k, got None"),
        (config("topk", k=True), "k must be a positive integer, got True"),
        (config("topk", k=3, activation_fn_kwargs={"postact_fn": "x"}), "'postact_fn' of activation_fn_kwargs may"),
        (config("jumprelu", activation_fn="topk"), "or topk of architecture topk, got 'topk'"),
        (config("temporal"), "temporal is not supported: its features of a token depend on the tokens before it"),
        (config("temporal", n_heads=2, sae_diff_type="topk", kval_topk=3, activation_normalization_factor=1.0),
         "temporal is not supported: its features of a token depend on the tokens before it"),
        (config("batchtopk"), "batchtopk is not supported: a checkpoint of training"),
        (config("batchtopk", k=3, topk_threshold_lr=0.01), "batchtopk is not supported: a checkpoint of training"),
        (config("matryoshka_batchtopk", k=3, matryoshka_widths=[4, 10]), "matryoshka_batchtopk is not supported: a"),
        (config("transcoder", d_out=6), "apply_b_dec_to_input must be false in a transcoder"),
        (config("skip_transcoder", apply_b_dec_to_input=False, d_out=6), "has a weight W_skip, unlike these files"),
        (config("transcoder", apply_b_dec_to_input=False, d_out=5), "d_out=5, b_dec has shape [6]"),
        (config("transcoder", apply_b_dec_to_input=False, d_out=6), "hook_name_out must say where the transcoder of"),
        (config("standard", dtype="int8"), "got 'int8'"),
        (config("standard", d_sae=11), "d_sae=11, W_enc has shape [6, 10]"),
        (config("standard", rescale_acts_by_decoder_norm=True), "belongs to architecture topk"),
        (config("jumprelu"), "requires the weights ['W_dec', 'W_enc', 'b_dec', 'b_enc', 'threshold']"),
        (config("standard", metadata=3), "metadata must be a JSON object, got int"),
        ([1, 2], "must hold a JSON object, got list"),
    ],
)  # fmt: skip
def test_a_config_that_would_change_numbers_is_refused_by_name(
    tmp_path: Path, cfg: object, message: str
) -> None:
    path = folder(tmp_path, cfg, random_weights(ReLU(), D_IN, D_SAE))
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load(path)
    assert str(tmp_path) in str(caught.value)


def test_a_config_that_is_no_text_or_nested_beyond_reading_is_named(tmp_path: Path) -> None:
    path = folder(tmp_path, config("standard"), random_weights(ReLU(), D_IN, D_SAE))
    for content in (b"\xff{}", b"[" * 100_000):
        (path / "cfg.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"cfg\.json is not readable JSON"):
            load(path)


def test_a_scaling_factor_that_scales_is_refused(tmp_path: Path) -> None:
    weights = random_weights(ReLU(), D_IN, D_SAE) | {"scaling_factor": torch.full((D_SAE,), 2.0)}
    with pytest.raises(ValueError, match="'scaling_factor'"):
        load(folder(tmp_path, config("standard"), weights))


def test_a_model_that_was_processed_at_loading_is_pointed_out(tmp_path: Path) -> None:
    cfg = old_config(model_from_pretrained_kwargs={"center_writing_weights": True})
    path = folder(tmp_path, cfg, random_weights(ReLU(), D_IN, D_SAE))
    with pytest.warns(UserWarning, match="loaded with {'center_writing_weights': True}"):
        load(path)


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must hold a dictionary in a known layout \(SAELens.*got no file"):
        load(tmp_path)
    folder(tmp_path, config("standard"), random_weights(ReLU(), D_IN, D_SAE))
    weights = tmp_path / "sae_weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"sae_weights\.safetensors is not readable"):
        load(tmp_path)
    folder(tmp_path, config("standard"), random_weights(ReLU(), D_IN, D_SAE))
    (tmp_path / "cfg.json").write_text("{")
    with pytest.raises(ValueError, match=r"cfg\.json is not readable JSON"):
        load(tmp_path)


def test_weights_too_large_for_the_dtype_asked_for_are_refused(tmp_path: Path) -> None:
    weights = random_weights(ReLU(), D_IN, D_SAE)
    weights["b_dec"][0] = 7e4
    path = folder(tmp_path, config("standard"), weights)
    with pytest.raises(ValueError, match="b_dec: numbers up to 65504 fit float16, got 70000"):
        load(path, dtype=torch.float16)
    assert bool(load(path, dtype=torch.bfloat16).b_dec.isfinite().all())


@pytest.mark.parametrize("key", ["apply_b_dec_to_input", "rescale_acts_by_decoder_norm"])
def test_what_is_true_or_false_must_be_written_so(key: str, tmp_path: Path) -> None:
    path = folder(tmp_path, config("standard") | {key: 1.5}, random_weights(ReLU(), D_IN, D_SAE))
    with pytest.raises(ValueError, match=f"{key} must be true or false, got 1.5"):
        load(path)
