"""Why a head attends: pairs of parts sum to the recorded score; a loop written out by hand; planted circuits."""

import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch
import xarray as xr
from torch import Tensor

import interp
from interp import Batch, Edit, HookedEncoderDecoder, HookedTransformer
from interp.attention import AttentionAttribution, attention_attribution, attention_paths
from interp.attention.score_parts import ScoreSplit, score_parts
from interp.data.batch import Side
from interp.edits import PerRow, Scale, Zero
from interp.model import Transformer
from interp.model.norm import NormedHeads
from interp.model.tap import Read, Tap
from interp.passes.schedule import run_steps
from interp.residual import IncompleteSumError
from interp.residual.attribution import labels_before_attention
from interp.zoo import planted
from tests.configs import CONFIGS, build, perturbed, some_tokens
from tests.loops import over
from tests.mixers import MIXERS, build_mixed
from tests.model import test_encoder_decoder as pairs
from tests.tolerances import assert_close
from tests.wrapped.wrapping import wrapped

MODELS = (*CONFIGS, *MIXERS)
SPLITS: tuple[ScoreSplit, ...] = ("part", "head")
PROMPT = [[3, 1, 4, 1, 5, 9, 2, 6, 5]]


def network_of(name: str) -> Transformer:
    return build(name) if name in CONFIGS else build_mixed(name)


def recorded(network: Transformer, tokens: Tensor, *sites: str) -> list[Tensor]:
    """Some sites of one pass."""
    tap = Tap([Read(site) for site in sites])
    network(tokens, tap)
    return [tap.values[Read(site)] for site in sites]


def splits(name: str, layer: int) -> bool:
    """Whether a layer's scores are one product of queries and keys."""
    return (CONFIGS | MIXERS)[name].mixers[layer].traits.separable


