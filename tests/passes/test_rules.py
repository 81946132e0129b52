"""Backward rules: no number of a pass moves, derivatives are those of a linear model written out, relevances sum."""

from functools import partial

import pytest
import torch
from torch import Tensor

import interp
from interp import HookedTransformer, Read, observe
from interp.causal import attribution_patch
from interp.circuits import edge_attribution
from interp.data.batch import Batch
from interp.edits import Add, Edit, Scale, Zero
from interp.lab import ConvMLP
from interp.lenses import gradient_factors
from interp.model import MLP, MoE, Tap, Transformer, Weights, sites
from interp.model.rules import Rule
from interp.model.sites import final_stream
from interp.passes import schedule
from interp.passes.metrics import logit_difference, next_token_loss
from interp.passes.rules import (
    LINEAR,
    PRESETS,
    _summand_gradients as gradients_of,
    as_rules,
    completeness,
    under_rules,
)
from interp.tokens import METHODS, token_attribution
from tests.causal.slow_edges import ANSWER, WRONG, by_autograd, difference, gradients
from tests.causal.test_graph import SUMS
from tests.circuits.test_edge_attribution import CLEAN, CORRUPT, by_edge, changes
from tests.configs import CONFIGS, build, some_tokens
from tests.loops import over
from tests.mixers import MIXERS, build_mixed
from tests.tolerances import assert_close
from tests.wrapped.wrapping import wrapped

TOKENS = some_tokens()
METRIC = logit_difference(ANSWER, WRONG)
UNREACHED = (
    "pool", "pool-softmax", "linformer", "linformer-rotary", "reformer", "reformer-softmax", "reformer-bidirectional",
    "dual-chunk", "dual-chunk-softmax", "linear", "linear-relu", "linear-softmax", "lightning", "lightning-gated",
    "lightning-no-decay", "minimax", "polar", "polar-rotary", "sana", "gated-delta", "gated-delta-pairs", "short-conv",
    "mamba2", "mamba2-softmax", "mamba2-delta", "conv-softmax", "differential", "differential-rotary",
    "differential-plain", "differential-bidirectional", "synthesizer", "synthesizer-alibi", "synthesizer-random",
    "synthesizer-random-bidirectional", "memory-gate", "memory-gate-deep", "memory-layer", "memory-context",
    "memory-context-deep", "spatial-gating", "spatial-gating-softmax", "spatial-gating-bidirectional", "token-mixing",
    "token-mixing-softmax", "linear-bidirectional", "lightning-bidirectional", "lightning-gated-bidirectional",
    "polar-bidirectional", "sana-bidirectional", "memory-gate-bidirectional", "memory-layer-bidirectional",
    "memory-context-bidirectional", "performer", "performer-rotary", "performer-bidirectional",
    "shared-blocks-bidirectional",
)  # fmt: skip
"""Models of `tests.mixers` that the rules are not defined for."""
REACHED = [*CONFIGS, *(name for name in MIXERS if name not in UNREACHED)]
NO_PRODUCTS = (
    "cosine", "cosine-adaptive", "additive", "additive-log-n", "adaptive", "refined-simple", "refined-stochastic",
    "refined-value", "refined-additive", "refined-alibi",
)  # fmt: skip
"""Models whose scores are no products that could be halved."""
SINGLE = tuple((rule,) for rule in (*LINEAR, "half"))


def any_model(name: str) -> Transformer:
    return build(name) if name in CONFIGS else build_mixed(name)


def ruled(name: str, rules: tuple[str, ...] | str = "relp") -> Transformer:
    return under_rules(any_model(name), rules)


def last(stream: Tensor, model: Transformer) -> Tensor:
    """One number per row, linear in the logits (or the final stream) of the last token."""
    seen = model.read_out(stream[:, -1])
    return seen[:, 3] - seen[:, 5]


def final_gradient(model: Transformer) -> tuple[Tensor, Tensor]:
    """The final stream, and d (sum of `last`) / d it."""
    end = final_stream(model.config)
    found = observe(
        model, Batch(TOKENS), [Read(end, grad=True)], stop=model.config.n_layers,
        metric=lambda stream: last(stream, model).sum(),
    )  # fmt: skip
    return found.output, found.trace[end]


def slopes(model: Transformer, reads: list[str], tokens: Tensor = TOKENS) -> dict[str, Tensor]:
    """d (sum of `last`) / d value at these sites."""
    found = observe(
        model, Batch(tokens), [Read(site, grad=True) for site in reads], stop=model.config.n_layers,
        metric=lambda stream: last(stream, model).sum(),
    )  # fmt: skip
    return {read.site: value for read, value in found.trace.items()}


