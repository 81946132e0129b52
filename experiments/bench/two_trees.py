"""Do two working trees compute the same? Every call in both, bit by bit, with what it dispatches and holds.

For a change of structure: the numbers of a question asked alone on the same batches must not change in a bit, and its
operators, FLOPs, token-layers and bytes must not grow. Each tree runs in a process of its own with its own tests, which
say how its functions are called, and the calls go by turns. Three groups of calls:

questions   every question of the contract (`tests/contract/cases.py`), in float64 and with weights in bfloat16
demo        the questions that people ask first, of demo-4l: prompts of several lengths, pairs, packed rows
smollm2     every public function on SmolLM2 (`tests/real/calls.py`), from the package index

    git worktree add ../old main~10
    python experiments/bench/two_trees.py ../old                        # against the tree of this script
    python experiments/bench/two_trees.py ../old --groups demo --only patch heads
"""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
import tyro
from measure import memory, work
from torch import Tensor

HERE = Path(__file__).resolve().parents[2]
Group = Literal["questions", "demo", "smollm2"]
Call = Callable[[], object]
Costs = dict[str, float | str]
"""What a call costs, or the error that it ends with."""
COUNTS = ("operators", "gflop", "token_layers", "allocated_mib", "cpu_s")
LARGER = 1.02
"""What a count must grow by to be named: bytes differ a little from run to run."""
DEPTH = 4
"""How far into records numbers are looked for."""


class Compared(NamedTuple):
    """One call in both trees."""

    name: str
    apart: str
    """What of the results differs; empty where no bit does."""
    counts: Mapping[str, tuple[float, float]]
    """Old and new."""

    @property
    def grown(self) -> list[str]:
        """The exact counts that are larger than before."""
        return [key for key, (old, new) in self.counts.items() if key != "cpu_s" and new > LARGER * old]


def main(
    old: Annotated[Path, tyro.conf.Positional],
    new: Path = HERE,
    groups: tuple[Group, ...] = ("questions", "demo"),
    only: tuple[str, ...] = (),
    serve: bool = False,
) -> None:
    """Make all calls in both trees and print a line for each; exit code 1 if any number differs.

    Args:
        old: the tree to compare with.
        new: the tree that was changed.
        groups: which calls.
        only: those whose names contain one of these words.
        serve: answer questions of another process about one tree (what this script starts itself).
    """
    if serve:
        answer_all()
        return
    with tempfile.TemporaryDirectory() as place:
        trees = [Tree(tree, Path(place) / side) for tree, side in ((old, "old"), (new, "new"))]
        found = []
        for group in groups:
            names = [name for name in trees[1].names(group) if not only or any(word in name for word in only)]
            for name in names:
                found.append(compared(group, name, trees))
                print(line(found[-1]), flush=True)
        for tree in trees:
            tree.close()
    apart, grown = [each.name for each in found if each.apart], [each.name for each in found if each.grown]
    print(f"{len(found)} calls, {len(apart)} with other numbers {apart}, {len(grown)} that take more {grown}")
    sys.exit(bool(apart))


def compared(group: Group, name: str, trees: Sequence[Tree]) -> Compared:
    """One call, first in the old tree and then in the new one."""
    (old, before), (new, after) = (tree.called(group, name) for tree in trees)
    counts = {key: (float(old[key]), float(new[key])) for key in COUNTS if key in old and key in new}
    if "error" in old or "error" in new:
        same = old.get("error") == new.get("error")
        apart = "" if same else f"old: {old.get('error', 'answers')}; new: {new.get('error', 'answers')}"
        return Compared(f"{group} {name}", apart, counts)
    return Compared(f"{group} {name}", "; ".join(differences(before, after)), counts)


def differences(old: Mapping[str, np.ndarray], new: Mapping[str, np.ndarray]) -> Iterator[str]:
    """The numbers that are not equal to the bit, each with by how much."""
    for missing in sorted(old.keys() ^ new.keys()):
        yield f"{missing} is only in the {'old' if missing in old else 'new'} one"
    for name in sorted(old.keys() & new.keys()):
        one, other = old[name], new[name]
        if one.shape != other.shape or one.dtype != other.dtype:
            yield f"{name}: {one.dtype}{one.shape} became {other.dtype}{other.shape}"
        elif one.dtype.kind in "fc" and not np.array_equal(one, other, equal_nan=True):
            worst, size = np.nanmax(np.abs(one - other)), np.nanmax(np.abs(one))
            yield f"{name}: apart by {worst:.1e} of {size:.1e}"
        elif one.dtype.kind not in "fc" and not np.array_equal(one, other):
            yield f"{name}: {int((one != other).sum())} of {one.size} differ"


