"""Rotary positions from configs: the table `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from interp.core.wording import value_text
from interp.families.spec import LARGEST, Settings, UnsupportedError
from interp.model.config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    Rotary,
    RotaryScaling,
    YarnScaling,
)

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
BESIDE = (
    "rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "rope_scaling", "rope_parameters",
)  # fmt: skip
"""Keys outside the rotary table that transformers ignores where the table has precedence."""
WORDS = (
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "attention_factor",
    "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "short_factor", "long_factor", "type",
)  # fmt: skip
"""Keys of a rotary table that are read under some kinds of scaling and ignored under others."""


@dataclass(frozen=True)
class Wording:
    """Names of the keys with which a family's configs describe the rotation, where they differ from Llama's."""

    theta: str = "rope_theta"
    """Key of the base outside the table."""
    share: str | None = "partial_rotary_factor"
    """Key outside the table of the share of dimensions that are rotated; None: only the table may have it."""
    part: str | None = None
    """Entry of a table that has one rule per kind of layer (Gemma 3); `rope_scaling` is then for full attention."""
    original: int | None = None
    """Default for a missing `original_max_position_embeddings` outside the table."""
    longrope: Sequence[str] = ("longrope",)
    """Values of `rope_type` that mean LongRoPE."""
    table: Mapping[str, object] | None = None
    """The rotary table for a config that has none."""
    unused: bool = False
    """Whether the model has no rotation, so that all these keys are ignored."""
    same_for_texts: Sequence[str] = ()
    """Keys of the table about positions in images, which change nothing for text."""


USUAL = Wording()


def rotary(
    settings: Settings,
    d_head: int,
    n_ctx: int,
    *,
    base: int | float = 10_000.0,
    partial: int | float | None = None,
    wording: Wording = USUAL,
) -> Rotary:
    """The rotation of a checkpoint, half-split; keys inside the table have precedence over those outside.

    Args:
        n_ctx: the config's context length.
        base, partial: the family's defaults for the base and for the share of rotated dimensions; partial None: the
            family rotates whole heads, whatever its config says.
    """
    settings.ignored(BESIDE)
    if wording.unused:
        return Rotary(base=base)
    name, table = _rope_table(settings, wording.part, wording.table)
    rule = settings.inside(name, table)
    rule.present(wording.same_for_texts)
    theta = rule.real("rope_theta", settings.real(wording.theta, base))
    stated = rule.text("rope_type", rule.text("type", "default"))
    kind = "longrope" if stated in wording.longrope else stated
    share = _rotated_share(settings, rule, kind, partial, wording.share)
    dim = int(d_head * share)
    if dim % 2 and dim != d_head:
        raise UnsupportedError(
            f"an even number of rotated dimensions is required, got partial_rotary_factor={share} of head_dim={d_head}"
        )
    truncate = (
        rule.flag("truncate", True) if wording.part is None else True
    )  # transformers looks in the outer table
    scaling = _scaling(kind, rule, n_ctx, _original_context(settings, kind, wording), dim, truncate)
    rule.ignored(WORDS)
    return Rotary(base=theta, dim=None if dim == d_head else dim, scaling=scaling)


def _rope_table(
    settings: Settings, layer_kind: str | None, usual: Mapping[str, object] | None = None
) -> tuple[str, Mapping[str, object]]:
    """The name and contents of the rotary table: `rope_scaling` (older libraries) or `rope_parameters`."""
    scaling, tables = settings.table("rope_scaling"), settings.table("rope_parameters")
    if settings.get("rope_parameters") is None:
        tables = usual or {}
    nested = {key: value for key, value in tables.items() if isinstance(value, Mapping)}
    if layer_kind is None:
        if scaling or not nested:
            return ("rope_scaling", scaling) if scaling else ("rope_parameters", tables)
        raise UnsupportedError(f"rope_parameters requires one table for all layers, got {', '.join(nested)}")
    if flat := [key for key in tables if key not in nested and tables[key] is not None]:
        raise UnsupportedError(
            f"rope_parameters requires a table for each kind of layer, got {flat[0]!r} beside them"
        )
    part_rule = nested.get(layer_kind, {"rope_type": "default"})
    return f"rope_parameters.{layer_kind}", part_rule if layer_kind == "sliding_attention" else {
        **part_rule,
        **scaling,
    }


def _rotated_share(
    settings: Settings, rule: Settings, kind: str, default: int | float | None, outside: str | None
) -> int | float:
    """The share of a head's dimensions that are rotated; 1 where the family has no such share.

    Raises:
        ValueError: a share other than 1 with a scaling rule, for a family without shares, where transformers fails.
    """
    key = "partial_rotary_factor"
    if default is not None:
        fallback = default if outside is None else settings.real(outside, default)
        return rule.real(key, fallback)
    share = rule.peek(key) if rule.peek(key) is not None else settings.peek(key)
    if kind != "default" and share not in (None, 1.0):
        raise ValueError(
            f"rope_parameters: whole heads are required under rope_type={kind!r}, got {key}={value_text(share)}"
        )
    rule.ignored((key,))
    return 1.0


def _original_context(settings: Settings, kind: str, wording: Wording) -> int | None:
    """`original_max_position_embeddings` outside the table, which overrides the one inside (Phi-3); None: absent."""
    key = "original_max_position_embeddings"
    if kind in ("default", "linear", "dynamic") or wording.part is not None:
        return None
    stated = settings.optional(key, wording.original)
    return None if stated is None else settings.count(key, wording.original)


def context(n_ctx: int, position: Rotary) -> int:
    """The context length in tokens: `max_position_embeddings`, or the length to which dynamic NTK or YaRN extend it."""
    rule = position.scaling
    if isinstance(rule, DynamicScaling | YarnScaling):
        return max(n_ctx, int(rule.original_n_ctx * rule.factor))
    return n_ctx


def yarn_score_factor(settings: Settings) -> float:
    """DeepSeek's factor on scores under a scaling rule: (0.1 m ln(factor) + 1)^2, m `mscale_all_dim`; 1 without m."""
    rule = Settings(_rope_table(settings, None)[1], "rope_parameters")
    if rule.text("rope_type", rule.text("type", "default")) == "default" or not rule.real(
        "mscale_all_dim", 0.0
    ):
        return 1.0
    return _mscale(rule.positive("factor"), rule.real("mscale_all_dim")) ** 2


