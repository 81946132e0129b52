"""Every mixer through the analyses: numbers that an oracle confirms, or a refusal that says why; never others."""

from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
from einops import rearrange
from torch import Tensor

import interp
from interp import HookedTransformer
from interp.causal.graph import EdgeGraph, reads_by_qkv
from interp.compat.hooked_export import to_hooked_state
from interp.lab import ConvMLP
from interp.lenses.factors import present
from interp.model import Read, Tap, Trace, Transformer, Weights, sites
from interp.passes.sweep import Sweep
from interp.residual import orders
from interp.residual.paths import frozen_reads
from interp.runs.tensor_parallel import check_tensor_parallel
from interp.tasks import RepeatedTokens
from interp.tokens.mixing import SourceSplit, contributions, mixing_reads
from interp.weights.matrices import matrix_place
from tests.configs import some_tokens
from tests.loops import over
from tests.mixers import MIXERS, build_mixed
from tests.passes.test_sweep import DIFFERENCE, asked, cells, loop
from tests.tolerances import assert_close

EVERY = over("name", MIXERS)
ANSWER, WRONG = torch.tensor([3, 14, 7]), torch.tensor([5, 1, 30])
CARRIED = (
    "attn.hook_q",
    "attn.hook_attn_scores",
    "attn.hook_first_pattern",
    "attn.hook_pattern_2",
    "mlp.hook_pre",
    "mlp.hook_expanded",
)
"""Sites of a block whose value at one column reaches others in some mixers, and stays in the rest."""


def lacking(name: str, trait: str) -> list[int]:
    """The layers whose mixer does not have a trait."""
    return [layer for layer, mixer in enumerate(MIXERS[name].mixers) if not getattr(mixer.traits, trait)]


def _put(value: Tensor, there: Tensor) -> Tensor:
    return value


def recorded(name: str, reads: list[Read]) -> Trace:
    """One pass."""
    tap = Tap(reads)
    build_mixed(name)(some_tokens(), tap)
    return Trace(tap.values)


@pytest.mark.parametrize("name", MIXERS)
def test_sweeps_over_the_last_block_give_the_numbers_of_the_loop(name: str) -> None:
    model, batch, config = build_mixed(name), asked(), MIXERS[name]
    known = set(sites.names(config))
    for site in (f"blocks.{config.n_layers - 1}.{short}" for short in CARRIED):
        if site in known:
            variants = cells(model, batch, site)
            assert_close(Sweep(model, batch, variants).run(DIFFERENCE).values, loop(model, batch, variants))


@EVERY
def test_a_block_splits_by_source_or_is_refused(name: str) -> None:
    model, config = build_mixed(name), MIXERS[name]
    for layer in range(config.n_layers):
        reads = [*mixing_reads(MIXERS[name], layer, "alti"), Read(f"blocks.{layer}.hook_attn_out")]
        if layer in lacking(name, "patterned"):
            with pytest.raises(KeyError, match="has no"):
                recorded(name, reads)
        elif layer in lacking(name, "additive"):
            with pytest.raises(ValueError, match="z = pattern @ values"):
                SourceSplit.of(model, layer, recorded(name, reads))
        else:
            trace = recorded(name, reads)
            assert_close(SourceSplit.of(model, layer, trace, "attn").output, trace[reads[-1]])


@EVERY
def test_attention_is_read_as_shares_only_where_rows_are_shares(name: str) -> None:
    model = build_mixed(name)
    for layer in range(MIXERS[name].n_layers):
        if layer in lacking(name, "patterned"):
            continue
        trace = recorded(
            name, [*mixing_reads(MIXERS[name], layer, "attention"), Read(f"blocks.{layer}.attn.hook_pattern")]
        )
        pattern = trace[Read(f"blocks.{layer}.attn.hook_pattern")]
        if layer in lacking(name, "distribution"):
            with pytest.raises(ValueError, match="weights that are shares"):
                contributions(model, layer, trace, "attention")
        else:
            found, _ = contributions(model, layer, trace, "attention")
            assert bool((pattern >= 0).all()) and bool((found.sum(-1) < 1 + 1e-6).all())
            if layer not in lacking(name, "scored") and not MIXERS[name].sinks:
                torch.testing.assert_close(found.sum(-1), torch.ones_like(found[..., 0]), rtol=0, atol=1e-4)


