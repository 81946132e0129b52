"""Records that hold tensors say what they are in a line or two, and travel to other processes."""

import dataclasses
import importlib
import inspect
import pickle
import pkgutil
import re
from collections.abc import Callable

import pytest
import torch

import interp
import interp.families
import interp.lab.training
import interp.model
import interp.residual
from interp import Batch, Edit
from interp.causal import RankAgreement, Subspace
from interp.circuits import CircuitProtocol, GraphNode, MibScores
from interp.editing import Continuation
from interp.edits import Add, Project, Set, Swap, Zero
from interp.lab import AdaptiveSoftmax, BigBird, Strided
from interp.lab.rasp import PROGRAMS, compile
from interp.lab.training import Training
from interp.model import KVCache, MoE

OF_THE_PAGES = "interp.pages"
MADE_HERE = {
    "ActivationStore", "Ask", "AttributionGraph", "Beams", "ByRow", "Circuits", "Compiled", "Contract", "ContractLine",
    "Demo", "Edge", "Exactness", "Fact", "FactPrompt", "GradientFactors", "HookPoint", "IndirectObject",
    "LayerWeights", "Memory", "Reading", "Results", "SingularTriples", "SingularValues", "Site", "Staged",
    "Pruned", "StoredTokenizer", "Trace", "Trained", "Traits", "TwoPasses", "Vocabulary", "WithoutData",
}  # fmt: skip
"""Records that this package makes and users only read."""


def exported_records() -> dict[str, type]:
    """Every record that a package of `interp` exports, by its name."""
    folders = [found.name for found in pkgutil.iter_modules(interp.__path__, "interp.") if found.ispkg]
    packages = [
        importlib.import_module(name) for name in (*folders, "interp.lab.training", "interp.lab.rasp")
    ]
    exported = [getattr(package, name) for package in packages for name in getattr(package, "__all__", ())]
    records = [each for each in exported if inspect.isclass(each) and dataclasses.is_dataclass(each)]
    return {
        each.__name__: each
        for each in records
        if not each.__module__.startswith(OF_THE_PAGES) and each.__name__ not in MADE_HERE
    }


def fields_given(record: type) -> list[str]:
    return [field.name for field in dataclasses.fields(record) if field.init]  # type: ignore[arg-type]


@pytest.mark.kinds
@pytest.mark.parametrize("name", [name for name, kind in exported_records().items() if fields_given(kind)])
def test_a_record_checks_the_kinds_of_its_fields_first(name: str) -> None:
    record = exported_records()[name]
    odd = {field: object() for field in fields_given(record)}
    refusal = ""
    try:
        record(**odd)
    except (ValueError, KeyError) as error:
        refusal = str(error)
    assert re.search(r"must be|is required|no part", refusal), (
        f"{name} lets objects of any kind in, or refuses them without a name: its __post_init__ is to call "
        f"interp.core.boundary.check_fields first; what only the package makes is in MADE_HERE ({refusal})"
    )


