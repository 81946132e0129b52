"""Conversations as prompts: what a chat is, and which tokens of it belong to which message.

A chat template is a program of the checkpoint, so that where it writes a message, and what it changes in it, can only
be seen in what it returns. The chat is therefore rendered again with a mark in place of each content: with the contents
put back at the marks, the text must be the first one, character by character. (A third rendering, without white space
around the contents, tells whether the template keeps it.) Where it is not, whose tokens they are is unknown, and is
never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Literal, TypeGuard, get_args

import numpy as np
import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from interp.core.boundary import public
from interp.core.files import json_contents
from interp.core.notes import note
from interp.core.wording import NO_TEMPLATE, nearest, value_text
from interp.data.tokenizers import ChatTokenizer, Tokenizer
from interp.model.layout import PerRow

Message = Mapping[str, str]
"""One message: `{"role": "user", "content": "..."}`."""
Chat = Sequence[Message]
"""The messages of one conversation, in order."""
Role = Literal["system", "developer", "user", "assistant", "tool"]
"""The speaker of a message."""
TEMPLATE: Literal["template"] = "template"
"""What tokens that the template itself writes have in place of a role."""
ROLES: tuple[str, ...] = get_args(Role)
KEYS = ("role", "content", "reasoning_content")
"""Keys of a message; the last is what an assistant thought, for templates that take it apart from the content."""


@public()
def read_chats(path: Path | str) -> list[list[dict[str, str]]]:
    """The chats in a JSON file, each a list of messages, for every function that takes prompts.

    Args:
        path: a `.json` file of one chat, a list of messages; of several, a list of such lists; or of an object or a
            list of objects with the messages under `messages`. A `.jsonl` file has a chat in each line.

    Returns:
        The chats, in the file's order.

    Raises:
        ValueError: a file that holds no chats, and a message that is none, by file, chat and number.
        OSError: a file that cannot be read.

    Example:
        >>> import json, pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "talk.json"
        >>> _ = file.write_text(json.dumps([{"role": "user", "content": "The cat"}]))
        >>> interp.data.read_chats(file)
        [[{'role': 'user', 'content': 'The cat'}]]
    """
    contents, name = json_contents(path), Path(path).name
    chats = contents_as_chats(contents)
    if chats is None:
        raise ValueError(
            f"{name}: a list of messages with role and content, a list of such lists, or objects with 'messages' are "
            f"required, got {value_text(contents)}"
        )
    return as_chats(chats, name)


def contents_as_chats(contents: object) -> list[object] | None:
    """The chats in what a JSON file holds, not checked yet; None where it holds something else."""
    if isinstance(contents, Mapping):
        contents = [contents]
    if not isinstance(contents, list) or not contents:
        return None
    if isinstance(contents[0], Mapping) and "messages" in contents[0]:
        return [each.get("messages") if isinstance(each, Mapping) else each for each in contents]
    return [contents] if _has_role(contents[0]) else list(contents) if is_chats(contents[:1]) else None


UNKNOWN = -1
"""Code of every token of a row for which it is unknown whose they are."""
_THOUGHT = re.compile(r"(</?think>)")
"""Marks of reasoning, by which templates cut an assistant's content."""
_MARK = "\ue000{}\ue001"
"""Text in place of a content: two characters for private use around its number."""
_MARKED = re.compile("\ue000(\\d+)\ue001")


def is_chats(value: object) -> TypeGuard[Chat | Sequence[Chat]]:
    """Whether a value is meant as a chat or as several: a list of mappings with a role, or a list of such lists."""
    if not isinstance(value, list | tuple) or not value:
        return False
    return _has_role(value[0]) or all(
        isinstance(item, list | tuple) and item and _has_role(item[0]) for item in value
    )


def _has_role(message: object) -> bool:
    return isinstance(message, Mapping) and "role" in message


def as_chats(value: object, what: str = "chat") -> list[list[dict[str, str]]]:
    """One chat or several as a list of them, each message a dict.

    Args:
        value: the messages of one chat, or a list of chats.
        what: the name of the argument or file, for errors.

    Raises:
        ValueError: no messages; a message without role or content, with other keys, or with a content that is no text;
            a role that is not one of `ROLES`. The message says which.
    """
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(
            f"{what}: messages are required, such as [{{'role': 'user', 'content': 'Hello'}}], or a list of such "
            f"lists, got {value_text(value)}"
        )
    several = all(isinstance(item, list | tuple) for item in value)
    chats = list(value) if several else [value]
    return [_checked_chat(chat, f"{what} {i}" if several else what) for i, chat in enumerate(chats)]


