"""`HookedTransformerConfig`: TransformerLens' mutable record of a model, with its fields, defaults and checks."""

import inspect
import pprint
import random
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from interp.compat.hooked_config import NOT_ARITHMETIC
from interp.compat.transformer_lens.activations import SUPPORTED_ACTIVATIONS

__path__: list[str] = []
"""To the import system a package: `config.hooked_transformer_config` is this module too (`install.ALIASES`)."""

FOLLOWED = frozenset(
    {
        "output_logits_soft_cap", "attn_scores_soft_cap", "attention_dir", "window_size", "clip_qkv", "use_logn_attn",
        "train_seq_length", "norm_topk_prob",
    }
)  # fmt: skip
"""Fields that the next pass of a model follows, as in TransformerLens."""
IDLE = frozenset(NOT_ARITHMETIC) - {"dtype", "train_seq_length", "use_hook_tokens"}
"""Fields that change no number of a model that is built."""
INSTEAD = {
    "attn_scale": "set blocks[i].attn.attn_scale",
    "eps": "set eps of the norms, as in blocks[i].ln1.eps",
    "act_fn": "set blocks[i].mlp.act_fn to a function",
    "normalization_type": "process_weights_() folds the norms",
    "dtype": "model.to(dtype) casts the weights",
}
"""Replacement for setting a field of a model that is built."""


@runtime_checkable
class User(Protocol):
    """Protocol of objects that compute by a config."""

    def accepts(self, name: str, value: object) -> bool:
        """Whether a field that is fixed may have this value nevertheless."""
        ...


@dataclass(repr=False)
class TransformerLensConfig:
    """The fields that every model of TransformerLens has."""

    __slots__ = ("__dict__", "__weakref__", "_users")

    d_model: int
    d_head: int
    n_layers: int
    n_ctx: int
    n_heads: int = -1
    """-1 = d_model // d_head."""
    d_mlp: int | None = None
    """None = 4 d_model."""
    d_vocab: int = -1
    """-1 = from the tokenizer."""
    device: Any = None
    """None = a GPU if there is one, else the CPU."""
    use_attn_result: bool = False
    """Whether `attn.hook_result` is cached without being named."""
    use_split_qkv_input: bool = False
    """Whether `hook_q_input`, `hook_k_input`, `hook_v_input` are cached without being named."""
    default_prepend_bos: bool = True
    positional_embedding_type: str = "standard"
    """standard, rotary, alibi or shortformer."""
    n_key_value_heads: int | None = None
    attn_only: bool = False
    gated_mlp: bool = False
    uses_rms_norm: bool = False
    eps: float = 1e-5
    layer_norm_folding: bool = False
    act_fn: str | None = "relu"
    normalization_type: str | None = "LN"
    num_experts: int | None = None
    experts_per_token: int | None = None
    final_rms: bool = False
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.n_heads == -1:
            self.n_heads = self.d_model // self.d_head
            if self.d_model % self.d_head:
                raise ValueError(f"d_model ({self.d_model}) must be divisible by d_head ({self.d_head})")
        if self.device is None:
            self.device = "cuda" if torch.cuda.is_available() else "cpu"
        if self.d_mlp is None:
            self.d_mlp = self.d_model * 4

    @classmethod
    def unwrap(cls, config: Any) -> Any:
        """The config itself, or the one that a dict describes."""
        return cls.from_dict(config) if isinstance(config, Mapping) else config

    @classmethod
    def from_dict(cls, config_dict: Any) -> Any:
        """The config of a dict; keys that are no fields are ignored."""
        known = inspect.signature(cls).parameters
        return cls(**{name: value for name, value in config_dict.items() if name in known})

    def to_dict(self) -> dict[str, Any]:
        """The fields."""
        return self.__dict__.copy()

    # a config that something computes by

    def used_by(self, user: User) -> None:
        """From now on refuse to change what this model (or part) was built with."""
        self._all_users().add(user)

    def _all_users(self) -> "weakref.WeakSet[User]":
        try:
            users: weakref.WeakSet[User] = object.__getattribute__(self, "_users")
        except AttributeError:
            users = weakref.WeakSet()
            object.__setattr__(self, "_users", users)
        return users

    def __setattr__(self, name: str, value: Any) -> None:
        if name in FIXED and name in self.__dict__ and name != "dtype":  # of weights that may be cast later
            for user in self._all_users():
                refuse_changes({name: self.__dict__[name]}, {name: value}, user)
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        """The fields; nothing computes by a copy yet."""
        return self.__dict__

    def __repr__(self) -> str:
        return f"{type(self).__name__}:\n" + pprint.pformat(self.to_dict())


