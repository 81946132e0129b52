"""Editors: how to make a model answer a prompt with another token by changing one matrix. Each returns a `WeightEdit`.

The forward-only shift, one gradient step and plain fine-tuning; rank-one ROME is in `rome.py`, and `edit_table` in
`edit_scores.py` says what an edit is worth. All take one prompt or several (with an answer each), and measure the
answer at the last token of each; of an answer of several tokens each token after those before it. Katz et al. 2024,
"Backward Lens" (arXiv:2402.12865), sections 5 and 6.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from interp.core.boundary import public
from interp.core.factored import FactoredMatrix
from interp.core.kinds import Positive, PositiveCount
from interp.core.stats import upcast
from interp.data.answers import AnswerTokens
from interp.data.batch import Answers, Batch, Prompts
from interp.data.ids import check_count
from interp.editing.weight_edit import WeightEdit, changed, own_matrix_place
from interp.lenses.factors import factors, loss_of_answers
from interp.model.tap import Read
from interp.model.transformer import Transformer
from interp.model.weights import Weights
from interp.passes.observe import Model, Subject, as_model, observe
from interp.passes.question import check_followed
from interp.weights.matrices import by_head

FactorPair = tuple[Float[Tensor, "_ _"], Float[Tensor, "_ _"]]
"""u `[n i]` and delta `[n o]` of one matrix at n tokens; the widths are those of the matrix."""


@public()
def shift_edit(
    model: Model, data: Prompts, *, answer: Answers, layer: int, eta: float, prepend_bos: bool | None = None
) -> WeightEdit:
    """Forward-only edit of an MLP's W_out towards an answer: W' = W + eta x_n^T u_t, without a gradient.

    x_n: the post-activation at the last prompt token; u_t: column t of W_U (in tied models the embedding of t).
    Identity: (x_n W' - x_n W) u_t = eta |x_n|^2 |u_t|^2. Of an answer of several tokens the changes of all of them are
    added up, each with the x of the token before it. Where the family norms what the MLP adds (Gemma-2, OLMo-2), the
    shift is of the output before that norm.

    Args:
        data: one prompt or several.
        answer: the token t to make likely, one for all prompts or one for each.
        layer: whose MLP is changed.
        eta: size of the shift; > 0 here absorbs the sign of the gradient.
        prepend_bos: whether texts begin with BOS; None: as the model does by default.

    Returns:
        WeightEdit of `blocks.<layer>.mlp.W_out`. Rank = number of prompts whose argmax is not the answer already; for
        the others it is a no-op, as in the paper.

    Raises:
        ValueError: a model without one MLP matrix per layer, that is not a causal decoder or has no logits, an answer
            of several tokens, eta <= 0.
        IndexError: a layer that does not exist.

    Source:
        Katz et al. 2024 (arXiv:2402.12865), section 6, the "forward pass shift".

    See Also:
        `gradient_edit`: the gradient step that it approximates. `edit_table`: what an edit is worth.

    Example:
        >>> edit = shift_edit(model, prompt, answer=" John", layer=1, eta=0.1)
        >>> with edit.applied(model):
        ...     answer = model.generate(prompt, 1)
    """
    if not eta > 0:
        raise ValueError(f"eta > 0 is required, which moves W_out towards the answer, got {eta}")
    subject = as_model(model)
    network, batch = subject.transformer, edit_batch(subject, data, answer, prepend_bos=prepend_bos)
    name = f"blocks.{layer}.mlp.W_out"
    own_matrix_place(network, name)
    columns, (tokens, _) = batch.answer_columns(), batch.answer_tokens()
    read = Read(f"blocks.{layer}.mlp.hook_post")
    run = observe(network, batch, [read], logits_at=columns)
    row, place = (~batch.is_answer(run.output.argmax(-1))).nonzero().unbind(1)
    keys = upcast(run.trace[read][row, columns[row, place]])
    directions = upcast(Weights(network).W_U[:, tokens[row, place]])
    return WeightEdit(name, FactoredMatrix(keys.mT, eta * directions.mT))


@public()
def gradient_edit(
    model: Model,
    data: Prompts,
    *,
    answer: Answers,
    layer: int,
    eta: float,
    matrix: str = "mlp.W_out",
    prepend_bos: bool | None = None,
) -> WeightEdit:
    """One step of gradient descent on one matrix towards an answer, as thin factors: W' = W - eta sum_i x_i^T delta_i.

    x_i: what the matrix reads at token i; delta_i: the gradient of the loss at what it writes there. Loss: the negative
    log-likelihood of the answer at the last token, summed over prompts. No weight gradient is formed.

    Args:
        data: one prompt or several.
        answer: what to make likely, of one or several tokens, one for all prompts or one for each.
        layer: whose matrix is changed.
        eta: size of the step, > 0.
        matrix: which matrix of the block: "mlp.W_out", "mlp.W_in", "attn.W_V", ...
        prepend_bos: whether texts begin with BOS; None: as the model does by default.

    Returns:
        WeightEdit, of a rank of at most the number of tokens.

    Raises:
        ValueError: as `shift_edit`.
        IndexError: a layer that does not exist.

    Source:
        Katz et al. 2024 (arXiv:2402.12865), equation 6 in the row convention.

    See Also:
        `finetune_edit`: many steps. `interp.lenses.backward_lens`: the step as tokens.

    Example:
        >>> gradient_edit(model, prompt, answer=" John", layer=1, eta=0.1).rank == model.to_tokens(prompt).shape[1]
        True
    """
    if not eta > 0:
        raise ValueError(f"eta > 0 is required, the size of a step down the loss, got {eta}")
    subject = as_model(model)
    network, batch = subject.transformer, edit_batch(subject, data, answer, prepend_bos=prepend_bos)
    name = f"blocks.{layer}.{matrix}"
    weight = own_matrix_place(network, name).in_(network)
    x, delta = factors_of(network, batch, [name])[name]
    return WeightEdit(name, by_head(x.mT, -eta * delta, name, len(weight) if weight.ndim == 3 else None))


@public()
@dataclass(frozen=True)
class FineTuning:
    """Steps, learning rate and optimiser of a training.

    Raises:
        ValueError: fewer than one step, or a rate that is not above 0 and finite.
    """

    steps: PositiveCount = 25
    """Number of steps. `finetune_edit` ends earlier once every prompt gets its answer; other trainings take all."""
    rate: Positive = 1e-3
    """Learning rate."""
    optimiser: Literal["adam", "sgd"] = "adam"
    """Adam with PyTorch's defaults, or plain gradient descent."""

    def optimiser_of(self, leaves: Iterable[Tensor]) -> torch.optim.Optimizer:
        """The optimiser of these leaves."""
        kinds = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}
        return kinds[self.optimiser](leaves, lr=self.rate)


