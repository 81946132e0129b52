"""Gemma Scope and Gemma Scope 2: where a dictionary belongs, by its path or its config, and what is refused."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from interp import HookedTransformer
from interp.features import CrossLayerTranscoder, Dictionary, load
from tests.configs import build
from tests.features.formats.test_written import assert_says, rewritten
from tests.features.formats.written import LAYERS, D, S, gemma_scope, gemma_scope_2, gemma_scope_2_layers
from tests.tolerances import assert_close


def placed(top: Path, name: str) -> Path:
    folder = top / name
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize(
    ("name", "reads", "writes", "before_gain"),
    [
        ("gemma-scope-2b-pt-res/layer_5/width_16k/average_l0_7", "blocks.5.hook_resid_post", None, False),
        ("models--google--gemma-scope-9b-it-mlp/snapshots/ab/layer_0/width_1m/average_l0_7", "blocks.0.hook_mlp_out",
         None, False),
        ("gemma-scope-27b-pt-att/layer_12/width_16k/average_l0_7", "blocks.12.attn.hook_z", None, False),
        ("gemma-scope-2b-pt-transcoders/layer_5/width_16k/average_l0_7", "blocks.5.ln2.hook_normalized",
         "blocks.5.hook_mlp_out", True),
        ("downloads/layer_5/width_16k/average_l0_7", None, None, False),
        ("gemma-scope-2b-pt-res/width_16k", None, None, False),
    ],
)  # fmt: skip
def test_the_path_says_where_a_dictionary_of_gemma_scope_belongs(
    tmp_path: Path, name: str, reads: str | None, writes: str | None, before_gain: bool
) -> None:
    folder = placed(tmp_path, name)
    answer = gemma_scope(folder)
    for path in (folder, folder / "params.npz"):
        found = load(path)
        assert isinstance(found, Dictionary)
        assert (found.reads, found.writes, found.before_gain) == (reads, writes or reads, before_gain)
        assert_says(found, answer)


def test_a_layer_that_the_path_does_not_say_is_the_users_and_may_not_contradict_it(tmp_path: Path) -> None:
    folder = placed(tmp_path, "gemma-scope-2b-pt-res")
    gemma_scope(folder)
    assert load(folder, layer=7).reads == "blocks.7.hook_resid_post"
    other = placed(tmp_path, "gemma-scope-2b-pt-mlp/layer_3")
    gemma_scope(other)
    with pytest.raises(ValueError, match="layer=7 is given, and the path says layer=3"):
        load(other, layer=7)


def test_a_dictionary_of_the_embedding_is_brought_to_embeddings_that_are_sqrt_d_times_as_long(
    tmp_path: Path,
) -> None:
    """Gemma multiplies rows of its embedding by sqrt(d); what the file says of a row is said of the product."""
    folder = placed(tmp_path, "gemma-scope-2b-pt-res/embedding/width_4k/average_l0_6")
    answer = gemma_scope(folder)
    longer = answer._replace(x=D**0.5 * answer.x, output=D**0.5 * answer.output)
    found = load(folder)
    assert_says(found, longer)
    assert found.reads == "hook_embed"


def test_thresholds_below_0_let_nothing_below_0_pass(tmp_path: Path) -> None:
    p, theta = np.array([2.0, -3.0, -0.2, 0.25]), np.full(4, -1.0)
    w = {
        "W_enc": np.zeros((3, 4)),
        "b_enc": p,
        "W_dec": np.ones((4, 3)),
        "b_dec": np.zeros(3),
        "threshold": theta,
    }
    np.savez(tmp_path / "params.npz", **w)  # type: ignore[arg-type]
    assert load(tmp_path).encode(torch.zeros(1, 3).double())[0].tolist() == [2, 0, 0, 0.25]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("name", "reads", "writes"),
    [
        ("resid_post_all/layer_5_width_16k_l0_small", "blocks.5.hook_resid_post", None),
        ("attn_out/layer_5_width_16k_l0_small", "blocks.5.attn.hook_z", None),
        ("mlp_out/layer_5_width_16k_l0_small", "blocks.5.hook_mlp_out", None),
        ("transcoder_all/layer_5_width_16k_l0_big_affine", "blocks.5.ln2.hook_normalized", "blocks.5.hook_mlp_out"),
        ("layer_5_width_16k_l0_small", None, None),
    ],
)  # fmt: skip
def test_without_a_config_the_path_says_where_a_dictionary_of_gemma_scope_2_belongs(
    tmp_path: Path, name: str, reads: str | None, writes: str | None
) -> None:
    folder = placed(tmp_path, name)
    answer = gemma_scope_2(folder)
    (folder / "config.json").unlink()
    for path in (folder, folder / "params.safetensors"):
        found = load(path)
        assert isinstance(found, Dictionary)
        assert (found.reads, found.writes) == (reads, writes or reads)
        assert_says(found, answer)
    assert not found.before_gain  # its transcoders read what the MLP reads


def test_the_affine_skip_is_not_transposed(tmp_path: Path) -> None:
    folder = placed(tmp_path, "transcoder/layer_0_width_16k_l0_small_affine")
    gemma_scope_2(folder)

    def worked_out(held: dict[str, torch.Tensor]) -> None:
        for name, value in held.items():
            held[name] = torch.zeros(*(min(n, 2) for n in value.shape)).double()
        held["affine_skip_connection"] = torch.tensor([[0.0, 1.0], [0.0, 0.0]]).double()

    rewritten(folder / "params.safetensors", worked_out)
    (folder / "config.json").unlink()
    found = load(folder)
    assert isinstance(found, Dictionary)
    assert found(torch.tensor([[3.0, 5.0]]).double()).tolist() == [[0, 3]]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "affine_connection",
            False,
            "affine_connection is False, and the tensors hold a affine_skip_connection",
        ),
        ("width", 11, "width is 11, and b_enc has 10 entries"),
        ("architecture", "topk", "architecture must be jump_relu, got 'topk'"),
        ("affine_connection", 3, "affine_connection must be true or false, got 3"),
    ],
)
def test_a_config_that_contradicts_the_tensors_is_refused(
    tmp_path: Path, key: str, value: object, message: str
) -> None:
    gemma_scope_2(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(ValueError, match=re.escape(message)):
        load(tmp_path)


def test_decoders_may_be_stored_from_the_own_layer_on(tmp_path: Path) -> None:
    whole = gemma_scope_2_layers(tmp_path)
    assert_says(load(tmp_path), whole)
    less = gemma_scope_2_layers(tmp_path, stored=lambda layer: layer)
    assert (less.output == whole.output).all()
    assert_says(load(tmp_path), whole)


@pytest.mark.parametrize("numbers", [(7, 13, 17), (0, 1, 2)])
def test_a_crosscoder_has_the_layers_that_its_folder_names(tmp_path: Path, numbers: tuple[int, ...]) -> None:
    """Its features read the stream of one layer and write to it and the later ones."""
    folder = placed(tmp_path, "gemma-scope-2-1b-pt/crosscoder/layer_7_13_17_width_65k_l0_medium")
    answer = gemma_scope_2_layers(folder)
    for i, number in reversed([*enumerate(numbers)]):
        (folder / f"params_layer_{i}.safetensors").rename(folder / f"params_layer_{number}.safetensors")
    found = load(folder)
    assert isinstance(found, CrossLayerTranscoder)
    assert [*found.layers] == [7, 13, 17] and found.later(13) == [13, 17]
    assert found.reads == found.writes == {layer: f"blocks.{layer}.hook_resid_post" for layer in (7, 13, 17)}
    assert_says(found, answer)


def test_a_transcoder_of_several_layers_knows_its_sites_by_its_path(tmp_path: Path) -> None:
    folder = placed(tmp_path, "gemma-scope-2-1b-pt/clt/width_262k_l0_medium_affine")
    gemma_scope_2_layers(folder)
    found = load(folder)
    assert isinstance(found, CrossLayerTranscoder)
    assert found.reads[1] == "blocks.1.ln2.hook_normalized" and found.writes[1] == "blocks.1.hook_mlp_out"


def test_a_layer_that_is_missing_is_pointed_out(tmp_path: Path) -> None:
    gemma_scope_2_layers(tmp_path)
    (tmp_path / "params_layer_2.safetensors").unlink()
    with pytest.raises(ValueError, match=f"writes to {LAYERS} layers, and there are files of 2"):
        load(tmp_path)


def test_a_transcoder_that_reads_before_the_gain_is_fitted_to_a_model(tmp_path: Path) -> None:
    """Against the numbers of the file at the norm's output without its gain."""
    subject = HookedTransformer(build("gemma2")).to(torch.float64)
    d = subject.cfg.d_model
    folder = placed(tmp_path, "gemma-scope-2b-pt-transcoders/layer_1")
    rng = np.random.default_rng(0)
    w = {"W_enc": (d, S), "b_enc": (S,), "W_dec": (S, d), "b_dec": (d,), "threshold": (S,)}
    arrays = {name: rng.normal(size=shape) for name, shape in w.items()}
    np.savez(folder / "params.npz", **arrays)  # type: ignore[arg-type]
    found = load(folder, model=subject)
    assert isinstance(found, Dictionary) and not found.before_gain
    gain = subject.transformer.get_submodule("blocks.1.ln2").gamma
    bare = rng.normal(size=(5, d))
    z = bare @ arrays["W_enc"] + arrays["b_enc"]
    f = np.where(z > np.maximum(arrays["threshold"], 0), z, 0)
    assert_close(found.encode(torch.from_numpy(bare) * gain), torch.from_numpy(f))
