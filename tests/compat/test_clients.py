"""Libraries written for TransformerLens, on ours: their transcripts where they are installed, and what they need of us.

`experiments/clients/run.sh` makes an environment with SAELens and circuit-tracer. The transcripts run in the Python
that runs the tests, or in that of `INTERP_CLIENTS_PYTHON=/tmp/clients/bin/python`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from interp.compat.transformer_lens.components import MLP, CanBeUsedAsMLP, GatedMLP
from interp.compat.transformer_lens.config import HookedTransformerConfig
from interp.compat.transformer_lens.hook_points import HookPoint
from interp.compat.transformer_lens.hooked_transformer import HookedTransformer

FOLDER = Path(__file__).parents[2] / "experiments" / "clients"
PYTHON = os.environ.get("INTERP_CLIENTS_PYTHON", sys.executable)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A process of its own: `install()` wants to come before any `transformer_lens`."""
    quiet = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    return subprocess.run(
        [PYTHON, *arguments], cwd=FOLDER, env=os.environ | quiet, capture_output=True, text=True, timeout=900
    )


@pytest.mark.parametrize(("transcript", "package"), [("saes", "sae_lens"), ("circuits", "circuit_tracer")])
def test_the_client_runs_unchanged(transcript: str, package: str) -> None:
    found = run("-c", f"import importlib.util; print(importlib.util.find_spec({package!r}) is not None)")
    if found.stdout.strip() != "True":
        pytest.skip(f"{package} is not installed in {PYTHON}; experiments/clients/run.sh installs it")
    done = run(f"{transcript}.py", "interp")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "interp/compat/transformer_lens" in done.stdout


@pytest.fixture(params=[False, True], ids=["plain", "gated"])
def model(request: pytest.FixtureRequest) -> HookedTransformer:
    torch.manual_seed(0)
    return HookedTransformer(
        HookedTransformerConfig(
            n_layers=2, d_model=12, n_ctx=10, d_head=4, n_heads=3, d_vocab=11, d_mlp=16, act_fn="gelu_new",
            normalization_type="LNPre", gated_mlp=request.param, seed=0, device="cpu",
        )
    )  # fmt: skip


def test_an_mlp_with_a_forward_of_its_own_runs_it(model: HookedTransformer) -> None:
    """SAELens gives each MLP a hook point before its input, and a `forward` that goes through it."""
    tokens = torch.arange(8)[None]
    before = model(tokens)
    for block in model.blocks:
        inner = block.mlp.forward
        block.mlp.hook_in = HookPoint()
        block.mlp.forward = lambda x, inner=inner, point=block.mlp.hook_in: inner(point(x))
    model.setup()
    torch.testing.assert_close(model(tokens), before, rtol=1e-5, atol=1e-5)

    def double(value: torch.Tensor, hook: HookPoint) -> torch.Tensor:
        return 2 * value

    at_input = model.run_with_hooks(tokens, fwd_hooks=[("blocks.1.mlp.hook_in", double)])
    at_norm = model.run_with_hooks(tokens, fwd_hooks=[("blocks.1.ln2.hook_normalized", double)])
    assert not torch.allclose(at_input, before)
    torch.testing.assert_close(at_input, at_norm)
    _, cache = model.run_with_cache(tokens, names_filter=["blocks.1.mlp.hook_in"])
    torch.testing.assert_close(
        cache["blocks.1.mlp.hook_in"], model.run_with_cache(tokens)[1]["blocks.1.ln2.hook_normalized"]
    )


def test_mlps_share_the_base_that_clients_name(model: HookedTransformer) -> None:
    mlp = model.blocks[0].mlp
    assert isinstance(mlp, GatedMLP if model.cfg.gated_mlp else MLP) and isinstance(mlp, CanBeUsedAsMLP)


def test_a_subclass_of_the_base_takes_the_place_of_an_mlp(model: HookedTransformer) -> None:
    """The base gives its input back: then the block adds its normed stream."""
    model.blocks[1].mlp = CanBeUsedAsMLP(model.cfg)
    _, cache = model.run_with_cache(torch.arange(8)[None])
    torch.testing.assert_close(cache["blocks.1.hook_mlp_out"], cache["blocks.1.ln2.hook_normalized"])
