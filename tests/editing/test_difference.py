"""Exchanged parts: every parameter once, the numbers of a loop over copied state dicts, edits found where they are."""

import copy
import functools
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import xarray as xr
from torch import Tensor

import interp
from interp import Batch, Edit, HookedTransformer, Read
from interp.editing import (
    FineTuning,
    Rome,
    WeightEdit,
    diff,
    diff_interactions,
    difference,
    exchange,
    finetune_edit,
    gradient_edit,
    key_moment,
    rome_edit,
    shift_edit,
)
from interp.editing.exchange import pieces_of
from interp.edits import Set, Zero
from interp.metrics import Metric, kl_divergence, logit_difference, next_token_loss
from interp.model import NoNorm, NoPosition, Transformer, Weights
from interp.model.parts import Part
from interp.weights.matrices import matrix_place
from tests.batches import in_batches
from tests.configs import CONFIGS, build, perturbed, some_tokens
from tests.loops import over
from tests.mixers import MIXERS, build_mixed
from tests.tiny import CORPUS, hooked
from tests.tolerances import assert_close, student95

GRAINS = ("sublayer", "head")
PROMPT = "The capital of France is"
WITH_LOGITS = tuple(name for name, config in CONFIGS.items() if config.unembed)


@functools.cache
def other(name: str) -> Transformer:
    """Another model of the config, all of whose parameters differ."""
    torch.manual_seed(1)
    return perturbed(CONFIGS[name], seed=zlib.crc32(name.encode()) + 1)


@pytest.mark.parametrize("at_once", [1, 30, 2**22])
def test_length_of_a_change_is_that_of_all_numbers_in_any_pieces(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "AT_ONCE", at_once)
    one, two = build("gpt2"), other("gpt2")
    owned = pieces_of(one, "head")
    found = exchange.changes(one, two, [piece for pieces in owned.values() for piece in pieces])
    for piece, change in found.items():
        mine, its = (piece.of(net.get_parameter(piece.parameter)).double() for net in (one, two))
        expected = torch.stack(((its - mine).norm(), mine.norm())).square()
        torch.testing.assert_close(change.squares, expected.detach(), rtol=1e-12, atol=0)


def ragged() -> Batch:
    """Rows of 9, 6 and 4 tokens."""
    keep = torch.arange(9)[None] < torch.tensor([9, 6, 4])[:, None]
    return Batch(some_tokens(3, 9), keep).with_answers(torch.tensor([3, 4, 5]), torch.tensor([6, 7, 8]))


def changed_copy(model: HookedTransformer, *edits: WeightEdit) -> HookedTransformer:
    """The model with these edits for good."""
    found = HookedTransformer(copy.deepcopy(model.transformer), model.text.tokenizer)
    found.transformer.tie()
    with torch.no_grad():
        for edit in edits:
            weight = matrix_place(found.transformer, edit.name).in_(found.transformer)
            weight += edit.dense.to(weight.dtype)
    return found


def with_entries(base: Transformer, tuned: Transformer, names: list[str]) -> Transformer:
    """A copy of the base whose state dict has these entries of the tuned model."""
    found = copy.deepcopy(base)
    found.tie()
    state = {name: tuned.state_dict()[name] for name in names}
    missing = found.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys
    return found


def entries(network: Transformer, part: str) -> list[str]:
    """The entries of the state dict that a sublayer, a norm or a part outside the blocks is made of."""
    prefix = re.sub(r"^L(\d+)\.", r"blocks.\1.", part) + "."
    found = [name for name, _ in network.named_parameters() if name.startswith(prefix)]
    assert found, part
    return found


def logits(network: Transformer, batch: Batch) -> Tensor:
    """At the last token of every row."""
    return network(batch.tokens, keep=batch.keep, types=batch.types)[torch.arange(len(batch)), batch.last()]


def kl(tuned: Tensor, found: Tensor) -> Tensor:
    """KL(tuned || found) of the distributions of these logits."""
    p, q = tuned.log_softmax(-1), found.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def effects(found: xr.Dataset, what: str = "weights") -> dict[str, Tensor]:
    """The effect of every part in every prompt."""
    each = found.each.sel(what=what)
    return {str(part): torch.tensor(each.sel(part=part).values) for part in found.part.values}


def shares(found: xr.Dataset, what: str = "weights") -> dict[str, float]:
    """The share of every part."""
    cells = found.value.sel(what=what, score="share")
    return {str(part): float(cells.sel(part=part)) for part in found.part.values}


