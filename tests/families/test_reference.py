"""Hugging Face's models as references: they hold our weights, give our logits and gradients, and stay as they were."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from interp import HookedEncoderDecoder, HookedTransformer
from interp.data.batch import Batch
from interp.families.load import any_from_folder, from_folder, from_hf_model, save
from interp.families.reference import HuggingFaceReference, exported, reference_of
from interp.model import MLP, ModelConfig, Read, RMSNorm, Rotary, Transformer
from interp.passes.observe import observe
from tests.configs import CONFIGS, build, perturbed, some_tokens
from tests.families import oracle
from tests.families.oracle import hf_model, new_hf_model
from tests.loops import over
from tests.tolerances import assert_close

TOKENS = some_tokens()
_LLAMA = CONFIGS["llama-gqa"]
EXPORTED: dict[str, tuple[ModelConfig, str]] = {
    "gpt2": (CONFIGS["gpt2"], "GPT2LMHeadModel"),
    "gpt2-tied": (replace(CONFIGS["gpt2"], tied=True), "GPT2LMHeadModel"),
    "gpt2-relu-eps": (
        replace(CONFIGS["gpt2"], mlp=MLP(17, act="relu"), scale_by_layer=True), "GPT2LMHeadModel",
    ),
    "llama": (_LLAMA, "LlamaForCausalLM"),
    "llama-mqa-tied": (replace(_LLAMA, n_kv_heads=1, tied=True, norm=RMSNorm(1e-2)), "LlamaForCausalLM"),
    "llama-biases": (
        replace(_LLAMA, qkv_bias=True, out_bias=True, mlp=MLP(36, "silu", gated=True), position=Rotary(50.0)),
        "LlamaForCausalLM",
    ),
    "llama-gelu": (replace(_LLAMA, mlp=MLP(36, "gelu", gated=True, bias=False)), "LlamaForCausalLM"),
}  # fmt: skip
"""Native configs and the class of Hugging Face's that computes them."""
EVERY = pytest.mark.parametrize("name", EXPORTED)


def native(name: str) -> Transformer:
    return perturbed(EXPORTED[name][0])


def reference(model: Transformer) -> HuggingFaceReference:
    found = exported(model)
    assert isinstance(found, HuggingFaceReference), found
    return found


def wide(name: str) -> nn.Module:
    """A model of `oracle` as a user has it, in float64."""
    return copy.deepcopy(hf_model(name)).double()


def gradient_of_ours(model: Transformer, tokens: Tensor, probe: Tensor) -> Tensor:
    read = Read("hook_embed", grad=True)
    return observe(model, Batch(tokens), [read], metric=lambda logits: (logits * probe).sum()).trace[read]


def largest(a: Tensor, b: Tensor) -> float:
    """The largest difference relative to the largest value."""
    return float((a - b).abs().max() / b.abs().max())


# --- the model that ours becomes ------------------------------------------------------------------------------------


@EVERY
def test_exported_model_is_of_the_family_and_gives_logits_and_gradients(name: str) -> None:
    """To 1e-6: Hugging Face computes Llama's norms and angles in float32 even in a float64 model."""
    model = native(name)
    found = reference(model)
    assert type(found._model).__name__ == EXPORTED[name][1]
    assert largest(found.logits(TOKENS), model(TOKENS)) < 1e-6
    probe = torch.randn(*TOKENS.shape, model.config.d_vocab, dtype=torch.float64)
    ours = gradient_of_ours(model, TOKENS, probe)
    assert largest(found.gradient(TOKENS, probe), ours) < 1e-6


@EVERY
def test_every_parameter_of_ours_reaches_the_exported_model(name: str) -> None:
    """Each is changed in turn: Hugging Face's logits change as ours do."""
    model = native(name)
    plain = model(TOKENS)
    for label, parameter in model.named_parameters():
        before = parameter.clone()
        parameter += 0.3 * torch.randn(parameter.shape, dtype=torch.float64)
        ours = model(TOKENS)
        assert largest(reference(model).logits(TOKENS), ours) < 1e-6, label
        assert largest(ours, plain) > 1e-4, label
        parameter.copy_(before)


