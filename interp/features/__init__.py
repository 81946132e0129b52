"""Dictionaries of features (sparse autoencoders, transcoders), probes, and the texts that activate a cell most."""

from interp.features.activations import (
    AbsTopK,
    Gated,
    GroupMax,
    JumpReLU,
    MatchingPursuit,
    NormTopK,
    ReLU,
    TopK,
)
from interp.features.cross_layer import Crosscoder, CrossLayerTranscoder, LayerWeights
from interp.features.dictionary import Dictionary
from interp.features.dictionary_metrics import (
    DictionaryQuality,
    Reconstruction,
    dictionary_match,
    dictionary_quality,
    reconstruction,
    reconstruction_quality,
)
from interp.features.feature_cards import FeatureCards, feature_cards
from interp.features.fitting_sites import FittingSites, fitting_sites
from interp.features.formats import load, save
from interp.features.neuronpedia import neuronpedia_json
from interp.features.objectives import BatchTopK, Matryoshka
from interp.features.probing import ProbeNeurons, probe, probe_neurons
from interp.features.top_examples import TopExamples, examples_table, top_examples
from interp.features.training import train_dictionary

__all__ = [
    "AbsTopK",
    "BatchTopK",
    "CrossLayerTranscoder",
    "Crosscoder",
    "Dictionary",
    "DictionaryQuality",
    "FeatureCards",
    "FittingSites",
    "Gated",
    "GroupMax",
    "JumpReLU",
    "LayerWeights",
    "MatchingPursuit",
    "Matryoshka",
    "NormTopK",
    "ProbeNeurons",
    "ReLU",
    "Reconstruction",
    "TopExamples",
    "TopK",
    "dictionary_match",
    "dictionary_quality",
    "examples_table",
    "feature_cards",
    "fitting_sites",
    "load",
    "neuronpedia_json",
    "probe",
    "probe_neurons",
    "reconstruction",
    "reconstruction_quality",
    "save",
    "top_examples",
    "train_dictionary",
]
