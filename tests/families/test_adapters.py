"""Adapters of PEFT: each opens to the logits of PEFT's own network, in which it is not merged, or is named.

The oracle is always that network's own pass, its adapter beside the matrices. None of an adapter's numbers is at its
start, where it would change nothing.
"""

import copy
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from interp import HookedEncoderDecoder, HookedTransformer
from interp.core.notes import Note
from interp.families.reference import HuggingFaceReference, reference_of
from tests.families.oracle import SPREAD, new_hf_model, some_tokens
from tests.families.test_bad_checkpoints import refused
from tests.families.test_sources import llama, logits, said

peft = pytest.importorskip("peft", reason="the extra peft is not installed")
from peft.tuners.tuners_utils import BaseTunerLayer  # noqa: E402

SAME = 1e-5
"""Of the largest number: what a few layers in float32 round by, and a change of a matrix does not stay below."""
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CAUSAL: dict[str, object] = {"task_type": "CAUSAL_LM"}
UNMERGED = "logits = Hugging Face with the adapter not merged"
FILE = "adapter_model.safetensors"


def adapted(network: nn.Module, seed: int = 5, config: object = None, **options: object) -> nn.Module:
    """PEFT's network of a base: a LoRA, or an adapter of a config, every number of which was moved."""
    torch.manual_seed(0)
    config = config or peft.LoraConfig(**{"r": 2, **options})
    found = peft.get_peft_model(network, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in found.parameters():
            if parameter.requires_grad:
                parameter += SPREAD * torch.randn(parameter.shape, generator=generator)
    return found.eval()


def written(network: nn.Module, folder: Path, base: nn.Module | str, **more: object) -> Path:
    """An adapter in `folder/adapter`, and its base in `folder/base`, or the base's name."""
    adapter, name = folder / "adapter", base
    if isinstance(base, nn.Module):
        base.save_pretrained(folder / "base")
        name = str(folder / "base")
    network.peft_config["default"].base_model_name_or_path = name
    network.save_pretrained(adapter, **more)
    return adapter


def changed(adapter: Path, **values: object) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def kept(adapter: Path, keep: str, renamed: tuple[str, str] = ("", "")) -> None:
    """The adapter's file without the tensors that have a word in their names, the others renamed."""
    tensors = {k.replace(*renamed): v for k, v in load_file(adapter / FILE).items() if keep not in k}
    save_file(tensors, adapter / FILE)


def same(source: nn.Module | Path, expected: Tensor, **options: object) -> HookedTransformer:
    """The model of a source gives these numbers."""
    model = HookedTransformer.from_pretrained(source, **options)
    found = model.transformer(some_tokens())
    found = found if found.ndim == expected.ndim else found[:, -1]
    assert float((found - expected).abs().max() / expected.abs().max()) <= SAME
    return model


def verified(model: HookedTransformer) -> HookedTransformer:
    """Verify holds, and compares with the adapter that is not merged."""
    found = model.verify()
    assert found.passed and found.lines, f"\n{found}"
    line = next(line for line in found.lines if line.claim == UNMERGED)
    assert line.error is not None and line.error <= SAME
    return model


def far(a: Tensor, b: Tensor) -> bool:
    """Whether two answers differ by far more than rounding, so that a test could fail."""
    return float((a - b).abs().max() / b.abs().max()) > 1e-2


# --- merged -------------------------------------------------------------------------------------------------------

ADAPTERS: dict[str, tuple[str, dict[str, object]]] = {
    "lora": ("llama", {"target_modules": ALL}),
    "rslora": ("llama", {"target_modules": ["q_proj", "v_proj"], "use_rslora": True, "lora_alpha": 3}),
    "dora": ("llama", {"target_modules": ["q_proj", "down_proj"], "use_dora": True}),
    "head": ("llama", {"target_modules": ["k_proj"], "modules_to_save": ["lm_head"]}),
    "patterns": ("llama", {"target_modules": ALL, "rank_pattern": {"q_proj": 3}, "alpha_pattern": {"v_proj": 9}}),
    "conv1d": ("gpt2", {"target_modules": ["c_attn", "c_fc", "attn.c_proj"], "fan_in_fan_out": True}),
    "biases": ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "bias": "all"}),
    "embedding": ("llama", {"target_modules": ["q_proj", "embed_tokens"]}),
    "tokens": ("llama", {"target_modules": ["q_proj"], "trainable_token_indices": [3, 7, 40]}),
    "bias of its own": ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "lora_bias": True}),
}  # fmt: skip


