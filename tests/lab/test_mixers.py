"""The contract of every mixer: whatever the kernel, the sites, the cache, the mask and the sums are those of the model.

That a mixer computes what its paper says is tested against a slow loop in a file of its own.
"""

import functools
import json
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import interp
from interp import HookedTransformer
from interp.families import load
from interp.lab import ConvMLP, DualChunk, Linear, Linformer
from interp.model import Alibi, Edit, Mamba2, ModelConfig, Read, Rotary, Tap, Weights, sites
from interp.passes.sweep import Sweep
from tests.configs import empty_cache, some_tokens
from tests.loops import over
from tests.mixers import CAUSAL_MIXERS, MIXERS, build_mixed
from tests.model.observed import noise
from tests.model.test_kv_cache import in_steps
from tests.model.test_mask import kept
from tests.passes.test_sweep import DIFFERENCE, asked, cells, in_rows
from tests.tolerances import assert_close

EVERY = pytest.mark.parametrize("name", MIXERS)
CAUSAL = pytest.mark.parametrize("name", CAUSAL_MIXERS)
SIDES = ("left", "right", "inside")
KEPT = torch.cat([kept(side) for side in SIDES])
"""The rows of `some_tokens()` padded on every side, one after another."""


def of_each_kind() -> Iterable[str]:
    """A model for each set of parameters that mixers and MLPs have here."""
    return {_parameters(name): name for name in MIXERS}.values()


def _parameters(name: str) -> frozenset[str]:
    own = (
        parameter.split(".", 2)[2] for parameter in build_mixed(name).state_dict() if "blocks" in parameter
    )
    return frozenset(parameter for parameter in own if not parameter.startswith("ln"))


@functools.cache
def plain(name: str) -> Tensor:
    """The logits of `some_tokens()`."""
    return build_mixed(name)(some_tokens())


