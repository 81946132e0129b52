"""Features of dictionaries in a model's blocks are sites: read, edited, patched and ablated as by hand."""

import copy
import functools

import pytest
import torch
from torch import Tensor

import interp
from interp import Edit, HookedTransformer, Read
from interp.edits import Add, PerRow, Scale, Set, Zero
from interp.features import Dictionary, ReLU
from interp.passes import observe
from tests.configs import build
from tests.tolerances import assert_close

READS, WRITES, STREAM = "blocks.1.ln2.hook_normalized", "blocks.1.hook_mlp_out", "blocks.0.hook_resid_post"
CLEAN, CORRUPT = [[3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8]], [[3, 1, 6, 1, 5, 9], [2, 7, 5, 8, 2, 8]]
ROWS = [[3, 1, 4, 1, 5, 9], [2, 7, 1, 8]]
METRIC = interp.logit_difference(3, 4)
S = 20


def random_dictionary(d: int, seed: int, **where: object) -> Dictionary:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weights = {
        "W_enc": normal(d, S) / d**0.5,
        "b_enc": normal(S),
        "W_dec": normal(S, d) / S**0.5,
        "b_dec": normal(d),
    }
    return Dictionary(ReLU(), weights, apply_b_dec_to_input=False, **where)  # type: ignore[arg-type]


@functools.cache
def plain() -> HookedTransformer:
    return HookedTransformer(copy.deepcopy(build("llama-gqa")).to(torch.float64))


@functools.cache
def dictionaries() -> tuple[Dictionary, Dictionary]:
    """An SAE of the stream after block 0, and a transcoder of the MLP of block 1."""
    d = plain().cfg.d_model
    return random_dictionary(d, 1, reads=STREAM), random_dictionary(d, 2, reads=READS, writes=WRITES)


@functools.cache
def split() -> HookedTransformer:
    return plain().with_dictionaries(dictionaries())


def value(site: str, rows: list[list[int]], subject: HookedTransformer | None = None) -> Tensor:
    subject = split() if subject is None else subject
    return observe(subject.transformer, subject.to_batch(rows), [Read(site)]).trace[Read(site)]


def logits_of(subject: HookedTransformer, rows: list[list[int]], edits: list[Edit]) -> Tensor:
    """The logits of one pass under edits."""
    read = Read("unembed.hook_out")
    return observe(subject.transformer, subject.to_batch(rows), [read], edits=edits).trace[read]


def test_a_model_whose_features_nobody_asks_for_is_the_same_bit_for_bit() -> None:
    assert torch.equal(split()(CLEAN[0]), plain()(CLEAN[0]))
    edited = [Edit("L1H0", Zero())]
    assert torch.equal(split().edited(edited)(CLEAN[0]), plain().edited(edited)(CLEAN[0]))
    for site in ("blocks.0.hook_features", "blocks.1.hook_error"):  # read alone
        batch = split().to_batch(CLEAN)
        seen = observe(split().transformer, batch, [Read(site), Read("blocks.1.hook_resid_post")])
        assert torch.equal(
            seen.trace["blocks.1.hook_resid_post"], value("blocks.1.hook_resid_post", CLEAN, plain())
        )


def test_features_and_error_are_those_of_the_dictionary_and_sum_to_the_site() -> None:
    for layer, coder, reads, writes in (
        (0, dictionaries()[0], STREAM, STREAM),
        (1, dictionaries()[1], READS, WRITES),
    ):
        x, y = value(reads, CLEAN, plain()), value(writes, CLEAN, plain())
        f, e = value(f"blocks.{layer}.hook_features", CLEAN), value(f"blocks.{layer}.hook_error", CLEAN)
        assert_close(f, (x @ coder.W_enc + coder.b_enc).relu())
        assert_close(f @ coder.W_dec + coder.b_dec + e, y)


