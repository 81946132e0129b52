"""Full-vocabulary questions against the vocab x vocab matrices themselves, closed forms and planted heads."""

import copy
import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import xarray as xr
from jaxtyping import TypeCheckError
from torch import Tensor

from interp import HookedTransformer
from interp.core import tiles
from interp.core.factored import FactoredMatrix
from interp.model import ModelConfig, NoNorm, Transformer
from interp.model.weights import Weights
from interp.weights import copying as door
from interp.weights.copying import (
    copying,
    copying_ranks,
    eigenvalue_scores,
    matching_scores,
    skip_trigrams,
    top_pairs,
)
from interp.weights.head_circuits import Circuits
from interp.zoo import groundtruth
from tests.configs import CONFIGS, build, perturbed
from tests.loops import over
from tests.tiny import hooked
from tests.tolerances import assert_close

WITH_LOGITS = [name for name in CONFIGS if name != "masked-lm"]
CIRCUITS = {
    "as they are": {},
    "folded": {"folded": True},
    "effective": {"folded": True, "embedding": "effective"},
}
CONVENTIONS = over("conventions", CIRCUITS.values())


def dense_ov(circuits: Circuits, layer: int, head: int) -> Tensor:
    """E W_V W_O U, `[source, output]`."""
    return circuits.embedded @ circuits.ov(layer, head).AB @ circuits.unembedding


def dense_qk(circuits: Circuits, layer: int, head: int) -> Tensor:
    return circuits.embedded @ circuits.qk(layer, head).AB @ circuits.embedded.mT


def brute(matrix: Tensor) -> Tensor:
    """Eigenvalue positivity from all V eigenvalues."""
    values = torch.linalg.eigvals(matrix)
    return values.real.sum() / values.abs().sum()


def each(make: Callable[[int, int], Tensor]) -> Tensor:
    return torch.stack([torch.stack([make(layer, head) for head in range(4)]) for layer in range(2)])


@pytest.fixture
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE", 100)
    monkeypatch.setattr(tiles, "CACHED", 7)
    monkeypatch.setattr(door, "CHUNK", 7)


# --- eigenvalues --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_small_tiles")
@CONVENTIONS
@pytest.mark.parametrize("name", WITH_LOGITS)
def test_copying_scores_are_those_of_all_eigenvalues_of_the_full_circuit(
    name: str, conventions: dict[str, bool]
) -> None:
    circuits = Circuits(build(name), **conventions)
    expected = each(lambda layer, head: brute(dense_ov(circuits, layer, head)))
    torch.testing.assert_close(eigenvalue_scores(circuits), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("_small_tiles")
@CONVENTIONS
@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "gemma3", "attention-only"])
def test_matching_scores_are_those_of_all_eigenvalues_of_the_composed_circuit(
    name: str, conventions: dict[str, bool]
) -> None:
    """Oracle: score(a, b) of every query token a and key whose predecessor is b, multiplied out by the definition."""
    circuits = Circuits(build(name), **conventions)
    previous = torch.rand(2, 4, generator=torch.Generator().manual_seed(0)).double()
    e = circuits.embedded
    written = sum(previous[0, h] * (e @ circuits.ov(0, h).AB) for h in range(4))
    found = matching_scores(circuits, previous)
    assert bool(found[0].isnan().all())
    for head in range(4):
        scores = torch.einsum("ad,df,bf->ab", e, circuits.qk(1, head).AB, written)
        torch.testing.assert_close(found[1, head], brute(scores), rtol=1e-6, atol=1e-6)


def tied_model(d_vocab: int = 200, d_head: int = 64) -> Transformer:
    """No norms, U = E^T."""
    config = ModelConfig(
        2, 96, 4, 8, d_vocab, d_head=d_head, mlp=None, norm=NoNorm(), final_norm=False, tied=True
    )
    torch.manual_seed(0)
    return Transformer(config).double().eval().requires_grad_(False)


