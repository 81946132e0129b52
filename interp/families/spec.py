"""Definition of a family: how its config becomes a `ModelConfig`, and which of its tensors become which parameters."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar, cast

from torch import Tensor

from interp.core.wording import value_text
from interp.families.inert import kinds_taken, read_keys, usual_values
from interp.model.config import (
    AnyConfig,
    EncoderDecoderConfig,
    ModelConfig,
)
from interp.model.records import MOST

NOT_ARITHMETIC = frozenset(
    {
        "_name_or_path", "_model_name_or_path", "architectures", "auto_map", "model_type", "task_specific_params",
        "tokenizer_class",
        "prefix", "name_or_path", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id",
        "sep_token_id", "finetuning_task", "problem_type", "dtype", "torch_dtype", "torchscript",
        "transformers_version", "initializer_range", "init_std", "initializer_factor", "id2label", "label2id",
        "num_labels", "gradient_checkpointing", "chunk_size_feed_forward", "keys_to_ignore_at_inference",
        "is_decoder", "is_encoder_decoder", "return_dict", "use_return_dict", "use_cache",
        "cache_implementation", "output_attentions", "output_hidden_states", "output_past", "attention_dropout",
        "attn_pdrop", "embd_pdrop", "resid_pdrop", "dropout", "activation_dropout", "hidden_dropout",
        "layerdrop", "embed_dropout", "resid_dropout", "classifier_dropout", "attention_probs_dropout_prob",
        "hidden_dropout_prob", "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
        "summary_type", "summary_use_proj", "attn_implementation", "_attn_implementation",
        "_attn_implementation_autoset", "do_sample", "max_length", "min_length", "temperature", "top_k",
        "top_p", "repetition_penalty", "num_beams", "output_router_logits", "router_aux_loss_coef",
        "router_jitter_noise", "encoder_layerdrop", "decoder_layerdrop", "dropout_rate",
    }
)  # fmt: skip
"""Keys of Hugging Face configs that cannot change a number of an evaluated forward pass."""

Scalar = str | int | float | bool | None
KIND_WORDS: Mapping[str, str] = {
    "int": "a whole number",
    "float": "a real number",
    "bool": "true or false",
    "str": "a text",
    "list": "a list",
    "dict": "an object",
}
"""Kinds of values in a config, as errors name them."""
LARGEST = 1e15
"""Largest number that a config may have; a larger one, or NaN, comes from a damaged file and is refused here."""


class UnsupportedError(ValueError):
    """A config requires a feature that transformers has and the family's file in this package lacks."""


