"""Where a model may come from: folder, file, shards, a live model, old layouts, our own format."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, GPT2Model

import interp
from interp import HookedTransformer, families
from interp.families import fill
from interp.model import Transformer
from tests.configs import CONFIGS, build, some_tokens as our_tokens
from tests.families.oracle import D_VOCAB, hf_config, hf_logits, hf_model, new_hf_model, some_tokens
from tests.tiny import gpt2_tokenizer

SOME = pytest.mark.parametrize("name", ["gpt2", "gpt2-untied", "llama-attention-bias", "llama-tied"])


def live(name: str) -> Transformer:
    return HookedTransformer.from_pretrained(hf_model(name)).transformer


def loaded(folder: Path) -> Transformer:
    return HookedTransformer.from_pretrained(folder).transformer


def same(a: Transformer, b: Transformer) -> bool:
    assert a.config == b.config
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(v, theirs[k]) for k, v in ours.items())


def rewrite(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def set_config(folder: Path, *, drop: tuple[str, ...] = (), **values: object) -> None:
    path = folder / "config.json"
    old = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in old.items() if k not in drop} | values))


@SOME
@pytest.mark.parametrize("how", ["folder", "str", "file", "shards"])
def test_a_saved_model_loads_as_the_live_one(name: str, how: str, tmp_path: Path) -> None:
    hf_model(name).save_pretrained(tmp_path, max_shard_size="10KB" if how == "shards" else "1GB")
    assert (len(list(tmp_path.glob("*.safetensors"))) > 3) == (how == "shards")
    source = {"str": str(tmp_path), "file": tmp_path / "model.safetensors"}.get(how, tmp_path)
    assert same(HookedTransformer.from_pretrained(source).transformer, live(name))


@SOME
def test_loaded_models_are_frozen_and_in_eval_mode(name: str) -> None:
    model = live(name)
    assert not model.training
    assert not any(p.requires_grad or p.is_meta for p in model.parameters())


def test_the_dtype_is_the_checkpoints_unless_another_is_asked_for(tmp_path: Path) -> None:
    new_hf_model("gpt2").bfloat16().save_pretrained(tmp_path)
    assert {p.dtype for p in loaded(tmp_path).parameters()} == {torch.bfloat16}
    cast = HookedTransformer.from_pretrained(tmp_path, dtype=torch.float32).transformer
    assert {p.dtype for p in cast.parameters()} == {torch.float32}
    assert torch.equal(cast.embed.weight.bfloat16(), loaded(tmp_path).embed.weight)


def test_weights_that_a_dtype_cannot_represent_are_refused(tmp_path: Path) -> None:
    theirs = new_hf_model("gpt2")
    with torch.no_grad():
        theirs.transformer.wte.weight[3, 5] = 7e4
    theirs.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"wte.weight: numbers up to 65504 fit float16, got 70000"):
        HookedTransformer.from_pretrained(tmp_path, dtype=torch.float16)
    wide = HookedTransformer.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="numbers up to 65504 fit float16"):
        wide.to(torch.float16)
    assert wide.transformer.dtype == torch.bfloat16, "nothing was cast"


def test_a_live_model_is_not_aliased() -> None:
    for name in ("gpt2", "llama-mlp-bias"):
        theirs = new_hf_model(name)
        model = HookedTransformer.from_pretrained(theirs).transformer
        before = model(some_tokens())
        expected = hf_logits(theirs, some_tokens())
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.zero_()
        assert torch.equal(model(some_tokens()), before)
        fresh = new_hf_model(name)
        model = HookedTransformer.from_pretrained(fresh).transformer
        for parameter in model.parameters():
            parameter.zero_()
        assert torch.equal(hf_logits(fresh, some_tokens()), expected)


def test_a_loaded_file_is_not_aliased(tmp_path: Path) -> None:
    """Safetensors are memory-mapped; writing the file again must not reach a model made from it."""
    hf_model("gpt2").save_pretrained(tmp_path)
    model = loaded(tmp_path)
    path = tmp_path / "model.safetensors"
    zeros = {k: torch.zeros_like(v) for k, v in load_file(path).items()}
    with path.open("r+b") as handle:  # in place: the same inode that was mapped
        handle.write(_bytes(zeros, tmp_path))
    assert float(load_file(path)["transformer.wte.weight"].abs().max()) == 0
    assert same(model, live("gpt2"))


@pytest.mark.parametrize("how", ["overwritten", "cut", "replaced", "deleted", "moved to other memory"])
def test_large_file_overwritten_in_place_is_noticed_before_the_next_number(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such parameters are views of the file; a threshold of 0 makes all of them so."""
    monkeypatch.setattr(fill, "MAPPED_FROM", 0)
    hf_model("llama").save_pretrained(tmp_path)
    model, path = loaded(tmp_path), tmp_path / "model.safetensors"
    assert [file.path for file in model.files] == [path.resolve()] and len(model.files[0].places) > 5
    expected = model(some_tokens())
    size, content = path.stat().st_size, path.read_bytes()
    if how == "moved to other memory":
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    if how == "replaced":
        (tmp_path / "new").write_bytes(bytes(size))
        (tmp_path / "new").replace(path)
    elif how == "deleted":
        path.unlink()
    else:
        with path.open("r+b") as handle:
            handle.truncate(size if how != "cut" else 100)
            handle.write(content[:8] + bytes(92))
        os.utime(path, ns=(0, 0))  # whatever the clock's steps are
    if how in ("overwritten", "cut"):
        for ask in (lambda: model(some_tokens()), lambda: interp.composition(model)):
            with pytest.raises(
                ValueError, match=r"model\.safetensors was overwritten in place after the model was"
            ):
                ask()
    else:
        assert torch.equal(model(some_tokens()), expected)


