"""The table of heads: equal to slow loops on the model's own patterns, right on a model whose circuit is known."""

import copy
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import interp
from interp import Edit, HookedTransformer
from interp.attention import attention_kernel
from interp.attention.heads import BY_PATTERN, DRAWN, SCORED, _scores_and_kernel, same_token
from interp.attention.labels import RULES
from interp.attention.shares import with_pattern
from interp.core.patterns import SCORES, copy_keys, copy_scores, distance_kernel, even_attention
from interp.core.stats import share_interval
from interp.data.batch import Batch
from interp.edits import Add, Scale, Set, Zero
from interp.model import Transformer
from interp.model.tap import Read
from interp.passes import duration, observe
from interp.passes.packs import block_products
from interp.runs.kept import forget
from interp.tasks import RepeatedTokens
from interp.weights.copying import chance_copying
from interp.weights.random_heads import with_random_heads
from interp.zoo import groundtruth, planted
from interp.zoo.groundtruth import INDUCTION, PREVIOUS
from tests.attention.slow_heads import slow_scores
from tests.attention.test_sentences import DATA, speaker
from tests.configs import CAUSAL, CONFIGS, build, perturbed
from tests.loops import over
from tests.mixers import MIXERS, build_mixed
from tests.tables import PART_COLUMNS
from tests.tiny import hooked
from tests.tolerances import assert_close

SMALL = RepeatedTokens(period=6, repeats=3, rows=7)


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "gpt-oss"])
def test_the_table_is_the_mean_over_rows_of_the_models_own_patterns(name: str) -> None:
    model = HookedTransformer(build(name))
    table = interp.heads(model, repeats=SMALL)
    tokens = SMALL.tokens(model.cfg.d_vocab, 0)
    cache = model.run_with_cache(tokens, "blocks.*.attn.hook_pattern")[1]
    for layer in range(2):
        for head in range(4):
            rows = [slow_scores(cache["pattern", layer][b, head], tokens[b].tolist())[0] for b in range(7)]
            for score in SCORES:
                values = torch.tensor([row[score] for row in rows]).double()
                cell = table.sel(layer=layer, head=head, score=score)
                low, high = share_interval(values.mean(), 7, values.var(correction=0))
                assert float(cell.value) == pytest.approx(float(values.mean()), rel=1e-5)
                assert float(cell.high) == pytest.approx(float(high), rel=1e-4)
                assert float(cell.low) == pytest.approx(float(low), rel=1e-4)
                assert int(cell.n) == 7 and cell.part == f"L{layer}H{head}"


def test_p_is_the_rank_of_each_head_among_the_random_ones_of_its_layer() -> None:
    """Oracle: the table of the models with random heads, counted by hand; without them only eigenvalues have a p."""
    model = speaker()
    table = interp.heads(model, repeats=SMALL, sentences=DATA, random=3)
    others = [
        interp.heads(HookedTransformer(with_random_heads(model.transformer, seed), model.text.tokenizer), repeats=SMALL,
                     sentences=None).value for seed in range(3)
    ]  # fmt: skip
    for score in (*SCORES, "copying"):
        for layer in range(2):
            chance = np.sort(np.concatenate([x.sel(layer=layer, score=score).values for x in others]))
            for head in range(4):
                here = table.sel(layer=layer, score=score, head=head)
                above, below = (chance >= float(here.value)).sum(), (chance <= float(here.value)).sum()
                assert float(here.p) == pytest.approx(min(1, 2 * (1 + min(above, below)) / 13))
    for score in ("to_receiver", "to_giver", "name_mover", "s_inhibition", "copying_weights"):
        assert bool(table.p.sel(score=score).notnull().all())
    assert bool(table.p.sel(score="peak_distance").isnull().all())
    bare = interp.heads(model, repeats=SMALL, sentences=DATA)
    xr.testing.assert_identical(bare.drop_vars("p"), table.drop_vars("p"))
    known = bare.p.notnull().any(("layer", "head"))
    assert known.score.values[known.values].tolist() == ["copying_weights"]


