"""Influence: kernels against closed forms, the whole against autograd and explicit inverses, ranks against scipy."""

import importlib
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
import scipy.stats
import torch
import xarray as xr
from torch import Tensor

import interp
from interp.data.batch import Batch
from interp.dynamics import influence, lds
from interp.dynamics.influence import _Setup, drawn, fisher, here, nats
from interp.dynamics.kronecker import Kronecker, along, products
from interp.dynamics.lds import correlations
from interp.model import MLP, Learned, ModelConfig, Transformer
from interp.passes.observe import as_model
from interp.tasks import RepeatedSequences
from interp.tasks.examples import Examples, Place
from tests.configs import build
from tests.tolerances import assert_close

influence_module = importlib.import_module("interp.dynamics.influence")
TASK = RepeatedSequences(d_vocab=12, width=7, low=2, high=3)
ROWS, QUERIES = TASK.batch(Place(0, 0), 5), TASK.batch(Place(0, 1), 3)
CONFIG = ModelConfig(1, 6, 2, 7, 12, mlp=MLP(8), position=Learned())


def eye(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64)


def network(config: ModelConfig = CONFIG) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def padded(examples: Examples) -> Examples:
    """The last row shorter by two tokens."""
    keep = torch.ones_like(examples.batch.tokens, dtype=torch.bool)
    keep[-1, -2:] = False
    assert examples.determined is not None
    return Examples(replace(examples.batch, keep=keep), examples.determined & keep[:, 1:])


def gradients(model: Transformer, value: Tensor) -> dict[str, Tensor]:
    """What autograd gives for every matrix, `[i, o]`."""
    places = {"qkv": "attn.qkv", "W_O": "attn.out", "W_in": "mlp.into", "W_out": "mlp.out"}
    held = {name: model.get_parameter(f"blocks.0.{at}.weight") for name, at in places.items()}
    found = dict(zip(held, torch.autograd.grad(value, list(held.values()), retain_graph=True), strict=True))
    parts = dict(zip(("W_Q", "W_K", "W_V"), found.pop("qkv").chunk(3), strict=True))
    return {name: each.T for name, each in {**parts, **found}.items()}


def row_loss(model: Transformer, examples: Examples, row: int, *, determined_only: bool) -> Tensor:
    """The summed nats of one row, token by token."""
    logp = model(examples.batch.tokens[row : row + 1])[0].log_softmax(-1)
    total = torch.zeros((), dtype=torch.float64)
    for i, token in enumerate(examples.batch.tokens[row, 1:].tolist()):
        real = bool(examples.batch.real[row, i + 1])
        if real and (not determined_only or bool(examples.determined[row, i])):  # type: ignore[index]
            total = total - logp[i, token]
    return total


def test_products_of_factors_are_those_of_the_gradients_that_they_make() -> None:
    draw = torch.Generator().manual_seed(0)
    x, delta = (torch.randn(4, 5, n, dtype=torch.float64, generator=draw) for n in (3, 2))
    y, other = (torch.randn(6, 7, n, dtype=torch.float64, generator=draw) for n in (3, 2))
    whole, theirs = x.mT @ delta, y.mT @ other
    wanted = torch.tensor([[float((a * b).sum()) for b in theirs] for a in whole], dtype=torch.float64)
    assert_close(products(x, delta, y, other), wanted)
    assert_close(along(x, delta, theirs), wanted)


@pytest.mark.parametrize("determined_only", [False, True])
def test_dot_products_are_those_of_autograds_gradients_row_by_row(determined_only: bool) -> None:
    model, rows = network(), padded(ROWS)
    found = influence(model, rows, QUERIES, method="dot", determined_only=determined_only, batch_size=2)
    ours = [gradients(model, row_loss(model, rows, i, determined_only=determined_only)) for i in range(5)]
    tokens = int(rows.predicted(determined_only=determined_only).sum())
    measured = QUERIES.measured(model(QUERIES.batch.tokens), determined_only=determined_only)
    for j in range(3):
        theirs = gradients(model, measured[j])
        for i in range(5):
            wanted = sum(float((ours[i][name] * theirs[name]).sum()) for name in theirs) / tokens
            assert float(found.value[i, j]) == pytest.approx(wanted, rel=1e-9)


