"""Flow routes: shares equal a loop over the definition and sum to 1; routes equal a walk edge by edge."""

import functools
import importlib
import itertools
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from torch import Tensor

from interp import Edit, HookedTransformer
from interp.data.batch import Batch
from interp.edits import Add, Zero
from interp.lab import Differential, Macaron
from interp.model import Read
from interp.model.parts import Part
from interp.model.weights import Weights
from interp.passes.observe import observe
from interp.tokens import flow_routes, routes
from interp.tokens.flow_routes import BlockShares, why_no_routes
from interp.tokens.mixing import SourceSplit
from tests.configs import CONFIGS, build, some_tokens
from tests.loops import over
from tests.tokens.edited import without
from tests.tolerances import assert_close

PLAIN = tuple(
    name for name, config in CONFIGS.items() if not config.norms_sum and "mlp_before" not in config.mlps
)
N = 5


@functools.cache
def found(name: str) -> xr.Dataset:
    return flow_routes(HookedTransformer(build(name)), some_tokens(2, N))


def share(parts: dict[object, Tensor], whole: Tensor) -> dict[object, float]:
    """The definition, one part at a time."""
    size = float(whole.abs().sum())
    near = {key: max(0.0, size - float((whole - part).abs().sum())) for key, part in parts.items()}
    return {key: value / sum(near.values()) for key, value in near.items()}


