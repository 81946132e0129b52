"""SAELens on `interp.compat.transformer_lens`: SAEs attached, read and removed, activations stored, an SAE trained.

Every claim is an assertion; what is recorded is compared with the real TransformerLens by `compare.py`.
"""

import tempfile
from typing import Any

import subject
import torch
from torch import Tensor

HOOK, HEADS = "blocks.1.hook_resid_post", "blocks.2.attn.hook_z"
STEPS, BATCH, CONTEXT = 150, 256, 64


def sae_at(hook: str, d_in: int, **options: Any) -> Any:
    """A random SAE of 4 features per dimension."""
    from sae_lens import StandardSAE, StandardSAEConfig
    from sae_lens.saes.sae import SAEMetadata

    cfg = StandardSAEConfig(d_in, 4 * d_in, metadata=SAEMetadata(hook_name=hook), **options)
    sae = StandardSAE(cfg)
    torch.manual_seed(0)
    with torch.no_grad():
        sae.W_enc.copy_(torch.randn(d_in, 4 * d_in) / d_in**0.5)
        sae.W_dec.copy_(sae.W_enc.T / 4)
    return sae


def transcoder_at(layer: int, d_model: int) -> Any:
    """A random transcoder from an MLP's input to its output."""
    from sae_lens import Transcoder, TranscoderConfig
    from sae_lens.saes.sae import SAEMetadata

    hooks = {"hook_name": f"blocks.{layer}.mlp.hook_in", "hook_name_out": f"blocks.{layer}.hook_mlp_out"}
    cfg = TranscoderConfig(
        d_model, 2 * d_model, d_out=d_model, apply_b_dec_to_input=False, metadata=SAEMetadata(**hooks)
    )
    coder = Transcoder(cfg)
    torch.manual_seed(1)
    with torch.no_grad():
        coder.W_enc.copy_(torch.randn(d_model, 2 * d_model) / d_model**0.5)
        coder.W_dec.copy_(torch.randn(2 * d_model, d_model) / d_model**0.5)
    return coder


def attached(model: Any, tokens: Tensor) -> subject.Record:
    """Logits and caches with SAEs; that an error term restores the model, and that nothing is left behind."""
    d = model.cfg.d_model
    saes = [sae_at(HOOK, d), sae_at(HEADS, d, reshape_activations="hook_z"), transcoder_at(3, d)]
    plain = model(tokens)
    found = {"logits": plain, "loss": model(tokens, return_type="loss")}
    for sae in saes:
        name = sae.cfg.metadata.hook_name
        with_sae = model.run_with_saes(tokens, saes=[sae])
        assert (with_sae - plain).abs().max() > 1e-2, f"the SAE at {name} changed nothing"
        with model.saes([sae], use_error_term=True):
            torch.testing.assert_close(model(tokens), plain, rtol=1e-4, atol=1e-4)
        _, cache = model.run_with_cache_with_saes(tokens, saes=[sae])
        out = sae.cfg.metadata.hook_name_out or name
        found |= {f"{name} logits": with_sae, f"{name} features": cache[f"{out}.hook_sae_acts_post"]}
    sae = saes[0]
    off = [(f"{HOOK}.hook_sae_acts_post", lambda acts, hook: acts * 0)]
    found["features off"] = model.run_with_hooks_with_saes(tokens, saes=[sae], fwd_hooks=off)
    assert not torch.equal(found["features off"], found[f"{HOOK} logits"])
    model.add_sae(sae, use_error_term=True)
    assert model.acts_to_saes == {HOOK: sae}
    edited = model.run_with_hooks(
        tokens, fwd_hooks=off
    )  # the error stays, so only the features' part is lost
    found["features off, error kept"] = edited
    grads = []
    model.add_hook(f"{HOOK}.hook_sae_acts_post", lambda grad, hook: grads.append(grad), dir="bwd")
    model(tokens, return_type="loss").backward()
    found["gradient of the features"] = grads[0]
    model.reset_hooks()
    model.reset_saes()
    assert torch.equal(model(tokens), plain), "reset_saes left something behind"
    return {name: value.detach() for name, value in found.items()}


def trained(model: Any, dataset: Any) -> subject.Record:
    """An activation store over a local data set, an SAE trained on it, and SAELens' own evaluation of the result."""
    from sae_lens import (
        LanguageModelSAERunnerConfig,
        LanguageModelSAETrainingRunner,
        LoggingConfig,
        StandardTrainingSAEConfig,
    )
    from sae_lens.evals import EvalConfig, run_evals
    from sae_lens.training.activation_scaler import ActivationScaler
    from sae_lens.training.sae_trainer import SAETrainer

    torch.manual_seed(0)
    d = model.cfg.d_model
    with tempfile.TemporaryDirectory() as folder:
        cfg = LanguageModelSAERunnerConfig(
            sae=StandardTrainingSAEConfig(d_in=d, d_sae=4 * d, l1_coefficient=1.0),
            model_name=subject.MODEL, hook_name=HOOK, streaming=False, is_dataset_tokenized=False,
            context_size=CONTEXT, training_tokens=STEPS * BATCH, train_batch_size_tokens=BATCH,
            store_batch_size_prompts=8, n_batches_in_buffer=8, lr=1e-3, device="cpu", n_eval_batches=2,
            logger=LoggingConfig(log_to_wandb=False), checkpoint_path=None, output_path=folder, verbose=False,
        )  # fmt: skip
        runner = LanguageModelSAETrainingRunner(cfg, override_dataset=dataset, override_model=model)
        store = runner.activations_store
        first = store.get_activations(store.get_batch_tokens(4))
        losses: list[float] = []
        step = SAETrainer.step

        def counted(self: Any, batch: Tensor) -> Any:
            output = step(self, batch)
            losses.append(float(output.loss.detach()))
            return output

        SAETrainer.step = counted
        try:
            sae = runner.run()
        finally:
            SAETrainer.step = step
    wanted = EvalConfig(
        batch_size_prompts=8, n_eval_reconstruction_batches=2, n_eval_sparsity_variance_batches=2,
        compute_ce_loss=True, compute_kl=True, compute_variance_metrics=True, compute_sparsity_metrics=True,
    )  # fmt: skip
    said, _ = run_evals(sae, store, model, ActivationScaler(), wanted)
    curve = torch.tensor(losses)
    assert curve.isfinite().all() and len(curve) == STEPS
    early, late = curve[:10].mean(), curve[-10:].mean()
    assert late < early / 2, f"the loss went from {early:.3g} to {late:.3g}"
    scores = {name: torch.tensor(value) for part in said.values() for name, value in part.items()}
    assert scores["ce_loss_score"] > 0.8, scores
    found = {"losses": curve, "first losses": early, "last losses": late, **scores}
    return {"stored activations": first} | {f"trained: {name}": value for name, value in found.items()}


def transcript() -> subject.Record:
    """Everything above on the demo model."""
    from datasets import Dataset
    from sae_lens import HookedSAETransformer

    state, config = subject.demo()
    model = HookedSAETransformer(config, tokenizer=subject.tokenizer())
    model.load_state_dict(state, strict=False)
    model.eval()
    written = subject.texts(256)
    tokens = model.to_tokens(written[:4])[:, :CONTEXT]
    return attached(model, tokens) | trained(model, Dataset.from_dict({"text": written}))


if __name__ == "__main__":
    subject.tell(transcript, "sae-lens")
