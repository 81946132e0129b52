"""Synthesizers against loops over heads and tokens, and what their scores do not depend on."""

from dataclasses import replace

import pytest
import torch

from interp.lab.synthesizer import SynthesizerAttention
from interp.model import Edit, Read, Rotary, Tap, Weights
from tests.configs import some_tokens
from tests.loops import over
from tests.mixers import MIXERS, build_mixed
from tests.tolerances import assert_close

PLAIN = ["synthesizer", "synthesizer-random", "synthesizer-random-bidirectional"]
SITES = ("attn.hook_v", "attn.hook_attn_scores", "attn.hook_pattern", "attn.hook_z")


@pytest.mark.parametrize("name", PLAIN)
@over("n", [1, 2, 9])
def test_z_is_that_of_a_loop_over_heads_and_tokens(name: str, n: int) -> None:
    model, config = build_mixed(name), MIXERS[name]
    attn = model.block(0).attn
    assert isinstance(attn, SynthesizerAttention)
    read = "hook_resid_pre" if name == "synthesizer-random" else "ln1.hook_normalized"
    reads = [Read(f"blocks.0.{site}") for site in (read, *SITES)]
    tap = Tap(reads)
    model(some_tokens(1, n), tap)
    x, v, scores, pattern, z = (tap.values[r][0] for r in reads)
    p, e = dict(attn.named_parameters()), config.head_width
    for h in range(config.n_heads):
        rows = slice(h * e, (h + 1) * e)
        for i in range(n):
            if "dense.weight" in p:
                hidden = (p["dense.weight"][rows] @ x[i] + p["dense.bias"][rows]).clamp_min(0)
                given = [p["keys"][j, h, :e] @ hidden + p["keys"][j, h, e] for j in range(n)]
            else:
                given = [p["keys"][i, h, j] for j in range(n)]
            row = torch.stack(given)
            last = i + 1 if config.causal else n
            weights = row[:last].exp() / row[:last].exp().sum()
            assert_close(scores[h, i, :last], row[:last])
            assert_close(pattern[h, i, :last], weights)
            assert_close(z[i, h], weights @ v[:last, h])


def test_no_key_has_a_part_in_dense_scores_and_no_token_in_random_ones() -> None:
    tokens = some_tokens()
    other = tokens.clone()
    other[:, 2] = (other[:, 2] + 1) % 31
    for name, same in (("synthesizer", [0, 1, 3, 4, 5, 6, 7, 8]), ("synthesizer-random", list(range(9)))):
        found = []
        for given in (tokens, other):
            tap = Tap([Read("blocks.0.attn.hook_pattern")])
            build_mixed(name)(given, tap)
            found.append(next(iter(tap.values.values())))
        assert_close(found[0][:, :, same], found[1][:, :, same])
        assert torch.allclose(found[0][:, :, 2], found[1][:, :, 2]) == (name == "synthesizer-random")


@pytest.mark.parametrize("name", PLAIN)
def test_it_has_no_queries_and_keys_and_says_why(name: str) -> None:
    model = build_mixed(name)
    for part in "qk":
        with pytest.raises(AttributeError, match="no queries and keys"):
            model.block(0).attn.part(part)
    for circuit in ("W_Q", "W_K", "QK"):
        with pytest.raises(AttributeError, match="has no"):
            getattr(Weights(model), circuit)
    assert Weights(model).OV.shape[:2] == (2, 4)
    with pytest.raises(KeyError, match="has no"):
        model(some_tokens(), Tap([Read("blocks.0.attn.hook_q")]))


def test_an_edited_pattern_is_the_pattern_used() -> None:
    model = build_mixed("synthesizer")
    tap = Tap(
        [Read("blocks.0.attn.hook_v"), Read("blocks.0.attn.hook_z")],
        [Edit("blocks.0.attn.hook_pattern", lambda x: torch.eye(9, dtype=x.dtype).expand_as(x))],
    )
    model(some_tokens(), tap)
    v, z = tap.values.values()
    assert_close(z, v)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position": Rotary()}, "no qk_norm and no rotary"),
        ({"n_kv_heads": 2}, "as many value heads"),
        ({"attn_scale": 0.5}, "no attn_scale"),
        ({"window": 4}, "no window under Synthesizer"),
    ],
)
def test_configs_that_contradict_it_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(MIXERS["synthesizer"], **changes)  # type: ignore[arg-type]