# --- the forward pass -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@over("name", REACHED)
@over("rules", [*PRESETS.values(), *SINGLE])
def test_no_number_of_a_pass_moves_a_bit(name: str, rules: tuple[Rule, ...]) -> None:
    if "half" in rules and name in NO_PRODUCTS:
        return
    model = any_model(name)
    # differentiated at the embeddings, so that every value is in the graph
    for observed in ([], [Read(site) for site in sites.names(model.config)]):
        reads = [Read("hook_embed", grad=True), *observed]
        plain, other = (
            observe(m, Batch(TOKENS), reads, metric=torch.sum) for m in (model, under_rules(model, rules))
        )
        assert torch.equal(plain.output, other.output)
        for read in observed:
            assert torch.equal(plain.trace[read], other.trace[read]), read.site


def test_the_model_itself_is_left_alone() -> None:
    model = build("gpt2")
    before = slopes(model, ["hook_embed"])["hook_embed"]
    under = under_rules(model, "relp")
    assert not torch.allclose(slopes(under, ["hook_embed"])["hook_embed"], before)
    assert torch.equal(slopes(model, ["hook_embed"])["hook_embed"], before)
    assert under.embed.weight is model.embed.weight and under_rules(model, ()) is model


# --- derivatives ------------------------------------------------------------------------------------------------------


def linear_by_hand(model: Transformer, delta: Tensor) -> Tensor:
    """What becomes of a small change of the embeddings at the final stream, block by block, all else held."""
    config, w = model.config, Weights(model)
    reads = {
        layer: [
            f"blocks.{layer}.{site}"
            for site in (
                "ln1.hook_scale",
                "attn.hook_pattern",
                "ln2.hook_scale",
                "mlp.hook_pre",
                "mlp.hook_post",
            )
        ]
        for layer in range(config.n_layers)
    }
    gated = isinstance(config.mlp, MLP) and config.mlp.gated
    every = [site for names in reads.values() for site in names]
    every += [f"blocks.{i}.mlp.hook_pre_linear" for i in reads if gated]
    trace = observe(model, Batch(TOKENS), list(map(Read, every))).trace
    x = delta
    for layer, names in reads.items():
        scale1, pattern, scale2, pre, post = (trace[name] for name in names)
        own, block = w.layer(layer), model.block(layer)
        assert (
            own.W_out is not None and own.W_in is not None and own.W_V is not None and block.ln2 is not None
        )
        normed = block.ln1.frozen(x, scale1)
        heads = config.n_heads // config.kv_heads
        v = torch.einsum("bpd,gde->bpge", normed, own.W_V).repeat_interleave(heads, 2)
        if own.W_V.shape[0] == config.n_heads:
            v = torch.einsum("bpd,hde->bphe", normed, own.W_V)
        x = x + torch.einsum("bhqk,bkhe,hed->bqd", pattern, v, own.W_O)
        normed = block.ln2.frozen(x, scale2)
        if gated:
            linear = trace[f"blocks.{layer}.mlp.hook_pre_linear"]
            assert own.W_gate is not None
            moved = (normed @ own.W_gate * (post / pre) + normed @ own.W_in * (post / linear)) / 2
        else:
            moved = normed @ own.W_in * (post / pre)
        x = x + moved @ own.W_out
    return x


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "scale-by-layer"])
def test_all_rules_give_the_gradient_of_the_linear_model_written_out(name: str) -> None:
    model, under = build(name), ruled(name)
    delta = torch.randn(*TOKENS.shape, model.config.d_model, dtype=torch.float64)
    stream = model(TOKENS, stop=model.config.n_layers)
    moved = model.ln_final.frozen(linear_by_hand(model, delta), model.ln_final.scale(stream))[:, -1]
    assert model.unembed is not None
    expected = moved @ (model.unembed.weight[3] - model.unembed.weight[5])
    found = (slopes(under, ["hook_embed"])["hook_embed"] * delta).sum((1, 2))
    assert_close(found, expected.detach())


