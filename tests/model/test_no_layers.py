"""A model without layers, logits = unembed(norm(embed + position)), through everything that it can be asked."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import interp
from interp import HookedTransformer
from interp.attention import Heads
from interp.causal import Ablate
from interp.edits import Zero
from interp.families.load import save
from interp.lab.training import FixedRows, Training, train
from interp.model import EncoderDecoderConfig, ModelConfig, NoNorm, NoPosition, RMSNorm, Transformer
from interp.runs import run
from interp.tasks import Place, RepeatingChain
from interp.weights import Copying
from tests.configs import perturbed, some_tokens
from tests.tolerances import assert_close

CONFIG = ModelConfig(n_layers=0, d_model=12, n_heads=3, n_ctx=64, d_vocab=31)
OTHERS = {
    "norm after the embeddings": replace(CONFIG, embed_norm=True),
    "post-norm": replace(CONFIG, norm_place="post", final_norm=False),
    "tied, RMSNorm, soft cap": replace(CONFIG, norm=RMSNorm(), tied=True, logit_softcap=5.0),
}
ROWS = some_tokens(3, 9, seed=1)


def hooked(config: ModelConfig = CONFIG) -> HookedTransformer:
    return HookedTransformer(perturbed(config))


def by_hand(model: HookedTransformer) -> torch.Tensor:
    """Logits from the parameters alone, LayerNorm written out."""
    given = dict(model.transformer.named_parameters())
    x = given["embed.weight"][ROWS] + given["pos_embed.weight"][: ROWS.shape[1]]
    x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + CONFIG.norm.eps).sqrt()
    return (x * given["ln_final.weight"] + given["ln_final.bias"]) @ given["unembed.weight"].T


def test_its_logits_are_those_written_out() -> None:
    model = hooked()
    assert_close(model.transformer(ROWS), by_hand(model))


@pytest.mark.parametrize("name", ["plain", *OTHERS])
def test_it_keeps_the_contract(name: str) -> None:
    found = hooked(OTHERS.get(name, CONFIG)).verify()
    assert found.passed, str(found)


def test_its_parts_are_the_embeddings_and_constants() -> None:
    model = hooked()
    found = interp.attribute(model, ROWS, 3, 4)
    logits = by_hand(model)[:, -1]
    assert_close(torch.from_numpy(found.total.values), (logits[:, 3] - logits[:, 4]).detach().double())
    assert_close(torch.from_numpy(found.value.sum("part").values), torch.from_numpy(found.total.values))
    assert {"embed", "pos_embed"} < set(found.part.values.tolist())


def test_its_lens_has_one_depth_which_is_its_answer() -> None:
    model = hooked()
    found = interp.logit_lens(model, ROWS, answer=5)
    assert found.sizes["depth"] == 1
    assert_close(
        torch.from_numpy(found.target_prob.values[:, 0]), by_hand(model).softmax(-1)[..., 5].detach().double()
    )


def test_its_path_is_the_direct_one_and_its_order_is_zero() -> None:
    model = hooked()
    found = interp.residual.paths(model, ROWS, 3, 4)
    assert found.path.values.tolist() == ["direct", "constant"]
    np.testing.assert_allclose(found.value.sum("path"), found.total, rtol=1e-5)
    worth = interp.residual.term_importance(model, ROWS).value.sel(term="order 0", score="loss")
    logits = by_hand(model).log_softmax(-1)[:, :-1].gather(-1, ROWS[:, 1:, None])
    assert float(worth) == pytest.approx(-float(logits.mean()), rel=1e-5)


def test_its_stream_is_read_and_edited() -> None:
    model = hooked()
    read = interp.Read("hook_stream")
    stream = interp.observe(model, ROWS, [read]).trace[read]
    edit = interp.Edit("hook_stream", interp.edits.Set(stream.flip(0)))
    assert_close(interp.observe(model, ROWS, edits=[edit]).output, by_hand(model).flip(0))


def test_it_is_saved_and_loaded(tmp_path: Path) -> None:
    model = hooked()
    save(model.transformer, tmp_path / "model")
    again = HookedTransformer.from_pretrained(tmp_path / "model")
    assert torch.equal(again.transformer(ROWS), model.transformer(ROWS))


def test_its_page_says_what_it_lacks(tmp_path: Path) -> None:
    tokenizer = HookedTransformer.from_pretrained("demo-4l").text.tokenizer
    model = HookedTransformer(perturbed(replace(CONFIG, d_vocab=1024)), tokenizer)
    page = interp.report(model, "When Mary and John went to the shop, John gave a drink to", " Mary", " John")
    assert set(page.tables) == {"tokens", "next_tokens", "attribution", "logit_lens"}
    assert page.save(tmp_path / "page").is_file()
    assert set(page.report.absent.values()) == {"this model has no layers"}


@pytest.mark.parametrize("question", [Heads(), Copying(), Ablate(change=Zero())])
def test_what_asks_about_layers_is_refused(question: interp.passes.Question) -> None:
    with pytest.raises(ValueError, match=f"{question.name} requires a model with layers, this one has none"):
        run([question], hooked(), ROWS)


def test_trained_it_is_the_bigram_table_of_its_corpus() -> None:
    """Elhage et al. 2021, "Zero-Layer Transformers": the best it can do is p(next | token) of what it was trained on.

    Oracle: the table counted here. Fixed rows, so that the frequencies are those of training to the last pair.
    """
    chain = RepeatingChain(12, 24, low=20, high=22, concentration=0.4)
    rows = chain.batch(Place(0, 0), 64)
    rows = replace(rows, determined=None)
    config = ModelConfig(0, 24, 1, 24, 12, position=NoPosition(), norm=NoNorm())
    plan = Training(steps=400, rows=64, learning_rate=3e-2, weight_decay=0.0, final_share=0.0, log_every=400)
    model = train(config, FixedRows(rows, rows), plan).model
    assert isinstance(model, Transformer)
    counts = torch.zeros(12, 12, dtype=torch.float64)
    tokens = rows.batch.tokens
    counts.index_put_((tokens[:, :-1], tokens[:, 1:]), torch.ones((), dtype=torch.float64), accumulate=True)
    share = counts / counts.sum(1, keepdim=True).clamp_min(1)
    told = model(torch.arange(12)[:, None])[:, 0].double().log_softmax(-1).detach()
    kl = (torch.special.xlogy(share, share) - share * told).sum(1)
    table = interp.weights.bigram_table(model, tokens)
    found = float(table.overall.sel(score="kl"))
    assert found == pytest.approx(float((kl * counts.sum(1)).sum() / counts.sum()), abs=1e-6)
    assert found < 0.01 < 0.3 < float(table.null_overall.sel(score="kl"))


def test_an_encoder_decoder_needs_layers() -> None:
    encoder = replace(CONFIG, causal=False, unembed=False)
    with pytest.raises(ValueError, match="n_layers >= 1 on both sides, got 0 and 1"):
        EncoderDecoderConfig(encoder, replace(CONFIG, n_layers=1, cross_attention=True))


def test_a_page_with_a_corrupted_prompt_is_refused() -> None:
    tokenizer = HookedTransformer.from_pretrained("demo-4l").text.tokenizer
    model = HookedTransformer(perturbed(replace(CONFIG, d_vocab=1024)), tokenizer)
    with pytest.raises(ValueError, match="a corrupted prompt is for a model with layers, this one has none"):
        interp.report(model, "to Mary", " John", " Mary", "to John")
