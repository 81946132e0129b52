"""What a model answers to every kind of question, asked of it in one process and spread over two."""

import functools
import zlib
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import interp
from interp.data.batch import Batch
from interp.model import Edit, LayerWeights, Read, Transformer, Weights, sites
from interp.passes.generate import generate
from interp.passes.observe import observe
from interp.passes.sweep import Sweep
from interp.runs.provenance import model_hash
from interp.runs.tensor_parallel import tensor_parallel
from tests.configs import CONFIGS, perturbed, some_tokens

WORLD = 2
Answers = dict[str, Tensor]


MODELS = CONFIGS | {"head-norm": replace(CONFIGS["gemma3"], n_kv_heads=2)}
NAMES = ("gpt2", "llama-gqa", "parallel", "window", "tied")
MORE = ("head-norm", "bloom", "gemma2", "masked-lm", "attention-only")
"""Norms of heads, a bias of scores, soft caps and sandwich norms, post-norms, and no MLP."""
CASES = [
    *((name, torch.float64) for name in (*NAMES, *MORE)),
    *((name, torch.float32) for name in NAMES[:2]),
]
HEAD, NEURON = 3, 17
"""Of the second process, of the first: global numbers must reach both."""


def label(name: str, dtype: torch.dtype) -> str:
    """The name of a case."""
    return f"{name}-{str(dtype).removeprefix('torch.')}"


def batch() -> Batch:
    """Three rows, one of them padded."""
    keep = torch.ones(3, 9, dtype=torch.bool)
    keep[1, :4] = False
    return Batch(some_tokens(), keep)


def silenced(index: int) -> "Edit.change":
    """Index assignment along the axis of heads or neurons, the one that would be lost on a sharded tensor."""

    def change(x: Tensor) -> Tensor:
        x[:, :, index] = 0.0
        return x

    return change


def scaled(v: Tensor) -> Tensor:
    """In place, too."""
    v[:, :, 0] *= 1.5
    return v


def edits(name: str) -> dict[str, list[Edit]]:
    """Interventions of every kind; all change the logits."""
    config, at = MODELS[name], "blocks.0."
    found = {
        "assign a head": [Edit(f"{at}attn.hook_z", silenced(HEAD))],
        "assign a key head": [Edit(f"{at}attn.hook_k", silenced(config.kv_heads - 1))],
        "scale a value head": [Edit(f"{at}attn.hook_v", scaled)],
        "uniform pattern": [Edit(f"{at}attn.hook_pattern", lambda x: torch.full_like(x, 1 / x.shape[-1]))],
        "reverse heads": [Edit(f"{at}attn.hook_z", lambda x: x.flip(2))],
        "drop a result": [Edit(f"{at}attn.hook_result", silenced(HEAD))],
        "query input": [Edit(f"{at}hook_q_input", silenced(HEAD))],
        "add to the stream": [Edit(f"{at}hook_resid_pre", lambda x: x + torch.linspace(-1, 1, x.shape[-1]).to(x))],
        "swap rows": [Edit(f"{at}attn.hook_z", lambda x: x.flip(0), rows=(0, 2))],
        "heads of both blocks": [
            Edit(f"blocks.{i}.attn.hook_z", silenced(i)) for i in range(config.n_layers)
        ],
    }  # fmt: skip
    if config.mlp is not None:
        found["assign a neuron"] = [Edit(f"{at}mlp.hook_post", silenced(NEURON))]
        found["shift before the non-linearity"] = [Edit(f"{at}mlp.hook_pre", lambda x: x - 0.5)]
    return found


def passes(model: Transformer, name: str) -> Answers:
    """Logits, every site, and logits and a site after every edit."""
    reads = [Read(site) for site in sites.names(MODELS[name], on_demand=True)]
    after = Read("blocks.1.attn.hook_pattern")
    seen = observe(model, batch(), reads)
    found = {"logits": model(some_tokens()), "observed logits": seen.output}
    found |= {f"site {read.site}": seen.trace[read] for read in reads}
    for title, change in edits(name).items():
        edited = observe(model, batch(), [after], change)
        found |= {f"edit {title}": edited.output, f"edit {title}, pattern": edited.trace[after]}
    return found