def test_the_planted_heads_are_beyond_all_random_ones() -> None:
    model = HookedTransformer.from_pretrained("groundtruth-induction")
    p = interp.heads(model, repeats=replace(SMALL, repeats=2), sentences=None, random=6).p
    for part, score in ((INDUCTION, "induction"), (PREVIOUS, "previous_token")):
        assert float(p.sel(layer=part[0], head=part[1], score=score)) == pytest.approx(2 / 25)


@pytest.mark.parametrize("name", ["gpt2", "window", "gemma2"])
def test_nulls_are_the_scores_of_even_attention_over_what_each_layer_sees(name: str) -> None:
    table = interp.heads(HookedTransformer(build(name)), repeats=SMALL)
    config = CONFIGS[name]
    tokens = SMALL.tokens(config.d_vocab, 0)[0].tolist()
    for layer in range(2):
        even = even_attention(SMALL.length, config.window if config.is_local(layer) else None)
        expected, _ = slow_scores(even[0, 0], tokens)
        for head in range(4):
            null = table.null.sel(layer=layer, head=head)
            found = {score: float(null.sel(score=score)) for score in SCORES}
            assert found == pytest.approx(expected, rel=1e-9)


def test_rows_that_begin_with_token_0_for_want_of_bos_are_said_to() -> None:
    known, unknown = hooked(), HookedTransformer(hooked().transformer)
    why = "it has no tokenizer to say which token is BOS"
    said = [f"the rows of repeated tokens begin with token 0 for this model, since {why}"]
    for ask in (interp.heads, attention_kernel):
        assert (
            ask(unknown, repeats=SMALL).attrs["notes"] == said
            and "notes" not in ask(known, repeats=SMALL).attrs
        )
    assert "notes" not in interp.heads(unknown, SMALL.tokens(unknown.cfg.d_vocab, 0)).attrs


def test_the_kernel_is_its_own_table_and_its_peak_is_in_the_table_of_heads() -> None:
    model = HookedTransformer(build("window"))
    kernel, table = attention_kernel(model, SMALL), interp.heads(model, repeats=SMALL)
    tokens = SMALL.tokens(model.cfg.d_vocab, 0)
    cache = model.run_with_cache(tokens, "blocks.*.attn.hook_pattern")[1]
    rows = torch.stack([distance_kernel(cache["pattern", layer], SMALL.farthest) for layer in range(2)], 1)
    assert kernel.value.dims == ("layer", "head", "distance") and kernel.sizes["distance"] == 5
    assert_close(torch.tensor(kernel.value.values), rows.mean(0))
    rows = rows.double()
    assert_close(
        torch.tensor(kernel.high.values), share_interval(rows.mean(0), 7, rows.var(0, correction=0))[1]
    )
    peak = table.value.sel(score="peak_distance")
    np.testing.assert_array_equal(peak, kernel.value.argmax("distance"))
    np.testing.assert_array_equal(table.null.sel(score="peak_distance"), kernel.null.argmax("distance"))
    assert kernel.null.dims == ("layer", "head", "distance")
    assert bool((kernel.null == kernel.null.isel(head=0)).all()), "it belongs to the layer"


def test_the_frame_of_the_table_is_tidy_and_narrow() -> None:
    table = interp.heads(HookedTransformer(build("gpt2")), repeats=SMALL)
    frame = interp.frame(table)
    assert set(table.dims) == {"layer", "head", "score", "called"}
    assert len(frame) == table.value.size and len(frame.columns.difference(PART_COLUMNS)) <= 12
    assert not frame.duplicated(["layer", "head", "score"]).any()
    row = frame.query("part == 'L1H2' and score == 'induction'").iloc[0]
    assert row.value == float(table.value.sel(layer=1, head=2, score="induction"))
    assert row.unit == "attention mass" and row.label == table.label.values[1, 2]


