"""Results over training: joined by step, nothing dropped, the phase change found, and principal components exact."""

import math
import weakref

import numpy as np
import pytest
import torch
import xarray as xr

import interp
from interp import HookedTransformer
from interp.attention import Heads
from interp.dynamics import InContext, in_context, over_checkpoints, per_token_loss_pca, phase_change
from interp.dynamics.checkpoints import step_of
from interp.tasks import RepeatedTokens
from interp.zoo import revisions
from tests.batches import in_batches
from tests.configs import CONFIGS, build, perturbed, some_tokens

DATA = RepeatedTokens(period=6, repeats=3, rows=3)
NAMES = {"step30": "gpt2", "step4": "mqa", "step200": "bloom"}


def load(revision: str) -> HookedTransformer:
    return HookedTransformer(build(NAMES[revision]))


def curve(model: HookedTransformer) -> xr.Dataset:
    return in_context(model, some_tokens(), early=2, late=7)  # type: ignore[arg-type]


def series(values: list[float], steps: list[int]) -> xr.DataArray:
    return xr.DataArray(values, dims="step", coords={"step": steps}, name="induction")


# --- joining ------------------------------------------------------------------------------------------------------


def test_every_checkpoint_has_its_own_result_in_ascending_order() -> None:
    found = over_checkpoints(load, list(NAMES), Heads(repeats=DATA, sentences=None))
    assert found.step.values.tolist() == [4, 30, 200]
    for revision in NAMES:
        alone = interp.heads(load(revision), repeats=DATA, sentences=None)
        xr.testing.assert_identical(found.sel(step=step_of(revision), drop=True), alone)
    assert {cells.dims[0] for cells in found.data_vars.values()} == {"step"}
    same = over_checkpoints(load, list(NAMES), lambda m: interp.heads(m, repeats=DATA, sentences=None))
    xr.testing.assert_identical(same, found)


def test_question_is_asked_of_every_checkpoint_under_the_same_edits() -> None:
    silent = [interp.Edit("L0.attn", interp.edits.Zero())]
    batches = in_batches(load("step4"), some_tokens(), 2)
    found = over_checkpoints(
        lambda revision: load(revision).edited(silent),
        ["step30", "step4"],
        InContext(early=2, late=7),
        batches,
    )
    for revision in ("step30", "step4"):
        alone = in_context(load(revision).edited(silent), batches, early=2, late=7)
        xr.testing.assert_identical(found.sel(step=step_of(revision), drop=True), alone)
    with pytest.raises(ValueError, match="an iterator gives every row once: a list is required"):
        over_checkpoints(load, ["step30", "step4"], InContext(early=2, late=7), iter(some_tokens()))
    with pytest.raises(ValueError, match="data belong to a question as a record"):
        over_checkpoints(load, ["step30"], curve, some_tokens())


def test_one_checkpoint_has_the_dim_and_variables_keep_their_attributes() -> None:
    found = over_checkpoints(
        load, ["step4"], lambda m: curve(m).assign(more=("index", [0] * 8, {"unit": "u"}))
    )
    assert found.sizes == {"step": 1, "index": 8, "score": 2}
    assert found.value.dims == ("step", "index", "score")
    assert found["more"].attrs == {"unit": "u"}


def test_differing_attribute_becomes_a_variable_and_a_shared_one_stays() -> None:
    def noted(model: HookedTransformer) -> xr.Dataset:
        return curve(model).assign_attrs(error=0.5 if model.cfg.n_kv_heads == 1 else math.nan, note="same")

    found = over_checkpoints(load, ["step30", "step4"], noted)
    np.testing.assert_array_equal(found.error, [0.5, math.nan])
    assert found.attrs["note"] == "same" and "error" not in found.attrs
    only_one = over_checkpoints(
        load, ["step30", "step4"], lambda m: curve(m).assign_attrs({"x": 1} if m.cfg.n_kv_heads == 1 else {})
    )
    assert only_one.x.values.tolist() == [1, None]


def test_a_model_is_released_before_the_next_is_loaded() -> None:
    alive: list[weakref.ref[torch.nn.Module]] = []

    def fresh(revision: str) -> HookedTransformer:
        assert [ref() for ref in alive if ref() is not None] == []
        network = perturbed(CONFIGS["attention-only"], seed=step_of(revision))
        alive.append(weakref.ref(network))
        return HookedTransformer(network)

    over_checkpoints(fresh, ["step1", "step2", "step3"], curve)
    assert len(alive) == 3


@pytest.mark.parametrize(
    ("revision", "step"),
    [("step2850", 2850), ("checkpoint-3000", 3000), ("step1000-tokens4B", 1000), ("stage1-step71", 71)],
)
def test_the_step_is_read_off_the_revision(revision: str, step: int) -> None:
    assert step_of(revision) == step


