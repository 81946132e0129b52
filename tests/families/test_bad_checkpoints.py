"""Checkpoints that are broken or ask for what we do not do: each is refused by name, and no code of theirs runs."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from interp import HookedTransformer, families
from interp.families import config_of
from tests.configs import build
from tests.families.oracle import hf_config, hf_model, new_hf_model, some_tokens
from tests.tiny import gpt2_tokenizer

GPT2_KEY = "transformer.h.1.mlp.c_fc.weight"
LLAMA_KEY = "model.layers.1.self_attn.k_proj.weight"
ONE_EACH = pytest.mark.parametrize(("name", "key"), [("gpt2", GPT2_KEY), ("llama", LLAMA_KEY)])
Tensors = dict[str, Tensor]


def stored(folder: Path, name: str = "gpt2") -> Path:
    hf_model(name).save_pretrained(folder)
    return folder


def change_tensors(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    path = folder / "model.safetensors"
    save_file(
        {k: v.contiguous() for k, v in change(load_file(path)).items()}, path, metadata={"format": "pt"}
    )


def change_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def refused(source: Path | nn.Module, message: str, error: type[Exception] = ValueError) -> None:
    with pytest.raises(error, match=message):
        HookedTransformer.from_pretrained(source)


# --- tensors ------------------------------------------------------------------------------------------------------


@ONE_EACH
def test_a_missing_tensor_is_named(name: str, key: str, tmp_path: Path) -> None:
    change_tensors(stored(tmp_path, name), lambda t: {k: v for k, v in t.items() if k != key})
    refused(tmp_path, f"lacks 1 of .* tensors, first '{re.escape(key)}'")


@ONE_EACH
def test_a_tensor_nobody_asked_for_is_named(name: str, key: str, tmp_path: Path) -> None:
    extra = key.replace("weight", "lora_A")
    change_tensors(stored(tmp_path, name), lambda t: t | {extra: torch.ones(3)})
    refused(tmp_path, f"1 tensors are not understood, first '{re.escape(extra)}'")


@ONE_EACH
def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(name: str, key: str, tmp_path: Path) -> None:
    change_tensors(stored(tmp_path, name), lambda t: t | {key: t[key][:-1]})
    said = {
        "gpt2": rf"blocks\.1\.mlp\.into\.weight requires shape \[\d+, \d+\], .*{re.escape(key)}.* gives \[\d+, \d+\]",
        "llama": rf"blocks\.1\.attn\.qkv\.weight is made of 3 tensors, and {re.escape(key)} requires shape ",
    }
    refused(tmp_path, said[name])


@ONE_EACH
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_tensor_with_nan_or_infinity_is_named(name: str, key: str, value: float, tmp_path: Path) -> None:
    def poison(tensors: Tensors) -> Tensors:
        tensors[key][0, 0] = value
        return tensors

    change_tensors(stored(tmp_path, name), poison)
    refused(tmp_path, f"{re.escape(key)}: the checkpoint holds NaN or infinite values")


def test_an_integer_tensor_is_named(tmp_path: Path) -> None:
    change_tensors(stored(tmp_path), lambda t: t | {GPT2_KEY: t[GPT2_KEY].to(torch.int8)})
    refused(tmp_path, rf"{re.escape(GPT2_KEY)}: a floating point tensor is required, got torch.int8")


def test_a_live_model_with_a_nan_is_refused() -> None:
    model = new_hf_model("gpt2")
    with torch.no_grad():
        model.transformer.wpe.weight[3, 3] = float("nan")
    refused(model, "transformer.wpe.weight: the checkpoint holds NaN")


def test_an_untied_config_without_an_unembedding_is_refused(tmp_path: Path) -> None:
    change_config(stored(tmp_path), tie_word_embeddings=False)
    refused(tmp_path, "lacks 1 of .* tensors, first 'lm_head.weight'")


def test_a_classifier_is_not_taken_for_a_language_model(tmp_path: Path) -> None:
    change_tensors(stored(tmp_path), lambda t: t | {"score.weight": torch.ones(2, 24)})
    refused(tmp_path, "not understood, first 'score.weight'")


# --- files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [0, 5, 0.5, -8])
def test_a_truncated_file_is_named(kept: float, tmp_path: Path) -> None:
    path = stored(tmp_path) / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content)) if isinstance(kept, float) else kept])
    refused(tmp_path, r"model.safetensors is not a readable safetensors file \(truncated\?\)")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    hf_model("llama").save_pretrained(tmp_path, max_shard_size="10KB")
    second = sorted(tmp_path.glob("*.safetensors"))[1]
    second.unlink()
    refused(tmp_path, f"the index names {second.name}, which is not there", FileNotFoundError)


def test_the_same_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    """Shards without an index: nobody can say which of them counts."""
    path = stored(tmp_path) / "model.safetensors"
    for shard in (1, 2):
        (tmp_path / f"weights-0000{shard}-of-00002.safetensors").write_bytes(path.read_bytes())
    path.unlink()
    refused(tmp_path, r"is in weights-00001-of-00002\.safetensors and in weights-00002-of-00002\.safetensors")


def test_several_sets_of_weights_without_a_usual_name_are_refused(tmp_path: Path) -> None:
    path = stored(tmp_path) / "model.safetensors"
    (tmp_path / "a.safetensors").write_bytes(path.read_bytes())
    path.rename(tmp_path / "b.safetensors")
    refused(tmp_path, r"holds 2 sets of weights, a\.safetensors, b\.safetensors.* give the path of one")


def test_a_folder_without_a_config_says_what_it_holds(tmp_path: Path) -> None:
    (stored(tmp_path) / "config.json").unlink()
    refused(
        tmp_path,
        r"config.json is required beside the weights; .* holds .*model.safetensors",
        FileNotFoundError,
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not readable JSON"),
        ("[1]", "must hold a JSON object, got list"),
        ("\xff", "is not readable JSON"),
        ("[" * 100_000, "is not readable JSON"),
    ],
)
def test_a_broken_config_is_named(content: str, message: str, tmp_path: Path) -> None:
    (stored(tmp_path) / "config.json").write_text(content, encoding="latin-1")
    refused(tmp_path, f"config.json {message}")


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    folder = stored(tmp_path)
    gpt2_tokenizer().save_pretrained(folder)
    file = folder / "tokenizer.json"
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(ValueError, match="its tokenizer cannot be read"):
        families.tokenizer_of(folder)
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a readable tokenizer"):
        families.tokenizer.FileTokenizer.read(file, "<|bos|>")


@pytest.mark.parametrize("n_layers", [10_000_000, 9_999])
def test_more_layers_than_tensors_are_refused_before_any_is_built(n_layers: int, tmp_path: Path) -> None:
    path = stored(tmp_path) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "n_layer": n_layers}))
    refused(tmp_path, rf"(n_layers in \[0, 10000\], got|the config says) {n_layers}")


@pytest.mark.parametrize("n_experts", [10**6, 10**4])
def test_more_experts_than_tensors_or_rows_are_refused_at_once(n_experts: int, tmp_path: Path) -> None:
    change_config(stored(tmp_path, "mixtral"), num_local_experts=n_experts)
    refused(tmp_path, rf"the config says {n_experts} experts, the checkpoint holds \d+ tensors of at most")


LARGER = {
    "num_local_experts": (10**6, r"network of \d+ numbers, the checkpoint holds \d+"),
    "vocab_size": (10**7, r"network of \d+ numbers, the checkpoint holds \d+"),
    "num_hidden_layers": (10**6, r"the config says 1000000 layers, the checkpoint holds \d+ tensors"),
}


@pytest.mark.parametrize("key", LARGER)
def test_a_network_far_larger_than_its_checkpoint_is_not_built(key: str, tmp_path: Path) -> None:
    value, message = LARGER[key]
    change_config(stored(tmp_path, "mixtral"), **{key: value})
    with pytest.raises(ValueError, match=message):
        HookedTransformer.from_pretrained(tmp_path, wrapped=True)


@pytest.mark.parametrize(
    ("key", "value"), [("hidden_act", 3), ("hidden_act", []), ("head_dim", "x"), ("layer_types", "x")]
)
def test_a_value_that_transformers_does_not_take_is_named(key: str, value: object, tmp_path: Path) -> None:
    change_config(stored(tmp_path, "llama"), **{key: value})
    with pytest.raises(ValueError, match=f"{tmp_path}: transformers does not take a value.*{key}"):
        HookedTransformer.from_pretrained(tmp_path, wrapped=True)


class Payload:
    """What a malicious pickle holds: unpickling it would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_with_code_in_it_is_refused_and_not_run(zipped: bool, tmp_path: Path) -> None:
    path, marker = stored(tmp_path) / "model.safetensors", tmp_path / "executed"
    evil = tmp_path / "pytorch_model.bin"
    poisoned = {**load_file(path), "evil": Payload(marker)}
    torch.save(poisoned, evil, _use_new_zipfile_serialization=zipped)
    path.unlink()
    refused(tmp_path, r"pytorch_model\.bin is refused, and nothing in it was run")
    refused(evil, r"pytorch_model\.bin is refused")
    assert not marker.exists()
    torch.load(evil, weights_only=False)  # the trap works
    assert marker.exists()


