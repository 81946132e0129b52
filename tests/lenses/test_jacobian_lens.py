"""The Jacobian lens: autograd's whole Jacobian, closed forms, finite differences, and TransformerLens' own fit."""

import importlib
import re
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import xarray as xr
from einops import einsum
from torch import Tensor, nn

import interp
from interp import Batch, Edit, HookedTransformer, Read
from interp.data.sources import open_source
from interp.edits import Set
from interp.lenses import FittedJacobianLens, JacobianLens, jacobian_lens
from interp.lenses.fitted_jacobian_lens import lens_ranks, token_directions
from interp.lenses.jacobian_lens import JacobianGroups, prompt_jacobian
from interp.model import Transformer
from interp.model.sites import stream_after
from interp.model.weights import Weights
from interp.passes.observe import text_of
from interp.passes.rules import under_rules
from interp.runs.progress import BatchDone, Progress
from interp.wrapped import Wrapped
from tests.batches import in_batches
from tests.configs import CONFIGS, build, perturbed, some_tokens
from tests.contract.case import agree
from tests.loops import over
from tests.tiny import CORPUS
from tests.tolerances import assert_close
from tests.wrapped import wrapping

EVERY = (
    "gpt2", "llama-gqa", "mqa", "parallel", "gemma2", "gemma3", "olmo2", "post-norm", "window", "bidirectional",
    "bloom", "t5", "gpt-oss", "granite-moe", "glm4-moe", "macaron", "cohere2",
)  # fmt: skip
SKIP = 2
lens_module = importlib.import_module("interp.lenses.jacobian_lens")


def deep(name: str = "gpt2", layers: int = 3) -> Transformer:
    """A model of three layers, so that two of them have a J."""
    return perturbed(replace(CONFIGS[name], n_layers=layers))


def whole_jacobian(model: Transformer, tokens: Tensor, layer: int, skip: int = SKIP) -> Tensor:
    """J of one prompt from all of d x_final[t] / d x_l[s]."""
    with torch.no_grad():
        x = model(tokens[None], stop=layer + 1)

    def later(state: Tensor) -> Tensor:
        out: Tensor = model(state, start=layer + 1, stop=model.config.n_layers)
        return out[0, skip:-1].sum(0)

    found = torch.autograd.functional.jacobian(later, x)
    assert isinstance(found, Tensor)
    return found[:, 0, skip:-1].mean(1)


def mean_jacobian(model: Transformer, tokens: Tensor, layer: int, skip: int = SKIP) -> Tensor:
    return torch.stack([whole_jacobian(model, row, layer, skip) for row in tokens]).mean(0)


def fitted(model: Transformer, data: object, /, **how: object) -> FittedJacobianLens:
    return jacobian_lens(model, data, skip=SKIP, **how)  # type: ignore[arg-type]


def test_after_the_last_layer_it_is_the_identity() -> None:
    lens = fitted(build("gpt2"), some_tokens(), layers=[1])
    assert torch.equal(lens.jacobian[0], torch.eye(24, dtype=torch.float64))


@over("name", EVERY)
def test_it_is_the_mean_of_autograds_whole_jacobian(name: str) -> None:
    model, tokens = build(name), some_tokens()
    assert_close(fitted(model, tokens).jacobian[0], mean_jacobian(model, tokens, 0))


@over("name", ["gpt2", "llama-gqa", "gemma2", "gpt-oss"])
def test_under_rules_it_is_that_of_the_ruled_model(name: str) -> None:
    model, tokens = build(name), some_tokens()
    under = under_rules(model, "relp")
    lens = fitted(model, tokens, rules="relp")
    assert_close(lens.jacobian[0], mean_jacobian(under, tokens, 0))
    assert not torch.allclose(lens.jacobian, fitted(model, tokens).jacobian)
    assert lens.about["rules"] == "norm, activation, gate, pattern"


@pytest.mark.slow
@over("kind", ["olmo3", "falcon", "smollm3"])
def test_wrapped_decoder_has_the_jacobian_of_the_same_weights_in_our_code(kind: str) -> None:
    ours, tokens = HookedTransformer.from_pretrained(wrapping.network(kind)), wrapping.tokens()
    assert not isinstance(ours.transformer, Wrapped)
    found, expected = (fitted(x, tokens).jacobian for x in (wrapping.wrapped(kind), ours.transformer))
    assert_close(found, expected)


