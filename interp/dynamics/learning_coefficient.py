"""How degenerate a minimum is: the local learning coefficient, by Langevin dynamics that stays near it.

The volume of {w near w* : L(w) - L(w*) < e} falls as e^lambda (-log e)^(m - 1) for small e (Watanabe 2009). A minimum
of full rank in d dimensions has lambda = d / 2; flat and crossing directions make it smaller: what the model could lose
for free. Lau et al. 2023 (arXiv:2308.12108): lambda = n beta (E[L_n(w)] - L_n(w*)) for w drawn from
exp(-n beta L_n(w) - gamma / 2 |w - w*|^2), beta = 1 / log n.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm import tqdm

from interp.core.boundary import public
from interp.core.kinds import FromZero, NotNegative, Positive, PositiveCount, Seed
from interp.core.results import labelled
from interp.core.stats import upcast
from interp.core.wording import nearest
from interp.model.loss import next_token_loss
from interp.model.transformer import Transformer
from interp.passes.observe import Model, as_network
from interp.passes.question import NotFiniteError
from interp.runs.provenance import with_origin
from interp.tasks.examples import Examples

if TYPE_CHECKING:
    import xarray as xr

ParameterPoint = Mapping[str, Tensor]
"""Weights by their names."""
PointLoss = Callable[[ParameterPoint], Float[Tensor, ""]]
"""A function from a point to the mean loss of n rows, which autograd can differentiate."""


@public()
@dataclass(frozen=True)
class Langevin:
    """Langevin sampler: chains of small noisy steps down the loss, all from the minimum w*.

    w <- w - step / 2 (n beta grad L_n(w) + localisation (w - w*)) + sqrt(step) noise.

    At a minimum with curvature h along a direction, k = n beta h + localisation, the chain's own limit is known: that
    direction adds n beta h / k / (1 - step k / 4) to twice the coefficient (which is 1 for an exact sampler without
    localisation), and it needs step k < 4. So choose step k near 0.1 for the largest curvature, and the localisation
    well below n beta times the smallest that should count.

    Raises:
        ValueError: fewer than one chain or step, a negative burn-in, localisation or seed, and a step or an inverse
            temperature that is not above 0.
    """

    chains: PositiveCount = 4
    """Independent chains."""
    steps: PositiveCount = 2000
    """Draws of each chain after its burn-in."""
    burn_in: FromZero = 500
    """Draws that are discarded first."""
    step: Positive = 1e-4
    """epsilon: twice the size of a step along the gradient, and the variance of its noise."""
    localisation: NotNegative = 1.0
    """gamma: strength of the pull towards the starting point."""
    inverse_temperature: Positive | None = None
    """beta; None = 1 / log n."""
    seed: Seed = 0
    """Seed of the noise; a chain's noise does not depend on how many chains there are."""

    @public()
    def beta(self, n: int) -> float:
        """The inverse temperature for n rows. ValueError below 2 rows, where 1 / log n is not defined."""
        if n < 2:
            raise ValueError(f"a learning coefficient is that of 2 rows or more, got {n}")
        return 1 / math.log(n) if self.inverse_temperature is None else self.inverse_temperature


