"""The forward pass as a whole: against the slow one, in pieces, at chosen positions; its loss; what it refuses."""

import copy
import re
from dataclasses import replace

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor
from torch.func import functional_call

from interp import Edit
from interp.model import ModelConfig, Read, Rotary, Tap, Transformer, mean_next_token_loss, next_token_loss
from tests.configs import CAUSAL, CONFIGS, D_VOCAB, N_CTX, build, empty_cache, perturbed, some_tokens
from tests.loops import over
from tests.model.slow import slow_forward
from tests.tolerances import assert_close

EVERY = over("name", CONFIGS)


def oracle_dtype(name: str) -> torch.dtype:
    """Angles are float32 in both, but rounded at different places."""
    return torch.float32 if isinstance(CONFIGS[name].position, Rotary) else torch.float64


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_the_slow_forward(name: str) -> None:
    tokens = some_tokens()
    expected = torch.stack([slow_forward(build(name), row)[0] for row in tokens])
    assert_close(build(name)(tokens), expected, oracle_dtype(name))


@EVERY
def test_every_site_of_the_slow_forward_has_its_value(name: str) -> None:
    tokens = some_tokens(rows=1)
    _, expected = slow_forward(build(name), tokens[0])
    tap = Tap([Read(site) for site in expected])
    build(name)(tokens, tap)
    for read, value in tap.values.items():
        assert_close(value[0], expected[read.site], oracle_dtype(name))


def test_the_configs_give_models_that_do_something() -> None:
    for name in CONFIGS:
        tap = Tap([Read("blocks.1.attn.hook_pattern")])
        logits = build(name)(some_tokens(), tap)
        sharpest = tap.values[tap.reads[0]][:, :, 4:].amax(-1)
        assert 0.5 < logits.std() < 50, f"{name}: logits of spread {logits.std()}"
        assert sharpest.mean() > 0.25, f"{name}: attention is nearly uniform"


@EVERY
def test_starting_and_stopping_in_the_middle_equals_one_pass(name: str) -> None:
    model, tokens = build(name), some_tokens()
    whole = model(tokens)
    for layer in range(1, model.config.n_layers + 1):
        assert_close(model(model(tokens, stop=layer), start=layer), whole)
    resid = model(tokens, stop=1)
    assert_close(model(model(resid, start=1, stop=2), start=2), whole)
    assert torch.equal(model(resid, start=1, stop=1), resid)


@EVERY
def test_stopping_gives_the_residual_stream_entering_that_block(name: str) -> None:
    model, tokens = build(name), some_tokens()
    left = "hook_normalized_resid_post" if CONFIGS[name].norms_sum else "hook_resid_post"
    entering = [Read("blocks.0.hook_resid_pre"), Read("blocks.1.hook_resid_pre"), Read(f"blocks.1.{left}")]
    tap = Tap([*entering, Read(f"blocks.0.{left}")])
    model(tokens, tap)
    for stop, read in enumerate(entering):
        assert_close(model(tokens, stop=stop), tap.values[read])
    assert_close(tap.values[tap.reads[3]], tap.values[entering[1]])


@EVERY
def test_logits_at_chosen_columns_are_those_columns(name: str) -> None:
    model, tokens = build(name), some_tokens()
    columns = torch.tensor([[0, 8], [5, 5], [7, 1]])
    expected = torch.stack([row[at] for row, at in zip(model(tokens), columns, strict=True)])
    assert_close(model(tokens, logits_at=columns), expected)


@pytest.mark.parametrize("column", [9, 100, -10])
def test_logits_at_a_column_that_is_not_there_are_refused(column: int) -> None:
    with pytest.raises((IndexError, ValueError), match="out of bounds"):
        build("gpt2")(some_tokens(), logits_at=torch.tensor([[0], [0], [column]]))


@EVERY
def test_read_out_of_the_last_residual_gives_the_logits(name: str) -> None:
    model, tokens = build(name), some_tokens()
    assert_close(model.read_out(model(tokens, stop=2)), model(tokens))


