"""Small dictionaries written by llamascopium, each with its own features and outputs of some vectors beside it.

`python llamascopium_dictionaries.py FOLDER` writes them; they are kept under
tests/features/formats/peers/llamascopium, where `interp.features.load` is checked on them. Activations are scaled
before they are encoded and back after decoding, by llamascopium's own functions.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llamascopium.models.clt import CLTConfig, CrossLayerTranscoder
from llamascopium.models.crosscoder import Crosscoder, CrosscoderConfig
from llamascopium.models.sae import SAEConfig, SparseAutoEncoder
from torch import Tensor

D, N, LAYERS = 6, 7, 3
STREAM, MLP = "blocks.1.hook_resid_post", "blocks.1.hook_mlp_out"
NORMS = (3.7, 11.3, 0.9, 2.2, 5.1, 7.9)


def randomised(model: Any) -> Any:
    """The model with random weights, directions of different lengths, and norms of what it reads and writes."""
    model = model.double()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn(*weight.shape) / 2)
            if "W_D" in name:
                weight.mul_(torch.linspace(0.3, 3, weight.shape[-2])[:, None])
    hooks = dict.fromkeys(model.cfg.associated_hook_points)
    model.set_dataset_average_activation_norm(dict(zip(hooks, NORMS, strict=False)))
    return model


def settings(rule: str, **more: object) -> dict[str, Any]:
    """The fields of every config."""
    return {"d_model": D, "expansion_factor": 1.7, "act_fn": rule, "top_k": 3, "dtype": torch.float64, **more}


def written(model: Any, folder: Path, suffix: str = "safetensors") -> None:
    """The folder that llamascopium writes, and what it says about some vectors."""
    folder.mkdir(parents=True, exist_ok=True)
    model.cfg.save_hyperparameters(folder)
    model.save_checkpoint(folder / f"sae_weights.{suffix}")
    hooks = dict.fromkeys(model.cfg.associated_hook_points)
    batch = {hook: 3 * torch.randn(N, D) for hook in hooks}
    with torch.no_grad():
        scaled, factors = model.normalize_activations(batch, return_scale_factor=True)
        features = model.encode(model.prepare_input(scaled)[0])
        output = model.decode(features)
        ends = [batch[hook] for hook in model.cfg.hooks_in], [factors[hook] for hook in model.cfg.hooks_out]
        expect(folder, *answers(model, features, output, *ends))


def answers(
    model: Any, features: Tensor, output: Tensor, read: list[Tensor], factors: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """What is read, features and output, the last brought back to the scale of the model."""
    match model:
        case SparseAutoEncoder():
            return read[0], features, output / factors[0]
        case Crosscoder():
            return torch.stack(read, -2), features, output / torch.stack(factors)[:, None]
    return torch.stack(read), features.transpose(0, 1), output / torch.stack(factors)[:, None, None]


def expect(folder: Path, x: Tensor, features: Tensor, output: Tensor) -> None:
    """Write what is expected of a dictionary beside it."""
    arrays: dict[str, Any] = {"x": x.numpy(), "features": features.numpy(), "output": output.numpy()}
    np.savez(folder / "expected.npz", **arrays)


def sae(rule: str, **more: Any) -> Any:
    """An SAE, or a transcoder where `hook_point_out` says so."""
    hooks = {"hook_point_in": STREAM, "hook_point_out": STREAM} | more
    return randomised(SparseAutoEncoder(SAEConfig(**settings(rule, **hooks))))


def crosscoder(rule: str, **more: Any) -> Any:
    """A crosscoder of several layers."""
    hooks = [f"blocks.{layer}.hook_resid_post" for layer in range(LAYERS)]
    return randomised(Crosscoder(CrosscoderConfig(**settings(rule, hook_points=hooks, **more))))


def clt(rule: str, **more: Any) -> Any:
    """A cross-layer transcoder."""
    hooks = {
        f"hook_points_{end}": [f"blocks.{layer}.{hook}" for layer in range(LAYERS)]
        for end, hook in (("in", "hook_resid_mid"), ("out", "hook_mlp_out"))
    }
    return randomised(CrossLayerTranscoder(CLTConfig(**settings(rule, **hooks, **more))))


def main(top: Path) -> None:
    """Every type and every rule of inference, each in a folder of its own."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    for rule in ("relu", "jumprelu", "topk"):
        written(sae(rule), top / f"sae_{rule}")
        written(crosscoder(rule), top / f"crosscoder_{rule}")
        written(clt(rule), top / f"clt_{rule}")
    written(sae("jumprelu", hook_point_in=MLP.replace("out", "in"), hook_point_out=MLP), top / "transcoder")
    written(sae("topk", norm_activation="token-wise", use_decoder_bias=False), top / "sae_token_wise")
    written(sae("jumprelu", norm_activation="inference"), top / "sae_inference", "pt")
    plain = {"sparsity_include_decoder_norm": False}
    for rule in ("topk", "jumprelu"):
        written(sae(rule, **plain), top / f"sae_{rule}_plain")
        written(clt(rule, **plain), top / f"clt_{rule}_plain")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
