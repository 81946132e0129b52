"""`import interp` is cheap: what is heavy is imported where it is used, and nothing happens on import."""

import json
import subprocess
import sys

import pytest

HEAVY = [
    *("transformers", "transformer_lens", "tokenizers", "safetensors", "matplotlib"),
    *("pandas", "xarray", "pyarrow", "jinja2", "ray", "tyro"),
]
CODE = f"""
import json, sys, torch
torch.manual_seed(7)
state = lambda: (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(), torch.rand(1).item())
heavy = lambda: sorted(set(sys.modules) & set({HEAVY}))
before = state()
torch.manual_seed(7)
import interp
found = {{"same state": before == state(), "of the package": heavy()}}
import interp.__main__
found["of the command line"] = heavy()
model = interp.HookedTransformer.from_pretrained("demo-attn-2l")
model("a")
found["of loading a model"] = [name for name in ("torch._dynamo", "transformers") if name in sys.modules]
interp.run([interp.lenses.LogitLens(top=2)], model, ["a", "b"])
unneeded = ("torch._dynamo", "sympy", "matplotlib", "filelock", "interp.lab", "interp.wrapped")
found["of a first run"] = [name for name in unneeded if name in sys.modules]
interp.run([interp.lenses.LogitLens(top=2)], model, ["a", "b", "c"] * 3)
found["of more rows than a plan tries out"] = [name for name in ("torch._dynamo", "sympy") if name in sys.modules]
found["names"] = len([getattr(interp, name) for name in interp.HOMES])
print(json.dumps(found))
"""
Found = dict[str, object]


@pytest.fixture(scope="module")
def found() -> Found:
    """What a fresh interpreter sees as it imports the package, then the command line, then every name."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_importing_interp_loads_no_heavy_package(found: Found) -> None:
    assert found["of the package"] == []


def test_importing_interp_changes_no_global_state_of_torch(found: Found) -> None:
    assert found["same state"] is True


def test_the_command_line_starts_without_the_packages_of_its_commands(found: Found) -> None:
    assert set(found["of the command line"]) <= {"tyro"}  # type: ignore[call-overload]


def test_demo_model_loads_without_pytorchs_compiler_and_transformers(found: Found) -> None:
    assert found["of loading a model"] == []


def test_a_first_run_over_a_few_texts_loads_nothing_that_it_does_not_use(found: Found) -> None:
    assert found["of a first run"] == []


def test_a_first_run_over_many_texts_does_not_load_pytorchs_compiler(found: Found) -> None:
    assert found["of more rows than a plan tries out"] == []


def test_every_public_name_can_be_imported(found: Found) -> None:
    assert found["names"] > 0  # type: ignore[operator]
