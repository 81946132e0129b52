"""Linformer against a loop over ranks and tokens, its limits, and the contexts in which columns are chosen."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from interp.lab import Linformer
from interp.model import Edit, Read, Softmax, Tap
from tests.configs import perturbed, some_tokens
from tests.mixers import MIXERS, build_mixed
from tests.tolerances import assert_close

CONFIG = replace(MIXERS["linformer"], n_kv_heads=2, n_layers=1, n_ctx=12)
SITES = {name: Read(f"blocks.0.attn.hook_{name}") for name in ("q", "k", "v", "pattern", "z")}


def seen(model: torch.nn.Module, tokens: Tensor, **how: Tensor) -> dict[str, Tensor]:
    tap = Tap(list(SITES.values()))
    model(tokens, tap, **how)
    return {name: tap.values[read] for name, read in SITES.items()}


@pytest.mark.parametrize("n", [1, 3, 12])
def test_the_mixer_is_attention_over_the_mixtures_of_keys_and_values(n: int) -> None:
    model = perturbed(CONFIG)
    found, attn = seen(model, some_tokens(2, n)), model.block(0).attn
    mixes_k, mixes_v = attn.key_mix, attn.value_mix
    for b in range(2):
        for h in range(4):
            keys, values = (
                torch.stack([sum(mix[r, j] * x[b, j, h // 2] for j in range(n)) for r in range(5)])
                for mix, x in ((mixes_k, found["k"]), (mixes_v, found["v"]))
            )
            for i in range(n):
                share = (keys @ found["q"][b, i, h] * CONFIG.score_scale(0)).softmax(0)
                assert_close(found["z"][b, i, h], share @ values)
                pattern = torch.stack([share @ mixes_v[:, j] for j in range(n)])
                assert_close(found["pattern"][b, h, i], pattern)


def test_with_identity_mixtures_of_all_positions_it_is_softmax_attention() -> None:
    tokens = some_tokens(n=12)
    model = perturbed(replace(CONFIG, mixer=Linformer(12)))
    plain = perturbed(replace(CONFIG, mixer=Softmax()))
    with torch.no_grad():
        model.block(0).attn.key_mix.copy_(torch.eye(12))
        model.block(0).attn.value_mix.copy_(torch.eye(12))
    plain.load_state_dict({n: p for n, p in model.state_dict().items() if not n.endswith("_mix")})
    assert_close(model(tokens), plain(tokens))
    assert_close(seen(model, tokens)["pattern"], seen(plain, tokens)["pattern"])


def test_the_pattern_has_the_rank_of_the_mixtures() -> None:
    pattern = seen(perturbed(CONFIG), some_tokens(n=12))["pattern"]
    singular = torch.linalg.svdvals(pattern)
    assert (singular[..., 5:] < 1e-12).all() and (singular[..., 4] > 1e-6).all()


def test_an_edited_pattern_is_the_one_that_is_used() -> None:
    model, tokens, read = build_mixed("linformer"), some_tokens(), Read("blocks.0.attn.hook_z")
    tap = Tap([read], [Edit("blocks.0.attn.hook_pattern", torch.zeros_like)])
    model(tokens, tap)
    assert (tap.values[read] == 0).all()


@pytest.mark.parametrize("name", ["linformer", "linformer-rotary"])
def test_packed_texts_have_mixtures_of_their_own(name: str) -> None:
    model, tokens = build_mixed(name), some_tokens()
    documents = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2]).expand(3, -1)
    parts = [model(tokens[:, part]) for part in (slice(0, 4), slice(4, 7), slice(7, 9))]
    whole = model(tokens, documents=documents)
    assert_close(whole, torch.cat(parts, 1))
    at = torch.tensor([[5], [8], [0]])
    assert_close(model(tokens, documents=documents, logits_at=at)[:, 0], whole[torch.arange(3), at[:, 0]])


def test_padding_inside_packed_texts_changes_no_number() -> None:
    model, tokens = build_mixed("linformer"), some_tokens(1)
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1]])
    keep = torch.tensor([[1, 0, 1, 1, 1, 1, 0, 1, 0]], dtype=torch.bool)
    packed = model(tokens, documents=documents, keep=keep)
    for part in (slice(0, 4), slice(4, 9)):
        real = keep[0, part]
        assert_close(packed[0, part][real], model(tokens[:, part][:, real])[0])
