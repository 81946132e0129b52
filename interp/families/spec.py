"""What a family is: how its config becomes ours, and which of its tensors become which of ours."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from interp.model.config import LinearScaling, Llama3Scaling, ModelConfig, Rotary

NOT_ARITHMETIC = frozenset(
    {
        *(
            "_name_or_path",
            "architectures",
            "auto_map",
            "model_type",
            "task_specific_params",
            "tokenizer_class",
        ),
        *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "finetuning_task", "problem_type"),
        *(
            "dtype",
            "torch_dtype",
            "torchscript",
            "transformers_version",
            "initializer_range",
            "id2label",
            "label2id",
        ),
        *("gradient_checkpointing", "chunk_size_feed_forward", "keys_to_ignore_at_inference", "is_decoder"),
        *("is_encoder_decoder", "return_dict", "use_return_dict", "use_cache", "output_attentions"),
        *("output_hidden_states", "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop"),
        *("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type"),
        *("summary_use_proj", "attn_implementation", "_attn_implementation", "_attn_implementation_autoset"),
    }
)
"""Keys of Hugging Face configs that cannot change a number of an evaluated forward pass."""

Scalar = str | int | float | bool | None


class Settings:
    """A checkpoint's config, read key by key; what nobody read is refused by name at the end."""

    def __init__(self, values: Mapping[str, object], family: str) -> None:
        self._values = values
        self._family = family
        self._read: set[str] = set()

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number setting; `default` stands in for a missing key or None."""
        value = self._number(key, default)
        if value != int(value):
            raise ValueError(f"{self._family}: config requires a whole number for {key}, got {value!r}")
        return int(value)

    def real(self, key: str, default: float | None = None) -> float:
        """A real setting; `default` stands in for a missing key or None."""
        return float(self._number(key, default))

    def flag(self, key: str, default: bool) -> bool:
        """A boolean setting."""
        value = self.get(key)
        return default if value is None else bool(value)

    def text(self, key: str, default: str) -> str:
        """A string setting."""
        value = self.get(key)
        return default if value is None else str(value)

    def get(self, key: str) -> object:
        """Any setting, None if missing; marks the key as understood."""
        self._read.add(key)
        return self._values.get(key)

    def present(self, keys: Sequence[str]) -> dict[str, object]:
        """Those of `keys` that the config has; marks them as understood."""
        return {key: self.get(key) for key in keys if key in self._values}

    def table(self, key: str) -> Mapping[str, object]:
        """A nested object, empty if missing."""
        value = self.get(key)
        return dict(value) if isinstance(value, Mapping) else {}

    def require(self, key: str, *allowed: Scalar) -> None:
        """ValueError unless the setting is missing or one of `allowed`."""
        value = self.get(key)
        if key in self._values and value not in allowed:
            raise ValueError(
                f"{self._family}: config asks for {key}={value!r}, supported: {', '.join(map(repr, allowed))}"
            )

    def finish(self) -> None:
        """ValueError naming every key that was neither read nor known to be irrelevant."""
        unknown = sorted(set(self._values) - self._read - NOT_ARITHMETIC)
        unknown = [k for k in unknown if self._values[k] is not None]
        if unknown:
            raise ValueError(f"{self._family}: config keys not understood: {', '.join(unknown)}")

    def _number(self, key: str, default: int | float | None) -> int | float:
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{self._family}: config requires a number for {key}, got {value!r}")
        return value


def rotary(settings: Settings, dim: int | None = None) -> Rotary:
    """Rotary positions from `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (before)."""
    rule = Settings(
        {**settings.table("rope_scaling"), **settings.table("rope_parameters")}, "rope_parameters"
    )
    outer = settings.real("rope_theta", rule.real("rope_theta", 10_000.0))
    base = rule.real("rope_theta", outer)
    if base != outer:
        raise ValueError(f"rope_theta is given twice and differs: {outer}, and {base} in rope_parameters")
    kind = rule.text("rope_type", rule.text("type", "default"))
    scaling: LinearScaling | Llama3Scaling | None = None
    if kind == "linear":
        scaling = LinearScaling(rule.real("factor"))
    elif kind == "llama3":
        factor, low, high = (rule.real(name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
        scaling = Llama3Scaling(factor, low, high, rule.integer("original_max_position_embeddings"))
    elif kind != "default":
        raise ValueError(f"rope_type={kind!r} is not supported; supported: default, linear, llama3")
    rule.finish()
    return Rotary(base=base, dim=dim, scaling=scaling)


@dataclass(frozen=True)
class Rule:
    """One of our parameters and the checkpoint's tensors it is made of; `{l}` stands for the layer."""

    ours: str
    theirs: tuple[str, ...]
    layout: Literal["same", "transposed"] = "same"
    """`transposed` for Conv1D weights `[in, out]`; several tensors are joined along our first axis."""


@dataclass(frozen=True)
class Family:
    """One architecture family of checkpoints."""

    name: str
    model_types: tuple[str, ...]
    config: Callable[[Settings], ModelConfig]
    rules: Callable[[ModelConfig], tuple[Rule, ...]]
    prefix: str
    """What stands before most tensor names, and is missing when only the base model was saved."""
    buffers: tuple[str, ...] = ()
    """Regular expressions of tensors in old checkpoints that hold no weights (masks, frequency tables)."""
