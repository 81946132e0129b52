"""GGUF files: opened as the model that they were written from, their blocks as `gguf` itself dequantises them.

The oracle is the transformers model whose tensors `gguf_files` writes as llama.cpp's converter does; transformers' own
reader is a second one where it reads the file rightly.
"""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from interp import HookedEncoderDecoder, HookedTransformer
from interp.families.gguf import read_in_seconds
from interp.families.load import any_from_folder, any_from_hf_model
from interp.model import Transformer
from interp.wrapped import Wrapped
from tests.families import gguf_files
from tests.families.case import Case
from tests.families.cases_decoders import LLAMA3_ROPE, YARN_ROPE
from tests.families.memory import status
from tests.families.oracle import CASES, SPREAD, hf_logits, new_hf_model, quiet, some_tokens
from tests.forking import forked

GEMMA = {"query_pre_attn_scalar": 10}
"""The width of a head, as in all models but the largest; a file has no key for it."""
GEMMA3 = {**GEMMA, "num_hidden_layers": 7, "sliding_window_pattern": 6}
T5 = {"relative_attention_max_distance": 128}
FALCON = {"ffn_hidden_size": 96}
NATIVE: dict[str, Case] = {
    name: CASES[name]
    for name in (
        "llama", "llama-tied", "llama-attention-bias", "llama-mlp-bias", "llama-mqa", "llama-eps", "llama-linear-rope",
        "llama-yarn-rope", "llama-yarn-rope-factor", "mistral", "qwen2", "qwen2-tied", "qwen2-yarn", "qwen3",
        "qwen3-attention-bias", "qwen3-moe-renormalised", "phi3", "phi3-window", "phi3-partial", "phi3-long",
        "phi3-long-within", "bloom", "bloom-untied", "stablelm", "stablelm-12b", "gpt2", "gpt2-untied", "gpt2-n-inner",
        "gpt2-eps", "lfm2", "lfm2-bias-untied", "gpt-oss", "gpt-oss-yarn", "gpt-oss-no-rule", "gpt-oss-mqa",
    )
}  # fmt: skip
NATIVE |= {
    "falcon": CASES["falcon"].but(**FALCON),
    "falcon-groups": CASES["falcon-groups"].but(**FALCON),
    "falcon-groups-one-norm": CASES["falcon-groups-one-norm"].but(**FALCON),
    "gemma2": CASES["gemma2"].but(**GEMMA),
    "gemma2-tight-caps": CASES["gemma2-tight-caps"].but(**GEMMA),
    "gemma3": CASES["gemma3-every-6"].but(**GEMMA3),
    "gemma3-capped": CASES["gemma3-capped"].but(**GEMMA3),
    "gemma3-ropes": CASES["gemma3-ropes"].but(**GEMMA3),
    "t5": CASES["t5"].but(**T5),
    "t5-gated": CASES["t5-gated"].but(**T5),
    "t5-v1.1": CASES["t5-v1.1"].but(**T5),
}
READ_RIGHTLY_BY_TRANSFORMERS = (
    "llama",
    "llama-tied",
    "mistral",
    "qwen2",
    "bloom",
    "stablelm",
    "lfm2",
    "falcon",
)
_SMALL = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 36, "max_position_embeddings": 64,
}  # fmt: skip
WRAPPED: dict[str, Case] = {
    "starcoder2": Case(hf.Starcoder2Config, hf.Starcoder2ForCausalLM, {
        **_SMALL, "sliding_window": None, "norm_epsilon": 1e-3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    }),
    "mamba": Case(hf.MambaConfig, hf.MambaForCausalLM, {
        "num_hidden_layers": 2, "hidden_size": 24, "state_size": 6, "time_step_rank": 3, "layer_norm_epsilon": 1e-3,
    }),
    "qwen2_moe": Case(hf.Qwen2MoeConfig, hf.Qwen2MoeForCausalLM, {
        **_SMALL, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20, "num_experts": 5,
        "num_experts_per_tok": 2,
    }),
}  # fmt: skip
ROUNDED = ("gemma", "mamba")
"""Families whose files hold a gamma plus one, or an exponential: these round."""
LIKE_LLAMA = Case(hf.LlamaConfig, hf.LlamaForCausalLM, {
    "num_hidden_layers": 1, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 256, "max_position_embeddings": 64,
})  # fmt: skip
"""Rows of whole blocks of 256."""


