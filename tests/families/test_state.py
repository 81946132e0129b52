"""A state dict of one's own by a map of names, and a SentencePiece file as the tokenizer beside it."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interp import HookedTransformer, families
from interp.families import SentencePieceTokenizer, load_state
from interp.model import MLP, ModelConfig, NoNorm, NoPosition, Transformer
from tests.configs import CONFIGS, build, some_tokens
from tests.tolerances import assert_close

CONFIG = ModelConfig(
    n_layers=2, d_model=12, n_heads=3, n_ctx=6, d_vocab=7, d_vocab_out=4, mlp=MLP(10, act="relu", bias=False),
    norm=NoNorm(), qkv_bias=False, out_bias=False,
)  # fmt: skip
LENS_NAMES = {
    "embed.weight": "embed.W_E",
    "pos_embed.weight": "pos_embed.W_pos",
    "blocks.{l}.attn.qkv.weight": [f"blocks.{{l}}.attn.W_{x}: h d e -> (h e) d" for x in "QKV"],
    "blocks.{l}.attn.out.weight": "blocks.{l}.attn.W_O: h e d -> d (h e)",
    "blocks.{l}.mlp.into.weight": "blocks.{l}.mlp.W_in: d m -> m d",
    "blocks.{l}.mlp.out.weight": "blocks.{l}.mlp.W_out: m d -> d m",
    "unembed.weight": "unembed.W_U: d v -> v d",
}


def lens_state() -> dict[str, Tensor]:
    """Weights under TransformerLens' names and in its shapes, without a bias."""
    torch.manual_seed(0)
    state = {
        "embed.W_E": torch.randn(7, 12),
        "pos_embed.W_pos": torch.randn(6, 12),
        "unembed.W_U": torch.randn(12, 4),
    }
    for layer in range(2):
        at = f"blocks.{layer}"
        state |= {f"{at}.attn.W_{x}": torch.randn(3, 12, 4) / 4 for x in "QKV"}
        state |= {f"{at}.attn.W_O": torch.randn(3, 4, 12) / 4}
        state |= {f"{at}.mlp.W_in": torch.randn(12, 10) / 4, f"{at}.mlp.W_out": torch.randn(10, 12) / 4}
    return state


def slow(state: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """The logits of one row by a loop over layers and heads, straight from TransformerLens' shapes."""
    x = state["embed.W_E"][tokens] + state["pos_embed.W_pos"][: len(tokens)]
    future = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)
    for layer in range(2):
        q, k, v, o = (state[f"blocks.{layer}.attn.W_{name}"] for name in "QKVO")
        heads = []
        for head in range(3):
            scores = (x @ q[head]) @ (x @ k[head]).T / 2
            heads.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ (x @ v[head]) @ o[head])
        x = x + sum(heads)
        x = x + (x @ state[f"blocks.{layer}.mlp.W_in"]).relu() @ state[f"blocks.{layer}.mlp.W_out"]
    return x @ state["unembed.W_U"]


def test_a_state_under_other_names_gives_the_logits_of_a_slow_loop_over_it() -> None:
    state, tokens = lens_state(), torch.tensor([[1, 5, 2, 6], [0, 3, 3, 4]])
    model = load_state(CONFIG, state, LENS_NAMES)
    expected = torch.stack([slow(state, row) for row in tokens])
    assert expected.shape == (2, 4, 4)
    assert_close(model(tokens), expected, torch.float32)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_axes_before_a_parameters_own_are_flattened() -> None:
    joined = load_state(CONFIG, lens_state(), LENS_NAMES)
    deep = LENS_NAMES | {
        "blocks.{l}.attn.qkv.weight": [f"blocks.{{l}}.attn.W_{x}: h d e -> h e d" for x in "QKV"]
    }
    assert_close(
        load_state(CONFIG, lens_state(), deep)(torch.tensor([[1, 5, 2]])),
        joined(torch.tensor([[1, 5, 2]])),
        torch.float32,
    )


