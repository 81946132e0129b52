"""llama2.c's tokenizer: pieces with scores, merged greedily by score as run.c does, bytes for what has no piece."""

import re
import struct
from collections.abc import Sequence
from pathlib import Path

BYTE_PIECE = re.compile(rb"<0x([0-9A-Fa-f]{2})>")
FIRST_BYTE = 3
"""The id of byte 0; before it stand unknown, beginning and end."""


class Llama2cTokenizer:
    """Sentencepiece-style byte pairs: a text begins with a space of its own, the best-scored pair is joined first."""

    bos_id: int | None = 1
    eos_id: int | None = 2
    pad_id: int = 2

    def __init__(self, pieces: Sequence[bytes], scores: Sequence[float]) -> None:
        if len(pieces) != len(scores) or len(pieces) <= FIRST_BYTE:
            raise ValueError(
                f"a vocabulary of more than {FIRST_BYTE} pieces, each with a score, is required, "
                f"got {len(pieces)} pieces and {len(scores)} scores"
            )
        self._pieces = tuple(pieces)
        self._scores = tuple(scores)
        self._ids = {piece: i for i, piece in reversed(list(enumerate(pieces)))}

    @classmethod
    def read(cls, file: Path) -> "Llama2cTokenizer":
        """The tokenizer of a `tokenizer.bin`: an int32 (the longest piece), then score, length and bytes of each.

        Raises:
            FileNotFoundError, ValueError: naming the file and the piece that is cut off or longer than said.
        """
        if not file.is_file():
            raise FileNotFoundError(f"{file} does not exist")
        content = file.read_bytes()
        longest = struct.unpack_from("<i", content)[0] if len(content) >= 4 else -1
        pieces: list[bytes] = []
        scores: list[float] = []
        at = 4
        while at < len(content):
            score, length = struct.unpack_from("<fi", content, at) if at + 8 <= len(content) else (0.0, -1)
            if not 0 <= length <= longest or at + 8 + length > len(content):
                raise ValueError(
                    f"{file}: piece {len(pieces)} has length {length}, of at most {longest} and "
                    f"{max(0, len(content) - at - 8)} bytes that are left"
                )
            pieces.append(content[at + 8 : at + 8 + length])
            scores.append(score)
            at += 8 + length
        if not pieces:
            raise ValueError(f"{file} holds no pieces, {len(content)} bytes in all")
        return cls(pieces, scores)

    def __len__(self) -> int:
        return len(self._pieces)

    def encode(self, text: str) -> list[int]:
        """Ids of the text without special tokens, with the space that every text begins with.

        Empty for an empty text.
        """
        if not text:
            return []
        ids = [self._ids[b" "]] if b" " in self._ids else []
        for character in text:
            ids += self._character(character.encode("utf-8", errors="surrogatepass"))
        while (best := self._best_pair(ids)) is not None:
            at, joined = best
            ids[at : at + 2] = [joined]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids, special tokens included; the space that a text begins with is left out."""
        parts = []
        for i, token in enumerate(ids):
            content = self._bytes(int(token))
            begins = i == 0 or int(ids[i - 1]) == self.bos_id
            parts.append(content.removeprefix(b" ") if begins else content)
        return b"".join(parts).decode("utf-8", errors="replace")

    def piece(self, token: int) -> str:
        """The text of one token, leading space included."""
        return self._bytes(token).decode("utf-8", errors="replace")

    def _bytes(self, token: int) -> bytes:
        if not 0 <= token < len(self._pieces):
            raise ValueError(f"token ids must be in [0, {len(self._pieces) - 1}], got {token}")
        found = BYTE_PIECE.fullmatch(self._pieces[token])
        return self._pieces[token] if found is None else bytes([int(found[1], 16)])

    def _character(self, content: bytes) -> list[int]:
        """The piece that a character is, or one token for each of its bytes."""
        whole = self._ids.get(content)
        if whole is not None:
            return [whole]
        ids = [FIRST_BYTE + byte for byte in content]
        if bad := [i for i in ids if i >= len(self)]:
            raise ValueError(
                f"{content.decode('utf-8', 'replace')!r} has no piece, and the vocabulary of {len(self)} ends before "
                f"the byte piece {bad[0]}"
            )
        return ids

    def _best_pair(self, ids: Sequence[int]) -> tuple[int, int] | None:
        """Index of the neighbours with the highest score of their joint piece, the first of equals, and that piece."""
        best: tuple[int, int] | None = None
        for at in range(len(ids) - 1):
            joined = self._ids.get(self._pieces[ids[at]] + self._pieces[ids[at + 1]])
            if joined is not None and (best is None or self._scores[joined] > self._scores[best[1]]):
                best = at, joined
        return best
