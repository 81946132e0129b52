"""BERT, RoBERTa and DistilBERT against Hugging Face, with their masked-LM head and without any."""

import functools
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from interp.families.load import config_of, from_folder, from_hf_model
from interp.model import Read, Tap, Transformer
from tests.families.case import D_VOCAB
from tests.families.cases_others import CASES, ENCODERS
from tests.families.oracle import hf_model
from tests.loops import over
from tests.tolerances import assert_close

EVERY = pytest.mark.parametrize("name", ENCODERS)
TYPED = pytest.mark.parametrize("name", ["bert", "bert-no-head", "roberta", "xlm-roberta"])
ONE_EACH = pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "bert-no-head"])
HEADLESS = ("no-head", "classifier")


@functools.cache
def ours(name: str, dtype: torch.dtype = torch.float64) -> Transformer:
    return from_hf_model(hf_model(name, dtype))


def some_tokens(n: int = 20) -> Tensor:
    """Random tokens, none of which is a padding id: RoBERTa takes its positions from them."""
    return torch.randint(6, D_VOCAB, (3, n), generator=torch.Generator().manual_seed(0))


def expected(name: str, dtype: torch.dtype, tokens: Tensor, **inputs: Tensor) -> Tensor:
    """The oracle's logits, or its final states where it has no masked-LM head."""
    with torch.no_grad():
        out = hf_model(name, dtype)(tokens, output_hidden_states=True, **inputs)
    if name.endswith(HEADLESS):
        return out.hidden_states[-1]
    return out.prediction_logits if name.endswith("pretraining") else out.logits


@EVERY
@over("dtype", [torch.float32, torch.float64])
def test_logits_or_final_states_equal_hugging_faces(name: str, dtype: torch.dtype) -> None:
    wanted = expected(name, dtype, some_tokens())
    assert wanted.std() > 0.3
    bound = {torch.float32: 1e-4, torch.float64: 1e-9}[dtype]
    assert float((ours(name, dtype)(some_tokens()) - wanted).abs().max()) <= bound


@EVERY
def test_states_and_patterns_of_every_layer_equal_hugging_faces(name: str) -> None:
    with torch.no_grad():
        out = hf_model(name, torch.float64)(some_tokens(), output_attentions=True, output_hidden_states=True)
    reads = [Read(f"blocks.{i}.hook_resid_pre") for i in range(2)]
    reads.append(Read("blocks.1.hook_normalized_resid_post"))
    reads += [Read(f"blocks.{i}.attn.hook_pattern") for i in range(2)]
    tap = Tap(reads)
    ours(name)(some_tokens(), tap)
    for read, theirs in zip(reads, (*out.hidden_states, *out.attentions), strict=True):
        assert_close(tap.values[read], theirs)


@TYPED
def test_token_types_count_as_hugging_faces(name: str) -> None:
    types = torch.randint(0, 3, (3, 20), generator=torch.Generator().manual_seed(1))
    wanted = expected(name, torch.float64, some_tokens(), token_type_ids=types)
    assert_close(ours(name)(some_tokens(), types=types), wanted)
    assert float((wanted - ours(name)(some_tokens())).abs().max()) > 0.1


@ONE_EACH
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_give_hugging_faces_numbers_under_mask_and_positions(name: str, side: str) -> None:
    keep = torch.arange(20) < torch.tensor([[20], [13], [6]])
    keep = keep if side == "right" else keep.flip(1)
    offset = getattr(ours(name).config.position, "offset", 0)
    positions = (keep.cumsum(1) - 1).clamp_min(0) + offset
    wanted = expected(name, torch.float64, some_tokens(), attention_mask=keep.long(), position_ids=positions)
    assert_close(ours(name)(some_tokens(), keep=keep)[keep], wanted[keep])


@pytest.mark.parametrize("name", ["roberta", "roberta-padding-id", "camembert"])
def test_robertas_positions_begin_after_the_padding_id_in_the_tokens(name: str) -> None:
    pad = CASES[name].options["pad_token_id"]
    assert isinstance(pad, int)
    keep = torch.arange(20) < torch.tensor([[20], [13], [6]])
    tokens = some_tokens().masked_fill(~keep, pad)
    wanted = expected(name, torch.float64, tokens, attention_mask=keep.long())
    assert_close(ours(name)(tokens, keep=keep)[keep], wanted[keep])
    assert ours(name).config.n_ctx == 64 - pad - 1


