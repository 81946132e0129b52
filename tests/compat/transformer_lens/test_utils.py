"""The small tools: TransformerLens 3.9's answers on the same input, and loops where those are plainer."""

import json
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from interp.compat.transformer_lens import utils
from interp.compat.transformer_lens.factored_matrix import FactoredMatrix

SAVED: dict[str, Any] = torch.load(Path(__file__).parents[1] / "data" / "tools_3_9.pt", weights_only=True)
TOOLS = SAVED["tools"]


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_shorthand_names_are_theirs() -> None:
    found = {case: utils.get_act_name(*json.loads(case)) for case in SAVED["names"]}
    assert found == SAVED["names"]


@pytest.mark.parametrize("options", TOOLS["samples"])
def test_sampling_with_the_same_seed_draws_the_same_tokens(options: str) -> None:
    torch.manual_seed(7)
    settings = json.loads(options)
    draws = [
        utils.sample_logits(TOOLS["logits"][:, 0], tokens=TOOLS["tokens"], **settings) for _ in range(20)
    ]
    assert torch.equal(torch.stack(draws), TOOLS["samples"][options])


def test_sampling_refuses_options_out_of_range() -> None:
    logits = TOOLS["logits"][:, 0]
    for options, message in (
        ({"top_k": 0}, "top_k"), ({"top_p": 0.0}, "top_p"), ({"freq_penalty": 1.0}, "input_tokens"),
    ):  # fmt: skip
        with pytest.raises(AssertionError, match=message):
            utils.sample_logits(logits, **options)


def test_loss_and_accuracy_are_theirs_with_and_without_a_mask() -> None:
    logits, tokens, mask = TOOLS["logits"], TOOLS["tokens"], TOOLS["mask"]
    cases = [(m, each) for m in (None, mask, mask.bool()) for each in (False, True)]
    for (m, each), expected in zip(cases, TOOLS["loss"], strict=True):
        same(utils.lm_cross_entropy_loss(logits, tokens, m, per_token=each), expected)
    for each, expected in zip((False, True), TOOLS["accuracy"], strict=True):
        assert torch.equal(utils.lm_accuracy(logits, tokens, per_token=each), expected)
    with pytest.raises(AssertionError, match="same shape"):
        utils.lm_cross_entropy_loss(logits, tokens, mask[:, 1:])