def gradients(model: Transformer, name: str) -> Answers:
    """The gradient of the mean squared logit at every site, split inputs apart; and after an edit."""

    def metric(logits: Tensor) -> Tensor:
        return logits.square().mean()

    everything = sites.names(MODELS[name], on_demand=True)
    split = [s for s in everything if s.endswith(("q_input", "k_input", "v_input"))]
    found = {}
    for title, asked in {"": [s for s in everything if s not in split], "split ": split}.items():
        reads = [Read(site, grad=True) for site in asked]
        trace = observe(model, batch(), reads, metric=metric).trace
        found |= {f"gradient {title}{read.site}": trace[read] for read in reads}
    alone = Read("blocks.1.attn.hook_k", grad=True)  # where the graph begins at a spread site
    found["gradient of a leaf"] = observe(model, batch(), [alone], metric=metric).trace[alone]
    at = Read("hook_embed", grad=True)
    edit = Edit("blocks.1.attn.hook_z", silenced(HEAD))
    found["gradient after an edit"] = observe(model, batch(), [at], [edit], metric=metric).trace[at]
    return found


def experiments(model: Transformer, name: str) -> Answers:
    """Generation, a sweep over heads, per-head attribution, weights and their hash."""
    config, tokens, hooked = MODELS[name], some_tokens(), interp.HookedTransformer(model)
    shape = (1, tokens.shape[1], config.n_heads, config.head_width)
    nothing = torch.zeros(shape, dtype=model.dtype)
    variants = [
        interp.edits.Variant([interp.Edit((layer, h), interp.edits.Set(nothing))])
        for layer in range(config.n_layers)
        for h in range(config.n_heads)
    ]
    posed = Batch(tokens, answer=torch.tensor([3, 4, 5]), wrong=torch.tensor([6, 7, 8]))
    sweep = Sweep(model, posed, variants)
    found = {
        "sweep": sweep.run(interp.logit_difference()).values,
        "swept pattern": sweep.read([read := Read("blocks.1.attn.hook_pattern")])[read],
        "hash": torch.tensor([ord(c) for c in model_hash(model)]),
    }
    found["generated"] = generate(model, batch(), 6).tokens
    found["attribution"] = torch.from_numpy(
        interp.attribute(hooked, tokens, 3, 5, parts="head")["value"].values
    )
    layer = Weights(model).layer(1)
    kept = [
        name for name, value in vars(LayerWeights).items() if isinstance(value, functools.cached_property)
    ]
    views = {name: getattr(layer, name) for name in kept if not name.startswith("_")}
    return found | {f"weight {part}": view for part, view in views.items() if view is not None}


def answers(model: Transformer, name: str) -> Answers:
    """Everything, by the name of the question; the costlier questions of the first models in float64 only."""
    found = passes(model, name)
    if model.dtype == torch.float64:
        found |= gradients(model, name)
        found |= experiments(model, name) if name in NAMES else {}
    return found


def refusals(mesh: DeviceMesh) -> dict[str, str]:
    """What is said to a second spreading, to other weights in every process, and to a mesh of two dimensions."""
    unequal = perturbed(CONFIGS["gpt2"], seed=dist.get_rank())
    twice = tensor_parallel(perturbed(CONFIGS["gpt2"]), mesh)
    square = init_device_mesh("cpu", (1, WORLD))
    said = {}
    for title, model, on in (("twice", twice, mesh), ("unequal", unequal, mesh), ("square", unequal, square)):
        try:
            tensor_parallel(model, on)
        except ValueError as error:
            said[title] = str(error)
    return said


def work(rank: int, folder: str) -> None:
    """One process: answer every case with the spread model, into `<folder>/<rank>.pt`."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=120),
    )
    mesh = init_device_mesh("cpu", (WORLD,))
    found: dict[str, Answers] = {}
    sizes: dict[str, int] = {}
    for name, dtype in CASES:
        model = tensor_parallel(fresh(name, dtype), mesh)
        found[label(name, dtype)] = answers(model, name)
        sizes[label(name, dtype)] = sum(p.numel() for p in model.blocks.parameters())
    torch.save({"answers": found, "sizes": sizes, "said": refusals(mesh)}, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def fresh(name: str, dtype: torch.dtype) -> Transformer:
    """A random model, the same in every process."""
    torch.manual_seed(zlib.crc32(name.encode()))
    return perturbed(MODELS[name], dtype)


@functools.cache
def in_one_process(name: str, dtype: torch.dtype) -> Answers:
    """The oracle: the same questions to a model in one piece."""
    return answers(fresh(name, dtype), name)
