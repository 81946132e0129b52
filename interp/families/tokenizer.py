"""Tokenizers of a checkpoint's folder or GGUF file in any layout, under one interface (`data.tokenizers.Tokenizer`).

Most tokenizers are read by transformers, which is imported when the first text is encoded, not when a model is opened.
Code of a checkpoint is never run.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

from interp.core.boundary import check, public
from interp.core.files import json_object, regular
from interp.core.notes import note
from interp.core.wording import NO_TEMPLATE
from interp.families import gguf, native

if TYPE_CHECKING:
    import tokenizers
    import transformers

VOCABULARIES = (
    "tokenizer.json", "*.model", "*.spm", "*.tiktoken", "tekken.json", "vocab.json", "vocab.txt", "merges.txt",
)  # fmt: skip
"""Names of the files that hold a tokenizer's tokens."""
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.*")
"""Names of the files with a tokenizer's settings, which need one of the files with its tokens."""
PROBES = ("the cat", " the  cat", "two\nlines ", "Na\u00efve \ufb01 \u00bd \u65e5\u672c\u8a9e \U0001f642\t!")
"""Texts on which two readers of a SentencePiece file are compared: spaces, and characters that some models rewrite."""


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
            tokenizer = tokenizers.Tokenizer.from_file(str(regular(path)))
        except Exception as cause:  # the library raises Exception itself
            raise ValueError(f"{path} is not a readable tokenizer: {cause}") from cause
        return cls(tokenizer, bos)

    @property
    def n_ids(self) -> int:
        """One more than the largest id."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str) -> list[int]:
        """Ids of the text without special tokens."""
        return list(self._tokenizer.encode(_valid_text(text), add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of `encode` for each text."""
        if self._tokenizer.padding is not None:  # it would pad them to the longest
            return [self.encode(text) for text in texts]
        # "fast" leaves out the offsets of the tokens: the same ids in 0.8 of the time.
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids, special tokens included."""
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False))

    def piece(self, token: int) -> str:
        """The text of one token."""
        return self.decode([token])


class HuggingFaceTokenizer:
    """A transformers tokenizer; where it has no BOS (or padding) token, its end-of-text token serves."""

    ends: tuple[int, ...] = ()
    """Further ids at which generation ends: the end of a turn and of a message (GGUF)."""

    def __init__(self, tokenizer: TransformersTokenizer, chat_template: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._template = chat_template
        bos, eos, pad = (getattr(tokenizer, f"{kind}_token_id", None) for kind in ("bos", "eos", "pad"))
        self.eos_id: int | None = eos
        self.bos_id: int | None = eos if bos is None else bos
        self.pad_id: int = next((i for i in (pad, self.eos_id, self.bos_id) if i is not None), 0)

    @classmethod
    def read(cls, folder: Path) -> "HuggingFaceTokenizer":
        """The tokenizer of a folder; ValueError, with the folder's name, for files that transformers cannot read."""
        try:
            return cls(_from_folder(folder))
        except (
            Exception
        ) as cause:  # of many kinds, and of none in particular: the files may be damaged anywhere
            where = ", ".join(_files_named(folder, VOCABULARIES)) or "no vocabulary"
            raise ValueError(
                f"{folder}: its tokenizer cannot be read from {where}: {_first_line(cause)}"
            ) from cause

    @classmethod
    def from_gguf(cls, path: Path) -> "HuggingFaceTokenizer":
        """The tokenizer inside a GGUF file, its chat template included.

        Raises:
            ValueError: transformers cannot read the tokenizer, or the package gguf is missing.
        """
        import transformers

        try:
            with gguf.read_in_seconds():
                theirs = transformers.AutoTokenizer.from_pretrained(
                    str(path.parent), gguf_file=path.name, trust_remote_code=False, local_files_only=True
                )
            keys = gguf.tokenizer_keys(path)
            _set_pre_tokenizer(theirs, path, keys)
            tokenizer = cls(theirs)
            tokenizer.ends = tuple(
                end for kind in ("eot", "eom") if isinstance(end := keys.get(f"{kind}_token_id"), int)
            )
            return tokenizer
        except Exception as cause:
            raise ValueError(f"{path}: its tokenizer cannot be read: {_first_line(cause)}") from cause

    @property
    def n_ids(self) -> int:
        """One more than the largest id, added tokens included."""
        return max(self._tokenizer.get_vocab().values(), default=-1) + 1

    def encode(self, text: str) -> list[int]:
        """Ids of the text without special tokens."""
        return list(self._tokenizer.encode(_valid_text(text), add_special_tokens=False))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of `encode` for each text."""
        if not texts:  # which transformers does not take
            return []
        encodings = self._tokenizer(list(texts), add_special_tokens=False)
        return [list(ids) for ids in encodings["input_ids"]]

    def with_special(self, text: str) -> list[int]:
        """Ids of the text with every special token that the tokenizer itself adds."""
        return list(self._tokenizer.encode(_valid_text(text)))

    def chat(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation in the tokenizer's chat template, which also writes the special tokens.

        The template comes from the checkpoint; transformers runs it in a sandbox.

        Raises:
            ValueError: a tokenizer without a template, or a conversation that its template refuses.
        """
        return self.encode(self._rendered(messages, add_generation_prompt=add_generation_prompt))

    def chat_text(self, messages: Sequence[Mapping[str, str]]) -> str:
        """A conversation as text in the chat template, up to where the assistant speaks.

        A last message of the assistant is left open, to be continued; after any other the template's generation
        prompt follows.

        Raises:
            ValueError: a tokenizer without a template, or a conversation that its template refuses.
        """
        continues = messages[-1]["role"] == "assistant"
        return self._rendered(messages, add_generation_prompt=not continues, continue_final_message=continues)

    @cached_property
    def turn_end(self) -> int | None:
        """Id of the special token with which the template ends an assistant's turn; None where there is none."""
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        try:
            whole, begun = self._rendered(messages), self.chat_text(messages)
        except ValueError:
            return None
        special = set(getattr(self._tokenizer, "added_tokens_decoder", {}))
        special |= set(getattr(self._tokenizer, "all_special_ids", ()))
        after = self.encode(whole.removeprefix(begun)) if whole.startswith(begun) else []
        return next((token for token in after if token in special), None)

    def _rendered(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
    ) -> str:
        """A conversation in the chat template; ValueError without one, or for messages that it refuses."""
        if self._template is None and getattr(self._tokenizer, "chat_template", None) is None:
            raise ValueError(NO_TEMPLATE)
        import jinja2

        try:
            text = self._tokenizer.apply_chat_template(  # type: ignore[attr-defined]
                [dict(message) for message in messages],
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
        except (jinja2.TemplateError, TypeError, KeyError, ValueError) as cause:
            raise ValueError(
                f"the tokenizer's chat template refuses these messages: {_first_line(cause)}"
            ) from cause
        return str(text)

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
    """A SentencePiece `.model` file, read by that library; where it has no BOS, its end-of-text token serves.

    Tokens that were added in other files beside it are not known to this tokenizer.
    """

    def __init__(self, content: bytes) -> None:
        """The file's content."""
        check("SentencePieceTokenizer: content", content, bytes)
        import sentencepiece

        model = sentencepiece.SentencePieceProcessor()
        try:
            model.LoadFromSerializedProto(content)
        except RuntimeError as cause:
            raise ValueError(f"content is not a readable SentencePiece model: {cause}") from cause
        self._model = model
        bos, eos, pad = (i if i >= 0 else None for i in (model.bos_id(), model.eos_id(), model.pad_id()))
        self.eos_id: int | None = eos
        self.bos_id: int | None = eos if bos is None else bos
        self.pad_id: int = next((i for i in (pad, self.eos_id, self.bos_id) if i is not None), 0)

    @classmethod
    @public()
    def read(cls, path: Path | str) -> "SentencePieceTokenizer":
        """The tokenizer of a file; ValueError, with the file's name, for a damaged or other file."""
        content = regular(path).read_bytes()
        try:
            return cls(content)
        except ValueError as cause:
            raise ValueError(f"{path} is not a readable SentencePiece model: {cause.__cause__}") from cause

    @property
    def n_ids(self) -> int:
        """Number of ids."""
        return int(self._model.get_piece_size())

    @public()
    def encode(self, text: str) -> list[int]:
        """Ids of the text without special tokens."""
        return [int(i) for i in self._model.encode(_valid_text(text))]

    @public()
    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids, special tokens included. IndexError for an id that there is not."""
        if bad := [token for token in ids if not 0 <= token < self.n_ids]:
            raise IndexError(f"ids are 0 to {self.n_ids - 1}, got {bad[0]}")
        text, run = "", list[int]()
        for token in ids:
            if self._model.is_control(int(token)):
                text, run = text + self._model.decode(run) + self._model.id_to_piece(int(token)), []
            else:
                run.append(int(token))
        return text + str(self._model.decode(run))

    @public()
    def piece(self, token: int) -> str:
        """The text of one token, leading space included. IndexError for an id that there is not."""
        if not 0 <= token < self.n_ids:
            raise IndexError(f"tokens are 0 to {self.n_ids - 1}, got {token}")
        raw = str(self._model.id_to_piece(int(token)))
        return self.decode([token]) if self._model.is_byte(int(token)) else raw.replace("\u2581", " ")


def _valid_text(text: str) -> str:
    """The text itself; ValueError for half of a surrogate pair, for which the libraries give unclear errors."""
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
    """A tokenizer whose files are not read yet: a model opens without them, and the first text reads them."""

    path: Path
    """The checkpoint's folder, or a GGUF file."""
    chat_template: str | None = None
    """A chat template in place of the files' own."""

    def opened(self) -> TokenizerAdapter:
        """The tokenizer; ValueError, in one sentence, for files that cannot be read."""
        tokenizer = self._in_files()
        if self.chat_template is not None:
            tokenizer = with_template(tokenizer, self.chat_template)
        return tokenizer

    def _in_files(self) -> TokenizerAdapter:
        """The tokenizer as its files say."""
        folder = self.path
        if folder.is_file():
            return HuggingFaceTokenizer.from_gguf(folder)
        vocabularies, settings = _files_named(folder, VOCABULARIES), _files_named(folder, SETTINGS)
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


def with_template(tokenizer: object, chat_template: str) -> HuggingFaceTokenizer:
    """The tokenizer with another chat template; ValueError for one that transformers does not read."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        raise ValueError(
            f"chat_template requires a tokenizer that transformers reads, got {type(tokenizer).__name__}"
        )
    found = copy.copy(tokenizer)
    found.__dict__.pop("turn_end", None)
    found._template = chat_template
    return found


@public()
def tokenizer_in(path: Path) -> StoredTokenizer | None:
    """The tokenizer of a checkpoint, not read yet; None where there are no tokenizer files.

    Args:
        path: the checkpoint's folder, its GGUF file, or another weight file in its folder. In a folder without
            tokenizer files, that of a single GGUF file is taken.
    """
    if path.is_file():
        return StoredTokenizer(path) if gguf.is_gguf(path) else tokenizer_in(path.parent)
    ours = _is_ours(path) and not any((path / f"tokenizer.{kind}").is_file() for kind in ("json", "model"))
    if not ours and _files_named(path, VOCABULARIES + SETTINGS):
        return StoredTokenizer(path)
    packed = _files_named(path, ["*.gguf"])
    return StoredTokenizer(path / packed[0]) if len(packed) == 1 else None


@public()
def tokenizer_of(folder: Path) -> TokenizerAdapter | None:
    """The tokenizer of a checkpoint, read from its files; None where there are no tokenizer files.

    Ids without a row in the embedding are refused only where they are used, since added tokens may occur in no text.

    Raises:
        ValueError: in one sentence, for files that cannot be read.
    """
    stored = tokenizer_in(folder)
    return None if stored is None else stored.opened()


def _files_named(folder: Path, patterns: Sequence[str]) -> list[str]:
    """The names of the files in a folder that match these patterns, sorted."""
    return sorted({file.name for pattern in patterns for file in folder.glob(pattern) if file.is_file()})


def _settings(folder: Path, name: str) -> Mapping[str, object]:
    """The contents of a JSON file in a folder; empty where there is none."""
    return json_object(folder / name) if (folder / name).is_file() else {}


def _is_ours(folder: Path) -> bool:
    """Whether a checkpoint is one of this package, by its config."""
    return _settings(folder, "config.json").get("model_type") == native.MODEL_TYPE


def _first_line(cause: Exception) -> str:
    """The first line of another library's error message."""
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
"""`tokenizer.ggml.pre` of files -> how a text is split before the merges, as in llama.cpp: "words" as GPT-2 has them,
"digits" for the same with every digit apart, or another name for which transformers has a rule.

Source: llama.cpp, `src/llama-vocab.cpp`.
"""


def _set_pre_tokenizer(
    tokenizer: "transformers.PreTrainedTokenizerBase", path: Path, keys: Mapping[str, object]
) -> None:
    """Set how a byte-level tokenizer splits texts to the rule named in its file (`tokenizer.ggml.pre`).

    transformers uses GPT-2's rule for every name that it does not know. A file without a name gets that rule too, and a
    `Note`.

    Raises:
        ValueError: a name whose rule is not known here.
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
        pre_tokenizer: pre_tokenizers.PreTokenizer = words
    elif rule == "digits":
        pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    elif rule in theirs:
        pieces = pre_tokenizers.Split(tokenizers.Regex(theirs[rule]), behavior="isolated")
        pre_tokenizer = pre_tokenizers.Sequence(
            [pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    else:
        raise ValueError(
            f"how it cuts texts, {named!r} (tokenizer.ggml.pre), is not known here; give tokenizer= of the original "
            "model"
        )
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizer


def _splits_of_transformers() -> Mapping[str, str]:
    """`tokenizer.ggml.pre` -> regular expression in transformers; empty for versions without such a table."""
    try:
        from transformers.integrations.gguf import gguf_tokenizer_mapping
    except ImportError:
        return {}
    splits: Mapping[str, str] = gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS
    return splits


# --- what transformers reads --------------------------------------------------------------------------------------


def _from_folder(folder: Path) -> TransformersTokenizer:
    """The transformers tokenizer of a folder, with the folder's chat template and without code of the checkpoint."""
    tokenizer_config = _settings(folder, "tokenizer_config.json")
    if (folder / "tokenizer.model").is_file() and not (folder / "tokenizer.json").is_file():
        tokenizer = _from_sentencepiece(folder, tokenizer_config)
    else:
        tokenizer = _from_named_class(folder, tokenizer_config)
    tokenizer(["a"])  # some damaged settings are read when the first text is
    special = set(getattr(tokenizer, "all_special_tokens", ()))
    if not set(tokenizer.get_vocab()) - special:
        raise ValueError(
            f"{type(tokenizer).__name__} finds no vocabulary among {', '.join(_files_named(folder, VOCABULARIES))}"
        )
    template = _settings(folder, "chat_template.json").get("chat_template")
    if template is not None and getattr(tokenizer, "chat_template", None) is None:
        tokenizer.chat_template = template  # type: ignore[attr-defined]
    return tokenizer


def _from_named_class(folder: Path, tokenizer_config: Mapping[str, object]) -> TransformersTokenizer:
    """The tokenizer of the class that the folder names, or of tokenizer.json where that class is remote code."""
    import transformers

    try:
        return _load_with(transformers.AutoTokenizer, folder)
    except Exception as cause:
        if "auto_map" not in tokenizer_config:
            raise
        if not (folder / "tokenizer.json").is_file():
            raise ValueError(
                f"its class {tokenizer_config.get('tokenizer_class')} is code of the checkpoint, which is never run, "
                "and there is no tokenizer.json"
            ) from cause
    return _load_with(transformers.PreTrainedTokenizerFast, folder)


def _from_sentencepiece(folder: Path, tokenizer_config: Mapping[str, object]) -> TransformersTokenizer:
    """The tokenizer of `tokenizer.model` and its settings, with the ids that SentencePiece itself gives plain texts.

    The classes of transformers that such folders name (LlamaTokenizer) have a normalisation of their own, so that texts
    with spaces, or with characters that the file rewrites, get other ids than in training. The conversion of the file
    by transformers is correct from some version on (5.9 loses the first space, 5.24 does not). The first of the two
    that agrees with SentencePiece is returned. With `"legacy": false` no space is put before a text that begins with
    one, as in transformers.

    Raises:
        ValueError: neither agrees.
    """
    import transformers

    try:
        plain = SentencePieceTokenizer.read(folder / "tokenizer.model")
    except ValueError:  # some files of this name are tiktoken's
        return _from_named_class(folder, tokenizer_config)
    if tokenizer_config.get("add_prefix_space") is False:  # which asks for other ids than the file's own
        return _from_named_class(folder, tokenizer_config)
    probes = [text.lstrip() if tokenizer_config.get("legacy") is False else text for text in PROBES]
    if "auto_map" not in tokenizer_config:
        tokenizer = _from_named_class(folder, tokenizer_config)
        if _agree(tokenizer, plain, probes):
            _check_added(tokenizer, tokenizer_config)
            return tokenizer
    begins = {} if "add_bos_token" in tokenizer_config else {"add_bos_token": True}  # as these classes do
    tokenizer = _load_with(transformers.PreTrainedTokenizerFast, folder, **begins)
    if not _agree(tokenizer, plain, probes):
        raise ValueError(
            f"transformers {transformers.__version__} reads tokenizer.model to other ids than SentencePiece itself; "
            "a newer version may not"
        )
    _check_added(tokenizer, tokenizer_config)
    return tokenizer


def _check_added(tokenizer: TransformersTokenizer, tokenizer_config: Mapping[str, object]) -> None:
    """ValueError for an added token with another id than in the settings: transformers silently closes gaps of ids."""
    ids, added = tokenizer.get_vocab(), tokenizer_config.get("added_tokens_decoder")
    for token, entry in added.items() if isinstance(added, Mapping) else ():
        content = entry.get("content") if isinstance(entry, Mapping) else entry
        if ids.get(str(content)) != int(token):
            raise ValueError(
                f"tokenizer_config.json says id {token} for {content!r}, got {ids.get(str(content))}"
            )


def _agree(tokenizer: TransformersTokenizer, plain: SentencePieceTokenizer, texts: Sequence[str]) -> bool:
    """Whether both tokenizers give the same ids for each text that contains no added token."""
    added = getattr(tokenizer, "added_tokens_encoder", {})
    return all(
        tokenizer.encode(text, add_special_tokens=False) == plain.encode(text)
        for text in texts
        if not any(token in text for token in added)
    )


def _load_with(kind: type, folder: Path, **settings: bool) -> TransformersTokenizer:
    """The tokenizer that a class of transformers reads from a folder, without download or code of the checkpoint."""
    tokenizer = kind.from_pretrained(  # type: ignore[attr-defined]
        str(folder), trust_remote_code=False, local_files_only=True, **settings
    )
    return cast(TransformersTokenizer, tokenizer)
