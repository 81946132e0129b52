"""The report on late layers: each number against a slow way to it, and a planted layer that holds its answer back."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor

import interp
from interp import Batch, Edit, HookedTransformer
from interp.data.stream import prompt_source
from interp.edits import Zero
from interp.lenses import LateLayers, late_layers
from interp.lenses.late_layers import SCORES, _mean_distribution, _mean_prediction_question, average_token
from interp.model import Transformer
from interp.model.block import Block
from interp.runs.over_data import reduced_over
from tests.configs import CONFIGS, D_VOCAB, build, perturbed, some_tokens
from tests.edited import without_head
from tests.tolerances import assert_close

LINEAR = tuple(name for name, config in CONFIGS.items() if not config.mlm_head)
ANSWERS = [3, 14, 7]
FREQUENCIES = torch.rand(D_VOCAB, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def subject(name: str) -> HookedTransformer:
    return HookedTransformer(build(name))


def of(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


def score(found: xr.Dataset, name: str) -> xr.DataArray:
    """The values of one score, of the parts that have it."""
    return found.value.sel(score=name).dropna("part")


def answered(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Log probability and rank of each prompt's answer at the last position."""
    logp = logits[:, -1].log_softmax(-1)
    own = logp[torch.arange(3), torch.tensor(ANSWERS)]
    return own, (logp > own[:, None]).sum(-1)


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "gemma2", "post-norm", "attention-only", "olmo2"])
def test_attribution_is_that_of_attribute_relative_to_all_words(name: str) -> None:
    model, tokens = subject(name), some_tokens(rows=1)
    found = late_layers(model, tokens, 5, frequencies=FREQUENCIES)
    for parts in ("head", "sublayer", *(["layer"] if name != "post-norm" else [])):
        every = interp.attribute(model, tokens.expand(D_VOCAB, -1), list(range(D_VOCAB)), parts=parts)  # type: ignore[arg-type]
        centred = (every.value - every.value.mean("prompt")).isel(prompt=5)
        ours = score(found, "attribution")
        shared = [c for c in ours.part.values if c in set(every.part.values)]
        assert len(shared) >= 1 or name in ("attention-only", "post-norm")
        assert_close(of(ours.sel(part=shared).values), of(centred.sel(part=shared).values))


@pytest.mark.parametrize("name", LINEAR)
def test_removal_is_what_hooks_on_the_whole_model_give(name: str) -> None:
    model, tokens = subject(name), some_tokens()
    found = late_layers(model, tokens, ANSWERS, frequencies=FREQUENCIES)
    before, rank = answered(model(tokens))  # type: ignore[arg-type]
    assert float(score(found, "log_prob")[-1]) == pytest.approx(float(before.mean()), rel=1e-9)
    assert float(score(found, "rank")[-1]) == float(rank.double().mean())

    def silent(value: Tensor, hook: object) -> Tensor:
        return torch.zeros_like(value)

    def without_head(z: Tensor, hook: object) -> Tensor:
        z = z.clone()
        z[:, :, 2] = 0
        return z

    hooks: dict[str, list[tuple[str, Callable[..., Tensor]]]] = {
        f"L1.{s.removesuffix('_out')}": [(f"blocks.1.hook_{s}", silent)] for s in model.cfg.sublayers
    }
    hooks["L1H2"] = [("blocks.1.attn.hook_z", without_head)]
    if len(model.cfg.sublayers) > 1:
        hooks["L1"] = [(f"blocks.1.hook_{s}", silent) for s in model.cfg.sublayers]
    for part, each in hooks.items():
        after, after_rank = answered(model.run_with_hooks(tokens, fwd_hooks=each))  # type: ignore[arg-type]
        change = found.value.sel(part=part)
        assert float(change.sel(score="log_prob_change")) == pytest.approx(
            float((after - before).mean()), rel=1e-8, abs=1e-10
        )
        expected = float((after_rank - rank).double().mean())
        assert float(change.sel(score="rank_change")) == pytest.approx(expected)


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
    cell = found.sel(part="L1.mlp", score="cosine")
    assert float(cell.value) == pytest.approx(float(torch.stack(cosines).mean()))
    generator, nulls = torch.Generator().manual_seed(0), []
    for order in torch.rand(200, D_VOCAB, generator=generator).argsort(1):
        axis = sum(p[order[t]] * words[t] for t in range(D_VOCAB)) - words.mean(0)
        last = [out - out.mean() for out in cache["blocks.1.hook_mlp_out"][:, -1]]
        gamma = model.transformer.ln_final.gamma
        nulls.append(torch.stack([torch.cosine_similarity(x * gamma, axis, dim=0) for x in last]).mean())  # type: ignore[operator]
    assert float(cell.null) == pytest.approx(float(torch.stack(nulls).mean()))
    assert float(cell.null_sd) == pytest.approx(float(torch.stack(nulls).std()))
    above = int((torch.stack(nulls) >= float(cell.value)).sum())
    assert float(cell.p) == pytest.approx(2 * (1 + min(above, 200 - above)) / 201)
    assert bool(found.p.notnull().sum("part").sel(score="cosine") == 7) and int(found.p.notnull().sum()) == 7
    assert late_layers(model, tokens, ANSWERS).p.isnull().all(), (
        "of the model's own prediction it says nothing"
    )


