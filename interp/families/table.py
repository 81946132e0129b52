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
    """The rules of modules with a weight and, if `bias`, a bias; several checkpoint tensors are joined along the rows.

    Args:
        names: our name of a module -> the checkpoint's name or names.
        ours, theirs: prefixes of all names, such as "blocks.{l}.".
    """
    table = []
    for name, stored in names.items():
        parts = (stored,) if isinstance(stored, str) else stored
        for kind in ("weight", "bias") if bias else ("weight",):
            joined = tuple(f"{theirs}{part}.{kind}" for part in parts)
            table.append(TensorRule(f"{ours}{name}.{kind}", joined, layout))
    return tuple(table)


def norm_rules(
    names: Mapping[str, str], norm: Norm, *, ours: str = "", theirs: str = ""
) -> tuple[TensorRule, ...]:
    """The rules of norms of one kind: a weight and a bias, where the kind has them."""
    trained = "nothing" if isinstance(norm, NoNorm) else norm.trained
    if trained == "nothing":
        return ()
    return modules(names, ours=ours, theirs=theirs, bias=trained == "gamma and beta")


def unembedding(config: ModelConfig) -> tuple[TensorRule, ...]:
    """The rules of `lm_head`: a weight unless it is tied to the embedding, and a bias where there is one."""
    kinds = {"weight": not config.tied, "bias": config.unembed_bias}
    return tuple(
        TensorRule(f"unembed.{kind}", (f"lm_head.{kind}",)) for kind, has_one in kinds.items() if has_one
    )


def tied_to(embedding: str) -> Callable[[ModelConfig], Mapping[str, str]]:
    """The `duplicates` of a family in which a tied `lm_head` may be stored besides the embedding."""
    return lambda config: {"lm_head.weight": embedding} if config.tied else {}


def heads_apart(tensor: Tensor, config: ModelConfig) -> Tensor:
    """Rows stored by head (its q, k, v), as a reordered view `[3, head, d_head, ...]`: all q, all k, all v."""
    return rearrange(tensor, "(h three e) ... -> three h e ...", h=config.n_heads, three=3)
