"""One model and the passes for the page: clean and edited rows of one batch, kept for a while.

The clean row is computed once for each prompt and position, together with the first edited one unless that takes a mean
from it; a pass that was seen lately (undo, redo, another head to look at) is not repeated. Nothing is stored on the
model, and a pass that is stopped leaves no trace. One thread at a time.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from threading import Event
from typing import TYPE_CHECKING, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.data.batch import Batch
from interp.lenses.lens import lens_sites
from interp.model import sites
from interp.model.config import MLP, MLPS, ModelConfig
from interp.model.edits import Edit
from interp.model.tap import Read
from interp.pages.stages import sites_of, staged
from interp.passes.edit_text import edit_to_json
from interp.passes.generate import Step, stream
from interp.passes.observe import Subject, observe
from interp.passes.question import Reading
from interp.passes.sampling import Sampling
from interp.residual.attribution import attribution
from interp.serve import directions
from interp.serve.asks import MAX_TOKENS, PATTERN, Continue, EditedPrompt
from interp.serve.changes import AVERAGED, RESAMPLED, DirectionValues, Lengths, check, renormalises, resolved

if TYPE_CHECKING:
    from interp.causal import Subspace

T = TypeVar("T")
KEPT = 8
"""Rows kept: GPT-2 small with 128 tokens takes 28 MiB each."""


class Stopped(BaseException):
    """The computation is not wanted any more. No `Exception`, so that no handler takes it for an error."""


HeadSteps = tuple[Tensor, Tensor, Tensor, Tensor]
"""The query at the position looked at `[1 h r]`, all keys and values `[k g r]`, `[k g e]`, and its scores `[h 1 k]`."""


@dataclass(frozen=True, eq=False)
class Seen:
    """Values of one row of a pass."""

    logits: Float[Tensor, "v"]
    """Logits of the token after the position."""
    patterns: Mapping[int, Float[Tensor, "h q k"]]
    """Attention patterns by layer; only layers with mixers that have them."""
    at: Mapping[str, Float[Tensor, "1 ..."]]
    """Values that attribution reads at the position, by site."""
    means: DirectionValues
    """Means over all positions of the sites in `AVERAGED`."""
    steps: Mapping[int, HeadSteps]
    """Inputs of the stages of heads, by layer; only layers that have them (`interp.pages.stages`)."""


@dataclass(frozen=True, eq=False)
class RowPair:
    """A prompt's clean and edited row."""

    tokens: Int[Tensor, "p"]
    second: Int[Tensor, "p2"] | None
    position: int
    clean: Seen
    edited: Seen
    edits: Sequence[Edit]
    """The edits, with looked-up values of means and resampled parts."""
    donor: Seen | None
    """The second prompt's row, where edits take something from it."""
    random: Float[Tensor, "r v"] | None = None
    """Logits with random directions in place of those that edits add, where they add any."""