def network(case: Case, seed: int = 0) -> PreTrainedModel:
    """A model of a case, every number of it moved."""
    torch.manual_seed(seed)
    config = case.config()
    config._attn_implementation = "eager"
    model = case.model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += SPREAD * torch.randn(parameter.shape)
    return model.eval()


def inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    return {"decoder_input_ids": some_tokens(seed=1)} if model.config.is_encoder_decoder else {}


def ours(path: Path, model: PreTrainedModel) -> Tensor:
    """Our logits of a file."""
    return any_from_folder(path)(some_tokens(), *inputs(model).values())


def apart(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    return float((a - b).abs().max() / b.abs().max())


def llama_file(path: Path, name: str = "llama", **how: object) -> Path:
    return gguf_files.write(path / "model.gguf", new_hf_model(name), **how)  # type: ignore[arg-type]


# --- architectures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NATIVE)
def test_a_file_opens_as_the_model_that_it_was_written_from(name: str, tmp_path: Path) -> None:
    """Every parameter is the same number, and the logits are transformers' own."""
    theirs = network(NATIVE[name])
    path = gguf_files.write(tmp_path / "model.gguf", theirs)
    model, live = any_from_folder(path), any_from_hf_model(theirs)
    rounded = 1e-6 if theirs.config.model_type.startswith(ROUNDED) else 0.0
    for (key, a), (other, b) in zip(model.named_parameters(), live.named_parameters(), strict=True):
        assert key == other
        torch.testing.assert_close(a, b, rtol=rounded, atol=rounded)
    expected = hf_logits(theirs, some_tokens(), **inputs(theirs))
    bound = max(1e-5, 2 * apart(live(some_tokens(), *inputs(theirs).values()), expected))
    assert apart(ours(path, theirs), expected) <= bound
    if isinstance(model, Transformer) and isinstance(live, Transformer):
        assert model.config.tied == live.config.tied


@pytest.mark.parametrize("name", READ_RIGHTLY_BY_TRANSFORMERS)
def test_transformers_reads_the_same_numbers(name: str, tmp_path: Path) -> None:
    theirs = network(NATIVE[name])
    gguf_files.write(tmp_path / "model.gguf", theirs)
    quiet()
    read = hf.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    assert apart(ours(tmp_path, theirs), hf_logits(read, some_tokens())) <= 1e-5


def test_transformers_reads_the_same_bits_and_gguf_is_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables: list[int] = []
    usual = gguf.get_tensor_name_map
    monkeypatch.setattr(gguf, "get_tensor_name_map", lambda *given: tables.append(1) or usual(*given))
    llama_file(tmp_path)
    before = gguf.GGUFReader, gguf.get_tensor_name_map

    def read() -> tuple[dict[str, torch.Tensor], int]:
        tables.clear()
        found = hf.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
        return found.state_dict(), len(tables)

    quiet()
    (slowly, many), quickly = read(), read_in_seconds()
    with quickly:
        found, one = read()
    assert found.keys() == slowly.keys() and all(torch.equal(found[name], slowly[name]) for name in found)
    assert one == 1 < many
    with pytest.raises(RuntimeError), read_in_seconds():
        raise RuntimeError
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == before


@pytest.mark.parametrize("name", WRAPPED)
def test_an_architecture_without_a_family_is_wrapped(name: str, tmp_path: Path) -> None:
    theirs = network(WRAPPED[name])
    path = gguf_files.write(tmp_path / "model.gguf", theirs)
    model = HookedTransformer.from_pretrained(path).transformer
    assert isinstance(model, Wrapped)
    assert any("read from a GGUF file" in note for note in model.opened)
    assert apart(model(some_tokens()), hf_logits(theirs, some_tokens())) <= 1e-5


def test_a_known_family_is_wrapped_where_that_is_asked(tmp_path: Path) -> None:
    theirs = network(NATIVE["qwen3"])
    path = gguf_files.write(tmp_path / "model.gguf", theirs)
    model = HookedTransformer.from_pretrained(path, wrapped=True).transformer
    assert isinstance(model, Wrapped)
    assert apart(model(some_tokens()), hf_logits(theirs, some_tokens())) <= 1e-5


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "t5-gated",
        "falcon-groups",
        "gpt-oss-yarn",
        "stablelm-12b",
        "gemma3",
        "phi3-long",
        "falcon-groups-one-norm",
        "bloom-untied",
    ],
)
def test_the_contract_holds_and_says_what_was_read(name: str, tmp_path: Path) -> None:
    case = NATIVE[name]  # experts of whole blocks of 16 bytes, which transformers' grouped product asks for
    theirs = network(case.but(intermediate_size=16) if name.startswith("gpt-oss") else case)
    path = gguf_files.write(tmp_path / "model.gguf", theirs)
    kind = HookedEncoderDecoder if theirs.config.is_encoder_decoder else HookedTransformer
    model = kind.from_pretrained(path)
    said = str(model.verify())
    assert model.verify().passed, said
    assert "Hugging Face" in said and "read from a GGUF file" in said
    if isinstance(model, HookedTransformer):
        assert "GGUF" in str(model)


