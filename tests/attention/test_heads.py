"""The table of heads: equal to slow loops on the model's own patterns, right on a model whose circuit is known."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import interp
from interp import HookedTransformer, RepeatedTokens
from interp.attention.heads import SCORES, attention_kernel
from interp.attention.repeats import distance_kernel, even_attention
from interp.model import Transformer
from interp.zoo.groundtruth import INDUCTION, PREVIOUS
from tests.attention.slow_heads import slow_scores
from tests.configs import CAUSAL, CONFIGS, build, perturbed
from tests.tolerances import assert_close

SMALL = RepeatedTokens(period=6, repeats=3, rows=7)


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "gpt-oss"])
def test_the_table_is_the_mean_over_rows_of_the_models_own_patterns(name: str) -> None:
    model = HookedTransformer(build(name))
    table = interp.heads(model, SMALL, batch_size=3)
    tokens = SMALL.tokens(model.cfg.d_vocab, 0)
    cache = model.run_with_cache(tokens, "blocks.*.attn.hook_pattern")[1]
    for layer in range(2):
        for head in range(4):
            rows = [slow_scores(cache["pattern", layer][b, head], tokens[b].tolist())[0] for b in range(7)]
            for score in SCORES:
                values = torch.tensor([row[score] for row in rows]).double()
                cell = table.isel(layer=layer, head=head)
                half = 1.959964 * values.std() / 7**0.5
                assert float(cell[score]) == pytest.approx(float(values.mean()), rel=1e-5)
                assert float(cell[f"{score}_high"]) == pytest.approx(float(values.mean() + half), rel=1e-4)
                assert float(cell[f"{score}_low"]) == pytest.approx(float(values.mean() - half), rel=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "window", "gemma2"])
def test_nulls_are_the_scores_of_even_attention_over_what_each_layer_sees(name: str) -> None:
    table = interp.heads(HookedTransformer(build(name)), SMALL)
    config = CONFIGS[name]
    tokens = SMALL.tokens(config.d_vocab, 0)[0].tolist()
    for layer in range(2):
        even = even_attention(SMALL.length, config.window if config.is_local(layer) else None)
        expected, _ = slow_scores(even[0, 0], tokens)
        found = {score: float(table[f"{score}_null"][layer]) for score in SCORES}
        assert found == pytest.approx(expected, rel=1e-9)


def test_the_kernel_is_its_own_table_and_its_peak_is_in_the_table_of_heads() -> None:
    model = HookedTransformer(build("window"))
    kernel, table = attention_kernel(model, SMALL, batch_size=4), interp.heads(model, SMALL)
    tokens = SMALL.tokens(model.cfg.d_vocab, 0)
    cache = model.run_with_cache(tokens, "blocks.*.attn.hook_pattern")[1]
    rows = torch.stack([distance_kernel(cache["pattern", layer], SMALL.farthest) for layer in range(2)], 1)
    assert kernel.kernel.dims == ("layer", "head", "distance") and kernel.sizes["distance"] == 5
    assert_close(torch.tensor(kernel.kernel.values), rows.mean(0))
    half = 1.959963984540054 * rows.std(0) / 7**0.5
    assert_close(torch.tensor(kernel.kernel_high.values), rows.mean(0) + half)
    np.testing.assert_array_equal(table.peak_distance, kernel.kernel.argmax("distance"))
    assert kernel.kernel_null.dims == ("layer", "distance")
    assert set(table.dims) == {"layer", "head"}
    assert len(interp.frame(table)) == 2 * 4


@pytest.mark.parametrize("name", CAUSAL)
def test_every_variant_of_the_architecture_has_a_table(name: str) -> None:
    table = interp.heads(HookedTransformer(build(name)), SMALL, batch_size=7)
    for score in (*SCORES, "copying"):
        low, value, high = (table[f"{score}{end}"].values for end in ("_low", "", "_high"))
        assert (low <= value).all() and (value <= high).all()
        assert (np.abs(value) <= 1 + 1e-12).all() and table[f"{score}_null"].notnull().all()
    assert set(np.unique(table.label)) <= {"none", *(rule.label for rule in interp.attention.labels.RULES)}


def test_scores_and_intervals_do_not_depend_on_the_batch_split() -> None:
    model = HookedTransformer(build("gpt2"))
    tables = [interp.heads(model, SMALL, batch_size=size) for size in (1, 4, 7)]
    for other in tables[1:]:
        for name in tables[0].drop_vars("label").data_vars:
            assert_close(
                torch.tensor(other[name].values), torch.tensor(tables[0][name].values), torch.float64
            )


def test_half_precision_gives_the_table_of_float32_to_its_rounding() -> None:
    narrow = copy.deepcopy(build("llama-gqa")).bfloat16()
    tables = [interp.heads(HookedTransformer(m), SMALL) for m in (narrow, copy.deepcopy(narrow).float())]
    for score in SCORES:
        np.testing.assert_allclose(tables[0][score], tables[1][score], atol=0.05)


def test_a_model_without_logits_is_scored_by_its_patterns() -> None:
    model = HookedTransformer(perturbed(replace(CONFIGS["gpt2"], unembed=False)))
    table = interp.heads(model, SMALL)
    assert "induction" in table and not {"copying", "copying_weights", "successor"} & set(table)
    assert table.attrs["no_copying"] == table.attrs["no_successor"] == "this model has no logits"


def test_the_hand_built_model_shows_exactly_its_two_planted_heads() -> None:
    table = interp.heads(HookedTransformer.from_pretrained("groundtruth-induction"))
    planted = {"previous_token": PREVIOUS, "induction": INDUCTION, "duplicate_token": None}
    named = {PREVIOUS: "previous token", INDUCTION: "induction"}
    for layer in range(2):
        for head in range(4):
            cell = table.sel(layer=layer, head=head)
            assert str(cell.label.item()) == named.get((layer, head), "none")
            for score, where in planted.items():
                assert float(cell[score]) > 0.95 if (layer, head) == where else float(cell[score]) < 0.2
    assert float(table.copying[INDUCTION]) > 0.95 and float(table.copying_weights[INDUCTION]) > 0.95
    assert float(table.copying[PREVIOUS]) == pytest.approx(float(table.copying_null))


@pytest.mark.parametrize("seed", [1, 2])
def test_noise_is_given_no_label_whatever_the_seed(seed: int) -> None:
    from interp.zoo import groundtruth

    model = HookedTransformer(groundtruth.induction(noise=0.05, seed=seed), groundtruth.Alphabet())
    label = interp.heads(model, RepeatedTokens(seed=seed)).label.values
    assert (
        (label != "none").sum() == 2
        and label[PREVIOUS] == "previous token"
        and label[INDUCTION] == "induction"
    )


def test_the_hand_built_model_predicts_the_repeat_and_one_layer_cannot() -> None:
    model = HookedTransformer.from_pretrained("groundtruth-induction")
    tokens = RepeatedTokens(period=25, repeats=4, rows=4).tokens(model.cfg.d_vocab, 0)
    loss = model(tokens, return_type="loss", loss_per_token=True)
    assert isinstance(loss, Tensor)
    assert float(loss[:, 26:].mean()) < 0.01 < 3.0 < float(loss[:, :24].mean())

    def silence(z: Tensor, hook: object) -> Tensor:
        z[:, :, PREVIOUS[1]] = 0.0
        return z

    broken = model.run_with_hooks(tokens, [("blocks.0.attn.hook_z", silence)], return_type="loss")
    assert isinstance(broken, Tensor) and float(broken) > 3.0


def test_a_random_head_has_eigenvalue_scores_as_spread_as_the_null_says() -> None:
    config = replace(CONFIGS["attention-only"], d_model=256, d_vocab=256, n_heads=64, d_head=16, tied=True)
    torch.manual_seed(0)
    model = Transformer(config).requires_grad_(False)
    model.embed.weight.copy_(torch.eye(256))
    for parameter in model.blocks.parameters():
        if parameter.ndim == 2:
            parameter.copy_(torch.randn(parameter.shape))
    table = interp.heads(HookedTransformer(model), SMALL)
    assert float(table.copying_weights_null_sd) == 1.5 / 16
    assert float(table.copying_weights.std()) == pytest.approx(1.5 / 16, rel=0.2)
    assert abs(float(table.copying_weights.mean())) < 4 * 1.5 / 16 / 128**0.5


def test_rows_that_do_not_fit_and_models_that_see_ahead_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of 101 tokens do not fit the context of 24"):
        interp.heads(HookedTransformer(build("gpt2")))
    with pytest.raises(ValueError, match="causal"):
        interp.heads(HookedTransformer(build("bidirectional")), SMALL)
