"""What the weights say: QK and OV circuits of heads, composition, copying, directions, spectra."""

from interp.weights.bigrams import bigram_table
from interp.weights.composition import composition, composition_directions, composition_scores, virtual_heads
from interp.weights.copying import copying, eigenvalue_scores, matching_scores, skip_trigrams, top_pairs
from interp.weights.directions import directions, neurons, singular_directions
from interp.weights.head_circuits import Circuits
from interp.weights.head_tokens import head_tokens
from interp.weights.spectra import spectra

__all__ = [
    "Circuits",
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
    "top_pairs",
    "virtual_heads",
]
