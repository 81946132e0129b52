"""Full-vocabulary questions against the vocab x vocab matrices themselves, closed forms and planted heads."""

import copy
import functools
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import xarray as xr
from scipy.stats import binomtest
from torch import Tensor

from interp import HookedTransformer
from interp.core import tiles
from interp.core.factored import FactoredMatrix
from interp.core.haar import haar_frames
from interp.model import ModelConfig, NoNorm, Transformer
from interp.model.parts import Part
from interp.model.weights import Weights
from interp.weights import HeadCircuits, copying, eigenvalue_scores, matching_scores
from interp.weights.copying import positivity, random_copying
from interp.weights.random_heads import with_random_heads
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


def dense_ov(circuits: HeadCircuits, layer: int, head: int) -> Tensor:
    """E W_V W_O U, `[source, output]`."""
    return circuits.embedded @ circuits.ov((layer, head)).AB @ circuits.unembedding


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
    monkeypatch.setattr(sys.modules["interp.weights.head_circuits"], "WIDENED", 7)


# --- eigenvalues --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_small_tiles")
@CONVENTIONS
@pytest.mark.parametrize("name", WITH_LOGITS)
def test_copying_scores_are_those_of_all_eigenvalues_of_the_full_circuit(
    name: str, conventions: dict[str, bool]
) -> None:
    circuits = HeadCircuits(build(name), **conventions)
    expected = each(lambda layer, head: brute(dense_ov(circuits, layer, head)))
    torch.testing.assert_close(eigenvalue_scores(circuits), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("_small_tiles")
@CONVENTIONS
@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "gemma3", "attention-only"])
def test_matching_scores_are_those_of_the_composed_circuits_eigenvalues(
    name: str, conventions: dict[str, bool]
) -> None:
    """Oracle: score(a, b) of every query token a and key whose predecessor is b, multiplied out by the definition."""
    circuits = HeadCircuits(build(name), **conventions)
    previous = torch.rand(2, 4, generator=torch.Generator().manual_seed(0)).double()
    e = circuits.embedded
    written = sum(previous[0, h] * (e @ circuits.ov((0, h)).AB) for h in range(4))
    found = matching_scores(circuits, previous)
    assert bool(found[0].isnan().all())
    for head in range(4):
        scores = torch.einsum("ad,df,bf->ab", e, circuits.qk((1, head)).AB, written)
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
def test_semidefinite_circuit_between_tied_embeddings_copies_perfectly(sign: float) -> None:
    model = tied_model()
    set_values(model, sign)
    assert_close(eigenvalue_scores(HeadCircuits(model)), torch.full((2, 4), sign).double())


def test_random_heads_score_about_zero() -> None:
    assert eigenvalue_scores(HeadCircuits(tied_model())).abs().max() < 0.1


def test_scores_do_not_depend_on_the_basis_inside_a_head() -> None:
    """W_V -> W_V M, W_O -> M^-1 W_O, and W_Q -> W_Q M, W_K -> W_K M^-T are the same head."""
    model, previous = perturbed(CONFIGS["gpt2"]), torch.rand(2, 4).double()
    before = HeadCircuits(model)
    ov, matching, ranks = (
        eigenvalue_scores(before),
        matching_scores(before, previous)[1],
        before.full_ov("L1H2").diagonal_ranks(),
    )
    mix = torch.randn(6, 6).double() + 3 * torch.eye(6).double()
    for layer in range(2):
        w = Weights(model).layer(layer)
        for into, out in ((w.W_V, w.W_O), (w.W_Q, w.W_K.mT)):
            into.copy_(into @ mix)
            out.copy_(torch.linalg.inv(mix) @ out)
    after = HeadCircuits(model)
    torch.testing.assert_close(eigenvalue_scores(after), ov, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(matching_scores(after, previous)[1], matching, rtol=1e-6, atol=1e-6)
    assert torch.equal(after.full_ov("L1H2").diagonal_ranks(), ranks)


def test_half_precision_weights_are_summed_in_float32() -> None:
    """Oracle: the same rounded weights in float64."""
    half = perturbed(CONFIGS["no-norm"], torch.bfloat16)
    exact = copy.deepcopy(half).double()
    previous = torch.rand(2, 4)
    ours, theirs = HeadCircuits(half), HeadCircuits(exact)
    found = eigenvalue_scores(ours), matching_scores(ours, previous)[1]
    expected = eigenvalue_scores(theirs), matching_scores(theirs, previous.double())[1]
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)
    assert torch.equal(ours.full_ov("L1H2").diagonal_ranks(), theirs.full_ov("L1H2").diagonal_ranks())


