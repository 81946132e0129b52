"""The logit lens: equal to a slow read-out, to the model itself at the end, and blind to padding."""

import copy

import numpy as np
import pytest
import torch
import xarray as xr

import interp
from interp import Batch, Edit, HookedTransformer
from interp.edits import Zero
from interp.lenses import TunedLens, lens
from tests.configs import CAUSAL, CONFIGS, build, perturbed, some_tokens
from tests.edited import without_head
from tests.loops import over
from tests.model.slow import slow_read_out
from tests.tolerances import assert_close


def of(values: np.ndarray) -> torch.Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_statistic_equals_a_loop_over_depths_and_positions(name: str) -> None:
    model, tokens = HookedTransformer(build(name)), some_tokens()
    result = interp.logit_lens(model, tokens, top=3)
    last = "L1.normalized_resid_post" if CONFIGS[name].norms_sum else "L1.resid_post"
    assert result.depth.values.tolist() == ["L0.resid", "L1.resid", last]
    table = {key: value.values for key, value in result.data_vars.items()}
    final = model(tokens).log_softmax(-1)  # type: ignore[union-attr]
    for depth in range(3):
        state = model.transformer(tokens, stop=depth)
        for row in range(3):
            logits = slow_read_out(model.transformer, state[row])
            for pos, logp in enumerate(logits.log_softmax(-1)):
                cell, order = (row, depth, pos), logp.argsort(descending=True)
                assert table["top_token"][cell].tolist() == order[:3].tolist()
                assert_close(of(table["top_prob"][cell]), logp.exp()[order[:3]])
                entropy, kl = (
                    -(logp.exp() * logp).sum(),
                    (final[row, pos].exp() * (final[row, pos] - logp)).sum(),
                )
                assert table["entropy"][cell] == pytest.approx(float(entropy), rel=1e-9)
                assert table["kl"][cell] == pytest.approx(float(kl), rel=1e-9, abs=1e-9)
                if pos < 8:
                    target = int(tokens[row, pos + 1])
                    assert table["target_rank"][cell] == order.tolist().index(target)
                    assert table["target_prob"][cell] == pytest.approx(float(logp[target].exp()), rel=1e-9)
                else:
                    assert table["target_rank"][cell] == -1 and np.isnan(table["target_prob"][cell])


@pytest.mark.parametrize("name", CONFIGS)
def test_the_last_depth_is_the_models_own_distribution(name: str) -> None:
    model = HookedTransformer(build(name))
    last = interp.logit_lens(model, some_tokens(), top=1).isel(depth=-1)
    probs = model(some_tokens()).softmax(-1)  # type: ignore[union-attr]
    assert_close(of(last.top_prob.values[..., 0]), probs.max(-1).values)
    assert float(abs(last.kl).max()) == 0.0


def test_an_answer_is_the_target_at_every_position() -> None:
    model = HookedTransformer(build("gpt2"))
    result = interp.logit_lens(model, some_tokens(), answer=[3, 14, 7])
    probs = model(some_tokens()).softmax(-1)  # type: ignore[union-attr]
    expected = torch.stack([probs[i, :, a] for i, a in enumerate((3, 14, 7))])
    assert_close(of(result.target_prob.isel(depth=-1).values), expected)


@pytest.mark.parametrize("name", CAUSAL)
@over("side", ["left", "right"])
def test_padded_positions_hold_nothing_and_the_others_the_unpadded_numbers(name: str, side: str) -> None:
    rows = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9]]
    model = HookedTransformer(build(name))
    padded = interp.logit_lens(model, Batch.of(rows, side=side), top=2)  # type: ignore[arg-type]
    alone = interp.logit_lens(model, torch.tensor(rows[0]), top=2)
    real = slice(0, 5)
    for name_ in ("entropy", "kl", "top_prob", "target_prob"):
        ours, expected = padded[name_].isel(prompt=0, pos=real).values, alone[name_].values[0]
        assert_close(of(np.nan_to_num(ours, nan=-1.0)), of(np.nan_to_num(expected, nan=-1.0)))
    hidden = [i for i in range(8) if i not in range(8)[real]]
    assert np.isnan(padded.entropy.values[0][:, hidden]).all()
    assert (padded.target_rank.values[0][:, hidden] == -1).all()


