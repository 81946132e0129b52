"""The tuned lens: the logit lens while untrained, exact where an affine map is the answer, and safe to store."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import xarray as xr
from safetensors.torch import save_file
from torch import Tensor

import interp
from interp import Batch, Edit, HookedTransformer
from interp.data.sources import open_source
from interp.data.stream import Stream
from interp.edits import Zero
from interp.lenses import TunedLens, train_tuned_lens, tuned_lens
from interp.lenses.tuned_lens import loss_and_gradients
from interp.model import NoNorm, Transformer
from interp.model.tap import Read
from interp.model.weights import Weights
from interp.passes.observe import observe
from tests.configs import CONFIGS, build, perturbed, some_tokens
from tests.edited import without_head
from tests.tolerances import assert_close

EVERY = pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "gemma2", "olmo2", "post-norm", "masked-lm"])


def affine() -> HookedTransformer:
    """A model whose every block is an affine map of the stream: no norm, and each token sees itself only."""
    config = replace(CONFIGS["attention-only"], norm=NoNorm(), window=1, qkv_bias=True, out_bias=True)
    return HookedTransformer(perturbed(config))


def exact(model: HookedTransformer) -> TunedLens:
    """The translators that the affine model's weights say: (1 + A) of a depth is the product over later blocks."""
    found, d = TunedLens.untrained(model), model.cfg.d_model
    weights = Weights(model.transformer)
    whole, constant = torch.eye(d, dtype=torch.float64), torch.zeros(d, dtype=torch.float64)
    for layer in reversed(range(model.cfg.n_layers)):
        w = weights.layer(layer)
        ov = (w.W_V @ w.W_O).sum(0)
        bias = (w.b_V[:, None] @ w.W_O).sum((0, 1)) + w.b_O
        constant = constant + bias @ whole
        whole = whole + ov @ whole
        found.weight[layer], found.bias[layer] = whole - torch.eye(d), constant
    return found


def random_translators(model: HookedTransformer) -> TunedLens:
    generator, found = torch.Generator().manual_seed(1), TunedLens.untrained(model)
    for parameter in (found.weight, found.bias):
        parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return found


@EVERY
def test_untrained_it_is_the_logit_lens_bit_for_bit(name: str) -> None:
    model = HookedTransformer(build(name))
    tuned = interp.logit_lens(model, some_tokens(), translators=TunedLens.untrained(model))
    xr.testing.assert_identical(tuned, interp.logit_lens(model, some_tokens()))


def test_the_true_affine_map_of_the_later_blocks_leaves_no_divergence() -> None:
    model = affine()
    plain, tuned = (interp.logit_lens(model, some_tokens(), translators=t) for t in (None, exact(model)))
    assert float(plain.kl[:, :-1].min()) > 1e-4
    assert float(tuned.kl.max()) < 1e-10
    assert (tuned.top_token == tuned.top_token.isel(depth=-1)).all()


@pytest.mark.slow
def test_training_undoes_a_planted_affine_distortion() -> None:
    model, data = affine(), some_tokens(rows=64, n=12, seed=1)
    tuned = train_tuned_lens(model, data, steps=120, optimiser=lambda p: torch.optim.Adam(p, lr=0.1))
    held_out = some_tokens(rows=8, n=12, seed=2)
    before, after = (interp.logit_lens(model, held_out, translators=t).kl[:, :-1] for t in (None, tuned))
    assert float(after.mean()) < 0.01 * float(before.mean())


def test_the_divergence_of_every_depth_falls_in_training() -> None:
    model, data = HookedTransformer(build("gpt2")), some_tokens(rows=32, n=12, seed=1)
    tuned = train_tuned_lens(model, data, steps=30, batch_size=32)
    assert tuned.losses is not None
    assert bool((tuned.losses[-1] < 0.9 * tuned.losses[0]).all())


