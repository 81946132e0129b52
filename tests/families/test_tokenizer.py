"""The two tokenizer libraries behind one interface: which tokens serve as what, and that no text is lost."""

import functools
import io
import json
import pickle
import re
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from interp import HookedTransformer, Stream, families
from interp.core.notes import Note, note
from interp.data import open_source
from interp.data.text import Text
from interp.families.tokenizer import FileTokenizer, HuggingFaceTokenizer, tokenizer_in, tokenizer_of
from interp.runs.fingerprint import fingerprint
from tests.configs import CONFIGS, perturbed
from tests.families.oracle import hf_model
from tests.tiny import CORPUS, END, backend, gpt2_tokenizer

TEXTS = ("The cat sat , on the mat .", "  two  spaces", "Zoë naïve 日本語 🙂\n\ttabs", f"a{END}b")


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    backend().save(str(path))
    return path


@pytest.mark.parametrize("text", TEXTS)
def test_texts_round_trip_exactly(text: str, stored: Path) -> None:
    for tokenizer in (HuggingFaceTokenizer(gpt2_tokenizer()), FileTokenizer.read(stored, END)):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert len(ids) > 1


def test_both_libraries_give_the_same_ids(stored: Path) -> None:
    both = HuggingFaceTokenizer(gpt2_tokenizer()), FileTokenizer.read(stored, END)
    for text in TEXTS:
        assert both[0].encode(text) == both[1].encode(text)


def test_half_of_a_surrogate_pair_is_refused_with_its_place(stored: Path) -> None:
    for tokenizer in (HuggingFaceTokenizer(gpt2_tokenizer()), FileTokenizer.read(stored, END)):
        with pytest.raises(ValueError, match="half of a surrogate pair at 1"):
            tokenizer.encode("a\ud83d")
    with pytest.raises(ValueError, match="half of a surrogate pair at 0"):
        HuggingFaceTokenizer(gpt2_tokenizer()).with_special("\udcff")


def test_pieces_join_to_the_text() -> None:
    tokenizer = HuggingFaceTokenizer(gpt2_tokenizer())
    pieces = [tokenizer.piece(i) for i in tokenizer.encode(CORPUS[0])]
    assert "".join(pieces) == CORPUS[0]
    assert " the" in pieces


def test_end_of_text_serves_as_beginning_and_padding_where_there_is_none() -> None:
    tokenizer = HuggingFaceTokenizer(gpt2_tokenizer())
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 0, 0)


def test_special_tokens_of_its_own_are_used() -> None:
    theirs = gpt2_tokenizer()
    theirs.add_special_tokens({"bos_token": "<s>", "pad_token": "<pad>"})
    tokenizer = HuggingFaceTokenizer(theirs)
    assert tokenizer.bos_id == theirs.convert_tokens_to_ids("<s>")
    assert tokenizer.pad_id == theirs.convert_tokens_to_ids("<pad>")
    assert tokenizer.eos_id == 0
    assert len({tokenizer.bos_id, tokenizer.pad_id, tokenizer.eos_id}) == 3


def test_a_tokenizer_without_special_tokens_has_none() -> None:
    tokenizer = HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend()))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (None, None, 0)


def test_encoding_adds_nothing_even_where_the_tokenizer_would() -> None:
    adding = tokenizers.Tokenizer.from_str(backend().to_str())
    adding.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
    theirs = PreTrainedTokenizerFast(tokenizer_object=adding, eos_token=END)
    assert theirs.encode("The cat")[0] == 0
    assert HuggingFaceTokenizer(theirs).encode("The cat") == theirs.encode("The cat")[1:]
    assert FileTokenizer(adding, END).encode("The cat") == theirs.encode("The cat")[1:]


def test_a_sentencepiece_token_keeps_its_leading_space() -> None:
    metaspace = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace()
    metaspace.decoder = decoders.Metaspace()
    metaspace.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>"], show_progress=False)
    )
    tokenizer = HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=metaspace))
    ids = tokenizer.encode("The cat")
    assert "".join(tokenizer.piece(i) for i in ids) == " The cat"
    assert tokenizer.decode(ids[-1:]).startswith(" ") is False, "which is why piece() exists"


