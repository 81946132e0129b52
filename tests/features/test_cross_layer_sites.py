"""Features of a cross-layer transcoder in a model are sites, of which a change reaches its layer and all later ones."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import interp
from interp import Edit, HookedTransformer, Read
from interp.causal import feature_edits, steering_curve
from interp.edits import Add, PerRow, Scale, Set, Zero
from interp.features import (
    Crosscoder,
    CrossLayerTranscoder,
    Dictionary,
    JumpReLU,
    LayerWeights,
    ReLU,
    cross_layer,
    load,
)
from interp.model.tap import Tap
from interp.passes import observe
from interp.passes.sweep import Sweep
from tests.configs import CONFIGS, perturbed
from tests.features.formats.written import LAYERS, D, circuit_tracer_clt
from tests.tolerances import assert_close
from tests.wrapped.wrapping import spoken

N, S = 3, 20
ROWS = [[3, 1, 4, 1, 5, 9], [2, 7, 1, 8]]
CLEAN, CORRUPT = [[3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8]], [[3, 1, 6, 1, 5, 9], [2, 7, 5, 8, 2, 8]]
METRIC = interp.logit_difference(3, 4)
MODELS = ("llama-gqa", "parallel", "gemma2", "gptj")
Pair = tuple[HookedTransformer, HookedTransformer, "Weights"]


class Weights:
    """Random weights of a cross-layer transcoder, and what was read of them."""

    def __init__(
        self, d: int, layers: Sequence[int], *, skip: bool = False, reads: str = "hook_mlp_in"
    ) -> None:
        generator = torch.Generator().manual_seed(7)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.layers, self.reads = list(layers), reads
        self.W_enc = {i: normal(d, S) / d**0.5 for i in layers}
        self.b_enc = {i: normal(S) for i in layers}
        self.W_dec = {i: normal(S, len([j for j in layers if j >= i]), d) / S**0.5 for i in layers}
        self.b_dec = {i: normal(d) for i in layers}
        self.W_skip = {i: normal(d, d) / d**0.5 for i in layers} if skip else {}
        self.encoders: list[int] = []
        self.decoders: list[tuple[int, list[int]]] = []

    def transcoder(self) -> CrossLayerTranscoder:
        return CrossLayerTranscoder(
            ReLU(),
            {i: self._of_layer(i) for i in self.layers},
            self.b_dec,
            {i: f"blocks.{i}.{self.reads}" for i in self.layers},
            {i: f"blocks.{i}.hook_mlp_out" for i in self.layers},
        )

    def _of_layer(self, i: int) -> LayerWeights:
        d = len(self.W_enc[i])

        def encoder() -> dict[str, Tensor]:
            self.encoders.append(i)
            return {"W_enc": self.W_enc[i], "b_enc": self.b_enc[i]}

        def directions(features: list[int]) -> Tensor:
            self.decoders.append((i, features))
            return self.W_dec[i][features]

        return LayerWeights((d, S, d), encoder, directions, (lambda: self.W_skip[i]) if self.W_skip else None)

    def features(self, i: int, x: Tensor) -> Tensor:
        return (x @ self.W_enc[i] + self.b_enc[i]).relu()

    def into(self, i: int, j: int) -> Tensor:
        """The decoder from layer i into layer j, [s d]."""
        return self.W_dec[i][:, self.layers.index(j) - self.layers.index(i)]

    def explained(self, j: int, features: Mapping[int, Tensor], x: Tensor) -> Tensor:
        given = self.b_dec[j] + sum(features[i] @ self.into(i, j) for i in self.layers if i <= j)
        return given + x @ self.W_skip[j] if self.W_skip else given


def test_one_in_files_is_mounted_and_read_from_there(tmp_path: Path) -> None:
    circuit_tracer_clt(tmp_path)
    config = replace(CONFIGS["llama-gqa"], n_layers=LAYERS, d_model=D)
    plain = HookedTransformer(perturbed(config, torch.float64, 5))
    clt = load(tmp_path, model=plain)
    assert isinstance(clt, CrossLayerTranscoder) and clt.reads[1] == "blocks.1.hook_resid_mid"
    split = plain.with_dictionaries([clt])
    names = [f"blocks.{i}.{hook}" for i in range(LAYERS) for hook in ("hook_resid_mid", "hook_mlp_out")]
    found = seen(split, ROWS, [*names, *(f"blocks.{i}.hook_error" for i in range(LAYERS))])
    x, y = found[0 : 2 * LAYERS : 2], found[1 : 2 * LAYERS : 2]
    for error, written, said in zip(found[2 * LAYERS :], y, clt(dict(enumerate(x))).values(), strict=True):
        assert_close(error, written - said)
    raised = logits_of(split, ROWS, [Edit("L0F3", Add(1.0), at={"pos": -1})])
    added = [  # the same along its directions
        Edit(clt.writes[j], Add(row), at={"pos": -1}) for j, row in enumerate(clt.directions(0, [3])[0])
    ]
    assert_close(raised, logits_of(plain, ROWS, added))


@functools.cache
def pair(name: str, *, layers: tuple[int, ...] = (0, 1, 2), skip: bool = False) -> Pair:
    """A model of three layers, the same with a cross-layer transcoder, and its weights."""
    config = CONFIGS[name]
    mixers = {"mixers": (config.mixers * N)[:N]} if config.mixer is None else {}
    plain = HookedTransformer(perturbed(replace(config, n_layers=N, **mixers), torch.float64, 5))
    weights = Weights(plain.cfg.d_model, layers, skip=skip)
    return plain, plain.with_dictionaries([weights.transcoder()]), weights


def seen(
    subject: HookedTransformer, rows: object, sites: Sequence[str], edits: Sequence[Edit] = ()
) -> list[Tensor]:
    batch = subject.to_batch(rows)  # type: ignore[arg-type]
    trace = observe(subject, batch, [Read(site) for site in sites], edits=edits).trace
    return [trace[site] for site in sites]


def logits_of(subject: HookedTransformer, rows: object, edits: Sequence[Edit] = ()) -> Tensor:
    return observe(subject, subject.to_batch(rows), edits=edits).output  # type: ignore[arg-type]


Change = Callable[[Tensor], Tensor]


def by_hand(
    model: Pair,
    rows: object,
    of_features: Mapping[int, Change],
    of_errors: Mapping[int, Change] | None = None,
    held: Sequence[Edit] = (),
) -> list[Edit]:
    """The edits of the plain model that put in place what each layer writes under changes of features and errors.

    Edits of `held` are part of every run.

    Layer by layer: one run of the plain model with everything earlier in place says what this layer reads and writes.
    """
    plain, _, weights = model
    put = list(held)
    old: dict[int, Tensor] = {}
    new: dict[int, Tensor] = {}
    for j in weights.layers:
        x, y = seen(plain, rows, [f"blocks.{j}.{weights.reads}", f"blocks.{j}.hook_mlp_out"], put)
        x = x.double()
        old[j] = weights.features(j, x)
        new[j] = of_features.get(j, lambda f: f)(old[j].clone())
        error = y - weights.explained(j, old, x)
        kept = (of_errors or {}).get(j, lambda e: e)(error.clone())
        put.append(Edit(f"blocks.{j}.hook_mlp_out", Set(weights.explained(j, new, x) + kept)))
    return put


@pytest.mark.parametrize("name", MODELS)
def test_features_and_errors_are_those_of_the_transcoder_and_sum_to_the_outputs(name: str) -> None:
    for skip in (False, True):
        plain, split, weights = pair(name, skip=skip)
        sites = [f"blocks.{j}.{hook}" for hook in ("hook_mlp_in", "hook_mlp_out") for j in range(N)]
        found = seen(plain, ROWS, sites)
        x, y = dict(enumerate(found[:N])), dict(enumerate(found[N:]))
        f = {j: weights.features(j, x[j]) for j in range(N)}
        names = [f"blocks.{j}.{hook}" for hook in ("hook_features", "hook_error") for j in range(N)]
        ours = seen(split, ROWS, names)
        for j in range(N):
            assert_close(ours[j], f[j])
            assert_close(ours[N + j], y[j] - weights.explained(j, f, x[j]))
        alone = seen(split, ROWS, ["blocks.1.hook_error"])[0]  # without the sites of others
        assert_close(alone, ours[N + 1])


@pytest.mark.parametrize("name", MODELS)
def test_a_model_whose_features_nobody_changes_is_the_same_bit_for_bit(name: str) -> None:
    plain, split, weights = pair(name)
    weights.encoders.clear()
    weights.decoders.clear()
    base = logits_of(plain, ROWS)
    assert torch.equal(logits_of(split, ROWS), base) and not weights.encoders
    for site in ("blocks.1.hook_features", "blocks.2.hook_error"):
        read = observe(split, split.to_batch(ROWS), [Read(site)])
        assert torch.equal(read.output, base)
    assert set(weights.encoders) == {0, 1, 2}
    untouched = [Edit("L0F3", lambda cells: cells), Edit("L1.error", Scale(1.0))]
    assert torch.equal(logits_of(split, ROWS, untouched), base)


def test_only_what_is_asked_for_is_read() -> None:
    _, split, weights = pair("llama-gqa")
    for asked, encoders, layers in (
        ([Read("blocks.1.hook_features")], [1], set()),
        ([Edit("L1F3", Add(1.0))], [1], {1}),
        ([Read("blocks.1.hook_error")], [0, 1], {0, 1}),
    ):
        weights.encoders.clear()
        weights.decoders.clear()
        reads = [each for each in asked if isinstance(each, Read)]
        edits = [each for each in asked if isinstance(each, Edit)]
        observe(split, split.to_batch(ROWS), reads, edits=edits)
        assert weights.encoders == encoders
        assert {layer for layer, _ in weights.decoders} == layers
        if edits:
            assert weights.decoders == [(1, [3])]


POSITIONS = [None, -1, (0, 2), PerRow([(1, 2), (3,)])]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("pos", POSITIONS, ids=str)
def test_an_edited_feature_moves_its_layer_and_all_later_ones(name: str, pos: object) -> None:
    model = pair(name)
    _, split, _ = model
    at = {} if pos is None else {"pos": pos}
    batch = split.to_batch(ROWS).host()
    real, first = batch.real, batch.real.int().argmax(1).tolist()
    chosen = torch.zeros(real.shape, dtype=torch.bool)
    for row, ids in enumerate(ROWS):
        given = pos.places[row] if isinstance(pos, PerRow) else pos
        tokens = range(len(ids)) if given is None else given if isinstance(given, tuple) else (given,)
        chosen[row, [first[row] + t % len(ids) for t in tokens]] = True  # type: ignore[operator]
    changes: list[tuple[object, Change]] = [
        (Zero(), lambda f: 0 * f), (Scale(3.0), lambda f: 3 * f),
        (Set(2.0), lambda f: 0 * f + 2), (Add(1.0), lambda f: f + 1),
    ]  # fmt: skip
    for layer, (change, new) in zip((0, 0, 1, 2), changes, strict=True):

        def changed(f: Tensor, new: Change = new) -> Tensor:
            f[..., 7] = torch.where(chosen, new(f[..., 7]), f[..., 7])
            return f

        expected = logits_of(model[0], ROWS, by_hand(model, ROWS, {layer: changed}))
        found = logits_of(split, ROWS, [Edit(f"L{layer}F7", change, at=at)])  # type: ignore[arg-type]
        if isinstance(change, Set | Add):
            assert not torch.allclose(expected[real], logits_of(model[0], ROWS)[real])
        assert_close(found[real], expected[real])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("skip", [False, True])
def test_changes_of_several_layers_and_errors_go_together(name: str, skip: bool) -> None:
    model = pair(name, skip=skip)
    edits = [
        Edit("L0F2", Scale(2.0)), Edit("L1.error", Scale(0.5)), Edit("blocks.1.hook_features", Scale(0.3)),
        Edit("L2F5", Set(1.5)), Edit("L2.error", Zero()),
    ]  # fmt: skip

    def doubled(f: Tensor) -> Tensor:
        f[..., 2] *= 2
        return f

    def put(f: Tensor) -> Tensor:
        f[..., 5] = 1.5
        return f

    features = {0: doubled, 1: lambda f: 0.3 * f, 2: put}
    expected = by_hand(model, CLEAN, features, {1: lambda e: 0.5 * e, 2: lambda e: 0 * e})
    assert_close(logits_of(model[1], CLEAN, edits), logits_of(model[0], CLEAN, expected))
    standing = model[1].edited(edits)
    assert_close(logits_of(standing, CLEAN), logits_of(model[0], CLEAN, expected))


def test_layers_without_a_transcoder_stand_between_and_may_have_a_dictionary() -> None:
    model = pair("llama-gqa", layers=(0, 2))
    plain, split, weights = model
    assert split.cfg.features is not None and split.cfg.features.by_layer == (S, 0, S)
    zeroed = {0: lambda f: 0 * f}
    expected = logits_of(plain, CLEAN, by_hand(model, CLEAN, zeroed))
    assert_close(logits_of(split, CLEAN, [Edit("blocks.0.hook_features", Zero())]), expected)
    d = plain.cfg.d_model
    of_one = {"W_enc": torch.eye(d), "b_enc": torch.zeros(d), "W_dec": torch.eye(d), "b_dec": torch.zeros(d)}
    sae = Dictionary(ReLU(), {k: v.double() for k, v in of_one.items()}, reads="blocks.1.hook_resid_post")
    both = plain.with_dictionaries([sae, weights.transcoder()])
    edits = [Edit("blocks.0.hook_features", Zero()), Edit("L1F3", Add(2.0))]
    moved = [*by_hand(model, CLEAN, zeroed), Edit("blocks.1.hook_resid_post", Add(2.0 * torch.eye(d)[3]))]
    again = by_hand((plain.edited(moved[-1]), split, weights), CLEAN, zeroed)
    assert_close(logits_of(both, CLEAN, edits), logits_of(plain, CLEAN, [*again, moved[-1]]))


def test_patching_and_ablation_are_loops_of_edited_passes() -> None:
    model = pair("llama-gqa")
    plain, split, _ = model
    base = logits_of(plain, CLEAN)[:, -1]

    def effect(moved: Tensor, base: Tensor) -> float:
        return float(((moved - base)[:, 3] - (moved - base)[:, 4]).mean())

    every = interp.ablate(split, CLEAN, "feature", change=Zero(), metric=METRIC, by=("layer", "feature"))
    parts = [["L0F3", "L2F7"], "L1.error", "L1H0", "L2F3"]
    some = interp.ablate(split, CLEAN, parts, change=Zero(), metric=METRIC, by=("part",))
    for i, names in enumerate(parts):
        edits = [Edit(each, Zero()) for each in ([names] if isinstance(names, str) else names)]
        wanted = effect(logits_of(split, CLEAN, edits)[:, -1], base)
        assert float(some.value[i]) == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    for layer in range(N):
        for feature in (0, 3, 7):

            def zeroed(f: Tensor, feature: int = feature) -> Tensor:
                f[..., feature] = 0
                return f

            moved = logits_of(plain, CLEAN, by_hand(model, CLEAN, {layer: zeroed}))[:, -1]
            ours = float(every.value.sel(layer=layer, feature=feature))
            assert ours == pytest.approx(effect(moved, base), rel=1e-9, abs=1e-12)
    base = logits_of(plain, CORRUPT)[:, -1]
    for by in (("layer", "pos"), ("layer", "pos", "feature")):
        found = interp.patch(split, CLEAN, CORRUPT, "features", metric=METRIC, by=by)
        for layer in range(N):
            (clean,) = seen(split, CLEAN, [f"blocks.{layer}.hook_features"])
            for pos in (2, 4):

                def patched(
                    f: Tensor, clean: Tensor = clean, pos: int = pos, one: bool = len(by) == 3
                ) -> Tensor:
                    features = slice(4, 5) if one else slice(None)
                    f[:, pos, features] = clean[:, pos, features]
                    return f

                moved = logits_of(plain, CORRUPT, by_hand(model, CORRUPT, {layer: patched}))[:, -1]
                cell = found.value.sel(layer=layer, pos=pos)
                ours = float(cell[4] if len(by) == 3 else cell)
                assert ours == pytest.approx(effect(moved, base), rel=1e-9, abs=1e-12)


EVERY = [f"L0F{i}" for i in range(S)]


def test_with_attention_held_later_layers_compute_their_features_under_the_patterns_of_the_run() -> None:
    model = pair("llama-gqa")
    plain, split, _ = model
    names = [f"blocks.{i}.attn.hook_pattern" for i in range(N)]
    held = [Edit(site, Set(pattern)) for site, pattern in zip(names, seen(plain, CLEAN, names), strict=True)]
    zeroed = {0: lambda f: 0 * f}
    found = interp.ablate(split, CLEAN, [EVERY], change=Zero(), metric=METRIC, freeze_patterns=True)
    base, moved, free = (
        logits_of(plain, CLEAN, edits)[:, -1]
        for edits in ([], by_hand(model, CLEAN, zeroed, held=held), by_hand(model, CLEAN, zeroed))
    )
    effect = ((moved - base)[:, 3] - (moved - base)[:, 4]).mean()
    assert float(found.value.squeeze()) == pytest.approx(float(effect), rel=1e-9)
    assert not torch.allclose(moved, free)


@pytest.mark.parametrize("kind", ["cohere", "olmo3"])
def test_a_wrapped_network_takes_one_too(kind: str) -> None:
    plain = spoken(kind)
    weights = Weights(plain.cfg.d_model, (0, 1), reads="hook_resid_pre")
    clt = weights.transcoder()
    single = CrossLayerTranscoder(ReLU(), clt.layers, clt.b_dec, clt.reads, clt.writes, dtype=torch.float32)
    split = plain.with_dictionaries([single])
    rows, zeroed = [[3, 1, 4, 1, 5, 9]], {0: lambda f: 0 * f}
    base, expected = (
        logits_of(plain, rows, edits) for edits in ([], by_hand((plain, split, weights), rows, zeroed))
    )
    found = logits_of(split, rows, [Edit(each, Zero()) for each in EVERY])
    assert_close(found, expected)
    assert not torch.allclose(base, expected)
    swept = interp.ablate(split, rows, [EVERY], change=Zero(), metric=METRIC)
    eye, zero = torch.eye(plain.cfg.d_model), torch.zeros(plain.cfg.d_model)
    of_one = {"W_enc": eye, "b_enc": zero, "W_dec": eye, "b_dec": zero}
    sae = Dictionary(ReLU(), of_one, reads="blocks.1.hook_resid_post")
    halved = logits_of(plain.with_dictionaries([sae]), rows, [Edit("blocks.1.hook_features", Scale(0.5))])
    assert_close(halved, logits_of(plain, rows, sae.edits(lambda f: f / 2)))
    moved = (expected - base)[0, -1]
    assert float(swept.value.squeeze()) == pytest.approx(float(moved[3] - moved[4]), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("memory", [1, None])
def test_sweeps_under_standing_edits_are_loops_whatever_the_packs(memory: int | None) -> None:
    _, split, _ = pair("llama-gqa")
    edited = split.edited([Edit("L0F3", Add(1.0))])
    edits = [
        [Edit("L1F2", Set(3.0), at={"pos": 4})], [Edit("L2H1", Zero(), at={"pos": 3})], [Edit("L0.error", Zero())],
        [Edit("L2.error", Scale(2.0), at={"pos": 2})],
    ]  # fmt: skip
    batch = split.to_batch(CLEAN)
    variants = [interp.edits.Variant(each) for each in edits]
    sweep = Sweep(edited.transformer, batch, variants, memory=memory)
    found = sweep.run(interp.metrics.kl_divergence()).values
    base = logits_of(edited, CLEAN)[:, -1].log_softmax(-1)
    streams = sweep.read([Read("blocks.2.hook_resid_post"), Read("blocks.1.hook_features")])
    for i, each in enumerate(edits):
        moved = logits_of(edited, CLEAN, each)[:, -1].log_softmax(-1)
        assert_close(found[i], (base.exp() * (base - moved)).sum(-1))
        for read, values in streams.items():
            assert_close(values[i], seen(edited, CLEAN, [read.site], each)[0])
    assert "every pack runs through all of its blocks" in sweep.plan().explain()


def gradients(subject: HookedTransformer, sites: Sequence[str]) -> dict[str, Tensor]:
    reads = [Read(site, grad=True) for site in sites]

    def metric(logits: Tensor) -> Tensor:
        return (logits[:, -1, 3] - logits[:, -1, 4]).sum()

    trace = observe(subject, subject.to_batch(CORRUPT), reads, metric=metric).trace
    return {read.site: trace[read] for read in reads}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("at_once", [3, 1024])
def test_the_gradient_of_a_feature_is_that_of_all_outputs_along_its_directions(
    monkeypatch: pytest.MonkeyPatch, name: str, at_once: int
) -> None:
    monkeypatch.setattr(cross_layer, "AT_ONCE", at_once)
    plain, split, weights = pair(name)
    outputs, first = [f"blocks.{j}.hook_mlp_out" for j in range(N)], "blocks.0.hook_resid_pre"
    wanted = gradients(plain, [first, *outputs])
    sites = [f"blocks.{j}.{hook}" for j in range(N) for hook in ("hook_features", "hook_error")]
    found = gradients(split, [first, *sites])
    assert_close(found[first], wanted[first])
    for i in range(N):
        expected = sum(wanted[outputs[j]] @ weights.into(i, j).T for j in range(i, N))
        assert isinstance(expected, Tensor)
        assert_close(found[f"blocks.{i}.hook_features"], expected)
        assert_close(found[f"blocks.{i}.hook_error"], wanted[outputs[i]])
    by = ("layer", "pos", "feature")
    patched = interp.causal.attribution_patch(split, CLEAN, CORRUPT, "features", metric=METRIC, by=by)
    f, other = (seen(split, rows, ["blocks.1.hook_features"])[0] for rows in (CORRUPT, CLEAN))
    moved = ((other - f) * found["blocks.1.hook_features"]).mean(0)
    assert_close(torch.from_numpy(patched.value.sel(layer=1).values), moved)


@pytest.mark.parametrize("name", MODELS)
def test_cached_generation_under_edited_features_equals_uncached(name: str) -> None:
    _, split, _ = pair(name)
    edited = split.edited([Edit("L1F7", Set(4.0)), Edit("L0F2", Scale(2.0)), Edit("L2.error", Scale(0.5))])
    row = list(CLEAN[0])
    for _ in range(5):
        row.append(int(edited(row)[0, -1].argmax()))
    assert edited.generate([CLEAN[0]], max_new_tokens=5).tokens[0].tolist()[-5:] == row[-5:]
    new = [Edit("L0F2", Set(9.0), at={"pos": "new"})]
    one, other = (
        split.generate(CLEAN, max_new_tokens=4, edits=new, use_past_kv_cache=cache) for cache in (True, False)
    )
    assert torch.equal(one.tokens, other.tokens)


def test_features_planted_as_neurons_leave_no_error_and_act_as_neurons() -> None:
    """Features that are the neurons of MLPs of ReLUs, and write nothing to later layers."""
    plain, _, _ = pair("no-norm")
    named = dict(plain.transformer.named_parameters())

    def layer(i: int) -> LayerWeights:
        W_in, W_out = named[f"blocks.{i}.mlp.into.weight"], named[f"blocks.{i}.mlp.out.weight"]
        own = torch.zeros(W_in.shape[0], N - i, W_in.shape[1]).double()
        own[:, 0] = W_out.T
        encoder = {"W_enc": W_in.T, "b_enc": named[f"blocks.{i}.mlp.into.bias"]}
        shape = (W_in.shape[1], W_in.shape[0], W_in.shape[1])
        return LayerWeights(shape, lambda: encoder, lambda features: own[features])

    b_dec = {i: named[f"blocks.{i}.mlp.out.bias"] for i in range(N)}
    ends = ({i: f"blocks.{i}.hook_mlp_{end}" for i in range(N)} for end in ("in", "out"))
    split = plain.with_dictionaries(
        [CrossLayerTranscoder(ReLU(), {i: layer(i) for i in range(N)}, b_dec, *ends)]
    )
    for error in seen(split, ROWS, [f"blocks.{i}.hook_error" for i in range(N)]):
        assert_close(error, torch.zeros_like(error))
    for edit in (Zero(), Set(2.0)):
        edits = [Edit("L0F3", edit), Edit("L1F5", edit, at={"pos": -1})]
        neurons = [Edit("L0N3", edit), Edit("L1N5", edit, at={"pos": -1})]
        assert_close(logits_of(split, CLEAN, edits), logits_of(plain, CLEAN, neurons))


def test_steering_by_a_feature_moves_every_site_that_it_writes() -> None:
    plain, split, weights = pair("llama-gqa")
    added = [Edit(f"blocks.{j}.hook_mlp_out", Add(weights.into(1, j)[7], scale=1.75)) for j in (1, 2)]
    assert_close(logits_of(split, CLEAN, feature_edits(split, "L1F7", 1.75)), logits_of(plain, CLEAN, added))
    clamped = feature_edits(split, "L1F7", 1.75, "clamp", at={"pos": 2})
    assert_close(
        logits_of(split, CLEAN, clamped), logits_of(split, CLEAN, [Edit("L1F7", Set(1.75), at={"pos": 2})])
    )
    for mode in ("cap", "orthogonal"):
        with pytest.raises(ValueError, match="L1F7 writes 2"):
            feature_edits(split, "L1F7", 1.0, mode)  # type: ignore[arg-type]
        assert feature_edits(split, "L2F7", 1.0, mode)  # type: ignore[arg-type]
    asked = {"metric": METRIC, "strengths": (0.0, 1.0), "unit": 2.0, "random": 3}
    for mode in ("add", "clamp"):
        found = steering_curve(split, CLEAN, ["L1F7"], mode=mode, **asked)  # type: ignore[arg-type]
        base = logits_of(plain, CLEAN)[:, -1]
        moved = logits_of(split, CLEAN, feature_edits(split, "L1F7", 2.0, mode))[:, -1]  # type: ignore[arg-type]
        effect = ((moved - base)[:, 3] - (moved - base)[:, 4]).mean()
        cell = found.value.sel(layer=1, strength=1.0, score="effect")
        assert float(cell) == pytest.approx(float(effect), rel=1e-9)
        length = 2.0 * torch.cat([weights.into(1, j)[7] for j in (1, 2)]).norm()
        assert float(found.norm[0]) == pytest.approx(float(length))
    # a random direction moves each site as far as the feature does: none where the feature is at its amount already
    (f,) = seen(split, CLEAN, ["blocks.1.hook_features"])
    draws = steering_curve(split, CLEAN, ["L1F7"], mode="add", **asked).draws  # type: ignore[arg-type]
    assert float(draws.sel(strength=0.0, score="effect").max()) == 0 and bool((f[..., 7] != 2.0).any())


def test_what_cannot_be_is_refused_in_words() -> None:
    plain, split, weights = pair("llama-gqa")
    clt = weights.transcoder()
    words = "belong to a cross-layer transcoder, whose features write to later ones too"
    for ask in (
        lambda: interp.attribute(split, CLEAN, 3, parts="feature"),
        lambda: interp.circuits.feature_circuit(split, CLEAN, CORRUPT, metric=METRIC),
    ):
        with pytest.raises(ValueError, match=words):
            ask()
    sae = Dictionary(
        ReLU(),
        {"W_enc": torch.eye(24), "b_enc": torch.zeros(24), "W_dec": torch.eye(24), "b_dec": torch.zeros(24)},
        reads="blocks.1.hook_resid_post",
    )
    for bad, match in (
        ([clt, sae], "got two for block 1"),
        ([clt, clt], "got two for block 0"),
        ([CrossLayerTranscoder(ReLU(), clt.layers, clt.b_dec)], "do not say which sites it reads"),
    ):
        with pytest.raises(ValueError, match=match):
            plain.with_dictionaries(bad)
    with pytest.raises(ValueError, match="a site of block 1 is required for layer 1"):
        CrossLayerTranscoder(
            ReLU(), clt.layers, clt.b_dec, dict.fromkeys(range(N), "blocks.0.hook_mlp_in"), clt.writes
        )
    (stream,) = seen(plain, CLEAN, ["blocks.1.hook_resid_pre"])
    edited = split.edited([Edit("L0F3", Zero())]).transformer
    with pytest.raises(ValueError, match="misses what the edited features of block 0 write"):
        edited(stream, start=1, stop=3) if edited.edits else None
    with pytest.raises(ValueError, match="the error of block 1 depends on the features of block 0"):
        split.transformer(stream, Tap([Read("blocks.1.hook_error")]), start=1)
    later = Tap([Read("blocks.1.hook_features")])
    split.transformer(stream, later, start=1)
    assert_close(later.values[later.reads[0]], seen(split, CLEAN, ["blocks.1.hook_features"])[0])


# --- crosscoders ------------------------------------------------------------------------------------------------------

SOURCES = ("blocks.0.hook_resid_post", "blocks.1.hook_mlp_out", "blocks.2.hook_resid_post")


def crosscoder(d: int, sources: Sequence[str | None] = SOURCES, *, by_source: bool = False) -> Crosscoder:
    generator, n = torch.Generator().manual_seed(3), len(sources)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weights = {
        "W_enc": normal(n, d, S) / d**0.5,
        "b_enc": normal(S),
        "W_dec": normal(n, S, d),
        "b_dec": normal(n, d),
    }
    scaling = {"shift": normal(n, d), "scale": normal(n).exp(), "unscale": normal(n).exp()}
    threshold = {"threshold": normal(n, S).abs()} if by_source else {}
    return Crosscoder(
        JumpReLU() if by_source else ReLU(), weights | scaling | threshold, reads=tuple(sources)
    )


@pytest.mark.parametrize("by_source", [False, True])
def test_a_change_of_features_moves_every_source_by_its_own_directions(by_source: bool) -> None:
    plain, _, _ = pair("llama-gqa")
    coder = crosscoder(plain.cfg.d_model, by_source=by_source)
    x = torch.stack(seen(plain, ROWS, SOURCES), 2)
    batch = plain.to_batch(ROWS)
    real = batch.host().real
    f = coder.encode(x)
    assert_close(coder.features(plain, batch), f)

    def zeroed(features: Tensor) -> Tensor:
        features[..., 3:9] = 0
        return features

    edits = coder.edits(plain, batch, zeroed)
    found = logits_of(plain, ROWS, edits)
    put: list[Edit] = []
    for source, site in enumerate(SOURCES):  # by hand, one run for each source
        own = (f[:, :, source] if by_source else f)[..., 3:9]
        (value,) = seen(plain, ROWS, [site], put)
        moved = own @ coder.W_dec[source, 3:9] / coder.get_parameter("unscale")[source]
        put.append(Edit(site, Set(value - moved)))
    assert_close(found[real], logits_of(plain, ROWS, put)[real])
    assert torch.equal(logits_of(plain, ROWS, coder.edits(plain, batch, lambda f: f)), logits_of(plain, ROWS))
    last = logits_of(plain, ROWS, coder.edits(plain, batch, zeroed, at={"pos": -1}, rows=(0,)))
    assert torch.equal(last[1], logits_of(plain, ROWS)[1]) and torch.equal(
        last[0, :-1], logits_of(plain, ROWS)[0, :-1]
    )
    assert_close(last[0, -1], last_alone(plain, f, coder, by_source))
    rebuilt = seen(plain, ROWS, SOURCES, coder.edits(plain, batch, lambda f: f, error=False))
    assert_close(torch.stack(rebuilt, 2)[real], coder(x)[real])


def last_alone(plain: HookedTransformer, f: Tensor, coder: Crosscoder, by_source: bool) -> Tensor:
    """The logits at the last token of the first row where its sources alone lose features 3 to 8."""
    edits = []
    for source, site in enumerate(SOURCES):
        own = (f[0, -1, source] if by_source else f[0, -1])[3:9]
        moved = own @ coder.W_dec[source, 3:9] / coder.get_parameter("unscale")[source]
        edits.append(Edit(site, Add(-moved), at={"pos": -1}))
    return plain.edited(edits)(ROWS[0])[0, -1]


def test_a_crosscoder_of_one_source_acts_as_a_dictionary() -> None:
    plain, _, _ = pair("llama-gqa")
    generator, d = torch.Generator().manual_seed(4), plain.cfg.d_model
    shapes = {"W_enc": (1, d, S), "b_enc": (S,), "W_dec": (1, S, d), "b_dec": (1, d)}
    weights = {k: torch.randn(*v, generator=generator, dtype=torch.float64) for k, v in shapes.items()}
    coder = Crosscoder(ReLU(), weights, reads=("blocks.1.hook_resid_post",))
    flat = {name: x if name == "b_enc" else x[0] for name, x in weights.items()}
    sae = Dictionary(ReLU(), flat, reads="blocks.1.hook_resid_post", apply_b_dec_to_input=False)

    def scaled(features: Tensor) -> Tensor:
        return features * torch.linspace(0, 2, S).double()

    for error in (True, False):
        one = coder.edits(plain, CLEAN, scaled, error=error)
        assert_close(logits_of(plain, CLEAN, one), logits_of(plain, CLEAN, sae.edits(scaled, error=error)))


def test_what_a_crosscoder_cannot_do_is_refused() -> None:
    plain, _, _ = pair("llama-gqa")
    d = plain.cfg.d_model
    with pytest.raises(ValueError, match="got the same one twice"):
        crosscoder(d, [SOURCES[0], SOURCES[0]]).features(plain, CLEAN)
    with pytest.raises(ValueError, match="do not say which sites it reads"):
        crosscoder(d, [SOURCES[0], None]).edits(plain, CLEAN, lambda f: f)
    with pytest.raises(ValueError, match="the change must return features of shape"):
        crosscoder(d).edits(plain, CLEAN, lambda f: f[..., :3])
    with pytest.raises(ValueError, match=r"the change must return features .*, got None"):
        crosscoder(d).edits(plain, CLEAN, lambda f: None)  # type: ignore[arg-type,return-value]
    edits = crosscoder(d).edits(plain, CLEAN, lambda f: 0 * f)
    with pytest.raises(ValueError, match="values for"):
        plain.generate(CLEAN, max_new_tokens=2, edits=edits)
