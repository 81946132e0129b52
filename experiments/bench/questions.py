"""What every public question costs beside a plain forward: seconds, operators, FLOPs, peak, kernels and waits.

The questions, their rows and their models are those of the contract tests (`tests/contract/cases.py`): two or three
layers of width 24, 5 rows. At that size seconds are the price of operators and of Python, not of arithmetic. Kernels,
waits and copies are counted on a simulated accelerator (`tests/contract/device.py`), each on one batch, with what is
kept of weights made anew. A contract test fails where those grow by more than 15 %.
"""

import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import chdir
from functools import partial

import torch
import tyro
from measure import report, work

from interp.runs import kept
from interp.runs.memory import LiveBytes
from tests.configs import build
from tests.contract import calls, device
from tests.contract.cases import CASES


def main(names: tuple[str, ...] = (), repeats: int = 3) -> None:
    """Measure every question and every function that computes.

    Args:
        names: only these.
        repeats: timed calls of each, after one untimed.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    asked = names or (*device.QUESTIONS, *device.FUNCTIONS)
    counted = device.measured(*asked)
    with tempfile.TemporaryDirectory() as folder, chdir(folder):  # some calls write files
        for name in asked:
            call, forward = _calls(name)
            seconds, one = _seconds(call, repeats), _seconds(forward, repeats)
            kept.forget()
            done, passed = work(call), work(forward)
            kept.forget()
            report(
                "questions", name, "5 rows", {"ratio": round(seconds / one, 1), "median_s": round(seconds, 4)},
                done, operators_of_forward=passed.operators, gflop_of_forward=passed.gflop, peak_kib=_peak_kib(call),
                **counted[name]._asdict(),
            )  # fmt: skip


def _calls(name: str) -> tuple[Callable[[], object], Callable[[], object]]:
    """The call, and a plain forward over its rows, or over rows like them where it brings none."""
    if name in CASES:
        case = CASES[name]
        model = case.models[0]
        network, batch = build(model), case.batch(model)
        return device.question(name, on_host=True), partial(network, batch.tokens)
    function = dict(calls.public_names())[name]
    network, batch = calls.model().transformer, CASES["Heads"].batch("gpt2")
    return lambda: calls.called(name, function, calls.valid(name, function)), partial(network, batch.tokens)


def _seconds(call: Callable[[], object], repeats: int) -> float:
    """The median CPU seconds of a call that keeps nothing of earlier ones."""
    times = []
    for _ in range(repeats + 1):
        kept.forget()
        begun = time.process_time()
        call()
        times.append(time.process_time() - begun)
    return statistics.median(times[1:])


def _peak_kib(call: Callable[[], object]) -> int:
    """The most that the tensors made in a call hold at once."""
    with LiveBytes() as bytes_:
        call()
    return bytes_.peak >> 10


if __name__ == "__main__":
    tyro.cli(main)
