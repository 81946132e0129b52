"""What every analysis promises, run on every analysis: a new one is one line in `CASES`.

Splitting, reordering or padding the rows changes no number, neither does the dtype beyond rounding, a second run gives
the same bits, and the result has the dims its door declares.
"""

import functools
import pickle
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor

import interp
from interp.attention.heads import SCORES, RepeatedTokens, head_scores
from interp.attention.sentences import MENTIONS, name_attention
from interp.data.batch import Batch
from interp.dynamics.in_context import chosen_losses, position_losses
from interp.features.sae import SAE, TopK
from interp.features.sae_metrics import reconstruction
from interp.features.top_examples import top_activations
from interp.lenses import BackwardLens, GradientCosines, GradientRank, LateLayers, LogitLens, OutputLens
from interp.model import ModelConfig, Transformer
from interp.passes.analysis import Analysis, Question, Questions, run_batches
from interp.passes.observe import as_model
from interp.plot import cards, choice
from interp.residual import Attribute, Orders, Paths, TermImportance
from interp.tokens.alti_logit import alti_logit
from interp.tokens.token_attribution import METHODS, layer_matrices, mixed_attribution
from tests.configs import CONFIGS, D_VOCAB, build, some_tokens
from tests.contract.case import ENDS, Case, Dims
from tests.contract.depth_cases import DEPTH_CASES
from tests.contract.test_pictures import PNG, WITHOUT_PLOT
from tests.loops import over

DATA = RepeatedTokens(period=5, repeats=3, rows=5)
MODELS = ("gpt2", "llama-gqa", "attention-only-rotary")


def _reconstruction(config: ModelConfig) -> Analysis:
    """An autoencoder of random weights, active on 3 features out of 40."""
    dice, d = torch.Generator().manual_seed(0), config.d_model
    shapes = {"W_enc": (d, 40), "b_enc": (40,), "W_dec": (40, d), "b_dec": (d,)}
    weights = {
        name: torch.randn(shape, dtype=torch.float64, generator=dice) for name, shape in shapes.items()
    }
    return reconstruction(SAE(TopK(3), weights), "blocks.1.hook_resid_pre")


def of(question: Question) -> Callable[[ModelConfig], Analysis]:
    """What a question asks of any model of a config."""

    def made(config: ModelConfig) -> Analysis:
        asked = question.asked(as_model(Transformer(config)))
        assert isinstance(asked, Analysis)
        return asked

    return made


