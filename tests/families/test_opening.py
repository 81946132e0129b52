"""Checkpoints as people have them, beyond plain folders: several dtypes, other heads, ends of turns, mistakes.

The oracle is transformers' own network of the same folder, or its own generation.
"""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from interp import HookedEncoderDecoder, HookedTransformer
from interp.core.notes import Note, note
from tests.families.oracle import CASES, hf_model, new_hf_model, some_tokens
from tests.families.test_bad_checkpoints import change_config, change_tensors, refused, stored
from tests.families.test_sources import GQA, llama, logits, perturbed, said
from tests.tolerances import assert_close

SMALL: dict[str, object] = {**GQA, "num_labels": 3}


def made(kind: str, **options: object) -> nn.Module:
    """A perturbed network of a class of transformers."""
    torch.manual_seed(0)
    network = getattr(transformers, kind)
    return perturbed(network(network.config_class(**{**SMALL, **options})))


def theirs(folder: Path, **options: object) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


# --- dtypes -------------------------------------------------------------------------------------------------------

STORED: dict[str, tuple[Callable[[str], torch.dtype], str | None]] = {
    "ends wide": (lambda n: torch.float32 if "embed" in n or "lm_head" in n else torch.float16, "float16"),
    "a layer wide": (lambda n: torch.float32 if "layers.0." in n else torch.bfloat16, "bfloat16"),
    "two halves": (lambda n: torch.bfloat16 if "q_proj" in n else torch.float16, "float16"),
    "norms wide": (lambda n: torch.float32 if "norm" in n else torch.bfloat16, "bfloat16"),
    "not said": (lambda n: torch.float32 if "norm" in n else torch.bfloat16, None),
}


@pytest.mark.parametrize("case", STORED)
def test_parameters_of_several_dtypes_become_one_as_in_transformers(case: str, tmp_path: Path) -> None:
    kind, stated = STORED[case]
    llama().save_pretrained(tmp_path)
    change_tensors(tmp_path, lambda state: {name: value.to(kind(name)) for name, value in state.items()})
    change_config(tmp_path, dtype=stated)
    model = HookedTransformer.from_pretrained(tmp_path)
    kept = getattr(torch, stated or "float32")
    assert {p.dtype for p in model.transformer.parameters()} == {kept}
    network = theirs(tmp_path, dtype=kept)
    assert model.transformer(some_tokens()).dtype == kept == network.dtype  # type: ignore[comparison-overlap]
    said(model, rf"stored in several dtypes \(.*\): cast to {stated or 'float32'}")
    assert_close(
        model.transformer.float()(some_tokens()), logits(network.float())
    )  # of the same rounded numbers


def test_a_live_network_of_several_dtypes_loses_no_digit() -> None:
    network = llama()
    for name, parameter in network.named_parameters():
        parameter.data = parameter.data if "embed" in name else parameter.data.half()
    note.cache_clear()
    with pytest.warns(Note, match="not compared with our copy's, since it fails"):
        model = HookedTransformer.from_pretrained(network)
    assert {p.dtype for p in model.transformer.parameters()} == {torch.float32}
    assert_close(model.transformer(some_tokens()), logits(network.float()))


@pytest.mark.parametrize("name", ["deepseek-v3", "glm4-moe"])
def test_what_is_computed_in_float32_in_any_case_stays_as_it_is_stored(name: str, tmp_path: Path) -> None:
    new_hf_model(name).save_pretrained(tmp_path)
    wide = ("gate.weight", "e_score_correction_bias")
    change_tensors(tmp_path, lambda s: {n: v if n.endswith(wide) else v.bfloat16() for n, v in s.items()})
    change_config(tmp_path, dtype="bfloat16")
    model = HookedTransformer.from_pretrained(tmp_path).transformer
    kinds = {
        n.rpartition("mlp.")[2]: p.dtype for n, p in model.named_parameters() if p.dtype == torch.float32
    }
    assert set(kinds) == {"router.weight", "correction"}
    assert not any("several dtypes" in clause for clause in model.opened)
    network = theirs(tmp_path, experts_implementation="eager")
    assert {n: p for n, p in network.named_parameters() if p.dtype == torch.float32}.keys() == {
        n for n, _ in network.named_parameters() if n.endswith("gate.weight")
    }
    assert_close(model.float()(some_tokens()), logits(network.float()))


# --- heads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("head", ["score", None])
@pytest.mark.parametrize("family", ["Gemma2", "SmolLM3", "Llama"])
def test_base_models_and_classifiers_of_any_name_open(
    family: str, head: str | None, live: bool, tmp_path: Path
) -> None:
    """Gemma-2's soft cap of logits goes with them; SmolLM3 has LM in its name, and no head all the same."""
    kind = f"{family}ForSequenceClassification" if head else f"{family}Model"
    network = made(kind, tie_word_embeddings=False)
    network.save_pretrained(tmp_path)
    model = HookedTransformer.from_pretrained(network if live else tmp_path)
    with torch.no_grad():
        base = network.base_model if head else network
        states = base(some_tokens()).last_hidden_state  # type: ignore[operator]
        expected = network.score(states) if head else states  # type: ignore[operator]
    assert_close(model.transformer(some_tokens()), expected)
    said(model, "the head score is read as the unembedding" if head else "ends in its residual stream")


