"""What an attribution graph costs by the length of its prompt: ours, and circuit-tracer's of the same random model.

`python circuit_tracer_times.py given FOLDER`, at the top of this repository with interp, writes the model and prints
our times; `python circuit_tracer_times.py graph FOLDER` with circuit-tracer prints its own. Both take the features of
most influence, 32 at a time, on one thread, in float32.
"""

import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from circuit_tracer_graphs import record_of, tracer

LENGTHS = (16, 64, 256)
FEATURES, MOST, VOCABULARY = 2048, 256, 500
LAYERS, WIDTH, HEADS = 8, 256, 4


def ids_of(length: int) -> list[int]:
    """A prompt of random tokens."""
    return torch.randint(1, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def timed(length: int, call: Callable[[], object]) -> None:
    """Print processor seconds of the second call, and the most memory so far."""
    call()
    start = time.process_time()
    call()
    spent = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    sys.stdout.write(f"{length:4} tokens: {spent:6.1f} s, {peak:.2f} GiB\n")
    sys.stdout.flush()


def given(folder: Path) -> None:
    """Write the model, and print what our graphs of it cost."""
    import interp

    config = interp.model.ModelConfig(
        n_layers=LAYERS,
        d_model=WIDTH,
        n_heads=HEADS,
        n_ctx=1024,
        d_vocab=VOCABULARY,
        mlp=interp.model.MLP(4 * WIDTH),
    )
    torch.manual_seed(0)
    model = interp.HookedTransformer(interp.model.Transformer(config))
    record = record_of(model, FEATURES, skip=False)
    torch.save(record, folder / "timed.pt")
    kept = ("W_enc", "b_enc", "W_dec", "b_dec")
    coders = [
        interp.features.Dictionary(
            interp.features.ReLU(), {key: record["weights"][f"{layer}.{key}"].float() for key in kept},
            reads=f"blocks.{layer}.ln2.hook_normalized", writes=f"blocks.{layer}.hook_mlp_out",
            apply_b_dec_to_input=False,
        )
        for layer in range(LAYERS)
    ]  # fmt: skip
    model = model.with_dictionaries(coders)
    for length in LENGTHS:
        prompt = ids_of(length)
        timed(
            length,
            lambda prompt=prompt: interp.circuits.attribution_graph(model, prompt, most=MOST, by="influence"),  # type: ignore[misc]
        )


def graph(folder: Path) -> None:
    """Print what circuit-tracer's graphs of the written model cost."""
    from circuit_tracer import attribute

    model = tracer(torch.load(folder / "timed.pt", weights_only=False))
    for length in LENGTHS:
        prompt = torch.tensor(ids_of(length))
        timed(length, lambda prompt=prompt: attribute(prompt, model, batch_size=32, max_feature_nodes=MOST))  # type: ignore[misc]


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"given": given, "graph": graph}[sys.argv[1]](Path(sys.argv[2]))