@dataclass(repr=False)
class HookedTransformerConfig(TransformerLensConfig):
    """Everything a `HookedTransformer` is made from. Fields that ask for what is not supported are refused there."""

    model_name: str = "custom"
    act_fn: str | None = "relu"
    eps: float = 1e-5
    use_attn_scale: bool = True
    attn_scale: float = -1.0
    """Divisor of the scores; -1: sqrt(d_head)."""
    use_hook_mlp_in: bool = False
    use_attn_in: bool = False
    use_qk_norm: bool = False
    clip_qkv: float | None = None
    use_logn_attn: bool = False
    train_seq_length: int | None = None
    use_dynamic_ntk_rope: bool = False
    use_local_attn: bool = False
    ungroup_grouped_query_attention: bool = False
    """Whether keys and values of grouped attention are shown once per query head."""
    original_architecture: str | None = None
    from_checkpoint: bool = False
    checkpoint_index: int | None = None
    checkpoint_label_type: str | None = None
    checkpoint_value: int | None = None
    tokenizer_name: str | None = None
    window_size: int | None = None
    attn_types: list[Any] | tuple[Any, ...] | None = None
    """For each layer `global` or `local`."""
    init_mode: str = "gpt2"
    """gpt2, xavier_uniform, xavier_normal, kaiming_uniform, kaiming_normal or muP."""
    normalization_type: str | None = "LN"
    """LN, LNPre (weights folded), RMS, RMSPre or None."""
    n_devices: int = 1
    attention_dir: str = "causal"
    attn_only: bool = False
    seed: int | None = None
    initializer_range: float = -1.0
    """Standard deviation (gpt2) or gain; -1 = 0.8 / sqrt(d_model), or 1."""
    init_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    final_rms: bool = False
    d_vocab_out: int = -1
    """-1 = d_vocab."""
    parallel_attn_mlp: bool = False
    rotary_dim: int | None = None
    n_params: int | None = None
    """Computed: the weights of attention and MLPs, without biases and embeddings."""
    use_hook_tokens: bool = False
    gated_mlp: bool = False
    dtype: torch.dtype = torch.float32
    tokenizer_prepends_bos: bool | None = None
    post_embedding_ln: bool = False
    rotary_base: float | int = 10000
    rotary_base_local: float | int | None = None
    rotary_scaling_factor: float = 1.0
    trust_remote_code: bool = False
    rotary_adjacent_pairs: bool = False
    load_in_4bit: bool = False
    quantization_method: str | None = None
    num_experts: int | None = None
    experts_per_token: int | None = None
    relative_attention_max_distance: int | None = None
    relative_attention_num_buckets: int | None = None
    decoder_start_token_id: int | None = None
    tie_word_embeddings: bool = False
    use_normalization_before_and_after: bool = False
    attn_scores_soft_cap: float = -1.0
    output_logits_soft_cap: float = -1.0
    use_NTK_by_parts_rope: bool = False  # noqa: N815 - their name
    NTK_by_parts_low_freq_factor: float = 1.0
    NTK_by_parts_high_freq_factor: float = 4.0
    NTK_by_parts_factor: float = 8.0
    NTK_original_ctx_len: int = 8192
    use_yarn_rope: bool = False
    yarn_factor: float = 1.0
    yarn_attention_factor: float = 1.0
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_original_max_position_embeddings: int = 4096
    yarn_truncate: bool = True
    yarn_global_attn_only: bool = False
    use_attention_sinks: bool = False
    norm_topk_prob: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seed is not None:
            self.set_seed_everywhere(self.seed)
        self._check()
        if self.initializer_range < 0:
            self.initializer_range = 0.8 / np.sqrt(self.d_model) if self.init_mode == "gpt2" else 1.0
        if self.d_vocab_out == -1:
            self.d_vocab_out = self.d_vocab
        if self.positional_embedding_type == "rotary" and self.rotary_dim is None:
            self.rotary_dim = self.d_head
        if self.use_attn_scale and self.attn_scale == -1.0:
            self.attn_scale = np.sqrt(self.d_head)
        self.n_params = self._hidden_weights()

    def _check(self) -> None:
        if self.use_local_attn:
            assert self.window_size is not None, "window_size must be specified for local attention"
            assert self.attn_types is not None, "attn_types must be specified for local attention"
        if not self.attn_only:
            assert self.act_fn is not None, "act_fn must be specified for non-attn-only models"
            names = tuple(SUPPORTED_ACTIVATIONS)
            assert self.act_fn in names, f"act_fn={self.act_fn} must be one of {names}"
        given = [name for name in ("num_experts", "experts_per_token") if getattr(self, name) is not None]
        assert len(given) != 1, f"num_experts and experts_per_token must be set together, got {given}"
        if self.n_devices > 1:
            count = torch.cuda.device_count()
            assert count >= self.n_devices, (
                f"n_devices={self.n_devices} requires as many GPUs, there are {count}"
            )
        assert self.default_prepend_bos in (True, False), (
            f"default_prepend_bos must be either True or False, but {self.default_prepend_bos} is given"
        )

    def _hidden_weights(self) -> int:
        count = 4 * self.d_model * self.d_head * self.n_heads
        if not self.attn_only:
            assert self.d_mlp is not None
            mlp = self.d_model * self.d_mlp * (2 + self.gated_mlp)
            count += (mlp + self.d_model) * self.num_experts if self.num_experts else mlp
        return self.n_layers * count

    @classmethod
    def unwrap(cls, config: Any) -> "HookedTransformerConfig":
        """The config itself, or the one that a dict or another config describes."""
        if isinstance(config, cls):
            return config
        return cls.from_dict(config if isinstance(config, Mapping) else config.to_dict())

    @classmethod
    def from_dict(cls, config_dict: Any) -> "HookedTransformerConfig":
        """The config of a dict; TypeError for a key that is no field."""
        return cls(**config_dict)

    def to_dict(self) -> dict[str, Any]:
        """The fields themselves: what is written into the dict is written into the config."""
        return self.__dict__

    def set_seed_everywhere(self, seed: int) -> None:
        """Seed torch, random and numpy."""
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)

    def is_layer_norm_activation(self) -> bool:
        """Whether the activation is followed by a norm."""
        return self.act_fn is not None and self.act_fn.endswith("_ln")


FIXED = frozenset(field.name for field in fields(HookedTransformerConfig)) - FOLLOWED - IDLE
"""Fields that a model is built with."""


def refuse_changes(before: Mapping[str, object], now: Mapping[str, object], user: User) -> None:
    """ValueError naming the first field that a model was built with and that has another value now."""
    for name in _differing(before, now):
        if name in FIXED and not user.accepts(name, now.get(name)):
            instead = INSTEAD.get(name, "")
            raise ValueError(
                f"a model was built with {name}={before.get(name)!r}, and no pass would follow {now.get(name)!r}: "
                f"HookedTransformer({{**cfg.to_dict(), {name!r}: ...}}) is another model"
                f"{'; or ' if instead else ''}{instead}"
            )


def _differing(before: Mapping[str, object], now: Mapping[str, object]) -> Iterable[str]:
    missing = object()
    return [name for name in {**before, **now} if before.get(name, missing) != now.get(name, missing)]
