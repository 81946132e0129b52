"""Any Hugging Face decoder by contract: its own code, watched, and offered as far as it was proven."""

from interp.wrapped.network import Wrapped, WrappedCache
from interp.wrapped.prove import wrap
from interp.wrapped.search import UnknownNetworkError

__all__ = ["UnknownNetworkError", "Wrapped", "WrappedCache", "wrap"]