@pytest.mark.parametrize("observed", [False, True])
@over("name", ["llama-gqa", "gpt-oss", "gemma2", "latent", "gated-softmax", "chunks"])
def test_half_of_each_product_of_attention(name: str, observed: bool) -> None:
    """Of pattern . v a half goes to each; of that half of q . k a half to each. Fused and written out."""
    layer = f"blocks.{any_model(name).config.n_layers - 1}.attn.hook_"
    reads = [f"{layer}{part}" for part in ("q", "k", "v", *(("attn_scores", "pattern") if observed else ()))]
    plain, half = (slopes(model, reads) for model in (any_model(name), ruled(name, ("half",))))
    shares = {"q": 0.25, "k": 0.25, "v": 0.5}
    for part, share in shares.items():
        if not observed:
            assert_close(half[f"{layer}{part}"], share * plain[f"{layer}{part}"])
    if observed:  # each site is a leaf for what is before it
        assert_close(half[f"{layer}v"], 0.5 * plain[f"{layer}v"])
        assert_close(half[f"{layer}pattern"], 0.5 * plain[f"{layer}pattern"])


@pytest.mark.parametrize("observed", [False, True])
@over("name", ["gpt2", "llama-gqa", "gpt-oss", "latent", "refined-value", "additive"])
def test_held_patterns_give_queries_keys_and_scores_nothing(name: str, observed: bool) -> None:
    model, under = any_model(name), ruled(name, ("pattern",))
    layer = f"blocks.{model.config.n_layers - 1}.attn.hook_"
    more = ("attn_scores",) if observed else ()
    plain, held = (slopes(m, [f"{layer}{part}" for part in ("q", "k", "v", *more)]) for m in (model, under))
    assert_close(held[f"{layer}v"], plain[f"{layer}v"])
    for part in ("q", "k", *more):
        assert not bool(held[f"{layer}{part}"].any()) and bool(plain[f"{layer}{part}"].any())


# --- the promise ------------------------------------------------------------------------------------------------------


@over("name", REACHED)
def test_relevances_of_embeddings_and_biases_sum_to_the_metric(name: str) -> None:
    """With those of the read-out's own biases, found here by autograd on all parameters that are added somewhere."""
    under = ruled(name)
    biases = {n: p.detach().requires_grad_() for n, p in under.named_parameters() if n.endswith("bias")}
    twin = under.with_parameters(biases)
    metric = partial(last, model=twin)
    embeds = [s for s in ("hook_embed", "hook_pos_embed", "hook_type_embed") if s in sites.names(twin.config)]
    tap = Tap([Read(site, grad=True) for site in embeds])
    value = metric(twin(TOKENS, tap, stop=twin.config.n_layers)).sum()
    leaves = [*tap.live.values(), *biases.values()]
    found = torch.autograd.grad(value, leaves, allow_unused=True)
    total = sum((leaf * g).sum() for leaf, g in zip(leaves, found, strict=True) if g is not None)
    assert isinstance(total, Tensor)
    assert_close(total.detach(), value.detach())


@over("name", REACHED)
def test_the_check_measures_rounding_and_nothing_else(name: str) -> None:
    under = ruled(name)
    error = completeness(under, Batch(TOKENS), *final_gradient(under))["completeness_error"]
    assert error.shape == (len(TOKENS),) and float(error.max()) < 1e-13


def test_a_promise_that_is_broken_is_an_error() -> None:
    under = ruled("gpt2")
    under.block(1).ln1.rules = frozenset()
    stream = under(TOKENS, stop=under.config.n_layers).detach()
    with pytest.raises(ArithmeticError, match="should sum to"):
        completeness(under, Batch(TOKENS), stream, torch.randn_like(stream))


def test_relevances_that_all_cancel_keep_the_promise() -> None:
    """A gradient across every embedding and bias: none has relevance, though the products in each are of size one."""
    under, batch = ruled("llama-gqa"), Batch(TOKENS[:1])
    stream = under(batch.tokens, stop=under.config.n_layers).detach()
    along = torch.zeros(stream.shape[-1], *stream.shape, dtype=stream.dtype)
    along[:, 0, -1] = torch.eye(len(along), dtype=stream.dtype)
    parts = torch.stack(
        [torch.stack([(x * g).sum() for x, g in gradients_of(under, batch, each)]) for each in along]
    )
    assert parts.shape[1] < len(along)
    across = torch.linalg.svd(parts.T).Vh[-1]
    gradient = torch.einsum("d,dbpe->bpe", across, along)
    relevances = [x * g for x, g in gradients_of(under, batch, gradient)]
    assert max(float(each.sum().abs()) for each in relevances) < 1e-13 < 0.1 < max(
        float(each.abs().sum()) for each in relevances
    )  # fmt: skip
    completeness(under, batch, stream, gradient)
    with pytest.raises(ArithmeticError, match="should sum to"):
        completeness(under, batch, stream + torch.randn_like(stream), gradient)