def set_values(model: Transformer, sign: float) -> None:
    """W_O = sign * W_V^T in every head."""
    for layer in range(2):
        weights = Weights(model).layer(layer)
        weights.W_O.copy_(sign * weights.W_V.mT)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_symmetric_semidefinite_circuit_between_tied_embeddings_copies_perfectly(sign: float) -> None:
    model = tied_model()
    set_values(model, sign)
    assert_close(eigenvalue_scores(Circuits(model)), torch.full((2, 4), sign).double())


def test_random_heads_score_about_zero() -> None:
    assert eigenvalue_scores(Circuits(tied_model())).abs().max() < 0.1


def test_scores_do_not_depend_on_the_basis_inside_a_head() -> None:
    """W_V -> W_V M, W_O -> M^-1 W_O, and W_Q -> W_Q M, W_K -> W_K M^-T are the same head."""
    model, previous = perturbed(CONFIGS["gpt2"]), torch.rand(2, 4).double()
    before = Circuits(model)
    ov, matching, ranks = (
        eigenvalue_scores(before),
        matching_scores(before, previous)[1],
        copying_ranks(before, 1, 2),
    )
    mix = torch.randn(6, 6).double() + 3 * torch.eye(6).double()
    for layer in range(2):
        w = Weights(model).layer(layer)
        for into, out in ((w.W_V, w.W_O), (w.W_Q, w.W_K.mT)):
            into.copy_(into @ mix)
            out.copy_(torch.linalg.inv(mix) @ out)
    after = Circuits(model)
    torch.testing.assert_close(eigenvalue_scores(after), ov, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(matching_scores(after, previous)[1], matching, rtol=1e-6, atol=1e-6)
    assert torch.equal(copying_ranks(after, 1, 2), ranks)


def test_half_precision_weights_are_summed_in_float32() -> None:
    """Oracle: the same rounded weights in float64."""
    half = perturbed(CONFIGS["no-norm"], torch.bfloat16)
    exact = copy.deepcopy(half).double()
    previous = torch.rand(2, 4)
    ours, theirs = Circuits(half), Circuits(exact)
    found = eigenvalue_scores(ours), matching_scores(ours, previous)[1]
    expected = eigenvalue_scores(theirs), matching_scores(theirs, previous.double())[1]
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)
    assert torch.equal(copying_ranks(ours, 1, 2), copying_ranks(theirs, 1, 2))


def test_nothing_of_the_vocabulary_squared_is_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    """600 tokens: every result of every operator stays below V x V, and nothing per head is V x d_model."""
    sizes: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, Tensor))
            return out

    circuits = Circuits(tied_model(d_vocab=600, d_head=8), folded=True)
    monkeypatch.setattr(tiles, "CACHED", 100)
    with Watch():
        eigenvalue_scores(circuits)
        matching_scores(circuits, torch.ones(2, 4))
        copying_ranks(circuits, 1, 2)
    assert max(sizes) == 600 * 96


# --- ranks and the door -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_small_tiles")
@CONVENTIONS
@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "gemma2", "granite-moe", "attention-only-rotary"])
def test_ranks_are_those_of_the_dense_circuit(name: str, conventions: dict[str, bool]) -> None:
    circuits = Circuits(build(name), **conventions)
    full = dense_ov(circuits, 1, 2)
    expected = (full > full.diagonal()[:, None] + 1e-12).sum(-1)
    assert torch.equal(copying_ranks(circuits, 1, 2), expected)


def test_the_table_holds_the_means_over_tokens_and_their_intervals() -> None:
    model = hooked("gpt2")
    table = copying(model, previous=xr.DataArray(torch.rand(2, 4).numpy(), dims=("layer", "head")))
    circuits = Circuits(model.transformer, folded=True, embedding="effective")
    assert_close(torch.from_numpy(table.eigenvalue.values), eigenvalue_scores(circuits))
    for layer, head in ((0, 3), (1, 1)):
        ranks = copying_ranks(circuits, layer, head).double()
        cell, n = table.sel(layer=layer, head=head), len(ranks)
        for name, values in (("top1", (ranks == 0).double()), ("mean_rank", ranks)):
            mean, half = float(values.mean()), 1.959964 * float(values.std()) / n**0.5
            assert float(cell[name]) == pytest.approx(mean)
            assert float(cell[f"{name}_low"]) == pytest.approx(mean - half, rel=1e-6, abs=1e-9)
            assert float(cell[f"{name}_high"]) == pytest.approx(mean + half, rel=1e-6, abs=1e-9)
    assert float(table.top1_null) == pytest.approx(1 / n)
    assert float(table.mean_rank_null) == (n - 1) / 2
    assert bool(table.matching[0].isnull().all()) and bool(table.matching[1].notnull().all())