@public()
@torch.enable_grad()
def finetune_edit(
    model: Model,
    data: Prompts,
    *,
    answer: Answers,
    layer: int,
    matrix: str = "mlp.W_out",
    tuning: FineTuning | None = None,
    prepend_bos: bool | None = None,
) -> WeightEdit:
    """Fine-tune one matrix of a block, all else frozen, until the answer is the argmax.

    Loss as in `gradient_edit`. Works in every family; the model's parameters are never written (the change is kept
    apart from them, in float32 at least).

    Args:
        data: one prompt or several.
        answer: what to make the argmax, of one or several tokens, one for all prompts or one for each.
        layer: whose matrix is changed.
        matrix: which matrix of the block: "mlp.W_out", "mlp.W_in", "attn.W_V", ...
        tuning: steps, learning rate and optimiser; None: 25 steps of Adam at 1e-3.
        prepend_bos: whether texts begin with BOS; None: as the model does by default.

    Returns:
        WeightEdit with a dense change; zero where the answer is the argmax already.

    Raises:
        ValueError: as `shift_edit`.
        IndexError: a layer that does not exist.

    Caveat:
        It stops at the step limit whether or not the answer is reached.

    Source:
        Katz et al. 2024 (arXiv:2402.12865), the "fine-tune MLP l" rows.

    See Also:
        `gradient_edit`: one step, of low rank. `rome_edit`: a rank-one change that disturbs other keys least.

    Example:
        >>> edit = finetune_edit(model, prompt, answer=" John", layer=0, matrix="attn.W_V")
    """
    subject = as_model(model)
    network, batch = subject.transformer, edit_batch(subject, data, answer, prepend_bos=prepend_bos)
    name, tuning = f"blocks.{layer}.{matrix}", tuning or FineTuning()
    change = torch.zeros_like(
        upcast(own_matrix_place(network, name).in_(network).detach()), requires_grad=True
    )
    optimiser = tuning.optimiser_of([change])
    begin, columns = entering(network, batch, layer), batch.answer_columns()
    for _ in range(tuning.steps):
        edited = network.with_parameters(changed(network, {name: change}))
        logits = edited(begin, start=layer, logits_at=columns, **batch.inputs)
        if bool(batch.is_answer(logits.argmax(-1)).all()):
            break
        change.grad = torch.autograd.grad(loss_of_answers(logits, batch), change)[0]
        optimiser.step()
    return WeightEdit(name, change.detach())