def base_of(name: str) -> nn.Module:
    return llama() if ADAPTERS[name][0] == "llama" else new_hf_model("gpt2")


def of(name: str) -> nn.Module:
    return adapted(base_of(name), **ADAPTERS[name][1], **CAUSAL)


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_opens_merged_into_its_base(name: str, tmp_path: Path) -> None:
    expected = logits(of(name))
    assert far(expected, logits(base_of(name)))
    model = verified(same(written(of(name), tmp_path, base_of(name)), expected))
    said(model, r"adapter merged into .*base: LORA 'default', rank 2")


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_live_model_with_an_adapter_opens_merged_and_is_left_as_it_was(name: str) -> None:
    network = of(name)
    before = {key: value.clone() for key, value in network.state_dict().items()}
    model = verified(same(network, logits(network)))
    said(model, "adapter merged into the live model: LORA 'default', rank 2")
    after = network.state_dict()
    assert set(after) == set(before) and all(torch.equal(before[key], value) for key, value in after.items())


OTHERS: dict[str, object] = {
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], **CAUSAL),
    "oft": lambda: peft.OFTConfig(target_modules=["q_proj"], oft_block_size=4, **CAUSAL),
    "loha": lambda: peft.LoHaConfig(target_modules=["q_proj"], r=2, **CAUSAL),
    "lokr": lambda: peft.LoKrConfig(target_modules=["q_proj"], r=2, **CAUSAL),
    "vera": lambda: peft.VeraConfig(target_modules=["q_proj"], r=2, **CAUSAL),
    "adalora": lambda: peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10, init_r=2, **CAUSAL),
    "boft": lambda: peft.BOFTConfig(target_modules=["q_proj"], boft_block_size=4, **CAUSAL),
    "norms": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"], **CAUSAL),
    "vblora": lambda: peft.VBLoRAConfig(target_modules=["q_proj"], r=2, vector_length=8, num_vectors=9, topk=2,
                                        **CAUSAL),
}  # fmt: skip


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("kind", OTHERS)
def test_adapters_of_other_kinds_open_merged(kind: str, live: bool, tmp_path: Path) -> None:
    network = adapted(llama(), config=OTHERS[kind]())  # type: ignore[operator]
    expected = logits(network)
    assert far(expected, logits(llama()))
    model = verified(same(network if live else written(network, tmp_path, llama()), expected))
    assert "rank 0" not in str(model)


