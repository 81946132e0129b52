"""Dictionaries of features (sparse autoencoders, transcoders), probes, and the texts that activate a cell most."""

from interp.features.activations import AbsTopK, Gated, GroupMax, JumpReLU, ReLU, TopK
from interp.features.dictionary import Dictionary
from interp.features.dictionary_metrics import (
    DictionaryQuality,
    Reconstruction,
    dictionary_match,
    dictionary_quality,
    reconstruction,
    reconstruction_quality,
)
from interp.features.fitting_sites import FittingSites, fitting_sites
from interp.features.formats import load, save
from interp.features.objectives import BatchTopK, Matryoshka
from interp.features.probing import ProbeNeurons, probe, probe_neurons
from interp.features.top_examples import TopExamples, examples_table, top_examples
from interp.features.training import train_dictionary

__all__ = [
    "AbsTopK",
    "BatchTopK",
    "Dictionary",
    "DictionaryQuality",
    "FittingSites",
    "Gated",
    "GroupMax",
    "JumpReLU",
    "Matryoshka",
    "ProbeNeurons",
    "ReLU",
    "Reconstruction",
    "TopExamples",
    "TopK",
    "dictionary_match",
    "dictionary_quality",
    "examples_table",
    "fitting_sites",
    "load",
    "probe",
    "probe_neurons",
    "reconstruction",
    "reconstruction_quality",
    "save",
    "top_examples",
    "train_dictionary",
]
