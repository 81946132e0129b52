"""The two thin factors of every weight gradient: the input of the matrix, and the gradient at its output.

A matrix acts as z_i = x_i W on every token i, so dL/dW = sum_i x_i^T delta_i with delta_i = dL/dz_i, the VJP (Katz et
al. 2024, "Backward Lens", section 4). One forward and one backward pass with frozen parameters give both factors of
every matrix; no weight gradient is formed. Names are the field's: `blocks.3.mlp.W_in`, `blocks.3.attn.W_Q`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from interp.core.boundary import public
from interp.core.notes import note
from interp.core.stats import Rows, finite, upcast
from interp.core.transfers import check
from interp.core.wording import nearest
from interp.data.answers import AnswerTokens
from interp.data.batch import Answers, Batch, Prompts
from interp.data.ids import check_count
from interp.data.stream import GivenBatches, by_place
from interp.model.attention import Memory
from interp.model.config import MLP, ModelConfig
from interp.model.edits import Add, Edit
from interp.model.encoder_decoder import EncoderDecoder
from interp.model.parts import Part
from interp.model.tap import Read
from interp.model.transformer import Transformer
from interp.model.weights import Weights
from interp.passes.frozen import output_norm
from interp.passes.metrics import summed_log_probs
from interp.passes.needs import Steps, TowardLoss, recorded
from interp.passes.observe import Model, Objective, Studied, as_model
from interp.passes.question import ByRow, NotFiniteError
from interp.passes.rules import Rules, under_rules
from interp.passes.schedule import run_steps
from interp.runs.over_data import reduced_over
from interp.weights.matrices import between, given_at, matrix_place, reads_memory, side_by_side

LensMatrix = Literal[
    "W_in", "W_gate", "W_out", "W_Q", "W_K", "W_V", "W_O",
    "mlp_before.W_in", "mlp_before.W_gate", "mlp_before.W_out",
    "cross_attn.W_Q", "cross_attn.W_K", "cross_attn.W_V", "cross_attn.W_O",
]  # fmt: skip
MATRICES: tuple[LensMatrix, ...] = get_args(LensMatrix)
"""Matrices of the MLP, of attention, of the MLP before attention in Macaron blocks, and of cross-attention.

