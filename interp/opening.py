"""Which model a command or an experiment is about, in what precision and where. No torch until it is opened."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from interp.hooked import HookedTransformer

DType = Literal["float64", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class OfModel:
    """The parameters that say which model is opened: inherited by every command and experiment about one.

    Example:
        >>> OfModel(model="groundtruth-induction", dtype="float64").opened().cfg.n_layers
        2
    """

    model: str = "demo-4l"
    """Demo name (see `interp models`), local folder, file of weights or hub name."""
    revision: str | None = None
    """Branch, tag or training checkpoint."""
    dtype: DType | None = None
    """Precision to load in; without it the checkpoint's own."""
    device: str = "cpu"
    """Where to compute: cpu, cuda, cuda:1, ..."""
    prepend_bos: bool | None = None
    """Whether texts begin with BOS; without it they do where the tokenizer has one."""

    def opened(self, revision: str | None = None) -> "HookedTransformer":
        """The model, or a checkpoint of it; ValueError before any weights are read if there is no such device here."""
        from interp.hooked import HookedTransformer

        return HookedTransformer.from_pretrained(
            self.model,
            revision=self.revision if revision is None else revision,
            dtype=self.dtype,
            device=self.available(),
            default_prepend_bos=self.prepend_bos,
        )

    def available(self) -> str:
        """The device, if there is one of this name here; ValueError otherwise."""
        import torch

        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as cause:
            raise ValueError(f"device {self.device!r} is not available: {cause}") from cause
        return self.device
