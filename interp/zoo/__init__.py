"""Embedded demo models with cards, hand-built models with known circuits, and the tasks they are measured on."""
