"""Text continuation with a key/value cache, step by step or as a whole; every step can be read and edited.

Step 0 passes the prompt through the model, every later step the token drawn before it. So each position but the last
is computed, edited and read exactly once; the last token drawn is never passed through it.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.core.answered import yes_or_no
from interp.core.notes import note
from interp.core.stats import upcast
from interp.core.wording import value_text
from interp.data.batch import Batch
from interp.data.chats import UNKNOWN, answer_code
from interp.data.ids import is_id
from interp.data.text import Text
from interp.data.tokenizers import Tokenizer
from interp.model.config import ModelConfig
from interp.model.encoder_decoder import EncoderDecoder, edits_of
from interp.model.kv_cache import Past
from interp.model.sites import EMBEDDING_SITES, find
from interp.model.tap import Edit, Read, Tap, Trace, compact
from interp.model.transformer import Transformer
from interp.passes.edited import with_edits_in_batch
from interp.passes.sampling import Choice, Sampling

StopRule = Callable[[str], bool]
"""A function from the text that a row has got so far to whether it ends there."""
OneStop = str | int | np.integer | StopRule
Stop = OneStop | Collection[OneStop] | Int[Tensor, "*n"] | np.ndarray
"""Where to end: a token id, a text that the new text contains, a function of the new text, or several of these."""
Ends = Callable[[Sequence[int]], Callable[[int], bool]]
"""How a row ends: a function of the ids of its prompt that returns one to call with each new id: does it end there?"""
UNDECODED = "\N{REPLACEMENT CHARACTER}"
"""The character to which tokenizers decode bytes that are not (yet) a character."""


@dataclass(frozen=True, eq=False)
class Step:
    """One new token per row, and what the pass that predicted it gave."""

    tokens: Int[Tensor, "b"]
    """The new column; a row that had ended repeats its last token."""
    alive: Bool[Tensor, "b"]
    """True where the new token is real, False in rows that had ended before."""
    logits: Float[Tensor, "b v"]
    """The model's own logits for this column, before penalty, temperature and truncation."""
    trace: Trace
    """Answers at the positions computed in this step: the whole prompt in the first, else the token drawn before."""

    @property
    def log_probs(self) -> Float[Tensor, "b"]:
        """Log-probability of each new token under the model's own distribution, in nats."""
        return upcast(self.logits).log_softmax(-1).gather(1, self.tokens[:, None])[:, 0]


def stream(
    model: Transformer,
    batch: Batch,
    max_new_tokens: int,
    *,
    sampling: Sampling | None = None,
    repetition_penalty: float = 1.0,
    stop_tokens: Collection[int] = (),
    ends: Ends | None = None,
    use_cache: bool = True,
    reads: Sequence[Read] = (),
    edits: Sequence[Edit] = (),
) -> Iterator[Step]:
    """The steps of a continuation, computed one by one as they are consumed, until every row has ended.

    A row ends with a token of `stop_tokens`, or where `ends` says so.

    Prompts are aligned to the left of the first new column, as `batch.left_aligned()`. Where tokens have types, new
    ones have that of the last token of their prompt, as in transformers. Positions of edits are each row's own tokens,
    negative ones from the end of its prompt, "new" those that are generated. Greedy without `sampling`;
    `repetition_penalty` acts on the raw logits before it. `edits` apply at every step to the positions computed in it:
    with the cache each position once, without it all of them again. `reads` are answered with the cache only, each
    position once (`joined` puts them together); sites after the blocks are computed at the last prompt position only,
    unless one of them is read. Answers at padding, and in rows that have ended, have no meaning.
    Errors, before anything is computed: ValueError for a result beyond the context, rows of several continuations, a
    negative count, a penalty that is not positive, a stop token outside the vocabulary, reads without the cache or with
    a gradient; KeyError for a site.
    Inside `torch.autocast` the steps follow it, like any plain pass, and a `Note` says so: the tokens may be others.

    Example:
        >>> read = Read("blocks.0.hook_resid_post")
        >>> steps = list(stream(model.transformer, model.to_batch("The cat"), 3, reads=[read]))
        >>> joined([step.trace for step in steps], read, model.cfg).shape[1] == steps[0].trace[read].shape[1] + 2
        True
    """
    _note_autocast(model.device)
    batch = batch.to(model.device).left_aligned()
    check_generation(model.config, batch, max_new_tokens, stop_tokens)
    choice = Choice(batch, model.config.d_vocab, sampling=sampling, repetition_penalty=repetition_penalty)
    stops = torch.tensor(sorted(stop_tokens), dtype=torch.long, device=model.device)
    decoder = Decoder.opened(model, batch, max_new_tokens, use_cache=use_cache, reads=reads, edits=edits)
    rows = zip(batch.tokens.cpu(), batch.real.cpu(), strict=True)
    ends_at = None if ends is None else [ends(ids[real].tolist()) for ids, real in rows]
    return _steps(decoder, choice, stops, ends_at, max_new_tokens)