def _checked_chat(chat: Sequence[object], what: str) -> list[dict[str, str]]:
    if not chat:
        raise ValueError(f"{what}: messages must be at least one, each with a role and content, got none")
    return [_checked_message(message, f"{what}, message {i}") for i, message in enumerate(chat)]


def _checked_message(message: object, what: str) -> dict[str, str]:
    if not isinstance(message, Mapping) or {"role", "content"} - set(message):
        raise ValueError(
            f"{what}: messages must be at least one, each with a role and content, got {value_text(message)}"
        )
    if unknown := [key for key in message if key not in KEYS]:
        raise ValueError(
            f"{what}: a message has the keys {', '.join(KEYS)}, not {unknown[0]!r}; for tools and pictures render the "
            "chat with the tokenizer and give its ids as the prompt"
        )
    if odd := [key for key in message if not isinstance(message[key], str)]:
        raise ValueError(f"{what}: {odd[0]} must be a text, got {value_text(message[odd[0]])}")
    role = str(message["role"])
    if role not in ROLES:
        raise ValueError(
            f"{what}: the role must be one of {', '.join(ROLES)}, got {role!r}; {nearest(role, ROLES)}"
        )
    return {str(key): str(text) for key, text in message.items()}


def encoded_chats(tokenizer: Tokenizer, chats: Sequence[Chat]) -> tuple[list[list[int]], list[list[int]]]:
    """The ids of each chat in the tokenizer's chat template, and the code of each token.

    Raises:
        ValueError: a tokenizer without a template, and a chat that its template refuses.
    """
    if not isinstance(tokenizer, ChatTokenizer):
        raise ValueError(NO_TEMPLATE)
    rows, codes = [], []
    for number, chat in enumerate(chats):
        rendered = RenderedChat.of(tokenizer, chat)
        ids = tokenizer.encode(rendered.text)
        found = rendered.codes(tokenizer, ids)
        if rendered.change or found is None:
            note(_changed_words(number, rendered, known=found is not None))
        rows.append(ids)
        codes.append([UNKNOWN] * len(ids) if found is None else found)
    return rows, codes


def _changed_words(number: int, rendered: RenderedChat, *, known: bool) -> str:
    why = rendered.change or "its tokens do not add up to the text that the template writes"
    unknown = "" if known else "; which tokens are whose cannot be told"
    return f"the chat template does not write chat {number} as it is given: {why}{unknown}"


def code_of(message: int, role: str) -> int:
    """The code of the tokens of a message: its number and its role in one number above 0, which is the template's."""
    return 1 + message * len(ROLES) + ROLES.index(role)


# --- where a template writes the messages ---------------------------------------------------------------------------


Characters = tuple[int, int, int]
"""First character, one past the last, and the code of the message that they belong to."""


@dataclass(frozen=True)
class RenderedChat:
    """A chat as the text that the model reads, and the characters of each message in it."""

    text: str
    spans: tuple[Characters, ...] | None
    """The characters of each piece of a message, in order; None: unknown."""
    change: str = ""
    """What the template does with the contents besides writing them, in words; why spans are unknown."""

    @classmethod
    def of(cls, tokenizer: ChatTokenizer, chat: Chat) -> RenderedChat:
        """The chat in the tokenizer's template; ValueError where the template refuses it."""
        text, change = tokenizer.chat_text(chat), ""
        for cut in (
            False,
            True,
        ):  # contents whole, or at their marks of reasoning, which the template may drop
            pieces = _pieces(chat, cut)
            try:
                skeleton, bare = _skeletons(tokenizer, chat, cut)
            except ValueError as cause:
                change = f"with other contents it refuses the messages ({cause})"
                continue
            if skeleton.numbers == bare.numbers and skeleton.filled(pieces) == text:
                return cls(text, tuple(skeleton.spans(pieces, bare)), _left_out(skeleton, pieces, chat))
            change = "it writes other text than the contents of the messages and its own marks"
        return cls(text, None, change)

    def codes(self, tokenizer: Tokenizer, ids: Sequence[int]) -> list[int] | None:
        """The code of each token, 0 for the template's own; None where it is unknown."""
        places = token_characters(tokenizer, ids, self.text)
        if self.spans is None or places is None:
            return None
        codes = [0] * len(ids)
        for start, stop, code in self.spans:
            for i, (first, last) in enumerate(places):
                codes[i] = code if first < stop and last > start else codes[i]
        return codes


