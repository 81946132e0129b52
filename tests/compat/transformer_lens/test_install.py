"""`install()`: `import transformer_lens` gives our modules, refuses what would mix, and can be undone."""

import subprocess
import sys

import pytest

from interp.compat.transformer_lens.install import ALIASES, instead

IMPORTS = """
import transformer_lens, transformer_lens.utils as utils, transformer_lens.patching
import transformer_lens.utilities.slice, transformer_lens.components.mlps.mlp
from transformer_lens import HookedTransformer, HookedTransformerConfig, ActivationCache, FactoredMatrix
from transformer_lens import evals, head_detector, patching, train, utilities
from transformer_lens.HookedTransformer import HookedTransformer as again
from transformer_lens.hook_points import HookPoint
from transformer_lens.HookedRootModule import HookedRootModule
from transformer_lens.ActivationCache import ActivationCache as cache
from transformer_lens.past_key_value_caching import TransformerLensKeyValueCache
from transformer_lens.utilities.components_utils import get_act_name
from transformer_lens.components import TransformerBlock
from transformer_lens.loading_from_pretrained import get_official_model_name
import transformer_lens.loading_from_pretrained as loading
import interp.compat.transformer_lens as ours
assert transformer_lens is ours and again is HookedTransformer is ours.HookedTransformer
assert utils.get_act_name is get_act_name and isinstance(HookedTransformer, type)
import transformer_lens.HookedTransformer, transformer_lens.FactoredMatrix
assert isinstance(transformer_lens.HookedTransformer, type) and isinstance(transformer_lens.FactoredMatrix, type)
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    """A fresh process: what is imported cannot be taken back in this one."""
    setup = "from interp.compat.transformer_lens.install import install, uninstall\n"
    return subprocess.run([sys.executable, "-c", setup + code], capture_output=True, text=True, check=False)


def test_every_name_users_import_is_ours_until_it_is_undone() -> None:
    code = f"""
import sys
install(); install()
assert "transformer_lens" not in sys.modules
{IMPORTS}
hints = dict(model_bridge="from_bridge", tools="interp.patch", hook_pionts="hook_points")
for missing, hint in hints.items():
    try:
        __import__("transformer_lens." + missing)
    except ModuleNotFoundError as error:
        assert hint in str(error), error
    else:
        raise AssertionError(missing)
try:
    from transformer_lens import HookedEncoder
except ImportError as error:
    assert "interp.HookedTransformer.from_pretrained" in str(error), error
uninstall(); uninstall()
assert not [name for name in sys.modules if name.partition(".")[0] == "transformer_lens"]
assert isinstance(ours.HookedTransformer, type)
"""
    done = run(code)
    assert done.returncode == 0, done.stderr


def test_a_real_one_that_is_already_imported_is_refused() -> None:
    code = """
import sys, types
sys.modules["transformer_lens"] = types.ModuleType("transformer_lens")
try:
    install()
except RuntimeError as error:
    assert "already imported" in str(error)
else:
    raise AssertionError
"""
    done = run(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "name", ["TransformerBridge", "HookedEncoderDecoder", "tools.analysis", "ActivationCach"]
)
def test_names_that_are_not_offered_say_what_is(name: str) -> None:
    assert f"transformer_lens.{name} is not offered" in instead(name)
    assert "interp." in instead(name) or "ActivationCache" in instead(name)


def test_aliases_name_modules_that_exist() -> None:
    from importlib.util import find_spec

    missing = [
        ours for ours in ALIASES.values() if find_spec(f"interp.compat.transformer_lens.{ours}") is None
    ]
    assert missing == []