@EVERY
def test_paths_are_refused_where_heads_are_no_linear_maps(name: str) -> None:
    config = MIXERS[name]
    if config.mlp is None and lacking(name, "additive"):
        with pytest.raises(ValueError, match="z = pattern @ values"):
            frozen_reads(config)
    elif config.mlp is None and lacking(name, "values"):
        with pytest.raises(ValueError, match="requires a matrix W_V"):
            frozen_reads(config)
    elif config.mlp is None:
        found = orders(HookedTransformer(build_mixed(name)), some_tokens())
        assert found.attrs["completeness_error"] < 1e-9


@pytest.mark.slow
@EVERY
def test_head_scores_leave_out_what_a_mixer_has_not(name: str) -> None:
    config, data = MIXERS[name], RepeatedTokens(period=6, repeats=3, rows=2)
    model = HookedTransformer(build_mixed(name))
    if not config.causal:
        with pytest.raises(ValueError, match="a causal model"):
            interp.heads(model, repeats=data, sentences=None)
        return
    without = lacking(name, "patterned")
    if len(without) == config.n_layers:
        with pytest.raises(ValueError, match="head scores require an attention pattern"):
            interp.heads(model, repeats=data, sentences=None)
        return
    if isinstance(config.mlp, ConvMLP) and not lacking(name, "additive"):
        with pytest.raises(ValueError, match="an MLP of single positions"):
            interp.heads(model, repeats=data, sentences=None)
        return
    table = interp.heads(model, repeats=data, sentences=None)
    induction = table.value.sel(score="induction").notnull()
    for layer in range(config.n_layers):
        assert bool(induction.sel(layer=layer).all()) != (layer in without)
    for layer in range(config.n_layers):
        known = table.value.sel(score="entropy", layer=layer).notnull().values
        assert bool(known.all()) != (layer in lacking(name, "distribution"))
    assert ("copying" in table.score) == (not lacking(name, "moves"))
    assert ("no_copying" in table.attrs) == bool(lacking(name, "moves"))


@EVERY
def test_functions_of_weights_refuse_circuits_that_do_not_exist(name: str) -> None:
    model = HookedTransformer(build_mixed(name))
    kinds = set(interp.weights.spectra(model).kind.values)
    n = MIXERS[name].n_layers
    for circuit, trait in (("OV", "moves"), ("QK", "bilinear")):
        assert (circuit in kinds) == (len(lacking(name, trait)) < n)
    for function, trait in (
        (interp.copying, "moves"), (lambda m: interp.composition(m, kind="V"), "moves"),
        (lambda m: interp.composition(m, kind="K"), "bilinear"),
    ):  # fmt: skip
        if lacking(name, trait):
            with pytest.raises(AttributeError, match="has no"):
                function(model)


@EVERY
def test_edges_into_heads_are_refused_where_heads_read_in_other_ways(name: str) -> None:
    config, model = MIXERS[name], HookedTransformer(build_mixed(name))
    end = "L1H0.v" if config.kv_heads == config.n_heads else "L1G0.v"
    if reads_by_qkv(config):
        assert len(EdgeGraph.of(config)) > 0
        return
    with pytest.raises(ValueError, match="otherwise than as queries, keys and values"):
        EdgeGraph.of(config)
    with pytest.raises(ValueError, match="as queries, keys and values alone"):
        interp.path_patch(model, some_tokens(), some_tokens(seed=1), [end], metric=DIFFERENCE)


