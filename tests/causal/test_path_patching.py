"""Path patching equals its definition run one sender at a time with ordinary edits, and finds the planted circuits."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor

from interp import HookedTransformer, Read, observe
from interp.causal import EdgeGraph, patch, path_patch
from interp.circuits import Edge
from interp.data.batch import Batch
from interp.model import Tap, Transformer
from interp.model.config import ModelConfig
from interp.model.tap import Edit
from interp.passes.metrics import kl_divergence, logit_difference, of_logits
from interp.zoo.planted import PLANTED
from tests.causal.slow_edges import ANSWER, WRONG, difference, exact, writes
from tests.configs import CONFIGS, perturbed, some_tokens
from tests.tiny import hooked
from tests.tolerances import assert_close

CLEAN, CORRUPT = some_tokens(3, 7), some_tokens(3, 7, seed=1)
METRIC = logit_difference(ANSWER, WRONG)
SHAPES = (
    "gpt2",
    "llama-gqa",
    "parallel",
    "gemma2",
    "attention-only",
    "bidirectional",
    "gpt-oss",
    "post-norm",
    "macaron",
)
Values = Mapping[str, Tensor]


@functools.cache
def deep(name: str) -> Transformer:
    """Three layers, so that there are heads to hold and MLPs to pass on between sender and receiver."""
    return perturbed(replace(CONFIGS[name], n_layers=3))


def patched(name: str, receivers: str | Sequence[str], direction: str = "noise", **how: object) -> xr.Dataset:
    given: dict = {"metric": METRIC, "direction": direction} | how
    return path_patch(HookedTransformer(deep(name)), CLEAN, CORRUPT, receivers, **given)


def by_sender(table: xr.Dataset, name: str = "each") -> dict[str, Tensor]:
    """Every sender's values."""
    return {str(part): torch.from_numpy(table[name].sel(part=part).values) for part in table.part.values}


# the definition, one sender after the other


def site_of(sender: str) -> tuple[str, int | None]:
    if sender == "L0.resid":
        return "blocks.0.hook_resid_pre", None
    layer, _, mlp = sender[1:].partition(".")
    if mlp in ("mlp", "mlp_before"):
        return f"blocks.{layer}.hook_{mlp}_out", None
    layer, head = sender[1:].split("H")
    return f"blocks.{layer}.attn.hook_z", int(head)


def input_of(receiver: str) -> tuple[str, int | None]:
    node, part = receiver[1:].split(".")
    if part in ("mlp", "mlp_before"):
        return f"blocks.{node}.hook_{part}_in", None
    layer, head = node.replace("G", "H").split("H")
    return f"blocks.{layer}.attn.hook_{part}", int(head)


def set_to(value: Tensor, head: int | None, pos: int | None = None) -> Callable[[Tensor], Tensor]:
    def change(x: Tensor) -> Tensor:
        columns = slice(None) if pos is None else slice(pos, pos + 1)
        place = (slice(None), columns) if head is None else (slice(None), columns, head)
        x[place] = value[place]
        return x

    return change


@functools.cache
def recorded(model: Transformer, tokens: Tensor) -> Values:
    kinds = ["hook_resid_pre", "attn.hook_z", *(f"hook_{mlp}_out" for mlp in model.config.mlps)]
    reads = [Read(f"blocks.{i}.{kind}") for i in range(model.config.n_layers) for kind in kinds]
    trace = observe(model, Batch(tokens), reads).trace
    return {read.site: trace[read] for read in reads}


@functools.cache
def untouched(model: Transformer, tokens: Tensor) -> Tensor:
    return difference(model(tokens))


def slow(
    model: Transformer,
    runs: tuple[Tensor, Tensor],
    sender: str,
    receivers: Sequence[str],
    *,
    freeze_mlps: bool = False,
    pos: int | None = None,
) -> Tensor:
    """The change of the metric in every row of the first run; values of the second run are patched into it."""
    own, other = runs
    here, there = recorded(model, own), recorded(model, other)
    held = [s for s in here if s.endswith("hook_z") or (freeze_mlps and ".hook_mlp_" in s)]
    edits = [Edit(site, set_to(here[site], None)) for site in held]
    site, head = site_of(sender)
    edits.append(Edit(site, set_to(there[site], head, pos)))
    base = untouched(model, own)
    if list(receivers) == ["logits"]:
        return difference(model(own, Tap(edits=edits))) - base
    inputs = [input_of(receiver) for receiver in receivers]
    seen = observe(model, Batch(own), [Read(s) for s in {s for s, _ in inputs}], edits).trace
    onwards = [Edit(s, set_to(seen[Read(s)], h)) for s, h in inputs]
    return difference(model(own, Tap(edits=onwards))) - base


