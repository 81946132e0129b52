"""Claim: the tests notice one wrong line. Deliberate breaks, each of which some quick part of them must catch.

Every break changes numbers or behaviour a little: a sign, an off-by-one, an axis, a dropped scale, an ignored option.
It is made in a temporary copy of the repository, so that the working tree is never touched. A break names its place by
the text that stands there; code that has moved is an error, not a miss. Exit code 1 if any break is missed.

    .venv/bin/python experiments/bench/mutations.py [--only TEXT]
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import tyro

ROOT = Path(__file__).parents[2]
FAILED = 1
"""Exit code of pytest."""


@dataclass(frozen=True)
class Break:
    """One line made wrong."""

    file: str
    """From `interp/` on."""
    old: str
    """Text that stands there once."""
    new: str
    why: str
    """What is wrong then."""
    tests: str
    """The part of the tests that must notice, from `tests/` on: paths, and words behind `-k`."""


BREAKS = (
    # --- core: numbers and labels
    Break(
        "core/stats.py",
        "spread = self.spread + other.spread + step.square() * (self.n * other.n / n)",
        "spread = self.spread + other.spread + step.square() * (self.n * other.n / (n + 1))",
        "merged batches have too little variance",
        "core/test_stats.py",
    ),
    Break(
        "core/stats.py",
        "half = t95(rows) * error",
        "half = 1.96 * error",
        "intervals of few rows are as narrow as those of many",
        "core/test_stats.py",
    ),
    Break(
        "core/stats.py",
        "(n.square() / weight.var(0)).round().clamp(max=n)",
        "n.clone()",
        "rows of one text count as independent ones in a bootstrap",
        "core/test_stats.py",
    ),
    Break(
        "core/stats.py",
        "zip((30, 27), _MULTIPLIERS, strict=True)",
        "zip((30, 28), _MULTIPLIERS, strict=True)",
        "random numbers are not those of SplitMix64",
        "core/test_resampling.py",
    ),
    Break(
        "core/permutation.py",
        "added = 0 if exact else 1",
        "added = 0",
        "drawn permutations leave the observed one out, so p may be 0",
        "core/test_permutation.py",
    ),
    Break(
        "core/covariance.py",
        "self.scatter + other.scatter + weight * step[:, None] * step_other",
        "self.scatter + other.scatter + weight * step_other[:, None] * step",
        "the covariance of merged parts is transposed",
        "core/test_covariance.py",
    ),
    # --- model: the Transformer
    Break(
        "model/norm.py",
        "return (square + self.kind.eps).sqrt().to(x.dtype)",
        "return (square.sqrt() + self.kind.eps).to(x.dtype)",
        "a norm's epsilon stands outside of the root",
        "model/test_norm.py",
    ),
    Break(
        "model/position.py",
        "new_second = second * self.cos + first * self.sin",
        "new_second = second * self.cos - first * self.sin",
        "a rotation is none",
        "model/test_position.py",
    ),
    Break(
        "model/position.py",
        "turns = rule.original_n_ctx * frequency / (2 * math.pi)",
        "turns = rule.original_n_ctx * frequency / math.pi",
        "Llama 3's scaling sets in one octave late",
        "model/test_position.py",
    ),
    Break(
        "model/attention.py",
        "(distance.abs() < window)",
        "(distance.abs() <= window)",
        "a window sees one token too many",
        "model/test_mask.py",
    ),
    Break(
        "model/loss.py",
        "counted = None if keep is None else keep[:, 1:] & keep[:, :-1]",
        "counted = None if keep is None else keep[:, 1:]",
        "the loss counts what padding predicts",
        "model/test_transformer.py -k loss",
    ),
    Break(
        "model/block.py",
        "if not self.kind.renormalise:",
        "if self.kind.renormalise is None:",
        "experts' weights are renormalised whether asked or not",
        "model/test_experts.py",
    ),
    Break(
        "lab/lightning.py",
        "depth = 1 - layer / (config.n_layers - 1 + 1e-5) + 1e-5",
        "depth = 1 - layer / (config.n_layers + 1e-5) + 1e-5",
        "the decay of lightning attention is that of a deeper stack",
        "lab/test_linear.py",
    ),
    # --- data, passes, runs: batches, sweeps, generation
    Break(
        "passes/metrics.py",
        'F.kl_div(mine, base, reduction="none", log_target=True)',
        'F.kl_div(base, mine, reduction="none", log_target=True)',
        "the KL divergence is taken the other way round",
        "passes/test_sweep.py",
    ),
    Break(
        "passes/sampling.py",
        "before = ranked.cumsum(-1) - ranked",
        "before = ranked.cumsum(-1)",
        "top-p drops the token that crosses p",
        "passes/test_sampling.py",
    ),
    Break(
        "passes/generate.py",
        'unseen = -torch.inf if read.site.endswith("attn_scores") else 0.0',
        "unseen = 0.0",
        "joined scores say 0 where a step had not seen the key",
        "passes/test_generate.py",
    ),
    Break(
        "data/batch.py",
        "key=lambda i: -lengths[i])",
        "key=lambda i: lengths[i])",
        "texts are packed shortest first, into more rows",
        "data/test_packed.py",
    ),
    Break(
        "runs/progress.py",
        "return None if window in self.tree else self.open.get(window, Begun()).batches",
        "return None if window in self.tree else 0",
        "a window that was interrupted is begun anew",
        "runs/test_run.py runs/test_scaling_simulation.py",
    ),
    # --- the wings' analyses
    Break(
        "attention/heads.py",
        "return v[:, 1 : 1 + n]",
        "return v[:, :n]",
        "copying scores look at the values one token early",
        "attention/test_heads.py",
    ),
    Break(
        "lenses/lens.py",
        "index = torch.where(wanted < 0, lengths[:, None] + wanted, wanted)",
        "index = torch.where(wanted < 0, tokens.shape[1] + wanted, wanted)",
        "positions from the end are counted from the longest prompt's",
        "lenses/test_lens.py",
    ),
    Break(
        "tokens/flow_routes.py",
        "return cls(moved, bias, resid, 1 - share, share)",
        "return cls(moved, bias, resid, share, 1 - share)",
        "the MLP's share and the stream's are exchanged",
        "tokens/test_flow_routes.py",
    ),
    Break(
        "dynamics/rank_collapse.py",
        "return (size.sum(-2).amax(-1) * size.sum(-1).amax(-1)).sqrt()",
        "return (size.sum(-1).amax(-1) * size.sum(-1).amax(-1)).sqrt()",
        "the composite norm is the row norm",
        "dynamics/test_rank_collapse.py",
    ),
    Break(
        "core/stats.py",
        "root = Z95 * (share * (1 - share) / count + z2 / (4 * count)).sqrt()",
        "root = Z95 * (share * (1 - share) / count + z2 / count).sqrt()",
        "Wilson's interval is too wide",
        "core/test_intervals.py",
    ),
    Break(
        "features/dictionary_metrics.py",
        '"mse": _plain(self.error / (n * d_in), n,',
        '"mse": _plain(self.error / n, n,',
        "the mean squared error is summed over coordinates",
        "features/test_sae_metrics.py",
    ),
    Break(
        "causal/causal_trace.py",
        "share = role.to(effect) / role.sum(2, keepdim=True)",
        "share = role.to(effect) / role.sum(1, keepdim=True)",
        "the mean over a role's tokens divides by the wrong axis",
        "causal/test_causal_trace.py",
    ),
    Break(
        "weights/copying.py",
        '"mean_rank": score(1, (config.d_vocab - 1) / 2,',
        '"mean_rank": score(1, config.d_vocab / 2,',
        "the rank by chance is half a rank too high",
        "weights/test_copying.py",
    ),
    Break(
        "causal/contrast.py",
        'clean, corrupt = (other, own) if self.direction == "denoise" else (own, other)',
        "clean, corrupt = other, own",
        "noising calls the clean run the corrupted one",
        "causal/test_path_patching.py",
    ),
    # --- families: checkpoints of others
    Break(
        "families/granite.py",
        'logit_scale=1 / settings.real("logits_scaling", 1.0)',
        'logit_scale=settings.real("logits_scaling", 1.0)',
        "Granite's logits are multiplied where they are divided",
        "families/test_parity.py -k granite",
    ),
    Break(
        "families/rope.py",
        "return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0",
        "return 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0",
        "YaRN's mscale is ignored",
        "families/test_parity.py families/test_configs.py -k yarn",
    ),
    Break(
        "families/rope.py",
        "math.sqrt(1 + math.log(factor) / math.log(original))",
        "math.sqrt(math.log(factor) / math.log(original))",
        "LongRoPE's attention factor lacks the 1",
        "families/test_parity.py families/test_configs.py -k long",
    ),
    Break(
        "families/gemma.py",
        "norm = replace(found.norm, unit_offset=True)",
        "norm = found.norm",
        "Gemma's norms scale by gamma instead of 1 + gamma",
        "families/test_parity.py -k gemma",
    ),
    Break(
        "families/falcon.py",
        "parts = groups.split([config.n_heads // config.kv_heads, 1, 1], 1)",
        "parts = groups.flip(1).split([config.n_heads // config.kv_heads, 1, 1], 1)",
        "Falcon's groups are read back to front",
        "families/test_parity.py -k falcon-groups",
    ),
    Break(
        "families/codegen.py",
        "query, value, key = rearrange",
        "query, key, value = rearrange",
        "CodeGen's keys are its values",
        "families/test_parity.py -k codegen",
    ),
    Break(
        "model/attention.py",
        "if view.rotation is None or not self.rotated:",
        "if view.rotation is None:",
        "layers without positions are rotated",
        "model/test_transformer.py -k slow_forward",
    ),
    Break(
        "model/softmax.py",
        "v.clamp(-most, most)",
        "v",
        "values are not clipped",
        "families/test_parity.py -k clipped",
    ),
    Break(
        "model/position.py",
        "bias = (slopes.bfloat16() * key[:, None, None, :])",
        "bias = (slopes * key[:, None, None, :])",
        "Falcon's ALiBi is exact",
        "families/test_parity.py -k alibi_is_rounded",
    ),
    Break(
        "passes/frozen.py",
        "    if isinstance(norm.kind, NoNorm):\n        return gradient",
        "    if norm.gamma is None:\n        return gradient",
        "a norm without weights passes gradients as they are",
        "lenses/test_factors.py circuits/test_edge_attribution.py",
    ),
    # --- models and tasks of the package
    Break(
        "core/patterns.py",
        "queries = n - 1 - period",
        "queries = n - period",
        "the induction score divides by one query too many",
        "zoo/test_measure.py",
    ),
    Break(
        "tasks/pairs.py",
        "return (column >= start) & (column < stop)",
        "return (column >= start) & (column <= stop)",
        "the roles of a pair are one token too long",
        "tasks/test_pairs.py",
    ),
    # --- pages, plots, live page, command line
    Break(
        "pages/tables.py",
        "rank[1:] = (logits[:-1] > logits[:-1].gather(1, ids[1:, None])).sum(1)",
        "rank[1:] = (logits[:-1] >= logits[:-1].gather(1, ids[1:, None])).sum(1)",
        "the page's ranks begin at 1",
        "pages/test_report.py",
    ),
    Break(
        "pages/tables.py",
        "order = (-table.value.abs()).argsort(",
        "order = (-table.value).argsort(",
        "edges are listed by their sign, not by their size",
        "pages/test_corrupted.py",
    ),
    Break(
        "plot/attribution.py",
        "left=np.cumsum(steps) - steps",
        "left=np.cumsum(steps)",
        "bars of the waterfall begin where they should end",
        "plot/test_plots.py",
    ),
    Break(
        "plot/probing.py",
        "np.stack([line.low - value, line.high - value])",
        "np.stack([line.high - value, line.high - value])",
        "error bars show the upper end on both sides",
        "plot/test_probing.py",
    ),
    Break(
        "serve/changes.py",
        """in there and f"blocks.{layer}.attn.hook_first_pattern" not in there""",
        "in there",
        "an edge is cut before a refinement that gives its weight back",
        "serve/test_numbers.py",
    ),
    Break(
        "serve/session.py",
        "position = min(position, len(second) - 1)",
        "position = len(second) - 1",
        "the second prompt is looked at in its last token wherever one looks",
        "serve/test_numbers.py",
    ),
    Break(
        "cli/asking.py",
        'hasattr(self, each.name) and each.name != "metric"',
        'hasattr(self, each.name) and each.name not in ("metric", "seed")',
        "the option --seed of every question is ignored",
        "test_cli_analyses.py",
    ),
    Break(
        "cli/asking.py",
        'for key in ("answer", "wrong")}',
        'for key in ("answer",)}',
        "the option --wrong of a metric is ignored",
        "test_cli_analyses.py",
    ),
    # --- training
    Break(
        "training/schedule.py",
        "done = (step - self.warm_up) / max(1, self.steps - self.warm_up)",
        "done = step / max(1, self.steps)",
        "the learning rate falls during the warm-up already",
        "training/test_schedule.py",
    ),
    Break(
        "training/loop.py",
        '[p for p in parameters if p.ndim < 2], "weight_decay": 0.0}',
        '[p for p in parameters if p.ndim < 2], "weight_decay": training.weight_decay}',
        "biases and norms decay",
        "training/test_loop.py",
    ),
    Break(
        "training/losses.py",
        "asked = counted if part.determined is None else part.determined",
        "asked = counted",
        "accuracy counts tokens that nothing determines",
        "training/test_losses.py",
    ),
    # --- compat: other libraries
    Break(
        "compat/hooked_layout.py",
        '(f"{expert}W_gate.weight", f"{expert}W_in.weight")',
        '(f"{expert}W_in.weight", f"{expert}W_gate.weight")',
        "experts are written with gate and input exchanged",
        "compat/test_hooked_export.py",
    ),
    Break(
        "compat/llama2c.py",
        '("w1.{l}", "w3.{l}")',
        '("w3.{l}", "w1.{l}")',
        "llama2.c's gate is read as its input",
        "compat/test_llama2c.py",
    ),
    Break(
        "compat/transformer_lens/head_detector.py",
        "if exclude_current_token:\n        counted.fill_diagonal_(False)",
        "if exclude_current_token:\n        counted.fill_diagonal_(True)",
        "a head detector's exclude_current_token is ignored",
        "compat/transformer_lens/test_head_detector.py",
    ),
    Break(
        "compat/transformer_lens/losses.py",
        "beyond[..., 1:] = total[..., :-1] > top_p",
        "beyond[..., 1:] = total[..., 1:] > top_p",
        "top_p drops the token that crosses p",
        "compat/transformer_lens/test_utils.py",
    ),
)


def main(only: str = "", jobs: int = 2) -> None:
    """Make every break in a copy, run its tests, print what they noticed.

    Args:
        only: breaks whose file or reason holds this text; all of them without it.
        jobs: copies at work at a time.
    """
    chosen = [each for each in BREAKS if only in f"{each.file} {each.why}"]
    if not chosen:
        raise SystemExit(f"no break holds {only!r}")
    if gone := [said for each in chosen for said in stale(each)]:
        raise SystemExit("\n".join(gone))
    with tempfile.TemporaryDirectory() as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for i in range(jobs):
            copies.put(copied(Path(folder) / str(i)))
        whole = sorted({each.tests for each in chosen})
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(lambda tests: require_passing(copies, tests), whole))
            caught = list(pool.map(lambda each: tried(copies, each), chosen))
    print(f"{sum(caught)} of {len(chosen)} caught")
    sys.exit(not all(caught))


def stale(each: Break) -> list[str]:
    """What a break names that does not stand there, or not once."""
    file = ROOT / "interp" / each.file
    found = file.read_text(encoding="utf-8").count(each.old) if file.exists() else 0
    tests = each.tests.partition(" -k ")[0].split()
    return [
        *([f"{each.old!r} stands {found} times in interp/{each.file}"] if found != 1 else []),
        *(f"tests/{path} is not there" for path in tests if not (ROOT / "tests" / path).exists()),
    ]


def copied(to: Path) -> Path:
    """The working tree without what git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    return to