def test_a_sample_of_tokens_has_the_ranks_it_has_among_all() -> None:
    model = hooked()
    n = model.cfg.d_vocab
    chosen = torch.randperm(n, generator=torch.Generator().manual_seed(0))[:7]
    ranks = copying_ranks(Circuits(model.transformer, folded=True, embedding="effective"), 1, 2)[
        chosen
    ].double()
    table = copying(model, sample=7).sel(layer=1, head=2)
    assert float(table.mean_rank) == pytest.approx(float(ranks.mean()))
    assert float(table.top1) == pytest.approx(float((ranks == 0).double().mean()))
    whole = copying(model, sample=n)
    for name, values in copying(model).items():
        torch.testing.assert_close(
            torch.tensor(whole[name].values), torch.tensor(values.values), equal_nan=True
        )
    with pytest.raises(ValueError, match=f"a sample of 2 to {n} tokens is required, got {n + 1}"):
        copying(model, sample=n + 1)


def test_without_ranks_only_spectra_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FactoredMatrix, "diagonal_ranks", None)
    assert set(copying(hooked("gpt2"), ranks=False)) == {"eigenvalue", "eigenvalue_null"}


@functools.cache
def planted() -> HookedTransformer:
    return HookedTransformer.from_pretrained("groundtruth-induction")


def test_the_planted_induction_head_copies_and_matches_and_no_other_does() -> None:
    previous = torch.zeros(2, 4)
    previous[groundtruth.PREVIOUS] = 1.0
    table = copying(planted(), previous=xr.DataArray(previous.numpy(), dims=("layer", "head")))
    layer, head = groundtruth.INDUCTION
    for name, others in (("eigenvalue", 0.2), ("matching", 0.2), ("top1", 0.2)):
        score = torch.from_numpy(table[name].values.copy())
        assert float(score[layer, head]) > 0.99
        score[layer, head] = 0.0
        assert float(score.nan_to_num(0.0).abs().max()) < others
    assert float(table.mean_rank[layer, head]) == 0.0


def test_a_head_that_writes_nothing_has_no_score() -> None:
    """A row of equal logits would otherwise pass for a perfect copy."""
    model = perturbed(CONFIGS["gpt2"])
    Weights(model).layer(1).W_O[2].zero_()
    table = copying(HookedTransformer(model))
    for name in ("eigenvalue", "top1", "mean_rank", "top1_low", "mean_rank_high"):
        missing = table[name].isnull()
        assert bool(missing[1, 2]) and int(missing.sum()) == 1