PLACES = ("L0H1", "L0.mlp", "L1.attn", "embed", "blocks.1.attn.hook_v")
CHANGES = [(place, change) for place in PLACES for change in (Zero(), Scale(0.5))]


@over("name", ["gpt2", "llama-gqa", "gpt-oss", "olmo2"])
@over(
    "edit", [*CHANGES, ("blocks.1.ln2_post.hook_scale", Scale(0.5)), ("blocks.0.ln1.hook_scale", Scale(2.0))]
)
def test_edits_that_bring_no_constant_keep_the_promise(name: str, edit: tuple[str, Zero | Scale]) -> None:
    where, change = edit
    if where.endswith("scale") and where not in sites.names(CONFIGS[name]):
        with pytest.raises(KeyError):
            ruled(name).edited(Edit(where, change))
        return
    under = ruled(name).edited(Edit(where, change))
    error = completeness(under, Batch(TOKENS), *final_gradient(under))["completeness_error"]
    assert float(error.max()) < 1e-13


def test_nothing_is_promised_under_other_rules_or_edits() -> None:
    for under in (ruled("gpt2", "attnlrp"), ruled("gpt2").edited(Edit("L0.resid", Add(1.0)))):
        stream = under(TOKENS, stop=under.config.n_layers)
        assert completeness(under, Batch(TOKENS), stream, torch.ones_like(stream)) == {}


# --- analyses ---------------------------------------------------------------------------------------------------------


def test_attribution_patching_takes_the_gradient_under_the_rules() -> None:
    model = build("llama-gqa")
    found = attribution_patch(HookedTransformer(model), CLEAN, CORRUPT, "z", metric=METRIC, rules="relp")
    under = under_rules(model, "relp")
    for layer in range(2):
        site = f"blocks.{layer}.attn.hook_z"
        own, other = (observe(model, Batch(x), [Read(site)]).trace[site] for x in (CORRUPT, CLEAN))
        got = observe(
            under, Batch(CORRUPT), [Read(site, grad=True)], metric=lambda logits: difference(logits).sum()
        )
        expected = ((other - own) * got.trace[site]).sum(-1)
        assert_close(torch.from_numpy(found["each"].values)[:, layer], expected)
    assert found.attrs["rules"] == "norm, activation, gate, pattern"
    assert found.attrs["completeness_error"] < 1e-13
    plain = attribution_patch(HookedTransformer(model), CLEAN, CORRUPT, "z", metric=METRIC)
    assert not {"rules", "completeness_error"} & set(plain.attrs)
    assert not torch.allclose(torch.from_numpy(plain.value.values), torch.from_numpy(found.value.values))