def cells(scores: Tensor) -> list[tuple[int, int]]:
    """Some visible (query, key) of scores `[q k]`: the last query and an earlier one, with their first and last key."""
    seen = [(q, (scores[q] > -math.inf).nonzero().flatten().tolist()) for q in (4, scores.shape[0] - 1)]
    return [(q, key) for q, keys in seen for key in {keys[0], keys[len(keys) // 2], keys[-1]}]


@over("layer, head, by", list(itertools.product((0, 1), (0, 3), ("part", "head"))))
@pytest.mark.parametrize("name", MODELS)
def test_all_pairs_sum_to_the_recorded_score(name: str, layer: int, head: int, by: ScoreSplit) -> None:
    network, tokens = network_of(name), some_tokens(2)
    model = HookedTransformer(network)
    if not splits(name, layer):
        with pytest.raises(ValueError, match="requires scores that are one product"):
            attention_attribution(model, tokens, (layer, head), key=0)
        return
    (scores,) = recorded(network, tokens, f"blocks.{layer}.attn.hook_attn_scores")
    for query, key in cells(scores[0, head]):
        found = attention_attribution(model, tokens, (layer, head), query=query, key=key, by=by)
        content, cap = found.value.sum(("query_part", "key_part")).values, network.config.attn_softcap
        content = torch.tensor(content)
        before = content + torch.tensor(found.position.values)
        assert_close(torch.tensor(found.total.values), before)
        after = before if cap is None else cap * (content / cap).tanh() + torch.tensor(found.position.values)
        assert_close(after, scores[:, head, query, key])
        assert found.attrs["completeness_error"] < 1e-11


def test_both_refusals_and_answers_are_among_the_models() -> None:
    able = {name for name in MODELS for layer in (0, 1) if splits(name, layer)}
    assert set(CONFIGS) <= able
    assert {"linear", "cosine", "dual-chunk", "adaptive", "latent", "clipped"} <= set(MODELS) - able
    assert {"log-n", "log-steps", "strided", "gated-softmax"} <= able


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-gqa", "gemma2", "bloom"])
def test_every_cell_of_a_small_model_sums_to_its_score(name: str) -> None:
    network = build(name)
    tokens = torch.tensor(PROMPT)[:, :6]
    for layer in (0, 1):
        (scores,) = recorded(network, tokens, f"blocks.{layer}.attn.hook_attn_scores")
        for head, query, key in itertools.product(range(4), range(6), range(6)):
            if scores[0, head, query, key] == -math.inf:
                with pytest.raises(
                    ValueError, match=f"token {query} does not see token {key} in L{layer}H{head}"
                ):
                    attention_attribution(network, tokens, (layer, head), query=query, key=key)
                continue
            found = attention_attribution(network, tokens, (layer, head), query=query, key=key)
            content, bias = float(found.value.sum()), float(found.position[0])
            cap = network.config.attn_softcap
            total = content + bias if cap is None else cap * math.tanh(content / cap) + bias
            assert total == pytest.approx(float(scores[0, head, query, key]), rel=1e-9, abs=1e-9)


@dataclass(frozen=True)
class ByHand:
    """How a model turns and norms queries and keys, as its config says in words."""

    layer: int
    base: float | None = None
    """Of the rotation; None = no rotation in this layer."""
    dim: int = 10
    divisor: float = 1.0
    """Of the frequencies."""
    normed: bool = False
    centred: bool = False


BY_HAND = {
    "llama-gqa": ByHand(1, 10_000.0),
    "gemma3": ByHand(1, 100.0, normed=True),
    "olmo2": ByHand(1, 10_000.0, normed=True),
    "glm4-moe": ByHand(1, 10_000.0, dim=4, normed=True),
    "cohere2": ByHand(0, normed=True, centred=True),
}


def turned(x: list[float], place: int, how: ByHand) -> list[float]:
    """A head's vector rotated to its position, pair by pair (i with i + half), as in Su et al. 2021."""
    half, out = how.dim // 2, list(x)
    for i in range(half if how.base else 0):
        assert how.base is not None
        angle = place / how.base ** (2 * i / how.dim) / how.divisor
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def divided(x: list[float], scale: float, gamma: list[float], centred: bool) -> list[float]:
    """The linear part of a norm."""
    mean = sum(x) / len(x) if centred else 0.0
    return [(each - mean) / scale * g for each, g in zip(x, gamma, strict=True)]


def side_by_hand(
    network: Transformer, tokens: Tensor, how: ByHand, side: str, head: int, place: int, part: Tensor
) -> list[float]:
    """What one vector of the stream becomes in the query or the key of a head, one number after another."""
    block, config, at = network.block(how.layer), network.config, f"blocks.{how.layer}"
    index = head if side == "q" else head // (config.n_heads // config.kv_heads)
    x = part.tolist()
    if block.ln1.weight is not None:
        (scale,) = recorded(network, tokens, f"{at}.ln1.hook_scale")
        stored = block.ln1.weight + 1 if block.ln1.unit_offset else block.ln1.weight
        x = divided(x, float(scale[0, place, 0]), stored.tolist(), how.centred)
    weight, _ = block.attn.part(side)
    heads = [
        [sum(x[d] * float(weight[h, e, d]) for d in range(24)) for e in range(10)] for h in range(len(weight))
    ]
    norm = block.attn.q_norm if side == "q" else block.attn.k_norm
    if norm is None:
        return turned(heads[index], place, how)
    (scale,) = recorded(network, tokens, f"{at}.attn.{side}_norm.hook_scale")
    assert how.normed and norm.norm.weight is not None
    gamma = (norm.norm.weight + 1 if norm.norm.unit_offset else norm.norm.weight).tolist()
    mine = gamma if len(gamma) == 10 else gamma[index * 10 : index * 10 + 10]
    its = float(scale[0, place, 0 if scale.shape[2] == 1 else index, 0])
    return turned(divided(heads[index], its, mine, how.centred), place, how)


@pytest.mark.parametrize("name", BY_HAND)
def test_pairs_are_those_written_out_by_hand(name: str) -> None:
    """Rotation, shared keys, norms of queries and keys of every kind: of each head, each of its own, of all as one."""
    network, how, tokens, head = build(name), BY_HAND[name], torch.tensor(PROMPT), 3
    query, key = 7, 5
    sites = [f"blocks.0.hook_{each}_out" for each in ("attn", "mlp")] if how.layer else []
    parts = recorded(network, tokens, "hook_embed", *sites)
    found = attention_attribution(network, tokens, (how.layer, head), query=query, key=key).value[0]
    assert found.query_part.values.tolist()[:-1] == ["embed", "L0.attn", "L0.mlp"][: len(parts)]
    scale = network.config.attn_scale or 1 / math.sqrt(10)
    for a, b in itertools.product(range(len(parts)), repeat=2):
        q = side_by_hand(network, tokens, how, "q", head, query, parts[a][0, query])
        k = side_by_hand(network, tokens, how, "k", head, key, parts[b][0, key])
        by_hand = scale * sum(x * y for x, y in zip(q, k, strict=True))
        assert float(found[a, b]) == pytest.approx(by_hand, rel=1e-5, abs=1e-5)  # angles are float32
    if name != "glm4-moe":  # it has biases
        assert not found[-1].values.any() and not found[:, -1].values.any()


def test_what_is_there_whatever_the_stream_is_is_a_part_of_its_own() -> None:
    network = build("gpt2")
    tokens = some_tokens(2)
    norm, attention = network.block(1).ln1, network.block(1).attn
    (w_q, b_q), (w_k, b_k) = attention.part("q"), attention.part("k")
    assert norm.bias is not None and b_q is not None and b_k is not None
    constant_q, constant_k = w_q[2] @ norm.bias + b_q[2], w_k[2] @ norm.bias + b_k[2]
    found = attention_attribution(network, tokens, "L1H2", key=3).value
    corner = float(constant_q @ constant_k) * attention.scale
    assert found.sel(query_part="L1.q_bias", key_part="L1.k_bias").values == pytest.approx(corner)
    k, q = recorded(network, tokens, "blocks.1.attn.hook_k", "blocks.1.attn.hook_q")
    row = torch.tensor(found.sel(query_part="L1.q_bias").sum("key_part").values)
    column = torch.tensor(found.sel(key_part="L1.k_bias").sum("query_part").values)
    assert_close(row, k[:, 3, 2] @ constant_q * attention.scale)
    assert_close(column, q[:, -1, 2] @ constant_k * attention.scale)


@pytest.mark.parametrize("name", ["bloom", "t5"])
def test_positions_that_add_to_scores_are_a_term_of_their_own(name: str) -> None:
    network, tokens = build(name), some_tokens(2)
    bias = network.score_bias
    assert bias is not None
    found = attention_attribution(network, tokens, "L1H2", query=6, key=1)
    places = torch.tensor([[6]]), torch.tensor([[1]])
    assert found.position.values == pytest.approx(float(bias(*places, torch.float64)[0, 2]))
    assert float(abs(found.position[0])) > 0.01
    assert not attention_attribution(build("gpt2"), tokens, "L1H2", key=1).position.values.any()


@pytest.mark.parametrize("name", MODELS)
def test_parts_have_the_names_of_the_config(name: str) -> None:
    network = network_of(name)
    for layer in (layer for layer in (0, 1) if splits(name, layer)):
        by_part, by_head = (
            run_steps(network, score_parts(network, Batch(some_tokens()), (layer, 1), 6, 6, by))
            for by in SPLITS
        )
        assert by_part.parts == labels_before_attention(network.config, layer, "sublayer")
        assert by_head.parts == labels_before_attention(network.config, layer, "head")


@over("heads", ["head", "width"])
def test_betas_of_the_norms_of_queries_and_keys_are_in_the_bias(heads: NormedHeads) -> None:
    network, tokens = perturbed(replace(CONFIGS["gpt2"], qk_norm=heads)), some_tokens(2)
    (scores,) = recorded(network, tokens, "blocks.1.attn.hook_attn_scores")
    found = attention_attribution(network, tokens, "L1H2", key=4)
    assert_close(torch.tensor(found.value.sum(("query_part", "key_part")).values), scores[:, 2, -1, 4])
    attention = network.block(1).attn
    assert attention.k_norm is not None and attention.k_norm.norm.bias is not None
    with torch.no_grad():
        attention.k_norm.norm.bias += 1.0
    moved = attention_attribution(network, tokens, "L1H2", key=4).value - found.value
    assert not moved.sel(key_part=["embed", "L0.attn", "L0.mlp"]).values.any()
    assert abs(moved.sel(key_part="L1.k_bias")).values.min() > 1e-6


@over("side, other", [("query", "key"), ("key", "query")])
@pytest.mark.parametrize(
    "name", ["gpt2", "llama-gqa", "gemma2", "post-norm", "olmo2", "macaron", "bloom", "gpt-oss"]
)
def test_what_heads_moved_from_each_token_sums_to_what_the_heads_add(
    name: str, side: str, other: str
) -> None:
    network, tokens = build(name), torch.tensor(PROMPT)
    found = attention_attribution(network, tokens, "L1H1", query=7, key=5, by="source")
    whole = found.value.sel({f"{side}_part": [f"L0H{h}" for h in range(4)]}).sum(f"{other}_part")
    by_source = found[f"by_{side}_source"]
    assert_close(torch.tensor(by_source.sum("source").values[:, 0]), torch.tensor(whole.values))
    (pattern,) = recorded(network, tokens, "blocks.0.attn.hook_pattern")
    place = {"query": 7, "key": 5}[side]
    assert ((pattern[0, :, place] == 0) == (torch.tensor(by_source.values[0, 0]) == 0)).all()


def test_what_a_head_moved_from_a_token_is_that_of_a_slow_loop() -> None:
    network, tokens, how = build("llama-gqa"), torch.tensor(PROMPT), BY_HAND["llama-gqa"]
    pattern, v, q = recorded(
        network, tokens, "blocks.0.attn.hook_pattern", "blocks.0.attn.hook_v", "blocks.1.attn.hook_rot_q"
    )
    found = attention_attribution(network, tokens, "L1H3", query=7, key=5, by="source").by_key_source
    out = network.block(0).attn.out.weight
    for head, source in itertools.product(range(4), range(9)):
        written = out[:, head * 10 : head * 10 + 10] @ v[0, source, head // 2] * pattern[0, head, 5, source]
        k = side_by_hand(network, tokens, how, "k", 3, 5, written)
        by_hand = sum(x * y for x, y in zip(q[0, 7, 3].tolist(), k, strict=True)) / math.sqrt(10)
        assert float(found[0, 0, head, source]) == pytest.approx(by_hand, rel=1e-5, abs=1e-5)


def test_the_planted_head_is_named_on_the_key_side_with_all_of_the_score() -> None:
    model = HookedTransformer.from_pretrained("groundtruth-induction")
    prompt = "abcdefabcdefabc"
    found = attention_attribution(model, prompt, "L1H2", key=10, by="head")
    by_key = found.value.sum("query_part")[0] / found.total[0]
    assert str(by_key.idxmax("key_part").item()) == "L0H1"
    assert float(by_key.max()) == pytest.approx(1, abs=0.02)
    assert float(abs(by_key.where(by_key.key_part != "L0H1")).max()) < 0.02
    path = attention_paths(model, prompt, "L1H2", key=10, top=1)
    assert path.path.values.tolist() == [["embed@15 x L0H1@10<9"]]
    assert float(path.share[0, 0]) == pytest.approx(1, abs=0.02)
    assert float(path.key_moved[0, 0] / path.value[0, 0]) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("by", ["part", "head", "source"])
def test_an_edit_of_an_earlier_head_is_in_its_parts(by: ScoreSplit) -> None:
    network, tokens = build("gpt2"), some_tokens(2)
    for change, site, factor in ((Zero(), "L0H2", 0.0), (Scale(0.5), "L0H2", 0.5)):
        edits = [Edit(site, change)]
        found = attention_attribution(network.edited(edits), tokens, "L1H1", key=3, by=by)
        (scores,) = recorded(network.edited(edits), tokens, "blocks.1.attn.hook_attn_scores")
        assert_close(torch.tensor(found.total.values), scores[:, 1, -1, 3])
        if by == "part":
            continue
        plain = attention_attribution(network, tokens, "L1H1", key=3, by=by)
        zeroed = not found.value.sel(query_part="L0H2").values.any()
        assert zeroed == (factor == 0)
        scales = [recorded(m, tokens, "blocks.1.ln1.hook_scale")[0] for m in (network, network.edited(edits))]
        ratio = (scales[0] / scales[1])[..., 0]
        both = torch.tensor(plain.value.sel(query_part="L0H2", key_part="embed").values)
        expected = both * factor * ratio[:, -1] * ratio[:, 3]
        assert_close(torch.tensor(found.value.sel(query_part="L0H2", key_part="embed").values), expected)


@over("site", ["blocks.1.attn.hook_q", "blocks.1.attn.hook_attn_scores", "blocks.1.hook_resid_pre"])
def test_a_score_that_is_not_what_the_stream_makes_of_it_is_refused(site: str) -> None:
    edits = [Edit(site, Scale(1.5))]
    with pytest.raises(IncompleteSumError, match="parts"):
        attention_attribution(build("gpt2").edited(edits), some_tokens(2), "L1H1", key=3)


@over("side", ["left", "right"])
@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "gemma2", "bloom", "bidirectional"])
def test_padding_changes_no_number(name: str, side: Side) -> None:
    rows = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1, 8, 2], [1, 4, 1, 4, 2, 1, 3]]
    network = build(name)
    together = attention_attribution(network, Batch.of(rows, side=side), "L1H1", key=3, by="source")
    paths = attention_paths(network, Batch.of(rows, side=side), "L1H1", key=3, top=4)
    for i, row in enumerate(rows):
        alone = attention_attribution(network, torch.tensor([row]), "L1H1", key=3, by="source")
        for each in ("value", "total", "position"):
            assert_close(torch.tensor(together[each].values[i]), torch.tensor(alone[each].values[0]))
        for each in ("by_query_source", "by_key_source"):
            mine, padded = alone[each].values[0], together[each].values[i]
            assert_close(torch.tensor(padded[..., : len(row)]), torch.tensor(mine))
            assert not padded[..., len(row) :].any()
        assert together["query"].values[i] == len(row) - 1
        assert (
            paths.path.values[i].tolist()
            == attention_paths(network, [row], "L1H1", key=3, top=4).path[0].values.tolist()
        )


