"""`python -m interp` and the `interp` command."""

from interp.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    raise SystemExit(main())
