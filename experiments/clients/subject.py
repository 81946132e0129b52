"""The model, texts and record of both transcripts: `demo-4l` in TransformerLens' layout, and texts that it writes."""

import argparse
import atexit
import importlib.metadata
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import interp
from interp.compat import install, to_hooked_state

MODEL = "demo-4l"
TOKENIZER = Path(interp.__file__).parent / "zoo" / "weights" / MODEL / "tokenizer.json"
Record = dict[str, Tensor]
"""What a transcript computed, by name."""


def demo(dtype: torch.dtype = torch.float32) -> tuple[dict[str, Tensor], dict[str, object]]:
    """The demo model's state dict and config, as TransformerLens 3 takes them."""
    return to_hooked_state(interp.HookedTransformer.from_pretrained(MODEL, dtype=dtype))


@cache
def tokenizer() -> Any:
    """The demo model's tokenizer, from a folder of transformers': TransformerLens loads it again by its name."""
    bos = "<|bos|>"
    plain = PreTrainedTokenizerFast(
        tokenizer_file=str(TOKENIZER), bos_token=bos, eos_token=bos, pad_token=bos, unk_token=bos
    )
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    plain.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def texts(n: int, length: int = 100) -> list[str]:
    """What the demo model writes, `n` texts of `length` tokens: the same at every call."""
    model = interp.HookedTransformer.from_pretrained(MODEL)
    starts = torch.zeros(n, 1, dtype=torch.long)
    rows = model.generate(starts, length, sampling=interp.passes.Sampling(seed=0))
    return [tokenizer().decode(row, skip_special_tokens=True) for row in rows.tokens.tolist()]


def tell(transcript: Callable[[], Record], client: str) -> None:
    """Run a transcript on the real TransformerLens or on `interp`'s, say what it found, and save it.

    Usage: `transcript.py {interp,real} [--save FILE]`.
    """
    parser = argparse.ArgumentParser(description=client)
    parser.add_argument("on", choices=["interp", "real"])
    parser.add_argument("--save", type=Path)
    asked = parser.parse_args()
    if asked.on == "interp":
        install()
    import transformer_lens

    where = Path(transformer_lens.__file__)
    assert ("compat" in where.parts) == (asked.on == "interp"), f"transformer_lens comes from {where}"
    print(f"{client} {importlib.metadata.version(client)} on {where.parent}")
    start = time.perf_counter()
    record = transcript()
    for name, value in record.items():
        shown = f"{value.item():.6g}" if value.numel() == 1 else f"{tuple(value.shape)}"
        print(f"  {name:42} {shown}")
    print(f"  {time.perf_counter() - start:.1f} s")
    if asked.save is not None:
        torch.save(record, asked.save)