_PARTS: Dims = {"value": ("prompt", "part"), "total": ("prompt",)}
_CELL = ("prompt", "depth", "pos")
_MATRIX = ("prompt", "matrix", "layer")
_SCORED = ("value", "low", "high", "null", "n")
CASES: dict[str, Case] = {
    "name_attention": Case(name_attention, dict.fromkeys(MENTIONS, ("prompt", "layer", "head")), ("left",)),
    **{
        f"attribution-{parts}": Case(
            of(Attribute(parts=parts)),  # type: ignore[arg-type]
            {**_PARTS, "by_source": ("prompt", "layer", "head", "source")} if parts == "source" else _PARTS,
            ("left", "right"),
            needs_mlp=parts == "neuron",
        )
        for parts in ("layer", "sublayer", "head", "source", "neuron")
    },
    **{
        f"lens{which}": Case(
            of(question),
            {
                **dict.fromkeys(("entropy", "kl", "target_rank", "target_prob"), _CELL),
                **dict.fromkeys(("top_token", "top_prob", "word"), (*_CELL, "rank")),
            },
            ("left", "right"),
        )
        for which, question in {
            "": LogitLens(top=3),
            "-states": LogitLens(top=3, sites=("resid_pre", "resid_post"), pos=(0, -1)),
        }.items()
    },
    **{
        f"output_lens-{part}": Case(
            of(OutputLens(part, top=3)),
            {
                **dict.fromkeys(("vocabulary_mean", "target_logit", "norm"), _CELL[::2]),
                **{
                    f"{end}_{what}": (*_CELL[::2], "rank")
                    for end in ("top", "bottom")
                    for what in ("token", "logit", "word")
                },
            },
            ("left", "right"),
            needs_mlp="N" in part,
        )
        for part in ("L0H1", "L1.attn", "L1N5")
    },
    "late_layers": Case(
        of(LateLayers(frequencies=torch.arange(1.0, D_VOCAB + 1))),
        dict.fromkeys((*_SCORED, "null_sd"), ("part", "score")),
        ("left", "right"),
    ),
    "backward_lens": Case(
        of(BackwardLens(matrices=("W_O", "W_V"), top=3)),
        {
            **dict.fromkeys(("x", "delta", "relative_update", "target_rank", "word"), (*_MATRIX, "pos")),
            **{
                f"{end}_{what}": (*_MATRIX, "pos", "rank")
                for end in ("top", "bottom")
                for what in ("token", "word")
            },
        },
        ("left", "right"),
    ),
    "gradient_rank": Case(
        of(GradientRank(matrices=("W_O",))), {"value": _MATRIX, "tokens": ("prompt",)}, ("left", "right")
    ),
    "gradient_cosines": Case(
        of(GradientCosines(matrices=("W_O", "W_V"))), {"value": (*_MATRIX, "other_layer")}, ("left", "right")
    ),
    "paths": Case(
        of(Paths()), {"value": ("prompt", "path"), "total": ("prompt",)}, ("left", "right"), needs_no_mlp=True
    ),
    "orders": Case(
        of(Orders()), {"value": ("prompt", "order", "pos", "vocab")}, ("left", "right"), needs_no_mlp=True
    ),
    "term_importance": Case(
        of(TermImportance()),
        {**dict.fromkeys(_SCORED, ("term", "score")), "terms": ("term",)},
        ("left", "right"),
        needs_no_mlp=True,
    ),
    "in_context": Case(
        partial(position_losses, early=2, late=6),
        {
            **dict.fromkeys(("loss", "loss_low", "loss_high", "count"), ("index",)),
            **dict.fromkeys(("score", "score_low", "score_high"), ()),
        },
        ("left", "right"),
    ),
    "one_token_losses": Case(
        chosen_losses, dict.fromkeys(("loss", "index"), ("example",)), ("left", "right")
    ),
    "alti_logit": Case(
        alti_logit,
        {
            "score": ("prompt", "pos"),
            **dict.fromkeys(("initial", "mlp", "bias", "total", "error"), ("prompt",)),
        },
        ("left",),
    ),
    **{
        f"token_attribution-{name}": Case(
            partial(mixed_attribution, how=METHODS[name]), {"score": ("prompt", "pos")}, ("left", "right")
        )
        for name in ("values", "flow", "norm_rollout", "alti")
    },
    "layer_mixing": Case(
        partial(layer_matrices, kernel="norms"),
        {"contribution": ("prompt", "layer", "query", "key"), "mixing_ratio": ("prompt", "layer", "query")},
        ("left", "right"),
    ),
    "reconstruction": Case(
        _reconstruction,
        {
            **dict.fromkeys(("l0", "mse", "explained_variance", "dead_fraction"), ()),
            "density": ("feature",),
            "mean": ("coordinate",),
        },
        ("left", "right"),
    ),
    **{
        f"top_activations-{site}": Case(
            partial(top_activations, site=f"blocks.1.{site}", k=3, context=(2, 1)),
            {
                **dict.fromkeys(("value", "row", "pos", *more), (dim, "rank")),
                **dict.fromkeys(("tokens", "activation"), (dim, "rank", "offset")),
                **dict.fromkeys((f"{x}{end}" for x in ("density", "mean") for end in ENDS), (dim,)),
                "max": (dim,),
                "quantiles": (dim, "q"),
            },
            ("left", "right"),
        )
        for site, dim, more in (
            ("hook_resid_pre", "coordinate", ()),
            ("attn.hook_result", "head", ()),
            ("attn.hook_pattern", "head", ("key", "key_token")),
        )
    },
    "heads": Case(
        partial(head_scores, data=DATA),
        {
            **{f"{score}{end}": ("layer", "head") for score in (*SCORES, "copying") for end in ENDS},
            **{f"{score}_null": ("layer",) for score in SCORES},
            **{f"kernel{end}": ("layer", "head", "distance") for end in ENDS},
            "kernel_null": ("layer", "distance"),
            "copying_null": (),
            "peak_distance": ("layer", "head"),
        },
    ),
    **DEPTH_CASES,
}


def models(case: str) -> list[str]:
    """The models that the analysis can be asked about."""
    needs_mlp, needs_none = CASES[case].needs_mlp, CASES[case].needs_no_mlp
    return [name for name in MODELS if not (needs_none if CONFIGS[name].mlp else needs_mlp)]


