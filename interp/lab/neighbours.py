"""A memory outside the weights: next-token probabilities of a model, mixed with those of the nearest stored contexts.

Khandelwal et al. 2020, "Generalization through Memorization: Nearest Neighbor Language Models" (kNN-LM), section 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.core.boundary import public
from interp.core.kinds import Positive, PositiveCount, Probability
from interp.core.stats import upcast
from interp.model.transformer import Transformer

AT_ONCE = 1 << 24
"""The most distances in memory at once."""


@public()
@dataclass(frozen=True, eq=False, repr=False)
class Datastore:
    """Contexts of a corpus, each by the final state of a model, with the token that came next.

    Args:
        keys: the states, one row each.
        following: the token after each.

    Raises:
        ValueError: no key, another number of tokens than of keys, keys that are not finite, or negative tokens.

    Source:
        Khandelwal et al. 2020, section 2. They found the input of the last MLP, after its norm, slightly better keys
        than the state after the last block, which is used here.

    Example:
        >>> store = interp.lab.Datastore.of(model.transformer, torch.tensor([[1, 2, 3], [4, 5, 6]]))
        >>> len(store)
        4
    """

    keys: Float[Tensor, "n d"]
    following: Int[Tensor, "n"]

    def __post_init__(self) -> None:
        if not len(self.keys) or len(self.keys) != len(self.following):
            raise ValueError(
                f"Datastore requires keys, and in `following` the token after each, got {len(self.keys)} keys and "
                f"{len(self.following)} tokens"
            )
        if not bool(self.keys.isfinite().all()) or int(self.following.min()) < 0:
            raise ValueError("Datastore requires finite keys and tokens of 0 or more")

    def __len__(self) -> int:
        return len(self.keys)

    def __repr__(self) -> str:
        return f"Datastore({len(self)} contexts, {self.keys.shape[-1]} wide)"

    @classmethod
    @public()
    @torch.no_grad()
    def of(
        cls, model: Transformer, tokens: Int[Tensor, "b p"], *, keep: Bool[Tensor, "b p"] | None = None
    ) -> Datastore:
        """The contexts of some rows: every token that another one follows.

        Args:
            model: the network; it need not be the one that is asked later, but its states must mean the same.
            tokens: [b, p], ids.
            keep: [b, p], True at real tokens; None: no padding.

        Returns:
            As many keys as tokens are predicted, on the model's device.

        Raises:
            ValueError: rows in which nothing is predicted.
        """
        states = model(tokens, stop=model.config.n_layers, keep=keep)[:, :-1]
        following = tokens.to(states.device)[:, 1:]
        real = torch.ones_like(following, dtype=torch.bool)
        if keep is not None:
            kept = keep.to(states.device)
            real = kept[:, :-1] & kept[:, 1:]
        return cls(states[real], following[real])

    @public()
    def log_probs(
        self,
        states: Float[Tensor, "b p d"],
        d_vocab: PositiveCount,
        *,
        k: PositiveCount = 8,
        temperature: Positive = 1.0,
    ) -> Float[Tensor, "b p v"]:
        """Log-probabilities of what follows the nearest stored contexts, the nearer the more.

        A neighbour weighs exp(-d / temperature), d its squared Euclidean distance (equation 2), over the sum of the
        `k` nearest. The search is exact. Gradients pass the weights, not the choice of neighbours.

        Args:
            states: [b, p, d], final states of the contexts that are asked about.
            d_vocab: number of tokens.
            k: number of neighbours; all, where there are fewer.
            temperature: in squared units of the stream; the paper's formula has 1.

        Returns:
            [b, p, v], -inf for tokens that follow none of the neighbours.

        Raises:
            ValueError: states of another width than the keys, or a stored token outside the vocabulary.
        """
        if states.shape[-1] != self.keys.shape[-1]:
            raise ValueError(f"states {self.keys.shape[-1]} wide are required, got {states.shape[-1]}")
        if (highest := int(self.following.max())) >= d_vocab:
            raise ValueError(f"stored tokens below d_vocab = {d_vocab} are required, got {highest}")
        keys = upcast(self.keys)
        asked = states.to(keys).flatten(0, 1)
        run, count = max(1, AT_ONCE // len(keys)), min(k, len(keys))
        near = [
            # by differences: products would cancel where all states have a large part in common
            torch.cdist(part.detach(), keys, compute_mode="donot_use_mm_for_euclid_dist")
            .topk(count, -1, largest=False)
            .indices
            for part in asked.split(run)
        ]
        nearest = torch.cat(near) if near else torch.zeros(0, count, dtype=torch.int64, device=keys.device)
        distances = (asked[:, None] - keys[nearest]).square().sum(-1)  # [n d] [n k d] -> [n k]
        shares = (-distances / temperature).softmax(-1)
        found = shares.new_zeros(len(asked), d_vocab).scatter_add(1, self.following[nearest], shares)
        return found.log().unflatten(0, states.shape[:2])

    @public()
    def interpolated(
        self,
        model: Transformer,
        tokens: Int[Tensor, "b p"],
        *,
        share: Probability = 0.25,
        k: PositiveCount = 8,
        temperature: Positive = 1.0,
        keep: Bool[Tensor, "b p"] | None = None,
    ) -> Float[Tensor, "b p v"]:
        """Log-probabilities of share p_neighbours + (1 - share) p_model (Khandelwal et al. 2020, equation 3).

        Args:
            model: a network with logits for every token.
            tokens: [b, p], ids.
            share: the neighbours' share of the probability.
            k: number of neighbours.
            temperature: see `log_probs`.
            keep: [b, p], True at real tokens; None: no padding.

        Returns:
            [b, p, v], which sum to 1 as probabilities; -inf with share = 1 for tokens that follow no neighbour.

        Raises:
            ValueError: a model without logits of its tokens, or one that the store does not fit.
        """
        config = model.config
        if not config.unembed or config.n_outputs != config.d_vocab:
            raise ValueError("a model with a logit for every token is required")
        states = model(tokens, stop=config.n_layers, keep=keep)
        own = upcast(model.read_out(states)).log_softmax(-1)
        near = self.log_probs(states, config.d_vocab, k=k, temperature=temperature).to(own)
        shares = torch.tensor([share, 1 - share], dtype=own.dtype, device=own.device).log()
        return torch.logaddexp(near + shares[0], own + shares[1])
