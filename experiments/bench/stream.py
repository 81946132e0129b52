"""Claims about runs over data, on demo-4l, whose context holds 128 tokens: rows of 125 tokens, not of 256.

taxonomy  the scores of all heads over 1 000 rows at >= 85 % of the tokens/s of plain passes over the same batches;
          memory flat from row 100 to the end
five      five analyses in one pass <= 1.5x the most expensive alone
journal   progress on disk costs <= 2 % of the run
workers   two processes on two cores >= 1.7x one, once they have started; the same on Ray
text      norms of the embedding over 20 000 texts <= 1.1x a loop by hand that tokenises, looks up and averages
corpus    100 MB of text in flat memory: norms of the embedding, so that the pass ends before the first block
costs     the constants of docs/scaling.md: overhead per batch, and merging, packing and writing per MB

Seconds are CPU seconds (of all processes for `workers`, beside the wall clock, which other work on the machine slows).
"""

import logging
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
import tyro
from measure import MIB, NARROW, cpu_seconds, report, resident_mib, timing
from torch import Tensor

import interp
from interp import Batch
from interp.attention.heads import head_scores
from interp.core.results import labelled
from interp.core.stats import Bootstrap, Means, Partial
from interp.data.sources import open_source
from interp.data.stream import DataSource, Stream, Window, data_source
from interp.dynamics import InContext, OneTokenLosses
from interp.features import Dictionary, Reconstruction, ReLU, TopExamples
from interp.lenses import LogitLens
from interp.model import Read, Trace, Transformer
from interp.passes.question import Askable, ByRow, Questions, Reading
from interp.runs.journal import Journal, packed_done, unpacked_done
from interp.runs.memory import LiveBytes
from interp.runs.progress import BatchDone, Progress, Tally
from interp.runs.workers import done_by_processes
from interp.tasks import RepeatedTokens

if TYPE_CHECKING:
    import xarray as xr

Claim = Literal["taxonomy", "five", "text", "journal", "workers", "corpus", "costs"]
ALL: tuple[Claim, ...] = ("taxonomy", "five", "text", "journal", "workers", "corpus", "costs")
ROWS = RepeatedTokens(period=31, repeats=4, rows=1000)
BATCH_ROWS = 32
FEW, MANY = (128, 5_000) if NARROW else (256, 20_000)
"""Texts that are read by every part, and that meet nothing but the embedding."""
STREAM = "blocks.2.hook_resid_post"
NAMES = ("Mary", "John", "Anna", "Paul", "Lucy", "Mark", "Ruth", "Tom", "Jane", "Peter")
PLACES = ("store", "park", "school", "station", "garden", "office", "house", "market")
THINGS = ("drink", "book", "ring", "letter", "ball", "key", "bag", "cake")


def main(claims: tuple[Claim, ...] = ALL, rounds: int = 5) -> None:
    """Measure the claims.

    Args:
        claims: which of them.
        rounds: timed rounds per system.
    """
    torch.set_num_threads(1)
    model = interp.HookedTransformer.from_pretrained("demo-4l")
    measured: dict[Claim, Callable[[], None]] = {
        "taxonomy": partial(taxonomy, model, rounds),
        "five": partial(five, model, rounds),
        "text": partial(text, model, rounds),
        "journal": partial(journal, model),
        "workers": partial(workers, model),
        "corpus": partial(corpus, model),
        "costs": partial(costs, model),
    }
    for claim in claims:
        measured[claim]()


# --- head scores --------------------------------------------------------------------------------------------------


