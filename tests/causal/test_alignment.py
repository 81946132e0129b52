"""Alignment search: on a model whose variable is written down, against a loop of edited models, and against NumPy."""

import functools
import itertools

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor

from interp.causal import Descent, Subspace, align
from interp.causal.alignment import NULLS, AlignedCells, AlignedRuns, pairs_of, shuffled
from interp.core.stats import share_interval
from interp.data.answers import AnswerTokens
from interp.lab.rasp import PROGRAMS, Compiled, compile
from interp.model.config import ModelConfig, NoNorm, NoPosition
from interp.model.edits import Edit, Set, Swap
from interp.model.tap import Read
from interp.model.transformer import Transformer
from interp.passes.observe import as_model, observe
from interp.zoo.groundtruth import noisy, plant_head
from tests.configs import build, some_tokens
from tests.loops import over
from tests.tolerances import assert_close

END, HERE, THERE = 5, 2, 4
"""The symbol that asks, the column that holds the variables, and the one that answers."""
SEEN, MOVED = torch.eye(12)[:4], torch.eye(12)[4:8]
"""Where a token writes its two variables, two values each, and where the head moves them."""


def planted() -> Transformer:
    """Tokens 1 to 4 say two variables u and v; a head moves them to the end; token 6 + 2 u + v is the answer."""
    config = ModelConfig(
        n_layers=2, d_model=12, n_heads=1, d_head=4, n_ctx=8, d_vocab=10, position=NoPosition(), norm=NoNorm(),
        final_norm=False, qkv_bias=False, out_bias=False, attn_scale=1.0,
    )  # fmt: skip
    with torch.no_grad():
        model = noisy(config, 0.0, torch.Generator().manual_seed(0)).double()
        asks, has = torch.eye(12)[8], torch.eye(12)[9]
        values = torch.stack([SEEN[u] + SEEN[2 + v] for u, v in itertools.product((0, 1), (0, 1))])
        model.embed.weight[1:5] = (values + has).double()
        model.embed.weight[END] = asks.double()
        one = torch.eye(4)[:1]
        plant_head(
            model, (0, 0), query=asks[:, None] * 30 @ one, key=has[:, None] @ one, value=SEEN.T, out=MOVED
        )
        answers = torch.stack([MOVED[u] + MOVED[2 + v] for u, v in itertools.product((0, 1), (0, 1))])
        model.unembed.weight[6:10] = 3.0 * answers.double()
    return model


def prompts(said: Tensor) -> Tensor:
    """Prompts whose variables are said at one column."""
    tokens = torch.zeros(len(said), 5, dtype=torch.long)
    tokens[:, HERE], tokens[:, THERE] = 1 + said, END
    return tokens