# --- what a part owns ------------------------------------------------------------------------------------------------


@over("grain", GRAINS)
@over("name", [*CONFIGS, *MIXERS])
def test_every_number_of_every_parameter_belongs_to_exactly_one_part(grain: str, name: str) -> None:
    network = build(name) if name in CONFIGS else build_mixed(name)
    owned = {key: torch.zeros_like(value) for key, value in network.named_parameters()}
    parts = pieces_of(network, grain)  # type: ignore[arg-type]
    for pieces in parts.values():
        for piece in pieces:
            view = piece.of(owned[piece.parameter])
            view += 1
    assert all(bool((count == 1).all()) for count in owned.values())
    assert len({str(part) for part in parts}) == len(parts)
    assert all(Part.of(str(part)) == part for part in parts)


@over("name", ["gpt2", "llama-gqa"])
def test_head_owns_its_matrices_and_shared_ones_are_their_groups(name: str) -> None:
    network = build(name)
    found = copy.deepcopy(network)
    config, views, theirs = network.config, Weights(found).layer(1), Weights(other(name)).layer(1)
    heads = {"W_Q": 2, "b_Q": 2, "W_O": 2} | (
        {} if config.kv_heads < config.n_heads else {"W_K": 2, "b_K": 2}
    )
    parts = ["L1H2"]
    if config.kv_heads < config.n_heads:
        parts, heads = ["L1H2", "L1G1.k"], heads | {"W_K": 1, "b_K": 1}
    else:
        heads |= {"W_V": 2, "b_V": 2}
    for matrix, index in heads.items():
        if matrix.startswith("W") or config.qkv_bias:
            getattr(views, matrix)[index] = getattr(theirs, matrix)[index]
    batch = ragged()
    expected = kl(logits(other(name), batch), logits(found, batch))
    result = diff(network, batch, other(name), parts=[parts], what=["weights"])
    assert_close(torch.tensor(result.each.values[:, 0, 0]), expected - torch.tensor(result.base.values))


# --- the numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WITH_LOGITS)
def test_exchanged_weights_give_the_metric_of_a_copy_with_these_entries(name: str) -> None:
    base, tuned, batch = build(name), other(name), ragged()
    wanted = logits(tuned, batch)
    before = kl(wanted, logits(base, batch))
    found = diff(base, batch, tuned, what=["weights"])
    assert_close(torch.tensor(found.base.values), before)
    for part, effect in effects(found).items():
        swapped = with_entries(base, tuned, entries(base, part))
        assert_close(effect, kl(wanted, logits(swapped, batch)) - before)
    assert bool(found.changed.all())


@over("name", ["gpt2", "gemma2", "t5", "post-norm"])
def test_the_other_direction_takes_the_base_s_parts_into_the_tuned_model(name: str) -> None:
    base, tuned, batch = build(name), other(name), ragged()
    wanted = logits(tuned, batch)
    found = diff(base, batch, tuned, what=["weights"], direction="noise")
    for part, effect in effects(found).items():
        swapped = with_entries(tuned, base, entries(base, part))
        assert_close(effect, kl(wanted, logits(swapped, batch)))
    assert_close(torch.tensor(found.tuned.values), torch.zeros(3, dtype=torch.float64))


WRITES = {"attn": "hook_attn_out", "mlp": "hook_mlp_out"}


@over("name", ["gpt2", "llama-gqa", "gemma2", "macaron"])
def test_exchanged_activations_are_those_of_the_other_model_set_by_hand(name: str) -> None:
    base, tuned, batch = build(name), other(name), ragged()
    found = diff(base, batch, tuned, parts="head", what=["activations"])
    wanted, before = logits(tuned, batch), torch.tensor(found.base.values)
    seen = {
        "L1H2": ("blocks.1.attn.hook_z", {"head": 2}),
        "L0.mlp": ("blocks.0.hook_mlp_out", {}),
        "embed": ("hook_embed", {}),
    }
    if name == "llama-gqa":
        seen["L0G1.v"] = ("blocks.0.attn.hook_v", {"kv_head": 1})
    for part, (site, at) in seen.items():
        values = observe(tuned, batch, site)
        run = interp.observe(base, batch, edits=[Edit(site, Set(values), at)])
        patched = run.output[torch.arange(3), batch.last()]
        assert_close(effects(found, "activations")[part], kl(wanted, patched) - before)
    silent = [
        str(p) for p in found.part.values if re.fullmatch(r"L\d\.(ln\w+|attn_rest)|ln_final|unembed", str(p))
    ]
    assert silent and bool(found.value.sel(part=silent).isnull().all()) and not found.n.sel(part=silent).any()


