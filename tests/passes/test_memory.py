"""What a pass will record is known before it runs: what is refused would not have fitted, and nothing else is."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from interp import HookedTransformer
from interp.core import memory as of_core
from interp.data.batch import Batch
from interp.features import top_examples
from interp.model import Edit, Read, Transformer, sites
from interp.passes import memory, observe
from interp.passes.memory import check_recorded
from tests.configs import CONFIGS, build, some_tokens
from tests.loops import over
from tests.mixers import MIXERS, build_mixed
from tests.tiny import hooked

EXACT = ("gpt2", "llama-gqa", "attention-only")


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets a machine have so many bytes."""

    def left(size: int) -> None:
        monkeypatch.setattr(of_core, "free_memory", lambda device: size)
        for module in (of_core, memory):
            monkeypatch.setattr(module, "MUCH", 4 * size)

    return left


def nbytes(values: Tensor) -> int:
    return values.numel() * values.element_size()


@over("name", [*CONFIGS, *MIXERS])
def test_no_more_is_predicted_than_a_pass_records(name: str, free: Callable[[int], None]) -> None:
    model = build(name) if name in CONFIGS else build_mixed(name)
    free(10**15)
    tokens = some_tokens(2, 8)
    names = sites.names(model.config)
    values = {
        read.site: value for read, value in observe(model, Batch(tokens), [*map(Read, names)]).trace.items()
    }
    taken = sum(map(nbytes, values.values()))
    free(taken)
    check_recorded(names, model, 2, 8, logits=False)
    if name in EXACT:
        free(taken - 1)
        with pytest.raises(
            ValueError, match=rf"^{len(names)} sites of 2 x 8 tokens: .* are required, .* are free; "
        ):
            check_recorded(names, model, 2, 8, logits=False)


def test_a_cache_that_does_not_fit_is_refused_before_the_pass(
    free: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = hooked()
    logits, cache = model.run_with_cache("The cat sat")
    free(nbytes(logits) + sum(map(nbytes, cache.values())) - 1)
    assert len(model.run_with_cache("The cat sat", "blocks.*.hook_resid_post")[1]) == model.cfg.n_layers
    assert model.run_with_cache("The cat sat", stop_at_layer=1)[1]
    monkeypatch.setattr(Transformer, "forward", lambda *_, **__: pytest.fail("a pass was run"))
    with pytest.raises(ValueError, match=r"fewer sites \(names_filter=, of caches\)"):
        model.run_with_cache("The cat sat")


def test_a_list_that_does_not_fit_is_refused(free: Callable[[int], None]) -> None:
    free(10**6)
    texts = ["The cat sat on the mat"] * 300
    with pytest.raises(ValueError, match=r"^lists of \d+ entries \(top\) of each of \d+ cells: "):
        top_examples(hooked(), texts, "blocks.1.mlp.hook_post", top=10**6)


def test_a_pass_that_fails_lets_go_of_what_it_recorded() -> None:
    """Tap and scopes refer to each other: only the collector would free them."""
    model, seen = HookedTransformer(build("gpt2")), list[weakref.ref[Tensor]]()

    def broken(value: Tensor) -> Tensor:
        raise ValueError("mine")

    def watched(value: Tensor) -> Tensor:
        seen.append(weakref.ref(kept := value.clone()))
        return kept

    gc.disable()
    try:
        with pytest.raises(Exception, match="mine"):
            observe(
                model, Batch(torch.arange(6)[None]), [Read("blocks.0.hook_resid_pre", watched)],
                [Edit("blocks.1.hook_resid_pre", broken)],
            )  # fmt: skip
        assert [each() for each in seen] == [None]
    finally:
        gc.enable()