@pytest.mark.parametrize("kept", [0, 40, 0.5, -8])
def test_a_truncated_pickle_is_named(kept: float, tmp_path: Path) -> None:
    path = stored(tmp_path) / "model.safetensors"
    torch.save(load_file(path), tmp_path / "pytorch_model.bin")
    path.unlink()
    content = (tmp_path / "pytorch_model.bin").read_bytes()
    cut = content[: int(kept * len(content)) if isinstance(kept, float) else kept]
    (tmp_path / "pytorch_model.bin").write_bytes(cut)
    refused(tmp_path, r"pytorch_model\.bin is (refused|not a readable file)")


def test_a_pickle_of_other_things_is_refused(tmp_path: Path) -> None:
    path = stored(tmp_path) / "model.safetensors"
    torch.save({"net": load_file(path), "step": 3}, tmp_path / "pytorch_model.bin")
    path.unlink()
    refused(tmp_path, "must hold a dict of tensors, or one under model, .*; it holds net, step")


def test_a_folder_without_weights_says_what_it_holds(tmp_path: Path) -> None:
    (stored(tmp_path) / "model.safetensors").unlink()
    refused(
        tmp_path, r"no \*\.safetensors file and no pytorch_model\.bin; it holds config", FileNotFoundError
    )


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere does not exist; give a folder", FileNotFoundError)