def generate(
    model: Transformer,
    batch: Batch,
    max_new_tokens: int,
    *,
    sampling: Sampling | None = None,
    repetition_penalty: float = 1.0,
    stop_tokens: Collection[int] = (),
    ends: Ends | None = None,
    use_cache: bool = True,
    edits: Sequence[Edit] = (),
) -> Batch:
    """The prompts (padded on the left) followed by up to `max_new_tokens` new tokens: `stream`, collected.

    A row that has ended is padded with its last token and marked as not kept; the loop ends when every row has.
    To read while generating, use `stream`. Errors as there.
    """
    steps = stream(
        model,
        batch,
        max_new_tokens,
        sampling=sampling,
        repetition_penalty=repetition_penalty,
        stop_tokens=stop_tokens,
        ends=ends,
        use_cache=use_cache,
        edits=edits,
    )
    return continued(batch.to(model.device), steps, stop_tokens)


def continued(batch: Batch, steps: Iterable[Step], stop_tokens: Collection[int] = ()) -> Batch:
    """The prompts, padded on the left, followed by the tokens of the steps; in chats those are the assistant's."""
    batch = batch.left_aligned()
    columns = [(step.tokens, step.alive) for step in steps]  # the logits of a step go with it
    if not columns:
        return Batch(
            batch.tokens, batch.keep, batch.bos, types=batch.types, turns=batch.turns, memory=batch.memory
        )
    new, alive = (torch.stack(column, 1) for column in zip(*columns, strict=True))
    tokens, types, turns = torch.cat((batch.tokens, new), 1), longer(batch.types, new.shape[1]), None
    if batch.turns is not None:
        codes = torch.tensor([answer_code(row) for row in batch.turns.tolist()], device=new.device)
        marks = torch.isin(new, torch.tensor(list(stop_tokens), dtype=new.dtype, device=new.device))
        spoken = codes[:, None].where((alive & ~marks) | (codes[:, None] == UNKNOWN), 0)
        turns = torch.cat((batch.turns, spoken), 1)
    whole = batch.keep is None and bool(alive.all())
    keep = None if whole else torch.cat((batch.real, alive), 1)
    return Batch(tokens, keep, batch.bos, types=types, turns=turns, memory=batch.memory)


def longer(types: Int[Tensor, "b p"] | None, n: int) -> Int[Tensor, "b m"] | None:
    """The token types of rows that end in the last column, with n new tokens of the type of each row's last one."""
    return None if types is None else torch.cat((types, types[:, -1:].expand(-1, n)), 1)


def joined(traces: Sequence[Trace], key: Read | str, config: ModelConfig) -> Tensor:
    """The answers of consecutive steps to one read, as one pass over all their positions would have given them.

    Joined along the position axis (queries, for scores and patterns); keys that a step had not seen yet are 0, in
    scores -inf.

    Raises:
        ValueError: no steps, or a read with `via`, whose answers have axes of their own.
    """
    if not traces:
        raise ValueError("at least one step is required, got none")
    answers = [trace[key] for trace in traces]
    read = key if isinstance(key, Read) else next(read for read in traces[0] if read.site == key)
    if read.via is not None:
        raise ValueError(
            f"joined requires a read without via: the answers at {read.site!r} have axes of their own"
        )
    axes = find(read.site, config)[0].axes.split()
    grows = next((axis for axis in "pq" if axis in axes), None)
    if grows is None:  # keys and values of a memory, the same at every step
        return answers[-1]
    if "k" not in axes:
        return torch.cat(answers, axes.index(grows))
    unseen = -torch.inf if read.site.endswith("attn_scores") else 0.0
    n_keys = answers[-1].shape[-1]
    return torch.cat([F.pad(a, (0, n_keys - a.shape[-1]), value=unseen) for a in answers], axes.index("q"))