@public()
def learning_coefficient(
    model: Model,
    rows: Examples,
    sampler: Langevin,
    *,
    parameters: Sequence[str] | None = None,
    determined_only: bool = False,
    rows_per_step: int | None = None,
) -> xr.Dataset:
    """Local learning coefficient of a trained model on its training rows: how degenerate the minimum is.

    A model in half precision is sampled as a copy in float32. The loss of a row is the sum of its tokens' nats, L_n
    their mean over the n rows: rows are independent draws, tokens are not.

    Args:
        rows: what the model was trained on.
        sampler: chains, steps and step size of the Langevin dynamics.
        parameters: names of the parameters that move, such as "blocks.0.mlp.out.weight", the others held fixed (Wang et
            al. 2024); None: all.
        determined_only: whether determined tokens alone count in the loss of a row.
        rows_per_step: rows drawn for each step; None: all. Differences of losses are then those of the same rows.

    Returns:
        Dataset of `learning_coefficient_of`.

    Raises:
        ValueError: as `learning_coefficient_of`; unknown parameters, packed rows, rows_per_step out of range, an
            encoder-decoder.

    Caveat:
        Those of `learning_coefficient_of`: compare models under one sampler, and do not read one number as a dimension.

    Memory:
        Three times the parameters that move, so name few of a large model.

    Cost:
        Each step is a forward and a backward pass of its rows.

    Source:
        Lau et al. 2023, arXiv:2308.12108; Watanabe 2009.

    See Also:
        `learning_coefficient_of`: of any loss.

    Example:
        >>> rows = interp.tasks.RepeatedSequences(8, 12, 3, 4).batch(interp.tasks.Place(0, 0), 8)
        >>> found = learning_coefficient(model, rows, Langevin(chains=2, steps=3, burn_in=1))
        >>> found.loss.shape
        (2, 3)
    """
    network = _in_float32(as_network(model))
    examples = rows.to(network.device)
    count = len(examples.batch)
    examples.batch.require_one_text("a learning coefficient")
    if rows_per_step is not None and not 1 <= rows_per_step <= count:
        raise ValueError(f"rows_per_step must be in [1, {count}], got {rows_per_step}")
    at = _moving_parameters(network, parameters)

    def loss_of(some_rows: Examples) -> PointLoss:
        return lambda point: _row_loss(network.with_parameters(dict(point)), some_rows, determined_only)

    if rows_per_step is None or rows_per_step == count:
        full_loss = loss_of(examples)
        result = _sampled_coefficient(lambda generator: full_loss, at, count, sampler)
        return with_origin(result, as_network(model))

    def minibatch_loss(generator: torch.Generator) -> PointLoss:
        order = torch.randperm(count, generator=generator, device=generator.device)
        return loss_of(examples.rows(order[:rows_per_step]))

    return with_origin(_sampled_coefficient(minibatch_loss, at, count, sampler), as_network(model))


@public()
def learning_coefficient_of(loss: PointLoss, at: ParameterPoint, rows: int, sampler: Langevin) -> xr.Dataset:
    """Local learning coefficient of any loss of named parameters at a minimum.

    lambda = n beta (E[L_n(w)] - L_n(w*)), w drawn from exp(-n beta L_n(w) - gamma / 2 |w - w*|^2). A minimum of full
    rank in d dimensions has lambda = d / 2; flat and crossing directions make it smaller.

    Args:
        loss: function from parameters of the names of `at` to the mean loss of n rows, differentiable.
        at: the minimum w*, tensors by name, on one device.
        rows: number n of rows that the loss is the mean of.
        sampler: chains, steps and step size of the Langevin dynamics.

    Returns:
        Dataset:

        - `value`: lambda, mean over chains.
        - `spread`: standard deviation over chains.
        - `of_chain` [chain]: lambda of each chain.
        - `loss` [chain, draw]: L_n(w) - L_n(w*) along each chain, in which a burn-in that is too short shows.

    Raises:
        NotFiniteError: a chain that runs away, which it names.
        ValueError: fewer than 2 rows, no parameters, a loss that is no number.

    Caveats:
        The spread is no interval of lambda: all chains have the same bias, from localisation (too small), finite steps
        (too large), n that is finite (under multiplicity m, by about -(m - 1) / log(n beta)) and slow mixing along flat
        valleys; the manual has a table of it for losses whose coefficient is known. Negative: w* was no minimum.

    Source:
        Lau et al. 2023, arXiv:2308.12108; Watanabe 2009.

    Example:
        >>> bowl = lambda point: point["w"].square().sum() / 2
        >>> at = {"w": torch.zeros(10, dtype=torch.float64)}
        >>> found = learning_coefficient_of(bowl, at, 10_000, Langevin(localisation=0.0))
        >>> 4.5 < float(found.value) < 5.5
        True
    """
    return _sampled_coefficient(lambda generator: loss, at, rows, sampler)


def _in_float32(network: Transformer) -> Transformer:
    """The model in float32 at least: in half precision a chain's step is smaller than the rounding of a weight."""
    narrow = {name: x for name, x in network.named_parameters() if x.dtype != upcast(x).dtype}
    return network.with_parameters(
        {name: nn.Parameter(upcast(x.detach()), requires_grad=False) for name, x in narrow.items()}
    )


def _moving_parameters(network: Transformer, names: Sequence[str] | None) -> ParameterPoint:
    """The parameters that the chains change, by name; raises ValueError for a name that the model does not have."""
    known = dict(network.named_parameters())
    chosen = list(known) if names is None else list(names)
    if unknown := [name for name in chosen if name not in known]:
        raise ValueError(f"unknown parameter {unknown[0]!r}; {nearest(unknown[0], known)}")
    return {name: known[name].detach() for name in chosen}


