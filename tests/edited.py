"""The oracles of edits: a zeroed head is one whose rows of W_O are zero, for every number but that head's own z; or one
whose values are zero, for every number but their gradients.
"""

from dataclasses import replace

from interp.model import Transformer
from tests.configs import CONFIGS, build


def without_head(name: str, layer: int = 1, head: int = 2) -> Transformer:
    """A copy of the model of one of the `CONFIGS` whose W_O rows of one head are 0."""
    network = copy_of(name)
    width = network.config.head_width
    network.block(layer).attn.out.weight[:, head * width : (head + 1) * width] = 0
    return network


def without_values(name: str, layer: int = 1, head: int = 2) -> Transformer:
    """A copy of one of the models whose heads have values of their own, where those of one head are 0."""
    config, network = CONFIGS[name], copy_of(name)
    assert config.kv_heads == config.n_heads, "heads that share their values cannot lose them alone"
    width = config.head_width
    start = 2 * config.n_heads * width + head * width
    qkv = network.block(layer).attn.qkv
    qkv.weight[start : start + width] = 0
    if qkv.bias is not None:
        qkv.bias[start : start + width] = 0
    return network


def copy_of(name: str) -> Transformer:
    """A copy of the model of one of the `CONFIGS`."""
    own = build(name)
    network = Transformer(replace(own.config, features=None)).double().eval().requires_grad_(False)
    network.load_state_dict(own.state_dict())
    return network.with_dictionaries(list(own.dictionaries.values())) if own.dictionaries else network
