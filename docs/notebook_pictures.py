"""Draws one picture of every notebook anew, for the gallery: notebooks are committed without what they show.

Run: `python docs/notebook_pictures.py [NAME ...]`; it takes Pillow and some minutes for all of them.
"""

import io
import os
import sys
import tempfile
from pathlib import Path

from blocks import as_page, run_page
from PIL import Image

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures" / "notebooks"
SHOWN = {
    "01_first_look": 1, "02_circuits": 4, "03_head_taxonomy": 0, "04_attribution": 3, "05_backward_lens": 0,
    "06_patching": 0, "07_circuits_causal": 1, "08_runs": 0, "09_probes_and_saes": 2, "10_phase_change": 0,
    "11_mixers": 0, "12_encoder_decoder": 1, "13_lenses_with_error_bars": 0, "14_why_a_head_attends": 1,
    "15_a_variable": 2, "16_steering_and_differences": 0, "17_which_method": 0,
    "18_why_attention_is_scaled": 0, "19_a_transcoder": 0, "20_what_is_reported": 0,
}  # fmt: skip
"""Which of its figures stands for a notebook, counted from 0."""
WIDTH, COLOURS = 800, 128
"""Of a picture: pixels across at most, and how many colours."""


def draw(name: str) -> None:
    """Run the notebook and write its picture."""
    notebook = ROOT / "notebooks" / f"{name}.ipynb"
    figures = [png for shown in run_page(as_page(notebook), notebook) for png, _, _ in shown.figures]
    picture = Image.open(io.BytesIO(figures[SHOWN[name]])).convert("RGB")
    picture.thumbnail((WIDTH, WIDTH))
    PICTURES.mkdir(exist_ok=True)
    few = picture.quantize(COLOURS, kmeans=2, dither=Image.Dither.NONE)
    few.save(PICTURES / f"{name}.png", optimize=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for each in sys.argv[1:] or SHOWN:
            draw(each)
