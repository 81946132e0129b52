"""Alignment search beside pyvene's, on the same weights, pairs, cells, ranks, steps and batches: IIA and CPU seconds.

Usage: `alignment.py make FOLDER`, then `alignment.py interp FOLDER` and, in an environment with pyvene (0.1.8) and
transformers 4, `alignment.py pyvene FOLDER`. `make` trains a GPT-2 of three layers to look a token up: of
`x0 x1 x2 q s` the answer is x_q. The variable is the answer; a source prompt has the same q and another one. In the
last position it arrives with depth, before that it is nowhere in one place: cells where the search should and should
not find it.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor

VALUES, SLOTS = 16, 3
QUERY = VALUES
"""The id of the first of the three queries; the separator comes after them."""
PAIRS, RANK, STEPS, BATCH = 512, 8, 100, 32
LAYERS, POSITIONS = (0, 1, 2), (3, 4)
RATES = (0.001, 0.01, 0.1)
"""pyvene's parametrisation has a scale of its own, so each of these is tried."""


def prompts(n: int, draw: torch.Generator, asked: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids `[n, 5]`, the slot that each asks for, and the answers."""
    slots = torch.randint(VALUES, (n, SLOTS), generator=draw)
    asked = torch.randint(SLOTS, (n,), generator=draw) if asked is None else asked
    end = torch.full((n, 1), QUERY + SLOTS)
    return torch.cat((slots, QUERY + asked[:, None], end), 1), asked, slots[torch.arange(n), asked]


def make(folder: Path) -> None:
    """Train the model and draw the pairs."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=QUERY + SLOTS + 1, n_positions=8, n_embd=64, n_layer=len(LAYERS), n_head=4, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    )  # fmt: skip
    model, draw = GPT2LMHeadModel(config), torch.Generator().manual_seed(1)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(1500):
        tokens, _, answer = prompts(128, draw)
        loss = torch.nn.functional.cross_entropy(model(tokens).logits[:, -1], answer)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    base, asked, own = prompts(PAIRS * 2, draw)
    source, _, answer = prompts(PAIRS * 2, draw, asked)
    differ = (own != answer).nonzero()[:PAIRS, 0]
    assert len(differ) == PAIRS
    model.eval().save_pretrained(folder)
    found = {"base": base[differ], "source": source[differ], "answer": answer[differ]}
    torch.save(found | {"train": torch.arange(PAIRS) < PAIRS // 2}, folder / "pairs.pt")
    with torch.no_grad():
        right = model(base).logits[:, -1].argmax(-1) == own
    print(f"accuracy on {len(base)} fresh prompts: {float(right.double().mean()):.3f}")


def by_interp(folder: Path, pairs: dict[str, Tensor]) -> dict[str, object]:
    """All cells in one call."""
    import interp
    from interp.causal import Descent, align

    model = interp.HookedTransformer.from_pretrained(folder)
    start = time.process_time()
    found = align(
        model, pairs["base"], pairs["source"], answer=pairs["answer"], layers=LAYERS, pos=POSITIONS, rank=RANK,
        descent=Descent(STEPS, pairs=BATCH), held_out=(~pairs["train"]).tolist(), nulls=[], batch_size=BATCH,
    )  # fmt: skip
    seconds = time.process_time() - start
    iia = found.value.sel(score="iia", swapped="found", layer=list(LAYERS), pos=list(POSITIONS))
    return {"seconds": seconds, "iia": iia.transpose("layer", "pos").values.tolist()}


def by_pyvene(folder: Path, pairs: dict[str, Tensor], rate: float) -> dict[str, object]:
    """A model of interventions for each cell."""
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(folder).eval()
    start = time.process_time()
    iia = [[_cell(model, pairs, layer, pos, rate) for pos in POSITIONS] for layer in LAYERS]
    return {"seconds": time.process_time() - start, "iia": iia}


def _cell(model: torch.nn.Module, pairs: dict[str, Tensor], layer: int, pos: int, rate: float) -> float:
    """IIA of one cell."""
    import pyvene

    torch.manual_seed(0)
    where = pyvene.RepresentationConfig(layer, "block_output", "pos", 1, low_rank_dimension=RANK)
    config = pyvene.IntervenableConfig(
        representations=[where],
        intervention_types=pyvene.LowRankRotatedSpaceIntervention,
        model_type=type(model),
    )
    intervenable = pyvene.IntervenableModel(config, model, use_fast=True)
    intervenable.disable_model_gradients()

    def logits(rows: Tensor) -> Tensor:
        at = [[[pos]] * len(rows)]
        _, found = intervenable(
            {"input_ids": pairs["base"][rows]},
            [{"input_ids": pairs["source"][rows]}],
            {"sources->base": (at, at)},
        )
        return found.logits[:, -1]

    optimiser = torch.optim.Adam(intervenable.get_trainable_parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1 - step / STEPS)
    train, test = (rows.nonzero()[:, 0] for rows in (pairs["train"], ~pairs["train"]))
    order = torch.cat([train[torch.randperm(len(train))] for _ in range(-(-STEPS * BATCH // len(train)))])
    for some in order[: STEPS * BATCH].split(BATCH):
        loss = torch.nn.functional.cross_entropy(logits(some), pairs["answer"][some])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    with torch.no_grad():
        right = torch.cat([logits(some).argmax(-1) == pairs["answer"][some] for some in test.split(BATCH)])
    return float(right.double().mean())


def main() -> None:
    """Do what was asked and say what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["make", "interp", "pyvene"])
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.what == "make":
        given.folder.mkdir(parents=True, exist_ok=True)
        make(given.folder)
        return
    pairs = torch.load(given.folder / "pairs.pt")
    if given.what == "interp":
        print(json.dumps(by_interp(given.folder, pairs)))
        return
    for rate in RATES:
        print(json.dumps({"rate": rate} | by_pyvene(given.folder, pairs, rate)))


if __name__ == "__main__":
    main()