def test_positions_may_be_one_for_each_prompt() -> None:
    network, tokens = build("llama-gqa"), some_tokens(3)
    together = attention_attribution(
        network, tokens, "L1H0", query=PerRow([5, -1, 4]), key=PerRow([2, 3, -6])
    )
    for i, (query, key) in enumerate([(5, 2), (8, 3), (4, 3)]):
        alone = attention_attribution(network, tokens[i : i + 1], "L1H0", query=query, key=key)
        assert_close(torch.tensor(together.value.values[i]), torch.tensor(alone.value.values[0]))
        assert (together["query"].values[i], together["key"].values[i]) == (query, key)


def test_half_precision_sums_within_its_own_rounding() -> None:
    for name, dtype in itertools.product(("gpt2", "gemma2", "olmo2"), (torch.float32, torch.bfloat16)):
        network = build(name, dtype)
        exact = attention_attribution(build(name), some_tokens(2), "L1H1", key=6, query=7, by="source")
        found = attention_attribution(network, some_tokens(2), "L1H1", key=6, query=7, by="source")
        wide = torch.tensor(found.value.values).double()
        assert_close(wide, torch.tensor(exact.value.values), dtype)


def test_paths_are_the_largest_pairs_with_their_heads_largest_source() -> None:
    network, tokens = build("gemma2"), some_tokens(3)
    found = attention_paths(network, tokens, "L1H2", query=7, key=5, top=6)
    pairs = attention_attribution(network, tokens, "L1H2", query=7, key=5, by="head").value
    for i, rank in itertools.product(range(3), range(6)):
        names = [str(found[f"{side}_part"].values[i, rank]) for side in ("query", "key")]
        value = float(found.value[i, rank])
        assert value == pytest.approx(float(pairs[i].sel(query_part=names[0], key_part=names[1])))
        assert abs(value) == pytest.approx(float(sorted(abs(pairs[i].values.flatten()))[-1 - rank]))
        assert float(found.share[i, rank]) == pytest.approx(value / float(found.total[i]))
        for side, name in zip(("query", "key"), names, strict=True):
            source, moved = int(found[f"{side}_source"][i, rank]), float(found[f"{side}_moved"][i, rank])
            assert (source == -1) == math.isnan(moved) == ("H" not in name)


