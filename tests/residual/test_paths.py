"""Path expansion against literal reruns of the model, and the framework it rests on (Elhage et al. 2021), checked."""

import functools
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import interp
from interp import Edit, HookedTransformer, Read, observe
from interp.core import FactoredMatrix
from interp.data.batch import Batch
from interp.edits import Add, Scale, Zero
from interp.residual import (
    IncompleteSumError,
    orders,
    path_matrix,
    paths,
    term_importance,
)
from interp.residual.paths import Frozen, Readings, frozen_reads, order_logits, path_name
from interp.weights import HeadCircuits
from tests.batches import in_batches
from tests.configs import CONFIGS, perturbed
from tests.loops import over
from tests.residual.reruns import BATCH, PLAIN, VARIANTS, Rerun, model
from tests.tolerances import assert_close, student95
from tests.wrapped.wrapping import wrapped

EACH = pytest.mark.parametrize("name", VARIANTS)
ANSWER, WRONG = torch.tensor([3, 14]), torch.tensor([30, 2])


def by_rerun(name: str) -> tuple[list[Tensor], Rerun]:
    """Logits of run 1, 2, ..., n_layers + 1, each adding what the run before computed."""
    rerun = Rerun(model(name))
    found, writes = [], [None] * rerun.n
    for _ in range(rerun.n + 1):
        run = rerun(writes)
        found.append(run.logits)
        writes = run.added
    return found, rerun


def by_order(name: str = "framework") -> Tensor:
    """Logits by order, `[order b p v]`."""
    result = orders(model(name), BATCH)
    return torch.from_numpy(result.value.transpose("order", "prompt", "pos", "vocab").values)


@EACH
def test_the_sum_up_to_each_order_is_the_literal_rerun(name: str) -> None:
    found = by_order(name)
    runs, rerun = by_rerun(name)
    assert len(found) == rerun.n + 1
    assert (found.cumsum(0) - torch.stack(runs)).abs().max() < 1e-10
    assert min(float(order.abs().max()) for order in found) > 1e-3, "no order is empty in a random model"


@EACH
def test_the_orders_sum_to_the_models_own_logits(name: str) -> None:
    result = orders(model(name), BATCH)
    site = Rerun(model(name)).logits_site
    logits = observe(model(name).transformer, BATCH, [Read(site)]).trace[site]
    assert np.abs(result.value.sum("order").values - logits.numpy()).max() < 1e-10
    assert result.attrs["completeness_error"] < 1e-11


def measured(name: str, last: Tensor) -> dict[str, Tensor]:
    """Every direct, single and virtual term as differences of reruns; `last` picks the logits asked for."""
    rerun = Rerun(model(name))
    base = rerun([None] * rerun.n, mlps=())
    found = {"order 0": (base.logits * last).sum((1, 2))}
    for mlp in rerun.mlps:
        run = rerun([None] * rerun.n, mlps=(mlp,))
        found[mlp] = ((run.logits - base.logits) * last).sum((1, 2))
        for reader in range(rerun.n):
            for h, head in enumerate(run.heads[reader] - base.heads[reader]):
                effect = rerun.alone(reader, rerun.as_added(reader, head), base)
                found[f"{mlp}>L{reader}H{h}"] = (effect.logits * last).sum((1, 2))
    for first in range(rerun.n):
        writes = {f"L{first}H{h}": rerun.as_added(first, r) for h, r in enumerate(base.heads[first])}
        writes[f"L{first}.attn_bias"] = base.added[first] - sum(writes.values())  # type: ignore[call-overload]
        for label, write in writes.items():
            effect = rerun.alone(first, write, base)
            found[label] = (effect.logits * last).sum((1, 2))
            for second in range(first + 1, rerun.n):
                for h, change in enumerate(effect.heads[second]):
                    pair = rerun.alone(second, rerun.as_added(second, change), base)
                    found[f"{label}>L{second}H{h}"] = (pair.logits * last).sum((1, 2))
    return found


def picked(*, wrong: bool) -> Tensor:
    """1 at the answer's logit at the last position (and -1 at the wrong one's), `[b p v]`."""
    last = torch.zeros(2, 8, 31, dtype=torch.float64)
    last[range(2), -1, ANSWER] = 1
    if wrong:
        last[range(2), -1, WRONG] = -1
    return last