A gated MLP is `act(x W_gate) * (x W_in) W_out` (gate, up, down).
"""
WRITERS = ("W_out", "W_O", "mlp_before.W_out", "cross_attn.W_O")
"""The matrices whose output is as wide as the stream; the others read it."""
_UNSEEN = {
    **{f"W_{part}": (f"hook_{part.lower()}_input",) for part in "QKV"},
    "cross_attn.W_O": ("cross_attn.hook_result",),
    "W_O": ("attn.hook_result", "ln1_post.hook_scale", "ln1_post.hook_normalized"),
    "W_out": ("ln2_post.hook_scale", "ln2_post.hook_normalized"),
}
"""Sites between the recorded output of a matrix and the matrix itself."""
GradientPair = tuple[Float[Tensor, "b p i"], Float[Tensor, "b p o"]]


@dataclass(frozen=True, eq=False)
class GradientFactors(Mapping[str, tuple[Tensor, Tensor]]):
    """Both factors of each weight gradient by the matrix' name: x `[b p i]`, what it read, and delta `[b p o]`.

    The gradient of `blocks.3.mlp.W_in` is the sum over rows and tokens of the outer products of both; of blocks that
    share their weights, over layers too.

    What heads read or give stands side by side: `rearrange(delta, "b p (h e) -> b p h e", e=d_head)` splits delta of
    W_Q, W_K, W_V (W_K and W_V: key/value heads) and x of W_O. Deltas are those of the row's own loss, 0 at padding.
    """

    model: Transformer
    batch: Batch
    pairs: Mapping[str, GradientPair]
    loss: Objective
    """The function that was differentiated, of the logits at the last token `[b 1 v]`; of an encoder, of its states."""
    everywhere: bool = False
    """Whether the loss is a function of the logits at every token instead, `[b p v]`."""
    whole: bool = False
    """Whether it is one of the logits at every token that predicts one of the answer instead, `[b k v]`."""

    def __getitem__(self, name: str) -> GradientPair:
        if name not in self.pairs:
            raise KeyError(f"no factors of {name!r} were recorded; {nearest(name, self.pairs)}")
        return self.pairs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.pairs)

    def __len__(self) -> int:
        return len(self.pairs)

    def __repr__(self) -> str:
        rows, n = self.batch.tokens.shape
        return f"GradientFactors({len(self)} matrices, {rows} rows of {n} tokens: {', '.join(list(self)[:2])}, ...)"

    def recorded(self) -> dict[LensMatrix, list[int]]:
        """The layers in which each matrix was recorded."""
        layers: dict[LensMatrix, list[int]] = {}
        for name in self.pairs:
            _, layer, part, matrix = name.split(".")
            matrix = matrix if part in ("mlp", "attn") else f"{part}.{matrix}"
            layers.setdefault(matrix, []).append(int(layer))  # type: ignore[arg-type]
        return layers

    @public()
    def in_stream(self, layer: int, matrix: LensMatrix) -> Float[Tensor, "b p d"]:
        """The factor of a matrix in a residual stream: delta of W_out and W_O, x of the others.

        x of cross-attention's W_K and W_V is in the encoder's stream, at source positions.
        """
        return self[full_name(layer, matrix)][1 if matrix in WRITERS else 0]

    @public()
    def reconstruct(self, name: str) -> Float[Tensor, "i o"]:
        """The gradient of the matrix, sum over rows and tokens of outer(x_i, delta_i), in float32 at least.

        For `z = x W`: the transpose of an `nn.Linear`'s `weight.grad`.
        """
        x, delta = self[name]
        return einsum(upcast(x), upcast(delta), "b p i, b p o -> i o")

    @public()
    def error(self, name: str) -> float:
        """Largest difference between `reconstruct` and autograd's weight gradient, relative to its largest entry.

        Takes a pass of its own, and as much memory as the matrix.
        """
        expected, ours = self._autograd_gradient(name), self.reconstruct(name)
        largest = expected.abs().max().clamp_min(torch.finfo(expected.dtype).tiny)
        return float((ours - expected).abs().max() / largest)

    def _autograd_gradient(self, name: str) -> Float[Tensor, "i o"]:
        """The weight gradient by autograd, at a detached alias of the parameter, so that its `.grad` stays as it is."""
        where = matrix_place(self.model, name)
        path = where.parameter
        stand_in = self.model.get_parameter(path).detach().requires_grad_()
        batch = self.batch
        with torch.enable_grad():
            output: Tensor = self.model.with_parameters({path: stand_in})(
                batch.tokens,
                logits_at=TowardLoss(loss_of_answers, self.everywhere, self.whole).columns(self.model, batch),
                **batch.inputs,
            )
            (gradient,) = torch.autograd.grad(self.loss(output), stand_in)
        return upcast(side_by_side(where.view(gradient).to(self.model.device), name))


@public()
def gradient_factors(
    model: Model,
    data: Prompts,
    answer: Answers | None = None,
    wrong: Answers | None = None,
    *,
    matrices: Sequence[LensMatrix] | None = None,
    layers: Sequence[int] | None = None,
    rules: Rules = (),
    edits: Sequence[Edit] = (),
    prepend_bos: bool | None = None,
    batch_size: int = 32,
) -> GradientFactors:
    """Both thin factors of each weight gradient of -log p(answer) at the last token, for prompts in memory.

    A matrix acts as z_i = x_i W on every token i, so dL/dW = sum_i x_i^T delta_i with delta_i = dL/dz_i. Each prompt's
    loss is its own. One forward and one backward pass give all factors; no weight gradient is formed. It keeps vectors
    of every prompt and token, so it is no question for `interp.run`; `backward_lens`, `gradient_rank` and
    `gradient_cosines` are.

    Args:
        data: prompts in memory: texts, token ids or a batch.
        answer: token trained towards, as text or id, one for all prompts or one for each; None: that of the batch.
        wrong: token trained away from; None: none. With it the loss is logit(wrong) - logit(answer).
        matrices: which matrices of each layer, such as "W_in" or "W_O"; None: all that the model has.
        layers: which layers; None: all.
        rules: backward rules under which gradients are taken, or the name of a preset, as in `backward_lens`.
        edits: interventions that every pass runs under.
        prepend_bos: whether texts begin with BOS; None: as the model does by default.
        batch_size: the most rows of a pass.

    Returns:
        GradientFactors: by name, such as "blocks.3.mlp.W_in", x `[b p i]` and delta `[b p o]`.

    Raises:
        ValueError: matrices that the model does not have, no logits, packed rows, edits of what a matrix gives, and
            answers that are not one token, or none.
        IndexError: a layer that does not exist.

    Source:
        Katz et al. 2024, "Backward Lens", section 4.

    See Also:
        `backward_lens`: the factors as tokens, for data of any size.

    Example:
        >>> found = interp.lenses.gradient_factors(model, prompt, " Mary", matrices=["W_out"])
        >>> x, delta = found["blocks.1.mlp.W_out"]
        >>> found.error("blocks.1.mlp.W_out") < 1e-4
        True
    """
    subject = as_model(model, edits)
    subject = Studied(under_rules(subject.transformer, rules), subject.text)
    batch = subject.text.batch(data, prepend_bos=prepend_bos).to(subject.transformer.device)
    answers = AnswerTokens.of(subject.text, answer, wrong)
    if answers is not None:
        check_count(answers.prompts, len(batch))
        for sentence in answers.notes(batch):
            note(sentence)
        batch = answers.on(batch)
    compute = partial(_flat_factors, matrices=matrices, layers=layers)
    analysis = ByRow("gradient_factors", compute, Rows)
    batches = GivenBatches.cut(by_place(batch), batch_size)  # padding stays: factors keep the batch's columns
    total = reduced_over(analysis, subject, batches)
    assert isinstance(total, Rows)
    names = [name.removesuffix(" x") for name in total.rows if name.endswith(" x")]
    rows = {name: value.to(batch.tokens.device) for name, value in total.rows.items()}
    pairs = {name: (rows[f"{name} x"], rows[f"{name} delta"]) for name in names}
    return GradientFactors(subject.transformer, batch, pairs, answer_loss(batch))


def _flat_factors(
    model: Transformer,
    batch: Batch,
    matrices: Sequence[LensMatrix] | None,
    layers: Sequence[int] | None,
) -> Steps[Mapping[str, Tensor]]:
    """The factors of every matrix under flat names: `blocks.3.mlp.W_in x` and `blocks.3.mlp.W_in delta`."""
    pairs = yield from factor_steps(model, batch, matrices, layers)
    return {
        f"{name} {side}": factor
        for name, pair in pairs.items()
        for side, factor in zip(("x", "delta"), pair, strict=True)
    }


def factors(
    model: Transformer,
    batch: Batch,
    matrices: Sequence[LensMatrix] | None = None,
    layers: Sequence[int] | None = None,
    *,
    loss: Objective | None = None,
    everywhere: bool = False,
    whole: bool = False,
) -> GradientFactors:
    """Both factors of the gradients of these matrices in these layers, in one pass.

    The backward pass goes through the norms, their scales included, as training would. A mixture's experts have no
    factors here, its attention has. In float16, VJPs below 6e-8 are lost: prefer bfloat16. A decoder with
    cross-attention takes a batch that brings its memory (`HookedEncoderDecoder.given`); W_K and W_V there have x and
    delta at source positions.

    Args:
        batch: prompts, with answers unless `loss` is given.
        matrices: which matrices; None: all that the model has.
        layers: which layers; None: all.
        loss: from the logits at each row's last token `[b 1 v]` (everywhere: at all tokens `[b p v]`) to one number, a
            sum over rows; None = `answer_loss` of the batch. Of an encoder it is a function of all final states
            `[b p d]`, and is required.
        everywhere: whether the loss is of the logits at every token.
        whole: whether the loss is that of all tokens of the answers, each predicted after those before it; otherwise
            that of their last token.

    Raises:
        ValueError: matrices that the model does not have, no logits, packed rows, a batch without answers or memory, or
            edits of what a matrix gives.
        IndexError: a layer that does not exist.

    Example:
        >>> batch = model.text.batch(prompt).with_answers(torch.tensor([5]), None)
        >>> found = factors(model.transformer, batch, ["W_in"], [1])
        >>> found["blocks.1.mlp.W_in"][0].shape[-1] == model.cfg.d_model
        True
    """
    steps = factor_steps(model, batch, matrices, layers, loss=loss, everywhere=everywhere, whole=whole)
    return run_steps(model, steps)


def factor_steps(
    model: Transformer,
    batch: Batch,
    matrices: Sequence[LensMatrix] | None = None,
    layers: Sequence[int] | None = None,
    *,
    loss: Objective | None = None,
    everywhere: bool = False,
    whole: bool = False,
    rules: Rules = (),
) -> Steps[GradientFactors]:
    """Both factors of the gradients of these matrices, from a pass that questions about the same answers share.

    Args:
        rules: backward rules under which the model runs. Other arguments and errors as in `factors`.
    """
    layers_and_matrices = chosen(model.config, matrices, layers, logits=loss is None)
    check_differentiable(model, layers_and_matrices)
    batch = batch.to(model.device)
    metric = answer_loss(batch) if loss is None else loss
    toward = TowardLoss(
        loss_of_answers if loss is None else partial(_of_logits, loss=loss), everywhere, whole
    )
    names = {key: full_name(*key) for key in layers_and_matrices}
    input_reads = {
        name: Read(between(model.config, name)[0]) for name in names.values() if not reads_memory(name)
    }
    output_reads = {name: Read(given_at(model.config, name), grad=True) for name in names.values()}
    all_reads = list(dict.fromkeys((*input_reads.values(), *output_reads.values())))
    recording = yield from recorded(batch, all_reads, toward=toward, rules=rules)
    model, trace, pairs = recording.model, recording.trace, {}
    for (layer, matrix), name in names.items():
        # [b p h e] -> [b p (h e)]: heads side by side
        x = (
            _encoder_states(batch)
            if name not in input_reads
            else trace[input_reads[name]].to(model.device).flatten(2)
        )
        delta = trace[output_reads[name]].to(model.device).flatten(2)
        pairs[name] = x, _output_gradient(model, layer, matrix, x, delta)
    check(finite([factor for pair in pairs.values() for factor in pair]), partial(_not_finite_error, pairs))
    return GradientFactors(model, batch, pairs, metric, everywhere, whole)


def _of_logits(logits: Tensor, batch: Batch, loss: Objective) -> Float[Tensor, ""]:
    """The loss of the logits, as a function that is also given the batch and ignores it."""
    return loss(logits)


def _not_finite_error(pairs: Mapping[str, tuple[Tensor, Tensor]]) -> NotFiniteError | None:
    """The error that names the first matrix with a NaN or infinite factor; None if all factors are finite."""
    for name, pair in pairs.items():
        if not all(bool(factor.isfinite().all()) for factor in pair):
            return NotFiniteError(f"the factors of {name}'s gradient are NaN or infinite")
    return None


def _encoder_states(batch: Batch) -> Float[Tensor, "b s d"]:
    """The encoder's states that cross-attention reads."""
    assert batch.memory is not None
    return batch.memory.states.detach()


