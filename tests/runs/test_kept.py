"""What is made of weights alone: once for the same weights, anew after any change of a number."""

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

import interp
from interp.model import Transformer
from interp.model.edits import Zero
from interp.passes.observe import as_model
from interp.runs import kept
from interp.tasks import RepeatedTokens
from interp.weights import composition, copying
from tests.configs import build
from tests.tiny import hooked


def fresh() -> Transformer:
    """A network of its own, with the same numbers each time."""
    network = copy.deepcopy(build("gpt2"))
    network.tie()
    return network


def made_for(models: list[interp.HookedTransformer], what: object = "it") -> int:
    """How often it is made when these models are asked one after the other."""
    kept.forget()
    made: list[object] = []
    for model in models:
        kept.cached_for_model(as_model(model), what, lambda: made.append(None))
    return len(made)


def test_equal_weights_are_asked_once_whatever_object_holds_them() -> None:
    one = interp.HookedTransformer(fresh())
    assert made_for([one, one, interp.HookedTransformer(fresh())]) == 1


def test_one_other_number_config_or_tokenizer_is_another_model() -> None:
    one, other = (interp.HookedTransformer(fresh()) for _ in range(2))
    other.transformer.block(1).mlp.out.bias.data[0] += 1e-9  # a change that no version counter of torch sees
    assert made_for([one, other]) == 2
    assert made_for([one, interp.HookedTransformer(build("llama-gqa"))]) == 2
    assert made_for([one, interp.HookedTransformer(one.transformer, hooked("gpt2").text.tokenizer)]) == 2


def test_changed_signs_and_exchanged_numbers_are_seen_on_an_accelerator() -> None:
    values = torch.randn(16, generator=torch.Generator().manual_seed(0))
    seen = {int(kept._position_hash(values.view(torch.int64)))}
    pairs = list(itertools.combinations(range(16), 2))
    for i, j in pairs:
        signs, order = torch.ones(16), list(range(16))
        signs[[i, j]], order[i], order[j] = -1, j, i
        seen |= {int(kept._position_hash(each.view(torch.int64))) for each in (values * signs, values[order])}
    assert len(seen) == 1 + 2 * len(pairs)


def test_what_cannot_be_compared_is_made_each_time() -> None:
    one = interp.HookedTransformer(fresh())
    assert made_for([one, one], what=open(__file__)) == 2  # noqa: SIM115


def test_a_result_is_the_askers_own() -> None:
    model = interp.HookedTransformer(fresh())
    kept.forget()
    first = composition(model, "K")
    before = first.value.values.copy()
    first.value.values[:] = 7.0
    assert (composition(model, "K").value.values == before)[~torch.tensor(before).isnan().numpy()].all()


def test_training_between_two_questions_changes_the_answer() -> None:
    model = interp.HookedTransformer(fresh())
    first = copying(model, ranks=False)
    with torch.no_grad():
        model.transformer.block(0).attn.out.weight.mul_(-1)
    second = copying(model, ranks=False)
    kept.forget()
    assert second.equals(copying(model, ranks=False)) and not second.equals(first)


def test_table_of_heads_is_made_once_for_the_same_weights_and_rows() -> None:
    model, data = interp.HookedTransformer(fresh()), RepeatedTokens(period=3, repeats=3, rows=4)
    kept.forget()
    first = interp.heads(model, repeats=data)
    value = first.value.values.copy()
    first.value.values[:] = 7.0  # the asker's own
    zero = [interp.Edit("L0H0", Zero())]
    with unasked():
        assert np.array_equal(interp.heads(model, repeats=data).value.values, value, equal_nan=True)
    for again in (
        lambda: interp.heads(model, repeats=RepeatedTokens(period=3, repeats=3, rows=4, seed=1)),
        lambda: interp.heads(model.edited(zero), repeats=data),
        lambda: interp.heads(model, [[1, 2, 3, 1, 2, 3]]),
    ):
        with pytest.raises(AssertionError, match="asked"), unasked():
            again()
    kept.forget()
    assert np.array_equal(interp.heads(model, repeats=data).value.values, value, equal_nan=True)


@contextmanager
def unasked() -> Iterator[None]:
    """No pass of any model inside."""

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("the model was asked")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Transformer, "forward", refused)
        yield


def test_weights_that_nobody_changes_are_looked_at_once() -> None:
    network, looks = fresh(), list[int]()
    for _ in range(2):
        kept.looked_at(network, "it", lambda: looks.append(0))
    with kept.unchanged(network), kept.unchanged(network):
        for other in (network, network, fresh()):
            kept.looked_at(other, "it", lambda: looks.append(1))
    assert looks == [0, 0, 1, 1]
