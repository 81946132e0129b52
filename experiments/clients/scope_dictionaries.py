"""Small dictionaries in the layouts of Gemma Scope and Llama Scope, with what SAELens makes of them beside.

`python scope_dictionaries.py FOLDER` writes them; they are kept under tests/features/formats/peers/scopes, where
`interp.features.load` is checked on them. Their own tools are not public or no more: the files are written as their
publishers wrote them, and SAELens' loaders read them, from the folder instead of from the hub.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from sae_lens.loading import pretrained_sae_loaders as loaders
from sae_lens.saes.sae import SAE
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

D, S, N = 6, 10, 7


def normal(*shape: int) -> Tensor:
    """Standard normal numbers in float32, to which SAELens converts all."""
    return torch.randn(*shape)


def expect(folder: Path, x: Tensor, features: Tensor, output: Tensor) -> None:
    """Write what is expected of a dictionary beside it."""
    arrays: dict[str, Any] = {"x": x.numpy(), "features": features.numpy(), "output": output.numpy()}
    np.savez(folder / "expected.npz", **arrays)


def answered(
    folder: Path, loaded: tuple[dict[str, Any], dict[str, Tensor], object], factor: float | None
) -> None:
    """What SAELens computes with what one of its loaders made of the folder."""
    config = loaders.handle_config_defaulting(loaded[0] | {"dtype": "float32", "device": "cpu"})
    config_class = SAE.get_sae_config_class_for_architecture(config["architecture"])
    sae_config: Any = config_class.from_dict(config)
    sae = SAE.get_sae_class_for_architecture(sae_config.architecture())(sae_config)
    state = {name: weight.float() for name, weight in loaded[1].items()}
    sae.process_state_dict_for_loading(state)
    sae.load_state_dict(state)
    if factor is not None:
        sae.fold_activation_norm_scaling_factor(factor)
    x = 3 * normal(N, D)
    with torch.no_grad():
        expect(folder, x, sae.encode(x), sae(x))


def gemma_scope(top: Path, repository: str, name: str) -> None:
    """An SAE or a transcoder of Gemma Scope."""
    folder = top / repository / name
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        "W_enc": normal(D, S), "b_enc": normal(S), "W_dec": normal(S, D), "b_dec": normal(D),
        "threshold": normal(S).abs(),
    }  # fmt: skip
    if name.startswith("embedding"):
        weights["b_dec"] = torch.zeros(D)  # SAELens scales W_dec and leaves b_dec
    arrays: dict[str, Any] = {key: value.numpy() for key, value in weights.items()}
    np.savez(folder / "params.npz", **arrays)
    read = loaders.gemma_2_sae_huggingface_loader
    if repository.endswith("transcoders"):
        read = loaders.gemma_2_transcoder_huggingface_loader
    sizes = {"d_in": D, "d_sae": S} | ({"d_out": D} if repository.endswith("transcoders") else {})
    answered(folder, read(str(top / repository), name, cfg_overrides=sizes), None)


def gemma_scope_2(top: Path, name: str, config: Mapping[str, object] | None) -> None:
    """An SAE or a transcoder of Gemma Scope 2; `config`: None where the repository has none."""
    repository = top / "gemma-scope-2-1b-pt"
    folder = repository / name
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        "w_enc": normal(D, S), "b_enc": normal(S), "w_dec": normal(S, D), "b_dec": normal(D),
        "threshold": normal(S).abs(),
    }  # fmt: skip
    if name.endswith("affine"):
        weights["affine_skip_connection"] = normal(D, D)
    save_file(weights, folder / "params.safetensors")
    if config is not None:
        common = {"architecture": "jump_relu", "model_name": "google/gemma-3-1b-pt", "width": S, "l0": 20}
        (folder / "config.json").write_text(json.dumps({**common, **config}, indent=2))
    answered(folder, loaders.gemma_3_sae_huggingface_loader(str(repository), name), None)


def llama_weights() -> dict[str, Tensor]:
    """The tensors that both releases of Llama Scope have."""
    return {
        "encoder.weight": normal(S, D), "encoder.bias": normal(S), "decoder.weight": normal(D, S),
        "decoder.bias": normal(D),
    }  # fmt: skip


def llama_scope(top: Path) -> None:
    """An SAE of Llama Scope's first release; SAELens' factor is that of the registry, sqrt(d) over the norm."""
    folder = top / "Llama3_1-8B-Base-LXR-8x" / "Llama3_1-8B-Base-L15R-8x"
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    hook, norm = "blocks.15.hook_resid_post", 10.8125
    config = {
        "d_model": D, "d_sae": S, "hook_point_in": hook, "hook_point_out": hook, "act_fn": "jumprelu",
        "jump_relu_threshold": 0.330078125, "norm_activation": "dataset-wise", "use_decoder_bias": True,
        "dataset_average_activation_norm": {"in": norm, "out": norm}, "apply_decoder_bias_to_pre_encoder": False,
    }  # fmt: skip
    (folder / "hyperparams.json").write_text(json.dumps(config, indent=2))
    save_file(llama_weights(), folder / "checkpoints" / "final.safetensors")
    override = {"dtype": "float32", "device": "cpu"}
    loaded = loaders.llama_scope_sae_huggingface_loader(
        str(folder.parent), folder.name, cfg_overrides=override
    )
    answered(folder, loaded, D**0.5 / norm)


def llama_scope_r1(top: Path) -> None:
    """An SAE of Llama Scope R1, with the norm that the file holds."""
    folder = top / "Llama-Scope-R1-Distill" / "L5R"
    folder.mkdir(parents=True, exist_ok=True)
    hook, norm = "blocks.5.hook_resid_post", 4.75
    config = {
        "sae_type": "sae", "d_model": D, "expansion_factor": 2, "hook_point_in": hook, "hook_point_out": hook,
        "act_fn": "jumprelu", "norm_activation": "dataset-wise", "sparsity_include_decoder_norm": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    weights = {
        "encoder.weight": normal(2 * D, D), "encoder.bias": normal(2 * D), "decoder.weight": normal(D, 2 * D),
        "decoder.bias": normal(D), "log_jumprelu_threshold": normal(2 * D),
        f"dataset_average_activation_norm.{hook}": torch.tensor(norm),
    }  # fmt: skip
    save_file(weights, folder / "sae_weights.safetensors")
    loaded = loaders.llama_scope_r1_distill_sae_huggingface_loader(str(folder.parent), folder.name)
    answered(folder, loaded, D**0.5 / norm)


def from_folders() -> None:
    """Let SAELens' loaders find a repository in the folder of its name."""

    def found(repo_id: str, filename: str, subfolder: str = "", **_: object) -> str:
        path = Path(repo_id, subfolder, filename)
        if not path.exists():
            raise LocalEntryNotFoundError(str(path))
        return str(path)

    def shapes(repo_id: str, filename: str) -> dict[str, list[int]]:
        with safe_open(Path(repo_id, filename), "pt") as file:
            return {name: file.get_slice(name).get_shape() for name in [*file.keys()]}

    loaders.hf_hub_download = found
    loaders.get_safetensors_tensor_shapes = shapes