@dataclass(frozen=True)
class _Piece:
    """A part of a content that a template may write by itself: all of it, or what stands between marks of reasoning."""

    message: int
    code: int
    before: str
    """White space at its beginning."""
    core: str
    after: str
    """White space at its end."""


@dataclass(frozen=True)
class _Skeleton:
    """What a template writes around marks that stand in place of the pieces."""

    literals: tuple[str, ...]
    """The texts before, between and after the marks."""
    numbers: tuple[int, ...]
    """The number of the piece in place of each mark."""

    @classmethod
    def of(cls, rendered: str) -> _Skeleton:
        parts = _MARKED.split(rendered)
        return cls(tuple(parts[::2]), tuple(map(int, parts[1::2])))

    def filled(self, pieces: Sequence[_Piece]) -> str:
        """The text with the pieces in place of their marks."""
        cores = (pieces[number].core for number in self.numbers)
        return self.literals[0] + "".join(
            core + text for core, text in zip(cores, self.literals[1:], strict=True)
        )

    def spans(self, pieces: Sequence[_Piece], bare: _Skeleton) -> Iterator[Characters]:
        """The characters of each piece, with the white space at its ends that the template keeps.

        Args:
            bare: what the template writes around pieces without such white space.
        """
        start, owners = len(self.literals[0]), [pieces[number] for number in self.numbers]
        befores, afters = [*(piece.before for piece in owners), ""], ["", *(piece.after for piece in owners)]
        kept = [_kept(*each) for each in zip(self.literals, bare.literals, afters, befores, strict=True)]
        for i, piece in enumerate(owners):
            stop = start + len(piece.core)
            yield start - kept[i][1], stop + kept[i + 1][0], piece.code
            start = stop + len(self.literals[i + 1])


def _skeletons(tokenizer: ChatTokenizer, chat: Chat, cut: bool) -> tuple[_Skeleton, _Skeleton]:
    """What the template writes around the pieces, and around pieces without white space at their ends."""
    skeleton = _Skeleton.of(tokenizer.chat_text(_marked(chat, cut)))
    try:
        return skeleton, _Skeleton.of(tokenizer.chat_text(_marked(chat, cut, bare=True)))
    except ValueError:  # an open answer whose reasoning transformers does not find if it is spaced otherwise
        return skeleton, skeleton


def _kept(literal: str, bare: str, after: str, before: str) -> tuple[int, int]:
    """How much of the white space after one piece and before the next a template keeps in the text between them."""
    ways = ((i, j) for i in range(len(after), -1, -1) for j in range(len(before), -1, -1))
    return next(
        ((i, j) for i, j in ways if literal == after[:i] + bare + before[len(before) - j :]),
        (0, 0),
    )


def _left_out(skeleton: _Skeleton, pieces: Sequence[_Piece], chat: Chat) -> str:
    """The first message that a template leaves out or cuts, in words; "" where there is none."""
    owners = {pieces[number].message for number in skeleton.numbers}
    missing = [piece.message for i, piece in enumerate(pieces) if i not in skeleton.numbers]
    parts = [
        f"it leaves out {'part of ' * (n in owners)}message {n}, of the {chat[n]['role']}" for n in missing
    ]
    return parts[0] if parts else ""


def _parts(message: Message, text: str, cut: bool) -> list[str]:
    """A text of a message as a whole, or what the assistant says cut before and after its marks of reasoning."""
    return _THOUGHT.split(text) if cut and message["role"] == "assistant" else [text]


def _pieces(chat: Chat, cut: bool) -> list[_Piece]:
    """The pieces of all contents, in order."""
    found = []
    for i, message in enumerate(chat):
        texts = [
            part for key, text in message.items() if key != "role" for part in _parts(message, text, cut)
        ]
        for part in texts:
            core = part.strip()
            if core and not _THOUGHT.fullmatch(part):
                before, _, after = part.partition(core)
                found.append(_Piece(i, code_of(i, message["role"]), before, core, after))
    return found


def _marked(chat: Chat, cut: bool, *, bare: bool = False) -> list[dict[str, str]]:
    """The chat with a mark in place of each piece of its contents; bare: without the white space around pieces."""
    numbers = count()

    def mark(part: str) -> str:
        core = part.strip()
        if not core or _THOUGHT.fullmatch(part):
            return part
        marked = _MARK.format(next(numbers))
        return marked if bare else marked.join(part.split(core, 1))

    return [
        {
            key: text if key == "role" else "".join(map(mark, _parts(message, text, cut)))
            for key, text in message.items()
        }
        for message in chat
    ]


