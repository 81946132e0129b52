"""Functions that a user gives to answer yes or no, whose answers are checked."""

import re
from collections.abc import Callable

import numpy as np

from interp.core.wording import value_text


def yes_or_no(function: Callable[[str], object], what: str) -> Callable[[str], bool]:
    """The function with its answers checked: a text or a tensor of several numbers is neither yes nor no.

    What `re.search` returns is: a match, or None.

    Args:
        function: a function of a text.
        what: its name in the error.

    Raises:
        ValueError: (the returned function) an answer that is neither True nor False.

    Example:
        >>> yes_or_no(lambda text: "no", "stop")("a")
        Traceback (most recent call last):
        ValueError: stop must return True or False, got 'no' (str) for 'a' (str)
    """

    def answered(text: str) -> bool:
        answer = function(text)
        if not isinstance(answer, bool | np.bool_ | re.Match | None):
            raise ValueError(
                f"{what} must return True or False, got {value_text(answer)} for {value_text(text)}"
            )
        return bool(answer)

    return answered