@EVERY
def test_a_put_of_all_that_heads_read_is_all_that_they_read(name: str) -> None:
    """The oracle of `reads_by_qkv`: with q, k and v of the other tokens, z is that of the other tokens."""
    config, model = MIXERS[name], build_mixed(name)
    traits = config.mixers[0].traits
    has = {"q": traits.queries, "k": traits.queries, "v": traits.valued}
    read = [Read(f"blocks.0.attn.hook_{part}") for part, there in has.items() if there]
    z = Read("blocks.0.attn.hook_z")
    other = Tap([*read, z])
    model(some_tokens(seed=1), other)
    held_values: dict[str, Tensor] = {r.site: other.values[r] for r in read}
    tap = Tap([z], [interp.Edit(site, partial(_put, v)) for site, v in held_values.items()])
    model(some_tokens(), tap)
    same = torch.allclose(tap.values[z], other.values[z])
    assert same or not reads_by_qkv(config)


@EVERY
def test_matrices_are_found_by_name_or_refused(name: str) -> None:
    model = build_mixed(name)
    for matrix in ("W_Q", "W_K", "W_V", "W_O"):
        parameter = "out.weight" if matrix == "W_O" else "qkv.weight"
        if parameter in dict(model.block(0).attn.named_parameters()):
            mine = matrix_place(model, f"blocks.0.attn.{matrix}").in_(model)
            assert torch.equal(mine, getattr(Weights(model).layer(0), matrix))
        else:
            with pytest.raises(ValueError, match="no such matrix of its own"):
                matrix_place(model, f"blocks.0.attn.{matrix}")


@pytest.mark.parametrize("name", [n for n, c in MIXERS.items() if c.causal and not lacking(n, "queries")])
def test_factors_of_a_matrix_are_its_gradient(name: str) -> None:
    config, model = MIXERS[name], HookedTransformer(build_mixed(name))
    live = deepcopy(build_mixed(name)).requires_grad_(True)
    loss = -live(some_tokens())[:, -1].log_softmax(-1)[torch.arange(3), ANSWER].sum()
    found = interp.lenses.gradient_factors(model, some_tokens(), ANSWER, prepend_bos=False)
    for matrix in present(config):
        full = f"blocks.0.{'attn' if matrix in ('W_Q', 'W_K', 'W_V', 'W_O') else 'mlp'}.{matrix}"
        try:
            place = matrix_place(live, full)
        except ValueError:
            continue
        (gradient,) = torch.autograd.grad(loss, live.get_parameter(place.parameter), retain_graph=True)
        product = torch.zeros(())
        for layer in range(config.n_layers if config.shared_blocks else 1):
            x, delta = found[full.replace(".0.", f".{layer}.")]
            product = product + torch.einsum("bpi,bpo->io", x.flatten(2), delta.flatten(2))
        sides = {"W_O": "h e d -> (h e) d"} | dict.fromkeys(("W_Q", "W_K", "W_V"), "h d e -> d (h e)")
        expected = place.view(gradient)
        assert_close(product, rearrange(expected, sides[matrix]) if matrix in sides else expected)


@EVERY
def test_other_formats_and_machines_refuse_what_they_do_not_know(name: str) -> None:
    model = build_mixed(name)
    if name == "shared-blocks":  # TransformerLens can have that model, with the weights once for each layer
        network = model if isinstance(model, Transformer) else model.transformer
        apart = Transformer(replace(network.config, shared_blocks=False)).to(network.dtype)
        layers = range(network.config.n_layers)
        stored = network.state_dict().items()
        apart.load_state_dict(
            {key.replace("blocks.0.", f"blocks.{i}."): value for i in layers for key, value in stored}
        )
        (state, fields), (expected, same) = (
            to_hooked_state(each) for each in (network, apart.to(network.dtype))
        )
        assert fields == same and state.keys() == expected.keys()
        assert all(torch.equal(state[key], expected[key]) for key in state)
    else:
        with pytest.raises(ValueError, match="cannot express"):
            to_hooked_state(model)
    with pytest.raises(ValueError, match=r"mixer=|mlp=|shared_blocks="):
        check_tensor_parallel(model.config, 2)


@pytest.mark.parametrize(
    "name",
    ["differential", "additive-log-n", "refined-value", "synthesizer", "synthesizer-random", "polar", "pool"],
)
def test_the_numerical_contract_holds(name: str) -> None:
    found = HookedTransformer(build_mixed(name)).verify()
    assert "RED" not in str(found)
    assert ("pattern @ v = z" in str(found)) == (not lacking(name, "additive"))