def test_wrapped_decoder_without_attention_has_its_own_codes_gradients() -> None:
    network, tokens = wrapping.network("mamba"), wrapping.tokens()
    blocks, seen = network.get_submodule("backbone.layers"), list[Tensor]()
    assert isinstance(blocks, nn.ModuleList)

    def kept(block: nn.Module, given: object, out: Tensor) -> Tensor:
        seen.append(out if out.requires_grad else out.detach().requires_grad_())
        return seen[-1]

    hooks = [blocks[i].register_forward_hook(kept) for i in (1, -1)]
    network(tokens)
    for hook in hooks:
        hook.remove()
    towards = torch.randn(seen[0].shape[-1], generator=torch.Generator().manual_seed(0))
    (grad,) = torch.autograd.grad((seen[1][:, SKIP:-1] @ towards).sum(), seen[0])
    found = fitted(wrapping.wrapped("mamba"), tokens, layers=[1]).jacobian[0]
    assert_close(towards @ found, grad[:, SKIP:-1].mean((0, 1)))


def test_of_several_layers_every_one_is_its_own() -> None:
    model, tokens = deep(), some_tokens(rows=2)
    lens = fitted(model, tokens, layers=[1, 0])
    assert lens.layers == (0, 1)
    for layer in lens.layers:
        assert_close(lens.jacobian[layer], mean_jacobian(model, tokens, layer))


def test_rows_computed_in_parts_are_the_rows_computed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = build("llama-gqa"), some_tokens()
    whole = fitted(model, tokens).jacobian
    module = importlib.import_module("interp.lenses.jacobian_lens")
    monkeypatch.setattr(module, "TOGETHER", 5 * tokens.shape[1])
    assert_close(fitted(model, tokens).jacobian, whole)


def test_it_says_where_a_small_change_arrives() -> None:
    model, tokens = build("gemma2"), some_tokens(rows=1)
    jacobian, step = fitted(model, tokens).jacobian[0], 1e-5
    x = model(tokens, stop=1)
    for i in (0, 7, 23):
        change = []
        for s in range(SKIP, x.shape[1] - 1):
            moved = torch.zeros_like(x)
            moved[0, s, i] = step
            up, down = (model(x + way * moved, start=1, stop=2)[0, SKIP:-1].sum(0) for way in (1, -1))
            change.append((up - down) / (2 * step))
        torch.testing.assert_close(jacobian[:, i], torch.stack(change).mean(0), rtol=1e-6, atol=1e-6)


def test_with_frozen_patterns_and_norms_it_is_a_product_of_maps() -> None:
    """(1 + sum_h P_h OV_h) of every later layer, over positions and dimensions together."""
    config = replace(CONFIGS["attention-only"], n_layers=3)
    model, tokens = perturbed(config), some_tokens(rows=1)
    sites = [f"blocks.{layer}.{site}" for layer in (1, 2) for site in ("attn.hook_pattern", "ln1.hook_scale")]
    trace = interp.observe(model, Batch(tokens), [Read(site) for site in sites]).trace
    lens = fitted(model.edited([Edit(site, Set(trace[site])) for site in sites]), tokens)
    n, d = tokens.shape[1], config.d_model
    identity = torch.eye(n * d, dtype=torch.float64).view(n, d, n, d)
    centre, whole = torch.eye(d, dtype=torch.float64) - 1 / d, identity
    for layer in (1, 2):
        w, norm = Weights(model).layer(layer), model.block(layer).ln1
        assert norm.gamma is not None and w.W_V is not None and w.W_O is not None
        ov = (centre * norm.gamma) @ w.W_V @ w.W_O
        pattern = (
            trace[f"blocks.{layer}.attn.hook_pattern"][0] / trace[f"blocks.{layer}.ln1.hook_scale"][0, :, 0]
        )
        step = identity + einsum(pattern, ov, "h t s, h i o -> t o s i")
        whole = einsum(step, whole, "t o m c, m c s i -> t o s i")
        if layer == 1:
            last = identity
        last = step if layer == 2 else last
    for found, expected in zip(lens.jacobian, (whole, last), strict=True):
        assert_close(found, expected[SKIP:-1, :, SKIP:-1].sum(0).mean(1))


