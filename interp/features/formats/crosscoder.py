"""Crosscoders of two models or several layers, of the dictionary_learning of "science of finetuning".

They are `model.safetensors` with `config.json`, or one `.pt` file.

They are of kind ReLU, or trained with BatchTopK: there a feature is active where its pre-activation, times what the
code normalisation makes of the norms of its directions, exceeds one threshold.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from interp.core.wording import value_text
from interp.features.activations import DictionaryKind, JumpReLU, ReLU
from interp.features.cross_layer import Crosscoder
from interp.features.formats.configs import check_keys, refuse_facts, refuse_unknown, widened
from interp.features.formats.files import Facts, Files, Layout
from interp.model.config import Json

CONFIG = "config.json"
KEYS = (
    "activation_dim", "dict_size", "num_layers", "num_decoder_layers", "encoder_layers", "latent_processor", "k",
    "code_normalization", "code_normalization_alpha_sae", "code_normalization_alpha_cc", "same_init_for_all_layers",
    "norm_init_scale", "init_with_transpose", "target_rms", "activation_mean", "activation_std", "dict_class",
)  # fmt: skip
WEIGHTS = ("encoder.weight", "encoder.bias", "decoder.weight", "decoder.bias")
SCALING = ("activation_mean", "activation_std", "activation_global_scale", "target_rms")
NORMALIZATIONS = ("CROSSCODER", "SAE", "MIXED", "NONE", "DECOUPLED")
"""By `code_normalization_id`, from 1 on."""
EPS = 1e-8
ROUNDING = 2**-6
"""How far a scale in bfloat16 may be from that of its parts in bfloat16, relative to it."""
COMPILED = "_orig_mod."
"""What torch.compile puts before names."""


def _weights(files: Files) -> str | None:
    """The name of the one file of tensors, None where there are none or several."""
    found = [name for name in files.names if name.endswith((".pt", ".pth", ".safetensors"))]
    return found[0] if len(found) == 1 else None


def _fits(files: Files) -> bool:
    name = _weights(files)
    if name is None:
        return False
    shapes = {key.removeprefix(COMPILED): shape for key, shape in files.tensors(name).shapes.items()}
    return len(shapes.get("encoder.weight", ())) == 3 and len(shapes.get("decoder.weight", ())) == 3


def _read(files: Files, facts: Facts) -> Crosscoder:
    """The crosscoder, with its thresholds in units of pre-activations."""
    refuse_facts(facts, "layer", "k", "norm_scaling_factor")
    name = _weights(files)
    assert name is not None
    config = files.json(CONFIG) if files.path.is_dir() else {}
    refuse_unknown(config, KEYS)
    if config.get("latent_processor") is not None:
        raise ValueError(
            "latent_processor is not supported: it changes features by code that is not in the files"
        )
    stored = {key.removeprefix(COMPILED): value for key, value in files.tensors(name).every().items()}
    check_keys(
        set(stored) - {*SCALING, "code_normalization_id", "k", "threshold"}, WEIGHTS, f"the tensors of {name}"
    )
    if ("k" in stored) != ("threshold" in stored):
        raise ValueError(f"the tensors of {name} must hold both 'k' and 'threshold', or neither")
    W_dec = stored["decoder.weight"]
    weights = {
        "W_enc": _all_sources(stored["encoder.weight"], len(W_dec), config),
        "b_enc": stored["encoder.bias"],
        "W_dec": W_dec,
        "b_dec": stored["decoder.bias"],
        **_scaling(stored),
    }
    kind: DictionaryKind = ReLU()
    if "threshold" in stored:
        kind = JumpReLU()
        weights["threshold"] = _thresholds(stored, config)
        if weights["threshold"].ndim == 2 and "scale" in weights:
            raise ValueError(
                "code normalisation DECOUPLED of scaled activations is not supported: its tool scales them twice"
            )
    return Crosscoder(kind, widened(weights), metadata=config)


LAYOUT = Layout("crosscoder", _fits, _read)


def _all_sources(W_enc: Tensor, n: int, config: Json) -> Float[Tensor, "l d s"]:
    """The encoder of every source, 0 of those that are only written (`encoder_layers`)."""
    read = config.get("encoder_layers")
    if read is None:
        read = [*range(len(W_enc))]
    if (
        not isinstance(read, list)
        or len(read) != len(W_enc) > 0
        or not all(isinstance(each, int) and 0 <= each < n for each in read)
        or len(set(read)) != len(read)
    ):
        raise ValueError(
            f"encoder_layers must name {len(W_enc)} of {n} sources, those that encoder.weight has, got "
            f"{value_text(read)}"
        )
    if read == [*range(n)]:
        return W_enc
    return W_enc.new_zeros(n, *W_enc.shape[1:]).index_copy(0, torch.tensor(read), W_enc)


def _scaling(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """What activations are shifted and scaled by; {} where the file says that they are not."""
    given = [stored[name] for name in SCALING if name in stored]
    if len(given) < len(SCALING) and given:
        missing = next(name for name in SCALING if name not in stored)
        raise ValueError(f"the tensors must hold {missing!r}, as they hold others of {', '.join(SCALING)}")
    if not given or bool(given[0].isnan().any() | given[1].isnan().any()):
        return {}
    mean, std, scale, rms = widened({name: stored[name] for name in SCALING}).values()
    if not torch.allclose(scale, rms / (std.square().sum(-1) + EPS).sqrt(), rtol=ROUNDING):
        raise ValueError(
            "activation_global_scale must be target_rms over the root of the summed squares of activation_std"
        )
    return {"shift": mean, "scale": scale, "unscale": scale + EPS}


def _thresholds(stored: dict[str, Tensor], config: Json) -> Tensor:
    """What pre-activations must exceed: the threshold over the norm that they are multiplied by before it is asked."""
    threshold = widened({"": stored["threshold"]})[""]
    norm = _code_norm(widened({"": stored["decoder.weight"]})[""], _normalization(stored, config), config)
    wanted = norm.shape[:-1]
    if threshold.shape != wanted:
        raise ValueError(f"threshold must have shape {[*wanted]}, got {[*threshold.shape]}")
    most = torch.finfo(norm.dtype).max
    return (threshold[..., None] / norm).nan_to_num(nan=most, posinf=most, neginf=0.0)


def _normalization(stored: dict[str, Tensor], config: Json) -> str:
    """The name of the code normalisation: by its number in the file, CROSSCODER where there is none."""
    number = stored.get("code_normalization_id")
    if number is None:
        named = config.get("code_normalization") or NORMALIZATIONS[0]
        if named not in NORMALIZATIONS:
            raise ValueError(
                f"code_normalization must be one of {', '.join(NORMALIZATIONS)}, got {value_text(named)}"
            )
        return str(named)
    if number.numel() != 1 or not 1 <= int(number) <= len(NORMALIZATIONS):
        raise ValueError(
            f"code_normalization_id must be from 1 to {len(NORMALIZATIONS)}, got {value_text(number)}"
        )
    return NORMALIZATIONS[int(number) - 1]


def _code_norm(W_dec: Float[Tensor, "l s d"], normalization: str, config: Json) -> Tensor:
    """What pre-activations are multiplied by before they are compared with the threshold: [s], or [l s]."""
    each = W_dec.norm(dim=-1)
    match normalization:
        case "CROSSCODER":
            return each.sum(0)
        case "SAE":
            return W_dec.norm(dim=(0, 2))
        case "MIXED":
            alphas = [config.get(f"code_normalization_alpha_{name}") for name in ("sae", "cc")]
            sae, cc = (
                usual if alpha is None else alpha for alpha, usual in zip(alphas, (1.0, 0.1), strict=True)
            )
            for alpha in (sae, cc):
                if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 <= alpha < 2.0**64:
                    raise ValueError(
                        f"code_normalization_alpha_sae and _cc must be numbers of at least 0, got {value_text(alpha)}"
                    )
            assert isinstance(sae, int | float) and isinstance(cc, int | float)
            return W_dec.norm(dim=(0, 2)) * sae + each.sum(0) * cc
        case "NONE":
            return torch.ones_like(each[0])
        case _:
            return each
