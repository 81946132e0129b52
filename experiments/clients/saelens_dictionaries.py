"""Small dictionaries of every architecture, written by SAELens with its own features and outputs of some vectors.

`python saelens_dictionaries.py write FOLDER` writes them: each in a folder of its own with `expected.npz`, which holds
x, features and output. Under SAELens 5 it writes folders in the format of that time. They are kept under
tests/features/formats/peers/saelens, where `interp.features.load` is checked on them. `... foreign FOLDER` writes files
of Goodfire and Qwen Scope, with what SAELens makes of them. `... check FOLDER` reads folders of `interp.features.save`,
with the same file beside, and compares.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import sae_lens
import torch
from torch import Tensor

if not sae_lens.__version__.startswith("5."):
    from sae_lens.saes.sae import SAEMetadata
    from sae_lens.training.activation_scaler import ActivationScaler, ActivationWhitening

D_IN, D_SAE, D_OUT, N = 6, 10, 4, 7
HOOKS = {"hook_name": "blocks.1.ln2.hook_normalized", "hook_name_out": "blocks.1.hook_mlp_out"}
Arrays = dict[str, Tensor]


def normal(*shape: int) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(*shape, dtype=torch.float64)


def randomised(module: Any) -> Any:
    """The module with weights of its own everywhere: no bias 0, no encoder that is the decoder transposed."""
    with torch.no_grad():
        for name, weight in module.named_parameters():
            weight.copy_(normal(*weight.shape) / 2)
            if name == "threshold":
                weight.abs_()
    return module


def config(kind: str, **options: Any) -> Any:
    """The config of an SAE or a transcoder of SAELens."""
    transcodes = "Transcoder" in kind
    where: dict[str, str] = HOOKS if transcodes else {"hook_name": "blocks.3.hook_resid_post"}
    if transcodes:
        options |= {"d_out": D_OUT, "apply_b_dec_to_input": False}
    made = getattr(sae_lens, f"{kind}Config")
    return made(
        D_IN, D_SAE, **{"dtype": "float64"} | options, metadata=SAEMetadata(model_name="gpt2", **where)
    )


def made(kind: str, **options: Any) -> Any:
    """A random SAE or transcoder."""
    return randomised(getattr(sae_lens, kind)(config(kind, **options)))


def written(sae: Any, folder: Path, x: Tensor) -> None:
    """The folder that SAELens writes, and what it says about x."""
    sae.save_model(folder)
    with torch.no_grad():
        expect(folder, x, sae.encode(x), sae(x))


def expect(folder: Path, x: Tensor, features: Tensor, output: Tensor) -> None:
    """Write what is expected of a dictionary beside it."""
    np.savez(
        folder / "expected.npz",
        x=x.numpy(),
        features=features.detach().numpy(),
        output=output.detach().numpy(),
    )


def plain(folder: Path, x: Tensor) -> None:
    """Every architecture of inference, with what changes numbers in it."""
    cases = {
        "standard": made("StandardSAE"),
        "standard_layer_norm": made("StandardSAE", normalize_activations="layer_norm"),
        "standard_float32": made("StandardSAE", dtype="float32", apply_b_dec_to_input=False),
        "topk": made("TopKSAE", k=3, rescale_acts_by_decoder_norm=False),
        "topk_rescaled": made("TopKSAE", k=3, rescale_acts_by_decoder_norm=True),
        "abstopk": made("AbsTopKSAE", k=3, rescale_acts_by_decoder_norm=True),
        "jumprelu": made("JumpReLUSAE", normalize_activations="constant_norm_rescale"),
        "gated": made("GatedSAE"),
        "transcoder": made("Transcoder"),
        "skip_transcoder": made("SkipTranscoder"),
        "jumprelu_transcoder": made("JumpReLUTranscoder"),
        "jumprelu_skip_transcoder": made("JumpReLUSkipTranscoder"),
        "matching_pursuit": made("MatchingPursuitSAE", max_iterations=4, residual_threshold=0.8),
        "matching_pursuit_uncentred": made(
            "MatchingPursuitSAE",
            apply_b_dec_to_input=False,
            stop_on_duplicate_support=False,
            max_iterations=3,
        ),
    }
    for name, sae in cases.items():
        written(sae, folder / name, x.to(sae.dtype))


def trained(folder: Path, x: Tensor) -> None:
    """What becomes of the two architectures that are for training alone when SAELens writes them for inference."""
    shared = {"dtype": "float64", "k": 3, "metadata": SAEMetadata(hook_name="blocks.2.hook_resid_pre")}
    cases = {
        "batchtopk": sae_lens.BatchTopKTrainingSAE(
            sae_lens.BatchTopKTrainingSAEConfig(D_IN, D_SAE, **shared)
        ),
        "matryoshka": sae_lens.MatryoshkaBatchTopKTrainingSAE(
            sae_lens.MatryoshkaBatchTopKTrainingSAEConfig(D_IN, D_SAE, **shared, matryoshka_widths=[4, D_SAE])
        ),
    }
    for name, sae in cases.items():
        randomised(sae)
        sae.topk_threshold.fill_(0.4)
        sae.save_inference_model(folder / name)
        read = sae_lens.SAE.load_from_disk(folder / name)
        expect(folder / name, x, read.encode(x), read(x))


def scaled(folder: Path, x: Tensor) -> None:
    """Checkpoints of training, whose scaling of the activations lies beside and is folded in when training ends."""
    for name, sae in {
        "expected_average": made("TopKSAE", k=3, normalize_activations="expected_average_only_in"),
        "expected_average_pursuit": made(
            "MatchingPursuitSAE", max_iterations=3, normalize_activations="expected_average_only_in"
        ),
    }.items():
        sae.save_model(folder / name)
        scaler = ActivationScaler(scaling_factor=2.7)
        scaler.save(str(folder / name / "activation_scaler.json"))
        sae.fold_activation_norm_scaling_factor(scaler.scaling_factor)
        expect(folder / name, x, sae.encode(x), sae(x))
    for name, kind, options in (
        ("whitened", "StandardSAE", {}),
        ("whitened_gated", "GatedSAE", {"apply_b_dec_to_input": False}),
        ("whitened_topk", "TopKSAE", {"k": 3, "rescale_acts_by_decoder_norm": True}),
    ):
        sae = made(kind, normalize_activations="covariance_whitening", **options)
        sae.save_model(folder / name)
        matrix = normal(D_IN, D_IN) + 2 * torch.eye(D_IN)
        whitening = ActivationWhitening(normal(D_IN), matrix, torch.linalg.inv(matrix))
        scaler = ActivationScaler(whitening=whitening)
        scaler.save(str(folder / name / "activation_scaler.json"))
        with torch.no_grad():
            z = scaler.scale(x)
            features, output = sae.encode(z), scaler.unscale(sae(z))
            sae.fold_activation_whitening(whitening.mean, whitening.matrix, whitening.inverse_matrix)
            torch.testing.assert_close(sae.encode(x), features, rtol=1e-9, atol=1e-9)
        expect(folder / name, x, features, output)


def older(folder: Path, x: Tensor) -> None:
    """Folders of SAELens 5, with what it computes."""
    shared: dict[str, Any] = {
        "architecture": "standard", "d_in": D_IN, "d_sae": D_SAE, "apply_b_dec_to_input": True,
        "finetuning_scaling_factor": False, "context_size": 128, "model_name": "gpt2-small",
        "hook_name": "blocks.8.hook_resid_pre", "hook_layer": 8, "hook_head_index": None, "prepend_bos": True,
        "dataset_path": "text", "dataset_trust_remote_code": True, "normalize_activations": "none",
        "dtype": "torch.float64", "device": "cpu", "sae_lens_training_version": "5.11.0",
        "activation_fn_str": "relu",
    }  # fmt: skip
    cases: dict[str, dict[str, Any]] = {
        "older_standard": {},
        "older_layer_norm": {"normalize_activations": "layer_norm", "apply_b_dec_to_input": False},
        "older_topk": {
            "architecture": "topk",
            "activation_fn_str": "topk",
            "activation_fn_kwargs": {"k": 3},
        },
        "older_jumprelu": {"architecture": "jumprelu"},
        "older_gated": {"architecture": "gated"},
    }
    for name, keys in cases.items():
        written(randomised(sae_lens.SAE(sae_lens.SAEConfig(**(shared | keys)))), folder / name, x)


def foreign(folder: Path, x: Tensor) -> None:
    """Files of other projects, and what SAELens makes of them: it downloads them, here from the folder itself."""
    from sae_lens.loading import pretrained_sae_loaders as loaders

    d = {"encoder_linear": (D_SAE, D_IN), "decoder_linear": (D_IN, D_SAE)}
    s = {"W_enc": (D_SAE, D_IN), "W_dec": (D_IN, D_SAE)}
    goodfire = {f"{name}.weight": normal(*shape).float() for name, shape in d.items()}
    goodfire |= {f"{name}.bias": normal(shape[0]).float() for name, shape in d.items()}
    qwen = {name: normal(*shape).float() for name, shape in s.items()}
    qwen |= {"b_enc": normal(D_SAE).float(), "b_dec": normal(D_IN).float()}
    for repository, file, state, loader in (
        ("Goodfire/Llama-3.1-8B-Instruct-SAE-l19", "Llama-3.1-8B-Instruct-SAE-l19.pth", goodfire,
         loaders.get_goodfire_huggingface_loader),
        ("Qwen/SAE-Res-Qwen3-1.7B-Base-W32K-L0_3", "layer5.sae.pt", qwen, loaders.qwen_scope_sae_huggingface_loader),
    ):  # fmt: skip
        place = folder / repository
        place.mkdir(parents=True, exist_ok=True)
        torch.save(state, place / file)
        loaders.hf_hub_download = lambda repo_id, filename, **_: str(folder / repo_id / filename)
        config, weights, _ = loader(repository, file, "cpu", False, {"d_in": D_IN, "d_sae": D_SAE})
        sae = sae_lens.SAE.from_dict(loaders.handle_config_defaulting(config))
        sae.load_state_dict(weights)
        expect(place, x.float(), sae.encode(x.float()), sae(x.float()))


def check(folder: Path) -> None:
    """Read what `interp.features.save` wrote, and compare with what it computes."""
    for place in sorted(each.parent for each in folder.rglob("expected.npz")):
        expected = {name: torch.from_numpy(value) for name, value in np.load(place / "expected.npz").items()}
        sae = sae_lens.SAE.load_from_disk(place)
        for name, found in (("features", sae.encode(expected["x"])), ("output", sae(expected["x"]))):
            torch.testing.assert_close(found, expected[name], rtol=1e-12, atol=1e-12)
        print(place.name, sae.cfg.architecture(), sae.cfg.metadata.hook_name, sae.cfg.metadata.hook_name_out)


if __name__ == "__main__":
    what, place = sys.argv[1], Path(sys.argv[2])
    torch.manual_seed(0)
    if what == "check":
        check(place)
    else:
        vectors = 2 * normal(N, D_IN)
        makers = (older,) if sae_lens.__version__.startswith("5.") else (plain, trained, scaled)
        makers = (foreign,) if what == "foreign" else makers
        for make in makers:
            make(place, vectors)
