"""The tuned lens: a logit lens that first translates each depth's state into the terms of the last one.

logits_l = LN_f(x_l + x_l A_l + b_l) W_U, one affine translator per depth and none for the last, trained to minimise
KL(final || lens_l) with the model frozen (Belrose et al. 2023). A_l and b_l begin at zero: untrained it is the logit
lens. What it finds is what an affine map can read out; a trained probe may find what the model itself never uses.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from pathlib import Path

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from tqdm import tqdm

from interp.core.boundary import public
from interp.core.files import write_atomically
from interp.core.kinds import Count
from interp.core.stats import upcast
from interp.core.viewer import Brief
from interp.core.wording import value_text
from interp.data.batch import Batch, is_prompts
from interp.data.sources import Data
from interp.data.stream import DataSource, prompt_source, windows_of
from interp.lenses.lens import CHUNK, lens_sites
from interp.model.edits import Edit
from interp.model.fitted_file import fitted_file, is_of, sample_of
from interp.model.sites import final_stream
from interp.model.tap import Read
from interp.model.transformer import Transformer
from interp.passes.observe import Model, as_model, as_network, observe
from interp.passes.question import NotFiniteError

FORMAT = "interp tuned lens 1"
MakeOptimiser = Callable[[list[Tensor]], torch.optim.Optimizer]


@public()
@dataclass(frozen=True, eq=False, repr=False)
class TunedLens(Brief):
    """Tuned lens: an affine translator for each of some states of one model, for `logit_lens(..., translators=...)`."""

    sites: tuple[str, ...]
    """Full names of the states."""
    weight: Float[Tensor, "l d d"]
    """A of every state: it becomes x + x A + b."""
    bias: Float[Tensor, "l d"]
    sample: Float[Tensor, "n"]
    """Some numbers of every parameter of the model, in order, by which the model is recognised."""
    losses: Float[Tensor, "step l"] | None = None
    """KL(final || lens) in nats of each state before each step of the training; None if untrained or loaded."""

    @classmethod
    @public()
    def untrained(cls, model: Model, *, sites: str | Sequence[str] = "resid_pre") -> TunedLens:
        """Translators that change nothing, which is the logit lens.

        Args:
            model: the model whose states they translate.
            sites: states to translate, as in `logit_lens`.

        Example:
            >>> float(TunedLens.untrained(model).weight.abs().max())
            0.0
        """
        network = as_network(model)
        if not network.config.unembed:
            raise ValueError("a lens requires an unembedding; this model ends in its residual stream")
        names, d = lens_sites(network.config, sites)[:-1], network.config.d_model
        dtype = torch.promote_types(network.dtype, torch.float32)
        weight = torch.zeros(len(names), d, d, dtype=dtype, device=network.device)
        return cls(names, weight, weight[:, 0].clone(), sample_of(network))

    def __call__(self, site: str, state: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        """The state of a site translated for the final norm, in the state's dtype. KeyError for an unknown site."""
        if site not in self.sites:
            raise KeyError(f"no translator for {site!r}; there are: {', '.join(self.sites)}")
        i, x = self.sites.index(site), state.to(self.weight.dtype)
        return (x + (x @ self.weight[i] + self.bias[i])).to(state.dtype)

    def check(self, model: Transformer, sites: Sequence[str]) -> None:
        """Raise ValueError for a model with other parameters (a narrower dtype is allowed), KeyError for a site."""
        if not is_of(model, self.sample):
            raise ValueError(
                "the translators were trained on another model: its parameters differ from this one's"
            )
        if missing := [site for site in sites if site not in self.sites]:
            raise KeyError(f"no translator for {missing[0]!r}; there are: {', '.join(self.sites)}")

    @public()
    def save(self, path: Path | str) -> None:
        """Write the translators to a safetensors file, with the numbers by which their model is recognised."""
        from safetensors.torch import save_file

        tensors = {"weight": self.weight, "bias": self.bias, "sample": self.sample}
        flat = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        header = {"format": FORMAT, "sites": json.dumps(self.sites)}
        write_atomically(Path(path), lambda file: save_file(flat, file, metadata=header))

    @classmethod
    @public()
    def load(cls, path: Path | str, model: Model) -> TunedLens:
        """The translators of a file.

        Args:
            path: a file that `save` wrote.
            model: the model that they were trained on.

        Raises:
            ValueError: a file of another kind, a damaged one, or translators of another model.
        """
        network = as_network(model)
        with fitted_file(path, "tuned lens", FORMAT, network.device) as (header, stored):
            tensors = {name: stored[name] for name in ("weight", "bias", "sample")}
            sites = tuple(json.loads(header["sites"]))
        d = network.config.d_model
        shapes = {"weight": (len(sites), d, d), "bias": (len(sites), d)}
        if bad := [name for name, shape in shapes.items() if tensors[name].shape != shape]:
            got = list(tensors[bad[0]].shape)
            raise ValueError(
                f"{path}: {bad[0]} of shape {list(shapes[bad[0]])} is required by this model, got {got}"
            )
        lens = cls(sites, **tensors)
        lens.check(network, lens_sites(network.config, sites or "resid_pre")[:-1])
        return lens