def test_queries_with_answers_are_measured_at_their_last_token() -> None:
    model = network()
    batch = QUERIES.batch.with_answers(torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6]))
    found = influence(model, ROWS, Examples(batch), method="dot")
    assert found.value.attrs["unit"] == "logits per step of length 1"
    ours = gradients(model, row_loss(model, ROWS, 2, determined_only=False))
    logits = model(QUERIES.batch.tokens)[1, -1]
    theirs = gradients(model, logits[2] - logits[5])
    wanted = sum(float((ours[name] * theirs[name]).sum()) for name in theirs) / 30
    assert float(found.value[2, 1]) == pytest.approx(wanted, rel=1e-9)


def pseudo(model: Transformer, rows: Examples, row: int, sample: int, seed: int) -> Tensor:
    """The loss of one row on labels drawn from the model."""
    logits = model(rows.batch.tokens[row : row + 1])
    labels = drawn(logits, torch.tensor([row]), sample, 7, seed)
    return nats(logits, labels, rows.predicted()[row : row + 1])


@pytest.mark.parametrize("method", ["kfac", "ekfac"])
def test_the_whole_is_that_of_explicit_matrices_inverted(method: str) -> None:
    model, rows, samples, share = network(), padded(ROWS), 2, 0.3
    found = influence(model, rows, QUERIES, method=method, damping=share, samples=samples, seed=7)  # type: ignore[arg-type]
    tokens, real = int(rows.predicted().sum()), int(rows.batch.real.sum())
    factors = interp.lenses.factors.factors(model, rows.batch, loss=torch.sum, everywhere=True)
    total = np.zeros((5, 3))
    ours = [gradients(model, row_loss(model, rows, i, determined_only=False)) for i in range(5)]
    theirs = [gradients(model, each) for each in QUERIES.measured(model(QUERIES.batch.tokens))]
    fake = [[gradients(model, pseudo(model, rows, i, s, 7)) for i in range(5)] for s in range(samples)]
    for name in theirs[0]:
        full = f"blocks.0.{'mlp' if name in ('W_in', 'W_out') else 'attn'}.{name}"
        x = factors[full][0][rows.batch.real]
        deltas = []
        for s in range(samples):
            labels = drawn(model(rows.batch.tokens, keep=rows.batch.keep), torch.arange(5), s, 7, 7)
            pair = interp.lenses.factors.factors(
                model,
                rows.batch,
                loss=partial(nats, labels=labels, predicted=rows.predicted()),
                everywhere=True,
            )
            deltas.append(pair[full][1][rows.batch.real])
        every = torch.cat(deltas)
        a, s_out = x.T @ x / real, every.T @ every / real / samples
        fisher_ = torch.kron(a, s_out) * real / tokens
        if method == "ekfac":
            basis = torch.kron(torch.linalg.eigh(a)[1], torch.linalg.eigh(s_out)[1])
            flat = torch.stack([each[name].reshape(-1) for draw in fake for each in draw])
            squares = (flat @ basis).square().sum(0) / samples / tokens
            fisher_ = basis @ torch.diag(squares) @ basis.T
        damped = fisher_ + share * fisher_.diagonal().mean() * eye(len(fisher_))
        solved = torch.linalg.solve(damped, torch.stack([each[name].reshape(-1) for each in theirs]).T)
        total += (torch.stack([each[name].reshape(-1) for each in ours]) @ solved / tokens).detach().numpy()
    np.testing.assert_allclose(found.value.values, total, rtol=1e-7)


