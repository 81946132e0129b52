"""T5, BART and Marian against Hugging Face: both stacks, cross-attention, padding, losses, decoding and edits."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, T5ForConditionalGeneration

from interp.data.batch import Batch
from interp.families.load import any_from_folder, any_from_hf_model, config_of
from interp.model import Edit, EncoderDecoder, KVCache, Read, Tap, mean_next_token_loss
from interp.passes.generate import decode
from tests.families.cases_others import CASES, ENCODER_DECODERS
from tests.families.oracle import hf_model, new_hf_model, some_tokens, widened
from tests.loops import over
from tests.tolerances import assert_close

EVERY = pytest.mark.parametrize("name", ENCODER_DECODERS)
SOME = pytest.mark.parametrize("name", ["t5", "t5-v1.1", "bart", "marian", "marian-two-vocabularies"])
ONE_EACH = pytest.mark.parametrize("name", ["t5", "bart", "marian"])
SOURCE = some_tokens()
TARGET = some_tokens(n=13, seed=1) % 41
"""Within the smaller of two vocabularies."""
KEEP = torch.arange(20) < torch.tensor([[20], [13], [6]])


@functools.cache
def ours(name: str, dtype: torch.dtype = torch.float64) -> EncoderDecoder:
    return loaded(hf_model(name, dtype))


def loaded(model: PreTrainedModel) -> EncoderDecoder:
    found = any_from_hf_model(model)
    assert isinstance(found, EncoderDecoder)
    return found


def stored(folder: Path) -> EncoderDecoder:
    found = any_from_folder(folder)
    assert isinstance(found, EncoderDecoder)
    return found


@torch.no_grad()
def expected(name: str, dtype: torch.dtype = torch.float64, **inputs: Tensor) -> Tensor:
    """The oracle's logits."""
    given = {"input_ids": SOURCE, "decoder_input_ids": TARGET, **inputs}
    return hf_model(name, dtype)(**given).logits


# --- numbers ------------------------------------------------------------------------------------------------------


@EVERY
def test_logits_equal_hugging_faces_in_float32(name: str) -> None:
    """As near to the exact logits as theirs are, however large: T5 scales no scores, and 1.1 no logits."""
    exact, theirs = expected(name), expected(name, torch.float32)
    assert theirs.std() > 0.3
    rounding = (theirs - exact).abs().max()
    assert (ours(name, torch.float32)(SOURCE, TARGET) - exact).abs().max() <= 4 * rounding


@EVERY
def test_logits_equal_hugging_faces_in_float64(name: str) -> None:
    difference = (ours(name)(SOURCE, TARGET) - expected(name)).abs().max()
    assert float(difference) <= 1e-9


@EVERY
def test_states_and_patterns_of_both_stacks_equal_hugging_faces(name: str) -> None:
    with torch.no_grad():
        out = hf_model(name, torch.float64)(
            input_ids=SOURCE, decoder_input_ids=TARGET, output_attentions=True, output_hidden_states=True
        )
    last = "ln_final.hook_normalized" if name.startswith("t5") else "blocks.{}.hook_normalized_resid_post"
    wanted: dict[str, Tensor] = {}
    for side, n in (("encoder", 2), ("decoder", 3)):
        names = [f"blocks.{i}.hook_resid_pre" for i in range(n)] + [last.format(n - 1)]
        states = getattr(out, f"{side}_hidden_states")
        wanted |= {f"{side}.{site}": state for site, state in zip(names, states, strict=True)}
        for i, pattern in enumerate(getattr(out, f"{side}_attentions")):
            wanted[f"{side}.blocks.{i}.attn.hook_pattern"] = pattern
    for i, pattern in enumerate(out.cross_attentions):
        wanted[f"decoder.blocks.{i}.cross_attn.hook_pattern"] = pattern
    assert len(wanted) == 3 + 4 + 2 + 3 + 3
    tap = Tap([Read(site) for site in wanted])
    ours(name)(SOURCE, TARGET, tap)
    for read, value in tap.values.items():
        assert_close(value, wanted[read.site])


