"""Beam search against lists of hypotheses, exhaustive search and greedy decoding."""

from itertools import product

import pytest
import torch
from torch import Tensor

from interp import Edit
from interp.data.batch import Batch
from interp.edits import Add
from interp.lab.training import beam_search
from interp.lab.training.presets import encoder_decoder
from interp.model import EncoderDecoder, ModelConfig, Transformer
from interp.passes.generate import decode, generate
from interp.tasks import SequencePairs
from interp.tasks.examples import Place
from tests.configs import build, perturbed, some_tokens
from tests.loops import over
from tests.tolerances import assert_close

MODEL = build("gpt2")
SMALL = perturbed(ModelConfig(1, 8, 2, 12, 4))
PROMPTS = torch.tensor([[1, 2, 3], [3, 0, 1]])


def log_prob(model: Transformer, prompt: list[int], new: list[int]) -> float:
    found = model(torch.tensor([[*prompt, *new]]))[0].log_softmax(-1)
    return float(sum(found[len(prompt) + i - 1, token] for i, token in enumerate(new)))


def by_lists(
    model: Transformer, prompt: list[int], n: int, width: int, end: int | None, penalty: float
) -> list[tuple[float, float, list[int]]]:
    """Score, log-probability and tokens of each hypothesis, the best first; whole sequences are scored again."""
    beam: list[list[int]] = [[]]
    for _ in range(n):
        longer = []
        for each in beam:
            if end is not None and end in each:
                longer.append(each)
            else:
                longer += [[*each, token] for token in range(model.config.d_vocab)]
        beam = sorted(longer, key=lambda new: -log_prob(model, prompt, new))[:width]
    found = [(log_prob(model, prompt, new), new) for new in beam]
    return sorted(((p / ((5 + len(new)) / 6) ** penalty, p, new) for p, new in found), reverse=True)


@over("end", [None, 2])
@over("penalty", [0.0, 0.6, 3.0])
@over("width", [1, 3, 20])
def test_the_beam_is_that_of_lists(width: int, penalty: float, end: int | None) -> None:
    found = beam_search(SMALL, Batch(PROMPTS), 3, width=width, end=end, length_penalty=penalty)
    for row in range(2):
        wanted = by_lists(SMALL, PROMPTS[row].tolist(), 3, width, end, penalty)
        for place, (score, probability, new) in enumerate(wanted):
            length = int(found.lengths[row, place])
            assert found.tokens[row, place, :length].tolist() == new
            assert float(found.scores[row, place]) == pytest.approx(score)
            assert float(found.log_probs[row, place]) == pytest.approx(probability)
        assert (found.scores[row, len(wanted) :] == -torch.inf).all()


def test_a_beam_of_one_goes_on_with_the_types_of_the_prompt() -> None:
    model = perturbed(ModelConfig(1, 8, 2, 12, 30, n_token_types=2))
    typed = Batch(PROMPTS, types=torch.tensor([[0, 1, 1], [1, 1, 1]]))
    found, untyped = (beam_search(model, batch, 5, width=1).tokens[:, 0] for batch in (typed, Batch(PROMPTS)))
    assert torch.equal(found, generate(model, typed, 5).tokens[:, 3:])
    assert not torch.equal(found, untyped)


def test_a_beam_of_all_sequences_finds_the_most_probable() -> None:
    found = beam_search(SMALL, Batch(PROMPTS), 3, width=64, length_penalty=0.0)
    for row in range(2):
        every = [
            (log_prob(SMALL, PROMPTS[row].tolist(), list(new)), list(new))
            for new in product(range(4), repeat=3)
        ]
        assert found.tokens[row, 0].tolist() == max(every)[1]
        assert len({tuple(new.tolist()) for new in found.tokens[row]}) == 64
        assert_close(found.log_probs[row].exp().sum(), torch.tensor(1.0, dtype=torch.float64))


@pytest.mark.parametrize("end", [None, 5])
def test_a_beam_of_one_is_greedy_decoding(end: int | None) -> None:
    prompts = Batch(some_tokens(3, 5))
    greedy = generate(MODEL, prompts, 6, stop_tokens=[] if end is None else [end])
    found = beam_search(MODEL, prompts, 6, width=1, end=end)
    for row in range(3):
        length = int(found.lengths[row, 0])
        assert found.tokens[row, 0, :length].tolist() == greedy.tokens[row, 5 : 5 + length].tolist()


def test_a_wider_beam_is_never_worse_where_everything_is_kept() -> None:
    """The best of all sequences is at least as probable as the best of any beam."""
    scores = [
        beam_search(SMALL, Batch(PROMPTS), 3, width=w, length_penalty=0.0).scores[:, 0] for w in (1, 4, 64)
    ]
    assert (scores[2] > scores[0] - 1e-9).all() and (scores[2] > scores[1] - 1e-9).all()


def test_padding_changes_nothing() -> None:
    rows: list[Tensor] = [some_tokens(1, 5)[0], some_tokens(1, 3)[0]]
    both = beam_search(MODEL, Batch.of([row.tolist() for row in rows]), 3, width=3)
    for place, row in enumerate(rows):
        alone = beam_search(MODEL, Batch(row[None]), 3, width=3)
        assert torch.equal(both.tokens[place], alone.tokens[0])
        assert_close(both.scores[place], alone.scores[0])


def test_an_encoder_decoder_is_searched_given_its_source() -> None:
    torch.manual_seed(0)
    model = EncoderDecoder(encoder_decoder(9, 7, d_model=16, n_heads=2, n_layers=1)).double().eval()
    source = SequencePairs(9, 2, 5).batch(Place(0, 0), 3).source
    assert source is not None
    greedy = decode(model, source, 4, stop_tokens=[1])
    found = beam_search(model, source, 4, width=1, end=1)
    for row in range(3):
        length = int(found.lengths[row, 0])
        assert found.tokens[row, 0, :length].tolist() == greedy.tokens[row, 1 : 1 + length].tolist()
    wide = beam_search(model, source, 4, width=5, end=1)
    assert (wide.scores[:, :-1] >= wide.scores[:, 1:]).all()


def test_what_cannot_be_searched_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit the context of 12"):
        beam_search(SMALL, Batch(PROMPTS), 10)
    with pytest.raises(ValueError, match=r"stop_tokens must be in \[0, 3\], got 9"):
        beam_search(SMALL, Batch(PROMPTS), 2, end=9)


def test_edits_that_would_move_with_the_text_are_refused_and_others_are_those_of_greedy_decoding() -> None:
    push = 4 * torch.randn(24, generator=torch.Generator().manual_seed(0)).double()
    batch = Batch.of([[1, 2, 3, 4], [5, 6, 7, 8]])
    for at in ({"pos": -1}, {"pos": (0, -2)}):
        with pytest.raises(ValueError, match="counts positions from its end: count them from the beginning"):
            beam_search(MODEL.edited([Edit("L0.resid", Add(push), at)]), batch, 3)
    with pytest.raises(ValueError, match="in which no token is new"):
        beam_search(MODEL.edited([Edit("L0.resid", Add(push), {"pos": "new"})]), batch, 3)
    edited = MODEL.edited([Edit("L0.resid", Add(push), {"pos": 3})])
    assert torch.equal(
        beam_search(edited, batch, 4, width=1).tokens[:, 0], generate(edited, batch, 4).tokens[:, 4:]
    )
