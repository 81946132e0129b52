"""The table of sites, row by row, on every config: shapes, reading, editing; and the names."""

import re

import pytest
from torch import Tensor

from interp.model import Edit, ModelConfig, MoE, Read, Tap, sites
from tests.configs import CONFIGS, build, some_tokens
from tests.loops import over
from tests.model.observed import everything, noise, plain_logits, site_of_each_row
from tests.tolerances import assert_close

EVERY = pytest.mark.parametrize("name", CONFIGS)
EACH = over("site", site_of_each_row)


def axis_sizes(config: ModelConfig, rows: int, n: int) -> dict[str, int]:
    sizes = {"b": rows, "p": n, "q": n, "k": n, "h": config.n_heads, "g": config.kv_heads, "1": 1}
    sizes |= {"d": config.d_model, "e": config.head_width, "v": config.d_vocab}
    sizes |= {"x": config.mlp.n_experts} if isinstance(config.mlp, MoE) else {}
    return sizes | ({} if config.mlp is None else {"m": config.mlp.d_mlp})


@EVERY
def test_every_site_has_its_declared_shape(name: str) -> None:
    config = CONFIGS[name]
    sizes = axis_sizes(config, *some_tokens().shape)
    for site, value in everything(name).items():
        axes = sites.find(site, config)[0].axes
        inside = ".mlp.shared." in site and isinstance(config.mlp, MoE)
        own = sizes | {"m": config.mlp.shared} if inside else sizes
        assert tuple(value.shape) == tuple(own[axis] for axis in axes.split()), site


@EVERY
def test_every_site_is_visited_exactly_once_layer_after_layer(name: str) -> None:
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
    tap = Tap([Read(site) for site in sites.names(CONFIGS[name], on_demand=True)])
    assert_close(build(name)(some_tokens(), tap), plain_logits(name))
    assert tap.values.keys() == set(tap.reads)


@EVERY
@EACH
def test_reading_one_site_changes_nothing_and_agrees_with_reading_all(name: str, site: str) -> None:
    tap = Tap([Read(site)])
    assert_close(build(name)(some_tokens(), tap), plain_logits(name))
    assert_close(tap.values[tap.reads[0]], everything(name)[site])


@EVERY
@EACH
def test_edit_by_the_identity_changes_nothing(name: str, site: str) -> None:
    logits = build(name)(some_tokens(), Tap(edits=[Edit(site, lambda x: x)]))
    assert_close(logits, plain_logits(name))


@EVERY
@EACH
def test_writing_what_was_read_changes_nothing(name: str, site: str) -> None:
    swap = Edit(site, lambda x: everything(name)[site].clone())
    assert_close(build(name)(some_tokens(), Tap(edits=[swap])), plain_logits(name))


@EVERY
@EACH
def test_edit_changes_its_rows_and_no_others(name: str, site: str) -> None:
    after = build(name)(some_tokens(), Tap(edits=[Edit(site, lambda x: x + noise(x), rows=(0, 2))]))
    change = (after - plain_logits(name)).abs().amax((1, 2))
    assert change[0] > 1e-4, "no effect on row 0"
    assert change[2] > 1e-4, "no effect on row 2"
    assert_close(after[1], plain_logits(name)[1])


@EVERY
@EACH
def test_edit_of_all_rows_equals_the_same_edit_of_each_row(name: str, site: str) -> None:
    def change(x: Tensor) -> Tensor:
        return x * 1.5 + noise(x[:1])

    whole = Tap(edits=[Edit(site, change)])
    each = Tap(edits=[Edit(site, change, rows=(row,)) for row in (2, 0, 1)])
    assert_close(build(name)(some_tokens(), whole), build(name)(some_tokens(), each))


@EVERY
@EACH
def test_a_read_sees_the_edit_of_its_site(name: str, site: str) -> None:
    tap = Tap([Read(site)], [Edit(site, lambda x: x + noise(x))])
    build(name)(some_tokens(), tap)
    before = everything(name)[site]
    assert_close(tap.values[tap.reads[0]], before + noise(before))


# --- names --------------------------------------------------------------------------------------------------------


def test_sites_that_a_model_lacks_are_refused_with_the_nearest_it_has() -> None:
    refused = {
        ("attention-only", "blocks.0.mlp.hook_post"): "has no 'blocks.0.mlp.hook_post'",
        ("attention-only", "blocks.0.hook_resid_mid"): "residual stream after attention",
        ("gpt2", "blocks.1.attn.hook_rot_q"): "queries after rotation",
        ("gpt2", "blocks.1.mlp.hook_pre_linear"): "the linear branch",
        ("parallel", "blocks.0.hook_resid_mid"): "has no",
        ("no-norm", "ln_final.hook_scale"): "what the norm before the unembedding divides by",
        ("no-final-norm", "ln_final.hook_normalized"): "has no",
        ("llama-gqa", "hook_pos_embed"): "position embeddings",
        ("gpt2", "blocks.0.attn.hook_patern"): "nearest: blocks.0.attn.hook_pattern",
        ("gpt2", "blocks.2.attn.hook_z"): "layers are 0 to 1 in this model, got 2",
        ("gpt2", "blocks.-1.attn.hook_z"): "got -1",
        ("gpt2", "attn.hook_z"): "unknown site 'attn.hook_z'",
    }
    for (name, site), message in refused.items():
        for item in ({"reads": [Read(site)]}, {"edits": [Edit(site, lambda x: x)]}):
            with pytest.raises(KeyError, match=re.escape(message)):
                build(name)(some_tokens(), Tap(**item))
    with pytest.raises(KeyError, match="unknown site ''"):
        build("gpt2")(some_tokens(), Tap([Read("")]))
    with pytest.raises(KeyError, match="no part ''"):
        Edit("", lambda x: x)


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


def test_a_shorthand_is_that_of_the_first_site_of_all_kinds_of_blocks() -> None:
    """Those of usual blocks are found without importing the others."""
    first: dict[str, str] = {}
    for name in (site.name for site in (*sites.block_rows(), *sites.MODEL_SITES)):
        if not re.search(r"ln|norm\.|^cross_|^mlp_before\.|^mlp\.shared\.", name):
            first.setdefault(name.rpartition("hook_")[2], name)
    assert len(first) > len(sites.BLOCK_SITES)
    assert {short: sites.full_name(short) for short in first} == first
