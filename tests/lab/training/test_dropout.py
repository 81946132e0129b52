"""Dropout against a pass written out with the same masks, its draws against (seed, step), and its absence elsewhere."""

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from interp.data.batch import Batch
from interp.lab import HierarchicalSoftmax, LongTermMemory
from interp.lab.training.dropout import Drop, Dropout
from interp.lab.training.loop import fresh_state, train, update
from interp.lab.training.losses import logits, mean_loss, scores
from interp.lab.training.presets import encoder_decoder
from interp.model import MLP, ModelConfig, NoNorm, Softmax, Transformer
from interp.model.loss import next_token_loss
from interp.tasks import RepeatedSequences, SequencePairs
from interp.tasks.examples import Examples, Place
from tests.configs import perturbed, some_tokens
from tests.lab.training.test_loop import CONFIG, DATA, PLAN, Deadly, KilledError, files, same_weights
from tests.loops import over
from tests.mixers import MIXERS, build_mixed
from tests.tolerances import assert_close

EACH = Dropout(residual=0.2, attention=0.3, embedding=0.1)
PLAIN = ModelConfig(1, 8, 2, 12, 20, mlp=MLP(6, act="relu"), norm=NoNorm())


def masks(
    dropout: Dropout, config: ModelConfig, step: int, shapes: dict[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """What each site is multiplied by, drawn from the changes of the edits."""
    edits = {edit.site: edit.change for edit in dropout.edits(config, 0, step)}
    assert edits.keys() == shapes.keys()
    return {site: edits[site](torch.ones(shape, dtype=torch.float64)) for site, shape in shapes.items()}  # type: ignore[operator]


def by_hand(given: dict[str, Tensor], tokens: Tensor, mask: dict[str, Tensor]) -> Tensor:
    """Logits of `PLAIN` from the parameters alone, with every product by a mask written out."""
    n, block = tokens.shape[1], "blocks.0."
    x = (given["embed.weight"][tokens] + given["pos_embed.weight"][:n]) * mask[f"{block}hook_resid_pre"]
    qkv = x @ given[f"{block}attn.qkv.weight"].T + given[f"{block}attn.qkv.bias"]
    q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in qkv.split(8, -1))
    scores = (q @ k.mT / 2).masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
    z = (scores.softmax(-1) * mask[f"{block}attn.hook_pattern"]) @ v
    out = z.transpose(1, 2).flatten(-2) @ given[f"{block}attn.out.weight"].T + given[f"{block}attn.out.bias"]
    x = x + out * mask[f"{block}hook_attn_out"]
    hidden = (x @ given[f"{block}mlp.into.weight"].T + given[f"{block}mlp.into.bias"]).relu()
    out = hidden @ given[f"{block}mlp.out.weight"].T + given[f"{block}mlp.out.bias"]
    return (x + out * mask[f"{block}hook_mlp_out"]) @ given["unembed.weight"].T


def test_a_pass_and_its_gradients_are_those_written_out() -> None:
    model, tokens = perturbed(PLAIN).requires_grad_(True), some_tokens(3, 9) % 20
    wide, pattern = (3, 9, 8), (3, 2, 9, 9)
    shapes = {f"blocks.0.{site}": wide for site in ("hook_resid_pre", "hook_attn_out", "hook_mlp_out")}
    mask = masks(EACH, PLAIN, 5, shapes | {"blocks.0.attn.hook_pattern": pattern})
    examples = Examples(Batch(tokens))
    wanted = by_hand(dict(model.named_parameters()), tokens, mask)
    assert_close(logits(model, examples, EACH.edits(PLAIN, 0, 5)), wanted)
    parameters = list(model.parameters())
    loss = mean_loss(model, examples, edits=EACH.edits(PLAIN, 0, 5))
    found = torch.autograd.grad(loss, parameters)
    for one, other in zip(
        found, torch.autograd.grad(next_token_loss(wanted, tokens).mean(), parameters), strict=True
    ):
        assert_close(one, other)


def test_the_share_dropped_is_the_share_asked_and_the_mean_is_kept() -> None:
    """Of 10^6 numbers: both within five standard deviations of the binomial law."""
    n = 10**6
    for share in (0.1, 0.5, 0.9):
        found = Drop(share, torch.Generator().manual_seed(1))(torch.ones(n, dtype=torch.float64))
        off = 5 * (share * (1 - share) / n) ** 0.5
        assert abs(float((found == 0).double().mean()) - share) < off
        assert abs(float(found.mean()) - 1) < off / (1 - share)
        assert_close(found[found != 0].unique(), torch.tensor([1 / (1 - share)], dtype=torch.float64))


def test_draws_are_a_function_of_seed_and_step_and_differ_between_sites() -> None:
    def drawn(seed: int, step: int) -> list[Tensor]:
        return [edit.change(torch.ones(4, 9, 8)) for edit in EACH.edits(CONFIG, seed, step)]  # type: ignore[operator,misc]

    assert all(torch.equal(a, b) for a, b in zip(drawn(3, 7), drawn(3, 7), strict=True))
    every = [each for place in ((3, 7), (3, 8), (4, 7)) for each in drawn(*place)]
    zeros = [each == 0 for each in every]
    assert not any(torch.equal(a, b) for i, a in enumerate(zeros) for b in zeros[:i])


def test_without_shares_nothing_is_edited() -> None:
    assert Dropout().edits(CONFIG, 0, 0) == ()
    assert [e.site for e in Dropout(embedding=0.1).edits(replace(CONFIG, n_layers=0), 0, 0)] == [
        "hook_stream"
    ]


@pytest.mark.parametrize("kill_at", [0, 1, 4, 6])
def test_a_run_with_dropout_killed_at_any_step_goes_on_to_the_same_bits(kill_at: int, tmp_path: Path) -> None:
    data, plan = Deadly(20, 12, 4, 5), replace(PLAN, dropout=EACH, label_smoothing=0.1, initial="xavier")
    whole = train(CONFIG, data, plan, out=tmp_path / "whole")
    with pytest.raises(KilledError):
        train(CONFIG, replace(data, kill_at=kill_at), plan, out=tmp_path / "killed", resume=True)
    resumed = train(CONFIG, data, plan, out=tmp_path / "killed", resume=True)
    assert same_weights(resumed.model, whole.model)
    pd.testing.assert_frame_equal(resumed.log, whole.log, check_exact=True)
    assert files(tmp_path / "killed") == files(tmp_path / "whole")


def test_held_out_losses_and_the_trained_model_have_no_dropout() -> None:
    plan = replace(PLAN, dropout=EACH, label_smoothing=0.2)
    found = train(CONFIG, DATA, plan)
    held_out = DATA.batch(Place(plan.seed, None), plan.evaluation_rows)
    assert (
        found.log.held_out_loss.iloc[-1]
        == scores(found.model, held_out, rows_at_once=plan.rows)["held_out_loss"]
    )
    bare = Transformer(CONFIG)
    bare.load_state_dict(found.model.state_dict())
    assert torch.equal(bare(some_tokens(2, 9) % 20), found.model(some_tokens(2, 9) % 20))
    assert not same_weights(found.model, train(CONFIG, DATA, PLAN).model)


def test_one_update_moves_by_the_loss_under_the_masks_of_its_step() -> None:
    plan = replace(PLAN, dropout=EACH, learning_rate=1e-2, warm_up=0)
    state = fresh_state(CONFIG, plan)
    state.step = 3
    examples = DATA.batch(Place(0, 3), plan.rows)
    wanted = mean_loss(state.model, examples, edits=EACH.edits(CONFIG, plan.seed, 3)).detach()
    assert torch.equal(update(state, examples, plan)[0], wanted)


def test_both_sides_of_an_encoder_decoder_are_dropped() -> None:
    config = encoder_decoder(9, 7, d_model=16, n_heads=2, n_layers=1)
    found = {edit.site for edit in EACH.edits(config, 0, 0)}
    decoder = {"hook_resid_pre", "hook_attn_out", "attn.hook_pattern", "hook_cross_attn_out",
               "cross_attn.hook_pattern", "hook_mlp_out"}  # fmt: skip
    assert found == {f"decoder.blocks.0.{site}" for site in decoder} | {
        f"encoder.blocks.0.{site}" for site in decoder if "cross" not in site
    }
    data, plan = SequencePairs(9, 2, 5), replace(PLAN, dropout=EACH, steps=2)
    assert not same_weights(
        train(config, data, plan).model, train(config, data, replace(plan, dropout=Dropout())).model
    )


@over("name", MIXERS)
def test_every_mixer_is_trained_with_dropout_or_refused_by_name(name: str) -> None:
    """A pattern that is dropped is the pattern that is used: z of the layer changes, gradients are finite."""
    config, model = MIXERS[name], build_mixed(name)
    if not all(mixer.traits.patterned for mixer in config.mixers):
        with pytest.raises(
            ValueError, match=r"attention dropout requires an attention pattern; layer \d has none"
        ):
            EACH.edits(config, 0, 0)
        return
    examples = replace(RepeatedSequences(config.d_vocab, 9, 4, 5).batch(Place(0, 0), 2), determined=None)
    only = Dropout(attention=0.4)
    plain, dropped = mean_loss(model, examples), mean_loss(model, examples, edits=only.edits(config, 0, 0))
    assert dropped.isfinite() and not torch.isclose(plain, dropped, rtol=1e-9)


def test_shares_out_of_range_and_layers_without_a_pattern_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Dropout requires attention in \[0, 1\), got 1.0"):
        Dropout(attention=1.0)
    memory = replace(
        CONFIG, mixer=(Softmax(), LongTermMemory(n_persistent=2, segment=4, chunk=2)), n_layers=2
    )
    with pytest.raises(ValueError, match="layer 1 has none: LongTermMemory"):
        EACH.edits(memory, 0, 0)
    assert len(Dropout(residual=0.1).edits(memory, 0, 0)) == 4


def test_label_smoothing_is_torchs_and_a_mean_over_the_vocabulary() -> None:
    model, examples = perturbed(CONFIG), DATA.batch(Place(0, 0), 3)
    tokens = examples.batch.tokens
    found = mean_loss(model, examples, label_smoothing=0.3)
    flat = model(tokens)[:, :-1].flatten(0, 1)
    assert_close(found, F.cross_entropy(flat, tokens[:, 1:].flatten(), label_smoothing=0.3))
    each = -flat.log_softmax(-1)
    target = each.gather(1, tokens[:, 1:].reshape(-1, 1))[:, 0]
    assert_close(found, (0.7 * target + 0.3 * each.mean(1)).mean())


def test_smoothed_labels_under_a_tree_are_those_of_its_probabilities() -> None:
    config = replace(CONFIG, output=HierarchicalSoftmax())
    model, examples = perturbed(config), DATA.batch(Place(0, 0), 3)
    flat, target = model(examples.batch.tokens)[:, :-1].flatten(0, 1), examples.batch.tokens[:, 1:].flatten()
    for smoothing in (0.0, 0.2):
        found = mean_loss(model, examples, label_smoothing=smoothing)
        assert_close(found, F.cross_entropy(flat, target, label_smoothing=smoothing))
