"""Small transcoders written by circuit-tracer, each with its own features and outputs of some vectors beside it.

`python circuit_tracer_dictionaries.py FOLDER` writes them; they are kept under
tests/features/formats/peers/circuit_tracer, where `interp.features.load` is checked on them. Gemma Scope's files are
written as numpy and safetensors hold them, and read by circuit-tracer.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from circuit_tracer.transcoder.activation_functions import JumpReLU, TopK
from circuit_tracer.transcoder.cross_layer_transcoder import (
    CrossLayerTranscoder,
    load_clt,
    load_gemma_scope_2_clt,
)
from circuit_tracer.transcoder.single_layer_transcoder import (
    SingleLayerTranscoder,
    TranscoderSet,
    load_gemma_scope_2_transcoder,
    load_gemma_scope_transcoder,
    load_relu_transcoder,
)
from safetensors.torch import save_file
from torch import Tensor

D, S, N, LAYERS = 6, 10, 7, 3
HOOKS = {"feature_input_hook": "mlp.hook_in", "feature_output_hook": "hook_mlp_out"}


def normal(*shape: int) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(*shape, dtype=torch.float64)


def randomised(module: Any) -> Any:
    """The module with random weights in float64."""
    module = module.double()
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(normal(*weight.shape) / 2)
    return module


def expect(folder: Path, **arrays: Tensor) -> None:
    """Write what is expected of a dictionary beside it."""
    held: dict[str, Any] = {name: value.detach().numpy() for name, value in arrays.items()}
    np.savez(folder / "expected.npz", **held)


def config(folder: Path, kind: str, **more: object) -> None:
    """The config that circuit-tracer reads."""
    settings = {"model_name": "google/gemma-2-2b", "model_kind": kind, "scan": "tiny", **HOOKS, **more}
    (folder / "config.yaml").write_text(yaml.dump(settings))


def layered(folder: Path, rule: Callable[[], Any], skip: bool, **more: object) -> None:
    """A set of one transcoder a layer, and what it says about the last of its layers."""
    folder.mkdir(exist_ok=True)
    coders = {
        layer: randomised(SingleLayerTranscoder(D, S, rule(), layer, skip, dtype=torch.float64))
        for layer in range(LAYERS)
    }
    TranscoderSet(coders, **HOOKS).to_safetensors(str(folder))
    config(folder, "transcoder_set", **more)
    last, x = coders[LAYERS - 1], normal(N, D)
    if not more:  # circuit-tracer 0.5.0 reads no top-k from files
        path = str(folder / f"layer_{LAYERS - 1}.safetensors")
        last = load_relu_transcoder(path, LAYERS - 1, dtype=torch.float64)
    with torch.no_grad():
        expect(folder, x=x, features=last.encode(x), output=last(x))


def across(folder: Path, rule: str) -> None:
    """A cross-layer transcoder, whose weights are read by circuit-tracer from what it wrote."""
    made = CrossLayerTranscoder(LAYERS, S, D, rule, lazy_decoder=False, dtype=torch.float64)
    randomised(made).to_safetensors(str(folder))
    config(folder, "cross_layer_transcoder")
    answered(folder, load_clt(str(folder), dtype=torch.float64))


def answered(folder: Path, clt: Any) -> None:
    """What a cross-layer transcoder says about some vectors of every layer."""
    x = normal(LAYERS, N, D)
    with torch.no_grad():
        features = clt.encode(x)
        expect(folder, x=x, features=features, output=clt.decode(features.to_sparse(), x))


def gemma_scope(folder: Path) -> None:
    """A transcoder of Gemma Scope's first release, read by circuit-tracer."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        "W_enc": normal(D, S), "b_enc": normal(S), "W_dec": normal(S, D), "b_dec": normal(D),
        "threshold": normal(S).abs(),
    }  # fmt: skip
    arrays: dict[str, Any] = {name: x.numpy() for name, x in weights.items()}
    np.savez(folder / "params.npz", **arrays)
    coder, x = load_gemma_scope_transcoder(str(folder / "params.npz"), 5, dtype=torch.float64), normal(N, D)
    with torch.no_grad():
        expect(folder, x=x, features=coder.encode(x), output=coder(x))


def gemma_weights(*targets: int, affine: bool) -> dict[str, Tensor]:
    """Random weights in the layout of Gemma Scope 2."""
    weights = {
        "w_enc": normal(D, S), "b_enc": normal(S), "w_dec": normal(S, *targets, D), "b_dec": normal(D),
        "threshold": normal(S).abs(),
    }  # fmt: skip
    return weights | ({"affine_skip_connection": normal(D, D)} if affine else {})


def gemma_scope_2(folder: Path, affine: bool) -> None:
    """A transcoder of Gemma Scope 2, read by circuit-tracer."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "params.safetensors"
    save_file(gemma_weights(affine=affine), path)
    coder, x = load_gemma_scope_2_transcoder(str(path), 5, dtype=torch.float64), normal(N, D)
    with torch.no_grad():
        expect(folder, x=x, features=coder.encode(x), output=coder(x))


def gemma_scope_2_across(folder: Path, affine: bool) -> None:
    """A cross-layer transcoder of Gemma Scope 2, read by circuit-tracer, whose loop leaves out the last layer named."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {layer: str(folder / f"params_layer_{layer}.safetensors") for layer in range(LAYERS)}
    for path in paths.values():
        save_file(gemma_weights(LAYERS, affine=affine), path)
    clt = load_gemma_scope_2_clt({**paths, LAYERS: ""}, dtype=torch.float64)
    if affine:
        clt.W_skip.data = clt.W_skip.data.double()
    answered(folder, clt)


def main(top: Path) -> None:
    """Every kind of file, each in a folder of its own."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    top.mkdir(parents=True, exist_ok=True)
    layered(top / "relu_skip", lambda: torch.nn.functional.relu, True)
    layered(top / "jump_relu", lambda: JumpReLU(torch.zeros(S, dtype=torch.float64)), False)
    layered(top / "topk", lambda: TopK(4), True, activation="topk", k=4)
    across(top / "clt_relu", "relu")
    across(top / "clt_jump_relu", "jump_relu")
    first = "gemma-scope-2b-pt-transcoders/layer_5/width_16k/average_l0_7"
    gemma_scope(top / first)
    second = top / "gemma-scope-2-1b-pt"
    for name in ("layer_5_width_16k_l0_small", "layer_5_width_16k_l0_small_affine"):
        gemma_scope_2(second / "transcoder_all" / name, name.endswith("affine"))
    for name in ("width_262k_l0_medium", "width_262k_l0_medium_affine"):
        gemma_scope_2_across(second / "clt" / name, name.endswith("affine"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
