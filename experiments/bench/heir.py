"""Claim: code written for TransformerLens' `HookedTransformer` runs as fast as the native functions, within 10 %.

Its forward without hooks is to take no more than 3 % beyond the native model's, with and without gradients. With
TransformerLens 3 on the path (`PYTHONPATH=...`; 4 has no `HookedTransformer`) it is timed too, once.
"""

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
import transformer_lens
import tyro
from measure import cpu_seconds, report, timing, work
from subjects import gpt2_small, largest_difference
from torch import Tensor, nn

import interp
from interp.compat import to_hooked_state
from interp.compat.transformer_lens import HookedTransformer, HookedTransformerConfig, patching
from interp.weights import HeadCircuits, composition_scores
from interp.weights.composition import CompositionKind

COLUMNS, NEW = 15, 32
ANSWER, WRONG = 1000, 2000
KINDS: tuple[CompositionKind, ...] = ("Q", "K", "V")
FORWARD, FUNCTIONS = 1.03, 1.1
Calls = Mapping[str, Callable[[], Any]]


@dataclass(frozen=True)
class Heirs:
    """One set of weights in three implementations."""

    name: str
    native: interp.HookedTransformer
    shim: HookedTransformer
    lens: Any
    """TransformerLens 3's, where that can be imported."""

    def tokens(self, rows: int, columns: int, seed: int = 1) -> Tensor:
        """The same random tokens at every call."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.native.cfg.d_vocab, (rows, columns), generator=generator)


def main(repeats: int = 5, lens: bool = True) -> None:
    """Measure the claims on three shapes.

    Args:
        repeats: timed rounds per system; forward passes of the small models get 10 times as many.
        lens: whether to time TransformerLens 3 as well, where it is there.
    """
    torch.set_num_threads(1)
    small = [
        heirs(name, interp.HookedTransformer.from_pretrained(name)) for name in ("demo-attn-2l", "demo-4l")
    ]
    gpt2 = heirs("gpt2-small", gpt2_small().ours, lens=lens)
    for subject, rounds in (*((each, 10 * repeats) for each in small), (gpt2, repeats)):
        forward(subject, rounds)
    with torch.no_grad():
        for what, calls in functions(gpt2).items():
            _compare(what, calls, repeats)


def heirs(name: str, native: interp.HookedTransformer, *, lens: bool = False) -> Heirs:
    """The implementations of a native model's weights."""
    state, config = to_hooked_state(native)
    shim = HookedTransformer(HookedTransformerConfig.from_dict({**config, "device": "cpu"}))
    shim.load_state_dict(state, strict=False)
    theirs = None
    if lens and int(version("transformer-lens").partition(".")[0]) < 4:
        cfg = transformer_lens.HookedTransformerConfig.from_dict({**config, "device": "cpu"})
        theirs = transformer_lens.HookedTransformer(cfg)
        theirs.load_state_dict(state, strict=False)
    return Heirs(name, native, shim, theirs)


def forward(subject: Heirs, rounds: int) -> None:
    """Plain passes; with gradients against a native model whose parameters want them."""
    tokens = subject.tokens(4, 32)
    native = subject.shim.engine.native
    assert isinstance(native, nn.Module)
    trained = copy.deepcopy(native).requires_grad_(True)
    for grad, reference in ((False, native), (True, trained)):
        with torch.set_grad_enabled(grad):
            calls: dict[str, Callable[[], Any]] = {
                "native": partial(reference, tokens),
                "shim": partial(subject.shim, tokens),
            }
            if subject.lens is not None:
                calls["transformer_lens"] = partial(subject.lens, tokens)
            what = f"forward of {subject.name}, 4 x 32, gradients {'on' if grad else 'off'}"
            _compare(what, calls, rounds, FORWARD)


