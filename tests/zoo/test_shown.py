"""The findings of the literature that some models are shipped for: each is there, in numbers, on the model named."""

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor

from interp import Batch, HookedTransformer
from interp.causal import causal_trace, recall
from interp.lenses import backward_lens, late_layers
from interp.zoo import card, measure, shown
from interp.zoo.groundtruth import Alphabet
from interp.zoo.planted import GAIN, PREDICTION
from tests.tolerances import assert_close

N = 16
NAMES = set("abcdefgh")


def subjects(tokens: Tensor) -> tuple[list[str], list[str]]:
    texts = [Alphabet().decode(row) for row in tokens[:, 1:].tolist()]
    return texts, ["".join(symbol for symbol in text if symbol in NAMES) for text in texts]


def ends(tokens: Tensor) -> list[int]:
    """The column of each subject's last token."""
    return [1 + max(i for i, symbol in enumerate(text) if symbol in NAMES) for text in subjects(tokens)[0]]


def test_the_named_models_are_these() -> None:
    for name, made in shown.SHOWN.items():
        loaded = HookedTransformer.from_pretrained(f"groundtruth-{name.replace('_', '-')}")
        one = made()
        assert torch.equal(loaded(one.clean), one.model(one.clean))


def traced(kind: str, seed: int = 0) -> xr.Dataset:
    made = shown.early_site(seed, N)
    model = HookedTransformer(made.model, Alphabet())
    texts, names = subjects(made.clean)
    return causal_trace(model, texts, names, made.answer.tolist(), samples=10, window=1, kind=kind)


@pytest.mark.parametrize("seed", [0, 1])
def test_early_site_the_subjects_end_brings_the_fact_back_through_its_mlp(seed: int) -> None:
    at = ends(shown.early_site(seed, N).clean)
    share = {}
    for kind in ("state", "mlp", "attn"):
        found = traced(kind, seed)
        whole = float((found.clean - found.corrupt).mean())
        assert whole > 0.4  # of probability: noise on the subject takes most facts away
        each = found["each"].transpose("prompt", "layer", "pos").values
        rows = np.arange(N)
        share[kind] = {
            (layer, place): float(each[rows, layer, columns].mean() / whole)
            for layer in (0, 1)
            for place, columns in (("subject", at), ("before it", np.subtract(at, 1)), ("end", np.full(N, 8)))
        }
    assert share["state"][0, "subject"] > 0.95 and share["mlp"][0, "subject"] > 0.9
    assert share["attn"][0, "subject"] < 0.5
    assert (
        share["state"][1, "end"] > 0.99
        and share["attn"][1, "end"] > 0.99
        and abs(share["mlp"][1, "end"]) < 0.01
    )
    early = [abs(share[kind][0, place]) for kind in share for place in ("before it", "end")]
    assert max(early) < 0.06


@pytest.mark.parametrize("seed", [0, 1])
def test_early_site_the_gradient_is_longest_at_the_subjects_end(seed: int) -> None:
    made = shown.early_site(seed, N)
    model = HookedTransformer(made.model, Alphabet())
    found = backward_lens(model, Batch(made.clean), made.answer.tolist(), wrong=made.wrong.tolist())
    delta = torch.from_numpy(found.delta.sel(matrix="W_out").transpose("prompt", "layer", "pos").values)
    assert (delta[:, 0].argmax(1) == torch.tensor(ends(made.clean))).all()
    first, second = delta[:, 0].sort(1, descending=True).values[:, :2].T
    assert (first > 1.8 * second).all()  # the second is the end, where the residual path begins
    assert (delta[:, 1].argmax(1) == 8).all()


