"""Direct logit attribution by feature: a loop over features by hand, sums, planted dictionaries, kept features."""

import copy
import functools

import numpy as np
import pytest
import torch
from torch import Tensor

import interp
from interp import Edit, HookedTransformer, Read
from interp.data.batch import Batch
from interp.edits import Detach, PerRow, Scale, Set, Zero
from interp.features import Dictionary, ReLU
from interp.model.sites import find
from interp.passes.observe import observe
from interp.residual import IncompleteSumError, feature_shares
from tests.configs import CONFIGS, build, some_tokens
from tests.loops import over
from tests.tolerances import assert_close

ANSWER, WRONG = torch.tensor([3, 14, 7]), torch.tensor([5, 1, 30])
S = 20
NORMS = ("gpt2", "llama-gqa", "gemma2", "olmo2", "post-norm", "parallel", "no-norm", "bloom")
TOKENS = some_tokens()
MLP, ATTENTION, HEADS, NEURONS = "hook_mlp_out", "hook_attn_out", "attn.hook_z", "mlp.hook_post"


@functools.cache
def plain(name: str) -> HookedTransformer:
    return HookedTransformer(copy.deepcopy(build(name)).to(torch.float64))


def value(subject: HookedTransformer, site: str, tokens: Tensor = TOKENS) -> Tensor:
    """A site's value at each row's last token, heads side by side."""
    seen = observe(subject.transformer, tokens, [Read(site)]).trace[Read(site)]
    return seen[:, -1].flatten(1)


def dictionary(
    name: str, writes: str, seed: int, reads: str | None = None, *, skip: bool = False, **how: object
) -> Dictionary:
    """A random dictionary of a site; about half of its features are active."""
    generator, subject = torch.Generator().manual_seed(seed), plain(name)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    d, out = (value(subject, site).shape[-1] for site in (reads or writes, writes))
    weights = {"W_enc": normal(d, S) / d**0.5, "b_enc": normal(S), "W_dec": normal(S, out) / S**0.5}
    weights["b_dec"] = normal(out)
    if skip:
        weights["W_skip"] = normal(d, out) / d
    return Dictionary(ReLU(), weights, reads=reads or writes, writes=writes, **how)  # type: ignore[arg-type]


def through_frozen_norms(name: str, site: str) -> Tensor:
    """The gradient of the logit difference at a site's last token, scales frozen, nothing read by later sublayers."""
    subject = plain(name)
    layer, inner = find(site, subject.cfg)[1], site.split(".", 2)[2]
    order = subject.cfg.sublayers
    first = {MLP: "mlp_out", NEURONS: "mlp_out", ATTENTION: "attn_out", HEADS: "attn_out"}.get(inner)
    first = first or {"hook_resid_mid": "attn_out", "hook_resid_post": order[-1]}.get(inner)
    assert layer is not None
    later = [
        Edit(f"blocks.{i}.hook_{sublayer}", Detach())
        for i in range(layer, subject.cfg.n_layers)
        for sublayer in order
        if (i, order.index(sublayer)) > (layer, -1 if first is None else order.index(first))
    ]
    seen = observe(subject.transformer, TOKENS, [Read(site)]).trace[Read(site)]
    with torch.enable_grad():
        start = seen.clone().requires_grad_()
        ruled = HookedTransformer(subject.transformer.ruled({"norm"}))
        logits = ruled.edited([Edit(site, lambda cells: start), *later])(TOKENS)[:, -1]
        cap = CONFIGS[name].logit_softcap
        logits = logits if cap is None else cap * (logits / cap).atanh()
        rows = torch.arange(3)
        (gradient,) = torch.autograd.grad((logits[rows, ANSWER] - logits[rows, WRONG]).sum(), start)
    return gradient[:, -1].flatten(1)