@EACH
def test_every_path_is_the_difference_of_two_literal_reruns(name: str) -> None:
    table = paths(model(name), BATCH, ANSWER, WRONG)
    found = {str(c): torch.from_numpy(table.value.sel(path=c).values) for c in table.path.values}
    expected = measured(name, picked(wrong=True))
    found["order 0"] = found.pop("direct") + found.pop("constant")
    rest = found.pop("remainder", None)
    assert not found.keys() - expected.keys()
    for label, value in expected.items():
        if label not in found:  # a head before an MLP reads nothing of it
            assert ".mlp" in label and value.abs().max() == 0
            continue
        assert (found[label] - value).abs().max() < 1e-10, label
    orders_, heads = (
        by_order(name),
        {int(k): table.value.sel(path=table.order == k).sum("path") for k in (0, 1)},
    )
    for k, total in heads.items():  # the paths of 0 and of 1 head are all there
        assert_close(torch.from_numpy(total.values), (orders_[k] * picked(wrong=True)).sum((1, 2)))
    if rest is not None:
        long = orders_[2:].sum(0)
        shown = torch.from_numpy(table.value.sel(path=table.order == 2).sum("path").values)
        assert_close(rest, (long * picked(wrong=True)).sum((1, 2)) - shown)
        assert rest.abs().max() > 1e-4


@EACH
@over("wrong", [True, False])
def test_the_paths_sum_to_the_logit_asked_for(name: str, wrong: bool) -> None:
    table = paths(model(name), BATCH, ANSWER, WRONG if wrong else None)
    site = Rerun(model(name)).logits_site
    logits = observe(model(name).transformer, BATCH, [Read(site)]).trace[site]
    expected = (logits * picked(wrong=wrong)).sum((1, 2)).numpy()
    assert np.abs(table.value.sum("path").values - expected).max() < 1e-10
    np.testing.assert_allclose(table.total.values, expected, rtol=0, atol=1e-12)
    assert table.attrs["completeness_error"] < 1e-11


def test_the_paper_s_two_layer_model_has_1_and_24_and_144_terms() -> None:
    table = paths(model(), BATCH, ANSWER, WRONG)
    biases = table.path.str.contains("bias")
    assert float(np.abs(table.value.where(biases, 0)).max()) == 0, "this model has none"
    counts = [int(((table.order == k) & ~biases & (table.path != "constant")).sum()) for k in range(3)]
    assert counts == [1, 24, 144] == term_importance(model(), BATCH).terms.values[:3].tolist()


# the framework, by dense matrices: a head is A x OV, and the logits are the direct path, every head, every pair


@functools.cache
def patterns() -> tuple[Tensor, Tensor]:
    sites = [f"blocks.{layer}.attn.hook_pattern" for layer in range(2)]
    cache = model().run_with_cache(BATCH, sites)[1]
    return cache[sites[0]], cache[sites[1]]


@functools.cache
def embedding() -> Tensor:
    cache = model().run_with_cache(BATCH, ["hook_embed", "hook_pos_embed"])[1]
    return cache["hook_embed"] + cache["hook_pos_embed"]


def dense(*heads: tuple[int, int]) -> Tensor:
    """Logits of one path: patterns A2 A1 and matrices OV1 OV2 multiplied out."""
    x = embedding()
    for layer, head in heads:
        circuit = model().OV[layer, head]
        x = patterns()[layer][:, head] @ (x @ circuit.A @ circuit.B)
    return x @ model().W_U


def test_orders_are_direct_path_heads_and_virtual_heads_multiplied_out() -> None:
    single = sum(dense((layer, h)) for layer in range(2) for h in range(12))
    virtual = sum(dense((0, first), (1, second)) for first in range(12) for second in range(12))
    found = by_order()
    for order, expected in zip(found, (dense(), single, virtual), strict=True):
        assert isinstance(expected, Tensor)
        assert (order - expected).abs().max() < 1e-10
        assert expected.abs().max() > 1e-2, "no order is negligible in a random model"
    assert (found.sum(0) - model()(BATCH)).abs().max() < 1e-10