def observe(model: Transformer, batch: Batch, site: str) -> Tensor:
    """What a site holds."""
    return interp.observe(model, batch, [Read(site)]).trace[Read(site)]


METRICS: Mapping[str, Callable[[], Metric]] = {
    "logits": logit_difference,
    "everywhere": next_token_loss,
    "at": lambda: kl_divergence().at(1),
    "own": lambda: interp.metrics.of_logits(lambda logits: logits[:, -1, 3], name="third"),
}


@over("direction", ["denoise", "noise"])
@over("what", ["weights", "activations"])
@over("metric", METRICS)
def test_all_parts_together_are_the_other_model_whatever_is_watched(
    direction: str, what: str, metric: str
) -> None:
    base, tuned = build("gpt2"), other("gpt2")
    every = [str(part) for part in pieces_of(base, "sublayer")]
    if what == "activations":  # up to the last norm, which both must then share
        every = [part for part in every if re.fullmatch(r"embed|pos_embed|L\d\.(attn|mlp)", part)]
        tuned = with_entries(
            tuned, base, [n for n, _ in base.named_parameters() if n.startswith(("ln_final", "unembed"))]
        )
    found = diff(
        base,
        ragged(),
        tuned,
        parts=[every, "L0.mlp"],
        what=[what],
        metric=METRICS[metric](),
        direction=direction,
    )  # type: ignore[list-item,arg-type]
    whole = (found.tuned - found.base) * (1 if direction == "denoise" else -1)
    assert_close(torch.tensor(found.each.values[:, 0, 0]), torch.tensor(whole.values))
    assert float(found.value[0, 0].sel(score="share")) == pytest.approx(1, abs=1e-9)
    assert float(found.value[0, 1].sel(score="share")) != pytest.approx(1, abs=1e-3)


def test_metric_at_every_column_is_read_out_by_the_exchanged_model() -> None:
    base, tuned, batch = build("gpt2"), other("gpt2"), ragged()
    found = diff(base, batch, tuned, what=["weights"], metric=next_token_loss())
    for part in ("unembed", "ln_final", "L1.mlp"):
        swapped = with_entries(base, tuned, entries(base, part))
        expected = torch.stack(
            [
                F.cross_entropy(swapped(row[None])[0, :-1], row[1:])
                for row in (batch.tokens[i, :n] for i, n in enumerate((9, 6, 4)))
            ]
        )
        assert_close(effects(found)[part] + torch.tensor(found.base.values), expected)


# --- what is known ---------------------------------------------------------------------------------------------------


@functools.cache
def edits() -> dict[str, tuple[str, WeightEdit]]:
    """The four editors of the package, each with the part that it edits."""
    model, asked = hooked(), {"answer": 17, "layer": 1}
    return {
        "shift": ("L0.mlp", shift_edit(model, PROMPT, answer=17, layer=0, eta=0.1)),
        "gradient": ("L1.attn", gradient_edit(model, PROMPT, answer=17, layer=1, eta=0.3, matrix="attn.W_V")),
        "fine-tuning": (
            "L1.mlp",
            finetune_edit(model, PROMPT, **asked, matrix="mlp.W_in", tuning=FineTuning(3, 0.05)),
        ),  # type: ignore[arg-type]
        "rome": (
            "L0.mlp",
            rome_edit(
                model,
                PROMPT,
                answer=17,
                subject="France",
                keys=key_moment(model, CORPUS, layer=0),
                rome=Rome(ridge=0.1, steps=2),
            ),
        ),
    }


@over("direction", ["denoise", "noise"])
@over("editor", ["shift", "gradient", "fine-tuning", "rome"])
def test_an_edit_is_found_where_it_was_made_with_share_1_and_nowhere_else(
    editor: str, direction: str
) -> None:
    part, edit = edits()[editor]
    found = diff(hooked(), [PROMPT, *CORPUS], changed_copy(hooked(), edit), direction=direction)  # type: ignore[arg-type]
    by_part = shares(found)
    assert by_part.pop(part) == pytest.approx(1, abs=1e-9)
    assert set(by_part.values()) == {0.0}, "exactly: nothing was exchanged there"
    changed = found.changed.sel(what="weights")
    assert found.part.values[changed.values].tolist() == [part]
    assert not found.changed.sel(what="activations").values[: int(changed.values.argmax())].any()
    assert float(found.moved.sel(part=part)) > 0 and float(found.moved.sum()) == float(
        found.moved.sel(part=part)
    )
    assert shares(found, "activations")[part] == pytest.approx(1, abs=1e-9)