def test_nothing_of_the_vocabulary_squared_is_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    """600 tokens: every result of every operator stays below V x V, and nothing per head is V x d_model."""
    sizes: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, Tensor))
            return out

    circuits = HeadCircuits(tied_model(d_vocab=600, d_head=8), folded=True)
    monkeypatch.setattr(tiles, "CACHED", 100)
    with Watch():
        eigenvalue_scores(circuits)
        matching_scores(circuits, torch.ones(2, 4))
        circuits.full_ov("L1H2").diagonal_ranks()
    assert max(sizes) == 600 * 96


# --- ranks and the door -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_small_tiles")
@CONVENTIONS
@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "gemma2", "granite-moe", "attention-only-rotary"])
def test_ranks_are_those_of_the_dense_circuit(name: str, conventions: dict[str, bool]) -> None:
    circuits = HeadCircuits(build(name), **conventions)
    full = dense_ov(circuits, 1, 2)
    expected = (full > full.diagonal()[:, None] + 1e-12).sum(-1)
    assert torch.equal(circuits.full_ov("L1H2").diagonal_ranks(), expected)


def test_the_table_holds_the_means_over_tokens_and_their_intervals() -> None:
    model = hooked("gpt2")
    table = copying(model, previous=xr.DataArray(torch.rand(2, 4).numpy(), dims=("layer", "head")))
    circuits = HeadCircuits(model, folded=True, embedding="effective")
    for given in (circuits, model, model.transformer):
        exact = table.sel(score="eigenvalue")
        assert_close(torch.from_numpy(exact.value.values), eigenvalue_scores(given))
    assert bool(
        (exact.low == exact.value).all() and (exact.high == exact.value).all() and (exact.n == 0).all()
    )
    for layer, head in ((0, 3), (1, 1)):
        ranks = circuits.full_ov((layer, head)).diagonal_ranks().double()
        n = len(ranks)
        share, mean = (table.sel(layer=layer, head=head, score=name) for name in ("top1", "mean_rank"))
        known = binomtest(int((ranks == 0).sum()), n).proportion_ci(method="exact")
        assert_close(
            torch.tensor([float(share.low), float(share.high)]).double(),
            torch.tensor([known.low, known.high]).double(),
        )
        assert bool(mean.low.isnull() and mean.high.isnull()), "a few tokens decide the mean of ranks"
        assert float(share.value) == float((ranks == 0).double().mean())
        assert float(mean.value) == pytest.approx(float(ranks.mean()))
        assert int(share.n) == int(mean.n) == n and str(share.part.values) == f"L{layer}H{head}"
    assert set(table.null.sel(score="top1").values.ravel()) == {1 / n}
    assert set(table.null.sel(score="mean_rank").values.ravel()) == {(n - 1) / 2}
    matching = table.value.sel(score="matching")
    assert bool(matching[0].isnull().all()) and bool(matching[1].notnull().all())


def test_a_random_heads_score_is_that_of_its_full_circuit() -> None:
    """Three frames on either side: the heads written out, vocabulary by vocabulary, have the scores of the null."""
    circuits = HeadCircuits(build("gpt2"), folded=True)
    config, spectra = circuits.config, [circuits.ov(Part("attn", layer)).svd()[1] for layer in range(2)]
    found = random_copying(circuits, 12, seed=3).scores
    generator = torch.Generator().manual_seed(3)
    drawn = haar_frames(6, config.d_model, config.head_width, generator)
    order = torch.randperm(12, generator=generator)
    read, written = drawn[:3], drawn[3:]
    expected = []
    for partner in range(4):
        for w in range(3):
            values = torch.cat(spectra)[order[3 * partner + w] % 8]
            ov = read[(w + partner) % 3] @ torch.diag(values) @ written[w].mT
            full = circuits.embedded @ circuits.before_unembedding(ov) @ circuits.bare_unembedding
            expected.append(positivity(torch.linalg.eigvals(full)))
    assert_close(found, torch.stack(expected))


@pytest.mark.parametrize("name", ["demo-4l", "demo-attn-2l"])
def test_one_random_head_in_twenty_is_below_p_of_a_twentieth(name: str) -> None:
    """Heads of another seed, of a trained model's spectra and embeddings; Gaussian theory would call many of them."""
    circuits = HeadCircuits(HookedTransformer.from_pretrained(name), folded=True, embedding="effective")
    null, others = random_copying(circuits), random_copying(circuits, 1600, seed=5).scores
    p = null.p(others)
    assert (
        0.035 < float((p <= 0.05).double().mean()) < 0.065 and 0.45 < float((p <= 0.5).double().mean()) < 0.55
    )
    gaussian = 2 * 1.5 / circuits.config.head_width
    assert float((others.abs() > gaussian).double().mean()) > 0.1
    assert float(null.p(torch.tensor([torch.nan])).isnan()) == 1.0


