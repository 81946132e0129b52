"""106 configs of public repositories: each opens with transformers' numbers, and every key of each is told apart."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import transformers
from packaging import version

from interp.families.convert import to_model
from interp.families.inert import read_keys, usual_values
from interp.families.load import ConfigReading, any_from_folder, family_of, reading_of
from interp.families.spec import Settings, UnsupportedError
from interp.families.stored import LiveTensors
from interp.model import Transformer
from interp.model.encoder_decoder import EncoderDecoder
from interp.wrapped import Wrapped
from tests.families import hub_models
from tests.families.hub_models import Values, configs, kinds, lacking, paths, their_numbers, tokens_of
from tests.families.oracle import CASES, hf_config
from tests.families.pair import largest
from tests.families.test_config_fuzz import KINDS, base
from tests.loops import over
from tests.tolerances import TOLERANCES

DIFFERENT = {
    "olmo3 trained with rope_theta 10000": "transformers 5.24 gives layers with a window its own default base whatever "
    "rope_theta says beside the table, 5.9 scales them like the others; here they have the base of the config, as in "
    "the code that the model was trained with",
}
"""Configs whose numbers are not those of the installed transformers, and why."""
OLD = version.parse(transformers.__version__) < version.parse("5.24")
OTHERWISE = {
    "codegen": "reads n_ctx, which is wrapped then",
    "gemma": "takes hidden_act gelu at its word, which always meant the tanh approximation",
    "mamba2": "norms all groups of the gate together",
}
"""Types that transformers before 5.24 computes otherwise."""
BOUNDS = {"bloom": {"seq_length"}, "cohere": {"model_max_length"}}
"""Keys that bound our context, where transformers has no bound; they change no number."""
NEWER = {"num_nextn_predict_layers", "swiglu_alpha", "swiglu_limit"} if OLD else set()
"""Keys that transformers reads since 5.24 alone; before, what they say was fixed."""
NATIVE = {kind for kind in kinds() if kind not in ("qwen2_moe", "olmoe", "phimoe")}
"""Types with a file of ours; the others are wrapped."""


def opened(name: str, folder: Path) -> tuple[torch.Tensor, torch.Tensor, Transformer | object]:
    """transformers' numbers and ours for a config in a folder, and our model."""
    values = configs()[name]
    theirs = hub_models.reference(values)
    hub_models.write(theirs, values, folder)
    tokens = tokens_of(values)
    ours = any_from_folder(folder, dtype=torch.float32)
    with torch.no_grad():
        found = ours(tokens, tokens) if theirs.config.is_encoder_decoder else ours(tokens)
    return their_numbers(theirs, tokens), found, ours


def assert_opens(name: str, folder: Path) -> None:
    expected, found, ours = opened(name, folder)
    assert expected.std() > 0.1
    assert isinstance(ours, Wrapped) == (configs()[name]["model_type"] not in NATIVE)
    tolerance = TOLERANCES[torch.float32]
    assert largest(expected, found) <= tolerance.atol + tolerance.rtol * float(expected.abs().max())


@pytest.mark.slow
@over("kind", sorted(NATIVE))
def test_config_of_every_type_opens_with_transformers_logits(kind: str, tmp_path: Path) -> None:
    name = kinds()[kind]
    if name not in DIFFERENT and not (OLD and kind in OTHERWISE):
        assert_opens(name, tmp_path)


@pytest.mark.slow
@over("name", sorted(configs().keys() - DIFFERENT.keys()))
def test_every_config_opens_from_its_folder_with_transformers_logits(name: str, tmp_path: Path) -> None:
    assert_opens(name, tmp_path)


@over("name", sorted(DIFFERENT))
def test_an_exception_opens_and_its_difference_is_still_there(name: str, tmp_path: Path) -> None:
    expected, found, ours = opened(name, tmp_path)
    assert isinstance(ours, Transformer) and largest(expected, found) > 0.1


# --- with and without every key -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(NATIVE))
def test_key_is_inert_for_transformers_exactly_where_we_list_it(
    kind: str,
) -> None:
    """Each config of the type with and without each of its keys, at the same weights."""
    seen: set[str] = set()
    wrong = []
    for name, values in configs().items():
        if values["model_type"] == kind and name not in DIFFERENT:
            model = Both(values)
            for path in paths(values):
                if (said := f"{path} {_at(values, path)!r}") in seen and "rope" not in said:
                    continue
                seen.add(said)
                wrong += [f"{name}: {said}: {fault}" for fault in model.faults(path)]
    assert not wrong, "\n".join(wrong)