@over("name", CONFIGS)
@over("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_read_a_float32_stream_as_float32_copies(
    name: str, dtype: torch.dtype
) -> None:
    """All logits, some of them, and the gradient; the narrow stream has the narrow logits of the pass."""
    half = build(name, dtype)
    wide, narrow = copy.deepcopy(half).float(), half(some_tokens(), stop=2)
    assert torch.equal(half.read_out(narrow), half(some_tokens()))
    stream, columns = narrow.float().requires_grad_(), torch.tensor([3, 30, 0]).expand(3, 9, -1)
    for asked in (None, columns):
        found, expected = (model.read_out(stream, columns=asked) for model in (half, wide))
        assert found.dtype == torch.float32
        assert_close(found, expected)
        assert_close(*(torch.autograd.grad(x.square().sum(), stream)[0] for x in (found, expected)))


@over("name", CAUSAL)
def test_a_causal_model_does_not_see_what_comes_later(name: str) -> None:
    tokens = some_tokens(n=10)
    changed = torch.cat((tokens[:, :6], some_tokens(n=4, seed=1)), 1)
    assert not torch.equal(tokens, changed)
    assert_close(build(name)(tokens)[:, :6], build(name)(changed)[:, :6])


def test_a_bidirectional_model_does() -> None:
    tokens = some_tokens()
    changed = tokens.clone()
    changed[:, -1] = (tokens[:, -1] + 1) % D_VOCAB
    difference = build("bidirectional")(tokens)[:, 0] - build("bidirectional")(changed)[:, 0]
    assert difference.abs().amin(0).max() > 1e-3


@EVERY
def test_rows_of_a_batch_do_not_touch_each_other(name: str) -> None:
    tokens = some_tokens()
    alone = torch.cat([build(name)(row[None]) for row in tokens])
    assert_close(build(name)(tokens), alone)


@EVERY
def test_float32_agrees_with_float64(name: str) -> None:
    tokens = some_tokens()
    assert_close(build(name, torch.float32)(tokens).double(), build(name)(tokens), torch.float32)


def test_grouped_heads_equal_full_heads_with_repeated_keys_and_values() -> None:
    grouped = build("llama-gqa")
    config = replace(CONFIGS["llama-gqa"], n_kv_heads=4)
    full = Transformer(config).double()
    state = grouped.state_dict()
    for layer in range(config.n_layers):
        name = f"blocks.{layer}.attn.qkv.weight"
        q, k, v = state[name].split([40, 20, 20])
        state[name] = torch.cat(
            (q, *(w.unflatten(0, (2, 10)).repeat_interleave(2, 0).flatten(0, 1) for w in (k, v)))
        )
    full.load_state_dict(state)
    assert_close(full(some_tokens()), grouped(some_tokens()))


def test_a_tied_model_has_one_matrix_and_an_untied_one_two() -> None:
    assert build("tied").unembed.weight is build("tied").embed.weight
    assert build("gpt2").unembed.weight is not build("gpt2").embed.weight


def test_a_fresh_model_starts_near_the_uniform_prediction() -> None:
    torch.manual_seed(0)
    model = Transformer(CONFIGS["gpt2"])
    loss = mean_next_token_loss(model(some_tokens()), some_tokens())
    assert abs(loss.item() - torch.tensor(float(D_VOCAB)).log().item()) < 0.1