WIDE = torch.arange(4096.0)
RECORDS = {
    "a batch": Batch(torch.arange(4096).reshape(8, 512)).with_answers(torch.arange(8), None),
    "directions": Subspace("blocks.0.hook_resid_post", WIDE[None], {"pos": -1}, {"method": "das"}),
    "scores": MibScores(torch.ones(64, 64), torch.ones(64, 64, dtype=torch.bool)),
    "an addition": Edit("L3.resid", Add(WIDE, 2.0)),
    "values": Edit("L3.resid", Set(WIDE), at={"pos": 3}, rows=(0, 1)),
    "a projection": Edit("L3.resid", Project(WIDE)),
    "an exchange": Edit("L3.resid", Swap(WIDE, WIDE)),
    "nothing else": Edit("L3H5", Zero()),
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_of_tensors_is_short_and_comes_back(name: str) -> None:
    record = RECORDS[name]
    text = repr(record)
    assert text.startswith(type(record).__name__) and "\n" not in text and len(text) < 250
    assert repr(pickle.loads(pickle.dumps(record))) == text


def test_what_is_said_is_what_is_there() -> None:
    assert repr(RECORDS["a batch"]) == "Batch(tokens=int64[8, 512], answer=int64[8])"
    assert repr(RECORDS["an addition"].change) == "Add(values=float32[4096], scale=2.0)"
    assert repr(Edit((3, 5), Zero())) == "Edit(where='L3H5', change=Zero())"
    assert repr(Add(0.5)) == "Add(values=0.5)"
    text = repr(compile(PROGRAMS["shift"]()).planted())
    assert "\n" not in text and len(text) < 500 and text.startswith("Planted(name='shift'")


def test_an_edit_that_travelled_does_the_same() -> None:
    edit = pickle.loads(pickle.dumps(RECORDS["values"]))
    assert (
        edit.site == "blocks.3.hook_resid_pre"
        and edit.cells == RECORDS["values"].cells
        and edit.rows == (0, 1)
    )
    assert edit.change.values.equal(WIDE)
    assert pickle.loads(pickle.dumps(RECORDS["nothing else"])).cells == {"h": 5}


NAN, INF = float("nan"), float("inf")
NEAR = torch.device("cpu")
CONFIG = interp.model.ModelConfig(n_layers=1, d_model=8, n_heads=2, n_ctx=4, d_vocab=5)
SENSELESS: dict[str, tuple[str, Callable[[], object]]] = {
    "a share above 1": ("overlap", lambda: RankAgreement(NAN, 5.0, 1.0, 1, 1)),
    "a sign below 0": ("same_sign", lambda: RankAgreement(NAN, 1.0, -3.0, 1, 1)),
    "fewer than one compared": ("top", lambda: RankAgreement(NAN, 1.0, 1.0, -1, -1)),
    "no pairs": ("n", lambda: CircuitProtocol("logits", "", "exact", "greedy", "zero", n=-1)),
    "an influence that is NaN": ("influence", lambda: GraphNode("a", "b", "c", 1, "d", influence=NAN)),
    "no tokens": ("length", lambda: Continuation(length=-1)),
    "an endless window": ("n_window", lambda: BigBird(4, n_window=INF)),  # type: ignore[arg-type]
    "no stride": ("stride", lambda: Strided(NAN)),  # type: ignore[arg-type]
    "no width": ("div_value", lambda: AdaptiveSoftmax((4,), div_value=NAN)),
    "a step that is True": ("steps", lambda: Training(steps=True)),
    "a device that is NaN": ("device", lambda: Training(device=NAN)),  # type: ignore[arg-type]
    "a device that is none": ("device", lambda: Training(device="xyz")),
    "a log without end": ("log_every", lambda: Training(log_every=INF)),  # type: ignore[arg-type]
    "an endless rate": ("learning_rate", lambda: Training(learning_rate=INF)),
    "dropout without its record": ("dropout", lambda: Training(dropout=NAN)),  # type: ignore[arg-type]
    "fewer than no rows": ("rows", lambda: KVCache(CONFIG, -1, 4, device=NEAR, dtype=torch.float32)),
    "a cache of ids": ("dtype", lambda: KVCache(CONFIG, 1, 4, device=NEAR, dtype=torch.int64)),
    "a number for a cache": (
        "values",
        lambda: interp.residual.ActivationCache(1.5, interp.model.build(CONFIG)),
    ),  # type: ignore[arg-type]
    "several positions in one": ("pos", lambda: interp.Read("blocks.0.hook_resid_pre", pos=([1],))),  # type: ignore[arg-type]
    "a factor that is NaN": ("linear_offset", lambda: MoE(2, 1, 4, linear_offset=NAN)),
    "a scale that is NaN": ("logit_scale", lambda: dataclasses.replace(CONFIG, logit_scale=NAN)),
}


@pytest.mark.kinds
@pytest.mark.parametrize("name", SENSELESS)
def test_a_number_that_means_nothing_is_refused_by_its_field(name: str) -> None:
    field, make = SENSELESS[name]
    with pytest.raises(ValueError, match=rf"\b{field}\b.*, got"):
        make()


CLASSES = [
    interp.model.EncoderDecoder,
    interp.model.KVCache,
    interp.model.Transformer,
    interp.model.Weights,
    interp.families.SentencePieceTokenizer,
    interp.lab.training.PackedTexts,
]


@pytest.mark.kinds
@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_a_class_checks_the_kinds_of_its_arguments_first(kind: type) -> None:
    odd = {name: object() for name in inspect.signature(kind).parameters}
    with pytest.raises(ValueError, match=rf"{kind.__name__}: {next(iter(odd))} must be"):
        kind(**odd)
