"""Pieces of weight tables that many families share."""

from collections.abc import Callable, Mapping

from einops import rearrange
from torch import Tensor

from interp.families.spec import TensorLayout, TensorRule, same
from interp.model.config import ModelConfig, NoNorm, Norm


def modules(
    names: Mapping[str, str | tuple[str, ...]],
    *,
    ours: str = "",
    theirs: str = "",
    bias: bool = True,
    layout: TensorLayout = same,
) -> tuple[TensorRule, ...]:
    """The rules of modules with a weight and, perhaps, a bias: name -> the checkpoint's, joined along the rows.

    Args:
        ours, theirs: what stands before every name, such as "blocks.{l}.".
    """
    table = []
    for name, found in names.items():
        parts = (found,) if isinstance(found, str) else found
        for kind in ("weight", "bias") if bias else ("weight",):
            joined = tuple(f"{theirs}{part}.{kind}" for part in parts)
            table.append(TensorRule(f"{ours}{name}.{kind}", joined, layout))
    return tuple(table)


def norm_rules(
    names: Mapping[str, str], norm: Norm, *, ours: str = "", theirs: str = ""
) -> tuple[TensorRule, ...]:
    """The rules of norms of one kind: a weight and a bias where the kind has them."""
    trained = "nothing" if isinstance(norm, NoNorm) else norm.trained
    if trained == "nothing":
        return ()
    return modules(names, ours=ours, theirs=theirs, bias=trained == "gamma and beta")


def unembedding(config: ModelConfig) -> tuple[TensorRule, ...]:
    """The rules of `lm_head`: a matrix unless it is the embedding's, and a bias where there is one."""
    kinds = {"weight": not config.tied, "bias": config.unembed_bias}
    return tuple(
        TensorRule(f"unembed.{kind}", (f"lm_head.{kind}",)) for kind, has_one in kinds.items() if has_one
    )


def tied_to(embedding: str) -> Callable[[ModelConfig], Mapping[str, str]]:
    """The duplicates of a family: a tied `lm_head` may be stored as well as the embedding."""
    return lambda config: {"lm_head.weight": embedding} if config.tied else {}


def heads_apart(tensor: Tensor, config: ModelConfig) -> Tensor:
    """Rows stored head by head, each its q, k and v, as a reordered view: all of q, all of k, all of v."""
    return rearrange(tensor, "(h three e) ... -> three h e ...", h=config.n_heads, three=3)