def receiver_sets(config: ModelConfig) -> list[list[str]]:
    shared = "H" if config.kv_heads == config.n_heads else "G"
    sets = [["logits"], ["L2H1.q"], [f"L2{shared}0.v", f"L2{shared}0.k", "L1H3.q"]]
    sets += [["L1.mlp"], ["L2.mlp", "L1.mlp", "L2H0.q"]] if config.mlp is not None else []
    return sets + ([["L2.mlp_before"], ["L1.mlp_before", "L2H1.q"]] if "mlp_before" in config.mlps else [])


@pytest.mark.parametrize(
    ("name", "direction"),
    [*((name, "noise") for name in SHAPES), ("gpt2", "denoise"), ("llama-gqa", "denoise")],
)
def test_every_effect_is_that_of_the_definition(name: str, direction: str) -> None:
    model = deep(name)
    runs = (CLEAN, CORRUPT) if direction == "noise" else (CORRUPT, CLEAN)
    for receivers in receiver_sets(model.config):
        found = by_sender(patched(name, receivers, direction=direction))
        for sender, each in found.items():
            assert_close(each, slow(model, runs, sender, receivers))
        assert any(bool(each.abs().max() > 1e-4) for each in found.values())


def test_one_position_at_a_time() -> None:
    for receivers in (["logits"], ["L2G1.k"]):
        for sender, each in by_sender(patched("llama-gqa", receivers, by=("part", "pos"))).items():
            for pos in (0, 3, 6):
                wanted = slow(deep("llama-gqa"), (CLEAN, CORRUPT), sender, receivers, pos=pos)
                assert_close(each[:, pos], wanted)


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "post-norm", "macaron"])
def test_with_mlps_held_as_well(name: str) -> None:
    for receivers in (["logits"], ["L2H1.q", "L2.mlp"]):
        for sender, each in by_sender(patched(name, receivers, freeze_mlps=True)).items():
            wanted = slow(deep(name), (CLEAN, CORRUPT), sender, receivers, freeze_mlps=True)
            assert_close(each, wanted)


# closed forms


def added(model: Transformer) -> Values:
    """What each sender's value of the corrupted run adds to the stream that is read after it in the clean one."""
    here, there = writes(model, CLEAN), writes(model, CORRUPT)
    change = {name: there[name] - here[name] for name in here}
    if model.config.norm_place != "sandwich":
        return change
    z = recorded(model, CORRUPT)  # the norm of the heads' sum is computed anew, whatever their shares
    for layer in range(model.config.n_layers):
        read = Read(f"blocks.{layer}.hook_attn_out")
        before = observe(model, Batch(CLEAN), [read]).trace[read]
        for head in range(model.config.n_heads):
            site = f"blocks.{layer}.attn.hook_z"
            edit = Edit(site, set_to(z[site], head))
            change[f"L{layer}H{head}"] = observe(model, Batch(CLEAN), [read], [edit]).trace[read] - before
    return change


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "gemma2", "macaron"])
def test_direct_path_is_the_senders_change_added_where_the_receiver_reads(name: str) -> None:
    model = deep(name)
    change, graph = added(model), EdgeGraph.of(model.config)
    for receiver in [*graph.receivers[graph.inputs(2)][1::5], "L1.mlp", "logits"]:
        found = by_sender(patched(name, receiver, freeze_mlps=True))
        seen = int(graph.visible[graph.receivers.index(receiver)])
        assert set(found) == set(graph.senders[:seen])
        for sender, each in found.items():
            assert_close(each, exact(model, CLEAN, f"{sender}->{receiver}", change))


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_what_has_no_heads_after_it_is_activation_patching(name: str) -> None:
    hooked, last = HookedTransformer(deep(name)), {"layer": 2}
    for direction in ("noise", "denoise"):
        table = patched(name, "logits", direction)
        for site, parts in (("z", [f"L2H{h}" for h in range(4)]), ("mlp_out", "L2.mlp")):
            by = ["layer", *["head"] * (site == "z")]
            plain = patch(hooked, CLEAN, CORRUPT, site, metric=METRIC, direction=direction, by=by)  # type: ignore[arg-type]
            for variable in ("value", "low", "high", "n", "normalised", "each", "changed"):
                mine, theirs = table[variable].sel(part=parts), plain[variable].sel(last)
                np.testing.assert_allclose(mine.values, theirs.values, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("circuit", "receiver", "senders"),
    [
        ("two_hop", "L1H0.v", {"L0H2"}),
        ("two_hop", "logits", {"L1H0"}),
        ("induction", "L1H2.k", {"L0H1"}),
        ("induction", "L1H2.q", {"L0.resid"}),
        ("induction", "logits", {"L1H2"}),
        ("fact_memory", "L1.mlp", {"L0H1", "L0.resid"}),
        ("backup", "L1H2.q", {"L0H3"}),
        ("backup", "logits", {"L0H3", "L1H1"}),
    ],
)
def test_exactly_the_planted_senders_come_out(circuit: str, receiver: str, senders: set[str]) -> None:
    planted = PLANTED[circuit]()
    metric = logit_difference(planted.answer, planted.wrong)
    table = path_patch(
        HookedTransformer(planted.model), planted.clean, planted.corrupt, receiver, metric=metric, direction="noise",
        freeze_mlps=True,
    )  # fmt: skip
    total = float((table.clean - table.corrupt).mean())
    found = {name: abs(float(each.mean())) / total for name, each in by_sender(table).items()}
    assert {name for name, share in found.items() if share > 0.2} == senders
    assert max([share for name, share in found.items() if name not in senders]) < 0.02
    shown = [Edge.of(edge) for edge in planted.edges - planted.hidden]
    assert {str(edge.sender) for edge in shown if str(edge).endswith(f"->{receiver}")} == senders