class Settings:
    """A checkpoint's config, or a table inside one, read key by key.

    `finish` then sorts the keys that were not read: a key that transformers does not read either is inert and listed; a
    key that transformers reads is refused by name, unless its value is the default.
    """

    def __init__(self, values: Mapping[str, object], family: str, kind: str | None = None) -> None:
        """The settings of a config.

        Args:
            kind: the `model_type` whose code in transformers decides which keys are read; None: that of `values`.
        """
        self._values = values
        self._family = family
        self._kind = str(values.get("model_type")) if kind is None else kind
        self._read: set[str] = set()
        self._tables: list[tuple[str, Settings]] = []
        self._ignored: set[str] = set()

    def inside(self, name: str, values: Mapping[str, object]) -> "Settings":
        """The settings of a table inside this config; `finish` lists its inert keys as `name.key`."""
        table = Settings(values, f"{self._family} {name}", str(values.get("model_type") or self._kind))
        self._tables.append((name, table))
        return table

    def ignored(self, keys: Sequence[str]) -> None:
        """Mark keys as inert unless they are read: under this config they change nothing."""
        self._ignored |= {key for key in keys if self._values.get(key) is not None}

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number setting; `default` stands in for a missing key or None."""
        value = self._number(key, default)
        if value != int(value):
            raise ValueError(f"{self._family}: config requires a whole number for {key}, got {value!r}")
        return int(value)

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number setting of at least 1; `default` stands in for a missing key or None."""
        value = self.integer(key, default)
        if not 1 <= value <= MOST:
            raise ValueError(f"{self._family}: config requires {key} in [1, {MOST}], got {value}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A real setting; `default` stands in for a missing key or None."""
        return float(self._number(key, default))

    def positive(self, key: str, default: float | None = None) -> float:
        """A real setting above 0; `default` stands in for a missing key or None."""
        value = self.real(key, default)
        if value <= 0:
            raise ValueError(f"{self._family}: config requires {key} above 0, got {value}")
        return value

    def optional(self, key: str, default: int | float | None) -> float | None:
        """A setting that may be None; `default` stands in for a missing key only."""
        return None if self.present((key,)).get(key, default) is None else float(self._number(key, default))

    def optional_integer(self, key: str, default: int | None) -> int | None:
        """A whole number setting that may be None; `default` stands in for a missing key only."""
        return None if self.present((key,)).get(key, default) is None else self.integer(key, default)

    def flag(self, key: str, default: bool) -> bool:
        """A boolean setting."""
        value = self.get(key)
        if not isinstance(value, bool | None):
            raise ValueError(
                f"{self._family}: config requires true or false for {key}, got {value_text(value)}"
            )
        return default if value is None else value

    def text(self, key: str, default: str) -> str:
        """A string setting."""
        value = self.get(key)
        if not isinstance(value, str | None):
            raise ValueError(f"{self._family}: config requires a text for {key}, got {value_text(value)}")
        return default if value is None else value

    def get(self, key: str) -> object:
        """Any setting, None if missing; marks the key as understood."""
        self._read.add(key)
        return self._values.get(key)

    def numbers(self) -> dict[str, object]:
        """The numbers that were read, by key, for errors that concern several of them."""
        read_values = {key: self._values.get(key) for key in sorted(self._read)}
        return {key: value for key, value in read_values.items() if type(value) in (int, float)}

    def names(self, words: str) -> bool:
        """Whether a message contains the name of a key that was read."""
        return any(key in words for key in self._read)

    def peek(self, key: str) -> object:
        """Any setting, None if missing, without marking the key as understood."""
        return self._values.get(key)

    def present(self, keys: Sequence[str]) -> dict[str, object]:
        """The settings among `keys` that the config has; marks them as understood."""
        return {key: self.get(key) for key in keys if key in self._values}

    def table(self, key: str) -> Mapping[str, object]:
        """A nested object, empty if missing."""
        value = self.get(key)
        if not isinstance(value, Mapping | None):
            raise ValueError(f"{self._family}: config requires an object for {key}, got {value_text(value)}")
        return dict(value or {})

    def require(self, key: str, *allowed: Scalar) -> None:
        """UnsupportedError unless the setting is missing or one of `allowed`."""
        value = self.get(key)
        if key in self._values and value not in allowed:
            raise UnsupportedError(
                f"{self._family}: config asks for {key}={value!r}, supported: {', '.join(map(repr, allowed))}"
            )

    def finish(self) -> tuple[str, ...]:
        """The inert keys, those of tables as `table.key`; UnsupportedError with the other keys that were not read.

        Raises:
            ValueError: a value of a kind that transformers does not take for its key.
        """
        self._check_kinds()
        done = self._read | self._ignored | NOT_ARITHMETIC
        unread = {key: value for key, value in self._values.items() if value is not None and key not in done}
        read = read_keys(self._kind, unread)
        usual = self._usual_values() if unread or self._ignored else {}
        unknown = sorted(
            key for key in read if key not in usual or not _equal_values(usual[key], unread[key])
        )
        if unknown:
            listed = ", ".join(f"{key}={value_text(unread[key])}" for key in unknown)
            raise UnsupportedError(f"{self._family}: config keys not understood: {listed}")
        tables = [f"{name}.{key}" for name, table in self._tables for key in table.finish()]
        inert = (unread.keys() - read) | (self._ignored - self._read)
        # a key with its default value is not listed
        inert = {key for key in inert if key not in usual or not _equal_values(usual[key], self._values[key])}
        return (*sorted(inert), *dict.fromkeys(tables))

    def _check_kinds(self) -> None:
        """ValueError for a value of a kind that transformers refuses: 1.5 for a whole number, 7 for true or false."""
        for key, taken in kinds_taken(self._kind).items() if self._values.get("model_type") else ():
            value = self._values.get(key)
            kind = type(value).__name__.replace("tuple", "list")
            kinds = (
                {kind, "float"} if kind == "int" else {kind}
            )  # a whole number is a real one, as JSON has it
            if value is None or key in NOT_ARITHMETIC or kinds & taken:
                continue
            words = " or ".join(KIND_WORDS[kind] for kind in sorted(taken & KIND_WORDS.keys()))
            raise ValueError(
                f"{self._family}: config requires {words} for {key}, as transformers does, got {value_text(value)}"
            )

    def _usual_values(self) -> Mapping[str, object]:
        """Defaults of transformers for missing keys of a config; empty for a table inside a config."""
        return usual_values(self._kind) if self._values.get("model_type") else {}

    def _number(self, key: str, default: int | float | None) -> int | float:
        value = self.get(key)
        value = default if value is None else value
        if value is None and key not in self._values:
            value = self._usual_values().get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{self._family}: config requires a number for {key}, got {value_text(value)}")
        if not abs(value) <= LARGEST:  # nor NaN
            raise ValueError(
                f"{self._family}: config requires a number up to {LARGEST:g} for {key}, got {value_text(value)}"
            )
        return value


def _equal_values(a: object, b: object) -> bool:
    return a == b and isinstance(a, bool) == isinstance(b, bool)


C = TypeVar("C", bound=AnyConfig)
Product = Callable[..., Tensor]
"""A function from all checkpoint tensors of a rule to the parameter, where they are not simply joined."""
TensorLayout = Callable[[Tensor, ModelConfig], Tensor]
"""A function from one checkpoint tensor to rows of a parameter, a view wherever possible.

The config is that of the parameter's stack: in an encoder-decoder the encoder's for names with `encoder.`, else the
decoder's.
"""


def same(tensor: Tensor, config: ModelConfig) -> Tensor:
    """The tensor as it is."""
    return tensor


def transposed(tensor: Tensor, config: ModelConfig) -> Tensor:
    """A matrix stored `[in, out]` (Conv1D), or each matrix of a stack, transposed to `[out, in]`."""
    return tensor.mT


@dataclass(frozen=True)
class TensorRule:
    """One parameter and the checkpoint's tensors that it is made of, joined along the first axis.

    `{l}` stands for the layer. `{x}` in `theirs` stands for the expert: all of `theirs` for expert 0, then for 1, and
    so on; parts with fewer axes than ours are joined along ours flattened (`[rows, d]` into `[x, rows, d]`).
    """

    ours: str
    theirs: tuple[str, ...]
    layout: TensorLayout = same
    """Applied to each of the checkpoint's tensors."""
    product: Product | None = None
    """Function that computes the parameter from all of `theirs`; None: they are joined."""
    otherwise: "TensorRule | None" = None
    """Rule for checkpoints that lack the first of `theirs` (one parameter, two ways to store it)."""


def in_layers(rules: Sequence[TensorRule], layers: Sequence[int]) -> tuple[TensorRule, ...]:
    """The rules written out for these layers only; rules without `{l}` stay as they are."""

    def written(rule: TensorRule, layer: int) -> TensorRule:
        theirs = tuple(name.replace("{l}", str(layer)) for name in rule.theirs)
        alternative = None if rule.otherwise is None else written(rule.otherwise, layer)
        return replace(rule, ours=rule.ours.replace("{l}", str(layer)), theirs=theirs, otherwise=alternative)

    written_rules: list[TensorRule] = []
    for rule in rules:
        written_rules += [written(rule, layer) for layer in layers] if "{l}" in rule.ours else [rule]
    return tuple(written_rules)


def _unchanged(name: str) -> str:
    return name


def _no_duplicates(config: AnyConfig) -> Mapping[str, str]:
    return {}


@dataclass(frozen=True)
class Family(Generic[C]):
    """One architecture family of checkpoints, with configs that become a `ModelConfig` or an `EncoderDecoderConfig`."""

    name: str
    model_types: tuple[str, ...]
    config: Callable[[Settings], C]
    rules: Callable[[C], tuple[TensorRule, ...]]
    prefix: str
    """Prefix of most tensor names, which is missing where only the base model was saved."""
    buffers: tuple[str, ...] = ()
    """Regular expressions of tensors in old checkpoints that hold no weights (masks, frequency tables)."""
    unused: tuple[str, ...] = ()
    """Regular expressions of weights of parts that we do not model, such as BERT's pooler."""
    outside: tuple[str, ...] = ("lm_head.",)
    """Beginnings of names that never carry the prefix: heads outside the base model."""
    duplicates: Callable[[C], Mapping[str, str]] = _no_duplicates
    """Name of a tied tensor's second copy -> name of the first; one suffices, and stored copies must be equal."""
    wide: tuple[str, ...] = ()
    """Regular expressions for names of parameters that are used in float32, whatever the dtype of the others."""
    rename: Callable[[str], str] = _unchanged
    """A name in old checkpoints -> the name that the rules use (BERT's `gamma` is `weight`)."""

    def table(self, config: AnyConfig) -> tuple[tuple[TensorRule, ...], Mapping[str, str]]:
        """Rules and duplicates for a config that this family made."""
        typed = cast(C, config)
        return self.rules(typed), self.duplicates(typed)


AnyFamily = Family[ModelConfig] | Family[EncoderDecoderConfig] | Family[AnyConfig]