@EVERY
def test_the_exported_weights_are_copies(name: str) -> None:
    model = native(name)
    found, before = reference(model), model(TOKENS)
    for parameter in found._model.parameters():
        parameter.requires_grad_(False).mul_(0.5)
    assert torch.equal(model(TOKENS), before)
    wanted = reference(model).logits(TOKENS)
    found = reference(model)
    model.embed.weight.mul_(2)
    assert torch.equal(found.logits(TOKENS), wanted)
    assert largest(reference(model).logits(TOKENS), wanted) > 1e-3


@EVERY
def test_loading_the_exported_model_gives_ours_back(name: str) -> None:
    model = native(name)
    back = from_hf_model(reference(model)._model)
    assert back.config == model.config
    for (label, mine), theirs in zip(back.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs), label


def test_exported_model_has_our_dtype_and_is_compared_in_float32_at_least() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        found = reference(perturbed(CONFIGS["gpt2"], dtype))
        half = dtype in (torch.bfloat16, torch.float16)
        assert found.logits(TOKENS).dtype == (torch.float32 if half else dtype)
        assert found.half_logits(TOKENS).dtype == (dtype if half else torch.bfloat16)


@over("name", [n for n in CONFIGS if n not in ("gpt2", "llama-gqa")])
def test_what_neither_family_computes_gets_a_reason(name: str) -> None:
    assert exported(build(name)) == "no Hugging Face family computes exactly this config"


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
def test_heads_that_do_not_divide_the_width_get_a_reason_too(name: str) -> None:
    """Hugging Face's configs refuse them, whatever the width of a head is."""
    model = perturbed(replace(CONFIGS[name], n_heads=5, n_kv_heads=5, d_head=8))
    found = exported(model)
    if isinstance(found, str):
        assert found == "no Hugging Face family computes exactly this config"
    else:
        assert largest(found.logits(TOKENS), model(TOKENS)) < 1e-6


# --- a live model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma", "bert"])
def test_gradients_are_those_at_the_embeddings_rows_even_where_scaled(
    name: str,
) -> None:
    """By finite differences of the embedding's rows: Gemma's logits depend on sqrt(d) times a row."""
    theirs = new_hf_model(name, torch.float64)
    tokens = 1 + torch.randperm(52)[None, :6]  # each row of the matrix is used once at most
    probe = torch.randn(theirs(tokens).logits.shape, dtype=torch.float64)
    found = HuggingFaceReference(theirs).gradient(tokens, probe)
    theirs.set_input_embeddings(copy.deepcopy(theirs.get_input_embeddings()))  # not tied any more
    weight, step = theirs.get_input_embeddings().weight, 1e-6
    direction = torch.randn(6, weight.shape[1], dtype=torch.float64)

    @torch.no_grad()
    def value(change: float) -> Tensor:
        weight[tokens[0]] += change * direction
        return (theirs(tokens).logits * probe).sum()

    slope = (value(step) - value(-2 * step)) / (2 * step)
    torch.testing.assert_close((found[0] * direction).sum(), slope, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["t5", "bart", "marian"])
def test_gradients_of_an_encoder_decoder_are_those_at_the_source(name: str) -> None:
    """The source's alone: with shared matrices a change of the row would also change the target's."""
    theirs = new_hf_model(name, torch.float64)
    source, target = oracle.some_tokens(rows=2, n=6), oracle.some_tokens(rows=2, n=4, seed=1)
    probe = torch.randn(*target.shape, 53, dtype=torch.float64)
    found = HuggingFaceReference(theirs).pair_gradient(source, target, probe)
    rows = theirs.get_encoder().get_input_embeddings().weight[source].detach().requires_grad_()
    factor = theirs.config.d_model**0.5 if getattr(theirs.config, "scale_embedding", False) else 1.0
    out = theirs(inputs_embeds=rows * factor, decoder_input_ids=target).logits
    (wanted,) = torch.autograd.grad((out * probe).sum(), rows)
    assert_close(found, wanted)