def encoder_factors(
    model: EncoderDecoder,
    source: Batch,
    target: Batch,
    matrices: Sequence[LensMatrix] | None = None,
    layers: Sequence[int] | None = None,
) -> GradientFactors:
    """Both factors of the encoder's weight gradients, for the answer's loss at the target's last token.

    The target is a batch with answers; its rows belong to those of the source. Names are those of the encoder alone
    (`blocks.0.mlp.W_in`). The unembedding does not read the encoder's stream, so there is no lens of these vectors:
    lengths, ranks and cosines can be compared, words cannot be read off.

    Raises:
        ValueError: as `factors`; another number of targets than sources.

    Example:
        >>> of = {"n_layers": 1, "d_model": 16, "n_heads": 2, "d_vocab": 30, "n_ctx": 12}
        >>> encoder, decoder = ModelConfig(**of, causal=False, unembed=False), ModelConfig(**of, cross_attention=True)
        >>> pair = EncoderDecoder(interp.model.EncoderDecoderConfig(encoder, decoder, start_token=0))
        >>> target = Batch(torch.tensor([[0, 7]])).with_answers(torch.tensor([9]), None)
        >>> found = encoder_factors(pair, Batch(torch.tensor([[5, 3, 8]])), target, ["W_V"])
        >>> found.error("blocks.0.attn.W_V") < 1e-4
        True
    """
    if len(source) != len(target):
        raise ValueError(
            f"one target per source is required, got {len(target)} targets of {len(source)} sources"
        )
    source, target = source.to(model.device), target.to(model.device)
    loss, where = answer_loss(target), target.last()[:, None]

    def of_states(states: Float[Tensor, "b s d"]) -> Float[Tensor, ""]:
        memory = Memory(states, source.keep)
        return loss(model.decoder(target.tokens, keep=target.keep, logits_at=where, memory=memory))

    return factors(model.encoder, source, matrices, layers, loss=of_states)


