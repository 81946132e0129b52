"""Small dictionaries of every class, written by dictionary_learning with its own features and outputs of some vectors.

`python dictionary_learning_dictionaries.py FOLDER` writes each as its training does, `ae.pt` beside `config.json`, with
`expected.npz`, which holds x, features and output as `load_dictionary` finds them (of AutoEncoder, whose features that
call rescales, as the class itself computes them). They are kept under tests/features/formats/peers/dictionary_learning.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dictionary_learning.dictionary import (
    AutoEncoder,
    AutoEncoderNew,
    GatedAutoEncoder,
    JumpReluAutoEncoder,
)
from dictionary_learning.trainers.batch_top_k import BatchTopKSAE
from dictionary_learning.trainers.matryoshka_batch_top_k import MatryoshkaBatchTopKSAE
from dictionary_learning.trainers.top_k import AutoEncoderTopK
from dictionary_learning.utils import load_dictionary

D, S, N = 6, 10, 7
BUFFER = {
    "d_submodule": D, "io": "out", "n_ctxs": 8, "ctx_len": 128, "refresh_batch_size": 4, "out_batch_size": 4,
    "device": "cpu",
}  # fmt: skip


def randomised(module: Any) -> Any:
    """The dictionary with weights of its own everywhere, and a threshold that is settled."""
    with torch.no_grad():
        for name, weight in module.named_parameters():
            weight.copy_(torch.randn(*weight.shape) / 2)
            if name == "threshold":
                weight.abs_()
    if "threshold" in dict(module.named_buffers()):
        module.threshold.fill_(0.4)
    return module


def main(folder: Path) -> None:
    """One folder for each class, in the form in which `trainSAE` leaves it."""
    torch.manual_seed(0)
    x = 2 * torch.randn(N, D)
    for made, k in {
        AutoEncoder(D, S): None, AutoEncoderNew(D, S): None, GatedAutoEncoder(D, S): None,
        JumpReluAutoEncoder(D, S): None, AutoEncoderTopK(D, S, 3): 3, BatchTopKSAE(D, S, 3): 3,
        MatryoshkaBatchTopKSAE(D, S, 3, [4, 6]): 3,
    }.items():  # fmt: skip
        name = type(made).__name__
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        torch.save(randomised(made).state_dict(), place / "ae.pt")
        trainer = {
            "trainer_class": "SomeTrainer", "dict_class": name, "lr": 1e-3, "steps": 10, "seed": 0, "activation_dim": D,
            "dict_size": S, "device": "cpu", "layer": 3, "lm_name": "EleutherAI/pythia-70m-deduped",
            "wandb_name": name, "submodule_name": "resid_post_layer_3", **({} if k is None else {"k": k}),
        }  # fmt: skip
        (place / "config.json").write_text(json.dumps({"trainer": trainer, "buffer": BUFFER}, indent=4))
        read, _ = load_dictionary(str(place), "cpu")
        with torch.no_grad():
            features, output = (made if name == "AutoEncoder" else read).encode(x), read(x)
        np.savez(place / "expected.npz", x=x.numpy(), features=features.numpy(), output=output.numpy())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
