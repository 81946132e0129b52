"""Interventions: the changes of an edit (`Zero`, `Add`, `Mean`, ...), and edits as JSON and Python."""

from interp.model.edits import Add, Detach, Edit, Mean, Project, Resample, Scale, Set, Swap, Zero
from interp.model.layout import PerRow
from interp.passes.edit_text import edit_from_json, edit_to_json, edit_to_python
from interp.passes.variants import Variant

__all__ = [
    "Add",
    "Detach",
    "Edit",
    "Mean",
    "PerRow",
    "Project",
    "Resample",
    "Scale",
    "Set",
    "Swap",
    "Variant",
    "Zero",
    "edit_from_json",
    "edit_to_json",
    "edit_to_python",
]
