"""Dictionaries that are one torch file: of OpenAI, Goodfire and Qwen Scope, by their rules in NumPy."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from interp.features import ReLU, TopK, load
from tests.features.formats.peers import assert_agrees, written_by
from tests.features.formats.reference import (
    Array,
    K,
    S,
    assert_computes,
    computed,
    relu,
    tensors,
    top,
    vectors,
    weights,
)

QWEN = "models--Qwen--SAE-Res-Qwen3-1.7B-Base-W32K-L0_3/snapshots/abc"


def openai(activation: str = "TopK", **settings: object) -> dict[str, object]:
    """The state dict of OpenAI's Autoencoder."""
    w = weights()
    counted = {"stats_last_nonzero": torch.zeros(S, dtype=torch.long), "latents_mean_square": torch.zeros(S)}
    stored = tensors({
        "encoder.weight": w["W_enc"].T, "decoder.weight": w["W_dec"].T, "pre_bias": w["b_dec"],
        "latent_bias": w["b_enc"],
    })  # fmt: skip
    of_topk = {"k": K, "postact_fn": "ReLU"} | settings if activation == "TopK" else {}
    return {**stored, **counted, "activation": activation, "activation_state_dict": of_topk}


def goodfire() -> dict[str, Tensor]:
    w = weights()
    return tensors({
        "encoder_linear.weight": w["W_enc"].T, "encoder_linear.bias": w["b_enc"],
        "decoder_linear.weight": w["W_dec"].T, "decoder_linear.bias": w["b_dec"],
    })  # fmt: skip


def qwen() -> dict[str, Tensor]:
    w = weights()
    return tensors({"W_enc": w["W_enc"].T, "W_dec": w["W_dec"].T, "b_enc": w["b_enc"], "b_dec": w["b_dec"]})


def written(path: Path, state: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path)
    return path


def normed(x: Array) -> tuple[Array, Array]:
    """OpenAI's TopK: of inputs of mean 0 and standard deviation 1 (n - 1), which is undone without the 1e-5."""
    mean, std = x.mean(1, keepdims=True), x.std(1, ddof=1, keepdims=True)
    features, output = computed(weights(), (x - mean) / (std + 1e-5), top(K))
    return features, output * std + mean


@pytest.mark.parametrize(
    ("location", "site"),
    [
        ("mlp_post_act", "mlp.hook_post"),
        ("resid_delta_attn_v5_32k", "hook_attn_out"),
        ("resid_delta_mlp_v4", "hook_mlp_out"),
        ("resid_post_attn_v5_128k", "hook_resid_mid"),
        ("resid_post_mlp_v5_32k", "hook_resid_post"),
    ],
)
def test_openais_folder_says_the_location_and_the_file_the_layer(
    tmp_path: Path, location: str, site: str
) -> None:
    found = load(written(tmp_path / location / "autoencoders" / "7.pt", openai()))
    assert found.reads == f"blocks.7.{site}" and found.metadata["layout"] == "OpenAI"


def test_openais_topk_implies_normed_inputs(tmp_path: Path) -> None:
    found = load(written(tmp_path / "3.pt", openai()))
    assert found.kind == TopK(K) and found.normalize_activations == "layer_norm" and found.reads is None
    assert_computes(found, vectors(), normed(vectors()))
    assert (found.encode(torch.from_numpy(vectors())) != 0).sum(1).max() == K


def test_openais_relu_does_not(tmp_path: Path) -> None:
    found = load(written(tmp_path / "3.pt", openai("ReLU")))
    assert found.kind == ReLU() and found.normalize_activations == "none"
    assert_computes(found, vectors(), computed(weights(), vectors(), relu))


def test_openais_topk_keeps_signs_where_nothing_follows_it(tmp_path: Path) -> None:
    assert load(written(tmp_path / "3.pt", openai(postact_fn="Identity"))).kind == TopK(K, relu=False)
    stored = openai(k=3) | {
        "encoder.weight": torch.zeros(4, 2), "decoder.weight": torch.ones(2, 4), "pre_bias": torch.zeros(2),
        "latent_bias": torch.tensor([2, -3, -0.2, -0.5]),
    }  # fmt: skip
    assert load(written(tmp_path / "4.pt", stored)).encode(torch.tensor([[0.0, 1.0]]))[0].tolist() == [
        2,
        0,
        0,
        0,
    ]


