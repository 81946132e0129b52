"""A model spread over two processes: every answer is that of the model in one piece."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore, destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh

from interp.model import MLP, ModelConfig
from interp.runs.tensor_parallel import check_tensor_parallel, tensor_parallel
from tests.configs import CONFIGS
from tests.forking import together
from tests.runs.tensor_parallel_answers import (
    CASES,
    MORE,
    NAMES,
    WORLD,
    Answers,
    answers,
    edits,
    fresh,
    in_one_process,
    label,
    work,
)

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
"""Relative and absolute: sums over two processes are only added in another order."""
Process = dict[str, dict[str, Answers]]
cases = pytest.mark.parametrize(("name", "dtype"), CASES, ids=[label(*case) for case in CASES])


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[Process]:
    """What each of two processes answered to everything, all in one launch."""
    folder = tmp_path_factory.mktemp("processes")
    together(work, str(folder), processes=WORLD)
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.slow
@cases
@pytest.mark.slow
def test_every_answer_is_that_of_one_process(name: str, dtype: torch.dtype, processes: list[Process]) -> None:
    expected, found = in_one_process(name, dtype), processes[0]["answers"][label(name, dtype)]
    assert found.keys() == expected.keys()
    within = TOLERANCE[dtype]
    for question, answer in expected.items():
        torch.testing.assert_close(
            found[question], answer, rtol=within, atol=within, msg=lambda m, q=question: f"{q}: {m}"
        )


@pytest.mark.slow
@cases
@pytest.mark.slow
def test_every_process_has_the_same_bits_in_plain_tensors(
    name: str, dtype: torch.dtype, processes: list[Process]
) -> None:
    first, second = (process["answers"][label(name, dtype)] for process in processes)
    for question, answer in first.items():
        assert type(answer) in (Tensor, torch.nn.Parameter) and torch.equal(answer, second[question]), (
            question
        )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_weights_and_their_hash_come_back_to_the_bit(name: str, processes: list[Process]) -> None:
    expected, found = in_one_process(name, torch.float64), processes[1]["answers"][label(name, torch.float64)]
    exact = [question for question in expected if question.startswith("weight") or question == "hash"]
    assert len(exact) >= 9
    assert [q for q in exact if not torch.equal(found[q], expected[q])] == []


@pytest.mark.parametrize("name", [*NAMES, *MORE])
@pytest.mark.slow
def test_no_edit_is_lost(name: str, processes: list[Process]) -> None:
    found = processes[0]["answers"][label(name, torch.float64)]
    for title in edits(name):
        assert (found[f"edit {title}"] - found["observed logits"]).abs().max() > 1e-6, title


@pytest.mark.parametrize("name", [*NAMES, *MORE])
@pytest.mark.slow
def test_each_process_holds_half_of_every_matrix_of_a_block(name: str, processes: list[Process]) -> None:
    blocks = fresh(name, torch.float64).blocks
    whole = sum(
        p.numel() for n, p in blocks.named_parameters() if p.ndim == 1 and "into" not in n and "qkv" not in n
    )
    spread = sum(p.numel() for p in blocks.parameters()) - whole
    for process in processes:
        assert process["sizes"][label(name, torch.float64)] == whole + spread // WORLD


def test_a_team_of_one_passes_the_shape_checks() -> None:
    """Which only this process has, see `tests/conftest.py`."""
    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        model = tensor_parallel(fresh("llama-gqa", torch.float64), init_device_mesh("cpu", (1,)))
        found = answers(model, "llama-gqa")
    finally:
        destroy_process_group()
    for question, answer in in_one_process("llama-gqa", torch.float64).items():
        torch.testing.assert_close(found[question], answer, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_wrong_uses_are_refused_in_every_process(processes: list[Process]) -> None:
    for process in processes:
        assert "spread already" in process["said"]["twice"]
        assert "same weights; embed.weight differs" in process["said"]["unequal"]
        assert "one dimension is required, got 2" in process["said"]["square"]


@pytest.mark.parametrize(
    ("config", "count", "message"),
    [
        (CONFIGS["mqa"], 2, "divides n_heads=4, n_kv_heads=1, d_mlp=40, got 2; possible: 1$"),
        (CONFIGS["gpt2"], 3, "divides n_heads=4, n_kv_heads=4, d_mlp=40, got 3; possible: 1, 2, 4"),
        (replace(CONFIGS["gpt2"], mlp=MLP(41)), 2, "d_mlp=41, got 2; possible: 1$"),
        (CONFIGS["attention-only"], 8, "divides n_heads=4, n_kv_heads=4, got 8; possible: 1, 2, 4"),
        (CONFIGS["gpt2"], 0, "got 0; possible: 1, 2, 4"),
        (CONFIGS["granite-moe"], 2, r"does not support models with mlp=MoE\(n_experts=4"),
        (CONFIGS["gpt-oss"], 2, "sinks=True"),
        (CONFIGS["olmo2"], 2, "qk_norm='width'"),
        (CONFIGS["cohere2"], 2, "mixer=.*rotated=False.*, qk_norm='each'"),
        (replace(CONFIGS["gpt2"], cross_attention=True), 2, "cross_attention=True"),
    ],
)
def test_what_does_not_divide_or_is_not_supported_is_refused(
    config: ModelConfig, count: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_tensor_parallel(config, count)
