"""Configs with other values than their authors': what transformers makes of them, we make too or refuse by name.

The oracle is transformers' own small model of the very same config, on the same perturbed weights.
"""

import copy
import functools
import itertools
import json
import random
import zlib
from collections.abc import Iterator, Mapping

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from torch import Tensor
from transformers import CONFIG_MAPPING

from interp.families.convert import to_model
from interp.families.inert import read_keys, usual_values
from interp.families.load import reading_of
from interp.families.spec import NOT_ARITHMETIC
from interp.families.stored import LiveTensors
from interp.model.encoder_decoder import EncoderDecoder
from tests.families import hub_models
from tests.families.case import D_VOCAB
from tests.families.hub_models import Values, configs, their_config, their_numbers
from tests.families.oracle import CASES
from tests.families.pair import largest
from tests.loops import every, over
from tests.tolerances import TOLERANCES

TOKENS = torch.randint(3, D_VOCAB, (2, 20), generator=torch.Generator().manual_seed(1))
NOT_TRIED = {
    "vocab_size", "dtype", "torch_dtype", "transformers_version", "id2label", "label2id", "num_labels", "return_dict",
    "output_attentions", "output_hidden_states", "problem_type", "use_cache", "is_encoder_decoder", "is_decoder",
    "text_config", "vision_config", "architectures", "model_type", "bos_token_id", "eos_token_id", "pad_token_id",
    "chunk_size_feed_forward", "layer_types", "per_layer_config",
}  # fmt: skip
"""Keys about tokens, labels, what a call returns and half precision; and lists with an entry for each layer."""
LONGER = ("theta", "base", "max", "length", "original", "window", "chunk", "floor", "position", "freq", "ctx")
"""Words of keys that may hold a large number without making the model large."""
DIFFERENT = {("olmo3", "rope_theta"), ("olmo3", "rope_scaling")}
"""Keys whose numbers are not transformers' for a reason: see `test_hub_configs.DIFFERENT`."""
ACCEPTED = {
    (
        "llama4_text",
        "partial_rotary_factor",
    ): "transformers rotates all pairs of a head with its few frequencies",
}
"""Values that transformers accepts by accident."""
BOUNDS = {"seq_length", "model_max_length"}
"""Keys that bound our context in some types."""


def base(kind: str) -> Values:
    """A small config of a type, as a file has it."""
    case = next(case for case in CASES.values() if case.config_class.model_type == kind)
    pad = 1 if "obert" in kind or kind == "camembert" else 0
    options = {key: value for key, value in case.options.items() if key != "experts_implementation"}
    said = {
        "vocab_size": D_VOCAB,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": pad,
        "model_type": kind,
    }
    return copy.deepcopy({**said, "architectures": [case.model_class.__name__], **options})


KINDS = tuple(dict.fromkeys(case.config_class.model_type for case in CASES.values()))


@functools.cache
def values_of_keys() -> Mapping[str, list[object]]:
    """Every key that any config here or on the hub has, with the values that it has there."""
    found: dict[str, dict[str, object]] = {"my_note": {"": 1}}
    said = [base(kind) for kind in KINDS] + [dict(case.options) for case in CASES.values()]
    for values in (*said, *configs().values(), *(case.config().to_dict() for case in CASES.values())):
        for key, value in values.items():
            if key not in NOT_TRIED and _affordable(key, value):
                found.setdefault(key, {})[json.dumps(value)] = value
    return {key: list(values.values()) for key, values in found.items() if values}


def _affordable(key: str, value: object) -> bool:
    if isinstance(value, int) and not isinstance(value, bool):
        return value <= 64 or (value <= 4100 and any(word in key for word in LONGER)) or "theta" in key
    return not isinstance(value, list) or len(value) <= 12


def theirs(values: Values, seed: int) -> tuple[Mapping[str, Tensor], Tensor] | None:
    """The weights and numbers of transformers' model of a config; None where it cannot build or run one."""
    try:
        model = hub_models.reference(values, seed)
        found = their_numbers(model, TOKENS)
    except Exception:  # whatever its code raises
        return None
    return (model.state_dict(), found) if bool(found.isfinite().all()) else None