def test_what_was_dequantised_is_said(tmp_path: Path) -> None:
    path = gguf_files.write(tmp_path / "q.gguf", network(LIKE_LLAMA), types=gguf.GGMLQuantizationType.Q8_0)
    model = HookedTransformer.from_pretrained(path)
    words = "read from a GGUF file (llama): 9 tensors of Q8_0, 3 tensors of F32, dequantised to float32"
    assert model.transformer.opened == (words,)
    contract = model.verify()
    assert contract.passed and words in str(contract)


# --- keys ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("attention.causal", False, "attention.causal = False"),
        ("expert_count", 4, "expert_count = 4"),
        ("rope.scale_linear", 2.0, "rope.scale_linear = 2.0"),
        ("logit_scale", 0.5, "logit_scale is 0.5"),
        ("rope.dimension_count", 6, "rope.dimension_count is 6"),
        ("attention.value_length", 12, "attention.value_length is 12"),
        ("attention.scale", 0.5, "attention.scale is 0.5"),
        ("attention.sliding_window", 6, "attention.sliding_window is 6"),
        ("rope.scaling.type", "longrope", "rope.scaling.type is 'longrope'; read are none, linear and yarn"),
        ("rope.scaling.attn_factor", 1.2, "rope.scaling.attn_factor is 1.2"),
        ("general.architecture", "gemma4", "architecture 'gemma4' is not read"),
        ("feed_forward_length", [36, 40], "feed_forward_length differs between layers"),
        ("block_count", "two", "config"),
        ("attention.head_count", 3, "head"),
        ("general.architecture", "llama5", r"'llama5' is not read from GGUF; read are bloom, .*nearest: llama"),
        ("split.count", 3, "one of 3 parts; merge them first: llama-gguf-split --merge"),
        ("general.architecture", "command-r", "architecture 'command-r' is not read"),
    ],
)  # fmt: skip
def test_a_key_that_nobody_reads_is_refused_by_its_name(
    key: str, value: object, words: str, tmp_path: Path
) -> None:
    path = llama_file(tmp_path, keys={key: value})
    with pytest.raises(ValueError, match=words):
        any_from_folder(path)


@pytest.mark.parametrize(
    "keys",
    [
        {"attention.causal": True},
        {"expert_count": 0, "expert_used_count": 0},
        {"attention.head_count_kv": [2, 2], "feed_forward_length": [36, 36]},
        {"rope.scaling.type": "none", "rope.scaling.finetuned": False},
        {"attention.sliding_window": 0},
        {"attention.sliding_window": 4096},
        {"rope.dimension_count": None},
        {"attention.key_length": None, "attention.value_length": None},
        {"vocab_size": None, "tokenizer.ggml.tokens": None},
        {"general.name": "mistral"},
        {"general.quantization_version": 2, "other.key": "anything"},
    ],
    ids=str,
)
def test_a_key_that_changes_no_number_is_no_reason_to_refuse(keys: dict[str, object], tmp_path: Path) -> None:
    theirs = new_hf_model("llama")
    path = gguf_files.write(tmp_path / "model.gguf", theirs, keys=keys)
    assert apart(ours(path, theirs), hf_logits(theirs, some_tokens())) <= 1e-5


def test_heads_of_keys_and_values_are_by_default_as_many_as_of_queries(tmp_path: Path) -> None:
    """Where transformers would leave the rows of queries and keys as llama.cpp permuted them."""
    theirs = new_hf_model("llama-mha")
    path = gguf_files.write(tmp_path / "model.gguf", theirs, keys={"attention.head_count_kv": None})
    assert apart(ours(path, theirs), hf_logits(theirs, some_tokens())) <= 1e-5
    assert HookedTransformer.from_pretrained(path).verify().passed


