"""The models that come with the package, loaded: trained ones from `weights/`, hand-built ones from code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from interp.core.boundary import public
from interp.core.files import named_path
from interp.core.kinds import Device
from interp.core.wording import nearest
from interp.families.load import from_folder
from interp.families.tokenizer import TokenizerAdapter, tokenizer_of
from interp.model.config import Json
from interp.model.transformer import Transformer
from interp.zoo import groundtruth, shown
from interp.zoo.demos import DEMOS, WEIGHTS, card_of

BUILT: dict[str, Callable[[], Transformer]] = {
    "groundtruth-induction": groundtruth.induction,
    "groundtruth-early-site": lambda: shown.early_site(n=1).model,
    "groundtruth-late-suppression": lambda: shown.late_suppression(n=1).model,
}
DemoTokenizer = TokenizerAdapter | groundtruth.Alphabet


@public()
def load(
    name: str,
    *,
    revision: str | None = None,
    dtype: torch.dtype | None = None,
    device: Device = "cpu",
) -> tuple[Transformer, DemoTokenizer | None]:
    """A demo model and its tokenizer; `revision="step1500"` is a checkpoint of its training, where one is shipped."""
    if name not in DEMOS:
        raise ValueError(f"there is no demo model {name!r}; {nearest(name, DEMOS)}")
    if DEMOS[name].built:
        if revision is not None:
            raise ValueError(f"{name} is built from code and has no revision {revision!r}")
        model = BUILT[name]().to(device=device, dtype=dtype).requires_grad_(False).eval()
        return model, groundtruth.Alphabet()
    folder = WEIGHTS / name
    return _model_of_weights(folder, revision, dtype, device), tokenizer_of(folder)


@public()
def card(name: str) -> Json:
    """Measured numbers of a trained demo model on held-out material; empty for a hand-built one."""
    return card_of(name)


@public()
def revisions(name: str) -> list[str]:
    """The names of the training checkpoints shipped with a demo model, such as "step1500", in order of the step."""
    files = (WEIGHTS / named_path(name) / "checkpoints").glob("step*.safetensors")
    return sorted((p.stem for p in files), key=lambda stem: int(stem.removeprefix("step")))


def _model_of_weights(
    folder: Path, revision: str | None, dtype: torch.dtype | None, device: Device
) -> Transformer:
    if revision is None:
        return from_folder(folder / "model.safetensors", dtype=dtype, device=device)
    file = named_path(folder / "checkpoints" / f"{revision}.safetensors")
    if not file.is_file():
        raise ValueError(f"{folder.name} has no revision {revision!r}; it has {revisions(folder.name)}")
    return from_folder(file, config=folder / "config.json", dtype=dtype or torch.float32, device=device)
