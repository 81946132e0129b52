"""Claim: loading a 1.5 GB checkpoint takes at most 1.15x its size in memory. Goal, not met: 1.2x Hugging Face's time.

Both keep parameters as views of the mapped files. Hugging Face's load reads nothing, its first forward pass reads
everything. Ours reads everything once, to test for NaN, and copies q, k, v, which we join into one matrix. So both
moments are reported: the return of `from_pretrained`, and the first logits. Every figure is a fresh process with the
files in the page cache; `taken_gib` is the high-water mark of resident memory above the imports, `own_gib` that part of
it that is no page of a file. On a virtual machine whose host hands out memory lazily, new pages can cost seconds per
gigabyte: compare only rounds of one run.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
import tyro
from measure import report

from tests.real.memory import OwnMemory, status

GOAL, CLAIM_MEMORY = 1.2, 1.15
System = Literal["interp", "huggingface"]
SYSTEMS: tuple[System, ...] = ("interp", "huggingface")
GIB = 2**30
Figures = dict[str, float]


def main(
    repeats: int = 5, layers: int = 11, source: Path | None = None, child: tuple[System, Path] | None = None
) -> None:
    """Write a checkpoint, or take one, load it by turns in fresh processes, and report medians and ratios.

    Args:
        repeats: processes per system.
        layers: of the checkpoint; 11 make 1.5 GB.
        source: a folder or a GGUF file to load instead, such as those of a real model.
        child: measure one system on one folder and print its figures (what the processes do).
    """
    torch.set_num_threads(1)
    if child is not None:
        print(json.dumps(measured(*child)))
        return
    with tempfile.TemporaryDirectory() as place:
        folder = source or Path(place)
        if source is None:
            write_checkpoint(folder, layers)
        files = [folder] if folder.is_file() else list(folder.glob("*.safetensors"))
        size = sum(f.stat().st_size for f in files) / GIB
        runs: dict[System, list[Figures]] = {system: [] for system in SYSTEMS}
        for turn in range(repeats + 1):
            for system in SYSTEMS if turn % 2 else reversed(SYSTEMS):
                figures = in_a_process(system, folder)
                if turn:  # the first round brings the files into the page cache
                    runs[system].append(figures)
    for system in SYSTEMS:
        medians = {key: round(statistics.median(r[key] for r in runs[system]), 3) for key in runs[system][0]}
        theirs = {key: statistics.median(r[key] for r in runs["huggingface"]) for key in medians}
        ratios = {f"{key}_ratio": round(medians[key] / theirs[key], 2) for key in medians if "_s" in key}
        claim = {"goal": GOAL, "claim_memory": CLAIM_MEMORY} if system == "interp" else {}
        memory = {"taken_over_size": round(medians["taken_gib"] / size, 3), "size_gib": round(size, 3)}
        report(
            "load",
            system,
            "sharded float32 Llama" if source is None else source.name,
            medians,
            ratios,
            memory,
            claim,
            rounds=repeats,
        )


def write_checkpoint(folder: Path, layers: int) -> None:
    """A random Llama of width 1536 with 12 heads on 4 key/value heads, in shards of 400 MB."""
    import transformers

    config = transformers.LlamaConfig(
        num_hidden_layers=layers, hidden_size=1536, intermediate_size=4096, num_attention_heads=12,
        num_key_value_heads=4, vocab_size=32000, max_position_embeddings=1024,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="400MB")


def in_a_process(system: System, folder: Path) -> Figures:
    """The figures of one system, measured by a fresh interpreter."""
    command = [sys.executable, __file__, "--child", system, str(folder)]
    figures: Figures = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return figures


def measured(system: System, folder: Path) -> Figures:
    """Wall and CPU seconds of a load and of a load with a first forward pass, and the memory both took."""
    load = LOADERS[system]()
    tokens = torch.arange(16)[None]
    start, start_cpu, before = time.perf_counter(), time.process_time(), status("VmRSS")
    with OwnMemory() as own, torch.no_grad():
        model = load(folder)
        loaded, loaded_cpu = time.perf_counter() - start, time.process_time() - start_cpu
        model(tokens)
        answered, answered_cpu = time.perf_counter() - start, time.process_time() - start_cpu
    return {
        "load_s": loaded,
        "load_cpu_s": loaded_cpu,
        "first_logits_s": answered,
        "first_logits_cpu_s": answered_cpu,
        "taken_gib": (status("VmHWM") - before) / GIB,
        "own_gib": own.peak / GIB,
    }


def _ours() -> Callable[[Path], Callable[[torch.Tensor], object]]:
    import interp

    return lambda folder: interp.HookedTransformer.from_pretrained(folder).transformer


def _hugging_face() -> Callable[[Path], Callable[[torch.Tensor], object]]:
    import transformers

    transformers.utils.logging.disable_progress_bar()

    def load(source: Path) -> transformers.PreTrainedModel:
        folder, packed = (source.parent, source.name) if source.is_file() else (source, None)
        return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, gguf_file=packed)

    return load


LOADERS = {"interp": _ours, "huggingface": _hugging_face}


if __name__ == "__main__":
    tyro.cli(main)
