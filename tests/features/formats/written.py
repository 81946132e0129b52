"""Small dictionaries written by hand in layouts of others, with the features and outputs that their rules give.

The numbers are worked out in numpy, one source or layer at a time, from the files' own tensors and the rules of the
tools (FEATURES A in `shared`), never by the code that is tested. Widths differ and no matrix is another's transpose.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

Array = NDArray[np.float64]
Arrays = Mapping[str, Array]
D, S, D_OUT, N, LAYERS = 6, 10, 4, 7, 3
STREAM = "blocks.2.hook_resid_post"


class Answer(NamedTuple):
    """Vectors, and what the dictionary says about them; of several layers each with a first axis of layers."""

    x: Array
    features: Array
    output: Array


@dataclass(frozen=True)
class Example:
    """A dictionary in one layout."""

    layout: str
    """The name of the layout."""
    make: Callable[[Path], Answer]
    """Writes the files into a folder."""
    file: str
    """A file of tensors in it,"""
    tensor: str
    """and one of its tensors, which cannot be done without."""
    given: Mapping[str, object] = field(default_factory=dict)
    """What `load` is given beside the path."""


def draw(seed: int = 0) -> Callable[..., Array]:
    """A function that draws normal numbers."""
    rng = np.random.default_rng(seed)
    return lambda *shape: rng.normal(size=shape) / 2


def relu(z: Array) -> Array:
    """Numbers below 0 as 0."""
    return np.maximum(z, 0)


def jump(z: Array, threshold: Array | float) -> Array:
    """Numbers that exceed their threshold, others as 0."""
    return np.where(z > threshold, z, 0.0)


def top(z: Array, k: int, by: Array | float = 1.0) -> Array:
    """The k of each row that are largest times `by`, others as 0."""
    found = np.zeros_like(z)
    for row, (values, score) in enumerate(zip(z, z * by, strict=True)):
        for each in np.argsort(score)[-k:]:
            found[row, each] = values[each]
    return found


def lengths(W_dec: Array) -> Array:
    """The length of each row of the last axis."""
    return np.sqrt((W_dec**2).sum(-1))


def save(path: Path, arrays: Arrays) -> None:
    """A file of safetensors."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: torch.from_numpy(np.array(value)) for name, value in arrays.items()}, path)


def gemma_scope(folder: Path) -> Answer:
    """JumpReLU, nothing subtracted, and a d of its own."""
    n = draw()
    w = {"W_enc": n(D, S), "b_enc": n(S), "W_dec": n(S, D), "b_dec": n(D), "threshold": abs(n(S))}
    np.savez(folder / "params.npz", **w)  # type: ignore[arg-type]
    x = n(N, D)
    f = jump(x @ w["W_enc"] + w["b_enc"], w["threshold"])
    return Answer(x, f, f @ w["W_dec"] + w["b_dec"])