def by_hand(layer: int, rows: list[list[int]], change: Tensor) -> Tensor:
    """The final logits where `change` is added to the features of a block, worked out at the site that is written."""
    coder = dictionaries()[layer]
    site = (STREAM, WRITES)[layer]
    y = value(site, rows, plain())
    return logits_of(plain(), rows, [Edit(site, Set(y + change @ coder.W_dec))])


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("pos", [None, -1, (0, 2), PerRow([(1, 2), (3,)])], ids=str)
def test_an_edited_feature_moves_the_model_as_its_direction_does(layer: int, pos: object) -> None:
    at = {} if pos is None else {"pos": pos}
    batch = split().to_batch(ROWS)
    f = value(f"blocks.{layer}.hook_features", ROWS)
    real, first = batch.host().real, batch.host().real.int().argmax(1).tolist()
    chosen = torch.zeros(f.shape[:2], dtype=torch.bool)
    for row, ids in enumerate(ROWS):
        given = pos.places[row] if isinstance(pos, PerRow) else pos  # type: ignore[index]
        tokens = range(len(ids)) if given is None else given if isinstance(given, tuple) else (given,)
        chosen[row, [first[row] + t % len(ids) for t in tokens]] = True  # type: ignore[operator]
    for edit_change, new in ((Zero(), 0 * f), (Scale(3.0), 3 * f), (Set(2.0), 0 * f + 2), (Add(1.0), f + 1)):
        change = torch.zeros_like(f)
        change[..., 7] = ((new - f) * chosen[..., None])[..., 7]
        edits = [Edit(f"L{layer}F7", edit_change, at=at)]  # type: ignore[arg-type]
        found = logits_of(split(), ROWS, edits)
        assert_close(found[real], by_hand(layer, ROWS, change)[real])


def test_patched_features_are_a_loop_over_features() -> None:
    found = interp.patch(split(), CLEAN, CORRUPT, "features", metric=METRIC, by=("layer", "feature"))
    assert found.sizes["layer"] == 2 and found.layer.values.tolist() == [0, 1]
    assert found.part.values[1, 7] == "L1F7"
    f, other = value("blocks.1.hook_features", CORRUPT), value("blocks.1.hook_features", CLEAN)
    base = by_hand(1, CORRUPT, torch.zeros_like(f))[:, -1]
    for feature in (0, 7, 19):
        change = torch.zeros_like(f)
        change[..., feature] = (other - f)[..., feature]
        moved = by_hand(1, CORRUPT, change)[:, -1]
        expected = ((moved - base)[:, 3] - (moved - base)[:, 4]).mean()
        assert float(found.value.sel(layer=1)[feature]) == pytest.approx(float(expected), rel=1e-9)


def test_all_features_and_the_error_patched_together_are_the_site_patched() -> None:
    site = interp.patch(plain(), CLEAN, CORRUPT, "blocks.0.hook_resid_post", metric=METRIC, by=("pos",))
    edits = [Edit(f"blocks.0.{name}", Set(value(f"blocks.0.{name}", CLEAN)), at={"pos": 2})
             for name in ("hook_features", "hook_error")]  # fmt: skip
    moved = logits_of(split(), CORRUPT, edits)[:, -1]
    base = logits_of(plain(), CORRUPT, [])[:, -1]
    expected = ((moved - base)[:, 3] - (moved - base)[:, 4]).mean()
    assert float(site.value.sel(pos=2)) == pytest.approx(float(expected), rel=1e-9)


def test_ablated_features_and_errors_are_those_of_edits() -> None:
    parts = ["L0F3", "L1F7", ["L0F3", "L1F7"], "L1.error"]
    found = interp.ablate(split(), CLEAN, parts, change=Zero(), metric=METRIC, by=("part",))
    base = plain()(split().to_batch(CLEAN))[:, -1]
    for i, names in enumerate(parts):
        edits = [Edit(name, Zero()) for name in ([names] if isinstance(names, str) else names)]
        moved = logits_of(split(), CLEAN, edits)[:, -1]
        expected = ((moved - base)[:, 3] - (moved - base)[:, 4]).mean()
        assert float(found.value[i]) == pytest.approx(float(expected), rel=1e-9)
    every = interp.ablate(split(), CLEAN, "feature", change=Zero(), metric=METRIC, by=("layer", "feature"))
    assert float(every.value.sel(layer=1, feature=7)) == pytest.approx(
        float(found.value[1]), rel=1e-9, abs=1e-12
    )


def test_attribution_patching_of_features_is_their_change_along_the_gradient() -> None:
    by = ("layer", "pos", "feature")
    found = interp.causal.attribution_patch(split(), CLEAN, CORRUPT, "features", metric=METRIC, by=by)
    f, other = value("blocks.1.hook_features", CORRUPT), value("blocks.1.hook_features", CLEAN)
    y = value(WRITES, CORRUPT, plain()).requires_grad_()
    with torch.enable_grad():
        logits = plain().edited(Edit(WRITES, lambda cells: y))(plain().to_batch(CORRUPT))[:, -1]
        (grad,) = torch.autograd.grad((logits[:, 3] - logits[:, 4]).sum(), y)
    expected = ((other - f) * (grad @ dictionaries()[1].W_dec.T)).mean(0)
    assert_close(torch.from_numpy(found.value.sel(layer=1).values), expected.detach())


