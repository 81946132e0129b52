"""Two passes: the first one says what kind of prompt it is, the second answers with the vector z of that kind.

Sun et al. 2025, Transformer^2, section 3.2: the kind is asked of the unchanged model (method A), or of the model under
a z that was trained to answer that question (method B). The vectors z are trained by REINFORCE (equation 1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.boundary import public
from interp.core.kinds import Count
from interp.core.memory import check_memory
from interp.core.stats import upcast
from interp.core.viewer import Brief
from interp.core.wording import nearest
from interp.data.batch import Batch, Prompts
from interp.editing.editors import FineTuning
from interp.editing.singular_values import SingularValues
from interp.editing.weight_edit import changed
from interp.model.transformer import Transformer
from interp.passes.generate import generate
from interp.passes.observe import Model, as_model, as_network
from interp.passes.question import NotFiniteError
from interp.passes.sampling import Sampling

Vectors = Mapping[str, Float[Tensor, "r"]]
"""One z for each of some matrices, by the matrix' name."""
Reward = Callable[[Int[Tensor, "b n"]], Float[Tensor, "b"]]
"""A function from the new tokens [b, n] of all samples to one reward each; a prompt's samples are adjacent rows."""


@public()
def adapted(model: Model, vectors: Vectors, *, rescale: bool = False) -> Transformer:
    """A model with the singular values of some matrices scaled by z, all else shared, for any analysis.

    Args:
        vectors: z [r] by the name of the matrix, as `train_z` gives them.
        rescale: whether z is rescaled so that the sum of the singular values stays.

    Returns:
        Another `Transformer`; the given model is not changed.

    Raises:
        ValueError: as `SingularValues.of` and `SingularValues.factor`.

    Source:
        Sun et al. 2025, Transformer^2.

    See Also:
        `SingularValues.edit`: the same change, put into the model and taken back.

    Example:
        >>> z = {"blocks.0.mlp.W_out": torch.zeros(24)}
        >>> bool(adapted(model, z).block(0).mlp.out.weight.abs().max() < 1e-5)
        True
    """
    network = as_network(model)
    changes = {
        name: SingularValues.of(network, name).change(z, rescale=rescale).AB for name, z in vectors.items()
    }
    return network.with_parameters(changed(network, changes))


@public()
@dataclass(frozen=True, eq=False, repr=False)
class Dispatch(Brief):
    """How the first pass decides: by the label that is most probable after the prompt and a question.

    With `z` the question is asked of the model under z, a classifier that `train_z` trains on the prompts of
    `with_question`; without it, of the unchanged model.

    Raises:
        ValueError: no labels.
    """

    question: str | tuple[int, ...]
    """The text or token ids that follow the prompt."""
    labels: Mapping[str, str | int]
    """The label of each kind of prompt, one token."""
    z: Vectors | None = None
    rescale: bool = False

    def __post_init__(self) -> None:
        if not self.labels:
            raise ValueError("a dispatch requires a label for each kind of prompt, got none")

    @public()
    def with_question(self, model: Model, prompts: Prompts, *, prepend_bos: bool | None = None) -> Batch:
        """The prompts, padded on the left, each followed by the question.

        Args:
            model: whose tokenizer is used.
            prompts: texts, token ids or a batch.
            prepend_bos: whether texts begin with BOS; None: as the model does by default.

        Example:
            >>> dispatch = Dispatch((1, 2), {"even": 5, "odd": 6})
            >>> dispatch.with_question(model, torch.tensor([[7, 8]]), prepend_bos=False).tokens
            tensor([[7, 8, 1, 2]])
        """
        text = as_model(model).text
        batch = text.batch(prompts, prepend_bos=prepend_bos, side="left")
        question = self.question if isinstance(self.question, tuple) else text.tokenizer.encode(self.question)
        added = torch.tensor(list(question), dtype=torch.long).expand(len(batch), -1)
        tokens = torch.cat((batch.tokens, added.to(batch.tokens)), 1)
        keep = (
            None
            if batch.keep is None
            else torch.cat((batch.keep, torch.ones_like(added, dtype=torch.bool)), 1)
        )
        return Batch(tokens, keep, batch.bos)

    @public()
    def label_ids(self, model: Model) -> Int[Tensor, "t"]:
        """The token of every label. ValueError for a label that is no single token of the model."""
        text, n = as_model(model).text, as_network(model).config.d_vocab
        ids = [text.single(label) if isinstance(label, str) else label for label in self.labels.values()]
        if wrong := [i for i in ids if not 0 <= i < n]:
            raise ValueError(f"labels must be tokens from 0 to {n - 1}, got {wrong[0]}")
        return torch.tensor(ids)

    @public()
    def probabilities(
        self, model: Model, prompts: Prompts, *, prepend_bos: bool | None = None
    ) -> Float[Tensor, "b t"]:
        """The share of each label in the probability of all labels, after each prompt and the question.

        Args:
            model: the model that answers, under `z` if there is one.
            prompts: texts, token ids or a batch.
            prepend_bos: whether texts begin with BOS; None: as the model does by default.

        Returns:
            [b t], in the order of the labels; each row sums to 1.
        """
        network = as_network(model) if self.z is None else adapted(model, self.z, rescale=self.rescale)
        logits = _last_logits(network, self.with_question(model, prompts, prepend_bos=prepend_bos))
        return upcast(logits[:, self.label_ids(model).to(logits.device)]).softmax(-1)