def token_characters(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> list[tuple[int, int]] | None:
    """The characters of a text that each of its tokens holds: the first, and one past the last.

    The tokens are decoded one after the other, several together where they are one character, and compared with the
    text; white space may be no token's. None where their texts do not add up to it, as with a tokenizer that rewrites
    characters.
    """
    places: list[tuple[int, int]] = []
    done, waiting = 0, list[int]()
    for token in ids:
        waiting.append(token)
        written = tokenizer.piece(token) if len(waiting) == 1 else tokenizer.decode(waiting)
        found = _found_at(text, written, done)
        if found is None:
            continue
        places += [found] * len(waiting)
        done, waiting = found[1], []
    return None if waiting or text[done:].strip() else places


def _found_at(text: str, written: str, done: int) -> tuple[int, int] | None:
    """The characters of a text that a token's text is, at a place where a tokenizer may add or drop a space."""
    if text.startswith(written, done):
        return done, done + len(written)
    if written.startswith(" ") and text.startswith(written[1:], done):  # as SentencePiece before a text
        return done, done + len(written) - 1
    rest = text[done:].lstrip()  # which tokens of words do not hold
    start = len(text) - len(rest)
    return (start, start + len(written)) if rest.startswith(written) else None


# --- positions by role ----------------------------------------------------------------------------------------------


def role_words(turns: Int[Tensor, "b p"], real: Bool[Tensor, "b p"]) -> Shaped[np.ndarray, "b p"]:
    """The role of each token, "template" for what the template writes, "" at padding and where it is unknown."""
    spoken = np.array([*ROLES, TEMPLATE, ""], dtype=object)
    index = torch.where(turns > 0, (turns - 1) % len(ROLES), len(ROLES))
    return spoken[index.masked_fill((turns == UNKNOWN) | ~real, len(ROLES) + 1).numpy()]


def role_positions(rows: Sequence[Sequence[int]], role: str, turn: int | None) -> PerRow:
    """The positions of the tokens of a role in each row of codes.

    Args:
        rows: the code of each token of each row, without padding.
        role: one of `ROLES`, or "template".
        turn: which message of that role, from 0, negative from the last; None: all.

    Raises:
        ValueError: an unknown role; a row whose roles are unknown, without this role, or without this turn.
    """
    if role not in (*ROLES, TEMPLATE):
        raise ValueError(
            f"role must be one of {', '.join((*ROLES, TEMPLATE))}, got {role!r}; {nearest(role, ROLES)}"
        )
    if turn is not None and role == TEMPLATE:
        raise ValueError("the template has no turns: leave turn out")
    return PerRow([_places_of_role(row, number, role, turn) for number, row in enumerate(rows)])


def _places_of_role(codes: Sequence[int], number: int, role: str, turn: int | None) -> tuple[int, ...]:
    if UNKNOWN in codes:
        raise ValueError(
            f"the tokens of chat {number} cannot be told apart by role: its template changes what the messages say (a "
            "note said how when the batch was made)"
        )
    if role == TEMPLATE:
        return tuple(i for i, code in enumerate(codes) if code == 0)
    own = sorted({code for code in codes if code > 0 and ROLES[(code - 1) % len(ROLES)] == role})
    if not own:
        raise ValueError(f"chat {number} has no token of the {role}; it has {_roles_in(codes)}")
    if turn is not None and not -len(own) <= turn < len(own):
        raise ValueError(f"chat {number} has {len(own)} turns of the {role}, got turn {turn}")
    wanted = set(own) if turn is None else {own[turn]}
    return tuple(i for i, code in enumerate(codes) if code in wanted)


def _roles_in(codes: Sequence[int]) -> str:
    found = {ROLES[(code - 1) % len(ROLES)] for code in codes if code > 0}
    return ", ".join(role for role in ROLES if role in found) or "no message with content"


def answer_code(codes: Sequence[int]) -> int:
    """The code of tokens that are generated after these: the assistant's, in the last message or in one of its own."""
    last = max(codes)
    if UNKNOWN in codes:
        return UNKNOWN
    message, role = divmod(last - 1, len(ROLES)) if last > 0 else (-1, -1)
    if role == ROLES.index("assistant"):
        return last
    return code_of(message + 1, "assistant")