def _mscale(factor: int | float, weight: int | float) -> float:
    """YaRN's magnitude 0.1 * weight * ln(factor) + 1; 1 for factors up to 1."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _scaling(
    kind: str, rule: Settings, n_ctx: int, outer: int | None, dim: int, truncate: bool
) -> RotaryScaling | None:
    """The rule that scales the rotary frequencies.

    Args:
        n_ctx: the config's context length.
        outer: the context length in training, if it is given outside the table.
    """
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(rule.real("factor"))
    if kind == "dynamic":
        return DynamicScaling(rule.real("factor"), n_ctx)
    inner = rule.count("original_max_position_embeddings", n_ctx)
    original = inner if outer is None else outer
    if kind == "llama3":
        factor, low, high = (rule.real(name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
        return Llama3Scaling(factor, low, high, original)
    if kind == "longrope":
        return _longrope(rule, original, n_ctx / original, dim)
    if kind == "yarn":
        return _yarn(rule, original, n_ctx / original, truncate)
    raise UnsupportedError(f"rope_type={kind!r} is not supported; supported: {', '.join(KINDS)}")


def _yarn(rule: Settings, original: int, stretch: int | float, truncate: bool) -> YarnScaling:
    """The YaRN rule; a missing `attention_factor` follows from the factor and DeepSeek's two `mscale` numbers."""
    factor = rule.real("factor", stretch)
    tops = [rule.real(key, 0.0) for key in ("mscale", "mscale_all_dim")]
    default_factor = (
        _mscale(factor, tops[0]) / _mscale(factor, tops[1]) if all(tops) else _mscale(factor, 1.0)
    )
    return YarnScaling(
        factor=factor,
        original_n_ctx=original,
        attention_factor=rule.real("attention_factor", default_factor),
        beta_fast=rule.real("beta_fast", 0.0) or 32.0,
        beta_slow=rule.real("beta_slow", 0.0) or 1.0,
        truncate=truncate,
    )


def _longrope(rule: Settings, original: int, stretch: int | float, dim: int) -> LongScaling:
    """The LongRoPE rule; a missing `attention_factor` is sqrt(1 + ln(factor) / ln(original))."""
    lists = []
    for key in ("short_factor", "long_factor"):
        value = rule.get(key)
        numbers = value if isinstance(value, list | tuple) else ()
        known = all(type(x) in (int, float) and abs(x) <= LARGEST for x in numbers)
        if not known or len(numbers) != dim // 2:
            raise ValueError(
                f"rope_parameters: longrope requires {dim // 2} numbers in a list {key}, got {value!r}"
            )
        lists.append(tuple(float(x) for x in numbers))
    factor = rule.real("factor", stretch)
    if original < 2:
        raise ValueError(
            f"rope_parameters: original_max_position_embeddings of at least 2 is required, got {original}"
        )
    default_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongScaling(lists[0], lists[1], original, rule.real("attention_factor", default_factor))