@dataclass(frozen=True, eq=False, repr=False)
class TwoPasses(Brief):
    """Result of `two_passes`: the kind of each prompt, and the logits under that kind's vectors."""

    kinds: tuple[str, ...]
    """The kind of each prompt, by the first pass."""
    probabilities: Float[Tensor, "b t"]
    """Probability of every kind from the first pass, in the order of the labels."""
    logits: Float[Tensor, "b v"]
    """Logits at the last token of each prompt, from the second pass."""


@public()
def two_passes(
    model: Model,
    prompts: Prompts,
    vectors: Mapping[str, Vectors],
    dispatch: Dispatch,
    *,
    rescale: bool = False,
    prepend_bos: bool | None = None,
) -> TwoPasses:
    """Answer each prompt under the vectors z of its kind, which a first pass of the model decides.

    A kind that has a label but no vectors is answered by the model as it is (the paper's "others"). The prompts of a
    kind make one pass.

    Args:
        prompts: texts, token ids or a batch.
        vectors: by kind, z [r] by the name of the matrix.
        dispatch: the question and the label of each kind.
        rescale: whether z is rescaled so that the sum of the singular values stays.
        prepend_bos: whether texts begin with BOS; None: as the model does by default.

    Returns:
        TwoPasses: the kind of each prompt, the probabilities of the kinds [b t], and the logits [b v] at the last
            token.

    Raises:
        ValueError: vectors of a kind without a label; as `adapted` and `Dispatch`.

    Source:
        Sun et al. 2025, Transformer^2, section 3.2.

    See Also:
        `train_z`: trains the vectors. `interpolated`: mixes several into one.

    Example:
        >>> dispatch = Dispatch((1,), {"a": 5, "b": 6})
        >>> found = two_passes(model, torch.tensor([[7, 8], [9, 3]]), {}, dispatch)
        >>> found.logits.shape[0], set(found.kinds) <= {"a", "b"}
        (2, True)
    """
    if unknown := [kind for kind in vectors if kind not in dispatch.labels]:
        raise ValueError(f"vectors of {unknown[0]!r} have no label; {nearest(unknown[0], dispatch.labels)}")
    probabilities = dispatch.probabilities(model, prompts, prepend_bos=prepend_bos)
    names = list(dispatch.labels)
    kinds = tuple(names[i] for i in probabilities.argmax(-1).tolist())
    subject = as_model(model)
    batch = subject.text.batch(prompts, prepend_bos=prepend_bos, side="left").to(subject.transformer.device)
    rows: list[Float[Tensor, "v"] | None] = [None] * len(kinds)
    for kind in dict.fromkeys(kinds):
        members = [i for i, prompt_kind in enumerate(kinds) if prompt_kind == kind]
        index = torch.tensor(members, device=batch.tokens.device)
        network = adapted(model, vectors[kind], rescale=rescale) if kind in vectors else subject.transformer
        for i, row in zip(index.tolist(), _last_logits(network, batch.rows(index)), strict=True):
            rows[i] = row
    return TwoPasses(kinds, probabilities, torch.stack([row for row in rows if row is not None]))


@torch.no_grad()
def _last_logits(network: Transformer, batch: Batch) -> Float[Tensor, "b v"]:
    """Logits at the last column of prompts that are padded on the left; NotFiniteError, a ValueError, for NaN."""
    batch = batch.to(network.device).left_aligned()
    last = torch.full((len(batch), 1), batch.tokens.shape[1] - 1, device=network.device)
    logits = network(batch.tokens, logits_at=last, **batch.inputs)[:, 0]
    if not bool(logits.amax(-1).isfinite().all()):
        raise NotFiniteError("two passes require finite logits, the model's are NaN or infinite")
    return logits