def test_cached_generation_under_an_edited_feature_equals_uncached() -> None:
    edited = split().edited([Edit("L1F7", Set(4.0)), Edit("L0F2", Scale(2.0))])
    row = list(CLEAN[0])
    for _ in range(5):
        row.append(int(edited(row)[0, -1].argmax()))
    assert edited.generate([CLEAN[0]], max_new_tokens=5).tokens[0].tolist()[-5:] == row[-5:]


def test_what_a_block_has_no_dictionary_for_is_refused() -> None:
    only = plain().with_dictionaries(dictionaries()[:1])
    for edit, error in (("L1F0", KeyError), ("L0F20", IndexError)):
        with pytest.raises(error):
            only.edited(Edit(edit, Zero()))
    with pytest.raises(KeyError, match="hook_features"):
        plain().edited(Edit("L0F0", Zero()))
    d = plain().cfg.d_model
    for bad, match in (
        (
            [random_dictionary(d, 1, reads=STREAM), random_dictionary(d, 2, reads=STREAM)],
            "got two for block 0",
        ),
        ([random_dictionary(d, 1)], "does not know its site"),
        ([random_dictionary(d + 1, 1, reads=STREAM)], "a dictionary of width"),
        ([random_dictionary(d, 1, reads=STREAM, writes=WRITES)], "a dictionary of one block"),
        ([random_dictionary(d, 1, reads="hook_embed")], "a dictionary of one block"),
    ):
        with pytest.raises(ValueError, match=match):
            plain().with_dictionaries(bad)
    assert interp.ablate(only, CLEAN, "feature", change=Zero(), metric=METRIC).layer.values.tolist() == [0]
    with pytest.raises(KeyError, match=r"blocks\.1\.hook_features"):
        interp.ablate(only, CLEAN, "feature", change=Zero(), metric=METRIC, layers=[1])
    unequal = plain().with_dictionaries([dictionaries()[0], dictionaries()[1].prefix(5)])
    with pytest.raises(ValueError, match="as many features in every layer are required"):
        interp.patch(unequal, CLEAN, CORRUPT, "features", metric=METRIC, by=("layer", "feature"))
    assert (
        interp.patch(unequal, CLEAN, CORRUPT, "blocks.1.hook_features", metric=METRIC, by=("feature",)).sizes[
            "feature"
        ]
        == 5
    )


def test_a_model_with_dictionaries_is_written_as_the_model_without() -> None:
    assert split().cfg.to_dict() == plain().cfg.to_dict()
    assert split().transformer.unedited.dictionaries
    again = split().with_dictionaries([])
    assert again.cfg == plain().cfg and not again.transformer.dictionaries


def test_the_edits_of_a_dictionary_and_those_of_its_features_agree() -> None:
    coder = dictionaries()[1]

    def scaled(features: Tensor) -> Tensor:
        features[..., 7] *= 3
        return features

    edits = coder.edits(scaled)
    one = logits_of(plain(), ROWS, edits)
    other = logits_of(split(), ROWS, [Edit("L1F7", Scale(3.0))])
    real = plain().to_batch(ROWS).host().real
    assert_close(one[real], other[real])


def test_features_of_heads_are_read_side_by_side() -> None:
    site = "blocks.1.attn.hook_z"
    width = plain().cfg.n_heads * plain().cfg.head_width
    coder = random_dictionary(width, 3, reads=site)
    subject = plain().with_dictionaries([coder])
    z = value(site, CLEAN, plain()).flatten(2)
    f = value("blocks.1.hook_features", CLEAN, subject)
    assert_close(f, (z @ coder.W_enc + coder.b_enc).relu())
    y = z - f[..., 7:8] * coder.W_dec[7]
    expected = logits_of(plain(), CLEAN, [Edit(site, Set(y.view(*y.shape[:2], plain().cfg.n_heads, -1)))])
    assert_close(logits_of(subject, CLEAN, [Edit("L1F7", Zero())]), expected)