def test_a_file_without_the_token_that_begins_a_sequence_is_refused(stored: Path) -> None:
    with pytest.raises(ValueError, match=r"no token '<\|bos\|>' to begin a sequence with"):
        FileTokenizer.read(stored, "<|bos|>")


# --- layouts of a checkpoint's folder ------------------------------------------------------------------------------

LLAMA = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
TEMPLATE = "{% for m in messages %}<|turn|>{{ m.content }}{% endfor %}"
MERGES = "#version: 0.2\nt h\nth e\n"
WORDS = {word: i for i, word in enumerate(["<|endoftext|>", "t", "h", "e", "th", "the"])}
SPOKEN = ("the cat sat", " the cat", "two  spaces", "line\n\nthe", "Naïve ﬁ ½ 日本語 🙂", "\tthe ", "a")


def model_in(folder: Path) -> Path:
    """A tiny Llama."""
    hf_model("llama").save_pretrained(folder)
    return folder


def write(folder: Path, files: dict[str, object]) -> Path:
    """Files of these contents: text, bytes, or what is written as JSON."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@functools.cache
def pieces(**options: object) -> bytes:
    """A SentencePiece model; as Llama's, or with that library's usual rewriting of characters and spaces."""
    found = io.BytesIO()
    lines = [*CORPUS, "the cat sat on the mat", "a dog ran to the cat", "two lines"] * 20
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=found, vocab_size=340, model_type="bpe", byte_fallback=True,
        hard_vocab_limit=False, minloglevel=2, **options,
    )  # fmt: skip
    return found.getvalue()


def tekken() -> dict[str, object]:
    """What Mistral's own file of a vocabulary holds."""
    words = [bytes([i]) for i in range(256)] + [b"th", b"the", b"ca", b"cat", b" cat"]
    entries = [
        {"rank": i, "token_bytes": b64encode(w).decode(), "token_str": None} for i, w in enumerate(words)
    ]
    special = [
        {"rank": i, "token_str": w, "is_control": True} for i, w in enumerate(("<unk>", "<s>", "</s>"))
    ]
    sizes = {
        "num_vocab_tokens": len(words),
        "default_vocab_size": len(words) + 3,
        "default_num_special_tokens": 3,
    }
    config = {"pattern": r" ?\p{L}+|\s+|.", "version": "v7", **sizes}
    return {"config": config, "vocab": entries, "special_tokens": special}


def as_llama() -> bytes:
    return pieces(normalization_rule_name="identity", remove_extra_whitespaces=False)


def added(**tokens: int) -> dict[str, object]:
    """The entries of added tokens in `tokenizer_config.json`."""
    plain = {"special": True, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    return {
        "added_tokens_decoder": {str(i): {"content": f"<|{name}|>", **plain} for name, i in tokens.items()}
    }


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "settings alone": ({"tokenizer_config.json": LLAMA}, "there is tokenizer_config.json but no vocabulary"),
    "a template alone": ({"chat_template.jinja": TEMPLATE}, "there is chat_template.jinja but no vocabulary"),
    "a stray vocab.json": ({"vocab.json": WORDS}, "from vocab.json: transformers has no reader"),
    "a GPT-2's files": ({"vocab.json": WORDS, "merges.txt": MERGES}, "merges.txt, vocab.json: transformers has no"),
    "a BERT's file": ({"vocab.txt": "[PAD]\n[UNK]\nthe"}, "from vocab.txt: transformers has no reader"),
    "a T5's file": ({"spiece.model": b"\x0a"}, "from spiece.model: transformers has no reader"),
    "an XLM-R's file": ({"sentencepiece.bpe.model": b"\x0a"}, "from sentencepiece.bpe.model: transformers has no"),
    "another class's files": (
        {"vocab.txt": "[PAD]\n[UNK]\nthe", "tokenizer_config.json": LLAMA},
        "from vocab.txt: LlamaTokenizer finds no vocabulary",
    ),
    "remote code": (
        {
            "qwen.tiktoken": "dGhl 0\n",
            "tokenizer_config.json": {"tokenizer_class": "Q", "auto_map": {"AutoTokenizer": ["q.Q", None]}},
        },
        "its class Q is code of the checkpoint, which is never run",
    ),
    "a damaged tekken.json": ({"tekken.json": {}}, "its tokenizer cannot be read from tekken.json"),
    "damaged settings": (
        {"tokenizer.json": backend().to_str(), "tokenizer_config.json": "{"},
        r"tokenizer_config.json is not readable JSON",
    ),
}  # fmt: skip


