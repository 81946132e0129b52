"""Tokenizers of a checkpoint's folder or GGUF file in any layout, under one interface (`data.tokenizers.Tokenizer`).

What transformers reads needs no reader here; it is imported when the first text is encoded, not when a model is opened.
Code of a checkpoint is never run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

from interp.core.boundary import public
from interp.core.files import json_object, regular
from interp.core.notes import note
from interp.families import gguf, native

if TYPE_CHECKING:
    import tokenizers
    import transformers

VOCABULARIES = (
    "tokenizer.json", "*.model", "*.spm", "*.tiktoken", "tekken.json", "vocab.json", "vocab.txt", "merges.txt",
)  # fmt: skip
"""Names of the files that hold a tokenizer's tokens."""
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.*")
"""Names of the files that say more of a tokenizer, and are nothing without one of the others."""
PROBES = ("the cat", " the  cat", "two\nlines ", "Na\u00efve \ufb01 \u00bd \u65e5\u672c\u8a9e \U0001f642\t!")
"""Plain texts by which two readers of a SentencePiece file are compared: spaces, and what some models rewrite."""


@runtime_checkable
class TransformersTokenizer(Protocol):
    """Protocol of a transformers tokenizer, so that the library need not be imported to recognise one."""

    def __call__(self, text: list[str], *, add_special_tokens: bool = True) -> Mapping[str, list[list[int]]]:
        """Ids of several texts, under "input_ids"."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text."""
        ...

    def decode(
        self, token_ids: list[int], *, clean_up_tokenization_spaces: bool | None = None
    ) -> str | list[str]:
        """The text of these ids."""
        ...

    def convert_ids_to_tokens(self, ids: int) -> str | list[str]:
        """The stored form of one token."""
        ...

    def get_vocab(self) -> dict[str, int]:
        """Every token and its id."""
        ...