def test_the_table_says_how_rare_a_score_is_among_random_heads() -> None:
    model = hooked("gpt2")
    weight = xr.DataArray(torch.rand(2, 4).numpy(), dims=("layer", "head"))
    table = copying(model, previous=weight, ranks=False)
    null = random_copying(HeadCircuits(model, folded=True, embedding="effective"))
    eigenvalue = table.sel(score="eigenvalue")
    assert_close(torch.from_numpy(eigenvalue.p.values), null.p(torch.from_numpy(eigenvalue.value.values)))
    assert (eigenvalue.null == null.mean).all()
    matching = table.sel(score="matching")
    assert matching.p[0].isnull().all() and matching.null[0].isnull().all()
    assert ((matching.p[1] > 0) & (matching.p[1] <= 1)).all()


def test_p_of_ranks_is_that_of_random_heads_of_the_same_layer() -> None:
    """Oracle: the tables of the models with random heads, counted by hand."""
    model = hooked("gpt2")
    table = copying(model, random=2, sample=9)
    others = [copying(with_random_heads(model.transformer, seed), sample=9).value for seed in range(2)]
    for score in ("top1", "mean_rank"):
        for layer in range(2):
            chance = torch.cat(
                [torch.from_numpy(x.sel(layer=layer, score=score).values.copy()) for x in others]
            )
            for head in range(4):
                cell = table.sel(layer=layer, head=head, score=score)
                above, below = (chance >= float(cell.value)).sum(), (chance <= float(cell.value)).sum()
                assert float(cell.p) == pytest.approx(min(1, 2 * (1 + min(int(above), int(below))) / 9))
    plain = copying(model, sample=9)
    assert bool(plain.p.sel(score=["top1", "mean_rank"]).isnull().all())
    xr.testing.assert_identical(plain.drop_vars("p"), table.drop_vars("p"))


def test_a_sample_of_tokens_has_the_ranks_it_has_among_all() -> None:
    model = hooked()
    n = model.cfg.d_vocab
    chosen = torch.randperm(n, generator=torch.Generator().manual_seed(0))[:7]
    circuits = HeadCircuits(model, folded=True, embedding="effective")
    ranks = circuits.full_ov("L1H2").diagonal_ranks()[chosen].double()
    table = copying(model, sample=7).value.sel(layer=1, head=2)
    assert float(table.sel(score="mean_rank")) == pytest.approx(float(ranks.mean()))
    assert float(table.sel(score="top1")) == pytest.approx(float((ranks == 0).double().mean()))
    whole = copying(model, sample=n)
    for name, values in copying(model).items():
        torch.testing.assert_close(
            torch.tensor(whole[name].values), torch.tensor(values.values), equal_nan=True
        )
    xr.testing.assert_identical(copying(model, sample="all"), copying(model))
    with pytest.raises(ValueError, match=f"a sample of 2 to {n} tokens is required, got {n + 1}"):
        copying(model, sample=n + 1)


def test_of_a_large_vocabulary_a_sample_is_ranked_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hooked()
    c = model.cfg
    assert not copying(model).view.notes
    module = sys.modules["interp.weights.copying"]  # the package has a function of this name
    of_token = 2 * c.d_vocab * c.head_width * c.n_heads * c.n_layers
    monkeypatch.setattr(module, "RANKING", 5.5 * of_token)
    monkeypatch.setattr(module, "FEWEST_RANKED", 4)
    monkeypatch.setattr(module, "SCREENED", 6)
    some, asked = copying(model, folded=False), copying(model, folded=False, sample=5)
    assert some.view.notes[0].startswith(f"top1 and mean_rank are of 5 of {c.d_vocab} tokens")
    assert not asked.view.notes
    assert set(some.n.sel(score=["top1", "mean_rank"]).values.ravel()) == {5}
    torch.testing.assert_close(torch.tensor(some.value.values), torch.tensor(asked.value.values))


def test_ranks_by_a_sample_of_outputs_are_unbiased_and_first_places_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = hooked()
    n, module = model.cfg.d_vocab, sys.modules["interp.weights.copying"]
    circuits = HeadCircuits(model, folded=True, embedding="effective")
    monkeypatch.setattr(module, "SCREENED", 5)
    chosen = torch.arange(n)
    every = torch.zeros(n, dtype=torch.float64)
    full = circuits.full_ov("L1H2")
    for seed in range(400):
        monkeypatch.setattr(torch, "randperm", functools.partial(drawn, seed=seed))
        top, ranks, silent = module._Screen.of(circuits, chosen).ranks(circuits.ov("L1H2").wide())
        assert torch.equal(top, full.diagonal_ranks() == 0) and not silent
        every += ranks / 400
    # a rank has a standard deviation of at most n / 2 over samples of one output, of 5 outputs n / 2 / sqrt(5)
    bound = 5 * n / 2 / (5 * 400) ** 0.5
    assert float((every - full.diagonal_ranks()).abs().max()) < bound