def check_by_hand(name: str, coder: Dictionary, layer: int) -> None:
    """Every feature, the bias, the skip and the error of one dictionary, feature by feature; and the sum."""
    subject = plain(name).with_dictionaries([coder])
    found = interp.attribute(subject, TOKENS, ANSWER, WRONG, parts="feature")
    assert coder.reads is not None and coder.writes is not None
    along = through_frozen_norms(name, coder.writes)
    x, y = (value(plain(name), site) for site in (coder.reads, coder.writes))
    features = torch.stack([coder.encode(row) for row in x])
    active = features.any(0)
    listed = [part for part in found.part.values if part.startswith(f"L{layer}F")]
    assert listed == [f"L{layer}F{i}" for i in range(S) if active[i]] and listed
    for i in active.nonzero()[:, 0].tolist():
        expected = torch.stack([f * (coder.W_dec[i] @ g) for f, g in zip(features[:, i], along, strict=True)])
        assert_close(torch.tensor(found.value.sel(part=f"L{layer}F{i}").values), expected)
    bias = torch.tensor(found.value.sel(part=f"L{layer}.feature_bias").values)
    assert_close(bias, along @ coder.b_dec)
    skip = 0 if coder.skip is None else x @ coder.skip
    if coder.skip is not None:
        assert_close(
            torch.tensor(found.value.sel(part=f"L{layer}.feature_skip").values), (along * skip).sum(-1)
        )
    error = y - (features @ coder.W_dec + coder.b_dec + skip)
    assert_close(torch.tensor(found.value.sel(part=f"L{layer}.error").values), (along * error).sum(-1))
    np.testing.assert_allclose(found.value.sum("part"), found.total, rtol=1e-9, atol=1e-9)
    assert found.attrs["completeness_error"] <= 1e-11
    sublayers = interp.attribute(plain(name), TOKENS, ANSWER, WRONG)
    np.testing.assert_array_equal(found.total, sublayers.total)
    for part in set(found.part.values) & set(sublayers.part.values) - {"rounding"}:
        np.testing.assert_allclose(
            found.value.sel(part=part), sublayers.value.sel(part=part), rtol=1e-9, atol=1e-9
        )


@pytest.mark.parametrize("name", NORMS)
def test_features_of_a_transcoder_are_a_loop_by_hand(name: str) -> None:
    coder = dictionary(name, f"blocks.0.{MLP}", 1, "blocks.0.hook_mlp_in", skip=True)
    check_by_hand(name, coder, 0)


@over("site", [ATTENTION, HEADS, NEURONS, MLP])
@pytest.mark.parametrize("name", NORMS)
def test_features_of_a_sublayers_output_heads_or_neurons_are_a_loop_by_hand(name: str, site: str) -> None:
    check_by_hand(name, dictionary(name, f"blocks.1.{site}", 2), 1)


@over("site", ["blocks.0.hook_resid_pre", "blocks.0.hook_resid_post", "blocks.1.hook_resid_mid",
               "blocks.1.hook_resid_post"])  # fmt: skip
@pytest.mark.parametrize("name", NORMS)
def test_a_dictionary_of_the_stream_stands_for_all_that_was_added_before(name: str, site: str) -> None:
    if name == "parallel" and site.endswith("mid"):
        return
    layer = int(site.split(".")[1])
    check_by_hand(name, dictionary(name, site, 3), layer)
    names = interp.attribute(
        plain(name).with_dictionaries([dictionary(name, site, 3)]), TOKENS, 3, parts="feature"
    )
    before = {"embed", "pos_embed"} | ({"L0.attn", "L0.mlp"} if layer == 1 else set())
    assert not before & set(names.part.values.tolist())


def test_in_post_norm_models_the_normed_stream_may_have_a_dictionary() -> None:
    for layer in (0, 1):
        coder = dictionary("post-norm", f"blocks.{layer}.hook_normalized_resid_post", 3)
        found = interp.attribute(
            plain("post-norm").with_dictionaries([coder]), TOKENS, ANSWER, WRONG, parts="feature"
        )
        np.testing.assert_allclose(found.value.sum("part"), found.total, rtol=1e-9, atol=1e-9)
        assert ("L1.mlp" in found.part.values) == (layer == 0) and "L0.ln2_bias" not in found.part.values


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_several_dictionaries_split_their_sublayers_and_leave_the_others_whole(name: str) -> None:
    coders = [
        dictionary(name, f"blocks.0.{MLP}", 1, "blocks.0.hook_mlp_in"),
        dictionary(name, f"blocks.1.{HEADS}", 2),
    ]
    found = interp.attribute(plain(name).with_dictionaries(coders), TOKENS, ANSWER, WRONG, parts="feature")
    alone = [
        interp.attribute(plain(name).with_dictionaries([one]), TOKENS, ANSWER, WRONG, parts="feature")
        for one in coders
    ]
    for part in found.part.values:
        (one,) = [each for each, layer in zip(alone, "01", strict=True) if part in each.part.values and
                  (part.startswith(f"L{layer}") or not part.startswith("L"))][:1]  # fmt: skip
        if part != "rounding":
            np.testing.assert_allclose(
                found.value.sel(part=part), one.value.sel(part=part), rtol=1e-9, atol=1e-12
            )
    assert {"L0.attn", "L1.mlp", "L1.attn_bias"} <= set(
        found.part.values
    ) and "L0.mlp" not in found.part.values
    np.testing.assert_allclose(found.value.sum("part"), found.total, rtol=1e-9, atol=1e-9)


