"""The six models of the manual's page, trained and read as it says, against slow passes and known answers."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import interp
from interp import Batch, HookedTransformer
from interp.families.tokenizer import HuggingFaceTokenizer
from interp.model import MLP, ModelConfig, Transformer
from tests.tiny import gpt2_tokenizer, hooked
from tests.tolerances import assert_close

PAGE = Path("docs/howto/six_models.md")


@pytest.fixture(scope="module")
def page() -> dict[str, object]:
    """What the page's code has made, from top to bottom."""
    space: dict[str, object] = {}
    for block in re.findall(
        r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    ):
        exec(compile(block, str(PAGE), "exec"), space)
    return space


def classifier(*, causal: bool = False, outputs: int = 3) -> HookedTransformer:
    """Small, random, every parameter in use; its outputs are not its tokens."""
    torch.manual_seed(0)
    config = ModelConfig(
        n_layers=2, d_model=16, n_heads=2, n_ctx=6, d_vocab=7, d_vocab_out=outputs, causal=causal, mlp=MLP(12)
    )
    network = Transformer(config)
    for parameter in network.parameters():
        parameter.data.add_(torch.randn_like(parameter) / 4)
    return HookedTransformer(network)


@pytest.mark.slow
def test_every_model_of_the_page_has_learned_its_task(page: dict[str, object]) -> None:
    for name, tokens, columns, target in (
        ("brackets", "rows", 0, "whole"), ("voting", "counts", 0, "most"),
        ("sorting", "lists", slice(3, 6), None), ("looking", "twice", slice(4, 7), None),
    ):  # fmt: skip
        model, rows = page[name], page[tokens]
        assert isinstance(model, HookedTransformer)
        assert isinstance(rows, Tensor)
        right = model(rows)[:, columns].argmax(-1) == (
            page[target] if target else rows[:, columns.start + 1 :]
        )
        assert float(right.float().mean()) > 0.97, name
    adding, pairs = page["adding"], page["pairs"]
    assert isinstance(adding, HookedTransformer)
    assert isinstance(pairs, Tensor)
    assert torch.equal(adding(page["sums"])[:, -1].argmax(-1), pairs.sum(1) % 7)
    copier = page["copier"]
    assert isinstance(copier, HookedTransformer)
    assert float(interp.copying(copier).value.sel(score="eigenvalue").min()) > 0.99


@pytest.mark.parametrize("causal", [True, False])
def test_a_metric_at_a_position_is_that_of_the_logits_there(causal: bool) -> None:
    model = classifier(causal=causal)
    rows = [[1, 5, 2, 6], [3, 4, 0]]
    other = [[2, 5, 3, 6], [6, 2, 0]]
    for side in ("left", "right"):
        clean, corrupt = (Batch.of(each, side=side) for each in (rows, other))
        for pos in (0, 1, -1, -2):
            metric = interp.logit_difference(2, 0).at(pos)
            found = interp.patch(model, clean, corrupt, "z", metric=metric, by=("layer", "head"))
            for i, row in enumerate(rows):
                logits = model.transformer(torch.tensor([row]))[0, pos]
                assert_close(torch.tensor(found.clean.values[i]), logits[2] - logits[0], torch.float32)
    with pytest.raises(IndexError, match="position 3 is required of every row, but row 1 has 3 tokens"):
        interp.patch(
            model, clean, corrupt, "z", metric=interp.logit_difference(2, 0).at(3), by=("layer", "head")
        )
    with pytest.raises(ValueError, match="looks at every position, not at one"):
        interp.metrics.next_token_loss().at(0)


def test_a_divergence_at_a_position_compares_with_the_same_position() -> None:
    model, rows = classifier(), torch.tensor([[1, 5, 2, 6], [3, 4, 0, 1]])
    metric, zero = interp.metrics.kl_divergence().at(1), interp.edits.Zero()
    found = interp.ablate(model, rows, "head", change=zero, metric=metric)
    without = model.edited(interp.Edit("L1H1", zero))
    base, cut = (each.transformer(rows)[:, 1].log_softmax(-1) for each in (model, without))
    expected = (base.exp() * (base - cut)).sum(-1).mean()
    assert_close(torch.tensor(found.value.sel(layer=1, head=1).item()), expected)