def test_a_live_model_is_left_as_it_was() -> None:
    theirs = copy.deepcopy(hf_model("gpt2")).train()
    before, hooked = copy.deepcopy(theirs.state_dict()), hooks(theirs)
    found = HuggingFaceReference(theirs)
    logits = found.logits(oracle.some_tokens())
    found.half_logits(oracle.some_tokens())
    found.gradient(oracle.some_tokens(), torch.randn(logits.shape))
    assert theirs.training and theirs.dtype == torch.float32
    assert all(torch.equal(value, before[name]) for name, value in theirs.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in theirs.parameters())
    assert hooks(theirs) == hooked


def hooks(model: nn.Module) -> int:
    """How many forward hooks a model carries: transformers keeps some of its own once hidden states were asked for."""
    return sum(len(module._forward_hooks) for module in model.modules())


def test_the_hook_for_gradients_is_gone_after_a_failure_too() -> None:
    theirs = copy.deepcopy(hf_model("gpt2"))
    hooked = hooks(theirs)
    with pytest.raises(IndexError):
        HuggingFaceReference(theirs).gradient(torch.tensor([[999]]), torch.randn(1, 1, 53))
    assert hooks(theirs) == hooked


def test_dropout_of_a_model_in_training_mode_plays_no_part() -> None:
    theirs = copy.deepcopy(hf_model("gpt2")).train()
    tokens = oracle.some_tokens()
    assert torch.equal(
        HuggingFaceReference(theirs).logits(tokens), oracle.hf_logits(hf_model("gpt2"), tokens)
    )
    assert not torch.equal(oracle.hf_logits(theirs, tokens), oracle.hf_logits(hf_model("gpt2"), tokens))


def test_half_logits_are_those_of_the_model_cast_to_bfloat16() -> None:
    tokens = oracle.some_tokens()
    wanted = oracle.hf_logits(copy.deepcopy(hf_model("gpt2")).bfloat16(), tokens)
    found = HuggingFaceReference(hf_model("gpt2")).half_logits(tokens)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, wanted)


def test_a_model_without_a_head_answers_with_its_final_states() -> None:
    tokens = oracle.some_tokens()
    with torch.no_grad():
        wanted = hf_model("bert-no-head")(tokens).last_hidden_state
    assert torch.equal(HuggingFaceReference(hf_model("bert-no-head")).logits(tokens), wanted)


@pytest.mark.parametrize(
    ("name", "part"),
    [("gpt2", "transformer"), ("bart", "model"), ("bert-pretraining", ""), ("bert-classifier", "")],
)
def test_verify_measures_or_says_why_not_where_there_are_no_logits(name: str, part: str) -> None:
    """A base model of which we know the tied unembedding, and BERT with other heads than ours."""
    theirs = hf_model(name).get_submodule(part)
    door = HookedEncoderDecoder if name == "bart" else HookedTransformer
    found = door.from_pretrained(theirs).verify()
    assert found.passed, f"\n{found}"
    assert all(line.error is not None or line.note for line in found.lines)


# --- what a model was loaded from -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "bart"])
def test_a_saved_folder_is_read_a_second_time_as_its_reference(name: str, tmp_path: Path) -> None:
    hf_model(name).save_pretrained(tmp_path)
    found = reference_of(tmp_path, any_from_folder(tmp_path), torch.float32)
    assert isinstance(found, HuggingFaceReference)
    assert type(found._model) is type(hf_model(name))
    tokens = oracle.some_tokens(n=8)
    if name == "bart":
        with torch.no_grad():
            wanted = hf_model(name)(input_ids=tokens, decoder_input_ids=tokens).logits
        assert_close(found.pair_logits(tokens, tokens), wanted)
    else:
        assert_close(found.logits(tokens), oracle.hf_logits(hf_model(name), tokens))


