"""The report on late layers: each number against a slow way to it, and a planted layer that holds its answer back."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import interp
from interp import Batch, HookedTransformer, Transformer
from interp.lenses.late_layers import average_token, late_layers, mean_prediction
from tests.configs import CONFIGS, D_VOCAB, build, perturbed, some_tokens
from tests.tolerances import assert_close

LINEAR = tuple(name for name, config in CONFIGS.items() if not config.mlm_head)
ANSWERS = [3, 14, 7]
FREQUENCIES = torch.rand(D_VOCAB, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def subject(name: str) -> HookedTransformer:
    return HookedTransformer(build(name))


def of(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


def answered(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Log probability and rank of each prompt's answer at the last position."""
    logp = logits[:, -1].log_softmax(-1)
    own = logp[torch.arange(3), torch.tensor(ANSWERS)]
    return own, (logp > own[:, None]).sum(-1)


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "gemma2", "post-norm", "attention-only", "olmo2"])
def test_attribution_is_that_of_attribute_relative_to_all_words(name: str) -> None:
    model, tokens = subject(name), some_tokens(rows=1)
    found = late_layers(model, tokens, 5, frequencies=FREQUENCIES)
    for by in ("head", "sublayer"):
        every = interp.attribute(model, tokens.expand(D_VOCAB, -1), list(range(D_VOCAB)), by=by)  # type: ignore[arg-type]
        centred = (every.logits - every.logits.mean("prompt")).isel(prompt=5)
        shared = [c for c in found.component.values if c in set(every.component.values)]
        assert len(shared) >= 1
        assert_close(
            of(found.attribution.sel(component=shared).values), of(centred.sel(component=shared).values)
        )


@pytest.mark.parametrize("name", LINEAR)
def test_removal_is_what_hooks_on_the_whole_model_give(name: str) -> None:
    model, tokens = subject(name), some_tokens()
    found = late_layers(model, tokens, ANSWERS, frequencies=FREQUENCIES)
    before, rank = answered(model(tokens))  # type: ignore[arg-type]
    assert float(found.log_prob) == pytest.approx(float(before.mean()), rel=1e-9)
    assert float(found["rank"]) == float(rank.double().mean())

    def silent(value: Tensor, hook: object) -> Tensor:
        return torch.zeros_like(value)

    def without_head(z: Tensor, hook: object) -> Tensor:
        z = z.clone()
        z[:, :, 2] = 0
        return z

    hooks: dict[str, list[tuple[str, Callable[..., Tensor]]]] = {
        f"1_{s}": [(f"blocks.1.hook_{s}", silent)] for s in model.cfg.sublayers
    }
    hooks["L1H2"] = [("blocks.1.attn.hook_z", without_head)]
    if len(model.cfg.sublayers) > 1:
        hooks["1_block"] = [(f"blocks.1.hook_{s}", silent) for s in model.cfg.sublayers]
    for component, each in hooks.items():
        after, after_rank = answered(model.run_with_hooks(tokens, fwd_hooks=each))  # type: ignore[arg-type]
        cell = found.sel(component=component)
        assert float(cell.log_prob_change) == pytest.approx(
            float((after - before).mean()), rel=1e-8, abs=1e-10
        )
        assert float(cell.rank_change) == pytest.approx(float((after_rank - rank).double().mean()))


def test_cosines_and_their_null_are_those_of_a_slow_loop() -> None:
    model, tokens = subject("gpt2"), some_tokens()
    found = late_layers(model, tokens, ANSWERS, frequencies=FREQUENCIES)
    _, cache = model.run_with_cache(tokens)
    words = model.transformer.unembed.weight  # type: ignore[union-attr]
    p = FREQUENCIES / FREQUENCIES.sum()
    axis = sum(p[t] * words[t] for t in range(D_VOCAB)) - words.mean(0)
    cosines = []
    for row in range(3):
        out = cache["blocks.1.hook_mlp_out"][row, -1]
        normed = (out - out.mean()) * model.transformer.ln_final.gamma  # type: ignore[operator]  # a cosine knows no scale
        cosines.append(torch.cosine_similarity(normed, axis, dim=0))
    cell = found.sel(component="1_mlp_out")
    assert float(cell.cosine) == pytest.approx(float(torch.stack(cosines).mean()))
    assert float(cell.cosine_null_low) < float(cell.cosine_null_high)