@public()
def train_tuned_lens(
    model: Model,
    data: DataSource | Data,
    *,
    steps: Count = 250,
    sites: str | Sequence[str] = "resid_pre",
    optimiser: MakeOptimiser | None = None,
    seed: int = 0,
    edits: Sequence[Edit] = (),
    prepend_bos: bool | None = None,
    batch_size: int = 16,
) -> TunedLens:
    """Train a tuned lens: affine translators that bring each depth's prediction close to the model's own.

    Minimises KL(final || lens), each state's mean over the tokens of a batch, summed over states, where logits_l =
    LN_f(x_l + x_l A_l + b_l) W_U; A and b begin at zero, which is the logit lens. The model is frozen: its parameters
    get no gradient. A step is one batch: of prompts in memory `batch_size` rows, shuffled anew in every epoch; of a
    stream or of files the next batch of the data, whose windows come in a new order in every epoch. The learning rate
    falls linearly to 0. The same seed gives the same bits on the same machine.

    Args:
        data: prompts, token ids, a batch, files or a stream of any size.
        steps: how many batches it is trained on.
        sites: states to translate in every block, as in `logit_lens`.
        optimiser: makes the torch optimiser of the parameters; None: Adam at 1e-3. Belrose et al. use SGD with Nesterov
            momentum: `lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9, nesterov=True)`.
        seed: of the order of rows or windows.
        edits: interventions that the model runs under. The lens knows its model by the parameters, not by the edits:
            use it under the same ones.
        prepend_bos: whether texts begin with BOS; None: as the model does by default.
        batch_size: rows of a step, of prompts in memory; other data come in batches of their own.

    Returns:
        TunedLens, with the losses of the training `[step l]`: KL(final || lens) in nats of each state before each step.

    Raises:
        ValueError: no steps, a model without an unembedding, a site that does not hold the stream, data without a
            usable row, or an iterator that ends before the steps do.
        NotFiniteError: a loss that is NaN or infinite.

    Caveat:
        It finds what an affine map can read out; a trained probe may find what the model itself never uses.

    Memory:
        A batch's activations are computed when it comes and then dropped; no more than 128 rows of logits exist at a
        time.

    Source:
        Belrose et al. 2023.

    See Also:
        `logit_lens`: reads with the lens, or without any training. `jacobian_lens`: a linear lens fitted from
        gradients.

    Example:
        >>> tuned = train_tuned_lens(model, [prompt, "The cat sat on the mat"], steps=2)
        >>> found = interp.logit_lens(model, prompt, translators=tuned)
    """
    if steps < 1 or batch_size < 1:
        raise ValueError(
            f"at least one step of one row is required, got steps={steps}, batch_size={batch_size}"
        )
    subject = as_model(model, edits)
    lens = TunedLens.untrained(subject, sites=sites)
    parameters = [lens.weight.requires_grad_(), lens.bias.requires_grad_()]
    optimise = _adam(parameters) if optimiser is None else optimiser(parameters)
    if not isinstance(optimise, torch.optim.Optimizer):
        raise ValueError(
            f"optimiser must make a torch.optim.Optimizer of the parameters, it made {value_text(optimise)}"
        )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimise, lambda step: 1 - step / steps)
    if is_prompts(data):
        batches = _shuffled_batches(subject.text.batch(data, prepend_bos=prepend_bos), batch_size, seed)
    else:
        source = prompt_source(data, subject.text, prepend_bos=prepend_bos, batch_size=batch_size)
        batches = _source_batches(source, steps, seed)
    losses = []
    for _ in tqdm(range(steps), desc="tuned lens", delay=1, leave=False):
        loss, grads = loss_and_gradients(subject.transformer, lens, next(batches))
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        optimise.step()
        schedule.step()
        losses.append(loss)
    if not bool(torch.stack(losses).isfinite().all()):
        raise NotFiniteError("a finite loss is required, that of the tuned lens became NaN or infinite")
    weight, bias = (parameter.detach() for parameter in parameters)
    return replace(lens, weight=weight, bias=bias, losses=torch.stack(losses))