# the table


def test_normalised_counts_from_the_corrupted_run_to_the_clean_one() -> None:
    for direction, start in (("noise", "clean"), ("denoise", "corrupt")):
        table = patched("gpt2", "L2H1.q", direction)
        total = table.clean.mean() - table.corrupt.mean()
        moved = table[start].mean() + table["each"].mean("prompt") - table.corrupt.mean()
        xr.testing.assert_allclose(table.normalised, moved / total)
    assert_close(torch.tensor(table.clean.values), difference(deep("gpt2")(CLEAN)))
    assert_close(torch.tensor(table.corrupt.values), difference(deep("gpt2")(CORRUPT)))


@pytest.mark.parametrize("metric", [kl_divergence(), of_logits(lambda x: x[:, -1, 2])])
@pytest.mark.parametrize("direction", ["noise", "denoise"])
def test_comparing_metrics_compare_with_the_clean_run(metric: object, direction: str) -> None:
    model = HookedTransformer(deep("gpt2"))
    table = path_patch(model, CLEAN, CORRUPT, metric=metric, direction=direction)  # type: ignore[arg-type]
    plain = patch(model, CLEAN, CORRUPT, "z", metric=metric, direction=direction)  # type: ignore[arg-type]
    for variable in ("clean", "corrupt"):
        xr.testing.assert_allclose(table[variable], plain[variable])
    found = table["each"].sel(part=[f"L2H{h}" for h in range(4)])
    np.testing.assert_allclose(found.values, plain["each"].sel(layer=2).values, rtol=1e-9, atol=1e-12)


def test_a_sender_that_is_alike_in_both_runs_changes_nothing_and_says_so() -> None:
    corrupt = torch.cat((CLEAN[:, :4], CORRUPT[:, 4:]), 1)
    model = HookedTransformer(deep("gpt2"))
    for receiver in ("logits", "L2H1.k"):
        table = path_patch(
            model, CLEAN, corrupt, receiver, metric=METRIC, direction="noise", by=("part", "pos")
        )
        changed = table.changed
        assert not changed.sel(pos=slice(0, 3)).any() and changed.sel(pos=6).all()
        assert changed.sel(pos=4, part=changed.layer < 2).all(), (
            "the last block does not carry it to the last token"
        )
        assert (table["each"].sel(pos=slice(0, 3)) == 0).all()


def test_only_the_senders_asked_for_in_their_order() -> None:
    table = patched("gpt2", "logits", senders=["m1", (0, 2), "L0.resid"])
    whole = patched("gpt2", "logits")
    assert table.part.values.tolist() == ["L1.mlp", "L0H2", "L0.resid"]
    assert (table.layer.values.tolist(), table.kind.values.tolist()) == ([1, 0, 0], ["mlp", "head", "resid"])
    xr.testing.assert_allclose(table.value, whole.value.sel(part=table.part))
    assert whole.part.values.tolist() == list(EdgeGraph.of(deep("gpt2").config).senders)
    assert "mlp" not in patched("attention-only", "logits").kind
    assert set(patched("gpt2", "L1H0.q").layer.values) == {0}, "no sender without a way"


