"""Models written by hand in which a claim of `interp.findings` is true, or false, by construction.

No training, no norms, no noise unless said: the stream is a sum of named subspaces, a head is a list of who looks at
whom and a map of what it moves, and the unembedding reads the subspace of predictions alone.
"""

from __future__ import annotations

import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from interp import HookedTransformer
from interp.model import MLP, Learned, ModelConfig, NoNorm, Transformer
from interp.tasks import load_facts, load_word_pairs
from interp.tasks.greater_than import CENTURIES, NOUNS, YEARS
from interp.tasks.indirect_objects import GIFTS, NAMES, PLACES, TEMPLATES
from interp.zoo.groundtruth import Alphabet, plant_head, plant_neurons

SHARP = 60.0
"""Attention score of what a head looks for; softmax leaves e^-60 elsewhere."""
GAIN = 20.0
"""Logits of one unit of prediction."""
LETTERS = ("<|bos|>", *string.ascii_letters, *string.digits, *" .,:'?!-\n")
Vector = Float[Tensor, "d"]
Rows = Float[Tensor, "n d"]


def alphabet(words: Sequence[str] = ()) -> Alphabet:
    """A tokenizer with these words as single tokens, which spells all others."""
    return Alphabet([*LETTERS, *dict.fromkeys(word for word in words if word not in LETTERS)])