def test_the_lens_of_a_classifier_lists_its_outputs_and_ends_in_its_logits() -> None:
    model, rows = classifier(), torch.tensor([[1, 5, 2, 6]])
    found = interp.logit_lens(model, rows, answer=2, pos=0)
    expected = model.transformer(rows)[0, 0].softmax(-1)
    assert found.sizes["rank"] == 3
    np.testing.assert_allclose(found.target_prob.values[0, -1, 0], expected[2], rtol=1e-5)
    assert set(found.word.values[0, -1, 0]) == {"<0>", "<1>", "<2>"}
    assert interp.logit_lens(model, rows).target_prob.isnull().all(), (
        "a next token is no answer of a classifier"
    )


def test_what_only_a_model_that_predicts_tokens_has_is_refused_by_name() -> None:
    model, rows = classifier(causal=True), torch.tensor([[1, 5, 2, 6]])
    pages = HookedTransformer(model.transformer)
    for asked in (
        lambda: model(rows, return_type="loss"),
        lambda: model.generate(rows, 1),
        lambda: interp.weights.bigram_table(model, rows),
        lambda: interp.patch(model, rows, rows.flip(1), metric=interp.metrics.next_token_loss()),
        lambda: interp.pages.report.report_of(pages, interp.pages.report.ReportQuestion("a"), None),
    ):
        with pytest.raises(ValueError, match=r"3 outputs of its own beside 7 tokens|about must be"):
            asked()
    for answer, message in ((3, r"\[0, 2\], got 3"), ("a", "the outputs of this model are not its tokens")):
        with pytest.raises(ValueError, match=message):
            interp.attribute(model, rows, answer)


def test_as_many_outputs_as_tokens_are_tokens() -> None:
    base = {"n_layers": 1, "d_model": 8, "n_heads": 2, "n_ctx": 4, "d_vocab": 5}
    assert ModelConfig(**base, d_vocab_out=5) == ModelConfig(**base)
    config = ModelConfig(**base, d_vocab_out=3)
    assert (config.n_outputs, ModelConfig(**base).n_outputs) == (3, 5)
    assert ModelConfig.from_dict(config.to_dict()) == config
    for change in ({"tied": True}, {"unembed": False}, {"d_vocab_out": 0}):
        with pytest.raises(ValueError, match="d_vocab_out"):
            ModelConfig(**{**base, "d_vocab_out": 3, **change})


def test_what_heads_copy_is_asked_of_models_of_tokens_only() -> None:
    """Few outputs or many: a table of heads has no copying, and says why; the questions about it refuse."""
    for outputs in (3, 50):
        config = ModelConfig(
            n_layers=2, d_model=16, n_heads=2, n_ctx=16, d_vocab=7, d_vocab_out=outputs, mlp=MLP(12)
        )
        model = interp.HookedTransformer(Transformer(config))
        table = interp.heads(model, repeats=interp.tasks.RepeatedTokens(period=4, repeats=3, rows=4))
        assert "induction" in table.score.values and "copying" not in table.score.values
        assert table.attrs["no_copying"] == f"the {outputs} outputs of this model are not its tokens"
        for ask in (interp.copying, interp.weights.eigenvalue_scores):
            with pytest.raises(
                ValueError, match=f"requires a model that predicts tokens; this one has {outputs}"
            ):
                ask(model)


def test_a_model_that_is_wrapped_is_frozen() -> None:
    network = Transformer(ModelConfig(n_layers=1, d_model=8, n_heads=2, n_ctx=4, d_vocab=5))
    assert all(parameter.requires_grad for parameter in network.parameters())
    model = HookedTransformer(network)
    assert not any(parameter.requires_grad for parameter in network.parameters())
    assert not model(torch.tensor([[1, 2]])).requires_grad