def test_model_opens_beside_an_unreadable_tokenizer_and_says_why(
    tmp_path: Path,
) -> None:
    folder = model_in(tmp_path)
    for files, why in REFUSED.values():
        write(folder, files)
        model = HookedTransformer.from_pretrained(folder)
        assert model(torch.tensor([[1, 2]])).shape[:2] == (1, 2)
        with pytest.raises(ValueError, match=rf"texts are refused, .*{why}.*: pass token ids, or give a"):
            model.to_tokens("the")
        assert re.search(f"texts are refused, .*{why}", " ".join(str(model).split()))
        assert not model.text.has_tokenizer
        assert model.to_str_tokens(torch.tensor([5])) == ["<5>"]
        for name in files:
            (folder / name).unlink()
    assert "texts are refused" not in str(HookedTransformer.from_pretrained(folder))
    with pytest.raises(ValueError, match="this model has no tokenizer: pass token ids"):
        HookedTransformer.from_pretrained(folder).to_tokens("the")


def test_a_tokenizer_is_read_at_the_first_text_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(model_in(tmp_path), {"tokenizer.json": backend().to_str()})
    read, whole = [], HookedTransformer.from_pretrained
    monkeypatch.setattr(
        HuggingFaceTokenizer, "read", lambda path: read.append(path) or HuggingFaceTokenizer(gpt2_tokenizer())
    )
    model = whole(folder)
    model(torch.tensor([[1, 2]]))
    assert read == []
    first, _ = model.text.tokenizer, model.text.tokenizer
    assert model.text.tokenizer is first
    assert read == [folder]


def test_another_process_gets_the_same_tokenizer_whatever_was_read_before(
    tmp_path: Path,
) -> None:
    folder = write(tmp_path, {"tokenizer.json": backend().to_str()})
    text = Text(tokenizer_in(folder), 24, 400)
    before = fingerprint(text)
    sent = pickle.dumps(text)
    (folder / "tokenizer.json").unlink()
    there = pickle.loads(sent)
    assert there.ids("The cat") == text.ids("The cat") == backend().encode("The cat").ids
    assert text.batch("The cat").tokens.tolist() == [text.ids("The cat")]
    assert fingerprint(text) == fingerprint(there) == before
    nothing = Text(tokenizer_in(write(folder, {"vocab.json": WORDS})), 24, 400)
    with pytest.raises(ValueError, match=r"texts are refused, .* from vocab.json"):
        pickle.loads(pickle.dumps(nothing)).ids("The cat")


def test_what_transformers_reads_has_its_ids(tmp_path: Path) -> None:
    layouts: dict[str, tuple[str, dict[str, object]]] = {
        "gpt2": ("gpt2", {"vocab.json": WORDS, "merges.txt": MERGES}),
        "bert": ("bert", {"vocab.txt": "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\ncat"}),
        "named": (
            "llama",
            {"vocab.json": WORDS, "merges.txt": MERGES, "tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer"}},
        ),
        "tekken": ("mistral", {"tekken.json": tekken()}),
        "json": ("llama", {"tokenizer.json": backend().to_str(), "special_tokens_map.json": {"bos_token": END}}),
    }  # fmt: skip
    for name, (kind, files) in layouts.items():
        folder = write(tmp_path / name, {"config.json": {"model_type": kind}, **files})
        ours, theirs = tokenizer_of(folder), AutoTokenizer.from_pretrained(str(folder))
        assert isinstance(ours, HuggingFaceTokenizer)
        for text in ("the", "the cat", "thethe  e"):
            assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), name
            assert ours.with_special(text) == theirs.encode(text), name
        assert ours.eos_id == theirs.eos_token_id, name


