"""The hub under TransformerLens' names: what is waited out and what is not, and what a file gives."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers

from interp.compat.transformer_lens import hub
from interp.compat.transformer_lens.config import HookedTransformerConfig
from interp.compat.transformer_lens.hooked_transformer import HookedTransformer
from interp.compat.transformer_lens.pretrained import named_tokenizer
from tests.tiny import gpt2_tokenizer


class RefusedError(Exception):
    """What a client raises for an answer of the hub."""

    def __init__(self, status: int, headers: dict[str, str]) -> None:
        super().__init__(str(status))
        self.response = SimpleNamespace(status_code=status, headers=headers)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(hub.time, "sleep", found.append)
    monkeypatch.setattr(hub.random, "random", lambda: 0.5)
    return found


def failing(times: int, status: int, **headers: str) -> tuple[list[int], object]:
    calls: list[int] = []

    def ask() -> str:
        calls.append(1)
        if len(calls) <= times:
            raise RefusedError(status, {name.replace("_", "-"): value for name, value in headers.items()})
        return "answer"

    return calls, ask


def test_too_many_requests_are_waited_out_ever_longer(pauses: list[float]) -> None:
    calls, ask = failing(2, 429)
    assert hub.call_hf_with_retry(ask, max_attempts=3, base_delay=10.0) == "answer"  # type: ignore[arg-type]
    assert len(calls) == 3 and pauses == [10.0, 20.0]


def test_the_hub_says_how_long(pauses: list[float]) -> None:
    _, ask = failing(1, 429, Retry_After="7.5")
    hub.call_hf_with_retry(ask)  # type: ignore[arg-type]
    _, ask = failing(1, 429, Retry_After="soon")
    hub.call_hf_with_retry(ask, base_delay=1e4)  # type: ignore[arg-type]
    assert pauses == [7.5, hub.LONGEST_WAIT]


@pytest.mark.parametrize(("status", "calls_made"), [(429, 3), (503, 1)])
def test_the_last_refusal_and_other_errors_come_through(
    status: int, calls_made: int, pauses: list[float]
) -> None:
    calls, ask = failing(99, status)
    with pytest.raises(RefusedError, match=str(status)):
        hub.call_hf_with_retry(ask)  # type: ignore[arg-type]
    assert len(calls) == calls_made and len(pauses) == calls_made - 1


def test_a_file_gives_its_values_or_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"d_model": 4}))
    torch.save({"W": torch.ones(2)}, tmp_path / "a.pth")
    (tmp_path / "a.txt").write_text("x")
    monkeypatch.setattr(hub, "hf_hub_download", lambda filename, **options: str(tmp_path / filename))
    assert hub.download_file_from_hf("owner/name", "a.json") == {"d_model": 4}
    assert torch.equal(hub.download_file_from_hf("owner/name", "a.pth")["W"], torch.ones(2))
    assert hub.download_file_from_hf("owner/name", "a.txt") == str(tmp_path / "a.txt")


AUTOS = ("AutoConfig", "AutoModel", "AutoTokenizer", "AutoProcessor", "AutoFeatureExtractor")


@pytest.fixture
def autos(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The loaders of transformers, put back afterwards."""
    for name in AUTOS:
        auto = getattr(transformers, name)
        monkeypatch.setattr(auto, "from_pretrained", auto.__dict__["from_pretrained"])
    return monkeypatch


def test_loaders_wait_out_too_many_requests_once_however_often_asked(
    autos: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    calls, ask = failing(2, 429)
    autos.setattr(
        transformers.AutoTokenizer, "from_pretrained", classmethod(lambda cls, name: (cls, name, ask()))
    )  # type: ignore[operator]
    for _ in range(2):
        hub.enable_hf_retry()
    assert transformers.AutoTokenizer.from_pretrained("gpt2") == (
        transformers.AutoTokenizer,
        "gpt2",
        "answer",
    )
    assert len(calls) == 3 and len(pauses) == 2


@pytest.mark.parametrize("stand_in", ["function", "partial", "object"])
def test_what_stands_in_for_a_loader_stays_and_is_asked(stand_in: str, autos: pytest.MonkeyPatch) -> None:
    """As tests put it there: a plain function, and callables that are none."""
    asked: list[str] = []

    def load(name: str, **options: object) -> transformers.PreTrainedTokenizerBase:
        asked.append(name)
        return gpt2_tokenizer()

    given: Any = {"function": load, "partial": partial(load), "object": Mock(side_effect=load)}[stand_in]
    autos.setattr(transformers.AutoTokenizer, "from_pretrained", given)
    hub.enable_hf_retry()
    assert transformers.AutoTokenizer.from_pretrained is given
    assert named_tokenizer("gpt2-medium") is not None
    config = HookedTransformerConfig(
        n_layers=1,
        d_model=8,
        n_ctx=8,
        d_head=4,
        d_vocab=400,
        act_fn="relu",
        tokenizer_name="gpt2",
        device="cpu",
    )
    model = HookedTransformer(config)
    assert model.to_tokens("The cat").shape[0] == 1
    assert asked[0] == "gpt2-medium" and asked[1:] and set(asked[1:]) == {"gpt2"}
