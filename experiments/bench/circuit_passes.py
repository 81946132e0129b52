"""Claim: the metric under one circuit costs about 1.4 forward passes, whatever the depth.

Four circuits that keep half of all edges, of 8 pairs of 16 tokens, against plain forwards over as many rows; the pass
over the corrupted prompts, which all circuits share, is in. Widths of 256 at three depths, and GPT-2 small's shape.
"""

from collections.abc import Callable
from functools import partial

import torch
import transformers
import tyro
from measure import NARROW, cpu_seconds, report, timing, work

import interp
from interp.causal import EdgeGraph
from interp.circuits import interchange
from interp.metrics import logit_difference

CLAIM = 1.4
PAIRS, COLUMNS, VOCABULARY, CIRCUITS = 8, 16, 2000, 4
SHAPES = ((4, 256), (16, 256), (32, 256), *([] if NARROW else [(12, 768)]))


@torch.no_grad()
def main(repeats: int = 5) -> None:
    """Measure every shape.

    Args:
        repeats: timed rounds per system.
    """
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    for layers, width in SHAPES:
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            n_layer=layers, n_embd=width, n_head=width // 64, vocab_size=VOCABULARY
        )
        model = interp.HookedTransformer.from_pretrained(
            transformers.AutoModelForCausalLM.from_config(config)
        )
        generator = torch.Generator().manual_seed(0)
        clean, corrupt = (torch.randint(VOCABULARY, (PAIRS, COLUMNS), generator=generator) for _ in range(2))
        graph = EdgeGraph.of(model.cfg)
        kept = (torch.rand(CIRCUITS, *graph.exists.shape, generator=generator) < 0.5) & graph.exists
        rows, metric = clean.repeat(CIRCUITS, 1), logit_difference(3, 4)
        calls: dict[str, Callable[[], object]] = {
            "forward": partial(model.transformer, rows),
            "interp": partial(interchange, model, clean, corrupt, kept, metric=metric),
        }
        seconds = cpu_seconds(calls, repeats)
        for system, call in calls.items():
            what = f"{CIRCUITS} circuits of {PAIRS} pairs, {layers} layers of {width}"
            report(
                "circuit_metric", system, what, timing(seconds, system, "forward"), work(call), claim=CLAIM
            )


if __name__ == "__main__":
    tyro.cli(main)