def test_one_fine_tuned_head_is_found_with_share_1() -> None:
    model = hooked()
    change = {
        name: torch.zeros_like(
            matrix_place(model.transformer, f"blocks.0.attn.{name}").in_(model.transformer)
        )
        for name in ("W_V", "W_O")
    }
    for value in change.values():
        value[2] = torch.randn(value[2].shape, generator=torch.Generator().manual_seed(0), dtype=value.dtype)
    tuned = changed_copy(
        model, *(WeightEdit(f"blocks.0.attn.{name}", value) for name, value in change.items())
    )
    by_part = shares(diff(model, CORPUS, tuned, parts="head"))
    assert by_part.pop("L0H2") == pytest.approx(1, abs=1e-9) and set(by_part.values()) == {0.0}
    by_activation = shares(diff(model, CORPUS, tuned, parts="head"), "activations")
    assert by_activation["L0H1"] == 0 and by_activation["L0H2"] != 0


def test_two_changes_that_multiply_interact_by_their_product() -> None:
    """Logits W_E W_U of a model whose block adds nothing: (E + e)(U + u) - EU = eU + Eu + eu."""
    config = replace(CONFIGS["attention-only"], norm=NoNorm(), position=NoPosition(), n_layers=1)
    torch.manual_seed(0)
    base, tuned = (perturbed(config, seed=seed) for seed in (0, 1))
    for each in (base, tuned):
        each.block(0).attn.out.weight.zero_()
        if each.block(0).attn.out.bias is not None:
            each.block(0).attn.out.bias.zero_()
        if each.unembed is not None and each.unembed.bias is not None:
            each.unembed.bias.zero_()
    tokens, answer = some_tokens(4, 3), 5
    found = diff_interactions(
        base, tokens, tuned, ["embed", "unembed", "L0.attn"], metric=logit_difference(answer)
    )
    e = (tuned.embed.weight - base.embed.weight)[tokens[:, -1]]
    u = (Weights(tuned).W_U - Weights(base).W_U)[:, answer]
    together = torch.tensor(found.each.sel(what="weights", pair="embed+unembed").values)
    assert_close(together, e @ u)
    assert float(abs(found.value.sel(pair="embed+L0.attn", score="effect")).max()) < 1e-12
    singles = diff(
        base, tokens, tuned, parts=["embed", "unembed", ["embed", "unembed"]], metric=logit_difference(answer)
    )
    both, *alone = (effects(singles)[name] for name in ("embed+unembed", "embed", "unembed"))
    assert_close(together, both - sum(alone))


def test_a_part_whose_weights_are_the_same_has_no_interaction_at_all() -> None:
    _, edit = edits()["fine-tuning"]
    found = diff_interactions(hooked(), CORPUS, changed_copy(hooked(), edit), ["L0.attn", "L1.mlp", "embed"])
    assert bool((found.each == 0).all())


def test_only_what_differs_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    real = difference.exchanged

    def counted(*given: object) -> Transformer:
        made.append(given)
        return real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(difference, "exchanged", counted)
    _, edit = edits()["gradient"]
    diff(hooked(), CORPUS, changed_copy(hooked(), edit))
    assert len(made) == 1


def test_shares_are_ratios_of_means_with_their_linear_interval() -> None:
    found = diff(build("gpt2"), some_tokens(64, 4), other("gpt2"))
    whole = (found.tuned - found.base).values
    for what in ("weights", "activations"):
        each = found.each.sel(what=what, part="L0.mlp").values
        share = each.mean() / whole.mean()
        error = (each - share * whole).std(ddof=1) / 8 / abs(whole.mean())
        cell = found.sel(what=what, part="L0.mlp", score="share")
        ends = (share, share - student95(64) * error, share + student95(64) * error)
        np.testing.assert_allclose([cell.value, cell.low, cell.high], ends, rtol=1e-9)
    few = diff(build("gpt2"), some_tokens(63, 4), other("gpt2"))
    assert bool(few.low.isnull().all()) and "of shares if at least 64" in few.attrs["interval"]


