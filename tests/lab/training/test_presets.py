"""Configs by name, and from files of both kinds."""

import json
from pathlib import Path

import pytest

from interp.families import save
from interp.lab.training.presets import PRESETS, config_for
from interp.model import ModelConfig, Rotary, Transformer
from interp.tasks import AssociativeRecall
from interp.tasks.examples import Place

DATA = AssociativeRecall(d_vocab=31, pairs=4, queries=2)
TOML = """
n_layers = 1
d_model = 8
n_heads = 2
n_ctx = 20
d_vocab = 31
position = {kind = "Rotary", base = 500.0}
"""


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_as_large_as_the_data(name: str) -> None:
    config = config_for(name, DATA)
    assert isinstance(config, ModelConfig)
    assert (config.d_vocab, config.n_ctx) == (31, 13)
    assert Transformer(config)(DATA.batch(Place(0, 0), 3).batch.tokens).shape == (3, 13, 31)


def test_a_file_is_taken_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "model.toml").write_text(TOML)
    config = config_for(str(tmp_path / "model.toml"), DATA)
    assert config == ModelConfig(1, 8, 2, 20, 31, position=Rotary(500.0))
    (tmp_path / "model.json").write_text(json.dumps(config.to_dict()))
    assert config_for(str(tmp_path / "model.json"), DATA) == config
    save(Transformer(config), tmp_path)
    assert config_for(str(tmp_path / "config.json"), DATA) == config


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown model 'attention-3l'.*attention-"):
        config_for("attention-3l", DATA)
    path = tmp_path / "model.toml"
    path.write_text(TOML.replace("n_ctx = 20", "n_ctx = 12"))
    with pytest.raises(ValueError, match="rows of 13 is required, this one has 31 and a context of 12"):
        config_for(str(path), DATA)
    path.write_text(TOML.replace("n_heads", "heads"))
    with pytest.raises(ValueError, match="ModelConfig has no field 'heads'"):
        config_for(str(path), DATA)
