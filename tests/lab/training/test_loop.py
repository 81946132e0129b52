"""The loop against a plain one, and a run that is killed at any step against one that is not."""

import errno
import itertools
import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import torch
import torch.nn.functional as F

import interp
from interp.core.files import write_atomically
from interp.data.batch import Batch
from interp.families import any_from_folder
from interp.lab.training.decoding import exactly_right
from interp.lab.training.loop import Trained, fresh_state, train
from interp.lab.training.losses import scores
from interp.lab.training.presets import attention_only, encoder_decoder
from interp.lab.training.schedule import Training
from interp.lab.training.sentences import Sentences
from interp.lab.training.state import STATE
from interp.lab.training.vocabulary import Vocabulary
from interp.model import MLP, EncoderDecoder, Learned, ModelConfig, Transformer
from interp.passes.question import NotFiniteError
from interp.runs import state_file
from interp.tasks import IndirectObjects, RepeatedSequences, SequencePairs
from interp.tasks.examples import Examples, Place
from interp.zoo.demos import WEIGHTS
from tests.forking import attempt
from tests.lab.training.killed import go_on
from tests.tolerances import assert_close

DATA = RepeatedSequences(d_vocab=20, width=12, low=4, high=5)
CONFIG = ModelConfig(1, 16, 2, 12, 20, mlp=MLP(24), position=Learned())
PLAN = Training(steps=7, rows=4, warm_up=3, log_every=3, checkpoints=4, evaluation_rows=8, keep_seconds=0.0)


class KilledError(BaseException):
    """The end of the process, as far as the loop can tell."""


@dataclass(frozen=True)
class Deadly(RepeatedSequences):
    """Data that kills whoever asks for the rows of one step."""

    kill_at: int | None = None

    @property
    def description(self) -> dict[str, object]:
        """The same whenever it kills."""
        return {"type": "Deadly"}

    def batch(self, place: Place, rows: int) -> Examples:
        if place.step is not None and place.step == self.kill_at:
            raise KilledError
        return super().batch(place, rows)


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def plain(plan: Training) -> tuple[Transformer, list[float]]:
    """The same training with AdamW written out and nothing else around it."""
    torch.manual_seed(plan.seed)
    model = Transformer(CONFIG)
    moments = {p: (torch.zeros_like(p), torch.zeros_like(p)) for p in model.parameters()}
    losses = []
    for step in range(plan.steps):
        tokens = DATA.batch(Place(plan.seed, step), plan.rows).batch.tokens
        loss = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        grads = dict(zip(moments, torch.autograd.grad(loss, list(moments)), strict=True))
        norm = sum(float(g.detach().square().sum()) for g in grads.values()) ** 0.5
        rate = plan.rate(step)
        with torch.no_grad():
            for p, (mean, square) in moments.items():
                g = grads[p] * min(1.0, plan.clip / norm)
                mean.mul_(plan.beta1).add_(g, alpha=1 - plan.beta1)
                square.mul_(plan.beta2).add_(g.square(), alpha=1 - plan.beta2)
                if p.ndim > 1:
                    p.mul_(1 - rate * plan.weight_decay)
                hat = (square / (1 - plan.beta2 ** (step + 1))).sqrt() + 1e-8
                p.sub_(rate * mean / (1 - plan.beta1 ** (step + 1)) / hat)
        losses.append(float(loss.detach()))
    return model, losses


def test_the_loop_does_what_adamw_says() -> None:
    plan = replace(PLAN, clip=0.3, weight_decay=0.5, learning_rate=3e-3)
    expected, losses = plain(plan)
    found = train(CONFIG, DATA, plan)
    for name, value in expected.named_parameters():
        assert_close(found.model.get_parameter(name).detach(), value.detach())
    assert found.log.step.tolist() == [0, 1, 3, 6, 7]
    assert found.log.loss.tolist()[1:] == pytest.approx(
        [losses[0], sum(losses[1:3]) / 2, sum(losses[3:6]) / 3, losses[6]], rel=1e-4
    )
    assert found.log.tokens.tolist() == [48 * step for step in found.log.step]
    held_out = DATA.batch(Place(plan.seed, None), plan.evaluation_rows)
    assert found.log.iloc[-1].accuracy == pytest.approx(scores(expected, held_out)["accuracy"])