def _row_loss(network: Transformer, rows: Examples, determined_only: bool) -> Float[Tensor, ""]:
    """The loss of a row, summed over its tokens in nats, as a mean over the rows."""
    batch = rows.batch
    losses = next_token_loss(network(batch.tokens, **batch.inputs), batch.tokens, batch.keep)
    return (losses * rows.predicted(determined_only=determined_only)).sum() / len(batch)


def _sampled_coefficient(
    draw: Callable[[torch.Generator], PointLoss], at: ParameterPoint, rows: int, sampler: Langevin
) -> xr.Dataset:
    """The Dataset of `learning_coefficient_of`, from all chains.

    Args:
        draw: makes the loss function of one step, on the rows that it draws.
    """
    if not at:
        raise ValueError("at least one parameter that moves is required, got none")
    strength = rows * sampler.beta(rows)
    losses = torch.stack(
        [_chain_losses(draw, at, strength, sampler, chain) for chain in range(sampler.chains)]
    )
    of_chain = strength * losses.mean(1)
    return labelled(
        "learning_coefficient",
        {
            "value": ((), of_chain.mean()),
            "spread": (
                (),
                of_chain.std() if len(of_chain) > 1 else of_chain.new_tensor(torch.nan),
            ),
            "of_chain": (("chain",), of_chain),
            "loss": (("chain", "draw"), losses),
        },
        units={
            **dict.fromkeys(("value", "spread", "of_chain"), "learning coefficient"),
            "loss": "nats per row",
        },
        attrs={
            "rows": rows,
            "inverse_temperature": sampler.beta(rows),
            "localisation": sampler.localisation,
            "step": sampler.step,
            "dimensions": sum(value.numel() for value in at.values()),
        },
    )


def _chain_losses(
    draw: Callable[[torch.Generator], PointLoss],
    at: ParameterPoint,
    strength: float,
    sampler: Langevin,
    chain: int,
) -> Float[Tensor, "n"]:
    """L_n(w) - L_n(w*) at every kept draw of one chain, float64."""
    (device,) = {value.device for value in at.values()}
    noise, choice = (
        torch.Generator(device).manual_seed(
            int(np.random.SeedSequence([sampler.seed, chain, i]).generate_state(1)[0])
        )
        for i in range(2)
    )
    point = {name: value.detach().clone() for name, value in at.items()}
    losses: list[Tensor] = []
    bar = tqdm(range(sampler.burn_in + sampler.steps), desc=f"chain {chain}", delay=1, leave=False)
    base: dict[PointLoss, Tensor] = {}
    for i in bar:
        loss = draw(choice)
        value, gradients = _loss_and_gradients(loss, point)
        if loss not in base:
            with torch.no_grad():
                base = {loss: loss(at)}
        if i >= sampler.burn_in:
            losses.append((value - base[loss]).double())
        for name in list(gradients):
            gradient = gradients.pop(name)  # popped, so that its memory is free at once
            pull = strength * gradient + sampler.localisation * (point[name] - at[name])
            kick = torch.randn(gradient.shape, generator=noise, dtype=gradient.dtype, device=device)
            point[name] = point[name] - sampler.step / 2 * pull + sampler.step**0.5 * kick
    excess = torch.stack(losses)
    if not bool(excess.isfinite().all()):
        first = sampler.burn_in + int((~excess.isfinite()).nonzero()[0])
        raise NotFiniteError(
            f"chain {chain} ran away, its loss is NaN or infinite from draw {first} on: a smaller step than "
            f"{sampler.step} is required, and a loss that is finite at the start"
        )
    return excess


def _loss_and_gradients(
    loss: PointLoss, point: ParameterPoint
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """The loss at a point and its gradient."""
    live = {name: value.detach().requires_grad_() for name, value in point.items()}
    with torch.enable_grad():
        value = loss(live)
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            raise ValueError(
                f"a loss that is one number and depends on the parameters is required, got {value!r:.60}"
            )
        gradients = torch.autograd.grad(value.reshape(()), list(live.values()))
    return value.detach().reshape(()), dict(zip(live, gradients, strict=True))
