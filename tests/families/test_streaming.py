"""How numbers get to their place: once, in the asked dtype, with layouts, experts, duplicates and devices."""

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from einops import rearrange
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from interp import families
from interp.families import convert, fill as filling, native
from interp.families.convert import to_model
from interp.families.fill import ParameterPlan, check_dtype, fill, plan, require_finite
from interp.families.llama import FAMILY
from interp.families.spec import TensorRule, same, transposed
from interp.families.stored import CHUNK, LiveTensors, Tensors
from interp.model import ModelConfig, Transformer
from tests.configs import CONFIGS
from tests.families.memory import taken
from tests.families.oracle import hf_config, hf_model, some_tokens
from tests.forking import forked

CONFIG = CONFIGS["gpt2"]
CPU = torch.device("cpu")


def made(
    rule: TensorRule, shape: tuple[int, ...], dtype: torch.dtype | None = None, **tensors: Tensor
) -> Tensor:
    source = LiveTensors(tensors)
    return fill(plan(rule, torch.Size(shape), rule.theirs, source, CONFIG, dtype, CPU), source)


# --- rules --------------------------------------------------------------------------------------------------------


def test_parts_are_joined_along_the_first_axis_and_transposed_before() -> None:
    a, b = torch.randn(5, 3), torch.randn(5, 4)
    assert torch.equal(made(TensorRule("w", ("a", "b"), transposed), (7, 5), a=a, b=b), torch.cat([a.T, b.T]))


def test_a_layout_may_be_a_view_with_more_axes() -> None:
    """NeoX stores q, k, v head by head; ours are all queries, all keys, all values."""

    def by_kind(tensor: Tensor, config: ModelConfig) -> Tensor:
        return rearrange(tensor, "(h kind e) ... -> kind h e ...", h=4, kind=3)

    weight, bias = torch.randn(24, 5), torch.randn(24)
    expected = rearrange(weight, "(h kind e) d -> (kind h e) d", h=4, kind=3)
    assert torch.equal(made(TensorRule("w", ("a",), by_kind), (24, 5), a=weight), expected)
    expected = rearrange(bias, "(h kind e) -> (kind h e)", h=4, kind=3)
    assert torch.equal(made(TensorRule("w", ("a",), by_kind), (24,), a=bias), expected)


def test_experts_stored_one_by_one_fill_a_stack() -> None:
    parts = {name: torch.randn(2, 5) for name in ("a", "b", "c", "d", "e", "f")}
    expected = rearrange(torch.stack(list(parts.values())), "(x two) r d -> x (two r) d", two=2)
    assert torch.equal(made(TensorRule("w", tuple(parts)), (3, 4, 5), **parts), expected)


@pytest.mark.parametrize("shape", [(3, 5), (5, 3, 1), (15,), (1, 5, 3)])
def test_the_same_number_of_elements_is_not_enough(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"w requires shape \[5, 3\], a gives"):
        made(TensorRule("w", ("a",)), (5, 3), a=torch.randn(shape))


def test_parts_larger_than_a_chunk_arrive_whole() -> None:
    rows = CHUNK // 4 // 100 + 7
    a, b = torch.randn(rows, 100), torch.randn(3 * rows, 100)
    assert torch.equal(made(TensorRule("w", ("a", "b")), (4 * rows, 100), a=a, b=b), torch.cat([a, b]))


def test_parts_of_two_dtypes_get_the_wider_one() -> None:
    a, b = torch.randn(2, 3), torch.randn(2, 3).bfloat16()
    assert made(TensorRule("w", ("a", "b")), (4, 3), a=a, b=b).dtype == torch.float32
    assert made(TensorRule("w", ("a", "b")), (4, 3), torch.float16, a=a, b=b).dtype == torch.float16


def changed(names: dict[str, str], /, **fields: object) -> Transformer:
    """A Llama whose tensors were renamed, read by a family with other fields."""
    state = {names.get(k, k): v for k, v in hf_model("llama-tied").state_dict().items()}
    family = replace(FAMILY, **fields)
    _, config = families.config_of(hf_config("llama-tied").to_dict())
    model = to_model(family, config, LiveTensors(state), dtype=None, devices=(CPU,))
    assert isinstance(model, Transformer)
    return model