def test_moments_alone_give_the_same_numbers_for_data_of_any_size() -> None:
    asked = {"tuned": other("gpt2"), "metric": logit_difference(3)}
    whole, streamed = (
        diff(build("gpt2"), in_batches(build("gpt2"), some_tokens(64, 4), 23), **asked, each=each)
        for each in (True, False)
    )  # type: ignore[arg-type]
    for name in ("value", "low", "high", "changed"):
        np.testing.assert_allclose(streamed[name], whole[name], rtol=1e-9, atol=1e-12)
    assert "each" not in streamed and float(streamed.base) == pytest.approx(float(whole.base.mean()))


def test_the_tuned_model_is_taken_in_the_dtype_of_the_base() -> None:
    base = copy.deepcopy(build("gpt2", torch.float32)).double()
    network = with_entries(base, other("gpt2"), ["blocks.1.mlp.out.weight"])
    found = diff(build("gpt2", torch.float32), some_tokens(), network)
    assert found.part.values[found.changed.sel(what="weights").values].tolist() == ["L1.mlp"]
    assert network.dtype == torch.float64, "and is left as it is"


# --- what is refused -------------------------------------------------------------------------------------------------


def test_models_that_are_not_alike_are_refused_by_what_differs() -> None:
    base, tokens = build("gpt2"), some_tokens()
    deeper = perturbed(replace(base.config, n_layers=3))
    with pytest.raises(ValueError, match=r"two models of one config .* n_layers: 2 and 3"):
        diff(base, tokens, deeper)
    model = hooked()

    class Shifted:
        """The tokenizer with two tokens exchanged."""

        bos_id, eos_id, pad_id = model.text.bos_id, model.text.eos_id, 0

        def encode(self, text: str) -> list[int]:
            return model.text.tokenizer.encode(text)

        def decode(self, ids: list[int]) -> str:
            return model.text.tokenizer.decode(ids)

        def piece(self, token: int) -> str:
            return model.text.tokenizer.piece({7: 8, 8: 7}.get(token, token))

    _, edit = edits()["shift"]
    network = changed_copy(model, edit).transformer
    with pytest.raises(ValueError, match=r"one tokenizer .* token 7 is"):
        diff(model, PROMPT, HookedTransformer(network, Shifted()))
    diff(model, PROMPT, network)  # a bare network brings no tokens of its own


def test_nothing_to_compare_is_refused() -> None:
    base, tokens = build("gpt2"), some_tokens()
    with pytest.raises(ValueError, match="the same weights"):
        diff(base, tokens, copy.deepcopy(base))
    with pytest.raises(ValueError, match="third is the same for both models"):
        diff(
            base,
            tokens,
            other("gpt2"),
            metric=interp.metrics.of_logits(lambda x: x[:, -1, 3] * 0, name="third"),
        )
    for pair in (
        (base.edited(Edit("L0H1", Zero())), other("gpt2")),
        (base, other("gpt2").edited(Edit("L0H1", Zero()))),
    ):
        with pytest.raises(ValueError, match="one with an edit of L0H1"):
            diff(pair[0], tokens, pair[1])


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"parts": ["L0.resid"]}, KeyError, "no parameter belongs to a part 'L0.resid'.*nearest"),
        ({"parts": ["L7.mlp"]}, KeyError, "'L7.mlp'"),
        ({"parts": []}, ValueError, "each once, are required"),
        ({"parts": ["L0.mlp", "L0.mlp"]}, ValueError, "each once"),
        ({"parts": [[]]}, ValueError, "at least one"),
        ({"parts": [["L0.attn", "L0H1"]]}, ValueError, "own different parameters, got L0.attn, L0H1"),
        ({"parts": [["L0.mlp", "L0.mlp"]]}, ValueError, "own different parameters"),
        ({"parts": "neuron"}, ValueError, "parts"),
        ({"what": []}, ValueError, "weights, activations or both"),
        ({"what": ["weights", "weights"]}, ValueError, "each once"),
        ({"direction": "up"}, ValueError, "direction"),
    ],
)
def test_what_names_no_exchange_is_refused(
    given: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        diff(build("gpt2"), some_tokens(), other("gpt2"), **given)  # type: ignore[arg-type]


def test_a_network_whose_parameters_are_somebody_else_s_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Transformer, "restarts", property(lambda self: False))
    with pytest.raises(ValueError, match="a wrapped network: which part each of its parameters belongs to"):
        diff(build("gpt2"), some_tokens(), other("gpt2"))


def test_one_part_has_no_interaction() -> None:
    with pytest.raises(ValueError, match="at least two are required"):
        diff_interactions(build("gpt2"), some_tokens(), other("gpt2"), ["L0.mlp"])
