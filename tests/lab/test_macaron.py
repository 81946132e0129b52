"""Macaron blocks against the formulas of Lu et al. 2019: half an MLP, attention, half an MLP; and what refuses them."""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interp.families import load
from interp.lab import ConvMLP, Macaron
from interp.model import (
    MLP,
    LayerNorm,
    ModelConfig,
    MoE,
    Read,
    RMSNorm,
    Softmax,
    Tap,
    Transformer,
    UsualBlock,
    Weights,
    mean_next_token_loss,
)
from interp.model.block import FeedForward
from interp.model.experts import Experts
from interp.model.norm import Normalize
from interp.model.records import Json
from interp.passes.sweep import Sweep
from tests.configs import CONFIGS, empty_cache, perturbed, some_tokens
from tests.passes.test_sweep import DIFFERENCE, asked, cells, loop
from tests.tolerances import assert_close

PLAIN = replace(CONFIGS["gpt2"], block=Macaron())
MODELS = {
    "plain": PLAIN,
    "gated, scaled": CONFIGS["macaron"],
    "experts": replace(PLAIN, mlp=MoE(3, 2, 20), norm=RMSNorm(), n_kv_heads=2, out_bias=False),
}
EVERY = pytest.mark.parametrize("name", MODELS)


def normed(norm: Normalize, x: Tensor) -> Tensor:
    if isinstance(norm.kind, LayerNorm):
        return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.kind.eps)
    return F.rms_norm(x, x.shape[-1:], norm.weight, norm.kind.eps)  # type: ignore[union-attr]


def fed(mlp: nn.Module | None, x: Tensor) -> Tensor:
    """The whole output of an MLP; of experts token by token."""
    if isinstance(mlp, FeedForward):
        pre = mlp.into(x)
        gate, linear = pre.chunk(2, -1) if mlp.gated else (pre, None)
        act = gate * gate.sigmoid() if linear is not None else F.gelu(gate, approximate="tanh")
        return mlp.out(act if linear is None else act * linear)
    assert isinstance(mlp, Experts)
    out = torch.zeros_like(x)
    for i, token in enumerate(x):
        logits = mlp.router(token)
        chosen = logits.topk(mlp.kind.top_k)
        for share, expert in zip(chosen.values.softmax(0), chosen.indices.tolist(), strict=True):
            gate, linear = (mlp.into[expert] @ token).chunk(2)
            out[i] += share * (mlp.out[expert] @ (gate * gate.sigmoid() * linear))
    return out


