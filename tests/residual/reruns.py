"""Small models, and literal reruns of them: the oracle of path expansion.

A rerun keeps patterns and norm scales as recorded and replaces what each layer's attention adds to the stream; what
MLPs add is given too, as recorded or 0. So every term can be measured as a difference of two forward passes.
"""

import functools
from collections.abc import Collection, Sequence
from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import Tensor

from interp import Edit, HookedTransformer, Read, observe
from interp.data.batch import Batch
from interp.model import Alibi, LayerNorm, ModelConfig, NoNorm, RMSNorm
from interp.model.sites import names
from tests.configs import CONFIGS, perturbed, some_tokens

PLAIN, _ROTARY = CONFIGS["attention-only"], CONFIGS["attention-only-rotary"]
_FRAMEWORK = ModelConfig(
    2, 24, 12, 16, 31, d_head=6, norm=NoNorm(), final_norm=False, qkv_bias=False, out_bias=False, attn_scale=0.3
)  # fmt: skip
"""The paper's: no norms, no biases, 12 heads a layer."""
VARIANTS: dict[str, ModelConfig] = {
    "learned": PLAIN,
    "rotary-biases": _ROTARY,
    "gqa-rms": replace(
        _ROTARY, n_kv_heads=2, norm=RMSNorm(unit_offset=True), residual_scale=0.4, logit_scale=1.5, embed_scale=2.0
    ),
    "gqa-no-biases": replace(
        _ROTARY, n_kv_heads=2, qkv_bias=False, out_bias=False, norm=RMSNorm(), residual_scale=0.4, logit_scale=1.5
    ),
    "no-norm-biases": replace(_FRAMEWORK, n_heads=4, n_kv_heads=None, qkv_bias=True, out_bias=True),
    "sandwich": replace(_ROTARY, norm_place="sandwich", n_kv_heads=1, logit_softcap=3.0),
    "output": replace(_ROTARY, norm_place="output", norm=RMSNorm(), qk_norm="head"),
    "post-norm": replace(_ROTARY, norm_place="post", embed_norm=True, final_norm=False, norm=LayerNorm()),
    "alibi-sinks-tied": replace(PLAIN, position=Alibi(), sinks=True, tied=True, window=4),
    "one-layer": replace(_ROTARY, n_layers=1),
    "three-layers": replace(_ROTARY, n_layers=3, n_heads=2, n_kv_heads=None),
    "three-layers-post": replace(_ROTARY, n_layers=3, n_heads=2, n_kv_heads=1, norm_place="post"),
    **{
        f"{name}-mlp": replace(CONFIGS[name], n_layers=layers)
        for name, layers in (
            ("gpt2", 2), ("gemma2", 3), ("parallel", 3), ("macaron", 2), ("post-norm", 3), ("granite-moe", 2),
            ("ngpt", 3),
        )
    },
}  # fmt: skip
BATCH = Batch(some_tokens(rows=2, n=8))


@functools.cache
def model(name: str = "framework", dtype: torch.dtype = torch.float64) -> HookedTransformer:
    torch.manual_seed(0)
    return HookedTransformer(perturbed(_FRAMEWORK if name == "framework" else VARIANTS[name], dtype))


class Rerun:
    """The model with patterns and norm scales frozen, and attention's additions given."""

    def __init__(self, subject: HookedTransformer, batch: Batch = BATCH) -> None:
        self.model, self.batch, config = subject.transformer, batch, subject.cfg
        self.n, self.post_scales = config.n_layers, {}
        kept = [
            s for s in names(config) if s.endswith(("hook_pattern", "hook_scale")) and "ln_embed" not in s
        ]
        self.seen = observe(self.model, batch, [Read(site) for site in kept]).trace
        self.froze = [
            Edit(s, lambda x, kept=self.seen[s]: kept) for s in kept if not s.endswith("ln1_post.hook_scale")
        ]
        self.mlps = {
            f"L{i}.{mlp}": f"blocks.{i}.hook_{mlp}_out" for i in range(self.n) for mlp in config.mlps
        }
        self.written = observe(self.model, batch, [Read(site) for site in self.mlps.values()]).trace
        self.logits_site = "unembed.hook_uncapped" if config.logit_softcap else "unembed.hook_out"

    def __call__(
        self, writes: Sequence[Tensor | None], mlps: Collection[str] | None = None
    ) -> SimpleNamespace:
        """Logits with these additions (None: 0), what each layer would have added, and each head's z W_O.

        mlps: those that add what they did; the others add 0. None: all.
        """
        added: dict[int, Tensor] = {}

        def put(x: Tensor, layer: int) -> Tensor:
            added[layer] = x.clone()
            given = writes[layer]
            return torch.zeros_like(x) if given is None else given

        edits = [Edit(f"blocks.{i}.hook_attn_out", functools.partial(put, layer=i)) for i in range(self.n)]
        adding = self.mlps if mlps is None else mlps
        given = [
            Edit(site, lambda x, kept=self.written[site], on=name in adding: kept * on)
            for name, site in self.mlps.items()
        ]
        scales = [e for i in range(self.n) for e in self.post_scale(i)]
        heads = [Read(f"blocks.{i}.attn.hook_result") for i in range(self.n)]
        run = observe(
            self.model, self.batch, [Read(self.logits_site), *heads], [*self.froze, *scales, *given, *edits]
        )
        return SimpleNamespace(
            mlps=mlps,
            logits=run.trace[self.logits_site],
            capped=run.output,
            added=[added[i] for i in range(self.n)],
            heads=[run.trace[read].movedim(2, 0) for read in heads],
        )

    def post_scale(self, layer: int) -> list[Edit]:
        site = f"blocks.{layer}.ln1_post.hook_scale"
        return [Edit(site, lambda x: self.seen[site])] if site in {r.site for r in self.seen} else []

    def alone(self, layer: int, write: Tensor | None, base: SimpleNamespace) -> SimpleNamespace:
        """What one addition changes, in the logits and in every head, against the run without any."""
        run = self([write if i == layer else None for i in range(self.n)], base.mlps)
        heads = [h - b for h, b in zip(run.heads, base.heads, strict=True)]
        return SimpleNamespace(logits=run.logits - base.logits, heads=heads)

    def as_added(self, layer: int, result: Tensor) -> Tensor:
        """A head's z W_O as what it adds to the stream."""
        post, factor = self.model.block(layer).ln1_post, self.model.config.residual_scale
        site = f"blocks.{layer}.ln1_post.hook_scale"
        return (result if post is None else post.frozen(result, self.seen[site])) * factor