def test_a_window_in_layers_that_the_file_names_is_in_those(tmp_path: Path) -> None:
    case = NATIVE["gemma3"].but(layer_types=["full_attention", *["sliding_attention"] * 5, "full_attention"])
    theirs = network(case)
    pattern = [False, *[True] * 5, False]
    path = gguf_files.write(
        tmp_path / "model.gguf", theirs, keys={"attention.sliding_window_pattern": pattern}
    )
    assert apart(ours(path, theirs), hf_logits(theirs, some_tokens())) <= 1e-5


def test_the_largest_gemma_divides_scores_by_another_root(tmp_path: Path) -> None:
    """Gemma 2 27B has 46 layers, and 4608 / 32 under the root where a head is 128 wide."""
    case = CASES["gemma2"].but(num_hidden_layers=46, query_pre_attn_scalar=6)
    path = gguf_files.write(tmp_path / "model.gguf", network(case))
    model = any_from_folder(path)
    assert isinstance(model, Transformer) and model.config.attn_scale == 6**-0.5


# --- rotary scaling -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [20, 64, 150])
def test_the_factors_of_llama_3_1_are_applied_at_every_length(length: int, tmp_path: Path) -> None:
    """transformers passes over them without a word: its logits are those of the model without scaling."""
    theirs = network(CASES["llama"].but(rope_parameters=LLAMA3_ROPE, max_position_embeddings=192))
    factors = gguf_files.rope_freqs(theirs)
    assert len(set(factors.tolist())) > 2
    path = gguf_files.write(tmp_path / "model.gguf", theirs, tensors={"rope_freqs.weight": factors})
    tokens = some_tokens(2, length)
    assert apart(any_from_folder(path)(tokens), hf_logits(theirs, tokens)) <= 1e-5
    read = hf.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    assert apart(hf_logits(read, tokens), hf_logits(theirs, tokens)) > 1e-2
    assert HookedTransformer.from_pretrained(path).verify().passed


def test_factors_of_one_are_no_scaling(tmp_path: Path) -> None:
    path = llama_file(tmp_path, tensors={"rope_freqs.weight": np.ones(5, dtype=np.float32)})
    model = any_from_folder(path)
    assert isinstance(model, Transformer)
    assert model.config == any_from_hf_model(new_hf_model("llama")).config


def test_a_factor_without_a_type_is_linear_as_for_llama_cpp(tmp_path: Path) -> None:
    theirs = network(NATIVE["llama-linear-rope"])
    path = gguf_files.write(tmp_path / "model.gguf", theirs, keys={"rope.scaling.type": None})
    assert apart(ours(path, theirs), hf_logits(theirs, some_tokens())) <= 1e-5


def test_half_of_longrope_and_two_scalings_at_once_are_refused(tmp_path: Path) -> None:
    theirs, ones = network(NATIVE["phi3-long"]), np.full(5, 2, np.float32)
    lacking = {"rope_factors_short.weight": None}
    refused_by("'rope_factors_long.weight'", gguf_files.write(tmp_path / "a.gguf", theirs, tensors=lacking,
                                                               keys={"rope.scaling.attn_factor": None}))  # fmt: skip
    theirs = network(NATIVE["llama-linear-rope"])
    path = gguf_files.write(tmp_path / "b.gguf", theirs, tensors={"rope_freqs.weight": ones})
    refused_by("rope_freqs.weight beside rope.scaling.type 'linear' is not read", path)


def test_a_part_of_yarn_that_transformers_lacks_is_refused(tmp_path: Path) -> None:
    theirs = network(CASES["llama"].but(rope_parameters=YARN_ROPE))
    keys = {"rope.scaling.yarn_ext_factor": 0.5}
    path = gguf_files.write(tmp_path / "model.gguf", theirs, keys=keys)
    with pytest.raises(ValueError, match=r"llama\.rope\.scaling\.yarn_ext_factor = 0\.5"):
        any_from_folder(path)


# --- blocks -------------------------------------------------------------------------------------------------------

TYPES = [kind for kind in gguf.GGMLQuantizationType if kind in gguf.quants._type_traits]
QUANTISABLE = ("BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4")


