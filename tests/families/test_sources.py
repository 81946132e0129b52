"""What people have instead of a plain folder: each opens to the numbers of transformers' own model, or is named.

Adapters are in `test_adapters.py`, GGUF files in `test_gguf.py`, quantised weights in `test_quantised.py`, and
tokenizers in `test_tokenizer.py`.
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

import interp
from interp import HookedTransformer
from interp.core.notes import Note
from tests.families.oracle import SPREAD, hf_model, new_hf_model, some_tokens
from tests.families.test_bad_checkpoints import change_config, change_tensors, refused, stored
from tests.tolerances import assert_close

GQA: dict[str, object] = {
    "vocab_size": 53, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0,
    "pad_token_id": 1,
}  # fmt: skip


def perturbed(network: nn.Module, seed: int = 0) -> nn.Module:
    """The network in eval mode, every number of it moved: norms, biases and adapters too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += SPREAD * torch.randn(parameter.shape, generator=generator)
    return network.eval()


def llama(kind: str = "LlamaForCausalLM", **options: object) -> nn.Module:
    torch.manual_seed(0)
    return perturbed(getattr(transformers, kind)(transformers.LlamaConfig(**GQA, **options)))  # type: ignore[arg-type]


def same_logits(source: nn.Module | Path, expected: Tensor) -> HookedTransformer:
    model = HookedTransformer.from_pretrained(source)
    assert_close(model.transformer(some_tokens()), expected)
    return model


def logits(network: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = network(some_tokens()).logits
    return found


def said(model: HookedTransformer, words: str) -> None:
    """What was done to a checkpoint stands in the model's own text and in verify, which holds."""
    found = model.verify()
    assert found.passed, f"\n{found}"
    assert any(re.search(words, line.note) for line in found.lines if line.claim == "checkpoint as opened"), (
        found
    )
    assert re.search(words, " ".join(str(model).split()))


# --- files --------------------------------------------------------------------------------------------------------


def test_of_two_sets_of_weights_that_is_read_which_transformers_reads(tmp_path: Path) -> None:
    """A single file beside the index of older shards, and beside copies in other precisions and for other programs."""
    new, old = llama(), perturbed(llama(), 1)
    old.save_pretrained(tmp_path, max_shard_size="10KB")
    new.save_pretrained(tmp_path / "new")
    (tmp_path / "new" / "model.safetensors").rename(tmp_path / "model.safetensors")
    for name in ("model.fp16.safetensors", "consolidated.safetensors"):
        save_file({"x": torch.ones(2)}, tmp_path / name)
    assert (tmp_path / "model.safetensors.index.json").is_file()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(theirs), logits(new))
    same_logits(tmp_path, logits(theirs))


WITHIN: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "state": lambda state: state,
    "training": lambda state: {"model": state, "optimizer": {"lr": 1e-3}, "step": 7},
    "lightning": lambda state: {"state_dict": {f"model.{name}": v for name, v in state.items()}, "epoch": 3},
    "ddp": lambda state: {"module": {f"module.{name}": v for name, v in state.items()}},
    "compiled": lambda state: {f"_orig_mod.{name}": v for name, v in state.items()},
    "twice": lambda state: {f"module._orig_mod.{name}": v for name, v in state.items()},
    "base": lambda state: {name.removeprefix("model."): v for name, v in state.items()},
}  # fmt: skip


@pytest.mark.parametrize("suffix", ["pt", "pth", "ckpt", "bin"])
@pytest.mark.parametrize("within", WITHIN)
def test_a_training_checkpoint_opens(within: str, suffix: str, tmp_path: Path) -> None:
    network = llama()
    network.config.save_pretrained(tmp_path)
    torch.save(WITHIN[within](dict(network.state_dict())), tmp_path / f"step_7.{suffix}")
    same_logits(tmp_path, logits(network))
    same_logits(tmp_path / f"step_7.{suffix}", logits(network))


@pytest.mark.parametrize("within", ["ddp", "compiled", "base"])
def test_prefixes_in_safetensors_are_taken_off(within: str, tmp_path: Path) -> None:
    change_tensors(stored(tmp_path, "llama"), lambda t: WITHIN[within](t).get("module", WITHIN[within](t)))  # type: ignore[attr-defined]
    same_logits(tmp_path, logits(hf_model("llama")))


