"""Reads and edits as records, and the `Tap` that carries them through one forward pass.

A `Read` says what to record, an `Edit` what to change. A `Tap` holds both for ONE pass; modules call
`at(tap, site, value)`, which applies the edits first and then answers the reads. Nothing is stored on the model, so
nothing can leak into the next pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from torch import Tensor

from interp.core.boundary import public
from interp.core.wording import nearest
from interp.model import sites
from interp.model.cells import Span, edited, tokens_of
from interp.model.edits import ANSWERS, COLUMNS, Edit as Edit
from interp.model.layout import ByRole, PerRow, several
from interp.model.mounted import ERROR, FEATURES, Mountable, check_start

if TYPE_CHECKING:
    from interp.model.config import ModelConfig


@public(plain_pass=True)
@dataclass(frozen=True)
class Read:
    """A request to record `via(value)` at a site of a pass, or the metric's gradient there.

    Args:
        site: full name of the site.
        via: function of the value, such as a reduction; it runs at the site, so only its result is kept: `[batch,
            head]` instead of `[batch, head, q, k]`.
        grad: True: the answer is d metric / d value (passed through `via`), given by `passes.observe`.
        pos: which tokens of every row, counted as `Edit` counts them: the answer has these alone along the axis of
            positions (of queries, in scores and patterns), wherever they stand in the batch; one row per text where
            rows are packed. `(3, -1)` are two of every row, `PerRow([3, 4])` one of each its own, `{"role": "user"}` in
            chats those of a role; None: all columns.
    """

    site: str
    via: Callable[..., Tensor] | None = None
    grad: bool = False
    pos: int | tuple[int, ...] | PerRow | ByRole | Mapping[str, str | int] | None = None
    by_row: tuple[Tensor, ...] | None = None
    """Not None: the result of `via` in a row depends on that row alone, so that attention may pass some rows at a
    time, and after them their entries of each of these tensors. A large batch then never holds all its patterns at
    once.
    """

    def __post_init__(self) -> None:
        if self.pos is None:
            return
        object.__setattr__(self, "pos", several(self.pos))
        if self.by_row is not None or not set(sites.axes_of(self.site).split()) & set(COLUMNS):
            raise ValueError(
                f"pos requires a site with an axis of tokens that is read whole, got {self.site!r}"
            )


@dataclass(frozen=True)
class Trace(Mapping[Read, Tensor]):
    """The answers of one pass, indexed by `Read`, or by site name where only one read is of it."""

    answers: Mapping[Read, Tensor]

    def __getitem__(self, key: Read | str) -> Tensor:
        if isinstance(key, Read):
            if key in self.answers:
                return self.answers[key]
            raise KeyError(f"nobody asked for {key}; asked: {sorted({r.site for r in self.answers})}")
        matches = [read for read in self.answers if read.site == key]
        if len(matches) == 1:
            return self.answers[matches[0]]
        if matches:
            raise KeyError(f"{len(matches)} reads of {key!r}: index by the Read itself")
        hint = nearest(key, {r.site for r in self.answers})
        raise KeyError(f"nothing was read at {key!r}; {hint}")

    def __iter__(self) -> Iterator[Read]:
        return iter(self.answers)

    def __len__(self) -> int:
        return len(self.answers)


class Scope:
    """The reads and edits of one layer (or of the parts outside the layers)."""

    def __init__(self, tap: Tap, prefix: str) -> None:
        self._tap = tap
        self._prefix = prefix
        self._edits: dict[str, list[Edit]] = defaultdict(list)
        self._reads: dict[str, list[Read]] = defaultdict(list)

    def add(self, item: Read | Edit) -> None:
        """File a read or an edit under its site."""
        site = item.site.removeprefix(self._prefix)
        if isinstance(item, Edit):
            self._edits[site].append(item)
        else:
            self._reads[site].append(item)

    def wants(self, *names: str) -> bool:
        """Whether any of these sites is read or edited in this scope."""
        return any(name in self._reads or name in self._edits for name in names)

    def alters(self, *names: str) -> bool:
        """Whether any of these sites is edited or differentiated, so that later values must depend on it."""
        return any(
            name in self._edits or any(read.grad for read in self._reads.get(name, ())) for name in names
        )

    def by_row(self, *names: str) -> bool:
        """Whether these sites are only read, and may be visited with some rows of their values at a time."""
        reads = [read for name in names for read in self._reads.get(name, ())]
        return bool(reads) and all(read.by_row is not None for read in reads) and not self.alters(*names)

    def parts(self, rows: int, size: int) -> Iterator[slice]:
        """Slices of `size` rows, one after the other; the values visited within each slice hold these rows alone."""
        for start in range(0, rows, size):
            self._tap.rows = slice(start, start + size)
            yield self._tap.rows
        self._tap.join()

    @property
    def finished(self) -> bool:
        """Whether the pass may end here (`Tap.finished`)."""
        return self._tap.finished

    def visit(self, name: str, value: Tensor) -> Tensor:
        """The value that the forward pass goes on with: edited where this site has edits, with its reads answered."""
        for edit in self._edits.get(name, ()):
            value = edited(edit, value, self._tap.span)
        for read in self._reads.get(name, ()):
            value = self._tap.answer(read, value)
        return value


@public()
class Tap:
    """The reads and edits of one forward pass; `values` holds the answers afterwards.

    Args:
        answers_only: the pass's output is not wanted, so the pass ends once every read is answered, inside a block if
            need be, and what it returns has no meaning. Edits after the last read then do not run; they could change
            no answer.
        prompt: how many columns the prompts have, where a text is being generated: later passes see more, so that an
            edit may name a token that is not there yet, and negative positions count from the end of each row's
            prompt.

    Example:
        >>> tap = Tap(reads=[Read("blocks.0.attn.hook_pattern")])
        >>> logits = model(tokens, tap)
        >>> tap.values[tap.reads[0]].shape
        torch.Size([1, 8, 12, 12])
    """

    def __init__(
        self,
        reads: Iterable[Read] = (),
        edits: Iterable[Edit] = (),
        *,
        answers_only: bool = False,
        prompt: int | None = None,
        forced: Int[Tensor, "b"] | None = None,
    ) -> None:
        self.reads = tuple(dict.fromkeys(reads))
        self.edits = tuple(edits)
        self.answers_only = answers_only
        self.prompt = prompt
        self.forced = forced
        """How many of each row's last tokens belong to its answer (`Batch.forced`)."""
        self.span = Span()
        """Columns that the pass computes; set by `open`."""
        self.values: dict[Read, Tensor] = {}
        self.live: dict[Read, Tensor] = {}
        """Tensors in the graph, one for each `Read(grad=True)`."""
        self._scopes: dict[int | None, Scope] = {}
        self._home: torch.device | None = None
        self.rows: slice | None = None
        """The batch rows of the values visited now; None: all (`Scope.parts`)."""
        self._parts: dict[Read, list[Tensor]] = defaultdict(list)

    def open(
        self,
        config: ModelConfig,
        start: int,
        stop: int | None,
        home: torch.device | None = None,
        *,
        standing: Sequence[Edit] = (),
        dictionaries: Mapping[int, Mountable] = MappingProxyType({}),
        span: Span | None = None,
    ) -> None:
        """Check every site against the model and the layers that will run; refuse what could not be answered.

        Args:
            home: where the answers go, if layers are spread over devices.
            standing: the model's own edits, which run first; those of layers that do not run are left out.
            dictionaries: those of the blocks; where their features or errors are read or edited, after the other edits
                of the sites that they write.
            span: which columns the pass computes, and the tokens they hold.
        """
        self._home = home
        self._scopes, self.values, self.live = {}, {}, {}
        self.rows = None
        self._parts.clear()
        span = Span() if span is None else span
        layout = span.layout
        if self.prompt is not None or self.forced is not None:
            layout = replace(layout, prompt=self.prompt, forced=self.forced)
        self.span = replace(span, layout=layout, memory={ANSWERS: self.values})
        model_edits = [
            e for e in standing if _will_run(e.site, sites.find(e.site, config)[1], start, stop, config)
        ]
        items: tuple[Read | Edit, ...] = (*self.reads, *model_edits, *self.edits)
        for item in items:
            _, layer = sites.find(item.site, config)
            if not _will_run(item.site, layer, start, stop, config):
                last = "the logits" if stop is None else f"the residual entering block {stop}"
                raise ValueError(
                    f"{type(item).__name__} of {item.site!r} would never run: this pass goes from "
                    f"block {start} to {last}"
                )
            self._file(item, layer)
        if start:
            check_start(dictionaries, {edit.site for edit in standing}, start)
        blocks = range(start, config.n_layers if stop is None else stop)
        for dictionary in {id(each): each for each in dictionaries.values()}.values():
            places = {
                layer: scope
                for layer, scope in self._scopes.items()
                if layer is not None
                and dictionaries.get(layer) is dictionary
                and scope.wants(FEATURES, ERROR)
            }
            for split in dictionary.splits(places, blocks) if places else ():
                self._file(split, sites.find(split.site, config)[1])
        if any(read.grad for read in self.reads) and not torch.is_grad_enabled():
            raise ValueError("Read(grad=True) requires gradients; this pass runs under torch.no_grad()")

    def _file(self, item: Read | Edit, layer: int | None) -> None:
        """Add a read or an edit to the scope of its block."""
        prefix = "" if layer is None else f"blocks.{layer}."
        self._scopes.setdefault(layer, Scope(self, prefix)).add(item)

    def kept(self, read: Read, value: Tensor) -> Tensor:
        """The answer to a read: the site's value at `read.pos`, passed through `read.via`."""
        value = value if read.pos is None else tokens_of(read.site, value, read.pos, self.span)
        if read.via is None:
            return compact(value)
        rows = slice(None) if self.rows is None else self.rows
        answer = read.via(value, *(tensor[rows].to(value.device) for tensor in read.by_row or ()))
        if not isinstance(answer, Tensor):
            raise ValueError(
                f"the via of a read must return a tensor, got {type(answer).__name__} at {read.site!r}"
            )
        answer = compact(answer)
        if self.rows is not None and len(answer) != len(value):
            raise ValueError(
                f"a read by row requires an answer for each of the {len(value)} rows that its via gets, got "
                f"{len(answer)} at {read.site!r}"
            )
        return answer

    def close(self) -> None:
        """Free the values at once: tap and scopes refer to each other, so only garbage collection would free them."""
        for table in (self._scopes, self.values, self.live):
            table.clear()

    @property
    def finished(self) -> bool:
        """Whether the pass may end here: all reads are answered, and its output is not wanted."""
        return self.answers_only and len(self.values) == len(self.reads)

    def scope(self, layer: int | None = None) -> Scope | None:
        """The reads and edits of one layer (None: outside the blocks), or None where there are none."""
        return self._scopes.get(layer)

    def answer(self, read: Read, value: Tensor) -> Tensor:
        """Store the answer to one read; returns the value to go on with (a leaf, if it starts the graph)."""
        if read.grad:
            # An alias of its own: the gradient is that of what follows the site, not of the tensor's other uses
            # (`hook_mlp_in` is also the stream that the MLP's output is added to).
            value = value.view_as(value) if value.requires_grad else value.detach().requires_grad_()
            self.live[read] = value
        else:
            answer = self.kept(read, value.detach())
            if self._home is not None:
                answer = answer.to(self._home)
            if self.rows is None:
                self.values[read] = answer
            else:
                self._parts[read].append(answer)
        return value

    def join(self) -> None:
        """Join answers that were recorded some rows at a time into answers for all rows."""
        self.values |= {read: torch.cat(answers) for read, answers in self._parts.items()}
        self.rows = None
        self._parts.clear()


def at(tap: Scope | None, name: str, value: Tensor) -> Tensor:
    """Pass `value` through the site `name`: the only line a module needs to make a tensor observable."""
    return value if tap is None else tap.visit(name, value)


def compact(value: Tensor) -> Tensor:
    """The tensor itself, or a copy where it is a view that would keep a larger tensor alive."""
    return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value


def _will_run(site: str, layer: int | None, start: int, stop: int | None, config: ModelConfig) -> bool:
    """Whether a pass from block `start` to block `stop` visits the site."""
    if layer is not None:
        return start <= layer < (config.n_layers if stop is None else stop)
    return start == 0 if site in sites.EMBEDDING_SITES else stop is None
