"""What every sender of an edge graph adds to the stream in one run, heads kept as z, d_head wide."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from interp.circuits.edge_scores import START, Change
from interp.core.precision import wide
from interp.core.stats import MaskedMeans, Partial
from interp.data.batch import Batch
from interp.data.stream import prompt_source
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer
from interp.model.weights import Weights
from interp.passes.analysis import Analysis
from interp.passes.frozen import output_norm
from interp.passes.observe import Subject
from interp.runs.run import reduced_over

if TYPE_CHECKING:
    import xarray as xr

Values = Mapping[Read, Tensor]
"""Answers to `edge_scores.Change.reads`."""


@dataclass(frozen=True, eq=False)
class Outputs:
    """What every sender adds to the stream, one row per example or one for all; heads as z, d_head wide.

    Behind a norm of the sum of a layer's heads (sandwich and output norms), z is divided by the norm's scale in its
    own run, so that W_O and the linear part of the norm make a head's share of it; the bias b_O is then one head more,
    whose z is 1 / scale.
    """

    start: Float[Tensor, "n p d"]
    heads: tuple[Float[Tensor, "n p h e"], ...]
    mlp: tuple[Float[Tensor, "n p d"], ...]

    @classmethod
    def of(cls, model: Transformer, values: Values) -> "Outputs":
        """From the answers to `Change.reads`."""
        layers = range(model.config.n_layers)
        mlp = [mlp_output(values, layer) for layer in layers if model.config.mlp is not None]
        heads = [head_outputs(model, values, layer) for layer in layers]
        return cls(wide(values[Read(START)]), tuple(heads), tuple(mlp))

    @classmethod
    def nothing(cls, model: Transformer) -> "Outputs":
        """Nothing said, for all examples and positions; a bias behind a norm is no head's, it stays what it is."""
        config, like = model.config, wide(model.embed.weight[:0])
        stream, z = like.new_zeros(1, 1, 1), like.new_zeros(1, 1, config.n_heads, 1)
        return cls(
            stream, (z,) * config.n_layers, (stream,) * config.n_layers if config.mlp is not None else ()
        )

    def named(self) -> dict[str, Tensor]:
        """The same as one tensor per sender and layer, by name; `of_named` takes it back."""
        heads = {f"heads {layer}": x for layer, x in enumerate(self.heads)}
        return {"start": self.start} | heads | {f"mlp {layer}": x for layer, x in enumerate(self.mlp)}

    @classmethod
    def of_named(cls, values: Mapping[str, Tensor]) -> "Outputs":
        """What `named` made flat."""
        heads = tuple(x for name, x in values.items() if name.startswith("heads"))
        return cls(values["start"], heads, tuple(x for name, x in values.items() if name.startswith("mlp")))

    def each(self, change: Callable[[Tensor], Tensor]) -> "Outputs":
        """The same with all values changed alike."""
        return Outputs(change(self.start), tuple(map(change, self.heads)), tuple(map(change, self.mlp)))


@dataclass(frozen=True, eq=False)
class MeanOutputs:
    """What every sender says on average over reference prompts, position by position; padding does not count."""

    outputs: Outputs
    known: Bool[Tensor, "p"]
    """The columns where there was a token to take the mean of."""

    @classmethod
    def over(cls, model: Subject, reference: Batch, batch_size: int) -> "MeanOutputs":
        """The means of these prompts."""
        network = model.transformer
        reads = Change.reads(network)
        asked = Analysis("mean_outputs", _said, MaskedMeans, _unlabelled, reads=reads)
        source = prompt_source(reference, model.text, prepend_bos=True, batch_size=batch_size)
        total = reduced_over(asked, model, source)
        assert isinstance(total, MaskedMeans)
        like = wide(network.embed.weight[:0])
        means = {name: moments.mean[None].to(like) for name, moments in total.moments.items()}
        return cls(Outputs.of_named(means), reference.real.any(0).cpu())

    def for_rows(self, batch: Batch) -> Outputs:
        """The means for the columns of a batch.

        Errors: ValueError for a batch that has tokens where the reference has none, or, if it is not as wide, padding
        on the left.
        """
        ours = batch.real.any(0).cpu()
        columns, mine = len(ours), len(self.known)
        from_left = bool(batch.real[:, 0].all()) and bool(self.known[0])
        if bool((ours & ~_as_wide(self.known, columns)).any()) or (columns != mine and not from_left):
            raise ValueError(
                "a mean by position requires reference prompts as long as the clean ones, got "
                f"{int(self.known.sum())} positions for {int(ours.sum())}"
            )
        return self.outputs if columns == mine else self.outputs.each(partial(_columns, count=columns))


def _said(trace: Trace, batch: Batch, model: Transformer) -> dict[str, Tensor]:
    """What every sender says, NaN at padding."""
    absent = ~batch.real

    def masked(x: Tensor) -> Tensor:
        return x.masked_fill(absent.view(*absent.shape, *[1] * (x.ndim - 2)), torch.nan)

    return Outputs.of(model, trace).each(masked).named()


def _unlabelled(merged: Partial) -> "xr.Dataset":
    raise AssertionError("means of senders are not labelled")


def _as_wide(known: Bool[Tensor, "p"], columns: int) -> Bool[Tensor, "q"]:
    """So many columns, False beyond its own."""
    return F.pad(known, (0, columns - len(known)))


def _columns(value: Float[Tensor, "n p ..."], count: int) -> Float[Tensor, "n q ..."]:
    """So many columns of a value, 0 beyond its own, where there is padding alone."""
    missing = count - value.shape[1]
    return F.pad(value, (*[0] * (2 * value.ndim - 3), missing)) if missing > 0 else value[:, :count]


def head_outputs(model: Transformer, values: Values, layer: int) -> Float[Tensor, "n p h e"]:
    """What the heads of a layer say, see `Outputs`."""
    z, post = wide(values[Read(f"blocks.{layer}.attn.hook_z")]), Read(f"blocks.{layer}.ln1_post.hook_scale")
    if post not in values:
        return z
    scale = wide(values[post])[..., None]
    if model.block(layer).attn.out.bias is None:
        return z / scale
    one = torch.zeros_like(z[:, :, :1])
    one[..., 0] = 1
    return torch.cat((z, one), 2) / scale


def head_matrices(model: Transformer, layer: int) -> Float[Tensor, "h e d"]:
    """What turns the `head_outputs` of a layer into what is added to the stream."""
    out, norm = wide(Weights(model).layer(layer).W_O), output_norm(model, layer, "attn_out")
    bias = model.block(layer).attn.out.bias
    if norm.sites and bias is not None:
        extra = torch.zeros_like(out[:1])
        extra[0, 0] = wide(bias)
        out = torch.cat((out, extra))
    return norm.through(out)


def mlp_output(values: Values, layer: int) -> Float[Tensor, "n p d"]:
    """What the MLP of a layer adds to the stream."""
    return wide(values[Read(f"blocks.{layer}.hook_mlp_out")])
