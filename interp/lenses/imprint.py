"""Effects of one step along a weight gradient on the tokens that it came from, in closed form.

W <- W + eta sum_i x_i^T delta_i, with eta < 0 for descent (Katz et al. 2024, "Backward Lens", sections 5 and 6). Each
function speaks of the outer product of one token, x^T delta, and of the matrix run again on the same x.
"""

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.axes import shape_text
from interp.core.boundary import public
from interp.core.kinds import Finite
from interp.core.stats import upcast
from interp.model.weights import Weights
from interp.passes.observe import Model, as_model
from interp.residual.decomposition import not_linear


@public()
def imprint(x: Float[Tensor, "*b i"], delta: Float[Tensor, "*b o"], eta: Finite) -> Float[Tensor, "*b o"]:
    """Change of a matrix' output x W after one step along x^T delta: eta ||x||^2 delta.

    Of W_in: pre-activation j moves by eta ||x||^2 delta[j]; for eta < 0 neurons with delta[j] > 0 answer x less, the
    others more: x is printed into them. Of W_out: the whole shift of the output, along -delta.

    Args:
        x: [*b i], what the matrix reads at a token.
        delta: [*b o], the gradient at what it gives there.
        eta: learning rate, negative for descent.

    Returns:
        [*b o], in float32 at least.

    Raises:
        ValueError: x and delta of other tokens, or numbers that are not finite.

    Source:
        Katz et al. 2024, "Backward Lens", sections 5 and 6.

    See Also:
        `shift`: the same change, neuron by neuron.

    Example:
        >>> imprint(torch.tensor([3.0, 4.0]), torch.tensor([1.0]), -0.1)
        tensor([-2.5000])
    """
    x, delta = _of_one_step(x, delta)
    return eta * x.square().sum(-1, keepdim=True) * delta


@public()
def shift(x: Float[Tensor, "*b i"], delta: Float[Tensor, "*b o"], eta: Finite) -> Float[Tensor, "*b i o"]:
    """Change of each neuron's part of an MLP's output after one step: eta x[j]^2 delta, which sums to `imprint`.

    For eta < 0 every neuron shifts the output along -delta, whatever the sign of its activation.

    Args:
        x: [*b i], what W_out reads at a token, one number per neuron.
        delta: [*b o], the gradient at what it gives there.
        eta: learning rate, negative for descent.

    Returns:
        [*b i o], in float32 at least. One vector per neuron: use single tokens in large models.

    Raises:
        ValueError: as `imprint`.

    Source:
        Katz et al. 2024, "Backward Lens", sections 5 and 6.

    Example:
        >>> shift(torch.tensor([-2.0, 1.0]), torch.tensor([1.0]), -0.5).flatten().tolist()
        [-2.0, -0.5]
    """
    x, delta = _of_one_step(x, delta)
    return eta * einsum(x.square(), delta, "... i, ... o -> ... i o")


def _of_one_step(
    x: Float[Tensor, "*b i"], delta: Float[Tensor, "*b o"]
) -> tuple[Float[Tensor, "*b i"], Float[Tensor, "*b o"]]:
    """Both in float32 at least. ValueError for x and delta of other tokens, or not finite."""
    if not x.ndim or not delta.ndim or x.shape[:-1] != delta.shape[:-1]:
        raise ValueError(
            "x and delta must be of the same tokens, [*b i] and [*b o], got "
            f"{shape_text(x.shape)} and {shape_text(delta.shape)}"
        )
    for name, value in {"x": x, "delta": delta}.items():
        if not bool(value.isfinite().all()):
            raise ValueError(f"{name} must have finite numbers, got NaN or infinite ones")
    return upcast(x), upcast(delta)


def logit_vjp(logits: Float[Tensor, "*b v"], answer: Int[Tensor, "*b"]) -> Float[Tensor, "*b v"]:
    """Gradient of -log p(answer) at the logits: p_k - 1[k = answer]; sums to 0, negative at the answer only.

    Args:
        logits: [*b v].
        answer: [*b], the ids of the answers.

    Returns:
        [*b v], in float32 at least.

    Example:
        >>> logit_vjp(torch.zeros(4), torch.tensor(2)).tolist()
        [0.25, 0.25, -0.75, 0.25]
    """
    probabilities = upcast(logits).softmax(-1)
    return probabilities - torch.nn.functional.one_hot(answer, logits.shape[-1])


def top_vjp(model: Model, logits: Float[Tensor, "*b v"], answer: Int[Tensor, "*b"]) -> Float[Tensor, "*b d"]:
    """Gradient of -log p(answer) at the output of the final norm: sum_k (p_k - 1[k = answer]) u_k.

    u_k is column k of W_U; every column has a positive weight except that of the answer. The gradient includes the
    model's factor on the logits and the slope 1 - (logit / cap)^2 of a soft cap.

    Args:
        logits: [*b v], of the model.
        answer: [*b], the ids of the answers.

    Returns:
        [*b d], in float32 at least.

    Raises:
        ValueError: a model whose logits are not linear in the normed stream, or edited after its last block.

    Source:
        Katz et al. 2024, "Backward Lens", Lemma 5.1.
    """
    network = as_model(model).transformer
    if what := not_linear(network.config):
        raise ValueError(
            f"the top VJP requires logits that are linear in the normed stream; this model {what}"
        )
    gradient, cap = logit_vjp(logits, answer), network.config.logit_softcap
    if cap is not None:
        gradient = gradient * (1 - (upcast(logits) / cap).square())
    return (gradient * network.config.logit_scale) @ Weights(network).W_U.mT.to(gradient)