def compared(values: Values, keys: Mapping[str, object]) -> str:
    """What came of a config: "same" numbers, "refused" by a sentence with one of the keys, or "no oracle".

    Errors: AssertionError for other numbers on two draws of the weights (on one, a router may choose between two
    experts whose scores are equal but for rounding), and for a sentence without the keys.
    """
    off, most = 0.0, 0.0
    for seed in (0, 1):
        oracle = theirs(values, seed)
        if oracle is None:
            return "no oracle"
        try:
            found = _ours(values, oracle[0])
        except ValueError as refusal:
            said = str(refusal)
            break
        off, most = largest(oracle[1], found), float(oracle[1].abs().max())
        if off <= TOLERANCES[torch.float32].atol + TOLERANCES[torch.float32].rtol * most:
            return "same"
    else:
        raise AssertionError(f"{keys}: off by {off:.2g} of {most:.2g}")
    assert any(key in said or _named(key) in said for key in keys), f"{keys}: {said}"
    return "refused"


def _ours(values: Values, state: Mapping[str, Tensor]) -> Tensor:
    told, device = reading_of(values), (torch.device("cpu"),)
    model = to_model(told.family, told.config, LiveTensors(state), dtype=None, devices=device)
    with torch.no_grad():
        return model(TOKENS, TOKENS) if isinstance(model, EncoderDecoder) else model(TOKENS)


def _named(key: str) -> str:
    """What our sentences call some sizes, and what others follow from."""
    words = {"max_position_embeddings": "the context", "n_positions": "the context"}
    rotated = ("rope_parameters", "rope_scaling", "num_attention_heads", "hidden_size", "head_dim")
    return words.get(key, "rotated dimensions" if key in rotated else key)


def few(kind: str, key: str, most: int) -> Iterator[object]:
    """Some values of a key, drawn by the names of type and key."""
    values = list(values_of_keys()[key])
    random.Random(zlib.crc32(f"{kind} {key}".encode())).shuffle(values)
    yield from [value for value in values if value != base(kind).get(key, "none")][:most]


@over("kind", ["gpt2", "gemma2", "mistral", "mpt", "deepseek_v2", "t5"])
def test_a_value_of_a_kind_that_transformers_refuses_is_refused_with_its_key(kind: str) -> None:
    keys = {*base(kind), *CONFIG_MAPPING[kind]().to_dict()} - NOT_ARITHMETIC
    for key, value in itertools.product(sorted(keys), (1.5, 2.0, 3, True, "x", [], {})):
        values = {**base(kind), key: value}
        refused = _refused_for_its_kind(kind, values)
        try:
            reading_of(values)
            said = ""
        except ValueError as refusal:
            said = str(refusal)
        if (
            refused and not said
        ):  # a whole number where it wants a real one, unless another package lets it in
            assert type(value) is int, f"{key}={value!r} is read, and transformers refuses it"
            assert reading_of(values) == reading_of({**values, key: float(value)})
        assert refused is not False or "as transformers does" not in said, f"{key}={value!r}: {said}"


def _refused_for_its_kind(kind: str, values: Values) -> bool | None:
    """Whether transformers refuses a value by its annotation; None where it fails at something else."""
    try:
        CONFIG_MAPPING[kind].from_dict(copy.deepcopy(values))
    except StrictDataclassFieldValidationError:
        return True
    except Exception:  # whatever its code raises
        return None
    return False


def test_a_window_of_one_and_a_half_tokens_and_an_attention_that_is_no_table_are_refused_in_words() -> None:
    with pytest.raises(
        ValueError, match=r"Mistral: config requires a whole number for sliding_window, got 1.5"
    ):
        reading_of({**base("mistral"), "sliding_window": 1.5})
    with pytest.raises(
        ValueError, match=r"Gemma 2: config requires a whole number for sliding_window.* got 2.0"
    ):
        reading_of({**base("gemma2"), "sliding_window": 2.0})
    for value in ("x", []):
        with pytest.raises(ValueError, match=r"MPT: config requires an object for attn_config, got"):
            reading_of({**base("mpt"), "attn_config": value})
    with pytest.raises(ValueError, match=r"MPT: config requires true or false for no_bias.* got 7"):
        reading_of({**base("mpt"), "no_bias": 7})
    with pytest.raises(
        ValueError, match=r"MPT: config requires a whole number for expansion_ratio.* got 'x'"
    ):
        reading_of({**base("mpt"), "expansion_ratio": "x"})


