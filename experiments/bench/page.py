"""Claims: the report page of a 64-token prompt at GPT-2 small's shape takes at most 1.5x the time of the analyses in
it, `index.html` has at most 3 MB, and Chromium paints it first within a second.

The analyses are timed where the page calls them, in the run that writes it: what is left is making tables, CSV, Parquet
and HTML. Paint is what the browser itself reports (`first-contentful-paint`, from the start of navigation), the median
of some visits to the file on disk; without Chromium and Playwright that line is left out.
"""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import torch
import transformers
import tyro
from measure import report
from subjects import gpt2_small
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

import interp
from interp.families.tokenizer import HuggingFaceTokenizer
from interp.pages import About, ReportQuestion, report as gathering, report_of, write_report
from interp.pages.corrupted import PromptPair

COLUMNS, CHANGED = 64, 5
CLAIM_TIME, CLAIM_MB, CLAIM_PAINT = 1.5, 3.0, 1.0
FUNCTIONS = ("attribute", "backward_lens", "composition", "copying", "heads", "logit_lens", "observe", "run")
ANALYSES: list[tuple[object, str]] = [
    *((gathering, name) for name in FUNCTIONS), (PromptPair, "edges"), (PromptPair, "curve"),
]  # fmt: skip
"""Where the page calls an analysis."""
PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime / 1000"
READY = "performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd / 1000"


def main(twin: bool = True, visits: int = 5, keep: Path | None = None) -> None:
    """Measure the claims.

    Args:
        twin: with patching, ablation by the twin and edges, some minutes of analyses; without, the rest.
        visits: how often the browser opens the page.
        keep: folder to leave the report in.
    """
    torch.set_num_threads(1)
    model = speaking(gpt2_small().ours)
    words = [f" w{7 * i:05d}" for i in range(COLUMNS)]
    corrupt = "".join([*words[:CHANGED], " w40000", *words[CHANGED + 1 :]]) if twin else None
    question = ReportQuestion("".join(words), " w00021", " w00028", corrupt)
    what = f"{COLUMNS} tokens, {'with a twin' if twin else 'no twin'}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) if keep is None else keep
        folder.mkdir(exist_ok=True)
        started = time.process_time()
        with timed(ANALYSES) as seconds:
            found = report_of(model, question, About("GPT-2 small's shape, random weights"))
        gathered = time.process_time()
        write_report(found, folder)
        written = time.process_time()
        whole, inside = written - started, sum(seconds.values())
        tokens = len(found.tables["tokens"])
        if tokens != COLUMNS:
            raise RuntimeError(f"the prompt has {tokens} tokens, not {COLUMNS}")
        report(
            "page", "interp", f"time of the page against its analyses, {what}",
            ratio=round(whole / inside, 3), claim=CLAIM_TIME, page_cpu_s=round(whole, 2),
            analyses_cpu_s=round(inside, 2), writing_cpu_s=round(written - gathered, 2),
            each={name: round(each, 2) for name, each in seconds.items()},
        )  # fmt: skip
        size = (folder / "index.html").stat().st_size / 1e6
        report("page", "interp", f"size of index.html, {what}", megabytes=round(size, 3), claim=CLAIM_MB)
        if seen := opened(folder / "index.html", visits):
            paints, ready = zip(*seen, strict=True)
            report(
                "page", "chromium", f"first paint, {what}", median_s=round(statistics.median(paints), 3),
                worst_s=round(max(paints), 3), linked_s=round(statistics.median(ready), 3), claim=CLAIM_PAINT,
                visits=visits,
            )  # fmt: skip


def speaking(model: interp.HookedTransformer) -> interp.HookedTransformer:
    """The same weights with a vocabulary of words such as ` w00021`, as long as GPT-2's usual tokens."""
    end = "<|endoftext|>"
    words = {f" w{i:05d}": i for i in range(1, model.cfg.d_vocab)}
    tokenizer = Tokenizer(models.WordLevel({end: 0, **words}, unk_token=end))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r" w\d+"), "isolated")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, bos_token=end)
    return interp.HookedTransformer(model.transformer, HuggingFaceTokenizer(fast), name="gpt2-small-shape")


@contextmanager
def timed(places: list[tuple[object, str]]) -> Iterator[dict[str, float]]:
    """CPU seconds spent in each of these functions while inside, calls within each other counted once."""
    seconds: dict[str, float] = {}
    depth = [0]

    def watched(name: str, call: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object, **kwargs: object) -> object:
            depth[0] += 1
            started = time.process_time()
            try:
                return call(*args, **kwargs)
            finally:
                depth[0] -= 1
                if not depth[0]:
                    seconds[name] = seconds.get(name, 0.0) + time.process_time() - started

        return run

    with ExitStack() as stack:
        for owner, name in places:
            stack.enter_context(patch.object(owner, name, watched(name, getattr(owner, name))))
        yield seconds


def opened(page: Path, visits: int) -> list[tuple[float, float]]:
    """Seconds to the first paint, and until the views are linked, each visit in a fresh tab; none without a browser."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None or find_spec("playwright") is None:
        return []
    from playwright import sync_api

    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-gpu"])
        found = []
        for _ in range(visits):
            tab = running.new_page(viewport={"width": 1400, "height": 900}, bypass_csp=True)  # to be asked
            tab.goto(page.as_uri())
            tab.wait_for_function("performance.getEntriesByName('first-contentful-paint').length")
            found.append((float(tab.evaluate(PAINT)), float(tab.evaluate(READY))))
            tab.close()
        running.close()
    return found


if __name__ == "__main__":
    tyro.cli(main)
