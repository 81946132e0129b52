"""What mixes the positions of a block: one small record for each mechanism of the literature."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

Score = Literal["dot", "cosine", "additive"]
Refinement = Literal["simple", "value", "additive"]
Arrangement = Literal["context", "gate", "layer"]


@dataclass(frozen=True)
class Traits:
    """What a mixer has of the things that analyses rely on."""

    queries: bool = True
    """Matrices W_Q and W_K."""
    bilinear: bool = False
    """Its weights come from q . k: there is a QK circuit."""
    rotated: bool = True
    """Rotary positions rotate its queries and keys."""
    scored: bool = False
    """Scores that a softmax turns into the pattern."""
    patterned: bool = True
    """An effective pattern: `[query, key]` weights of the values, whatever the kernel computes."""
    distribution: bool = False
    """Rows of the pattern are shares: never negative, of sum 1 (with sinks less, without any similarity 0)."""
    additive: bool = True
    """z = pattern @ values and nothing after it, so that heads split by source and have an OV circuit."""
    keyed: bool = True
    """A cache keeps keys and values of every token for it."""
    stateful: bool = False
    """It keeps a state of the past, so that a pass cannot go on from an arbitrary column of an earlier one."""


@dataclass(frozen=True)
class Dilated:
    """A query sees itself and the keys `dilation`, 2 `dilation`, ... before it, `width` in all (atrous)."""

    width: int
    dilation: int = 2

    def __post_init__(self) -> None:
        _at_least_one(self, "width", "dilation")


@dataclass(frozen=True)
class Strided:
    """The last `stride` keys, and every key a multiple of `stride` before the query (Child et al. 2019)."""

    stride: int

    def __post_init__(self) -> None:
        _at_least_one(self, "stride")


@dataclass(frozen=True)
class FixedBlocks:
    """The keys of the query's own block, and the last `summary` keys of every block (Child et al. 2019)."""

    block: int
    summary: int = 1

    def __post_init__(self) -> None:
        _at_least_one(self, "block", "summary")
        if self.summary > self.block:
            raise ValueError(f"FixedBlocks requires summary <= block, got {self.summary} and {self.block}")


@dataclass(frozen=True)
class Longformer:
    """A dilated window, and `n_global` first tokens that see and are seen by all (Beltagy et al. 2020)."""

    width: int
    dilation: int = 1
    n_global: int = 1

    def __post_init__(self) -> None:
        _at_least_one(self, "width", "dilation")


@dataclass(frozen=True)
class BigBird:
    """Blocks: `n_window` neighbours, `n_random` drawn ones and `n_global` first blocks (Zaheer et al. 2020)."""

    block: int
    n_window: int = 3
    """Blocks of the window, the query's own in its middle (a causal model sees the half before it)."""
    n_random: int = 1
    n_global: int = 1
    seed: int = 0
    """Of the drawn blocks; they depend on nothing else, least of all on the length of the text."""

    def __post_init__(self) -> None:
        _at_least_one(self, "block", "n_window")


Sparsity = Dilated | Strided | FixedBlocks | Longformer | BigBird


@dataclass(frozen=True)
class LogN:
    """Scores times log n / log m: n the keys a query sees, m the length it was trained at (Su 2021; Chiang 2022)."""

    train_length: int
    floor: float | None = None
    """The factor is not less than this; None = no floor."""

    def __post_init__(self) -> None:
        if self.train_length < 2:
            raise ValueError(f"LogN requires train_length >= 2, got {self.train_length}")


@dataclass(frozen=True)
class AdaptiveTemperature:
    """Scores of a row times a polynomial of its entropy, at least 1 (Velickovic et al. 2024, section 4)."""


Temperature = LogN | AdaptiveTemperature


