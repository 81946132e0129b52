"""What a lens asks of logits over the whole vocabulary, tile by tile while a tile is in the processor's cache.

Some rows of logits are held in whole, in memory that is used again for the next ones. Their products run in tiles of
the vocabulary, faster than as a whole; every further question about them costs one pass over a tile
(`experiments/bench/lens.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from interp.model.transformer import Transformer

COLUMNS = 1024
"""Width of a tile on a CPU: with 128 rows half a MiB in float32. An accelerator gets the vocabulary as one tile."""


class LogitTiles:
    """The logits of up to `rows` states: `values[t, r, c]` is that of token `t * width + c`, in float32 at least.

    Exactly the model's own arithmetic after the stream: final norm, masked-LM head, factor, soft cap, in its dtype.
    After the last token stands -inf.
    """

    def __init__(self, model: Transformer, rows: int) -> None:
        self.model = model
        size = model.config.d_vocab
        self.width = min(size, COLUMNS if model.device.type == "cpu" else size)
        self.count = -(-size // self.width)
        dtype = torch.promote_types(model.dtype, torch.float32)
        self._memory = torch.empty(self.count * rows * self.width, dtype=dtype, device=model.device)
        self.values = self._memory.view(self.count, rows, self.width)
        self.largest = self.values.new_empty(rows, self.count)
        """The largest logit of each row in each tile."""

    def fill(self, state: Float[Tensor, "r d"]) -> None:
        """Compute the logits of these states; those before are overwritten."""
        rows = len(state)
        logits_of = self._columns(state)
        self.values = self._memory[: self.count * rows * self.width].view(self.count, rows, self.width)
        self.largest = self.largest.new_empty(rows, self.count)
        for t in range(self.count):
            part = slice(t * self.width, (t + 1) * self.width)
            logits = logits_of(part)
            if logits.shape[1] < self.width:
                self.values[t].fill_(-torch.inf)
            self.tile(t).copy_(logits)
            torch.amax(logits.to(self.largest.dtype), 1, out=self.largest[:, t])

    def tile(self, t: int) -> Float[Tensor, "r c"]:
        """The logits of one tile, without what stands after the last token."""
        return self.values[t, :, : self.model.config.d_vocab - t * self.width]

    def of(self, token: Int[Tensor, "r"]) -> Float[Tensor, "r"]:
        """One logit of every row."""
        row = torch.arange(len(token), device=token.device)
        return self.values[token // self.width, row, token % self.width]

    def top(self, k: int) -> tuple[Float[Tensor, "r k"], Int[Tensor, "r k"]]:
        """The k largest logits of every row in order, and their tokens.

        They lie in the k tiles of the row with the largest maxima; only those are searched.
        """
        where = self.largest.topk(min(k, self.count)).indices
        row = torch.arange(len(where), device=where.device)[:, None]
        found = self.values[where, row].flatten(1).topk(k)
        tile = where.gather(1, found.indices // self.width)
        return found.values, tile * self.width + found.indices % self.width

    def _columns(self, state: Float[Tensor, "r d"]) -> Callable[[slice], Tensor]:
        """From some tokens to their logits; those of another output layer than an unembedding come all at once."""
        model = self.model
        if model.unembed is None:
            logits = model.read_out(state)
            return lambda part: logits[:, part]
        x = model.ln_final(state)
        x = x if model.mlm_head is None else model.mlm_head(x)
        weight, bias = model.unembed.weight, model.unembed.bias
        return lambda part: self._finished(F.linear(x, weight[part], None if bias is None else bias[part]))

    def _finished(self, logits: Float[Tensor, "r c"]) -> Float[Tensor, "r c"]:
        config = self.model.config
        if config.logit_scale != 1:
            logits = logits * config.logit_scale
        if config.logit_softcap is not None:
            logits = (logits / config.logit_softcap).tanh_().mul_(config.logit_softcap)
        return logits


@dataclass(frozen=True, eq=False)
class Reference:
    """The distribution that others are compared with, as `statistics` leaves it: exp(logit - largest) and sums."""

    weights: Float[Tensor, "t r c"]
    total: Float[Tensor, "r"]
    entropy: Float[Tensor, "r"]

    @classmethod
    def like(cls, tiles: LogitTiles) -> "Reference":
        """Memory for the reference of these rows."""
        rows = tiles.values.new_zeros(tiles.values.shape[1], dtype=torch.float64)
        return cls(torch.empty_like(tiles.values), rows, rows.clone())


def statistics(
    tiles: LogitTiles, target: Int[Tensor, "r"], top: int, reference: Reference, *, is_reference: bool = False
) -> dict[str, Tensor]:
    """What the logits say, per row; they are overwritten on the way.

    `top_token`, `top_prob`, `entropy` and `kl` = KL(reference || these) in nats, `target_rank` and `target_prob` (-1
    and NaN where the target is negative). With `is_reference` the reference is written instead of compared with.
    Sums over the vocabulary: in the logits' dtype within a tile, in float64 over tiles.
    """
    known, of_target = target >= 0, tiles.of(target.clamp_min(0))[:, None]
    best, tokens = tiles.top(top)
    largest = best[:, :1]
    scratch, weight = torch.empty_like(tiles.values[0]), torch.empty_like(tiles.values[0])
    above, total, dot, cross = torch.zeros(4, len(target), dtype=torch.float64, device=target.device)
    for t in range(tiles.count):
        logits = tiles.tile(t)
        used = slice(0, logits.shape[1])
        space, other = scratch[:, used], reference.weights[t, :, used]
        own = other if is_reference else weight[:, used]
        above += torch.gt(logits, of_target, out=space).sum(-1)
        torch.exp(logits.sub_(largest), out=own)
        total += own.sum(-1)
        dot += torch.mul(own, logits, out=space).sum(-1)
        if not is_reference:
            cross += torch.mul(other, logits, out=space).sum(-1)
    entropy = total.log() - dot / total
    if is_reference:
        reference.total.copy_(total)
        reference.entropy.copy_(entropy)
        kl = torch.zeros_like(entropy)
    else:
        kl = (total.log() - cross / reference.total - reference.entropy).clamp_min(0.0)
    values = {
        "top_prob": (best - largest).exp() / total[:, None],
        "entropy": entropy,
        "kl": kl,
        "target_prob": ((of_target - largest).exp()[:, 0] / total).masked_fill(~known, torch.nan),
    }
    narrow = {name: value.to(tiles.values.dtype) for name, value in values.items()}
    return {**narrow, "top_token": tokens, "target_rank": above.long().masked_fill(~known, -1)}