@pytest.mark.parametrize("wrapped", [None, True])
def test_a_classifier_is_not_wrapped_as_a_language_model(wrapped: bool | None, tmp_path: Path) -> None:
    kind = "Llama" if wrapped else "Starcoder2"
    made(f"{kind}ForSequenceClassification", tie_word_embeddings=True).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=rf"{kind}ForCausalLM, as which .* has no place for 1 .* first 'score.weight'"
    ):
        HookedTransformer.from_pretrained(tmp_path, wrapped=wrapped)


def test_a_value_head_beside_a_wrapped_model_is_left_out_and_said(tmp_path: Path) -> None:
    network = made("Starcoder2ForCausalLM")
    network.save_pretrained(tmp_path)
    change_tensors(tmp_path, lambda state: {**state, "v_head.summary.weight": torch.ones(1, 24)})
    model = HookedTransformer.from_pretrained(tmp_path)
    assert torch.equal(model.transformer(some_tokens()), logits(network))
    said(model, "left out, as parts that are not modelled: v_head.summary.weight")


@pytest.mark.parametrize(("name", "layer"), [("deepseek-v3", 61), ("glm4-moe", 46), ("glm4-moe", 92)])
def test_the_predictor_of_a_second_token_is_left_out_as_transformers_does(
    name: str, layer: int, tmp_path: Path
) -> None:
    network = hf_model(name)
    network.save_pretrained(tmp_path)
    extra = {
        f"model.layers.{layer}.eh_proj.weight": torch.ones(3),
        f"model.layers.{layer}.enorm.weight": torch.ones(3),
    }
    change_tensors(tmp_path, lambda state: {**state, **extra})
    model = HookedTransformer.from_pretrained(tmp_path)
    assert_close(model.transformer(some_tokens()), logits(theirs(tmp_path, experts_implementation="eager")))
    assert f"left out, as parts that are not modelled: model.layers.{layer}." in " ".join(
        model.transformer.opened
    )
    change_tensors(tmp_path, lambda state: {**state, "model.layers.7.enorm.weight": torch.ones(3)})
    refused(tmp_path, r"1 tensors are not understood, first 'model\.layers\.7\.enorm\.weight'")


def test_a_bert_whose_class_ends_in_lmhead_has_its_head(tmp_path: Path) -> None:
    config = CASES["bert"].config()
    network = perturbed(transformers.BertLMHeadModel(config))
    network.save_pretrained(tmp_path)
    model = HookedTransformer.from_pretrained(tmp_path)
    assert_close(model.transformer(some_tokens()), logits(network))


