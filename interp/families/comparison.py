"""Comparison of Hugging Face networks with the models converted from them: outputs of both for the same tokens."""

from collections.abc import Iterable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from interp.core.notes import note
from interp.core.torch_state import products
from interp.model.encoder_decoder import EncoderDecoder
from interp.model.live_modules import bare_copy, copied, own_tensors
from interp.model.transformer import Transformer

NAME = "Hugging Face"
BESIDE = "Hugging Face with the adapter not merged"
"""Name of the reference for a model with a merged adapter (the merge rounds the weights once more)."""
PROBED = 8
"""Number of tokens on which a live network and its copy are compared."""
ALLOWED = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest allowed difference between the outputs of a live network and its copy, relative to the largest output, as in
`verify`. In half precision the median over tokens is compared, since rounding may send a token to another expert.
"""


class HuggingFaceReference:
    """A live Hugging Face model with the weights of a model of this package; its state is left as it was.

    A model in half precision is compared through a float32 copy with the same weights, since half precision cannot
    tell a wrong model from a rounded one; `half_logits` are those of the model itself.
    """

    def __init__(self, model: nn.Module, name: str = NAME) -> None:
        self.rounded = name == BESIDE
        half = next(model.parameters()).dtype in (torch.float16, torch.bfloat16)
        self._half, self.name = (model if half else None), name
        self._model = copied(model).float() if half else model

    def logits(self, tokens: Int[Tensor, "b p"]) -> Float[Tensor, "b p v"]:
        """The network's output for these tokens: logits, or the last hidden states where it has no head."""
        with torch.no_grad():
            return self._run(self._model, input_ids=tokens)

    def half_logits(self, tokens: Int[Tensor, "b p"]) -> Float[Tensor, "b p v"]:
        """Logits in half precision: the model's own, or those of a copy in bfloat16."""
        half = copied(self._model).to(torch.bfloat16) if self._half is None else self._half
        with torch.no_grad():
            return self._run(half, input_ids=tokens)

    def gradient(self, tokens: Int[Tensor, "b p"], probe: Float[Tensor, "b p v"]) -> Float[Tensor, "b p d"]:
        """d sum(probe * logits) / d (rows of the embedding matrix), by autograd."""
        return self._gradient(probe, input_ids=tokens)

    def pair_logits(self, source: Int[Tensor, "b s"], target: Int[Tensor, "b p"]) -> Float[Tensor, "b p v"]:
        """The logits of an encoder-decoder for a source and a target."""
        with torch.no_grad():
            return self._run(self._model, input_ids=source, decoder_input_ids=target)

    def pair_gradient(
        self, source: Int[Tensor, "b s"], target: Int[Tensor, "b p"], probe: Float[Tensor, "b p v"]
    ) -> Float[Tensor, "b s d"]:
        """d sum(probe * logits) / d (rows of the encoder's embedding matrix), by autograd."""
        return self._gradient(probe, input_ids=source, decoder_input_ids=target)

    def _gradient(self, probe: Tensor, **inputs: Tensor) -> Tensor:
        """The gradient of sum(probe * logits) by the rows of the embedding matrix for `input_ids`."""
        embedding = self._model.get_input_embeddings()  # type: ignore[operator]
        if "decoder_input_ids" in inputs:
            embedding = self._model.get_encoder().get_input_embeddings()  # type: ignore[operator]
        leaf: list[Tensor] = []

        def start_here(module: nn.Module, given: object, output: Tensor) -> Tensor:
            if leaf:
                return output
            leaf.append(output.detach().requires_grad_())
            return leaf[0]

        handle = embedding.register_forward_hook(start_here)
        try:
            with torch.enable_grad():
                output = self._run(self._model, **inputs)
                (gradient,) = torch.autograd.grad((output * probe.to(output)).sum(), leaf)
        finally:
            handle.remove()
        return (gradient * _scale(embedding, inputs["input_ids"])).detach()

    def _run(self, model: nn.Module, **inputs: Tensor) -> Float[Tensor, "b p v"]:
        mode, device = model.training, next(model.parameters()).device
        model.eval()
        try:
            output = model(**{name: value.to(device) for name, value in inputs.items()})
        finally:
            model.train(mode)
        kinds = ("logits", "prediction_logits", "last_hidden_state")
        return next(output[kind] for kind in kinds if output.get(kind) is not None)


def _scale(embedding: nn.Module, tokens: Int[Tensor, "b p"]) -> Tensor:
    """The factor that an embedding module applies to the rows of its weight."""
    while (
        within := getattr(embedding, "base_layer", getattr(embedding, "original_module", None))
    ) is not None:
        embedding = within  # the module inside an adapter's wrapper
    weight = embedding.weight
    assert isinstance(weight, Tensor)
    tokens = tokens.to(weight.device)
    with torch.no_grad():
        scaled: Tensor = embedding(tokens)
        return scaled.norm() / weight[tokens].norm()


