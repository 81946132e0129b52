"""Which layers have a sliding window, from `sliding_window` and `layer_types` in a config, or a family's rule."""

from collections.abc import Callable

from interp.families.spec import Settings

LINEAR = ("full_attention", "linear_attention")
KINDS = ("full_attention", "sliding_attention")


def window_size(settings: Settings, default: int | None) -> int | None:
    """`sliding_window`, None where the config says so; `default` stands in for a missing key only."""
    return settings.optional_integer("sliding_window", default)


def local_layers(
    settings: Settings, n_layers: int, size: int | None, is_local: Callable[[int], bool]
) -> tuple[int | None, tuple[int, ...] | None]:
    """The window and the layers that have it (None and None if none does): `layer_types`, or else the family's rule.

    Raises:
        ValueError: other kinds of layers, a list of the wrong length, or windows without a size.
    """
    kinds = settings.get("layer_types")
    if kinds is None:
        kinds = [KINDS[is_local(layer)] for layer in range(n_layers)]
    if (
        not isinstance(kinds, list | tuple)
        or len(kinds) != n_layers
        or any(kind not in KINDS for kind in kinds)
    ):
        raise ValueError(f"layer_types requires {n_layers} of {' and '.join(KINDS)}, got {kinds!r}")
    local = tuple(layer for layer, kind in enumerate(kinds) if kind == KINDS[1])
    if local and size is None:
        raise ValueError(f"layers {local} have a sliding window, but sliding_window is None")
    return (size, local) if local else (None, None)


def full_layers(
    settings: Settings, n_layers: int, every: Callable[[int], bool], kinds: tuple[str, str] = LINEAR
) -> list[bool]:
    """Whether each layer has attention and not the family's other mixer: `layer_types`, or else the family's rule.

    Args:
        kinds: names of the two in `layer_types`.

    Raises:
        ValueError: other kinds, or a list of the wrong length.
    """
    layer_types = settings.get("layer_types")
    if layer_types is None:
        return [every(layer) for layer in range(n_layers)]
    if (
        not isinstance(layer_types, list | tuple)
        or len(layer_types) != n_layers
        or any(kind not in kinds for kind in layer_types)
    ):
        raise ValueError(f"layer_types requires {n_layers} of {' and '.join(kinds)}, got {layer_types!r}")
    return [kind == kinds[0] for kind in layer_types]


def from_layer(settings: Settings, n_layers: int) -> tuple[int | None, tuple[int, ...] | None]:
    """Qwen's rule: with `use_sliding_window`, the layers from `max_window_layers` on have the window."""
    size = window_size(settings, 4096) if settings.flag("use_sliding_window", False) else None
    settings.get("sliding_window")  # ignored without use_sliding_window
    first = settings.integer("max_window_layers", 28)
    return local_layers(settings, n_layers, size, lambda layer: size is not None and layer >= first)