# --- where generation ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said_in", ["generation_config", "config", "live"])
def test_generation_ends_where_transformers_does(said_in: str, tmp_path: Path) -> None:
    """At any id of a list, such as the end of a turn."""
    network = llama()
    prompt = torch.tensor([[5, 6, 7]])
    free = (
        HookedTransformer.from_pretrained(network).generate(prompt, 10, stop_at_eos=False).tokens[0].tolist()
    )
    stop = free[5]
    if said_in == "config":
        network.config.eos_token_id = [2, stop]
        network.generation_config = None
        network.config.save_pretrained(tmp_path)
        save_file(network.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    else:
        network.generation_config = transformers.GenerationConfig(eos_token_id=[2, stop])
        network.save_pretrained(tmp_path)
    other = theirs(tmp_path)
    expected = other.generate(prompt, max_new_tokens=10, do_sample=False)  # type: ignore[operator]
    assert expected[0].tolist() == free[: free.index(stop, 3) + 1]
    model = HookedTransformer.from_pretrained(other if said_in == "live" else tmp_path)
    assert model.generate(prompt, 10).tokens.tolist() == expected.tolist()
    assert model.generate(prompt, 10, stop_at_eos=False).tokens[0].tolist() == free
    assert len(free) == 13


# --- names and files ------------------------------------------------------------------------------------------------

INSIDE: dict[str, Callable[[str], str]] = {
    "compiled layers": lambda n: n.replace("layers.0.", "layers.0._orig_mod."),
    "checkpointed": lambda n: n.replace("mlp.", "_checkpoint_wrapped_module.mlp."),
    "fsdp": lambda n: f"_fsdp_wrapped_module.{n.replace('layers.1.', 'layers.1._fsdp_wrapped_module.')}",
}


@pytest.mark.parametrize("inside", INSIDE)
def test_wrappers_inside_names_are_taken_off(inside: str, tmp_path: Path) -> None:
    network = llama()
    network.config.save_pretrained(tmp_path)
    torch.save({INSIDE[inside](n): v for n, v in network.state_dict().items()}, tmp_path / "step.pt")
    model = HookedTransformer.from_pretrained(tmp_path)
    assert_close(model.transformer(some_tokens()), logits(network))


def test_a_tensor_beside_a_prefixed_model_is_the_one_that_is_named(tmp_path: Path) -> None:
    network = llama()
    network.config.save_pretrained(tmp_path)
    state = {f"model.{n}": v for n, v in network.state_dict().items()}
    torch.save({"state_dict": {**state, "criterion.weight": torch.ones(3)}}, tmp_path / "last.ckpt")
    refused(tmp_path, r"1 tensors are not understood, first 'criterion\.weight'")


def test_files_of_a_run_are_no_weights(tmp_path: Path) -> None:
    network = llama()
    network.config.save_pretrained(tmp_path)
    torch.save(network.state_dict(), tmp_path / "model.pt")
    for name in ("scheduler.bin", "optimizer_1.bin", "random_states_0.bin", "rng_state_3.pth"):
        torch.save({"x": torch.ones(2)}, tmp_path / name)
    model = HookedTransformer.from_pretrained(tmp_path)
    assert_close(model.transformer(some_tokens()), logits(network))


@pytest.mark.parametrize("name", ["step.pt", "weights.safetensors"])
def test_a_network_that_is_wrapped_opens_from_weights_of_any_name(name: str, tmp_path: Path) -> None:
    network = made("Starcoder2ForCausalLM")
    network.config.save_pretrained(tmp_path)
    state = {n: v.clone() for n, v in network.state_dict().items()}
    torch.save(state, tmp_path / name) if name.endswith("pt") else save_file(state, tmp_path / name)
    model = HookedTransformer.from_pretrained(tmp_path)
    assert torch.equal(model.transformer(some_tokens()), logits(network))
    short = {n: v for n, v in state.items() if n != "model.norm.weight"}
    torch.save(short, tmp_path / name) if name.endswith("pt") else save_file(short, tmp_path / name)
    refused(tmp_path, r"transformers found 1 missing keys, first model\.norm\.weight")


def test_a_path_may_begin_with_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    llama().save_pretrained(tmp_path / "mine")
    model = HookedTransformer.from_pretrained("~/mine")
    assert_close(model.transformer(some_tokens()), logits(llama()))


# --- mistakes -----------------------------------------------------------------------------------------------------


def pickled(folder: Path, saved: Mapping[str, object]) -> Path:
    llama().config.save_pretrained(folder)
    torch.save({"model": dict(llama().state_dict()), **saved}, folder / "m.pt")
    return folder


def pointer(folder: Path, name: str) -> Path:
    llama().config.save_pretrained(folder)
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    return folder


def shards(folder: Path) -> Path:
    llama().save_pretrained(folder, max_shard_size="10KB")
    return min(folder.glob("model-*"))


def step(folder: Path) -> Path:
    llama().save_pretrained(folder / "checkpoint-500")
    return folder


MISTAKES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "pointer": (lambda f: pointer(f, "model.safetensors"), r"\.safetensors is a pointer of Git LFS .*git lfs pull"),
    "pointer, bin": (lambda f: pointer(f, "pytorch_model.bin"), r"pytorch_model\.bin is a pointer of Git LFS"),
    "pointer, gguf": (lambda f: pointer(f, "a.gguf") / "a.gguf", r"a\.gguf is a pointer of Git LFS"),
    "options": (lambda f: pickled(f, {"args": argparse.Namespace(a=1)}),
                r"nothing in it was run: it holds argparse\.Namespace beside tensors; .* torch\.save"),
    "numpy": (lambda f: pickled(f, {"loss": np.float64(1)}), r"it holds numpy\.[\w.]+ beside tensors"),
    "config": (lambda f: stored(f) / "config.json", r"config\.json holds no weights; give its folder"),
    "shard": (shards, r"is one of \d+ parts of the weights; give its folder"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_what_to_do(mistake: str, tmp_path: Path) -> None:
    make, message = MISTAKES[mistake]
    refused(make(tmp_path), message)


def test_a_folder_of_training_checkpoints_names_them(tmp_path: Path) -> None:
    refused(step(tmp_path), "give the path of one of its checkpoints, checkpoint-500", FileNotFoundError)


def test_an_empty_name_is_no_model() -> None:
    with pytest.raises(ValueError, match="name or the path of a model is required, got an empty text"):
        HookedTransformer.from_pretrained("")


@pytest.mark.parametrize("live", [True, False])
def test_an_encoder_decoder_is_sent_to_its_class(live: bool, tmp_path: Path) -> None:
    network = hf_model("t5")
    network.save_pretrained(tmp_path)
    refused(network if live else tmp_path, r"interp\.HookedEncoderDecoder\.from_pretrained opens it")
    HookedEncoderDecoder.from_pretrained(tmp_path)


@pytest.mark.parametrize("kind", ["ntk", "su"])
def test_rotary_positions_that_transformers_has_not_either_are_named(kind: str, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    del values["rope_parameters"]
    (tmp_path / "config.json").write_text(
        json.dumps(values | {"rope_scaling": {"type": kind, "factor": 2.0}})
    )
    refused(tmp_path, rf"transformers fails to open it .*'{kind}'.*rope_type='{kind}' is not supported")
