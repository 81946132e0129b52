"""What several commands need."""


def available(name: str) -> str:
    """The name, if there is such a device here; ValueError otherwise, before any weights are read."""
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as cause:
        raise ValueError(f"device {name!r} is not available: {cause}") from cause
    return name
