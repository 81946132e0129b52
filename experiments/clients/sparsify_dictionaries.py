"""Small dictionaries of every form, written by EleutherAI's sparsify with its own features and outputs of some vectors.

`python sparsify_dictionaries.py FOLDER` writes each into a folder named after a module, with `expected.npz` beside,
which holds x, features and output. They are kept under tests/features/formats/peers/sparsify.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sparsify import SparseCoder, SparseCoderConfig

D_IN, D_SAE, N = 6, 10, 7


def coder(dtype: torch.dtype, **options: Any) -> Any:
    """A random dictionary: no bias 0, no decoder that is the encoder."""
    made = SparseCoder(D_IN, SparseCoderConfig(num_latents=D_SAE, **options), dtype=dtype)
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(torch.randn(*weight.shape, dtype=torch.float64) / 2)
    return made


def main(folder: Path) -> None:
    """Every form of dictionary: what is subtracted, what is added, and how features are chosen."""
    torch.manual_seed(0)
    x = 2 * torch.randn(N, D_IN, dtype=torch.float64)
    double = torch.float64
    for name, made in {
        "sae/layers.10": coder(double, k=3),
        "sae_float32/h.3.mlp": coder(torch.float32, k=3),
        "sae_skip/layers.2.mlp": coder(double, k=3, skip_connection=True),
        "transcoder/layers.4.mlp": coder(double, k=3, transcode=True),
        "skip_transcoder/layers.5.mlp": coder(double, k=4, transcode=True, skip_connection=True),
        "groupmax/layers.1.attention": coder(double, k=5, activation="groupmax"),
        "seeds/layers.7/seed1": coder(double, k=2),
    }.items():
        made.save_to_disk(folder / name)
        given = x.to(made.dtype)
        with torch.no_grad():
            values, index, _ = made.encode(given)
            features = torch.zeros(N, D_SAE, dtype=made.dtype).scatter(-1, index, values)
            output = made(given).sae_out
        np.savez(
            folder / name / "expected.npz", x=given.numpy(), features=features.numpy(), output=output.numpy()
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