def pairs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Base and source prompts that differ in u, and the answers with and without the source's u."""
    every = [(b, s) for b, s in itertools.product(range(4), range(4)) if b // 2 != s // 2] * 6
    base, source = torch.tensor(every).T
    return prompts(base), prompts(source), 6 + 2 * (source // 2) + base % 2, 6 + base


@functools.cache
def found() -> xr.Dataset:
    """All cells of the streams that enter the blocks."""
    base, source, answer, wrong = pairs()
    return align(planted(), base, source, answer=answer, wrong=wrong, site="resid_pre", descent=Descent(40))


def test_das_finds_the_variable_where_it_is_and_nothing_beside_it() -> None:
    iia = found().value.sel(score="iia", swapped="found")
    assert iia.values.tolist() == [[0, 0, 1, 0, 0], [0, 0, 0, 0, 1]]


@pytest.mark.slow
@over("where", [(0, HERE, SEEN), (1, THERE, MOVED)])
def test_its_direction_is_the_planted_one(where: tuple[int, int, Tensor]) -> None:
    base, source, answer, _ = pairs()
    layer, pos, values = where
    result = align(
        planted(), base, source, answer=answer, site="resid_pre", layers=[layer], pos=[pos], descent=Descent(400),
        nulls=[],
    )  # fmt: skip
    truth = Subspace(f"blocks.{layer}.hook_resid_pre", (values[0] - values[1])[None].double())
    assert float(Subspace.of_result(result, layer=layer, pos=pos).angles(truth)[0]) < 0.02


def test_what_knows_nothing_of_the_variable_is_no_better_than_a_guess() -> None:
    """There are four answers, two for each value of v, so a guess that follows v is right half of the time."""
    iia = found().value.sel(score="iia")
    for null in NULLS["das"]:
        assert float(iia.sel(swapped=null).max()) <= 0.5, null


def test_the_whole_state_brings_both_variables() -> None:
    """A source that differs in v too gives its own answer when all of it is put in: half of the pairs."""
    _, source, answer, _ = pairs()
    test = torch.tensor(found().prompt.values)
    right = (planted()(source)[:, -1].argmax(-1) == answer)[test].double().mean()
    whole = found().value.sel(score="iia", swapped="whole state", layer=0, pos=HERE)
    assert float(whole) == float(right) < 1


@over(
    "how",
    [
        {"method": "class means"},
        {"method": "pca", "rank": 2},
        {"method": "das", "rank": 2, "descent": Descent(3)},
    ],
)
def test_scores_are_those_of_edited_models_one_by_one(how: dict[str, object]) -> None:
    model, base, source = build("gpt2"), some_tokens(6), some_tokens(6, seed=1)
    answer, wrong = torch.tensor([3, 4, 5, 6, 7, 8]), torch.tensor([4, 9, 4, 9, 9, 9])
    result = align(
        model, base, source, answer=answer, wrong=wrong, site="mlp_out", pos=[-1, 4], seed=3, **how
    )  # type: ignore[arg-type]
    test = torch.tensor(result.prompt.values)
    plain = model(base[test])[:, -1]
    for layer, pos in itertools.product((0, 1), (8, 4)):
        name = f"blocks.{layer}.hook_mlp_out"
        given = observe(model, source[test], [Read(name)]).trace[name]
        subspace = torch.from_numpy(result.directions.sel(layer=layer, pos=pos).values)
        for swapped, change in (("found", Swap(subspace, given)), ("whole state", Set(given))):
            logits = model.edited([Edit(name, change, {"pos": pos})])(base[test])[:, -1]
            wanted = scores(logits, answer[test], wrong[test])
            mine = torch.from_numpy(result.each.sel(swapped=swapped, layer=layer, pos=pos).values)
            assert_close(mine, wanted.to(mine), torch.float32)
            means = torch.from_numpy(result.value.sel(swapped=swapped, layer=layer, pos=pos).values)
            assert_close(means, wanted.mean(0).double(), torch.float32)
    null = torch.from_numpy(result.null.sel(swapped="found").values)
    assert_close(
        null, scores(plain, answer[test], wrong[test]).mean(0).expand(2, 2, 3).double(), torch.float32
    )


def scores(logits: Tensor, answer: Tensor, wrong: Tensor) -> Tensor:
    """The three scores of every row, from all logits."""
    rows = torch.arange(len(logits))
    right = (logits.argmax(-1) == answer).to(logits)
    loss = torch.nn.functional.cross_entropy(logits, answer, reduction="none")
    return torch.stack((right, logits[rows, answer] - logits[rows, wrong], loss), 1)


def exchanged(cells: Tensor, own: Tensor, basis: Tensor) -> Tensor:
    """The formula."""
    return cells + (own - cells) @ basis.mT @ basis


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "bidirectional", "gemma2", "post-norm"])
@over("site", [("resid_post", ("layer", "pos")), ("z", ("layer", "head")), ("z", ("layer", "pos", "head")),
               ("resid_mid", ("layer",)), ("post", ("layer", "pos"))])  # fmt: skip
