"""The texts of a pass as rows by themselves, for mixers that cut a text into segments."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from interp.model.attention import Pass


@dataclass(frozen=True)
class Texts:
    """Every text of a pass as a row by itself that begins where a segment does, its kept tokens side by side."""

    slot: Int[Tensor, "b p"]
    """Where each column stands, counted over rows and columns; one beyond the end for those left out."""
    source: Int[Tensor, "r t"]
    """The column that stands there, counted over rows and columns of the pass; one beyond the end for none."""
    begun: Bool[Tensor, "r"]
    """Whether there are segments before the first one here."""
    start: Int[Tensor, "r"]
    """Where the first new token stands."""
    span: tuple[int, int]
    """All new tokens stand between these."""

    @property
    def present(self) -> Bool[Tensor, "r t"]:
        """Where a new token stands."""
        return self.source < self.slot.numel()

    def apart(self, x: Shaped[Tensor, "b p *rest"]) -> Shaped[Tensor, "r t *rest"]:
        """Text by text, 0 where no token stands."""
        flat = torch.cat((x.flatten(0, 1), x.new_zeros(1, *x.shape[2:])))
        return flat[self.source]

    def together(self, x: Shaped[Tensor, "r t *rest"]) -> Shaped[Tensor, "b p *rest"]:
        """As the pass has them, 0 at tokens that are not kept."""
        flat = torch.cat((x.flatten(0, 1), x.new_zeros(1, *x.shape[2:])))
        return flat[self.slot]


def texts(shared: Pass, rows: int, n: int, segment: int) -> Texts:
    """The texts of a pass of `rows` and `n` columns; only rows that pack several cost a look at the numbers."""
    assert shared.positions is not None
    positions, layout = shared.positions.expand(rows, n), shared.layout
    past = 0 if shared.cache is None else shared.cache.length
    device = positions.device
    keep = (
        torch.ones(rows, n, dtype=torch.bool, device=device) if layout.keep is None else layout.keep[:, past:]
    )
    row = torch.arange(rows, device=device)[:, None]
    before = torch.full((rows,), past, device=device)
    if past and layout.keep is not None:
        before = layout.keep[:, :past].sum(1)
    start, n_texts = before % segment, rows
    first = past % segment if layout.keep is None else 0
    last = first + n if layout.keep is None or not past else segment - 1 + n
    local = positions - (before - start)[:, None]
    if layout.documents is not None:  # never with a cache
        opens = F.pad(layout.documents[:, 1:] != layout.documents[:, :-1], (1, 0), value=True)
        row = opens.flatten().cumsum(0).view(rows, n) - 1
        n_texts = int(row.max()) + 1
        start = before = before.new_zeros(n_texts)
        last = int(local.max()) + 1
    width = -(-last // segment) * segment
    slot = torch.where(keep, row * width + local, n_texts * width)
    source = torch.full((n_texts * width + 1,), rows * n, device=device)
    source[slot.flatten()] = torch.where(
        keep, torch.arange(rows * n, device=device).view(rows, n), rows * n
    ).flatten()
    return Texts(slot, source[:-1].view(n_texts, width), before >= segment, start, (first, last))
