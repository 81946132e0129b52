"""One model and the passes that the page asks of it: clean and edited rows of one batch, kept for a while.

The clean row is computed once for each prompt and position, together with the first edited one; a pass that was seen
lately (undo, redo, another head to look at) is not repeated. Nothing is stored on the model, and a pass that is stopped
leaves nothing behind. One thread at a time.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from threading import Event

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.data.batch import Batch
from interp.model import sites
from interp.model.config import MLP, MLPS, ModelConfig
from interp.model.tap import Edit, Read
from interp.passes.analysis import Analysis
from interp.passes.generate import Step, stream
from interp.passes.observe import Subject, observe
from interp.passes.sampling import Sampling
from interp.residual.attribution import attribution
from interp.serve.asks import MAX_TOKENS, Ask, Continue
from interp.serve.changes import PATCHED, Donors, Lengths, check, edits_of

KEPT = 8
"""Rows kept: GPT-2 small with 128 tokens takes 12 MiB each."""


class Stopped(BaseException):
    """The computation is not wanted any more. No `Exception`, so that nobody on its way takes it for an error."""


@dataclass(frozen=True, eq=False)
class Seen:
    """What one row of a pass gave."""

    logits: Float[Tensor, "v"]
    """Of the token behind the position looked at."""
    patterns: Mapping[int, Float[Tensor, "h q k"]]
    """By layer; only layers whose mixer has patterns."""
    at: Mapping[str, Float[Tensor, "1 ..."]]
    """What attribution reads at that position, by site."""


@dataclass(frozen=True, eq=False)
class Pair:
    """A prompt's clean and edited row."""

    tokens: Int[Tensor, "p"]
    second: Int[Tensor, "p2"] | None
    position: int
    clean: Seen
    edited: Seen
    donor: Seen | None
    """The second prompt's row, where edits take something from it."""


