"""Continuous depth: a model whose blocks are integrals, x' = block(x) - x for time 1, by a solver of torchdiffeq.

Chen et al. 2018, "Neural Ordinary Differential Equations" (arXiv:1806.07366). One step of Euler's scheme per block is
the model itself; more steps, better schemes or an adaptive solver approach the flow, and the adjoint method (its
section 2) differentiates it without keeping what the solver computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.core.boundary import public
from interp.core.kinds import Positive, PositiveCount
from interp.core.stats import upcast
from interp.lab.depth.refinement import Field, steps_of_euler
from interp.lab.depth.switched_blocks import entering
from interp.model.edits import Edit
from interp.model.tap import Tap
from interp.model.transformer import Transformer
from interp.passes.question import NotFiniteError

Method = Literal["euler", "midpoint", "rk4", "heun3", "bosh3", "dopri5", "dopri8"]
"""Schemes of torchdiffeq: the first four with steps of one length, the others with steps that an error decides."""
FIXED = ("euler", "midpoint", "rk4", "heun3")


@public()
@dataclass(frozen=True)
class Solver:
    """How an integral over depth is computed, and how it is differentiated.

    Args:
        method: the scheme; `euler`, `midpoint`, `rk4` (the 3/8 rule) and `heun3` take `steps` equal steps, `bosh3`,
            `dopri5` and `dopri8` as many as the tolerances require.
        steps: number of equal steps over the time of a block.
        rtol: relative tolerance of the adaptive schemes.
        atol: absolute tolerance of the adaptive schemes, in units of the stream.
        adjoint: whether gradients come from a second integral backwards, whose memory does not grow with the steps;
            False: from the steps themselves. With few equal steps both differ, by the error of the scheme.

    Raises:
        ValueError: numbers out of range.

    Source:
        Chen et al. 2018, section 2 and appendix B (the adjoint of the parameters).

    Example:
        >>> solver = interp.lab.depth.Solver("rk4", steps=4)
        >>> solver.flow(lambda x: -x, torch.ones(1))
        tensor([0.3679])
    """

    method: Method = "dopri5"
    steps: PositiveCount = 1
    rtol: Positive = 1e-5
    atol: Positive = 1e-6
    adjoint: bool = False

    def flow(
        self, field: Field, x: Float[Tensor, "*b d"], parameters: Sequence[Tensor] = ()
    ) -> Float[Tensor, "*b d"]:
        """Where x' = field(x) takes `x` in time 1.

        Args:
            field: what is added to x per unit of time.
            x: the start.
            parameters: what `field` depends on and gradients are wanted of, for the adjoint method.

        Returns:
            The end, differentiable in `x` and in the parameters.

        Raises:
            ImportError: without torchdiffeq.
        """
        try:
            from torchdiffeq import odeint, odeint_adjoint
        except ImportError as cause:
            raise ImportError(
                "integrals over depth require torchdiffeq: pip install 'interp[ode]'"
            ) from cause
        time = torch.tensor([0.0, 1.0], dtype=x.dtype, device=x.device)
        # without the ends as steps dopri8 and bosh3 interpolate to 1, a thousand times as far from it as `rtol`
        options = {"step_size": 1 / self.steps} if self.method in FIXED else {"step_t": time}
        settings = {"method": self.method, "rtol": self.rtol, "atol": self.atol, "options": options}

        def at_time(_: Tensor, stream: Tensor) -> Tensor:
            return field(stream)

        if self.adjoint:
            wanted = tuple(p for p in parameters if p.requires_grad)
            return odeint_adjoint(at_time, x, time, adjoint_params=wanted, **settings)[-1]
        return odeint(at_time, x, time, **settings)[-1]


@dataclass(frozen=True, eq=False, repr=False)
class IntegratedPass:
    """What a pass with blocks as integrals gives."""

    logits: Float[Tensor, "b p v"]
    evaluations: tuple[int, ...]
    """How often each integrated block was computed: the depth that the solver took."""

    def __repr__(self) -> str:
        return f"IntegratedPass({list(self.logits.shape)} logits, {self.evaluations} evaluations)"


@public()
def integrated(
    model: Transformer,
    tokens: Int[Tensor, "b p"],
    solver: Solver | None = None,
    *,
    layers: Sequence[int] | None = None,
    keep: Bool[Tensor, "b p"] | None = None,
) -> IntegratedPass:
    """A pass in which blocks are integrals over depth: x' = block(x) - x for time 1 in place of x = block(x).

    It is differentiable in the model's parameters, so that a model may be trained in it. One step of `euler` is the
    model's own pass: a residual network is Euler's scheme. `refinement` cuts a block's sublayers in turn (a splitting);
    in parallel and attention-only blocks its steps are those of `euler` here.

    Args:
        model: the network; its parameters are used as they are.
        tokens: [b, p], ids.
        solver: how each integral is computed; None: `Solver()`, adaptive steps.
        layers: numbers of the blocks that are integrals; None: all of them.
        keep: [b, p], True at real tokens; None: no padding.

    Returns:
        The logits and how often each integrated block was computed, in the order of the layers.

    Raises:
        ImportError: without torchdiffeq.
        IndexError: a layer that does not exist.
        ValueError: post-norm blocks, which do not add to the stream, and a model that is edited where the stream enters
            block 0.
        NotFiniteError: embeddings that are not finite.

    Caveats:
        Weights that were trained as steps owe the flow nothing. Edits of an edited model act at every evaluation.
        The integrals, and so the logits, are in float32 at least; blocks compute in the dtype of the model.

    Source:
        Chen et al. 2018, equations 1 to 3.

    See Also:
        `refinement`: predictions and stream as the steps of a trained model are cut.

    Example:
        >>> found = integrated(model.transformer, torch.tensor([[1, 2, 3]]), interp.lab.depth.Solver("midpoint", 2))
        >>> found.evaluations
        (4, 4, 4)
    """
    config, solver = model.config, solver or Solver()
    steps_of_euler(config, "integrated")
    if any(edit.site == entering(0) for edit in model.edits):
        raise ValueError(
            f"a solver gives block 0 its stream, so that an edit of {entering(0)} has no place there: edit hook_embed"
        )
    which = range(config.n_layers) if layers is None else layers
    if bad := [layer for layer in which if not 0 <= layer < config.n_layers]:
        raise IndexError(f"layers are 0 to {config.n_layers - 1} in this model, got {bad[0]}")
    x, counts = upcast(model(tokens, stop=0, keep=keep)), []
    if not bool(x.isfinite().all()):  # an adaptive solver would never end
        raise NotFiniteError(
            "a finite stream is required, that of the embeddings is not: the model has weights of NaN"
        )
    for layer in range(config.n_layers):
        block = _Block(model, tokens, layer, keep)
        if layer not in which:
            x = block(x)
            continue
        x = solver.flow(block.added, x, list(model.block(layer).parameters()))
        counts.append(block.evaluations)
    return IntegratedPass(model.read_out(x), tuple(counts))


class _Block:
    """One block of a model as a function of the stream that enters it; counts its calls."""

    def __init__(
        self, model: Transformer, tokens: Int[Tensor, "b p"], layer: int, keep: Bool[Tensor, "b p"] | None
    ) -> None:
        self.model, self.tokens, self.layer, self.keep = model, tokens, layer, keep
        self.evaluations = 0

    def __call__(self, stream: Float[Tensor, "b p d"]) -> Float[Tensor, "b p d"]:
        """The stream that leaves the block, in the dtype of the one that enters it."""
        self.evaluations += 1
        given = stream.to(self.model.dtype)
        if self.layer:
            found = self.model(given, None, self.layer, self.layer + 1, keep=self.keep)
        else:
            tap = Tap(edits=[Edit(entering(0), lambda _: given)])
            found = self.model(self.tokens, tap, 0, 1, keep=self.keep)
        return found.to(stream.dtype)

    def added(self, stream: Float[Tensor, "b p d"]) -> Float[Tensor, "b p d"]:
        """What the block adds to the stream."""
        return self(stream) - stream