class Decoder:
    """The state of a generation: tokens are pushed, logits of the next column and values of reads come out."""

    def __init__(
        self,
        model: Transformer,
        batch: Batch,
        cache: Past | None,
        reads: Sequence[Read],
        edits: Sequence[Edit],
    ) -> None:
        self._model, self._cache, self._reads, self._edits = model, cache, reads, edits
        self._tokens, self._keep, self._memory = batch.tokens, batch.keep, batch.memory
        self._types = batch.types
        self._prompt = batch.tokens.shape[1]
        outside = [read.site for read in reads if find(read.site, model.config)[1] is None]
        self._every_logit = not set(outside) <= set(EMBEDDING_SITES)

    @classmethod
    def opened(
        cls,
        model: Transformer,
        batch: Batch,
        max_new_tokens: int,
        *,
        use_cache: bool = True,
        reads: Sequence[Read] = (),
        edits: Sequence[Edit] = (),
    ) -> "Decoder":
        """A decoder before its first pass, whose cache has room for `max_new_tokens` more tokens.

        Raises:
            ValueError, KeyError: reads and edits that do not fit the model.
        """
        model, edits = with_edits_in_batch(model, batch, edits)
        _check_tap(model.config, reads, edits, use_cache)
        _check_values(model.config, batch, (*model.edits, *edits))
        rows, n = batch.tokens.shape
        cache = model.new_cache(rows, n + max_new_tokens) if use_cache else None
        return cls(model, batch, cache, reads, edits)

    @torch.no_grad()
    def next_logits(self) -> tuple[Float[Tensor, "b v"], Trace]:
        """Logits of the next column, and the answers at the positions computed."""
        rows, n = self._tokens.shape
        watched = self._reads or self._edits or self._model.edits
        tap = Tap(self._reads, self._edits, prompt=self._prompt) if watched else None
        last = None
        if n > 1 and not self._every_logit:
            last = torch.full((rows, 1), n - 1, device=self._tokens.device)
        logits = self._model(
            self._tokens,
            tap,
            keep=self._keep,
            cache=self._cache,
            logits_at=last,
            types=self._types,
            memory=self._memory,
        )
        return compact(logits[:, -1]), Trace({} if tap is None else tap.values)

    def push(self, tokens: Int[Tensor, "b"]) -> None:
        """Append a column of tokens for the next pass; with the cache that pass computes this column alone."""
        if self._cache is not None:  # which counts all later tokens as real
            self._tokens, self._keep = tokens[:, None], None
            self._types = None if self._types is None else self._types[:, -1:]
            return
        self._tokens, self._types = torch.cat((self._tokens, tokens[:, None]), 1), longer(self._types, 1)
        if self._keep is not None:
            self._keep = F.pad(self._keep, (0, 1), value=True)


def _steps(
    decoder: Decoder,
    choice: Choice,
    stops: Int[Tensor, "s"],
    ends_at: Sequence[Callable[[int], bool]] | None,
    n: int,
) -> Iterator[Step]:
    """Up to `n` steps, until every row has drawn one of `stops`, or ended by its own rule of `ends_at`."""
    tokens = alive = None
    for _ in range(n):
        logits, trace = decoder.next_logits()
        drawn = choice.draw(logits)
        if tokens is None or alive is None:
            tokens, alive = drawn, torch.ones_like(drawn, dtype=torch.bool)
        else:
            tokens = torch.where(alive, drawn, tokens)
        yield Step(tokens, alive, logits, trace)
        if ends_at is not None:
            each = zip(tokens.tolist(), alive.tolist(), ends_at, strict=True)
            going = [goes_on and not ends(token) for token, goes_on, ends in each]
            alive = torch.tensor(going, device=alive.device)
        if len(stops):
            alive = alive & ~torch.isin(tokens, stops)
        if (ends_at is not None or len(stops)) and not bool(alive.any()):
            return
        decoder.push(tokens)


