"""What goes with the tokens of a batch into a pass, and rows of several continuations where a loss is asked for."""

import pytest
import torch

import interp
from interp import HookedTransformer
from interp.data.batch import Batch, PassInputs
from interp.tasks import Examples
from tests.configs import build, some_tokens

SHARED = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2]).expand(3, 9)
"""Three columns of a prompt, then a continuation of two and one of four."""
SEVERAL = Batch(some_tokens(), branches=SHARED)


def test_the_inputs_of_a_batch_are_its_fields_of_those_names() -> None:
    batch = Batch(
        some_tokens(), keep=torch.ones(3, 9, dtype=torch.bool), types=some_tokens() % 2, branches=SHARED
    )
    assert list(batch.inputs) == list(PassInputs.__annotations__)
    assert all(batch.inputs[name] is getattr(batch, name) for name in batch.inputs)  # type: ignore[literal-required]


ASKED = {
    "the model": lambda model: model(SEVERAL, return_type="loss"),
    "examples": lambda model: Examples(SEVERAL),
    "in_context": lambda model: interp.dynamics.in_context(model, SEVERAL, early=2, late=5),
    "lens": lambda model: interp.logit_lens(model, SEVERAL),
    "one_token_losses": lambda model: interp.dynamics.one_token_losses(model, SEVERAL),
    "a metric": lambda model: interp.ablate(
        model, SEVERAL, "head", change=interp.edits.Zero(), metric=interp.metrics.next_token_loss()
    ),
    "term_importance": lambda model: interp.residual.term_importance(model, SEVERAL),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_loss_of_rows_of_several_continuations_is_refused(name: str) -> None:
    """The first token of a later continuation follows the prompt, not the column before it."""
    with pytest.raises(ValueError, match="rows of one continuation"):
        ASKED[name](HookedTransformer(build("gpt2")))