@pytest.mark.parametrize("kill_at", range(7))
def test_a_run_killed_at_any_step_goes_on_to_the_same_bits(kill_at: int, tmp_path: Path) -> None:
    data = Deadly(20, 12, 4, 5)
    whole = train(CONFIG, data, PLAN, out=tmp_path / "whole")
    with pytest.raises(KilledError):
        train(CONFIG, replace(data, kill_at=kill_at), PLAN, out=tmp_path / "killed", resume=True)
    resumed = train(CONFIG, data, PLAN, out=tmp_path / "killed", resume=True)
    assert same_weights(resumed.model, whole.model)
    pd.testing.assert_frame_equal(resumed.log, whole.log, check_exact=True)
    assert files(tmp_path / "killed") == files(tmp_path / "whole")


@pytest.mark.slow
def test_a_process_that_is_killed_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    assert attempt(partial(go_on, killed, dies=True)) == -signal.SIGKILL
    assert pd.read_csv(killed / "log.csv").step.tolist() == [0, 2, 4]
    assert attempt(partial(go_on, killed)) == attempt(partial(go_on, whole)) == 0
    assert pd.read_csv(killed / "log.csv").step_again.tolist() == [0, 2, 4, 6, 8, 9]
    assert files(killed) == files(whole)


def test_a_folder_has_one_writer_at_a_time(tmp_path: Path) -> None:
    data, refused = RepeatedSequences(20, 12, 4, 5), []

    def again(model: object, step: int) -> dict[str, int]:
        with pytest.raises(ValueError, match=r"another process writes the training run in .*: one at a time"):
            train(CONFIG, data, PLAN, out=tmp_path / "run", resume=True)
        refused.append(step)
        return {}

    whole = train(CONFIG, data, PLAN, out=tmp_path / "whole")
    assert same_weights(train(CONFIG, data, PLAN, out=tmp_path / "run", evaluate=again).model, whole.model)
    assert refused == whole.log.step.tolist()
    train(CONFIG, data, PLAN, out=tmp_path / "run", resume=True)


def test_a_kept_state_of_which_any_byte_changed_is_refused(tmp_path: Path) -> None:
    data, place = Deadly(20, 12, 4, 5), tmp_path / "run" / STATE
    with pytest.raises(KilledError):
        train(CONFIG, replace(data, kill_at=4), PLAN, out=tmp_path / "run")
    whole, generator = place.read_bytes(), random.Random(0)
    begins = 8 + int.from_bytes(whole[:8], "little")
    places = [
        0,
        9,
        begins,
        len(whole) - 1,
        whole.index(b"step"),
        *generator.sample(range(begins, len(whole)), 20),
    ]
    for damaged in (*(whole[:i] + bytes([whole[i] ^ 16]) + whole[i + 1 :] for i in places), whole[:-1], b""):
        place.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"state\.safetensors is damaged"):
            train(CONFIG, data, PLAN, out=tmp_path / "run", resume=True)
    place.write_bytes(whole)
    train(CONFIG, data, PLAN, out=tmp_path / "run", resume=True)


def test_what_a_killed_process_left_half_written_blocks_nothing(tmp_path: Path) -> None:
    data = Deadly(20, 12, 4, 5)
    with pytest.raises(KilledError):
        train(CONFIG, replace(data, kill_at=4), PLAN, out=tmp_path / "run")
    left = [".training.json.1a2b3c4d.json", ".log.csv.1a2b3c4d.csv", "state/.state.safetensors.1a2b3c4d.safetensors",
            "step0/.model.safetensors.1a2b3c4d.safetensors", ".model.safetensors.1a2b3c4d.safetensors"]  # fmt: skip
    for name in left:
        (tmp_path / "run" / name).write_bytes(b"half")
    train(CONFIG, data, PLAN, out=tmp_path / "run", resume=True)
    assert [name for name in left if (tmp_path / "run" / name).exists()] == []