@pytest.mark.parametrize("name", CAUSAL)
def test_every_variant_of_the_architecture_has_a_table(name: str) -> None:
    table = interp.heads(HookedTransformer(build(name)), repeats=SMALL)
    some = table.sel(score=[*SCORES, "copying"])
    low, value, high = (some[end].values for end in ("low", "value", "high"))
    assert (low <= value).all() and (value <= high).all()
    assert (np.abs(value) <= 1 + 1e-12).all() and some.null.notnull().all()
    assert set(np.unique(table.label)) <= {"none", *(rule.label for rule in RULES)}


def test_scores_and_intervals_do_not_depend_on_the_batch_split(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tables = HookedTransformer(build("gpt2")), []
    for rows in (1, 4, 7):
        monkeypatch.setattr(sys.modules["interp.attention.heads"], "ROWS", rows)
        forget()
        tables.append(interp.heads(model, repeats=SMALL))
    for other in tables[1:]:
        xr.testing.assert_allclose(other.drop_vars("label"), tables[0].drop_vars("label"), 1e-10, 1e-12)
        assert (other.label == tables[0].label).all()


def test_half_precision_gives_the_table_of_float32_to_its_rounding() -> None:
    narrow = copy.deepcopy(build("llama-gqa")).bfloat16()
    tables = [
        interp.heads(HookedTransformer(m), repeats=SMALL) for m in (narrow, copy.deepcopy(narrow).float())
    ]
    narrow_values, wide_values = (table.value.sel(score=list(SCORES)) for table in tables)
    np.testing.assert_allclose(narrow_values, wide_values, atol=0.05)


def test_a_model_without_logits_is_scored_by_its_patterns() -> None:
    model = HookedTransformer(perturbed(replace(CONFIGS["gpt2"], unembed=False)))
    table = interp.heads(model, repeats=SMALL)
    scores = set(table.score.values)
    assert "induction" in scores and not {"copying", "copying_weights", "successor"} & scores
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
                value = float(cell.value.sel(score=score))
                assert value > 0.95 if (layer, head) == where else value < 0.2
    copying, weights = (table.sel(score=score) for score in ("copying", "copying_weights"))
    assert float(copying.value[INDUCTION]) > 0.95 and float(weights.value[INDUCTION]) > 0.95
    assert float(copying.value[PREVIOUS]) == pytest.approx(float(copying.null[PREVIOUS]))


@pytest.mark.parametrize("seed", [1, 2])
def test_noise_is_given_no_label_whatever_the_seed(seed: int) -> None:
    model = HookedTransformer(groundtruth.induction(noise=0.05, seed=seed), groundtruth.Alphabet())
    label = interp.heads(model, repeats=RepeatedTokens(seed=seed)).label.values
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


def test_random_heads_are_as_rare_as_p_says() -> None:
    """Gaussian heads between the embeddings of one's own: every twentieth p is below 0.05, and no label comes of it."""
    config = replace(
        CONFIGS["attention-only"], d_model=64, d_vocab=64, n_heads=64, n_layers=8, d_head=8, tied=True
    )
    torch.manual_seed(0)
    model = Transformer(config).requires_grad_(False)
    model.embed.weight.copy_(torch.randn(64, 64) + 3 * torch.randn(64))
    for parameter in model.blocks.parameters():
        if parameter.ndim == 2:
            parameter.copy_(torch.randn(parameter.shape) / 50)
    table = interp.heads(HookedTransformer(model), repeats=SMALL)
    weights = table.sel(score="copying_weights")
    p = weights.p.values.ravel()
    assert (weights.n == 0).all() and len(p) == 512 and float(weights.value.std()) > 0.15
    assert 0.02 < (p <= 0.05).mean() < 0.08 and 0.4 < (p <= 0.5).mean() < 0.6
    assert (table.label == "none").all()


# --- rows of one's own ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "window", "differential"])
def test_repeated_tokens_given_as_own_rows_have_the_same_scores(name: str) -> None:
    model = HookedTransformer(build_mixed(name) if name in MIXERS else build(name))
    known = interp.heads(model, repeats=SMALL, sentences=None)
    rows = Batch(SMALL.tokens(model.cfg.d_vocab, model.text.bos_id or 0), bos=True)
    found = interp.heads(model, rows, sentences=None)
    for variable in ("value", "low", "high", "null", "n"):
        mine, theirs = (table[variable].sel(score=list(SCORES)).values for table in (found, known))
        np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-12, err_msg=variable)
    why = (
        "z = pattern @ values alone; Differential has a pattern, but a norm of each head's z follows it"
        if name in MIXERS
        else "asked of rows of your own"
    )
    assert "copying" not in found.score.values and found.attrs["no_copying"] == why


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_of_ones_own_have_the_scores_of_a_slow_loop(side: Literal["left", "right"]) -> None:
    """Rows of several lengths, tokens that repeat at any distance; one row repeats nothing and counts for neither."""
    rows = [[0, 5, 7, 5, 7, 9, 5], [0, 3, 3, 4], [0, 1, 2, 3, 4]]
    network = build("gpt2")
    table = interp.heads(HookedTransformer(network), Batch.of(rows, side=side), sentences=None)
    values: dict[str, list[np.ndarray]] = {name: [] for name in SCORES}
    for row in rows:
        seen = observe(network, Batch.of([row]), [Read("blocks.1.attn.hook_pattern")])
        pattern = seen.trace["blocks.1.attn.hook_pattern"][0].numpy()
        of_row: dict[str, list[np.ndarray]] = {name: [] for name in SCORES}
        for q in range(1, len(row)):
            a = pattern[:, q]
            copies = [k for k in range(q) if row[k] == row[q]]
            of_row["previous_token"].append(a[:, q - 1])
            of_row["current_token"].append(a[:, q])
            of_row["first_token"].append(a[:, 0])
            of_row["local"].append(a[:, max(1, q - 4) : q + 1].sum(1))
            of_row["entropy"].append(-(a[:, : q + 1] * np.log(a[:, : q + 1])).sum(1) / np.log(q + 1))
            if copies:
                of_row["duplicate_token"].append(a[:, copies].sum(1))
                of_row["induction"].append(a[:, [k + 1 for k in copies]].sum(1))
        for name, each in of_row.items():
            if each:
                values[name].append(np.mean(each, 0))
    for name, each in values.items():
        cells = table.sel(layer=1, score=name)
        np.testing.assert_allclose(cells.value, np.mean(each, 0), rtol=1e-9, atol=1e-12, err_msg=name)
        assert (cells.n == len(each)).all() and len(each) == (
            2 if name in ("duplicate_token", "induction") else 3
        )