def line(found: Compared) -> str:
    """One call as a line of text."""
    counts = ", ".join(f"{key} {old:g} -> {new:g}" for key, (old, new) in found.counts.items())
    said = "same bits" if not found.apart else f"APART: {found.apart}"
    return f"{found.name}: {said}; {counts}" + (f" MORE {found.grown}" if found.grown else "")


class Tree:
    """A working tree and the process that makes its calls."""

    def __init__(self, folder: Path, out: Path) -> None:
        self.out = out
        out.mkdir()
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), str(folder), "--serve"],
            cwd=folder, env={**os.environ, "PYTHONPATH": str(folder.resolve()), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=(out / "stderr").open("w"), text=True,
        )  # fmt: skip

    def names(self, group: Group) -> list[str]:
        """The calls of a group that the tree has."""
        return list(self._asked({"names": group}))

    def called(self, group: Group, name: str) -> tuple[Costs, dict[str, np.ndarray]]:
        """What a call costs, or its error; and the numbers of its result."""
        path = self.out / "numbers.pkl"
        path.unlink(missing_ok=True)
        counts = self._asked({"group": group, "name": name, "path": str(path)})
        return counts, pickle.loads(path.read_bytes()) if path.exists() else {}

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _asked(self, question: Mapping[str, str]) -> Costs:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            said = (self.out / "stderr").read_text(encoding="utf-8")[-2000:]
            raise RuntimeError(f"the process of the {self.out.name} tree ended at {question}: {said}")
        found: Costs = json.loads(answer)
        return found


# --- in the process of a tree -------------------------------------------------------------------------------------


def answer_all() -> None:
    """Make the calls that are asked for on standard input, and print what each costs as a line of JSON."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    out = sys.stdout
    for question in map(json.loads, sys.stdin):
        with redirect_stdout(sys.stderr), redirect_stderr(io.StringIO()):
            if "names" in question:
                found: Costs = dict.fromkeys(calls(question["names"]), 0.0)
            else:
                found = counted(calls(question["group"])[question["name"]], Path(question["path"]))
        print(json.dumps(found), file=out, flush=True)


def counted(made: Call, path: Path) -> Costs:
    """What a call costs that was made once before; the numbers of its result go into a file.

    What the package keeps of weights between calls is forgotten before each.
    """
    from interp.runs.kept import forget

    def call() -> object:
        forget()
        return made()

    try:
        path.write_bytes(pickle.dumps(dict(numbers(call()))))
        start = time.process_time()
        call()
        seconds = time.process_time() - start
        layers = TokenLayers()
        with layers:
            done = work(call)
        return {
            "operators": done.operators, "gflop": done.gflop, "token_layers": layers.count,
            "allocated_mib": memory(call).allocated_mib, "cpu_s": round(seconds, 3),
        }  # fmt: skip
    except Exception as error:  # of any kind: it must be the same in both trees
        return {"error": f"{type(error).__name__}: {error}"}


class TokenLayers:
    """Counts the tokens that blocks compute, each as often as a block computes it."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> TokenLayers:
        self._hook = torch.nn.modules.module.register_module_forward_pre_hook(self._counted)
        return self

    def __exit__(self, *error: object) -> None:
        self._hook.remove()

    def _counted(self, module: torch.nn.Module, given: tuple[object, ...]) -> None:
        if type(module).__name__ == "Block":
            stream = next(x for x in given if isinstance(x, Tensor))
            self.count += stream.shape[0] * stream.shape[1]