class FileTokenizer:
    """A `tokenizer.json` read by the `tokenizers` library; its first special token serves as BOS, EOS and padding."""

    def __init__(self, tokenizer: "tokenizers.Tokenizer", bos: str) -> None:
        bos_id = tokenizer.token_to_id(bos)
        if bos_id is None:
            raise ValueError(f"the tokenizer has no token {bos!r} to begin a sequence with")
        self._tokenizer = tokenizer
        self.bos_id: int | None = bos_id
        self.eos_id: int | None = bos_id
        self.pad_id: int = bos_id

    @classmethod
    def read(cls, path: Path, bos: str) -> "FileTokenizer":
        """The tokenizer of a file."""
        import tokenizers

        try:
            found = tokenizers.Tokenizer.from_file(str(regular(path)))
        except Exception as cause:  # the library raises Exception itself
            raise ValueError(f"{path} is not a readable tokenizer: {cause}") from cause
        return cls(found, bos)

    @property
    def n_ids(self) -> int:
        """One more than the largest id."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str) -> list[int]:
        """Ids of the text without special tokens."""
        return list(self._tokenizer.encode(_whole(text), add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of `encode` for each text."""
        if self._tokenizer.padding is not None:  # it would pad them to the longest
            return [self.encode(text) for text in texts]
        # "fast" leaves out where in the text each token stands: the same ids in 0.8 of the time.
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [one.ids for one in found]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids, special tokens included."""
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False))

    def piece(self, token: int) -> str:
        """The text of one token."""
        return self.decode([token])


class HuggingFaceTokenizer:
    """A transformers tokenizer; where it has no BOS (or padding) token, its end-of-text token serves."""

    ends: tuple[int, ...] = ()
    """More ids at which what is generated ends: of a turn and of a message (GGUF)."""

    def __init__(self, tokenizer: TransformersTokenizer) -> None:
        self._tokenizer = tokenizer
        bos, eos, pad = (getattr(tokenizer, f"{kind}_token_id", None) for kind in ("bos", "eos", "pad"))
        self.eos_id: int | None = eos
        self.bos_id: int | None = eos if bos is None else bos
        self.pad_id: int = next((i for i in (pad, self.eos_id, self.bos_id) if i is not None), 0)

    @classmethod
    def read(cls, folder: Path) -> "HuggingFaceTokenizer":
        """The tokenizer of a folder; ValueError, by its name, for files that transformers cannot read."""
        try:
            return cls(_in_folder(folder))
        except (
            Exception
        ) as cause:  # of many kinds, and of none in particular: the files may be damaged anywhere
            where = ", ".join(_names(folder, VOCABULARIES)) or "no vocabulary"
            raise ValueError(
                f"{folder}: its tokenizer cannot be read from {where}: {_in_short(cause)}"
            ) from cause

    @classmethod
    def from_gguf(cls, path: Path) -> "HuggingFaceTokenizer":
        """The tokenizer inside a GGUF file, its chat template included.

        Raises:
            ValueError: by the file's name, for what transformers cannot read, or where the package gguf is missing.
        """
        import transformers

        try:
            with gguf.read_in_seconds():
                found = transformers.AutoTokenizer.from_pretrained(
                    str(path.parent), gguf_file=path.name, trust_remote_code=False, local_files_only=True
                )
            keys = gguf.tokenizer_keys(path)
            _split_as_told(found, path, keys)
            made = cls(found)
            made.ends = tuple(
                end for kind in ("eot", "eom") if isinstance(end := keys.get(f"{kind}_token_id"), int)
            )
            return made
        except Exception as cause:
            raise ValueError(f"{path}: its tokenizer cannot be read: {_in_short(cause)}") from cause

    @property
    def n_ids(self) -> int:
        """One more than the largest id, added tokens included."""
        return max(self._tokenizer.get_vocab().values(), default=-1) + 1

    def encode(self, text: str) -> list[int]:
        """Ids of the text without special tokens."""
        return list(self._tokenizer.encode(_whole(text), add_special_tokens=False))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of `encode` for each text."""
        if not texts:  # which transformers does not take
            return []
        found = self._tokenizer(list(texts), add_special_tokens=False)
        return [list(ids) for ids in found["input_ids"]]

    def with_special(self, text: str) -> list[int]:
        """Ids of the text with every special token that the tokenizer itself adds."""
        return list(self._tokenizer.encode(_whole(text)))

    def chat(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation in the tokenizer's own template, special tokens as the template writes them.

        The template is text of the checkpoint, which transformers runs in a sandbox.

        Raises:
            ValueError: a tokenizer without a template, or a conversation that its template refuses.
        """
        if getattr(self._tokenizer, "chat_template", None) is None:
            raise ValueError("messages require a tokenizer with a chat template, this one has none")
        import jinja2

        try:
            text = self._tokenizer.apply_chat_template(  # type: ignore[attr-defined]
                [dict(each) for each in messages], tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except (jinja2.TemplateError, TypeError, KeyError) as cause:
            raise ValueError(f"the tokenizer's chat template refuses these messages: {cause}") from cause
        return self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids, special tokens included, spaces as they are."""
        return str(self._tokenizer.decode([int(i) for i in ids], clean_up_tokenization_spaces=False))

    def piece(self, token: int) -> str:
        """The text of one token, with the leading space that decoding it by itself would drop (SentencePiece)."""
        raw = self._tokenizer.convert_ids_to_tokens(int(token))
        if isinstance(raw, str) and "\u2581" in raw:
            return raw.replace("\u2581", " ")
        return self.decode([token])


class SentencePieceTokenizer:
    """A SentencePiece `.model` file, read by that library itself; where it has no BOS, its end of text serves.

    What such a file alone means, only its own library says; it knows nothing of tokens that were added beside it.
    """

    def __init__(self, content: bytes) -> None:
        """The file's content."""
        import sentencepiece

        found = sentencepiece.SentencePieceProcessor()
        found.LoadFromSerializedProto(content)
        self._model = found
        bos, eos, pad = (i if i >= 0 else None for i in (found.bos_id(), found.eos_id(), found.pad_id()))
        self.eos_id: int | None = eos
        self.bos_id: int | None = eos if bos is None else bos
        self.pad_id: int = next((i for i in (pad, self.eos_id, self.bos_id) if i is not None), 0)

    @classmethod
    def read(cls, path: Path | str) -> "SentencePieceTokenizer":
        """The tokenizer of a file; ValueError, by its name, for one that is none or is damaged."""
        try:
            return cls(regular(path).read_bytes())
        except RuntimeError as cause:
            raise ValueError(f"{path} is not a readable SentencePiece model: {cause}") from cause

    @property
    def n_ids(self) -> int:
        """How many ids it gives."""
        return int(self._model.get_piece_size())

    def encode(self, text: str) -> list[int]:
        """Ids of the text without special tokens."""
        return [int(i) for i in self._model.encode(_whole(text))]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids, special tokens included."""
        text, run = "", list[int]()
        for token in ids:
            if self._model.is_control(int(token)):
                text, run = text + self._model.decode(run) + self._model.id_to_piece(int(token)), []
            else:
                run.append(int(token))
        return text + str(self._model.decode(run))

    def piece(self, token: int) -> str:
        """The text of one token, leading space included."""
        raw = str(self._model.id_to_piece(int(token)))
        return self.decode([token]) if self._model.is_byte(int(token)) else raw.replace("\u2581", " ")


def _whole(text: str) -> str:
    """The text itself; ValueError for half of a surrogate pair, which neither library has a good word for."""
    try:
        text.encode()
    except UnicodeEncodeError as cause:
        raise ValueError(
            f"a text of whole characters is required, {text!r} has half of a surrogate pair at {cause.start}"
        ) from cause
    return text


TokenizerAdapter = FileTokenizer | HuggingFaceTokenizer | SentencePieceTokenizer


@dataclass(frozen=True)
class StoredTokenizer:
    """A tokenizer that is still in its files: a model opens without it, and the first text reads it."""

    path: Path
    """The checkpoint's folder, or a GGUF file."""

    def opened(self) -> TokenizerAdapter:
        """The tokenizer; ValueError, in one sentence, for files that cannot be read."""
        folder = self.path
        if folder.is_file():
            return HuggingFaceTokenizer.from_gguf(folder)
        vocabularies, settings = _names(folder, VOCABULARIES), _names(folder, SETTINGS)
        if "tokenizer.model" in vocabularies and "tokenizer.json" not in vocabularies and not settings:
            return SentencePieceTokenizer.read(folder / "tokenizer.model")
        if _is_ours(folder):
            return FileTokenizer.read(folder / "tokenizer.json", native.BOS)
        if not vocabularies:
            raise ValueError(
                f"{folder}: its tokenizer cannot be read: there is {', '.join(settings)} but no vocabulary "
                "(tokenizer.json, tokenizer.model, vocab.json and merges.txt, vocab.txt)"
            )
        return HuggingFaceTokenizer.read(folder)


@public()
def tokenizer_in(path: Path) -> StoredTokenizer | None:
    """The tokenizer of a checkpoint, not read yet; None where no file of one is there.

    Args:
        path: its folder, its GGUF file, or another file of weights in its folder. A folder without files of a
            tokenizer may have one GGUF file.
    """
    if path.is_file():
        return StoredTokenizer(path) if gguf.is_gguf(path) else tokenizer_in(path.parent)
    ours = _is_ours(path) and not any((path / f"tokenizer.{kind}").is_file() for kind in ("json", "model"))
    if not ours and _names(path, VOCABULARIES + SETTINGS):
        return StoredTokenizer(path)
    packed = _names(path, ["*.gguf"])
    return StoredTokenizer(path / packed[0]) if len(packed) == 1 else None


@public()
def tokenizer_of(folder: Path) -> TokenizerAdapter | None:
    """The tokenizer of a checkpoint, as `tokenizer_in`, read; None where no file of one is there.

    Ids that a model has no row for are refused where they are used, since tokens may have been added that no text has.

    Raises:
        ValueError: in one sentence, for files that cannot be read.
    """
    found = tokenizer_in(folder)
    return None if found is None else found.opened()


def _names(folder: Path, patterns: Sequence[str]) -> list[str]:
    """The files of these names that a folder has."""
    return sorted({file.name for pattern in patterns for file in folder.glob(pattern) if file.is_file()})


def _settings(folder: Path, name: str) -> Mapping[str, object]:
    """The contents of a JSON file of a folder; nothing where there is none."""
    return json_object(folder / name) if (folder / name).is_file() else {}


def _is_ours(folder: Path) -> bool:
    """Whether a checkpoint is one of this package, by its config."""
    return _settings(folder, "config.json").get("model_type") == native.MODEL_TYPE


def _in_short(cause: Exception) -> str:
    """The first line of what another library says."""
    message = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
    if message.startswith("Couldn't instantiate the backend tokenizer"):  # and what else it would take
        return "transformers has no reader of such files for this type of model"
    return message


# --- GGUF ---------------------------------------------------------------------------------------------------------

_WORDS = (
    "gpt-2", "phi-2", "jina-es", "jina-de", "jina-v1-en", "jina-v2-es", "jina-v2-de", "jina-v2-code", "roberta-bpe",
    "gigachat", "a.x-4.0", "mellum", "exaone4", "mpt", "olmo", "jais", "trillion",
)  # fmt: skip
_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
SPLITS: Mapping[str, str] = {
    **dict.fromkeys(_WORDS, "words"), **dict.fromkeys(_DIGITS, "digits"),
    **dict.fromkeys(("stablelm2", "hunyuan"), "qwen2"), **dict.fromkeys(("glm4", "chatglm-bpe"), "llama-bpe"),
}  # fmt: skip
"""`tokenizer.ggml.pre` of files -> how a text is cut before the merges, as llama.cpp does: into words as GPT-2 has
them; the same with every digit apart; or by the rule that transformers has for another of these names.

Source: llama.cpp, `src/llama-vocab.cpp`.
"""


def _split_as_told(
    found: "transformers.PreTrainedTokenizerBase", path: Path, keys: Mapping[str, object]
) -> None:
    """Let a byte-level tokenizer cut texts as its file says; transformers takes GPT-2's rule for names it has not.

    Raises:
        ValueError: a name whose rule is not known here. A file without one gets GPT-2's and a `Note`.
    """
    import tokenizers
    from tokenizers import pre_tokenizers

    if keys.get("model") != "gpt2":
        return
    named = keys.get("pre")
    if named is None:
        note(
            f"{path.name} does not say how texts are cut before the merges (tokenizer.ggml.pre): they are cut into "
            "words as GPT-2 does; a tokenizer= of the original model is surer"
        )
        named = "gpt-2"
    rule, theirs = SPLITS.get(str(named), str(named)), _splits_of_transformers()
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if rule == "words":
        made: pre_tokenizers.PreTokenizer = words
    elif rule == "digits":
        made = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    elif rule in theirs:
        pieces = pre_tokenizers.Split(tokenizers.Regex(theirs[rule]), behavior="isolated")
        made = pre_tokenizers.Sequence(
            [pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    else:
        raise ValueError(
            f"how it cuts texts, {named!r} (tokenizer.ggml.pre), is not known here; give tokenizer= of the original "
            "model"
        )
    found.backend_tokenizer.pre_tokenizer = made


def _splits_of_transformers() -> Mapping[str, str]:
    """The regular expressions that transformers has by the names of files; empty for versions without such a table."""
    try:
        from transformers.integrations.gguf import gguf_tokenizer_mapping
    except ImportError:
        return {}
    found: Mapping[str, str] = gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS
    return found


# --- what transformers reads --------------------------------------------------------------------------------------


def _in_folder(folder: Path) -> TransformersTokenizer:
    """transformers' tokenizer of a folder, without code of the checkpoint, with the chat template that stands there."""
    says = _settings(folder, "tokenizer_config.json")
    if (folder / "tokenizer.model").is_file() and not (folder / "tokenizer.json").is_file():
        found = _of_pieces(folder, says)
    else:
        found = _by_class(folder, says)
    found(["a"])  # some damaged settings are read when the first text is
    special = set(getattr(found, "all_special_tokens", ()))
    if not set(found.get_vocab()) - special:
        raise ValueError(
            f"{type(found).__name__} finds no vocabulary among {', '.join(_names(folder, VOCABULARIES))}"
        )
    template = _settings(folder, "chat_template.json").get("chat_template")
    if template is not None and getattr(found, "chat_template", None) is None:
        found.chat_template = template  # type: ignore[attr-defined]
    return found


def _by_class(folder: Path, says: Mapping[str, object]) -> TransformersTokenizer:
    """The tokenizer as the class that a folder names, or as its tokenizer.json where that class is remote code."""
    import transformers

    try:
        return _read_by(transformers.AutoTokenizer, folder)
    except Exception as cause:
        if "auto_map" not in says:
            raise
        if not (folder / "tokenizer.json").is_file():
            raise ValueError(
                f"its class {says.get('tokenizer_class')} is code of the checkpoint, which is never run, and there is "
                "no tokenizer.json"
            ) from cause
    return _read_by(transformers.PreTrainedTokenizerFast, folder)


def _of_pieces(folder: Path, says: Mapping[str, object]) -> TransformersTokenizer:
    """The tokenizer of `tokenizer.model` and its settings, with the ids that SentencePiece gives plain texts.

    The classes of transformers that such folders name (LlamaTokenizer) normalise in a way of their own, so that texts
    with spaces, or with characters that the file rewrites, get other ids than the model was trained with. Its
    conversion of the file itself does not, from some version on (5.9 loses the first space, 5.24 does not). Of both,
    the first that agrees is taken. With `"legacy": false` a text that begins with a space has no other before it, as
    transformers has it.

    Raises:
        ValueError: neither agrees.
    """
    import transformers

    try:
        plain = SentencePieceTokenizer.read(folder / "tokenizer.model")
    except ValueError:  # some files of this name are tiktoken's
        return _by_class(folder, says)
    if says.get("add_prefix_space") is False:  # which asks for other ids than the file's own
        return _by_class(folder, says)
    probes = [text.lstrip() if says.get("legacy") is False else text for text in PROBES]
    if "auto_map" not in says:
        found = _by_class(folder, says)
        if _agree(found, plain, probes):
            _check_added(found, says)
            return found
    begins = {} if "add_bos_token" in says else {"add_bos_token": True}  # as these classes do
    found = _read_by(transformers.PreTrainedTokenizerFast, folder, **begins)
    if not _agree(found, plain, probes):
        raise ValueError(
            f"transformers {transformers.__version__} reads tokenizer.model to other ids than SentencePiece itself; "
            "a newer version may not"
        )
    _check_added(found, says)
    return found


def _check_added(found: TransformersTokenizer, says: Mapping[str, object]) -> None:
    """ValueError for an added token that has another id than the settings say; a gap between ids closes unseen."""
    ids, added = found.get_vocab(), says.get("added_tokens_decoder")
    for token, entry in added.items() if isinstance(added, Mapping) else ():
        content = entry.get("content") if isinstance(entry, Mapping) else entry
        if ids.get(str(content)) != int(token):
            raise ValueError(
                f"tokenizer_config.json says id {token} for {content!r}, got {ids.get(str(content))}"
            )


def _agree(found: TransformersTokenizer, plain: SentencePieceTokenizer, texts: Sequence[str]) -> bool:
    """Whether both give the same ids to plain texts, those in which no added token stands."""
    added = getattr(found, "added_tokens_encoder", {})
    return all(
        found.encode(text, add_special_tokens=False) == plain.encode(text)
        for text in texts
        if not any(token in text for token in added)
    )


def _read_by(kind: type, folder: Path, **settings: bool) -> TransformersTokenizer:
    """The tokenizer that a class of transformers makes of a folder, without download or code of the checkpoint."""
    found = kind.from_pretrained(  # type: ignore[attr-defined]
        str(folder), trust_remote_code=False, local_files_only=True, **settings
    )
    return cast(TransformersTokenizer, found)
