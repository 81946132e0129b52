"""Words that are one token in running text."""

from interp.data.text import Text


def single_token(text: Text, word: str) -> int | None:
    """The one token that a word is in running text, with or without a leading space; None if several or unknown.

    Raises:
        ValueError: without a tokenizer.
    """
    tokenizer = text.tokenizer
    for form in (f" {word}", word):
        try:
            token = text.single(form)
        except ValueError:  # several tokens, or none that can write it
            continue
        if tokenizer.piece(token).strip().casefold() == word.casefold():
            return token
    return None