def check_generation(
    config: ModelConfig, batch: Batch, max_new_tokens: int, stop_tokens: Collection[int]
) -> None:
    """ValueError for a continuation beyond the context, a negative count, or a stop token outside the vocabulary.

    Rows of several continuations (`branches`) are refused too: there is no one text that goes on.
    """
    config.require_next_token("generation")
    batch.require_one_continuation("generation")
    n = batch.tokens.shape[1]
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens >= 0 is required, got {max_new_tokens}")
    if n + max_new_tokens > config.n_ctx:
        raise ValueError(
            f"{n} prompt tokens and {max_new_tokens} new ones do not fit the context of {config.n_ctx}: "
            f"max_new_tokens must be at most {max(config.n_ctx - n, 0)} here"
        )
    if bad := [token for token in stop_tokens if not 0 <= token < config.d_vocab]:
        raise ValueError(f"stop_tokens must be in [0, {config.d_vocab - 1}], got {bad[0]}")


def _note_autocast(device: torch.device) -> None:
    """A `Note` where products are rounded to another dtype than the model's, so that other tokens may be drawn."""
    if torch.is_autocast_enabled(device.type):
        low = str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")
        note(
            f"generated under autocast({low}): products are rounded to it, and the tokens may be others than without"
        )


def _check_tap(config: ModelConfig, reads: Sequence[Read], edits: Sequence[Edit], use_cache: bool) -> None:
    if reads and not use_cache:
        raise ValueError(
            "reads while generating require the cache: without it every step sees every position again"
        )
    with torch.no_grad():
        Tap(reads, edits).open(config, 0, None)


def _check_values(config: ModelConfig, batch: Batch, edits: Sequence[Edit]) -> None:
    """ValueError for edits with values by column if prompts of several lengths are realigned to the left."""
    if batch.keep is None:
        return
    for edit in edits:
        values = getattr(edit.change, "values", None)
        if (
            isinstance(values, Tensor)
            and values.ndim == len(find(edit.site, config)[0].axes.split())
            and len(values) > 1
        ):
            raise ValueError(
                f"values for {edit.name} are of the columns of another pass, and prompts of several lengths are padded "
                "on the left to be continued: give the values of the cells, or prompts of one length"
            )


# --- as text ------------------------------------------------------------


def stops_of(text: Text, stop: Stop, *, eos: bool, chat: bool = False) -> tuple[set[int], Ends | None]:
    """The stop tokens, and the rule of the texts and functions; None where there are none.

    A text ends a row as soon as the new text, not that of the prompt, contains it. `eos` adds the tokens at which the
    model's own generation ends (`Text.end_ids`), and after a chat the token that ends a turn (`Text.turn_end`).

    Raises:
        ValueError: what is neither an id, a text nor a function; an empty text. A function raises one where its answer
            is neither True nor False.
    """
    if isinstance(stop, Tensor | np.ndarray):
        stop = stop.flatten().tolist()
    if isinstance(stop, Mapping):  # whose keys would be taken
        raise ValueError(
            f"stop must be texts, token ids or functions of the new text, got {value_text(stop)}"
        )
    every = list(stop) if isinstance(stop, Collection) and not isinstance(stop, str) else [stop]
    if odd := [s for s in every if not (isinstance(s, str) or callable(s) or is_id(s))]:
        raise ValueError(
            f"stop must be texts, token ids or functions of the new text, got {odd[0]!r} among them"
        )
    if "" in every:
        raise ValueError("stop must be texts of at least one character, got '' among them")
    rules = [
        partial(_contains, s) if isinstance(s, str) else yes_or_no(s, "stop: a function of the new text")
        for s in every
        if isinstance(s, str) or callable(s)
    ]
    ids = {int(s) for s in every if is_id(s)} | (text.end_ids if eos else set())
    if eos and chat and text.turn_end is not None:
        ids.add(text.turn_end)

    def ends(prompt: Sequence[int]) -> Callable[[int], bool]:
        new = NewText(text.tokenizer, prompt)

        def is_end(token: int) -> bool:
            written = new.after(token)
            return any(rule(written) for rule in rules)

        return is_end

    return ids, ends if rules else None