def test_the_last_dictionary_of_the_stream_counts_and_a_note_names_the_others() -> None:
    coders = [dictionary("gpt2", f"blocks.{layer}.hook_resid_post", layer) for layer in (0, 1)]
    subject = plain("gpt2").with_dictionaries(coders)
    found = interp.attribute(subject, TOKENS, ANSWER, WRONG, parts="feature")
    assert not [part for part in found.part.values if part.startswith("L0")]
    assert any("the dictionaries of blocks 0 have no part" in note for note in found.attrs["notes"])


# --- planted --------------------------------------------------------------------------------------------------------


def test_a_planted_dictionary_gives_each_feature_the_logit_that_it_writes() -> None:
    """The identity's features, kept from 0 by a bias: in a model without norms feature i adds y_i W_U[i]."""
    subject, site, d = plain("no-norm"), f"blocks.1.{MLP}", 24
    eye, far = torch.eye(d, dtype=torch.float64), torch.full((d,), 1e3, dtype=torch.float64)
    coder = Dictionary(
        ReLU(),
        {"W_enc": eye, "b_enc": far, "W_dec": eye, "b_dec": -far},
        reads=site,
        apply_b_dec_to_input=False,
    )
    found = interp.attribute(subject.with_dictionaries([coder]), TOKENS, ANSWER, parts="feature")
    y, W_U = value(subject, site), subject.W_U
    assert_close(torch.tensor(found.value.sel(part="L1.error").values), torch.zeros(3, dtype=torch.float64))
    for i in range(d):
        assert_close(torch.tensor(found.value.sel(part=f"L1F{i}").values), (y[:, i] + 1e3) * W_U[i, ANSWER])


def test_an_edited_feature_counts_as_it_was_edited() -> None:
    coder = dictionary("gpt2", f"blocks.0.{MLP}", 1, "blocks.0.hook_mlp_in")
    subject = plain("gpt2").with_dictionaries([coder])
    before = interp.attribute(subject, TOKENS, ANSWER, WRONG, parts="feature")
    edits = [Edit("L0F7", Set(4.0)), Edit("L0.error", Zero())]
    after = interp.attribute(subject.edited(edits), TOKENS, ANSWER, WRONG, parts="feature")
    np.testing.assert_allclose(after.value.sel(part="L0.error"), 0, atol=1e-9)
    assert not np.allclose(before.value.sel(part="L0.error"), 0)
    np.testing.assert_allclose(after.value.sum("part"), after.total, rtol=1e-9, atol=1e-9)
    sae = dictionary("no-norm", "blocks.1.hook_resid_post", 3)
    subject = plain("no-norm").with_dictionaries([sae])
    before = interp.attribute(subject, TOKENS, ANSWER, WRONG, parts="feature")
    part = next(part for part in before.part.values if part.startswith("L1F"))
    after = interp.attribute(subject.edited([Edit(part, Scale(3.0))]), TOKENS, ANSWER, WRONG, parts="feature")
    np.testing.assert_allclose(after.value.sel(part=part), 3 * before.value.sel(part=part), rtol=1e-9)
    others = [other for other in before.part.values if other not in (part, "rounding")]
    np.testing.assert_allclose(
        after.value.sel(part=others), before.value.sel(part=others), rtol=1e-9, atol=1e-9
    )


