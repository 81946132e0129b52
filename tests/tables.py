"""What tests say of the tables that `interp.frame` makes."""

PART_COLUMNS = ["layer", "head", "kind"]
"""What spells out a part beside its name; a table is narrow with at most 12 columns besides."""
