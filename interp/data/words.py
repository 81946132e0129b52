"""Words that are one token in running text."""

from interp.data.text import Text


def single_token(text: Text, word: str) -> int | None:
    """The id of a word that is one token with a leading space, or else without; None if it is neither.

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