# --- one key, and all that count for nothing ----------------------------------------------------------------------


SOME = ("gpt2", "llama", "gemma3_text", "deepseek_v3", "t5")


@over("kind", SOME)
def test_ignored_keys_of_other_types_together_change_nothing(
    kind: str,
) -> None:
    assert_ignored(kind)


@pytest.mark.slow
@over("kind", [kind for kind in KINDS if kind not in SOME])
def test_ignored_keys_of_other_types_are_listed_in_the_remaining_types(
    kind: str,
) -> None:
    assert_ignored(kind)


def assert_ignored(kind: str) -> None:
    """All foreign keys at once: listed, our config and transformers' numbers as without them."""
    plain = base(kind)
    foreign = {key: next(few(kind, key, 1), 1) for key in values_of_keys().keys() - plain.keys()}
    read = read_keys(kind, foreign)
    inert = _taken(
        plain, {key: value for key, value in foreign.items() if key not in read and value is not None}
    )
    assert len(inert) > 50
    told, crowded = reading_of(plain), reading_of({**plain, **inert})
    assert crowded.config == told.config
    usual = usual_values(kind)  # what every file of the type says means nothing, and is not listed
    said = {key for key, value in inert.items() if key not in usual or value != usual[key]}
    assert set(crowded.inert) >= said - NOT_ARITHMETIC - BOUNDS
    model, other = hub_models.reference(plain), hub_models.new_model({**plain, **inert})
    other.load_state_dict(model.state_dict())
    assert torch.equal(their_numbers(model, TOKENS), their_numbers(other, TOKENS))


def _taken(plain: Values, more: Values) -> Values:
    """Those further keys that transformers' configuration takes with these values."""
    try:
        their_config({**plain, **more})
    except Exception:  # whatever its code raises
        keys, half = list(more), len(more) // 2
        found: dict[str, object] = {}
        for some in (keys[:half], keys[half:]) if half else ():  # each beside what was taken before it
            found |= _taken({**plain, **found}, {key: more[key] for key in some})
        return found
    return more


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_another_value_of_any_key_gives_transformers_numbers_or_is_refused(kind: str) -> None:
    plain, seen = base(kind), []
    with every() as case:
        for key in sorted(read_keys(kind, values_of_keys())):
            for value in few(kind, key, 3):
                if (kind, key) not in DIFFERENT and (kind, key) not in ACCEPTED:
                    with case(key, value):
                        seen.append(compared({**plain, key: copy.deepcopy(value)}, {key: value}))
    assert seen.count("same") > 10


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_key_less_gives_transformers_numbers(kind: str) -> None:
    plain = base(kind)
    small = (
        "size",
        "dim",
        "layers",
        "heads",
        "experts",
        "inner",
        "vocab",
        "layer",
        "head",
        "d_",
        "n_",
        "embd",
    )
    with every() as case:
        for key in sorted(plain.keys() - NOT_TRIED):
            if not any(word in key for word in small):  # whose usual values make large models
                with case(key):
                    compared({each: value for each, value in plain.items() if each != key}, {key: None})
        with case("nothing"):
            assert compared(plain, {}) == "same"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_other_values_of_several_keys_give_transformers_numbers_or_refusal(kind: str) -> None:
    plain, draw = base(kind), random.Random(zlib.crc32(kind.encode()))
    known = [key for key in plain if key not in NOT_TRIED and key in values_of_keys()]
    with every() as case:
        for _ in range(20):
            chosen = {key: _other(key, draw) for key in draw.sample(known, min(3, len(known)))}
            if not any((kind, key) in DIFFERENT for key in chosen):
                with case(chosen):
                    compared({**plain, **copy.deepcopy(chosen)}, chosen)


