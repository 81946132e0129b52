"""Attribution graphs as circuit-tracer computes them, of small random models with random transcoders, cross-layer too.

`python circuit_tracer_graphs.py given FOLDER`, run at the top of this repository with interp, writes the models;
`python circuit_tracer_graphs.py graph FOLDER`, run with circuit-tracer, writes its graph beside each. They are kept
under tests/circuits/peers, where `interp.circuits.attribution_graph` is compared with them edge by edge.
"""

import copy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

MODELS = {"llama-gqa": False, "gpt2": True}
"""Models of tests/configs.py, and whether their transcoders have a skip."""
CROSS_LAYER = {"llama-gqa-clt": False, "gpt2-clt": True}
"""The same two models with three layers and a cross-layer transcoder; that of the first has thresholds."""
LAYERS, S, IDS = 3, 16, [3, 1, 4, 1, 5, 9, 2]


def given(folder: Path) -> None:
    """A model in both layouts, and the weights of a transcoder for the MLP of each layer, or of a cross-layer one."""
    import interp
    from tests.configs import CONFIGS, build, perturbed

    for name, skip in MODELS.items():
        model = interp.HookedTransformer(copy.deepcopy(build(name)))
        torch.save(record_of(model, S, skip=skip), folder / f"{name}.pt")
    for name, skip in CROSS_LAYER.items():
        config = replace(CONFIGS[name.removesuffix("-clt")], n_layers=LAYERS)
        model = interp.HookedTransformer(perturbed(config, torch.float64, 5))
        torch.save(record_of(model, S, skip=skip, cross_layer=True), folder / f"{name}.pt")


def record_of(model: Any, features: int, *, skip: bool, cross_layer: bool = False) -> dict[str, Any]:
    """A model in both layouts, with random transcoders of one layer each or a cross-layer one."""
    from interp.compat.hooked_export import to_hooked_state

    state, config = to_hooked_state(model)
    d, draw = model.cfg.d_model, torch.Generator().manual_seed(0)

    def normal(*shape: int, by: float) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64) / by

    weights: dict[str, torch.Tensor] = {}
    for layer in range(model.cfg.n_layers):
        into = (model.cfg.n_layers - layer,) if cross_layer else ()  # the layers that its features write to
        own = {
            "W_enc": normal(d, features, by=d**0.5), "b_enc": normal(features, by=3),
            "W_dec": normal(features, *into, d, by=features**0.5), "b_dec": normal(d, by=5),
            **({"W_skip": normal(d, d, by=d)} if skip else {}),
            **({"threshold": normal(features, by=3).abs()} if cross_layer and not skip else {}),
        }  # fmt: skip
        weights |= {f"{layer}.{key}": value for key, value in own.items()}
    return {"hooked": state, "config": config, "weights": weights, "own": model.transformer.state_dict()}


class Numbers:
    """A tokenizer of numbers, which circuit-tracer asks for."""

    bos_token_id, all_special_ids, padding_side = IDS[0], [IDS[0]], "right"
    pad_token_id = eos_token_id = cls_token_id = sep_token_id = mask_token_id = unk_token_id = None

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def decode(self, token: object, *_: object, **__: object) -> str:
        """The number as text."""
        return str(token)

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        """The numbers as texts."""
        return [str(i) for i in ids]


def tracer(record: dict[str, Any]) -> Any:
    """The model of a record as circuit-tracer has it, in torch's default dtype."""
    from circuit_tracer.replacement_model.replacement_model_transformerlens import (
        TransformerLensReplacementModel,
    )
    from circuit_tracer.transcoder.single_layer_transcoder import TranscoderSet
    from transformer_lens import HookedTransformerConfig

    config = HookedTransformerConfig(**record["config"])
    coders: Any
    if record["weights"]["0.W_dec"].ndim == 3:
        coders = cross_layer_transcoder(record["weights"], config.n_layers)
    else:
        each = {layer: transcoder(record["weights"], layer) for layer in range(config.n_layers)}
        coders = TranscoderSet(each, "mlp.hook_in", "mlp.hook_out")
    model = TransformerLensReplacementModel.from_config(config, coders)
    inner = {".mlp.": ".mlp.old_mlp.", "unembed.": "unembed.old_unembed."}
    state = {renamed(key, inner): value for key, value in record["hooked"].items()}
    model.load_state_dict(state, strict=False)
    model.tokenizer = Numbers(config.d_vocab)
    return model


