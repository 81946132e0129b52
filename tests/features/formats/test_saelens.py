"""SAELens' architectures of inference by their rules in NumPy, what is written for it, and folders that it wrote."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from interp.features import (
    AbsTopK,
    Dictionary,
    Gated,
    GroupMax,
    JumpReLU,
    MatchingPursuit,
    ReLU,
    TopK,
    load,
    save,
)
from interp.features.activations import DictionaryKind
from tests.features.formats.peers import assert_agrees, written_by
from tests.features.formats.reference import (
    Array,
    D,
    K,
    Rule,
    S,
    assert_computes,
    computed,
    jump,
    relu,
    rng,
    tensors,
    top,
    vectors,
    weights,
)

Config = dict[str, object]
D_OUT = 4
SKIP = rng(7).normal(size=(D_OUT, D))
THRESHOLDS = np.abs(rng(5).normal(size=S))
READS, WRITES = "blocks.1.ln2.hook_normalized", "blocks.1.hook_mlp_out"
SIGNED = top(K, np.abs, lambda z: z)


def config(architecture: str, **more: object) -> Config:
    """What SAELens 6 writes into cfg.json."""
    transcodes = "transcoder" in architecture
    hooks = (
        {"hook_name": READS, "hook_name_out": WRITES}
        if transcodes
        else {"hook_name": "blocks.3.hook_resid_post"}
    )
    return {
        "architecture": architecture, "d_in": D, "d_sae": S, "dtype": "float64", "device": "cuda",
        "apply_b_dec_to_input": not transcodes, "normalize_activations": "none", "reshape_activations": "none",
        "metadata": {"sae_lens_version": "6.54.12", "model_name": "gpt2", **hooks},
        **({"d_out": D_OUT} if transcodes else {}),
    } | more  # fmt: skip


def folder(path: Path, cfg: Config, arrays: dict[str, Array]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "cfg.json").write_text(json.dumps(cfg))
    save_file(tensors(arrays), path / "sae_weights.safetensors")
    return path


@pytest.mark.parametrize(
    ("architecture", "more", "arrays", "rule"),
    [
        ("abstopk", {"k": K}, {}, SIGNED),
        ("transcoder", {}, {}, relu),
        ("skip_transcoder", {}, {"W_skip": SKIP}, relu),
        ("jumprelu_transcoder", {}, {"threshold": THRESHOLDS}, jump(THRESHOLDS)),
        ("jumprelu_skip_transcoder", {}, {"threshold": THRESHOLDS, "W_skip": SKIP}, jump(THRESHOLDS)),
    ],
)  # fmt: skip
def test_an_architecture_gives_the_numbers_of_its_rule(
    tmp_path: Path, architecture: str, more: Config, arrays: dict[str, Array], rule: Rule
) -> None:
    transcodes = "transcoder" in architecture
    w = weights(d_out=D_OUT if transcodes else D)
    found = load(folder(tmp_path, config(architecture, **more), w | arrays))
    skip = SKIP if "W_skip" in arrays else None
    assert_computes(found, vectors(), computed(w, vectors(), rule, centred=not transcodes, skip=skip))
    assert found.transcodes == transcodes
    if transcodes:
        assert (found.reads, found.writes, found.before_gain) == (READS, WRITES, True)


def gated_arrays() -> dict[str, Array]:
    w = weights()
    b = w.pop("b_enc")
    return w | {"b_gate": b, "b_mag": b - 0.5, "r_mag": b / 2}


def gated(w: dict[str, Array], x: Array, *, centred: bool = True) -> tuple[Array, Array]:
    z = (x - w["b_dec"] if centred else x) @ w["W_enc"]
    on = z + w["b_gate"] > 0
    features = np.where(on, relu(np.exp(w["r_mag"]) * z + w["b_mag"]), 0)
    return features, features @ w["W_dec"] + w["b_dec"]


def test_a_gated_dictionary_is_read(tmp_path: Path) -> None:
    found = load(folder(tmp_path, config("gated"), gated_arrays()))
    assert_computes(found, vectors(), gated(gated_arrays(), vectors()))


def pursued(
    w: dict[str, Array], x: Array, kind: MatchingPursuit, *, centred: bool = True
) -> tuple[Array, Array]:
    """Matching pursuit, one vector and one step at a time."""
    b = w["b_dec"] if centred else 0 * w["b_dec"]
    features = np.zeros((len(x), S))
    for row, vector in enumerate(x):
        rest = vector - b
        for _ in range(kind.max_iterations or D):
            sizes = [rest @ direction for direction in w["W_dec"]]
            best = int(np.argmax(sizes))
            before = set(np.flatnonzero(features[row]))
            if sizes[best] > 0:
                features[row, best] += sizes[best]
                rest = rest - sizes[best] * w["W_dec"][best]
            if kind.stop_on_duplicate_support and set(np.flatnonzero(features[row])) == before:
                break
            if np.sqrt(rest @ rest) < kind.residual_threshold:
                break
    return features, features @ w["W_dec"] + b


@pytest.mark.parametrize(
    "kind",
    [
        MatchingPursuit(),
        MatchingPursuit(0.5, None, False),
        MatchingPursuit(0, 3, False),
        MatchingPursuit(1.0, 4),
    ],
)
@pytest.mark.parametrize("centred", [True, False])
def test_matching_pursuit_is_the_slow_loop(tmp_path: Path, kind: MatchingPursuit, centred: bool) -> None:
    w = {name: weights()[name] for name in ("W_dec", "b_dec")}
    w["W_dec"] /= np.linalg.norm(w["W_dec"], axis=1, keepdims=True)
    cfg = config("matching_pursuit", apply_b_dec_to_input=centred, **dataclasses.asdict(kind))
    found = load(folder(tmp_path, cfg, w))
    assert found.kind == kind
    assert_computes(found, vectors(), pursued(w, vectors(), kind, centred=centred))
    alone = torch.cat([found.encode(row) for row in torch.from_numpy(vectors()).split(1)])
    assert torch.equal(alone != 0, found.encode(torch.from_numpy(vectors())) != 0)
    with pytest.raises(ValueError, match="finds features of vectors, not of pre-activations"):
        found.activate(torch.zeros(1, S))


def test_matching_pursuit_is_tied(tmp_path: Path) -> None:
    w = tensors({name: value for name, value in weights().items() if name != "b_enc"})
    with pytest.raises(ValueError, match="requires W_enc to be W_dec transposed"):
        Dictionary(MatchingPursuit(), w)
    with pytest.raises(ValueError, match="residual_threshold must be at least 0, got -1"):
        MatchingPursuit(-1)


def test_norms_and_a_skip_are_those_worked_out_by_hand(tmp_path: Path) -> None:
    direction = np.eye(4)
    arrays = {
        "W_enc": np.zeros((4, 4)), "b_enc": np.array([2, -3, 0.5, 0.25]), "W_dec": direction * [[1], [1], [4], [1]],
        "b_dec": np.zeros(4),
    }  # fmt: skip
    cfg = config("topk", d_in=4, d_sae=4, k=2, rescale_acts_by_decoder_norm=True)
    found = load(folder(tmp_path / "norms", cfg, arrays))
    x = torch.zeros(1, 4).double()
    assert found.encode(x)[0].tolist() == [2, 0, 2, 0] and found(x)[0].tolist() == [2, 0, 2, 0]
    arrays = {
        "W_enc": np.zeros((2, 3)), "b_enc": np.zeros(3), "W_dec": np.zeros((3, 2)), "b_dec": np.zeros(2),
        "W_skip": np.array([[0.0, 1.0], [0.0, 0.0]]),
    }  # fmt: skip
    found = load(folder(tmp_path / "skip", config("skip_transcoder", d_in=2, d_sae=3, d_out=2), arrays))
    assert found(torch.tensor([[3.0, 5.0]]).double()).tolist() == [[5.0, 0.0]]


def whitening(path: Path) -> tuple[Array, Array, Array]:
    """A whitening of the activations, beside a checkpoint as SAELens writes it."""
    mean, matrix = rng(11).normal(size=D), rng(12).normal(size=(D, D)) + 2 * np.eye(D)
    inverse = np.linalg.inv(matrix)
    stored = {"mean": mean, "matrix": matrix, "inverse_matrix": inverse}
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors(stored), path / "activation_whitening.safetensors")
    return mean, matrix, inverse


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("architecture", ["standard", "gated", "jumprelu"])
def test_whitening_is_folded(tmp_path: Path, architecture: str, centred: bool) -> None:
    mean, matrix, inverse = whitening(tmp_path)
    arrays = gated_arrays() if architecture == "gated" else weights()
    arrays |= {"threshold": THRESHOLDS} if architecture == "jumprelu" else {}
    cfg = config(architecture, normalize_activations="covariance_whitening", apply_b_dec_to_input=centred)
    found = load(folder(tmp_path, cfg, arrays))
    z = (vectors() - mean) @ matrix
    rule = relu if architecture == "standard" else jump(THRESHOLDS)
    features, output = (
        gated(arrays, z, centred=centred)
        if architecture == "gated"
        else computed(arrays, z, rule, centred=centred)
    )
    assert_computes(found, vectors(), (features, output @ inverse + mean), 1e-11)
    assert found.normalize_activations == "none"


def test_a_checkpoint_says_its_scaling_factor(tmp_path: Path) -> None:
    cfg = config("standard", normalize_activations="expected_average_only_in")
    path = folder(tmp_path, cfg, weights())
    (path / "activation_scaler.json").write_text(json.dumps({"scaling_factor": 2.7, "has_whitening": False}))
    features, output = computed(weights(), 2.7 * vectors(), relu)
    assert_computes(load(path), vectors(), (features, output / 2.7))
    with pytest.raises(ValueError, match=r"norm_scaling_factor=2\.5 is given, and the files say"):
        load(path, norm_scaling_factor=2.5)


@pytest.mark.parametrize("factor", [-1.0, 0.0])
def test_a_factor_that_scales_nothing_is_refused(tmp_path: Path, factor: float) -> None:
    path = folder(tmp_path, config("standard", normalize_activations="expected_average_only_in"), weights())
    with pytest.raises(ValueError, match="norm_scaling_factor must be a positive number"):
        load(path, norm_scaling_factor=factor)


@pytest.mark.parametrize("fact", ["layer", "k"])
def test_facts_that_the_files_say_are_refused(tmp_path: Path, fact: str) -> None:
    path = folder(tmp_path, config("standard"), weights())
    with pytest.raises(
        ValueError, match=f"{fact} belongs to files that do not say it, and changes nothing here; got 3"
    ):
        load(path, **{fact: 3})  # type: ignore[arg-type]


def test_a_module_of_hugging_face_says_the_site_where_no_hook_does(tmp_path: Path) -> None:
    modules = {
        "hf_hook_name": "model.layers.5.pre_feedforward_layernorm.output",
        "hf_hook_name_out": "model.layers.5.post_feedforward_layernorm.output",
    }
    found = load(folder(tmp_path, config("transcoder", metadata=modules), weights(d_out=D_OUT)))
    assert (found.reads, found.writes) == ("blocks.5.ln2.hook_normalized", "blocks.5.hook_mlp_out")
    assert not found.before_gain


def of_kind(kind: DictionaryKind, **more: object) -> Dictionary:
    """A random dictionary of a kind."""
    transcodes = more.get("writes") is not None
    arrays: dict[str, Array] = weights(d_out=D_OUT if transcodes else D)
    if isinstance(kind, Gated):
        arrays = gated_arrays()
    if isinstance(kind, MatchingPursuit):
        del arrays["b_enc"]
        arrays["W_enc"] = arrays["W_dec"].T
    arrays |= {"threshold": THRESHOLDS} if isinstance(kind, JumpReLU) else {}
    arrays |= {"W_skip": SKIP.T} if more.pop("skip", False) else {}
    return Dictionary(kind, tensors(arrays), **more)  # type: ignore[arg-type]


def everything() -> dict[str, Dictionary]:
    """A dictionary for every architecture of inference that SAELens has, but for the one of whole texts."""
    at: Config = {"reads": "blocks.2.hook_resid_pre"}
    coder: Config = {"reads": "blocks.1.ln2.hook_normalized", "writes": WRITES}
    return {
        "standard": of_kind(ReLU(), **at), "topk": of_kind(TopK(K), **at), "abstopk": of_kind(AbsTopK(K), **at),
        "jumprelu": of_kind(JumpReLU(), **at), "gated": of_kind(Gated(), **at),
        "matching_pursuit": of_kind(MatchingPursuit(0.3, 4), **at),
        "transcoder": of_kind(ReLU(), **coder), "skip_transcoder": of_kind(ReLU(), skip=True, **coder),
        "jumprelu_transcoder": of_kind(JumpReLU(), before_gain=True, **coder),
        "jumprelu_skip_transcoder": of_kind(JumpReLU(), skip=True, **coder),
    }  # fmt: skip


@pytest.mark.parametrize("name", everything())
def test_what_is_written_is_read_back_bit_for_bit(tmp_path: Path, name: str) -> None:
    made = everything()[name]
    save(made, tmp_path)
    again = load(tmp_path)
    assert json.loads((tmp_path / "cfg.json").read_text())["architecture"] == name
    assert (again.kind, again.reads, again.writes, again.before_gain, again.apply_b_dec_to_input) == (
        made.kind, made.reads, made.writes, made.before_gain, made.apply_b_dec_to_input
    )  # fmt: skip
    x = torch.from_numpy(vectors())
    assert torch.equal(again.encode(x), made.encode(x)) and torch.equal(again(x), made(x))


def test_what_is_written_has_saelens_orientation(tmp_path: Path) -> None:
    save(everything()["skip_transcoder"], tmp_path)
    assert load_file(tmp_path / "sae_weights.safetensors")["W_skip"].shape == (D_OUT, D)
    hooks = json.loads((tmp_path / "cfg.json").read_text())["metadata"]
    assert (hooks["hook_name"], hooks["hook_name_out"]) == ("blocks.1.mlp.hook_in", WRITES)
    save(everything()["matching_pursuit"], tmp_path)
    assert set(load_file(tmp_path / "sae_weights.safetensors")) == {"W_dec", "b_dec"}


def test_a_file_from_before_the_gain_that_is_fitted_is_written_as_one_from_after_it(tmp_path: Path) -> None:
    """Else it would be read back as one whose gain is still to be folded."""
    made = everything()["jumprelu_transcoder"]
    save(made, tmp_path)
    named = load(tmp_path)
    after = Dictionary(
        made.kind,
        dict(made.named_parameters()),
        reads=made.reads,
        writes=made.writes,
        metadata=named.metadata,
    )
    save(after, tmp_path)
    assert not load(tmp_path).before_gain
    assert json.loads((tmp_path / "cfg.json").read_text())["metadata"]["hook_name"] == "blocks.1.mlp.hook_in"


@pytest.mark.parametrize(
    "made",
    [
        of_kind(GroupMax(5)),
        of_kind(TopK(K, relu=False)),
        of_kind(TopK(K), reads=READS, writes=WRITES),
        of_kind(JumpReLU(relu=False)).prefix(5)._with(
            {n: w[..., :5] if n == "W_enc" else (w - 9 if n == "threshold" else w)
             for n, w in of_kind(JumpReLU()).prefix(5).named_parameters()}, before_gain=False),
    ],
    ids=["GroupMax", "signed TopK", "TopK transcoder", "negative thresholds"],
)  # fmt: skip
def test_what_saelens_has_no_architecture_for_is_not_written(tmp_path: Path, made: Dictionary) -> None:
    with pytest.raises(
        ValueError, match="an SAE of kind ReLU, TopK, AbsTopK, JumpReLU, Gated, MatchingPursuit, or"
    ):
        save(made, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_site_without_a_hook_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no hook for what blocks\.0\.ln1\.hook_normalized holds"):
        save(of_kind(ReLU(), reads="blocks.0.ln1.hook_normalized"), tmp_path)


@pytest.mark.parametrize("place", written_by("saelens"), ids=lambda path: path.name)
def test_what_saelens_wrote_computes_what_it_computes(place: Path) -> None:
    assert_agrees(load(place), place)


def test_the_exponential_of_an_older_threshold_is_taken(tmp_path: Path) -> None:
    found = load(folder(tmp_path, config("jumprelu"), weights() | {"log_threshold": np.log(THRESHOLDS)}))
    assert_computes(found, vectors(), computed(weights(), vectors(), jump(THRESHOLDS)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_so(tmp_path: Path, dtype: torch.dtype) -> None:
    cfg = config("topk", dtype=str(dtype), k=K)
    path = folder(tmp_path, cfg, weights())
    save_file(tensors(weights(), dtype), path / "sae_weights.safetensors")
    assert load(path).W_enc.dtype == dtype
    rounded: dict[str, Tensor] = tensors(weights(), dtype)
    exact = computed({name: w.double().numpy() for name, w in rounded.items()}, vectors(), top(K))
    assert_computes(load(path, dtype=torch.float64), vectors(), exact)