def test_remote_code_of_a_tokenizer_is_not_run_and_special_tokens_are_kept(tmp_path: Path) -> None:
    says = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", "mine.MineFast"]}}
    files = {
        "config.json": {"model_type": "llama"},
        "mine.py": f"open({str(tmp_path / 'executed')!r}, 'w')",
        "tokenizer.json": backend().to_str(),
        "tokenizer_config.json": {**says, "bos_token": END, "pad_token": "[PAD]", "chat_template": TEMPLATE},
    }
    ours = tokenizer_of(write(tmp_path, files))
    assert isinstance(ours, HuggingFaceTokenizer)
    assert ours.encode("The cat") == backend().encode("The cat").ids
    assert (ours.bos_id, ours.pad_id) == (0, backend().get_vocab_size())
    assert ours.chat([{"role": "user", "content": "The cat"}]) == ours.encode("<|turn|>The cat")
    assert not (tmp_path / "executed").exists()


def test_a_chat_template_is_found_wherever_it_stands(tmp_path: Path) -> None:
    for number, files in enumerate(
        (
            {"chat_template.json": {"chat_template": TEMPLATE}},
            {"chat_template.jinja": TEMPLATE},
            {"tokenizer_config.json": {"chat_template": TEMPLATE}},
        )
    ):
        base = {"config.json": {"model_type": "llama"}, "tokenizer.json": backend().to_str()}
        ours = tokenizer_of(write(tmp_path / str(number), base | files))
        assert isinstance(ours, HuggingFaceTokenizer)
        assert ours.chat([{"role": "user", "content": "a"}]) == ours.encode("<|turn|>a")