def test_what_a_pair_moved_is_its_pair_without_the_other_sources() -> None:
    network, tokens = build("attention-only"), torch.tensor(PROMPT)
    parts = run_steps(network, score_parts(network, Batch(tokens), (1, 2), 7, 5, "source"))
    found = attention_paths(network, tokens, "L1H2", query=7, key=5, top=20)
    for rank in range(20):
        names = [str(found[f"{side}_part"].values[0, rank]) for side in ("query", "key")]
        for at, side in enumerate(("query", "key")):
            if "H" in names[at]:
                other = (parts.key, parts.query)[at][
                    0,
                    [*parts.parts, "bias"].index(
                        names[1 - at].replace("L1.q_bias", "bias").replace("L1.k_bias", "bias")
                    ),
                ]
                each = parts.sources[0][at, 0, int(names[at][-1])] @ other
                best = int(each.abs().argmax())
                assert int(found[f"{side}_source"][0, rank]) == best
                assert float(found[f"{side}_moved"][0, rank]) == pytest.approx(float(each[best]))


def test_frames_are_tidy_and_name_their_tokens() -> None:
    model = HookedTransformer(build("gpt2"))
    for by in ("part", "head", "source"):
        table = interp.frame(attention_attribution(model, some_tokens(2), "L1H1", key=3, by=by))
        assert len(table.columns) <= 12
        assert [*table.columns[:3]] == ["prompt", "query_part", "key_part"]
    result = attention_attribution(model, some_tokens(2), "a1.h1", key=3)
    assert result.attrs["part"] == "L1H1" and result.value.attrs["unit"] == "score"
    assert (
        "before the soft cap"
        in attention_attribution(build("gemma2"), some_tokens(2), "L1H1", key=7).attrs["score"]
    )


