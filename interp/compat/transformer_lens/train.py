"""TransformerLens' small training loop for next-token models."""

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from interp.compat.transformer_lens.devices import get_device
from interp.compat.transformer_lens.hub import is_library_available


@dataclass
class HookedTransformerTrainConfig:
    """Parameters of a training run."""

    num_epochs: int
    """Number of passes over the dataset."""
    batch_size: int
    """Rows per step."""
    lr: float = 1e-3
    """Learning rate, after the warm-up."""
    seed: int = 0
    """Given to torch before anything is drawn."""
    momentum: float = 0.0
    """Momentum of SGD."""
    max_grad_norm: float | None = None
    """The gradient is scaled down to this norm; None = never."""
    weight_decay: float | None = None
    """None = none; with a number "Adam" is AdamW."""
    optimizer_name: str = "Adam"
    """Adam, AdamW or SGD."""
    device: str | torch.device | None = None
    """None = the best there is."""
    warmup_steps: int = 0
    """Steps over which the learning rate grows from 0."""
    save_every: int | None = None
    """Write a checkpoint at every so many steps of an epoch."""
    save_dir: str | None = None
    """The folder of the checkpoints, `model_<step>.pt`."""
    wandb: bool = False
    """Whether to log to Weights & Biases."""
    wandb_project_name: str | None = None
    """Name of the project in wandb; None: "easy-transformer"."""
    print_every: int | None = 50
    """Write the loss to stdout at every so many steps; None = never."""
    max_steps: int | None = None
    """An epoch ends after this step, counted from 0."""


Model = TypeVar("Model", bound=nn.Module)


def train(model: Model, config: HookedTransformerTrainConfig, dataset: Dataset[Any]) -> Model:
    """The model, trained in place on rows `{"tokens": ...}` to predict the next token.

    Raises:
        ValueError: an unknown optimizer.
        ImportError: `wandb` is asked for and not installed.
    """
    config = dataclasses.replace(config, device=config.device or get_device())
    torch.manual_seed(config.seed)
    model.train()
    log = _log(config)
    optimizer = _optimizer(model, config)
    scheduler = None
    if config.warmup_steps > 0:
        scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / config.warmup_steps))
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=config.batch_size, shuffle=True)
    model.to(config.device)
    for epoch in tqdm(range(1, config.num_epochs + 1), desc="epoch", delay=1):
        samples = 0
        for step, batch in enumerate(loader):
            tokens = batch["tokens"].to(config.device)
            loss = model(tokens, return_type="loss")
            loss.backward()
            if config.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
            samples += len(tokens)
            log({"train_loss": loss, "samples": samples, "epoch": epoch})
            if _due(step, config.print_every):
                sys.stdout.write(f"Epoch {epoch} Samples {samples} Step {step} Loss {loss.item()}\n")
            if config.save_dir is not None and _due(step, config.save_every):
                torch.save(model.state_dict(), Path(config.save_dir) / f"model_{step}.pt")
            if config.max_steps is not None and step >= config.max_steps:
                break
    return model


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _optimizer(model: nn.Module, config: HookedTransformerTrainConfig) -> optim.Optimizer:
    decay = config.weight_decay
    if config.optimizer_name in ("Adam", "AdamW"):
        if decay is None:
            return optim.Adam(model.parameters(), lr=config.lr)
        return optim.AdamW(model.parameters(), lr=config.lr, weight_decay=decay)
    if config.optimizer_name == "SGD":
        return optim.SGD(
            model.parameters(), lr=config.lr, weight_decay=decay or 0.0, momentum=config.momentum
        )
    raise ValueError(f"Optimizer {config.optimizer_name} not supported")


def _log(config: HookedTransformerTrainConfig) -> Callable[[dict[str, Any]], None]:
    """Show and log the numbers of a step."""
    if not config.wandb:
        return lambda row: None
    if not is_library_available("wandb"):
        raise ImportError("Wandb is not available")
    import wandb

    project = config.wandb_project_name or "easy-transformer"
    wandb.init(project=project, config=vars(config))

    def log(row: dict[str, Any]) -> None:
        wandb.log(
            {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in row.items()}
        )

    return log