def test_one_step_of_gradient_descent_is_that_of_an_edited_model(
    name: str, site: tuple[str, tuple[str, ...]]
) -> None:
    """The loss and its gradient in R, with Swap's formula written as a function in a whole pass."""
    model, base, source = build(name), some_tokens(4), some_tokens(4, seed=1)
    which, by = site
    together = pairs_of(as_model(model), base, source, AnswerTokens(torch.tensor([3, 4, 5, 6])))
    cells = AlignedCells.of(model.config, together, which, by, None, None)
    runs = AlignedRuns.of(model, cells, together, 3)
    place = cells.places[-1]
    for layer, full in enumerate(cells.caller_names):
        x = observe(model, source, [Read(full)]).trace[full]
        weight = torch.linalg.qr(torch.randn(x.shape[-1], 2, dtype=x.dtype))[0].mT[None].requires_grad_()
        rows = torch.tensor([2, 0, 3])
        loss = runs.loss(cells.names[layer], [place], weight, together.own.answer[None, rows], rows).sum()
        grad = torch.autograd.grad(loss, weight)[0]

        dims, own = cells.dims, x[rows]
        own = own[:, place[dims.index("pos")]] if "pos" in dims else own
        own = own[..., place[dims.index("head")], :] if "head" in dims else own
        change = functools.partial(exchanged, own=own, basis=weight[0])
        logits = model.edited([Edit(full, change, cells.at(place))])(base[rows])[:, -1]
        wanted = torch.nn.functional.cross_entropy(logits, together.own.answer[rows], reduction="sum")
        assert_close(loss.detach(), wanted.detach().to(loss))
        assert_close(grad, torch.autograd.grad(wanted, weight)[0])


def test_class_means_and_principal_components_are_numpys() -> None:
    model, base, source = build("gpt2"), some_tokens(8), some_tokens(8, seed=1)
    labels = [0, 1, 2, 0, 1, 2, 0, 1], [1, 2, 0, 1, 2, 0, 1, 0]
    held = [True, False] * 4
    name, kept = "blocks.0.hook_resid_post", ~np.array(held)
    how = {"answer": [3] * 8, "layers": [0], "pos": [5], "rank": 2, "held_out": held, "nulls": []}
    x = [observe(model, tokens, [Read(name)]).trace[name][kept, 5].numpy() for tokens in (base, source)]
    every, classes = np.concatenate(x), np.concatenate([np.array(each)[kept] for each in labels])
    means = np.stack([every[classes == c].mean(0) for c in range(3)])
    for method, rows in (("pca", every), ("class means", means)):
        result = align(model, base, source, method=method, labels=labels, **how)  # type: ignore[arg-type]
        mine = result.directions.values[0, 0]
        theirs = np.linalg.svd(rows - rows.mean(0))[2][:2]
        np.testing.assert_allclose(mine.T @ mine, theirs.T @ theirs, atol=1e-5)


def test_given_directions_are_scored_as_they_are_on_all_pairs() -> None:
    base, source, answer, _ = pairs()
    truth = Subspace("blocks.0.hook_resid_pre", 7.0 * (SEEN[0] - SEEN[1])[None].double())
    result = align(
        planted(), base, source, answer=answer, site="resid_pre", layers=[0], pos=[HERE], subspace=truth
    )
    assert int(result.n.max()) == len(base) and result.attrs["method"] == "given"
    assert list(result.swapped.values) == ["found", "whole state", "random subspace"]
    assert result.value.sel(score="iia", swapped="found").item() == 1.0
    low, _ = share_interval(torch.tensor(1.0).double(), len(base))
    assert result.low.sel(score="iia", swapped="found").item() == pytest.approx(float(low))
    assert list(result.score.values) == ["iia", "logit", "loss"]


def test_positions_exchanged_together_share_their_directions() -> None:
    base, source, answer, _ = pairs()
    how = {"answer": answer, "site": "resid_pre", "by": ("layer",), "descent": Descent(30), "nulls": []}
    result = align(planted(), base, source, pos=[1, HERE], **how)  # type: ignore[arg-type]
    assert result.value.sel(score="iia", swapped="found").values.tolist() == [1.0, 0.0]
    subspace = Subspace.of_result(result, layer=0)
    assert subspace.at == {"pos": (1, HERE)}
    given = observe(planted(), source, [Read(subspace.site)]).trace[subspace.site]
    logits = planted().edited([subspace.swap(given)])(base)[:, -1]
    assert torch.equal(logits.argmax(-1), answer)