def test_what_cannot_be_split_is_refused_by_name() -> None:
    network, tokens = build("gpt2"), some_tokens(2)
    with pytest.raises(ValueError, match=r"a head of self-attention is required, such as L1H2, got L1\.mlp"):
        attention_attribution(network, tokens, "L1.mlp", key=0)
    with pytest.raises(IndexError, match="L7H0: layers are 0 to 1"):
        attention_attribution(network, tokens, "L7H0", key=0)
    with pytest.raises(IndexError, match="position 40 is required of every row, but row 0 has 9 tokens"):
        attention_attribution(network, tokens, "L1H0", key=40)
    with pytest.raises(ValueError, match="token 2 does not see token 5 in L1H0"):
        attention_attribution(network, tokens, "L1H0", query=2, key=5)
    with pytest.raises(ValueError, match="before L0H0 there is none"):
        attention_attribution(network, tokens, "L0H0", key=0, by="source")
    with pytest.raises(ValueError, match="holds query or key positions for 3 prompts, got 2 rows"):
        attention_attribution(network, tokens, "L1H0", key=PerRow([0, 1, 2]))
    with pytest.raises(ValueError, match="2 queries and 3 keys"):
        AttentionAttribution("L1H0", key=PerRow([0, 1, 2]), query=PerRow([5, 6])).bind(
            HookedTransformer(network)
        )
    with pytest.raises(ValueError, match="by must be one of 'part', 'head', 'source'"):
        attention_attribution(network, tokens, "L1H0", key=0, by="neuron")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one pair"):
        attention_paths(network, tokens, "L1H0", key=0, top=0)