def by_the_formulas(model: Transformer, tokens: Tensor) -> Tensor:
    """Logits `[p, v]` of one row: x + MLP'(x)/2, then attention, then MLP(x)/2, each of its normed input."""
    config, scale = model.config, model.config.residual_scale
    assert model.pos_embed is not None and model.unembed is not None
    x = model.embed(tokens) + model.pos_embed.weight[: len(tokens)]
    heads, e, group = config.n_heads, config.head_width, config.n_heads // config.kv_heads
    for layer in range(config.n_layers):
        block = model.block(layer)
        assert block.ln0 is not None and block.ln2 is not None
        x = x + scale * fed(block.mlp_before, normed(block.ln0, x)) / 2
        q, k, v = block.attn.qkv(normed(block.ln1, x)).split([heads * e, *[config.kv_heads * e] * 2], -1)
        z = []
        for h in range(heads):
            mine, its = slice(h * e, (h + 1) * e), slice(h // group * e, (h // group + 1) * e)
            scores = (q[:, mine] @ k[:, its].T / e**0.5).masked_fill(
                torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf
            )
            z.append(scores.softmax(-1) @ v[:, its])
        x = x + scale * block.attn.out(torch.cat(z, -1))
        x = x + scale * fed(block.mlp, normed(block.ln2, x)) / 2
    return model.unembed(normed(model.ln_final, x))


@EVERY
def test_logits_are_those_of_the_formulas(name: str) -> None:
    model, tokens = perturbed(MODELS[name]), some_tokens()
    assert_close(model(tokens), torch.stack([by_the_formulas(model, row) for row in tokens]))


@EVERY
def test_the_sites_of_the_first_mlp_hold_its_half(name: str) -> None:
    model = perturbed(MODELS[name])
    names = ("hook_resid_pre", "hook_mlp_before_in", "hook_mlp_before_out", "hook_resid_pre_attn")
    reads = [Read(f"blocks.1.{name}") for name in names]
    tap = Tap(reads, answers_only=True)
    model(some_tokens(), tap)
    entered, read, added, attended = (tap.values[r] for r in reads)
    block = model.block(1)
    assert block.ln0 is not None
    half = torch.stack([fed(block.mlp_before, normed(block.ln0, row)) for row in entered]) / 2
    assert_close(added, model.config.residual_scale * half)
    assert_close(attended, entered + added)
    assert torch.equal(read, entered)


@EVERY
def test_generation_from_a_cache_gives_the_logits_of_the_whole_text(name: str) -> None:
    model, tokens = perturbed(MODELS[name]), some_tokens()
    cache = empty_cache(model, len(tokens))
    steps = [model(part, cache=cache) for part in tokens.split(4, 1)]
    assert_close(torch.cat(steps, 1), model(tokens))


@pytest.mark.parametrize("name", ["gated, scaled", "experts"])
def test_sweeps_over_the_last_block_give_the_numbers_of_the_loop(name: str) -> None:
    """What is put before attention reaches later columns, what is put behind it does not."""
    model, batch = perturbed(MODELS[name]), asked()
    sites = ["hook_mlp_before_out", "hook_resid_pre_attn", "hook_resid_mid"]
    for site in [*sites, "mlp_before.hook_post"] if name != "experts" else sites:
        variants = cells(model, batch, f"blocks.1.{site}")[-6:]
        assert_close(Sweep(model, batch, variants).run(DIFFERENCE).values, loop(model, batch, variants))


def test_a_step_of_training_moves_every_parameter_and_lowers_the_loss() -> None:
    torch.manual_seed(0)
    model, tokens = Transformer(CONFIGS["macaron"]).double(), some_tokens()
    before = deepcopy(model.state_dict())
    losses = []
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        loss = mean_next_token_loss(model(tokens), tokens)
        losses.append(float(loss.detach()))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert losses[1] < losses[0]
    still = [name for name, value in model.state_dict().items() if torch.equal(value, before[name])]
    assert still == []


def test_both_mlps_begin_with_small_writes_and_no_bias() -> None:
    block = Transformer(replace(PLAIN, d_model=64, mlp=MLP(512))).block(0)
    for mlp in (block.mlp_before, block.mlp):
        assert isinstance(mlp, FeedForward) and mlp.out.bias is not None
        assert float(mlp.out.weight.detach().std()) == pytest.approx(0.01, rel=0.05)
        assert float(mlp.into.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
        assert not mlp.out.bias.any()


def test_the_weights_of_either_mlp_are_its_parameters() -> None:
    model = perturbed(CONFIGS["macaron"])
    for before in (False, True):
        mlp = model.block(1).mlp_before if before else model.block(1).mlp
        views = Weights(model).layer(1, before=before)
        assert isinstance(mlp, FeedForward) and views.W_out is not None
        assert views.W_gate is not None and views.W_in is not None
        assert torch.equal(views.W_out, mlp.out.weight.T)
        assert torch.equal(torch.cat((views.W_gate, views.W_in), 1).T, mlp.into.weight)
    with pytest.raises(ValueError, match="no MLP before attention"):
        Weights(perturbed(CONFIGS["gpt2"])).layer(0, before=True)


def test_the_config_survives_json_and_older_ones_are_read(tmp_path: Path) -> None:
    config = CONFIGS["macaron"]
    stored: Json = json.loads(json.dumps(config.to_dict()))
    assert ModelConfig.from_dict(stored) == config
    del stored["block"]
    for macaron, block in ((True, Macaron()), (False, UsualBlock())):
        assert ModelConfig.from_dict({**stored, "macaron": macaron}) == replace(config, block=block)
    assert ModelConfig.from_dict(stored) == replace(config, block=UsualBlock())
    load.save(perturbed(config, torch.float32), tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    values = json.loads(file.read_text())
    del values["block"]
    file.write_text(json.dumps({**values, "macaron": True}))
    assert load.from_folder(tmp_path / "model").config == config


@pytest.mark.parametrize(
    "change",
    [
        {"norm_place": "post"}, {"norm_place": "sandwich"}, {"norm_place": "output"}, {"parallel": True},
        {"mlp": None}, {"mlp": ConvMLP(20)}, {"cross_attention": True},
    ],
)  # fmt: skip
def test_blocks_that_are_no_macarons_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="for Macaron"):
        replace(CONFIGS["macaron"], **change)  # type: ignore[arg-type]


def test_other_mixers_stand_between_the_halves_too() -> None:
    config = replace(PLAIN, mixer=Softmax(smeared_keys=True))
    model, tokens = perturbed(config), some_tokens()
    silent = deepcopy(model)
    for layer in range(2):
        for mlp in (silent.block(layer).mlp_before, silent.block(layer).mlp):
            assert isinstance(mlp, FeedForward) and mlp.out.bias is not None
            mlp.out.weight.zero_(), mlp.out.bias.zero_()
    bare = Transformer(replace(config, block=UsualBlock(), mlp=None)).double()
    bare.load_state_dict(silent.state_dict(), strict=False)
    assert_close(silent(tokens), bare(tokens))
