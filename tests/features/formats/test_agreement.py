"""What other tools wrote and computed is what is read here: folders under `peers`, made by `experiments/clients`."""

from pathlib import Path

import numpy as np
import pytest
import torch

from interp.features import Crosscoder, CrossLayerTranscoder, load
from interp.features.activations import ReLU
from tests.features.formats.peers import PEERS, TOLERANCES
from tests.features.formats.test_written import Answer, assert_says

TOOLS = {"circuit_tracer": 10, "llamascopium": 16, "scopes": 10}
"""The tools, and how many folders each of them wrote."""
FOLDERS = [folder.parent for tool in TOOLS for folder in sorted((PEERS / tool).rglob("expected.npz"))]


def expected(folder: Path) -> Answer:
    """What the tool says about its vectors."""
    with np.load(folder / "expected.npz") as arrays:
        return Answer(arrays["x"], arrays["features"], arrays["output"])


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(PEERS)))
def test_what_another_tool_wrote_gives_its_features_and_output(folder: Path) -> None:
    layer = {"layer": 2} if (folder / "layer_2.safetensors").exists() else {}
    found, answer = load(folder, **layer), expected(folder)  # type: ignore[arg-type]
    if isinstance(found, Crosscoder) and found.kind == ReLU():  # there every source has the same features
        assert (answer.features == answer.features[:, :1]).all() or np.ptp(
            answer.features, axis=1
        ).max() < 1e-12
        answer = answer._replace(features=answer.features[:, 0])
    assert_says(found, answer, TOLERANCES[torch.from_numpy(answer.x).dtype])


def test_every_folder_that_they_wrote_is_looked_at() -> None:
    assert {tool: sum(tool in folder.parts for folder in FOLDERS) for tool in TOOLS} == TOOLS
    of_layers = [load(folder) for folder in FOLDERS if "clt" in folder.as_posix()]
    assert len(of_layers) == 9 and all(isinstance(each, CrossLayerTranscoder) for each in of_layers)