def _other(key: str, draw: random.Random) -> object:
    """A value of a key that no config has, or one that some has."""
    value = draw.choice(values_of_keys()[key])
    if isinstance(value, float) and value < 100:
        return round(value * draw.uniform(0.3, 2.5), 4)
    if isinstance(value, int) and not isinstance(value, bool) and draw.random() < 0.4:
        return max(1, value + draw.choice([-1, 1, 2]))
    return value


# --- the rotary table ---------------------------------------------------------------------------------------------

NEEDED: Mapping[str, tuple[str, ...]] = {
    "default": (), "linear": ("factor",), "dynamic": ("factor",), "yarn": ("factor",), "longrope": (), "su": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}  # fmt: skip
"""The words that a kind of scaling cannot do without."""
WORDS: Mapping[str, tuple[object, ...]] = {
    "rope_theta": (77.0, 1e4), "factor": (1.0, 2.0, 8.0, 3.5), "low_freq_factor": (1.0, 0.5), "type": ("linear",),
    "high_freq_factor": (4.0, 2.0), "original_max_position_embeddings": (8, 16, 32), "attention_factor": (1.3, 0.7),
    "beta_fast": (32, 8.0), "beta_slow": (1, 2.0), "mscale": (1.0, 0.7, 0), "mscale_all_dim": (1.0, 0.5, 0),
    "truncate": (True, False), "partial_rotary_factor": (0.5, 1.0), "finetuned": (True,),
}  # fmt: skip
BESIDE: Mapping[str, tuple[object, ...]] = {
    "rope_theta": (99.0, 1e4), "partial_rotary_factor": (0.5, 1.0), "original_max_position_embeddings": (16, 32),
    "rotary_pct": (0.5,), "rotary_emb_base": (50,), "rope_local_base_freq": (33.0,),
}  # fmt: skip
ROTATED = tuple(kind for kind in KINDS if hasattr(their_config(base(kind)), "rope_parameters"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ROTATED)
def test_any_rotary_table_gives_transformers_numbers_or_is_refused(kind: str) -> None:
    draw, seen = random.Random(zlib.crc32(kind.encode())), []
    with every() as case:
        for _ in range(40):
            values = rotated(kind, draw)
            said = {key: value for key, value in values.items() if base(kind).get(key) != value}
            if not (kind == "olmo3" and "rope_theta" in values):
                with case(json.dumps(said)):
                    seen.append(compared(values, dict.fromkeys(("rope", "rotat"))))
    assert "same" in seen


def rotated(kind: str, draw: random.Random) -> Values:
    """A config of a type with random rotary tables, in either place or both, and words beside them."""
    plain = {key: value for key, value in base(kind).items() if not key.startswith("rope_")}
    config = their_config(plain)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if kind in ("gemma3_text", "olmo3"):
        tables = {
            part: _table(width, draw)
            for part in ("full_attention", "sliding_attention")
            if draw.random() < 0.9
        }
    else:
        tables = _table(width, draw)
    where = draw.choice(["rope_parameters", "rope_scaling", "both"])
    plain |= {} if where == "rope_scaling" else {"rope_parameters": tables}
    plain |= {} if where == "rope_parameters" else {"rope_scaling": _table(width, draw)}
    return plain | {key: draw.choice(some) for key, some in BESIDE.items() if draw.random() < 0.25}


def _table(width: int, draw: random.Random) -> Values:
    kind = draw.choice(list(NEEDED))
    table: Values = {draw.choice(["rope_type", "rope_type", "type"]): kind}
    words = [word for word in WORDS if word in NEEDED[kind] or draw.random() < 0.2]
    table |= {word: draw.choice(WORDS[word]) for word in words if word not in table}
    if kind in ("longrope", "su"):
        half = int(width * draw.choice([1, 1, 0.5, 0.25])) // 2
        for name, most in {"short_factor": 2, "long_factor": 9}.items():
            table[name] = [round(draw.uniform(1, most), 2) for _ in range(half)]
    return table


def test_a_name_that_no_folder_can_have_is_no_kind_of_model() -> None:
    for name in ("x" * 300, "x" * 5000, "a/b", "..", "", "\0"):
        assert read_keys(name, ["a_key"]) == {"a_key"}
