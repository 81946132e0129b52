"""Frozen norms are affine: parts sum to the norm of the whole, and a direction carried back reads the same number."""

import torch

from interp.model import NoNorm
from interp.model.sites import attention_input, names
from interp.passes.frozen import FrozenNorm, embedding_norm, final_norm, input_norm, output_norm, sum_norm
from tests.configs import CONFIGS, build
from tests.loops import over
from tests.model.observed import everything
from tests.tolerances import assert_close


def every_norm(name: str) -> list[FrozenNorm]:
    """All frozen norms of the last layer of a model, the embeddings' and the final one."""
    model, layer = build(name), CONFIGS[name].n_layers - 1
    inner = [f(model, layer, s) for f in (output_norm, sum_norm) for s in CONFIGS[name].sublayers]
    return [*inner, input_norm(model, layer, "attn_out"), embedding_norm(model), final_norm(model)]


@over("name", CONFIGS)
def test_parts_sum_to_the_norm_of_the_whole_and_directions_go_back(name: str) -> None:
    parts, direction = torch.randn(5, 3, 2, 24).double(), torch.randn(2, 24).double()
    whole = parts.sum(0)
    for norm in every_norm(name):
        frozen = norm.of(whole)
        assert_close(
            frozen.split(parts, 2).sum(0), (whole if norm.norm is None else norm.norm(whole)) * norm.factor
        )
        for each in (frozen, norm):
            assert_close(
                (parts * each.back(direction.expand(3, 2, 24))).sum(-1),
                (each.through(parts) * direction).sum(-1),
            )
            matrix = torch.randn(24, 4).double()
            assert_close(parts @ norm.reading(matrix), norm.through(parts) @ matrix)
        made: list[torch.Tensor] = []
        same = norm.of(lambda made=made: made.append(whole) or whole)
        assert torch.equal(same.through(parts), frozen.through(parts))
        assert len(made) == (norm.norm is not None)


@over("name", CONFIGS)
def test_the_scale_is_recorded_where_the_model_has_a_norm(name: str) -> None:
    for norm in every_norm(name)[:-1]:
        assert len(norm.sites) == (norm.norm is not None and not isinstance(norm.norm.kind, NoNorm))
        assert set(norm.sites) <= set(names(CONFIGS[name]))
    seen, reading = everything(name), input_norm(build(name), 1, "attn_out")
    if reading.sites:
        stream = seen[attention_input(CONFIGS[name], 1)]
        assert_close(reading.recorded(seen).through(stream), reading.of(stream).through(stream))
