"""Analyses of the weights alone: QK and OV circuits of heads, composition, copying, directions, spectra.

All of it is about the weights as they are: edits and hooks of activations do not concern it, so that of an edited
model, and inside `with model.hooks(...)`, they give the same numbers.
"""

from interp.weights.bigrams import BigramTable, bigram_table
from interp.weights.composition import (
    Composition,
    SingularTriples,
    composition,
    composition_directions,
    composition_scores,
    virtual_heads,
)
from interp.weights.copying import Copying, copying, eigenvalue_scores, matching_scores
from interp.weights.directions import (
    Directions,
    Neurons,
    SingularDirections,
    directions,
    neurons,
    singular_directions,
)
from interp.weights.head_circuits import HeadCircuits
from interp.weights.head_tokens import HeadTokens, head_tokens
from interp.weights.spectra import Spectra, spectra
from interp.weights.superposition import Superposition, superposition
from interp.weights.token_pairs import SkipTrigrams, TopPairs, skip_trigrams, top_pairs

__all__ = [
    "BigramTable",
    "Composition",
    "Copying",
    "Directions",
    "HeadCircuits",
    "HeadTokens",
    "Neurons",
    "SingularDirections",
    "SingularTriples",
    "SkipTrigrams",
    "Spectra",
    "Superposition",
    "TopPairs",
    "bigram_table",
    "composition",
    "composition_directions",
    "composition_scores",
    "copying",
    "directions",
    "eigenvalue_scores",
    "head_tokens",
    "matching_scores",
    "neurons",
    "singular_directions",
    "skip_trigrams",
    "spectra",
    "superposition",
    "top_pairs",
    "virtual_heads",
]
