"""What takes minutes says so, with the number that its arguments give."""

from collections.abc import Callable

import pytest
import torch

import interp
from interp.passes.duration import ELEMENTWISE, RANKED
from interp.tokens import flow_routes
from tests.configs import CONFIGS, build, some_tokens
from tests.loops import over

ROWS, LENGTH = 2, 7
PAIRS = "of 2 rows of 7 tokens, with a vector for every pair of them and head"
CALLS: dict[str, tuple[str, Callable[[interp.HookedTransformer], object]]] = {
    "alti": (PAIRS, lambda model: interp.token_attribution(model, some_tokens(ROWS, LENGTH), method="alti")),
    "alti_logit": (
        PAIRS,
        lambda model: interp.token_attribution(model, some_tokens(ROWS, LENGTH), 1, method="alti_logit"),
    ),
    "flow_routes": (PAIRS, lambda model: flow_routes(model, some_tokens(ROWS, LENGTH))),
    "logit_lens": ("a lens: 42 states", lambda model: interp.logit_lens(model, some_tokens(ROWS, LENGTH))),
    "backward_lens": (
        "backward_lens: 168 states",
        lambda model: interp.backward_lens(model, some_tokens(ROWS, LENGTH), 1),
    ),
}
"""What the note of a call says, and the call. Of 14 tokens: three states of each, and six matrices in two layers."""


@over("name", CALLS)
def test_minutes_are_said_where_they_are_many(name: str) -> None:
    said, call = CALLS[name]
    model, config = interp.HookedTransformer(build("gpt2")), CONFIGS["gpt2"]
    if said is PAIRS:
        cells = config.n_layers * config.n_heads * ROWS * LENGTH**2
        products = ELEMENTWISE * cells * config.d_model
    else:
        products = RANKED * int(said.split()[-2]) * config.d_model * config.n_outputs
    notes: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("interp.passes.duration.note", notes.append)
        call(model)
        assert notes == []
        patch.setattr("interp.passes.duration.A_MINUTE", 1e3)
        call(model)
    (note,) = {note for note in notes if said in note}
    assert f"about {float(f'{minutes_of(products):.1g}'):g} min" in note


def minutes_of(products: int) -> float:
    """A thousand multiplications a minute on every thread."""
    return products / 1e3 / torch.get_num_threads()
