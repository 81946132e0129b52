"""Folders of sparsify: written here by its rules and checked in NumPy, and written by itself."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from interp.features import AbsTopK, Dictionary, GroupMax, TopK, load
from tests.features.formats.peers import assert_agrees, written_by
from tests.features.formats.reference import (
    D,
    K,
    Rule,
    S,
    assert_computes,
    computed,
    group_max,
    rng,
    tensors,
    top,
    vectors,
    weights,
)

Config = dict[str, object]
SKIP = rng(7).normal(size=(D, D))


def config(**more: object) -> Config:
    """What sparsify 1.3 writes into cfg.json."""
    return {
        "activation": "topk", "expansion_factor": 32, "normalize_decoder": True, "num_latents": S, "k": K,
        "multi_topk": False, "skip_connection": False, "transcode": False, "d_in": D,
    } | more  # fmt: skip


def state(*, older: bool = False, skip: bool = False) -> dict[str, Tensor]:
    """What sparsify writes into sae.safetensors."""
    w = weights()
    decoder = {"decoder.weight": w["W_dec"].T} if older else {"W_dec": w["W_dec"]}
    stored = {"encoder.weight": w["W_enc"].T, "encoder.bias": w["b_enc"], "b_dec": w["b_dec"], **decoder}
    return tensors(stored | ({"W_skip": SKIP} if skip else {}))


def folder(path: Path, cfg: Config, stored: dict[str, Tensor]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "cfg.json").write_text(json.dumps(cfg))
    save_file(stored, path / "sae.safetensors")
    return path


@pytest.mark.parametrize(
    ("cfg", "rule", "kind"),
    [
        (config(), top(K), TopK(K)),
        (config(transcode=True), top(K), TopK(K)),
        (config(skip_connection=True), top(K), TopK(K)),
        (config(skip_connection=True, transcode=True), top(K), TopK(K)),
        (config(activation="groupmax", k=5), group_max(5), GroupMax(5)),
        (config(signed=True), top(K, np.abs, lambda z: z), AbsTopK(K)),
        (config(num_latents=0, expansion_factor=2, d_in=D), top(K), TopK(K)),
    ],
    ids=["sae", "transcoder", "skip", "skip transcoder", "groupmax", "signed", "by its factor"],
)
def test_a_folder_gives_the_numbers_of_its_rule(
    tmp_path: Path, cfg: Config, rule: Rule, kind: object
) -> None:
    transcode, skip = cfg["transcode"], bool(cfg["skip_connection"])
    w = weights()
    stored = state(skip=skip)
    if cfg["num_latents"] == 0:
        wide = {name: rng(3).normal(size=shape) for name, shape in
                {"W_enc": (D, 2 * D), "b_enc": (2 * D,), "W_dec": (2 * D, D), "b_dec": (D,)}.items()}  # fmt: skip
        w, stored = wide, tensors({
            "encoder.weight": wide["W_enc"].T, "encoder.bias": wide["b_enc"], "W_dec": wide["W_dec"],
            "b_dec": wide["b_dec"],
        })  # fmt: skip
    found = load(folder(tmp_path / "layers.3.mlp", cfg, stored))
    assert found.kind == kind and found.metadata["layout"] == "sparsify"
    assert found.writes == "blocks.3.hook_mlp_out"
    assert found.reads == ("blocks.3.ln2.hook_normalized" if transcode else "blocks.3.hook_mlp_out")
    x = vectors()
    assert_computes(found, x, computed(w, x, rule, centred=not transcode, skip=SKIP if skip else None))


@pytest.mark.parametrize(
    ("place", "site"),
    [
        ("layers.10", "blocks.10.hook_resid_post"),
        ("h.3.attn", "blocks.3.hook_attn_out"),
        ("layers.7/seed1", "blocks.7.hook_resid_post"),
        ("embed_tokens", "hook_embed"),
        ("something_else", None),
    ],
)
def test_the_folder_says_the_site(tmp_path: Path, place: str, site: str | None) -> None:
    assert load(folder(tmp_path / place, config(), state())).reads == site


def test_an_older_decoder_is_that_of_a_linear_layer(tmp_path: Path) -> None:
    new, old = (load(folder(tmp_path / f"{n}", config(), state(older=bool(n)))) for n in (0, 1))
    assert torch.equal(new.W_dec, old.W_dec)


def numbers(path: Path, p: list[float], **more: object) -> list[float]:
    """The features of a dictionary whose pre-activations are these."""
    s = len(p)
    stored = {
        "encoder.weight": torch.zeros(s, 2).double(), "encoder.bias": torch.tensor(p).double(),
        "W_dec": torch.ones(s, 2).double(), "b_dec": torch.zeros(2).double(),
    }  # fmt: skip
    found = load(folder(path, config(d_in=2, num_latents=s, **more), stored))
    return found.encode(torch.zeros(1, 2).double())[0].tolist()


def test_features_are_those_worked_out_by_hand(tmp_path: Path) -> None:
    assert numbers(tmp_path, [2, -3, -0.25, -0.5], k=3) == [2, 0, 0, 0]
    assert numbers(tmp_path, [2, -3, 0.5, 0.25], k=2, activation="groupmax") == [2, 0, 0.5, 0]


def test_a_skip_is_that_of_a_linear_layer(tmp_path: Path) -> None:
    stored = {
        "encoder.weight": torch.zeros(3, 2).double(), "encoder.bias": torch.zeros(3).double(),
        "W_dec": torch.zeros(3, 2).double(), "b_dec": torch.zeros(2).double(),
        "W_skip": torch.tensor([[0.0, 1.0], [0.0, 0.0]]).double(),
    }  # fmt: skip
    cfg = config(d_in=2, num_latents=3, k=1, skip_connection=True, transcode=True)
    found = load(folder(tmp_path, cfg, stored))
    assert found(torch.tensor([[3.0, 5.0]]).double()).tolist() == [[5.0, 0.0]]


def test_half_precision_stays_so_and_computes_nearly_the_same(tmp_path: Path) -> None:
    half = {name: weight.to(torch.bfloat16) for name, weight in state().items()}
    found = load(folder(tmp_path, config(), half))
    assert found.W_enc.dtype == torch.bfloat16
    exact = Dictionary(TopK(K), {name: weight.double() for name, weight in found.state_dict().items()})
    x = torch.from_numpy(vectors())
    assert (load(tmp_path, dtype=torch.float64)(x) - exact(x)).abs().max() == 0


@pytest.mark.parametrize(
    ("cfg", "change", "message"),
    [
        (config(), {"encoder.weight": "encoder.wieght"}, "must hold 'encoder.weight'; nearest: encoder.wieght"),
        (config(), {"b_dec": None}, "must hold 'b_dec'"),
        (config(skip_connection=True), {}, "must hold 'W_skip'"),
        (config(activation="relu"), {}, "activation must be topk or groupmax"),
        (config(transcod=True), {}, "unknown key 'transcod' may change numbers; nearest: transcode"),
        (config(transcode="yes"), {}, "transcode must be true or false, got 'yes'"),
        (config(k=0), {}, "k must be a positive integer, got 0"),
        (config(d_in=5), {}, r"d_in=5 and 10 latents, W_enc has shape \[6, 10\]"),
        (config(activation="groupmax", k=4), {}, "must fall into k groups of one size, got k=4"),
    ],
)  # fmt: skip
def test_what_is_missing_or_unknown_is_named(
    tmp_path: Path, cfg: Config, change: dict[str, str | None], message: str
) -> None:
    stored = state()
    for old, new in change.items():
        tensor = stored.pop(old)
        stored |= {} if new is None else {new: tensor}
    with pytest.raises(ValueError, match=message):
        load(folder(tmp_path, cfg, stored))


@pytest.mark.parametrize("place", written_by("sparsify"), ids=lambda path: path.parent.name)
def test_what_sparsify_wrote_computes_what_it_computes(place: Path) -> None:
    assert_agrees(load(place), place)
