"""`BaseTensorConversion`: what `HookPoint.enable_reshape` takes to show hooks another shape than the model's."""

from collections.abc import Callable
from typing import Any

__path__: list[str] = []
"""To the import system a package: `conversion_utils.conversion_steps` is this module (`install.ALIASES`)."""
Filter = Callable[[Any], Any]


class BaseTensorConversion:
    """A conversion to be subclassed: `handle_conversion` there, `revert` back, the identity unless overridden."""

    def __init__(self, input_filter: Filter | None = None, output_filter: Filter | None = None) -> None:
        """Filters: applied before and after `handle_conversion` by `convert`."""
        self.input_filter = input_filter
        self.output_filter = output_filter

    def convert(self, input_value: Any, *full_context: Any) -> Any:
        """The value that hooks see."""
        value = input_value if self.input_filter is None else self.input_filter(input_value)
        value = self.handle_conversion(value, *full_context)
        return value if self.output_filter is None else self.output_filter(value)

    def handle_conversion(self, input_value: Any, *full_context: Any) -> Any:
        """The conversion itself; NotImplementedError in this class."""
        raise NotImplementedError(f"{type(self).__name__} must define handle_conversion")

    def revert(self, input_value: Any, *full_context: Any) -> Any:
        """The value that the model goes on with."""
        return input_value
