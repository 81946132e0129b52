"""Sparse autoencoders of GPT-2 small by OpenAI: `{layer}.pt` in a folder whose name says the location.

Those with TopK read inputs of mean 0 and standard deviation 1, which no key says.
"""

from __future__ import annotations

from collections.abc import Mapping

from interp.core.wording import value_text
from interp.features.activations import DictionaryKind, ReLU, TopK
from interp.features.formats.configs import agreed, check_keys, count, refuse_facts, refuse_unknown
from interp.features.formats.files import Facts, Files, Layout, Stored
from interp.features.formats.states import chosen, in_path, named, transposed

FILE = r"^(?:.*/)?(\d+)\.pt$"
NAMES = {"W_enc": "encoder.weight", "W_dec": "decoder.weight", "b_enc": "latent_bias", "b_dec": "pre_bias"}
COUNTED = {"stats_last_nonzero", "latents_activation_frequency", "latents_mean_square"}
"""What training counted of each feature; no number depends on it."""
LOCATIONS = {
    "mlp_post_act": "mlp.hook_post", "resid_delta_attn": "hook_attn_out", "resid_delta_mlp": "hook_mlp_out",
    "resid_post_attn": "hook_resid_mid", "resid_post_mlp": "hook_resid_post",
}  # fmt: skip


def _fits(files: Files) -> bool:
    found = named(files, FILE)
    return bool(found) and {"pre_bias", "latent_bias"} <= files.tensors(next(iter(found))).shapes.keys()


def _read(files: Files, facts: Facts) -> Stored:
    """The autoencoder in a file."""
    refuse_facts(facts, "norm_scaling_factor")
    name, layer = chosen(files, FILE, facts)
    tensors = files.tensors(name)
    state = tensors.every()
    check_keys(state.keys() - COUNTED, NAMES.values(), name)
    kind = _kind(tensors.plain, facts)
    where = in_path(files, name, "|".join(LOCATIONS))
    site = None if where is None or layer is None else f"blocks.{layer}.{LOCATIONS[where[0]]}"
    return Stored(
        kind,
        transposed(state, NAMES),
        reads=site,
        normalize_activations="layer_norm" if isinstance(kind, TopK) else "none",
        metadata={"model_name": "gpt2", "location": None if where is None else where[0]},
    )


LAYOUT = Layout("OpenAI", _fits, _read)


def _kind(plain: Mapping[str, object], facts: Facts) -> DictionaryKind:
    """The kind by the name of the activation; of TopK the function after it, too."""
    refuse_unknown(dict(plain), ("activation", "activation_state_dict"))
    activation, settings = plain.get("activation", "ReLU"), plain.get("activation_state_dict") or {}
    if activation == "ReLU":
        refuse_facts(facts, "k")
        return ReLU()
    if activation != "TopK" or not isinstance(settings, dict):
        raise ValueError(f"activation must be ReLU or TopK, got {value_text(activation)}")
    refuse_unknown(settings, ("k", "postact_fn"), " of activation_state_dict")
    k, after = agreed("k", count(settings, "k"), facts.k), settings.get("postact_fn", "ReLU")
    if k is None or after not in ("ReLU", "Identity"):
        raise ValueError(
            f"activation_state_dict must hold k and postact_fn ReLU or Identity, got {dict(settings)}"
        )
    return TopK(k, relu=after == "ReLU")
