"""A model or a metric that gives NaN: every public function says so; none returns an empty or a made-up result."""

import copy
import inspect
import warnings
from pathlib import Path

import pytest
import torch

from interp import HookedTransformer
from interp.passes import Sampling
from tests.contract.calls import NOT_RUN, REFUSES, called, public_methods, public_names, valid
from tests.tiny import hooked

FUNCTIONS = {**dict(public_names()), **dict(public_methods())}
LOOK_AT_NONE = {
    "observe": "what a pass holds is to be seen, NaN too", "verify.contract": "its lines say nan and that they fail",
    "weights.HeadCircuits": "it computes nothing yet", "passes.Sweep": "it is a plan", "causal.batches": "it cuts data",
    "causal.feature_edits": "it makes edits, of the dictionary's weights",
    "causal.continuations": "it cuts data", "lenses.FittedJacobianLens": "it holds what was computed",
    "residual.ActivationCache": "it holds what was computed",
    "features.load": "the sites of a model are asked, and the gain of a norm where a dictionary reads before it",
    **dict.fromkeys(("circuits.write_mib", "circuits.read_mib"), "scores are given, of the model its shape is asked"),
}  # fmt: skip
"""Functions that take a model and need not mind."""
ELSEWHERE = ("compat.", "Hooked", "circuits.Circuit", "model.", "families.", "verify.", "lab.training.",
             "lab.depth.integrated")  # fmt: skip
"""What begins so takes no model that users hold; losses are NaN then, and `train` and `integrated` say so."""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def of_nan(model: HookedTransformer) -> HookedTransformer:
    """A copy whose every weight is NaN."""
    network = copy.deepcopy(model.transformer)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(torch.nan)
    return HookedTransformer(network, model.text.tokenizer)


def with_model() -> list[str]:
    names = [name for name in FUNCTIONS if name not in {*NOT_RUN, *REFUSES, *LOOK_AT_NONE}]
    asked = {name: inspect.signature(FUNCTIONS[name]).parameters for name in names}
    return [name for name in names if "model" in asked[name] and not name.startswith(ELSEWHERE)]


@pytest.mark.parametrize("name", with_model())
def test_weights_of_nan_are_a_named_error(name: str) -> None:
    given = valid(name, FUNCTIONS[name])
    given["model"] = of_nan(given["model"])  # type: ignore[arg-type]
    with (
        warnings.catch_warnings(action="ignore"),
        pytest.raises((ValueError, ArithmeticError), match=r"(?i)nan|finite|parts miss the"),
    ):
        called(name, FUNCTIONS[name], given)


@pytest.mark.parametrize(
    "name", [name for name in with_model() if "metric" in inspect.signature(FUNCTIONS[name]).parameters]
)
def test_a_metric_of_nan_is_a_named_error(name: str) -> None:
    given = valid(name, FUNCTIONS[name])
    given["metric"] = lambda logits: logits.flatten(1)[:, 0] * torch.nan
    with warnings.catch_warnings(action="ignore"), pytest.raises(ValueError, match=r"(?i)nan|finite"):
        called(name, FUNCTIONS[name], given)


@pytest.mark.parametrize("sampling", [None, Sampling(seed=0), Sampling(top_p=0.5, top_k=3, seed=0)])
@pytest.mark.parametrize("cached", [True, False])
def test_nothing_is_generated_from_logits_of_nan(sampling: Sampling | None, cached: bool) -> None:
    with pytest.raises(ValueError, match="a next token requires finite logits"):
        of_nan(hooked()).generate("The cat", 3, sampling=sampling, use_past_kv_cache=cached)