def drawn(k: int, *, generator: object, seed: int) -> Tensor:
    """A permutation, whatever torch's own function is replaced by."""
    return torch.rand(k, generator=torch.Generator().manual_seed(seed)).argsort()


def test_without_ranks_only_spectra_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FactoredMatrix, "diagonal_ranks", None)
    assert copying(hooked("gpt2"), ranks=False).score.values.tolist() == ["eigenvalue"]
    for given in ({"sample": 9}, {"random": 2}):
        with pytest.raises(ValueError, match="about ranks, which ranks=False leaves out"):
            copying(hooked("gpt2"), ranks=False, **given)  # type: ignore[arg-type]


@functools.cache
def planted() -> HookedTransformer:
    return HookedTransformer.from_pretrained("groundtruth-induction")


def test_the_planted_induction_head_copies_and_matches_and_no_other_does() -> None:
    previous = torch.zeros(2, 4)
    previous[groundtruth.PREVIOUS] = 1.0
    table = copying(planted(), previous=xr.DataArray(previous.numpy(), dims=("layer", "head")))
    layer, head = groundtruth.INDUCTION
    for name, others in (("eigenvalue", 0.2), ("matching", 0.2), ("top1", 0.2)):
        score = torch.from_numpy(table.value.sel(score=name).values.copy())
        assert float(score[layer, head]) > 0.99
        score[layer, head] = 0.0
        assert float(score.nan_to_num(0.0).abs().max()) < others
    assert float(table.value.sel(layer=layer, head=head, score="mean_rank")) == 0.0


def test_a_head_that_writes_nothing_has_no_score() -> None:
    """A row of equal logits would otherwise pass for a perfect copy."""
    model = perturbed(CONFIGS["gpt2"])
    Weights(model).layer(1).W_O[2].zero_()
    table = copying(HookedTransformer(model))
    for name in ("value", "low", "high"):
        missing = table[name].drop_sel(score=[] if name == "value" else ["mean_rank"]).isnull()
        assert bool(missing.sel(layer=1, head=2).all()) and int(missing.sum()) == len(missing.score)
    assert not table.n.sel(layer=1, head=2).any()


# --- what they refuse ---------------------------------------------------------------------------------------------


def test_what_has_no_meaning_is_refused_by_name() -> None:
    circuits = HeadCircuits(build("gpt2"))
    biased = HeadCircuits(build("gpt2"), biases=True)
    for ask in (lambda: eigenvalue_scores(biased), lambda: matching_scores(biased, torch.ones(2, 4))):
        with pytest.raises(ValueError, match=r"eigenvalues require a square circuit.*biases=True"):
            ask()
    with pytest.raises(ValueError, match=r"one finite weight per head is required, \[2, 4\], got \[4, 2\]"):
        matching_scores(circuits, torch.ones(4, 2))
    with pytest.raises(ValueError, match=r"got \[2, 4\] with NaN"):
        matching_scores(circuits, torch.full((2, 4), torch.nan))
    with pytest.raises(ValueError, match="masked-LM head"):
        eigenvalue_scores(HeadCircuits(build("masked-lm")))
    with pytest.raises(IndexError, match="L0H4: the index of a head is 0 to 3 in this model"):
        circuits.full_ov("L0H4").diagonal_ranks()
    with pytest.raises(
        ValueError, match=r"one weight per head is required, dims layer and head .*, got dims head"
    ):
        copying(hooked("gpt2"), previous=xr.DataArray([1.0], dims="head"))
    no_logits = perturbed(replace(CONFIGS["gpt2"], unembed=False))
    with pytest.raises(AttributeError, match="no W_U"):
        eigenvalue_scores(HeadCircuits(no_logits))


def test_matching_scores_refuse_weights_of_which_none_counts() -> None:
    model = build("llama-gqa")
    n_layers, n_heads = model.config.n_layers, model.config.n_heads
    last = torch.zeros(n_layers, n_heads)
    last[-1] = 1.0  # the last layer writes for nobody
    for previous in (torch.zeros(n_layers, n_heads), last):
        with pytest.raises(ValueError, match="previous must weigh a head below the last layer"):
            matching_scores(model, previous)