@public()
@torch.enable_grad()
def reinforce_z(
    model: Model,
    data: Prompts,
    reward: Reward,
    names: Sequence[str],
    *,
    new_tokens: Count = 1,
    samples: Count = 8,
    kl: float = 0.0,
    rescale: bool = False,
    tuning: FineTuning | None = None,
    seed: int = 0,
    prepend_bos: bool | None = None,
) -> tuple[dict[str, Float[Tensor, "r"]], list[float]]:
    """Train one vector z per matrix, which scales its singular values, by REINFORCE on a reward of generated tokens.

    Ascends E[r(y) log p_z(y | x)] - kl KL(p_z || p): at every step each prompt is continued `samples` times with
    `new_tokens` tokens drawn from the model under the present z, and the reward of a sample weighs the gradient of its
    log-probability. The KL term is exact at every drawn position, over all tokens, in nats per token. Unlike `train_z`
    this needs no gradient of the reward, which may be right or wrong (1 or -1); its gradient is noisy, its mean is that
    of the expected reward. Differs from the paper: z itself is trained, as in `train_z`.

    Args:
        data: prompts, all in one pass.
        reward: function from the new tokens [b n] of every sample to a number each; the samples of a prompt are
            adjacent, prompts in order.
        names: the matrices, as `WeightEdit` names them.
        new_tokens: how many tokens are drawn per sample.
        samples: how many samples per prompt and step.
        kl: weight of the KL from the model as it is.
        rescale: whether z is rescaled so that the sum of the singular values stays.
        tuning: steps, learning rate and optimiser; None: 25 steps of Adam at 1e-3. Every step is taken.
        seed: of the samples.
        prepend_bos: whether texts begin with BOS; None: as the model does by default.

    Returns:
        z [r] by the name of the matrix, from z = 1, and the mean reward of every step.

    Raises:
        ValueError: as `train_z`; less than one sample or token, more than fit into the free memory, a negative kl,
            and rewards that are not one finite number per sample.

    Source:
        Sun et al. 2025, Transformer^2, equation 1; Williams 1992.

    See Also:
        `train_z`: from a loss with a gradient.

    Example:
        >>> def says_five(new):
        ...     return (new[:, 0] == 5).double()
        >>> z, rewards = reinforce_z(model, torch.tensor([[3, 4]]), says_five, ["blocks.0.mlp.W_out"], samples=4)
        >>> len(rewards)
        25
    """
    if not names or len(set(names)) != len(names):
        raise ValueError(f"names must be those of distinct matrices, got {list(names)}")
    if samples < 1 or new_tokens < 1 or not 0 <= kl < float("inf"):
        raise ValueError(
            f"samples >= 1, new_tokens >= 1, kl >= 0 are required, got {samples}, {new_tokens}, {kl}"
        )
    subject, tuning = as_model(model), tuning or FineTuning()
    network = subject.transformer
    network.config.require_next_token("REINFORCE")
    prompts = subject.text.batch(data, prepend_bos=prepend_bos, side="left").to(network.device).left_aligned()
    count, width = len(prompts) * samples, prompts.tokens.shape[1] + new_tokens
    check_memory(
        f"{count} samples (samples={samples} of each prompt) of {width} tokens",
        3 * count * width * network.config.d_vocab * network.dtype.itemsize,  # logits of both models, and their slopes
        network.device, "fewer samples and more steps take less",
    )  # fmt: skip
    rows = prompts.rows(torch.arange(len(prompts), device=network.device).repeat_interleave(samples))
    parts = {name: SingularValues.of(network, name) for name in names}
    z = {name: torch.ones_like(matrix.sigma).requires_grad_() for name, matrix in parts.items()}
    optimiser, mean_rewards = tuning.optimiser_of(z.values()), []
    for step in range(tuning.steps):
        changes = {name: matrix.change(z[name], rescale=rescale).AB for name, matrix in parts.items()}
        policy = network.with_parameters(changed(network, changes))
        drawn = generate(policy, rows, new_tokens, sampling=Sampling(seed=seed + step))
        rewards = _checked_rewards(reward(drawn.tokens[:, -new_tokens:]), len(rows))
        with torch.no_grad():
            base = network(drawn.tokens, **drawn.inputs)
        logits = policy(drawn.tokens, **drawn.inputs)
        loss = policy_loss(logits, base, drawn.tokens, rewards.to(logits), new_tokens, kl).mean()
        for leaf, slope in zip(z.values(), torch.autograd.grad(loss, list(z.values())), strict=True):
            leaf.grad = slope
        optimiser.step()
        mean_rewards.append(float(rewards.double().mean()))
    return {name: leaf.detach() for name, leaf in z.items()}, mean_rewards


def policy_loss(
    logits: Float[Tensor, "b p v"],
    base: Float[Tensor, "b p v"],
    tokens: Int[Tensor, "b p"],
    reward: Float[Tensor, "b"],
    new_tokens: int,
    kl: float,
) -> Float[Tensor, "b"]:
    """REINFORCE loss of each sample, -r log p(y) + kl KL(p || base), over its last `new_tokens` tokens.

    Over samples y of p the mean of its gradient is that of -E[r] + kl KL at the positions that were drawn.

    Args:
        logits: [b p v], of the policy.
        base: [b p v], of the model as it is.
        tokens: [b p], prompts and samples.
        reward: [b].
        new_tokens: how many of the last tokens were drawn.
        kl: weight of the KL, which is per token.

    Returns:
        [b], in float32 at least.
    """
    policy_logp, base_logp = (upcast(x[:, -new_tokens - 1 : -1]).log_softmax(-1) for x in (logits, base))
    log_probs = policy_logp.gather(-1, tokens[:, -new_tokens:, None])[..., 0].sum(1)
    divergence = (policy_logp.exp() * (policy_logp - base_logp)).sum(-1).mean(1)
    return -reward * log_probs + kl * divergence


def _checked_rewards(rewards: Float[Tensor, "*n"], rows: int) -> Float[Tensor, "b"]:
    if not isinstance(rewards, Tensor) or rewards.shape != (rows,) or not bool(rewards.isfinite().all()):
        raise ValueError(f"a reward must be one finite number for each of {rows} samples, got {rewards}")
    return rewards
