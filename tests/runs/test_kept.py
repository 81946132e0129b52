"""What is made of weights alone: once for the same weights, anew after any change of a number."""

import copy

import torch

import interp
from interp.model import Transformer
from interp.passes.observe import as_model
from interp.runs import kept
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
        kept.once(as_model(model), what, lambda: made.append(None))
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