def answer_loss(batch: Batch) -> Objective:
    """The function from logits at the last token to the sum over rows of -log p(answer), in nats.

    With wrong answers it is the sum of log p(wrong) - log p(answer), which equals logit(wrong) - logit(answer).

    Raises:
        ValueError: a batch without answers.
    """
    if batch.answer is None:
        raise ValueError(
            "gradients are those of a loss: an answer for every prompt is required, got none; name it, or bring it "
            "with the data"
        )
    return partial(loss_of_answers, batch=batch)


def loss_of_answers(logits: Float[Tensor, "b k v"], batch: Batch) -> Float[Tensor, ""]:
    """The value of `answer_loss` for a batch with answers, summed over rows.

    Args:
        logits: where the tokens of each answer are predicted (`Batch.answer_columns`); k = 1: of its last token alone.
    """
    answer, wrong = batch.answer, batch.wrong
    assert answer is not None
    logits = upcast(logits)
    if wrong is not None:
        last = logits[:, -1]
        return (last.gather(1, wrong[:, None]) - last.gather(1, answer[:, None])).sum()
    if logits.shape[1] == 1:
        return -summed_log_probs(
            logits, answer[:, None], torch.ones_like(answer[:, None], dtype=torch.bool)
        ).sum()
    return -summed_log_probs(logits, *batch.answer_tokens()).sum()


