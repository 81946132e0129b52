"""One model and the passes for the page: rows of a prompt, clean and edited, kept for a while.

A row is one pass over a prompt. What it keeps are the streams and what was added to them, at every position, so that
another position to look at costs no pass; attention patterns, which grow with the square of the length, are never kept:
a layer that is looked at runs once more, alone, from the stream that entered it. Nothing is stored on the model, and a
pass that is stopped leaves no trace. One thread at a time.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from threading import Event
from typing import TYPE_CHECKING, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.attention.heads import same_token
from interp.attention.shares import signed_shares, without_shares
from interp.core.patterns import copy_keys, copy_scores
from interp.data.batch import Batch
from interp.lenses.lens import lens_sites
from interp.model import sites
from interp.model.config import MLP, MLPS, ModelConfig
from interp.model.edits import Edit, Mean, Resample
from interp.model.tap import Read, Tap
from interp.pages.stages import sites_of, staged
from interp.passes.edit_text import edit_to_json
from interp.passes.edited import layer_of
from interp.passes.generate import Step, stream
from interp.passes.observe import Subject, as_model, observe
from interp.passes.question import Reading
from interp.passes.sampling import Sampling
from interp.residual.attribution import attribution
from interp.serve import directions
from interp.serve.asked import AskedTokens, asked_tokens
from interp.serve.asks import MAX_TOKENS, PATTERN, Continue, EditedPrompt
from interp.serve.changes import Lengths, check, renormalises, resolved

if TYPE_CHECKING:
    from interp.causal import Subspace

T = TypeVar("T")
ROOM = 2**30
"""Bytes of the rows that are kept: SmolLM2 with 1 024 tokens takes 270 MiB each, GPT-2 small with 128 tokens 19 MiB."""
NEAR = 3
"""Layers kept with their patterns: one in the clean row, the edited row and that of the second prompt."""
MANY = 32
"""Numbers of a row that are kept, such as the scores of its heads."""
COLUMNS = 8192
"""Tokens of a pass over several rows."""


class Stopped(BaseException):
    """The computation is not wanted any more. No `Exception`, so that no handler takes it for an error."""


@dataclass(frozen=True, eq=False)
class Row:
    """One pass over a prompt: what was at the sites of `Session.kept`, at every position."""

    key: Hashable
    """Name of the row among those that are kept."""
    tokens: Int[Tensor, "p"]
    edits: Sequence[Edit]
    """The edits of the pass, with looked-up values of means and resampled parts."""
    values: Mapping[str, Float[Tensor, "p ..."]]
    """Values by site."""

    @property
    def size(self) -> int:
        """Bytes of the values."""
        storages = {
            value.untyped_storage().data_ptr(): value.untyped_storage() for value in self.values.values()
        }
        return sum(storage.nbytes() for storage in storages.values())


@dataclass(frozen=True, eq=False)
class Seen:
    """A row at the position looked at."""

    row: Row
    position: int
    logits: Float[Tensor, "v"]
    """Logits of the token after the position."""
    at: Mapping[str, Float[Tensor, "1 ..."]]
    """Values at the position, by site: of the row, and after the last block."""


@dataclass(frozen=True, eq=False)
class LayerSeen:
    """One layer of a row from near."""

    values: Mapping[str, Float[Tensor, "p ..."]]
    """Values by site: the pattern `[h q k]`, what the stages of heads are made of, and neurons; those it has."""

    def at(self, position: int) -> dict[str, Float[Tensor, "1 ..."]]:
        """The neurons at a position, by site."""
        return {site: x[position][None] for site, x in self.values.items() if site.endswith(".hook_post")}


@dataclass(frozen=True, eq=False)
class RandomRuns:
    """A prompt's rows with random directions in place of those that edits add."""

    logits: Float[Tensor, "r v"]
    """Logits of the token after the position looked at."""
    log_prob: Float[Tensor, "r"] | None
    """log p of the whole answer, in nats; None for an answer of one token."""


