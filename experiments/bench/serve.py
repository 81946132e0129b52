"""Claims: a live edit of one head is on the screen within 150 ms on demo-4l, and within 600 ms on GPT-2 small's shape.

`interp serve` in this process, its page in Chromium beside it (as many threads as cores, as it runs for a reader): a
head's factor is moved, and the time is from that event to the frame that shows the new numbers. Every round is a new
factor, so no pass is answered from what was kept; the clean run is. Wall time depends on what else runs here: the load
stands in each line, and CPU seconds of the computation alone (`Session.pair` and `look`) beside it.
"""

import json
import os
import shutil
import statistics
import threading
import time
from functools import partial
from itertools import count
from threading import Event

import torch
import tyro
from measure import report, work
from playwright.sync_api import Page, sync_playwright
from subjects import gpt2_small

import interp
from interp import Edit
from interp.edits import Scale
from interp.families.tokenizer import tokenizer_of
from interp.passes.edit_text import edit_to_json
from interp.serve.answers import look
from interp.serve.app import ServedModel, opened
from interp.serve.asks import Look, parsed
from interp.serve.document import Opening
from interp.serve.session import Session
from interp.serve.snippet import Origin
from interp.zoo.demos import WEIGHTS

PROMPT = "When Mary and John went to the store, John gave a drink to"
SPEAKER = "demo-4l"
"""Whose tokenizer the random model gets."""
FACTORS = count(3.0, 0.125)
CLAIMS_MS = {"demo-4l": 150, "gpt2-small": 600}
MOVE = """
async (factor) => {
  const [status, slider] = ["#status", "#factor"].map((selector) => document.querySelector(selector));
  const painted = new Promise((done) => {
    const seen = new MutationObserver(() => {
      if (!status.textContent.endsWith(" ms")) return;
      seen.disconnect();
      requestAnimationFrame(() => setTimeout(done));
    });
    seen.observe(status, { childList: true });
  });
  const start = performance.now();
  slider.value = factor;
  slider.dispatchEvent(new Event("input", { bubbles: true }));
  await painted;
  return performance.now() - start;
}
"""
"""Moves the factor of the chosen head, and gives the milliseconds until the answer is painted."""


def main(rounds: int = 20) -> None:
    """Measure both claims.

    Args:
        rounds: timed edits per model, after three untimed ones.
    """
    for name, session in subjects().items():
        served = opened(ServedModel(session, Origin(name), Opening(PROMPT)))
        thread = threading.Thread(target=served.run)
        thread.start()
        try:
            seen = on_screen(served.address, rounds)
        finally:
            served.server.should_exit = True
            thread.join()
        alone = computed(session, rounds)
        length = session.model.text.batch(PROMPT).tokens.shape[1]
        report(
            "serve", name, f"one head scaled, prompt of {length} tokens: event to painted frame",
            {"median_ms": round(statistics.median(seen)), "rounds_ms": [round(min(seen)), round(max(seen))]},
            work(partial(asked, session)),
            claim_ms=CLAIMS_MS[name], computation_cpu_ms=round(1000 * statistics.median(alone)),
            rounds=rounds, load=[round(load, 1) for load in os.getloadavg()],
        )  # fmt: skip


def subjects() -> dict[str, Session]:
    """The demo model, and random weights in GPT-2 small's shape with the demo's tokenizer."""
    wide = interp.HookedTransformer(gpt2_small().ours.transformer, tokenizer_of(WEIGHTS / SPEAKER))
    return {
        "demo-4l": Session(interp.HookedTransformer.from_pretrained("demo-4l")),
        "gpt2-small": Session(wide),
    }


def on_screen(address: str, rounds: int) -> list[float]:
    """Milliseconds of every edit in a real browser."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        page: Page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.goto(address)
        page.click("#map-1 [data-layer='1'][data-head='5']")
        page.wait_for_timeout(2000)
        times = [float(page.evaluate(MOVE, turn / 10 - 2)) for turn in range(rounds + 3)]
        browser.close()
    return times[3:]


def computed(session: Session, rounds: int) -> list[float]:
    """CPU seconds of the numbers alone on one thread (more of them spin while they wait), a new factor each time."""
    seconds, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(rounds):
        start = time.process_time()
        asked(session)
        seconds.append(time.process_time() - start)
    torch.set_num_threads(threads)
    return seconds


def asked(session: Session) -> dict[str, object]:
    """What the page is told about L1H5 times a factor that nobody asked for before."""
    edits = [edit_to_json(Edit("L1H5", Scale(next(FACTORS))))]
    asked = {"tab": "bench", "prompt": PROMPT, "edits": edits, "layer": 1, "head": 5}
    ask = parsed(Look, json.dumps(asked).encode())
    never = Event()
    return look(session, ask, session.pair(ask, never), never)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    tyro.cli(main)