def test_two_fits_merge_to_the_joint_fit() -> None:
    model, tokens = build("gpt2"), some_tokens(rows=6)
    rows = torch.eye(24, dtype=torch.float64)
    each = torch.stack([prompt_jacobian(model, Batch(row[None]), [0], rows, SKIP) for row in tokens])
    values = {"jacobian": each, "positions": torch.full((6,), 6)}
    kind, number = JacobianGroups(4), torch.arange(6)
    joint = kind.of(values, number)
    parts = [kind.of({k: v[i] for k, v in values.items()}, number[i]) for i in (slice(0, 1), slice(1, 6))]
    for merged in (parts[0].merge(parts[1]), parts[1].merge(parts[0])):
        torch.testing.assert_close(merged.total, joint.total, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(merged.error(), joint.error(), rtol=1e-12, atol=1e-12)
        assert merged.prompts.tolist() == joint.prompts.tolist() == [2, 2, 1, 1]
    again = kind.load(joint.tensors())
    assert torch.equal(again.total, joint.total) and torch.equal(again.mean(), joint.mean())


def test_the_error_is_that_of_the_mean_over_prompts() -> None:
    model, tokens = build("gpt2"), some_tokens(rows=6)
    each = torch.stack([whole_jacobian(model, row, 0) for row in tokens])
    expected = (each.var(0).sum() / 6).sqrt() / each.mean(0).norm()
    error = fitted(model, tokens).error
    assert error is not None
    assert_close(error[0], expected)


def test_it_stops_at_the_precision_and_not_before_sixteen_prompts() -> None:
    model = build("gpt2")
    same, other = some_tokens(rows=1).expand(20, -1), some_tokens(rows=12)
    assert fitted(model, in_batches(model, same, 3)).prompts == 18
    found = fitted(model, other, precision=1e-9)
    assert found.prompts == 12 and found.error is not None and float(found.error[0]) > 1e-3
    assert fitted(model, same, precision=None).prompts == 20


def test_prompts_are_asked_for_in_the_order_given_whatever_their_lengths() -> None:
    """A fit that stops has seen the first prompts, not the longest ones."""
    model, short = build("gpt2"), some_tokens(rows=1)[0].tolist()[:7]
    rows = [short] * 16 + [some_tokens(rows=1)[0].tolist()] * 4
    found, alone = fitted(model, in_batches(model, rows, 4)), fitted(model, [short])
    assert found.prompts == 16
    assert_close(found.jacobian, alone.jacobian)


def test_a_long_fit_says_before_it_begins_how_many_products_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of a row passes n - 1 - skip columns and the blocks after the lowest layer, here 1 of 2."""
    model, tokens = build("gpt2"), some_tokens(rows=3, n=9)
    monkeypatch.setattr("interp.passes.duration.A_MINUTE", 1.0)
    text = "at most 24 vector-Jacobian products for each of 3 prompts, the work of about 8 passes over them: about "
    assert 24 * 3 * (9 - 1 - SKIP) * 1 / (3 * 9 * 2) == 8.0
    with pytest.warns(interp.Note, match=re.escape(text)):
        fitted(model, tokens)
    with pytest.warns(
        interp.Note, match=r"at most 1 vector-Jacobian products for each of 3 prompts, [^;]*; later"
    ):
        fitted(model, tokens, tokens=[5])
    monkeypatch.setattr("interp.passes.duration.A_MINUTE", 1e12)
    with warnings.catch_warnings():
        warnings.simplefilter("error", interp.Note)
        fitted(model, some_tokens(rows=3, n=8))


def test_what_counts_is_differentiated_alone() -> None:
    """The columns skipped are constants, the last reaches none that counts: 9 - 1 - 2 of 9, and with edits all."""
    model, tokens = build("llama-gqa"), some_tokens(rows=1, n=9)
    columns = []
    for network in (model, model.edited(interp.Edit("L0.mlp", interp.edits.Scale(1.0)))):
        text = Batch(tokens)
        columns.append(lens_module._pass_columns(network, text, SKIP)[0])
        found = lens_module.prompt_jacobian(network, text, [0], torch.eye(24, dtype=torch.float64), SKIP)
        assert_close(found[0], whole_jacobian(model, tokens[0], 0))
    assert columns == [slice(SKIP, 8), slice(0, 9)]


def test_the_result_says_whether_the_data_ended_first() -> None:
    model, same = build("gpt2"), some_tokens(rows=1).expand(20, -1)
    batches = list(Batch(same).split(4))
    found = interp.run([JacobianLens(skip=SKIP)], model, batches)
    assert found["jacobian_lens"].ended == "precise enough" and found.complete and found.rows == 16
    found = interp.run([JacobianLens(skip=SKIP)], model, batches[:1])
    assert found["jacobian_lens"].ended == "at the end of the data" and found.complete
    asked = [JacobianLens(skip=SKIP), interp.lenses.LogitLens(top=2)]
    assert interp.run(asked, model, batches).rows == 20, "other questions ask for all rows"


def stream(model: Transformer, rows: int) -> interp.Stream:
    source = open_source(some_tokens(rows=rows).tolist())
    return interp.Stream(source, text_of(model), tokens_per_batch=32, rows_per_window=2)


def test_a_run_that_goes_on_stops_where_one_that_was_not_interrupted_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("gpt2")
    data = stream(model, rows=24)
    asked = [JacobianLens(skip=SKIP, precision=0.3)]
    expected = interp.run(asked, model, data)
    assert expected["jacobian_lens"].ended == "precise enough" and expected.rows < 24
    add, taken = Progress.add, list[object]()

    def dies(self: Progress, done: BatchDone) -> None:
        add(self, done)
        taken.append(done)
        if len(taken) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "add", dies)
    with pytest.raises(KeyboardInterrupt):
        interp.run(asked, model, data, out=tmp_path / "run")
    monkeypatch.setattr(Progress, "add", add)
    for _ in range(2):
        found = interp.run(asked, model, data, out=tmp_path / "run", resume=True)
        xr.testing.assert_identical(found["jacobian_lens"], expected["jacobian_lens"])
        assert found.rows == expected.rows and found.complete
    assert (tmp_path / "run" / "jacobian_lens.nc").exists()


def test_shards_together_give_the_bits_of_one_run_over_all_windows(tmp_path: Path) -> None:
    model = build("gpt2")
    data = stream(model, rows=12)
    for shard in ("0/2", "1/2"):
        interp.run([JacobianLens(skip=SKIP)], model, data, out=tmp_path / "run", shard=shard)
    found = interp.run([JacobianLens(skip=SKIP)], model, data, out=tmp_path / "run", resume=True)
    expected = interp.run([JacobianLens(skip=SKIP, precision=None)], model, data)["jacobian_lens"]
    assert found.rows == 12
    for name in ("value", "by_group", "error"):
        xr.testing.assert_equal(found["jacobian_lens"][name], expected[name])


def test_some_tokens_have_their_rows_of_the_whole() -> None:
    model, tokens = deep("llama-gqa"), some_tokens()
    whole, some = fitted(model, tokens), fitted(model, tokens, tokens=[5, 9, 30])
    assert some.jacobian.shape == (2, 3, 24)
    assert_close(some.jacobian, token_directions(model, [5, 9, 30]) @ whole.jacobian)
    assert_close(some.directions([9, 5]), whole.directions([9, 5]))
    assert_close(some.directions(30), whole.directions(30))
    with pytest.raises(
        ValueError, match=r"the whole of J is required; this lens was fitted for 3 tokens alone"
    ):
        some.read(tokens)
    with pytest.raises(ValueError, match=r"fitted for the tokens \[5, 9, 30\], not for 6"):
        some.directions(6)


def test_short_prompts_are_left_out_and_said() -> None:
    model, tokens = build("gpt2"), some_tokens(rows=2)
    rows = [tokens[0].tolist(), [1, 2, 3], tokens[1].tolist(), [4]]
    assert_close(fitted(model, rows).jacobian, fitted(model, tokens).jacobian)
    found = interp.run([JacobianLens(skip=SKIP)], model, Batch.of(rows))["jacobian_lens"]
    assert found.attrs["left_out"] == 2 and found.attrs["prompts"] == 2
    with pytest.raises(ValueError, match=r"prompts of at least 4 tokens are required, with skip=2"):
        fitted(model, [[1, 2, 3]])


def test_padding_and_packing_change_no_number() -> None:
    model = build("llama-gqa")
    rows = [row[:n].tolist() for row, n in zip(some_tokens(rows=4, n=9), (9, 5, 7, 9), strict=True)]
    ask = [JacobianLens(skip=SKIP)]
    plain = interp.run(ask, model, [Batch.of([row]) for row in rows])["jacobian_lens"]
    left = interp.run(ask, model, Batch.of(rows, side="left"))["jacobian_lens"]
    packed = interp.run(ask, model, Batch.packed(rows, 16, row=torch.arange(4)))["jacobian_lens"]
    for found in (left, packed):
        agree(found, plain)


# --- the fitted lens ----------------------------------------------------------------------------------------------


def identity(model: Transformer) -> FittedJacobianLens:
    config = model.config
    every = torch.eye(config.d_model, dtype=model.dtype).expand(config.n_layers - 1, -1, -1).clone()
    return FittedJacobianLens(model, tuple(range(config.n_layers - 1)), every)


def test_with_the_identity_it_is_the_logit_lens() -> None:
    model, tokens = deep(), some_tokens()
    plain, lens = (
        interp.logit_lens(model, tokens, sites="resid_post", translators=how)
        for how in (None, identity(model))
    )
    assert lens.attrs == plain.attrs
    agree(lens, plain)


@over("name", ["gpt2", "gemma2", "post-norm", "olmo2"])
def test_it_reads_the_logits_of_j_x(name: str) -> None:
    model, tokens = build(name), some_tokens()
    lens = fitted(model, tokens)
    found = lens.read(tokens, top=3)
    x = model(tokens, stop=1)
    expected = model.read_out(x @ lens.jacobian[0].mT).softmax(-1).topk(3)
    assert_close(torch.from_numpy(found.top_prob.values[:, 0]), expected.values)
    assert (found.top_token.values[:, 0] == expected.indices.numpy()).all()
    assert found.depth.values.tolist()[-1] == str(interp.Part.of(stream_after(model.config, 1)))


def test_stream_that_enters_a_block_is_the_one_that_left_the_block_before() -> None:
    model, tokens = deep(), some_tokens()
    lens = fitted(model, tokens)
    after = interp.logit_lens(model, tokens, sites="blocks.0.hook_resid_post", translators=lens)
    before = interp.logit_lens(model, tokens, sites="blocks.1.hook_resid_pre", translators=lens)
    assert_close(torch.from_numpy(before.kl.values), torch.from_numpy(after.kl.values))
    with pytest.raises(
        KeyError, match=r"no Jacobian of 'blocks.0.hook_resid_pre'; there are: .*sites='resid_post'"
    ):
        interp.logit_lens(model, tokens, translators=lens)


def test_ranks_under_resamples_are_those_of_the_resampled_lenses() -> None:
    model, tokens = build("gpt2"), some_tokens(rows=8)
    lens = fitted(model, tokens, groups=4)
    assert lens.by_group is not None and lens.sizes is not None
    weights = lens.draws(20, 3)
    assert weights is not None
    assert_close(weights.sum(1), torch.ones(20, dtype=torch.float64))
    state, listed = model(tokens, stop=1)[0], torch.tensor([[3, 4, 5]]).expand(9, -1)
    found = lens_ranks(model, lens, stream_after(model.config, 0), state, listed, weights)
    for i, weight in enumerate(weights):
        other = sum(w * group[0] for w, group in zip(weight, lens.by_group, strict=True))
        order = model.read_out(state @ other.mT).argsort(descending=True).argsort()
        assert (order.gather(1, listed) == found[:, i].long()).all()


def test_resampled_lenses_spread_as_far_as_the_mean_errs() -> None:
    model, tokens = build("gpt2"), some_tokens(rows=16)
    lens = fitted(model, tokens)
    weights = lens.draws(4000, 0)
    assert weights is not None and lens.by_group is not None and lens.error is not None
    others = torch.einsum("ng,gd->nd", weights, lens.by_group[:, 0].flatten(1))
    spread = (others - lens.jacobian[0].flatten()).square().sum(1).mean().sqrt() / lens.jacobian[0].norm()
    assert abs(float(spread / lens.error[0]) - 1) < 0.05


def test_prompts_that_agree_leave_no_doubt() -> None:
    model, same = build("gpt2"), some_tokens(rows=1).expand(8, -1)
    found = fitted(model, same).read(some_tokens(), top=4, pos=-1)
    assert (
        (found.low == found["rank"]).all()
        and (found.high == found["rank"]).all()
        and (found.stays == 1).all()
    )


def test_without_groups_nobody_knows_how_sure_it_is() -> None:
    model = build("gpt2")
    found = identity(model).read(some_tokens(), top=2)
    assert found.low.isnull().all() and found.stays.isnull().all() and not found.top_prob.isnull().any()
    assert fitted(model, some_tokens(rows=2)).read(some_tokens()).high.isnull().all()


def test_a_direction_is_the_gradient_of_the_tokens_logit() -> None:
    model, tokens = build("llama-gqa"), some_tokens(rows=1)
    lens = fitted(model, tokens, layers=[0, 1])
    x = model(tokens, stop=2)[0, -1]
    logit = lens.directions([3, 7])[1] @ x / model.ln_final.scale(x)
    assert_close(logit, model.read_out(x)[[3, 7]])
    assert_close(lens.directions(3)[0], lens.directions(3)[1] @ lens.jacobian[0])


def test_steering_adds_a_vector_of_the_length_asked_for() -> None:
    model, tokens = deep(), some_tokens()
    lens = fitted(model, tokens)
    site, direction = stream_after(model.config, 1), lens.directions(5)[1]
    seen = [
        interp.observe(model, tokens, [Read(site)], edits).trace[site]
        for edits in ((), lens.steer(5, 2.0, layers=[1]))
    ]
    expected = 2 * direction / direction.norm()
    assert_close(seen[1] - seen[0], expected.expand_as(seen[0]))
    assert [edit.site for edit in lens.steer(5, 1.0)] == [
        stream_after(model.config, layer) for layer in (0, 1)
    ]


def test_a_swap_exchanges_two_coordinates_and_nothing_else() -> None:
    model, tokens = deep(), some_tokens()
    lens = fitted(model, tokens)
    site, basis = stream_after(model.config, 0), lens.directions([5, 9])[0]
    edits = lens.swap(5, 9, layers=[0])
    seen = [interp.observe(model, tokens, [Read(site)], e).trace[site] for e in ((), edits, edits * 2)]
    one, other = (torch.linalg.lstsq(basis.mT, x.reshape(-1, 24).mT).solution for x in seen[:2])
    assert_close(other, one.flip(0))
    rest = [x.reshape(-1, 24).mT - basis.mT @ c for x, c in zip(seen, (one, other), strict=False)]
    assert_close(rest[1], rest[0])
    assert_close(seen[2], seen[0])
    with pytest.raises(ValueError, match="two tokens of different directions are required"):
        lens.swap(5, 5)


# --- files --------------------------------------------------------------------------------------------------------


@over("tokens", [None, [3, 4]])
def test_a_saved_lens_comes_back_as_it_was(tokens: list[int] | None, tmp_path: Path) -> None:
    model = HookedTransformer(build("llama-gqa"))
    lens = jacobian_lens(model, some_tokens(), tokens=tokens, skip=SKIP)
    lens.save(tmp_path / "lens.safetensors")
    again = FittedJacobianLens.load(tmp_path / "lens.safetensors", model)
    for name in ("jacobian", "error", "by_group", "sizes"):
        assert torch.equal(getattr(again, name), getattr(lens, name))
    for name in ("layers", "prompts", "tokens", "about"):
        assert getattr(again, name) == getattr(lens, name)
    assert again.about["ended"] == "at the end of the data"
    with pytest.raises(ValueError, match="is a Jacobian lens of another model"):
        FittedJacobianLens.load(tmp_path / "lens.safetensors", build("mqa"))


def test_a_lens_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="of another model: its parameters differ"):
        interp.logit_lens(
            build("mqa"), some_tokens(), sites="resid_post", translators=identity(build("gpt2"))
        )


def test_a_result_of_a_run_is_the_lens_of_the_function() -> None:
    model, batch = build("gpt2"), Batch(some_tokens())
    found = interp.run([JacobianLens(skip=SKIP)], model, batch)["jacobian_lens"]
    lens, expected = FittedJacobianLens.of_result(found, model), fitted(model, batch)
    assert torch.equal(lens.jacobian, expected.jacobian) and lens.prompts == 3
    assert repr(lens).startswith(
        "FittedJacobianLens(the whole of J, after blocks [0], 3 prompts, standard error"
    )


def test_neuronpedias_files_are_written_and_read(tmp_path: Path) -> None:
    model, path = deep(), tmp_path / "lens.pt"
    lens = fitted(model, some_tokens(), layers=[0, 1, 2])
    lens.to_neuronpedia(path, dtype=torch.float64)
    large = replace(lens, jacobian=lens.jacobian * 1e7)
    with pytest.raises(ValueError, match="J: numbers up to 65504 fit float16"):
        large.to_neuronpedia(tmp_path / "large.pt")
    again = FittedJacobianLens.from_neuronpedia(path, model)
    assert again.layers == (0, 1) and again.prompts == 3 and again.by_group is None
    assert torch.equal(again.jacobian, lens.jacobian[:2])
    content = torch.load(path, weights_only=True)
    assert content["source_layers"] == [0, 1] and content["d_model"] == 24
    sums = {layer: 3 * x for layer, x in content["J"].items()}
    torch.save({"jacobian_sum": sums, "n_done": 3, "target_layer": 2}, path)
    assert_close(FittedJacobianLens.from_neuronpedia(path, model).jacobian, lens.jacobian[:2])


NO_LENS = {
    "a Jacobian lens is required": {"weights": torch.zeros(3)},
    r"layers 0 to 1 are possible in this model, got 2": {"J": {2: torch.zeros(24, 24)}},
    r"J of shape \[24, 24\] is required, got \[24, 23\]": {"J": {0: torch.zeros(24, 23)}},
    "J holds NaN": {"J": {0: torch.full((24, 24), torch.nan)}},
    "this one goes to 1": {"J": {0: torch.zeros(24, 24)}, "metadata": {"target_layer": 1}},
}


@over("message", NO_LENS)
def test_files_of_other_things_are_refused(message: str, tmp_path: Path) -> None:
    torch.save(NO_LENS[message], tmp_path / "lens.pt")
    with pytest.raises(ValueError, match=message):
        FittedJacobianLens.from_neuronpedia(tmp_path / "lens.pt", deep())


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    torch.save({"J": Path("x")}, tmp_path / "lens.pt")
    with pytest.raises(ValueError, match="refused, and nothing in it was run"):
        FittedJacobianLens.from_neuronpedia(tmp_path / "lens.pt", deep())


@over("name", ["gpt2", "llama"])
def test_the_fit_is_that_of_transformer_lens_and_reads_its_files(name: str, tmp_path: Path) -> None:
    theirs = pytest.importorskip("transformer_lens.tools.analysis.jacobian_lens").JacobianLens  # of version 4
    from interp.compat import from_bridge
    from tests.compat.test_bridge import boot

    bridge = boot(name)
    model = from_bridge(bridge)
    fit = theirs.fit(bridge, CORPUS, corpus="tiny", skip_first_positions=SKIP, show_progress=False)
    ours = jacobian_lens(model, list(CORPUS), skip=SKIP)
    assert_near(ours.jacobian[0], fit.jacobians[0])
    assert ours.prompts == fit.n_prompts == 3
    fit.save(str(tmp_path / "theirs.pt"), dtype=torch.float32)
    read = FittedJacobianLens.from_neuronpedia(tmp_path / "theirs.pt", model)
    assert torch.equal(read.jacobian[0].float(), fit.jacobians[0]) and read.prompts == 3
    ours.to_neuronpedia(tmp_path / "ours.pt", dtype=torch.float32)
    again = theirs.load(str(tmp_path / "ours.pt"))
    assert torch.equal(again.jacobians[0], ours.jacobian[0].float()) and again.n_prompts == 3
    told = again.readout(bridge, CORPUS[0], top_k=3).lens_topk_indices[0]
    assert (told.numpy() == read.read(CORPUS[0], top=3).top_token.values[0, 0]).all()


def assert_near(ours: Tensor, theirs: Tensor) -> None:
    """To 1e-6 of the largest entry: their rows are averaged in float32."""
    assert float((ours - theirs).abs().max() / ours.abs().max()) < 1e-6


# --- what is refused ----------------------------------------------------------------------------------------------


def test_questions_that_make_no_sense_are_refused_by_name() -> None:
    model, tokens = build("gpt2"), some_tokens()
    with pytest.raises(IndexError, match="layers are 0 to 1, got 2"):
        fitted(model, tokens, layers=[2])
    with pytest.raises(ValueError, match="at least one layer is required, each once"):
        fitted(model, tokens, layers=[0, 0])
    with pytest.raises(ValueError, match="precision must be a number above 0"):
        fitted(model, tokens, precision=0.0)
    with pytest.raises(ValueError, match="unembedding right after the final norm"):
        fitted(build("masked-lm"), tokens, tokens=[1])
