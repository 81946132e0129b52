"""Unwrapping of live networks: wrappers of torch (DataParallel, compile) and of tools for reinforcement learning."""

from torch import nn


def inside(network: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
    """The Hugging Face model inside its wrappers, and a note about each wrapper that was removed.

    Raises:
        ValueError: a model whose parameters are sharded over processes (FSDP), or a bridge of TransformerLens.
    """
    notes: tuple[str, ...] = ()
    while True:
        name = type(network).__name__
        if name.startswith(("FullyShardedDataParallel", "FSDP")):
            raise ValueError(
                f"a model whose parameters are all here is required, {name} holds pieces: save it, give the folder"
            )
        if isinstance(network, nn.DataParallel | nn.parallel.DistributedDataParallel):
            network, notes = network.module, (*notes, f"taken out of {name}")
        elif isinstance(inner := getattr(network, "_orig_mod", None), nn.Module):
            network, notes = inner, (*notes, "taken out of torch.compile: its passes here are not compiled")
        elif isinstance(
            inner := getattr(network, "pretrained_model", None), nn.Module
        ):  # with a value head (TRL)
            network, notes = inner, (*notes, f"the value head of {name} is left out")
        elif hasattr(network, "original_model"):
            raise ValueError(f"{name} wraps a model: interp.compat.from_bridge reads it")
        else:
            return network, notes