class Written(TorchDispatchMode):
    """The numbers that operators write, views not counted, and the most of one operator."""

    def __init__(self) -> None:
        super().__init__()
        self.total = self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.is_floating_point() and not func.is_view:
            self.total, self.most = self.total + out.numel(), max(self.most, out.numel())
        return out


def test_the_scores_of_a_pattern_write_little_beside_it() -> None:
    """In numbers for each weight of a pattern: 2.0 and 3.1; 4.2 and 9.2 with a copy for each score."""
    data = RepeatedTokens(period=31, repeats=4, rows=2)
    pattern = torch.rand(2, 4, data.length, data.length).tril()
    batch = Batch(data.tokens(100, 0))
    keys = copy_keys(same_token(batch), batch.places)
    for most, score in (
        (2.2, lambda: _scores_and_kernel(pattern, data)),
        (3.2, lambda: copy_scores(pattern, keys, batch.places)),
    ):
        with Written() as written:
            score()
        assert written.total < most * pattern.numel()


@pytest.mark.parametrize("data", [SMALL, "own"])
def test_no_more_than_a_part_of_the_patterns_is_held_at_once(
    data: RepeatedTokens | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = speaker()
    tokens = SMALL.tokens(model.cfg.d_vocab, model.text.bos_id or 0)
    size = model.cfg.n_heads * SMALL.length**2
    monkeypatch.setattr("interp.model.attention.PART", 2 * size)
    square = []

    class Squares(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.ndim == 4 and out.shape[-2:] == (SMALL.length, SMALL.length):
                square.append(out.numel() if out.shape[1] == model.cfg.n_heads else 0)
            return out

    rows = Batch(tokens, bos=True) if data == "own" else None
    with Squares():
        interp.heads(model, rows, repeats=None if data == "own" else SMALL, sentences=None)
    assert max(square) == 2 * size < len(tokens) * size


def test_what_repeats_is_ones_own_to_say() -> None:
    """Upper and lower case as one token: induction across the two, which no equal ids would show."""
    model = HookedTransformer.from_pretrained("groundtruth-induction")
    plain = SMALL.tokens(model.cfg.d_vocab, 0)
    same = interp.heads(model, Batch(plain, bos=True), sentences=None)
    told = interp.heads(model, Batch(plain, bos=True), copies=same_token, sentences=None)
    assert same.value.identical(told.value)
    shifted = interp.heads(model, Batch(plain, bos=True), copies=one_before, sentences=None)
    assert float(same.value.sel(score="induction")[INDUCTION]) > 0.9
    assert float(shifted.value.sel(score="induction")[INDUCTION]) < 0.1
    assert same.label.values[INDUCTION] == "induction" != shifted.label.values[INDUCTION]
    for wrong in (
        lambda batch: same_token(batch)[:, :, :-1],
        lambda batch: same_token(batch).mT,
        same_token_ids,
    ):
        with pytest.raises(ValueError, match="copies must be True or False for each query and key"):
            interp.heads(model, Batch(plain, bos=True), copies=wrong, sentences=None)
    with pytest.raises(ValueError, match="data must have rows in which a token repeats an earlier one"):
        interp.heads(model, Batch(plain[:, :4], bos=True), sentences=None)
    with pytest.raises(ValueError, match="RepeatedTokens knows where its tokens repeat"):
        interp.heads(model, repeats=SMALL, copies=same_token)


def one_before(batch: Batch) -> Tensor:
    """What stands before an earlier copy, in place of the copy."""
    found = same_token(batch).roll(-1, 2)
    found[:, :, -1] = False
    return found & same_token(batch).any(2, keepdim=True) & torch.ones_like(found).tril(-1)


def same_token_ids(batch: Batch) -> Tensor:
    return same_token(batch).long()


# --- edited models -------------------------------------------------------------------------------------------------


def ways(model: HookedTransformer, edits: list[Edit], *data: object) -> Iterator[xr.Dataset]:
    """The table of an edited model in both ways to ask for it."""
    with model.hooks(edits=edits):
        yield interp.heads(model, *data)  # type: ignore[arg-type]
    yield interp.heads(model.edited(edits), *data)  # type: ignore[arg-type]


@pytest.mark.slow
def test_planted_induction_head_without_its_previous_token_head_is_at_null() -> None:
    model = HookedTransformer(planted.induction().model, groundtruth.Alphabet())
    assert float(interp.heads(model).value.sel(score="induction")[INDUCTION]) > 0.95
    first = None
    for table in ways(model, [Edit(PREVIOUS, Zero())]):
        cell = table.sel(layer=INDUCTION[0], head=INDUCTION[1], score="induction")
        assert float(cell.value) == pytest.approx(float(cell.null), abs=0.002)
        assert (
            table.label.values[INDUCTION] != "induction" and table.label.values[PREVIOUS] == "previous token"
        )
        first = table if first is None else first
        assert table.identical(first)
    again = interp.heads(model).value.sel(score="induction")[INDUCTION]
    assert float(again) > 0.95, "nothing is left of the edits"


def test_trained_model_without_previous_token_heads_has_no_induction_head() -> None:
    model, rows = HookedTransformer.from_pretrained("demo-attn-2l"), RepeatedTokens(rows=4)
    plain = interp.heads(model, repeats=rows, sentences=None)
    previous = plain.value.sel(layer=0, score="previous_token").values
    edits = [Edit((0, int(head)), Zero()) for head in np.flatnonzero(previous > 0.15)]
    found = interp.heads(model.edited(edits), repeats=rows, sentences=None).sel(layer=1, score="induction")
    assert (plain.value.sel(layer=1, score="induction") > 0.5).sum() >= 4
    assert float(abs(found.value - found.null).max()) < 0.01


def zeroed(name: str, edit: str) -> Transformer:
    """A copy of a model whose part writes nothing."""
    network = copy.deepcopy(speaker(name).transformer)
    if edit == "L0.mlp":
        network.block(0).mlp.out.weight.zero_()  # type: ignore[union-attr]
        if network.block(0).mlp.out.bias is not None:  # type: ignore[union-attr]
            network.block(0).mlp.out.bias.zero_()  # type: ignore[union-attr]
    else:
        width = network.config.head_width
        network.block(0).attn.out.weight[:, width : 2 * width] = 0
    return network


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "gemma2", "parallel"])
@over("edit", ["L0.mlp", "L0H1"])
def test_an_edited_model_is_the_model_with_those_weights(name: str, edit: str) -> None:
    model = speaker(name)
    found = interp.heads(model.edited(Edit(edit, Zero())), repeats=SMALL, sentences=DATA)
    expected = interp.heads(
        HookedTransformer(zeroed(name, edit), model.text.tokenizer), repeats=SMALL, sentences=DATA
    )
    plain = interp.heads(model, repeats=SMALL, sentences=DATA)
    if edit == "L0.mlp":
        assert set(expected.score.values) - set(found.score.values) == {"copying_weights"}
        assert "L0.mlp is edited" in found.attrs["no_copying_weights"]
    cells = found.value.notnull()
    gone = [(int(i), int(h), str(s)) for i, h, s in zip(*np.nonzero(~cells.values), strict=True)]
    off = [found.score.values.tolist().index(s) for s in ("copying", "copying_weights") if s in found.score]
    assert {(i, h, int(s)) for i, h, s in gone} == ({(0, 1, s) for s in off} if edit == "L0H1" else set())
    same = expected.sel(score=found.score).where(cells)
    np.testing.assert_allclose(found.value, same.value, rtol=1e-9, atol=1e-12)
    assert float(abs(found.value - plain.value.sel(score=found.score)).max()) > 1e-3