class _AtEveryPosition(nn.Module):
    """A classifier of Hugging Face with its head applied at every position, not only at the last."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.base: nn.Module = network.base_model  # type: ignore[assignment]
        self.head: nn.Module = network.score if hasattr(network, "score") else network.classifier  # type: ignore[assignment]

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        """The head's outputs, `[b p v]`, as logits."""
        return {"logits": self.head(self.base(**inputs).last_hidden_state)}

    def get_input_embeddings(self) -> nn.Module:
        """The embedding of tokens."""
        embedding: nn.Module = self.base.get_input_embeddings()  # type: ignore[operator]
        return embedding


def compared(
    theirs: nn.Module, model: Transformer | EncoderDecoder, name: str = NAME
) -> HuggingFaceReference | str:
    """The reference that ends where the model does (logits, another head, or final states), or why there is none."""
    if isinstance(model, Transformer) and model.unembed is None:
        below = theirs.base_model
        assert isinstance(below, nn.Module)
        return HuggingFaceReference(below, name)
    if isinstance(model, Transformer) and (hasattr(theirs, "score") or hasattr(theirs, "classifier")):
        return HuggingFaceReference(_AtEveryPosition(theirs), name)
    if not hasattr(theirs, "get_output_embeddings") or theirs.get_output_embeddings() is None:  # type: ignore[operator]
        return f"{type(theirs).__name__} gives no logits of tokens"
    return HuggingFaceReference(theirs, name)


def require_same(network: nn.Module, model: Transformer | EncoderDecoder) -> None:
    """Compare a live network with its copy on a few tokens, so that code or settings of its own are found.

    A custom forward or a changed attribute is in neither config nor parameters, so it is missing from our copy. If the
    network's own pass fails, there is a `Note` instead of a comparison.

    Raises:
        ValueError: the two outputs differ.
    """
    with torch.no_grad(), torch.autocast(model.device.type, enabled=False):
        try:
            comparison = _probe_difference(network, model)
        except Exception as cause:  # of many kinds: it is code of anybody
            note(
                "this live model's own pass was not compared with our copy's, since it fails "
                f"({type(cause).__name__}: {(str(cause).strip().splitlines() or [''])[0]})"
            )
            return
    if comparison is None:
        return
    error, allowed = comparison
    if not error <= allowed:
        raise ValueError(
            f"{type(network).__name__}: its own pass gives other numbers than its config and parameters say, by "
            f"{error:.1e} of the largest ({allowed:.0e} allowed): its code, or settings of its modules, were "
            "changed; wrapped=True takes its own code, the folder of its checkpoint what the config says"
        )


def _probe_difference(network: nn.Module, model: Transformer | EncoderDecoder) -> tuple[float, float] | None:
    """The relative difference of the two outputs and the allowed one; None where the network has no such output."""
    network = bare_copy(network, own_tensors(network))
    if hasattr(network, "get_base_model"):  # with its adapters (PEFT), not merged
        network = network.get_base_model()  # type: ignore[operator]
    theirs = compared(network, model)
    if isinstance(theirs, str):
        return None
    if isinstance(model, Transformer):
        tokens = _some_tokens(network, model)
        ours, expected = model(tokens), theirs.logits(tokens)
    else:
        source, target = _some_tokens(network, model.encoder), _some_tokens(network, model.decoder)
        ours, expected = model(source, target), theirs.pair_logits(source, target)
    return apart(ours, expected, (model.dtype, *(p.dtype for p in network.parameters())))


def apart(ours: Tensor, theirs: Tensor, dtypes: Iterable[torch.dtype]) -> tuple[float, float]:
    """The difference of two outputs `[b p v]` relative to the largest entry of `theirs`, and the allowed difference.

    Args:
        dtypes: the dtypes of the parameters of both models.
    """
    kinds = {kind for kind in dtypes if kind.is_floating_point}
    allowed = max(ALLOWED.get(kind, ALLOWED[torch.bfloat16]) for kind in kinds)
    for device in (ours.device, theirs.device):
        if (rounded := products(device)) is not None:
            allowed = max(allowed, ALLOWED[torch.bfloat16 if rounded == "bf16" else torch.float16])
    wide = torch.promote_types(theirs.dtype, torch.float32)
    difference = (ours.to(theirs.device, wide) - theirs.to(wide)).abs().amax(-1)
    error = (
        difference.max() if allowed < ALLOWED[torch.float16] else difference.median()
    ) / theirs.abs().max()
    return float(error), allowed


def _some_tokens(network: nn.Module, model: Transformer) -> Int[Tensor, "1 p"]:
    """Random tokens `[1 p]`, none of them padding; p is `PROBED`, or less if the context is shorter."""
    padding = getattr(network.config, "pad_token_id", None)
    ids = torch.arange(model.config.d_vocab)
    ids = ids if len(ids) < 2 or not isinstance(padding, int) else ids[ids != padding]
    drawn = torch.randint(
        len(ids), (1, min(PROBED, model.config.n_ctx)), generator=torch.Generator().manual_seed(0)
    )
    return ids[drawn].to(model.device)
