"""Sparse autoencoders, probes, and the texts that activate a cell most."""

from interp.features.probing import ProbeNeurons, probe, probe_neurons
from interp.features.sae import SAE, JumpReLU, ReLU, TopK
from interp.features.sae_files import load_sae, save_sae
from interp.features.sae_metrics import (
    Reconstruction,
    SaeQuality,
    dictionary_match,
    reconstruction,
    reconstruction_quality,
    sae_quality,
)
from interp.features.sae_training import train_sae
from interp.features.top_examples import TopExamples, examples_table, top_examples

__all__ = [
    "SAE",
    "JumpReLU",
    "ProbeNeurons",
    "ReLU",
    "Reconstruction",
    "SaeQuality",
    "TopExamples",
    "TopK",
    "dictionary_match",
    "examples_table",
    "load_sae",
    "probe",
    "probe_neurons",
    "reconstruction",
    "reconstruction_quality",
    "sae_quality",
    "save_sae",
    "top_examples",
    "train_sae",
]