def test_weights_made_unlike_by_edits_are_left_out_and_the_rest_is_told() -> None:
    model = speaker()
    vector = torch.arange(model.cfg.d_model).double()
    found = interp.heads(model.edited(Edit("L1.attn", Scale(2.0))), repeats=SMALL, sentences=DATA)
    assert found.value.sel(layer=1, score=["copying", "copying_weights"]).isnull().all()
    assert found.value.sel(layer=0).notnull().all()
    assert "name_mover" not in found.score and "not all that writes" in found.attrs["no_name_mover"]
    assert "to_receiver" in found.score
    steered = interp.heads(model.edited(Edit("L1.resid", Add(vector))), repeats=SMALL, sentences=DATA)
    assert "copying_weights" in steered.score and steered.value.notnull().all()
    assert "name_mover" not in steered.score
    values = interp.heads(model.edited(Edit("blocks.1.attn.hook_v", Zero())), repeats=SMALL, sentences=None)
    assert values.value.sel(layer=1, score="copying_weights").isnull().all()
    copying = values.value.sel(layer=1, score="copying").values
    assert copying == pytest.approx(chance_copying(SMALL.sample)), "it raises nothing"
    embedded = interp.heads(model.edited(Edit("embed", Scale(2.0))), repeats=SMALL, sentences=None)
    assert "copying_weights" not in embedded.score and "embed is edited" in embedded.attrs["no_successor"]