def test_a_state_of_torchs_own_modules_gives_their_logits() -> None:
    layer = nn.TransformerEncoderLayer(
        12, 3, dim_feedforward=10, dropout=0.0, activation=F.relu, batch_first=True, norm_first=True
    )
    theirs = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    embed, head = nn.Embedding(7, 12), nn.Linear(12, 2)
    state = {f"layers.{name}": w for name, w in nn.ModuleDict({"e": embed, "h": head}).state_dict().items()}
    state |= theirs.state_dict()
    names = {"attn.qkv": "self_attn.in_proj_", "attn.out": "self_attn.out_proj.", "mlp.into": "linear1.",
             "mlp.out": "linear2.", "ln1": "norm1.", "ln2": "norm2."}  # fmt: skip
    rename = {
        f"blocks.{{l}}.{ours}.{part}": f"layers.{{l}}.{name}{part}"
        for ours, name in names.items()
        for part in ("weight", "bias")
    }
    rename |= {
        "embed.weight": "layers.e.weight",
        "unembed.weight": "layers.h.weight",
        "unembed.bias": "layers.h.bias",
    }
    config = ModelConfig(
        n_layers=2, d_model=12, n_heads=3, n_ctx=6, d_vocab=7, d_vocab_out=2, causal=False, final_norm=False,
        unembed_bias=True, position=NoPosition(), mlp=MLP(10, act="relu"),
    )  # fmt: skip
    tokens = torch.tensor([[1, 5, 2, 6], [0, 3, 3, 4]])
    assert_close(load_state(config, state, rename)(tokens), head(theirs(embed(tokens))), torch.float32)


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "attention-only-rotary", "tied", "bidirectional"])
def test_without_a_map_the_names_are_the_models_own(name: str) -> None:
    network = build(name)
    again = load_state(CONFIGS[name], network.state_dict())
    assert torch.equal(again(some_tokens()), network(some_tokens()))
    assert all(
        a.data_ptr() != b.data_ptr() for a, b in zip(again.parameters(), network.parameters(), strict=True)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s, r: s.pop("unembed.W_U"), "lacks 1 of 15 tensors, first 'unembed.W_U'"),
        (lambda s, r: s.update(extra=torch.zeros(1)), "1 tensors are not understood, first 'extra'"),
        (lambda s, r: r.update({"unembd.weight": "x"}), "no parameter 'unembd.weight'; nearest: unembed.weight"),
        (lambda s, r: r.update({"unembed.weight": "unembed.W_U"}), "unembed.weight requires shape [4, 12], unembed"),
        (lambda s, r: r.update({"unembed.weight": "unembed.W_U: a b c -> c"}), "cannot be laid out as 'a b c -> c'"),
        (lambda s, r: s["embed.W_E"].fill_(torch.nan), "embed.W_E: the checkpoint holds NaN"),
    ],
    ids=["missing", "left over", "no such parameter", "not turned", "no such axes", "nan"],
)  # fmt: skip
def test_what_does_not_fit_is_named(change: object, message: str) -> None:
    state, rename = lens_state(), dict(LENS_NAMES)
    change(state, rename)  # type: ignore[operator]
    with pytest.raises(ValueError, match=re.escape(message)):
        load_state(CONFIG, state, rename)


def test_masks_in_a_state_are_passed_over_on_request() -> None:
    state = lens_state() | {
        "blocks.0.attn.mask": torch.ones(6, 6),
        "blocks.1.attn.IGNORE": torch.tensor(-1e5),
    }
    model = load_state(CONFIG, state, LENS_NAMES, ignore=[r"blocks\.\d+\.attn\.(mask|IGNORE)"])
    assert torch.equal(model.embed.weight, state["embed.W_E"])


def test_the_manual_names_every_parameter_of_a_usual_model() -> None:
    page = Path("docs/howto/own_model.md").read_text(encoding="utf-8")
    for config in (CONFIG, CONFIGS["gpt2"], CONFIGS["llama-gqa"], CONFIGS["attention-only-rotary"]):
        for name, _ in Transformer(config).named_parameters():
            assert re.sub(r"\.\d+\.", ".{l}.", name).rpartition(".")[0] in page, name


# --- SentencePiece -------------------------------------------------------------------------------------------------

SENTENCES = ["the cat sat on the mat", "a dog ran to the cat", "hello world, the dog sat"]


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a SentencePiece model and nothing else."""
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("pieces")
    (folder / "text.txt").write_text("\n".join(SENTENCES * 30))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"), model_prefix=str(folder / "tokenizer"), vocab_size=60, model_type="bpe",
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    return folder


def test_a_folder_with_a_sentencepiece_model_alone_has_that_librarys_ids(pieces: Path) -> None:
    """transformers 5 converts it without the space before the first word: other ids, and no error."""
    import sentencepiece

    theirs = sentencepiece.SentencePieceProcessor(model_file=str(pieces / "tokenizer.model"))
    ours = families.tokenizer_of(pieces)
    assert isinstance(ours, SentencePieceTokenizer)
    for text in SENTENCES:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == text
        assert "".join(map(ours.piece, ours.encode(text))) == f" {text}"
    assert (ours.bos_id, ours.eos_id, ours.n_ids) == (1, 2, theirs.get_piece_size())
    assert ours.decode([1, *ours.encode("the cat")]) == "<s>the cat"


def test_a_model_takes_text_through_a_sentencepiece_file(pieces: Path) -> None:
    tokenizer = SentencePieceTokenizer.read(pieces / "tokenizer.model")
    config = ModelConfig(n_layers=1, d_model=8, n_heads=2, n_ctx=8, d_vocab=tokenizer.n_ids)
    model = HookedTransformer(Transformer(config), tokenizer)
    assert model.to_tokens("the cat").tolist() == [[1, *tokenizer.encode("the cat")]]
    assert model.generate([[1]], 3).tokens.shape == (1, 4)


def test_a_damaged_sentencepiece_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\x00damaged")
    with pytest.raises(ValueError, match=r"tokenizer\.model is not a readable SentencePiece model"):
        families.tokenizer_of(tmp_path)