def holding_back() -> Transformer:
    """A model without norms whose last MLP writes the average token, and nothing else."""
    network = perturbed(replace(CONFIGS["no-norm"], unembed_bias=False))
    mlp = network.block(1).mlp
    with torch.no_grad():
        mlp.out.weight.zero_()  # type: ignore[union-attr]
        mlp.out.bias.copy_(4 * average_token(network, FREQUENCIES / FREQUENCIES.sum()))  # type: ignore[union-attr]
    return network


def test_mlp_that_writes_the_average_token_is_found_and_hurts_rare_answers() -> None:
    rare = int(FREQUENCIES.argmin())
    found = late_layers(HookedTransformer(holding_back()), some_tokens(), rare, frequencies=FREQUENCIES)
    mlp = found.sel(part="L1.mlp")
    cosine = mlp.sel(score="cosine")
    assert float(cosine.value) == pytest.approx(1.0, abs=1e-9)
    assert float(cosine.value) > float(cosine.null + 3 * cosine.null_sd)
    assert float(cosine.p) == pytest.approx(2 / 201)
    assert float(mlp.value.sel(score="attribution")) < 0 < float(mlp.value.sel(score="log_prob_change"))


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "parallel"])
def test_depths_are_those_of_the_logit_lens(name: str) -> None:
    model, tokens = subject(name), some_tokens()
    found = late_layers(model, tokens, ANSWERS, frequencies=FREQUENCIES)
    sites = "resid_pre" if name == "parallel" else ("resid_pre", "resid_mid")
    lens = interp.logit_lens(model, tokens, answer=ANSWERS, sites=sites, pos=-1)
    depths = score(found, "log_prob").part.values
    assert len(depths) == (2 if name == "parallel" else 3)
    expected = np.log(lens.target_prob.sel(depth=depths)).mean(("prompt", "pos"))
    assert_close(of(score(found, "log_prob").values), of(expected.values))
    ranks = lens.target_rank.sel(depth=depths).mean(("prompt", "pos"))
    assert_close(of(score(found, "rank").values), of(ranks.values))


def test_attention_to_the_first_token_survives_padding() -> None:
    model, rows = subject("llama-gqa"), [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9]]
    both = late_layers(model, Batch.of(rows), [7, 2], frequencies=FREQUENCIES)
    alone = [
        late_layers(model, torch.tensor(row), a, frequencies=FREQUENCIES)
        for row, a in zip(rows, (7, 2), strict=True)
    ]
    pattern = model.run_with_cache(torch.tensor([rows[0]]))[1]["blocks.1.attn.hook_pattern"]
    assert_close(of(score(alone[0], "first_attention").values), pattern[0, :, -1, 0])
    for name in SCORES:
        expected = (score(alone[0], name) + score(alone[1], name)) / 2
        assert_close(of(score(both, name).values), of(expected.values))