def test_with_frozen_patterns_the_logits_are_linear_in_the_embedding() -> None:
    sites = [f"blocks.{layer}.attn.hook_pattern" for layer in range(2)]
    froze = [(site, lambda x, hook, kept=kept: kept) for site, kept in zip(sites, patterns(), strict=True)]

    def scaled(by: float, hooks: list[object]) -> Tensor:
        scale = [(name, lambda x, hook: by * x) for name in ("hook_embed", "hook_pos_embed")]
        return model().run_with_hooks(BATCH, [*scale, *hooks])

    assert_close(scaled(3.0, froze), 3 * model()(BATCH))
    assert not torch.allclose(scaled(3.0, []), 3 * model()(BATCH))


@pytest.mark.parametrize("layer", [0, 1])
def test_scores_are_the_bilinear_form_of_the_query_key_circuit(layer: int) -> None:
    cache = model().run_with_cache(BATCH)[1]
    x, scores = cache["resid_pre", layer], cache["attn_scores", layer]
    for head in range(12):
        circuit = model().QK[layer, head]
        expected = 0.3 * (x @ circuit.A) @ (circuit.B @ x.mT)
        seen = torch.ones(8, 8, dtype=torch.bool).tril().expand(2, -1, -1)
        assert_close(scores[:, head][seen], expected[seen])


# matrices


def test_path_matrices_are_products_of_embedding_circuits_and_unembedding() -> None:
    circuits, m = HeadCircuits(model().transformer), model()
    first, second = m.OV[0, 3].AB, m.OV[1, 7].AB
    for heads, inner in {
        (): torch.eye(24).double(), ("L1H7",): second, ("L0H3", "L1H7"): first @ second,
    }.items():  # fmt: skip
        assert_close(path_matrix(circuits, *heads).AB, m.W_E @ inner @ m.W_U)
    assert torch.equal(
        path_matrix(circuits, (0, 3), interp.Part("head", 1, 7)).AB, path_matrix(circuits, "L0H3", "L1H7").AB
    )
    assert path_matrix(circuits, "L0H3", "L1H7").A.shape == (31, 6), "a virtual head keeps its rank"
    assert_close(path_matrix(circuits, "L1H7").AB, circuits.full_ov("L1H7").AB)
    assert_close(path_matrix(circuits).AB, circuits.direct().AB)


def test_only_the_first_head_of_a_path_reads_the_constant() -> None:
    """With biases the circuit has a row for b_V and beta; what a head writes to the next one carries no constant."""
    circuits = HeadCircuits(model("rotary-biases").transformer, folded=True, biases=True)
    first, second = circuits.ov("L0H1").AB, circuits.ov("L1H2").AB[:24]
    expected = circuits.embedded @ first @ second @ circuits.unembedding
    assert_close(path_matrix(circuits, "L0H1", "L1H2").AB, expected)
    assert first.shape == (25, 24) and path_matrix(circuits).shape == (31, 31)


def test_path_matrices_and_patterns_give_the_paths_on_data() -> None:
    """Folded, in a model with norms, GQA and factors whose stream holds tokens only: A2 A1 over the scales, times M."""
    subject = model("gqa-no-biases")
    rerun, circuits = Rerun(subject), HeadCircuits(subject.transformer, folded=True)
    scales = [
        rerun.seen[s] for s in ("blocks.0.ln1.hook_scale", "blocks.1.ln1.hook_scale", "ln_final.hook_scale")
    ]
    moved = [
        rerun.seen[f"blocks.{i}.attn.hook_pattern"] / scales[i].movedim(-1, 1)[:, :, None] for i in range(2)
    ]
    table = paths(subject, BATCH, ANSWER)
    for heads in ((), ("L0H1",), ("L1H2",), ("L0H1", "L1H2")):
        mix = torch.eye(8).double().expand(2, -1, -1)
        for part in map(interp.Part.of, heads):
            mix = moved[part.layer][:, part.index] @ mix
        columns = path_matrix(circuits, *heads).AB[:, ANSWER].T
        of_tokens = columns.gather(1, BATCH.tokens)
        expected = (mix[:, -1] * of_tokens).sum(-1) / scales[2][:, -1, 0]
        assert_close(torch.from_numpy(table.value.sel(path=path_name(*heads)).values), expected)


