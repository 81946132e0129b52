"""Generation as text: stop tokens from ids or texts, and the pieces of text that new tokens add as they arrive."""

from collections.abc import Collection, Iterable, Iterator, Sequence

from interp.data.batch import Batch
from interp.data.text import Text, Tokenizer
from interp.passes.generate import Step

Stop = str | int | Collection[str | int]
"""Where to end: a token id, a text that is one token, or several of either."""
UNDECODED = "\N{REPLACEMENT CHARACTER}"
"""What tokenizers decode bytes to that are not (yet) a character."""


def stop_ids(text: Text, stop: Stop, *, eos: bool) -> set[int]:
    """Ids of the stop tokens; `eos` adds the tokenizer's end of text, if it has one.

    Errors: ValueError naming the tokens of a text that is several.
    """
    given = [stop] if isinstance(stop, str | int) else stop
    ids = {s if isinstance(s, int) else text.single(s) for s in given}
    return ids | {text.eos_id} if eos and text.eos_id is not None else ids


def streamed_text(batch: Batch, steps: Iterable[Step], tokenizer: Tokenizer) -> Iterator[str]:
    """The text that the steps of one prompt's continuation add, in pieces; ValueError for several prompts."""
    if len(batch) != 1:
        raise ValueError(f"one prompt is required, got {len(batch)}")
    prompt = batch.tokens[0] if batch.keep is None else batch.tokens[0][batch.keep[0]]
    return text_pieces((int(step.tokens[0]) for step in steps), tokenizer, prompt.tolist())


def text_pieces(tokens: Iterable[int], tokenizer: Tokenizer, before: Sequence[int] = ()) -> Iterator[str]:
    """The text that each new token adds to `before`; bytes that are no whole character yet wait for the next token.

    The pieces join to the text of all new tokens. Each is cut from the text of everything so far, since a token's own
    text may depend on its neighbours (leading spaces, characters of several tokens); a thousand tokens take
    milliseconds.
    """
    ids = list(before)
    shown = len(tokenizer.decode(ids).rstrip(UNDECODED)) if ids else 0
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(ids).rstrip(UNDECODED)
        if len(text) > shown:
            yield text[shown:]
            shown = len(text)
    if rest := tokenizer.decode(ids)[shown:]:
        yield rest