def full_name(layer: int, matrix: LensMatrix) -> str:
    """The name of a matrix in the field's layout: `blocks.3.mlp.W_in`, `blocks.3.mlp_before.W_in`."""
    return f"blocks.{layer}.{sublayer_of(matrix)}.{matrix.rpartition('.')[2]}"


def sublayer_of(matrix: LensMatrix) -> str:
    """The sublayer of a block that a matrix belongs to: `mlp`, `attn`, `mlp_before` or `cross_attn`."""
    return matrix.rpartition(".")[0] or ("mlp" if matrix in MATRICES[:3] else "attn")


def present(config: ModelConfig, layers: Sequence[int] | None = None) -> tuple[LensMatrix, ...]:
    """The matrices that have factors in each of these layers (None: in all)."""
    return tuple(matrix for matrix in MATRICES if why_not(config, matrix, layers) is None)


def why_not(config: ModelConfig, matrix: LensMatrix, layers: Sequence[int] | None = None) -> str | None:
    """The reason why a model has no factors of a matrix in these layers (None: in all); None if it has them."""
    if config.block.why_not("matrices"):
        return config.block.unusual
    sublayer = sublayer_of(matrix)
    if sublayer == "cross_attn":
        return None if config.cross_attention else "has no cross-attention"
    if sublayer == "attn":
        for layer in range(config.n_layers) if layers is None else layers:
            mixer = config.mixers[layer]
            if matrix != "W_O" and not getattr(mixer.traits, "values" if matrix == "W_V" else "queries"):
                return f"has no {matrix} in layer {layer}, which mixes positions by {mixer}"
        return None
    if config.mlp is None:
        return "is attention-only"
    if config.mlp.no_matrices is not None:
        return f"has {config.mlp.no_matrices}"
    if sublayer not in config.mlps:
        return "has no MLP before attention"
    gated = isinstance(config.mlp, MLP) and config.mlp.gated
    return "has an MLP without a gate" if matrix.endswith("W_gate") and not gated else None


