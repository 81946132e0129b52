"""The successor score: planted successors, equality with the dense circuit, sequences that a tokenizer knows."""

import pytest
import torch

import interp
from interp import HookedTransformer
from interp.data.text import Text
from interp.model import ModelConfig, NoNorm, NoPosition, Transformer
from interp.tasks import RepeatedTokens
from interp.weights import HeadCircuits
from interp.weights.successor import hits, known_sequences, successor_hits
from interp.zoo.groundtruth import SYMBOLS, Alphabet
from tests.configs import build

IDS = torch.tensor([7, 3, 11, 2, 19, 5])
DATA = RepeatedTokens(period=5, repeats=3, rows=4)


class Digits(Alphabet):
    """The alphabet without the digits 3 and 8: they are two tokens."""

    def encode(self, text: str) -> list[int]:
        return super().encode("".join(f"a{c}" if c in "38" else c for c in text))


class Lone(Alphabet):
    """Every symbol is two tokens."""

    def encode(self, text: str) -> list[int]:
        return super().encode("".join(f"a{c}" for c in text))


def planted() -> Transformer:
    """Tokens are unit vectors on both ends; head 0 maps each letter and digit to the next symbol, head 1 to itself."""
    size = len(SYMBOLS)
    config = ModelConfig(
        1, size, 3, 24, size, d_head=size, norm=NoNorm(), final_norm=False, position=NoPosition(), qkv_bias=False,
        out_bias=False,
    )  # fmt: skip
    model = Transformer(config).requires_grad_(False)
    one = torch.eye(size)
    assert model.unembed is not None
    model.embed.weight.copy_(one)
    model.unembed.weight.copy_(one)
    for head, out in enumerate((one.roll(1, 1), one, 0 * one)):
        model.block(0).attn.part("v")[0][head].copy_(one)
        model.block(0).attn.out.weight[:, head * size : (head + 1) * size].copy_(out.T)
    return model


def test_a_planted_successor_scores_one_a_copier_and_a_silent_head_zero() -> None:
    table = interp.heads(HookedTransformer(planted(), Alphabet()), repeats=DATA)
    successor = table.sel(score="successor")
    assert successor.value[0].values.tolist() == [1.0, 0.0, 0.0]
    assert table.label[0].values.tolist()[:2] == ["successor", "copying"]
    assert successor.null[0].values.tolist() == pytest.approx([(9 / 9 + 25 / 25) / (9 + 25)] * 3)
    assert table.attrs["successor_items"] == "10 numbers, 26 letters"


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "parallel", "gemma2", "rms-plain"])
def test_hits_are_those_of_the_dense_circuit(name: str) -> None:
    circuits = HeadCircuits(build(name), folded=True, embedding="effective")
    found = successor_hits(circuits, IDS)
    for layer in range(2):
        for head in range(4):
            full = circuits.full_ov((layer, head)).AB
            rows = [[float(full[i, j]) for j in IDS] for i in IDS]
            expected = [rows[i].index(max(rows[i])) == i + 1 for i in range(5)]
            assert found[:, layer, head].tolist() == expected


def test_a_hit_is_the_single_largest_entry_right_of_the_diagonal() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [0.0, 1.0, 1.0], [0.0, 5.0, 9.0]])
    assert hits(logits).tolist() == [True, False]


def test_the_longest_run_of_single_tokens_of_each_sequence_is_used() -> None:
    text = Text(Alphabet(), 24, len(SYMBOLS))
    found = known_sequences(text)
    assert found.keys() == {"numbers", "letters"}
    assert text.pieces(found["numbers"]) == list("0123456789")
    gaps = known_sequences(Text(Digits(), 24, len(SYMBOLS)))
    assert gaps.keys() == {"letters"}  # 4 to 7 are four in a row, one too few


def test_the_table_tells_why_the_score_is_absent() -> None:
    table = interp.heads(HookedTransformer(build("gpt2")), repeats=DATA)
    assert "successor" not in table.score and "no tokenizer" in table.attrs["no_successor"]
    with pytest.raises(
        ValueError, match="a sequence with 5 items in a row that are single tokens is required"
    ):
        known_sequences(Text(Lone(), 24, len(SYMBOLS)))
