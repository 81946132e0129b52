"""Notes: what a call did other than its caller may think, as a warning of our own that each process gives once."""

import functools
import sys
import warnings
from types import FrameType


class Note(UserWarning):
    """A sentence about what was done other than one may think: texts that begin with BOS, a sample, a shorter list.

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
    """The `stacklevel`, seen from the inner frame, of the one that called the outermost function of this package."""
    package, level, found = __name__.partition(".")[0], 0, 1
    frame: FrameType | None = inner
    while frame is not None:
        level += 1
        if frame.f_globals.get("__name__", "").partition(".")[0] == package:
            found = level + 1
        frame = frame.f_back
    return found
