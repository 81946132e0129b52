"""Linear relational embeddings: is what a model does from a subject to an object of a relation an affine map?

In "The capital of France is", s is the state of the subject's last token after some block and o the final state at the
last token, from which the answer is read. Around the subjects of a relation, o is near W s + b, with W the mean
Jacobian of o with respect to s (Hernandez et al. 2024). The map is judged twice: does it give the model's own answer
for other subjects (faithfulness), and does its inverse say how to change s so that the model answers with another
object (causality)? The second is an intervention, which is why this file stands among them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.causal.ablation import chosen
from interp.causal.function_vectors import SCORES
from interp.core.kinds import Positive, PositiveCount, Seed
from interp.core.results import Score, scored
from interp.core.stats import Means, Moments, Partial, Rows, upcast
from interp.core.transfers import to_device
from interp.data.answers import AnswerTokens
from interp.data.batch import Batch
from interp.data.stream import prompt_source
from interp.data.text import Text
from interp.model.edits import Edit, Set
from interp.model.kv_cache import KVCache, Prefix
from interp.model.layout import PerRow
from interp.model.sites import full_name, stream_after
from interp.model.tap import Read, Tap
from interp.model.transformer import Transformer
from interp.passes.needs import Steps, recorded, swept
from interp.passes.observe import Subject
from interp.passes.question import Ask, ByRow, Question, Staged, Stages, Unshared, Values
from interp.passes.sweep import continues
from interp.passes.variants import Variant
from interp.runs.functions import of_weights
from interp.tasks.pair_lists import WordPairs, Words, distinct

if TYPE_CHECKING:
    import xarray as xr

ROOM = 2**9
"""Most tokens of one differentiated pass, over all rows of the Jacobian in it."""
EDITS = ("causality", "causality_replaced", "causality_random")
"""The edits of the subject's state: by the inverse of W, by the other subject's state, in a random direction."""


@dataclass(frozen=True, eq=False)
class LinearRelation(Question):
    """Linear relational embedding (LRE) of a relation: o = beta W s + b, and how far the model agrees with it.

    With s the state of the subject's last token after block `layer` and o the final state at the last token of the
    prompt, W is the mean over `examples` prompts of the Jacobian do/ds, and b the mean of o - (do/ds) s. Each of these
    prompts states the other examples first. The map is judged on all other subjects, after the same examples.

    Args:
        pairs: the pairs (subject, object) of the relation, of texts or of lists of token ids, each once.
        template: how the relation is stated, with `{input}` for the subject and `{output}`, which ends it.
        layers: blocks after which s is read, one LRE for each; None: the one at a third of the depth.
        examples: number of subjects from which W and b are made.
        beta: factor on W s; the paper chooses it for each model, 2.25 for GPT-J, since W alone moves o too little.
        rank: rank of the pseudo-inverse of W with which subjects are edited; None: an eighth of the width.
        only_known: whether only subjects count whose object the model gives by itself (its first token).
        separator: what stands between two statements.
        seed: seed of the choice of the examples, of the objects to edit towards, and of the random directions.

    Returns:
        Dataset over `layer` and `score`:

        - `value`: mean over the subjects judged, with the ends `low` and `high` of its 95 % interval, `null` and `n`.
        - `weight` [layer, out, in], `bias` [layer, out]: W and b.
        - `predicted` [layer, prompt], `answered` [prompt]: token that the LRE gives for each subject, and the model.
        - `known` [prompt]: whether `answered` is the first token of the object. Coordinate `subject` [prompt].

        Scores, each 1 or 0 for a subject:

            faithfulness               the LRE gives the model's own answer: the top token of beta W s + b through the
                                       final norm and the unembedding. Its null: it gives the answer of another
                                       subject, drawn at random
            faithfulness_translation   the same of o = s + b, b the mean of o - s over the examples
            faithfulness_most_frequent the same of always giving the answer that is most frequent in the examples
            causality                  s + W^+ (o' - o) makes the model answer as for another subject, whose final
                                       state is o'; W^+ is the pseudo-inverse of the given rank. Its null: the last
                                       score
            causality_replaced         the same of the other subject's s in place of s
            causality_random           the same of s + a random direction, as long as W^+ (o' - o)

    Raises:
        ValueError: fewer than two subjects to judge on, none that the model knows, a template without its parts, a
            subject that does not end with a token, the last block, a rank above the width.
        IndexError: a layer that the model lacks.

    Caveats:
        A map from few answers is faithful by giving the most frequent one: compare. That W s + b gives the answer does
        not say that the model computes it so.

    Source:
        Hernandez et al. 2024, "Linearity of Relation Decoding in Transformer Language Models" (arXiv:2308.09124),
        equations 3 to 6.

    See Also:
        `patch`: the state of another subject put in place, position by position. `jacobian_lens`: the mean Jacobian
        over all text.

    Example:
        >>> pairs = [([i], [i + 1]) for i in range(3, 12)]
        >>> found = linear_relation(model, pairs, examples=3, layers=[0], only_known=False)
        >>> found.value.dims, found.sizes["prompt"]
        (('layer', 'score'), 6)
    """

    pairs: WordPairs
    template: str = "{input} {output}"
    _: KW_ONLY
    layers: Sequence[int] | None = None
    examples: PositiveCount = 8
    beta: Positive = 1.0
    rank: PositiveCount | None = None
    only_known: bool = True
    separator: str = "\n"
    seed: Seed = 0

    def bind(self, model: Subject) -> Staged:
        """Passes over all prompts, Jacobians of the examples, and one planned sweep of edits per layer."""
        config = model.transformer.config
        config.require_next_token("the answer to a relation")
        layers = [config.n_layers // 3] if self.layers is None else list(self.layers)
        layers = chosen(layers, config.n_layers, "layer")
        if config.n_layers - 1 in layers:
            raise ValueError(
                "layers: a block before the last is required, after which nothing reaches another token"
            )
        if self.rank is not None and self.rank > config.d_model:
            raise ValueError(f"rank: at most the width {config.d_model} is required, got {self.rank}")
        prompts = RelationPrompts.of(self, model.text)
        return Staged(self.name, partial(_stages, model, self, layers, prompts), data="none")


linear_relation = of_weights(LinearRelation)


# --- the prompts ------------------------------------------------------------------------------------------------------


class RelationPrompts(NamedTuple):
    """Token ids of the prompts of the examples and of the subjects set aside, and what is known of them."""

    examples: list[list[int]]
    test: list[list[int]]
    example_columns: tuple[int, ...]
    """The position of the subject's last token in each prompt of an example."""
    test_columns: tuple[int, ...]
    objects: list[int]
    """First token of the object of each subject set aside."""
    subjects: list[str]

    @classmethod
    def of(cls, question: LinearRelation, text: Text) -> RelationPrompts:
        """The prompts of a question; errors as in `linear_relation`."""
        if question.template.count("{input}") != 1 or not question.template.endswith("{output}"):
            raise ValueError(
                f"template: a text with {{input}} that ends in {{output}} is required, got {question.template!r}"
            )
        given = distinct(question.pairs)
        order = np.random.default_rng([question.seed, 0]).permutation(len(given)).tolist()
        pairs = [given[i] for i in order]
        n = question.examples
        if len(pairs) < n + 2:
            raise ValueError(
                f"pairs: at least {n + 2} are required, {n} examples and two subjects to judge on, got {len(pairs)}"
            )
        known, asked = pairs[:n], pairs[n:]
        of_examples = [
            _prompt(question, text, [*known[:i], *known[i + 1 :]], subject)
            for i, (subject, _) in enumerate(known)
        ]
        of_test = [_prompt(question, text, known, subject) for subject, _ in asked]
        space = " " if question.template.removesuffix("{output}").endswith(" ") else ""
        answers = [space + it if isinstance(it, str) else list(it) for _, it in asked]
        return cls(
            [ids for ids, _ in of_examples],
            [ids for ids, _ in of_test],
            tuple(column for _, column in of_examples),
            tuple(column for _, column in of_test),
            [tokens[0] for tokens in text.continuations(answers)],
            [it if isinstance(it, str) else " ".join(map(str, it)) for it, _ in asked],
        )


def _prompt(
    question: LinearRelation, text: Text, stated: Sequence[tuple[Words, Words]], subject: Words
) -> tuple[list[int], int]:
    """Ids of a prompt that states some pairs and asks about a subject, and the position of the subject's last token."""
    if not isinstance(subject, str):
        ids = [int(token) for pair in stated for words in pair for token in words] + [int(i) for i in subject]
        return ids, len(ids) - 1
    before, after = question.template.removesuffix("{output}").split("{input}")
    statements = [f"{before}{x}{after}{y}" for x, y in stated]
    start = question.separator.join([*statements, before + subject])
    ids, prefix = (text.batch([x]).tokens[0].tolist() for x in (start + after.rstrip(" "), start))
    if ids[: len(prefix)] != prefix:
        raise ValueError(
            f"a subject that ends with a token is required, but in {before + subject + after!r} the token at the end "
            f"of {subject!r} goes on"
        )
    return ids, len(prefix) - 1


# --- states and Jacobians ---------------------------------------------------------------------------------------------


@torch.no_grad()
def _states(model: Transformer, batch: Batch, layers: Sequence[int], columns: PerRow) -> Steps[Values]:
    """State of the subject after each block `s` [b l d], final state `o` [b d], and the model's answer `top` [b]."""
    at = _columns_of(batch, columns)
    reads = {layer: Read(stream_after(model.config, layer), partial(_at, column_b=at)) for layer in layers}
    run = yield from recorded(batch, list(dict.fromkeys(reads.values())), final=True)
    o = _at(run.end, column_b=batch.host().last())
    return {
        "s": torch.stack([upcast(run.trace[reads[layer]]) for layer in layers], 1),
        "o": upcast(o),
        "top": model.read_out(upcast(o)[:, None])[:, 0].argmax(-1),
    }


def _columns_of(batch: Batch, columns: PerRow) -> Int[Tensor, "b"]:
    """The column of each row's position; on the host."""
    return batch.tokens_at(columns).columns[:, 0]


def _at(value: Float[Tensor, "b p d"], *, column_b: Int[Tensor, "b"]) -> Float[Tensor, "b d"]:
    """The values at one column of every row."""
    return value[torch.arange(len(value), device=value.device), to_device(column_b, value.device)]


def _jacobians(model: Transformer, batch: Batch, layers: Sequence[int], columns: PerRow) -> Values:
    """By row: the Jacobian `weight` [b l d d] of the final state, and `bias` [b l d], o - (do/ds) s.

    No other question shares these passes: each prompt runs alone, as copies, one for each row of the Jacobian.
    """
    at, real = _columns_of(batch, columns).tolist(), batch.host().real
    weights, biases = [], []
    for row, column in enumerate(at):
        tokens = batch.tokens[row][to_device(real[row], batch.tokens.device)]
        column -= int(real[row].int().argmax())
        found = [subject_jacobian(model, tokens, column, layer) for layer in layers]
        weights.append(torch.stack([jacobian for jacobian, _, _ in found]))
        biases.append(torch.stack([o - jacobian @ s for jacobian, s, o in found]))
    return {"weight": torch.stack(weights), "bias": torch.stack(biases)}


def subject_jacobian(
    model: Transformer, tokens: Int[Tensor, "p"], column: int, layer: int
) -> tuple[Float[Tensor, "d d"], Float[Tensor, "d"], Float[Tensor, "d"]]:
    """Jacobian of the final state at a prompt's last token by the stream after a block at one token.

    What the rest of the prompt adds is held fixed. In a causal model the passes begin at that token, from the keys and
    values of those before it.

    Args:
        tokens: ids of a prompt, without padding.
        column: the token whose state is varied.
        layer: the block after which it is.

    Returns:
        The Jacobian [d out, d in], the state s [d] and the final state o [d], in float32 at least.
    """
    config, n = model.config, len(tokens)
    continued = continues(config, n) and not model.edits
    cache = model.new_cache(1, n) if continued else None
    assert cache is None or isinstance(cache, KVCache)
    read = Read(stream_after(config, layer))
    tap = Tap([read])
    with torch.no_grad():
        final = model(tokens[None], tap, stop=config.n_layers, cache=cache)
        stream = tap.values[read]
    tap.close()
    first = column if continued else 0
    past = None if cache is None else cache
    size = max(1, min(config.d_model, ROOM // (n - first)))
    rows: list[Tensor] = []
    for piece in torch.eye(config.d_model, device=stream.device).split(size):
        with torch.enable_grad():
            entering = stream[:, first:].expand(len(piece), -1, -1).clone().requires_grad_()
            prefix = None if past is None or not first else Prefix(past, first, len(piece))
            out = model(entering, start=layer + 1, stop=config.n_layers, cache=prefix)[:, -1]
            (gradient,) = torch.autograd.grad(out, entering, piece.to(out))
        rows.append(upcast(gradient[:, column - first]))
    return torch.cat(rows).to(stream.device), upcast(stream[0, column]), upcast(final[0, -1])


# --- the stages -------------------------------------------------------------------------------------------------------


class States(NamedTuple):
    """States of some prompts, row by row: of the subject, at the end, and the model's answer."""

    s: Float[Tensor, "n l d"]
    o: Float[Tensor, "n d"]
    top: Int[Tensor, "n"]

    @classmethod
    def of(cls, merged: Partial) -> States:
        """From what was kept of every row, in the order of the prompts."""
        assert isinstance(merged, Rows)
        rows = merged.ordered().rows
        return cls(*(rows[name].cpu() for name in cls._fields))


def _stages(
    model: Subject, question: LinearRelation, layers: Sequence[int], prompts: RelationPrompts, has_data: bool
) -> Stages[xr.Dataset]:
    """The states and Jacobians, then the edits of every layer."""
    groups = ((prompts.examples, prompts.example_columns), (prompts.test, prompts.test_columns))
    sources = [prompt_source(ids, model.text) for ids, _ in groups]
    asks = [
        Ask(ByRow("states", partial(_states, layers=layers, columns=PerRow(columns)), Rows), source)
        for source, (_, columns) in zip(sources, groups, strict=True)
    ]
    compute = partial(_jacobians, layers=layers, columns=PerRow(prompts.example_columns))
    asks.append(Ask(ByRow("Jacobians", Unshared(compute), Means), sources[0]))
    examples, test, jacobians = yield asks
    assert isinstance(jacobians, Means)
    weight, bias = (jacobians.moments[name].mean.cpu() for name in ("weight", "bias"))
    relation = Relation(weight, bias, States.of(examples), States.of(test))
    judged = relation.judged(prompts, question.only_known)
    shifts = relation.shifts(judged, question, model.transformer.config.d_model)
    found = yield _edit_asks(model, relation, shifts, layers, prompts)
    return _table(model, question, layers, prompts, relation, judged, [_rows_of(each) for each in found])


def _rows_of(merged: Partial) -> Mapping[str, Tensor]:
    assert isinstance(merged, Rows)
    return merged.ordered().rows


@dataclass(frozen=True, eq=False)
class Relation:
    """The affine map of every layer, and the states that it is made of and judged on."""

    weight: Float[Tensor, "l d d"]
    bias: Float[Tensor, "l d"]
    examples: States
    test: States

    def judged(self, prompts: RelationPrompts, only_known: bool) -> Int[Tensor, "k"]:
        """The numbers of the subjects that count."""
        known = self.known(prompts)
        numbers = known.nonzero()[:, 0] if only_known else torch.arange(len(known))
        if not len(numbers):
            raise ValueError(
                f"the model knows none of the {len(known)} subjects set aside, so that there is nothing to judge: "
                "another template, or only_known=False"
            )
        return numbers

    def known(self, prompts: RelationPrompts) -> Bool[Tensor, "n"]:
        """Whether the model gives the first token of each subject's object by itself."""
        return self.test.top == torch.tensor(prompts.objects)

    def images(self, layer: int, beta: float) -> dict[str, Float[Tensor, "n d"]]:
        """Final states of all subjects by the map of a layer, and by the translation."""
        s, ours = self.test.s[:, layer].to(self.weight), self.examples
        step = (ours.o - ours.s[:, layer]).to(self.weight).mean(0)
        return {
            "faithfulness": beta * s @ self.weight[layer].mT + self.bias[layer],
            "faithfulness_translation": s + step,
        }

    def shifts(self, judged: Int[Tensor, "k"], question: LinearRelation, width: int) -> Shifts:
        """Which subject each is edited towards, and by what."""
        draw = np.random.default_rng([question.seed, 1])
        pairs = []
        for i in judged.tolist():
            others = [j for j in judged.tolist() if int(self.test.top[j]) != int(self.test.top[i])]
            pairs += [(i, int(draw.choice(others)))] if others else []
        rows, towards = (torch.tensor([pair[k] for pair in pairs], dtype=torch.long) for k in (0, 1))
        rank = max(1, width // 8) if question.rank is None else question.rank
        difference = (self.test.o[towards] - self.test.o[rows]).to(self.weight)
        by_inverse = torch.stack(
            [difference @ low_rank_inverse(weight, rank).mT for weight in self.weight], 1
        )
        replaced = (self.test.s[towards] - self.test.s[rows]).to(by_inverse)
        noise = torch.randn(
            by_inverse.shape, generator=torch.Generator().manual_seed(question.seed), dtype=torch.float64
        ).to(by_inverse)
        noise = noise * by_inverse.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True)
        return Shifts(rows, towards, torch.stack((by_inverse, replaced, noise), 2))


class Shifts(NamedTuple):
    """Edits of some subjects towards others."""

    rows: Int[Tensor, "k"]
    towards: Int[Tensor, "k"]
    by: Float[Tensor, "k l 3 d"]
    """What is added to the state of each subject in every layer, for each of `EDITS`."""


def low_rank_inverse(weight: Float[Tensor, "o i"], rank: int) -> Float[Tensor, "i o"]:
    """The pseudo-inverse of a matrix's best approximation of this rank.

    Example:
        >>> low_rank_inverse(torch.diag(torch.tensor([4.0, 2.0])), 1)
        tensor([[0.2500, 0.0000],
                [0.0000, 0.0000]])
    """
    u, sizes, v = torch.linalg.svd(weight, full_matrices=False)
    kept = (torch.arange(len(sizes), device=sizes.device) < rank) & (
        sizes > sizes[0] * max(weight.shape) * torch.finfo(sizes.dtype).eps
    )
    return v.mT * torch.where(kept, 1 / sizes.where(kept, 1.0), 0.0) @ u.mT


def _edit_asks(
    model: Subject, relation: Relation, shifts: Shifts, layers: Sequence[int], prompts: RelationPrompts
) -> list[Ask]:
    """The sweep of every layer over the prompts that are edited; none where no two subjects have different answers."""
    if not len(shifts.rows):
        return []
    source = prompt_source([prompts.test[i] for i in shifts.rows.tolist()], model.text)
    columns = PerRow([prompts.test_columns[i] for i in shifts.rows.tolist()])
    answers = AnswerTokens.of(model.text, relation.test.top[shifts.towards].tolist())
    return [
        Ask(
            ByRow(
                f"edits after block {layer}",
                partial(_edited, layer=layer, by=shifts.by[:, i], columns=columns),
                Rows,
                answers=answers,
            ),
            source,
        )
        for i, layer in enumerate(layers)
    ]


@torch.no_grad()
def _edited(
    model: Transformer, batch: Batch, layer: int, by: Float[Tensor, "k 3 d"], columns: PerRow
) -> Steps[Values]:
    """Whether each edit makes the other subject's answer the most probable token, `hit` [b 3]."""
    site, at = Read(full_name("resid_post", layer)), _columns_of(batch, columns)
    stream = (yield from recorded(batch, [site], exact=True)).trace[site]
    numbers = torch.arange(len(batch)) if batch.row is None else batch.row.cpu()
    rows, place = torch.arange(len(batch), device=stream.device), to_device(at, stream.device)
    variants = []
    for shift in by[numbers].unbind(1):
        values = upcast(stream).clone()
        values[rows, place] += to_device(shift, stream.device).to(values)
        where = {"pos": columns.of(numbers.tolist())}
        variants.append(Variant([Edit(site.site, Set(values), where)]))
    sweep = yield from swept(batch, variants, SCORES["accuracy"])
    return {"hit": sweep.values.mT}


# --- the result -------------------------------------------------------------------------------------------------------


def _table(
    model: Subject,
    question: LinearRelation,
    layers: Sequence[int],
    prompts: RelationPrompts,
    relation: Relation,
    judged: Int[Tensor, "k"],
    edited: Sequence[Mapping[str, Tensor]],
) -> xr.Dataset:
    """Dataset of `linear_relation`."""
    network, top = model.transformer, relation.test.top
    frequent = relation.examples.top.mode().values
    by_layer: list[dict[str, Score]] = []
    predicted = []
    for i in range(len(layers)):
        images = relation.images(i, question.beta)
        tops = {name: _top_tokens(network, image) for name, image in images.items()}
        predicted.append(tops["faithfulness"])
        hits = {name: guess == top for name, guess in tops.items()} | {
            "faithfulness_most_frequent": frequent == top
        }
        chance = _of_another(tops["faithfulness"][judged], top[judged])
        scores = {name: _share(hit[judged], chance) for name, hit in hits.items()}
        hit = edited[i]["hit"].cpu() if edited else torch.empty(0, len(EDITS))
        null = float(hit[:, -1].double().mean()) if len(hit) else float("nan")
        by_layer.append(scores | {name: _share(hit[:, k], null) for k, name in enumerate(EDITS)})
    stacked = {name: _over_layers([scores[name] for scores in by_layer]) for name in by_layer[0]}
    others: dict[str, tuple[Sequence[str], Tensor]] = {
        "weight": (("layer", "out", "in"), relation.weight),
        "bias": (("layer", "out"), relation.bias),
        "predicted": (("layer", "prompt"), torch.stack(predicted)),
        "answered": (("prompt",), top),
        "known": (("prompt",), relation.known(prompts)),
    }
    coords = {"layer": list(layers), "prompt": range(len(top)), "subject": (("prompt",), prompts.subjects)}
    attrs: dict[str, str | int | float] = {
        "template": question.template, "examples": question.examples, "beta": question.beta,
        "rank": max(1, network.config.d_model // 8) if question.rank is None else question.rank,
        "seed": question.seed, "interval": "95 % over subjects",
    }  # fmt: skip
    notes = [] if edited else ["no two of the subjects have different answers: causality is not known"]
    return scored(question.name, stacked, ("layer",), coords=coords, attrs=attrs, others=others, notes=notes)


def _top_tokens(model: Transformer, states: Float[Tensor, "n d"]) -> Int[Tensor, "n"]:
    """The most probable token of each final state, through the final norm and the unembedding."""
    with torch.no_grad():
        return model.read_out(upcast(states.to(model.device, model.dtype))[:, None])[:, 0].argmax(-1).cpu()


def _of_another(guess: Int[Tensor, "k"], top: Int[Tensor, "k"]) -> float:
    """Share of pairs of two different subjects in which the guess for the one is the answer of the other."""
    same = (guess[:, None] == top[None]).double()
    pairs = len(guess) * (len(guess) - 1)
    return float((same.sum() - same.trace()) / pairs) if pairs else float("nan")


def _over_layers(scores: Sequence[Score]) -> Score:
    """One score of every layer as one score over layers."""
    value, low, high, n, null = (
        torch.stack([getattr(score, part) for score in scores])
        for part in ("value", "low", "high", "n", "null")
    )
    return Score(value, low, high, n, null, scores[0].unit)


def _share(hits: Tensor, null: float) -> Score:
    """The share of subjects, with its interval; NaN of none."""
    if len(hits):
        return Score.of(Moments.of(hits.double()), "share of subjects", null, share=True)
    nothing = torch.tensor(torch.nan, dtype=torch.float64)
    return Score(nothing, nothing, nothing, torch.tensor(0), nothing, "share of subjects")