def edit_batch(
    model: Subject,
    data: Prompts,
    answer: Answers,
    *,
    others: Sequence[str] = (),
    prepend_bos: bool | None = None,
) -> Batch:
    """The prompts as a batch on the model's device, with their answers, of one or several tokens.

    Args:
        others: further prompts, texts as the first ones, which are read at their last token: no answer follows them.

    Raises:
        ValueError: a model whose last position does not predict a next token, and an answer that has tokens outside
            the vocabulary.
    """
    config = model.transformer.config
    problem = {
        "is not causal": not config.causal,
        "attends to the memory of an encoder": config.cross_attention,
        "has no logits": not config.unembed,
    }
    if reasons := [what for what, is_so in problem.items() if is_so]:
        raise ValueError(f"editing requires a causal decoder with an unembedding; this model {reasons[0]}")
    if others:
        assert isinstance(data, Sequence)
        data = [*map(str, data), *others]
    batch = model.text.batch(data, prepend_bos=prepend_bos)
    answers = AnswerTokens.of(model.text, answer, several=True)
    assert answers is not None
    count = len(batch) - len(others)
    check_count(answers.prompts, count)
    batch = answers.before_others(count, len(others)).on(batch)
    if batch.forced is not None:
        check_followed(config, batch)
    return batch.to(model.transformer.device)


def factors_of(model: Transformer, batch: Batch, names: Sequence[str]) -> dict[str, FactorPair]:
    """Inputs u [n, i] and output gradients delta [n, o] of matrices at all real tokens; a pass per kind of matrix.

    The gradient is that of -log p(answer), the sum over the tokens of the answer, summed over prompts.
    """
    layers: dict[str, list[int]] = {}
    for name in names:
        _, layer, module, matrix = name.split(".")
        kind = matrix if module in ("mlp", "attn") else f"{module}.{matrix}"
        layers.setdefault(kind, []).append(int(layer))
    pairs: dict[str, FactorPair] = {}
    for kind, indices in layers.items():
        by_matrix = factors(model, batch, [kind], indices, whole=True)  # type: ignore[list-item]  # `own_matrix_place` has seen it
        pairs |= {
            name: (upcast(x[batch.real]), upcast(delta[batch.real])) for name, (x, delta) in by_matrix.items()
        }
    return pairs


def entering(model: Transformer, batch: Batch, layer: int) -> Tensor:
    """The input of a pass from this layer on: its residual stream, or the tokens at layer 0."""
    if layer == 0:
        return batch.tokens
    with torch.no_grad():
        return model(batch.tokens, stop=layer, **batch.inputs)