def numbers(found: object, name: str = "result", depth: int = DEPTH) -> Iterator[tuple[str, np.ndarray]]:
    """All numbers and texts in a result, by where they stand."""
    if hasattr(found, "data_vars") and hasattr(found, "coords"):
        every = {**found.data_vars, **found.coords}
        yield from ((f"{name}.{key}", np.asarray(value)) for key, value in every.items())
    elif isinstance(found, Tensor):
        plain = found.detach().cpu()
        yield name, (plain.float() if plain.dtype == torch.bfloat16 else plain).numpy()
    elif isinstance(found, str | int | float | bool | np.ndarray | np.generic):
        yield name, np.asarray(found)
    elif hasattr(found, "to_numpy"):
        yield name, found.to_numpy().astype(str)
    elif depth and isinstance(found, Mapping):
        for key, value in found.items():
            yield from numbers(value, f"{name}.{key}", depth - 1)
    elif depth and isinstance(found, list | tuple):
        for i, value in enumerate(found):
            yield from numbers(value, f"{name}[{i}]", depth - 1)
    elif depth and dataclasses.is_dataclass(found):
        for each in dataclasses.fields(found):
            yield from numbers(getattr(found, each.name), f"{name}.{each.name}", depth - 1)


@functools.cache
def calls(group: Group) -> Mapping[str, Call]:
    """The calls of a group in this tree."""
    return {"questions": of_questions, "demo": of_demo, "smollm2": of_smollm2}[group]()


def of_questions() -> dict[str, Call]:
    """Every question of the contract, by name and dtype."""
    from tests.contract.cases import CASES
    from tests.contract.half import narrow

    def made(name: str, dtype: torch.dtype | None) -> Call:
        case = CASES[name]
        model = case.models[0]

        def call() -> object:
            network = None if dtype is None else narrow(model, dtype)
            batches = [] if case.alone else [case.batch(model, network)]
            return case.result(model, *batches, network=network)

        return call

    kinds = {"float64": None, "bfloat16": torch.bfloat16}
    return {f"{name} {kind}": made(name, dtype) for name in CASES for kind, dtype in kinds.items()}


def of_demo() -> dict[str, Call]:
    """What people ask first, of the embedded model."""
    import interp

    model = interp.HookedTransformer.from_pretrained("demo-4l")
    pairs = interp.tasks.IndirectObjects(8).pairs(model.text.tokenizer)
    both = interp.causal.batches(model, pairs)
    prompts = ["When Mary and John went to the shop, John gave a book to", "Mary saw John. John saw"]
    texts = [*prompts, "The boy and the girl", "Then Anna and Tom had a long talk. Tom gave a drink to Anna"]
    zero, answers = interp.edits.Zero(), (" Mary", " John")

    rows = [model.text.batch(text).tokens[0].tolist() for text in texts]

    def packed() -> object:
        return interp.run([interp.lenses.LogitLens(top=5)], model, interp.Batch.packed(rows, 32))

    return {
        "patch": lambda: interp.patch(model, *both, "z"),
        "patch streams": lambda: interp.patch(model, *both),
        "ablate": lambda: interp.ablate(model, both[0], "head", change=zero),
        "attribution_patch": lambda: interp.attribution_patch(model, *both, "z"),
        "path_patch": lambda: interp.path_patch(model, *both),
        "edge_attribution": lambda: interp.circuits.edge_attribution(model, *both, method="eap-ig-inputs"),
        "edge_effects": lambda: interp.circuits.edge_effects(model, *both, edges=40),
        "find_circuit": lambda: interp.find_circuit(model, *both),
        "evaluate_circuit": lambda: interp.evaluate_circuit(
            model, *both, interp.find_circuit(model, *both, edges=40)
        ),
        "causal_trace": lambda: interp.causal_trace(model, prompts[0], "Mary", " Mary", samples=4),
        "heads": lambda: interp.heads(model),
        "attribute": lambda: interp.attribute(model, prompts, *answers),
        "attribute by head": lambda: interp.attribute(model, prompts, *answers, parts="head"),
        "logit_lens": lambda: interp.logit_lens(model, texts, top=5),
        "packed rows": packed,
        "backward_lens": lambda: interp.backward_lens(model, prompts[0], " Mary"),
        "token_attribution": lambda: interp.token_attribution(model, prompts, *answers),
        "copying": lambda: interp.copying(model, ranks=False),
        "composition": lambda: interp.weights.composition(model, "K"),
        "generate": lambda: model.generate(prompts, max_new_tokens=8),
        "forward": lambda: model(texts),
        "report": lambda: interp.report(model, prompts[0], " Mary", " John").tables,
    }


def of_smollm2() -> dict[str, Call]:
    """Every public function on a real model."""
    from tests.real import calls as real

    def made(name: str) -> Call:
        return lambda: real.answer(name, real.given(name))

    return {name: made(name) for name in real.called_names() if name not in real.REFUSED}


if __name__ == "__main__":
    tyro.cli(main)
