"""A fitted Jacobian lens: reading states, directions of tokens, edits along them, and files.

logits_l = unembed(LN_f(J_l x)). How sure a word of it is: the prompts that J was averaged over are kept as means of
some groups, and groups drawn with replacement make other lenses that the same corpus could have given (the bootstrap
over groups; deviations are widened by sqrt(g / (g - 1)), what g groups miss of the variance).
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.axes import shape_text
from interp.core.boundary import public
from interp.core.files import regular, write_atomically
from interp.core.kinds import Count
from interp.core.memory import check_memory
from interp.core.results import check_result, in_order, numbers
from interp.core.stats import FEWEST, narrowed, upcast
from interp.core.transfers import to_device
from interp.data.batch import Answers, Batch
from interp.data.sources import Data
from interp.data.stream import DataSource
from interp.lenses.lens import CHUNK, LogitLens, columns_of
from interp.model.edits import Add, Edit
from interp.model.fitted_file import fitted_file, is_of, sample_of
from interp.model.layout import Places
from interp.model.sites import find, stream_after
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer
from interp.model.weights import Weights
from interp.passes.frozen import final_norm
from interp.passes.observe import Model, as_model, as_network
from interp.passes.question import Reading
from interp.runs.run import answered

if TYPE_CHECKING:
    import xarray as xr

FORMAT = "interp Jacobian lens 1"
ABOUT = ("skip", "precision", "ended", "left_out", "rules")
"""Attributes of a result that describe its fit."""


@public()
@dataclass(frozen=True, eq=False)
class FittedJacobianLens:
    """Jacobian lens of one model: the mean Jacobian J of some layers, as `jacobian_lens` fits it or a file holds it.

    `logit_lens(model, data, sites="resid_post", translators=lens)` reads any data with it.
    """

    model: Model
    """The model that it belongs to."""
    layers: tuple[int, ...]
    """The blocks after which the stream is read."""
    jacobian: Float[Tensor, "l r d"]
    """J of every layer: a change of the stream `[d]` to one of the final stream, or of the tokens' logits, `[r]`."""
    prompts: int = 0
    """How many prompts it is the mean of; 0 = unknown."""
    tokens: tuple[int, ...] | None = None
    """The tokens of the rows, where it was fitted for some tokens only; None = J as a whole."""
    error: Float[Tensor, "l"] | None = None
    """The standard error of J over prompts, relative to its norm."""
    by_group: Float[Tensor, "g l r d"] | None = None
    """J of each group of prompts."""
    sizes: Int[Tensor, "g"] | None = None
    """How many prompts each group has."""
    about: Mapping[str, str | int | float] = field(default_factory=dict)
    """How it was fitted, as the attributes of its result say: `skip`, `precision`, `ended`, `left_out`, `rules`."""

    def __post_init__(self) -> None:
        if self.tokens is not None and not self.tokens:
            raise ValueError("tokens requires at least one, or None for the whole of J, got none")
        d = as_network(self.model).config.d_model
        shape = (len(self.layers), d if self.tokens is None else len(self.tokens), d)
        if tuple(self.jacobian.shape) != shape:
            raise ValueError(
                f"J of shape {shape_text(shape)} is required by these layers of this model, got "
                f"{shape_text(self.jacobian.shape)}"
            )

    def __repr__(self) -> str:
        what = "the whole of J" if self.tokens is None else f"{len(self.tokens)} tokens"
        error = "" if self.error is None else f", standard error / |J| <= {float(self.error.max()):.3g}"
        return f"FittedJacobianLens({what}, after blocks {list(self.layers)}, {self.prompts} prompts{error})"

    @classmethod
    @public()
    def of_result(cls, result: xr.Dataset, model: Model) -> FittedJacobianLens:
        """The lens of a result of the question, `interp.run([JacobianLens(...)], model, data)["jacobian_lens"]`.

        Args:
            result: the Dataset.
            model: the model that was asked.

        Raises:
            ValueError: another result, or one of a model of another width.
        """
        check_result("result", result, ("value", "error", "by_group", "prompts", "layer"), "jacobian_lens")
        row = "token" if "token" in result.dims else "out"
        own = {dim: result[dim].to_numpy() for dim in ("layer", row)}
        width = range(result.sizes.get("in", 0))
        needed = {"group": None, **own, **({} if row == "token" else {"out": width}), "in": width}
        result = in_order("result", result, needed)
        network = as_network(model)
        like = upcast(torch.empty(0, dtype=network.dtype, device=network.device))
        tensors = {
            name: numbers(name, result[name], [str(dim) for dim in result[name].dims])
            for name in ("value", "error", "by_group", "prompts")
        }
        tokens = tuple(int(token) for token in result.token.values) if "token" in result.dims else None
        return cls(
            model, tuple(int(layer) for layer in result.layer.values), tensors["value"].to(like),
            int(result.attrs["prompts"]), tokens, tensors["error"], tensors["by_group"].to(like),
            tensors["prompts"].long(),
            {name: result.attrs[name] for name in ABOUT if name in result.attrs},
        )  # fmt: skip

    @property
    def sites(self) -> tuple[str, ...]:
        """The states that it reads: the stream after each of its layers."""
        config = as_network(self.model).config
        return tuple(stream_after(config, layer) for layer in self.layers)

    def __call__(self, site: str, state: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        """J x of the states of a site, in their dtype. KeyError for a site without J."""
        self._require_all_rows()
        matrix = self.jacobian[self.place(site)]
        return (state.to(matrix.dtype) @ matrix.mT.to(state.device)).to(state.dtype)

    def check(self, model: Transformer, sites: Sequence[str]) -> None:
        """Raise ValueError if `model` is not the fitted one (or its copy in a narrower dtype), KeyError without a J."""
        self._require_all_rows()
        if not is_of(model, sample_of(as_network(self.model))):
            raise ValueError("the Jacobian lens is of another model: its parameters differ from this one's")
        for site in sites:
            self.place(site)

    # --- what it reads --------------------------------------------------------------------------------------------

    @public()
    def read(
        self,
        data: DataSource | Data,
        *,
        answer: Answers | None = None,
        top: int | None = None,
        pos: Places | None = None,
        resamples: Count = 100,
        seed: int = 0,
    ) -> xr.Dataset:
        """Predictions of the lens after each of its layers, at every position, and how sure their tokens are.

        Args:
            data: prompts, token ids, a batch, files or a stream of any size.
            answer: target at every position, as in `logit_lens`; None: each position's next token.
            top: how many of the most probable tokens are listed; None: 10, or all of a smaller vocabulary.
            pos: which of each prompt's tokens, as in `logit_lens`; None: all.
            resamples: how many resampled lenses the ranks are taken under.
            seed: of the resampling.

        Returns:
            Dataset[prompt, depth, pos] of `logit_lens`, with three more variables for every listed token. A resampled
            lens is the mean of as many groups of the corpus' prompts as there are, drawn with replacement. The last
            depth is the model's own answer, which does not vary. All three are NaN for fewer than three groups (files
            of others have none).

            - `low`, `high` [prompt, depth, pos, rank]: ends of the token's rank in 95 % of the resampled lenses.
            - `stays` [prompt, depth, pos, rank]: share of the resampled lenses that list the token.

        Raises:
            ValueError: as `logit_lens`; a lens of some tokens alone, or no resample.

        Caveat:
            The three say how much the words depend on which prompts the corpus happened to have, not on the choice of
            corpus.

        Example:
            >>> lens = interp.lenses.jacobian_lens(model, [prompt], skip=1)
            >>> lens.read(prompt, top=3).stays.dims
            ('prompt', 'depth', 'pos', 'rank')
        """
        if resamples < 1:
            raise ValueError(f"at least one resample is required, got {resamples}")
        subject = as_model(self.model)
        sites = [stream_after(subject.transformer.config, layer) for layer in self.layers]
        question = LogitLens(answer=answer, top=top, sites=sites, pos=pos, translators=self)
        reading = question.reading(subject)
        names = tuple(read.site for read in reading.reads)
        weights = self.draws(resamples, seed)
        with_ranks = partial(_with_ranks, inner=reading, lens=self, sites=names, pos=pos, weights=weights)
        bound = replace(question.bind(subject), rows=replace(reading, compute=with_ranks))
        result = answered(bound, subject, data)
        for name in ("low", "high"):
            result[name].attrs["unit"] = "rank"
        result["stays"].attrs["unit"] = "share of resamples"
        return result.assign_attrs(prompts_of_lens=self.prompts, resamples=resamples)

    @public()
    def directions(self, token: Answers) -> Float[Tensor, "l *n d"]:
        """Direction of a token in the stream after each layer, J^T u: the mean gradient of its logit there.

        u is the token's column of the unembedding with the final norm at scale 1 (gamma in, centred if LayerNorm).

        Args:
            token: one token as text or id, or several.

        Returns:
            [l d] of one token given as a text or an id, [l n d] of several.

        Raises:
            ValueError: what is no single token, or a token that the lens was not fitted for.

        Example:
            >>> lens = interp.lenses.jacobian_lens(model, [prompt], skip=1)
            >>> lens.directions(5).shape[-1] == model.cfg.d_model
            True
        """
        subject = as_model(self.model)
        token_ids = subject.text.outputs(token).tolist()
        if self.tokens is None:
            directions = token_directions(subject.transformer, token_ids).to(self.jacobian) @ self.jacobian
        else:
            if missing := [token_id for token_id in token_ids if token_id not in self.tokens]:
                raise ValueError(
                    f"the lens was fitted for the tokens {list(self.tokens)}, not for {missing[0]}"
                )
            directions = self.jacobian[:, [self.tokens.index(token_id) for token_id in token_ids]]
        return directions[:, 0] if isinstance(token, str | int) else directions

    @public()
    def steer(self, token: str | int, scale: float, *, layers: Sequence[int] | None = None) -> list[Edit]:
        """Edits that add a vector of length `scale` along the token's direction after each layer.

        Args:
            token: a single token, as text or id.
            scale: length of the vector, in units of the stream; negative: against the direction.
            layers: after which layers; None: all of the lens.

        Returns:
            One `Edit` per layer.

        Raises:
            ValueError: as `directions`; a layer that the lens does not have.

        Example:
            >>> lens = interp.lenses.jacobian_lens(model, [prompt], skip=1)
            >>> model.edited(lens.steer(5, 2.0, layers=[0]))(tokens).shape == model(tokens).shape
            True
        """
        edits = []
        for site, (vector,) in self._site_directions((token,), layers).items():
            edits.append(Edit(site, Add(vector / vector.norm(), scale)))
        return edits

    @public()
    def swap(self, a: str | int, b: str | int, *, layers: Sequence[int] | None = None) -> list[Edit]:
        """Edits that exchange the coordinates of the stream along two tokens' directions after each layer.

        With V = [v_a v_b] and c = V^+ x: x + V (c_b - c_a, c_a - c_b); what is orthogonal to both stays.

        Args:
            a, b: two single tokens, as texts or ids.
            layers: after which layers; None: all of the lens.

        Returns:
            One `Edit` per layer.

        Raises:
            ValueError: one token twice, or tokens of one direction.

        Example:
            >>> lens = interp.lenses.jacobian_lens(model, [prompt], skip=1)
            >>> model.edited(lens.swap(5, 6, layers=[0]))(tokens).shape == model(tokens).shape
            True
        """
        edits = []
        for site, pair in self._site_directions((a, b), layers).items():
            if int(torch.linalg.matrix_rank(pair)) < 2:
                raise ValueError(f"two tokens of different directions are required, got {a!r} and {b!r}")
            edits.append(Edit(site, CoordinateExchange(pair)))
        return edits

    # --- files ----------------------------------------------------------------------------------------------------

    @public()
    def save(self, path: Path | str) -> None:
        """Write the lens to a safetensors file, its groups and the numbers that identify its model included."""
        from safetensors.torch import save_file

        tensors = {"jacobian": self.jacobian, "sample": sample_of(as_network(self.model))}
        more = {"error": self.error, "by_group": self.by_group, "sizes": self.sizes}
        tensors |= {name: value for name, value in more.items() if value is not None}
        flat = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        about = {"layers": self.layers, "prompts": self.prompts, "tokens": self.tokens}
        header = {"format": FORMAT, "lens": json.dumps({**about, "about": dict(self.about)})}
        write_atomically(Path(path), lambda file: save_file(flat, file, metadata=header))

    @classmethod
    @public()
    def load(cls, path: Path | str, model: Model) -> FittedJacobianLens:
        """The lens of a file that `save` wrote.

        Raises:
            ValueError: a file of another kind, a damaged one, or a lens of another model.
        """
        network = as_network(model)
        with fitted_file(path, "Jacobian lens", FORMAT, network.device) as (header, tensors):
            about = json.loads(header["lens"])
            sample, jacobian = tensors.pop("sample"), tensors.pop("jacobian")
            tokens = None if about["tokens"] is None else tuple(about["tokens"])
            if not is_of(network, sample):
                raise ValueError(f"{path} is a Jacobian lens of another model: its parameters differ")
            layers, prompts = tuple(about["layers"]), about["prompts"]
            return cls(model, layers, jacobian, prompts, tokens, **tensors, about=about["about"])

    @public()
    def to_neuronpedia(self, path: Path | str, *, dtype: torch.dtype = torch.float16) -> None:
        """Write J in the format of Neuronpedia's files, which TransformerLens reads; without groups and errors.

        Args:
            path: of the file.
            dtype: of the numbers in it.

        Raises:
            ValueError: a lens of some tokens alone, of the last layer only, or of numbers too large for `dtype`.
        """
        self._require_all_rows()
        last = as_network(self.model).config.n_layers - 1
        places = {layer: i for i, layer in enumerate(self.layers) if layer != last}
        if not places:
            raise ValueError("a layer before the last is required, whose J is the identity; got none")
        content = {
            "J": {
                layer: narrowed(self.jacobian[i].detach().cpu(), dtype, "J") for layer, i in places.items()
            },
            "n_prompts": self.prompts,
            "source_layers": list(places),
            "d_model": self.jacobian.shape[-1],
        }
        write_atomically(Path(path), lambda file: torch.save(content, file))

    @classmethod
    @public()
    def from_neuronpedia(cls, path: Path | str, model: Model) -> FittedJacobianLens:
        """The lens of one of Neuronpedia's files; no code in it is run.

        Args:
            path: of the file.
            model: the model that it was fitted on.

        Raises:
            ValueError: a file that is damaged, of another format, width or depth, not finite, or towards another stream
                than the final one.

        Caveat:
            Beyond layers and width such a file does not say which model it belongs to: you have to know. It holds for
            the raw weights, as checkpoints hold them.
        """
        network = as_network(model)
        last, d = network.config.n_layers - 1, network.config.d_model
        matrices, prompts = _neuronpedia_matrices(_torch_file_content(Path(path)), path, last)
        if bad := [layer for layer in matrices if not 0 <= layer < last]:
            raise ValueError(f"{path}: layers 0 to {last - 1} are possible in this model, got {bad[0]}")
        if misshapen := [x for x in matrices.values() if tuple(x.shape) != (d, d)]:
            raise ValueError(
                f"{path}: J of shape {shape_text((d, d))} is required, got {shape_text(misshapen[0].shape)}"
            )
        like = upcast(torch.empty(0, dtype=network.dtype, device=network.device))
        layers = tuple(sorted(matrices))
        jacobian = torch.stack([matrices[layer].to(like) for layer in layers])
        if not bool(jacobian.isfinite().all()):
            raise ValueError(f"{path}: finite numbers are required, J holds NaN or infinity")
        return cls(model, layers, jacobian, prompts)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _require_all_rows(self) -> None:
        """Raise ValueError for a lens that has only the rows of J for some tokens."""
        if self.tokens is not None:
            raise ValueError(
                f"the whole of J is required; this lens was fitted for {len(self.tokens)} tokens alone (tokens=)"
            )

    @public()
    def place(self, site: str) -> int:
        """Index into `jacobian` of the block whose output the site holds (a block's input is the output before it)."""
        config = as_network(self.model).config
        _, layer = find(site, config)
        if layer is not None:
            entered = layer - 1 if site.endswith(".hook_resid_pre") else None
            layer = layer if site == stream_after(config, layer) else entered
        if layer not in self.layers:
            known = ", ".join(stream_after(config, fitted_layer) for fitted_layer in self.layers)
            raise KeyError(f"no Jacobian of {site!r}; there are: {known} (sites='resid_post')")
        return self.layers.index(layer)

    def _site_directions(
        self, tokens: Sequence[str | int], layers: Sequence[int] | None
    ) -> dict[str, Float[Tensor, "n d"]]:
        """The direction of every token in the stream after each layer, by the name of the site."""
        chosen = self.layers if layers is None else tuple(layers)
        if missing := [layer for layer in chosen if layer not in self.layers]:
            raise ValueError(f"the lens has the layers {list(self.layers)}, not {missing[0]}")
        config = as_network(self.model).config
        directions = torch.stack([self.directions(token) for token in tokens], 1)
        return {stream_after(config, layer): directions[self.layers.index(layer)] for layer in chosen}

    @public()
    def draws(self, resamples: int, seed: int) -> Float[Tensor, "n g"] | None:
        """Weights of the groups of prompts in each resampled lens, each row sums to 1; None below three groups."""
        if self.by_group is None or self.sizes is None or len(self.sizes) < FEWEST:
            return None
        g = len(self.sizes)
        check_memory(
            f"{resamples} resampled lenses of {g} groups (resamples)", 32 * resamples * g, torch.device("cpu"),
            "fewer resamples take less",
        )  # fmt: skip
        drawn = torch.randint(g, (resamples, g), generator=torch.Generator().manual_seed(seed))
        sizes = self.sizes.cpu().double()
        counts = torch.zeros(resamples, g, dtype=torch.float64)
        counts.scatter_add_(1, drawn, torch.ones_like(counts))
        weights, shares = counts * sizes, sizes / sizes.sum()
        weights = weights / weights.sum(1, keepdim=True)
        # deviations from the lens of all prompts, widened by what g groups miss of the variance
        return shares + (g / (g - 1)) ** 0.5 * (weights - shares)


@dataclass(frozen=True, eq=False)
class CoordinateExchange:
    """The change of an `Edit` that exchanges the coordinates of each state along two vectors."""

    pair: Float[Tensor, "2 d"]

    def __call__(self, cells: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        """x + V (c' - c) with the coordinates c = V^+ x and c' = c in reverse order."""
        basis = self.pair.to(upcast(cells))
        coordinates = upcast(cells) @ torch.linalg.pinv(basis)
        return (upcast(cells) + (coordinates.flip(-1) - coordinates) @ basis).to(cells.dtype)


def token_directions(model: Transformer, tokens: Sequence[int]) -> Float[Tensor, "n d"]:
    """The gradient of each token's logit at the final stream with the final norm's scale at 1, before a soft cap.

    Raises:
        ValueError: models whose logits are no linear map of the normed stream.
    """
    if model.unembed is None or model.mlm_head is not None:
        raise ValueError("directions of tokens require an unembedding right after the final norm")
    columns = upcast(Weights(model).W_U[:, list(tokens)].detach()).mT * model.config.logit_scale
    return final_norm(model).back(columns)


@torch.no_grad()
def _with_ranks(
    trace: Trace,
    batch: Batch,
    model: Transformer,
    *,
    inner: Reading,
    lens: FittedJacobianLens,
    sites: Sequence[str],
    pos: Places | None,
    weights: Float[Tensor, "n g"] | None,
) -> Mapping[str, Tensor]:
    """What `inner` computes, with `low`, `high` and `stays` of every listed token, `[b depth pos rank]`."""
    values = dict(inner.compute(trace, batch, model))
    tokens = values["top_token"]
    nans = torch.full(tokens.shape, torch.nan, dtype=torch.float64, device=tokens.device)
    for name in ("low", "high", "stays"):
        values[name] = nans.clone()
    if weights is None:
        return values
    columns, real = (to_device(x, tokens.device) for x in columns_of(batch, pos))
    batch.require_one_text("resampled ranks")
    row, place = real.nonzero(as_tuple=True)
    rank = torch.arange(tokens.shape[-1], device=tokens.device).double()
    for name, ranks in {"low": rank, "high": rank, "stays": torch.ones_like(rank)}.items():
        values[name][row, -1, place] = ranks
    for depth, site in enumerate(sites[:-1]):
        state = trace[Read(site)][row, columns[row, place]]
        ranks_cnk = lens_ranks(model, lens, site, state, tokens[row, depth, place], weights)
        values["low"][row, depth, place] = ranks_cnk.quantile(0.025, 1, interpolation="lower")
        values["high"][row, depth, place] = ranks_cnk.quantile(0.975, 1, interpolation="higher")
        values["stays"][row, depth, place] = (ranks_cnk < tokens.shape[-1]).double().mean(1)
    return values


def lens_ranks(
    model: Transformer,
    lens: FittedJacobianLens,
    site: str,
    state: Float[Tensor, "c d"],
    tokens: Int[Tensor, "c k"],
    weights: Float[Tensor, "n g"],
) -> Float[Tensor, "c n k"]:
    """Rank of each state's tokens under n lenses, each the mean of the groups' J with one row of `weights`.

    J x is linear in J, so it is computed once for each group and then averaged.
    """
    assert lens.by_group is not None
    groups = lens.by_group[:, lens.place(site)].to(state.device)
    mapped_cgo = torch.einsum("god,cd->cgo", groups, state.to(groups.dtype))
    mapped_cno = weights.to(mapped_cgo) @ mapped_cgo  # [n g] @ [c g o] -> [c n o]
    ranks = []
    size = max(1, CHUNK // len(weights))
    for some_mapped, listed in zip(mapped_cno.split(size), tokens.split(size), strict=True):
        logits = model.read_out(upcast(some_mapped))  # [c n v]
        listed_logits = logits.gather(-1, listed[:, None].expand(-1, len(weights), -1))
        ranks.append(
            torch.stack(
                [(logits > listed_logits[..., [i]]).sum(-1) for i in range(listed_logits.shape[-1])], -1
            )
        )
    return torch.cat(ranks).double()


def _torch_file_content(path: Path) -> object:
    """The content of a torch file of tensors and plain values; raises ValueError if the file holds anything else."""
    try:
        return torch.load(regular(path), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as cause:
        raise ValueError(
            f"{path} is refused, and nothing in it was run: it holds more than tensors"
        ) from cause
    except Exception as cause:  # a damaged pickle raises errors of many types
        raise ValueError(f"{path} is not a readable torch file (truncated?): {cause}") from cause


def _neuronpedia_matrices(content: object, path: Path | str, last: int) -> tuple[dict[int, Tensor], int]:
    """The mean Jacobian of each layer, and the number of prompts; sums of an unfinished fit become means."""
    required = (
        f"{path}: a Jacobian lens is required, matrices by layer as 'J' (or 'jacobian_sum' and 'n_done')"
    )
    if not isinstance(content, Mapping):
        raise ValueError(f"{required}, got {type(content).__name__}")
    summed = "J" not in content
    matrices = content.get("jacobian_sum" if summed else "J")
    prompts = content.get("n_done" if summed else "n_prompts", 0)
    fits = isinstance(matrices, Mapping) and all(
        isinstance(layer, int) and isinstance(x, Tensor) and x.is_floating_point()
        for layer, x in matrices.items()
    )
    if not fits or not matrices or not isinstance(prompts, int) or prompts < summed:
        raise ValueError(f"{required}, got the keys {', '.join(map(str, content))}")
    more = content.get("metadata")
    towards = content.get("target_layer", more.get("target_layer") if isinstance(more, Mapping) else None)
    if towards not in (None, last):
        raise ValueError(
            f"{path}: J towards the stream after layer {last} is required, this one goes to {towards}"
        )
    return {layer: x / prompts if summed else x for layer, x in matrices.items()}, prompts
