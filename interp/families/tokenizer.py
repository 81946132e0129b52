"""The common tokenizer libraries under one small interface (see `data.text.Tokenizer`)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from interp.core.files import regular

if TYPE_CHECKING:
    import tokenizers


@runtime_checkable
class TransformersTokenizer(Protocol):
    """What marks a transformers tokenizer, said here so that nobody has to import the library to name one."""

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
        """Ids of the text alone."""
        return list(self._tokenizer.encode(_whole(text), add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """What `encode` gives for each text."""
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

    def __init__(self, tokenizer: TransformersTokenizer) -> None:
        self._tokenizer = tokenizer
        bos, eos, pad = (getattr(tokenizer, f"{kind}_token_id", None) for kind in ("bos", "eos", "pad"))
        self.eos_id: int | None = eos
        self.bos_id: int | None = eos if bos is None else bos
        self.pad_id: int = next((i for i in (pad, self.eos_id, self.bos_id) if i is not None), 0)

    @classmethod
    def read(cls, folder: Path) -> "HuggingFaceTokenizer":
        """The tokenizer of a folder; ValueError, by its name, for files that transformers cannot read."""
        import transformers

        try:
            found = transformers.AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
            found("a")  # some damaged settings are read when the first text is
        except (
            Exception
        ) as cause:  # of many kinds, and of none in particular: the files may be damaged anywhere
            raise ValueError(f"{folder}: its tokenizer cannot be read: {cause}") from cause
        return cls(found)

    @property
    def n_ids(self) -> int:
        """One more than the largest id, added tokens included."""
        return max(self._tokenizer.get_vocab().values(), default=-1) + 1

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone."""
        return list(self._tokenizer.encode(_whole(text), add_special_tokens=False))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """What `encode` gives for each text."""
        if not texts:  # which transformers does not take
            return []
        found = self._tokenizer(list(texts), add_special_tokens=False)
        return [list(ids) for ids in found["input_ids"]]

    def with_special(self, text: str) -> list[int]:
        """Ids of the text with every special token that the tokenizer itself adds."""
        return list(self._tokenizer.encode(_whole(text)))

    def chat(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation in the tokenizer's own template, special tokens as the template writes them.

        The template is text of the checkpoint, which transformers runs in a sandbox. Errors: ValueError for a tokenizer
        without a template, or a conversation that its template refuses.
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
        """The text of one token, with the leading space that decoding alone would drop (SentencePiece)."""
        raw = self._tokenizer.convert_ids_to_tokens(int(token))
        if isinstance(raw, str) and "\u2581" in raw:
            return raw.replace("\u2581", " ")
        return self.decode([token])


class SentencePieceTokenizer:
    """A SentencePiece `.model` file, read by that library itself; where it has no BOS, its end of text serves.

    transformers converts such a file, and in doing so may lose what stands before the first word: other ids.
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
        """Ids of the text alone."""
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


def check_fit(tokenizer: FileTokenizer | HuggingFaceTokenizer | SentencePieceTokenizer, d_vocab: int) -> None:
    """ValueError naming both sizes if a tokenizer gives ids that the model has no row for.

    An embedding with more rows than the tokenizer has tokens is fine: many are padded to a round number.
    """
    if tokenizer.n_ids > d_vocab:
        raise ValueError(
            f"the tokenizer has ids up to {tokenizer.n_ids - 1}, the model a vocabulary of {d_vocab}: "
            "tokens were added that the model lacks, or it is another model's tokenizer"
        )
    if not 0 <= tokenizer.pad_id < d_vocab:
        raise ValueError(
            f"the tokenizer pads with id {tokenizer.pad_id}, the model has a vocabulary of {d_vocab}"
        )
