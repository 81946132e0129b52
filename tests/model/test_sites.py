"""The table of sites, row by row, on every config: shapes, reading, editing, differentiating."""

import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from interp.model import Edit, ModelConfig, Read, Tap, Transformer, sites
from tests.configs import CONFIGS, build, some_tokens
from tests.tolerances import assert_close

EVERY = pytest.mark.parametrize("name", CONFIGS)
TABLE = {site.name: site for site in sites.BLOCK_SITES + sites.MODEL_SITES}


def pairs() -> Iterator[tuple[str, str]]:
    """Every config with every table row that it has."""
    for name, config in CONFIGS.items():
        for site in TABLE.values():
            if site.present(config):
                yield name, site.name


EACH = pytest.mark.parametrize(("name", "row"), list(pairs()))


def full_names(config: ModelConfig, row: str) -> list[str]:
    """The sites of one table row: one per layer, or one in all."""
    if row in {site.name for site in sites.MODEL_SITES}:
        return [row]
    return [f"blocks.{layer}.{row}" for layer in range(config.n_layers)]


def noise(like: Tensor) -> Tensor:
    """A fixed random tensor, different at every entry, so that no norm or softmax is blind to it."""
    return 0.5 * torch.randn(like.shape, generator=torch.Generator().manual_seed(1), dtype=like.dtype)


def observed(model: Transformer, tokens: Tensor, *reads: Read) -> dict[str, Tensor]:
    tap = Tap(reads)
    model(tokens, tap)
    return {read.site: value for read, value in tap.values.items()}


def axis_sizes(config: ModelConfig, rows: int, n: int) -> dict[str, int]:
    sizes = {"b": rows, "p": n, "q": n, "k": n, "h": config.n_heads, "g": config.kv_heads, "1": 1}
    sizes |= {"d": config.d_model, "e": config.head_width, "v": config.d_vocab}
    return sizes | ({} if config.mlp is None else {"m": config.mlp.d_mlp})


@EACH
def test_site_has_its_declared_shape(name: str, row: str) -> None:
    config = CONFIGS[name]
    sizes = axis_sizes(config, rows=3, n=9)
    for site in full_names(config, row):
        shape = observed(build(name), some_tokens(), Read(site))[site].shape
        assert tuple(shape) == tuple(sizes[axis] for axis in TABLE[row].axes.split())


@EVERY
def test_every_site_is_visited_exactly_once_in_the_order_of_the_table(name: str) -> None:
    visited: list[str] = []

    def noting(site: str) -> Read:
        return Read(site, via=lambda x: (visited.append(site), x[:1])[1])

    names = sites.names(CONFIGS[name], on_demand=True)
    build(name)(some_tokens(), Tap([noting(site) for site in names]))
    assert sorted(visited) == sorted(names)
    layers = [site.split(".")[1] for site in visited if site.startswith("blocks")]
    assert layers == sorted(layers)


@EVERY
def test_reading_everything_changes_nothing(name: str) -> None:
    model, tokens = build(name), some_tokens()
    tap = Tap([Read(site) for site in sites.names(CONFIGS[name], on_demand=True)])
    assert_close(model(tokens, tap), model(tokens))
    assert tap.values.keys() == set(tap.reads)


@EACH
def test_reading_one_site_changes_nothing_and_agrees_with_reading_all(name: str, row: str) -> None:
    model, tokens = build(name), some_tokens()
    everything = observed(model, tokens, *map(Read, sites.names(CONFIGS[name], on_demand=True)))
    for site in full_names(CONFIGS[name], row):
        tap = Tap([Read(site)])
        assert_close(model(tokens, tap), model(tokens))
        assert_close(tap.values[tap.reads[0]], everything[site])


@EACH
def test_edit_by_the_identity_changes_nothing(name: str, row: str) -> None:
    model, tokens = build(name), some_tokens()
    for site in full_names(CONFIGS[name], row):
        assert_close(model(tokens, Tap(edits=[Edit(site, lambda x: x)])), model(tokens))


@EACH
def test_edit_changes_its_rows_and_no_others(name: str, row: str) -> None:
    model, tokens = build(name), some_tokens()
    before = model(tokens)
    for site in full_names(CONFIGS[name], row):
        after = model(tokens, Tap(edits=[Edit(site, lambda x: x + noise(x), rows=(0, 2))]))
        change = (after - before).abs().amax((1, 2))
        assert change[0] > 1e-4, f"{site} has no effect"
        assert change[2] > 1e-4, f"{site} has no effect"
        assert_close(after[1], before[1])


@EACH
def test_edit_of_all_rows_equals_the_same_edit_of_each_row(name: str, row: str) -> None:
    model, tokens = build(name), some_tokens()

    def change(x: Tensor) -> Tensor:
        return x * 1.5 + noise(x[:1])

    for site in full_names(CONFIGS[name], row):
        whole = model(tokens, Tap(edits=[Edit(site, change)]))
        each = model(tokens, Tap(edits=[Edit(site, change, rows=(i,)) for i in (2, 0, 1)]))
        assert_close(whole, each)


@EACH
def test_a_read_sees_the_edit_of_its_site(name: str, row: str) -> None:
    model, tokens = build(name), some_tokens()
    for site in full_names(CONFIGS[name], row):
        before = observed(model, tokens, Read(site))[site]
        tap = Tap([Read(site)], [Edit(site, lambda x: x + noise(x))])
        model(tokens, tap)
        assert_close(tap.values[tap.reads[0]], before + noise(before))