@dataclass(frozen=True)
class Softmax:
    """Softmax attention, multi-head, grouped or multi-query, and what has been done to its scores and pattern."""

    score: Score = "dot"
    """`cosine`: a trained factor per head times the cosine; `additive`: w . tanh(q + k) (Bahdanau et al. 2015)."""
    sparsity: Sparsity | None = None
    """Which keys a query sees at all, beyond causality and `window`."""
    temperature: Temperature | None = None
    smeared_keys: bool = False
    """Each key mixed with the one before it, by a trained share per head (Olsson et al. 2022)."""
    refinement: Refinement | None = None
    """The pattern passed through attention between its own rows (Liu et al. 2024)."""

    def __post_init__(self) -> None:
        _one_of(self, "score", get_args(Score))
        _one_of(self, "refinement", (*get_args(Refinement), None))

    @property
    def traits(self) -> Traits:
        """What analyses may rely on; scores are q . k up to a factor that the query alone decides, or are not."""
        bilinear = self.score == "dot" and not self.smeared_keys and self.refinement is None
        stateful = self.smeared_keys or self.refinement is not None
        return Traits(bilinear=bilinear, scored=True, distribution=True, stateful=stateful)

    @property
    def plain(self) -> bool:
        """Whether nothing was done to it."""
        return self == Softmax()


@dataclass(frozen=True)
class DualChunk:
    """Rotary attention whose relative positions stay below a usable length (An et al. 2024, dual chunk attention)."""

    length: int
    """No relative position exceeds it."""
    chunk: int
    """Texts up to this length are attended to as usual; `length - chunk` positions back are exact in longer ones."""

    traits: ClassVar[Traits] = Traits(bilinear=True, scored=True, distribution=True)

    def __post_init__(self) -> None:
        if not 1 <= self.chunk <= self.length <= 2 * self.chunk:
            raise ValueError(
                f"DualChunk requires 1 <= chunk <= length <= 2 chunk, got chunk {self.chunk} and length {self.length}"
            )


@dataclass(frozen=True)
class Differential:
    """The difference of two softmax patterns, then a norm per head (Ye et al. 2024).

    Queries and keys are split into halves, one for each pattern: `d_head` is the width of the values, twice that of a
    half, so that parameters are those of softmax attention of the same heads.
    """

    eps: float = 1e-5

    traits: ClassVar[Traits] = Traits(additive=False)


@dataclass(frozen=True)
class Linformer:
    """Keys and values projected along the length to `rank` of each (Wang et al. 2020); bidirectional by nature."""

    rank: int

    traits: ClassVar[Traits] = Traits()

    def __post_init__(self) -> None:
        _at_least_one(self, "rank")


@dataclass(frozen=True)
class Reformer:
    """Queries that serve as keys, and see those that fall into their bucket (Kitaev et al. 2020, LSH attention)."""

    n_buckets: int
    """Buckets of one round of hashing, an even number."""
    n_rounds: int = 1

    traits: ClassVar[Traits] = Traits(scored=True, distribution=True)

    def __post_init__(self) -> None:
        _at_least_one(self, "n_rounds")
        if self.n_buckets < 2 or self.n_buckets % 2:
            raise ValueError(f"Reformer requires an even n_buckets >= 2, got {self.n_buckets}")


@dataclass(frozen=True)
class Linear:
    """Attention whose weights are phi(q) . phi(k) over their sum (Katharopoulos et al. 2020)."""

    feature: Literal["elu", "relu"] = "elu"
    """phi: elu(x) + 1, or relu(x) (Sana)."""
    eps: float = 1e-6
    """Added to the sum that the weights are divided by."""
    chunk: int = 64
    """Positions computed at once by the fused form."""

    traits: ClassVar[Traits] = Traits(distribution=True, keyed=False, stateful=True)

    def __post_init__(self) -> None:
        _one_of(self, "feature", ("elu", "relu"))
        _at_least_one(self, "chunk")


@dataclass(frozen=True)
class Lightning:
    """Linear attention without a denominator, with decay, its output normed (TransNormer; lightning attention).

    Its positions are its decay: rotary ones are those of the other layers of a stack.
    """

    decay: bool = True
    """Weights fall by a fixed factor per position and head, ALiBi's slopes as exponents; less in deeper layers."""
    gate: bool = False
    """Whether the normed output is multiplied by a sigmoid gate, made from what the block reads (MiniMax-01)."""
    eps: float = 1e-6
    """Of the norm."""
    chunk: int = 64
    """Positions of a tile: within it (q k^T) v, between tiles q (k^T v)."""

    traits: ClassVar[Traits] = Traits(rotated=False, additive=False, keyed=False, stateful=True)

    def __post_init__(self) -> None:
        _at_least_one(self, "chunk")


