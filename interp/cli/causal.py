"""The commands that intervene: patching of one prompt pair, causal tracing of one fact, circuits of a task."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from interp.cli.common import available

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

MOST_COLUMNS = 24
"""A wider map is printed as a list of its largest cells."""
LISTED = 15


@dataclass(frozen=True)
class Patch:
    """Print which activations of a clean prompt bring its answer back in a corrupted one."""

    clean: Annotated[str, tyro.conf.Positional]
    """Prompt with the right answer."""
    corrupt: Annotated[str, tyro.conf.Positional]
    """The same prompt, token for token, but for the words that change the answer."""
    answer: str
    """Next token of the clean prompt, leading space included."""
    wrong: str | None = None
    """Token it is contrasted with, usually the corrupted prompt's answer."""
    site: str = "resid_pre"
    """Which activations: resid_pre, resid_mid, attn_out, mlp_out, z, q, k, v, pattern, mlp.hook_post, ..."""
    by: tuple[str, ...] = ()
    """Dims of the map, such as `layer pos head`; without them layer and position, or layer and head."""
    direction: Literal["denoise", "noise"] = "denoise"
    """denoise: clean activations into the corrupted run; noise: the other way round."""
    model: str = "demo-4l"
    """Demo name (see `interp models`), local folder, safetensors file or hub name."""
    out: Path | None = None
    """CSV file for the whole table."""
    device: str = "cpu"
    """Where to compute: cpu, cuda, cuda:1, ..."""
    debug: bool = False
    """Show where an error was raised."""

    def run(self) -> None:
        """Print the map, or its largest cells, and how to read it."""
        from interp import HookedTransformer, logit_difference, patch

        model = HookedTransformer.from_pretrained(self.model, device=available(self.device))
        found = patch(
            model, self.clean, self.corrupt, self.site, by=self.by or None, direction=self.direction,
            metric=logit_difference(self.answer, self.wrong),
        )  # fmt: skip
        print(_shown(found, model.to_str_tokens(self.clean)).to_string())
        clean, corrupt = float(found.clean[0]), float(found.corrupt[0])
        print(
            f"{found.attrs['metric']}: clean {clean:.3f}, corrupted {corrupt:.3f}; in the map 0 = like the corrupted "
            "run, 1 = like the clean one, . = nothing was changed there"
        )
        if self.out is not None:
            found[["effect", "normalised", "changed"]].to_dataframe().to_csv(self.out)
            print(self.out)


@dataclass(frozen=True)
class Trace:
    """Print where a fact comes back when its subject is noise and one clean state is restored."""

    prompt: Annotated[str, tyro.conf.Positional]
    """Text up to the object of the fact."""
    subject: str
    """Word or words of the prompt that get the noise."""
    answer: str | None = None
    """Next token, leading space included; without it the model's own most probable one."""
    kind: Literal["state", "mlp", "attn"] = "state"
    """What is restored: the stream behind a block, or a window of MLP or attention outputs."""
    window: int = 1
    """Sub-layers restored together, for mlp and attn."""
    severed: Literal["mlp", "attn"] | None = None
    """Later MLPs or attentions that stay corrupted."""
    samples: int = 10
    """Draws of the noise."""
    seed: int = 0
    """Seed of the noise."""
    model: str = "demo-4l"
    """Demo name (see `interp models`), local folder, safetensors file or hub name."""
    device: str = "cpu"
    """Where to compute: cpu, cuda, cuda:1, ..."""
    debug: bool = False
    """Show where an error was raised."""

    def run(self) -> None:
        """Print the indirect effect by layer and token, and the total one."""
        from interp import HookedTransformer, causal_trace

        model = HookedTransformer.from_pretrained(self.model, device=available(self.device))
        best = int(model.transformer(model.to_tokens(self.prompt))[0, -1].argmax())
        answer = best if self.answer is None else model.text.single(self.answer)
        found = causal_trace(
            model, self.prompt, self.subject, answer, kind=self.kind, window=self.window, severed=self.severed,
            samples=self.samples, seed=self.seed,
        )  # fmt: skip
        one, name = found.isel(prompt=0), model.text.pieces([answer])[0]
        print(_map(one.each, one.changed, model.to_str_tokens(self.prompt)).to_string())
        print(
            f"p({name!r}): clean {float(one.clean):.3f}, subject noised {float(one.corrupt):.3f}; in the map the "
            f"probability that restoring brings back, mean of {self.samples} draws of noise, . = it can change nothing"
        )