def finite_blocks(kind: gguf.GGMLQuantizationType, rows: int, columns: int) -> np.ndarray:
    """Random bytes whose numbers are finite and not too large: a row at a time, until all are."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(int(kind))
    n = rows * columns // block
    found = np.zeros((0, size), dtype=np.uint8)
    while len(found) < n:
        drawn = rng.integers(0, 256, (4 * n, size), dtype=np.uint8)
        with np.errstate(all="ignore"):
            numbers = gguf.dequantize(drawn, kind).reshape(4 * n, -1)
        drawn = drawn[np.isfinite(numbers).all(1) & (np.abs(numbers).max(1) < 1e4)]
        found = np.concatenate([found, drawn])
    return found[:n].reshape(rows, -1)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_every_type_of_blocks_is_what_gguf_makes_of_it(
    kind: gguf.GGMLQuantizationType, tmp_path: Path
) -> None:
    """Values, up and down are compared: queries and keys are permuted as well, and compared in the next test."""
    theirs, names = network(LIKE_LLAMA), {"attn_v": 128, "ffn_up": 256, "ffn_down": 256}
    plain = gguf_files.tensors_of(theirs)
    raw = {
        name: gguf.quantize(plain[f"blk.0.{name}.weight"], kind)
        if kind.name in QUANTISABLE
        else finite_blocks(kind, rows, 256)
        for name, rows in names.items()
    }
    raw = {name: x if x.dtype == np.uint8 else x.view(np.uint8) for name, x in raw.items()}
    path = gguf_files.write(
        tmp_path / "model.gguf",
        theirs,
        types={f"blk.0.{name}.weight": kind for name in names},
        tensors={f"blk.0.{name}.weight": x for name, x in raw.items()},
    )
    model = any_from_folder(path)
    assert isinstance(model, Transformer)
    expected = {name: torch.from_numpy(gguf.dequantize(x, kind)) for name, x in raw.items()}
    parameters = dict(model.named_parameters())
    assert torch.equal(parameters["blocks.0.attn.qkv.weight"][-128:], expected["attn_v"])
    assert torch.equal(parameters["blocks.0.mlp.into.weight"][256:], expected["ffn_up"])
    assert torch.equal(parameters["blocks.0.mlp.out.weight"], expected["ffn_down"])


@pytest.mark.parametrize("kind", QUANTISABLE)
def test_a_quantised_model_is_near_the_one_it_was_made_of(kind: str, tmp_path: Path) -> None:
    """Weights no further apart than a few steps of the type: rows of queries and keys are in their places."""
    theirs = network(LIKE_LLAMA)
    path = gguf_files.write(tmp_path / "model.gguf", theirs, types=gguf.GGMLQuantizationType[kind])
    model, live = any_from_folder(path), any_from_hf_model(theirs)
    qkv = "blocks.0.attn.qkv.weight"
    a, b = (dict(each.named_parameters())[qkv].flatten() for each in (model, live))
    least = {"TQ1_0": 0.6, "TQ2_0": 0.6, "MXFP4": 0.97, "Q4_0": 0.97, "Q4_1": 0.97}.get(kind, 0.995)
    assert torch.corrcoef(torch.stack([a, b]))[0, 1] > least


@pytest.mark.kinds  # the shape checks look at a tensor of a mapping, which may be this one
def test_a_type_that_gguf_cannot_dequantise_is_named(tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.I32
    with pytest.raises(
        ValueError, match=r"'blk\.0\.ffn_up\.weight' is stored as I32, which gguf cannot dequantise"
    ):
        any_from_folder(llama_file(tmp_path, tensors={"blk.0.ffn_up.weight": np.ones((36, 24), np.int32)}))
    assert kind not in TYPES


@pytest.mark.parametrize(("kind", "kept"), [("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "float32")])
def test_the_dtype_of_the_matrices_is_kept_where_they_have_one(kind: str, kept: str, tmp_path: Path) -> None:
    theirs = network(LIKE_LLAMA)
    path = gguf_files.write(tmp_path / "model.gguf", theirs, types=gguf.GGMLQuantizationType[kind])
    assert HookedTransformer.from_pretrained(path).transformer.dtype == getattr(torch, kept)
    model = HookedTransformer.from_pretrained(path, dtype=torch.bfloat16, device="cpu")
    assert {p.dtype for p in model.transformer.parameters()} == {torch.bfloat16}


def test_matrices_of_several_types_are_opened_in_float32(tmp_path: Path) -> None:
    path = gguf_files.write(
        tmp_path / "model.gguf", network(LIKE_LLAMA), types={"output.weight": gguf.GGMLQuantizationType.F16}
    )
    assert HookedTransformer.from_pretrained(path).transformer.dtype == torch.float32


# --- files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sha256-4d7a", "Model.GGUF"])
def test_a_file_is_told_by_how_it_begins(name: str, tmp_path: Path) -> None:
    """As Ollama keeps them, without an end of their names."""
    expected = ours(llama_file(tmp_path), new_hf_model("llama"))
    path = tmp_path / "blobs" / name
    path.parent.mkdir()
    (tmp_path / "model.gguf").rename(path)
    assert torch.equal(HookedTransformer.from_pretrained(path).transformer(some_tokens()), expected)


def test_a_file_beside_what_is_no_weights_is_the_one_that_is_meant(tmp_path: Path) -> None:
    expected = ours(llama_file(tmp_path), new_hf_model("llama"))
    torch.save({"x": torch.ones(2)}, tmp_path / "mmproj.bin")
    assert torch.equal(HookedTransformer.from_pretrained(tmp_path).transformer(some_tokens()), expected)


def test_a_folder_means_its_one_file_and_asks_where_there_are_several(tmp_path: Path) -> None:
    llama_file(tmp_path)
    expected = ours(tmp_path / "model.gguf", new_hf_model("llama"))
    assert torch.equal(HookedTransformer.from_pretrained(tmp_path).transformer(some_tokens()), expected)
    (tmp_path / "training_args.bin").write_bytes(b"of the trainer")
    assert torch.equal(HookedTransformer.from_pretrained(tmp_path).transformer(some_tokens()), expected)
    (tmp_path / "other.gguf").write_bytes((tmp_path / "model.gguf").read_bytes())
    with pytest.raises(
        ValueError, match=r"holds 2 GGUF files, model\.gguf, other\.gguf; give the path of one"
    ):
        HookedTransformer.from_pretrained(tmp_path)
    model = HookedTransformer.from_pretrained(tmp_path / "other.gguf")
    assert torch.equal(model.transformer(some_tokens()), expected)


def refused_by(words: str, path: Path) -> None:
    with pytest.raises(ValueError, match=words) as refusal:
        HookedTransformer.from_pretrained(path)
    assert path.name in str(refusal.value)


def test_damaged_tensors_are_named(tmp_path: Path) -> None:
    name = "blk.1.ffn_up.weight"
    refused_by(r"lacks 1 of 21 tensors, first 'model\.layers\.1\.mlp\.up_proj\.weight'",
               llama_file(tmp_path, tensors={name: None}))  # fmt: skip
    extra = {"blk.1.attn_q_norm.weight": np.ones(10, np.float32)}
    refused_by(r"no place for 1 of 22 tensors, first 'blk\.1\.attn_q_norm\.weight'",
               llama_file(tmp_path, tensors=extra))  # fmt: skip
    wrong = {name: np.ones((30, 24), np.float32)}
    refused_by(
        r"model\.gguf: model\.layers\.1\.mlp\.up_proj\.weight requires shape \[36, 24\], this file gives "
        r"blk\.1\.ffn_up\.weight \[30, 24\]",
        llama_file(tmp_path, tensors=wrong),
    )
    nan = {name: np.full((36, 24), np.nan, np.float32)}
    refused_by("NaN or infinite", llama_file(tmp_path, tensors=nan))


def test_experts_of_a_wrong_shape_are_named(tmp_path: Path) -> None:
    theirs = network(NATIVE["gpt-oss"])
    name = "blk.0.ffn_gate_exps.weight"
    for shape in ((5, 14, 20), (4, 14, 24), (5, 14)):
        wrong = {name: np.ones(shape, np.float32)}
        path = gguf_files.write(tmp_path / "model.gguf", theirs, tensors=wrong)
        refused_by(r"mlp\.experts\.gate_up_proj requires shape \[5, 24, 28\], this file gives", path)
    refused_by(
        r"gate_up_proj is made of blk\.0\.ffn_gate_exps\.weight and blk\.0\.ffn_up_exps\.weight, and the file "
        r"lacks blk\.0\.ffn_gate_exps\.weight",
        gguf_files.write(tmp_path / "model.gguf", theirs, tensors={name: None}),
    )


def test_a_file_that_is_cut_short_or_is_none_is_refused(tmp_path: Path) -> None:
    whole = llama_file(tmp_path).read_bytes()
    for n in (0, 3, 4, 8, 20, 100, 1000, len(whole) // 2, len(whole) - 100):
        (tmp_path / "model.gguf").write_bytes(whole[:n])
        refused_by(r"model\.gguf is not a readable GGUF file", tmp_path / "model.gguf")
    (tmp_path / "model.gguf").write_bytes(b"not GGUF" * 1000)
    refused_by(r"model\.gguf is not a readable GGUF file", tmp_path / "model.gguf")


def test_a_damaged_byte_anywhere_before_the_numbers_opens_or_is_refused(tmp_path: Path) -> None:
    path = llama_file(tmp_path, "llama-mqa")
    whole = bytearray(path.read_bytes())
    rng, said = np.random.default_rng(0), []
    for at in rng.integers(0, 2500, 60):
        changed = bytearray(whole)
        changed[at] ^= int(rng.integers(1, 256))
        path.write_bytes(changed)
        try:
            any_from_folder(path)
        except ValueError as error:
            said.append(str(error))
    assert len(said) > 5 and all("model.gguf" in words for words in said)


def test_a_length_that_no_file_has_ends_at_once(tmp_path: Path) -> None:
    path = llama_file(tmp_path, keys={"other.list": [7, 8, 9]})
    whole = path.read_bytes()
    stored = np.array([3], np.uint64).tobytes() + np.array([7, 8, 9], np.int32).tobytes()
    assert whole.count(stored) == 1
    path.write_bytes(whole.replace(stored, np.array([2**40], np.uint64).tobytes() + stored[8:]))
    refused_by(r"model\.gguf is not a readable GGUF file.*its \d+ bytes are fewer than it says", path)


# --- models that transformers loaded from GGUF --------------------------------------------------------------------


def test_live_model_from_gguf_opens_and_so_does_its_saved_folder(tmp_path: Path) -> None:
    llama_file(tmp_path)
    live = hf.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    if getattr(live.config, "quantization_config", None) is None:  # transformers before 5.24 leaves none over
        live.config.quantization_config = {"quant_method": "gguf"}
    expected = hf_logits(live, some_tokens())
    model = HookedTransformer.from_pretrained(live)
    assert apart(model.transformer(some_tokens()), expected) <= 1e-5
    assert model.verify().passed
    saved = tmp_path / "saved"
    live.config.save_pretrained(saved)  # the model's own method refuses, so people save its tensors
    save_file(live.state_dict(), saved / "model.safetensors", metadata={"format": "pt"})
    assert json.loads((saved / "config.json").read_text())["quantization_config"]["quant_method"] == "gguf"
    model = HookedTransformer.from_pretrained(saved)
    assert apart(model.transformer(some_tokens()), expected) <= 1e-5
    assert model.verify().passed


# --- memory -------------------------------------------------------------------------------------------------------


def anonymous(
    tiny: Path, big: Path, dtype: torch.dtype | None, tick: Callable[[], int] = lambda: 0
) -> tuple[int, int]:
    """How far a process grew at most while it opened a file, pages of the file left out, and the model's size."""
    any_from_folder(tiny)  # so that imports do not count
    before, top, done = status("RssAnon"), [0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            top[0] = max(top[0], status("RssAnon"))
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = any_from_folder(big, dtype=dtype)
    done.set()
    watcher.join()
    return top[0] - before, sum(p.numel() * p.element_size() for p in model.parameters())


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize(("kind", "asked"), [("Q4_0", None), ("F16", None), ("F32", "bfloat16")])
def test_opening_takes_the_model_and_one_tensor(kind: str, asked: str | None, tmp_path: Path) -> None:
    """One tensor: the largest one in float32, as it is dequantised."""
    case = Case(hf.LlamaConfig, hf.LlamaForCausalLM, {
        "num_hidden_layers": 4, "hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12,
        "num_key_value_heads": 4, "max_position_embeddings": 64, "vocab_size": 8000,
    })  # fmt: skip
    tiny = llama_file(tmp_path)
    big = gguf_files.write(tmp_path / "big.gguf", network(case), types=gguf.GGMLQuantizationType[kind])
    grew, size = forked(anonymous, tiny, big, asked and getattr(torch, asked))
    assert 0.9 * size < grew <= size + 8000 * 768 * 4 + 8 * 2**20