def require_passing(copies: "SimpleQueue[Path]", tests: str) -> None:
    """SystemExit unless these tests pass as they are: else they would catch everything."""
    copy = copies.get()
    code, said = run(copy, tests)
    copies.put(copy)
    if code:
        raise SystemExit(f"without any break, pytest {tests} ends with {code}:\n{said}")


def tried(copies: "SimpleQueue[Path]", each: Break) -> bool:
    """Whether the tests notice the break; says so."""
    copy, begun = copies.get(), time.monotonic()
    file = copy / "interp" / each.file
    whole = file.read_text(encoding="utf-8")
    file.write_text(whole.replace(each.old, each.new), encoding="utf-8")
    code, said = run(copy, each.tests)
    file.write_text(whole, encoding="utf-8")
    copies.put(copy)
    if code not in (0, FAILED):
        raise SystemExit(f"{each.file}: {each.why}: the tests could not run:\n{said}")
    seconds = time.monotonic() - begun
    print(f"{'caught' if code else 'MISSED'} {seconds:4.0f} s  {each.file}: {each.why}", flush=True)
    return code == FAILED


def run(copy: Path, tests: str) -> tuple[int, str]:
    """Pytest's exit code on a part of a copy's tests, up to the first failure; and the end of what it said."""
    paths, _, words = tests.partition(" -k ")
    chosen: Sequence[str] = ["-k", words] if words else []
    done = subprocess.run(
        [
            *(sys.executable, "-B", "-m", "pytest", "-n", "0", "-x", "--tb=line", *chosen),
            *(f"tests/{path}" for path in paths.split()),
        ],
        cwd=copy, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return done.returncode, (done.stdout + done.stderr)[-2000:]


if __name__ == "__main__":
    tyro.cli(main)
