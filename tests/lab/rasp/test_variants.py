"""Variants of compiled models: the same circuit in another basis, in fewer dimensions, beside noise."""

import functools

import pytest
import torch
from torch import Tensor

from interp.causal import EdgeGraph
from interp.lab.rasp import PROGRAMS, Compiled, compile, rotated, superposed, with_noise_heads
from interp.model import RMSNorm
from interp.model.edits import Edit, Swap
from interp.model.parts import Part
from interp.model.tap import Read, Tap

NAMES = ["shift", "reverse", "induction", "addition", "backup", "suppression"]
every_one = pytest.mark.parametrize("name", NAMES)


@functools.cache
def compiled(name: str) -> Compiled:
    return compile(PROGRAMS[name]())


def words(model: Compiled, ids: Tensor) -> list[str]:
    return [model.text.piece(i) for i in ids.tolist()]


def stream(model: Compiled, site: str, tokens: Tensor) -> Tensor:
    read = Read(Part.of(site).site)
    tap = Tap(reads=[read])
    model.model(tokens, tap)
    return tap.values[read]


@every_one
def test_rotated_basis_leaves_every_logit_and_no_direction_an_axis(name: str) -> None:
    plain, turned = compiled(name), rotated(compiled(name), seed=1)
    for tokens in plain.inputs():
        assert float((plain.model(tokens) - turned.model(tokens)).abs().max()) < 2e-3
    rows = torch.cat([*turned.directions.values()])
    assert float((rows @ rows.mT - torch.eye(len(rows))).abs().max()) < 1e-6
    assert float(rows.abs().max()) < 0.99
    assert turned.check().wrong == 0 and turned.edges == plain.edges


def test_the_rotated_stream_is_the_stream_in_the_directions_that_are_said() -> None:
    plain, turned = compiled("reverse"), rotated(compiled("reverse"))
    tokens = plain.inputs()[-1]
    for name, sites in plain.subspaces.items():
        for site in sites:
            before = stream(plain, site, tokens) @ plain.directions[name].mT
            found = stream(turned, site, tokens) @ turned.subspaces[name][site].mT
            assert float((before - found).abs().max()) < 1e-4


def test_swap_in_a_rotated_subspace_gives_the_program_with_that_variable() -> None:
    model = rotated(compiled("reverse"))
    tokens = model.inputs()[-1]
    other = tokens.flip(0)
    site, directions = next(iter(model.subspaces["opposite"].items()))
    swap = Edit(site, Swap(directions, 1 * stream(model, site, other)))
    found = model.model(tokens, Tap(edits=[swap])).argmax(-1)[:, 1:]
    for row, (text, there) in enumerate(zip(tokens, other, strict=True)):
        said = [words(model, ids[1:]) for ids in (text, there)]
        wanted = model.evaluate(said[0], {"opposite": model.program.trace(said[1])["opposite"]})
        assert tuple(words(model, found[row])) == wanted


def rank(model: Compiled) -> int:
    every = [stream(model, site, tokens).flatten(0, 1) for tokens in model.inputs() for site in model.stream]
    return int(torch.linalg.matrix_rank(torch.cat(every).double(), rtol=1e-6))


@every_one
def test_superposed_model_is_exact_to_its_rank_and_then_says_its_errors(
    name: str,
) -> None:
    least = rank(compiled(name))
    d = compiled(name).model.config.d_model
    assert least < d
    exact = superposed(compiled(name), least)
    assert exact.model.config.d_model == least
    assert exact.check().wrong == 0 and exact.check().margin > 0.99 * compiled(name).check().margin
    small = superposed(compiled(name), d // 3)
    wrong = []
    for tokens in small.inputs():
        for logits, right in zip(small.model(tokens)[:, 1:], small.expected(tokens), strict=True):
            pairs = zip(logits.tolist(), right.tolist(), strict=True)
            wrong.append(any(row.pop(i) <= max(row) for row, i in pairs))
    assert small.check().wrong == pytest.approx(sum(wrong) / len(wrong)) and any(wrong)
    rows = torch.cat([*small.directions.values()])
    assert float((rows @ rows.mT - torch.eye(len(rows))).abs().max()) > 0.1


@every_one
def test_noise_heads_change_no_logit_elsewhere_and_others_a_little(name: str) -> None:
    plain = compiled(name)
    noisy, spilling = with_noise_heads(plain, 3), with_noise_heads(plain, 3, spill=0.005)
    assert noisy.model.config.n_heads == plain.model.config.n_heads + 3
    first = plain.model.config.n_heads
    most = 0.0
    for tokens in plain.inputs():
        logits = plain.model(tokens)
        assert float((noisy.model(tokens) - logits).abs().max()) < 1e-4
        most = max(most, float((spilling.model(tokens) - logits).abs().max()))
        read = Read("blocks.0.attn.hook_z")
        tap = Tap(reads=[read])
        noisy.model(tokens, tap)
        assert (
            float(tap.values[read][:, :, first:].abs().amax((0, 1, 3)).min()) > 0.1
        )  # they do say something
    assert most > 1e-3 and spilling.check().wrong == 0
    assert spilling.check().margin < plain.check().margin


def test_edges_of_noise_heads_lead_nowhere() -> None:
    model = with_noise_heads(compiled("induction"), 1)
    graph, tokens = EdgeGraph.of(model.model.config), model.inputs()[-1][:20]
    logits = model.model(tokens)
    for edge in set(graph.names()) - model.edges:
        assert float((model.without(edge, tokens) - logits).abs().max()) < 1e-4, edge


def test_what_cannot_be_is_refused() -> None:
    plain = compiled("shift")
    for width in (0, 13):
        with pytest.raises(ValueError, match=rf"width must be in \[1, 12\], .* got {width}"):
            superposed(plain, width)
    for heads in (0, 1001):
        with pytest.raises(ValueError, match=rf"1 to 1000 heads are required, got {heads}"):
            with_noise_heads(plain, heads)
    for spill in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="spill must be a number from 0"):
            with_noise_heads(plain, 2, spill=spill)
    normed = compile(PROGRAMS["shift"](), norm=RMSNorm())
    for made in (rotated, with_noise_heads):
        with pytest.raises(ValueError, match=r"a model without norms is required, got one with RMSNorm"):
            made(normed)