def test_what_cannot_be_joined_is_refused() -> None:
    for bad in ([], ["step4", "step4"], ["step4", "checkpoint-4"]):
        with pytest.raises(ValueError, match="distinct steps are required"):
            over_checkpoints(load, bad, curve)
    with pytest.raises(ValueError, match=r"names its step is required, such as 'step2850', got 'main'"):
        over_checkpoints(load, ["step4", "main"], curve)
    with pytest.raises(ValueError, match="same coordinates at every step"):
        over_checkpoints(
            load, ["step4", "step30"], lambda m: curve(m).isel(index=slice(4 + (m.cfg.n_kv_heads == 1)))
        )
    with pytest.raises(ValueError, match=r"same variables at every step.*\['low'\]"):
        over_checkpoints(
            load, ["step4", "step30"], lambda m: curve(m).drop_vars("low" if m.cfg.n_kv_heads == 1 else [])
        )
    with pytest.raises(ValueError, match=r"\['value'\] are variables already"):
        over_checkpoints(
            load, ["step4", "step30"], lambda m: curve(m).assign_attrs(value=m.cfg.n_kv_heads or 0)
        )
    with pytest.raises(KeyError, match="step5"):
        over_checkpoints(load, ["step5"], curve)


# --- phase change -------------------------------------------------------------------------------------------------


def test_the_steepest_gap_is_the_one_of_the_largest_rise_per_step() -> None:
    found = phase_change(series([0.0, 0.5, 0.8, 0.81], [0, 1000, 1100, 5000]))
    assert (int(found.before), int(found.after)) == (1000, 1100), "the rise before it is larger, but slower"
    assert float(found.rise) == pytest.approx(0.3) and float(found.rate) == pytest.approx(0.003)
    assert found.attrs["of"] == "induction"


def test_earliest_of_equal_rises_counts_and_falls_are_found_with_a_minus() -> None:
    assert int(phase_change(series([0, 1, 2, 2], [1, 2, 3, 4])).before) == 1
    found = phase_change(-series([0.0, -0.1, -2.0], [5, 6, 7]))
    assert (int(found.before), float(found.rise)) == (6, pytest.approx(1.9))


def test_every_head_has_its_own_phase_change_and_keeps_its_label() -> None:
    values = torch.rand(5, 2, 3, dtype=torch.float64)
    steps = [1, 2, 4, 8, 16]
    table = xr.DataArray(
        values.numpy(),
        dims=("step", "layer", "head"),
        coords={"step": steps, "layer": [0, 1], "head": [0, 1, 2]},
    )
    found = phase_change(table.transpose("head", "step", "layer"))
    for layer in range(2):
        for head in range(3):
            rates = [float(values[i + 1, layer, head] - values[i, layer, head]) / steps[i] for i in range(4)]
            cell = found.sel(layer=layer, head=head)
            assert int(cell.before) == steps[int(np.argmax(rates))]
            assert float(cell.rate) == pytest.approx(max(rates))


def test_a_selected_score_names_the_series_and_parts_keep_their_names() -> None:
    table = over_checkpoints(load, ["step30", "step4"], Heads(repeats=DATA, sentences=None))
    found = phase_change(table.value.sel(score="induction"))
    assert (found.attrs["of"], found.attrs["unit"]) == ("induction", "attention mass")
    assert found.rate.attrs["unit"] == "attention mass per step"
    assert str(found.part.sel(layer=1, head=2).item()) == "L1H2"


def test_a_series_without_two_ascending_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="a dim 'step' with at least two checkpoints"):
        phase_change(series([1.0], [1]))
    with pytest.raises(ValueError, match="a dim 'step'"):
        phase_change(xr.DataArray([1.0, 2.0], dims="index"))
    for values, steps in (([1.0, 2.0], [2, 1]), ([1.0, math.nan], [1, 2])):
        with pytest.raises(ValueError, match="ascending steps and a value at each"):
            phase_change(series(values, steps))


@pytest.mark.slow
def test_demo_models_induction_and_in_context_score_move_as_its_log_says() -> None:
    rows = RepeatedTokens(rows=16)

    def both(model: HookedTransformer) -> xr.Dataset:
        own = rows.tokens(model.cfg.d_vocab, 0)
        best = interp.heads(model, repeats=rows, sentences=None).value.sel(score="induction", drop=True).max()
        return in_context(model, own, early=20, late=95).assign(
            induction=best.drop_vars("unit", errors="ignore")
        )

    shipped = revisions("demo-attn-2l")
    found = over_checkpoints(
        lambda r: HookedTransformer.from_pretrained("demo-attn-2l", revision=r), shipped, both
    )
    assert [int(step) for step in found.step] == [step_of(r) for r in shipped]
    score = found.sel(score="in_context", index=95)
    first, last = score.isel(step=0), score.isel(step=-1)
    assert float(first.induction) < 0.1 < 0.5 < float(last.induction)
    assert float(last.high) < float(first.low), "the intervals are apart"
    assert (score.induction.diff("step") > 0).all() and (score.value.diff("step") < 0).all()
    for rising in (found.induction, -score.value):
        change = phase_change(rising)
        assert 1200 <= int(change.before) < int(change.after) <= 3250


