"""LSH attention against a loop over queries, rounds and keys; what a token that meets nobody sees; its one matrix."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from interp.lab import Reformer
from interp.model import ModelConfig, Read, Softmax, Tap, Transformer, Weights
from tests.configs import perturbed, some_tokens
from tests.loops import over
from tests.mixers import MIXERS, build_mixed
from tests.tolerances import assert_close

CONFIG = replace(MIXERS["reformer"], mixer=Reformer(4, 2), n_layers=1)
SITES = {name: Read(f"blocks.0.attn.hook_{name}") for name in ("q", "k", "v", "pattern", "z")}


def seen(model: Transformer, tokens: Tensor) -> dict[str, Tensor]:
    tap = Tap(list(SITES.values()))
    model(tokens, tap)
    return {name: tap.values[read] for name, read in SITES.items()}


def bucket(x: Tensor, rotation: Tensor) -> int:
    """The index of the largest of x R and -x R."""
    turned = [float(x @ column) for column in rotation.T]
    turned += [-value for value in turned]
    return turned.index(max(turned))


@over("causal", [True, False])
@over("kind", [Reformer(2), Reformer(4, 2), Reformer(16, 1)])
@over("n", [1, 2, 11])
def test_the_mixer_is_the_loop_over_the_union_of_buckets(n: int, kind: Reformer, causal: bool) -> None:
    config = replace(CONFIG, mixer=kind, causal=causal)
    model, tokens = perturbed(config), some_tokens(2, n)
    found, rotations = seen(model, tokens), model.block(0).attn.rotations
    for b in range(2):
        for h in range(4):
            x, values = found["q"][b, :, h], found["v"][b, :, h]
            hashes = [[bucket(x[i], rotations[r, h]) for r in range(kind.n_rounds)] for i in range(n)]
            for i in range(n):
                others = [j for j in range(i if causal else n) if j != i]
                met = [j for j in others if any(a == c for a, c in zip(hashes[i], hashes[j], strict=True))]
                met = met or [i]
                scores = torch.stack([x[i] @ x[j] / x[j].norm() for j in met]) * config.score_scale(0)
                expected = torch.zeros(n, dtype=torch.float64)
                expected[met] = scores.softmax(0)
                assert_close(found["pattern"][b, h, i], expected)
                assert_close(found["z"][b, i, h], expected @ values)


def test_the_first_token_of_a_causal_text_sees_itself_alone() -> None:
    pattern = seen(build_mixed("reformer"), some_tokens())["pattern"]
    assert (pattern[:, :, 0, 0] == 1).all()
    lonely = pattern.diagonal(dim1=-2, dim2=-1) > 0
    assert (pattern.diagonal(dim1=-2, dim2=-1)[lonely] == 1).all()


def test_queries_and_keys_are_one_vector_of_one_matrix() -> None:
    model = build_mixed("reformer")
    found, weights = seen(model, some_tokens()), Weights(model)
    assert torch.equal(found["q"], found["k"])
    assert torch.equal(weights.W_Q, weights.W_K) and torch.equal(weights.b_Q, weights.b_K)
    stream = Read("blocks.0.ln1.hook_normalized")
    tap = Tap([stream])
    model(some_tokens(), tap)
    made = torch.einsum("bpd,hde->bphe", tap.values[stream], weights.W_K[0]) + weights.b_K[0]
    assert_close(made, found["k"])


def test_more_rounds_meet_more_keys() -> None:
    """The first rounds of a model are those of the same model with fewer: what they let through stays."""
    tokens, states = some_tokens(n=20), perturbed(replace(CONFIG, mixer=Reformer(8, 6))).state_dict()
    sees = []
    for rounds in (1, 3, 6):
        model = perturbed(replace(CONFIG, mixer=Reformer(8, rounds)))
        state = {n: t[:rounds] if n.endswith("rotations") else t for n, t in states.items()}
        model.load_state_dict(state)
        sees.append(seen(model, tokens)["pattern"] > 0)
    others = ~torch.eye(20, dtype=torch.bool)
    for few, more in pairwise(sees):
        assert not (few & ~more & others).any()
        assert int((more & others).sum()) > int((few & others).sum())


def test_one_bucket_is_softmax_over_unit_keys_without_the_token_itself() -> None:
    """Oracle: equal vectors hash alike, so with a constant rotation sign every pair meets."""
    model, tokens = perturbed(CONFIG), some_tokens(n=9)
    with torch.no_grad():
        model.block(0).attn.rotations.zero_()  # argmax of zeros is the first bucket for all
    found = seen(model, tokens)
    q = found["q"].transpose(1, 2)
    scores = q @ (q / q.norm(dim=-1, keepdim=True)).mT * CONFIG.score_scale(0)
    scores = scores.masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(), -torch.inf)
    assert_close(found["pattern"][:, :, 1:], scores[:, :, 1:].softmax(-1))


def test_rotations_are_not_trained() -> None:
    model = Transformer(CONFIG)
    model(some_tokens()).sum().backward()
    assert model.block(0).attn.rotations.grad is None
    assert model.block(0).attn.qk.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"n_kv_heads": 2}, "as many value heads as heads"), ({"qk_norm": "head"}, "no qk_norm under Reformer")],
)
def test_what_a_shared_vector_cannot_have_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **changes)  # type: ignore[arg-type]
    assert isinstance(replace(CONFIG, mixer=Softmax(), **changes), ModelConfig)  # type: ignore[arg-type]