@ONE_EACH
def test_the_masked_token_loss_equals_hugging_faces(name: str) -> None:
    if name.endswith(HEADLESS):
        assert not ours(name).config.unembed
        return
    masked = torch.rand(3, 20, generator=torch.Generator().manual_seed(2)) < 0.2
    tokens = some_tokens()
    labels = tokens.masked_fill(~masked, -100)
    with torch.no_grad():
        wanted = hf_model(name, torch.float64)(tokens.masked_fill(masked, 5), labels=labels).loss
    logits = ours(name)(tokens.masked_fill(masked, 5))
    assert_close(F.cross_entropy(logits.flatten(0, 1), labels.flatten()), wanted)


# --- which parts a checkpoint has ---------------------------------------------------------------------------------


@EVERY
def test_a_saved_folder_gives_the_same_parameters(name: str, tmp_path: Path) -> None:
    hf_model(name, torch.float64).save_pretrained(tmp_path)
    found = from_folder(tmp_path)
    assert found.config == ours(name).config
    for (label, mine), theirs in zip(found.named_parameters(), ours(name).parameters(), strict=True):
        assert torch.equal(mine, theirs), label


def test_the_encoder_inside_a_masked_lm_ends_in_its_residual_stream() -> None:
    """Its config still says `BertForMaskedLM`; what counts is the class that was given."""
    whole = hf_model("bert", torch.float64)
    whole.config.architectures = ["BertForMaskedLM"]
    inner = from_hf_model(whole.bert)
    assert inner.unembed is None
    with torch.no_grad():
        assert_close(inner(some_tokens()), whole.bert(some_tokens()).last_hidden_state)


def test_without_architectures_a_stored_head_is_refused_by_name(tmp_path: Path) -> None:
    hf_model("bert").save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    del values["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"not understood, first 'cls\.predictions"):
        from_folder(tmp_path)


def test_a_promised_head_that_is_not_stored_is_missed_by_name(tmp_path: Path) -> None:
    hf_model("bert-no-head").save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "architectures": ["BertForMaskedLM"]}))
    with pytest.raises(ValueError, match=r"lacks .* first 'cls\.predictions"):
        from_folder(tmp_path)


def test_the_first_checkpoints_names_of_gamma_and_beta_are_understood(tmp_path: Path) -> None:
    hf_model("bert", torch.float64).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = {}
    for name, tensor in load_file(file).items():
        end = next((new for new in old if name.endswith(new)), None)
        tensors[name if end is None else name.removesuffix(end) + old[end]] = tensor
    assert any(name.endswith("gamma") for name in tensors)
    tensors["bert.embeddings.position_ids"] = torch.arange(64)[None]
    tensors["cls.seq_relationship.weight"] = torch.zeros(2, 24)
    save_file(tensors, file, metadata={"format": "pt"})
    assert_close(from_folder(tmp_path)(some_tokens()), ours("bert")(some_tokens()))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("bert", {"is_decoder": True}, "is_decoder=True"),
        ("bert", {"add_cross_attention": True}, "add_cross_attention=True"),
        ("bert", {"hidden_act": "tanh"}, "hidden_act='tanh'"),
        ("roberta", {"is_decoder": True}, "is_decoder=True"),
        ("distilbert", {"activation": "tanh"}, "activation='tanh'"),
    ],
)
def test_what_we_do_not_do_is_refused_by_name(name: str, change: dict[str, object], message: str) -> None:
    values = CASES[name].config().to_dict()
    config_of(values)
    with pytest.raises(ValueError, match=message):
        config_of({**values, **change})


def test_the_configs_that_the_first_checkpoints_have_are_understood() -> None:
    values = {
        "architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1, "gradient_checkpointing": False,
        "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768, "initializer_range": 0.02,
        "intermediate_size": 3072, "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "model_type": "bert",
        "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 0, "position_embedding_type": "absolute",
        "transformers_version": "4.6.0.dev0", "type_vocab_size": 2, "use_cache": True, "vocab_size": 30522,
        "directionality": "bidi", "pooler_fc_size": 768, "pooler_num_attention_heads": 12,
        "pooler_num_fc_layers": 3, "pooler_size_per_head": 128, "pooler_type": "first_token_transform",
    }  # fmt: skip
    _, config = config_of(values)
    reference = transformers.BertConfig(architectures=["BertForMaskedLM"]).to_dict()
    assert config == config_of(reference)[1]