@SOME
def test_padded_source_and_target_give_hugging_faces_logits(name: str) -> None:
    keep = torch.arange(13) < torch.tensor([[9], [13], [4]])
    masks = {"attention_mask": KEEP.long(), "decoder_attention_mask": keep.long()}
    found = ours(name)(SOURCE, TARGET, source_keep=KEEP, target_keep=keep)
    assert_close(found[keep], expected(name, **masks)[keep])


@pytest.mark.parametrize("name", ["t5", "t5-gated", "t5-buckets"])
def test_t5_takes_padding_on_the_left_too(name: str) -> None:
    """Its positions are differences; BART's and Marian's Hugging Face code counts columns, padding included."""
    keep = (torch.arange(13) < torch.tensor([[9], [13], [4]])).flip(1)
    masks = {"attention_mask": KEEP.flip(1).long(), "decoder_attention_mask": keep.long()}
    found = ours(name)(SOURCE, TARGET, source_keep=KEEP.flip(1), target_keep=keep)
    assert_close(found[keep], expected(name, **masks)[keep])


@SOME
def test_padding_of_the_source_changes_no_row_on_either_side(name: str) -> None:
    model = ours(name)
    for row in range(3):
        alone = model(SOURCE[row][KEEP[row]][None], TARGET[row : row + 1])[0]
        assert_close(model(SOURCE, TARGET, source_keep=KEEP)[row], alone)
        assert_close(model(SOURCE.flip(1), TARGET, source_keep=KEEP.flip(1))[row], model(
            SOURCE[row].flip(0)[KEEP[row].flip(0)][None], TARGET[row : row + 1])[0])  # fmt: skip


@SOME
def test_the_teacher_forced_loss_equals_hugging_faces_with_ignored_labels(name: str) -> None:
    """Hugging Face shifts the labels to the right, its start token first; ours reads targets as they are."""
    real = torch.arange(13) < torch.tensor([[9], [13], [4]])
    with torch.no_grad():
        wanted = hf_model(name, torch.float64)(
            input_ids=SOURCE, attention_mask=KEEP.long(), labels=TARGET.masked_fill(~real, -100)
        ).loss
    model = ours(name)
    start = torch.full((3, 1), model.config.start_token)
    target, keep = torch.cat((start, TARGET), 1), torch.cat((torch.ones(3, 1).bool(), real), 1)
    logits = model(SOURCE, target, source_keep=KEEP, target_keep=keep)
    assert_close(mean_next_token_loss(logits, target, keep), wanted)


# --- decoding -----------------------------------------------------------------------------------------------------


def lively(name: str) -> PreTrainedModel:
    """The oracle's model with steeper blocks, so that rows differ and T5 does not repeat itself."""
    model = new_hf_model(name, torch.float64)
    with torch.no_grad():
        for label, weight in model.named_parameters():
            if (
                weight.ndim > 1
                and weight.requires_grad
                and not label.endswith(("shared.weight", "tokens.weight"))
            ):
                weight *= 2
    return model


@SOME
def test_greedy_decoding_gives_hugging_faces_tokens_with_any_cache(name: str) -> None:
    theirs = lively(name)
    mine = loaded(theirs)
    tokens = theirs.generate(
        SOURCE, attention_mask=KEEP.long(), max_new_tokens=12, do_sample=False, num_beams=1, eos_token_id=None,
        pad_token_id=0, decoder_start_token_id=mine.config.start_token,
        use_cache=False,  # its cache has as many layers as the encoder, and ours here are more
    )  # fmt: skip
    assert len({tuple(row) for row in tokens.tolist()}) > 1
    assert not name.startswith("t5") or len(tokens.unique()) > 5
    for cached in (True, False):
        found = decode(mine, Batch(SOURCE, KEEP), 12, use_cache=cached)
        assert found.keep is None
        assert torch.equal(found.tokens, tokens)


@EVERY
def test_cached_steps_give_hugging_faces_logits(name: str) -> None:
    model = ours(name)
    cache = KVCache(model.config.decoder, 3, 13, device=model.device, dtype=model.dtype)
    memory = model.encode(SOURCE, keep=KEEP)
    steps = [model.decode(part, memory, cache=cache) for part in TARGET.split([1, 5, 7], 1)]
    assert_close(torch.cat(steps, 1), expected(name, attention_mask=KEEP.long()))


