"""MEND: a small network, trained on other edits, turns the gradient of an edit into a change that disturbs less.

Mitchell et al. 2022, "Fast Model Editing at Scale" (arXiv:2110.11309), section 3. In the row convention x @ W the
gradient of an edit's loss at a matrix is sum_i u_i^T delta_i over tokens i, u_i the input of the matrix and delta_i the
gradient at its output. The network g maps z_i = [norm(u_i), norm(delta_i)] to [u~_i, delta~_i]; then

    h = z + relu(s1 * (z V1 U1 + b) + o1),   g = h + relu(s2 * (h V2 U2) + o2),   W' = W - alpha sum_i u~_i^T delta~_i.

Matrices of one shape share U, V and b; alpha, s and o are each matrix' own. V begins at zero, so that g begins as the
identity.

Differences from the paper: norm takes its means and standard deviations from all training edits before the first step,
not during training, and does not scale a feature that does not vary. The learning rate falls linearly to zero, where
the paper stops early. The loss is over all rewordings and all other prompts of an edit, not one of each, with the KL at
the last token of each. As in the released code, tokens with delta = 0 change nothing; the released code starts U at
zero and V at random instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from tqdm import tqdm

from interp.core.axes import shape_text
from interp.core.boundary import public
from interp.core.factored import FactoredMatrix
from interp.core.files import write_atomically
from interp.core.kinds import Positive, PositiveCount
from interp.core.stats import upcast
from interp.core.transfers import to_device
from interp.core.viewer import Brief
from interp.data.batch import Answers, Batch, Prompts
from interp.editing.edit_scores import EditCase
from interp.editing.editors import FactorPair, FineTuning, edit_batch, entering, factors_of
from interp.editing.weight_edit import WeightEdit, changed, own_matrix_place
from interp.model.fitted_file import fitted_file, is_of, sample_of
from interp.model.transformer import Transformer
from interp.passes.observe import Model, Subject, as_model, as_network
from interp.passes.question import NotFiniteError
from interp.weights.matrices import by_head, side_by_side

FORMAT = "interp mend 1"
TRAINING = FineTuning(steps=200, rate=1e-3)
"""The default training of the networks."""
TRAINED = ("U", "V", "bias", "scale", "shift", "alpha")
CONSTANT = 1e-6
"""Share of a feature's mean below which its standard deviation counts as 0."""