def test_reference_of_a_file_is_the_model_beside_it_in_the_dtype_asked_for(tmp_path: Path) -> None:
    hf_model("gpt2").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    found = reference_of(file, from_folder(file), torch.float64)
    assert isinstance(found, HuggingFaceReference)
    assert found.logits(oracle.some_tokens()).dtype == torch.float64
    assert (
        largest(found.logits(oracle.some_tokens()), oracle.hf_logits(wide("gpt2"), oracle.some_tokens()))
        < 1e-12
    )


def test_a_live_model_is_its_own_reference() -> None:
    theirs = hf_model("gpt2")
    found = reference_of(theirs, from_hf_model(theirs), torch.float32)
    assert isinstance(found, HuggingFaceReference) and found._model is theirs


def test_our_own_format_is_compared_with_the_family_that_computes_it(tmp_path: Path) -> None:
    model = native("llama")
    save(model, tmp_path)
    found = reference_of(tmp_path, from_folder(tmp_path), torch.float64)
    assert isinstance(found, HuggingFaceReference)
    assert largest(found.logits(TOKENS), model(TOKENS)) < 1e-6


def test_our_own_format_of_an_encoder_decoder_has_no_reference(tmp_path: Path) -> None:
    model = HookedEncoderDecoder.from_pretrained(hf_model("t5")).model
    save(model, tmp_path)
    assert reference_of(tmp_path, any_from_folder(tmp_path), torch.float32) == "stored in our own format"


@pytest.mark.parametrize(
    ("architectures", "reason"),
    [
        (["GPT3LMHeadModel"], "transformers has no class 'GPT3LMHeadModel'"),
        ([], "the config names no architecture"),
        (None, "the config names no architecture"),
    ],
)
def test_a_class_that_is_not_there_is_a_reason_not_an_error(
    architectures: list[str] | None, reason: str, tmp_path: Path
) -> None:
    hf_model("gpt2").save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "architectures": architectures}))
    model = HookedTransformer.from_pretrained(tmp_path)
    assert reference_of(tmp_path, model.transformer, torch.float32) == reason
    found = model.verify()
    assert found.passed
    assert [line.note for line in found.lines[:2]] == [reason, reason]


def test_no_code_of_a_checkpoint_runs(tmp_path: Path) -> None:
    """A config that points to code of its own is read by the class of transformers, or not at all."""
    hf_model("gpt2").save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    code = {"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Config"}
    (tmp_path / "config.json").write_text(json.dumps({**values, "auto_map": code}))
    (tmp_path / "evil.py").write_text("raise SystemExit('code of a checkpoint ran')\n")
    found = HookedTransformer.from_pretrained(tmp_path).verify()
    assert found.passed
    assert found.lines[0].claim == "logits = Hugging Face"


# --- as users load them -----------------------------------------------------------------------------------------


def test_verify_compares_with_a_model_that_is_given() -> None:
    mine = HookedTransformer.from_pretrained(hf_model("gpt2"))
    assert mine.verify(copy.deepcopy(hf_model("gpt2"))).passed
    other = copy.deepcopy(hf_model("gpt2"))
    other.transformer.h[1].mlp.c_fc.bias.detach().add_(0.01)
    found = mine.verify(other)
    broken = {line.claim for line in found.lines if line.passed is False}
    assert {"logits = Hugging Face"} <= broken <= {
        "logits = Hugging Face", "gradients = autograd on Hugging Face"
    }  # fmt: skip


def test_verify_reads_the_folder_that_the_model_came_from(tmp_path: Path) -> None:
    hf_model("gpt2").save_pretrained(tmp_path)
    mine = HookedTransformer.from_pretrained(tmp_path)
    assert mine.verify().passed
    mine.transformer.block(0).attn.out.weight.mul_(1.01)
    assert not mine.verify().passed


def test_a_model_that_no_longer_lives_is_replaced_by_one_with_our_weights() -> None:
    theirs = copy.deepcopy(hf_model("gpt2"))
    mine = HookedTransformer.from_pretrained(theirs)
    theirs.transformer.wte.weight.detach().mul_(2)
    assert not mine.verify().passed, "the live model is the reference"
    del theirs
    found = mine.verify()
    assert found.passed and found.lines[0].claim == "logits = Hugging Face"