def test_a_merge_that_gives_other_numbers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its reason: here PEFT merges half of what it adds beside the matrix."""
    network = of("lora")
    adapter = written(network, tmp_path, llama())
    layer = peft.tuners.lora.Linear
    whole = layer.get_delta_weight
    monkeypatch.setattr(layer, "get_delta_weight", lambda self, name: whole(self, name) / 2)
    for source in (network, adapter):
        refused(source, r"merged into its matrices, an adapter \(LORA\) gives other numbers than beside them")


def test_verify_compares_with_the_adapter_that_is_not_merged(tmp_path: Path) -> None:
    """The reference's layers are PEFT's; a matrix of ours that is wrong by a hundredth is found."""
    network = of("embedding")
    adapter = written(network, tmp_path, llama())
    for source in (adapter, network):
        model = HookedTransformer.from_pretrained(source)
        found = reference_of(source, model.transformer, torch.float32)
        assert isinstance(found, HuggingFaceReference)
        layers = [m for m in found._model.modules() if isinstance(m, BaseTunerLayer)]
        assert len(layers) == 3 and not any(layer.merged for layer in layers)
        model.transformer.block(0).attn.out.weight.mul_(1.01)
        assert not model.verify().passed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_an_adapter_opens_in_other_precisions(dtype: torch.dtype, tmp_path: Path) -> None:
    network = of("lora")
    adapter = written(network, tmp_path, llama())
    model = HookedTransformer.from_pretrained(adapter, dtype=dtype)
    assert model.transformer.dtype == dtype and model.verify().passed
    if dtype == torch.float64:
        same(adapter, logits(network), dtype=dtype)


# --- what the base shares -------------------------------------------------------------------------------------------

SHARED: dict[str, dict[str, object]] = {
    "lm_head": {"target_modules": ["q_proj", "lm_head"]},
    "embed_tokens": {"target_modules": ["q_proj", "embed_tokens"]},
    "both": {"target_modules": ["lm_head", "embed_tokens"]},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 7]},
    "tied": {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
}


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("which", SHARED)
def test_an_adapter_of_one_of_two_tied_embeddings_changes_that_one(
    which: str, live: bool, tmp_path: Path
) -> None:
    network = adapted(llama(tie_word_embeddings=True), **SHARED[which], **CAUSAL)
    expected = logits(network)
    source = network if live else written(network, tmp_path, llama(tie_word_embeddings=True))
    model = verified(same(source, expected))
    assert model.cfg.tied == (which in ("tokens", "tied"))
    if which in ("lm_head", "embed_tokens", "both"):
        said(model, "embedding and unembedding, tied in the base, are apart")


@pytest.mark.parametrize("target", ["wte", "lm_head"])
def test_the_tied_embeddings_of_gpt2_are_separated_too(target: str, tmp_path: Path) -> None:
    network = adapted(new_hf_model("gpt2"), target_modules=[target], **CAUSAL)
    expected = logits(network)
    verified(same(network, expected))
    verified(same(written(network, tmp_path, new_hf_model("gpt2")), expected))


@pytest.mark.parametrize("live", [True, False])
def test_layers_that_an_adapter_repeats_have_matrices_of_their_own(live: bool, tmp_path: Path) -> None:
    network = adapted(llama(), target_modules=["q_proj"], layer_replication=[[0, 2], [1, 2]], **CAUSAL)
    expected = logits(network)
    model = verified(same(network if live else written(network, tmp_path, llama()), expected))
    assert model.cfg.n_layers == 3
    said(model, r"layers \[\[0, 2\], \[1, 2\]\]")
    before = model.transformer.block(2).mlp.out.weight.clone()  # type: ignore[union-attr]
    model.transformer.block(1).mlp.out.weight.mul_(2)  # type: ignore[union-attr]
    assert torch.equal(model.transformer.block(2).mlp.out.weight, before)  # type: ignore[union-attr]


# --- every tensor accounted for -------------------------------------------------------------------------------------


def test_an_adapter_whose_tensors_have_other_names_is_refused_naming_them(tmp_path: Path) -> None:
    adapter = written(of("lora"), tmp_path, llama())
    kept(adapter, "nothing", ("self_attn", "attention"))
    refused(
        adapter, r"its adapter does not fit its base, LlamaForCausalLM: 16 tensors that it requires are missing, first "
        r"'base_model\.model\.model\.layers\.0\.self_attn\.k_proj\.lora_A\.default\.weight'; 16 have no place there, "
        r"first 'base_model\.model\.model\.layers\.0\.attention\.k_proj\.lora_A"
    )  # fmt: skip


def test_an_adapter_that_lacks_a_layer_is_refused(tmp_path: Path) -> None:
    adapter = written(of("lora"), tmp_path, llama())
    kept(adapter, "layers.1.")
    refused(adapter, r"14 tensors that it requires are missing, first .*layers\.1\.")


@pytest.mark.parametrize(
    ("name", "word"), [("biases", "h.1.mlp.c_fc.bias"), ("head", "lm_head"), ("tokens", "trainable_tokens")]
)
def test_what_an_adapter_trains_besides_is_required_too(name: str, word: str, tmp_path: Path) -> None:
    adapter = written(of(name), tmp_path, base_of(name))
    before = len(load_file(adapter / FILE))
    kept(adapter, word)
    assert len(load_file(adapter / FILE)) == before - 1
    refused(adapter, rf"its adapter does not fit its base.*{word}")


def test_an_adapter_with_more_tensors_than_its_config_says_is_refused(tmp_path: Path) -> None:
    adapter = written(of("lora"), tmp_path, llama())
    changed(adapter, target_modules=["q_proj"])
    refused(adapter, "24 have no place there, first ")


def test_an_adapter_of_another_width_is_named_in_one_line(tmp_path: Path) -> None:
    adapter = written(of("lora"), tmp_path, llama())
    save_file({k: v[..., :-1].contiguous() for k, v in load_file(adapter / FILE).items()}, adapter / FILE)
    with pytest.raises(ValueError, match="adapter: its adapter does not fit its base: ") as found:
        HookedTransformer.from_pretrained(adapter)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("told", [True, False])
def test_an_adapter_without_a_task_opens_on_the_class_it_was_trained_on(told: bool, tmp_path: Path) -> None:
    """What PEFT writes of that class, or else the names of the tensors, say which."""
    network = adapted(llama().model, target_modules=["q_proj"])
    with torch.no_grad():
        expected = network(some_tokens()).last_hidden_state
    adapter = written(network, tmp_path, llama())
    if not told:
        changed(adapter, auto_mapping=None)
    said(same(adapter, expected), "no unembedding in the checkpoint")
    changed(adapter, task_type="CAUSAL_LM")
    refused(adapter, "does not fit its base, LlamaForCausalLM: 4 tensors that it requires are missing")


@pytest.mark.parametrize("told", [True, False])
def test_an_adapter_of_a_language_model_without_a_task_has_logits(told: bool, tmp_path: Path) -> None:
    network = adapted(llama(), target_modules=["q_proj"])
    adapter = written(network, tmp_path, llama())
    if not told:
        changed(adapter, auto_mapping=None)
    verified(same(adapter, logits(network)))


def test_an_adapter_of_an_encoder_decoder_opens(tmp_path: Path) -> None:
    network = adapted(new_hf_model("t5"), target_modules=["q", "wo"], task_type="SEQ_2_SEQ_LM")
    source, target = some_tokens(n=9), some_tokens(n=5)
    with torch.no_grad():
        expected = network(input_ids=source, decoder_input_ids=target).logits
    for opened in (network, written(network, tmp_path, new_hf_model("t5"))):
        model = HookedEncoderDecoder.from_pretrained(opened)
        found = model.model(source, target)
        assert float((found - expected).abs().max() / expected.abs().max()) <= SAME
        assert model.verify().passed


# --- the base -----------------------------------------------------------------------------------------------------


def test_an_adapter_on_an_adapter_is_merged_into_the_merged_one(tmp_path: Path) -> None:
    """In float64: two moved adapters in a row make a network that multiplies the rounding of float32 by a hundred."""

    def wide() -> nn.Module:
        return adapted(llama().double(), **ADAPTERS["lora"][1], **CAUSAL).double()

    first = written(wide(), tmp_path, llama().double())
    above = {"target_modules": ["q_proj", "up_proj"]}
    network = adapted(wide().merge_and_unload(), 9, **above, **CAUSAL).double()
    expected = logits(network)
    assert far(expected, logits(adapted(llama().double(), 9, **above, **CAUSAL).double()))
    model = verified(same(written(network, tmp_path / "second", str(first)), expected))
    assert len([clause for clause in model.transformer.opened if "adapter merged into" in clause]) == 2


def test_an_adapter_that_is_its_own_base_is_named(tmp_path: Path) -> None:
    first, second = (
        written(of("lora"), tmp_path / "1", llama()),
        written(of("lora"), tmp_path / "2", llama()),
    )
    changed(first, base_model_name_or_path=str(first))
    refused(first, "names the adapter itself as its base")
    changed(first, base_model_name_or_path=str(second))
    changed(second, base_model_name_or_path=str(first))
    refused(first, "names the adapter itself as its base")


def test_the_revision_of_a_base_on_the_hub_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    llama().save_pretrained(tmp_path / "main")
    other = llama(rms_norm_eps=0.3)
    other.save_pretrained(tmp_path / "step5")

    def snapshot(name: str, *, revision: str | None, **_: object) -> str:
        assert name == "someone/model"
        return str(tmp_path / (revision or "main"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    network = adapted(other, target_modules=["q_proj"], revision="step5", **CAUSAL)
    expected = logits(network)
    adapter = written(network, tmp_path, "someone/model")
    model = verified(same(adapter, expected))
    said(model, "adapter merged into someone/model at revision step5")
    changed(adapter, revision=None)
    assert far(HookedTransformer.from_pretrained(adapter).transformer(some_tokens()), expected)


def test_an_adapter_beside_a_full_model_is_merged_into_the_base_it_names(tmp_path: Path) -> None:
    adapter = written(of("lora"), tmp_path, llama())
    for file in (tmp_path / "base").iterdir():
        (adapter / file.name).write_bytes(file.read_bytes())
    same(adapter, logits(of("lora")))


def test_an_adapter_without_its_base_is_named(tmp_path: Path) -> None:
    adapter = written(of("lora"), tmp_path, llama())
    changed(adapter, base_model_name_or_path="someone/model")
    refused(adapter, r"is an adapter of 'someone/model', which is not found: .* base_model_name_or_path")
    (tmp_path / "base" / "config.json").rename(adapter / "config.json")
    refused(
        adapter, r"is an adapter of 'someone/model', which is not found: .* move adapter_config\.json away"
    )


def test_a_base_named_by_its_file_of_weights_is_its_folder(tmp_path: Path) -> None:
    adapter = written(of("lora"), tmp_path, llama())
    changed(adapter, base_model_name_or_path="base/model.safetensors")
    same(adapter, logits(of("lora")))
    changed(adapter, base_model_name_or_path="base/config.json")
    refused(adapter, r"the base of an adapter is a folder .* names .*config\.json")


def test_a_gguf_file_may_be_the_base_of_an_adapter(tmp_path: Path) -> None:
    """A file, or a folder with one; it has a language model, so that an adapter of another class is named."""
    pytest.importorskip("gguf", reason="the extra gguf is not installed")
    from tests.families import gguf_files

    gguf_files.write(tmp_path / "m.gguf", llama())  # type: ignore[arg-type]
    network = of("lora")
    adapter = written(network, tmp_path, str(tmp_path / "m.gguf"))
    verified(same(adapter, logits(network)))
    (tmp_path / "base").mkdir()
    (tmp_path / "m.gguf").rename(tmp_path / "base" / "m.gguf")
    changed(adapter, base_model_name_or_path="base")
    verified(same(adapter, logits(network)))
    changed(adapter, task_type="SEQ_CLS")
    refused(adapter, "a GGUF file as the base of an adapter has a language model, not AutoModelForSequence")


@pytest.mark.parametrize("content", ["{", "[]", '"x"'], ids=["broken", "a list", "a string"])
def test_a_broken_adapter_config_is_named(content: str, tmp_path: Path) -> None:
    adapter = written(of("lora"), tmp_path, llama())
    (adapter / "adapter_config.json").write_text(content)
    refused(adapter, r"adapter_config\.json (is not readable JSON|must hold a JSON object)")


def test_the_weights_of_an_adapter_mean_its_folder(tmp_path: Path) -> None:
    adapter = written(of("lora"), tmp_path, llama())
    verified(same(adapter / FILE, logits(of("lora"))))
    (adapter / "adapter_config.json").unlink()
    for source in (adapter, adapter / FILE):
        refused(
            source, r"adapter_config\.json is required beside the weights of an adapter", FileNotFoundError
        )


def test_an_adapter_without_weights_is_named(tmp_path: Path) -> None:
    adapter = written(of("lora"), tmp_path, llama())
    (adapter / FILE).unlink()
    refused(adapter, r"holds adapter_config\.json, but neither of adapter_model", FileNotFoundError)


def test_the_state_dict_of_a_model_with_an_adapter_is_named(tmp_path: Path) -> None:
    llama().config.save_pretrained(tmp_path)
    torch.save(of("lora").state_dict(), tmp_path / "model.pt")
    refused(tmp_path, r"with an adapter of PEFT beside its matrices, first .*; give the adapter's own folder")


# --- heads and vocabularies that the adapter brings -----------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("kind", ["SequenceClassification", "TokenClassification"])
def test_a_classifier_trained_on_a_language_model_brings_its_head(kind: str, n: int, tmp_path: Path) -> None:
    base = llama()
    base.save_pretrained(tmp_path / "base")
    network = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(tmp_path / "base", num_labels=n)
    task = "SEQ_CLS" if kind.startswith("Seq") else "TOKEN_CLS"
    network = adapted(network, target_modules=["q_proj"], task_type=task)
    expected = logits(network)
    model = verified(same(written(network, tmp_path, base), expected))
    said(model, f"the head score is read as the unembedding: {n} outputs")


def test_a_classifier_with_an_adapter_opens(tmp_path: Path) -> None:
    """Its base has a head of its own, of as many outputs or of others."""
    for live in (True, False):
        base = llama("LlamaForSequenceClassification", num_labels=3)
        network = adapted(copy.deepcopy(base), task_type="SEQ_CLS", target_modules=ALL)
        expected = logits(network)
        same(network if live else written(network, tmp_path, base), expected)
    llama("LlamaForSequenceClassification", num_labels=2).save_pretrained(tmp_path / "base")
    verified(same(tmp_path / "adapter", expected))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("how", ["saved layers", "modules", "adapted"])
def test_an_adapter_with_more_tokens_than_its_base_brings_them(how: str, tied: bool, tmp_path: Path) -> None:
    base = llama(tie_word_embeddings=tied)
    base.save_pretrained(tmp_path / "base")
    network = llama(tie_word_embeddings=tied)
    network.resize_token_embeddings(60)
    options = {
        "saved layers": {"target_modules": ["q_proj"]},
        "modules": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
        "adapted": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    }[how]
    network = adapted(network, **options, **CAUSAL)
    expected = logits(network)
    assert expected.shape[-1] == 60
    adapter = written(network, tmp_path, base, save_embedding_layers=how != "modules")
    model = verified(same(adapter, expected))
    said(model, "vocabulary of 60 tokens from the adapter, its base has 53")


def test_an_adapter_that_brings_only_some_of_its_new_tokens_is_named(tmp_path: Path) -> None:
    network = llama()
    network.resize_token_embeddings(60)
    network = adapted(network, target_modules=["q_proj"], modules_to_save=["embed_tokens"], **CAUSAL)
    adapter = written(network, tmp_path, llama(), save_embedding_layers=False)
    refused(
        adapter,
        r"another vocabulary than its base \(53 tokens\), model\.embed_tokens\.weight 60, and not .* lm_head",
    )


def test_adapters_of_a_wrapped_family_open_and_their_classifiers_are_named(tmp_path: Path) -> None:
    config = transformers.Starcoder2Config(
        vocab_size=53, hidden_size=24, intermediate_size=36, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, initializer_range=0.2
    )  # fmt: skip
    torch.manual_seed(0)
    base = transformers.Starcoder2ForCausalLM(config).eval()
    network = adapted(copy.deepcopy(base), target_modules=["q_proj", "lm_head"], **CAUSAL)
    expected = logits(network)
    for source in (network, written(network, tmp_path / "1", base)):
        model = verified(same(source, expected))
        said(model, "wrapped: every pass is computed by the network's own code")
        said(model, "embedding and unembedding, tied in the base, are apart")
    network = transformers.Starcoder2ForSequenceClassification.from_pretrained(tmp_path / "1" / "base")
    network = adapted(network, target_modules=["q_proj"], task_type="SEQ_CLS")
    for source in (network, written(network, tmp_path / "2", base)):
        refused(source, "Starcoder2ForSequenceClassification gives no logits of tokens")


# --- live ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize(
    "more",
    [{}, {"modules_to_save": ["lm_head"]}, {"trainable_token_indices": [3, 7]}],
    ids=["", "head", "tokens"],
)
def test_adapters_that_are_switched_off_are_left_out(more: dict[str, object], merge: bool) -> None:
    """A trained head too, and what was merged is taken out again, as in the network's own pass."""
    network = adapted(llama(), target_modules=["q_proj"], **more)
    on = logits(network)
    if merge:
        network.merge_adapter()
        same(network, on)
    with network.disable_adapter():
        model = same(network, logits(network))
        assert far(on, logits(network))
        verified(model)
    assert model.transformer.opened == ("adapters, which are switched off, left out",)
    same(network, logits(network))