# --- principal components -----------------------------------------------------------------------------------------


def test_components_are_the_covariances_eigenvectors_with_stated_signs() -> None:
    losses = np.random.default_rng(0).normal(size=(6, 20)) * np.linspace(3, 1, 20) + 5
    found = per_token_loss_pca(xr.DataArray(losses, dims=("step", "prompt")), components=4)
    values, vectors = np.linalg.eigh(np.cov(losses, rowvar=False))
    for c in range(4):
        direction = vectors[:, -1 - c] * np.sign(vectors[np.abs(vectors[:, -1 - c]).argmax(), -1 - c])
        np.testing.assert_allclose(found.direction[c], direction, atol=1e-9)
        np.testing.assert_allclose(found.projection[:, c], (losses - losses.mean(0)) @ direction, atol=1e-9)
    np.testing.assert_allclose(found.explained, values[::-1][:4] / values.sum(), rtol=1e-9)
    np.testing.assert_allclose(found["mean"], losses.mean(0))


def test_a_planted_trajectory_that_turns_at_a_right_angle_is_recovered() -> None:
    """First along one direction, then along another: two components hold all of it."""
    generator = np.random.default_rng(1)
    one, two = np.linalg.qr(generator.normal(size=(50, 2)))[0].T
    along = np.array([[0, 0], [4, 0], [8, 0], [8, 1], [8, 2.0]])
    losses = xr.DataArray(
        4 + along @ np.stack((one, two)), dims=("step", "prompt"), coords={"step": [1, 2, 3, 4, 5]}
    )
    found = per_token_loss_pca(losses)
    assert float(found.explained.sum()) == pytest.approx(1)
    path = found.projection.to_numpy()
    steps = np.diff(path, axis=0)
    np.testing.assert_allclose(np.linalg.norm(steps, axis=1), [4, 4, 1, 1], rtol=1e-9)
    assert abs(steps[1] @ steps[2]) < 1e-9 < abs(steps[0] @ steps[1]), "the turn"
    np.testing.assert_allclose(
        found["mean"].to_numpy() + path @ found.direction.to_numpy(), losses, atol=1e-9
    )
    assert found.projection.dims == ("step", "component") and found.step.values.tolist() == [1, 2, 3, 4, 5]


def test_several_models_are_fitted_jointly_and_keep_their_dims() -> None:
    losses = np.random.default_rng(2).normal(size=(3, 4, 9))
    cube = xr.DataArray(
        losses, dims=("model", "step", "prompt"), coords={"model": ["a", "b", "c"], "step": range(4)}
    )
    joint = per_token_loss_pca(cube.transpose("prompt", "model", "step"))
    flat = per_token_loss_pca(xr.DataArray(losses.reshape(12, 9), dims=("step", "prompt")))
    assert joint.projection.dims == ("model", "step", "component")
    np.testing.assert_allclose(joint.projection.to_numpy().reshape(12, 2), flat.projection, atol=1e-12)
    assert joint.model.values.tolist() == ["a", "b", "c"]


def test_losses_that_never_change_explain_nothing() -> None:
    found = per_token_loss_pca(xr.DataArray(np.full((3, 4), 2.5), dims=("step", "prompt")), components=1)
    assert float(found.explained.sum()) == 0.0 and not found.projection.any()


def test_what_has_no_components_is_refused() -> None:
    losses = xr.DataArray(np.random.default_rng(0).normal(size=(3, 9)), dims=("step", "prompt"))
    with pytest.raises(
        ValueError, match="1 to 2 components are required for 3 snapshots of 9 prompts, got 3"
    ):
        per_token_loss_pca(losses, components=3)
    with pytest.raises(ValueError, match="finite losses and"):
        per_token_loss_pca(losses.where(losses > 0))
    with pytest.raises(ValueError, match=r"a dim 'prompt' are required, got dims \['step', 'index'\]"):
        per_token_loss_pca(losses.rename(prompt="index"))


def test_a_phase_change_of_infinite_values_is_refused() -> None:
    for value in (math.inf, -math.inf):
        with pytest.raises(ValueError, match="finite values are required, got some that are infinite"):
            phase_change(series([1.0, value, 2.0, 3.0], [1, 2, 3, 4]))