def test_a_pattern_that_is_edited_is_the_one_that_is_scored() -> None:
    n = SMALL.length
    back = torch.eye(n, dtype=torch.float64)[[max(i - 1, 0) for i in range(n)]].expand(1, 4, n, n)
    edit = Edit("blocks.1.attn.hook_pattern", Set(back))
    found = interp.heads(speaker().edited(edit), repeats=SMALL, sentences=None).value
    np.testing.assert_allclose(found.sel(layer=1, score="previous_token"), 1.0)
    assert (found.sel(layer=0, score="previous_token") < 0.9).all()


def test_rows_whose_passes_take_minutes_are_announced_undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RepeatedTokens, "tokens", lambda *_, **__: (_ for _ in ()).throw(OSError("drawn")))
    monkeypatch.setattr("interp.passes.duration.A_MINUTE", 1e6)
    with (
        pytest.raises(OSError, match="drawn"),
        pytest.warns(
            interp.Note, match=r"^10000000 rows of 19 repeated tokens: about \S+ min on such a device; "
        ),
    ):
        interp.heads(hooked(), repeats=replace(SMALL, rows=10**7))


def test_minutes_of_rows_count_their_draws_and_their_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model's products of a million rows are less than a minute, and its scores of them are not."""
    monkeypatch.setattr(RepeatedTokens, "tokens", lambda *_, **__: (_ for _ in ()).throw(OSError("drawn")))
    model, repeats = hooked(), replace(SMALL, rows=10**6)
    config = model.cfg
    products = config.n_layers * repeats.length * block_products(config)
    others = SCORED * config.n_layers * config.n_heads * repeats.length**2 + DRAWN * config.d_vocab
    minute = duration.A_MINUTE * torch.get_num_threads()
    assert repeats.rows * products < minute
    with pytest.raises(OSError, match="drawn"), pytest.warns(interp.Note) as notes:
        interp.heads(model, repeats=repeats)
    expected = f"about {float(f'{repeats.rows * (products + others) / minute:.1g}'):g} min"
    assert any(expected in str(note.message) for note in notes)