def _at(values: Mapping[str, object], path: tuple[str, ...]) -> object:
    first, *rest = path
    inner = values[first]
    return _at(inner, tuple(rest)) if rest and isinstance(inner, dict) else inner


class Both:
    """transformers' model of a config and ours, on the same weights, whose config then lacks a key."""

    def __init__(self, values: Values) -> None:
        self.values, self.tokens = values, tokens_of(values)
        model = hub_models.reference(values)
        self.state, self.whole = dict(model.state_dict()), their_numbers(model, self.tokens)
        self.told = reading_of(values)

    def faults(self, path: tuple[str, ...]) -> list[str]:
        """What is wrong with how a key was told."""
        less = lacking(self.values, path)
        theirs = self.theirs_change(less)
        try:
            other = reading_of(less)
        except ValueError:
            return []  # by name, and it can be wrapped
        ours = other.config != self.told.config
        listed = any(key == path[0] or key.split(".")[-1] == path[-1] != path[0] for key in self.told.inert)
        faults = {
            "listed as inert, and changes our config": listed and ours,
            "listed as inert, and changes transformers' model": listed and bool(theirs),
            "changes our model and not transformers'": ours and theirs is False and self.ours_change(other),
            "changes transformers' model and not ours": not ours
            and bool(theirs)
            and path != ("vision_config",),
        }
        return [fault for fault, found in faults.items() if found]

    def theirs_change(self, less: Values) -> bool | None:
        """Whether transformers' model changes; None where it cannot be built so."""
        try:
            with torch.device("meta"):  # a size that is missing may mean billions of parameters
                shapes = {name: each.shape for name, each in hub_models.new_model(less).state_dict().items()}
            if shapes != {name: each.shape for name, each in self.state.items()}:
                return True
            model = hub_models.new_model(less)
            model.load_state_dict(self.state)
            return largest(their_numbers(model, self.tokens), self.whole) > 1e-4
        except Exception:  # whatever its code raises
            return None

    def ours_change(self, other: ConfigReading) -> bool:
        """Whether our numbers change with the config."""
        device = (torch.device("cpu"),)
        model = to_model(other.family, other.config, LiveTensors(self.state), dtype=None, devices=device)
        found = model(self.tokens, self.tokens) if isinstance(model, EncoderDecoder) else model(self.tokens)
        return largest(found, self.whole) > 1e-3


def test_no_family_reads_a_key_that_transformers_ignores() -> None:
    """By name: what a config of ours or of the hub is asked for, transformers' code for that type asks for, too."""
    asked: dict[str, set[str]] = {}
    for values in (*configs().values(), *(hf_config(name).to_dict() for name in CASES)):
        kind = str(values["model_type"])
        if kind in NATIVE:
            asked.setdefault(kind, set()).update(_asked(values))
    extra = {
        kind: sorted(keys - read_keys(kind, keys) - BOUNDS.get(kind, set()) - NEWER)
        for kind, keys in asked.items()
    }
    assert {kind: keys for kind, keys in extra.items() if keys} == {}


def _asked(values: Mapping[str, object]) -> set[str]:
    """The keys that a family asks a config for."""
    asked: set[str] = set()

    class Listening(Settings):
        def get(self, key: str) -> object:
            asked.add(key)
            return super().get(key)

    family = family_of(values)
    with suppress(UnsupportedError):  # of an older transformers
        family.config(Listening(values, family.name))
    return asked - {"model_type", "architectures"}


@pytest.mark.slow
def test_a_missing_key_means_what_transformers_takes_for_it() -> None:
    """Its literal defaults, written into a config, change nothing."""
    other = []
    for kind in KINDS:
        plain = base(kind)
        for key, value in usual_values(kind).items():
            less = {each: said for each, said in plain.items() if each != key}
            if key not in ("model_type", "attribute_map") and _config(less) != _config({**less, key: value}):
                other.append((kind, key, value))
    assert set(other) == {("deepseek_v3", "num_key_value_heads", 128)}, "which transformers cannot run either"


def _config(values: Values) -> object:
    try:
        return reading_of(values).config
    except ValueError:
        return "refused"


# --- inert keys ---------------------------------------------------------------------------------------------------


def test_a_live_model_with_an_attribute_of_ones_own_opens() -> None:
    theirs = hub_models.reference(configs()[kinds()["llama"]])
    theirs.config.my_note = "a note"
    values = theirs.config.to_dict()
    told = reading_of(values)
    assert "my_note" in told.inert
    tokens = tokens_of(values)
    ours = to_model(
        told.family, told.config, LiveTensors(theirs.state_dict()), dtype=None, devices=(torch.device("cpu"),)
    )
    assert largest(ours(tokens), their_numbers(theirs, tokens)) <= 1e-4
