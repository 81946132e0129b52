"""Live networks as people have them: inside the wrappers of torch and of tools for reinforcement learning."""

from torch import nn


def inside(network: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
    """The Hugging Face model in the wrappers around it, and what was taken off that is more than a wrapper.

    Errors: ValueError for a model whose parameters lie in pieces on several processes, and for a bridge of
    TransformerLens.
    """
    said: tuple[str, ...] = ()
    while True:
        name = type(network).__name__
        if name.startswith(("FullyShardedDataParallel", "FSDP")):
            raise ValueError(
                f"a model whose parameters are all here is required, {name} holds pieces: save it, give the folder"
            )
        if isinstance(network, nn.DataParallel | nn.parallel.DistributedDataParallel):
            network = network.module
        elif isinstance(inner := getattr(network, "_orig_mod", None), nn.Module):  # torch.compile
            network = inner
        elif isinstance(
            inner := getattr(network, "pretrained_model", None), nn.Module
        ):  # with a value head (TRL)
            network, said = inner, (*said, f"the value head of {name} is left out")
        elif hasattr(network, "original_model"):
            raise ValueError(f"{name} wraps a model: interp.compat.from_bridge reads it")
        else:
            return network, said