def test_rows_that_do_not_fit_and_models_that_see_ahead_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of 101 tokens do not fit the context of 24"):
        interp.heads(HookedTransformer(build("gpt2")))
    with pytest.raises(ValueError, match="causal"):
        interp.heads(HookedTransformer(build("bidirectional")), repeats=SMALL)


@over("name", ["gated-delta-pairs", "short-conv"])
def test_layers_without_attention_are_left_out_and_the_others_are_as_ever(name: str) -> None:
    model = HookedTransformer(build_mixed(name))
    layers, n_layers = with_pattern(model.cfg), model.cfg.n_layers
    assert 0 < len(layers) < n_layers
    data = RepeatedTokens(rows=6, period=6, repeats=3)
    found = interp.heads(model, repeats=data, sentences=None)
    kernel = attention_kernel(model, data).value
    others = [layer for layer in range(n_layers) if layer not in layers]
    where = [score for score in found.score.values if score in BY_PATTERN]
    assert (
        found.value.sel(layer=others, score=where).isnull().all() and kernel.sel(layer=others).isnull().all()
    )
    assert (found.label.sel(layer=others) == "none").all()
    assert found.attrs["no_pattern"].startswith(f"layers {', '.join(map(str, others))} ")
    tokens = data.tokens(model.cfg.d_vocab, 0)
    for layer in layers:
        site = f"blocks.{layer}.attn.hook_pattern"
        pattern = observe(model, Batch(tokens, bos=True), [Read(site)]).trace[site]
        for head in range(model.cfg.n_heads):
            rows = [slow_scores(pattern[b, head], tokens[b].tolist())[0] for b in range(len(tokens))]
            for score in SCORES:
                mean = float(np.mean([row[score] for row in rows]))
                value = found.value.sel(layer=layer, head=head, score=score)
                assert float(value) == pytest.approx(mean, abs=1e-6)
        assert kernel.sel(layer=layer).notnull().all()
