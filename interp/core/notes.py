"""Notes: warnings that a call did something other than its caller may expect, given once per process."""

import functools
import sys
import warnings
from types import FrameType


class Note(UserWarning):
    """A warning that a call did something other than its caller may expect: texts that begin with BOS, a sample, ...

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore", interp.Note)  # where they are not wanted
    """


@functools.cache  # which makes it once per process and text
def note(text: str) -> None:
    """Warn with a `Note`, once per process and text, at the line that called into the package."""
    warnings.warn(text, Note, stacklevel=_level_of_the_caller(sys._getframe()))


def _level_of_the_caller(inner: FrameType) -> int:
    """The `stacklevel`, counted from `inner`, of the frame that called the outermost function of this package."""
    package, level, outermost = __name__.partition(".")[0], 0, 1
    frame: FrameType | None = inner
    while frame is not None:
        level += 1
        if frame.f_globals.get("__name__", "").partition(".")[0] == package:
            outermost = level + 1
        frame = frame.f_back
    return outermost
