"""The logit lens: equal to a slow read-out, to the model itself at the end, and blind to padding."""

import numpy as np
import pytest
import torch

import interp
from interp import Batch, HookedTransformer
from interp.analyses import lens
from tests.configs import CAUSAL, CONFIGS, build, some_tokens
from tests.model.slow import slow_read_out
from tests.tolerances import assert_close


def of(values: np.ndarray) -> torch.Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_statistic_equals_a_loop_over_depths_and_positions(name: str) -> None:
    model, tokens = HookedTransformer(build(name)), some_tokens()
    result = interp.logit_lens(model, tokens, top=3)
    assert result.depth.values.tolist() == ["0_pre", "1_pre", "final_post"]
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
    last = interp.logit_lens(model, some_tokens(), top=1).sel(depth="final_post")
    probs = model(some_tokens()).softmax(-1)  # type: ignore[union-attr]
    assert_close(of(last.top_prob.values[..., 0]), probs.max(-1).values)
    assert float(abs(last.kl).max()) == 0.0


def test_an_answer_is_the_target_at_every_position() -> None:
    model = HookedTransformer(build("gpt2"))
    result = interp.logit_lens(model, some_tokens(), answer=[3, 14, 7])
    probs = model(some_tokens()).softmax(-1)  # type: ignore[union-attr]
    expected = torch.stack([probs[i, :, a] for i, a in enumerate((3, 14, 7))])
    assert_close(of(result.target_prob.sel(depth="final_post").values), expected)


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_positions_hold_nothing_and_the_others_the_unpadded_numbers(name: str, side: str) -> None:
    rows = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9]]
    model = HookedTransformer(build(name))
    padded = interp.logit_lens(model, Batch.of(rows, side=side), top=2)  # type: ignore[arg-type]
    alone = interp.logit_lens(model, torch.tensor(rows[0]), top=2)
    real = slice(0, 5) if side == "right" else slice(3, 8)
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
