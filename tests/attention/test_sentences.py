"""Scores on indirect-object sentences: equal to slow loops, balanced by construction, absent where names are split."""

from dataclasses import replace

import pytest
import torch
import xarray as xr
from torch import Tensor

import interp
from interp import Batch, HookedTransformer
from interp.attention.sentences import _distinct_rows, mention_masks, sentence_scores
from interp.core.stats import Moments
from interp.data.text import Text
from interp.data.words import single_token
from interp.model.tap import Read
from interp.passes import Staged, observe
from interp.passes.observe import as_model
from interp.passes.question import Stages
from interp.residual.decomposition import IncompleteSumError
from interp.runs.over_data import WorkPlace
from interp.runs.rounds import Rounds
from interp.tasks import SHORT_SENTENCES, IndirectObjects
from interp.weights.random_heads import with_random_heads
from interp.zoo.groundtruth import Alphabet
from tests.configs import CONFIGS, build, perturbed
from tests.tolerances import assert_close

DATA = replace(SHORT_SENTENCES, rows=12, names=("Mary", "John", "Tom", "Anna", "Nobody"))
DRAWS = 3
Scores = dict[str, tuple[Moments, Tensor]]
SPOKEN = [form.format(first="Mary", second="John", giver="Tom") for form in DATA.templates]


class Words:
    """One token per word; it knows all words of the sentences but the name Nobody."""

    bos_id: int | None = 0
    eos_id: int | None = 0
    pad_id: int = 0
    words = ("<bos>", "<unk>", "Anna", *sorted({word for text in SPOKEN for word in text.split()}))

    def encode(self, text: str) -> list[int]:
        return [self.words.index(word) if word in self.words else 1 for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(self.words[i] for i in ids)

    def piece(self, token: int) -> str:
        return f" {self.words[token]}"


def speaker(name: str = "gpt2") -> HookedTransformer:
    config = replace(CONFIGS[name], d_vocab=len(Words.words))
    torch.manual_seed(1)
    return HookedTransformer(perturbed(config), Words())


def scores_of(model: HookedTransformer, sentences: tuple[Batch, Batch], rows: int, **how: bool) -> Scores:
    """The scores that the stages end with."""
    found = {}

    def stages(has_data: bool) -> Stages[xr.Dataset]:
        found.update((yield from sentence_scores(model, sentences, rows, **how)))
        return xr.Dataset()

    Rounds(as_model(model), None, WorkPlace()).answered([Staged("scores", stages, data="none")])
    return found


def test_every_draw_has_both_orders_roles_and_the_same_with_a_third_name() -> None:
    said, unsaid = DATA.balanced(speaker().text)
    assert len(said) == len(unsaid) == DATA.rows == 4 * DRAWS
    assert said.answer is not None and said.wrong is not None and unsaid.wrong is not None
    for draw in range(DRAWS):
        rows = range(4 * draw, 4 * draw + 4)
        masks = mention_masks(said)
        seen = set()
        for i in rows:
            receiver, giver = int(said.answer[i]), int(said.wrong[i])
            tokens = said.tokens[i].tolist()
            assert tokens.count(receiver) == 1 and tokens.count(giver) == 2
            seen.add((receiver, tokens.index(receiver) < tokens.index(giver)))
            differ = (said.tokens[i] != unsaid.tokens[i]).nonzero().flatten().tolist()
            assert differ == masks[i, 2].nonzero().flatten().tolist()
            third = int(unsaid.tokens[i, differ[0]])
            assert third == unsaid.wrong[i] and third not in (receiver, giver)
        assert len(seen) == 4 and len({receiver for receiver, _ in seen}) == 2
    assert Words.words.index("<unk>") not in said.tokens


def test_names_are_marked_where_they_stand_and_padding_never_counts() -> None:
    tokens = torch.tensor([[5, 5, 7, 6, 2, 5, 9], [7, 3, 5, 7, 7, 6, 1]])
    keep = torch.tensor([[False, True, True, True, True, True, True], [True] * 7])
    batch = Batch(tokens, keep).with_answers(torch.tensor([6, 6]), torch.tensor([5, 7]))
    expected = [[[3], [1], [5]], [[5], [0], [4]]]
    found = [[mask.nonzero().flatten().tolist() for mask in row] for row in mention_masks(batch)]
    assert found == expected


def test_sentences_that_are_the_same_are_asked_once() -> None:
    """As are half of those with a third name: whoever gives, they name him alike."""
    tokens = torch.tensor([[0, 5, 6, 7], [0, 5, 6, 7], [4, 5, 6, 7], [0, 5, 6, 7], [0, 5, 6, 8]])
    keep, wrong = tokens > 0, torch.tensor([5, 5, 5, 6, 5])
    padding = torch.cat((torch.tensor([[9], [0]]), tokens[:2, 1:]), 1)  # what stands there is not looked at
    batch = Batch(torch.cat((tokens, padding)), torch.cat((keep, keep[:2])))
    batch = batch.with_answers(torch.arange(10, 17), torch.cat((wrong, wrong[:2])))
    found, again = _distinct_rows(batch)
    assert again.tolist() == [0, 0, 1, 2, 3, 0, 0]
    assert found.wrong is not None and torch.equal(found.wrong[again], torch.cat((wrong, wrong[:2])))
    assert torch.equal(found.tokens[again][:5], tokens)
    _, unsaid = DATA.balanced(speaker().text)
    assert 2 * len(_distinct_rows(unsaid)[0]) == len(unsaid)


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "window", "olmo2"])
def test_scores_are_those_of_a_loop_over_sentences(name: str) -> None:
    model = speaker(name)
    said, unsaid = DATA.balanced(model.text)
    found = scores_of(model, (said, unsaid), 5)
    rows = [slow_row(model, said, i) for i in range(len(said))]
    others = [slow_row(model, unsaid, i) for i in range(len(said))]
    draws = {key: torch.stack([r[key] for r in rows]).unflatten(0, (-1, 4)).mean(1) for key in rows[0]}
    for score in ("to_receiver", "to_giver", "name_mover", "s_inhibition"):
        moments, _ = found[score]
        torch.testing.assert_close(moments.mean, draws[score].mean(0), rtol=1e-9, atol=1e-12)
        error = draws[score].std(0) / DRAWS**0.5
        torch.testing.assert_close(moments.standard_error(), error, rtol=1e-7, atol=1e-12)
    nulls = {
        "to_receiver": draws["to_first"].mean(0),
        "to_giver": torch.stack([row["to_giver"] for row in others]).mean(0),
        "name_mover": torch.zeros(2, 4).double(),
    }
    for score, null in nulls.items():
        torch.testing.assert_close(found[score][1], null, rtol=1e-9, atol=1e-12)