def test_an_interrupted_pass_leaves_nothing_behind() -> None:
    model, tokens = build("gpt2"), some_tokens()
    before, attributes = model(tokens), {k: set(vars(m)) for k, m in model.named_modules()}

    def fail(value: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        model(tokens, Tap([Read("blocks.0.hook_resid_post", via=fail)]))
    assert torch.equal(model(tokens), before)
    assert {k: set(vars(m)) for k, m in model.named_modules()} == attributes


# --- the loss -----------------------------------------------------------------------------------------------------


def slow_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    rows, n = tokens.shape
    loss = torch.zeros(rows, n - 1, dtype=logits.dtype)
    for b in range(rows):
        for i in range(n - 1):
            p = torch.exp(logits[b, i] - logits[b, i].max())
            loss[b, i] = -torch.log(p[tokens[b, i + 1]] / p.sum())
    return loss


def test_loss_equals_a_slow_loop() -> None:
    tokens = some_tokens()
    logits = build("gpt2")(tokens)
    assert_close(next_token_loss(logits, tokens), slow_loss(logits, tokens))
    assert_close(mean_next_token_loss(logits, tokens), slow_loss(logits, tokens).mean())


def test_loss_counts_no_pair_with_padding_in_it() -> None:
    tokens = some_tokens(rows=2, n=5)
    keep = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]], dtype=torch.bool)
    logits = build("gpt2")(tokens, keep=keep)
    slow = slow_loss(logits, tokens)
    expected = torch.zeros_like(slow)
    expected[0, 2:], expected[1, :2] = slow[0, 2:], slow[1, :2]
    assert_close(next_token_loss(logits, tokens, keep), expected)
    assert_close(mean_next_token_loss(logits, tokens, keep), expected.sum() / 4)


def test_loss_of_half_precision_logits_is_computed_in_float32() -> None:
    tokens = some_tokens()
    logits = build("gpt2", torch.bfloat16)(tokens)
    loss = next_token_loss(logits, tokens)
    assert loss.dtype == torch.float32
    assert_close(loss, next_token_loss(logits.float(), tokens))


def test_loss_of_ids_of_every_kind_is_that_of_int64() -> None:
    tokens = some_tokens()
    logits = build("gpt2")(tokens)
    for kind in (torch.int32, torch.int16, torch.int8):
        assert torch.equal(next_token_loss(logits, tokens.to(kind)), next_token_loss(logits, tokens))


def test_loss_of_a_token_without_a_logit_is_refused() -> None:
    for token in (-1, -100, 10):
        with pytest.raises(ValueError, match=f"a logit for each token, got 10 and the token {token}"):
            mean_next_token_loss(torch.zeros(1, 3, 10), torch.tensor([[1, 2, token]]))


# --- what it refuses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        (torch.tensor([[0, D_VOCAB]]), {}, f"must be in [0, {D_VOCAB - 1}], got {D_VOCAB}"),
        (torch.tensor([[-1, 3]]), {}, "got -1"),
        (torch.zeros(1, 0, dtype=torch.long), {}, "at least one token"),
        (torch.zeros(0, 3, dtype=torch.long), {}, "at least one token"),
        (torch.zeros(1, N_CTX + 1, dtype=torch.long), {}, f"holds {N_CTX} tokens, got {N_CTX + 1}"),
        (
            torch.zeros(3, dtype=torch.long),
            {},
            "token ids [batch, pos] are required, got torch.int64 of shape [3]",
        ),
        (torch.zeros(1, 3), {}, "token ids [batch, pos] are required, got torch.float32"),
        (some_tokens(), {"start": 1}, "residual stream [batch, pos, 24] is required, got shape [3, 9]"),
        (some_tokens(), {"stop": 3}, "0 <= start <= stop <= 2"),
        (some_tokens(), {"start": 2, "stop": 1}, "got 2 and 1"),
    ],
    ids=lambda value: None if isinstance(value, Tensor) else str(value),
)
def test_tokens_that_do_not_fit_are_refused_with_what_would(
    tokens: Tensor, options: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        build("gpt2")(tokens, **options)


def test_a_keep_mask_of_another_shape_is_refused() -> None:
    with pytest.raises((ValueError, TypeCheckError), match=r"keep"):
        build("gpt2")(some_tokens(), keep=torch.ones(3, 8, dtype=torch.bool))


def test_a_full_cache_is_refused_before_anything_is_computed() -> None:
    model = build("gpt2")
    cache = empty_cache(model, rows=3, n_max=10)
    model(some_tokens(), cache=cache)
    with pytest.raises(ValueError, match="holds 9 of 10 tokens; 2 more do not fit"):
        model(some_tokens(n=2), cache=cache)
    assert cache.length == 9


def test_state_dict_round_trip_gives_the_same_logits() -> None:
    model = build("llama-gqa")
    again = perturbed(model.config, seed=99)
    assert not torch.equal(again(some_tokens()), model(some_tokens()))
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(some_tokens()), model(some_tokens()))