def test_a_training_checkpoint_without_its_config_says_what_is_missing(tmp_path: Path) -> None:
    torch.save({"model": dict(llama().state_dict())}, tmp_path / "ckpt.pt")
    refused(tmp_path / "ckpt.pt", r"config\.json is required beside the weights", FileNotFoundError)


class Harmful:
    """What would leave a file behind if it were unpickled by anything but the weights-only reader."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.trace,)


def test_nothing_in_a_training_checkpoint_is_run(tmp_path: Path) -> None:
    llama().config.save_pretrained(tmp_path)
    torch.save({"model": dict(llama().state_dict()), "args": Harmful(tmp_path / "ran")}, tmp_path / "ckpt.pt")
    refused(tmp_path, "is refused, and nothing in it was run")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("bias", [True, False])
def test_what_nanogpt_saves_opens_without_a_config(bias: bool, tmp_path: Path) -> None:
    """The oracle is GPT-2 of transformers, with plain matrices where that has Conv1D, and zeros for missing biases."""
    network = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=53, n_embd=24, n_layer=2, n_head=4, n_positions=64, activation_function="gelu"
        )
    )
    perturbed(network)
    if not bias:
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                parameter *= 0 if name.endswith(".bias") else 1
    state = {}
    for name, value in network.state_dict().items():
        if bias or not name.endswith(".bias"):
            state[f"_orig_mod.{name}"] = value.T if value.ndim == 2 and ".c_" in name else value
    options = {
        "n_layer": 2,
        "n_head": 4,
        "n_embd": 24,
        "block_size": 64,
        "bias": bias,
        "vocab_size": 53,
        "dropout": 0.0,
    }
    torch.save(
        {
            "model": state,
            "model_args": options,
            "iter_num": 5,
            "best_val_loss": torch.tensor(1.5),
            "config": {"lr": 1},
        },
        tmp_path / "ckpt.pt",
    )
    for source in (tmp_path, tmp_path / "ckpt.pt"):
        model = same_logits(source, logits(network))
    assert model.verify().passed


@pytest.mark.parametrize(
    ("name", "program"), [("tf_model.h5", "TensorFlow"), ("flax_model.msgpack", "Flax"), ("rust_model.ot", "rust-bert"),
                          ("model.onnx", "ONNX"), ("weights.npz", "NumPy")]
)  # fmt: skip
def test_weights_for_other_programs_are_named(name: str, program: str, tmp_path: Path) -> None:
    (stored(tmp_path) / "model.safetensors").rename(tmp_path / name)
    for source in (tmp_path, tmp_path / name):
        refused(
            source, rf"{re.escape(name)} holds weights for {program}, which are not read; .*save_pretrained"
        )


def test_weights_quantised_by_mlx_are_named(tmp_path: Path) -> None:
    change_config(stored(tmp_path, "llama"), quantization={"group_size": 64, "bits": 4})
    refused(tmp_path, r"quantization_config \(mlx\), which cannot be read; .* load the original checkpoint")


# --- heads --------------------------------------------------------------------------------------------------------


def test_own_unembedding_in_a_tied_config_is_used_as_transformers_does(tmp_path: Path) -> None:
    network = llama(tie_word_embeddings=False)
    network.save_pretrained(tmp_path)
    change_config(tmp_path, tie_word_embeddings=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(theirs), logits(network))
    said(same_logits(tmp_path, logits(network)), "lm_head.weight differs from the embedding, .*: untied")


@pytest.mark.parametrize("live", [True, False])
def test_a_base_model_opens_without_logits(live: bool, tmp_path: Path) -> None:
    base = llama("LlamaModel")
    base.save_pretrained(tmp_path)
    model = HookedTransformer.from_pretrained(base if live else tmp_path)
    with torch.no_grad():
        expected = base(some_tokens()).last_hidden_state
    assert_close(model.transformer(some_tokens()), expected)
    said(model, "no unembedding in the checkpoint: the model ends in its residual stream")
    for ask in (lambda: model([[1, 2, 3]], return_type="loss"), lambda: model.generate([[1, 2, 3]], 2)):
        with pytest.raises(ValueError, match=r"requires logits, this model ends in its residual stream"):
            ask()


def test_a_base_model_whose_unembedding_is_its_embedding_has_logits() -> None:
    network = new_hf_model("gpt2")
    same_logits(network.transformer, logits(network))


CLASSIFIERS = {
    "LlamaForSequenceClassification": {"num_labels": 3},
    "LlamaForTokenClassification": {"num_labels": 4},
    "reward": {"num_labels": 1},
}


@pytest.mark.parametrize("kind", CLASSIFIERS)
@pytest.mark.parametrize("tied", [True, False])
def test_head_of_a_classifier_or_reward_model_is_read_as_the_unembedding(
    kind: str, tied: bool, tmp_path: Path
) -> None:
    name = "LlamaForSequenceClassification" if kind == "reward" else kind
    network = llama(name, tie_word_embeddings=tied, **CLASSIFIERS[kind])
    network.save_pretrained(tmp_path)
    for source in (network, tmp_path):
        model = HookedTransformer.from_pretrained(source)
        ours, theirs = model.transformer(some_tokens()), logits(network)
        assert_close(ours if kind.endswith("TokenClassification") else ours[:, -1], theirs)
        said(model, rf"the head score is read as the unembedding: {CLASSIFIERS[kind]['num_labels']} outputs")
    wrote = interp.attribute(model, some_tokens()[:1], 0, parts="sublayer")
    assert_close(torch.tensor(float(wrote.value.sum())), model.transformer(some_tokens()[:1])[0, -1, 0])


def test_the_classifier_of_gpt2_is_read_too(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=53, n_embd=24, n_layer=2, n_head=4, n_positions=64, num_labels=2,
                                     pad_token_id=0)  # fmt: skip
    network = perturbed(transformers.GPT2ForTokenClassification(config))
    network.save_pretrained(tmp_path)
    same_logits(tmp_path, logits(network))


def test_a_value_head_is_left_out_and_said(tmp_path: Path) -> None:
    class WithValueHead(nn.Module):
        def __init__(self, network: nn.Module) -> None:
            super().__init__()
            self.pretrained_model, self.v_head = network, nn.Linear(24, 1)

    network = llama()
    network.save_pretrained(tmp_path)
    said(same_logits(WithValueHead(network), logits(network)), "the value head of WithValueHead is left out")
    heads = {"v_head.summary.weight": torch.ones(1, 24), "v_head.summary.bias": torch.ones(1)}
    change_tensors(tmp_path, lambda t: {f"pretrained_model.{k}": v for k, v in t.items()} | heads)
    model = same_logits(tmp_path, logits(network))
    assert model.transformer.opened == (
        "left out, as parts that are not modelled: v_head.summary.bias and 1 more",
    )


# --- live models --------------------------------------------------------------------------------------------------


def test_wrapped_live_models_open() -> None:
    network = llama()
    expected = logits(network)
    for outer in (torch.compile(network), nn.DataParallel(network), torch.compile(nn.DataParallel(network))):
        assert same_logits(outer, expected).verify().passed


def test_what_a_live_model_was_taken_out_of_is_said_of_it() -> None:
    network = llama()
    compiled, parallel = (
        "taken out of torch.compile: its passes here are not compiled",
        "taken out of DataParallel",
    )
    for outer, clauses in (
        (torch.compile(network), (compiled,)),
        (torch.compile(nn.DataParallel(network)), (compiled, parallel)),
        (network, ()),
    ):
        model = HookedTransformer.from_pretrained(outer)  # type: ignore[arg-type]
        assert model.transformer.opened == clauses and model.name == "LlamaForCausalLM"
        assert all(clause in str(model) for clause in clauses)


def test_hooks_on_a_live_model_are_named_and_those_of_libraries_are_not() -> None:
    network = llama()
    network(some_tokens(), output_hidden_states=True)  # transformers puts hooks of its own there
    expected = logits(network)
    handle = network.model.layers[1].mlp.register_forward_hook(lambda module, given, output: output * 0)
    with pytest.warns(
        Note, match=r"hooks on 1 modules .* first 'model\.layers\.1\.mlp', are no part of our copy"
    ):
        same_logits(network, expected)
    handle.remove()
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same_logits(network, expected)


@pytest.mark.parametrize("package", ["gguf", "peft"])
def test_a_missing_package_is_asked_for_by_its_own_name(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "base").mkdir()
    stored(tmp_path / "base")
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(tmp_path / "base")}
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(adapter))
    save_file({"x": torch.zeros(1)}, tmp_path / "adapter" / "adapter_model.safetensors")
    monkeypatch.setitem(sys.modules, package, None)
    source = tmp_path / {"gguf": "model.gguf", "peft": "adapter"}[package]
    with pytest.raises(ValueError, match=rf"requires the package {package}: pip install {package}$"):
        HookedTransformer.from_pretrained(source)


# --- parts of a joined tensor -------------------------------------------------------------------------------------

A = "model.layers.0.self_attn."
M = "model.layers.0.mlp."


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ({A + "q_proj": 16, A + "k_proj": 32}, A + "q_proj"),
        ({A + "q_proj": 56, A + "k_proj": 4, A + "v_proj": 4}, A + "q_proj"),
        ({A + "q_proj": 32, A + "k_proj": 8, A + "v_proj": 24}, A + "k_proj"),
        ({M + "gate_proj": 40, M + "up_proj": 32}, M + "gate_proj"),
    ],
)
def test_each_part_of_a_joined_tensor_has_its_own_shape(
    rows: dict[str, int], named: str, tmp_path: Path
) -> None:
    """q 32, k 16 and v 16 rows, gate and up 36: the sums are right in every one of these, the parts are not."""
    llama().save_pretrained(tmp_path)

    def cut(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return tensors | {f"{name}.weight": torch.randn(n, 24) for name, n in rows.items()}

    change_tensors(tmp_path, cut)
    refused(
        tmp_path, rf"and {re.escape(named)}\.weight requires shape \[\d+, 24\], got \[{rows[named]}, 24\]"
    )


@pytest.mark.parametrize(
    ("name", "key", "change"),
    [
        ("cohere-qk-norm", A + "q_norm.weight", lambda t: t.mT),  # was read as other heads
        ("gpt2", "transformer.h.0.attn.c_attn.bias", lambda t: t.view(2, -1)),  # was read in another order
        (
            "qwen3-next",
            "model.layers.1.self_attn.q_proj.weight",
            lambda t: t[: len(t) // 2],
        ),  # as its own gates
        ("qwen3-next", "model.layers.0.linear_attn.in_proj_qkvz.weight", lambda t: t[1:]),
        ("gpt-neox", "gpt_neox.layers.0.attention.query_key_value.weight", lambda t: t[1:]),
        ("falcon", "transformer.h.0.self_attention.query_key_value.weight", lambda t: t[1:]),
        ("gpt-oss", M + "experts.gate_up_proj", lambda t: t[..., 1:]),
        ("llama4", "model.layers.1.feed_forward.experts.down_proj", lambda t: t.flatten()),
        ("mamba2", "backbone.layers.0.mixer.conv1d.weight", lambda t: t[:, 0]),
        ("mamba2", "backbone.layers.0.mixer.in_proj.weight", lambda t: t[1:]),
        ("bart", "final_logits_bias", lambda t: t.repeat(2, 1)),  # lost its second row
    ],
)
def test_a_tensor_of_another_layout_is_named_with_its_shape(
    name: str, key: str, change: Callable[[Tensor], Tensor]
) -> None:
    model = new_hf_model(name)
    wrong = change(model.state_dict()[key]).clone()
    *path, last = key.split(".")
    delattr(owner := model.get_submodule(".".join(path)), last)
    owner.register_parameter(last, nn.Parameter(wrong))
    hooked = interp.HookedEncoderDecoder if name == "bart" else HookedTransformer
    with pytest.raises(ValueError, match=re.escape(key)):
        hooked.from_pretrained(model)
