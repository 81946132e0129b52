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
    return [name for name, _ in _foreign_hooks(network)]


def note_hooks(network: nn.Module) -> None:
    """Show a `Note` if the network has hooks, which our copy of it will not have."""
    if hooked := hooks_of(network):
        note(
            f"hooks on {len(hooked)} modules of this model, first {hooked[0]!r}, are no part of our copy: its numbers "
            "are those of the model without them; remove them, or say what they do as edits or hooks of the copy"
        )


def bare_copy(network: nn.Module, tensors: dict[int, object]) -> nn.Module:
    """Copies of the modules of a network, in eval mode, without hooks and without compiled modules inside.

    Args:
        tensors: id of a parameter or buffer -> the tensor that replaces it; itself, to share it.
    """
    hooks: dict[int, object] = {
        id(hook): hook for _, hook in _foreign_hooks(network)
    }  # not copied: they may hold anything
    copied_network = copy.deepcopy(network, kept(network) | hooks | tensors).eval()
    for name, module in list(copied_network.named_modules()):
        for table in (module._forward_hooks, module._forward_pre_hooks):
            for key in [key for key, hook in table.items() if id(hook) in hooks]:
                del table[key]
        if name and isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):  # torch.compile
            parent, _, last = name.rpartition(".")
            setattr(copied_network.get_submodule(parent), last, inner)
    return copied_network


def own_tensors(network: nn.Module) -> dict[int, object]:
    """id -> tensor of the parameters and buffers of a network, for a copy that shares them."""
    return {id(tensor): tensor for tensor in (*network.parameters(), *network.buffers())}


def copied(network: nn.Module) -> nn.Module:
    """A copy of the network in eval mode, on tensors of its own, with its hooks."""
    return copy.deepcopy(network, kept(network)).eval()


def kept(network: nn.Module) -> dict[int, object]:
    """id -> detached copy, of tensors that modules store as attributes (of their last pass, or made of parameters).

    `copy.deepcopy` needs them as its memo, since it cannot copy such tensors.
    """
    attributes = [vars(module) for module in network.modules()]
    values = [
        value
        for module_attributes in attributes
        for value in module_attributes.values()
        if isinstance(value, Tensor)
    ]
    values += [
        value
        for module_attributes in attributes
        for value in _tensors_in(module_attributes)
        if not value.is_leaf
    ]
    return {id(value): value.detach().clone() for value in values}


def _tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors in a value or a dict, nested dicts included."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _tensors_in(entry)


def _foreign_hooks(network: nn.Module) -> Iterator[tuple[str, object]]:
    for name, module in network.named_modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if not str(getattr(hook, "__module__", None)).startswith(LIBRARIES):
                yield name or type(module).__name__, hook