def same_logits(model: Transformer) -> bool:
    expected = families.from_hf_model(hf_model("llama-tied"))(some_tokens())
    return torch.equal(model(some_tokens()), expected)


def test_old_names_are_renamed_and_unused_parts_left_out() -> None:
    old = {"model.norm.weight": "model.norm.gamma"}
    assert same_logits(changed(old, rename=lambda name: name.replace("gamma", "weight")))
    with pytest.raises(ValueError, match=r"not understood, first 'model.pooler'"):
        changed({"lm_head.weight": "model.pooler"})
    assert same_logits(changed({"lm_head.weight": "model.pooler"}, unused=(r"model\.pooler",)))


def test_an_alternative_rule_serves_where_the_first_tensor_is_missing() -> None:
    def rules(config: ModelConfig) -> tuple[TensorRule, ...]:
        first, *rest = FAMILY.rules(config)
        return (TensorRule(first.ours, ("model.fused",), otherwise=first), *rest)

    assert same_logits(changed({}, rules=rules))
    assert same_logits(changed({"model.embed_tokens.weight": "model.fused"}, rules=rules, unused=("lm_head.weight",),
                               duplicates=lambda config: {}))  # fmt: skip


def test_a_tied_matrix_that_is_stored_under_its_second_name_only_is_found() -> None:
    model = families.from_hf_model(hf_model("llama-tied"))
    state = {k: v for k, v in hf_model("llama-tied").state_dict().items() if k != "model.embed_tokens.weight"}
    loaded = to_model(FAMILY, model.config, LiveTensors(state), dtype=None, devices=(CPU,))
    assert isinstance(loaded, Transformer) and loaded.unembed is not None
    assert loaded.unembed.weight is loaded.embed.weight
    assert same_logits(loaded)


# --- dtype, device, finiteness ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.complex64])
def test_a_dtype_that_no_device_has_is_refused_before_reading(dtype: torch.dtype, tmp_path: Path) -> None:
    hf_model("llama").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    with pytest.raises(ValueError, match=f"dtype must be a torch dtype or None, got {dtype}"):
        families.from_folder(tmp_path, dtype=dtype)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a device that is not there")