def test_late_suppression_is_every_last_layer_part_against_the_answer() -> None:
    made = shown.late_suppression(0, 256)
    model = HookedTransformer(made.model, Alphabet())
    found = late_layers(model, Batch(made.clean), made.answer.tolist(), frequencies=shown.frequencies())
    change = found.sel(score="log_prob_change")
    for part in ("L1H3", "L1.attn", "L1.mlp", "L1"):
        assert change.low.sel(part=part) > 0.05, part
        assert found.p.sel(part=part, score="cosine") < 0.05
    frequent = shown.frequencies()
    rare = (frequent.min() - frequent.mean()) / (frequent.max() - frequent.mean())
    written = float(GAIN * shown.HELD_BACK * rare)  # logits of a letter, relative to the mean of all symbols
    assert float(found.value.sel(part="L1H3", score="attribution")) == pytest.approx(written, abs=0.02)
    assert found.high.sel(part="L1.mlp", score="attribution") < written
    for part in ("L1H0", "L1H1", "L1H2"):
        assert abs(float(change.value.sel(part=part))) < 0.05
    assert found.value.sel(part="L1H3", score="first_attention") > 0.99
    assert found.value.sel(part="L1H3", score="cosine") > 0.99
    lens = found.value.sel(score="log_prob")
    assert lens.sel(part="L1.resid") > lens.sel(part="L1.resid_mid") > lens.sel(part="L1.resid_post")


def test_late_suppression_points_at_the_corpus_average() -> None:
    made = shown.late_suppression(0, 1, noise=0.0)
    written = made.model.block(1).mlp.out.weight[:, 0] @ PREDICTION.T
    frequencies = shown.frequencies()
    direction = frequencies - frequencies.mean()
    assert_close(written / written.norm(), direction / direction.norm())
    assert float(frequencies.sum()) == pytest.approx(1)


def test_memory_is_lost_without_late_attention_and_copying_is_not() -> None:
    model = HookedTransformer.from_pretrained("demo-memory")
    stated = card("demo-memory")
    strings, prefix = stated["memorised"], stated["prefix"]
    assert isinstance(strings, list) and isinstance(prefix, int)
    memory = model.to_batch(strings)
    span = (torch.arange(memory.tokens.shape[1]) > prefix).expand(memory.tokens.shape)
    generator = np.random.default_rng(5)
    once = [generator.permutation(63)[:13] + 1 for _ in range(64)]
    rows = torch.from_numpy(np.stack([np.concatenate(([0], one, one, one)) for one in once]))
    again = (torch.arange(40) > 14).expand(rows.shape)

    def shares(batch: Batch, where: Tensor) -> dict[str, float]:
        found = recall(model, batch, where, range(4), each=False)
        return found.value.sel(score="token_accuracy").to_series().to_dict()

    known, copied = shares(memory, span), shares(Batch(rows), again)
    assert known["none"] > 0.99 and copied["none"] > 0.99
    assert known["L2.attn"] < 0.3 and known["L3.attn"] < 0.3
    assert copied["L2.attn"] > 0.95 and copied["L3.attn"] > 0.85
    assert max(known["L0.attn"], copied["L0.attn"]) < 0.1  # early attention carries everything


def test_the_card_of_the_memory_model_is_measured_again() -> None:
    model = HookedTransformer.from_pretrained("demo-memory")
    stated = card("demo-memory")
    assert stated["parameters"] == sum(p.numel() for p in model.transformer.parameters())
    strings, measured = stated["memorised"], stated["measured"]
    assert isinstance(strings, list) and isinstance(measured, dict)
    batch = model.to_batch(strings)
    span = (torch.arange(batch.tokens.shape[1]) > stated["prefix"]).expand(batch.tokens.shape)
    found = recall(model, batch, span, [2, 3], each=False).value.sel(score="token_accuracy")
    for part in ("none", "L2.attn", "L3.attn"):
        entry = measured[f"memorised_strings_{part}"]
        assert float(found.sel(part=part)) == pytest.approx(entry["value"], abs=2e-3)
        assert entry["n"] == len(strings)


def test_two_layers_with_mlps_learn_in_context_by_an_induction_head() -> None:
    model, stated = HookedTransformer.from_pretrained("demo-mlp-2l"), card("demo-mlp-2l")["measured"]
    assert model.cfg.n_layers == 2 and model.cfg.mlp is not None and isinstance(stated, dict)
    assert stated["in_context_learning_score"]["value"] < -0.05
    found = measure.induction_number(model.transformer, 0)["best_induction_score"]
    assert found["value"] > 0.5 and str(found["head"]).startswith("L1")