def _bytes(tensors: dict[str, Tensor], folder: Path) -> bytes:
    other = folder / "other"
    save_file(tensors, other, metadata={"format": "pt"})
    content = other.read_bytes()
    other.unlink()
    return content


# --- older and barer layouts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["live", "folder"])
def test_a_base_model_without_the_prefix_and_the_head_is_understood(how: str, tmp_path: Path) -> None:
    whole = hf_model("gpt2")
    assert isinstance(whole.transformer, GPT2Model)
    if how == "folder":
        whole.transformer.save_pretrained(tmp_path)
        assert not any(k.startswith("transformer.") for k in load_file(tmp_path / "model.safetensors"))
    source = tmp_path if how == "folder" else whole.transformer
    assert same(HookedTransformer.from_pretrained(source).transformer, live("gpt2"))


@pytest.mark.parametrize(
    ("name", "buffers"),
    [
        ("gpt2", {"transformer.h.{}.attn.bias": torch.ones(1, 1, 64, 64).tril().bool()}),
        ("gpt2", {"transformer.h.{}.attn.bias": torch.ones(9), "transformer.h.{}.attn.masked_bias": torch.ones(())}),
        ("llama", {"model.layers.{}.self_attn.rotary_emb.inv_freq": torch.ones(5)}),
        ("gpt-neo", {"transformer.h.{}.attn.attention.bias": torch.ones(9),
                     "transformer.h.{}.attn.attention.masked_bias": torch.ones(())}),
        ("gptj", {"transformer.h.{}.attn.bias": torch.ones(9), "transformer.h.{}.attn.masked_bias": torch.ones(())}),
        ("gpt-neox", {"gpt_neox.layers.{}.attention.bias": torch.ones(9),
                      "gpt_neox.layers.{}.attention.masked_bias": torch.ones(()),
                      "gpt_neox.layers.{}.attention.rotary_emb.inv_freq": torch.ones(2)}),
    ],
)  # fmt: skip
def test_buffers_in_old_checkpoints_are_ignored(
    name: str, buffers: dict[str, Tensor], tmp_path: Path
) -> None:
    hf_model(name).save_pretrained(tmp_path)
    extra = {key.format(layer): v.clone() for key, v in buffers.items() for layer in range(2)}
    rewrite(tmp_path, load_file(tmp_path / "model.safetensors") | extra)
    assert same(loaded(tmp_path), live(name))


def test_a_stored_tied_unembedding_that_equals_the_embedding_is_understood(tmp_path: Path) -> None:
    hf_model("gpt2").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    rewrite(tmp_path, tensors | {"lm_head.weight": tensors["transformer.wte.weight"].clone()})
    model = loaded(tmp_path)
    assert same(model, live("gpt2"))
    assert model.unembed.weight is model.embed.weight