def taxonomy(model: interp.HookedTransformer, rounds: int) -> None:
    """Speed against plain passes, and memory row by row."""
    batch = Batch(ROWS.tokens(model.cfg.d_vocab, 0), bos=True)
    batches = list(batch.split(BATCH_ROWS))
    asked = replace(head_scores(model.cfg, ROWS), result=partial(means, name="heads"))

    def plain() -> None:
        with torch.no_grad():
            for part in batches:
                model.transformer(part.tokens)

    def streamed() -> None:
        interp.run([asked], model.transformer, batches)

    seconds = cpu_seconds({"plain": plain, "interp": streamed}, rounds)
    speed = {name: batch.tokens.numel() / sorted(each)[len(each) // 2] for name, each in seconds.items()}
    report(
        "stream", "interp", "head scores over 1 000 rows of 125 tokens", timing(seconds, "interp", "plain"),
        tokens_per_s=round(speed["interp"]), share_of_plain=round(speed["interp"] / speed["plain"], 3), claim=0.85,
        **flatness([asked], model, batches),
    )  # fmt: skip


def flatness(
    asked: list[Askable], model: interp.HookedTransformer, batches: list[Batch]
) -> dict[str, object]:
    """Resident memory, and the tensors alive, between batches from row 100 on."""
    resident: list[float] = []
    alive: list[int] = []

    def watched(look: Callable[[], None]) -> Iterator[Batch]:
        for i, batch in enumerate(batches):
            if i * BATCH_ROWS >= 100:
                look()
            yield batch

    interp.run(asked, model.transformer, watched(lambda: resident.append(resident_mib())))
    with LiveBytes() as live:
        interp.run(asked, model.transformer, watched(lambda: alive.append(live.alive)))
    return {
        "resident_mib_from_row_100": [round(resident[0], 1), round(max(resident), 1), round(resident[-1], 1)],
        "alive_mib_from_row_100": [round(x / MIB, 2) for x in (alive[0], max(alive), alive[-1])],
    }


# --- several analyses ---------------------------------------------------------------------------------------------


def sentences(count: int, seed: int) -> Iterator[str]:
    """Made-up texts of one to five sentences, no two alike."""
    generator = random.Random(seed)
    for i in range(count):
        said = []
        for _ in range(generator.randint(1, 5)):
            one, other = generator.sample(NAMES, 2)
            place, thing = generator.choice(PLACES), generator.choice(THINGS)
            said.append(f"When {one} and {other} went to the {place}, {one} gave a {thing} to {other}.")
        yield f"{i}. " + " ".join(said)


def stream_of(model: interp.HookedTransformer, count: int) -> Stream:
    """Windows of made-up texts; those over the context are truncated."""
    return Stream(
        open_source(list(sentences(count, 0))), model.text, tokens_per_batch=4096, too_long="truncate"
    )


def questions_of(model: interp.HookedTransformer) -> dict[str, Askable]:
    """Five that stream texts, by name; the autoencoder is random, as large as four times the stream."""
    d, s = model.cfg.d_model, 4 * model.cfg.d_model
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(s, d, generator=generator) / d**0.5
    sae = Dictionary(
        ReLU(), {"W_enc": w.mT.contiguous(), "b_enc": torch.zeros(s), "W_dec": w, "b_dec": torch.zeros(d)}
    )
    return {
        "lens": LogitLens(),
        "in_context": InContext(early=5, late=50),
        "one_token_losses": OneTokenLosses(),
        "reconstruction": Reconstruction(sae, STREAM),
        "top_examples": TopExamples("blocks.2.mlp.hook_post", cells=range(64)),
    }


def five(model: interp.HookedTransformer, rounds: int) -> None:
    """Each alone, and all together."""
    texts = stream_of(model, FEW)
    asked = questions_of(model)
    calls: dict[str, Callable[[], object]] = {
        name: partial(interp.run, [each], model, texts) for name, each in asked.items()
    }
    calls["together"] = partial(interp.run, asked, model, texts)
    seconds = cpu_seconds(calls, rounds)
    medians = {name: sorted(each)[len(each) // 2] for name, each in seconds.items()}
    dearest = max(asked, key=lambda name: medians[name])
    report(
        "stream", "interp", "five analyses in one pass", timing(seconds, "together", dearest), claim=1.5,
        most_expensive=dearest, alone={name: round(x, 3) for name, x in medians.items()},
    )  # fmt: skip


# --- texts that meet nothing but the embedding -------------------------------------------------------------------


def text(model: interp.HookedTransformer, rounds: int) -> None:
    """The tokenizer alone, the windows of a stream, a run, and what it computes by hand in the same batches."""
    texts, window = list(sentences(MANY, 1)), 1024
    source = Stream(
        open_source(texts), model.text, tokens_per_batch=2**14, too_long="truncate", rows_per_window=window
    )
    embed = model.transformer.embed.weight

    def tokenised() -> list[list[list[int]]]:
        groups = (texts[i : i + window] for i in range(0, len(texts), window))
        return [list(model.text.many(group, prepend_bos=True)) for group in groups]

    def windows() -> None:
        for w in range(source.windows or 0):
            source.window(w)

    def by_hand() -> float:
        total = 0.0
        for group in tokenised():
            rows = sorted((ids[: model.cfg.n_ctx] for ids in group), key=len, reverse=True)
            while rows:
                some, rows = rows[: 2**14 // len(rows[0])], rows[2**14 // len(rows[0]) :]
                lengths = torch.tensor([len(ids) for ids in some])
                columns = int(lengths[0])
                tokens = torch.tensor([ids + [0] * (columns - len(ids)) for ids in some])
                real = torch.arange(columns) < lengths[:, None]
                total += float(((embed[tokens].norm(dim=-1) * real).sum(1) / lengths).sum())
        return total / len(texts)

    def run() -> float:
        return float(interp.run([NORMS], model, source)["norms"].norm)

    if abs(run() - by_hand()) > 1e-4 * by_hand():
        raise RuntimeError("the loop by hand has another mean")
    tokens = sum(min(len(ids), model.cfg.n_ctx) for group in tokenised() for ids in group)
    calls: dict[str, Callable[[], object]] = {
        "tokenizer": tokenised, "windows": windows, "by hand": by_hand, "interp": run,
    }  # fmt: skip
    seconds = cpu_seconds(calls, rounds)
    for name, reference in (("windows", "tokenizer"), ("by hand", "tokenizer"), ("interp", "by hand")):
        times = timing(seconds, name, reference)
        report(
            "stream", name, f"norms of the embedding over {MANY} texts", times, against=reference,
            tokens_per_s=round(tokens / sorted(seconds[name])[rounds // 2]),
            **({"claim": 1.1} if name == "interp" else {}),
        )  # fmt: skip


# --- progress on disk ---------------------------------------------------------------------------------------------


def journal(model: interp.HookedTransformer) -> None:
    """What `Journal.write` takes of a run's CPU seconds, with and without a bootstrap."""
    texts, asked = stream_of(model, 1024), questions_of(model)
    moments, every_row = asked["in_context"], asked["lens"]
    cases: dict[str, tuple[Askable, int]] = {
        "moments of 127 positions": (moments, 0),
        "the same with 1 000 replicates": (moments, 1000),
        "every row of a lens, all positions": (every_row, 0),
    }
    for what, (each, bootstrap) in cases.items():
        with tempfile.TemporaryDirectory() as folder, timed_writes() as writes:
            start = time.process_time()
            interp.run([each], model, texts, out=Path(folder) / "run", bootstrap=bootstrap)
            total = time.process_time() - start
        seconds, size = (sum(each) for each in zip(*writes, strict=True))
        report(
            "stream", "interp", f"a journal of {what}",
            share=round(seconds / total, 4), claim=0.02, batches=len(writes),
            ms_per_batch=round(1e3 * seconds / len(writes), 2),
            kib_per_batch=round(size / len(writes) / 1024, 1), run_cpu_s=round(total, 2),
        )  # fmt: skip


@contextmanager
def timed_writes() -> Iterator[list[tuple[float, int]]]:
    """CPU seconds and bytes of every entry of every journal."""
    found: list[tuple[float, int]] = []
    write = Journal.write

    def timed(self: Journal, done: BatchDone) -> None:
        start, before = time.process_time(), self._size
        write(self, done)
        found.append((time.process_time() - start, max(0, self._size - before)))

    Journal.write = timed  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Journal.write = write  # type: ignore[method-assign]


# --- processes ----------------------------------------------------------------------------------------------------


def workers(model: interp.HookedTransformer) -> None:
    """One and two worker processes, and two actors of Ray, from the moment when all are at work."""
    texts = stream_of(model, 4096)
    questions = Questions.of([InContext(early=5, late=50).bind(model)], model.cfg)

    def processes(progress: Progress, count: int) -> Iterator[BatchDone]:
        devices = [torch.device("cpu")] * count
        numbers = range(texts.windows or 0)
        return done_by_processes(questions, model.transformer, texts, numbers, progress.due, devices)

    def actors(progress: Progress, count: int) -> Iterator[BatchDone]:
        return by_actors(questions, model.transformer, texts, count, progress)

    for kind in (processes, actors):
        one, two = (rate(partial(kind, count=count), count) for count in (1, 2))
        report(
            "stream", f"2 {kind.__name__}", "tokens/s of two workers against one", claim=1.7,
            ratio=round(two["tokens_per_s"] / one["tokens_per_s"], 3), one=one, two=two, load=os.getloadavg(),
        )  # fmt: skip


def by_actors(
    questions: Questions, model: Transformer, source: DataSource, count: int, progress: Progress
) -> Iterator[BatchDone]:
    """The same on Ray."""
    import ray

    from interp.runs.ray_engine import done_by_ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield from done_by_ray(
            questions, model, source, range(source.windows or 0), progress.due, actors=count
        )
    finally:
        ray.shutdown()


def rate(done: Callable[[Progress], Iterator[BatchDone]], count: int) -> dict[str, float]:
    """Tokens per second from the first windows' ends till the last but a few, by the wall clock and of CPU time."""
    progress, start = Progress(), time.monotonic()
    ends: list[tuple[float, float, int]] = []
    for each in done(progress):
        progress.add(each)
        if each.last:
            ends.append((time.monotonic(), child_seconds(), progress.finished.tokens))
    first, last = ends[2 * count - 1], ends[-count]
    tokens, spent = last[2] - first[2], last[1] - first[1]
    return {
        "start_up_s": round(ends[0][0] - start, 1),
        "tokens_per_s": round(tokens / (last[0] - first[0])),
        "tokens_per_cpu_s": round(tokens / spent) if spent else float("nan"),
        "cpus_had": round(spent / (last[0] - first[0]), 2),
    }


def child_seconds() -> float:
    """CPU seconds of this process's children so far (Ray's actors are none)."""
    ticks = 0
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


# --- a corpus -----------------------------------------------------------------------------------------------------


def corpus(model: interp.HookedTransformer, megabytes: int = 100) -> None:
    """One pass over a file of 100 MB; resident memory each 10 000 rows."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "corpus.txt"
        with path.open("w") as file:
            texts = sentences(10**9, 1)
            while file.tell() < megabytes * 10**6:
                file.writelines(f"{text}\n" for _, text in zip(range(1000), texts, strict=False))
        inner = data_source(path, model.text, 2**14)
        assert isinstance(inner, Stream)
        watched = Watched(
            inner.source, inner.text, tokens_per_batch=2**14, too_long="truncate", rows_per_window=1024
        )
        start, wall = time.process_time(), time.monotonic()
        found = interp.run([NORMS], model, watched, out=Path(folder) / "run")
        took, wall = time.process_time() - start, time.monotonic() - wall
        size = path.stat().st_size
    seen = RESIDENT[1:]
    report(
        "stream", "interp", f"norms of the embedding over {size / 1e6:.0f} MB of text", rows=found.rows,
        tokens=found.tokens, cut=found.cut, cpu_s=round(took, 1), wall_s=round(wall, 1),
        tokens_per_cpu_s=round(found.tokens / took), megabytes_per_cpu_s=round(size / 1e6 / took, 2),
        resident_mib_at_each_tenth=[round(seen[i * (len(seen) - 1) // 10]) for i in range(11)],
        mean_norm=float(found["norms"].norm),
    )  # fmt: skip


# --- the constants of the cost model ------------------------------------------------------------------------------


def costs(model: interp.HookedTransformer) -> None:
    """What a run adds to the passes themselves."""
    questions = Questions.of([NORMS], model.cfg)
    words = [Batch(torch.tensor([[1]]), row=torch.tensor([i])) for i in range(2000)]
    passes = cpu_of(lambda: [questions.values(model.transformer, batch) for batch in words])
    runs = cpu_of(lambda: interp.run([NORMS], model.transformer, words))
    rows = torch.arange(4)
    large = Bootstrap(Means, 1000).of({"x": torch.randn(4, 1000)}, rows)
    done = BatchDone(0, 0, False, {"norms": large}, Tally())
    size = len(packed_done(done)) / 1e6
    reductions = {"norms": Bootstrap(Means, 1000)}
    with tempfile.TemporaryDirectory() as folder:
        kept = Journal.open(Path(folder), "main", reductions)
        numbers = iter(range(10**6))
        seconds = {
            "merge": cpu_of(lambda: large.merge(large), 9),
            "pack": cpu_of(lambda: packed_done(done), 9),
            "unpack": cpu_of(lambda: unpacked_done(packed_done(done), reductions), 9),
            "journal": cpu_of(lambda: kept.write(replace(done, batch=next(numbers))), 1),
            "fold": cpu_of(kept.fold, 3),
        }
        folded = sum(path.stat().st_size for path in Path(folder).iterdir()) / 1e6
    per_mb = {name: round(1e3 * x / (folded if name == "fold" else size), 2) for name, x in seconds.items()}
    report(
        "stream", "interp", "what a run adds", overhead_ms_per_batch=round(1e3 * (runs - passes) / len(words), 3),
        pass_ms_per_batch=round(1e3 * passes / len(words), 3), ms_per_mb=per_mb, partial_mb=round(size, 2),
    )  # fmt: skip


def cpu_of(call: Callable[[], object], rounds: int = 3) -> float:
    """The median CPU seconds of a call."""
    seconds = []
    for _ in range(rounds):
        start = time.process_time()
        call()
        seconds.append(time.process_time() - start)
    return sorted(seconds)[rounds // 2]


RESIDENT: list[float] = []


class Watched(Stream):
    """A stream that looks at the process's memory at each window."""

    def window(self, w: int) -> Window:
        """The window, as ever."""
        RESIDENT.append(resident_mib())
        return super().window(w)


def _norms(trace: Trace, batch: Batch, model: Transformer) -> Mapping[str, Tensor]:
    norm = trace["hook_embed"].norm(dim=-1)
    return {"norm": (norm * batch.real).sum(1) / batch.lengths}


def means(merged: Partial, name: str) -> "xr.Dataset":
    """The table of means."""
    assert isinstance(merged, Means)
    means = {what: moments.mean for what, moments in merged.moments.items()}
    return labelled(name, {what: ([f"{what}_{i}" for i in range(x.ndim)], x) for what, x in means.items()})


NORMS = ByRow("norms", Reading([Read("hook_embed")], _norms), Means, partial(means, name="norms"))
"""The mean norm of what a row's tokens enter with."""


if __name__ == "__main__":
    tyro.cli(main)