@EVERY
def test_loss_and_gradients_are_those_of_the_lens_and_of_autograd(name: str) -> None:
    model = HookedTransformer(build(name))
    batch = Batch.of([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9]])
    found = random_translators(model)
    loss, grads = loss_and_gradients(model.transformer, tracked(found), batch)
    lens = interp.logit_lens(model, batch, translators=found).kl.transpose("depth", "prompt", "pos")
    real = torch.from_numpy(lens.values)[:-1][:, batch.keep]
    assert_close(loss.detach(), real.mean(1))
    expected = torch.autograd.grad(dense_loss(model.transformer, found, batch), (found.weight, found.bias))
    for ours, theirs in zip(grads, expected, strict=True):
        assert_close(ours, theirs)


def tracked(lens: TunedLens) -> TunedLens:
    lens.weight.requires_grad_()
    lens.bias.requires_grad_()
    return lens


def dense_loss(model: Transformer, lens: TunedLens, batch: Batch) -> Tensor:
    """The same loss with all logits at once, differentiated as a whole."""
    final = model(batch.tokens, keep=batch.keep).log_softmax(-1)
    total = torch.zeros((), dtype=torch.float64)
    for i in range(len(lens.sites)):
        state = model(batch.tokens, stop=i, keep=batch.keep)
        moved = state + state @ lens.weight[i] + lens.bias[i]
        logp = model.read_out(moved).log_softmax(-1)
        total = total + (final.exp() * (final - logp)).sum(-1)[batch.keep].mean()
    return total


def test_the_size_of_the_chunks_changes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = HookedTransformer(build("gpt2")), Batch(some_tokens())
    found = tracked(random_translators(model))
    loss, grads = loss_and_gradients(model.transformer, found, batch)
    monkeypatch.setattr(tuned_lens, "CHUNK", 4)
    in_parts, parts = loss_and_gradients(model.transformer, found, batch)
    assert_close(in_parts, loss)
    assert_close(parts[0], grads[0])


def test_the_model_is_left_alone_and_a_second_training_gives_the_same_bits() -> None:
    network = build("gpt2")
    state = {name: value.clone() for name, value in network.state_dict().items()}
    one, two = (
        train_tuned_lens(HookedTransformer(network), some_tokens(), steps=3, batch_size=2) for _ in range(2)
    )
    assert torch.equal(one.weight, two.weight) and torch.equal(one.bias, two.bias)
    assert not one.weight.requires_grad
    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())
    assert all(p.grad is None for p in network.parameters())


def test_a_saved_lens_comes_back_as_it_was(tmp_path: Path) -> None:
    model = HookedTransformer(build("llama-gqa"))
    lens = random_translators(model)
    lens.save(tmp_path / "lens.safetensors")
    again = TunedLens.load(tmp_path / "lens.safetensors", model)
    assert again.sites == lens.sites
    assert torch.equal(again.weight, lens.weight) and torch.equal(again.bias, lens.bias)


def test_a_lens_fits_the_same_model_in_half_precision_too(tmp_path: Path) -> None:
    narrow = HookedTransformer(build("gpt2", torch.bfloat16))
    random_translators(HookedTransformer(build("gpt2"))).save(tmp_path / "lens.safetensors")
    lens = TunedLens.load(tmp_path / "lens.safetensors", narrow)
    assert interp.logit_lens(narrow, some_tokens(), translators=lens).kl.dtype == "float32"


def test_a_lens_of_another_model_is_refused(tmp_path: Path) -> None:
    file, mine = tmp_path / "lens.safetensors", HookedTransformer(build("gpt2"))
    random_translators(mine).save(file)
    other = HookedTransformer(perturbed(CONFIGS["gpt2"], seed=5))
    with pytest.raises(ValueError, match="another model"):
        TunedLens.load(file, other)
    with pytest.raises(ValueError, match="another model"):
        interp.logit_lens(other, some_tokens(), translators=TunedLens.untrained(mine))