def on_every_model(test: Callable[..., None]) -> Callable[..., None]:
    """The test on every analysis, in a loop over the models."""
    return pytest.mark.parametrize("case", CASES)(over("model", models)(test))


def rows(case: str) -> Batch:
    """Five rows with answers; repeated tokens where the analysis asks for them."""
    tokens = DATA.tokens(D_VOCAB, 0) if case == "heads" else some_tokens(rows=5, n=9)
    answer, wrong = torch.tensor([3, 14, 7, 1, 9]), torch.tensor([5, 1, 30, 2, 8])
    if case == "name_attention":
        tokens[:, 2], tokens[:, 4], tokens[:, 7] = answer, wrong, wrong
    return Batch(tokens, bos=True).with_answers(answer, wrong)


def result(case: str, model: str, *batches: Batch, dtype: torch.dtype = torch.float64) -> xr.Dataset:
    analysis = CASES[case].make(CONFIGS[model])
    return run_batches([analysis], build(model, dtype), batches)[analysis.name]


@functools.cache
def plain_result(case: str, model: str) -> xr.Dataset:
    """That of all rows in one batch."""
    return result(case, model, rows(case))


@functools.cache
def result_of_parts(case: str, model: str) -> xr.Dataset:
    """That of batches of two rows."""
    return result(case, model, *rows(case).split(2))


def agree(one: xr.Dataset, other: xr.Dataset, tolerance: float = 1e-9) -> None:
    assert one.data_vars.keys() == other.data_vars.keys()
    for name in one.data_vars:
        if one[name].dtype.kind in "OU":
            assert (one[name].values == other[name].values).all(), name
            continue
        np.testing.assert_allclose(
            one[name].values, other[name].values, rtol=tolerance, atol=tolerance, err_msg=str(name)
        )


def picked(batch: Batch, order: list[int]) -> Batch:
    index = torch.tensor(order)
    assert batch.answer is not None and batch.wrong is not None
    return Batch(batch.tokens[index], bos=batch.bos).with_answers(batch.answer[index], batch.wrong[index])


@on_every_model
def test_splitting_the_rows_changes_no_number(case: str, model: str) -> None:
    agree(result_of_parts(case, model), plain_result(case, model))
    for size in (1, 4):
        agree(result(case, model, *rows(case).split(size)), plain_result(case, model))


@on_every_model
def test_reordering_the_rows_reorders_the_result_and_nothing_else(case: str, model: str) -> None:
    order = [3, 0, 4, 2, 1]
    moved, plain = result(case, model, picked(rows(case), order)), plain_result(case, model)
    row = CASES[case].row_dim
    if "row" in plain:  # a list that names rows
        place = torch.tensor(order).argsort().numpy()
        plain = plain.assign(row=plain.row.copy(data=place[plain.row.values]))
    agree(moved, plain.isel({row: order}) if row else plain)


@on_every_model
def test_an_answer_belongs_to_its_row(case: str, model: str) -> None:
    """One row alone gives what it gives among others."""
    row = CASES[case].row_dim
    if row is None:
        return
    agree(result(case, model, picked(rows(case), [2])), plain_result(case, model).isel({row: [2]}))


def padded(batch: Batch, side: str, by: int = 3) -> Batch:
    """The same rows between others' garbage: `by` columns that are not kept."""
    extra = torch.full((len(batch), by), 17)
    kept, hidden = torch.ones_like(batch.tokens).bool(), torch.zeros_like(extra).bool()
    parts: list[tuple[Tensor, Tensor]] = [(batch.tokens, kept), (extra, hidden)]
    tokens, keep = (torch.cat(x, 1) for x in zip(*(parts if side == "right" else parts[::-1]), strict=True))
    return Batch(tokens, keep, bos=batch.bos).with_answers(batch.answer, batch.wrong)  # type: ignore[arg-type]


@on_every_model
@over("side", ["left", "right"])
def test_padding_changes_no_number_or_is_refused(case: str, model: str, side: str) -> None:
    batch = padded(rows(case), side)
    if side not in CASES[case].padding:
        with pytest.raises(ValueError, match="require"):
            result(case, model, batch)
        return
    plain, found = plain_result(case, model), result(case, model, batch)
    for axis in ("pos", "source", "query", "key"):
        if axis in found.dims:
            n = plain.sizes[axis]
            found = found.isel({axis: slice(0, n) if side == "right" else slice(-n, None)})
    agree(found, plain)


