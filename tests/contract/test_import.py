"""`import interp` is cheap: what is heavy is imported where it is used, and nothing happens on import."""

import subprocess
import sys

HEAVY = (
    "transformers transformer_lens tokenizers safetensors matplotlib pandas xarray pyarrow jinja2 ray tyro"
)


def printed(code: str) -> list[str]:
    """The words that a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_importing_interp_loads_no_heavy_package() -> None:
    assert printed(f"import interp, sys; print(*sorted(set(sys.modules) & set({HEAVY.split()})))") == []


def test_importing_interp_changes_no_global_state_of_torch() -> None:
    code = """
import torch
torch.manual_seed(7)
state = lambda: (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(), torch.rand(1).item())
before = state()
torch.manual_seed(7)
import interp
print(before == state())
"""
    assert printed(code) == ["True"]


def test_every_public_name_can_be_imported() -> None:
    code = "import interp; print(len([getattr(interp, name) for name in interp.__all__]) > 0)"
    assert printed(code) == ["True"]