@dataclass(frozen=True)
class Polar:
    """Polarity-aware linear attention: same-sign and opposite-sign parts of q . k (Meng et al. 2025, PolaFormer)."""

    max_power: float = 4.0
    """Features are x^p, with a trained 1 < p < 1 + max_power for each channel."""
    eps: float = 1e-6
    chunk: int = 64

    traits: ClassVar[Traits] = Traits(patterned=False, additive=False, keyed=False, stateful=True)

    def __post_init__(self) -> None:
        _at_least_one(self, "chunk")


@dataclass(frozen=True)
class Synthesizer:
    """Scores that no key has a part in: made from the query's token alone, or trained as they are (Tay et al. 2021)."""

    scores: Literal["dense", "random"] = "dense"
    """`dense`: two layers on what the query reads; `random`: one trained matrix `[query, key]` per head."""

    traits: ClassVar[Traits] = Traits(queries=False, scored=True, distribution=True)

    def __post_init__(self) -> None:
        _one_of(self, "scores", ("dense", "random"))


@dataclass(frozen=True)
class Pool:
    """The mean of what came before minus the token itself, no parameter (MetaFormer's pooling; Yu et al. 2022)."""

    traits: ClassVar[Traits] = Traits(queries=False)


@dataclass(frozen=True)
class LongTermMemory:
    """A network that learns keys' values while it reads, beside local attention (Behrouz et al. 2024, Titans)."""

    arrangement: Arrangement = "gate"
    """Memory as context of attention, as a gate on its output, or as a layer before it."""
    segment: int = 16
    """Tokens that attention sees at once; with `gate` and `layer` the width of its sliding window."""
    n_persistent: int = 4
    """Trained vectors that stand before every segment."""
    depth: int = 1
    """Matrices of each head's network, SiLU between them; 1 = a linear memory."""
    chunk: int = 16
    """Tokens whose gradients are taken at the same network, that before the first of them; 1 = each at its own."""

    traits: ClassVar[Traits] = Traits(patterned=False, additive=False, keyed=False, stateful=True)

    def __post_init__(self) -> None:
        _one_of(self, "arrangement", get_args(Arrangement))
        _at_least_one(self, "segment", "depth", "chunk")
        if self.n_persistent < 0 or self.segment % self.chunk:
            raise ValueError(
                f"LongTermMemory requires chunk to divide segment and n_persistent >= 0, got {self}"
            )


Mixer = (
    Softmax | DualChunk | Differential | Linformer | Reformer | Linear | Lightning | Polar | Synthesizer | Pool
    | LongTermMemory
)  # fmt: skip
_LACKS = {
    "additive": "z = pattern @ values; {} makes no pattern of the values",
    "distribution": "weights that are shares; those of {} may be negative or sum to anything",
}
MIXER_RECORDS: tuple[type, ...] = (*get_args(Mixer), *get_args(Sparsity), *get_args(Temperature))


def require(trait: str, mixers: Iterable[Mixer], what: str) -> None:
    """ValueError for `what` unless all of these mixers are `additive`, or have a `distribution` (`Traits`).

    The one refusal of analyses that multiply patterns and values, or that read a pattern's rows as shares.
    """
    for mixer in mixers:
        if not getattr(mixer.traits, trait):
            raise ValueError(f"{what} requires {_LACKS[trait].format(mixer)}")


def _at_least_one(record: object, *names: str) -> None:
    for name in names:
        if getattr(record, name) < 1:
            raise ValueError(f"{type(record).__name__} requires {name} >= 1, got {getattr(record, name)}")


def _one_of(record: object, name: str, allowed: tuple[str | None, ...]) -> None:
    value = getattr(record, name)
    if value not in allowed:
        raise ValueError(f"{type(record).__name__} has no {name} {value!r}; known: {allowed}")