def test_ids_that_a_model_has_no_row_for_are_refused_where_they_are_used(tmp_path: Path) -> None:
    theirs, d_vocab = gpt2_tokenizer(), backend().get_vocab_size()
    theirs.add_special_tokens({"pad_token": "[PAD]"})
    theirs.add_tokens(["<image_soft_token>"])
    config = replace(CONFIGS["llama-gqa"], d_vocab=d_vocab)
    families.save(perturbed(config), tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    for source in (HuggingFaceTokenizer(theirs), theirs):
        model = HookedTransformer.from_pretrained(tmp_path, tokenizer=source)
        assert values["d_vocab"] == model.cfg.d_vocab == d_vocab
        batch = model.to_batch(["The cat", "The cat sat on"])
        assert batch.tokens.max() < d_vocab
        assert torch.isfinite(model(batch)).all()
        said = rf"in \[0, {d_vocab - 1}\], got {d_vocab + 1}, the tokenizer's '<image_soft_token>', which this model"
        for prompt, place in (("The <image_soft_token>", 3), ([[5, d_vocab + 1]], 1)):
            with pytest.raises(ValueError, match=rf"{said} has no row for; at position {place} of prompt 0"):
                model(prompt)
        with pytest.raises(ValueError, match=said):
            model.text.targets("<image_soft_token>", 1)
        stream = Stream(
            open_source(["The cat", "a <image_soft_token>"]), model.text, tokens_per_batch=64
        ).window(0)
        assert "<image_soft_token>" in stream.rejected[0].reason


def test_padded_encoding_is_taken_although_its_padding_is_no_token() -> None:
    theirs, d_vocab = gpt2_tokenizer(), backend().get_vocab_size()
    theirs.add_special_tokens({"pad_token": "[PAD]"})
    model = HookedTransformer(
        perturbed(replace(CONFIGS["llama-gqa"], d_vocab=d_vocab)), HuggingFaceTokenizer(theirs)
    )
    batch = model.to_batch(theirs(["The cat", "The cat sat"], padding=True))
    assert batch.tokens.max() < d_vocab
    assert batch.lengths.tolist() == [2, 3]


# --- SentencePiece with settings beside it -------------------------------------------------------------------------


def test_sentencepiece_file_with_settings_has_its_own_and_the_added_ids(
    tmp_path: Path,
) -> None:
    """Trap: the class that such folders name rewrites no characters and merges no spaces: other ids, and no error."""
    for number, content in enumerate((as_llama(), pieces())):
        plain = sentencepiece.SentencePieceProcessor(model_proto=content)
        size = plain.get_piece_size()
        says = {**LLAMA, **added(turn=size), "add_bos_token": True, "chat_template": TEMPLATE}
        files = {"config.json": {"model_type": "llama"}, "tokenizer.model": content}
        ours = tokenizer_of(write(tmp_path / str(number), {**files, "tokenizer_config.json": says}))
        assert isinstance(ours, HuggingFaceTokenizer)
        for text in SPOKEN:
            assert ours.encode(text) == plain.encode(text)
            assert ours.with_special(text) == [1, *plain.encode(text)]
            assert ours.decode(ours.encode(text)) == plain.decode(plain.encode(text))
        assert ours.encode("a cat<|turn|>") == [*plain.encode("a cat"), size]
        assert ours.encode("<s>") == [1]
        assert ours.chat([{"role": "user", "content": "the cat"}]) == [size, *plain.encode("the cat")]


def test_a_first_space_is_as_transformers_has_it_where_settings_say_so(tmp_path: Path) -> None:
    plain = sentencepiece.SentencePieceProcessor(model_proto=as_llama())
    files = {"tokenizer.model": as_llama(), "tokenizer_config.json": {**LLAMA, "legacy": False}}
    folder = write(tmp_path, {"config.json": {"model_type": "llama"}, **files})
    ours, theirs = tokenizer_of(folder), AutoTokenizer.from_pretrained(str(folder))
    assert ours is not None
    assert ours.encode(" the cat") == theirs.encode(" the cat", add_special_tokens=False)
    for text in SPOKEN:
        assert ours.encode(text.strip(" ")) == plain.encode(text.strip(" "))


def test_ids_of_added_tokens_that_transformers_would_change_are_refused(tmp_path: Path) -> None:
    gap = {**LLAMA, **added(turn=900)}
    folder = write(tmp_path, {"tokenizer.model": as_llama(), "tokenizer_config.json": gap})
    with pytest.raises(ValueError, match=r"tokenizer_config.json says id 900 for '<\|turn\|>', got \d+"):
        tokenizer_of(folder)


def test_a_conversion_that_gives_other_ids_than_sentencepiece_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers 5.9 does, which loses the space before the first word."""
    folder = write(tmp_path, {"tokenizer.model": as_llama(), "tokenizer_config.json": LLAMA})
    monkeypatch.setattr("interp.families.tokenizer._load_with", lambda *_, **__: gpt2_tokenizer())
    with pytest.raises(ValueError, match=r"transformers \S+ reads tokenizer.model to other ids"):
        tokenizer_of(folder)


def test_a_sentencepiece_file_of_remote_code_is_converted(tmp_path: Path) -> None:
    plain = sentencepiece.SentencePieceProcessor(model_proto=as_llama())
    says = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}}
    files = {"config.json": {"model_type": "mine"}, "tokenizer.model": as_llama()}
    ours = tokenizer_of(write(tmp_path, {**files, "tokenizer_config.json": says}))
    assert ours is not None
    assert [ours.encode(text) for text in SPOKEN] == [plain.encode(text) for text in SPOKEN]


# --- GGUF ----------------------------------------------------------------------------------------------------------


def packed(path: Path, words: Sequence[str], merges: Sequence[Sequence[str]], **keys: str | int) -> Path:
    """A GGUF file of a byte-level tokenizer; keys: what `tokenizer.ggml.` says beside its lists."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(32)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([3 if word == END else 1 for word in words])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for key, value in keys.items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_a_gguf_file_has_its_tokenizer_and_chat_template(tmp_path: Path) -> None:
    stored = json.loads(backend().to_str())["model"]
    words = sorted(stored["vocab"], key=stored["vocab"].get)
    packed(tmp_path / "small.gguf", words, stored["merges"], pre="gpt-2")
    for path in (tmp_path / "small.gguf", tmp_path):
        ours = tokenizer_of(path)
        assert isinstance(ours, HuggingFaceTokenizer)
        for text in TEXTS:
            assert ours.encode(text) == backend().encode(text).ids
        assert (ours.bos_id, ours.eos_id) == (0, 0)
        assert ours.chat([{"role": "user", "content": "a"}]) == ours.encode("<|turn|>a")


CUTS: dict[str, pre_tokenizers.PreTokenizer] = {
    "words": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "digits": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}
"""How GPT-2's and SmolLM2's own tokenizer.json cut texts."""
SPACED = ("x =  12", "a\n  1. foo", "| 12 |  7 |", "1212", "the cat")
PAIRS = [
    ("\u0120", "\u0120"),
    ("1", "2"),
    ("\u0120", "1"),
    ("2", "0"),
    ("\u0120", "2"),
    ("t", "h"),
    ("th", "e"),
]


def byte_level(cut: pre_tokenizers.PreTokenizer) -> Tokenizer:
    """A byte-level tokenizer of few merges, some of them of digits and spaces, that cuts texts so."""
    words = [END, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in PAIRS)]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, PAIRS))
    made.pre_tokenizer = cut
    return made