def main(top: Path) -> None:
    """Every layout, each dictionary in a folder of its own."""
    torch.manual_seed(0)
    from_folders()
    gemma_scope(top, "gemma-scope-2b-pt-res", "layer_5/width_16k/average_l0_7")
    gemma_scope(top, "gemma-scope-2b-pt-res", "embedding/width_4k/average_l0_6")
    gemma_scope(top, "gemma-scope-9b-it-mlp", "layer_0/width_16k/average_l0_7")
    gemma_scope(top, "gemma-scope-2b-pt-transcoders", "layer_5/width_16k/average_l0_7")
    block = "model.layers.5"
    stream = {"hf_hook_point_in": f"{block}.output", "hf_hook_point_out": f"{block}.output", "type": "sae"}
    gemma_scope_2(top, "resid_post_all/layer_5_width_16k_l0_small", stream)
    gemma_scope_2(top, "mlp_out/layer_5_width_16k_l0_big", None)
    ends = {
        "hf_hook_point_in": f"{block}.pre_feedforward_layernorm.output",
        "hf_hook_point_out": f"{block}.post_feedforward_layernorm.output", "type": "transcoder",
    }  # fmt: skip
    gemma_scope_2(top, "transcoder_all/layer_5_width_16k_l0_small", ends | {"affine_connection": False})
    gemma_scope_2(top, "transcoder_all/layer_5_width_16k_l0_small_affine", ends | {"affine_connection": True})
    llama_scope(top)
    llama_scope_r1(top)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