def test_paths_and_matrices_that_do_not_exist_are_refused() -> None:
    circuits = HeadCircuits(model().transformer)
    with pytest.raises(ValueError, match="strictly rising layers are required, got L1H0, L0H0"):
        path_matrix(circuits, "L1H0", "L0H0")
    with pytest.raises(ValueError, match="strictly rising"):
        path_matrix(circuits, "L1H0", "L1H2")
    with pytest.raises(IndexError, match="L1H12: the index of a head is 0 to 11"):
        path_matrix(circuits, "L0H0", "L1H12")
    with pytest.raises(ValueError, match=r"goes through heads of self-attention, such as L0H1, got L0\.attn"):
        path_matrix(circuits, "L0.attn")
    assert path_name() == "direct" and path_name("L0H3", (1, 2)) == "L0H3>L1H2"


# what each order is worth


def row_losses(logits: Tensor) -> Tensor:
    """Each row's mean loss, by the textbook."""
    flat = F.cross_entropy(logits[:, :-1].reshape(-1, 31), BATCH.tokens[:, 1:].flatten(), reduction="none")
    return flat.view(2, 7).mean(1)


@pytest.mark.parametrize(
    "name",
    ["rotary-biases", "sandwich", "post-norm", "three-layers", "gpt2-mlp", "macaron-mlp", "post-norm-mlp"],
)
def test_term_importance_is_the_loss_bookkeeping_of_the_reruns(name: str) -> None:
    result, rerun = term_importance(model(name), BATCH), Rerun(model(name))
    writes, losses = [None] * rerun.n, [torch.full((2,), math.log(31), dtype=torch.float64)]
    for _ in range(rerun.n + 1):
        run = rerun(writes)
        losses.append(row_losses(run.capped))
        writes = run.added
    once = rerun([None] * rerun.n).added
    only = [[w if i == at else None for i, w in enumerate(once)] for at in range(rerun.n)]
    without = [[None if i == at else w for i, w in enumerate(once)] for at in range(rerun.n)]
    alone = [row_losses(rerun(w).capped) for w in only]
    by_order = [a - b for a, b in itertools.pairwise(losses)]
    of_rows = {
        "loss": [*losses[1:], *alone],
        "reduction": [*by_order, *(losses[1] - loss for loss in alone)],
        "given_others": [*by_order, *(row_losses(rerun(w).capped) - losses[2] for w in without)],
    }
    assert result.term.values.tolist() == [
        *(f"order {k}" for k in range(rerun.n + 1)), *(f"L{layer}.attn" for layer in range(rerun.n)),
    ]  # fmt: skip
    for key, rows in of_rows.items():
        values, found = torch.stack(rows).numpy(), result.sel(score=key)
        half = student95(2) * values.std(1, ddof=1) / math.sqrt(2)
        np.testing.assert_allclose(found.value, values.mean(1), atol=1e-10, err_msg=key)
        np.testing.assert_allclose(found.low, values.mean(1) - half, atol=1e-10)
        np.testing.assert_allclose(found.high, values.mean(1) + half, atol=1e-10)
        assert (found.null == (math.log(31) if key == "loss" else 0.0)).all() and (found.n == 2).all()
    whole = result.value.sel(term=f"order {rerun.n}", score="loss")
    assert float(whole) == pytest.approx(float(row_losses(model(name)(BATCH)).mean()), abs=1e-10)


def test_the_planted_model_s_loss_is_in_its_induction_head() -> None:
    planted = HookedTransformer.from_pretrained("groundtruth-induction")
    rows = planted.text.batch(["abcdefgh" * 12, "qwertyui" * 12])
    result = term_importance(planted, rows)
    orders_, layers = result.isel(term=slice(0, 3)), result.isel(term=slice(3, None))
    assert int(np.argmax(orders_.value.sel(score="reduction").values)) == 1
    for score in ("reduction", "given_others"):
        assert int(np.argmax(layers.value.sel(score=score).values)) == 1
    table = paths(planted, "abcdefabc", "d", "e")
    others = table.value[0].drop_sel(path="L1H2")
    assert float(table.value.sel(path="L1H2")[0]) > 15 > 10 * float(np.abs(others).max())


# precision, promises, refusals


@pytest.mark.parametrize(
    "name", ["learned", "gqa-rms", "post-norm", "three-layers", "gemma2-mlp", "macaron-mlp"]
)
def test_single_precision_agrees_with_double(name: str) -> None:
    wide, narrow = (paths(model(name, d), BATCH, ANSWER, WRONG) for d in (torch.float64, torch.float32))
    np.testing.assert_allclose(narrow.value, wide.value, atol=1e-4)
    half = orders(model(name, torch.bfloat16), BATCH)
    assert half.value.dtype == np.float32 and half.attrs["completeness_error"] < 5e-2