def test_padded_pairs_have_the_numbers_of_each_alone() -> None:
    model = hooked()
    clean = ["Mary and John gave", "The cat sat on the mat", "Paris is France"]
    corrupt = ["John and Mary gave", "The dog sat on the mat", "Paris is Italy"]
    sizes = [[len(model.text.ids(text)) for text in texts] for texts in (clean, corrupt)]
    kept = [i for i in range(3) if sizes[0][i] == sizes[1][i]]
    assert len({sizes[0][i] for i in kept}) > 1
    metric = logit_difference(3, 4)
    whole = path_patch(model, [clean[i] for i in kept], [corrupt[i] for i in kept], "L1H0.q", metric=metric)
    for row, i in enumerate(kept):
        alone = path_patch(model, [clean[i]], [corrupt[i]], "L1H0.q", metric=metric)
        np.testing.assert_allclose(whole["each"][row], alone["each"][0], rtol=1e-9, atol=1e-12)
    by_pos = ("part", "pos")
    whole = path_patch(model, [clean[i] for i in kept], [corrupt[i] for i in kept], metric=metric, by=by_pos)
    for row, i in enumerate(kept):
        alone = path_patch(model, [clean[i]], [corrupt[i]], metric=metric, by=by_pos)["each"][0]
        mine, n = whole["each"][row], alone.sizes["pos"]
        np.testing.assert_allclose(mine.isel(pos=slice(n)), alone, rtol=1e-9, atol=1e-12)
        assert bool(mine.isel(pos=slice(n, None)).isnull().all())


@pytest.mark.parametrize(
    ("name", "how", "error", "message"),
    [
        ("gpt2", {"receivers": "L2H9.q"}, IndexError, "L2H9.q: the index of a query is 0 to 3"),
        ("gpt2", {"receivers": "L3H0.q"}, IndexError, "layers are 0 to 2"),
        ("gpt2", {"receivers": "L2H0"}, KeyError, "L2H0 is no receiver of paths.*nearest: L2H0"),
        ("llama-gqa", {"receivers": "L2H0.k"}, KeyError, "this head's are L2G0.k"),
        ("gpt2", {"receivers": ["logits", "L1.mlp"]}, ValueError, "or 'logits' alone, got"),
        ("gpt2", {"receivers": []}, ValueError, "at least one"),
        ("gpt2", {"receivers": "L1H0.q", "senders": ["L1H1"]}, ValueError, "L1H1 has no way to L1H0.q"),
        ("gpt2", {"receivers": "L1.mlp", "senders": []}, ValueError, "at least one sender"),
        ("gpt2", {"receivers": "L1.mlp", "senders": ["L0H1", (0, 1)]}, ValueError, "none twice"),
        ("gpt2", {"receivers": "L1.mlp", "senders": ["z1"]}, KeyError, "no part 'z1'"),
        ("gpt2", {"receivers": "L1.mlp", "senders": ["embed"]}, KeyError, "embed is no sender of paths"),
        ("gpt2", {"receivers": "logits", "by": ("pos",)}, KeyError, "'part' is required in `by`"),
        ("gpt2", {"receivers": "logits", "by": "part"}, ValueError, "write by=\\('part',\\)"),
        (
            "gpt2",
            {"receivers": "logits", "direction": "both"},
            ValueError,
            "'denoise' or 'noise', got 'both'",
        ),
    ],
)
def test_what_has_no_meaning_is_refused(name: str, how: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        patched(name, **how)


def test_cross_attention_and_constant_metrics_are_refused() -> None:
    crossed = HookedTransformer(Transformer(replace(CONFIGS["gpt2"], cross_attention=True)))
    with pytest.raises(ValueError, match="this model also has cross-attention"):
        path_patch(crossed, CLEAN, CORRUPT, metric=METRIC)
    constant = of_logits(lambda x: x[:, -1, 0] * 0 + 1, name="one")
    with pytest.raises(ValueError, match="one is 1 for clean and corrupted runs alike"):
        path_patch(HookedTransformer(deep("gpt2")), CLEAN, CORRUPT, metric=constant)