def test_batches_do_not_move_an_estimate() -> None:
    model = network()
    one, two = (influence(model, padded(ROWS), QUERIES, batch_size=n) for n in (2, 5))
    np.testing.assert_allclose(one.value.values, two.value.values, rtol=1e-9)


def test_rows_whose_matrices_are_large_go_one_by_one_and_give_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the passes that add up squares: each row has matrices of its own there."""
    model, sizes = network(), []
    whole = influence(model, padded(ROWS), QUERIES)
    plain = influence_module.prompt_source

    def watched(*given: object, batch_size: int, **how: object) -> object:
        sizes.append(batch_size)
        return plain(*given, batch_size=batch_size, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(influence_module, "prompt_source", watched)
    monkeypatch.setattr(influence_module, "AT_ONCE", 1)
    found = influence(model, padded(ROWS), QUERIES)
    np.testing.assert_allclose(found.value.values, whole.value.values, rtol=1e-9)
    assert sizes == [32, 1, 1, 32]


def linear_regression(rows: int = 30) -> tuple[Tensor, Tensor, Tensor]:
    """x, y and the least-squares matrix under a ridge of 0.1 per row."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 4, dtype=torch.float64, generator=draw) @ torch.randn(
        4, 4, dtype=torch.float64, generator=draw
    )
    y = torch.randn(rows, 2, dtype=torch.float64, generator=draw)
    return x, y, torch.linalg.solve(x.T @ x / rows + 0.1 * eye(4), x.T @ y / rows)


def test_kfac_of_a_linear_model_is_its_exact_gauss_newton_inverse() -> None:
    x, y, weight = linear_regression()
    moment = x.T @ x / len(x)  # the Hessian of the mean of |x W - y|^2 / 2 is this (kron) the identity
    matrix = Kronecker.of(moment, eye(2))
    delta = x @ weight - y
    solved = matrix.solved(x[:, None], delta[:, None], 0.1)
    hessian = torch.func.hessian(lambda w: ((x @ w - y).square().sum(1) / 2).mean())(weight).reshape(8, 8)
    gradient = torch.einsum("b i, b o -> b i o", x, delta).reshape(-1, 8)
    exact = torch.linalg.solve(hessian + 0.1 * eye(8), gradient.T).T
    assert_close(solved.reshape(-1, 8), exact)


def test_ridge_regression_without_a_row_is_its_error_over_1_less_leverage() -> None:
    x, y, weight = linear_regression()
    rows, query = len(x), torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    matrix = Kronecker.of(x.T @ x / rows, eye(2))
    delta = x @ weight - y
    towards = eye(2)[:, None]  # a query for each output: query . W[:, o]
    solved = matrix.solved(query.expand(2, 1, 4), towards, 0.1)
    predicted = along(x[:, None], delta[:, None], solved) / rows
    leverage = (x @ torch.linalg.inv(x.T @ x + 0.1 * rows * eye(4)) * x).sum(1)
    assert float(leverage.max()) > 0.1
    for i in range(rows):
        kept = [j for j in range(rows) if j != i]
        without = torch.linalg.solve(x[kept].T @ x[kept] / rows + 0.1 * eye(4), x[kept].T @ y[kept] / rows)
        assert_close(query @ without - query @ weight, predicted[i] / (1 - leverage[i]))