@EACH
def test_writing_what_was_read_gives_the_same_logits(name: str, row: str) -> None:
    model, tokens = build(name), some_tokens()
    for site in full_names(CONFIGS[name], row):
        value = observed(model, tokens, Read(site))[site]
        swap = Edit(site, lambda x, value=value: value.clone())
        assert_close(model(tokens, Tap(edits=[swap])), model(tokens))


@EACH
def test_gradient_equals_the_effect_of_a_small_edit(name: str, row: str) -> None:
    """Oracle: a central difference along a random direction, made with edits alone."""
    model, tokens, step = build(name), some_tokens(), 1e-5
    weight = noise(model(tokens))
    for site in full_names(CONFIGS[name], row):
        tap = Tap([Read(site, grad=True)])
        (gradient,) = torch.autograd.grad((model(tokens, tap) * weight).sum(), tap.live[tap.reads[0]])

        def metric(t: float, site: str = site) -> Tensor:
            moved = Edit(site, lambda x: x + t * noise(x))
            return (model(tokens, Tap(edits=[moved])) * weight).sum()

        slope = (metric(step) - metric(-step)) / (2 * step)
        expected = (gradient * noise(gradient)).sum()
        assert abs(slope) > 1e-6, f"{site}: the direction is blind"
        torch.testing.assert_close(expected, slope, rtol=1e-5, atol=1e-6)


@EVERY
def test_gradients_at_all_sites_in_one_pass_equal_those_of_separate_passes(name: str) -> None:
    model, tokens = build(name), some_tokens()
    # The per-head copies would cut their norm out of the graph, so they are asked for on their own.
    names = [s for s in sites.names(CONFIGS[name]) if ".ln1." not in s]
    tap = Tap([Read(site, grad=True) for site in names])
    weight = noise(model(tokens))
    together = torch.autograd.grad((model(tokens, tap) * weight).sum(), [tap.live[r] for r in tap.reads])
    for read, gradient in zip(tap.reads, together, strict=True):
        alone = Tap([read])
        (expected,) = torch.autograd.grad((model(tokens, alone) * weight).sum(), alone.live[read])
        assert_close(gradient, expected)


# --- names --------------------------------------------------------------------------------------------------------


def test_sites_that_a_model_does_not_have_are_refused_with_the_nearest_it_has() -> None:
    refused = {
        ("attention-only", "blocks.0.mlp.hook_post"): "has no 'blocks.0.mlp.hook_post'",
        ("attention-only", "blocks.0.hook_resid_mid"): "residual stream between attention and MLP",
        ("gpt2", "blocks.1.attn.hook_rot_q"): "queries after rotation",
        ("gpt2", "blocks.1.mlp.hook_pre_linear"): "the linear branch",
        ("parallel", "blocks.0.hook_resid_mid"): "has no",
        ("no-norm", "ln_final.hook_scale"): "what the final norm divides by",
        ("no-final-norm", "ln_final.hook_normalized"): "has no",
        ("llama-gqa", "hook_pos_embed"): "position embeddings",
        ("gpt2", "blocks.0.attn.hook_patern"): "nearest: blocks.0.attn.hook_pattern",
        ("gpt2", "blocks.2.attn.hook_z"): "layers are 0 to 1 in this model, got 2",
        ("gpt2", "blocks.-1.attn.hook_z"): "got -1",
        ("gpt2", "attn.hook_z"): "unknown site 'attn.hook_z'",
        ("gpt2", ""): "unknown site ''",
    }
    for (name, site), message in refused.items():
        for item in ({"reads": [Read(site)]}, {"edits": [Edit(site, lambda x: x)]}):
            with pytest.raises(KeyError, match=re.escape(message)):
                build(name)(some_tokens(), Tap(**item))


@EVERY
def test_find_knows_every_listed_site_and_its_layer(name: str) -> None:
    config = CONFIGS[name]
    for full in sites.names(config, on_demand=True):
        site, layer = sites.find(full, config)
        assert full == (site.name if layer is None else f"blocks.{layer}.{site.name}")
    assert len(set(sites.names(config, on_demand=True))) == len(sites.names(config, on_demand=True))


def test_everything_means_no_site_that_costs_extra() -> None:
    cheap = sites.names(CONFIGS["gpt2"])
    asked = set(sites.names(CONFIGS["gpt2"], on_demand=True)) - set(cheap)
    assert {name.rpartition("hook_")[2] for name in asked} == {
        "q_input", "k_input", "v_input", "result", "mlp_in", "out",
    }  # fmt: skip


def test_shorthands_are_those_of_transformerlens() -> None:
    expected = {
        ("pattern", 3): "blocks.3.attn.hook_pattern",
        ("resid_post", 0): "blocks.0.hook_resid_post",
        ("mlp_out", 1): "blocks.1.hook_mlp_out",
        ("post", 1): "blocks.1.mlp.hook_post",
        ("q", 0): "blocks.0.attn.hook_q",
        ("embed",): "hook_embed",
        ("pos_embed",): "hook_pos_embed",
        ("scale", 2, "ln1"): "blocks.2.ln1.hook_scale",
        ("blocks.0.hook_resid_pre",): "blocks.0.hook_resid_pre",
    }
    assert {short: sites.full_name(*short) for short in expected} == expected
    with pytest.raises(KeyError, match="nearest: pattern"):
        sites.full_name("patern", 0)