def test_adapters_that_were_put_into_a_live_model_are_merged() -> None:
    network = peft.inject_adapter_in_model(
        peft.LoraConfig(r=2, target_modules=ALL), llama(), adapter_name="mine"
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += SPREAD * torch.randn(parameter.shape, generator=generator)
    expected = logits(network)
    said(verified(same(network, expected)), "adapter merged into the live model: .* 'mine'")
    for module in network.modules():
        if isinstance(module, BaseTunerLayer):
            module.enable_adapters(False)
    model = same(network, logits(network))
    assert far(logits(network), expected)
    assert model.transformer.opened == ("adapters, which are switched off, left out",)


def test_hooks_on_adapted_layers_are_no_part_of_the_copy() -> None:
    network = of("lora")
    expected = logits(network)
    adapted_layer = network.base_model.model.model.layers[1].mlp.up_proj
    adapted_layer.register_forward_hook(lambda module, given, output: output * 0)
    assert far(logits(network), expected)
    with pytest.warns(Note, match=r"hooks on 1 modules .*up_proj', are no part of our copy"):
        same(network, expected)


def test_of_several_adapters_the_active_ones_are_merged_and_named() -> None:
    network = adapted(llama(), target_modules=["q_proj"])
    network.add_adapter("b", peft.LoraConfig(r=3, target_modules=["v_proj"], init_lora_weights=False))
    network.eval()
    first = logits(network)
    network.set_adapter("b")
    assert far(logits(network), first)
    model = verified(same(network, logits(network)))
    said(model, r"into the live model: LORA 'b', rank 3; not active, left out: 'default'")
    network.base_model.set_adapter(["default", "b"])
    model = verified(same(network, logits(network)))
    said(
        model,
        r"into the live model: LORA 'default', rank 2; LORA 'b', rank 3($| this model has no tokenizer)",
    )


# --- what is no change of matrices --------------------------------------------------------------------------------


def test_an_adapter_that_changes_no_matrix_is_named() -> None:
    network = peft.get_peft_model(
        llama(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )
    refused(network, "an adapter of type PROMPT_TUNING changes no matrix and cannot be merged")


@pytest.mark.parametrize("live", [True, False])
def test_an_activated_lora_is_named(live: bool, tmp_path: Path) -> None:
    network = adapted(llama(), target_modules=["q_proj"], alora_invocation_tokens=[5, 6], **CAUSAL)
    source = network if live else written(network, tmp_path, llama())
    refused(
        source,
        "adapter 'default' is an activated LoRA: it changes what comes after its invocation tokens alone",
    )


@pytest.mark.parametrize("live", [True, False])
def test_a_bias_for_layers_that_have_none_is_named(live: bool, tmp_path: Path) -> None:
    network = adapted(llama(), target_modules=["q_proj"], lora_bias=True, **CAUSAL)
    source = network if live else written(network, tmp_path, llama())
    refused(source, r"an adapter \(LORA\) cannot be merged: .*lora_bias=True.*the base layer has no bias")


def test_the_base_stays_as_it_is_on_disk(tmp_path: Path) -> None:
    adapter = written(of("lora"), tmp_path, llama())
    before = load_file(tmp_path / "base" / "model.safetensors")
    HookedTransformer.from_pretrained(adapter)
    after = load_file(tmp_path / "base" / "model.safetensors")
    assert all(torch.equal(before[name], value) for name, value in after.items())
