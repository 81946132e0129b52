"""Calls that a type checker accepts, and calls that it must refuse: every `ignore` here has to be needed."""

import interp
from interp.runs.functions import of_data


def accepted(model: interp.HookedTransformer) -> None:
    """Leading names by place or by name, fields as the record has them."""
    interp.patch(model, "a", "b", "z", metric=interp.logit_difference(3, 4))
    interp.patch(model, clean="a", corrupt="b", site="z", direction="noise")
    interp.logit_lens(model, data=["a", "b"], top=3)
    interp.weights.composition(model, "K", folded=False)
    of_data(interp.lenses.LogitLens)(model, "a", pos=-1)


def refused(model: interp.HookedTransformer) -> None:
    """What is missing, misspelled, of another kind, or a setting of a run."""
    interp.patch(model, "a")  # type: ignore[call-arg]
    interp.patch(model, clean="a", corrupt="b", direction="sideways")  # type: ignore[arg-type]
    interp.patch(model, "a", "b", "z", None)  # type: ignore[call-arg]
    interp.attribute(model, "a", answers=" b")  # type: ignore[call-arg]
    interp.logit_lens(model, "a", batch_size=2)  # type: ignore[call-arg]
    interp.weights.composition(model, kind=3)  # type: ignore[arg-type]
