"""llama2.c files: written here byte by byte, run by a slow loop of numpy from the definition of run.c."""

import math
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from interp.compat import load_llama2c
from interp.compat.llama2c_tokenizer import Llama2cTokenizer
from interp.data.tokenizers import Tokenizer

Array = NDArray[np.float64]
DIM, HIDDEN, LAYERS, HEADS, KV, VOCAB, SEQ = 24, 20, 2, 4, 2, 300, 12
WIDTH = DIM // HEADS
PER_LAYER = {
    "norm1": (DIM,), "wq": (DIM, DIM), "wk": (KV * WIDTH, DIM), "wv": (KV * WIDTH, DIM), "wo": (DIM, DIM),
    "norm2": (DIM,), "w1": (HIDDEN, DIM), "w2": (DIM, HIDDEN), "w3": (HIDDEN, DIM),
}  # fmt: skip
TOKENS = [1, 17, 299, 5, 5, 42, 7]


def weights() -> dict[str, NDArray[np.float32]]:
    """Random float32 weights by name; those of all layers in one array."""
    random = np.random.default_rng(0)
    shapes = {name: (LAYERS, *shape) for name, shape in PER_LAYER.items()}
    shapes |= {"embed": (VOCAB, DIM), "final": (DIM,), "unembed": (VOCAB, DIM)}
    made = {name: random.normal(size=shape).astype("<f4") * 0.3 for name, shape in shapes.items()}
    return {name: w + 1 if name in ("norm1", "norm2", "final") else w for name, w in made.items()}