def test_the_size_of_the_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = HookedTransformer(build("gpt2"))
    whole = interp.logit_lens(model, some_tokens())
    monkeypatch.setattr(lens, "CHUNK", 4)
    split = interp.logit_lens(model, some_tokens())
    assert_close(of(split.kl.values), of(whole.kl.values))
    assert (split.top_token.values == whole.top_token.values).all()


def test_more_tokens_than_the_vocabulary_has_are_refused() -> None:
    with pytest.raises(ValueError, match=r"top must be in \[1, 31\], got 32"):
        interp.logit_lens(HookedTransformer(build("gpt2")), some_tokens(), top=32)


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "gemma2", "post-norm", "parallel"])
def test_every_residual_state_is_read_as_the_model_reads_its_last(name: str) -> None:
    network, tokens = build(name), some_tokens()
    sites = ["resid_pre", "resid_post"] + ([] if name == "parallel" else ["resid_mid"])
    result = interp.logit_lens(HookedTransformer(network), tokens, sites=sites, top=1)
    names_ = [*lens.lens_sites(network.config, sites)]
    order = {
        "parallel": "L0.resid L0.resid_post L1.resid L1.resid_post",
        "post-norm": "L0.resid L0.resid_mid L0.resid_post L1.resid L1.resid_mid L1.resid_post "
        "L1.normalized_resid_post",
    }
    expected = order.get(name, "L0.resid L0.resid_mid L0.resid_post L1.resid L1.resid_mid L1.resid_post")
    assert result.depth.values.tolist() == expected.split()
    _, cache = HookedTransformer(network).run_with_cache(tokens)
    for depth, site in enumerate(names_):
        probs = slow_read_out(network, cache[site].flatten(0, 1)).softmax(-1)
        assert_close(of(result.top_prob.values[:, depth, :, 0]).flatten(), probs.max(-1).values)


def test_one_state_may_be_named_in_full() -> None:
    model = HookedTransformer(build("gpt2"))
    one = interp.logit_lens(model, some_tokens(), sites="blocks.1.hook_resid_mid")
    all_ = interp.logit_lens(model, some_tokens(), sites="resid_mid")
    assert one.depth.values.tolist() == ["L1.resid_mid", "L1.resid_post"]
    assert_close(of(one.kl.values), of(all_.sel(depth=one.depth.values).kl.values))


@pytest.mark.parametrize("side", ["left", "right"])
def test_chosen_positions_are_counted_over_each_prompts_own_tokens(side: str) -> None:
    rows = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9]]
    model = HookedTransformer(build("llama-gqa"))
    some = interp.logit_lens(model, Batch.of(rows, side=side), pos=[0, -2])  # type: ignore[arg-type]
    assert some.pos.values.tolist() == [0, -2]
    for i, row in enumerate(rows):
        alone = interp.logit_lens(model, torch.tensor(row)).isel(prompt=0, pos=[0, len(row) - 2])
        for name in ("kl", "entropy", "target_prob", "top_prob"):
            assert_close(of(some[name].values[i]), of(alone[name].values))
        assert (some.target_rank.values[i] == alone.target_rank.values).all()


def test_the_width_of_the_tiles_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """31 words in tiles of 4: the last is narrower, and the top 10 come from more than one tile."""
    model = HookedTransformer(build("gemma2"))
    whole = interp.logit_lens(model, some_tokens())
    monkeypatch.setattr(lens, "COLUMNS", 4)
    tiled = interp.logit_lens(model, some_tokens())
    assert (tiled.word == whole.word).all()
    for name in whole.drop_vars("word"):
        np.testing.assert_allclose(tiled[name].values, whole[name].values, rtol=1e-9, atol=1e-9)