@pytest.mark.parametrize(("name", "shape"), TOOLS["init"])
def test_initialisation_with_the_same_seed_draws_the_same_weights(name: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(5)
    param = torch.empty(shape, dtype=torch.float64)
    found = getattr(utils, f"init_{name}_")(param, gain=1.3)
    assert found is param
    same(found, TOOLS["init"][name, shape])


def test_fans_are_those_of_weights_with_inputs_first() -> None:
    sizes = {(5,): (1, 5), (4, 6): (4, 6), (2, 4, 6): (4, 12)}
    assert {s: utils.calc_fan_in_and_fan_out(torch.empty(s)) for s in sizes} == sizes
    for shape in ((), (2, 2, 2, 2)):
        with pytest.raises(ValueError, match="can not be computed"):
            utils.calc_fan_in_and_fan_out(torch.empty(shape))


def test_composition_activations_and_positions_are_theirs() -> None:
    left, right = FactoredMatrix(*TOOLS["left"]), FactoredMatrix(*TOOLS["right"])
    torch.testing.assert_close(utils.composition_scores(left, right), TOOLS["composition"])
    for name, expected in TOOLS["activations"].items():
        same(getattr(utils, name)(TOOLS["logits"]), expected)
    assert torch.equal(utils.get_offset_position_ids(2, TOOLS["mask"]), TOOLS["positions"])
    with pytest.raises(AssertionError, match=r"left\.rdim==right\.ldim"):
        utils.composition_scores(left, FactoredMatrix(torch.ones(4, 2), torch.ones(2, 4)))


@pytest.mark.parametrize("verbose", [False, True])
def test_structure_is_reported_in_their_words(verbose: bool, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = TOOLS["matrices"]
    for second, expected in zip((one, other, one.T), TOOLS["structure"][verbose], strict=True):
        utils.check_structure(one, second, verbose=verbose)
        assert capsys.readouterr().out == expected


SLICES = [
    (2, 2), ((1, 4), slice(1, 4)), ((3,), slice(3)), ((0, 5, 2), slice(0, 5, 2)), ([1, 4, 0], [1, 4, 0]),
    (None, slice(None)), (slice(1, None), slice(1, None)), (torch.tensor([3, 1]), [3, 1]),
    (np.array([0, 2]), [0, 2]), (-1, -1),
    ([True, False, False, True, False], [0, 3]),
]  # fmt: skip


@pytest.mark.parametrize(("given", "index"), SLICES, ids=str)
def test_slices_select_what_the_index_does_along_any_axis(given: Any, index: Any) -> None:
    x = torch.arange(25 * 5).reshape(5, 5, 5)
    made = utils.Slice(given)
    assert torch.equal(made.apply(x), x[index])
    assert torch.equal(made.apply(x, dim=-1), x[..., index])
    assert torch.equal(made.apply(x, dim=1), x[:, index])
    picked = np.arange(5)[index]
    if made.mode != "int":
        assert made.indices(5).tolist() == picked.tolist()
        with pytest.raises(ValueError, match="max_ctx must be specified"):
            made.indices()
    else:
        assert made.indices().tolist() == [given]
    assert repr(made) == f"Slice: {made.slice} Mode: {made.mode} "


def test_unwrapping_keeps_the_axis_of_an_int_and_refuses_what_is_no_slice() -> None:
    x = torch.arange(6)
    assert utils.Slice.unwrap(2).apply(x).tolist() == [2]
    made = utils.Slice(2)
    assert utils.Slice.unwrap(made) is made
    with pytest.raises(Exception, match="nonsense"):
        utils.Slice("nonsense")


def test_arrays_come_from_whatever_holds_numbers() -> None:
    half = torch.tensor([1.5, 2.5], dtype=torch.bfloat16)
    assert utils.to_numpy(half).tolist() == [1.5, 2.5]
    assert utils.to_numpy(nn.Parameter(torch.ones(2))).tolist() == [1.0, 1.0]
    assert utils.to_numpy((1, 2)).tolist() == [1, 2]
    assert utils.to_numpy(True).tolist() is True


def test_shapes_prefixes_and_cumulative_sums() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    assert utils.get_corner(x, 2).tolist() == [[0, 1], [4, 5]]
    assert utils.remove_batch_dim(x[None]).shape == x.shape and utils.remove_batch_dim(x) is x
    assert torch.equal(utils.transpose(x), x.T)
    assert utils.is_square(x @ x.T) and not utils.is_square(x)
    assert utils.is_lower_triangular((x @ x.T).tril()) and not utils.is_lower_triangular(x)
    backwards = [[sum(row[i:]) for i in range(4)] for row in x.tolist()]
    assert utils.get_cumsum_along_dim(x, -1, reverse=True).tolist() == backwards
    assert torch.equal(utils.get_cumsum_along_dim(x, 0), x.cumsum(0))
    assert utils.repeat_along_head_dimension(x[None], 2).shape == (1, 3, 2, 4)
    assert utils.filter_dict_by_prefix({"a.b.w": 1, "a.bc.w": 2, "a.b.x.y": 3}, "a.b") == {"w": 1, "x.y": 3}


class Tokenizer:
    """Letters as tokens: a = 3, b = 4, ...; 0 is padding, 1 BOS, 2 EOS."""

    bos_token, eos_token, pad_token = "<", ">", "_"
    bos_token_id, eos_token_id, pad_token_id, padding_side = 1, 2, 0, "right"

    def __call__(self, texts: list[str], add_special_tokens: bool = True) -> dict[str, list[list[int]]]:
        assert not add_special_tokens
        return {"input_ids": [[ord(c) - ord("a") + 3 for c in text] for text in texts]}

    def add_special_tokens(self, tokens: dict[str, str]) -> None:
        self.pad_token, self.pad_token_id = tokens["pad_token"], 99


class Texts:
    """As much of a dataset as is asked for."""

    def __init__(self, columns: dict[str, list[str]]) -> None:
        self.columns, self.features, self.format = columns, list(columns), None

    def remove_columns(self, name: str) -> "Texts":
        return Texts({key: values for key, values in self.columns.items() if key != name})

    def map(
        self, function: Any, *, batched: bool, remove_columns: list[str], num_proc: int | None
    ) -> "Texts":
        assert batched and list(self.columns) == remove_columns
        return Texts(function(self.columns))

    def set_format(self, **how: Any) -> None:
        self.format = how


@pytest.mark.parametrize("pads", [True, False])
def test_texts_are_joined_by_eos_and_cut_into_rows_that_begin_with_bos(pads: bool) -> None:
    tokenizer = Tokenizer()
    if not pads:
        tokenizer.pad_token, tokenizer.pad_token_id = None, None
    texts = Texts({"text": ["abc", "de", "fghi"], "other": ["", "", ""]})
    found = utils.tokenize_and_concatenate(texts, tokenizer, max_length=4)
    stream = [3, 4, 5, 2, 6, 7, 2, 8, 9, 10, 11]
    assert found.columns["tokens"].tolist() == [[1, *stream[i : i + 3]] for i in (0, 3, 6)]
    assert found.format == {"type": "torch", "columns": ["tokens"]}
    short = utils.tokenize_and_concatenate(
        Texts({"text": ["ab"]}), Tokenizer() if pads else tokenizer, max_length=5, add_bos_token=False
    )
    padding = [0, 0, 0] if pads else [99, 99, 99]
    assert short.columns["tokens"].tolist() == [[3, 4, *padding]]


def test_no_padding_id_is_invented_where_the_tokenizer_has_none() -> None:
    tokenizer = Tokenizer()
    tokenizer.pad_token = tokenizer.pad_token_id = None
    found = utils.tokenize_and_concatenate(Texts({"text": ["ab"]}), tokenizer, max_length=5)
    assert found.columns["tokens"].tolist() == [[1, 3, 4, 2, 2]]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("shared", [False, True])
def test_masks_mark_the_padding_at_its_end_and_bos_is_taken_off(side: str, shared: bool) -> None:
    tokenizer = Tokenizer()
    tokenizer.padding_side = side
    tokenizer.bos_token_id = bos = 0 if shared else 1
    rows = [[bos, 5, 0, 6], [bos, 7]]
    padding = [0, 0]
    short = padding + rows[1] if side == "left" else rows[1] + padding
    tokens = torch.tensor([rows[0], short])
    expected = [[1, 1, 1, 1], [0, 0, 1, 1] if side == "left" else [1, 1, 0, 0]]
    assert utils.get_attention_mask(tokenizer, tokens, prepend_bos=True).tolist() == expected
    removed = utils.get_tokens_with_bos_removed(tokenizer, tokens)
    assert removed.tolist() == [[5, 0, 6], [0, 0, 7] if side == "left" else [7, 0, 0]]
    assert utils.get_attention_mask(None, tokens, prepend_bos=True).all()


def test_bos_text_is_prepended_where_there_is_one() -> None:
    prepend = utils.get_input_with_manually_prepended_bos
    assert (prepend("<", "a"), prepend("<", ["a", "b"]), prepend(None, "a")) == ("<a", ["<a", "<b"], "a")


def test_defaults_are_overridden_within_and_restored_after_an_error() -> None:
    model = SimpleNamespace(cfg=SimpleNamespace(default_prepend_bos=True), tokenizer=Tokenizer())
    overridden = utils.LocallyOverridenDefaults(model, prepend_bos=False, padding_side="left")
    with suppress(KeyError), overridden:
        assert (model.cfg.default_prepend_bos, model.tokenizer.padding_side) == (False, "left")
        raise KeyError
    assert (model.cfg.default_prepend_bos, model.tokenizer.padding_side) == (True, "right")
    with pytest.raises(AssertionError, match="not a valid parameter"):
        utils.LocallyOverridenDefaults(model, other=1)
    with (
        pytest.raises(AssertionError, match="must be one of"),
        utils.LocallyOverridenDefaults(model, padding_side="up"),
    ):
        pass


def test_a_swapped_parameter_comes_back_after_an_error() -> None:
    weight = nn.Parameter(torch.ones(2))
    with suppress(KeyError), utils.temporarily_swap_parameter(weight, torch.zeros(2)) as held:
        assert held is weight and not weight.any()
        raise KeyError
    assert weight.tolist() == [1, 1]


class Prompted:
    """A model whose logits are known: at every position the token's row of a matrix."""

    def __init__(self) -> None:
        self.table = torch.randn(30, 30, generator=torch.Generator().manual_seed(0))

    def to_tokens(self, text: str | list[str], prepend_bos: bool | None = None) -> Tensor:
        rows = [text] if isinstance(text, str) else text
        return torch.tensor(
            [[0] * (prepend_bos is not False) + [ord(c) % 29 + 1 for c in row] for row in rows]
        )

    def to_str_tokens(self, text: str, prepend_bos: bool | None = None) -> list[str]:
        return ["<"] * (prepend_bos is not False) + list(text)

    def to_string(self, token: Tensor) -> str:
        return str(int(token))

    def __call__(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]


def test_a_prompt_is_reported_with_the_rank_of_its_answer(capsys: pytest.CaptureFixture[str]) -> None:
    model = Prompted()
    utils.test_prompt("ab", "c", model, prepend_space_to_answer=False, top_k=2)
    lines = capsys.readouterr().out.splitlines()
    row = model.table[ord("b") % 29 + 1]
    answer = ord("c") % 29 + 1
    rank = int((row > row[answer]).sum())
    assert lines[:3] == [
        "Tokenized prompt: ['<', 'a', 'b']",
        "Tokenized answer: ['c']",
        "Performance on answer token:",
    ]
    prob = row.softmax(0)[answer]
    assert lines[3] == f"Rank: {rank: <8} Logit: {row[answer]:5.2f} Prob: {prob:6.2%} Token: |c|"
    assert lines[4].startswith(f"Top 0th token. Logit: {row.max():5.2f}") and lines[4].endswith(
        f"|{int(row.argmax())}|"
    )
    assert lines[6:] == [f"Ranks of the answer tokens: [('c', {rank})]"]
    utils.test_prompt("ab", ["c", "d"], model, prepend_space_to_answer=False, print_details=False)
    other = int((row > row[ord("d") % 29 + 1]).sum())
    assert capsys.readouterr().out == f"Ranks of the answer tokens: [[('c', {rank}), ('d', {other})]]\n"


def test_logits_become_a_table_likeliest_first() -> None:
    frame = utils.logits_to_df(torch.tensor([1.0, 3.0, 2.0]), top_k=2)
    assert list(frame.columns) == ["token_index", "logit", "log_prob", "probability"]
    assert frame.token_index.tolist() == [1, 2] and frame.logit.tolist() == [3.0, 2.0]


@pytest.mark.parametrize("name", ["get_dataset", "clear_huggingface_cache"])
def test_what_would_download_says_what_to_use(name: str) -> None:
    args = ("pile",) if name == "get_dataset" else ()
    with pytest.raises(NotImplementedError, match=r"use (datasets|`hf)"):
        getattr(utils, name)(*args)
