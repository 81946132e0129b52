"""How far two records of a transcript are apart: `compare.py OURS THEIRS`; exit status 1 where they differ.

Whole numbers must be equal; others agree relative to the largest entry, by dtype. Training amplifies rounding: what was
measured after it has a tolerance of its own.
"""

import sys

import torch

TOLERANCES = {torch.float64: 1e-6, torch.float32: 2e-5}
"""circuit-tracer computes in float64 and keeps edges in float32; SAELens computes in float32."""
TRAINED = 5e-3


def main(ours: str, theirs: str) -> None:
    """Print the largest difference of each value."""
    mine, other = (torch.load(path, weights_only=True) for path in (ours, theirs))
    assert mine.keys() == other.keys(), mine.keys() ^ other.keys()
    wrong = []
    for name, value in mine.items():
        assert value.shape == other[name].shape and value.dtype == other[name].dtype, name
        scale = other[name].abs().max().clamp_min(1e-30) if value.is_floating_point() else 1
        apart = float((value.double() - other[name].double()).abs().max() / scale)
        print(f"  {name:42} {apart:.1e}")
        allowed = TRAINED if name.startswith("trained") else TOLERANCES.get(value.dtype, 0.0)
        if not apart <= allowed:
            wrong.append(name)
    if wrong:
        sys.exit(f"these differ: {', '.join(wrong)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