def slow_row(model: HookedTransformer, batch: Batch, row: int) -> dict[str, Tensor]:
    """The scores `[layer, head]` of one sentence, alone and without padding; direct effects by forward norms."""
    assert batch.answer is not None and batch.wrong is not None
    kept = slice(None) if batch.keep is None else batch.keep[row]
    tokens = batch.tokens[row][kept]
    receiver, giver = int(batch.answer[row]), int(batch.wrong[row])
    _, cache = model.run_with_cache(tokens[None])
    network = model.transformer
    at = [tokens.tolist().index(receiver), tokens.tolist().index(giver)]
    last_giver = max(i for i, token in enumerate(tokens.tolist()) if token == giver)
    patterns = torch.stack([cache["pattern", layer][0, :, -1] for layer in range(2)])
    scale = network.ln_final.scale(cache["resid_post", 1][0, -1])
    direct = []
    for layer in range(2):
        parts = cache["z", layer][0, -1][:, None] @ network.block(layer).attn.out.weight.T.unflatten(
            0, (4, -1)
        )
        norm = network.block(layer).post_norm("attn_out")
        parts = parts[:, 0]
        if norm is not None:
            parts = norm.frozen(parts, norm.scale(parts.sum(0)))
        logits = network.ln_final.frozen(parts, scale) @ model.W_U * network.config.logit_scale
        direct.append(logits[:, receiver] - logits[:, giver])
    effect = torch.stack(direct)
    to_giver = patterns[..., last_giver]
    return {
        "to_receiver": patterns[..., at[0]], "to_first": patterns[..., at[1]], "to_giver": to_giver,
        "name_mover": effect, "s_inhibition": to_giver * (1 - effect.abs() / effect.abs().max()),
    }  # fmt: skip


def test_a_head_that_does_not_look_at_names_scores_its_null() -> None:
    model = speaker()
    for layer in range(2):
        weight, bias = model.transformer.block(layer).attn.part("q")
        assert bias is not None
        weight.zero_()
        bias.zero_()
    found = scores_of(model, DATA.balanced(model.text), 16)
    for score in ("to_receiver", "to_giver"):
        moments, null = found[score]
        torch.testing.assert_close(moments.mean, null, rtol=1e-12, atol=0)