@torch.enable_grad()
def loss_and_gradients(
    model: Transformer, translators: TunedLens, batch: Batch
) -> tuple[Float[Tensor, "l"], tuple[Float[Tensor, "l d d"], Float[Tensor, "l d"]]]:
    """Mean KL(final || lens) in nats of each state over a batch's tokens, and the gradients of their sum.

    d KL / d log p = -p_final, so autograd differentiates only from the translators to the log probabilities.
    """
    reads = {site: Read(site) for site in (*translators.sites, final_stream(model.config))}
    batch = batch.to(model.device)
    trace = observe(model, batch, tuple(reads.values()), answers_only=True).trace
    real = batch.real
    final, n = trace[reads[final_stream(model.config)]][real], int(real.sum())
    loss = translators.weight.new_zeros(len(translators.sites))
    grads = tuple(torch.zeros_like(parameter) for parameter in (translators.weight, translators.bias))
    for rows in torch.arange(n, device=final.device).split(CHUNK):
        with torch.no_grad():
            reference = _log_probs(model, final[rows])
        for i, site in enumerate(translators.sites):
            logp = _log_probs(model, translators(site, trace[reads[site]][real][rows]))
            with torch.no_grad():
                loss[i] += (reference.exp() * (reference - logp)).sum() / n
                towards = -reference.exp() / n
            parameters = (translators.weight, translators.bias)
            for total, grad in zip(grads, torch.autograd.grad(logp, parameters, towards), strict=True):
                total += grad
    return loss, (grads[0], grads[1])


def _log_probs(model: Transformer, state: Float[Tensor, "r d"]) -> Float[Tensor, "r v"]:
    return model.read_out(upcast(state)).log_softmax(-1)


def _adam(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3)


def _shuffled_batches(batch: Batch, size: int, seed: int) -> Iterator[Batch]:
    """Endless batches of `size` rows: every epoch holds all rows once in a new order; its last batch may be smaller."""
    generator = torch.Generator().manual_seed(seed)

    def batch_of(rows: Tensor) -> Batch:
        chosen_rows = batch.rows(rows)
        columns_used = _used_columns(chosen_rows.keep)
        columns = (
            chosen_rows.tokens, chosen_rows.keep, chosen_rows.documents, chosen_rows.types, chosen_rows.branches,
        )  # fmt: skip
        tokens, keep, documents, types, branches = (
            None if x is None else x[:, columns_used] for x in columns
        )
        assert tokens is not None
        return Batch(
            tokens,
            keep,
            batch.bos,
            documents=documents,
            types=types,
            memory=chosen_rows.memory,
            branches=branches,
        )

    orders = (torch.randperm(len(batch), generator=generator) for _ in repeat(None))
    return (batch_of(rows) for rows in chain.from_iterable(order.split(size) for order in orders))


def _source_batches(source: DataSource, steps: int, seed: int) -> Iterator[Batch]:
    """Endless batches of a data source, its windows in a new order in every round; an iterator is read once.

    Raises:
        ValueError: a source without a usable row, or the end of an iterator.
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        seen_batches = 0
        count = source.windows
        order = None if count is None else torch.randperm(count, generator=generator).tolist()
        for _, window in windows_of(source, order):
            yield from window.batches
            seen_batches += len(window.batches)
        if count is None:
            raise ValueError(
                f"batches for {steps} steps are required, the iterator ended after {seen_batches}"
            )
        if not seen_batches:
            raise ValueError("some rows that can be used are required, got none")


def _used_columns(keep: Bool[Tensor, "b p"] | None) -> slice:
    """The range of columns in which at least one row has a token, so that common padding is not computed."""
    if keep is None:
        return slice(None)
    columns = keep.any(0).nonzero()[:, 0]
    return slice(int(columns[0]), int(columns[-1]) + 1)