def test_numbers_depend_on_the_seed_alone_not_on_batches_or_other_cells() -> None:
    model, base, source = build("gpt2"), some_tokens(8), some_tokens(8, seed=1)
    how = {"answer": [3, 4, 5, 6] * 2, "wrong": [7] * 8, "descent": Descent(3, pairs=4), "rank": 2}
    first, again = (align(model, base, source, **how) for _ in range(2))  # type: ignore[arg-type]
    xr.testing.assert_identical(first, again)
    split = align(model, base, source, batch_size=3, **how)  # type: ignore[arg-type]
    part = align(model, base, source, layers=[1], pos=[6, 2], **how)  # type: ignore[arg-type]
    xr.testing.assert_allclose(first, split, rtol=1e-3, atol=1e-4)
    xr.testing.assert_allclose(first.sel(layer=[1], pos=[6, 2]), part, rtol=1e-3, atol=1e-4)
    other = align(model, base, source, seed=1, **how)  # type: ignore[arg-type]
    assert not np.array_equal(other.prompt.values, first.prompt.values)


def test_padding_changes_no_number() -> None:
    model, base, source = build("gpt2"), some_tokens(6), some_tokens(6, seed=1)
    how = {"answer": [3, 4, 5] * 2, "pos": [3], "descent": Descent(3)}
    plain = align(model, base, source, **how)  # type: ignore[arg-type]
    rows = [[*row.tolist()] for row in base], [[*row.tolist()] for row in source]
    longer = [*rows[0], [1] * 11], [*rows[1], [2] * 11]
    held = [i in plain.prompt.values for i in range(6)] + [True]
    how["answer"] = [3, 4, 5] * 2 + [3]
    padded = align(model, *longer, held_out=held, **how)  # type: ignore[arg-type]
    xr.testing.assert_allclose(padded.directions, plain.directions, rtol=1e-3, atol=1e-4)
    xr.testing.assert_allclose(padded.each.sel(prompt=plain.prompt), plain.each, rtol=1e-3, atol=1e-4)


def test_edits_and_an_edited_model_give_the_same() -> None:
    model, base, source = build("gpt2"), some_tokens(6), some_tokens(6, seed=1)
    edits = [Edit("L0.mlp", Set(0.5)), Edit("L1.resid", Set(torch.ones(24)), {"pos": 2})]
    how = {"answer": [3, 4, 5] * 2, "descent": Descent(3)}
    one = align(model, base, source, edits=edits, **how)  # type: ignore[arg-type]
    two = align(model.edited(edits), base, source, **how)  # type: ignore[arg-type]
    xr.testing.assert_identical(one, two)


def test_a_shuffled_model_has_the_same_numbers_in_other_places() -> None:
    model = build("gpt2")
    other = dict(shuffled(model).named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.flatten().sort()[0], other[name].flatten().sort()[0])
    assert not torch.equal(model(some_tokens()), shuffled(model)(some_tokens()))


REFUSED = {
    "more than 5 states or classes are required": {"method": "class means", "rank": 5},
    "a rank of at most 24": {"rank": 25},
    "held_out must leave pairs to train on": {"held_out": 1.0},
    "position 9 is required of every row": {"pos": [9]},
    "different layers among": {"layers": [2]},
    "is required in `by`": {"by": ("pos",)},
    "with vectors is required": {"site": "pattern"},
    "directions of width 24": {"subspace": torch.eye(5)},
    "subspace must be directions of finite numbers": {"subspace": torch.full((1, 24), torch.nan)},
    "an answer for every pair": {"answer": None, "wrong": None},
    "'pca' has the nulls": {"method": "pca", "nulls": ["permuted variable"]},
    "one label per prompt": {"method": "class means", "labels": ([1], [2])},
    "held_out must say of each of 4 pairs": {"held_out": [True]},
    "a share of held-out pairs": {"held_out": 0.0},
    "class means require classes": {"method": "class means", "wrong": None},
    "a rank of at least 1": {"rank": 0},
}


