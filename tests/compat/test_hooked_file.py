"""Files with a HookedTransformer in them: every way they were saved, and pickles that would run something."""

import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from interp.compat import from_hooked_transformer, load_hooked
from interp.data.tokenizers import Tokenizer
from interp.families.tokenizer import HuggingFaceTokenizer
from tests.compat.slow_hooked import BASE, random_state
from tests.tiny import gpt2_tokenizer

CONFIG = BASE | {
    "attn_scale": np.sqrt(10),
    "initializer_range": np.float32(0.1),
    "dtype": torch.float64,
    "seed": np.int64(3),
}
TOKENS = torch.arange(9)


def saved(path: Path, content: object) -> Path:
    torch.save(content, path)
    return path


def logits() -> Tensor:
    return from_hooked_transformer(random_state(BASE), BASE)(TOKENS)


LAYOUTS: dict[str, Callable[[], dict[str, object]]] = {
    "model-config": lambda: {"model": random_state(BASE), "config": CONFIG},
    "state_dict-cfg": lambda: {"state_dict": random_state(BASE), "cfg": CONFIG},
    "training": lambda: {
        "model": random_state(BASE),
        "config": CONFIG,
        "train_losses": [1.0, np.float64(0.5)],
        "epoch": 3,
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_dict_with_state_and_config_is_a_model(layout: str, tmp_path: Path) -> None:
    model = load_hooked(saved(tmp_path / "model.pth", LAYOUTS[layout]()))
    assert torch.equal(model(TOKENS), logits())


@pytest.mark.parametrize("old", [False, True], ids=["zip", "before-1.6"])
def test_a_bare_state_dict_is_a_model_with_a_config_beside_it(old: bool, tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save(random_state(BASE), path, _use_new_zipfile_serialization=not old)
    assert torch.equal(load_hooked(path, config=BASE)(TOKENS), logits())
    sidecar = tmp_path / "config.json"
    sidecar.write_text(json.dumps(BASE))
    assert torch.equal(load_hooked(path, sidecar)(TOKENS), logits())
    with pytest.raises(ValueError, match=r"weights.pt holds no config \(config or cfg\): give one"):
        load_hooked(path)
    sidecar.write_text("[]")
    with pytest.raises(ValueError, match=r"config.json must hold a JSON object, got list"):
        load_hooked(path, sidecar)


def test_a_given_config_goes_before_the_files_own(tmp_path: Path) -> None:
    path = saved(tmp_path / "model.pt", {"model": random_state(BASE), "config": BASE | {"act_fn": "solu_ln"}})
    with pytest.raises(ValueError, match=r"model.pt: TransformerLens: config asks for act_fn='solu_ln'"):
        load_hooked(path)
    assert torch.equal(load_hooked(path, config=BASE)(TOKENS), logits())


def test_dtype_and_tokenizer_are_passed_on(tmp_path: Path) -> None:
    path = saved(tmp_path / "model.pt", {"model": random_state(BASE), "config": BASE})
    model = load_hooked(path, dtype=torch.float32, tokenizer=HuggingFaceTokenizer(gpt2_tokenizer()))
    assert model.transformer.dtype == torch.float32 and isinstance(model.text.tokenizer, Tokenizer)


MODULES = ("transformer_lens.HookedTransformerConfig", "transformer_lens.config.hooked_transformer_config")


@pytest.mark.parametrize("module", MODULES)
def test_of_a_pickled_config_the_fields_are_read_and_no_code_is_run(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []
    made = type("HookedTransformerConfig", (), {"__module__": module})
    made.__setstate__ = lambda self, state: ran.append(1)  # type: ignore[attr-defined]
    place = ModuleType(module)
    place.HookedTransformerConfig = made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module, place)
    config = made()
    config.__dict__.update(CONFIG)
    path = saved(tmp_path / "grokking.pth", {"model": random_state(BASE), "config": config})
    assert torch.equal(load_hooked(path)(TOKENS), logits())
    assert not ran


class Harmful:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return Path.write_text, (self.path, "was here")  # type: ignore[return-value]


@pytest.mark.parametrize("bare", [False, True])
def test_a_pickle_that_would_run_something_is_refused_and_does_not(bare: bool, tmp_path: Path) -> None:
    trace, path = tmp_path / "trace", tmp_path / "evil.pt"
    content = {"model": random_state(BASE), "config": BASE, "hello": Harmful(trace)}
    if bare:
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path)
    with pytest.raises(ValueError, match=r"(?s)evil.pt is refused, and nothing in it was run.*Save it again"):
        load_hooked(path)
    assert not trace.exists()


def test_whole_pickled_model_is_refused_with_the_lines_that_save_it_again(tmp_path: Path) -> None:
    path = saved(tmp_path / "model.pt", torch.nn.Linear(2, 2))
    with pytest.raises(
        ValueError, match=r'refused.*torch.nn.modules.linear.Linear.*"config": old.cfg.to_dict\(\)'
    ):
        load_hooked(path)


def test_files_that_hold_something_else_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere.pt does not exist"):
        load_hooked(tmp_path / "nowhere.pt")
    with pytest.raises(ValueError, match=r"list.pt must hold a state dict or a dict with one, got list"):
        load_hooked(saved(tmp_path / "list.pt", [1]))
    with pytest.raises(ValueError, match=r"a state dict holds tensors, 'lr' is float"):
        load_hooked(saved(tmp_path / "odd.pt", {"lr": 0.1}), BASE)
    whole = saved(tmp_path / "cut.pt", random_state(BASE)).read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"cut.pt is (not a readable torch file|refused)"):
        load_hooked(tmp_path / "cut.pt", BASE)
