"""Patchscopes: equal to one edited pass per pair of depths, to the logit lens at the end, to the model on itself."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import interp
from interp import Edit, HookedTransformer
from interp.edits import Set
from interp.lenses import patchscope
from tests.configs import CAUSAL, CONFIGS, build, perturbed, some_tokens
from tests.tolerances import assert_close

TARGET = torch.tensor([4, 9, 2, 11, 7])
WHERE = 2
WIDER = replace(CONFIGS["gpt2"], d_model=32)
OTHER = replace(CONFIGS["gpt2"], d_vocab=40)


def states(model: HookedTransformer, tokens: Tensor, pos: int) -> list[Tensor]:
    """The stream before every block and the final one, at one position."""
    return [model.transformer(tokens, stop=depth)[:, pos] for depth in range(model.cfg.n_layers + 1)]


@pytest.mark.parametrize("name", CAUSAL)
def test_every_cell_equals_one_edited_pass_of_the_target_prompt(name: str) -> None:
    model, tokens = HookedTransformer(build(name)), some_tokens()
    found = patchscope(model, tokens, TARGET, pos=3, target_pos=WHERE, top=3)
    own = model(tokens)[:, 3].log_softmax(-1)
    for depth, state in enumerate(states(model, tokens, 3)):
        for layer in range(model.cfg.n_layers):
            edit = Edit(f"L{layer}.resid", Set(state), {"pos": WHERE})
            logp = model.edited([edit])(TARGET.expand(3, -1))[:, -1].log_softmax(-1)
            cell = found.isel(depth=depth, target_depth=layer)
            answer = own.argmax(-1, keepdim=True)
            assert cell.top_token.values.tolist() == logp.topk(3).indices.tolist()
            assert_close(torch.tensor(cell.target_prob.values), logp.gather(1, answer)[:, 0].exp())
            assert_close(torch.tensor(cell.kl.values), (own.exp() * (own - logp)).sum(-1))
    plain = model(TARGET[None])[0, -1].softmax(-1)
    assert_close(torch.tensor(found.unpatched_prob.values), plain[own.argmax(-1)])


def test_the_last_target_depth_is_the_logit_lens_of_the_states() -> None:
    model, tokens = HookedTransformer(build("gpt2")), some_tokens()
    answer = model(tokens)[:, -1].argmax(-1)
    found = patchscope(model, tokens, TARGET, top=4).isel(target_depth=-1)
    lens = interp.logit_lens(model, tokens, answer=answer, pos=-1, top=4).isel(pos=0)
    for name in ("top_token", "target_rank"):
        assert found[name].values.tolist() == lens[name].values.tolist()
    for name in ("top_prob", "entropy", "kl", "target_prob"):
        assert_close(torch.tensor(found[name].values), torch.tensor(lens[name].values))


def test_a_state_put_where_it_comes_from_changes_nothing() -> None:
    model, tokens = HookedTransformer(build("llama-gqa")), some_tokens(1)
    found = patchscope(
        model, tokens, tokens[0], pos=4, target_pos=4, answer=int(model(tokens)[0, -1].argmax())
    )
    for depth in range(model.cfg.n_layers):
        assert int(found.target_rank.values[0, depth, depth]) == 0
        assert_close(
            torch.tensor(found.target_prob.values[0, depth, depth]),
            torch.tensor(found.unpatched_prob.values[0]),
        )


def test_agreement_is_the_share_of_prompts_with_its_interval() -> None:
    model, tokens = HookedTransformer(build("gpt2")), some_tokens(12)
    found = patchscope(model, tokens, TARGET, top=1)
    share = (found.target_rank == 0).mean("prompt")
    assert float(abs(found.value - share).max()) < 1e-12
    last = found.isel(depth=-1, target_depth=-1)
    assert float(last.value) == 1 and float(last.high) == 1
    assert float(last.low) == pytest.approx(0.025 ** (1 / 12)), "all of 12: exact"


def test_states_of_a_wider_model_need_a_mapping() -> None:
    source, wider = HookedTransformer(build("gpt2")), HookedTransformer(perturbed(WIDER))
    with pytest.raises(ValueError, match="give `mapping` where widths differ"):
        patchscope(source, some_tokens(), TARGET, into=wider)
    turn = torch.randn(24, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = patchscope(
        source, some_tokens(), TARGET, into=wider, mapping=lambda x: x @ turn, target_pos=WHERE, top=2
    )
    assert found.sizes["depth"] == 3 and found.sizes["target_depth"] == 3
    state = states(source, some_tokens(), -1)[1] @ turn
    edit = Edit("L1.resid", Set(state), {"pos": WHERE})
    logits = wider.edited([edit])(TARGET.expand(3, -1))[:, -1]
    assert found.top_token.values[:, 1, 1].tolist() == logits.topk(2).indices.tolist()


def test_models_of_other_tokens_and_several_targets_are_refused() -> None:
    model = HookedTransformer(build("gpt2"))
    other = HookedTransformer(perturbed(OTHER))
    with pytest.raises(ValueError, match="as many output tokens are required"):
        patchscope(model, some_tokens(), TARGET, into=other)
    with pytest.raises(ValueError, match="target must be str or"):
        patchscope(model, some_tokens(), some_tokens(2))
    with pytest.raises(IndexError, match="position 5 is required of every row"):
        patchscope(model, some_tokens(), TARGET, target_pos=5)


def test_edits_of_the_model_hold_in_both_runs() -> None:
    model, tokens = HookedTransformer(build("gpt2")), some_tokens()
    edits = [Edit("L0.mlp", interp.edits.Zero())]
    asked = patchscope(model.edited(edits), tokens, TARGET, top=2)
    edited = patchscope(model.edited(edits), tokens, TARGET, top=2)
    assert asked.top_token.values.tolist() == edited.top_token.values.tolist()
    assert asked.unpatched_prob.values.tolist() == edited.unpatched_prob.values.tolist()


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
def test_an_answer_of_several_tokens_is_predicted_after_the_patched_prompt(name: str) -> None:
    model, prompts, answers = HookedTransformer(build(name)), [[3, 4, 5, 6], [8, 2]], [(3, 14, 2), (7,)]
    found = patchscope(model, prompts, TARGET, target_pos=WHERE, answer=answers, top=2)
    first = patchscope(model, prompts, TARGET, target_pos=WHERE, answer=[3, 7], top=2)
    for shared in ("target_prob", "target_rank", "kl", "unpatched_prob", "value"):
        assert_close(torch.tensor(found[shared].values).double(), torch.tensor(first[shared].values).double())
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        joined = torch.cat((TARGET, torch.tensor(answer)))[None]

        def log_prob(logits: Tensor, answer: tuple[int, ...] = answer) -> Tensor:
            logp = logits[0].log_softmax(-1)
            return torch.stack([logp[len(TARGET) - 1 + j, token] for j, token in enumerate(answer)]).sum()

        own = states(model, torch.tensor([prompt]), -1)
        for depth, layer in ((0, 1), (1, 0), (2, 1)):
            edit = Edit(f"L{layer}.resid", Set(own[depth]), {"pos": WHERE})
            cell = found.answer_log_prob.values[row, depth, layer]
            assert_close(torch.tensor(cell), log_prob(model.edited([edit])(joined)))
        assert_close(torch.tensor(found.unpatched_answer_log_prob.values[row]), log_prob(model(joined)))
    assert found.answer_log_prob.isel(target_depth=-1).isnull().all()