@dataclass(frozen=True, eq=False)
class RowPair:
    """A prompt's clean and edited row."""

    asked: AskedTokens
    clean: Seen
    edited: Seen
    donor: Seen | None
    """The second prompt's row, where edits take something from it."""

    @property
    def tokens(self) -> Int[Tensor, "p"]:
        """The tokens of both rows: the prompt, and the answer's before its last one."""
        return self.asked.row

    @property
    def position(self) -> int:
        """Where both are looked at."""
        return self.asked.position

    @property
    def rows(self) -> list[Row]:
        """The clean and the edited row."""
        return [self.clean.row, self.edited.row]

    @property
    def edits(self) -> Sequence[Edit]:
        """The edits of the edited row."""
        return self.edited.row.edits


class Session:
    """Passes of one model for the page.

    Args:
        model: the model.
        subspaces: the directions that the page may add.
        chats: batches of one chat each (`model.to_batch(chat=...)`), whose roles the page shows where it is about them.

    Raises:
        ValueError: a model that the page cannot show (without logits or tokenizer, with cross-attention, or one that
            sees both ways), or directions that are not one per site.
    """

    def __init__(
        self, model: Subject, subspaces: Sequence["Subspace"] = (), chats: Sequence[Batch] = ()
    ) -> None:
        config = model.transformer.config
        if not config.unembed or config.cross_attention or not config.causal:
            raise ValueError("the live page requires a causal model with logits and without cross-attention")
        _ = model.text.tokenizer
        self.model = as_model(model)  # of all rows, also after a `with` of edits around this call is left
        self.directions = directions.by_site(subspaces, config)
        self._roles = {
            tuple(batch.tokens[0].tolist()): list(map(str, batch.roles[0]))
            for batch in chats
            if batch.roles is not None
        }
        self._rows: OrderedDict[Hashable, Row] = OrderedDict()
        self._layers: OrderedDict[Hashable, LayerSeen] = OrderedDict()
        self._head_scores: OrderedDict[Hashable, Mapping[int, Tensor]] = OrderedDict()
        self._moved: OrderedDict[Hashable, Mapping[int, Tensor]] = OrderedDict()
        self._random: OrderedDict[Hashable, RandomRuns] = OrderedDict()

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
    def kept(self) -> tuple[str, ...]:
        """The sites that a row keeps: what attribution and the lens read, and the streams that enter the blocks."""
        layers = range(self.config.n_layers)
        found = [*self._read_by_attribution, *self.streams]
        found += [sites.stream_after(self.config, layer) for layer in layers]
        found += [f"blocks.{layer}.hook_{sublayer}" for layer in layers for sublayer in self.config.sublayers]
        return tuple(site for site in dict.fromkeys(found) if not sites.is_late(site))

    @property
    def _read_by_attribution(self) -> list[str]:
        return [] if isinstance(self.attribution, str) else [read.site for read in self.attribution.reads]

    @cached_property
    def renormalised(self) -> tuple[int, ...]:
        """Layers in which an entry of a pattern can be cut with the rest of its row renormalised."""
        return tuple(i for i in range(self.config.n_layers) if renormalises(self.config, i))

    @property
    def neurons(self) -> int:
        """Neurons of a layer; 0 in models without plain MLPs."""
        return self.config.mlp.d_mlp if isinstance(self.config.mlp, MLP) else 0

    def roles(self, tokens: Int[Tensor, "p"]) -> list[str] | None:
        """The role of each token of a known chat, what follows it being the assistant's; None: not one of them."""
        ids = tuple(tokens.tolist())
        begins = (chat for chat in self._roles if ids[: len(chat)] == chat)
        known = max(begins, key=len, default=None)
        return None if known is None else [*self._roles[known], *["assistant"] * (len(ids) - len(known))]

    def checked(self, ask: EditedPrompt) -> AskedTokens:
        """The tokens of a question; ValueError for what they or the model do not have."""
        asked = asked_tokens(ask, self.model.text, min(MAX_TOKENS, self.config.n_ctx))
        second = None if asked.second is None else len(asked.second)
        lengths = Lengths(len(asked.row), second, len(asked.forced))
        check(ask.edits, self.config, lengths, self.directions)
        return asked

    def pair(self, ask: EditedPrompt, stop: Event) -> RowPair:
        """Clean and edited row of a prompt: from what is kept, or from a pass for each that is missing.

        Raises:
            ValueError, KeyError: a question that does not fit; Stopped.
        """
        asked = self.checked(ask)
        clean = self._row((ask.prompt, asked.forced, None, ()), asked.row, [], stop)
        donor = None
        if asked.second is not None and ask.resampled:
            donor = self._row((ask.second, asked.forced, None, ()), asked.second, [], stop)
        texts = tuple(json.dumps(edit_to_json(edit)) for edit in ask.edits)
        key = (ask.prompt, asked.forced, ask.second if ask.resampled else None, texts)
        edits = self._rows[key].edits if key in self._rows else self._resolved(ask, asked, clean, donor, stop)
        edited = self._row(key, asked.row, edits, stop) if edits else clean
        seen = self._seen(clean, asked.position, stop)
        return RowPair(
            asked, seen, seen if edited is clean else self._seen(edited, asked.position, stop),
            None if donor is None else self._seen(donor, min(asked.position, len(donor.tokens) - 1), stop),
        )  # fmt: skip

    def _resolved(
        self, ask: EditedPrompt, asked: AskedTokens, clean: Row, donor: Row | None, stop: Event
    ) -> list[Edit]:
        """The edits with their values, looked up in the clean row and in that of the second prompt.

        Means are over the prompt's tokens, those of its answer not among them, as those of reference prompts are.
        """
        means, second = dict[str, Tensor](), dict[str, Tensor]()
        for edit in ask.edits:
            if isinstance(edit.change, Mean):
                means[edit.site] = self._values(clean, edit, stop)[: asked.end + 1].mean(0)
            if isinstance(edit.change, Resample) and donor is not None:
                second[edit.site] = self._values(donor, edit, stop)
        return resolved(ask.edits, means, second, self.directions, len(clean.tokens))

    def _values(self, row: Row, edit: Edit, stop: Event) -> Float[Tensor, "p ..."]:
        """The values of a row at the site of an edit: what it keeps, or what the layer gives once more."""
        if edit.site in row.values:
            return row.values[edit.site]
        layer = layer_of(edit, self.model.transformer)
        assert layer is not None
        return self._again(row, layer, [edit.site], stop)[edit.site]

    def random(self, pair: RowPair, stop: Event) -> RandomRuns:
        """What the model says with random directions in place of those that the edits add."""
        key = (pair.edited.row.key, pair.position, pair.asked.answer if pair.asked.forced else ())
        return _remembered(self._random, key, lambda: self._random_directions(pair, stop))

    @torch.no_grad()
    def _random_directions(self, pair: RowPair, stop: Event) -> RandomRuns:
        network, found, log_probs = self.model.transformer, [], []
        answered = range(pair.asked.end, len(pair.tokens)) if pair.asked.forced else ()
        at_once = max(1, COLUMNS // len(pair.tokens))
        for first in range(0, directions.RANDOM, at_once):
            drawn = range(first, min(first + at_once, directions.RANDOM))
            rows = pair.tokens.expand(len(drawn), -1).clone()
            columns = torch.tensor([[pair.position, *answered]] * len(rows), device=network.device)
            edits = [*directions.at_random(pair.edits, len(pair.tokens), drawn), *self._watches(stop)]
            output = observe(network, Batch(rows), [], edits, logits_at=columns).output
            found.append(output[:, 0])
            if answered:
                log_probs.append(log_probs_of(output[:, 1:], pair.asked.answer).sum(-1))
        return RandomRuns(torch.cat(found), torch.cat(log_probs) if log_probs else None)

    @torch.no_grad()
    def answer_log_probs(self, pair: RowPair, stop: Event) -> Float[Tensor, "2 k"]:
        """log p of each token of the answer after the prompt and the tokens before it, clean and edited, in nats.

        Raises:
            ValueError: a question without an answer.
        """
        if not pair.asked.answer:
            raise ValueError("an answer is required, got none")
        columns = range(pair.asked.end, len(pair.tokens))
        logits = [self._read_out(row, columns, [], stop)[0] for row in pair.rows]
        return log_probs_of(torch.stack(logits), pair.asked.answer)

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

    def layer(self, row: Row, layer: int, stop: Event) -> LayerSeen:
        """A layer of a row from near, from what is kept or from a pass of this layer alone."""
        mlps = [name.removesuffix("_out") for name in self.config.sublayers if name in MLPS]
        found = [f"blocks.{layer}.{PATTERN}"] if layer in self.with_patterns else []
        found += [*self.staged.get(layer, ())]
        found += [f"blocks.{layer}.{name}.hook_post" for name in mlps if self.neurons]
        once_more = partial(self._again, row, layer, found, stop)
        return _remembered(self._layers, (row.key, layer), lambda: LayerSeen(once_more()), NEAR)

    def scores(self, pair: RowPair, stop: Event) -> Mapping[int, Float[Tensor, "2 h s"]]:
        """Scores of all heads in both rows by layer, from what is kept or from each layer once more."""
        clean = self._scores(pair.clean.row, {}, stop)
        first = self._first_edited(pair.edited.row)
        unchanged = {layer: scores for layer, scores in clean.items() if layer < first}
        edited = self._scores(pair.edited.row, unchanged, stop)
        return {layer: torch.stack((scores, edited[layer])) for layer, scores in clean.items()}

    def _scores(
        self, row: Row, known: Mapping[int, Tensor], stop: Event
    ) -> Mapping[int, Float[Tensor, "h s"]]:
        """Scores of a row's heads by layer (`interp.core.patterns.SCORES`), but for those that are known."""

        def made() -> Mapping[int, Tensor]:
            batch = Batch(row.tokens[None]).to(self.model.transformer.device)
            keys, signed = copy_keys(same_token(batch), batch.places), without_shares(self.config)
            found = dict(known)
            for layer in (layer for layer in self.with_patterns if layer not in known):
                pattern = self._pattern(row, layer, stop)[None]
                shares, device = signed_shares(pattern) if layer in signed else pattern, pattern.device
                found[layer] = copy_scores(shares, keys.to(device), batch.places.to(device))[0]
            return found

        return _remembered(self._head_scores, row.key, made)

    def moved(self, pair: RowPair, stop: Event) -> Mapping[int, Float[Tensor, "h"]]:
        """How much of each head's attention the edits moved, by layer, from what is kept or from each layer once more.

        Half the L1 distance of a head's rows, mean over queries.
        """
        first = self._first_edited(pair.edited.row)

        def made() -> Mapping[int, Tensor]:
            found = {layer: torch.zeros(self.config.n_heads) for layer in self.with_patterns}
            for layer in (layer for layer in self.with_patterns if layer >= first):
                before, after = (self._pattern(row, layer, stop) for row in pair.rows)
                found[layer] = (after - before).abs().sum(-1).mean(-1) / 2
            return found

        return _remembered(self._moved, (pair.clean.row.key, pair.edited.row.key), made)

    def _first_edited(self, row: Row) -> int:
        """The first layer that an edit of a row changes; the number of layers where none is edited."""
        layers = [layer_of(edit, self.model.transformer) or 0 for edit in row.edits]
        return min(layers, default=self.config.n_layers)

    def _pattern(self, row: Row, layer: int, stop: Event) -> Float[Tensor, "h q k"]:
        site = f"blocks.{layer}.{PATTERN}"
        return self._again(row, layer, [site], stop)[site]

    def _watches(self, stop: Event) -> list[Edit]:
        """Edits that change nothing and stop the pass between layers."""
        watch = _watched(stop)
        return [Edit(f"blocks.{layer}.hook_resid_pre", watch) for layer in range(self.config.n_layers)]

    def _row(self, key: Hashable, tokens: Int[Tensor, "p"], edits: Sequence[Edit], stop: Event) -> Row:
        """A row by its key: from what is kept, or from a pass up to the end of the blocks."""
        if key not in self._rows:
            self._rows[key] = self._pass(key, tokens, edits, stop)
        self._rows.move_to_end(key)
        while len(self._rows) > NEAR and sum(row.size for row in self._rows.values()) > ROOM:
            self._rows.popitem(last=False)
        return self._rows[key]

    @torch.no_grad()
    def _pass(self, key: Hashable, tokens: Int[Tensor, "p"], edits: Sequence[Edit], stop: Event) -> Row:
        reads = {site: Read(site, _watched(stop)) for site in self.kept}
        seen = observe(
            self.model.transformer,
            Batch(tokens[None].clone()),
            [*reads.values()],
            edits,
            stop=self.config.n_layers,
        )
        if not bool(seen.output.isfinite().all()):
            raise ArithmeticError(NOT_FINITE)
        return Row(key, tokens, edits, {site: seen.trace[read][0] for site, read in reads.items()})

    @torch.no_grad()
    def _again(
        self, row: Row, layer: int, names: Sequence[str], stop: Event
    ) -> dict[str, Float[Tensor, "p ..."]]:
        """Values of a row at these sites of one layer, which runs once more from the stream that entered it.

        A network that takes no later start runs from its first layer on.
        """
        network = self.model.transformer
        start = layer if network.restarts else 0
        entering = row.values[sites.stream_after(self.config, start - 1)] if start else row.tokens
        tap = Tap(
            [Read(name, _watched(stop)) for name in names],
            [edit for edit in row.edits if start <= (layer_of(edit, network) or 0) <= layer],
            answers_only=True,
        )
        network(entering[None], tap, start=start, stop=layer + 1)
        found = {read.site: value[0] for read, value in tap.values.items()}
        tap.close()
        return found

    @torch.no_grad()
    def _seen(self, row: Row, position: int, stop: Event) -> Seen:
        """A row at a position: the final norm and the unembedding run there."""
        reads = [Read(site) for site in dict.fromkeys(self._read_by_attribution) if sites.is_late(site)]
        at = {site: value[position][None] for site, value in row.values.items()}
        logits, late = self._read_out(row, [position], reads, stop)
        return Seen(row, position, logits[0], at | late)

    def _read_out(
        self, row: Row, positions: Sequence[int], reads: Sequence[Read], stop: Event
    ) -> tuple[Float[Tensor, "n v"], dict[str, Float[Tensor, "n ..."]]]:
        """Logits at some positions of a row, and what is read there after the last block, by site."""
        network = self.model.transformer
        if self.config.n_layers and network.restarts:
            tap = Tap(reads)
            final = row.values[sites.final_stream(self.config)][list(positions)]
            output = network(final[None], tap, start=self.config.n_layers)
            values = dict(tap.values)
            tap.close()
        else:
            columns = torch.tensor([list(positions)], device=network.device)
            edits = [*row.edits, *self._watches(stop)]
            seen = observe(network, Batch(row.tokens[None].clone()), reads, edits, logits_at=columns)
            output, values = seen.output, {read: seen.trace[read] for read in reads}
        if not bool(output.isfinite().all()):
            raise ArithmeticError(NOT_FINITE)
        return output[0], {read.site: value[0] for read, value in values.items()}


NOT_FINITE = (
    "the edited run gives numbers that are not finite: a factor or value is too large, or a query has no key left to "
    "look at"
)


def _remembered(kept: OrderedDict[Hashable, T], key: Hashable, make: Callable[[], T], most: int = MANY) -> T:
    """What is kept by this name, or made now and kept; the oldest are let go, but for so many."""
    if key not in kept:
        kept[key] = make()
    kept.move_to_end(key)
    while len(kept) > most:
        kept.popitem(last=False)
    return kept[key]


def log_probs_of(logits: Float[Tensor, "r k v"], tokens: Sequence[int]) -> Float[Tensor, "r k"]:
    """log p of each of k tokens in every row, in float64."""
    ids = torch.tensor(tokens, device=logits.device).expand(len(logits), -1)[..., None]
    return logits.double().log_softmax(-1).gather(-1, ids)[..., 0].cpu()


def _watched(stop: Event) -> Callable[[Tensor], Tensor]:
    """The value as it is; Stopped where the computation is not wanted any more."""

    def look(value: Tensor) -> Tensor:
        if stop.is_set():
            raise Stopped
        return value

    return look


def _token(step: Step, stop: Event) -> int:
    if stop.is_set():
        raise Stopped
    return int(step.tokens[0])