# --- edits --------------------------------------------------------------------------------------------------------

OUTPUTS: dict[str, dict[str, str]] = {
    "t5": {
        "encoder.blocks.0.hook_attn_out": "encoder.block.0.layer.0.SelfAttention.o",
        "encoder.blocks.1.hook_mlp_out": "encoder.block.1.layer.1.DenseReluDense.wo",
        "decoder.blocks.1.hook_cross_attn_out": "decoder.block.1.layer.1.EncDecAttention.o",
        "decoder.blocks.2.hook_mlp_out": "decoder.block.2.layer.2.DenseReluDense.wo",
    },
    "bart": {
        "encoder.blocks.0.hook_attn_out": "model.encoder.layers.0.self_attn.out_proj",
        "encoder.blocks.1.hook_mlp_out": "model.encoder.layers.1.fc2",
        "decoder.blocks.1.hook_cross_attn_out": "model.decoder.layers.1.encoder_attn.out_proj",
        "decoder.blocks.2.hook_mlp_out": "model.decoder.layers.2.fc2",
    },
}
"""Sites and the modules of Hugging Face whose output they are."""


@ONE_EACH
@over("which", range(4))
def test_edit_on_either_side_does_what_a_pytorch_hook_on_the_original_does(name: str, which: int) -> None:
    site, module = list(OUTPUTS["t5" if name == "t5" else "bart"].items())[which]

    def change(value: Tensor) -> Tensor:
        return -2 * value + 0.5

    def hook(_: nn.Module, args: object, output: Tensor) -> Tensor:
        return change(output)

    handle = hf_model(name, torch.float64).get_submodule(module).register_forward_hook(hook)
    try:
        wanted = expected(name)
    finally:
        handle.remove()
    assert float((wanted - expected(name)).abs().max()) > 1e-3
    assert_close(ours(name)(SOURCE, TARGET, Tap(edits=[Edit(site, change)])), wanted)


# --- what checkpoints hold ----------------------------------------------------------------------------------------


@EVERY
def test_a_saved_folder_gives_the_same_parameters(name: str, tmp_path: Path) -> None:
    hf_model(name, torch.float64).save_pretrained(tmp_path)
    found = stored(tmp_path)
    assert found.config == ours(name).config
    for (label, mine), theirs in zip(found.named_parameters(), ours(name).parameters(), strict=True):
        assert torch.equal(mine, theirs), label


def rewritten(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_an_unembedding_that_t5_1_1_stores_beside_the_embedding_is_its_own(tmp_path: Path) -> None:
    hf_model("t5-v1.1", torch.float64).save_pretrained(tmp_path)
    own = torch.randn(53, 24, dtype=torch.float64)
    rewritten(tmp_path, lambda tensors: tensors.update({"lm_head.weight": own}))
    values = json.loads((tmp_path / "config.json").read_text())
    del values["scale_decoder_outputs"]
    (tmp_path / "config.json").write_text(json.dumps({**values, "tie_word_embeddings": False}))
    theirs = widened(T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float64).eval())
    with torch.no_grad():
        wanted = theirs(input_ids=SOURCE, decoder_input_ids=TARGET).logits
    for model in (stored(tmp_path), loaded(theirs)):
        assert not model.config.decoder.tied
        assert_close(model(SOURCE, TARGET), wanted)


def test_a_bias_of_the_logits_that_bart_does_not_store_is_zero(tmp_path: Path) -> None:
    hf_model("bart", torch.float64).save_pretrained(tmp_path)
    rewritten(tmp_path, lambda tensors: tensors.__delitem__("final_logits_bias"))
    bias = hf_model("bart", torch.float64).final_logits_bias
    assert bias.std() > 0.1
    assert_close(stored(tmp_path)(SOURCE, TARGET), expected("bart") - bias)