def legacy(shared: bool) -> bytes:
    """A file as run.c maps it."""
    w = weights()
    header = struct.pack("<7i", DIM, HIDDEN, LAYERS, HEADS, KV, VOCAB if shared else -VOCAB, SEQ)
    order = [w["embed"], *(w[name] for name in PER_LAYER), w["final"]]
    tables = [np.full(SEQ * WIDTH // 2, np.nan, "<f4")] * 2
    return header + b"".join(x.tobytes() for x in (*order, *tables, *([] if shared else [w["unembed"]])))


def version_1(shared: bool, version: int = 1) -> bytes:
    """A file as export.py writes it."""
    w = weights()
    header = struct.pack("<Ii7iB", 0x616B3432, version, DIM, HIDDEN, LAYERS, HEADS, KV, VOCAB, SEQ, shared)
    names = ["norm1", "norm2", "final", "embed", "wq", "wk", "wv", "wo", "w1", "w2", "w3"]
    return header.ljust(256, b"\0") + b"".join(
        w[name].tobytes() for name in names + ["unembed"] * (not shared)
    )


def rms(x: Array, gamma: Array) -> Array:
    return x / math.sqrt(float(x @ x) / len(x) + 1e-5) * gamma


def run(tokens: Sequence[int], shared: bool) -> Array:
    """Logits after every token: one token at a time, one head at a time."""
    w = {name: array.astype(np.float64) for name, array in weights().items()}
    keys: list[list[Array]] = [[] for _ in range(LAYERS)]
    values: list[list[Array]] = [[] for _ in range(LAYERS)]
    logits = []
    for position, token in enumerate(tokens):
        x = w["embed"][token].copy()
        for layer in range(LAYERS):
            normed = rms(x, w["norm1"][layer])
            q, k, v = (w[name][layer] @ normed for name in ("wq", "wk", "wv"))
            for vector in (q, k):
                for i in range(0, len(vector), 2):
                    angle = position / 10_000 ** ((i % WIDTH) / WIDTH)
                    a, b = vector[i], vector[i + 1]
                    vector[i] = a * math.cos(angle) - b * math.sin(angle)
                    vector[i + 1] = a * math.sin(angle) + b * math.cos(angle)
            keys[layer].append(k)
            values[layer].append(v)
            mixed = np.zeros(DIM)
            for head in range(HEADS):
                at = slice(head * WIDTH, (head + 1) * WIDTH)
                shared_at = slice(head // (HEADS // KV) * WIDTH, (head // (HEADS // KV) + 1) * WIDTH)
                scores = np.array([q[at] @ past[shared_at] / math.sqrt(WIDTH) for past in keys[layer]])
                pattern = np.exp(scores - scores.max())
                pattern /= pattern.sum()
                for weight, past in zip(pattern, values[layer], strict=True):
                    mixed[at] += weight * past[shared_at]
            x += w["wo"][layer] @ mixed
            normed = rms(x, w["norm2"][layer])
            gate = w["w1"][layer] @ normed
            x += w["w2"][layer] @ (gate / (1 + np.exp(-gate)) * (w["w3"][layer] @ normed))
        logits.append(w["embed" if shared else "unembed"] @ rms(x, w["final"]))
    return np.stack(logits)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "unshared"])
@pytest.mark.parametrize("form", [legacy, version_1], ids=["legacy", "version-1"])
def test_logits_are_those_of_the_slow_run(form, shared: bool, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    model = load_llama2c(write(tmp_path / "stories.bin", form(shared)), dtype=torch.float64)
    expected = torch.from_numpy(run(TOKENS, shared))
    torch.testing.assert_close(model(torch.tensor(TOKENS))[0], expected, rtol=1e-5, atol=1e-5)
    assert model.cfg.tied == shared and model.name == "stories"


def test_weights_are_those_of_the_file_and_the_file_is_left_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "model.bin", legacy(True))
    model = load_llama2c(path)
    assert model.transformer.dtype == torch.float32
    assert torch.equal(model.W_E, torch.from_numpy(weights()["embed"]))
    assert torch.equal(model.transformer.block(1).mlp.out.weight, torch.from_numpy(weights()["w2"][1]))
    model.W_E.zero_()
    assert path.read_bytes() == legacy(True)


def test_a_file_of_another_length_is_refused_with_both_numbers(tmp_path: Path) -> None:
    whole = legacy(False)
    for content in (whole[:-4], whole + b"\0"):
        with pytest.raises(
            ValueError, match=rf"a.bin has {len(content)} bytes, its header asks for {len(whole)}"
        ):
            load_llama2c(write(tmp_path / "a.bin", content))
    with pytest.raises(ValueError, match=r"a.bin has 12 bytes, too few for a header"):
        load_llama2c(write(tmp_path / "a.bin", whole[:12]))
    with pytest.raises(ValueError, match=r"a.bin has 200 bytes, too few for a header"):
        load_llama2c(write(tmp_path / "a.bin", version_1(True)[:200]))
    with pytest.raises(FileNotFoundError, match=r"b.bin is no file"):
        load_llama2c(tmp_path / "b.bin")


HEADERS = {
    "requires dim >= 1, got 0": (0, HIDDEN, LAYERS, HEADS, KV, VOCAB, SEQ),
    "requires n_layers >= 1, got -2": (DIM, HIDDEN, -2, HEADS, KV, VOCAB, SEQ),
    "requires n_layers <= 10000, got 2147483647": (DIM, HIDDEN, 2**31 - 1, HEADS, KV, VOCAB, SEQ),
    "requires vocab_size >= 1, got 0": (DIM, HIDDEN, LAYERS, HEADS, KV, 0, SEQ),
    "requires 5 heads of even width, got dim 24": (DIM, HIDDEN, LAYERS, 5, KV, VOCAB, SEQ),
    "n_kv_heads to divide n_heads, got 3 and 4": (DIM, HIDDEN, LAYERS, HEADS, 3, VOCAB, SEQ),
    "requires dim <= 100000000, got 2147483646": (2**31 - 2, 2**31 - 1, 9_999, 1, 1, VOCAB, SEQ),
    "its header asks for [0-9]{20,}": (10**8, 10**8, 9_999, 1, 1, VOCAB, SEQ),
    "requires hidden_dim <= 100000000, got 2147483647": (DIM, 2**31 - 1, LAYERS, HEADS, KV, VOCAB, SEQ),
}


@pytest.mark.parametrize("message", HEADERS)
def test_a_header_that_cannot_be_is_refused_by_its_number(message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "odd.bin", struct.pack("<7i", *HEADERS[message]) + bytes(64))
    with pytest.raises(ValueError, match=f"odd.bin.*{message}"):
        load_llama2c(path)


def test_quantised_files_are_refused_by_version(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"q.bin is of version 2; supported: legacy and 1 \(2 holds quantised"
    ):
        load_llama2c(write(tmp_path / "q.bin", version_1(True, version=2)))


WORDS = (" ", "a", "b", "c", "t", "ab", "bc", " a", "abc", " ab", "ct", "é", "\n")
PIECES = [
    b"<unk>",
    b"\n<s>\n",
    b"\n</s>\n",
    *(b"<0x%02X>" % i for i in range(256)),
    *(w.encode() for w in WORDS),
]
SCORES = {"ab": 1.0, "bc": 2.0, " a": 3.0, "abc": 4.0, " ab": 5.0, "ct": 1.0}
IDS = {word: 259 + i for i, word in enumerate(WORDS)}


def tokenizer_file(pieces: Sequence[bytes] = tuple(PIECES)) -> bytes:
    scores = [SCORES.get(piece.decode(), 0.0) for piece in pieces]
    entries = [struct.pack("<fi", s, len(p)) + p for s, p in zip(scores, pieces, strict=True)]
    return struct.pack("<i", max(len(p) for p in pieces)) + b"".join(entries)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Llama2cTokenizer:
    return Llama2cTokenizer.read(write(tmp_path / "tokenizer.bin", tokenizer_file()))


def test_the_best_scored_pair_is_joined_first(tokenizer: Llama2cTokenizer) -> None:
    assert isinstance(tokenizer, Tokenizer)
    assert tokenizer.encode("abc") == [IDS[" ab"], IDS["c"]]  # " a" (3) goes before "bc" (2), then " ab" (5)
    assert tokenizer.encode("cabc") == [IDS[" "], IDS["c"], IDS["abc"]]  # "bc" (2) before "ab" (1)
    assert tokenizer.encode("ctct") == [IDS[" "], IDS["ct"], IDS["ct"]]
    assert tokenizer.encode("") == []


def test_what_has_no_piece_becomes_bytes_and_comes_back(tokenizer: Llama2cTokenizer) -> None:
    assert tokenizer.encode("é") == [IDS[" "], IDS["é"]]
    euro = [3 + byte for byte in "€".encode()]
    assert tokenizer.encode("€") == [IDS[" "], *euro]
    for text in ("abc", " abc", "a€b é\n", "  c", "🙂"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([1, *ids]) == "\n<s>\n" + text
    assert tokenizer.piece(IDS[" ab"]) == " ab" and tokenizer.piece(3 + 65) == "A"
    assert (tokenizer.bos_id, tokenizer.eos_id, len(tokenizer)) == (1, 2, len(PIECES))
    with pytest.raises(ValueError, match=r"token ids must be in \[0, 271\], got 272"):
        tokenizer.decode([272])


def test_a_model_with_its_tokenizer_reads_and_writes_text(tmp_path: Path) -> None:
    pieces = [*PIECES, *(b"x%d" % i for i in range(VOCAB - len(PIECES)))]
    path = write(tmp_path / "tokenizer.bin", tokenizer_file(pieces))
    model = load_llama2c(write(tmp_path / "model.bin", legacy(True)), path)
    assert model.to_tokens("abc").tolist() == [[1, IDS[" ab"], IDS["c"]]]
    assert model.to_texts(model.generate("abc", 2))[0].startswith("abc")
    other = write(tmp_path / "other.bin", tokenizer_file())
    with pytest.raises(ValueError, match=r"other.bin has 272 tokens, .*model.bin has 300"):
        load_llama2c(tmp_path / "model.bin", other)


def test_a_damaged_tokenizer_is_refused_by_its_piece(tmp_path: Path) -> None:
    whole = tokenizer_file()
    for content, message in {
        whole[:-1]: r"t.bin: piece 271 has length 1, of at most \d+ and 0 bytes",
        whole[:-5]: r"t.bin: piece 271 has length -1",
        whole + struct.pack("<fi", 0.0, 1000): r"t.bin: piece 272 has length 1000",
        b"": r"t.bin holds no pieces, 0 bytes",
        tokenizer_file(PIECES[:3]): r"more than 3 pieces, each with a score, is required, got 3",
    }.items():
        with pytest.raises(ValueError, match=message):
            Llama2cTokenizer.read(write(tmp_path / "t.bin", content))
    with pytest.raises(FileNotFoundError, match=r"u.bin does not exist"):
        Llama2cTokenizer.read(tmp_path / "u.bin")
    with pytest.raises(ValueError, match=r"'€' has no piece, and the vocabulary of 5 ends before"):
        Llama2cTokenizer([*PIECES[:3], b" ", b"a"], [0.0] * 5).encode("€")