def functions(subject: Heirs) -> dict[str, Calls]:
    """What is compared: the native way, ours under their names, and theirs."""
    native, cells = subject.native, subject.tokens(1, COLUMNS)
    corrupt = cells.clone()
    corrupt[0, [2, 4, 9, 10]] = torch.arange(4) + 7
    metric = interp.logit_difference(ANSWER, WRONG)
    long = subject.tokens(4, 64)

    def patched(site: str, by: tuple[str, ...]) -> Tensor:
        found = interp.patch(native, cells, corrupt, site, metric=metric, by=by)
        return torch.from_numpy((found.value + float(found.corrupt[0])).values)

    def composed() -> Tensor:
        circuits = HeadCircuits(native)
        return torch.stack([composition_scores(circuits, kind) for kind in KINDS])

    _, kept = native.run_with_cache(long)
    ours: dict[str, Callable[[], Any]] = {
        "patch the stream, 12 x 15": partial(patched, "resid_pre", ("layer", "pos")),
        "patch z of 144 heads": partial(patched, "z", ("layer", "head")),
        "stack_head_results, 4 x 64": lambda: kept.stack_head_results().values,
        "decomposition with neurons, last of 4 x 64": partial(_neurons, kept, native.cfg.n_layers),
        "Q, K and V composition of 144 heads": composed,
        "32 greedy tokens after 32": lambda: (
            native.generate(interp.Batch(long[:1, :32]), NEW, stop_at_eos=False).tokens
        ),
    }
    found: dict[str, Calls] = {what: {"native": call} for what, call in ours.items()}
    models = [("shim", subject.shim, patching)]
    if subject.lens is not None:
        models.append(("transformer_lens", subject.lens, sys.modules["transformer_lens.patching"]))
    for name, model, sweeps in models:
        for what, call in zip(ours, _as_theirs(model, sweeps, cells, corrupt, long), strict=True):
            found[what] = {**found[what], name: call}
    return found


def _as_theirs(
    model: Any, sweeps: Any, cells: Tensor, corrupt: Tensor, long: Tensor
) -> list[Callable[[], Any]]:
    _, clean = model.run_with_cache(cells)
    _, kept = model.run_with_cache(long)
    return [
        lambda: sweeps.get_act_patch_resid_pre(model, corrupt, clean, _difference),
        lambda: sweeps.get_act_patch_attn_head_out_all_pos(model, corrupt, clean, _difference),
        lambda: _fresh(kept).stack_head_results(),
        lambda: kept.get_full_resid_decomposition(expand_neurons=True, pos_slice=-1),
        lambda: torch.stack([model.all_composition_scores(kind) for kind in KINDS]),
        lambda: model.generate(
            long[:1, :32], max_new_tokens=NEW, do_sample=False, stop_at_eos=False, verbose=False
        ),
    ]


def _fresh(cache: Any) -> Any:
    """The cache without the results that an earlier call left in it."""
    for name in [name for name in cache.cache_dict if name.endswith("hook_result")]:
        del cache.cache_dict[name]
    return cache


def _neurons(kept: Any, n_layers: int) -> Tensor:
    """The writes of all neurons at the last position; their function adds those of the heads."""
    return torch.cat([kept.stack_neuron_results(layer).values for layer in range(n_layers)])


def _difference(logits: Tensor) -> Tensor:
    return logits[0, -1, ANSWER] - logits[0, -1, WRONG]


def _compare(what: str, calls: Calls, rounds: int, claim: float = FUNCTIONS) -> None:
    results = {system: call() for system, call in calls.items()}
    if all(torch.is_tensor(value) and value.shape == results["native"].shape for value in results.values()):
        exists = ~results["native"].isnan()
        for system, value in results.items():
            difference = largest_difference(value[exists], results["native"][exists])
            if difference > 1e-4:
                raise RuntimeError(f"{what}: {system} differs from the native result by {difference}")
    del results
    fast = {system: call for system, call in calls.items() if system != "transformer_lens"}
    seconds = cpu_seconds(fast, rounds)
    if "transformer_lens" in calls:
        once = cpu_seconds({"transformer_lens": calls["transformer_lens"]}, 1)["transformer_lens"]
        seconds["transformer_lens"] = once * rounds
    for system, call in calls.items():
        report("heir", system, what, timing(seconds, system, "native"), work(call), claim=claim)


if __name__ == "__main__":
    tyro.cli(main)
