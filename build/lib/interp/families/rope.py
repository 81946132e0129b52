"""Rotary positions as configs describe them: `rope_parameters` (transformers 5), or `rope_theta` + `rope_scaling`."""

import math
from collections.abc import Mapping, Sequence

from interp.families.spec import LARGEST, Settings
from interp.model.config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    Rotary,
    Scaling,
    YarnScaling,
)

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


def rotary(
    settings: Settings,
    d_head: int,
    *,
    base: float = 10_000.0,
    partial: float = 1.0,
    outside: tuple[str, str] = ("rope_theta", "partial_rotary_factor"),
    part: str | None = None,
    same_for_texts: Sequence[str] = (),
) -> Rotary:
    """The rotation of a checkpoint, half-split.

    base, partial: the family's defaults for `rope_theta` and `partial_rotary_factor`.
    outside: the names of both where they stand beside the table and not in it (NeoX has its own).
    same_for_texts: keys of the table that tell the positions of images apart, and change nothing in a text.
    part: the entry of a table with one rule per kind of layer (Gemma 3); `rope_scaling` then means full attention.
    """
    scaling = {} if part == "sliding_attention" else settings.table("rope_scaling")
    tables = settings.table("rope_parameters")
    nested = tables.get(part) if part is not None else tables
    if part is not None and (
        flat := [key for key, value in tables.items() if not isinstance(value, Mapping)]
    ):
        raise ValueError(
            f"rope_parameters requires a table for each kind of layer, got {flat[0]!r} beside them"
        )
    rule = Settings({**scaling, **(nested if isinstance(nested, Mapping) else {})}, "rope_parameters")
    rule.present(same_for_texts)
    theta = _agreed(settings, rule, (outside[0], "rope_theta"), base)
    share = _agreed(settings, rule, (outside[1], "partial_rotary_factor"), partial)
    dim = int(d_head * share)
    rotated = _scaling(rule.text("rope_type", rule.text("type", "default")), rule, settings, dim)
    rule.finish()
    return Rotary(base=theta, dim=None if dim == d_head else dim, scaling=rotated)


def context(settings: Settings, position: Rotary, default: int | None = None) -> int:
    """Tokens the model takes: `max_position_embeddings`, or as many as dynamic NTK or YaRN stretch it to."""
    n_ctx = settings.count("max_position_embeddings", default)
    rule = position.scaling
    if isinstance(rule, DynamicScaling | YarnScaling):
        return max(n_ctx, int(rule.original_n_ctx * rule.factor))
    return n_ctx


def yarn_score_factor(settings: Settings) -> float:
    """DeepSeek's factor on scores under a scaling rule: (0.1 m ln(factor) + 1)^2, m `mscale_all_dim`; 1 without m."""
    rule = Settings(
        {**settings.table("rope_scaling"), **settings.table("rope_parameters")}, "rope_parameters"
    )
    if rule.text("rope_type", rule.text("type", "default")) == "default" or not rule.real(
        "mscale_all_dim", 0.0
    ):
        return 1.0
    return _mscale(rule.positive("factor"), rule.real("mscale_all_dim")) ** 2


def _mscale(factor: float, weight: float) -> float:
    """YaRN's magnitude 0.1 weight ln(factor) + 1; 1 where nothing is stretched."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _agreed(settings: Settings, rule: Settings, keys: tuple[str, str], default: float) -> float:
    """A number given beside the rotary table, inside it, or not at all; ValueError if both and different."""
    outside, inside = keys
    outer = settings.real(outside, rule.real(inside, default))
    inner = rule.real(inside, outer)
    if inner != outer:
        raise ValueError(f"{outside} is given twice and differs: {outer}, and {inner} in rope_parameters")
    return inner


def _scaling(kind: str, rule: Settings, settings: Settings, dim: int) -> Scaling | None:
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(rule.real("factor"))
    n_ctx = settings.count("max_position_embeddings")
    if kind == "dynamic":
        return DynamicScaling(rule.real("factor"), n_ctx)
    inner = rule.count("original_max_position_embeddings", n_ctx)
    # beside the table stands Phi-3's, which counts before the one inside
    original = settings.count("original_max_position_embeddings", inner)
    if kind == "llama3":
        factor, low, high = (rule.real(name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
        return Llama3Scaling(factor, low, high, original)
    if kind in ("longrope", "su") or rule.present(("short_factor",)):  # Phi-3 called it su, then yarn
        return _long(rule, original, n_ctx / original, dim)
    if kind == "yarn":
        return _yarn(rule, original, n_ctx / original)
    raise ValueError(f"rope_type={kind!r} is not supported; supported: {', '.join(KINDS)}")


def _yarn(rule: Settings, original: int, stretch: float) -> YarnScaling:
    """YaRN; without `attention_factor` it follows from the factor and DeepSeek's two `mscale` numbers."""
    factor = rule.real("factor", stretch)
    tops = [rule.real(key, 0.0) for key in ("mscale", "mscale_all_dim")]
    own = _mscale(factor, tops[0]) / _mscale(factor, tops[1]) if all(tops) else _mscale(factor, 1.0)
    return YarnScaling(
        factor=factor,
        original_n_ctx=original,
        attention_factor=rule.real("attention_factor", own),
        beta_fast=rule.real("beta_fast", 0.0) or 32.0,
        beta_slow=rule.real("beta_slow", 0.0) or 1.0,
        truncate=rule.flag("truncate", True),
    )


def _long(rule: Settings, original: int, stretch: float, dim: int) -> LongScaling:
    """LongRoPE; without `attention_factor` it is sqrt(1 + ln(stretch) / ln(original context))."""
    lists = []
    for key in ("short_factor", "long_factor"):
        found = rule.get(key)
        numbers = found if isinstance(found, list | tuple) else ()
        known = all(type(x) in (int, float) and abs(x) <= LARGEST for x in numbers)
        if not known or len(numbers) != dim // 2:
            raise ValueError(
                f"rope_parameters: longrope requires {dim // 2} numbers in a list {key}, got {found!r}"
            )
        lists.append(tuple(float(x) for x in numbers))
    factor = rule.real("factor", stretch)
    if original < 2:
        raise ValueError(
            f"rope_parameters: original_max_position_embeddings of at least 2 is required, got {original}"
        )
    own = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongScaling(lists[0], lists[1], original, rule.real("attention_factor", own))