def test_the_planted_previous_token_head_is_found_in_another_planted_model() -> None:
    """Every planted head of the second layer that reads a planted one through its keys says so."""
    for name, make in planted.PLANTED.items():
        found = make(0, 4)
        keys = [edge for edge in found.edges if edge.endswith((".k", ".q")) and "H" in edge.split("->")[0]]
        for edge in keys:
            sender, receiver = edge.split("->")
            side = "key" if receiver.endswith(".k") else "query"
            result = _strongest(found.model, found.clean, receiver.split(".")[0])
            marginal = abs(result.value.sum(f"{'query' if side == 'key' else 'key'}_part")).mean("prompt")
            assert sender in marginal.sortby(marginal, ascending=False)[f"{side}_part"].values[:3], (
                name,
                edge,
            )


def _strongest(network: Transformer, tokens: Tensor, head: str) -> xr.Dataset:
    """The score of the key that the last query of each prompt looks at most."""
    part = interp.Part.of(head)
    (scores,) = recorded(network, tokens, f"blocks.{part.layer}.attn.hook_attn_scores")
    return attention_attribution(
        network, tokens, part, key=PerRow(scores[:, part.index, -1].argmax(-1).tolist()), by="head"
    )


@pytest.mark.parametrize("name", pairs.CONFIGS)
def test_a_decoder_that_attends_to_a_memory_has_its_heads_as_parts(name: str) -> None:
    network = pairs.model(name)
    given = HookedEncoderDecoder(network).given(pairs.SOURCE, pairs.TARGET)
    decoder = HookedTransformer(network.decoder)
    found = attention_attribution(decoder, given, "L2H1", query=6, key=4, by="source")
    site = "blocks.2.attn.hook_attn_scores"
    scores = interp.observe(decoder, given, [Read(site)]).trace[Read(site)]
    whole = found.value.sum(("query_part", "key_part")) + found.position
    assert_close(torch.tensor(whole.values), scores[:, 1, 6, 4])
    assert {"L0X0", "L1X3", "L1H2"} <= set(found.key_part.values.tolist())
    heads = found.value.sel(key_part=[f"L{layer}H{h}" for layer in (0, 1) for h in range(4)]).sum(
        "query_part"
    )
    by_source = torch.tensor(found.by_key_source.sum("source").values).flatten(1)
    assert_close(by_source, torch.tensor(heads.values))
    with pytest.raises(ValueError, match="a head of self-attention is required, such as L1H2, got L2X1"):
        attention_attribution(decoder, given, "L2X1", key=0)


def test_wrapped_networks_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="not so of a wrapped network's own code"):
        attention_attribution(wrapped("smollm3"), [[1, 2, 3]], "L1H0", key=0)