def test_the_smallest_model_runs() -> None:
    config = ModelConfig(n_layers=1, d_model=2, n_heads=1, n_ctx=1, d_vocab=1)
    assert Transformer(config)(torch.zeros(1, 1, dtype=torch.long)).shape == (1, 1, 1)


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "window", "bidirectional", "bloom", "t5", "parallel"])
def test_chosen_columns_of_padded_rows_and_of_the_final_stream(name: str) -> None:
    model, tokens = build(name), some_tokens()
    keep = torch.ones_like(tokens, dtype=torch.bool)
    keep[1, :4], keep[2, 6:] = False, False
    columns = torch.tensor([[3], [8], [5]])
    rows = torch.arange(3)[:, None]
    assert_close(model(tokens, keep=keep, logits_at=columns), model(tokens, keep=keep)[rows, columns])
    whole = model(tokens, keep=keep, stop=2)
    assert_close(model(tokens, keep=keep, stop=2, logits_at=columns), whole[rows, columns])
    with pytest.raises(ValueError, match="through every block"):
        model(tokens, stop=1, logits_at=columns)


def test_some_logits_are_those_of_all() -> None:
    for name in CONFIGS:
        model, columns = build(name), torch.tensor([[3, 30], [0, 7], [5, 5]])
        if model.unembed is None:
            continue
        stream = model(some_tokens(), stop=2)[:, -1]
        assert_close(model.read_out(stream, columns=columns), model.read_out(stream).gather(1, columns))


@EVERY
def test_other_parameters_are_those_of_one_pass_alone(name: str) -> None:
    """The oracle is PyTorch's, which writes into the modules for the time of the pass."""
    model, tokens = build(name), some_tokens()
    plain = model(tokens)
    values = {path: (1.1 * value).detach().requires_grad_() for path, value in model.named_parameters()}
    expected = functional_call(model, values, (tokens,))
    meanwhile: list[bool] = []

    def look(value: Tensor) -> Tensor:
        meanwhile.append(torch.equal(model(tokens), plain))
        return value

    edited = model.edited(Edit("blocks.0.hook_resid_pre", look)).with_parameters(values)
    found = edited(tokens)
    assert torch.equal(found, expected) and meanwhile == [True]
    path = next(iter(values))
    assert torch.autograd.grad(found.sum(), values[path])[0].shape == values[path].shape
    some = dict(model.with_parameters({path: values[path]}).named_parameters())
    assert [n for n, p in model.named_parameters() if some[n] is not p] == [path]


@pytest.mark.kinds
def test_a_pass_of_what_is_no_tensor_of_ids_says_so() -> None:
    network = build("gpt2")
    for tokens in ([[1, 2]], torch.tensor([[True, False]]), torch.tensor([[1, 2]], dtype=torch.uint8)):
        with pytest.raises(ValueError, match=r"token ids .* are required, got"):
            network(tokens)


def test_tokens_of_another_device_are_brought_to_the_models() -> None:
    model, tokens = copy.deepcopy(build("gpt2")).to("meta"), some_tokens(2, 5)
    keep = torch.ones(2, 5, dtype=torch.bool)
    last = torch.full((2, 1), 4)
    assert model(tokens, keep=keep, logits_at=last).shape == (2, 1, model.config.d_vocab)
    assert model(tokens, stop=1).device.type == "meta"