def graph(folder: Path) -> None:
    """circuit-tracer's graph of each model, with all that a comparison needs."""
    from circuit_tracer import attribute
    from circuit_tracer.graph import compute_graph_scores

    torch.set_default_dtype(torch.float64)
    for name in (*MODELS, *CROSS_LAYER):
        record = torch.load(folder / f"{name}.pt", weights_only=False)
        model = tracer(record)
        model.zero_positions = slice(0)  # by default the first position has no features
        found: Any = attribute(torch.tensor(IDS), model, batch_size=64)
        held = {f"W.{key}": value.numpy() for key, value in record["weights"].items()}
        held |= {f"model.{key}": value.numpy() for key, value in record["own"].items()}
        np.savez_compressed(
            folder / f"{name}.npz",
            ids=np.array(IDS),
            adjacency=found.adjacency_matrix.numpy(),
            features=found.active_features[found.selected_features].numpy(),
            activations=found.activation_values[found.selected_features].numpy(),
            scores=np.array(compute_graph_scores(found)),
            logits=model(torch.tensor([IDS]))[0, -1].detach().numpy(),
            tokens=np.array([target.vocab_idx for target in found.logit_targets]),
            probabilities=found.logit_probabilities.detach().numpy(),
            **held,
        )


def transcoder(weights: dict[str, torch.Tensor], layer: int) -> Any:
    """The transcoder of a layer as circuit-tracer has it."""
    from circuit_tracer.transcoder.single_layer_transcoder import SingleLayerTranscoder

    own = {key.partition(".")[2]: value for key, value in weights.items() if key.startswith(f"{layer}.")}
    made = SingleLayerTranscoder(
        *own["W_enc"].shape, torch.relu, layer, skip_connection="W_skip" in own, dtype=torch.get_default_dtype(),
        device=torch.device("cpu"),
    )  # fmt: skip
    with torch.no_grad():
        for key, value in own.items():
            made.get_parameter(key).copy_(value.mT if key in ("W_enc", "W_skip") else value)
    return made


def cross_layer_transcoder(weights: dict[str, torch.Tensor], n_layers: int) -> Any:
    """The cross-layer transcoder as circuit-tracer has it."""
    from circuit_tracer.transcoder.cross_layer_transcoder import CrossLayerTranscoder

    d, features = weights["0.W_enc"].shape
    kind, skip = "jump_relu" if "0.threshold" in weights else "relu", "0.W_skip" in weights
    made = CrossLayerTranscoder(
        n_layers, features, d, kind, skip, lazy_decoder=False, dtype=torch.get_default_dtype(),
        device=torch.device("cpu"),
    )  # fmt: skip
    with torch.no_grad():
        for name, value in weights.items():
            layer, _, key = name.partition(".")
            if key == "W_dec":
                made.get_parameter(f"W_dec.{layer}").copy_(value)
            else:
                key = f"activation_function.{key}" if key == "threshold" else key
                made.get_parameter(key)[int(layer)].copy_(value.mT if key == "W_enc" else value)
    return made


def renamed(key: str, words: dict[str, str]) -> str:
    """The name of a parameter in the replacement model."""
    for old, new in words.items():
        key = key.replace(old, new)
    return key


if __name__ == "__main__":
    {"given": given, "graph": graph}[sys.argv[1]](Path(sys.argv[2]))