def test_a_recording_that_is_not_of_this_model_is_refused() -> None:
    config = model().cfg
    trace = observe(model().transformer, BATCH, frozen_reads(config)).trace
    torch.manual_seed(1)
    other = perturbed(config, seed=5)
    with pytest.raises(IncompleteSumError, match="logits by order: parts miss the whole"):
        order_logits(Frozen(other, trace))


def test_reading_back_never_builds_a_stream_per_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual head's reading is a weight per position and one direction."""
    shapes: list[tuple[int, ...]] = []
    plain = Readings.of_heads

    def watched(self: Readings, z: Tensor, out: Tensor) -> Tensor:
        shapes.extend([tuple(self.weight.shape), tuple(self.direction.shape)])
        return plain(self, z, out)

    monkeypatch.setattr(Readings, "of_heads", watched)
    paths(model(), BATCH, ANSWER, WRONG)
    assert shapes == [(2, 1, 8), (2, 1, 24), (2, 1, 8), (2, 1, 24), (2, 12, 8), (2, 12, 24)]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("masked-lm", "has a non-linear masked-LM head"), ("no-logits", "has no logits"),
        ("crossed", "attends to the memory of an encoder"),
        ("masked", "has a non-linear masked-LM head"),
    ],
)  # fmt: skip
def test_models_that_are_no_sum_of_paths_are_refused_by_name(name: str, what: str) -> None:
    more = {
        "no-logits": replace(PLAIN, unembed=False), "crossed": replace(PLAIN, cross_attention=True),
        "masked": replace(PLAIN, mlm_head="gelu"),
    }  # fmt: skip
    subject = HookedTransformer(perturbed((CONFIGS | more)[name], torch.float32))
    for ask in (orders, term_importance, functools.partial(paths, answer=3)):
        with pytest.raises(ValueError, match=f"exact for decoders and encoders .*{what}"):
            ask(subject, BATCH)


def test_a_row_that_predicts_nothing_is_refused() -> None:
    keep = torch.tensor([[True] * 8, [True] + [False] * 7])
    with pytest.raises(ValueError, match="two neighbouring real tokens in every row"):
        term_importance(model(), Batch(BATCH.tokens, keep))


def test_the_matrix_product_of_factors_stays_factored() -> None:
    assert isinstance(path_matrix(HeadCircuits(model().transformer), "L0H0", "L1H1"), FactoredMatrix)


# questions


def test_prompts_of_any_length_keep_their_orders_with_empty_padding() -> None:
    rows = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9]]
    both = orders(model("learned"), in_batches(model("learned"), Batch.of(rows), 1))
    for i, row in enumerate(rows):
        alone = orders(model("learned"), torch.tensor(row))
        np.testing.assert_allclose(both.value[i, :, : len(row)], alone.value[0], atol=1e-10)
    assert np.isnan(both.value[0, :, 5:]).all()
    assert both.token.values[0].tolist() == [*(f"<{i}>" for i in rows[0]), "", "", ""]


# edits


def without_head(subject: HookedTransformer, layer: int, head: int, factor: float = 0.0) -> HookedTransformer:
    """A copy whose W_O rows of one head are so many times as large."""
    network = perturbed(subject.cfg)
    network.load_state_dict(subject.transformer.state_dict())
    width = subject.cfg.head_width
    with torch.no_grad():
        network.block(layer).attn.out.weight[:, head * width : (head + 1) * width] *= factor
    return HookedTransformer(network)