class Session:
    """Passes of one model for the page.

    Args:
        model: the model.
        subspaces: the directions that the page may add.

    Raises:
        ValueError: a model that the page cannot show (without logits or tokenizer, with cross-attention, or one that
            sees both ways), or directions that are not one per site.
    """

    def __init__(self, model: Subject, subspaces: Sequence["Subspace"] = ()) -> None:
        config = model.transformer.config
        if not config.unembed or config.cross_attention or not config.causal:
            raise ValueError("the live page requires a causal model with logits and without cross-attention")
        _ = model.text.tokenizer
        self.model = model
        self.directions = directions.by_site(subspaces, config)
        self._random: OrderedDict[Hashable, Tensor] = OrderedDict()
        self._rows: OrderedDict[Hashable, Seen] = OrderedDict()
        self._donors: OrderedDict[Hashable, tuple[Seen, DirectionValues]] = OrderedDict()

    @property
    def config(self) -> ModelConfig:
        """The model's."""
        return self.model.transformer.config

    @cached_property
    def attribution(self) -> Reading | str:
        """Direct attribution by head, or why this model has none."""
        try:
            return attribution(self.config, "head")
        except ValueError as cause:
            return str(cause)

    @cached_property
    def with_patterns(self) -> tuple[int, ...]:
        """Layers with attention patterns."""
        site_names = set(sites.names(self.config))
        return tuple(i for i in range(self.config.n_layers) if f"blocks.{i}.{PATTERN}" in site_names)

    @cached_property
    def staged(self) -> Mapping[int, tuple[str, str, str, str]]:
        """Sites of the heads' queries, keys, values and scores, by layer, in layers with heads that have stages."""
        network = self.model.transformer
        return {layer: sites_of(network, layer)[:4] for layer in staged(network)}

    @cached_property
    def streams(self) -> tuple[str, ...]:
        """The states that the logit lens reads, from the embeddings to the end."""
        return (
            lens_sites(self.config, "resid_pre")
            if self.config.n_layers
            else (sites.final_stream(self.config),)
        )

    @cached_property
    def renormalised(self) -> tuple[int, ...]:
        """Layers in which an entry of a pattern can be cut with the rest of its row renormalised."""
        return tuple(i for i in range(self.config.n_layers) if renormalises(self.config, i))

    @property
    def neurons(self) -> int:
        """Neurons of a layer; 0 in models without plain MLPs."""
        return self.config.mlp.d_mlp if isinstance(self.config.mlp, MLP) else 0

    def tokens(self, text: str) -> Int[Tensor, "p"]:
        """The ids of a prompt, BOS included; ValueError for one that is too long."""
        tokens = self.model.text.batch(text).tokens[0]
        most = min(MAX_TOKENS, self.config.n_ctx)
        if len(tokens) > most:
            raise ValueError(f"a prompt of at most {most} tokens is required, got {len(tokens)}")
        return tokens

    def checked(self, ask: EditedPrompt) -> tuple[Int[Tensor, "p"], Int[Tensor, "p2"] | None, int]:
        """Tokens of both prompts and the position looked at; ValueError for what they or the model do not have."""
        tokens = self.tokens(ask.prompt)
        second = None if ask.second is None else self.tokens(ask.second)
        position = len(tokens) - 1 if ask.position is None else ask.position
        if position >= len(tokens):
            raise ValueError(f"a position from 0 to {len(tokens) - 1} is required, got {position}")
        lengths = Lengths(len(tokens), None if second is None else len(second))
        check(ask.edits, self.config, lengths, self.directions)
        return tokens, second, position

    def pair(self, ask: EditedPrompt, stop: Event) -> RowPair:
        """Clean and edited row of a prompt: from what is kept, or from one pass over those that are missing.

        Raises:
            ValueError, KeyError: a question that does not fit; Stopped.
        """
        tokens, second, position = self.checked(ask)
        donor, values = self._donor(ask, second, position, stop)
        clean_key = (ask.prompt, position)
        texts = tuple(json.dumps(edit_to_json(edit)) for edit in ask.edits)
        edited_key = (*clean_key, ask.second if ask.resampled else None, texts)
        clean, edited = self._rows.get(clean_key), self._rows.get(edited_key) if ask.edits else None
        if ask.averaged and clean is None:
            (clean,) = self._pass(tokens[None], position, [], stop)
        means = {} if clean is None else clean.means
        edits = resolved(ask.edits, means, values, self.directions, len(tokens))
        todo = [clean is None, edited is None and bool(edits)]
        if any(todo):
            rows = (sum(todo) - 1,)
            row_edits = [replace(edit, rows=rows) for edit in edits] if todo[1] else []
            seen = self._pass(tokens.expand(sum(todo), -1), position, row_edits, stop)
            clean = seen[0] if todo[0] else clean
            edited = seen[-1] if todo[1] else edited
        assert clean is not None
        _keep(self._rows, clean_key, clean)
        if edited is None:
            return RowPair(tokens, second, position, clean, clean, edits, None)
        _keep(self._rows, edited_key, edited)
        random = None
        if ask.steered:
            random = self._random.get(edited_key)
            random = self._random_directions(tokens, position, edits, stop) if random is None else random
            _keep(self._random, edited_key, random)
        return RowPair(tokens, second, position, clean, edited, edits, donor, random)

    @torch.no_grad()
    def _random_directions(
        self, tokens: Int[Tensor, "p"], position: int, edits: Sequence[Edit], stop: Event
    ) -> Float[Tensor, "r v"]:
        """The logits with random directions in place of those that edits add, one row for each."""
        rows = tokens.expand(directions.RANDOM, -1)
        columns = torch.full((len(rows), 1), position, device=self.model.transformer.device)
        row_edits = [*directions.at_random(edits, len(tokens)), *self._watches(stop)]
        seen = observe(self.model.transformer, Batch(rows.clone()), [], row_edits, logits_at=columns)
        return seen.output[:, 0]

    def continuations(self, ask: Continue, stop: Event) -> tuple[list[int], list[int]]:
        """New tokens, clean and edited, drawn with the same random numbers.

        Edits at all positions act on new tokens too; those with the second prompt's values on the prompt's tokens only.
        """
        pair = self.pair(ask, stop)
        sampling = None
        if ask.temperature > 0:
            sampling = Sampling(ask.temperature, ask.top_k, ask.top_p, ask.seed)
        batch = Batch(pair.tokens[None].clone())

        def run(edits: Sequence[Edit]) -> list[int]:
            steps = stream(
                self.model.transformer, batch, ask.tokens, sampling=sampling, stop_tokens=self.model.text.end_ids,
                edits=[*edits, *self._watches(stop)],
            )  # fmt: skip
            return [_token(step, stop) for step in steps]

        clean = run([])
        return clean, run(pair.edits) if pair.edits else clean

    def _watches(self, stop: Event) -> list[Edit]:
        """Edits that change nothing and stop the pass between layers."""
        watch = _watched(lambda value: value, stop)
        return [Edit(f"blocks.{layer}.hook_resid_pre", watch) for layer in range(self.config.n_layers)]

    def _donor(
        self, ask: EditedPrompt, second: Int[Tensor, "p2"] | None, position: int, stop: Event
    ) -> tuple[Seen | None, DirectionValues]:
        """The second prompt's row at the same position (or its last), and its values that may be put elsewhere."""
        if second is None or not ask.resampled:
            return None, {}
        position = min(position, len(second) - 1)
        key = (ask.second, position)
        if key not in self._donors:
            found: dict[str, Tensor] = {}
            reads = [Read(name) for name in self._in_blocks(RESAMPLED)]
            (seen,) = self._pass(second[None], position, [], stop, reads, found)
            self._donors[key] = seen, {name: value[0] for name, value in found.items()}
            while len(self._donors) > 2:
                self._donors.popitem(last=False)
        return self._donors[key]

    def _in_blocks(self, names: Sequence[str]) -> list[str]:
        """Full names of these sites in every block that has them."""
        site_names = set(sites.names(self.config))
        every = [f"blocks.{i}.{name}" for i in range(self.config.n_layers) for name in names]
        return [name for name in every if name in site_names]

    @torch.no_grad()
    def _pass(
        self,
        tokens: Int[Tensor, "b p"],
        position: int,
        edits: Sequence[Edit],
        stop: Event,
        more: Sequence[Read] = (),
        found: dict[str, Tensor] | None = None,
    ) -> list[Seen]:
        """Every row of one pass; `found` takes the answers of `more`."""
        at_position = {
            name: Read(name, _watched(_column(name, position), stop)) for name in self._at_position
        }
        means = {name: Read(name, _watched(_mean, stop)) for name in self._in_blocks(AVERAGED)}
        patterns = {i: Read(f"blocks.{i}.{PATTERN}", _watched(_same, stop)) for i in self.with_patterns}
        columns = torch.full((len(tokens), 1), position, device=self.model.transformer.device)
        steps = {i: self._step_reads(names, position, stop) for i, names in self.staged.items()}
        each_step = [read for four in steps.values() for read in four]
        reads = [*at_position.values(), *means.values(), *patterns.values(), *each_step, *more]
        seen = observe(self.model.transformer, Batch(tokens.clone()), reads, edits, logits_at=columns)
        if found is not None:
            found |= {read.site: seen.trace[read] for read in more}
        numbers = [seen.output, *(seen.trace[read] for read in patterns.values())]
        if not all(bool(each.isfinite().all()) for each in numbers):
            raise ArithmeticError(
                "the edited run gives numbers that are not finite: a factor or value is too large, or a query has no "
                "key left to look at"
            )
        return [
            Seen(
                seen.output[row, 0],
                {layer: seen.trace[read][row] for layer, read in patterns.items()},
                {name: seen.trace[read][row : row + 1] for name, read in at_position.items()},
                {name: seen.trace[read][row] for name, read in means.items()},
                {i: _steps(*(seen.trace[read][row] for read in four)) for i, four in steps.items()},
            )
            for row in range(len(tokens))
        ]

    def _step_reads(self, names: tuple[str, str, str, str], position: int, stop: Event) -> list[Read]:
        """Reads of a layer in which heads have stages: query and scores at the position, all keys and values."""
        q, k, v, scores = names
        one = {
            q: lambda value: value[:, position : position + 1],
            scores: lambda value: value[:, :, position : position + 1],
        }
        return [Read(name, _watched(one.get(name, _same), stop)) for name in (q, k, v, scores)]

    @cached_property
    def _at_position(self) -> tuple[str, ...]:
        """The sites that attribution and the table of neurons need at the position looked at."""
        parts = () if isinstance(self.attribution, str) else self.attribution.reads
        names = dict.fromkeys([*(read.site for read in parts), *self.streams])
        if self.neurons:
            block_sites = [f"hook_{sublayer}" for sublayer in self.config.sublayers]
            mlps = [name for name in self.config.sublayers if name in MLPS]
            block_sites += [f"{name.removesuffix('_out')}.hook_post" for name in mlps]
            names |= dict.fromkeys(
                f"blocks.{i}.{name}" for i in range(self.config.n_layers) for name in block_sites
            )
        return tuple(names)


def _keep(rows: OrderedDict[Hashable, T], key: Hashable, seen: T) -> None:
    """Keep what was seen, as the newest, and let go of the oldest."""
    rows[key] = seen
    rows.move_to_end(key)
    while len(rows) > KEPT:
        rows.popitem(last=False)


def _column(name: str, position: int) -> Callable[[Tensor], Tensor]:
    """The site's value at one position; after the blocks nothing else was computed."""
    outside = name.startswith(("ln_final", "unembed"))
    return lambda value: value[:, 0 if outside else position].clone()


def _steps(q: Tensor, k: Tensor, v: Tensor, scores: Tensor) -> HeadSteps:
    """Copies, so that nothing larger is kept with them."""
    return q.clone(), k.clone(), v.clone(), scores.clone()


def _mean(value: Tensor) -> Tensor:
    return value.mean(1)


def _same(value: Tensor) -> Tensor:
    return value


def _watched(via: Callable[[Tensor], Tensor], stop: Event) -> Callable[[Tensor], Tensor]:
    def look(value: Tensor) -> Tensor:
        if stop.is_set():
            raise Stopped
        return via(value)

    return look


def _token(step: Step, stop: Event) -> int:
    if stop.is_set():
        raise Stopped
    return int(step.tokens[0])
