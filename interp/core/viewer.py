"""The table of functions that draw results, which `interp.plot` fills when it is imported.

Results of all packages have `.plot()` and a card in a notebook, so these are defined in `core`. Drawing requires
matplotlib and `interp.plot`, which `core` may not import; they are imported at the first use (`late.MODULES`).
"""

import textwrap
from collections.abc import Callable, Iterable, Sized
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Literal, get_args

from interp.core import late

WIDTH = 80
"""Width, in characters, of the text of a result."""
LONG = 60
"""The most characters of a value in the text of a record."""
ANALYSIS = "interp_analysis"
"""The attribute of a labelled result that names its analysis."""
Style = Literal["screen", "paper"]
"""What a picture is for: to be looked at on a screen, or to be printed in a column (`interp.plot.paper`)."""
Draw = Callable[..., object]
"""Function from a result, its own options and `ax` to matplotlib's Axes."""


def _unfilled(*args: object, **options: object) -> str:
    """RuntimeError: `interp.plot`, whose function stands here, was not imported."""
    raise RuntimeError(
        "nothing draws: interp.plot was not imported; call it through interp.plot, or import that first"
    )


@dataclass
class Pictures:
    """The functions that draw results, by analysis or class of the result."""

    draws: dict[str | type, Draw] = field(default_factory=dict)
    """By name of an analysis (with or without " over training") or class of a result, the function that draws it."""
    paper: Callable[..., object] = _unfilled
    """From an Axes and `width=` to the same, fit to be printed."""
    card: Callable[[object], str] = _unfilled
    """Function from a result to HTML with a small picture, its name and its numbers."""

    def of(self, result: object) -> Draw | None:
        """The function that draws this result; None if there is none."""
        late.fill("pictures")
        if name := named(result):
            return self.draws.get(name + over_training(result))
        kinds = (kind for kind in self.draws if isinstance(kind, type) and isinstance(result, kind))
        return next((self.draws[kind] for kind in kinds), None)


PICTURES = Pictures()
"""The one table of the package."""


class Shown:
    """Base class of objects that a notebook shows as a card: their text, below a picture if there is one."""

    def _repr_html_(self) -> str:
        return card(self)


class Viewable(Shown):
    """Base class of results outside xarray that have a picture: `.plot()` draws it."""

    def plot(self, *args: object, style: Style = "screen", width: float = 3.3, **options: object) -> object:
        """The picture of this result, matplotlib's Axes, by the function of `interp.plot` that suits it.

        The function takes the options, `ax` among them. `style="paper", width=3.3` makes it fit for a column.
        """
        return drawn(self, *args, style=style, width=width, **options)


class Brief:
    """Base class of records with a short text: tensors by kind and shape, defaults left out.

    The dataclass is declared with `repr=False`.
    """

    def __repr__(self) -> str:
        assert is_dataclass(self)
        values = ((item, getattr(self, item.name)) for item in fields(self) if item.repr)
        texts = (
            f"{item.name}={_short_text(value)}" for item, value in values if not _is_default(item, value)
        )
        return f"{type(self).__name__}({', '.join(texts)})"


def _is_default(item: Field[object], value: object) -> bool:
    """Whether a value is the field's default: the same object, or empty if the field has a default factory."""
    from_factory = item.default_factory is not MISSING and isinstance(value, Sized)
    return value is item.default or (from_factory and not value)


def _short_text(value: object) -> str:
    """A short text of a value, at most one line."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if hasattr(value, "named_modules"):
        return type(value).__name__
    named_so = is_dataclass(value) and type(value).__str__ is not object.__str__
    text = repr(str(value)) if named_so else repr(value)
    if len(text) <= LONG and "\n" not in text:
        return text
    if isinstance(value, Sized) and not isinstance(value, str):
        return f"{type(value).__name__} of {len(value)}"
    return f"{text[:LONG].splitlines()[0]}..."


def fitted(lines: Iterable[str]) -> str:
    """The lines as one text, wrapped to at most `WIDTH` characters; long words are not broken."""
    wrapped = textwrap.TextWrapper(
        WIDTH, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False
    )
    return "\n".join(wrapped.fill(line) for line in lines)


def named(result: object) -> str | None:
    """The name of the analysis in a result's attrs; None for anything that is no labelled result."""
    attrs = getattr(result, "attrs", None)
    name = attrs.get(ANALYSIS) if isinstance(attrs, dict) else None
    return name if isinstance(name, str) else None


def notes_of(result: object) -> tuple[str, ...]:
    """The sentences under `attrs["notes"]` of a Dataset, also if a file stored a single one as a string."""
    attrs = getattr(result, "attrs", None)
    notes = attrs.get("notes", ()) if isinstance(attrs, dict) else ()
    return (notes,) if isinstance(notes, str) else tuple(map(str, notes))


def over_training(result: object) -> str:
    """Suffix of the name of a result with a `step` dim, those of `over_checkpoints`."""
    return " over training" if "step" in getattr(result, "dims", ()) else ""


def described(result: object) -> str:
    """Words for a result, for error messages."""
    if name := named(result):
        return f"the result of {name}{over_training(result)}"
    kind = type(result).__name__
    return f"a {kind}" + (" that is not a result of interp" if kind == "Dataset" else "")


def drawn(
    result: object, *args: object, style: Style = "screen", width: float = 3.3, **options: object
) -> object:
    """The picture of a result, at this width in inches if it is for paper.

    Raises:
        ValueError: a result that has no picture, naming what has one; or an unknown style.
    """
    if style not in get_args(Style):
        raise ValueError(f"style must be {' or '.join(map(repr, get_args(Style)))}, got {style!r}")
    draw = PICTURES.of(result)
    if draw is None:
        objects = [kind.__name__ for kind in PICTURES.draws if isinstance(kind, type)]
        names = [name for name in PICTURES.draws if isinstance(name, str)]
        raise ValueError(
            f"no plot for {described(result)}; there is one for {', '.join(objects)}, and for the Datasets of "
            f"{', '.join(names)}"
        )
    ax = draw(result, *args, **options)
    return PICTURES.paper(ax, width=width) if style == "paper" else ax


def card(result: object) -> str:
    """HTML with a small picture of a result, its name and its numbers."""
    late.fill("pictures")
    return PICTURES.card(result)