def test_empty_text_is_refused_by_every_call_with_the_way_to_bos_alone() -> None:
    model = interp.HookedTransformer.from_pretrained("demo-4l")
    calls: tuple[Callable[[str], object], ...] = (
        model, model.to_tokens, model.generate, lambda text: list(model.stream(text)),
        lambda text: interp.logit_lens(model, ["The", text]),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(ValueError, match=rf"prompt is empty: .* as ids, \[\[{model.text.bos_id}\]\]"):
            call("")


def test_generation_fills_the_context_exactly_and_begins_from_nothing() -> None:
    model = interp.HookedTransformer.from_pretrained("demo-4l")
    bos = model.text.bos_id
    alone = model.generate([[bos]], 4)
    assert alone.tokens[0, 1] == model(torch.tensor([[bos]]))[0, -1].argmax()
    assert "".join(model.stream([[bos]], 4)) == model.to_string(alone.tokens[0, 1:])
    tiny = HookedTransformer(Transformer(ModelConfig(n_layers=1, d_model=8, n_heads=2, n_ctx=4, d_vocab=5)))
    for cached in (True, False):
        assert tiny.generate(torch.tensor([[1, 2]]), 2, use_past_kv_cache=cached).tokens.shape == (1, 4)
    stops = (3, np.int64(3), torch.tensor([3]), np.array([3]))
    assert len({str(model.generate("The", 4, stop=stop).tokens.tolist()) for stop in stops}) == 1
    assert model.to_string(np.int64(5)) == model.to_string(5) == model.to_string(torch.tensor(5))
    assert model.to_single_token(5) == 5


@pytest.mark.parametrize("n_ctx", [5, 8])
def test_repeats_fit_a_context_below_nine(n_ctx: int) -> None:
    config = ModelConfig(n_layers=1, d_model=8, n_heads=2, n_ctx=n_ctx, d_vocab=5)
    repeats = interp.pages.report.fitting_repeats(config, 0)
    assert 1 + repeats.period * repeats.repeats <= n_ctx
    assert (repeats.period >= 2) and (repeats.repeats >= 2)
    scores = interp.heads(HookedTransformer(Transformer(config)), repeats=repeats).value
    assert bool(scores.sel(score="induction").notnull().all())


TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}<{{ message.role[0] }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
TALK = [{"role": "user", "content": "The cat sat"}, {"role": "assistant", "content": "on the mat"}]


def talking() -> interp.HookedTransformer:
    tokenizer = gpt2_tokenizer()
    tokenizer.add_special_tokens({"bos_token": tokenizer.eos_token})
    tokenizer.chat_template = TEMPLATE
    return interp.HookedTransformer(hooked().transformer, HuggingFaceTokenizer(tokenizer))


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_a_conversation_becomes_the_tokens_that_transformers_gives(add_generation_prompt: bool) -> None:
    model = talking()
    theirs = gpt2_tokenizer()
    theirs.add_special_tokens({"bos_token": theirs.eos_token})
    theirs.chat_template = TEMPLATE
    wanted = theirs.apply_chat_template(TALK, add_generation_prompt=add_generation_prompt, return_dict=True)
    found = model.chat(TALK, add_generation_prompt=add_generation_prompt)
    assert found.tolist() == [wanted["input_ids"]]
    assert found[0, 0] == theirs.bos_token_id and (found[0, 1:] != theirs.bos_token_id).all()
    assert model.to_batch(found).tokens.equal(found)  # nothing is prepended
    assert model.to_string(found).endswith("<a>") is add_generation_prompt
    assert model(found).shape[:2] == found.shape


def test_a_conversation_that_no_template_takes_is_refused_with_the_reason() -> None:
    without = gpt2_tokenizer()
    without.chat_template = None
    with pytest.raises(ValueError, match="messages require a tokenizer with a chat template"):
        interp.HookedTransformer(hooked().transformer, HuggingFaceTokenizer(without)).chat(TALK)
    with pytest.raises(ValueError, match="refuses these messages: no system"):
        talking().chat([{"role": "system", "content": "a"}, *TALK])
    for wrong in ([], [{"role": "user"}], [{"content": "a"}]):
        with pytest.raises(ValueError, match="messages must be at least one, each with a role and content"):
            talking().chat(wrong)
    demo = interp.HookedTransformer.from_pretrained("groundtruth-induction")
    with pytest.raises(ValueError, match="messages require a tokenizer with a chat template"):
        demo.chat(TALK)
