"""The oracle of edits: a zeroed head is a head whose rows of W_O are zero, for every number but that head's own z."""

from interp import Transformer
from tests.configs import CONFIGS, build


def without_head(name: str, layer: int = 1, head: int = 2) -> Transformer:
    """A copy of the model of one of the `CONFIGS` whose W_O rows of one head are 0."""
    network = Transformer(CONFIGS[name]).double().eval().requires_grad_(False)
    network.load_state_dict(build(name).state_dict())
    width = CONFIGS[name].head_width
    network.block(layer).attn.out.weight[:, head * width : (head + 1) * width] = 0
    return network
