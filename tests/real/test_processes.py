"""SmolLM2 out of a folder of files, in several processes: the bits of one, and its weights in memory once at most."""

import importlib.util
from pathlib import Path

import pytest

from interp import HookedTransformer
from tests.real.processes import HOWS, watched

pytestmark = pytest.mark.real
DEMO = "demo-4l"
PATIENCE = 300.0
COPIES = {"devices": 0, "ray": 0, "shards": 0, "pickle": 3, "deepcopy": 1}
"""How many copies of all weights a way needs beside the mapped file: the pickle, the bytes that unpickling keeps to its
end, and what is made of them."""
PROCESSES = {"devices": 3, "ray": 3}
EACH = 200 * 2**20
"""Bytes by which passes through a model of this size and its tokenizer may need more than the demo's, in a process."""


@pytest.mark.parametrize("how", HOWS)
def test_the_bits_are_those_of_one_process_and_the_weights_are_in_memory_once(
    how: str, folder: Path, tmp_path: Path
) -> None:
    if how == "ray" and importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed: pip install 'ray[data]'")
    network = HookedTransformer.from_pretrained(folder).transformer
    weights = sum(value.nbytes for value in network.parameters())
    mapped = sum(value.nbytes for file in network.files for value in file.views_in(network).values())
    assert mapped > 0.8 * weights
    del network
    code, most, said = watched(how, str(folder), tmp_path, PATIENCE)
    assert code == 0, said
    _, base, _ = watched(how, DEMO, tmp_path, PATIENCE)
    joined = 2 * (weights - mapped)  # of several tensors each, in memory of their own and in what is sent
    assert most - base < COPIES[how] * weights + joined + PROCESSES.get(how, 1) * EACH