@functools.cache
def observed(name: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The logits of `some_tokens()` and every site, on-demand ones included."""
    tap = Tap([Read(site) for site in sites.names(MIXERS[name], on_demand=True)])
    logits = build_mixed(name)(some_tokens(), tap)
    return logits, {read.site: value for read, value in tap.values.items()}


def layers_with(name: str, trait: str) -> list[int]:
    """The layers whose mixer has a trait."""
    return [layer for layer, mixer in enumerate(MIXERS[name].mixers) if getattr(mixer.traits, trait)]


@over("name", MIXERS)
def test_the_config_survives_json(name: str) -> None:
    config = MIXERS[name]
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@EVERY
def test_observing_every_site_changes_nothing(name: str) -> None:
    logits, values = observed(name)
    assert_close(logits, plain(name))
    assert all(torch.isfinite(value).all() for site, value in values.items() if "scores" not in site)


@over("name", MIXERS)
def test_every_site_has_the_shape_of_its_axes(name: str) -> None:
    config = MIXERS[name]
    sizes = {
        "b": 3,
        "p": 9,
        "q": 9,
        "k": 9,
        "h": config.n_heads,
        "g": config.kv_heads,
    }
    sizes |= {"d": config.d_model, "v": config.d_vocab, "1": 1}
    for site, value in observed(name)[1].items():
        row, layer = sites.find(site, config)
        of_z = row.name in ("attn.hook_z", "attn.hook_gate") and layer is not None
        wide = config.mixers[layer].z_width(config) if of_z else config.head_width  # type: ignore[index]
        expected = sizes | {"e": wide}
        known = {a: size for a, size in zip(row.axes.split(), value.shape, strict=True) if a in expected}
        assert known == {axis: expected[axis] for axis in known}, site


@EVERY
@over("split", [False, True])
def test_an_edit_at_every_site_reaches_the_logits(name: str, split: bool) -> None:
    """The value put is the value used: setting sites to what they hold changes nothing, perturbing one does."""
    model = build_mixed(name)
    every = sites.names(model.config, on_demand=True)
    names = [site for site in every if site.endswith("_input") == split]
    same = Tap(edits=[Edit(site, lambda value: value + 0.0) for site in names])
    assert_close(model(some_tokens(), same), plain(name))
    tokens = some_tokens(1)
    edits = [
        Edit(site, lambda value: value + 0.5 * torch.rand_like(value), rows=(row,))
        for row, site in enumerate(names)
    ]
    (unmoved,) = model(tokens)
    moved = model(tokens.expand(len(names), -1), Tap(edits=edits)) if names else ()
    assert [site for site, row in zip(names, moved, strict=True) if torch.allclose(row, unmoved)] == []


@over("name", MIXERS)
def test_z_is_the_pattern_of_the_values_where_the_mixer_says_so(name: str) -> None:
    model = build_mixed(name)
    for layer in layers_with(name, "additive"):
        pattern, v, z = (f"blocks.{layer}.attn.hook_{site}" for site in ("pattern", "v", "z"))
        tap = Tap([Read(site) for site in (pattern, v, z)])
        model(some_tokens(), tap)
        found = {read.site: value for read, value in tap.values.items()}
        heads = found[v].repeat_interleave(model.config.n_heads // model.config.kv_heads, 2)
        assert_close(torch.einsum("bhqk,bkhe->bqhe", found[pattern], heads), found[z])


@over("name", CAUSAL_MIXERS)
def test_nothing_depends_on_later_tokens(name: str) -> None:
    model, tokens = build_mixed(name), some_tokens()
    other = tokens.clone()
    other[:, 6:] = (other[:, 6:] + 1) % model.config.d_vocab
    assert_close(model(other)[:, :6], plain(name)[:, :6])


@EVERY
def test_padding_changes_no_number(name: str) -> None:
    model, tokens, keep = build_mixed(name), some_tokens().repeat(len(SIDES), 1), KEPT
    padded = model(tokens, keep=keep)
    observed = model(tokens, Tap([Read(site) for site in sites.names(model.config)]), keep=keep)
    assert_close(observed[keep], padded[keep])
    for row, real in enumerate(keep):
        assert_close(padded[row, real], model(tokens[row : row + 1, real])[0])


@over("name", CAUSAL_MIXERS)
def test_packed_documents_do_not_see_each_other(name: str) -> None:
    model, tokens = build_mixed(name), some_tokens()
    documents = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2]).expand(3, -1)
    packed = model(tokens, documents=documents)
    parts = [model(tokens[:, part]) for part in (slice(0, 4), slice(4, 7), slice(7, 9))]
    assert_close(packed, torch.cat(parts, 1))


@CAUSAL
@over("sizes", [[1] * 9, [9], [4, 5], [6, 1, 2]])
def test_steps_equal_the_full_pass(name: str, sizes: list[int]) -> None:
    model, tokens = build_mixed(name), some_tokens()
    assert_close(in_steps(model, tokens, sizes), plain(name))


@CAUSAL
def test_padded_steps_equal_the_full_pass(name: str) -> None:
    model, tokens = build_mixed(name), some_tokens().repeat(len(SIDES), 1)
    padded = model(tokens, keep=KEPT)[KEPT]
    for sizes in ([1] * 9, [6, 3]):
        assert_close(in_steps(model, tokens, sizes, KEPT)[KEPT], padded)


@over("name", CAUSAL_MIXERS)
def test_a_step_observes_what_the_full_pass_does(name: str) -> None:
    model, tokens, z = build_mixed(name), some_tokens(), Read("blocks.1.attn.hook_z")
    reads = [z, *(Read(f"blocks.{i}.attn.hook_pattern") for i in layers_with(name, "patterned"))]
    whole, step, cache = Tap(reads), Tap(reads), empty_cache(model, 3)
    model(tokens, whole)
    model(tokens[:, :7], cache=cache)
    model(tokens[:, 7:], step, cache=cache)
    assert_close(step.values[z], whole.values[z][:, 7:])
    for read in reads[1:]:
        if MIXERS[name].mixers[sites.find(read.site, MIXERS[name])[1] or 0].traits.keyed:
            assert_close(step.values[read], whole.values[read][:, :, 7:])


@over("name", CAUSAL_MIXERS)
def test_a_pass_that_fails_or_ends_early_leaves_the_cache_as_it_was(name: str) -> None:
    model, tokens, cache = build_mixed(name), some_tokens(), empty_cache(build_mixed(name), 3)
    model(tokens[:, :5], cache=cache)
    with pytest.raises(RuntimeError, match="the edit of"):
        model(tokens[:, 5:], Tap(edits=[Edit("blocks.1.hook_resid_post", lambda x: x @ x)]), cache=cache)
    model(tokens[:, 5:], Tap([Read("blocks.1.attn.hook_z")], answers_only=True), cache=cache)
    assert_close(model(tokens[:, 5:], cache=cache), plain(name)[:, 5:])


@over("name", MIXERS)
def test_the_wanted_columns_of_the_last_block_are_those_of_all(name: str) -> None:
    model, tokens = build_mixed(name), some_tokens()
    at = torch.tensor([[8], [3], [5]])
    assert_close(model(tokens, logits_at=at)[:, 0], plain(name)[torch.arange(3), at[:, 0]])


@over("name", MIXERS)
def test_a_pass_may_stop_and_start_between_blocks(name: str) -> None:
    model, tokens = build_mixed(name), some_tokens()
    assert_close(model(model(tokens, stop=1), start=1), plain(name))


@EVERY
def test_gradients_of_observed_and_fused_passes_agree(name: str) -> None:
    found = []
    for reads in ((), [Read(site) for site in sites.names(MIXERS[name])]):
        model = deepcopy(build_mixed(name)).requires_grad_(True)
        loss = model(some_tokens(), Tap(reads)).log_softmax(-1)[..., 3].sum()
        found.append(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))
    for fused, observed in zip(*found, strict=True):
        assert (fused is None) == (observed is None)
        if fused is not None:
            assert torch.isfinite(fused).all()
            assert_close(observed, fused)


@EVERY
def test_the_gradient_at_a_site_is_the_effect_of_a_small_edit(name: str) -> None:
    """Oracle: a central difference along a random direction, made with edits alone, a row for either end of a site."""
    model, step, tokens = build_mixed(name), 1e-6, some_tokens(1)
    weight, reads = noise(model(tokens)), [Read(site, grad=True) for site in sites.names(MIXERS[name])]
    tap = Tap(reads)
    metric = (model(tokens, tap) * weight).sum()
    gradients = torch.autograd.grad(metric, [tap.live[read] for read in reads])

    def moved(row: int, t: float) -> Edit:
        return Edit(reads[row // 2].site, lambda x: x + t * noise(x), rows=(row,))

    edits = [moved(2 * i + end, (step, -step)[end]) for i in range(len(reads)) for end in (0, 1)]
    ends = (model(tokens.expand(len(edits), -1), Tap(edits=edits)) * weight).sum((1, 2))
    for read, gradient, (up, down) in zip(reads, gradients, ends.view(-1, 2), strict=True):
        along = (gradient * noise(gradient)).sum()
        torch.testing.assert_close(along, (up - down) / (2 * step), rtol=1e-4, atol=1e-5, msg=read.site)


@EVERY
def test_a_planned_sweep_gives_the_numbers_of_ordinary_edits(name: str) -> None:
    """Oracle: one full pass without a plan, in which every variant has rows of its own."""
    model, batch = build_mixed(name), asked()
    inner = "v" if model.config.mixers[0].traits.valued else "gate"
    places = ("hook_embed", "blocks.0.hook_resid_post", f"blocks.0.attn.hook_{inner}", "blocks.1.attn.hook_z")
    variants = [variant for site in places for variant in cells(model, batch, site)]
    assert_close(Sweep(model, batch, variants).run(DIFFERENCE).values, in_rows(model, batch, variants))


@EVERY
@over("parts", ["layer", "sublayer", "head", "source"])
def test_attribution_sums_to_the_logit_difference_or_is_refused(name: str, parts: str) -> None:
    model, answer, wrong = build_mixed(name), torch.tensor([3, 14, 7]), torch.tensor([5, 1, 30])
    splits = layers_with(name, "additive")
    if parts == "source" and not splits:
        with pytest.raises(ValueError, match="z = pattern @ values"):
            interp.attribute(HookedTransformer(model), some_tokens(), answer, wrong, parts=parts)
        return
    found = interp.attribute(HookedTransformer(model), some_tokens(), answer, wrong, parts=parts)  # type: ignore[arg-type]
    last = plain(name)[:, -1]
    rows = torch.arange(3)
    assert_close(torch.tensor(found.value.sum("part").values), last[rows, answer] - last[rows, wrong])
    if parts == "source":
        heads = [f"L{layer}H{head}" for layer in splits for head in range(model.config.n_heads)]
        moved = found.by_source.sel(layer=list(splits)).sum("source").stack(part_of=("layer", "head"))
        assert_close(torch.tensor(moved.values), torch.tensor(found.value.sel(part=heads).values))
        others = [layer for layer in range(model.config.n_layers) if layer not in splits]
        assert bool(found.by_source.sel(layer=others).isnull().all())


@over("name", MIXERS)
def test_circuits_that_a_mixer_has_not_are_refused(name: str) -> None:
    weights = Weights(build_mixed(name))
    for circuit, trait in (("OV", "moves"), ("QK", "bilinear"), ("W_Q", "queries"), ("W_K", "queries")):
        if len(layers_with(name, trait)) < MIXERS[name].n_layers:
            with pytest.raises(AttributeError, match="has no"):
                getattr(weights, circuit)
        else:
            assert getattr(weights, circuit).shape[:2] == (
                MIXERS[name].n_layers,
                4 if circuit != "W_K" else MIXERS[name].kv_heads,
            )


@over("name", MIXERS)
def test_half_precision_is_near_double(name: str) -> None:
    low = build_mixed(name, torch.bfloat16)(some_tokens())
    assert low.dtype == torch.bfloat16
    assert_close(low.double(), plain(name), torch.bfloat16)


@pytest.mark.slow
@over("name", of_each_kind)
def test_a_model_is_stored_and_loaded(name: str, tmp_path: Path) -> None:
    model = build_mixed(name, torch.float32)
    load.save(model, tmp_path / name)
    again = load.from_folder(tmp_path / name)
    assert again.config == MIXERS[name]
    assert torch.equal(again(some_tokens()), model(some_tokens()))


BASE = MIXERS["pool"]
CONTRADICTIONS = {
    "a window on a linear mixer": ({"mixer": Linear(), "window": 4}, "no window under Linear"),
    "a bias on scores that do not exist": ({"mixer": Linear(), "position": Alibi()}, "other than Alibi"),
    "rotation without queries": ({"position": Rotary()}, "no qk_norm and no rotary"),
    "heads that do not divide": ({"n_kv_heads": 3, "mixer": Linear()}, "n_kv_heads to divide"),
    "chunks beyond the context": ({"mixer": DualChunk(200, 100), "position": Rotary()}, "chunk <= n_ctx"),
    "chunks without rotation": ({"mixer": DualChunk(8, 4)}, "rotary positions for DualChunk"),
    "more keys than there are": ({"mixer": Linformer(10_000), "causal": False}, "rank <= n_ctx"),
    "a future that leaks": ({"mixer": Linformer(4)}, "causal=False under Linformer"),
    "a state without an order": (
        {"mixer": Mamba2(4, 8, 4, 4), "causal": False},
        "a causal model under Mamba2",
    ),
    "a convolution that looks ahead": (
        {"mlp": ConvMLP(8, centred=True)},
        r"centred=True under .* in a causal model",
    ),
    "one that does not": (
        {"mlp": ConvMLP(8), "causal": False},
        r"centred=True under .* in a bidirectional model",
    ),
    "one without a middle": (
        {"mlp": ConvMLP(8, kernel=4, centred=True), "causal": False},
        "an odd kernel for a centred ConvMLP",
    ),
    "heads of z that cut a state": ({"mixer": Mamba2(1, 6, 4, 4)}, "n_heads = 4 to divide value_heads = 6"),
    "states that cut a group": ({"mixer": Mamba2(3, 8, 4, 4)}, "key_heads = 3 to divide value_heads = 8"),
    "no mixer": ({"mixer": ()}, "a mixer or several"),
}


@over("case", CONTRADICTIONS)
def test_configs_that_contradict_themselves_are_refused(case: str) -> None:
    changes, message = CONTRADICTIONS[case]
    with pytest.raises(ValueError, match=message):
        replace(BASE, **changes)  # type: ignore[arg-type]