def gemma_scope_2(folder: Path) -> Answer:
    """A transcoder of other widths, with an affine skip that is not transposed."""
    n = draw()
    w = {
        "w_enc": n(D, S), "b_enc": n(S), "w_dec": n(S, D_OUT), "b_dec": n(D_OUT), "threshold": abs(n(S)),
        "affine_skip_connection": n(D, D_OUT),
    }  # fmt: skip
    save(folder / "params.safetensors", w)
    config = {
        "architecture": "jump_relu", "model_name": "google/gemma-3-1b-pt", "width": S, "l0": 20, "type": "transcoder",
        "affine_connection": True, "hf_hook_point_in": "model.layers.2.pre_feedforward_layernorm.output",
        "hf_hook_point_out": "model.layers.2.post_feedforward_layernorm.output",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    x = n(N, D)
    f = jump(x @ w["w_enc"] + w["b_enc"], w["threshold"])
    return Answer(x, f, f @ w["w_dec"] + w["b_dec"] + x @ w["affine_skip_connection"])


def gemma_scope_2_layers(folder: Path, *, stored: Callable[[int], int] = lambda layer: 0) -> Answer:
    """A cross-layer transcoder; decoders into earlier layers are stored, hold numbers, and count for nothing."""
    n = draw()
    layers = [
        {"w_enc": n(D, S), "b_enc": n(S), "w_dec": n(S, LAYERS, D), "b_dec": n(D), "threshold": abs(n(S)),
         "affine_skip_connection": n(D, D)}
        for _ in range(LAYERS)
    ]  # fmt: skip
    for layer, w in enumerate(layers):
        save(
            folder / f"params_layer_{layer}.safetensors", w | {"w_dec": w["w_dec"][:, stored(layer) :].copy()}
        )
    x = n(LAYERS, N, D)
    f = np.stack([jump(x[i] @ w["w_enc"] + w["b_enc"], w["threshold"]) for i, w in enumerate(layers)])
    y = np.stack([x[j] @ w["affine_skip_connection"] + w["b_dec"] for j, w in enumerate(layers)])
    for i in range(LAYERS):
        for j in range(i, LAYERS):
            y[j] += f[i] @ layers[i]["w_dec"][:, j]
    return Answer(x, f, y)


def llama_scope(folder: Path) -> Answer:
    """Activations of norm 2.5 read and 0.7 written; the scalar threshold is in units of unscaled activations."""
    n, c_in, c_out = draw(), D**0.5 / 2.5, D**0.5 / 0.7
    w = {"encoder.weight": n(S, D), "encoder.bias": n(S), "decoder.weight": n(D, S), "decoder.bias": n(D)}
    save(folder / "checkpoints" / "final.safetensors", w)
    config = {
        "d_model": D, "d_sae": S, "hook_point_in": "blocks.2.hook_mlp_in", "hook_point_out": "blocks.2.hook_mlp_out",
        "act_fn": "jumprelu", "jump_relu_threshold": 0.1, "norm_activation": "dataset-wise", "use_decoder_bias": True,
        "dataset_average_activation_norm": {"in": 2.5, "out": 0.7}, "top_k": 50, "dtype": "torch.bfloat16",
    }  # fmt: skip
    (folder / "hyperparams.json").write_text(json.dumps(config))
    x = n(N, D)
    f = jump((x * c_in) @ w["encoder.weight"].T + w["encoder.bias"], 0.1 * c_in)
    return Answer(x, f, (f @ w["decoder.weight"].T + w["decoder.bias"]) / c_out)


def llama_scope_r1(folder: Path, *, include_norm: bool = True) -> Answer:
    """A threshold for each feature, which the pre-activation times the direction's length must exceed."""
    n, c = draw(), D**0.5 / 2.5
    w = {
        "encoder.weight": n(S, D), "encoder.bias": n(S), "decoder.weight": n(D, S), "decoder.bias": n(D),
        "log_jumprelu_threshold": n(S) - 1, f"dataset_average_activation_norm.{STREAM}": np.array(2.5),
    }  # fmt: skip
    save(folder / "sae_weights.safetensors", w)
    config = {
        "sae_type": "sae", "d_model": D, "expansion_factor": S / D, "hook_point_in": STREAM, "hook_point_out": STREAM,
        "act_fn": "jumprelu", "norm_activation": "dataset-wise", "sparsity_include_decoder_norm": include_norm,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    x = n(N, D)
    z = (x * c) @ w["encoder.weight"].T + w["encoder.bias"]
    norm = lengths(w["decoder.weight"].T) if include_norm else 1.0
    f = np.where(z * norm > np.exp(w["log_jumprelu_threshold"]), z, 0)
    return Answer(x, f, (f @ w["decoder.weight"].T + w["decoder.bias"]) / c)


def llamascopium_config(sae_type: str, rule: str, **more: object) -> dict[str, object]:
    """A config with the keys that llamascopium writes for every type."""
    return {
        "sae_type": sae_type, "d_model": D, "expansion_factor": S / D + 0.01, "use_decoder_bias": True, "act_fn": rule,
        "norm_activation": "dataset-wise", "sparsity_include_decoder_norm": True, "top_k": 3,
        "use_triton_kernel": False,
        "sparsity_threshold_for_triton_spmm_kernel": 0.996, "jumprelu_threshold_window": 2.0, **more,
    }  # fmt: skip


LOG = "activation_function.log_jumprelu_threshold"
NORM = "dataset_average_activation_norm."


def llamascopium(folder: Path) -> Answer:
    """An SAE with top-k by pre-activation times length."""
    n, c = draw(), D**0.5 / 2.5
    w = {"W_E": n(D, S), "b_E": n(S), "W_D": n(S, D), "b_D": n(D), NORM + STREAM: np.array(2.5)}
    save(folder / "sae_weights.safetensors", w)
    config = llamascopium_config(
        "sae", "topk", hook_point_in=STREAM, hook_point_out=STREAM, use_glu_encoder=False
    )
    (folder / "config.json").write_text(json.dumps(config))
    x = n(N, D)
    f = relu(top((x * c) @ w["W_E"] + w["b_E"], 3, lengths(w["W_D"])))
    return Answer(x, f, (f @ w["W_D"] + w["b_D"]) / c)


def llamascopium_crosscoder(folder: Path) -> Answer:
    """A crosscoder, whose features differ by source as their lengths do."""
    n, norms = draw(), np.array([2.5, 0.7, 1.3])
    hooks = [f"blocks.{layer}.hook_resid_post" for layer in range(LAYERS)]
    w = {
        "W_E": n(LAYERS, D, S), "b_E": n(LAYERS, S), "W_D": n(LAYERS, S, D), "b_D": n(LAYERS, D), LOG: n(S) - 1,
        **{NORM + hook: np.array(norm) for hook, norm in zip(hooks, norms, strict=True)},
    }  # fmt: skip
    save(folder / "sae_weights.safetensors", w)
    (folder / "config.json").write_text(
        json.dumps(llamascopium_config("crosscoder", "jumprelu", hook_points=hooks))
    )
    x, c = n(N, LAYERS, D), D**0.5 / norms
    z = sum((x[:, h] * c[h]) @ w["W_E"][h] + w["b_E"][h] for h in range(LAYERS))
    f = np.stack([np.where(z * lengths(w["W_D"][h]) > np.exp(w[LOG]), z, 0) for h in range(LAYERS)], axis=1)
    y = np.stack([(f[:, h] @ w["W_D"][h] + w["b_D"][h]) / c[h] for h in range(LAYERS)], axis=1)
    return Answer(x, f, y)


def llamascopium_clt(folder: Path) -> Answer:
    """A cross-layer transcoder, whose file W_D.j holds the decoders into layer j."""
    n = draw()
    hooks = {
        f"hook_points_{end}": [f"blocks.{layer}.{hook}" for layer in range(LAYERS)]
        for end, hook in (("in", "hook_resid_mid"), ("out", "hook_mlp_out"))
    }
    norms = {hook: 1.5 + i for i, hook in enumerate([*hooks["hook_points_in"], *hooks["hook_points_out"]])}
    w = {
        "W_E": n(LAYERS, D, S), "b_E": n(LAYERS, S), LOG: n(LAYERS, S) - 1,
        **{f"W_D.{j}": n(j + 1, S, D) for j in range(LAYERS)}, **{f"b_D.{j}": n(D) for j in range(LAYERS)},
        **{NORM + hook: np.array(norm) for hook, norm in norms.items()},
    }  # fmt: skip
    save(folder / "sae_weights.safetensors", w)
    (folder / "config.json").write_text(json.dumps(llamascopium_config("clt", "jumprelu", **hooks)))
    x = n(LAYERS, N, D)
    c_in, c_out = ([D**0.5 / norms[hook] for hook in hooks[f"hook_points_{end}"]] for end in ("in", "out"))
    f, y = np.zeros((LAYERS, N, S)), np.stack([np.tile(w[f"b_D.{j}"], (N, 1)) for j in range(LAYERS)])
    for i in range(LAYERS):
        z = (x[i] * c_in[i]) @ w["W_E"][i] + w["b_E"][i]
        norm = np.sqrt(sum(lengths(w[f"W_D.{j}"][i]) ** 2 for j in range(i, LAYERS)))
        f[i] = np.where(z * norm > np.exp(w[LOG][i]), z, 0)
        for j in range(i, LAYERS):
            y[j] += f[i] @ w[f"W_D.{j}"][i]
    return Answer(x, f, y / np.array(c_out)[:, None, None])


CIRCUIT_TRACER = """feature_input_hook: {read}
feature_output_hook: hook_mlp_out
model_kind: {kind}
model_name: google/gemma-2-2b
scan: tiny
"""


def circuit_tracer(folder: Path, *, hook: str = "ln2.hook_normalized") -> Answer:
    """A transcoder a layer, that of layer 1: thresholds below 0 let features below 0 pass; the skip is transposed."""
    n = draw()
    layers = [
        {"W_enc": n(S, D), "b_enc": n(S), "W_dec": n(S, D), "b_dec": n(D), "W_skip": n(D, D),
         "activation_function.threshold": n(S) - 0.2}
        for _ in range(LAYERS)
    ]  # fmt: skip
    for layer, w in enumerate(layers):
        save(folder / f"layer_{layer}.safetensors", w)
    (folder / "config.yaml").write_text(CIRCUIT_TRACER.format(read=hook, kind="transcoder_set"))
    x, w = n(N, D), layers[1]
    f = jump(x @ w["W_enc"].T + w["b_enc"], w["activation_function.threshold"])
    return Answer(x, f, f @ w["W_dec"] + w["b_dec"] + x @ w["W_skip"].T)


def circuit_tracer_clt(folder: Path) -> Answer:
    """A cross-layer transcoder, whose file W_dec_i holds the decoders out of layer i."""
    n = draw()
    w: dict[str, Array] = {}
    for i in range(LAYERS):
        w |= {f"W_enc_{i}": n(S, D), f"b_enc_{i}": n(S), f"b_dec_{i}": n(D), f"threshold_{i}": n(S)}
        save(folder / f"W_enc_{i}.safetensors", {name: x for name, x in w.items() if name.endswith(f"_{i}")})
        w |= {f"W_dec_{i}": n(S, LAYERS - i, D)}
        save(folder / f"W_dec_{i}.safetensors", {f"W_dec_{i}": w[f"W_dec_{i}"]})
    (folder / "config.yaml").write_text(
        CIRCUIT_TRACER.format(read="hook_resid_mid", kind="cross_layer_transcoder")
    )
    x = n(LAYERS, N, D)
    f = np.stack(
        [jump(x[i] @ w[f"W_enc_{i}"].T + w[f"b_enc_{i}"], w[f"threshold_{i}"]) for i in range(LAYERS)]
    )
    y = np.stack(
        [w[f"b_dec_{j}"] + sum(f[i] @ w[f"W_dec_{i}"][:, j - i] for i in range(j + 1)) for j in range(LAYERS)]
    )
    return Answer(x, f, y)


NORMALIZATIONS = ("CROSSCODER", "SAE", "MIXED", "NONE", "DECOUPLED")


def code_norm(W_dec: Array, normalization: str) -> Array:
    """What codes are multiplied by before they are compared with the threshold."""
    each = lengths(W_dec)
    together = np.sqrt((each**2).sum(0))
    return {
        "CROSSCODER": each.sum(0), "SAE": together, "MIXED": together + 0.1 * each.sum(0), "NONE": np.ones(S),
        "DECOUPLED": each,
    }[normalization]  # fmt: skip


def crosscoder(
    folder: Path, *, normalization: str = "CROSSCODER", scaled: bool = True, prefix: str = ""
) -> Answer:
    """A BatchTopK crosscoder of two models in one `.pt` file."""
    n, m, theta = draw(), 2, np.array([0.7, 1.1])
    decoupled = normalization == "DECOUPLED"
    nothing = np.full((m, D), np.nan)
    w = {
        "encoder.weight": n(m, D, S), "encoder.bias": n(S), "decoder.weight": n(m, S, D), "decoder.bias": n(m, D),
        "activation_mean": n(m, D) if scaled else nothing, "activation_std": abs(n(m, D)) if scaled else nothing,
        "target_rms": np.array(1.5), "k": np.array(3), "threshold": theta if decoupled else np.array(theta[0]),
        "code_normalization_id": np.array(1 + NORMALIZATIONS.index(normalization)),
        "activation_global_scale": np.ones(m),
    }  # fmt: skip
    if scaled:
        w["activation_global_scale"] = 1.5 / np.sqrt((w["activation_std"] ** 2).sum(-1) + 1e-8)
    torch.save({prefix + name: torch.from_numpy(np.array(x)) for name, x in w.items()}, folder / "model.pt")
    x = n(N, m, D)
    mean, scale = (w["activation_mean"], w["activation_global_scale"][:, None]) if scaled else (0.0, 1.0)
    given = (x - mean) * scale
    z = relu(sum(given[:, each] @ w["encoder.weight"][each] for each in range(m)) + w["encoder.bias"])
    norm = code_norm(w["decoder.weight"], normalization)
    if decoupled:
        f = np.stack([np.where(z * norm[each] > theta[each], z, 0) for each in range(m)], 1)
        y = np.einsum("bls,lsd->bld", f, w["decoder.weight"])
    else:
        f = np.where(z * norm > theta[0], z, 0)
        y = np.einsum("bs,lsd->bld", f, w["decoder.weight"])
    back = (scale + 1e-8) if scaled else 1.0
    return Answer(x, f, (y + w["decoder.bias"]) / back + mean)


EXAMPLES: tuple[Example, ...] = (
    Example("Gemma Scope", gemma_scope, "params.npz", "threshold"),
    Example("Gemma Scope 2", gemma_scope_2, "params.safetensors", "threshold"),
    Example("Gemma Scope 2, of several layers", gemma_scope_2_layers, "params_layer_1.safetensors", "b_dec"),
    Example("Llama Scope", llama_scope, "checkpoints/final.safetensors", "decoder.bias"),
    Example("Llama Scope R1", llama_scope_r1, "sae_weights.safetensors", "log_jumprelu_threshold"),
    Example("llamascopium", llamascopium, "sae_weights.safetensors", "W_D"),
    Example("llamascopium", llamascopium_crosscoder, "sae_weights.safetensors", "b_E"),
    Example("llamascopium", llamascopium_clt, "sae_weights.safetensors", "W_D.1"),
    Example("circuit-tracer", circuit_tracer, "layer_1.safetensors", "b_dec", {"layer": 1}),
    Example("circuit-tracer, across layers", circuit_tracer_clt, "W_enc_1.safetensors", "threshold_1"),
    Example("crosscoder", crosscoder, "model.pt", "decoder.bias"),
)