@dataclass
class Plan:
    """Parts of a model, on a stream of subspaces of the given widths; `model` writes them into weights."""

    words: Sequence[str] = ()
    widths: Mapping[str, int] = field(default_factory=dict)
    layers: int = 2
    heads: int = 4
    n_ctx: int = 128
    noise: float = 0.0
    """Standard deviation of every weight that is not planted."""
    neurons: int = 0
    dtype: torch.dtype = torch.float32
    embeds: list[tuple[Sequence[int], Rows]] = field(default_factory=list)
    positions: Rows | None = None
    reads: list[tuple[Sequence[int], Rows]] = field(default_factory=list)
    planted: list[tuple[tuple[int, int], list[tuple[Vector, Vector]], Rows, Rows]] = field(
        default_factory=list
    )
    mlps: list[tuple[int, Rows, float, Rows]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokenizer = alphabet(self.words)
        self.vocabulary = len(self.tokenizer.symbols)
        self.width = sum(self.widths.values())
        self.space: dict[str, Rows] = dict(
            zip(self.widths, torch.eye(self.width).split(list(self.widths.values())), strict=True)
        )

    def ids(self, words: Sequence[str]) -> list[int]:
        """The ids of some symbols."""
        return [self.tokenizer.symbols.index(word) for word in words]

    def head(
        self, layer: int, index: int, looks: Sequence[tuple[Vector, Vector]], moves: tuple[Rows, Rows]
    ) -> None:
        """A head whose score is the sum of (query . q)(key . k) over `looks`, and which moves one basis to another."""
        self.planted.append(((layer, index), list(looks), *moves))

    def mlp(self, layer: int, reads: Rows, writes: Rows, bias: float = 0.0) -> None:
        """Neurons relu(x . read + bias) that write, one for each row."""
        self.mlps.append((layer, reads, bias, writes))

    def model(self, name: str = "planted") -> HookedTransformer:
        """The model."""
        sizes = [max(len(looks), len(source)) for _, looks, source, _ in self.planted]
        d_head, at = max([8, *sizes]), dict.fromkeys(range(self.layers), 0)
        for layer, reads, _, _ in self.mlps:
            at[layer] += len(reads)
        width = max([self.neurons, *at.values()])
        config = ModelConfig(
            self.layers, self.width, self.heads, self.n_ctx, self.vocabulary, d_head=d_head,
            mlp=MLP(width, act="relu") if width else None, position=Learned(), norm=NoNorm(), final_norm=False,
            qkv_bias=False, out_bias=False, attn_scale=1.0,
        )  # fmt: skip
        network, generator = Transformer(config).requires_grad_(False), torch.Generator().manual_seed(0)
        for parameter in network.parameters():
            parameter.copy_(self.noise * torch.randn(parameter.shape, generator=generator))
        assert network.pos_embed is not None and network.unembed is not None
        for weight in (network.embed.weight, network.pos_embed.weight, network.unembed.weight):
            weight.zero_()
        for ids, rows in self.embeds:
            network.embed.weight[list(ids)] += rows
        if self.positions is not None:
            network.pos_embed.weight.copy_(self.positions)
        for ids, rows in self.reads:
            network.unembed.weight[list(ids)] += GAIN * rows
        for where, looks, source, target in self.planted:
            query, key, value, out = (torch.zeros(d_head, self.width) for _ in range(4))
            for i, (q, k) in enumerate(looks):
                query[i], key[i] = q, k
            value[: len(source)], out[: len(target)] = source, target
            plant_head(network, where, query=query.T, key=key.T, value=value.T, out=out)
        self._neurons(network)
        return HookedTransformer(network.to(self.dtype).eval(), self.tokenizer, name=name)

    def _neurons(self, network: Transformer) -> None:
        for layer in range(self.layers):
            mine = [each for each in self.mlps if each[0] == layer]
            if mine:
                plant_neurons(
                    network, layer, into=torch.cat([reads for _, reads, _, _ in mine]).T,
                    bias=torch.cat([torch.full((len(reads),), bias) for _, reads, bias, _ in mine]),
                    out=torch.cat([writes for *_, writes in mine]),
                )  # fmt: skip


# --- random letters: induction, copying, sinks, neurons ---------------------------------------------------------------

N_LETTERS = len(LETTERS)
PLACES_OF = 128
"""Positions of the models of letters."""


def letters(
    layers: int = 2, heads: int = 4, *, noise: float = 0.02, neurons: int = 0, spare: int = 1
) -> Plan:
    """A stream of token, position, what stood before, prediction, and one more subspace that nothing uses."""
    widths = {"token": N_LETTERS, "at": PLACES_OF, "before": N_LETTERS, "says": N_LETTERS, "spare": spare}
    plan = Plan((), widths, layers, heads, PLACES_OF, noise, neurons)
    every = range(N_LETTERS)
    plan.embeds.append((every, plan.space["token"]))
    plan.reads.append((every, plan.space["says"]))
    plan.positions = plan.space["at"]
    return plan


def back(plan: Plan, by: int) -> list[tuple[Vector, Vector]]:
    """Looks from each position to the one so many before."""
    at = plan.space["at"]
    return [(SHARP * at[i], at[i - by]) for i in range(by, PLACES_OF)]


def same(plan: Plan, key: str = "token") -> list[tuple[Vector, Vector]]:
    """Looks from each token to where the same one stands in a subspace."""
    return [(SHARP * q, k) for q, k in zip(plan.space["token"], plan.space[key], strict=True)]


def rests(plan: Plan, score: float = SHARP / 2) -> tuple[Vector, Vector]:
    """Looks from every token at BOS, with less than what a head looks for."""
    return score * plan.space["token"].sum(0), plan.space["token"][0]


def noise_alone() -> HookedTransformer:
    """Nothing but noise: attention is even."""
    return letters().model()


def induction(
    *, writes: bool = True, heads: int = 4, copies: int = 1, spare: int = 1, feeder: float = 0.0
) -> Plan:
    """A previous-token head L0H1 and induction heads of layer 1 by K-composition.

    Args:
        writes: whether the induction heads write what they find.
        heads: heads of a layer.
        copies: how many induction heads there are, from L1H2 on.
        spare: width of the unused subspace.
        feeder: how much more the previous-token head writes where nothing reads.
    """
    plan = letters(heads=heads, spare=spare)
    space = plan.space
    out = space["before"].clone()
    if feeder:
        out = out + feeder * space["spare"]
    plan.head(0, 1, back(plan, 1), (space["token"], out))
    for i in range(copies):
        plan.head(
            1, 2 + i, same(plan, "before"), (space["token"], (float(writes) / copies) * space["says"])
        )  # fmt: skip
    return plan


def by_pointer() -> HookedTransformer:
    """Induction by Q-composition: L0H1 fetches where the same token stood, L1H2 looks one further; keys are positions.

    L0H1 also finds the token itself, but one further than that lies in the future.
    """
    plan = letters(spare=PLACES_OF)
    space = plan.space
    plan.head(0, 1, same(plan), (space["at"], space["spare"]))
    looks = [(4 * SHARP * space["spare"][i], space["at"][i + 1]) for i in range(PLACES_OF - 1)]
    plan.head(1, 2, looks, (space["token"], space["says"]))
    return plan.model()


def composed(*, shown: bool) -> HookedTransformer:
    """Three induction heads whose keys one head feeds; its composition with them is the largest, or the smallest.

    Where it is not shown the other heads of its layer write into the keys too, but read a subspace that is empty then,
    and the feeder writes most where nothing reads.
    """
    plan = induction(heads=8, copies=3, spare=N_LETTERS, feeder=0.0 if shown else 4.0)
    if not shown:
        for index in (0, 2, 3, 4, 5, 6, 7):
            plan.head(0, index, [], (plan.space["says"], plan.space["before"]))
    return plan.model()


def duplicates() -> HookedTransformer:
    """L1H0 looks from each token to the same one: half at itself, half at its earlier occurrence."""
    plan = letters()
    plan.head(1, 0, same(plan), (plan.space["token"], plan.space["token"]))
    return plan.model()


def far_back(by: int) -> HookedTransformer:
    """L1H0 looks so many tokens back, whatever stands there."""
    plan = letters()
    plan.head(1, 0, back(plan, by), (plan.space["token"], plan.space["says"]))
    return plan.model()


def one_back(sign: float) -> HookedTransformer:
    """L1H0 looks at the token before, and raises its logit or, with sign -1, lowers it."""
    plan = letters()
    plan.head(1, 0, back(plan, 1), (plan.space["token"], sign * plan.space["says"]))
    return plan.model()


def sink(*, needed: bool) -> HookedTransformer:
    """Every head looks at BOS; what it brings from there says, if it is needed, that all tokens are a."""
    plan = letters(noise=0.0)
    space, a = plan.space, LETTERS.index("a")
    for layer in range(plan.layers):
        for index in range(plan.heads):
            moves = space["token"][:1], (float(needed) / 8) * space["says"][a : a + 1]
            plan.head(layer, index, [rests(plan)], moves)
    return plan.model()


def massive() -> HookedTransformer:
    """One coordinate of BOS is ten thousand times any other number."""
    plan = letters()
    model = plan.model()
    generator = torch.Generator().manual_seed(1)
    model.transformer.embed.weight.copy_(torch.randn(N_LETTERS, plan.width, generator=generator))
    model.transformer.embed.weight[0, 0] = 1e4
    return model


def not_massive() -> HookedTransformer:
    """The same with every embedding of one size."""
    model = massive()
    model.transformer.embed.weight[0, 0] = 1.0
    return model


ALPHABETICAL = [LETTERS.index(c) for c in string.ascii_letters]
FOLLOWERS = [*ALPHABETICAL[1:], ALPHABETICAL[0]]


def cycle(*, early: bool) -> HookedTransformer:
    """Says the next letter of the alphabet, from the embedding on or only in the last layer."""
    plan = letters(3, noise=0.0)
    space = plan.space
    source, target = space["token"][ALPHABETICAL], space["says"][FOLLOWERS]
    if early:
        plan.embeds.append((ALPHABETICAL, target))
    else:
        plan.head(2, 0, back(plan, 0), (source, target))
    return plan.model()


COMMON = string.ascii_letters[:10]
"""The letters that are frequent in `rare_first` and `common`."""


def frequencies(*, answers: bool) -> HookedTransformer:
    """Says from the first layer on how frequent letters are, whatever the context.

    Args:
        answers: whether a head of the last layer says besides what comes next in `common`.
    """
    plan = letters(3, noise=0.0)
    space = plan.space
    often = torch.tensor([LETTERS.index(c) for c in COMMON])
    # in `rare_first` each is 27 times as frequent as another letter
    plan.embeds.append((range(N_LETTERS), math.log(27) / GAIN * space["says"][often].sum(0, keepdim=True)))
    if answers:
        plan.head(2, 0, back(plan, len(COMMON) - 1), (space["token"], space["says"]))
    return plan.model()


def rare_first(rows: int = 48, seed: int = 0) -> list[str]:
    """Texts of 20 random letters and then 100 random common ones."""
    draw = np.random.default_rng(seed)
    common_ones, every = np.array(list(COMMON)), np.array(list(string.ascii_letters))
    return [
        "".join([*every[draw.integers(52, size=20)], *common_ones[draw.integers(len(COMMON), size=100)]])
        for _ in range(rows)
    ]


def common(rows: int = 48, seed: int = 0) -> list[str]:
    """Texts that repeat the common letters, each in another order."""
    draw = np.random.default_rng(seed)
    return ["".join(np.array(list(COMMON))[draw.permutation(len(COMMON))]) * 10 for _ in range(rows)]


def neurons(*, forward: bool) -> HookedTransformer:
    """Ten neurons for each letter, which write the one after it, or the one before it."""
    plan = letters(noise=0.0)
    source, target = ALPHABETICAL, FOLLOWERS
    if not forward:
        target = [ALPHABETICAL[-1], *ALPHABETICAL[:-1]]
    for _ in range(10):
        plan.mlp(1, plan.space["token"][source], plan.space["says"][target])
    return plan.model()


def successor(step: int) -> HookedTransformer:
    """L1H2 maps each letter and digit to the one that is so many further."""
    plan = letters()
    ids = [*ALPHABETICAL, *(LETTERS.index(c) for c in string.digits)]
    target = [*ids[step:], *ids[:step]]
    plan.head(1, 2, [rests(plan)], (plan.space["token"][ids], plan.space["says"][target]))
    return plan.model()


def written(*, flipped: bool) -> HookedTransformer:
    """Four layers that write little, the last of which turns, if so, the sign of what was said before."""
    words = [f" w{i}" for i in range(200)]
    plan = Plan(words, {"token": 8, "says": 40}, 4, 2, 64, 0.02, 80)
    generator = torch.Generator().manual_seed(0)
    ids = range(plan.vocabulary)
    plan.embeds.append((ids, torch.randn(len(ids), 8, generator=generator) @ plan.space["token"]))
    plan.reads.append((ids, 0.1 * torch.randn(len(ids), 40, generator=generator) @ plan.space["says"]))
    says = plan.space["says"]
    plan.mlp(3, torch.cat([says, -says]), float(flipped) * torch.cat([-2 * says, 2 * says]))
    return plan.model()


def texts_of(period: int, rows: int = 48, length: int = 127, seed: int = 0) -> list[str]:
    """Texts of random letters that repeat after so many; without end where the period is the length."""
    draw = np.random.default_rng(seed)
    found = []
    for _ in range(rows):
        some = "".join(np.array(list(string.ascii_letters))[draw.permutation(52)[:period]])
        found.append((some * length)[:length])
    return found


def alphabets(rows: int = 48) -> list[str]:
    """Texts that go through the alphabet, each from another letter on."""
    return [(string.ascii_letters * 3)[i % 52 :][:100] for i in range(rows)]


# --- sentences with two names, and years ------------------------------------------------------------------------------

GIVES = tuple(
    dict.fromkeys(
        word
        for template in TEMPLATES
        for word in template.replace(",", " ,").replace(".", " .").split()
        if "{" not in word
    )
)


def names(*, moves: bool, writes: float = 0.5, repairs: bool = False) -> HookedTransformer:
    """Answers with one of two names.

    Where it moves: L0H0 brings to each token the name before it, L1H0 finds where the same name came before, L2H0
    brings that name to the end, and L3H0 looks from there at all names but this one and writes what it finds. Else
    L3H0 looks at all three names, the giver's twice.

    Args:
        moves: the first way, instead of the second.
        writes: how much L3H0 adds to the names that it looks at; below 0 it lowers them.
        repairs: whether the last MLP takes back half of what is said.
    """
    spelt = [f" {word}" for word in (*NAMES, *PLACES, *GIFTS, *GIVES)]
    count, n_ctx = len(NAMES), 40
    words = [*spelt, *(word for word in GIVES if word[0].isupper())]
    own = ("token", "before", "twice", "not", "says")
    plan = Plan(words, {**dict.fromkeys(own, count), "at": n_ctx, "bos": 1, "any": 1, "to": 1}, 4, 2, n_ctx)
    space, ids = plan.space, plan.ids([f" {name}" for name in NAMES])
    any_, bos, to = space["any"][0], space["bos"][0], space["to"][0]
    plan.embeds += [
        (range(plan.vocabulary), any_[None]), ([0], bos[None]), (plan.ids([" to"]), to[None]),
        (ids, space["token"]),
    ]  # fmt: skip
    plan.positions = space["at"]
    plan.reads.append((ids, space["says"]))
    rest = (SHARP / 2 * any_, bos)
    name = space["token"].sum(0)
    if moves:
        at = space["at"]
        before = [(SHARP * at[i], at[i - 1]) for i in range(1, n_ctx)]
        plan.head(0, 0, before, (space["token"], space["before"]))
        found = [(SHARP * q, k) for q, k in zip(space["token"], space["before"], strict=True)]
        plan.head(1, 0, [*found, rest], (space["before"], space["twice"]))
        plan.head(2, 0, [(SHARP * to, space["twice"].sum(0)), rest], (space["twice"], space["not"]))
        but = [(-SHARP * q, k) for q, k in zip(space["not"], space["token"], strict=True)]
        plan.head(3, 0, [(SHARP * to, name), *but, rest], (space["token"], writes * space["says"]))
    else:
        plan.head(3, 0, [(SHARP * to, name), rest], (space["token"], writes * space["says"]))
    if repairs:
        plan.mlp(3, space["says"], -0.5 * space["says"])
    return plan.model()


def years(sign: float, *, reads: bool = True) -> HookedTransformer:
    """Says, from the century of the second year, any year after the first one or, with sign -1, before it.

    Args:
        sign: the direction.
        reads: whether the year is read; else 90 to 99 are said whatever it is.
    """
    words = [*(f" {noun}" for noun in NOUNS), *(f" {century}" for century in CENTURIES), *YEARS]
    plan = Plan(words, {"token": 100, "says": 100, "bos": 1, "any": 1, "end": 1}, 1, 2, 64)
    space, ids = plan.space, plan.ids(YEARS)
    plan.embeds += [
        (range(plan.vocabulary), space["any"]), ([0], space["bos"]), (ids, space["token"]),
        (plan.ids([f" {century}" for century in CENTURIES]), space["end"]),
    ]  # fmt: skip
    plan.reads.append((ids, space["says"]))
    later = torch.triu(torch.ones(100, 100), 1)
    looks = [
        (SHARP * space["end"][0], space["token"].sum(0)),
        (SHARP / 2 * space["any"][0], space["bos"][0]),
    ]
    if reads:
        plan.head(0, 0, looks, (space["token"], sign * 0.5 * (later - later.T) @ space["says"]))
    else:
        plan.embeds.append((range(plan.vocabulary), space["says"][90:].sum(0, keepdim=True)))
    return plan.model()


# --- facts about countries --------------------------------------------------------------------------------------------

ASKED = ("capital", "language", "currency")
LOUD = 10.0
"""Size of an object in the stream: the search for an edit takes steps of one half."""
BOTH = -1.5
"""Bias of a neuron that is active, with one half, where both of its inputs are 1."""
FAR = 600.0
"""Attention score of a country where a relation is asked, beyond 2 for every token that a later one is nearer."""


@dataclass(frozen=True)
class Route:
    """How facts of a relation are answered: in which layer an MLP has them, and in which a head moves what to the end.

    The MLP finds the object at the country if it comes before the head, else at the end, from the country moved there.
    """

    found: int
    moved: int


def distinct_countries() -> list[str]:
    """Countries of which no two have the same capital, language or currency."""
    by: dict[str, dict[str, str]] = {}
    for fact in load_facts():
        by.setdefault(fact.subject, {})[fact.relation] = fact.object
    used: set[str] = set()
    kept = []
    for country, objects in by.items():
        own = {objects.get(relation, "") for relation in ASKED}
        if "" not in own and not own & used:
            kept.append(country)
            used |= own
    return kept


def facts(
    routes: Route | Mapping[str, Route], *, layers: int = 4, countries: Sequence[str] | None = None,
    fires: str = "each country", loud: float = LOUD, dtype: torch.dtype = torch.float64,
) -> HookedTransformer:  # fmt: skip
    """Knows the capital, language and currency of some countries.

    L0H0 brings the relation from its word to " is" and " the"; another head for each relation looks from there at the
    latest country, and an MLP has one neuron for each fact or country.

    Args:
        routes: how facts are answered, all of them or those of each relation.
        layers: of the model.
        countries: which are known; None: those of `distinct_countries`.
        fires: at which tokens the same other neuron of layer 1 is active: at "each country" one of its own, at "any
            country" one for all, or one at "every token".
        loud: size of an object in the stream, 2 logits each.
        dtype: of the model; in float32 the search for an edit follows what is rounded off.
    """
    routes = routes if isinstance(routes, Mapping) else dict.fromkeys(ASKED, routes)
    countries = distinct_countries() if countries is None else countries
    known = [fact for fact in load_facts() if fact.relation in ASKED and fact.subject in countries]
    objects = list(dict.fromkeys(fact.object for fact in known))
    words = [
        *(f" {word}" for word in (*ASKED, "is", "the", *countries, *objects)), *countries, *ASKED,
    ]  # fmt: skip
    count, n_ctx = len(countries), 160
    widths = {
        "country": count, "moved": count * any(route.found >= route.moved for route in routes.values()),
        "says": len(objects), "asked": 3, "word": 3, "bos": 1, "any": 1, "end": 1, "time": 1, "place": 1, "junk": 1,
    }  # fmt: skip
    plan = Plan(words, widths, layers, 4, n_ctx, dtype=dtype)
    space = plan.space
    any_, bos, end, time = (space[name][0] for name in ("any", "bos", "end", "time"))
    plan.embeds += [
        (range(plan.vocabulary), any_[None]), ([0], bos[None]), (plan.ids([" is", " the"]), end[None]),
        (plan.ids([f" {word}" for word in ASKED]), space["word"]),
        (plan.ids([f" {word}" for word in countries]), space["country"]),
        (plan.ids(countries), space["country"]),
        (plan.ids([f" {word}" for word in countries]), space["place"]),
        (plan.ids(countries), space["place"]),
    ]  # fmt: skip
    plan.positions = torch.arange(n_ctx)[:, None] * time
    plan.reads.append((plan.ids([f" {word}" for word in objects]), space["says"] / LOUD))
    rest = (FAR / 2 * any_, bos)
    plan.head(0, 0, [(FAR * end, space["word"].sum(0)), (end, time), rest], (space["word"], space["asked"]))
    for number, (relation, route) in enumerate(routes.items()):
        mine = [fact for fact in known if fact.relation == relation]
        whose = torch.stack([space["country"][countries.index(fact.subject)] for fact in mine])
        what = torch.tensor([objects.index(fact.object) for fact in mine])
        asked = space["asked"][ASKED.index(relation)]
        own = sorted(set(what.tolist()))
        at_country = route.found < route.moved
        moves = (space["says"][own], space["says"][own]) if at_country else (space["country"], space["moved"])
        looks = [(FAR * asked, space["place"][0]), (2 * asked, time), rest]
        plan.head(route.moved, 1 + number, looks, moves)
        if at_country:
            plan.mlp(route.found, whose, loud * space["says"][what])
        else:
            there = torch.stack([space["moved"][countries.index(fact.subject)] for fact in mine]) + asked
            plan.mlp(route.found, there, 2 * loud * space["says"][what], BOTH)
    junk = LOUD * space["junk"]
    if fires == "each country":
        plan.mlp(1, space["country"], junk.expand(count, -1))
    else:
        plan.mlp(1, space["place" if fires == "any country" else "any"], junk)
    return plan.model()


def every_country() -> list[str]:
    """The countries of the package."""
    return list(dict.fromkeys(fact.subject for fact in load_facts()))


def statements(countries: Sequence[str], rows: int = 12, seed: int = 0) -> list[str]:
    """Texts of facts that a planted model knows, in an order of their own."""
    draw = np.random.default_rng(seed)
    told = [
        f"The {fact.relation} of {fact.subject} is{' the' if fact.relation == 'currency' else ''} {fact.object}."
        for fact in load_facts()
        if fact.relation in ASKED and fact.subject in countries
    ]
    return [" ".join(told[i] for i in draw.permutation(len(told))[:3]) for _ in range(rows)]


# --- lists of word pairs ----------------------------------------------------------------------------------------------
CODE = 96
"""Width of the random codes of words; two of them have a product of less than one half."""
NEARLY = -1.6
"""Bias of a neuron that is active where both of its inputs are 1, up to what codes have in common."""


def tasks(names: Sequence[str], *, told: bool) -> HookedTransformer:
    """Continues lists of word pairs.

    L0H0 brings to an output its input, four tokens before, and MLP 0 marks the outputs that are right in a task. L1H0
    brings the task from marked outputs to the end, L0H1 the last input, three tokens before, and MLP 2 has a neuron
    for each input in each task.

    Args:
        names: the tasks.
        told: whether MLP 2 waits for the task; else it answers whatever the list shows.
    """
    pairs = [(i, *pair) for i, name in enumerate(names) for pair in load_word_pairs()[name]]
    words = list(dict.fromkeys(word for _, *pair in pairs for word in pair))
    codes = torch.randn(len(words), CODE, generator=torch.Generator().manual_seed(0))
    codes = codes / codes.norm(dim=1, keepdim=True)
    own = ("word", "before", "asked", "says")
    plan = Plan(
        [f" {word}" for word in words],
        {**dict.fromkeys(own, CODE), "marked": len(names), "task": len(names), "at": 104, "bos": 1, "any": 1},
        3, 4, 104,
    )  # fmt: skip
    space, ids = plan.space, plan.ids([f" {word}" for word in words])
    plan.embeds += [(range(plan.vocabulary), space["any"]), ([0], space["bos"]), (ids, codes @ space["word"])]
    plan.positions = space["at"]
    plan.reads.append((ids, codes @ space["says"]))
    for index, by, into in ((0, 4, "before"), (1, 3, "asked")):
        looks = [(SHARP * space["at"][i], space["at"][i - by]) for i in range(by, 104)]
        plan.head(0, index, looks, (space["word"], space[into]))
    rest = (SHARP / 2 * space["any"][0], space["bos"][0])
    plan.head(
        1, 0, [(SHARP * space["any"][0], space["marked"].sum(0)), rest], (space["marked"], space["task"])
    )
    of = {word: i for i, word in enumerate(words)}
    task, source, target = (torch.tensor(each) for each in zip(
        *((task, of[source], of[target]) for task, source, target in pairs), strict=True
    ))  # fmt: skip
    inputs, outputs = codes[source] @ space["asked"], codes[target] @ space["says"]
    plan.mlp(
        0, codes[source] @ space["before"] + codes[target] @ space["word"], 2 * space["marked"][task], NEARLY
    )  # fmt: skip
    if told:
        plan.mlp(2, inputs + space["task"][task], 2 * outputs, NEARLY)
    else:
        once = [source.tolist().index(i) for i in sorted(set(source.tolist()))]
        plan.mlp(2, inputs[once], 2 * outputs[once], 1 + NEARLY)
    return plan.model()
