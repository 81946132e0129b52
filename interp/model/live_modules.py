"""Networks that belong to the caller: hooks and wrappers on their modules, and copies of them on the same tensors.

A copy has none of the hooks that observers put on the network, so that its numbers are the network's own.
"""

import copy
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from interp.core.notes import note

LIBRARIES = ("transformers.", "accelerate.", "peft.", "torch.")
"""Modules whose hooks belong to a network rather than to an observer of it."""


def hooks_of(network: nn.Module) -> list[str]:
    """The names of the modules with forward hooks that no library put there."""
    return [name for name, _ in _foreign(network)]


def note_hooks(network: nn.Module) -> None:
    """Warn that the hooks on a network are no part of what is made of it."""
    if hooked := hooks_of(network):
        note(
            f"hooks on {len(hooked)} modules of this model, first {hooked[0]!r}, are no part of our copy: its numbers "
            "are those of the model without them; remove them, or say what they do as edits or hooks of the copy"
        )


def bare_copy(network: nn.Module, tensors: dict[int, object]) -> nn.Module:
    """Copies of the modules of a network, in eval mode, without hooks and without compiled modules inside.

    Args:
        tensors: what takes the place of parameters and buffers, by their identity: themselves, to share them.
    """
    hooks: dict[int, object] = {
        id(hook): hook for _, hook in _foreign(network)
    }  # not copied: they may hold anything
    found = copy.deepcopy(network, kept(network) | hooks | tensors).eval()
    for name, module in list(found.named_modules()):
        for table in (module._forward_hooks, module._forward_pre_hooks):
            for key in [key for key, hook in table.items() if id(hook) in hooks]:
                del table[key]
        if name and isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):  # torch.compile
            parent, _, last = name.rpartition(".")
            setattr(found.get_submodule(parent), last, inner)
    return found


def own_tensors(network: nn.Module) -> dict[int, object]:
    """The parameters and buffers of a network by their identity, for a copy that shares them."""
    return {id(tensor): tensor for tensor in (*network.parameters(), *network.buffers())}


def copied(network: nn.Module) -> nn.Module:
    """A copy of the network in eval mode, on tensors of its own, with its hooks."""
    return copy.deepcopy(network, kept(network)).eval()


def kept(network: nn.Module) -> dict[int, object]:
    """Copies of the tensors that modules keep of their last pass, or computed from parameters, by identity.

    For a copy of the network; adapters of tied embeddings compute such tensors.
    """
    attributes = [vars(module) for module in network.modules()]
    found = [value for each in attributes for value in each.values() if isinstance(value, Tensor)]
    found += [value for each in attributes for value in _tensors(each) if not value.is_leaf]
    return {id(value): value.detach().clone() for value in found}


def _tensors(value: object) -> Iterator[Tensor]:
    """The tensors in what a module keeps, in dicts of dicts too."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)


def _foreign(network: nn.Module) -> Iterator[tuple[str, object]]:
    for name, module in network.named_modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if not str(getattr(hook, "__module__", None)).startswith(LIBRARIES):
                yield name or type(module).__name__, hook