def test_an_old_gpt2_config_is_understood(tmp_path: Path) -> None:
    """The keys of the configs of 2019, which nobody writes any more."""
    hf_model("gpt2").save_pretrained(tmp_path)
    kept = {k: v for k, v in json.loads((tmp_path / "config.json").read_text()).items() if k in OLD_GPT2}
    old = {"n_ctx": 64, "architectures": ["GPT2LMHeadModel"], "summary_type": "cls_index", "resid_pdrop": 0.1,
           "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(kept | old))
    assert same(loaded(tmp_path), live("gpt2"))


OLD_GPT2 = ("model_type", "vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "layer_norm_epsilon")


@pytest.mark.parametrize(
    ("name", "rope_scaling"),
    [
        ("llama", None),
        ("llama-linear-rope", {"type": "linear", "factor": 4.0}),
        ("llama-linear-rope", {"rope_type": "linear", "factor": 4.0}),
        ("llama-llama3-rope", {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                               "original_max_position_embeddings": 64}),
    ],
)  # fmt: skip
def test_rope_settings_of_before_transformers_5_are_understood(
    name: str, rope_scaling: dict[str, object] | None, tmp_path: Path
) -> None:
    """Oracle: Hugging Face reading the same old config."""
    hf_model(name).save_pretrained(tmp_path)
    theta = hf_model(name).config.rope_parameters["rope_theta"]
    set_config(tmp_path, drop=("rope_parameters",), rope_theta=theta, rope_scaling=rope_scaling)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    expected = hf_logits(theirs, some_tokens())
    torch.testing.assert_close(expected, hf_logits(hf_model(name), some_tokens()), rtol=0, atol=1e-5)
    torch.testing.assert_close(loaded(tmp_path)(some_tokens()), expected, rtol=0, atol=1e-4)


def test_of_a_rope_theta_written_twice_the_one_in_the_table_counts(tmp_path: Path) -> None:
    hf_model("llama-linear-rope").save_pretrained(tmp_path)
    set_config(tmp_path, rope_theta=1000.0)
    assert same(loaded(tmp_path), live("llama-linear-rope"))
    set_config(tmp_path, rope_theta=2000.0)
    assert same(loaded(tmp_path), live("llama-linear-rope"))


# --- our own format -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"), [*((n, torch.float32) for n in CONFIGS), ("gpt2", torch.bfloat16)]
)
def test_our_own_format_round_trips(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = build(name, dtype)
    families.save(model, tmp_path / "new" / "folder")
    again = loaded(tmp_path / "new" / "folder")
    assert same(again, model)
    assert again.dtype == dtype
    assert torch.equal(again(our_tokens()), model(our_tokens()))


def test_a_tied_model_is_stored_once_and_stays_tied(tmp_path: Path) -> None:
    families.save(build("tied"), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert "embed.weight" in stored
    assert "unembed.weight" not in stored
    again = loaded(tmp_path)
    assert again.unembed.weight is again.embed.weight


def test_saving_over_an_older_model_leaves_only_the_new_one(tmp_path: Path) -> None:
    families.save(build("gpt2"), tmp_path)
    families.save(build("llama-gqa"), tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"model.safetensors", "config.json"}
    assert same(loaded(tmp_path), build("llama-gqa"))


# --- the tokenizer that comes with it -----------------------------------------------------------------------------


def store_wide(folder: Path, d_vocab: int) -> None:
    """A GPT-2 with room for the tiny tokenizer's 328 ids."""
    config = hf_config("gpt2")
    config.vocab_size = d_vocab
    GPT2LMHeadModel(config).save_pretrained(folder)


@pytest.mark.parametrize("d_vocab", [400, 328, 327])
def test_a_tokenizer_may_have_fewer_ids_than_the_model_or_more(d_vocab: int, tmp_path: Path) -> None:
    store_wide(tmp_path, d_vocab)
    gpt2_tokenizer().save_pretrained(tmp_path)
    model = HookedTransformer.from_pretrained(tmp_path)
    assert model.text.eos_id == 0
    if d_vocab == 327:
        with pytest.raises(ValueError, match=r"token ids must be in \[0, 326\], got 327"):
            model.to_tokens(model.text.tokenizer.piece(327))


def test_a_folders_tokenizer_is_found_and_one_given_wins(tmp_path: Path) -> None:
    store_wide(tmp_path, 400)
    assert HookedTransformer.from_pretrained(tmp_path).text.bos_id is None
    gpt2_tokenizer().save_pretrained(tmp_path)
    model = HookedTransformer.from_pretrained(tmp_path)
    assert model.text.tokenizer.encode("The cat") == gpt2_tokenizer().encode("The cat")
    other = gpt2_tokenizer()
    other.add_special_tokens({"bos_token": "<s>"})
    given = HookedTransformer.from_pretrained(tmp_path, tokenizer=other)
    assert given.text.bos_id == other.bos_token_id != model.text.bos_id


def test_a_tokenizer_is_given_to_a_live_model() -> None:
    model = HookedTransformer.from_pretrained(hf_model("gpt2"), tokenizer=gpt2_tokenizer())
    assert model.text.tokenizer.decode([0]) == gpt2_tokenizer().decode([0])
    assert model.to_str_tokens(torch.tensor([0, 34])) == [gpt2_tokenizer().decode([i]) for i in (0, 34)]


def test_the_vocabulary_of_the_oracle_is_no_multiple_of_8() -> None:
    assert D_VOCAB % 8