def test_a_result_brings_its_words_along() -> None:
    model = HookedTransformer(build("gpt2"))
    batch = Batch.of([[5, 6, 7], [8, 9]])
    result = interp.logit_lens(model, batch, top=2)
    assert result.token.values.tolist() == [["<5>", "<6>", "<7>"], ["<8>", "<9>", ""]]
    words = [[f"<{i}>" for i in row] for row in result.top_token.values[0].reshape(-1, 2)]
    assert result.word.values[0].reshape(-1, 2).tolist() == words


def test_equal_logits_share_the_better_rank() -> None:
    network = perturbed(CONFIGS["gpt2"])
    with torch.no_grad():
        network.unembed.weight.zero_()  # type: ignore[union-attr]
    result = interp.logit_lens(HookedTransformer(network), some_tokens(), answer=30)
    assert (result.target_rank == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_weights_give_their_streams_distribution_in_float32(dtype: torch.dtype) -> None:
    """Not that of the model's own logits, which are rounded to its dtype."""
    model = HookedTransformer(build("gemma2", dtype))
    last = interp.logit_lens(model, some_tokens(), top=1).isel(depth=-1)
    stream = model.transformer(some_tokens(), stop=2).float()
    probs = copy.deepcopy(model.transformer).float().read_out(stream).softmax(-1)
    assert_close(of(last.top_prob.values[..., 0]), probs.max(-1).values, torch.float32)


def test_the_curve_is_the_mean_over_positions_then_over_prompts() -> None:
    rows = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9]]
    model = HookedTransformer(build("gpt2"))
    curve = lens.by_depth(interp.logit_lens(model, Batch.of(rows)))
    means = [interp.logit_lens(model, torch.tensor(row)).kl.mean(("prompt", "pos")).values for row in rows]
    kl = curve.sel(score="kl")
    assert_close(of(kl.value.values), of((means[0] + means[1]) / 2))
    two = curve.sel(score=["kl", "entropy"])
    assert two.low.isnull().all() and two.high.isnull().all(), "two prompts carry no interval, but of a share"
    assert (curve.n == 2).all() and curve.unit.values.tolist() == ["nats", "nats", "probability"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sites": "mlp_out"}, ValueError, "a lens reads the whole residual stream.*got 'mlp_out'"),
        ({"sites": "blocks.7.hook_resid_pre"}, KeyError, "layers are 0 to 1 in this model, got 7"),
        ({"sites": "normalized_resid_post"}, KeyError, "this model has no"),
        ({"pos": 9}, IndexError, "is required of every row, but row 0 has 9 tokens"),
        ({"pos": -10}, IndexError, "is required of every row, but row 0 has 9 tokens"),
        ({"pos": []}, ValueError, "a position, several that differ, or PerRow"),
    ],
)
def test_states_and_positions_that_do_not_exist_are_refused(
    options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        interp.logit_lens(HookedTransformer(build("gpt2")), some_tokens(), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_zeroed_head_gives_the_lens_of_the_model_without_its_output(name: str) -> None:
    model, copy = HookedTransformer(build(name)), HookedTransformer(without_head(name))
    found = interp.logit_lens(model.edited(Edit("L1H2", Zero())), some_tokens())
    expected = interp.logit_lens(copy, some_tokens())
    for value in ("kl", "entropy", "top_prob", "target_prob"):
        np.testing.assert_allclose(found[value], expected[value], rtol=1e-9, atol=1e-9)
    assert (found.top_token == expected.top_token).all()
    plain = interp.logit_lens(model, some_tokens())
    assert float(abs(found.entropy - plain.entropy).isel(depth=-1).max()) > 1e-6
    untrained = TunedLens.untrained(model)
    xr.testing.assert_identical(
        interp.logit_lens(model.edited(Edit("L1H2", Zero())), some_tokens(), translators=untrained), found
    )
