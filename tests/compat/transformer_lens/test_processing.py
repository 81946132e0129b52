"""Processing steps: TransformerLens 3.9's numbers, and unchanged probabilities.

What 3.9 made of the same random weights is in `data/processing_3_9.safetensors`, by `oracle/make_processing.py`.
"""

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from interp.compat import from_hooked_transformer, to_hooked_state
from interp.compat.transformer_lens import processing
from interp.compat.transformer_lens.processing import (
    ProcessWeights,
    center_unembed,
    center_writing_weights,
    fill_missing_keys,
    fold_layer_norm,
    fold_value_biases,
    process_weights,
    processed,
    refactor_factored_attn_matrices,
    refusals,
)
from interp.model.transformer import Transformer
from tests.configs import CONFIGS, perturbed, some_tokens
from tests.loops import over
from tests.tolerances import assert_close

FILE = Path(__file__).parents[1] / "data" / "processing_3_9.safetensors"
with safe_open(FILE, "pt") as file:
    FIXTURES = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    FIELDS: dict[str, dict[str, object]] = json.loads(file.metadata()["configs"])
DEFAULTS: dict[str, object] = {
    "normalization_type": "LN", "positional_embedding_type": "standard", "attn_only": False, "gated_mlp": False,
    "parallel_attn_mlp": False, "original_architecture": None, "final_rms": False, "num_experts": None,
    "output_logits_soft_cap": -1.0, "use_attention_sinks": False, "use_qk_norm": False, "dtype": torch.float64,
}  # fmt: skip
Step = Callable[[dict[str, Tensor], object], dict[str, Tensor]]
STEPS: dict[str, Step] = {
    "fold": fold_layer_norm,
    "fold_betas": lambda state, cfg: fold_layer_norm(state, cfg, True, False),
    "fold_gammas": lambda state, cfg: fold_layer_norm(state, cfg, False, False),
    "fold_centred": lambda state, cfg: fold_layer_norm(state, cfg, fold_biases=False),
    "center_writing_weights": center_writing_weights,
    "center_unembed": center_unembed,
    "fold_value_biases": fold_value_biases,
}
EXACT = [(c, s) for c in FIELDS for s in STEPS if (c, s) != ("experts", "center_writing_weights")]
REFACTORED = [name for name in FIELDS if any(key.startswith(f"{name}/refactor/") for key in FIXTURES)]
WHOLE = [name for name in FIELDS if name not in ("gated", "final-rms", "olmo2", "alibi")]
"""Cases of which 3.9's processing keeps the probabilities; alibi's unread pos_embed.W_pos aside, it is one too."""


def config(**fields: object) -> SimpleNamespace:
    return SimpleNamespace(**{**DEFAULTS, **fields})


def tensors(case: str, step: str) -> dict[str, Tensor]:
    at = f"{case}/{step}/"
    return {name.removeprefix(at): tensor for name, tensor in FIXTURES.items() if name.startswith(at)}


def expected(case: str, step: str) -> dict[str, Tensor]:
    return {**tensors(case, "state"), **tensors(case, step)}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@over("case, step", EXACT)
def test_every_step_gives_the_numbers_of_transformer_lens(case: str, step: str) -> None:
    state = tensors(case, "state")
    before = {name: w.clone() for name, w in state.items()}
    found, wanted = STEPS[step](state, config(**FIELDS[case])), expected(case, step)
    if case == "final-rms":  # it centres W_U behind an RMSNorm, which changes the model
        wanted["unembed.W_U"] = found["unembed.W_U"]
    assert_same(found, wanted)
    assert all(torch.equal(w, before[name]) for name, w in state.items()), "what was given is not written to"


@pytest.mark.parametrize("case", WHOLE)
def test_all_steps_together_give_them_too(case: str) -> None:
    """To float32's tolerance: TransformerLens rounds float64 on the way."""
    found = process_weights(tensors(case, "state"), config(**FIELDS[case]))
    assert_same(found, expected(case, "all"), 1e-5)