@pytest.mark.slow
def test_ekfacs_eigenvalues_are_the_fishers_diagonal_in_kronecker_basis() -> None:
    """Means over drawn labels, against the sum over every label that the model can give, in standard errors."""
    model, samples = network(), 300
    determined = torch.zeros(2, 6, dtype=torch.bool)
    determined[0, 3] = determined[1, 5] = determined[1, 2] = True
    rows = Examples(ROWS.rows(torch.arange(2)).batch, determined)
    asked = _Setup(as_model(model), ["W_in", "W_V"], None, True, samples, 0, 8)
    found = fisher(asked, rows, "ekfac")
    assert set(found) == {"blocks.0.mlp.W_in", "blocks.0.attn.W_V"}
    logits = model(rows.batch.tokens)
    places = [(int(b), int(i)) for b, i in determined.nonzero()]
    for name, matrix in found.items():
        mean, square = (torch.zeros_like(matrix.eigenvalues) for _ in range(2))
        for row in range(2):
            mine = [i for b, i in places if b == row]
            for labels in product(range(12), repeat=len(mine)):
                logp = logits[row].log_softmax(-1)[mine, list(labels)].sum()
                chance = logp.exp().item()
                gradient = gradients(model, -logp)[name.rpartition(".")[2]]
                squares = (matrix.basis_in.T @ gradient @ matrix.basis_out).square() / len(places)
                mean += chance * squares
                square += chance * squares.square()
        error = (square / samples).sqrt()
        assert float(((matrix.eigenvalues - mean) / error).abs().max()) < 6
        assert float((error / mean).median()) < 0.2


def test_labels_are_drawn_as_the_model_predicts_and_by_row_and_sample() -> None:
    logits = torch.tensor([[[0.0, 1.0, 2.0, -1.0]] * 3] * 4000)
    rows = torch.arange(4000)
    found = drawn(logits, rows, 0, 3, seed=0)
    wanted = 4000 * logits[0, 0].double().softmax(-1)
    counts = torch.stack([(found[:, 1] == v).sum() for v in range(4)]).double()
    assert float(((counts - wanted).square() / wanted).sum()) < scipy.stats.chi2.ppf(0.999, 3)
    assert torch.equal(found[7:9], drawn(logits[7:9], rows[7:9], 0, 3, seed=0))
    assert not torch.equal(found, drawn(logits, rows, 1, 3, seed=0))
    assert not torch.equal(found, drawn(logits, rows, 0, 3, seed=1))


def test_batch_finds_its_determined_tokens_by_the_number_of_its_rows() -> None:
    batch = replace(ROWS.batch, row=torch.arange(5)).rows(torch.tensor([3, 1]))
    part = here(ROWS, batch)
    assert part.determined is not None and ROWS.determined is not None
    assert torch.equal(part.determined, ROWS.determined[[3, 1]])


def test_correlations_are_scipys_with_and_without_each_group() -> None:
    draw = np.random.default_rng(0)
    x, y = draw.integers(0, 5, (2, 4, 9)).astype(float)
    whole, without = correlations(torch.tensor(x), torch.tensor(y))
    for j in range(4):
        assert float(whole[j]) == pytest.approx(scipy.stats.spearmanr(x[j], y[j]).statistic)
        for g in range(9):
            kept = np.arange(9) != g
            wanted = scipy.stats.spearmanr(x[j][kept], y[j][kept]).statistic
            assert float(without[j, g]) == pytest.approx(wanted)


def study(exact: np.ndarray, left_out: np.ndarray) -> xr.Dataset:
    (groups, queries), rows = exact.shape, left_out.shape[1]
    values = {
        "value": (("group", "query"), exact, {"unit": "nats"}),
        "left_out": (("group", "row"), left_out),
    }
    return xr.Dataset(
        values, {"group": np.arange(groups), "row": np.arange(rows), "query": np.arange(queries)}
    )


def guess(value: np.ndarray) -> xr.Dataset:
    coords = {"row": np.arange(len(value)), "query": np.arange(value.shape[1])}
    return xr.Dataset({"value": (("row", "query"), value, {"unit": "nats"})}, coords)