def of_gguf(folder: Path, **keys: str | int) -> HuggingFaceTokenizer:
    """The same tokenizer out of a GGUF file."""
    vocabulary = byte_level(CUTS["words"]).get_vocab()
    words = sorted(vocabulary, key=lambda word: vocabulary[word])
    return HuggingFaceTokenizer.from_gguf(packed(folder / "small.gguf", words, PAIRS, **keys))


@pytest.mark.parametrize(
    ("pre", "cut"),
    [
        ("gpt-2", "words"),
        ("olmo", "words"),
        ("smollm", "digits"),
        ("starcoder", "digits"),
        ("command-r", "digits"),
    ],
)
def test_a_gguf_file_cuts_texts_as_the_rule_that_it_names(pre: str, cut: str, tmp_path: Path) -> None:
    ours, theirs = of_gguf(tmp_path, pre=pre), byte_level(CUTS[cut])
    assert [ours.encode(text) for text in SPACED] == [theirs.encode(text).ids for text in SPACED]
    others = [byte_level(other) for name, other in CUTS.items() if name != cut]
    assert [o.encode(SPACED[0]).ids for o in others] != [ours.encode(SPACED[0])], "the two rules differ here"


@pytest.mark.parametrize(
    ("pre", "like"), [("stablelm2", "qwen2"), ("glm4", "llama-bpe"), ("chatglm-bpe", "llama-bpe")]
)
def test_names_of_one_rule_cut_alike(pre: str, like: str, tmp_path: Path) -> None:
    pytest.importorskip(
        "transformers.integrations.gguf.gguf_tokenizer_mapping", reason="a newer transformers"
    )
    ours, other = of_gguf(tmp_path, pre=pre), of_gguf(tmp_path, pre=like)
    assert [ours.encode(text) for text in SPACED] == [other.encode(text) for text in SPACED]
    assert ours.encode("1212") != byte_level(CUTS["words"]).encode("1212").ids, (
        "at most three digits together"
    )


@pytest.mark.parametrize("pre", ["falcon", "deepseek-llm", "bloom", "default", "of next year"])
def test_a_gguf_file_whose_rule_is_not_known_refuses_texts(pre: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"how it cuts texts, '{pre}' .*is not known here; give tokenizer="):
        of_gguf(tmp_path, pre=pre)


def test_a_gguf_file_that_names_no_rule_says_so(tmp_path: Path) -> None:
    note.cache_clear()
    with pytest.warns(Note, match=r"small\.gguf does not say how texts are cut .* into words as GPT-2 does"):
        ours = of_gguf(tmp_path)
    assert ours.encode(SPACED[0]) == byte_level(CUTS["words"]).encode(SPACED[0]).ids


def test_the_ends_of_turns_of_a_gguf_file_end_generation(tmp_path: Path) -> None:
    text = Text(of_gguf(tmp_path, pre="gpt-2", eot_token_id=5, eom_token_id=900), 24, 200)
    assert text.end_ids == {0, 5}, "and none that the model has no row for"


def test_a_file_that_is_no_gguf_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"small.gguf": b"GGUF"})
    with pytest.raises(ValueError, match=r"small\.gguf: its tokenizer cannot be read"):
        HuggingFaceTokenizer.from_gguf(tmp_path / "small.gguf")
    assert tokenizer_in(tmp_path / "small.gguf") == tokenizer_in(tmp_path)
    write(tmp_path, {"other.gguf": b"GGUF", "model.safetensors": b""})
    assert tokenizer_in(tmp_path) is None
    assert tokenizer_in(tmp_path / "model.safetensors") is None