def block_parts(
    name: str, layer: int, row: int, query: int
) -> tuple[dict[object, Tensor], Tensor, Tensor | None]:
    """Everything that is added to the stream after attention, from the weights; that stream; what the MLP adds."""
    model, config = build(name), CONFIGS[name]
    sites = ["hook_resid_pre", "attn.hook_pattern", "hook_attn_out"] + ["hook_mlp_out"] * (
        config.mlp is not None
    )
    trace = observe(model, Batch(some_tokens(2, N)), [Read(f"blocks.{layer}.{s}") for s in sites]).trace
    x, pattern, added = (trace[f"blocks.{layer}.{s}"] for s in sites[:3])
    block, w = model.block(layer), Weights(model).layer(layer)
    normed, group = block.reading(block.ln1)(x), config.n_heads // config.kv_heads
    bare: dict[object, Tensor] = {"attn_bias": w.b_O}
    for head, key in itertools.product(range(config.n_heads), range(N)):
        value = normed[row, key] @ w.W_V[head // group] + w.b_V[head // group]
        bare[head, key] = pattern[row, head, query, key] * (value @ w.W_O[head])
    if block.ln1_post is not None:  # RMSNorm, whose only effect on a part is a factor per coordinate
        scale = block.ln1_post.scale(torch.stack(list(bare.values())).sum(0))
        bare = {key: part / scale * block.ln1_post.gamma for key, part in bare.items()}
    parts = {key: part * config.residual_scale for key, part in bare.items()} | {"resid": x[row, query]}
    assert_close(torch.stack(list(parts.values())).sum(0), (x + added)[row, query])
    mlp = trace[f"blocks.{layer}.hook_mlp_out"][row, query] if config.mlp else None
    return parts, (x + added)[row, query], mlp


@pytest.mark.parametrize("name", PLAIN)
def test_shares_equal_the_definition_part_by_part(name: str) -> None:
    result, config = found(name), CONFIGS[name]
    for layer, row, query in itertools.product(range(2), range(2), (0, N - 1)):
        parts, middle, mlp = block_parts(name, layer, row, query)
        at = result.isel(prompt=row, layer=layer, query=query)
        if mlp is not None and config.parallel:
            parts, middle = parts | {"mlp": mlp}, middle + mlp
        expected = share(parts, middle)
        for head, key in itertools.product(range(config.n_heads), range(N)):
            assert float(at.value[head, key]) == pytest.approx(expected[head, key], abs=1e-12)
        for part in expected.keys() & {"attn_bias", "resid", "mlp"}:
            assert float(at[str(part)]) == pytest.approx(expected[part], abs=1e-12)
        if mlp is not None and not config.parallel:
            last = share({"resid_mid": middle, "mlp": mlp}, middle + mlp)
            assert {part: float(at[str(part)]) for part in last} == pytest.approx(last, abs=1e-12)


@over("name", PLAIN)
def test_the_shares_of_every_sum_are_not_negative_and_sum_to_one(name: str) -> None:
    result, parallel = found(name), CONFIGS[name].parallel
    assert all(bool((result[part] >= 0).all()) for part in result)
    first = result.value.sum(("head", "key")) + result.resid + result.attn_bias
    assert ("resid_mid" in result) == (CONFIGS[name].mlp is not None and not parallel)
    assert_close(
        torch.tensor((first + result.mlp if parallel else first).values), torch.ones(2, 2, N).double()
    )
    if "resid_mid" in result:
        assert_close(torch.tensor((result.mlp + result.resid_mid).values), torch.ones(2, 2, N).double())


def test_nothing_comes_from_a_position_that_is_not_seen() -> None:
    seen = torch.tensor(found("window").value.values)
    offset = torch.arange(N)[:, None] - torch.arange(N)
    assert not seen[..., (offset < 0) | (offset >= 4)].any()
    assert (torch.tensor(found("bidirectional").value.values)[..., offset < 0] > 0).any()


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "bidirectional"])
def test_the_numbers_do_not_depend_on_how_many_sources_are_held_at_a_time(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = found(name)
    monkeypatch.setattr(importlib.import_module("interp.tokens.flow_routes"), "CHUNK", 1)
    xr.testing.assert_allclose(
        flow_routes(HookedTransformer(build(name)), some_tokens(2, N)), whole, rtol=1e-12
    )


def test_part_against_the_sum_gets_nothing_and_others_what_they_bring() -> None:
    """y = x + f + b with x = (4, 0), f = (-1, 0), b = (0, 1): only x and b bring (3, 1) closer, by 2 and by 1."""
    parts = SourceSplit(
        pattern=torch.ones(1, 1, 1, 1), value=torch.ones(1, 1, 1, 1), out=torch.tensor([[[-1.0, 0.0]]]),
        scale=torch.ones(1, 1, 1), stream=torch.tensor([[[4.0, 0.0]]]), constant=torch.tensor([[[0.0, 1.0]]]),
    )  # fmt: skip
    one = BlockShares.of(parts, None, parallel=False, causal=True)
    assert one.value.item() == 0
    assert (one.resid.item(), one.attn_bias.item()) == pytest.approx((2 / 3, 1 / 3))


def test_where_no_part_brings_the_sum_closer_the_stream_keeps_it_all() -> None:
    """x = -f, so that y = 0: nothing can be closer to it than nothing."""
    parts = SourceSplit(
        pattern=torch.ones(1, 1, 1, 1), value=torch.ones(1, 1, 1, 1), out=torch.tensor([[[-1.0, 2.0]]]),
        scale=torch.ones(1, 1, 1), stream=torch.tensor([[[1.0, -2.0]]]), constant=torch.zeros(1, 1, 2),
    )  # fmt: skip
    one = BlockShares.of(parts, torch.zeros(1, 1, 2), parallel=False, causal=True)
    assert one.resid_mid is not None and one.mlp is not None
    assert [x.item() for x in (one.value, one.attn_bias, one.resid, one.mlp, one.resid_mid)] == [
        0,
        0,
        1,
        0,
        1,
    ]


def walked(name: str, threshold: float, pos: int) -> set[tuple[object, ...]]:
    """Edge by edge, backwards from the final stream, by recursion over nodes."""
    one, config = found(name).isel(prompt=0), CONFIGS[name]
    edges: set[tuple[object, ...]] = set()

    def top(layer: int, at: int) -> None:
        if layer < 0:
            return
        here = one.isel(layer=layer, query=at)
        if config.mlp is None:
            middle(layer, at)
            return
        if float(here.mlp) >= threshold:
            edges.add((f"L{layer}.mlp", at, at))
            top(layer - 1, at) if config.parallel else middle(layer, at)
        if config.parallel:
            middle(layer, at)
        elif float(here.resid_mid) >= threshold:
            edges.add((f"L{layer}.resid_mid", at, at))
            middle(layer, at)

    def middle(layer: int, at: int) -> None:
        here = one.isel(layer=layer, query=at)
        if float(here.resid) >= threshold:
            edges.add((f"L{layer}.resid", at, at))
            top(layer - 1, at)
        for head, key in itertools.product(range(config.n_heads), range(N)):
            if float(here.value[head, key]) >= threshold:
                edges.add((f"L{layer}H{head}", at, key))
                top(layer - 1, key)

    top(config.n_layers - 1, pos)
    return edges


@pytest.mark.parametrize("name", ["gpt2", "parallel", "attention-only", "gemma2"])
@over("threshold, pos", [(0.02, -1), (0.05, 2), (0.3, -1), (1.0, -1)])
def test_routes_are_the_edges_met_on_the_way_back(name: str, threshold: float, pos: int) -> None:
    table = routes(found(name), threshold=threshold, pos=pos)
    got = list(zip(table.part, table["query"], table.key, strict=True))
    assert len(set(got)) == len(got)
    assert set(got) == walked(name, threshold, pos % N)
    assert table.layer.is_monotonic_decreasing
    one = found(name).isel(prompt=0)
    for row in table.itertuples():
        part, at = Part.of(row.part), {"layer": row.layer, "query": row.query}
        assert part.layer == row.layer
        at |= {} if part.index is None else {"head": part.index, "key": row.key}
        kind = "value" if part.kind == "head" else row.part.removeprefix(f"L{row.layer}.")
        assert row.share == float(one[kind].isel(at))
        assert (row.query_token, row.key_token) == tuple(one.token.values[[row.query, row.key]])


def test_routes_of_a_padded_prompt_are_those_of_the_prompt_alone() -> None:
    model, tokens = HookedTransformer(build("gpt2")), some_tokens(1, N)[0].tolist()
    both = flow_routes(model, Batch.of([[1, 2, 3, 4, 5, 6, 7, 8], tokens]))
    alone, among = routes(found("gpt2"), threshold=0.03), routes(both, threshold=0.03, prompt=1)
    shift = int(both.resid[1, 0].notnull().values.argmax())
    moved = among.assign(query=among["query"] - shift, key=among.key - shift)
    pd.testing.assert_frame_equal(moved, alone)


def test_the_routes_of_a_planted_induction_circuit_are_that_circuit() -> None:
    """Built by hand: head 0.1 writes the token before; head 1.2 copies what followed the earlier `c`, a `d`."""
    model = HookedTransformer.from_pretrained("groundtruth-induction")
    table = routes(flow_routes(model, "abcdefghabc"), threshold=0.01)
    moved = table[table.part.str.contains("H")]
    edges = set(zip(moved.part, moved["query"], moved.key, strict=True))
    first_c, first_d, last = 3, 4, 11  # after the start token
    assert edges == {("L1H2", last, first_d), ("L0H1", first_d, first_c), ("L0H1", last, last - 1)}
    copied = moved[moved.part == "L1H2"].iloc[0]
    assert (copied.query_token, copied.key_token) == ("c", "d")


def test_models_whose_stream_is_not_a_plain_sum_of_parts_are_refused() -> None:
    for name in ("post-norm", "masked-lm"):
        with pytest.raises(ValueError, match="norms the sum itself"):
            flow_routes(HookedTransformer(build(name)), some_tokens())
    assert why_no_routes(CONFIGS["gpt2"]) is None
    assert "two MLPs" in str(why_no_routes(replace(CONFIGS["gpt2"], block=Macaron())))
    assert "memory" in str(why_no_routes(replace(CONFIGS["gpt2"], cross_attention=True)))
    assert "splitting a block by source requires" in str(
        why_no_routes(replace(CONFIGS["gpt2"], mixer=Differential(), qk_norm=None))
    )


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "gemma2", "parallel"])
@over("part", ["L0.mlp", "L0.attn", "L0H1", "L1H2"])
def test_an_edited_model_is_the_model_with_those_weights(name: str, part: str) -> None:
    model, edits = HookedTransformer(build(name)), [Edit(part, Zero())]
    changed, expected = flow_routes(model.edited(edits), some_tokens(2, N)), without(name, part)
    xr.testing.assert_allclose(changed, flow_routes(expected, some_tokens(2, N)), rtol=1e-9, atol=1e-11)
    assert changed.identical(flow_routes(model.edited(edits), some_tokens(2, N)))
    assert not np.allclose(changed.resid, found(name).resid)