def test_the_score_is_the_mean_rank_correlation_of_sums_over_groups() -> None:
    draw = np.random.default_rng(0)
    left_out, each = draw.random((8, 20)) < 0.3, draw.standard_normal((20, 4))
    exact = left_out @ each + draw.standard_normal((8, 4))
    found = lds(study(exact, left_out), guess(each))
    wanted = [scipy.stats.spearmanr(left_out @ each[:, j], exact[:, j]).statistic for j in range(4)]
    np.testing.assert_allclose(found["each"].values, wanted)
    assert float(found.value) == pytest.approx(np.mean(wanted))
    assert float(found.low) < float(found.value) < float(found.high)
    assert float(lds(study(left_out @ each, left_out), guess(each)).value) == pytest.approx(1.0)
    assert float(lds(study(left_out @ each, left_out), guess(-each)).value) == pytest.approx(-1.0)


def test_the_interval_is_a_jackknife_over_groups_plus_one_over_queries() -> None:
    draw = np.random.default_rng(1)
    left_out, each = draw.random((9, 20)) < 0.3, draw.standard_normal((20, 6))
    exact = left_out @ each + 6 * draw.standard_normal((9, 6))
    found = lds(study(exact, left_out), guess(each))

    def score(groups: list[int], queries: list[int]) -> float:
        part = study(exact[np.ix_(groups, queries)], left_out[groups])
        return float(lds(part, guess(each[:, queries])).value)

    def jackknife(values: list[float]) -> float:
        n = len(values)
        return float((n - 1) / n * np.square(np.array(values) - np.mean(values)).sum())

    everyone, all_groups = list(range(6)), list(range(9))
    of_groups = jackknife([score([g for g in all_groups if g != i], everyone) for i in all_groups])
    of_queries = jackknife([score(all_groups, [q for q in everyone if q != i]) for i in everyone])
    half = scipy.stats.t.ppf(0.975, 5) * (of_groups + of_queries) ** 0.5
    fewer = [score([g for g in all_groups if g != i], everyone) for i in all_groups]
    middle = 9 * score(all_groups, everyone) - 8 * float(np.mean(fewer))
    assert middle - half > -1 and middle + half < 1
    assert float(found.low) == pytest.approx(middle - half)
    assert float(found.high) == pytest.approx(middle + half)


def test_what_cannot_be_scored_is_said() -> None:
    left_out, each = np.eye(4) > 0, np.arange(8.0).reshape(4, 2)
    with pytest.raises(ValueError, match="the same rows and queries"):
        lds(study(each, left_out), guess(each[:3]))
    with pytest.raises(ValueError, match="query 1"):
        lds(study(np.stack([each[:, 0], np.ones(4)], 1), left_out), guess(each))
    with pytest.raises(ValueError, match="at least 3 groups"):
        lds(study(each[:2], left_out[:2]), guess(each))
    with pytest.raises(ValueError, match="value of estimate must have 8 finite numbers, got 0"):
        lds(study(each, left_out), guess(np.full_like(each, np.nan)))
    with pytest.raises(ValueError, match="leave_out"):
        lds(guess(each), guess(each))


def test_what_has_no_influence_is_refused_by_name() -> None:
    model = build("gpt2")
    for damping in (torch.inf, 1e300):
        with pytest.raises(ValueError, match="damping must be a number above 0"):
            influence(model, ROWS, QUERIES, damping=damping)
    with pytest.raises(ValueError, match="damping"):
        influence(model, ROWS, QUERIES, damping=0.0)
    with pytest.raises(ValueError, match="samples"):
        influence(model, ROWS, QUERIES, samples=0)
    packed = Examples(Batch.packed([[1, 2, 3], [4, 5]], 5))
    with pytest.raises(ValueError, match="packed"):
        influence(model, packed, QUERIES)
    with pytest.raises(ValueError, match="rows of one continuation"):
        Examples(replace(ROWS.batch, branches=torch.ones_like(ROWS.batch.tokens)))
    with pytest.raises(ValueError, match="weights"):
        influence(model, replace(ROWS, weight=torch.ones(5)), QUERIES)
    nothing = Examples(ROWS.batch, torch.zeros(5, 6, dtype=torch.bool))
    with pytest.raises(ValueError, match="token to predict"):
        influence(model, nothing, ROWS, determined_only=True)
