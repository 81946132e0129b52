"""`install()`: `import transformer_lens` gives our modules, refuses what would mix, and can be undone."""

import pytest

from interp.compat.transformer_lens.install import ALIASES, instead
from tests.forking import executed, forked

IMPORTS = """
import ROOT, ROOT.utils as utils, ROOT.patching
import ROOT.utilities.slice, ROOT.components.mlps.mlp
from ROOT import HookedTransformer, HookedTransformerConfig, ActivationCache, FactoredMatrix
from ROOT import evals, head_detector, patching, train, utilities
from ROOT.HookedTransformer import HookedTransformer as again
from ROOT.hook_points import HookPoint
from ROOT.HookedRootModule import HookedRootModule
from ROOT.ActivationCache import ActivationCache as cache
from ROOT.past_key_value_caching import TransformerLensKeyValueCache
from ROOT.utilities.components_utils import get_act_name
from ROOT.components import TransformerBlock
from ROOT.loading_from_pretrained import get_official_model_name
import ROOT.loading_from_pretrained as loading
import interp.compat.transformer_lens as ours
assert ROOT is ours and again is HookedTransformer is ours.HookedTransformer
assert utils.get_act_name is get_act_name and isinstance(HookedTransformer, type)
import ROOT.HookedTransformer, ROOT.FactoredMatrix
assert isinstance(ROOT.HookedTransformer, type) and isinstance(ROOT.FactoredMatrix, type)
from ROOT.cache.key_value_cache_entry import TransformerLensKeyValueCacheEntry
from ROOT.config.transformer_lens_config import TransformerLensConfig
from ROOT.conversion_utils.conversion_steps.base_tensor_conversion import BaseTensorConversion
from ROOT.factories.mlp_factory import MLPFactory
from ROOT.tools.analysis.direct_path_patching import get_act_patch_direct_path
from ROOT.utilities.attention import simple_attn_linear
from ROOT.utilities.hf_utils import call_hf_with_retry
assert issubclass(HookedTransformerConfig, TransformerLensConfig)
"""


SETUP = """
import sys
assert not [name for name in sys.modules if name.startswith(("interp.compat.transformer_lens", "transformer_lens"))]
from interp.compat.transformer_lens.install import install, uninstall
"""


def run(code: str) -> None:
    """A process in which nothing of either package is imported yet: what is cannot be taken back in this one."""
    forked(executed, SETUP + code)


@pytest.mark.slow
def test_every_name_users_import_is_ours_until_it_is_undone() -> None:
    code = f"""
import sys
install(); install()
assert "transformer_lens" not in sys.modules
{IMPORTS.replace("ROOT", "transformer_lens")}
hints = {{"model_bridge": "from_bridge", "tools.analysis.jacobian_lens": "interp.patch", "hook_pionts": "hook_points"}}
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
    run(code)


@pytest.mark.slow
def test_every_name_can_be_imported_from_our_package_too() -> None:
    """A textual change of the imports is all that code needs; no name of TransformerLens' itself is taken."""
    code = IMPORTS.replace("ROOT", "interp.compat.transformer_lens")
    run(f'{code}assert "transformer_lens" not in sys.modules')


@pytest.mark.parametrize(
    "first", ["HookedTransformer", "ActivationCache", "FactoredMatrix", "SVDInterpreter"]
)
@pytest.mark.slow
def test_a_module_with_the_name_of_a_class_does_not_hide_it(first: str) -> None:
    code = f"""
import interp.compat.transformer_lens as ours, sys
import interp.compat.transformer_lens.{first}
assert isinstance(ours.{first}, type)
assert sys.modules["interp.compat.transformer_lens.{first}"].{first} is ours.{first}
from interp.compat.transformer_lens import {first}
assert isinstance({first}, type)
"""
    run(code)


def test_importing_the_package_imports_no_model() -> None:
    run("assert 'interp.compat.transformer_lens.hooked_transformer' not in sys.modules")


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
    run(code)


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


def test_what_is_no_bridge_is_refused_without_an_import_of_the_real_one() -> None:
    """It takes seconds to import, and need not be there."""
    code = """
import torch
from interp.compat import from_bridge
try:
    from_bridge(torch.nn.Linear(2, 2))
except ValueError as error:
    assert "got Linear; the package transformer-lens" in str(error), error
else:
    raise AssertionError
assert "transformer_lens" not in sys.modules
"""
    run(code)
