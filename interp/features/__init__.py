"""Sparse autoencoders, probes, and the texts that activate a cell most."""

from interp.features.probing import probe, probe_neurons
from interp.features.sae import SAE, JumpReLU, ReLU, TopK
from interp.features.sae_files import load_sae, save_sae
from interp.features.sae_metrics import sae_quality
from interp.features.sae_training import train_sae
from interp.features.top_examples import top_examples

__all__ = [
    "SAE",
    "JumpReLU",
    "ReLU",
    "TopK",
    "load_sae",
    "probe",
    "probe_neurons",
    "sae_quality",
    "save_sae",
    "top_examples",
    "train_sae",
]