@pytest.mark.parametrize("name", ["learned", "gqa-rms", "sandwich", "post-norm", "three-layers", "gpt2-mlp"])
def test_zeroed_or_scaled_head_gives_the_paths_without_its_output(name: str) -> None:
    subject = model(name)
    for change, factor in ((Zero(), 0.0), (Scale(0.5), 0.5)):
        edits, copy = [Edit("L1H1", change)], without_head(subject, 1, 1, factor)
        found, expected = (
            paths(subject.edited(edits), BATCH, ANSWER, WRONG),
            paths(copy, BATCH, ANSWER, WRONG),
        )
        np.testing.assert_allclose(found.value, expected.value, rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(found.total, expected.total, rtol=1e-10)
        assert abs(float(found.value.sel(path="L1H1")[0])) > 1e-3 or not factor
        for ask in (orders, term_importance):
            np.testing.assert_allclose(
                ask(subject.edited(edits), BATCH).value, ask(copy, BATCH).value, rtol=1e-8, atol=1e-10
            )


def test_a_head_scaled_at_one_position_is_carried_through_the_later_heads() -> None:
    subject = model("three-layers").edited([Edit("L0H1", Scale(3.0), at={"pos": 2})])
    found = paths(subject, BATCH, ANSWER, WRONG)
    assert found.attrs["completeness_error"] < 1e-11
    assert not np.allclose(
        found.value.sel(path="L0H1>L1H0"),
        paths(model("three-layers"), BATCH, ANSWER, WRONG).value.sel(path="L0H1>L1H0"),
    )


def test_pattern_edits_are_frozen_and_those_without_paths_refused() -> None:
    found = paths(model().edited(Edit("L1.pattern", Scale(0.5), at={"head": 3})), BATCH, ANSWER)
    assert found.attrs["completeness_error"] < 1e-11
    for where, change in (
        ("L0.attn", Zero()),
        ("L1.resid", Scale(2.0)),
        ("L0H1", Add(1.0)),
        ("L0.v", Zero()),
    ):
        for ask in (orders, term_importance, functools.partial(paths, answer=3)):
            with pytest.raises(ValueError, match=f"path expansion under an edit of {where}"):
                ask(model().edited(Edit(where, change)), BATCH)


def test_what_an_edited_mlp_adds_is_frozen_as_it_is() -> None:
    subject = model("gpt2-mlp")
    before = paths(subject, BATCH, ANSWER, WRONG)
    for change in (Edit("L0N3", Add(2.0)), Edit("L0.mlp", Scale(0.5)), Edit("L1.mlp", Zero())):
        found = paths(subject.edited(change), BATCH, ANSWER, WRONG)
        assert found.attrs["completeness_error"] < 1e-11
        assert (found.value.sel(path=found.mlps == 1) != before.value.sel(path=before.mlps == 1)).any()
    zeroed = paths(subject.edited(Edit("L1.mlp", Zero())), BATCH, ANSWER, WRONG)
    assert float(np.abs(zeroed.value.sel(path="L1.mlp")).max()) == 0


def test_paths_begin_at_mlps_and_say_so() -> None:
    table = paths(model("macaron-mlp"), BATCH, ANSWER)
    names = table.path.values.tolist()
    heads = range(model("macaron-mlp").cfg.n_heads)
    assert [n for n in names if n.endswith(("mlp", "mlp_before"))] == [
        "L0.mlp_before", "L0.mlp", "L1.mlp_before", "L1.mlp",
    ]  # fmt: skip
    assert {n for n in names if n.startswith("L0.mlp>")} == {f"L0.mlp>L1H{h}" for h in heads}
    assert {n for n in names if n.startswith("L0.mlp_before>")} == {
        f"L0.mlp_before>L{layer}H{h}" for layer in (0, 1) for h in heads
    }
    assert names[-1] == "remainder" and int(table.order[-1]) == int(table.mlps[-1]) == -1
    assert table.attrs["frozen"] == "patterns, norm scales and what MLPs add"
    assert paths(model("learned"), BATCH, ANSWER).attrs["frozen"] == "patterns and norm scales"


def test_what_is_no_sum_of_paths_of_one_text_is_refused_in_words() -> None:
    packed = Batch(BATCH.tokens, documents=torch.tensor([[0] * 4 + [1] * 4] * 2))
    for ask in (orders, term_importance):
        with pytest.raises(ValueError, match="path expansion requires one text per row"):
            ask(model("learned"), packed)
    for ask in (orders, term_importance, functools.partial(paths, answer=3)):
        with pytest.raises(ValueError, match="this model is a wrapped network, whose norms are no sites"):
            ask(wrapped("mistral"), BATCH)
    post = model("post-norm-mlp").edited(Edit("blocks.0.ln2.hook_normalized", Scale(2.0)))
    with pytest.raises(ValueError, match=r"path expansion under an edit of blocks\.0\.ln2\.hook_normalized"):
        paths(post, BATCH, ANSWER)