def test_a_head_that_prefers_a_name_whatever_its_role_moves_no_name() -> None:
    """All values are one constant vector, so each head writes the same at every sentence; roles cancel it."""
    model = speaker("no-norm")
    for layer in range(2):
        model.transformer.block(layer).attn.part("v")[0].zero_()
    moments, null = scores_of(model, DATA.balanced(model.text), 16)["name_mover"]
    assert float(moments.mean.abs().max()) < 1e-12 and not null.any()
    assert float(moments.standard_error().max()) < 1e-12


def test_a_model_without_logits_has_attention_scores_only() -> None:
    network = perturbed(replace(CONFIGS["gpt2"], d_vocab=len(Words.words), unembed=False))
    model = HookedTransformer(network, Words())
    found = scores_of(model, DATA.balanced(model.text), 16)
    assert found.keys() == {"to_receiver", "to_giver"}


def test_a_word_is_one_token_only_if_the_tokenizer_says_it() -> None:
    text = speaker().text
    assert single_token(text, "Mary") == Words.words.index("Mary")
    assert single_token(text, "Nobody") is None and single_token(text, "Mary John") is None
    letters = Text(Alphabet(), 24, 64)
    assert single_token(letters, "7") == letters.single("7")
    assert single_token(letters, "Mary") is None and single_token(letters, "é") is None


def test_sentences_that_cannot_be_said_are_refused_with_the_reason() -> None:
    with pytest.raises(
        ValueError, match="three names that are single tokens of this model are required, got 0 of 5"
    ):
        DATA.balanced(Text(Alphabet(), 24, 64))
    with pytest.raises(ValueError, match="no tokenizer"):
        DATA.balanced(HookedTransformer(build("gpt2")).text)
    with pytest.raises(ValueError, match="context holds 8"):
        DATA.balanced(Text(Words(), 8, len(Words.words)))
    for rows, held_out in ((6, False), (8, True)):
        with pytest.raises(ValueError, match="rows in fours, over all pairs of names, are required"):
            IndirectObjects(rows, held_out=held_out).balanced(speaker().text)
    batch = Batch(torch.tensor([[1, 2, 3]]))
    with pytest.raises(ValueError, match="require batches of one text per row with both names"):
        mention_masks(batch)
    with pytest.raises(ValueError, match="require rows that contain both names"):
        mention_masks(batch.with_answers(torch.tensor([1]), torch.tensor([4])))


def test_the_table_tells_why_sentences_are_absent() -> None:
    data = interp.tasks.RepeatedTokens(period=5, repeats=3, rows=2)
    table = interp.heads(HookedTransformer(build("gpt2")), repeats=data)
    assert "to_receiver" not in table.score and "no tokenizer" in table.attrs["no_sentences"]
    assert interp.heads(speaker(), repeats=data, sentences=None).attrs["no_sentences"] == "not asked for"
    spoken = interp.heads(speaker(), repeats=data, sentences=DATA)
    assert spoken.attrs["sentences"] == 12 and "no_sentences" not in spoken.attrs
    assert spoken.sel(score="name_mover").unit == "logits"


def test_direct_effects_of_random_heads_are_what_they_would_have_written() -> None:
    """Oracle: z W_O of each random head, through the final norm at the scale of the real pass, along the difference."""
    model = speaker()
    random = HookedTransformer(with_random_heads(model.transformer, 0), model.text.tokenizer)
    said = DATA.balanced(model.text)[0]
    assert said.answer is not None and said.wrong is not None
    found = scores_of(random, DATA.balanced(model.text), 4, summed=False)["name_mover"][0].mean
    reads = [Read(site) for site in ("ln_final.hook_scale", *(f"blocks.{i}.attn.hook_z" for i in range(2)))]
    trace = observe(random.transformer, said, reads).trace
    scale, gamma = trace[reads[0]][:, -1], model.transformer.ln_final.gamma
    assert gamma is not None
    along = (model.W_U[:, said.answer] - model.W_U[:, said.wrong]).T * gamma
    along = (along - along.mean(1, keepdim=True)) / scale
    for layer in range(2):
        z, out = trace[reads[1 + layer]][:, -1], random.weights.layer(layer).W_O
        expected = torch.einsum("bhe, hed, bd -> bh", z, out, along).mean(0)
        assert_close(found[layer], expected)
    with pytest.raises(IncompleteSumError):
        scores_of(random, DATA.balanced(model.text), 4)
    for name, (moments, _) in scores_of(model, DATA.balanced(model.text), 4, summed=False).items():
        assert torch.equal(moments.mean, scores_of(model, DATA.balanced(model.text), 4)[name][0].mean)