@dataclass(frozen=True)
class Circuit:
    """Find the edges that carry a generated task, and print how much of the answer they keep on other prompts."""

    task: Annotated[Literal["indirect_objects", "facts", "repeated_sequences", "copy"], tyro.conf.Positional]
    """Where the pairs of prompts come from."""
    model: str = "demo-4l"
    """Demo name (see `interp models`), local folder, safetensors file or hub name."""
    edges: int = 40
    """Edges to keep, before loose ends are pruned."""
    method: Literal["eap", "eap-ig-inputs", "eap-ig-activations", "clean-corrupted"] = "eap-ig-inputs"
    """What scores the edges."""
    search: Literal["top_n", "greedy"] = "top_n"
    """How they are picked by their scores."""
    pairs: int = 32
    """Pairs to find the circuit on, and as many others to try it on."""
    seed: int = 0
    """Seed of the pairs."""
    out: Path | None = None
    """JSON file for the circuit."""
    device: str = "cpu"
    """Where to compute: cpu, cuda, cuda:1, ..."""
    debug: bool = False
    """Show where an error was raised."""

    def run(self) -> None:
        """Print the edges from the strongest on, and the circuit's faithfulness beside random ones."""
        from interp import HookedTransformer, batches, evaluate_circuit, find_circuit
        from interp.zoo.pairs import TASKS

        model = HookedTransformer.from_pretrained(self.model, device=available(self.device))
        pairs = [
            batches(model, TASKS[self.task](model.text.tokenizer, self.pairs, seed=s)) for s in self._seeds()
        ]
        found = find_circuit(
            model,
            *pairs[0],
            edges=self.edges,
            method=self.method,
            search=self.search,
            task=self.task,
            seed=self.seed,
        )
        for edge, score in sorted(found.scores.items(), key=lambda each: -abs(each[1])):
            print(f"{score:+9.3f}  {edge}")
        whole = evaluate_circuit(model, *pairs[1], found, subsets=1, draws=5)
        one = whole.sel(score="faithfulness", circuit="found")
        kept, low, high, chance = (float(one[name]) for name in ("value", "low", "high", "null"))
        print(
            f"{len(found.edges)} of {len(found.graph)} edges keep {kept:.2f} [{low:.2f}, {high:.2f}] of the logit "
            f"difference on {self.pairs} other pairs, random ones {chance:.2f}; a score is the change when the edge "
            "carries its clean value into the corrupted run, by first-order estimate"
        )
        if self.out is not None:
            found.save(self.out)
            print(self.out)

    def _seeds(self) -> tuple[int, int]:
        """Two that no other seed of a user's shares."""
        return 2 * self.seed, 2 * self.seed + 1


def _shown(found: "xr.Dataset", tokens: list[str]) -> "pd.DataFrame":
    """A map of two dims as a table, positions named by their tokens; of more dims the cells that matter most."""
    table = found.normalised
    if table.ndim != 2 or table.shape[1] > MOST_COLUMNS:
        start = 0.0 if found.attrs["direction"] == "denoise" else 1.0
        frame = found[["normalised", "changed"]].to_dataframe()
        order = (frame.normalised - start).abs().sort_values(ascending=False, kind="stable").index
        return frame.loc[order[:LISTED]]
    return _map(table, found.changed, tokens)


def _map(table: "xr.DataArray", changed: "xr.DataArray", tokens: list[str]) -> "pd.DataFrame":
    """Two decimals per cell, positions named by their tokens, a dot where nothing was changed."""
    import pandas as pd

    rows, columns = (str(dim) for dim in table.dims)
    words = [
        [f"{value:.2f}" if there else "." for value, there in zip(*pair, strict=True)]
        for pair in zip(table.values, changed.values, strict=True)
    ]
    named = [repr(token)[1:-1] for token in tokens] if columns == "pos" else list(range(len(words[0])))
    return pd.DataFrame(words, columns=named).rename_axis(index=rows)