def test_a_planted_circuit_without_its_first_head_has_no_route_through_it() -> None:
    model = HookedTransformer.from_pretrained("groundtruth-induction")
    table = routes(flow_routes(model.edited(Edit("L0H1", Zero())), "abcdefghabc"), threshold=0.01)
    assert not table.part.isin(["L0H1", "L1H2"]).any()


@over("where", ["L1.resid", "L0.resid_mid", "L1H2", "L1.attn"])
def test_what_no_part_writes_is_refused_by_name(where: str) -> None:
    edit = Edit(where, Add(torch.arange(6 if where == "L1H2" else 24).double()))
    with pytest.raises(ValueError, match=rf"(the edit of|the edits of) {where}".replace(".", r"\.")):
        flow_routes(HookedTransformer(build("gpt2")).edited(edit), some_tokens())


@pytest.mark.parametrize("threshold", [0.0, -0.1, 1.5, float("nan")])
def test_a_threshold_that_is_no_share_is_refused(threshold: float) -> None:
    with pytest.raises(ValueError, match=r"threshold in \(0, 1\]"):
        routes(found("gpt2"), threshold=threshold)


def test_shares_that_are_no_numbers_lead_nowhere() -> None:
    shares = found("gpt2")
    with pytest.raises(ValueError, match=r"value of shares must have .* finite numbers, got 0"):
        routes(shares.assign(value=shares.value * np.nan))


@pytest.mark.parametrize("pos", [N, -N - 1])
def test_a_position_that_the_prompt_lacks_is_refused(pos: int) -> None:
    with pytest.raises(IndexError, match="a prompt of 5 tokens"):
        routes(found("gpt2"), pos=pos)
