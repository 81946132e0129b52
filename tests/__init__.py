"""The test suite; it mirrors `interp`, plus `contract` for the rules that hold everywhere."""