class Session:
    """Passes of one model for the page.

    Errors: ValueError for a model that the page cannot show: without logits or tokenizer, with cross-attention, or one
    that sees both ways.
    """

    def __init__(self, model: Subject) -> None:
        config = model.transformer.config
        if not config.unembed or config.cross_attention or not config.causal:
            raise ValueError("the live page requires a causal model with logits and without cross-attention")
        _ = model.text.tokenizer
        self.model = model
        self._rows: OrderedDict[Hashable, Seen] = OrderedDict()
        self._donors: OrderedDict[Hashable, tuple[Seen, Donors]] = OrderedDict()

    @property
    def config(self) -> ModelConfig:
        """The model's."""
        return self.model.transformer.config

    @cached_property
    def attribution(self) -> Analysis | str:
        """Direct attribution by head, or why this model has none."""
        try:
            return attribution(self.config, "head")
        except ValueError as cause:
            return str(cause)

    @cached_property
    def with_patterns(self) -> tuple[int, ...]:
        """Layers whose mixer has attention patterns."""
        there = set(sites.names(self.config))
        return tuple(i for i in range(self.config.n_layers) if f"blocks.{i}.attn.hook_pattern" in there)

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

    def checked(self, ask: Ask) -> tuple[Int[Tensor, "p"], Int[Tensor, "p2"] | None, int]:
        """Tokens of both prompts and the position looked at; ValueError for what they or the model do not have."""
        tokens = self.tokens(ask.prompt)
        second = None if ask.second is None else self.tokens(ask.second)
        position = len(tokens) - 1 if ask.position is None else ask.position
        if position >= len(tokens):
            raise ValueError(f"a position from 0 to {len(tokens) - 1} is required, got {position}")
        check(ask.edits, self.config, Lengths(len(tokens), None if second is None else len(second)))
        return tokens, second, position

    def pair(self, ask: Ask, stop: Event) -> Pair:
        """Clean and edited row of a prompt: from what is kept, or from one pass over those that are missing.

        Errors: ValueError and KeyError for a question that does not fit; Stopped.
        """
        tokens, second, position = self.checked(ask)
        donor, donors = self._donor(ask, second, position, stop)
        clean_key = (ask.prompt, position)
        edited_key = (*clean_key, ask.second if ask.patched else None, ask.edits)
        clean, edited = self._kept(clean_key), self._kept(edited_key) if ask.edits else None
        todo = [clean is None, edited is None and bool(ask.edits)]
        if any(todo):
            rows = (sum(todo) - 1,)
            lengths = Lengths(len(tokens), None if second is None else len(second))
            edits = edits_of(ask.edits, donors, lengths, rows) if todo[1] else []
            seen = self._pass(tokens.expand(sum(todo), -1), position, edits, stop)
            clean = seen[0] if todo[0] else clean
            edited = seen[-1] if todo[1] else edited
        assert clean is not None
        self._keep(clean_key, clean)
        if edited is None:
            return Pair(tokens, second, position, clean, clean, None)
        self._keep(edited_key, edited)
        return Pair(tokens, second, position, clean, edited, donor)

    def continuations(self, ask: Continue, stop: Event) -> tuple[list[int], list[int]]:
        """New tokens, clean and edited, with the same dice.

        Edits at all positions act on new tokens too, except patches, which have a counterpart only in the prompt. So
        the edited run has no key/value cache: a mean over positions is taken anew at every step.
        """
        tokens, second, position = self.checked(ask)
        _, donors = self._donor(ask, second, position, stop)
        lengths = Lengths(len(tokens), None if second is None else len(second))
        edits = edits_of(ask.edits, donors, lengths)
        sampling = None
        if ask.temperature > 0:
            sampling = Sampling(ask.temperature, ask.top_k, ask.top_p, ask.seed)
        batch = Batch(tokens[None].clone())

        def run(change: Sequence[Edit]) -> list[int]:
            ends = [] if self.model.text.eos_id is None else [self.model.text.eos_id]
            steps = stream(
                self.model.transformer, batch, ask.tokens, sampling=sampling, stop_tokens=ends,
                use_cache=not change, edits=[*change, *self._watches(stop)] if change else [],
            )  # fmt: skip
            return [_token(step, stop) for step in steps]

        clean = run([])
        return clean, run(edits) if edits else clean

    def _watches(self, stop: Event) -> list[Edit]:
        """Edits that change nothing and stop the pass between layers."""
        watch = _watched(lambda value: value, stop)
        return [Edit(f"blocks.{layer}.hook_resid_pre", watch) for layer in range(self.config.n_layers)]

    def _donor(
        self, ask: Ask, second: Int[Tensor, "p2"] | None, position: int, stop: Event
    ) -> tuple[Seen | None, Donors]:
        """The second prompt's row at the same position (or its last), and what may be patched from it."""
        if second is None or not ask.patched:
            return None, {}
        position = min(position, len(second) - 1)
        key = (ask.second, position)
        if key not in self._donors:
            there = set(sites.names(self.config))
            every = (f"blocks.{i}.{name}" for i in range(self.config.n_layers) for name in PATCHED)
            reads = [Read(name) for name in every if name in there]
            donors: dict[str, Tensor] = {}
            seen = self._pass(second[None], position, [], stop, reads, donors)
            self._donors[key] = seen[0], donors
            while len(self._donors) > 2:
                self._donors.popitem(last=False)
        return self._donors[key]

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
        parts = () if isinstance(self.attribution, str) else self.attribution.reads
        names = dict.fromkeys(read.site for read in parts)
        if self.neurons:
            own = [f"hook_{sublayer}" for sublayer in self.config.sublayers]
            own += [
                f"{name.removesuffix('_out')}.hook_post" for name in self.config.sublayers if name in MLPS
            ]
            names |= dict.fromkeys(f"blocks.{i}.{name}" for i in range(self.config.n_layers) for name in own)
        here = {name: Read(name, _watched(_column(name, position), stop)) for name in names}
        patterns = {
            i: Read(f"blocks.{i}.attn.hook_pattern", _watched(_same, stop)) for i in self.with_patterns
        }
        columns = torch.full((len(tokens), 1), position, device=self.model.transformer.device)
        reads = [*here.values(), *patterns.values(), *more]
        seen = observe(self.model.transformer, Batch(tokens.clone()), reads, edits, logits_at=columns)
        if found is not None:
            found |= {read.site: seen.trace[read] for read in more}
        if not bool(seen.output.isfinite().all()):
            raise ArithmeticError(
                "the edited run gives numbers that are not finite: a factor or value is too large"
            )
        return [
            Seen(
                seen.output[row, 0],
                {layer: seen.trace[read][row] for layer, read in patterns.items()},
                {name: seen.trace[read][row : row + 1] for name, read in here.items()},
            )
            for row in range(len(tokens))
        ]

    def _kept(self, key: Hashable) -> Seen | None:
        return self._rows.get(key)

    def _keep(self, key: Hashable, seen: Seen) -> None:
        self._rows[key] = seen
        self._rows.move_to_end(key)
        while len(self._rows) > KEPT:
            self._rows.popitem(last=False)


def _column(name: str, position: int) -> Callable[[Tensor], Tensor]:
    """The site's value at one position; behind the blocks nothing else was computed."""
    outside = name.startswith(("ln_final", "unembed"))
    return lambda value: value[:, 0 if outside else position].clone()


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
