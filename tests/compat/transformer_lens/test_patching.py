"""Patching: TransformerLens 3.9's numbers in every ready sweep, planned or index by index, and the options of one."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from interp.compat.transformer_lens import patching
from interp.compat.transformer_lens.hooked_transformer import HookedTransformer
from interp.compat.transformer_lens.patching import LazyLogits, plannable
from tests.loops import over

SAVED: dict[str, Any] = torch.load(Path(__file__).parents[1] / "data" / "tools_3_9.pt", weights_only=True)[
    "sweeps"
]
SWEEPS = [(kind, name) for kind, case in SAVED.items() for name in case["sweeps"]]


@pytest.fixture(autouse=True)
def _double() -> Any:
    """TransformerLens' results have torch's default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def model_of(kind: str) -> HookedTransformer:
    model = HookedTransformer(SAVED[kind]["cfg"])
    model.load_state_dict(SAVED[kind]["state"])
    return model


class Foreign:
    """A model that is not ours: what every hookable model has, and no more."""

    def __init__(self, model: HookedTransformer) -> None:
        self.cfg, self.passes = model.cfg, 0
        self._model = model

    def run_with_hooks(self, *args: Any, **kwargs: Any) -> Tensor:
        self.passes += 1
        return self._model.run_with_hooks(*args, **kwargs)


def given(kind: str) -> tuple[HookedTransformer, Tensor, Any]:
    model, saved = model_of(kind), SAVED[kind]
    return model, saved["corrupted"], model.run_with_cache(saved["clean"])[1]


def metric(logits: Tensor) -> Tensor:
    return (logits[:, -1, 3] - logits[:, -1, 5]).mean()


def everywhere(logits: Tensor) -> Tensor:
    return logits.softmax(-1).square().sum() / logits[0].abs().max()