# --- pairs and skip-trigrams --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["OV", "QK"])
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "granite-moe"])
def test_top_pairs_are_the_extremes_of_the_dense_circuit_less_its_rows_means(
    name: str, kind: str, largest: bool
) -> None:
    model = hooked(name)
    circuits = Circuits(model.transformer, folded=True, scaled=True, embedding="effective")
    full = (dense_ov if kind == "OV" else dense_qk)(circuits, 1, 2)
    full = full - full.mean(-1, keepdim=True)
    order = full.flatten().argsort(descending=largest)[:7]
    table = top_pairs(model, 1, 2, kind, k=7, largest=largest, circuits=circuits)
    rows, columns = (table[f"{side}_id"].to_list() for side in door.SIDES[kind])
    assert (rows, columns) == ((order // len(full)).tolist(), (order % len(full)).tolist())
    assert_close(torch.tensor(table.value.to_list(), dtype=torch.float64), full.flatten()[order])
    assert table[door.SIDES[kind][0]].to_list() == model.text.pieces(rows)
    assert table.equals(top_pairs(model, 1, 2, kind, k=7, largest=largest))


def test_skip_trigrams_join_the_strongest_pairs_with_what_their_source_raises() -> None:
    model = hooked("gpt2")
    circuits = Circuits(model.transformer, folded=True, scaled=True, embedding="effective")
    qk, ov = (m - m.mean(-1, keepdim=True) for m in (dense_qk(circuits, 0, 1), dense_ov(circuits, 0, 1)))
    table = skip_trigrams(model, 0, 1, k=4, outputs=3)
    order = qk.flatten().argsort(descending=True)[:4]
    expected = [
        (int(pair % len(qk)), int(pair // len(qk)), int(output))
        for pair in order
        for output in ov[pair % len(qk)].argsort(descending=True)[:3]
    ]
    found = list(table[["source_id", "destination_id", "output_id"]].itertuples(index=False, name=None))
    assert found == expected
    for row in table.itertuples():
        assert row.qk == pytest.approx(float(qk[row.destination_id, row.source_id]))
        assert row.ov == pytest.approx(float(ov[row.source_id, row.output_id]))


@pytest.mark.parametrize("sources", [["a", 7], "b"])
def test_skip_trigrams_of_given_sources_list_who_attends_to_them(sources: str | list[str | int]) -> None:
    model = hooked("gpt2")
    circuits = Circuits(model.transformer, folded=True, scaled=True, embedding="effective")
    qk = dense_qk(circuits, 1, 1)
    qk = qk - qk.mean(-1, keepdim=True)
    table = skip_trigrams(model, 1, 1, sources=sources, k=3, outputs=2, circuits=circuits)
    given = [model.text.single("a"), 7] if isinstance(sources, list) else [model.text.single("b")]
    assert table.source_id.to_list() == [s for s in given for _ in range(6)]
    for i, source in enumerate(given):
        destinations = table.destination_id.to_list()[6 * i : 6 * i + 6 : 2]
        assert destinations == qk[:, source].argsort(descending=True)[:3].tolist()


def test_the_planted_induction_head_reads_as_copying_of_what_follows_itself() -> None:
    """Head 1.2 alone: every source raises itself most."""
    table = top_pairs(planted(), *groundtruth.INDUCTION, "OV", k=len(groundtruth.SYMBOLS))
    assert table.source.to_list() == table.output.to_list()
    assert sorted(table.source) == sorted(groundtruth.SYMBOLS)


# --- what they refuse ---------------------------------------------------------------------------------------------


def test_what_has_no_meaning_is_refused_by_name() -> None:
    circuits, model = Circuits(build("gpt2")), hooked("gpt2")
    biased = Circuits(build("gpt2"), biases=True)
    for ask in (lambda: eigenvalue_scores(biased), lambda: matching_scores(biased, torch.ones(2, 4))):
        with pytest.raises(ValueError, match=r"eigenvalues require a square circuit.*biases=True"):
            ask()
    with pytest.raises(ValueError, match=r"one finite weight per head is required, \[2, 4\], got \[4, 2\]"):
        matching_scores(circuits, torch.ones(4, 2))
    with pytest.raises(ValueError, match=r"got \[2, 4\] with NaN"):
        matching_scores(circuits, torch.full((2, 4), torch.nan))
    with pytest.raises(ValueError, match="masked-LM head"):
        eigenvalue_scores(Circuits(build("masked-lm")))
    with pytest.raises(IndexError, match="heads are 0 to 3, got 4"):
        copying_ranks(circuits, 0, 4)
    with pytest.raises((ValueError, TypeCheckError), match=r"kind must be OV or QK, got 'VO'|'kind'"):
        top_pairs(model, 0, 0, "VO")
    with pytest.raises(ValueError, match="circuits must be those of the model"):
        top_pairs(model, 0, 0, circuits=circuits)
    with pytest.raises(ValueError, match="got 0 answers"):
        skip_trigrams(model, 0, 0, sources=[])
    no_logits = perturbed(replace(CONFIGS["gpt2"], unembed=False))
    with pytest.raises(AttributeError, match="no W_U"):
        eigenvalue_scores(Circuits(no_logits))
