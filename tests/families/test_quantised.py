"""Quantised checkpoints: dequantised at load, against Hugging Face's own dequantised models and slow loops.

The checkpoints are made here: random codes and scales in the names and shapes in which each format is published.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor

from interp import HookedTransformer
from interp.families import config_of, save
from interp.families.quantised import FourBit, from_llm_int8, from_mxfp4, from_scaled
from interp.runs.provenance import provenance
from tests.families.case import Case
from tests.families.cases_decoders import CASES
from tests.families.oracle import some_tokens
from tests.families.pair import largest

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
State = dict[str, Tensor]
SHARED = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA = Case(hf.LlamaConfig, hf.LlamaForCausalLM, {**SHARED, "hidden_size": 48, "intermediate_size": 80})
GPT_OSS = Case(hf.GptOssConfig, hf.GptOssForCausalLM, {
    **SHARED, "hidden_size": 64, "intermediate_size": 32, "head_dim": 16, "num_local_experts": 4,
    "num_experts_per_tok": 2, "sliding_window": 6,
})  # fmt: skip
MOE = Case(hf.Qwen3MoeConfig, hf.Qwen3MoeForCausalLM, {
    **SHARED, "hidden_size": 48, "intermediate_size": 80, "moe_intermediate_size": 32, "num_experts": 4, "head_dim": 8,
    "num_experts_per_tok": 2,
})  # fmt: skip


def drawn(*shape: int, low: int, high: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.randint(low, high, shape, dtype=dtype)


def checkpoint(case: Case, folder: Path, said: Mapping[str, object], change: Callable[[State], None]) -> Path:
    """A folder of random weights in bfloat16, some of them stored as `said`."""
    torch.manual_seed(3)
    case.model_class(case.config()).bfloat16().save_pretrained(folder)
    file, config = folder / "model.safetensors", folder / "config.json"
    state = load_file(file)
    change(state)
    save_file({name: value.contiguous() for name, value in state.items()}, file, metadata={"format": "pt"})
    values = json.loads(config.read_text())
    config.write_text(json.dumps({**values, "quantization_config": dict(said)}))
    return folder


def matrices(state: State) -> list[str]:
    return [name for name in state if name.endswith("proj.weight")]


def as_mxfp4(state: State) -> None:
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, into, out = state.pop(name).shape
        state[f"{name}_blocks"] = drawn(experts, out, into // 32, 16, low=0, high=256)
        state[f"{name}_scales"] = drawn(experts, out, into // 32, low=118, high=126)


def as_fp8(rows: int, columns: int, end: str) -> Callable[[State], None]:
    """Blocks of so many rows and columns; 0 = all of them."""

    def change(state: State) -> None:
        for name in matrices(state):
            height, width = state[name].shape
            shape = -(-height // (rows or height)), -(-width // (columns or width))
            state[name] = torch.randn(height, width).to(torch.float8_e4m3fn)
            state[name + end] = torch.rand(shape) / 8 + 0.02

    return change


def as_int8(state: State) -> None:
    for name in matrices(state):
        module = name.removesuffix("weight")
        height, width = state[name].shape
        state[name] = drawn(height, width, low=-127, high=128, dtype=torch.int8)
        state[f"{module}SCB"] = torch.rand(height) / 2 + 0.1
        state[f"{module}weight_format"] = torch.tensor(0, dtype=torch.uint8)


def as_int8_rows(state: State) -> None:
    for name in matrices(state):
        height, width = state[name].shape
        state[name] = drawn(height, width, low=-127, high=128, dtype=torch.int8)
        state[f"{name}_scale"] = (torch.rand(height, 1) / 500 + 1e-3).bfloat16()
        state[name.removesuffix("weight") + "input_scale"] = torch.ones(1)


def as_four_bit(kind: str, nested: bool) -> Callable[[State], None]:
    def change(state: State) -> None:
        for name in matrices(state):
            height, width = state[name].shape
            n = height * width // 64
            said = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": [height, width]}
            state[f"{name}.absmax"] = torch.rand(n) / 4 + 0.05
            if nested:
                said |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.17}
                state[f"{name}.absmax"] = drawn(n, low=0, high=256)
                state[f"{name}.nested_absmax"] = torch.rand(-(-n // 256)) / 9
                state[f"{name}.nested_quant_map"] = torch.linspace(-1, 1, 256)
            state[name] = drawn(height * width // 2, 1, low=0, high=256)
            state[f"{name}.quant_map"] = torch.linspace(-1, 1, 16)
            text = json.dumps(said).encode()
            state[f"{name}.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text), dtype=torch.uint8)

    return change


COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
KINDS: dict[str, tuple[Case, Mapping[str, object], Callable[[State], None], str]] = {
    "mxfp4": (GPT_OSS, {"quant_method": "mxfp4"}, as_mxfp4, "mxfp4: 4 of"),
    "fp8-blocks": (
        LLAMA,
        {**FP8, "weight_block_size": [8, 16]},
        as_fp8(8, 16, "_scale_inv"),
        "fp8 in blocks of 8 x 16: 14 of",
    ),
    "fp8-experts": (
        MOE,
        {**FP8, "weight_block_size": [8, 16]},
        as_fp8(8, 16, "_scale_inv"),
        "fp8 in blocks of 8 x 16: 32 of",
    ),
    "fp8-tensor": (LLAMA, COMPRESSED, as_fp8(0, 0, "_scale"), r"fp8 \(compressed-tensors, float-quantized\)"),
    "fp8-channel": (
        LLAMA,
        COMPRESSED,
        as_fp8(1, 0, "_scale"),
        r"fp8 \(compressed-tensors, float-quantized\)",
    ),
    "int8-channel": (LLAMA, {**COMPRESSED, "format": "int-quantized"}, as_int8_rows, r"int8 \(compressed-t"),
    "llm-int8": (LLAMA, {"quant_method": "bitsandbytes", "load_in_8bit": True}, as_int8, "int8 .bitsandb"),
    "nf4": (
        LLAMA,
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        as_four_bit("nf4", nested=False),
        "nf4 .bitsandbytes.: 14 of",
    ),
    "fp4-nested": (
        LLAMA,
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        as_four_bit("fp4", nested=True),
        "fp4 .bitsandbytes.: 14 of",
    ),
}
THEIRS: dict[str, object] = {
    "mxfp4": hf.Mxfp4Config(dequantize=True),
    "fp8-blocks": hf.FineGrainedFP8Config(dequantize=True),
    "fp8-experts": hf.FineGrainedFP8Config(dequantize=True),
}


def made(name: str, folder: Path) -> Path:
    case, said, change, _ = KINDS[name]
    return checkpoint(case, folder, said, change)


@pytest.mark.parametrize("name", THEIRS)
def test_logits_equal_hugging_faces_own_dequantised_model(name: str, tmp_path: Path) -> None:
    folder, kind = made(name, tmp_path), KINDS[name][0].model_class
    for dtype, allowed in zip(DTYPES, (1e-4, 0.1, 1e-4), strict=True):
        theirs = kind.from_pretrained(
            folder, dtype=dtype, quantization_config=THEIRS[name], experts_implementation="eager"
        ).to(dtype)  # which leaves what was not quantised as it is stored
        model = HookedTransformer.from_pretrained(folder, dtype=dtype).transformer
        live = HookedTransformer.from_pretrained(theirs, wrapped=False).transformer
        for label, mine in model.named_parameters():
            assert mine.dtype == dtype
            assert torch.equal(mine, live.get_parameter(label)), label
        with torch.no_grad():
            expected = theirs(some_tokens()).logits
        assert expected.std() > 0.1
        assert largest(model(some_tokens()), expected) <= allowed * float(expected.abs().max())


@pytest.mark.parametrize("name", KINDS)
def test_verify_and_records_say_how_weights_were_stored(name: str, tmp_path: Path) -> None:
    model = HookedTransformer.from_pretrained(made(name, tmp_path / "stored"), dtype=torch.float32)
    found, words = model.verify(), KINDS[name][3]
    assert found.passed, f"\n{found}"
    (line,) = [line for line in found.lines if line.claim == "checkpoint as opened"]
    assert re.match(f"weights dequantised at load from {words}", line.note), line.note
    named = "Hugging Face" if name in THEIRS else "Hugging Face on the numbers we read"
    assert f"logits = {named}" in [line.claim for line in found.lines if line.error is not None]
    said = model.transformer.opened
    assert said == (line.note,)
    assert line.note in " ".join(str(model).split())
    assert provenance(model.transformer, "x", seed=None, parameters={})["opened"] == [line.note]
    save(model.transformer, tmp_path / "ours")
    assert HookedTransformer.from_pretrained(tmp_path / "ours").transformer.opened == said


@pytest.mark.parametrize("name", ["mxfp4", "nf4"])
def test_without_a_dtype_the_checkpoints_own_is_kept(name: str, tmp_path: Path) -> None:
    model = HookedTransformer.from_pretrained(made(name, tmp_path)).transformer
    assert {value.dtype for value in model.parameters()} == {torch.bfloat16}


def test_a_wrapped_model_reads_the_same_numbers(tmp_path: Path) -> None:
    folder = made("nf4", tmp_path)
    native = HookedTransformer.from_pretrained(folder, dtype=torch.float32).transformer
    wrapped = HookedTransformer.from_pretrained(folder, dtype=torch.float32, wrapped=True).transformer
    assert wrapped.opened[:-1] == native.opened != ()
    assert largest(wrapped(some_tokens()), native(some_tokens())) <= 1e-5


# --- against slow loops -------------------------------------------------------------------------------------------


def test_mxfp4_by_hand() -> None:
    blocks, scales = drawn(1, 3, 2, 16, low=0, high=256), drawn(1, 3, 2, low=100, high=150)
    found = from_mxfp4(blocks, scales)
    table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    for out in range(3):
        for into in range(64):
            byte = int(blocks[0, out, into // 32, into % 32 // 2])
            code = byte >> 4 if into % 2 else byte & 15
            value = table[code & 7] * (-1 if code & 8 else 1) * 2.0 ** (int(scales[0, out, into // 32]) - 127)
            assert float(found[0, into, out]) == value


@pytest.mark.parametrize("shape", [(1, 1), (7, 1), (3, 3), (7,), ()])
def test_scales_by_hand(shape: tuple[int, ...]) -> None:
    """Blocks of 3 x 4 in a matrix 7 x 10: the last row and the last two columns are cut off."""
    weight, scale = torch.randn(7, 10).to(torch.float8_e4m3fn), torch.rand(shape) + 0.5
    found = from_scaled(weight, scale, (3, 4) if shape == (3, 3) else None)
    for row in range(7):
        for column in range(10):
            at = {(3, 3): (row // 3, column // 4), (7, 1): (row, 0), (7,): (row,), (1, 1): (0, 0), (): ()}
            assert float(found[row, column]) == float(weight[row, column].float() * scale[at[shape]])


def test_scales_of_one_byte_are_powers_of_two() -> None:
    weight, scale = torch.randn(4, 6).to(torch.float8_e4m3fn), drawn(4, 3, low=120, high=130)
    wanted = weight.float() * (2.0 ** (scale.double() - 127)).repeat_interleave(2, 1)
    assert torch.equal(from_scaled(weight, scale).double(), wanted)
    assert torch.equal(from_scaled(weight, scale.view(torch.float8_e8m0fnu)).double(), wanted)


def test_llm_int8_by_hand() -> None:
    weight, largest_of = drawn(3, 5, low=-127, high=128, dtype=torch.int8), torch.rand(3)
    found = from_llm_int8(weight, largest_of)
    wanted = [[int(weight[i, j]) * float(largest_of[i]) / 127 for j in range(5)] for i in range(3)]
    torch.testing.assert_close(found, torch.tensor(wanted))


@pytest.mark.parametrize("nested", [False, True])
def test_four_bits_by_hand(nested: bool) -> None:
    packed, table = drawn(96, 1, low=0, high=256), torch.randn(16)
    scales, tables = torch.rand(12), (torch.randn(256), torch.rand(3))
    said = FourBit((12, 16), 16, (5, 0.3) if nested else None)
    codes = drawn(12, low=0, high=256)
    found = said.matrix(packed, codes, table, *tables) if nested else said.matrix(packed, scales, table)
    for i in range(192):
        byte = int(packed[i // 2])
        scale = float(scales[i // 16])
        if nested:
            scale = float(tables[0][int(codes[i // 16])]) * float(tables[1][i // 16 // 5]) + 0.3
        wanted = float(table[byte & 15 if i % 2 else byte >> 4]) * scale
        assert float(found[i // 16, i % 16]) == pytest.approx(wanted, rel=1e-6)


# --- refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"quant_method": "gptq"}, r"quantization_config \(gptq\), which cannot be read; read are mxfp4"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt e4m3 is required, got 'e5m2'"),
        (
            {"quant_method": "fp8", "weight_block_size": 128},
            "rows and columns of a block are required, got 128",
        ),
        ({"quant_method": "bitsandbytes"}, "load_in_8bit or load_in_4bit is required"),
        ({**COMPRESSED, "format": "pack-quantized"}, "got 'pack-quantized'"),
        ({**COMPRESSED, "transform_config": {"R1": 1}}, r"no transform_config is required, got \{'R1': 1\}"),
        ({**COMPRESSED, "config_groups": {"a": {"weights": {"num_bits": 4}}}}, "symmetric weights of 8 bits"),
    ],
)
def test_formats_that_are_not_read_are_refused_by_name(said: dict[str, object], message: str) -> None:
    values = json.loads(LLAMA.config().to_json_string(use_diff=False))
    with pytest.raises(ValueError, match=message):
        config_of({**values, "quantization_config": said})


def lose_a_scale(state: State) -> None:
    as_fp8(8, 16, "_scale_inv")(state)
    del state["model.layers.1.mlp.up_proj.weight_scale_inv"]


def cut_a_scale(state: State) -> None:
    as_fp8(8, 16, "_scale_inv")(state)
    name = "model.layers.1.mlp.up_proj.weight_scale_inv"
    state[name] = state[name][1:]


def lose_a_matrix(state: State) -> None:
    as_fp8(8, 16, "_scale_inv")(state)
    del state["model.layers.1.mlp.up_proj.weight"]


def store_by_columns(state: State) -> None:
    as_int8(state)
    state["model.layers.1.mlp.up_proj.weight_format"] += 1


def shift_a_row(state: State) -> None:
    as_int8_rows(state)
    state["model.layers.1.mlp.up_proj.weight_zero_point"] = torch.ones(80, 1, dtype=torch.int8)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "fp8-blocks",
            lose_a_scale,
            r"up_proj.weight: a floating point tensor is required, got torch.float8",
        ),
        ("fp8-blocks", cut_a_scale, r"scales \[9, 3\] do not fit a matrix \[80, 48\] in blocks of 8 x 16"),
        ("fp8-blocks", lose_a_matrix, "lacks 'model.layers.1.mlp.up_proj.weight'"),
        ("llm-int8", store_by_columns, r"stored by rows \(0\) are required, got 1"),
        (
            "int8-channel",
            shift_a_row,
            "tensors are not understood, first 'model.layers.1.mlp.up_proj.weight_zero",
        ),
    ],
)
def test_damaged_checkpoints_are_refused_by_the_tensors_name(
    name: str, change: Callable[[State], None], message: str, tmp_path: Path
) -> None:
    case, said, _, _ = KINDS[name]
    with pytest.raises(ValueError, match=message):
        HookedTransformer.from_pretrained(checkpoint(case, tmp_path, said, change))


def test_an_ordinary_checkpoint_says_nothing_of_it(tmp_path: Path) -> None:
    CASES["llama"].model_class(CASES["llama"].config()).save_pretrained(tmp_path)
    model = HookedTransformer.from_pretrained(tmp_path)
    assert model.transformer.opened == ()
    assert "weights as stored" not in [line.claim for line in model.verify().lines]