def test_files_that_are_no_lens_are_refused(tmp_path: Path) -> None:
    file, model = tmp_path / "lens.safetensors", HookedTransformer(build("gpt2"))
    save_file({"weight": torch.zeros(2)}, file)
    with pytest.raises(ValueError, match="format 'interp tuned lens 1' is required, got None"):
        TunedLens.load(file, model)
    random_translators(model).save(file)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="not a readable tuned lens"):
        TunedLens.load(file, model)
    with pytest.raises(ValueError, match="not a readable tuned lens"):
        TunedLens.load(tmp_path / "absent.safetensors", model)


def test_a_state_without_a_translator_is_refused() -> None:
    model = HookedTransformer(build("gpt2"))
    with pytest.raises(KeyError, match=r"no translator for 'blocks.0.hook_resid_mid'"):
        interp.logit_lens(model, some_tokens(), sites="resid_mid", translators=TunedLens.untrained(model))
    with pytest.raises(KeyError, match="no translator"):
        TunedLens.untrained(model)("blocks.0.hook_resid_post", torch.zeros(24))


def test_rows_of_several_continuations_are_read_as_such() -> None:
    """The first loss is that of the logit lens, of a pass in which the continuations see nothing of each other."""
    model, tokens = build("llama-gqa"), some_tokens()
    branches = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 2]).expand_as(tokens)
    reads = [Read(f"blocks.{layer}.hook_resid_pre") for layer in range(2)]
    losses = []
    for rows in (Batch(tokens, branches=branches), Batch(tokens)):
        run = observe(model, rows, reads)
        final = run.output.log_softmax(-1)
        each = [model.read_out(run.trace[read]).log_softmax(-1) for read in reads]
        expected = torch.stack([(final.exp() * (final - logp)).sum(-1).mean() for logp in each])
        losses.append(train_tuned_lens(HookedTransformer(model), rows, steps=1).losses[0])
        assert_close(losses[-1].double(), expected, torch.float32)
    assert (losses[0] - losses[1]).abs().max() > 1e-3


def test_no_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one step of one row is required, got steps=0"):
        train_tuned_lens(HookedTransformer(build("gpt2")), some_tokens(), steps=0)


def test_the_batches_of_a_source_come_in_rounds_of_its_windows() -> None:
    model, rows = HookedTransformer(build("gpt2")), some_tokens(rows=12, n=6, seed=1)
    stream = Stream(open_source(rows), model.text, tokens_per_batch=24, rows_per_window=4)
    found = train_tuned_lens(model, stream, steps=5)
    generator = torch.Generator().manual_seed(0)
    order = [w for _ in range(2) for w in torch.randperm(3, generator=generator).tolist()]
    start = tracked(TunedLens.untrained(model))
    first, _ = loss_and_gradients(model.transformer, start, Batch(rows[4 * order[0] : 4 * order[0] + 4]))
    assert found.losses is not None
    assert_close(found.losses[0], first.detach())
    by_hand = [stream.window(w).batches[0] for w in order[:5]]
    again = train_tuned_lens(model, iter(by_hand), steps=5)
    assert torch.equal(again.weight, found.weight)
    with pytest.raises(ValueError, match="batches for 6 steps are required, the iterator ended after 5"):
        train_tuned_lens(model, iter(by_hand), steps=6)
    with pytest.raises(ValueError, match="some rows that can be used are required"):
        train_tuned_lens(model, Stream(open_source([[99]]), model.text, tokens_per_batch=8), steps=1)


@EVERY
def test_the_lens_of_an_edited_model_is_that_of_the_model_without_the_head(name: str) -> None:
    model, copy = HookedTransformer(build(name)), HookedTransformer(without_head(name, layer=0))
    edits = [Edit("L0H2", Zero())]
    found = train_tuned_lens(model, some_tokens(), steps=3, edits=edits)
    expected = train_tuned_lens(copy, some_tokens(), steps=3)
    assert_close(found.weight, expected.weight)
    assert found.losses is not None and expected.losses is not None
    assert_close(found.losses, expected.losses)
    plain = train_tuned_lens(model, some_tokens(), steps=3)
    assert not torch.allclose(found.weight, plain.weight)
    within = train_tuned_lens(model.edited(edits), some_tokens(), steps=3)
    assert torch.equal(within.weight, found.weight)