def _contains(part: str, whole: str) -> bool:
    return part in whole


class NewText:
    """The text that new tokens add to a prompt, token by token, without bytes at its end that are no whole character.

    It is cut from the text of everything so far, since a token's own text may depend on its neighbours (leading spaces,
    characters of several tokens); a thousand tokens take milliseconds.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer, self._ids = tokenizer, list(prompt)
        self._prompt = len(tokenizer.decode(self._ids).rstrip(UNDECODED)) if self._ids else 0

    def after(self, token: int) -> str:
        """The new text with one more token."""
        self._ids.append(token)
        return self.whole.rstrip(UNDECODED)

    @property
    def whole(self) -> str:
        """The new text with all bytes at its end."""
        return self._tokenizer.decode(self._ids)[self._prompt :]


def streamed_text(batch: Batch, steps: Iterable[Step], tokenizer: Tokenizer) -> Iterator[str]:
    """The text that the steps of one prompt's continuation add, in pieces; ValueError for several prompts."""
    if len(batch) != 1:
        raise ValueError(f"one prompt is required, got {len(batch)}")
    prompt = batch.tokens[0] if batch.keep is None else batch.tokens[0][batch.keep[0]]
    return text_pieces((int(step.tokens[0]) for step in steps), tokenizer, prompt.tolist())


def text_pieces(tokens: Iterable[int], tokenizer: Tokenizer, before: Sequence[int] = ()) -> Iterator[str]:
    """The text that each new token adds to `before`; bytes that are no whole character yet wait for the next token.

    The pieces join to the text of all new tokens.
    """
    new, shown = NewText(tokenizer, before), 0
    for token in tokens:
        text = new.after(token)
        if len(text) > shown:
            yield text[shown:]
            shown = len(text)
    if ending := new.whole[shown:]:
        yield ending


# --- encoder-decoders ------------------------------------------------------------


@torch.no_grad()
def encoded(
    model: EncoderDecoder, source: Batch, target: Batch | None = None, *, edits: Sequence[Edit] = ()
) -> Batch:
    """The target as a batch of the decoder with the encoded source as its memory; without a target, the start token.

    What takes a Transformer and a batch takes `model.decoder` and this one, `observe` for one. The memory has no
    gradient. edits: of the encoder's pass, their sites named without a side.
    """
    source = source.to(model.device)
    memory = model.encode(source.tokens, Tap(edits=edits) if edits else None, keep=source.keep)
    if target is None:
        start = torch.full((len(source), 1), model.config.start_token, device=model.device)
        return Batch(start, memory=memory)
    return Batch(target.tokens.to(model.device), target.keep, target.bos, memory=memory).to(model.device)


def decode(
    model: EncoderDecoder,
    source: Batch,
    max_new_tokens: int,
    *,
    sampling: Sampling | None = None,
    repetition_penalty: float = 1.0,
    stop_tokens: Collection[int] = (),
    use_cache: bool = True,
    edits: Sequence[Edit] = (),
) -> Batch:
    """The start token and up to `max_new_tokens` tokens after it: greedily, or by `sampling`.

    A row ends with a stop token and is padded with it, not kept. Padding of the source, on either side, changes
    nothing. edits: of either side, whose name their sites begin with; those of the encoder act once, those of the
    decoder at every step, as in `generate`. To read: `stream(model.decoder, encoded(model, source), n, reads=...)`.

    Raises:
        KeyError: an edit that names no side; ValueError as in `generate`.
    """
    start = encoded(model, source, edits=edits_of(edits, "encoder"))
    return generate(
        model.decoder, start, max_new_tokens, sampling=sampling, repetition_penalty=repetition_penalty,
        stop_tokens=stop_tokens, use_cache=use_cache, edits=edits_of(edits, "decoder"),
    )  # fmt: skip