# --- what is kept ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [512, 3])
def test_top_features_stand_alone_and_the_others_of_a_dictionary_together(
    keep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    coders = [
        dictionary("gpt2", f"blocks.{layer}.{MLP}", layer, f"blocks.{layer}.hook_mlp_in") for layer in (0, 1)
    ]
    subject = plain("gpt2").with_dictionaries(coders)
    every = interp.attribute(subject, TOKENS, ANSWER, WRONG, parts="feature").value
    monkeypatch.setattr(feature_shares, "ACTIVE", keep)
    monkeypatch.setattr(interp.residual.attribution, "ACTIVE", keep)
    some = interp.attribute(subject, TOKENS, ANSWER, WRONG, parts="feature", top=5)
    features = [part for part in every.part.values if interp.Part.of(part).kind == "feature"]
    size = {part: float(abs(every.sel(part=part)).mean()) for part in features}
    kept = [part for part in some.part.values if interp.Part.of(part).kind == "feature"]
    assert len(kept) == 5
    if keep == 512:
        assert set(kept) == set(sorted(features, key=lambda part: -size[part])[:5])
        for part in kept:
            np.testing.assert_allclose(some.value.sel(part=part), every.sel(part=part), rtol=1e-12)
    for layer in (0, 1):
        own = [part for part in features if part.startswith(f"L{layer}F")]
        rest = some.value.sel(part=[*[p for p in kept if p in own], f"L{layer}.feature_rest"]).sum("part")
        np.testing.assert_allclose(rest, every.sel(part=own).sum("part"), rtol=1e-9, atol=1e-12)
    assert ("notes" in some.attrs) == (keep == 3)
    np.testing.assert_allclose(some.value.sum("part"), some.total, rtol=1e-9, atol=1e-9)


def test_prompts_of_several_lengths_and_batches_give_what_each_gives_alone() -> None:
    rows = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9], [7, 9]]
    subject = plain("llama-gqa").with_dictionaries(
        [dictionary("llama-gqa", f"blocks.1.{MLP}", 1, "blocks.1.hook_mlp_in", skip=True)]
    )
    for side in ("left", "right"):
        for pos in (-1, PerRow([2, -3, 0])):
            batch = Batch.of(rows, side=side)  # type: ignore[arg-type]
            together = interp.attribute(subject, batch, ANSWER, WRONG, parts="feature", pos=pos)
            for i, row in enumerate(rows):
                own = pos if isinstance(pos, int) else pos.places[i]
                alone = interp.attribute(
                    subject,
                    torch.tensor([row]),
                    ANSWER[i : i + 1],
                    WRONG[i : i + 1],
                    parts="feature",
                    pos=own,
                )
                there = alone.part.values
                np.testing.assert_allclose(
                    together.value[i].sel(part=there), alone.value[0], rtol=1e-9, atol=1e-9
                )
                absent = [part for part in together.part.values if part not in there]
                np.testing.assert_array_equal(together.value[i].sel(part=absent), 0)