def test_an_object_that_is_no_hugging_face_model_is_named() -> None:
    refused(nn.Linear(2, 2), "a Hugging Face model with a config is required, got Linear")


# --- configs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("gpt2", {"model_type": "mamba"}, r"model_type 'mamba' is not supported; supported: gpt2, llama"),
        ("gpt2", {"model_type": None}, "model_type 'None' is not supported"),
        ("gpt2", {"add_cross_attention": True}, "config asks for add_cross_attention=True, supported: False"),
        ("gpt2", {"activation_function": "relu2"}, "config asks for activation_function='relu2', supported: 'gelu'"),
        ("gpt2", {"n_layer": "two"}, "config requires a number for n_layer, got 'two'"),
        ("gpt2", {"n_layer": 2.5}, "config requires a whole number for n_layer, got 2.5"),
        ("gpt2", {"n_head": True}, "config requires a number for n_head, got True"),
        ("gpt2", {"n_head": None}, "config requires a number for n_head, got None"),
        ("gpt2", {"n_head": 5}, "n_heads to divide d_model"),
        ("llama", {"hidden_act": "xielu"}, "config asks for hidden_act='xielu', supported: 'gelu'"),
        ("llama", {"sliding_window": 16}, "config keys not understood: sliding_window"),
        ("llama", {"num_key_value_heads": 3}, "n_kv_heads to divide n_heads, got 3 and 4"),
        ("llama", {"rope_parameters": {"rope_type": "ntk", "factor": 2.0}}, "rope_type='ntk' is not supported"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, r"asks for quantization_config \(gptq\)"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "rope_parameters: config requires a number for factor"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "requires a number for low_freq_factor"),
        ("llama", {"rope_parameters": {"rope_theta": "big"}}, "requires a number for rope_theta, got 'big'"),
    ],
)  # fmt: skip
def test_a_config_that_asks_for_more_is_refused_by_name(
    name: str, values: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(hf_config(name).to_dict() | values)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_config_itself_is_accepted(name: str) -> None:
    """So that the refusals above are due to what was added."""
    assert config_of(hf_config(name).to_dict())[1].n_layers == 2


def test_an_own_checkpoint_of_a_later_version_is_refused_by_its_new_field(tmp_path: Path) -> None:
    families.save(build("gpt2"), tmp_path)
    change_config(tmp_path, n_experts=8)
    refused(tmp_path, "config keys not understood: n_experts")


# --- nothing is executed ------------------------------------------------------------------------------------------


def test_a_config_that_asks_for_remote_code_executes_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    code = f"from pathlib import Path\nPath({str(marker)!r}).touch()\n"
    for file in ("modeling_evil.py", "configuration_evil.py", "tokenization_evil.py"):
        (stored(tmp_path) / file).write_text(code + "class Evil: pass\n")
    gpt2_tokenizer().save_pretrained(tmp_path)
    wte = hf_model("gpt2").transformer.wte.weight.detach()
    wide = torch.cat([wte, wte.new_zeros(400 - len(wte), wte.shape[1])])
    change_tensors(tmp_path, lambda t: t | {"transformer.wte.weight": wide})
    change_config(tmp_path, vocab_size=400)
    auto = {"AutoConfig": "configuration_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
    change_config(tmp_path, auto_map=auto)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": ["tokenization_evil.Evil", None]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    model = HookedTransformer.from_pretrained(tmp_path)
    assert model.transformer(some_tokens()).shape == (3, 20, 400)
    assert model.text.tokenizer.encode("The cat") == gpt2_tokenizer().encode("The cat")
    assert not marker.exists()
    exec(compile(code, "evil", "exec"))  # the trap works
    assert marker.exists()
