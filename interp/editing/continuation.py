"""Does a model still speak after an edit? Sampled continuations, and how varied they are: the n-gram entropy.

The "fluency" of Meng et al. 2022 (ROME, arXiv:2202.05262) after Zhang et al. 2018, the column "n-gram" of the table of
Katz et al. 2024 (arXiv:2402.12865): a model that an edit has broken says the same few words again and again. Nonsense
that varies goes unseen; perplexity on a text sees it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from interp.core.boundary import public
from interp.passes.generate import generate
from interp.passes.observe import Model, as_network, text_of
from interp.passes.sampling import Sampling

WEIGHTS = {2: 1 / 3, 3: 2 / 3}
"""Share of the entropies of bigrams and trigrams: the mean of 2/3 and 4/3 of them, as in ROME's code."""
_WORD = re.compile(r"\w+|[^\w\s]")


@public()
@dataclass(frozen=True)
class Continuation:
    """How a model goes on from some openings. The defaults are those of ROME's code."""

    length: int = 100
    """Tokens of a text, its opening included."""
    top_k: int = 5
    """Every token is drawn from the k most probable ones."""
    seed: int = 0
    """Seed of the generator of random numbers."""

    def texts(self, model: Model, openings: Sequence[str], *, turn: int = 0) -> list[str]:
        """Every opening with what the model makes of it, `length` tokens together; seed + turn seeds it.

        Tokens that begin or end a text do not stop it, and are left out of it.
        Errors: ValueError for an opening that fills the length, or more than the context holds.

        Example:
            >>> (text,) = Continuation(length=20, top_k=1).texts(model, ["The cat sat on"])
            >>> text.startswith("The cat sat on")
            True
        """
        text = text_of(model)
        batch = text.batch(list(openings))
        if not int(batch.lengths.max()) < self.length:
            raise ValueError(
                f"openings shorter than {self.length} tokens are required, the longest has "
                f"{int(batch.lengths.max())}"
            )
        sampling = Sampling(top_k=self.top_k, seed=self.seed + turn)
        more = self.length - int(batch.lengths.min())
        found = generate(as_network(model), batch, more, sampling=sampling)
        silent = (text.bos_id, text.eos_id)
        rows = (row[real][: self.length].tolist() for row, real in zip(found.tokens, found.real, strict=True))
        return [text.tokenizer.decode([i for i in row if i not in silent]) for row in rows]


@public()
def ngram_entropy(text: str) -> float:
    """How varied a text is: H_2 / 3 + 2 H_3 / 3 in bits, H_n = -sum_w f(w) log2 f(w) over its n-grams w of words.

    f(w) is the share of w among the text's n-grams. 0 for a text of one word over and over, or too short for n-grams;
    log2 of the number of words, nearly, where nothing repeats. Papers print it times 100: GPT-2 XL has 6.27 bits.
    Words are runs of letters and digits; every other visible character is one too (ROME: NLTK's, which differ in
    contractions). Comparable between texts of one length only.

    Example:
        >>> ngram_entropy("no no no no")
        0.0
        >>> round(ngram_entropy("so be it."), 3)  # four words, three bigrams, two trigrams: log2(3) / 3 + 2 log2(2) / 3
        1.195
    """
    words = _WORD.findall(text)
    return sum(
        weight * _entropy(Counter(zip(*(words[i:] for i in range(n)), strict=False)))
        for n, weight in WEIGHTS.items()
    )


def _entropy(counts: Counter[tuple[str, ...]]) -> float:
    total = counts.total()
    return math.fsum(-c / total * math.log2(c / total) for c in counts.values())
