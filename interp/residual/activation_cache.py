"""The activations of one pass under their site names, with methods that decompose the residual stream."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.axes import shape_text
from interp.core.boundary import public
from interp.core.kinds import Device, require_device
from interp.core.viewer import Shown, fitted
from interp.core.wording import nearest, value_text
from interp.data.ids import check_contrast
from interp.model.parts import Part
from interp.model.sites import full_name
from interp.model.transformer import Transformer
from interp.passes.frozen import final_norm
from interp.residual import decomposition
from interp.residual.decomposition import Decomposition

_BLOCK = re.compile(r"^blocks\.\d+\.")
_BY_COLUMN = re.compile(r"hook_(resid_\w+|z|post|mlp_out|attn_out|embed)$")
"""Matches sites `[batch, pos, ...]`, which say how many positions the pass has."""
Key = str | tuple[str, int] | tuple[str, int, str]


@public(unchecked=("values",))
class ActivationCache(Shown, Mapping[str, Tensor]):
    """Activations that `run_with_cache` recorded, by site name or in shorthand: `cache["pattern", 3]`.

    A negative layer counts from the end. Methods that split the residual stream check that the parts sum to it, and
    raise `IncompleteSumError` if they do not.
    """

    def __init__(self, values: Mapping[str, Tensor], model: Transformer, *, batched: bool = True) -> None:
        if not isinstance(values, Mapping) or not all(isinstance(value, Tensor) for value in values.values()):
            raise ValueError(
                f"ActivationCache: values must be activations by the names of their sites, got {value_text(values)}"
            )
        self._values = dict(values)
        self.model = model
        self.batched = batched

    def __getitem__(self, key: Key) -> Tensor:
        name = key if isinstance(key, str) else self._site_name(*_checked_key(key))
        value = self._values.get(name)
        if value is None:
            value = self._values.get(full_name(name)) if "hook_" not in name else None
        if value is None:
            raise KeyError(f"{name!r} was not recorded; {nearest(name, self._values)}")
        return value

    def _site_name(self, short: str, layer: int, part: str | None = None) -> str:
        n = self.model.config.n_layers
        if not -n <= layer < n:
            raise KeyError(f"layers are 0 to {n - 1}, got {layer}")
        return full_name(short, layer % n, part)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        megabytes = sum(v.nbytes for v in self._values.values()) / 2**20
        return f"ActivationCache({len(self)} activations, {megabytes:.1f} MiB)"

    def __str__(self) -> str:
        kinds = Counter(
            (_BLOCK.sub("blocks.*.", name), shape_text(v.shape)) for name, v in self._values.items()
        )
        lines = [
            f"  {name} {shape}{f' x {count} layers' if count > 1 else ''}"
            for (name, shape), count in kinds.items()
        ]
        return fitted([repr(self), *lines])

    @public()
    def to(self, device: Device) -> "ActivationCache":
        """The activations on another device (the model stays where it is); ValueError for one that is not here."""
        require_device(device, numbers=False)
        moved = {name: value.to(device) for name, value in self._values.items()}
        return ActivationCache(moved, self.model, batched=self.batched)

    def remove_batch_dim(self) -> "ActivationCache":
        """The activations of the only row, without the batch axis; ValueError if there are several rows."""
        if not self.batched:
            return self
        rows = {value.shape[0] for value in self._values.values()}
        if rows != {1}:
            raise ValueError(f"the batch axis can be dropped for one row only, got {sorted(rows)}")
        return ActivationCache({n: v[0] for n, v in self._values.items()}, self.model, batched=False)

    @public()
    def accumulated_resid(self, layer: int | None = None, *, incl_mid: bool = False) -> Decomposition:
        """The stream at each depth up to `layer`, `[depth, batch, pos, d_model]`, for a lens."""
        return decomposition.accumulated(self._rows(), self.model, layer, incl_mid=incl_mid)

    @public()
    def decompose_resid(self, layer: int | None = None) -> Decomposition:
        """Embeddings and every sublayer's addition before depth `layer`, `[part, batch, pos, d_model]`."""
        return decomposition.by_sublayer(self._rows(), self.model, layer)

    @public()
    def stack_head_results(self, layer: int | None = None) -> Decomposition:
        """Every head's write and the remainder, `[part, batch, pos, d_model]`."""
        return decomposition.by_head(self._rows(), self.model, layer)

    @public()
    def head_source_results(self, layer: int, pos: int = -1) -> Float[Tensor, "h k b d"]:
        """Write of each head at `pos` by source position, `[head, source, batch, d_model]`."""
        return decomposition.by_source(self._rows(), self.model, layer, self._column(pos))

    @public()
    def stack_neuron_results(self, layer: int, pos: int = -1, *, before: bool = False) -> Decomposition:
        """Every neuron's write at `pos`, `[neuron + 1, batch, d_model]`, the last one b_out.

        Args:
            layer: the layer of the MLP.
            pos: the position.
            before: whether the neurons are those of the MLP before attention, in Macaron blocks.
        """
        return decomposition.by_neuron(self._rows(), self.model, layer, self._column(pos), before=before)

    @public()
    def apply_ln_to_stack(self, stack: Float[Tensor, "c b p d"]) -> Float[Tensor, "c b p d"]:
        """Parts of the stream through the final norm with its scale frozen (gamma applied, beta left out).

        The right norm for attribution; a lens recomputes the scale instead: `model.transformer.read_out`.
        """
        stream = decomposition.stream(self._rows(), self.model, None)
        if stack.shape[1:] != stream.shape:
            raise ValueError(
                f"stack must be parts of the stream, [part, {', '.join(map(str, stream.shape))}], "
                f"got {value_text(stack)}"
            )
        return final_norm(self.model).of(stream).through(stack)

    @public()
    def logit_attrs(
        self,
        stack: Decomposition,
        answer: Int[Tensor, "b"],
        wrong: Int[Tensor, "b"] | None = None,
        *,
        pos: int = -1,
    ) -> Decomposition:
        """Each part's contribution to the logit (or logit difference) at `pos`, `[part + 1, batch]`.

        The last row, `final_bias`, is beta W_U + b_U. For complete parts, the sum of all rows and of the result's
        `rounding` is checked against the logits of the final residual stream (before a soft cap). Computed in float32
        at least.

        Raises:
            ValueError: a row whose answer and wrong answer are one token, other than one token of the vocabulary for
                each row, and a position that the pass has not.
        """
        model, pos = self.model, self._column(pos)
        for what, tokens in (("answer", answer), ("wrong", wrong)):
            if tokens is not None:
                self._check_tokens(what, tokens)
        if wrong is not None:
            check_contrast(answer.cpu(), wrong.cpu())
        wide = torch.promote_types(model.dtype, torch.float32)
        final = decomposition.stream(self._rows(), model, None)[:, pos]
        direction, bias = decomposition.logit_direction(model, answer, wrong)
        pulled = final_norm(model).of(final.to(wide)).back(direction.to(wide))
        values = einsum(stack.values[:, :, pos].to(wide), pulled, "c b d, b d -> c b")
        contributions = torch.cat((values, bias[None].to(wide)))
        names = (*stack.parts, str(Part("final_bias")))
        if not stack.complete or stack.rounding is None:
            return Decomposition(contributions, names)
        tokens = answer[None] if wrong is None else torch.stack((answer, wrong))
        terms = model.uncapped(final.to(wide)).gather(1, tokens.mT)
        total = terms[:, 0] if wrong is None else terms[:, 0] - terms[:, 1]
        rounding = (stack.rounding[:, pos] * pulled).sum(-1)
        summands = torch.cat((contributions, rounding[None]))
        lengths = (stack.values[:, :, pos].to(wide) * pulled).norm(dim=-1).sum(0)
        size = summands.abs().sum(0) + terms.abs().sum(1) + lengths
        missed = decomposition.check_sum(summands, total, "logit attribution", size=size)
        return Decomposition(contributions, names, complete=True, rounding=rounding, missed=missed)

    def _column(self, pos: int) -> int:
        """The position, which the pass must have; a negative one counts from the end."""
        width = next(
            (value.shape[1] for name, value in self._rows().items() if _BY_COLUMN.search(name)), None
        )
        if width is not None and not -width <= pos < width:
            raise ValueError(f"pos must be one of {width} positions, {-width} to {width - 1}, got {pos}")
        return pos

    def _check_tokens(self, what: str, tokens: Int[Tensor, "b"]) -> None:
        """ValueError for other than one token of the vocabulary for each row."""
        rows, most = len(next(iter(self._rows().values()))), self.model.config.n_outputs
        if tokens.shape != (rows,) or not bool(((tokens >= 0) & (tokens < most)).all()):
            raise ValueError(
                f"{what} must be one token in [0, {most - 1}] for each of {rows} rows, got "
                f"{tokens.tolist() if tokens.numel() <= rows else value_text(tokens)}"
            )

    def _rows(self) -> Mapping[str, Tensor]:
        return self if self.batched else {name: value[None] for name, value in self._values.items()}


def _checked_key(key: object) -> tuple[str, int] | tuple[str, int, str]:
    """A key in shorthand; a KeyError for what is none."""
    if isinstance(key, tuple) and len(key) in (2, 3):
        short, layer, *part = key
        if isinstance(short, str) and type(layer) is int and all(isinstance(name, str) for name in part):
            return key
    raise KeyError(
        f"a site's name or its shorthand is required, such as 'blocks.0.hook_resid_post', ('pattern', 3) or "
        f"('k', 3, 'attn'), got {key!r:.200}"
    )