@pytest.mark.parametrize("case", REFACTORED)
def test_refactored_factors_are_those_of_transformer_lens_up_to_signs(case: str) -> None:
    found = refactor_factored_attn_matrices(tensors(case, "state"), config(**FIELDS[case]))
    wanted = expected(case, "refactor")
    assert set(found) == set(wanted)
    for layer in range(2):
        at = f"blocks.{layer}.attn."
        for pair in (("W_Q", "W_K"), ("W_V", "W_O")):
            ours, theirs = ([s[f"{at}{name}"] for name in pair] for s in (found, wanted))
            for mine, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(mine.abs(), other.abs(), rtol=1e-8, atol=1e-8)
        q, k = (torch.cat((found[f"{at}W_{x}"], found[f"{at}b_{x}"][:, None]), 1) for x in "QK")
        old_q, old_k = (
            torch.cat((s[f"{at}W_{x}"], s[f"{at}b_{x}"][:, None]), 1)
            for s in [tensors(case, "state")]
            for x in "QK"
        )
        assert_close(q @ k.mT, old_q @ old_k.mT)
        assert_close(found[f"{at}b_O"], wanted[f"{at}b_O"])


def test_behind_a_final_rms_norm_the_unembedding_is_folded_and_not_centred() -> None:
    state, cfg = tensors("final-rms", "state"), config(**FIELDS["final-rms"])
    W_U = processed(state, cfg, center_unembed=False)[0]["unembed.W_U"]
    assert_close(W_U, state["unembed.W_U"] * state["ln_final.w"][:, None])


def test_experts_are_centred_along_the_stream() -> None:
    state = tensors("experts", "state")
    found = center_writing_weights(state, config(**FIELDS["experts"]))
    name = "blocks.1.mlp.experts.0.W_out.weight"
    assert_close(found[name], state[name] - state[name].mean(0))


EXPORTED = (
    "gpt2", "llama-gqa", "mqa", "attention-only", "attention-only-rotary", "parallel", "rms-plain", "no-norm",
    "window", "bidirectional", "scale-by-layer", "gemma2", "gemma3", "bloom", "gptj", "llama3-scaled",
)  # fmt: skip


def logits(model: Transformer) -> Tensor:
    return model(some_tokens())


@over("refactor", [False, True])
@pytest.mark.parametrize("name", EXPORTED)
def test_processing_changes_no_probability_and_doing_it_twice_does_no_more(name: str, refactor: bool) -> None:
    model = perturbed(CONFIGS[name])
    state, fields = to_hooked_state(model)
    rotary = fields["positional_embedding_type"] == "rotary"
    if refactor and (rotary or fields["n_key_value_heads"]):
        error = AssertionError if rotary else ValueError
        with pytest.raises(error, match=r"QK circuit|_W_K"):
            processed(state, config(**fields), refactor_factored_attn_matrices=True)
        return
    once, changes = processed(state, config(**fields), refactor_factored_attn_matrices=refactor)
    folded = from_hooked_transformer(once, {**fields, **changes}).transformer
    assert_close(logits(folded).log_softmax(-1), logits(model).log_softmax(-1))
    if fields["normalization_type"] is not None:
        assert changes == {"normalization_type": f"{fields['normalization_type']}Pre"}
    twice, more = processed(once, config(**{**fields, **changes}))
    assert more == {}
    assert_same(twice, once, 1e-12)


def test_without_centred_unembedding_the_logits_themselves_stay() -> None:
    model = perturbed(CONFIGS["gpt2"])
    state, fields = to_hooked_state(model)
    found, changes = processed(state, config(**fields), center_unembed=False)
    assert_close(logits(from_hooked_transformer(found, {**fields, **changes}).transformer), logits(model))
    for layer in range(2):
        means = found[f"blocks.{layer}.attn.W_Q"].mean(1)
        assert_close(means, torch.zeros_like(means))
        assert not found[f"blocks.{layer}.attn.b_V"].any()