@dataclass(frozen=True, eq=False, repr=False)
class GradientNetwork(Brief):
    """The network g of all matrices of one shape `[i o]`, heads side by side; f = i + o features."""

    names: tuple[str, ...]
    """The m matrices that share the network."""
    U: Float[Tensor, "2 r f"]
    V: Float[Tensor, "2 f r"]
    bias: Float[Tensor, "f"]
    """b."""
    scale: Float[Tensor, "m 2 f"]
    """s1 and s2 of every matrix."""
    shift: Float[Tensor, "m 2 f"]
    """o1 and o2 of every matrix."""
    alpha: Float[Tensor, "m"]
    mean: Float[Tensor, "f"]
    std: Float[Tensor, "f"]

    def __call__(self, name: str, u: Float[Tensor, "n i"], delta: Float[Tensor, "n o"]) -> FactoredMatrix:
        """Change of one matrix, - alpha sum_i u~_i^T delta~_i, as factors; tokens with delta = 0 change nothing."""
        m = self.names.index(name)
        z = (torch.cat((u, delta), 1) - self.mean) / self.std
        for k in (0, 1):
            product = z @ self.V[k] @ self.U[k]
            inner = self.scale[m, k] * (product if k else product + self.bias) + self.shift[m, k]
            z = z + inner.clamp(min=0)  # not relu: its derivative at 0, where training begins, is 0
        z = torch.where((delta != 0).any(1, keepdim=True), z, 0.0)
        new_u, new_delta = z.split((u.shape[1], delta.shape[1]), 1)
        return FactoredMatrix(new_u.mT, -self.alpha[m] * new_delta)

    def normed(self, pairs: Sequence[Mapping[str, FactorPair]]) -> GradientNetwork:
        """This network with means and standard deviations of these factors, over tokens whose delta is not 0."""
        rows = [
            torch.cat(factors[name], 1)[(factors[name][1] != 0).any(1)]
            for factors in pairs
            for name in self.names
        ]
        std, mean = torch.std_mean(torch.cat(rows), 0, correction=0)
        return replace(self, mean=mean, std=torch.where(std > CONSTANT * mean.abs(), std, 1.0))

    def on(self, device: torch.device) -> GradientNetwork:
        """This network on another device."""
        return GradientNetwork(
            self.names, **{name: to_device(value, device) for name, value in self.numbers.items()}
        )

    @property
    def numbers(self) -> dict[str, Tensor]:
        """Its tensors by name."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)[1:]}


@public()
@dataclass(frozen=True, eq=False, repr=False)
class Mend(Brief):
    """MEND: trained networks that turn gradients into edits of some matrices of one model, for `mend_edit`."""

    networks: tuple[GradientNetwork, ...]
    """One for each shape of matrix."""
    sample: Float[Tensor, "n"]
    """Some numbers of every parameter of the model, in order, by which the model is recognised."""
    losses: Float[Tensor, "step 2"] | None = None
    """-log p of the answers and KL of the other prompts, nats, before each step; None if untrained or loaded."""

    @classmethod
    @public()
    def untrained(
        cls,
        model: Model,
        names: Sequence[str],
        *,
        alpha: Positive = 1e-3,
        rank: PositiveCount = 32,
        seed: int = 0,
    ) -> Mend:
        """Networks that are the identity, without norms: `mend_edit` is `gradient_edit` with eta = alpha.

        Args:
            model: the model that is edited.
            names: matrices of blocks, as `WeightEdit` names them.
            alpha: step size.
            rank: the inner size of V U at most.
            seed: of U.

        Raises:
            KeyError, IndexError, ValueError: a matrix that the model lacks.
            ValueError: one outside the blocks, no or repeated names, alpha <= 0, rank < 1.

        Example:
            >>> mend = Mend.untrained(model, ["blocks.0.mlp.W_in", "blocks.1.mlp.W_in"], alpha=0.1)
            >>> [edit.name for edit in mend_edit(model, prompt, answer=" cat", mend=mend)]
            ['blocks.0.mlp.W_in', 'blocks.1.mlp.W_in']
        """
        if not names or len(set(names)) != len(names):
            raise ValueError(f"names of distinct matrices are required, got {list(names)}")
        network, generator = as_network(model), torch.Generator().manual_seed(seed)
        by_shape: dict[torch.Size, list[str]] = {}
        for name in names:
            weight = own_matrix_place(network, name).in_(network)
            if not name.startswith("blocks."):
                raise ValueError(f"a matrix of a block is required, whose gradient has factors, got {name!r}")
            by_shape.setdefault(side_by_side(weight, name).shape, []).append(name)
        like = upcast(network.embed.weight.detach())
        zeros, ones, networks = like.new_zeros, like.new_ones, []
        for f, group in ((sum(shape), group) for shape, group in by_shape.items()):
            m, u = len(group), torch.empty(2, min(rank, f), f)
            for matrix in u:
                nn.init.xavier_uniform_(matrix, generator=generator)
            scales = ones(m, 2, f), zeros(m, 2, f), alpha * ones(m)
            v, bias, mean, std = zeros(u.mT.shape), zeros(f), zeros(f), ones(f)
            networks.append(GradientNetwork(tuple(group), u.to(like), v, bias, *scales, mean, std))
        return cls(tuple(networks), sample_of(network))

    @property
    def names(self) -> tuple[str, ...]:
        """The matrices that are changed."""
        return tuple(name for network in self.networks for name in network.names)

    def changes(self, model: Transformer, pairs: Mapping[str, FactorPair]) -> dict[str, FactoredMatrix]:
        """The change of every matrix from its factors u and delta, in the layout of `Weights`."""
        changes = dict[str, FactoredMatrix]()
        for network in self.networks:
            for name in network.names:
                weight, change = own_matrix_place(model, name).in_(model), network(name, *pairs[name])
                heads = len(weight) if weight.ndim == 3 else None
                changes[name] = by_head(change.A, change.B, name, heads)
        return changes

    @property
    def numbers(self) -> dict[str, Tensor]:
        """The tensors of all networks by name, and the sample."""
        tensors = {
            f"{i}.{k}": x for i, network in enumerate(self.networks) for k, x in network.numbers.items()
        }
        return tensors | {"sample": self.sample}

    @public()
    def save(self, path: Path | str) -> None:
        """Write the networks to a safetensors file, with the numbers by which their model is recognised."""
        from safetensors.torch import save_file

        flat = {name: x.detach().cpu().contiguous() for name, x in self.numbers.items()}
        about = {"names": self.names, "rank": max(network.U.shape[1] for network in self.networks)}
        header = {"format": FORMAT, "mend": json.dumps(about)}
        write_atomically(Path(path), lambda file: save_file(flat, file, metadata=header))

    @classmethod
    @public()
    def load(cls, path: Path | str, model: Model) -> Mend:
        """The `Mend` in a file that `save` wrote, for this model.

        Raises:
            ValueError: a file of another kind, a damaged one, or networks of another model.
        """
        network = as_network(model)
        with fitted_file(path, "MEND", FORMAT, network.device) as (header, stored):
            mend = cls.untrained(network, **json.loads(header["mend"]))
            for name, own in mend.numbers.items():
                if (got := stored[name].shape) != own.shape:
                    expected = f"{name} of shape {shape_text(own.shape)}"
                    raise ValueError(f"{path}: {expected} is required by this model, got {shape_text(got)}")
                own.copy_(stored[name])
        mend.check(network)
        return mend

    def check(self, model: Transformer) -> None:
        """ValueError unless this is the model that it was made for, in its dtype or a narrower one, and finite."""
        numbers = [sample_of(model), *self.numbers.values()]
        fine, *each = torch.stack([some.isfinite().all().to(model.device) for some in numbers]).tolist()
        if not fine:
            raise NotFiniteError(
                "a model of finite parameters is required, some of this one's are NaN or infinite"
            )
        if wrong := [name for name, is_finite in zip(self.numbers, each, strict=True) if not is_finite]:
            raise NotFiniteError(
                f"a MEND of finite numbers is required, {wrong[0]} has some that are NaN or infinite"
            )
        if not is_of(model, self.sample):
            raise ValueError("this MEND was trained on another model: its parameters differ from this one's")


@public()
def mend_edit(
    model: Model, data: Prompts, *, answer: Answers, mend: Mend, prepend_bos: bool | None = None
) -> list[WeightEdit]:
    """MEND: changes of several matrices that make prompts give their answers, from a trained `Mend`; applied together.

    One forward and one backward pass for each kind of matrix, as in `gradient_edit`, and the networks on top. Several
    prompts add up as their gradients do, which the training has not seen.

    Args:
        data: one prompt or several.
        answer: what to make likely, of one or several tokens, one for all prompts or one for each.
        mend: the trained networks; they say which matrices are changed.
        prepend_bos: whether texts begin with BOS; None: as the model does by default.

    Returns:
        One `WeightEdit` per matrix.

    Raises:
        ValueError: as `gradient_edit`; another model than the one that `mend` was trained on.

    Source:
        Mitchell et al. 2022, "Fast Model Editing at Scale" (arXiv:2110.11309), section 3.

    See Also:
        `train_mend`: trains the networks. `gradient_edit`: the step without them.

    Example:
        >>> mend = Mend.untrained(model, ["blocks.1.mlp.W_out"], alpha=0.1)
        >>> (edit,) = mend_edit(model, prompt, answer=" cat", mend=mend)
        >>> edit.name
        'blocks.1.mlp.W_out'
    """
    subject = as_model(model)
    network = subject.transformer
    mend.check(network)
    batch = edit_batch(subject, data, answer, prepend_bos=prepend_bos)
    on_device = replace(
        mend, networks=tuple(gradient_network.on(network.device) for gradient_network in mend.networks)
    )
    changes = on_device.changes(network, factors_of(network, batch, mend.names))
    return [WeightEdit(name, change) for name, change in changes.items()]


@public()
@torch.enable_grad()
def train_mend(
    model: Model,
    cases: Sequence[EditCase],
    names: Sequence[str],
    *,
    alpha: Positive = 1e-3,
    rank: PositiveCount = 32,
    c_edit: Positive = 0.1,
    tuning: FineTuning | None = None,
    batch_size: PositiveCount = 4,
    seed: int = 0,
    prepend_bos: bool | None = None,
) -> Mend:
    """Train MEND's networks, which turn the gradient of an edit into a change that disturbs less.

    Minimises c_edit L_edit + L_loc, the mean over `batch_size` cases a step, each edit alone. L_edit = -log p'(answer),
    p' the edited model, mean over the edited prompt and every check that expects the answer (rewordings). L_loc = KL(p
    || p') of the next token, mean over all other checks (prompts that should stay as they are; what they expect is not
    used). Every case comes once before any comes again. The model's parameters are neither written nor given gradients.

    Args:
        cases: edits to train on, as in `edit_table`; inputs, factors and old predictions of all are kept.
        names: the matrices, as `WeightEdit` names them; the paper takes the MLPs of the last three layers.
        alpha: the first step size, on normed factors.
        rank: the inner size of the networks at most.
        c_edit: weight of the edit's loss.
        tuning: steps, learning rate and optimiser; None: 200 steps of Adam at 1e-3. All steps are taken.
        batch_size: cases of a step.
        seed: of the networks' first weights and of the order of the cases.
        prepend_bos: whether texts begin with BOS; None: as the model does by default.

    Returns:
        Mend, with the losses of the training `[step 2]`: L_edit and L_loc in nats before each step.

    Raises:
        ValueError: as `Mend.untrained`; no cases, a case without another prompt, c_edit <= 0, batch_size < 1.
        NotFiniteError: a loss that is NaN or infinite.

    Source:
        Mitchell et al. 2022, "Fast Model Editing at Scale" (arXiv:2110.11309), section 3; the module says where this
        differs.

    See Also:
        `mend_edit`: makes edits with the result.

    Example:
        >>> case = EditCase(prompt, " cat", "John", {"neighbourhood": (("The cat sat on the", " dog"),)})
        >>> mend = train_mend(model, [case], ["blocks.1.mlp.W_out"], tuning=FineTuning(steps=3), batch_size=1)
        >>> mend.losses.shape
        torch.Size([3, 2])
    """
    if not cases:
        raise ValueError("at least one case is required, got none")
    subject, tuning = as_model(model), tuning or TRAINING
    mend = Mend.untrained(subject, names, alpha=alpha, rank=rank, seed=seed)
    training_cases = [_TrainingCase.of(subject, case, mend.names, prepend_bos) for case in cases]
    pairs = [case.pairs for case in training_cases]
    mend = replace(mend, networks=tuple(gradient_network.normed(pairs) for gradient_network in mend.networks))
    generator = torch.Generator().manual_seed(seed)
    epochs = (torch.randperm(len(training_cases), generator=generator).tolist() for _ in repeat(None))
    batches = (list(islice(order, batch_size)) for order in repeat(chain.from_iterable(epochs), tuning.steps))
    copied = subject.transformer.with_parameters({})  # a copy of the modules, in which parameters are swapped
    losses = _train_networks(
        mend, ([training_cases[i] for i in batch] for batch in batches), copied, c_edit, tuning
    )
    return replace(mend, losses=losses)


def _train_networks(
    mend: Mend,
    batches: Iterable[Sequence[_TrainingCase]],
    model: Transformer,
    c_edit: float,
    tuning: FineTuning,
) -> Float[Tensor, "step 2"]:
    """Train the tensors of `mend` in place; returns L_edit and L_loc before each step."""
    leaves = [network.numbers[name].requires_grad_() for network in mend.networks for name in TRAINED]
    optimiser, losses = tuning.optimiser_of(leaves), []
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1 - step / tuning.steps)
    for batch in tqdm(batches, desc="MEND", total=tuning.steps, delay=1, leave=False):
        edit, local = torch.stack([case.losses(model, mend) for case in batch]).mean(0)
        for leaf, slope in zip(leaves, torch.autograd.grad(c_edit * edit + local, leaves), strict=True):
            leaf.grad = slope
        optimiser.step()
        schedule.step()
        losses.append(torch.stack((edit, local)).detach())
    if not bool(torch.stack(losses).isfinite().all()):
        raise NotFiniteError("a finite loss is required, that of MEND became NaN or infinite")
    for leaf in leaves:
        leaf.requires_grad_(False).grad = None
    return torch.stack(losses)


@dataclass(frozen=True, eq=False)
class _TrainingCase:
    """A training case: the factors of its gradient, and the inputs of its prompts at the first changed layer."""

    pairs: Mapping[str, FactorPair]
    batch: Batch
    """The edited prompt and its rewordings, then the prompts that should stay as they are; all with the new answer."""
    asking: int
    """Number of rows that are the edited prompt and its rewordings."""
    layer: int
    begin: Tensor
    """The input of the pass from that layer on."""
    before: Float[Tensor, "n v"]
    """Log-probabilities of the other prompts' next token without the edit."""

    @classmethod
    def of(
        cls, model: Subject, case: EditCase, names: Sequence[str], prepend_bos: bool | None
    ) -> _TrainingCase:
        """The case as tensors.

        Raises:
            ValueError: as `train_mend`.
        """
        network = model.transformer
        prompts, expected = zip((case.prompt, case.answer), *chain(*case.checks.values()), strict=True)
        answer, *_ = tokens = model.text.continuations(expected)
        asking, others = (
            [prompt for prompt, each in zip(prompts, tokens, strict=True) if (each == answer) is same]
            for same in (True, False)
        )
        if not others:
            raise ValueError(
                "each case requires a check that does not expect its answer, a prompt to be left alone; that of "
                f"{case.prompt!r} has none"
            )
        wanted = partial(edit_batch, model, answer=[tuple(answer)], prepend_bos=prepend_bos)
        pairs = factors_of(network, wanted(case.prompt), names)
        batch = wanted(asking, others=others)
        layer = min(int(name.split(".")[1]) for name in names)
        begin = entering(network, batch, layer)
        with torch.no_grad():
            before = _answer_logp(network, batch, begin, layer)[len(asking) :, 0]
        return cls(pairs, batch, len(asking), layer, begin, before)

    def losses(self, model: Transformer, mend: Mend) -> Float[Tensor, "2"]:
        """L_edit and L_loc of `train_mend`, differentiable in the numbers of `mend`."""
        changes = {name: factored.AB for name, factored in mend.changes(model, self.pairs).items()}
        logp = _answer_logp(model, self.batch, self.begin, self.layer, changed(model, changes))
        tokens, present = (x[: self.asking] for x in self.batch.answer_tokens())
        each = logp[: self.asking].gather(2, tokens[..., None])[..., 0]
        edit = -each.where(present, 0).sum(1).mean()
        local = F.kl_div(logp[self.asking :, 0], self.before, reduction="batchmean", log_target=True)
        return torch.stack((edit, local))


def _answer_logp(
    model: Transformer,
    batch: Batch,
    begin: Tensor,
    layer: int,
    parameters: Mapping[str, Tensor] | None = None,
) -> Float[Tensor, "b k v"]:
    """Log-probabilities where each row's answer is predicted, with these parameters in place of the model's."""
    inputs = {"start": layer, "keep": batch.keep, "logits_at": batch.answer_columns()}
    logits = torch.func.functional_call(model, dict(parameters or {}), (begin,), inputs)
    return upcast(logits).log_softmax(-1)