@pytest.mark.parametrize(("rules", "read"), [("", False), ("relp", True)])
def test_the_gradient_of_the_final_stream_is_read_under_rules_alone(
    rules: str, read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Read] = []
    differentiated = schedule._differentiated_pass

    def watching(model: Transformer, batch: Batch, reads: list[Read], *others: object) -> object:
        seen.extend(reads)
        return differentiated(model, batch, reads, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(schedule, "_differentiated_pass", watching)
    attribution_patch(HookedTransformer(build("gpt2")), CLEAN, CORRUPT, "z", metric=METRIC, rules=rules or ())
    assert (Read(final_stream(CONFIGS["gpt2"]), grad=True) in seen) == read
    assert len(seen) == 4 + read


def test_sites_that_rules_leave_without_a_gradient_say_so() -> None:
    model = HookedTransformer(build("gpt2"))
    with pytest.raises(ValueError, match="or the rules pattern leave none"):
        attribution_patch(model, CLEAN, CORRUPT, "q", metric=METRIC, rules=["pattern"])


def test_metrics_that_are_not_linear_keep_the_promise_too() -> None:
    """The sum is that of (final stream . gradient), whatever the metric makes of it."""
    found = attribution_patch(
        HookedTransformer(build("gpt2")),
        CLEAN,
        CORRUPT,
        "z",
        metric=next_token_loss(),
        rules="relp",
        each=False,
    )
    assert found.attrs["completeness_error"] < 1e-13


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
@over("name", SUMS)
def test_edges_are_autograd_on_copies_of_the_stream_under_the_rules(name: str, preset: str) -> None:
    model = build(name)
    found = edge_attribution(HookedTransformer(model), CLEAN, CORRUPT, metric=METRIC, each=True, rules=preset)
    under = under_rules(model, preset)
    change, grads = changes(model, CORRUPT, CLEAN), gradients(under, CORRUPT)
    scores = by_edge(found, model.config)
    for edge, score in scores.items():
        assert_close(score, by_autograd(under, CORRUPT, change, edge, grads), torch.float64)
        if edge.endswith((".q", ".k")) and "pattern" in PRESETS[preset]:
            assert not bool(score.any())
    assert max(float(score.abs().max()) for score in scores.values()) > 1e-2
    assert ("completeness_error" in found.attrs) == (preset == "relp")


@over("name", ["gpt2", "llama-gqa", "gemma2", "gpt-oss", "no-norm"])
def test_tokens_and_biases_share_the_logit(name: str) -> None:
    model = HookedTransformer(build(name))
    found = token_attribution(model, TOKENS, [3, 3, 3], [5, 5, 5], method="relp")
    logits = model.transformer.uncapped(model.transformer(TOKENS, stop=2))[:, -1].detach()
    assert_close(torch.from_numpy(found.total.values), logits[:, 3] - logits[:, 5])
    total = found.value.sum("pos") + found.bias
    assert_close(torch.from_numpy(total.values), torch.from_numpy(found.total.values))
    assert found.attrs["completeness_error"] < 1e-13 and found.attrs["sums_to"].startswith("total")
    half = token_attribution(model, TOKENS, [3, 3, 3], [5, 5, 5], method="attnlrp")
    assert set(half.data_vars) == {"value"} and half.attrs["sums_to"] == "nothing in particular"
    assert {"relp", "attnlrp"} <= METHODS.keys()


@over("name", ["gpt2", "llama-gqa", "gemma2", "olmo2"])
def test_factors_are_those_of_the_ruled_model_s_weight_gradients(name: str) -> None:
    model = HookedTransformer(build(name))
    found = gradient_factors(model, TOKENS, [3, 3, 3], [5, 5, 5], rules="attnlrp")
    plain = gradient_factors(model, TOKENS, [3, 3, 3], [5, 5, 5])
    for matrix in found:
        assert found.error(matrix) < 1e-9, matrix
    assert not torch.allclose(found["blocks.0.attn.W_V"][1], plain["blocks.0.attn.W_V"][1])
    words = interp.backward_lens(model, TOKENS, [3, 3, 3], [5, 5, 5], matrices=["W_V"], rules="attnlrp")
    assert_close(
        torch.from_numpy(words.delta.sel(matrix="W_V", layer=0).values),
        found["blocks.0.attn.W_V"][1].norm(dim=-1),
    )


# --- what is refused --------------------------------------------------------------------------------------------------


def test_rules_are_named() -> None:
    assert as_rules("relp") == as_rules(LINEAR[::-1]) == LINEAR
    assert as_rules("norm") == ("norm",) and as_rules(()) == ()
    with pytest.raises(ValueError, match=r"presets relp, attnlrp, cp-lrp, got 'relpp'; nearest: relp"):
        as_rules("relpp")
    with pytest.raises(ValueError, match="got 'patern'; nearest: pattern"):
        as_rules(["norm", "patern"])
    with pytest.raises(ValueError, match="half and pattern exclude each other"):
        as_rules(["half", "pattern"])


@over("name", UNREACHED)
def test_models_that_rules_do_not_reach_are_refused(name: str) -> None:
    model = HookedTransformer(build_mixed(name))
    mlp = MIXERS[name].mlp
    what = str(mlp) if isinstance(mlp, ConvMLP) else "mixes positions by|memory"
    with pytest.raises(ValueError, match="rules are defined for softmax attention") as refused:
        under_rules(model.transformer, "relp")
    assert isinstance(mlp, ConvMLP | MLP | MoE | None) and (
        what in str(refused.value) or "layer" in str(refused.value)
    )


def test_wrapped_networks_are_refused_what_cannot_be_checked() -> None:
    model = HookedTransformer(wrapped("olmo3"))
    with pytest.raises(
        ValueError, match=r"rules are defined for .*: this model is a wrapped network, where only"
    ):
        attribution_patch(model, CLEAN % 20, CORRUPT % 20, metric=logit_difference(1, 2), rules="cp-lrp")


@over("name", NO_PRODUCTS)
def test_scores_that_are_no_products_are_not_halved(name: str) -> None:
    with pytest.raises(ValueError, match="layer 0 mixes positions by"):
        ruled(name, "attnlrp")


def test_an_option_is_checked_where_it_is_given() -> None:
    model = HookedTransformer(build("gpt2"))
    with pytest.raises(ValueError, match="rules are"):
        attribution_patch(model, CLEAN, CORRUPT, metric=METRIC, rules="lrp")
    with pytest.raises(ValueError, match="rules are"):
        interp.tokens.GradientTimesInput("lrp")
