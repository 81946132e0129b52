"""Claim: no law of chance that we know holds for composition; so results give sizes, and no p.

Two layers of heads are drawn from each of eight laws in which every head is independent of every other, so that no pair
composes; counted is how many pairs each null calls significant at 5 % (asked is .05), in how many `relative` is above 2
(no test: a size), and its 99.9 % quantile. The nulls: `spectrum`, random frames with the heads' own singular values,
mean and variance of the squared ratio exact, tail of the Gamma law with them; `shape`, the same for Gaussian heads;
`scaled`, `spectrum` after the dimensions' scales, common to the heads of a layer, are taken out; `medians`, normal
deviations of log `relative` by 1.48 median absolute deviations within the two layers. One JSON line per law.
"""

import json
from collections.abc import Callable, Mapping

import torch
import tyro
from jaxtyping import Float
from scipy import special, stats
from torch import Tensor

from interp.weights.composition import relative_scores

LEVEL = 0.05
Draw = Callable[[torch.Generator, int, int, int], tuple[Tensor, Tensor]]
"""What heads write and what heads read, each the thin factors of matrices `[h e d]`, by heads, width and d."""


def gaussian(draw: torch.Generator, *shape: int) -> Tensor:
    """Normal numbers in float64."""
    return torch.randn(shape, generator=draw, dtype=torch.float64)


def heavy(draw: torch.Generator, *shape: int) -> Tensor:
    """Student's t with two degrees of freedom."""
    chi = gaussian(draw, *shape).square() + gaussian(draw, *shape).square()
    return gaussian(draw, *shape) / (chi / 2).sqrt()


def sparse(draw: torch.Generator, *shape: int) -> Tensor:
    """Normal numbers, 98 of 100 set to 0."""
    return gaussian(draw, *shape) * (torch.rand(shape, generator=draw) < 0.02)


def outliers(d: int, count: int = 6, scale: float = 12.0) -> Tensor:
    """A scale for each dimension: a few are large."""
    return torch.where(torch.arange(d) < count, scale, 1.0).double()


def pairs(
    entry: Callable[..., Tensor],
    *,
    scaled: bool = False,
    steep: float = 0.0,
    own: float = 0.0,
    common: float = 0.0,
) -> Draw:
    """Heads of entries of this law; scaled: dimensions differ in scale, for all heads alike; own: for each head, by
    lognormal scales; steep: singular values fall at this rate; common: heads of a layer share directions.
    """

    def draw(generator: torch.Generator, h: int, e: int, d: int) -> tuple[Tensor, Tensor]:
        sides = []
        for _ in range(2):
            inner, outer = entry(generator, h, d, e), entry(generator, h, e, d)
            inner = inner * (-steep * torch.arange(e)).double().exp()
            outer = (outer + common * entry(generator, e, d)) * (own * gaussian(generator, h, 1, d)).exp()
            if scaled:
                outer = outer * outliers(d)
            half = torch.linalg.qr(inner, mode="r")[1] @ outer
            sides.append(half / half.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-300))
        return sides[0], sides[1]

    return draw


LAWS: Mapping[str, Draw] = {
    "gaussian": pairs(gaussian), "sparse": pairs(sparse), "heavy-tailed": pairs(heavy),
    "steep": pairs(gaussian, steep=0.8),
    "scaled dims": pairs(gaussian, scaled=True), "heavy-tailed, scaled dims": pairs(heavy, scaled=True),
    "common directions": pairs(gaussian, common=3.0), "scaled by head": pairs(gaussian, own=1.5),
}  # fmt: skip


def tail(ratio: Tensor, one: Tensor, other: Tensor, d: float) -> Tensor:
    """P(ratio as large) of random frames in d dimensions, for the sums of squares of both spectra (each of sum 1)."""
    excess = (one - 1 / d).clamp_min(1e-9) * (other - 1 / d).clamp_min(1e-9)
    shape = (d - 1) * (d + 2) / (2 * d**2 * excess)
    return torch.from_numpy(special.gammaincc(shape.numpy(), (shape * d * ratio.square()).numpy()))


def concentration(half: Float[Tensor, "h e d"]) -> Float[Tensor, "h"]:
    """The sum of squares of the squared singular values, whose sum is 1."""
    return (half @ half.mT).square().sum((-2, -1))


def called(written: Tensor, read: Tensor, shape: Tensor) -> dict[str, Tensor]:
    """Which pairs each null calls significant, and `relative`."""
    d = written.shape[-1]

    def ratios(one: Tensor, other: Tensor) -> Tensor:
        return torch.einsum("hed,gfd->hgef", one, other).flatten(2).norm(dim=2)

    ratio = ratios(written, read)
    first, second = concentration(written)[:, None], concentration(read)
    scale = (read.square().mean((0, 1)) / written.square().mean((0, 1)).clamp_min(1e-300)).pow(0.25)
    plain = [
        x / x.norm(dim=(-2, -1), keepdim=True) for x in (written * scale, read / scale.clamp_min(1e-300))
    ]
    both = (plain[0].square().mean((0, 1)) * plain[1].square().mean((0, 1))).sqrt()
    inside = float(both.sum().square() / both.square().sum())
    relative = relative_scores(ratio[None, :, None])[0, :, 0]
    size = relative.log()
    deviation = size / (1.4826 * size.abs().nanmedian())
    return {
        "spectrum": tail(ratio, first, second, d) < LEVEL,
        "shape": tail(ratio, shape, shape, d) < LEVEL,
        "scaled": tail(ratios(*plain), concentration(plain[0])[:, None], concentration(plain[1]), inside)
        < LEVEL,
        "medians": deviation > stats.norm.ppf(1 - LEVEL),
        "relative": relative,
    }


def main(models: int = 60, heads: int = 8, width: int = 16, d_model: int = 128, seed: int = 0) -> None:
    """Simulate and print.

    Args:
        models: pairs of layers of each law.
        heads: heads a layer.
        width: width of a head.
        d_model: width of the stream.
        seed: of the draws.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = concentration(LAWS["gaussian"](generator, 64, width, d_model)[0]).mean()
    for name, law in LAWS.items():
        found = [called(*law(generator, heads, width, d_model), shape) for _ in range(models)]
        every = {key: torch.stack([one[key] for one in found]) for key in found[0]}
        relative = every.pop("relative").flatten()
        line = {key: round(float(each.double().mean()), 3) for key, each in every.items()}
        line |= {"relative > 2": round(float((relative > 2).double().mean()), 3),
                 "relative, 99.9 %": round(float(relative.nan_to_num(1.0).quantile(0.999)), 2)}  # fmt: skip
        print(
            json.dumps({"bench": "composition_nulls", "law": name, "pairs": len(relative), **line}),
            flush=True,
        )


if __name__ == "__main__":
    tyro.cli(main)