@pytest.mark.slow
@over("kind, name", SWEEPS)
def test_every_ready_sweep_has_transformer_lens_numbers(kind: str, name: str) -> None:
    found = getattr(patching, name)(*given(kind), metric)
    torch.testing.assert_close(found, SAVED[kind]["sweeps"][name], rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", SAVED)
def test_a_metric_that_mixes_rows_and_positions_is_the_same(kind: str) -> None:
    found = patching.get_act_patch_attn_head_out_by_pos(*given(kind), everywhere)
    torch.testing.assert_close(found, SAVED[kind]["everywhere"], rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", SAVED)
@pytest.mark.parametrize("name", ["v_all_pos", "pattern_all_pos"])
def test_a_model_of_somebody_else_runs_index_by_index_to_the_same_numbers(kind: str, name: str) -> None:
    model, tokens, cache = given(kind)
    foreign = Foreign(model)
    sweep = getattr(patching, f"get_act_patch_attn_head_{name}")
    found = sweep(foreign, tokens, cache, metric)
    assert foreign.passes == found.numel()
    torch.testing.assert_close(found, sweep(model, tokens, cache, metric), rtol=0, atol=1e-10)


def test_our_own_model_is_planned_and_a_hooked_or_foreign_one_is_not() -> None:
    model, tokens, _ = given("ln")
    assert plannable(model, tokens) is model.engine.native
    assert plannable(Foreign(model), tokens) is None
    model.add_hook("blocks.0.hook_resid_pre", lambda value, hook: value)
    assert plannable(model, tokens) is None


def test_hooks_that_are_in_place_take_part() -> None:
    model, tokens, cache = given("ln")
    model.add_perma_hook("blocks.0.hook_mlp_out", lambda value, hook: 0 * value)
    foreign = patching.get_act_patch_resid_pre(Foreign(model), tokens, cache, metric)
    found = patching.get_act_patch_resid_pre(model, tokens, cache, metric)
    assert torch.equal(found, foreign)
    model.reset_hooks(including_permanent=True)
    assert not torch.allclose(found, patching.get_act_patch_resid_pre(model, tokens, cache, metric))


def test_parameters_that_point_elsewhere_are_noticed() -> None:
    model, tokens, cache = given("ln")
    model.blocks[0].attn.W_O.data = 2 * model.blocks[0].attn.W_O.data
    found = patching.get_act_patch_attn_head_out_all_pos(model, tokens, cache, metric)
    foreign = patching.get_act_patch_attn_head_out_all_pos(Foreign(model), tokens, cache, metric)
    torch.testing.assert_close(found, foreign, rtol=0, atol=1e-10)


def test_own_patch_setter_sees_value_index_and_donor_of_every_index() -> None:
    model, tokens, cache = given("ln")
    seen = []

    def setter(value: Tensor, index: list[int], donor: Tensor) -> Tensor:
        seen.append((index, donor is cache["blocks.1.attn.hook_z"]))
        value[:, index[1]] = donor[:, index[1]]
        return value

    some = pd.DataFrame({"layer": [1, 1], "pos": [2, 5]})
    given_df = {"activation_name": "z", "index_df": some}
    found, index = patching.generic_activation_patch(
        model, tokens, cache, metric, setter, return_index_df=True, **given_df
    )
    assert index is some
    assert seen == [([1, 2], True), ([1, 5], True)]
    planned = patching.generic_activation_patch(
        model, tokens, cache, metric, patching.layer_pos_patch_setter, **given_df
    )
    assert planned.shape == (2,)
    torch.testing.assert_close(found, planned, rtol=0, atol=1e-10)


@pytest.mark.parametrize("site", ["resid_post", "mlp_post", "pre", "q", "attn_scores"])
def test_ready_setters_work_at_other_sites(site: str) -> None:
    model, tokens, cache = given("ln")
    setter, axes = patching.layer_pos_patch_setter, ("layer", "pos")
    if site == "attn_scores":
        setter, axes = patching.layer_head_pattern_patch_setter, ("layer", "head")
    args = (tokens, cache, metric, setter, site, axes)
    found = patching.generic_activation_patch(model, *args)
    torch.testing.assert_close(
        found, patching.generic_activation_patch(Foreign(model), *args), rtol=0, atol=1e-10
    )


def test_a_site_that_stands_elsewhere_natively_is_not_planned() -> None:
    model, tokens, cache = given("ln")
    cells = pd.DataFrame([{"layer": 1, "pos": pos} for pos in (2, 5)])
    args = (tokens, cache, metric, patching.layer_pos_patch_setter, "normalized1ln2")
    found = patching.generic_activation_patch(model, *args, index_df=cells)
    assert torch.equal(found, patching.generic_activation_patch(Foreign(model), *args, index_df=cells))


def test_one_clean_prompt_serves_every_corrupted_one() -> None:
    model, tokens, _ = given("ln")
    _, cache = model.run_with_cache(SAVED["ln"]["clean"][:1])
    found = patching.get_act_patch_resid_pre(model, tokens, cache, metric)
    foreign = patching.get_act_patch_resid_pre(Foreign(model), tokens, cache, metric)
    torch.testing.assert_close(found, foreign, rtol=0, atol=1e-10)


def test_the_model_the_cache_and_the_tokens_are_left_as_they_were() -> None:
    model, tokens, cache = given("gqa")
    before = {name: value.clone() for name, value in cache.items()}, tokens.clone()
    patching.get_act_patch_attn_head_all_pos_every(model, tokens, cache, metric)
    assert all(torch.equal(cache[name], value) for name, value in before[0].items())
    assert torch.equal(tokens, before[1])
    assert all(not point.has_hooks() for point in model.hook_dict.values())


def test_exactly_one_of_axes_and_indices_is_required() -> None:
    model, tokens, cache = given("ln")
    args = (model, tokens, cache, metric, patching.layer_pos_patch_setter, "z")
    with pytest.raises(AssertionError):
        patching.generic_activation_patch(*args)
    with pytest.raises(AssertionError):
        patching.generic_activation_patch(*args, ("layer", "pos"), pd.DataFrame({"layer": [0], "pos": [0]}))
    with pytest.raises(AssertionError):
        patching.generic_activation_patch(*args, ("layer",))


def test_frames_of_ranges_run_the_last_column_fastest() -> None:
    frame = patching.make_df_from_ranges([2, 2], ["layer", "pos"])
    assert frame.to_numpy().tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert list(frame.columns) == ["layer", "pos"]


INDICES = [
    (slice(None), -1), (slice(None), -1, 3), (0, -1), (Ellipsis, -1, slice(None)), (Ellipsis, 2),
    (range(3), -1, [1, 2, 3]),
    (torch.arange(3), torch.tensor([1, 4, -1])), (torch.arange(3), torch.tensor([1, 4, 4]), torch.tensor([1, 2, 3])),
    (slice(None), slice(1, 3)), (slice(None), slice(None, None, 2), 4), 1, (slice(None), [0, -1]), (None, 0, -1),
    (slice(None), torch.tensor([True, False, True, False, True])), (slice(None), np.array([1, 2])), (1, slice(None), 2),
]  # fmt: skip


def lazy() -> tuple[LazyLogits, Tensor, list[int]]:
    stream, weight, positions = torch.randn(3, 5, 8), torch.randn(8, 11), []

    def read_out(some: Tensor) -> Tensor:
        positions.append(some.shape[1])
        return some @ weight

    return LazyLogits(stream, read_out, 11), stream @ weight, positions


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_lazy_logits_are_indexed_like_a_tensor(index: Any) -> None:
    found, whole, _ = lazy()
    assert type(found[index]) is Tensor
    torch.testing.assert_close(found[index], whole[index])


@pytest.mark.parametrize("index", INDICES[:5], ids=str)
def test_lazy_logits_compute_one_position_where_one_is_looked_at(index: Any) -> None:
    found, _, positions = lazy()
    found[index]
    assert positions == ([5] if index == (Ellipsis, 2) else [1])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.softmax(-1), lambda x: 1 - x, lambda x: torch.stack([x, x]), lambda x: x.mean(),
        lambda x: x.numpy(),
        lambda x: torch.einsum("bpv->b", x), lambda x: x.log_softmax(-1)[:, -1], lambda x: x.mT, np.asarray,
        lambda x: torch.nn.functional.cross_entropy(x[:, :-1].flatten(0, 1), torch.arange(12) % 11),
        lambda x: x.gather(-1, torch.zeros(3, 5, 1, dtype=torch.long)), lambda x: x.tolist(),
        lambda x: torch.vmap(torch.sum)(x),
    ],
)  # fmt: skip
def test_functions_of_lazy_logits_see_all_of_them(function: Any) -> None:
    found, whole, _ = lazy()
    np.testing.assert_allclose(np.asarray(function(found)), np.asarray(function(whole)))


def test_lazy_logits_know_their_shape_uncomputed_and_keep_what_is_written() -> None:
    found, whole, positions = lazy()
    assert isinstance(found, Tensor) and found.shape == whole.shape and found.dtype == whole.dtype
    assert (found.ndim, len(found), found.size(-1), found.device, positions) == (3, 3, 11, whole.device, [])
    found[:, -1, 0] = 7
    assert (found[:, -1, 0] == 7).all() and (found.sum() - whole.sum()).abs() > 1
    with pytest.raises(IndexError):
        lazy()[0][:, 5]