def test_a_device_that_is_not_there_is_named_with_the_dtype() -> None:
    with pytest.raises(ValueError, match="float16 on cuda:0 is not possible here"):
        check_dtype(torch.float16, torch.device("cuda:0"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_sum_that_overflows_is_not_taken_for_an_infinite_number(dtype: torch.dtype) -> None:
    largest = torch.full((100,), torch.finfo(dtype).max, dtype=dtype)
    assert not largest.sum().isfinite()
    require_finite("w", [largest])
    largest[17] = -torch.inf
    with pytest.raises(ValueError, match="w: the checkpoint holds NaN or infinite"):
        require_finite("w", [largest])


@pytest.mark.parametrize("n", [1, 2, 3])
def test_layers_are_spread_in_consecutive_runs_and_the_rest_on_the_first(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No such devices are needed: what would be allocated is noted, and made on the CPU."""
    devices, went = [torch.device("cuda", i) for i in range(n)], {}

    def note(plan: ParameterPlan, tensors: Tensors) -> Tensor:
        went[plan.ours] = plan.device
        return torch.empty(plan.shape)

    monkeypatch.setattr(convert, "fill", note)
    monkeypatch.setattr(filling, "check_dtype", lambda dtype, device: None)
    config = replace(CONFIGS["llama-gqa"], n_layers=4)
    state = LiveTensors(Transformer(config).state_dict())
    model = convert.to_model(native.FAMILY, config, state, dtype=None, devices=devices)
    assert isinstance(model, Transformer)
    assert went.keys() == dict(model.named_parameters()).keys()
    for name, device in went.items():
        layer = int(name.split(".")[1]) if name.startswith("blocks.") else 0
        assert device == devices[layer * n // 4], name
    assert model.devices == (tuple(devices[i * n // 4] for i in range(4)) if n > 1 else None)


def test_no_devices_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at least one device is required, got devices=\[\]"):
        families.from_hf_model(hf_model("llama"), devices=[])


# --- files --------------------------------------------------------------------------------------------------------


@pytest.fixture
def kept_views(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters of the tiny models count as large, so they stay views of their file."""
    monkeypatch.setattr(filling, "MAPPED_FROM", 1)


@pytest.mark.usefixtures("kept_views")
@pytest.mark.parametrize("name", ["gpt2", "llama", "llama-tied"])
@pytest.mark.parametrize("shard", ["10KB", "1GB"])
def test_views_of_files_hold_what_copies_hold(name: str, shard: str, tmp_path: Path) -> None:
    hf_model(name).save_pretrained(tmp_path, max_shard_size=shard)
    model, live = families.from_folder(tmp_path), families.from_hf_model(hf_model(name))
    pairs = zip(model.parameters(), live.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    torch.testing.assert_close(model(some_tokens()), live(some_tokens()), rtol=0, atol=1e-5)


@pytest.mark.usefixtures("kept_views")
def test_editing_views_of_a_file_changes_neither_it_nor_another_model(tmp_path: Path) -> None:
    hf_model("llama-tied").save_pretrained(tmp_path)
    content = (tmp_path / "model.safetensors").read_bytes()
    model, other = families.from_folder(tmp_path), families.from_folder(tmp_path)
    before = [p.clone() for p in other.parameters()]
    for parameter in model.parameters():
        parameter.fill_(7.0)
    assert (tmp_path / "model.safetensors").read_bytes() == content
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), before, strict=True))


@pytest.mark.usefixtures("kept_views")
@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_deleted_or_replaced_file_stays_what_it_was_to_a_loaded_model(how: str, tmp_path: Path) -> None:
    hf_model("llama-tied").save_pretrained(tmp_path)
    model, path = families.from_folder(tmp_path), tmp_path / "model.safetensors"
    before = [p.clone() for p in model.parameters()]
    if how == "replaced":
        zeros = {k: torch.zeros_like(v) for k, v in load_file(path).items()}
        save_file(zeros, tmp_path / "new", metadata={"format": "pt"})
        (tmp_path / "new").replace(path)
    else:
        path.unlink()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("how", ["one", "old", "shards"])
def test_pickled_weights_give_the_same_model(how: str, tmp_path: Path) -> None:
    hf_model("llama").save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    half = len(state) // 2
    parts = (
        [dict(list(state.items())[:half]), dict(list(state.items())[half:])] if how == "shards" else [state]
    )
    table: dict[str, str] = {}
    for i, part in enumerate(parts):
        file = f"pytorch_model-{i}.bin" if how == "shards" else "pytorch_model.bin"
        torch.save(part, tmp_path / file, _use_new_zipfile_serialization=how != "old")
        table |= dict.fromkeys(part, file)
    if how == "shards":
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": table}))
    torch.save({"lr": 0.1}, tmp_path / "training_args.bin")  # no weights, and not looked at
    model, live = families.from_folder(tmp_path), families.from_hf_model(hf_model("llama"))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), live.parameters(), strict=True))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[torch.dtype], Path]:
    """A model of 60 million parameters in several files, written once for each dtype that is asked for."""
    config = LlamaConfig(
        num_hidden_layers=8, hidden_size=768, intermediate_size=2048, num_attention_heads=12, num_key_value_heads=4,
        vocab_size=8000, max_position_embeddings=64,
    )  # fmt: skip

    @functools.cache
    def written(dtype: torch.dtype) -> Path:
        folder = tmp_path_factory.mktemp("big")
        LlamaForCausalLM(config).to(dtype).save_pretrained(folder, max_shard_size="60MB")
        return folder

    return written


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads /proc")
@pytest.mark.parametrize(
    ("stored", "asked"), [("float32", "float32"), ("bfloat16", "float32"), ("float32", "bfloat16")]
)
def test_loading_takes_at_most_1_15_times_the_model(
    stored: str, asked: str, checkpoint: Callable[[torch.dtype], Path], tmp_path: Path
) -> None:
    """Pages of the file included, which is more than the claim says."""
    hf_model("llama").save_pretrained(tmp_path)
    folder = checkpoint(getattr(torch, stored))
    least = min(forked(taken, tmp_path, folder, getattr(torch, asked)) for _ in range(3))
    assert 0.5 < least <= 1.15


def test_same_is_the_default_layout() -> None:
    assert TensorRule("a", ("b",)).layout is same
