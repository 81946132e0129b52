"""How a causal trace is made: the noise that drowns a subject, what is put back, and what stays corrupted.

Meng et al. 2022, "Locating and Editing Factual Associations in GPT" (arXiv:2202.05262), section 2, and its released
code.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from interp.core.precision import wide
from interp.data.batch import Batch
from interp.model.config import ModelConfig
from interp.model.edits import Edit, Set
from interp.model.sites import find
from interp.model.transformer import Transformer
from interp.passes.variants import Variant

Kind = Literal["state", "mlp", "attn"]
"""What is restored: the output of a block, of its MLP (its MLPs), or of its attention (as added to the stream)."""
Severed = Literal["mlp", "attn"]


@dataclass(frozen=True)
class Tracing:
    """How a trace is made: how the subject is corrupted, what is restored, what stays corrupted."""

    kind: Kind = "state"
    window: int = 1
    """MLP or attention outputs restored together, around the named layer; a block's output is restored alone."""
    noise: float = 3.0
    """Standard deviation of the noise, in standard deviations of the subjects' embeddings."""
    samples: int = 10
    """Draws of the noise per prompt."""
    seed: int = 0
    severed: Severed | None = None
    """The sublayers after the first restored one that keep their corrupted outputs at that token."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind) or self.severed not in (None, *get_args(Severed)):
            raise ValueError(
                f"kind must be one of {get_args(Kind)} and severed one of {(None, *get_args(Severed))}, "
                f"got {self.kind!r} and {self.severed!r}"
            )
        if self.window < 1 or self.samples < 1 or not self.noise > 0:
            raise ValueError(
                f"a window and samples of at least 1 and noise above 0 are required, got window={self.window}, "
                f"samples={self.samples}, noise={self.noise}"
            )

    def layers(self, layer: int, n_layers: int) -> range:
        """The layers restored together: max(0, l - w/2) .. min(L, l + w/2) - 1, the larger half below for even w."""
        if self.kind == "state":
            return range(layer, layer + 1)
        half = self.window // 2
        return range(max(0, layer - half), min(n_layers, layer + self.window - half))

    def check(self, config: ModelConfig) -> None:
        """KeyError for a sublayer, restored or severed, that the model lacks."""
        for layer in range(config.n_layers):
            for name in (*self.restored(layer, config), *self.frozen(layer, config)):
                find(name, config)

    def restored(self, layer: int, config: ModelConfig) -> list[str]:
        """The sites put back to their clean values."""
        post = "hook_normalized_resid_post" if config.norm_place == "post" else "hook_resid_post"
        names = [post] if self.kind == "state" else _outputs(config, self.kind)
        return [f"blocks.{i}.{name}" for i in self.layers(layer, config.n_layers) for name in names]

    def frozen(self, layer: int, config: ModelConfig) -> list[str]:
        """The sites kept at their corrupted values: after the first restored one, and not restored themselves."""
        if self.severed is None:
            return []
        first = self.layers(layer, config.n_layers).start
        sites = _outputs(config, self.severed)
        names = [f"blocks.{i}.{name}" for i in range(first, config.n_layers) for name in sites]
        return [name for name in names if name not in self.restored(layer, config)]

    def cells(
        self, config: ModelConfig, clean: Mapping[str, Tensor], corrupt: Mapping[str, Tensor], columns: int
    ) -> list[Variant]:
        """One variant per layer and column, columns fastest, with values from both runs."""
        kept = {name: Set(value) for name, value in corrupt.items()}
        back = {name: Set(value) for name, value in clean.items()}
        return [
            Variant(
                [Edit(name, kept[name], {"pos": column}) for name in self.frozen(layer, config)]
                + [Edit(name, back[name], {"pos": column}) for name in self.restored(layer, config)]
            )
            for layer in range(config.n_layers)
            for column in range(columns)
        ]


def usual_window(n_layers: int) -> int:
    """A fifth of the layers, at least one: 10 of 48, as Meng et al. 2022 restore at once in GPT-2 XL."""
    return max(1, round(n_layers / 5))


def _outputs(config: ModelConfig, part: Severed) -> list[str]:
    """The sites of what a block's attention adds, or its MLPs: two in Macaron blocks."""
    first = ["hook_mlp_before_out"] if part == "mlp" and config.macaron else []
    return [*first, f"hook_{part}_out"]


@dataclass(frozen=True, eq=False)
class Noised:
    """Prompts, several times over, with noise for the token embeddings of their subjects."""

    model: Transformer
    batch: Batch
    """Prompts x samples rows, the samples of a prompt next to each other, on the model's device."""
    noise: Float[Tensor, "r p d"]

    @classmethod
    def of(
        cls, model: Transformer, batch: Batch, where: Bool[Tensor, "b p"], scale: float, tracing: Tracing
    ) -> "Noised":
        """Rows with noise of this standard deviation where the subjects are.

        What a prompt gets depends on its own tokens and the seed alone, so that neither the order of the prompts nor
        the split into batches changes a number.
        """
        noise = torch.zeros(len(batch), tracing.samples, *where.shape[1:], model.config.d_model)
        for row, tokens, real, mine in zip(
            noise, batch.tokens.cpu(), batch.real.cpu(), where.cpu(), strict=True
        ):
            seed = zlib.crc32(tokens[real].numpy().tobytes(), tracing.seed % 2**32)
            generator = torch.Generator().manual_seed(seed)
            row[:, mine] = scale * torch.randn(
                tracing.samples, int(mine.sum()), row.shape[-1], generator=generator
            )
        rows = batch.rows(torch.arange(len(batch)).repeat_interleave(tracing.samples))
        return cls(model, rows.to(model.device), noise.flatten(0, 1).to(model.device))

    def corrupted(self, embedding: Float[Tensor, "r p d"]) -> Variant:
        """The corruption of these clean token embeddings."""
        return Variant([Edit("embed", Set(wide(embedding) + self.noise))])