def test_the_average_token_of_the_embedding_is_a_sum_over_its_rows() -> None:
    model = subject("gpt2")
    found = late_layers(model, some_tokens(), ANSWERS, frequencies=FREQUENCIES, words="embedding")
    rows, p = model.transformer.embed.weight, FREQUENCIES / FREQUENCIES.sum()
    axis = sum(p[t] * rows[t] for t in range(D_VOCAB)) - rows.mean(0)
    _, cache = model.run_with_cache(some_tokens())
    gamma = model.transformer.ln_final.gamma
    each = [
        torch.cosine_similarity((x - x.mean()) * gamma, axis, dim=0)
        for x in cache["blocks.1.hook_mlp_out"][:, -1]
    ]  # type: ignore[operator]
    cell = found.value.sel(part="L1.mlp", score="cosine")
    assert float(cell) == pytest.approx(float(torch.stack(each).mean()))
    assert found.attrs["words"] == "embedding"
    tied = [
        late_layers(subject("tied"), some_tokens(), ANSWERS, frequencies=FREQUENCIES, words=words)  # type: ignore[arg-type]
        for words in ("embedding", "unembedding")
    ]
    np.testing.assert_array_equal(*[each.value for each in tied])


def test_all_heads_are_rows_of_one_pass_through_the_last_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is looked at: two blocks once to read and once to depart from; then every part at one column, together."""
    shapes, usual = list[tuple[int, ...]](), Block.forward

    def counted(self: Block, resid: Tensor, *rest: object, **named: object) -> Tensor:
        shapes.append(tuple(resid.shape))
        return usual(self, resid, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Block, "forward", counted)
    late_layers(subject("gpt2"), some_tokens(), ANSWERS, frequencies=FREQUENCIES)
    parts = 4 + 2 + 1
    assert shapes == [(3, 9, 24)] * 4 + [(3 * parts, 1, 24)]


def test_without_frequencies_the_models_own_mean_prediction_counts() -> None:
    model, batch = subject("gpt2"), Batch.of([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9]])
    probs = model.transformer(batch.tokens, keep=batch.keep).softmax(-1)
    expected = probs[batch.keep].mean(0)
    for size in (1, 2):
        source = prompt_source(list(batch.split(size)), model.text, batch_size=size)
        assert_close(
            _mean_distribution(reduced_over(_mean_prediction_question(model.cfg), model, source)), expected
        )
    own = late_layers(model, batch, [7, 2])
    given = late_layers(model, batch, [7, 2], frequencies=expected)
    assert_close(of(score(own, "cosine").values), of(score(given, "cosine").values))
    assert own.attrs["frequencies"] != given.attrs["frequencies"] == "given"
    other = late_layers(model, batch, [7, 2], reference=some_tokens())
    assert not np.allclose(score(other, "cosine"), score(own, "cosine"))
    asked = interp.run([LateLayers([7, 2])], model, batch)["late_layers"]
    np.testing.assert_allclose(asked.value, own.value, rtol=1e-10)
    with pytest.raises(
        ValueError, match="can be read again are required, got an iterator; or say frequencies"
    ):
        late_layers(model, iter([[3, 1, 4]]), 3)


def test_half_precision_weights_agree_with_float64_to_rounding() -> None:
    wide = late_layers(subject("gpt2"), some_tokens(), ANSWERS, frequencies=FREQUENCIES)
    narrow = HookedTransformer(build("gpt2", torch.bfloat16))
    found = late_layers(narrow, some_tokens(), ANSWERS, frequencies=FREQUENCIES)
    for name in ("attribution", "cosine"):
        assert_close(of(score(found, name).values), of(score(wide, name).values), torch.bfloat16)


def test_bad_input_is_refused() -> None:
    model = subject("gpt2")
    with pytest.raises(ValueError, match=r"frequencies of all 31 words.*got \[30\]"):
        late_layers(model, some_tokens(), 3, frequencies=torch.ones(30))
    with pytest.raises(ValueError, match="none negative, some positive"):
        late_layers(model, some_tokens(), 3, frequencies=torch.zeros(31))
    with pytest.raises(
        ValueError, match="reference prompts that they are taken from, are required, got both"
    ):
        late_layers(model, some_tokens(), 3, frequencies=FREQUENCIES, reference=some_tokens())
    with pytest.raises(ValueError, match="no masked-LM head"):
        late_layers(subject("masked-lm"), some_tokens(), 3, frequencies=FREQUENCIES)
    with pytest.raises(
        ValueError, match="late_layers holds answers or labels for 2 prompts, got 3 rows of data"
    ):
        late_layers(model, some_tokens(), [3, 4], frequencies=FREQUENCIES)


def test_its_table_is_narrow_with_intervals_where_the_prompts_are_enough() -> None:
    model = subject("gpt2")
    found = late_layers(model, some_tokens(), ANSWERS)
    table = interp.frame(found)
    assert list(table) == [
        "part",
        "layer",
        "head",
        "kind",
        "score",
        "unit",
        "value",
        "low",
        "high",
        "null",
        "null_sd",
        "n",
        "p",
    ]
    assert table.dropna(subset="value").groupby("score").part.nunique().to_dict() == {
        "attribution": 7, "cosine": 7, "log_prob_change": 7, "rank_change": 7, "first_attention": 4, "log_prob": 3,
        "rank": 3,
    }  # fmt: skip
    assert ((found.n == 3) == found.value.notnull()).all()
    few = found.low.notnull().any("part")
    assert found.score.values[few.values].tolist() == ["cosine", "first_attention"], (
        "three prompts hold no other mean, and ranks none"
    )
    many = late_layers(model, some_tokens().repeat(11, 1), 3, frequencies=FREQUENCIES)
    assert many.low.sel(score="attribution").notnull().any(), "33 prompts hold an attribution"
    assert many.low.sel(score=["rank", "rank_change", "log_prob"]).isnull().all()


@pytest.mark.parametrize("name", LINEAR)
def test_a_zeroed_head_gives_the_numbers_of_the_model_without_its_output(name: str) -> None:
    edits, copy = [Edit("L1H2", Zero())], HookedTransformer(without_head(name))
    found = late_layers(subject(name).edited(edits), some_tokens(), ANSWERS)
    expected = late_layers(copy, some_tokens(), ANSWERS)
    for kept in ("value", "low", "high", "null", "null_sd"):
        np.testing.assert_allclose(found[kept], expected[kept], rtol=1e-7, atol=1e-9, err_msg=kept)
    silent = found.value.sel(part="L1H2")
    for nothing in ("attribution", "log_prob_change", "rank_change"):
        assert float(silent.sel(score=nothing)) == 0.0


def test_an_edit_of_the_stream_that_enters_the_layer_is_carried_out_once() -> None:
    model, steering = subject("gpt2"), Edit("L1.resid", interp.edits.Add(torch.arange(24.0) / 8))
    found = late_layers(model.edited(steering), some_tokens(), ANSWERS, frequencies=FREQUENCIES)
    with model.hooks(edits=[steering]):
        before, _ = answered(model(some_tokens()))  # type: ignore[arg-type]
    with model.hooks(edits=[steering, Edit("L1.mlp", Zero())]):
        after, _ = answered(model(some_tokens()))  # type: ignore[arg-type]
    change = found.value.sel(part="L1.mlp", score="log_prob_change")
    assert float(change) == pytest.approx(float((after - before).mean()))
    with pytest.raises(ValueError, match=r"what L1H0 wrote is changed on its way .* by the edit of L1\.attn"):
        late_layers(model.edited(Edit("L1.attn", Zero())), some_tokens(), 3, frequencies=FREQUENCIES)


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
def test_answers_of_several_tokens_are_sums_and_means_over_their_tokens(name: str) -> None:
    model, prompts, answers = subject(name), [[3, 4, 5, 6], [8, 2]], [(3, 14), (7,)]
    found = late_layers(model, prompts, answers, frequencies=FREQUENCIES)
    by_token = [
        [
            late_layers(model, [[*prompt, *answer[:j]]], [answer[j]], frequencies=FREQUENCIES).value
            for j in range(len(answer))
        ]
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    for which in ("attribution", "cosine", "log_prob_change", "rank_change", "log_prob", "rank"):
        own = [[cell.sel(score=which).values for cell in each] for each in by_token]
        combine = np.sum if which in ("log_prob", "log_prob_change") else np.mean
        expected = np.mean([combine(each, 0) for each in own], 0)
        assert_close(of(np.nan_to_num(found.value.sel(score=which).values)), of(np.nan_to_num(expected)))