@over("message", REFUSED)
def test_what_cannot_be_asked_is_refused(message: str) -> None:
    how = {"answer": [3, 4, 5, 6], "wrong": [7, 7, 7, 7], "descent": Descent(1)} | REFUSED[message]
    with pytest.raises((ValueError, KeyError, IndexError), match=message):
        align(build("gpt2"), some_tokens(4), some_tokens(4, seed=1), **how)  # type: ignore[arg-type]


NO_PAIRS = {
    "source prompts cannot be used: every prompt requires": (some_tokens(2), [[], []]),
    "base prompts cannot be used: token ids must be in": ([[10**6], [1]], [[1], [2]]),
    "make no pairs: one corrupted prompt per clean": (some_tokens(2), some_tokens(3)),
    "make no pairs: a corrupted prompt must differ": (some_tokens(2), some_tokens(2)),
}


@over("message", NO_PAIRS)
def test_prompts_that_make_no_pairs_are_refused_by_name(message: str) -> None:
    base, source = NO_PAIRS[message]
    with pytest.raises(ValueError, match=message):
        align(build("gpt2"), base, source, answer=3)


@over("how", [{"steps": 0}, {"pairs": 0}, {"rate": 0.0}])
def test_a_descent_that_does_nothing_is_refused(how: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(how))} must be a .*number (above 0|from 1)"):
        Descent(**how)  # type: ignore[arg-type]


# --- a compiled program, whose variables' directions are known ------------------------------------------------


def counted() -> tuple[Compiled, dict[str, Tensor]]:
    """Parity by the number of ones: pairs whose last position counts differently, and whose parity differs with it."""
    known = compile(PROGRAMS["parity"]())
    length, symbols = known.program.tokens.length, len(known.program.tokens.symbols)
    drawn = torch.randint(1, symbols + 1, (2, 400, length), generator=torch.Generator().manual_seed(0))
    base, source = (torch.cat((torch.zeros(400, 1, dtype=torch.long), each), 1) for each in drawn)
    wrong, answer = (known.expected(each)[:, -1] for each in (base, source))  # a function of the count alone
    kept = (answer != wrong).nonzero()[:128, 0]
    return known, {"base": base[kept], "source": source[kept], "answer": answer[kept], "wrong": wrong[kept]}


@pytest.mark.slow
def test_das_finds_a_compiled_variable_at_its_site_and_not_before() -> None:
    known, asked = counted()
    result = align(
        known.model, **asked, site="resid_pre", rank=5, descent=Descent(200), nulls=["permuted variable"]
    )
    iia = result.value.sel(score="iia", swapped="found")
    last = asked["base"].shape[1] - 1
    assert iia.sel(layer=1, pos=last) == 1
    assert iia.sel(layer=1, pos=slice(0, last - 1)).max() == 0  # the head moved nothing from there any more
    assert iia.sel(layer=0).max() < 0.6  # one token of several makes the count
    assert result.value.sel(score="iia", swapped="permuted variable", layer=1, pos=last) < 0.8
    truth = torch.linalg.qr(known.subspaces["ones"]["L1.resid"].mT)[0].mT
    cosines = torch.linalg.svdvals(Subspace.of_result(result, layer=1, pos=last).basis @ truth.mT.double())
    assert cosines[0] > 0.99


def test_the_directions_of_a_compiled_variable_exchange_it_on_every_pair() -> None:
    known, asked = counted()
    last, site = asked["base"].shape[1] - 1, "L1.resid"
    truth = torch.linalg.qr(known.subspaces["ones"][site].mT)[0].mT
    result = align(known.model, **asked, site="resid_pre", layers=[1], pos=[last], subspace=truth, nulls=[])
    assert result.value.sel(score="iia", swapped="found").item() == 1