@on_every_model
def test_it_travels_to_other_processes_and_its_partial_results_come_back_bit_for_bit(
    case: str, model: str
) -> None:
    analysis = pickle.loads(pickle.dumps(CASES[case].make(CONFIGS[model])))
    questions, network = Questions.of([analysis], CONFIGS[model]), build(model, torch.float64)
    for batch in rows(case).numbered().split(2):
        partial_ = questions.reduced(questions.values(network, batch), batch.identities())[analysis.name]
        tensors = partial_.tensors()
        back = analysis.reduction.load(tensors).tensors()
        assert back.keys() == tensors.keys()
        assert all(torch.equal(back[name].nan_to_num(7.5), tensors[name].nan_to_num(7.5)) for name in tensors)


@on_every_model
def test_a_run_gives_what_the_plain_loop_gives(case: str, model: str) -> None:
    made, network = CASES[case].make(CONFIGS[model]), build(model, torch.float64)
    found = interp.run([made], network, list(rows(case).numbered().split(2)))[made.name]
    plain = result_of_parts(case, model)
    assert set(plain.data_vars) <= set(found.data_vars)
    agree(found[list(plain.data_vars)], plain)


@on_every_model
def test_float32_agrees_with_float64_to_rounding(case: str, model: str) -> None:
    narrow, wide = result(case, model, rows(case), dtype=torch.float32), plain_result(case, model)
    ids = ["top_token", "bottom_token", "word", "top_word", "bottom_word"]
    agree(narrow.drop_vars(ids, errors="ignore"), wide.drop_vars(ids, errors="ignore"), 3e-4)


@on_every_model
def test_a_second_run_gives_the_same_bits(case: str, model: str) -> None:
    again = result(case, model, *rows(case).split(2))
    xr.testing.assert_identical(again, result_of_parts(case, model))


@on_every_model
def test_the_result_has_the_dims_its_door_declares(case: str, model: str) -> None:
    found = plain_result(case, model)
    assert {name: found[name].dims for name in found.data_vars} == CASES[case].dims
    named = {"component", "depth", "layer", "head"} & {str(d) for d in found.dims}
    missing = {d for d in named if d not in found.coords}
    assert missing <= {"layer", "head"} if "by_source" in found else not missing


@on_every_model
def test_the_result_names_what_gave_it(case: str, model: str) -> None:
    assert plain_result(case, model).attrs["interp_analysis"] in {*choice.PLOTS, *WITHOUT_PLOT}


@pytest.mark.parametrize("case", CASES)
def test_its_picture_can_be_drawn(case: str) -> None:
    """That of one model: a plot sees the dims of a result, which are the same for all."""
    found = plain_result(case, models(case)[0])
    if choice.draw_of(found) is not None:
        assert cards.png(lambda ax: choice.drawn(found, ax=ax))[0].startswith(PNG)


@on_every_model
def test_the_analysis_reads_only_sites_that_the_model_has_and_leaves_it_alone(case: str, model: str) -> None:
    network: Transformer = build(model)
    state = {name: value.clone() for name, value in network.state_dict().items()}
    result(case, model, rows(case))
    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())
    assert all(p.grad is None for p in network.parameters())


def test_every_analysis_of_the_package_is_in_the_table() -> None:
    """A function that returns an `Analysis` and is not listed above would go untested."""
    import importlib
    import pkgutil

    import interp.analyses

    makers = set()
    for info in pkgutil.iter_modules(interp.analyses.__path__):
        module = importlib.import_module(f"interp.analyses.{info.name}")
        for name, value in vars(module).items():
            hints = getattr(value, "__annotations__", {})
            if getattr(value, "__module__", "") == module.__name__ and hints.get("return") in (
                Analysis,
                "Analysis",
            ):
                makers.add(f"{info.name}.{name}")
    assert makers == {
        "alti_logit.alti_logit",
        "attention_rows.head_entropy",
        "attention_rows.weights_by_keys",
        "consensus.token_angles",
        "flow_routes.flow_shares",
        "rank_collapse.residuals",
        "attribution.attribution",
        "late_layers.last_layer",
        "lens.lens",
        "output_lens.output",
        "heads.head_scores",
        "sentences.name_attention",
        "in_context.position_losses",
        "in_context.chosen_losses",
        "sae_metrics.reconstruction",
        "paths.order_losses",
        "paths.path_expansion",
        "token_attribution.layer_matrices",
        "token_attribution.mixed_attribution",
        "top_examples.top_activations",
    }