def test_answers_of_several_tokens_have_one_set_of_features() -> None:
    subject = plain("gpt2").with_dictionaries(
        [dictionary("gpt2", f"blocks.1.{MLP}", 1, "blocks.1.hook_mlp_in")]
    )
    answers = [[3, 4], [7, 2], [5]]
    for top in (None, 3):
        found = interp.attribute(subject, TOKENS, answers, parts="feature", top=top)
        there = found.total.notnull()
        assert found.sizes["answer_token"] == 2 and int(there.sum()) == 5
        np.testing.assert_allclose(found.value.sum("part").where(there), found.total, rtol=1e-9, atol=1e-9)
        second = torch.cat((TOKENS[:1], torch.tensor([[3]])), 1)
        alone = interp.attribute(subject, second, 4, parts="feature", top=None)
        for part in set(found.part.values) & set(alone.part.values) - {"rounding"}:
            np.testing.assert_allclose(
                found.value.sel(part=part, prompt=0, answer_token=1), alone.value.sel(part=part)[0], atol=1e-9
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_less_precision_the_parts_still_sum(dtype: torch.dtype) -> None:
    subject = HookedTransformer(build("gpt2", dtype))
    for own in (torch.float32, torch.bfloat16):
        coders = [dictionary("gpt2", f"blocks.{layer}.{MLP}", layer, f"blocks.{layer}.hook_mlp_in", skip=True).to(own)
                  for layer in (0, 1)]  # fmt: skip
        found = interp.attribute(subject.with_dictionaries(coders), TOKENS, ANSWER, WRONG, parts="feature")
        np.testing.assert_allclose(found.value.sum("part"), found.total, rtol=1e-5, atol=1e-5)
        if dtype == own == torch.float32:
            wide = interp.attribute(
                plain("gpt2").with_dictionaries([each.double() for each in coders]), TOKENS, ANSWER, WRONG,
                parts="feature",
            )  # fmt: skip
            assert_close(torch.tensor(found.value.values), torch.tensor(wide.value.values), dtype)


def test_a_dictionary_without_an_active_feature_has_its_bias_and_error_alone() -> None:
    coder = dictionary("gpt2", f"blocks.1.{MLP}", 1)
    with torch.no_grad():
        coder.b_enc.fill_(-1e6)
    subject = plain("gpt2").with_dictionaries([coder])
    for top in (None, 3):
        found = interp.attribute(subject, TOKENS, ANSWER, WRONG, parts="feature", top=top)
        assert not [part for part in found.part.values if part.startswith("L1F")]
        assert ("L1.feature_rest" in found.part.values) == (top is not None)
        np.testing.assert_allclose(found.value.sum("part"), found.total, rtol=1e-9, atol=1e-9)


# --- refused --------------------------------------------------------------------------------------------------------


def test_what_cannot_be_split_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"requires dictionaries in the model's blocks: model.with_dictionaries"
    ):
        interp.attribute(plain("gpt2"), TOKENS, 3, parts="feature")
    wrong = plain("gpt2").with_dictionaries([dictionary("gpt2", "blocks.0.hook_mlp_in", 1)])
    with pytest.raises(ValueError, match=r"got one that writes blocks\.0\.hook_mlp_in"):
        interp.attribute(wrong, TOKENS, 3, parts="feature")
    subject = plain("gpt2").with_dictionaries([dictionary("gpt2", f"blocks.0.{MLP}", 1)])
    for top in (0, S + 1):
        with pytest.raises(ValueError, match=rf"top must be in \[1, {S}\] features, got {top}"):
            interp.attribute(subject, TOKENS, 3, parts="feature", top=top)
    scaled = dictionary("gpt2", f"blocks.0.{MLP}", 1, normalize_activations="layer_norm")
    with pytest.raises(ValueError, match="features that are not edited are required"):
        interp.attribute(
            plain("gpt2").with_dictionaries([scaled]).edited([Edit("L0F7", Zero())]),
            TOKENS,
            3,
            parts="feature",
        )


@over("kind", ["layer_norm", "constant_norm_rescale"])
def test_a_dictionary_that_normalises_gives_its_features_at_the_scale_of_the_input(kind: str) -> None:
    site = f"blocks.1.{MLP}"
    coder = dictionary("gpt2", site, 4, normalize_activations=kind)
    found = interp.attribute(plain("gpt2").with_dictionaries([coder]), TOKENS, ANSWER, WRONG, parts="feature")
    y, along = value(plain("gpt2"), site), through_frozen_norms("gpt2", site)
    features = coder.encode(y)
    for part in [part for part in found.part.values if part.startswith("L1F")]:
        without = features.clone()
        without[:, int(part[3:])] = 0
        expected = ((coder.decode(features, y) - coder.decode(without, y)) * along).sum(-1)
        assert_close(torch.tensor(found.value.sel(part=part).values), expected)
    error = y - coder.decode(features, y)
    assert_close(torch.tensor(found.value.sel(part="L1.error").values), (along * error).sum(-1))


def test_a_stream_that_holds_what_no_part_wrote_is_refused_after_a_dictionary_of_it_too() -> None:
    subject = plain("gpt2").with_dictionaries([dictionary("gpt2", "blocks.0.hook_resid_post", 1)])
    added = Edit("blocks.1.hook_resid_mid", interp.edits.Add(torch.ones(24, dtype=torch.float64)))
    with pytest.raises(IncompleteSumError):
        interp.attribute(subject.edited([added]), TOKENS, ANSWER, WRONG, parts="feature")
    before = Edit("blocks.0.hook_resid_mid", interp.edits.Add(torch.ones(24, dtype=torch.float64)))
    found = interp.attribute(subject.edited([before]), TOKENS, ANSWER, WRONG, parts="feature")
    np.testing.assert_allclose(found.value.sum("part"), found.total, rtol=1e-9, atol=1e-9)