def test_goodfires_encoder_subtracts_nothing(tmp_path: Path) -> None:
    found = load(written(tmp_path / "Llama-3.3-70B-Instruct-SAE-l50.pt", goodfire()))
    assert found.kind == ReLU() and found.metadata["layout"] == "Goodfire"
    assert found.reads == "blocks.50.hook_resid_post"
    assert_computes(found, vectors(), computed(weights(), vectors(), relu, centred=False))


def test_qwens_repository_says_k(tmp_path: Path) -> None:
    found = load(written(tmp_path / QWEN / "layer5.sae.pt", qwen()))
    assert found.kind == TopK(3) and found.metadata["layout"] == "Qwen Scope"
    assert found.reads == "blocks.5.hook_resid_post" and found.metadata["model_name"] == "Qwen3-1.7B-Base"
    assert_computes(found, vectors(), computed(weights(), vectors(), top(3), centred=False))


def test_qwens_k_is_given_where_no_folder_says_it(tmp_path: Path) -> None:
    path = written(tmp_path / "layer5.sae.pt", qwen())
    assert load(path, k=4).kind == TopK(4)
    with pytest.raises(ValueError, match=r"k is required: load\(\.\.\., k=50\)"):
        load(path)
    with pytest.raises(ValueError, match="k=4 is given, and the files say k=3"):
        load(written(tmp_path / QWEN / "layer5.sae.pt", qwen()), k=4)


@pytest.mark.parametrize(
    ("name", "state"), [("{}.pt", openai()), ("a-l{}.pth", goodfire()), (f"{QWEN}/layer{{}}.sae.pt", qwen())]
)
def test_of_a_folder_of_layers_the_one_that_is_asked_for_is_read(
    tmp_path: Path, name: str, state: object
) -> None:
    for layer in (2, 11):
        written(tmp_path / name.format(layer), state)
    found = load(tmp_path, layer=11)
    assert found.metadata["layout"] in ("OpenAI", "Goodfire", "Qwen Scope")
    if name != "{}.pt":
        assert found.reads == "blocks.11.hook_resid_post"
    with pytest.raises(
        ValueError, match=r"one layer of \[2, 11\] is required: load\(\.\.\., layer=2\), got layer=3"
    ):
        load(tmp_path, layer=3)


@pytest.mark.parametrize(
    ("name", "state", "old", "new"),
    [
        ("3.pt", openai(), "encoder.weight", "encoder.wieght"),
        ("a-l3.pth", goodfire(), "decoder_linear.bias", None),
        (f"{QWEN}/layer3.sae.pt", qwen(), "b_enc", "b_encoder"),
    ],
)
def test_what_is_missing_is_named(
    tmp_path: Path, name: str, state: dict[str, Tensor], old: str, new: str | None
) -> None:
    stored = dict(state)
    tensor = stored.pop(old)
    stored |= {} if new is None else {new: tensor}
    with pytest.raises(ValueError, match=f"must hold '{old}'"):
        load(written(tmp_path / name, stored))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"activation": "Tanh"}, "activation must be ReLU or TopK, got 'Tanh'"),
        ({"activation_state_dict": {"k": 0, "postact_fn": "ReLU"}}, "k must be a positive integer, got 0"),
        ({"activation_state_dict": {"k": 3, "postact_fn": "Tanh"}}, "postact_fn ReLU or Identity, got"),
        ({"activation_state": {}}, "unknown key 'activation_state' may change numbers"),
        ({"encoder.weight": torch.zeros(3)}, r"encoder\.weight must be a matrix, got shape \[3\]"),
    ],
)
def test_openais_activations_are_refused_by_name(
    tmp_path: Path, more: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load(written(tmp_path / "3.pt", openai() | more))


def test_half_precision_stays_so(tmp_path: Path) -> None:
    half = {name: tensor.to(torch.bfloat16) for name, tensor in goodfire().items()}
    path = written(tmp_path / "a-l3.pth", half)
    assert load(path).W_enc.dtype == torch.bfloat16
    rounded = {
        "W_enc": half["encoder_linear.weight"].T, "b_enc": half["encoder_linear.bias"],
        "W_dec": half["decoder_linear.weight"].T, "b_dec": half["decoder_linear.bias"],
    }  # fmt: skip
    w = {name: tensor.double().numpy() for name, tensor in rounded.items()}
    expected = computed(w, vectors(), relu, centred=False)
    assert_computes(load(path, dtype=torch.float64), vectors(), expected)


@pytest.mark.parametrize("place", written_by("foreign"), ids=lambda path: path.name)
def test_what_saelens_makes_of_such_a_file_is_what_is_read(place: Path) -> None:
    [file] = [each for each in place.iterdir() if each.suffix in (".pt", ".pth")]
    assert_agrees(load(file), place)