def test_the_base_model_alone_has_the_logits_of_its_tied_embedding() -> None:
    whole = hf_model("bart", torch.float64)
    assert_close(loaded(whole.model)(SOURCE, TARGET), expected("bart") - whole.final_logits_bias)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("t5", {"feed_forward_proj": "gated-tanh"}, "feed_forward_proj='gated-tanh'"),
        ("t5", {"is_gated_act": True}, "is_gated_act=True"),
        ("marian", {"decoder_vocab_size": 41}, "two vocabularies"),
        ("marian", {"activation_function": "tanh"}, "activation_function='tanh'"),
    ],
)
def test_what_we_do_not_do_is_refused_by_name(name: str, change: dict[str, object], message: str) -> None:
    values = CASES[name].config().to_dict()
    config_of(values)
    with pytest.raises(ValueError, match=message):
        config_of({**values, **change})


def test_a_stack_alone_is_missed_by_name() -> None:
    with pytest.raises(ValueError, match=r"T5: the checkpoint lacks .* 'decoder\."):
        any_from_hf_model(hf_model("t5").encoder)


@pytest.mark.parametrize(
    "values",
    [
        {
            "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_ff": 2048, "d_kv": 64,
            "d_model": 512,
            "decoder_start_token_id": 0, "dropout_rate": 0.1, "eos_token_id": 1, "initializer_factor": 1.0,
            "is_encoder_decoder": True, "layer_norm_epsilon": 1e-06, "n_positions": 512, "num_heads": 8,
            "num_layers": 6, "output_past": True, "pad_token_id": 0, "relative_attention_num_buckets": 32,
            "task_specific_params": {"summarization": {"prefix": "summarize: "}}, "vocab_size": 32128,
        },
        {
            "model_type": "bart", "architectures": ["BartModel"], "activation_dropout": 0.1, "vocab_size": 50265,
            "activation_function": "gelu", "add_bias_logits": False, "add_final_layer_norm": False,
            "attention_dropout": 0.1, "classif_dropout": 0.1, "classifier_dropout": 0.0, "d_model": 1024,
            "decoder_attention_heads": 16, "decoder_ffn_dim": 4096, "decoder_layerdrop": 0.0, "decoder_layers": 12,
            "decoder_start_token_id": 2, "dropout": 0.1, "early_stopping": True, "encoder_attention_heads": 16,
            "encoder_ffn_dim": 4096, "encoder_layerdrop": 0.0, "encoder_layers": 12, "eos_token_id": 2,
            "forced_bos_token_id": 0, "forced_eos_token_id": 2, "gradient_checkpointing": False, "init_std": 0.02,
            "is_encoder_decoder": True, "max_position_embeddings": 1024, "no_repeat_ngram_size": 3,
            "normalize_before": False, "num_beams": 4, "num_hidden_layers": 12, "pad_token_id": 1,
            "scale_embedding": False, "use_cache": True, "transformers_version": "4.7.0.dev0",
        },
        {
            "model_type": "marian", "architectures": ["MarianMTModel"], "_num_labels": 3, "activation_dropout": 0.0,
            "activation_function": "swish", "add_bias_logits": False, "add_final_layer_norm": False,
            "bad_words_ids": [[58100]], "classif_dropout": 0.0, "d_model": 512, "decoder_attention_heads": 8,
            "decoder_ffn_dim": 2048, "decoder_layerdrop": 0.0, "decoder_layers": 6, "decoder_start_token_id": 58100,
            "decoder_vocab_size": 58101, "dropout": 0.1, "encoder_attention_heads": 8, "encoder_ffn_dim": 2048,
            "encoder_layerdrop": 0.0, "encoder_layers": 6, "eos_token_id": 0, "forced_eos_token_id": 0,
            "init_std": 0.02, "is_encoder_decoder": True, "max_length": 512, "max_position_embeddings": 512,
            "normalize_before": False, "normalize_embedding": False, "num_beams": 6, "num_hidden_layers": 6,
            "pad_token_id": 58100, "scale_embedding": True, "share_encoder_decoder_embeddings": True,
            "static_position_embeddings": True, "vocab_size": 58101,
        },
    ],
    ids=["t5", "bart", "marian"],
)  # fmt: skip
def test_the_keys_that_published_configs_have_are_understood(values: dict[str, object]) -> None:
    _, config = config_of(values)
    assert config.to_dict()["start_token"] == values["decoder_start_token_id"]