@pytest.mark.parametrize("kept", [0, 2])
def test_full_disk_is_said_with_advice_and_training_goes_on_from_the_kept(
    kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, written = Deadly(20, 12, 4, 5), itertools.count()

    def full(path: Path, write: Callable[[Path], object]) -> None:
        def no_room(temporary: Path) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        name = path.name == STATE.name
        write_atomically(path, no_room if name and next(written) == kept else write)

    train(CONFIG, data, PLAN, out=tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(state_file, "write_atomically", full)
        with pytest.raises(
            OSError, match=r"No space left on device: make room .*, or resume.*state\.safetensors"
        ):
            train(CONFIG, data, PLAN, out=tmp_path / "run")
    train(CONFIG, data, PLAN, out=tmp_path / "run", resume=True)
    assert files(tmp_path / "run") == files(tmp_path / "whole")


def test_checkpoints_are_models_by_revision(tmp_path: Path) -> None:
    vocabulary = Vocabulary.read(WEIGHTS / "demo-4l" / "tokenizer.json")
    data = Sentences(IndirectObjects(), vocabulary)
    plan = replace(PLAN, steps=3, checkpoints=2)
    trained = train(attention_only(1, data.d_vocab, data.width), data, plan, out=tmp_path / "run")
    last = interp.HookedTransformer.from_pretrained(tmp_path / "run")
    assert same_weights(last.transformer, trained.model)
    assert last.to_str_tokens(" Mary gave")[-2:] == [" Mary", " gave"]

    def load(revision: str) -> interp.HookedTransformer:
        return interp.HookedTransformer.from_pretrained(tmp_path / "run", revision=revision)

    assert same_weights(load("step0").transformer, fresh_state(trained.model.config, plan).model)
    assert same_weights(load("step3").transformer, trained.model)
    rows = interp.tasks.RepeatedTokens(period=6, repeats=3, rows=4)
    table = interp.dynamics.over_checkpoints(
        load,
        [f"step{n}" for n in plan.checkpoint_steps],
        lambda m: interp.heads(m, repeats=rows, sentences=None),
    )
    assert table.step.values.tolist() == [0, 1, 3]


def test_an_encoder_decoder_is_trained_kept_and_resumed(tmp_path: Path) -> None:
    data = SequencePairs(9, 2, 5)
    config = encoder_decoder(9, 7, d_model=16, n_heads=2, n_layers=1)
    trained = train(config, data, PLAN, out=tmp_path / "run")
    again = train(config, data, PLAN, out=tmp_path / "run", resume=True)
    assert same_weights(again.model, trained.model) and again.log.equals(trained.log)
    assert same_weights(any_from_folder(tmp_path / "run"), trained.model)
    assert trained.log.tokens.iloc[-1] == sum(
        int(data.batch(Place(0, step), 4).batch.real.sum()) for step in range(7)
    )


def test_bfloat16_multiplies_in_half_and_keeps_whole_weights() -> None:
    seen: list[torch.dtype] = []
    plan = replace(PLAN, precision="bfloat16")

    def evaluate(model: torch.nn.Module, step: int) -> dict[str, float]:
        if step == 0:
            linear = next(m for m in model.modules() if isinstance(m, torch.nn.Linear))
            linear.register_forward_hook(lambda _m, _x, y: seen.append(y.dtype))
        return {}

    found, exact = train(CONFIG, DATA, plan, evaluate=evaluate), train(CONFIG, DATA, PLAN)
    assert seen.count(torch.bfloat16) == plan.steps
    assert {p.dtype for p in found.model.parameters()} == {torch.float32}
    assert found.log.loss.tolist()[1:] == pytest.approx(exact.log.loss.tolist()[1:], rel=5e-2)
    assert not same_weights(found.model, exact.model)


def test_the_global_random_state_is_left_alone_and_seeds_differ() -> None:
    before = torch.get_rng_state()
    one, other = (train(CONFIG, DATA, replace(PLAN, steps=1, seed=seed)) for seed in (0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert not same_weights(one.model, other.model)


def test_exactly_right_asks_for_every_token_and_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SequencePairs(9, 3, 3).batch(Place(0, 0), 4)
    said = found.batch.tokens.clone()
    said[1, 2] = 2 + (said[1, 2] - 1) % 7  # another symbol
    rows = [said[0], said[1], said[2, :-1], torch.cat([said[3, :-1], torch.tensor([5])])]
    monkeypatch.setattr(
        "interp.lab.training.decoding.decode", lambda *_a, **_k: Batch.of([r.tolist() for r in rows])
    )
    model = EncoderDecoder(encoder_decoder(9, 5, d_model=16, n_heads=2))
    assert exactly_right(model, found).tolist() == [True, False, False, False]
    with pytest.raises(ValueError, match="targets that finish with token 7"):
        exactly_right(model, found, end=7)
    with pytest.raises(ValueError, match="decoding requires sources"):
        exactly_right(model, replace(found, source=None))


@pytest.mark.slow
def test_greedy_decoding_agrees_with_teacher_forcing() -> None:
    """A row is exactly right if and only if each target token is the most probable one given those before it."""
    data = SequencePairs(5, 1, 2)
    plan = Training(steps=150, rows=32, learning_rate=1e-2, log_every=150)
    model = train(encoder_decoder(5, 4, d_model=16, n_heads=2, n_layers=1), data, plan).model
    assert isinstance(model, EncoderDecoder)
    test = data.batch(Place(1, None), 100)
    assert test.source is not None and test.determined is not None
    with torch.no_grad():
        found = model(test.source.tokens, test.batch.tokens, source_keep=test.source.keep)
    hits = (found[:, :-1].argmax(-1) == test.batch.tokens[:, 1:]) | ~test.determined
    assert exactly_right(model, test).tolist() == hits.all(1).tolist()
    assert 0 < int(hits.all(1).sum()) < 100


def test_what_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="this one has 19 and a context of 12"):
        train(attention_only(1, 19, 12), DATA, PLAN)
    with pytest.raises(NotFiniteError, match=r"it became nan .* lower the learning rate \(1e\+30\)"):
        train(CONFIG, DATA, replace(PLAN, learning_rate=1e30, warm_up=0))
    train(CONFIG, DATA, PLAN, out=tmp_path / "run")
    with pytest.raises(ValueError, match="holds a training run already: resume=True"):
        train(CONFIG, DATA, PLAN, out=tmp_path / "run")
    with pytest.raises(ValueError, match=r"holds another training run: training.steps: was 7, is 8"):
        train(CONFIG, DATA, replace(PLAN, steps=8), out=tmp_path / "run", resume=True)
    with pytest.raises(ValueError, match=r"data.high: was 5, is 6"):
        train(CONFIG, replace(DATA, high=6), PLAN, out=tmp_path / "run", resume=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    with pytest.raises(ValueError, match=r"new or empty folder is required, .*mine holds thesis.txt"):
        train(CONFIG, DATA, PLAN, out=tmp_path / "mine", resume=True)


def test_trained_is_what_the_folder_says(tmp_path: Path) -> None:
    found: Trained = train(
        CONFIG, DATA, PLAN, out=tmp_path / "run", evaluate=lambda _m, step: {"twice": 2.0 * step}
    )
    log = pd.read_csv(tmp_path / "run" / "log.csv")
    pd.testing.assert_frame_equal(log, found.log)
    assert log.twice.tolist() == [2.0 * step for step in log.step]