def holding_back() -> Transformer:
    """A model without norms whose last MLP writes the average token, and nothing else."""
    network = perturbed(replace(CONFIGS["no-norm"], unembed_bias=False))
    mlp = network.block(1).mlp
    with torch.no_grad():
        mlp.out.weight.zero_()  # type: ignore[union-attr]
        mlp.out.bias.copy_(4 * average_token(network, FREQUENCIES / FREQUENCIES.sum()))  # type: ignore[union-attr]
    return network


def test_an_mlp_that_writes_the_average_token_is_found_and_its_removal_helps_a_rare_answer() -> None:
    rare = int(FREQUENCIES.argmin())
    found = late_layers(HookedTransformer(holding_back()), some_tokens(), rare, frequencies=FREQUENCIES)
    mlp = found.sel(component="1_mlp_out")
    assert float(mlp.cosine) == pytest.approx(1.0, abs=1e-9)
    assert float(mlp.cosine) > float(mlp.cosine_null_high)
    assert float(mlp.attribution_high) < 0 < float(mlp.log_prob_change_low)


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "parallel"])
def test_depths_are_those_of_the_logit_lens(name: str) -> None:
    model, tokens = subject(name), some_tokens()
    found = late_layers(model, tokens, ANSWERS, frequencies=FREQUENCIES)
    sites = "resid_pre" if name == "parallel" else ("resid_pre", "resid_mid")
    lens = interp.logit_lens(model, tokens, answer=ANSWERS, sites=sites, positions=-1)
    expected = np.log(lens.target_prob.sel(depth=found.depth.values)).mean(("prompt", "pos"))
    assert_close(of(found.lens_log_prob.values), of(expected.values))


@pytest.mark.parametrize("batch_size", [1, 32])
def test_attention_to_the_first_token_and_all_else_survives_padding_and_splitting(batch_size: int) -> None:
    model, rows = subject("llama-gqa"), [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9]]
    both = late_layers(model, Batch.of(rows), [7, 2], frequencies=FREQUENCIES, batch_size=batch_size)
    alone = [
        late_layers(model, torch.tensor(row), a, frequencies=FREQUENCIES)
        for row, a in zip(rows, (7, 2), strict=True)
    ]
    pattern = model.run_with_cache(torch.tensor([rows[0]]))[1]["blocks.1.attn.hook_pattern"]
    assert_close(of(alone[0].first_attention.values), pattern[0, :, -1, 0])
    for name in (
        "first_attention",
        "attribution",
        "cosine",
        "log_prob_change",
        "rank_change",
        "lens_log_prob",
    ):
        expected = (alone[0][name] + alone[1][name]) / 2
        assert_close(of(both[name].values), of(expected.values))


def test_without_frequencies_the_models_own_mean_prediction_counts() -> None:
    model, batch = subject("gpt2"), Batch.of([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9]])
    probs = model.transformer(batch.tokens, keep=batch.keep).softmax(-1)
    expected = probs[batch.keep].mean(0)
    for size in (1, 2):
        assert_close(mean_prediction(model.transformer, batch, size), expected)
    own = late_layers(model, batch, [7, 2])
    given = late_layers(model, batch, [7, 2], frequencies=expected)
    assert_close(of(own.cosine.values), of(given.cosine.values))
    assert own.attrs["frequencies"] != given.attrs["frequencies"] == "given"


def test_half_precision_weights_agree_with_float64_to_rounding() -> None:
    wide = late_layers(subject("gpt2"), some_tokens(), ANSWERS, frequencies=FREQUENCIES)
    narrow = HookedTransformer(build("gpt2", torch.bfloat16))
    found = late_layers(narrow, some_tokens(), ANSWERS, frequencies=FREQUENCIES)
    assert_close(of(found.attribution.values), of(wide.attribution.values), torch.bfloat16)
    assert_close(of(found.cosine.values), of(wide.cosine.values), torch.bfloat16)


def test_bad_input_is_refused() -> None:
    model = subject("gpt2")
    with pytest.raises(ValueError, match=r"frequencies of all 31 words.*got \[30\]"):
        late_layers(model, some_tokens(), 3, frequencies=torch.ones(30))
    with pytest.raises(ValueError, match="none negative, some positive"):
        late_layers(model, some_tokens(), 3, frequencies=torch.zeros(31))
    with pytest.raises(ValueError, match="no masked-LM head"):
        late_layers(subject("masked-lm"), some_tokens(), 3)
    with pytest.raises(ValueError, match="one answer per prompt is required"):
        late_layers(model, some_tokens(), [3, 4])