def part_of(layer: int, matrix: LensMatrix) -> Part:
    """The sublayer that a matrix belongs to."""
    return Part(sublayer_of(matrix), layer)


def check_differentiable(model: Transformer, layers_and_matrices: Sequence[tuple[int, LensMatrix]]) -> None:
    """Raise ValueError if an edit replaces the output of one of these matrices, because the gradient would end there.

    Edits that add a vector (`Add`) are allowed: they change no gradient.
    """
    for layer, matrix in layers_and_matrices:
        output = given_at(model.config, full_name(layer, matrix))
        inner = {output, *(f"blocks.{layer}.{site}" for site in _UNSEEN.get(matrix, ()))}
        acting = [edit for edit in model.edits if edit.site in inner and not isinstance(edit.change, Add)]
        if acting:
            raise ValueError(
                f"the factors of {matrix} in layer {layer} require what it gives as it gives it; the edit of "
                f"{acting[0].name} ({type(acting[0].change).__name__}) changes that"
            )


def chosen(
    config: ModelConfig,
    matrices: Sequence[LensMatrix] | None,
    layers: Sequence[int] | None,
    *,
    logits: bool = True,
) -> list[tuple[int, LensMatrix]]:
    """The layers and matrices to differentiate, checked.

    Args:
        logits: whether the model must have logits.

    Raises:
        ValueError, IndexError: as `factors`.
    """
    if logits and not config.unembed:
        raise ValueError("a backward lens requires logits; this model ends in its residual stream")
    layer_numbers = range(config.n_layers) if layers is None else layers
    if bad := [layer for layer in layer_numbers if not 0 <= layer < config.n_layers]:
        raise IndexError(f"layers are 0 to {config.n_layers - 1}, got {bad[0]}")
    if config.block.why_not("matrices"):
        raise ValueError(f"a backward lens requires known matrices; this model {config.block.unusual}")
    names = present(config, layer_numbers) if matrices is None else tuple(matrices)
    if not names or not layer_numbers:
        raise ValueError(
            f"at least one matrix and one layer are required, got matrices={names} and layers={list(layer_numbers)}"
        )
    for matrix in names:
        if matrix not in MATRICES:
            hint = nearest(matrix, MATRICES)
            raise ValueError(f"matrices are {', '.join(MATRICES)}, got {matrix!r}; {hint}")
        if reason := why_not(config, matrix, layer_numbers):
            others = ", ".join(present(config, layer_numbers))
            raise ValueError(f"no factors of {matrix}: this model {reason}; it has {others}")
    return [(layer, matrix) for layer in layer_numbers for matrix in names]


def _output_gradient(
    model: Transformer,
    layer: int,
    matrix: LensMatrix,
    x: Float[Tensor, "b p i"],
    gradient: Float[Tensor, "b p o"],
) -> Float[Tensor, "b p o"]:
    """The gradient at x W itself, before the norm and the factor that some families apply to a sublayer's output."""
    if matrix not in WRITERS:
        return gradient
    norm = output_norm(model, layer, f"{sublayer_of(matrix)}_out")
    gradient = gradient if norm.factor == 1 else gradient * norm.factor
    if norm.norm is None:
        return gradient
    weights = Weights(model).layer(layer)
    if matrix == "W_out":
        assert weights.W_out is not None and weights.b_out is not None
        output = x @ weights.W_out + weights.b_out
    else:
        output = x @ weights.W_O.flatten(0, 1) + weights.b_O
    return norm.norm.gradient(upcast(gradient), upcast(output)).to(gradient.dtype)