REFUSED: dict[str, tuple[dict[str, object], str, str]] = {
    "soft cap": ({"output_logits_soft_cap": 3.0}, "center_unembed", "soft cap"),
    "rms": ({"normalization_type": "RMS"}, "center_writing_weights", "no LayerNorm"),
    "final rms": ({"final_rms": True}, "center_writing_weights", "final_rms"),
    "post-norm": ({"original_architecture": "Olmo2ForCausalLM"}, "fold_ln", "post-norm"),
    "shortformer": ({"positional_embedding_type": "shortformer"}, "fold_ln", "shortformer"),
    "gated with betas": ({"gated_mlp": True}, "fold_ln", "gate"),
    "experts": ({"num_experts": 2}, "fold_ln", "experts"),
    "none": ({"normalization_type": None}, "fold_ln", "no weights"),
    "sinks": ({"use_attention_sinks": True}, "fold_value_biases", "sum to 1"),
    "qk norm": ({"use_qk_norm": True}, "refactor_factored_attn_matrices", "use_qk_norm"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_change_probabilities_is_left_out_by_name(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    fields, step, reason = REFUSED[what]
    state, cfg = tensors("gpt2", "state"), config(**{**FIELDS["gpt2"], **fields})
    assert reason in refusals(state, cfg)[step]
    only = dict.fromkeys(("fold_ln", *processing._STEPS), False)
    with caplog.at_level(logging.INFO):
        found, changes = processed(state, cfg, **{**only, step: True})
    assert changes == {} and all(torch.equal(found[name], state[name]) for name in state | found)
    assert re.search(f"{step} is left out: .*{reason}", caplog.text)


def test_half_precision_is_processed_in_float32() -> None:
    state = {name: w.bfloat16() for name, w in tensors("gpt2", "state").items()}
    found = process_weights(state, config(**FIELDS["gpt2"]))
    exact = process_weights({n: w.float() for n, w in state.items()}, config(**FIELDS["gpt2"]))
    assert all(w.dtype == torch.bfloat16 for w in found.values())
    assert all(torch.equal(w, exact[name].bfloat16()) for name, w in found.items())


def test_missing_entries_are_filled_and_missing_matrices_refused() -> None:
    class Model(nn.Module):
        def state_dict(self) -> dict[str, Tensor]:  # type: ignore[override]
            return {"attn.W_Q": torch.ones(1), "attn.b_Q": torch.zeros(1), "ln1.w": torch.ones(1)}

    found = fill_missing_keys(Model(), {"attn.W_Q": torch.full((1,), 7.0)})
    assert {name: w.item() for name, w in found.items()} == {"attn.W_Q": 7, "attn.b_Q": 0, "ln1.w": 1}
    with pytest.raises(ValueError, match=r"missing weight matrices .*attn\.W_Q"):
        fill_missing_keys(Model(), {})


def test_a_state_dict_without_what_a_step_needs_is_refused_by_name() -> None:
    state, cfg = tensors("gpt2", "state"), config(**FIELDS["gpt2"])
    for step, name in (
        (center_unembed, "unembed.W_U"),
        (center_writing_weights, "embed.W_E"),
        (center_writing_weights, "pos_embed.W_pos"),
    ):
        with pytest.raises(KeyError, match=re.escape(name)):
            step({n: w for n, w in state.items() if n != name}, cfg)
    flat = {**state, "blocks.0.attn.b_V": torch.zeros(8)}
    with pytest.raises(ValueError, match=r"blocks.0.attn.b_V \[head, d_head\]"):
        fold_value_biases(flat, cfg)


def test_the_class_of_steps_has_their_names() -> None:
    state, cfg = tensors("gpt2", "state"), config(**FIELDS["gpt2"])
    assert_same(ProcessWeights.center_unembed(state, cfg=cfg), expected("gpt2", "center_unembed"))
    assert_same(ProcessWeights.process_weights(state, cfg, fold_ln=True), process_weights(state, cfg))
