"""Every part of every model has one name, which reads back to it; the spellings of other tools name the same parts."""

import re

import pytest

from interp.model import sites
from interp.model.parts import KINDS, Edge, Part, as_part, axis_size
from tests.configs import CONFIGS
from tests.loops import over


@pytest.mark.parametrize("name", CONFIGS)
def test_the_name_of_every_site_and_part_of_a_model_reads_back(name: str) -> None:
    config, wrong = CONFIGS[name], []
    for site in sites.names(config, on_demand=True):
        part = Part.of(site)
        if part.site != site or Part.of(str(part)) != part or as_part(str(part), config) != part:
            wrong.append((site, str(part)))
    for kind, row in KINDS.items():
        for layer in range(config.n_layers) if "{layer}" in row.form else (None,):
            count = 1 if row.axis is None else axis_size(row.axis, config)
            parts = [Part(kind, layer, None if row.axis is None else i) for i in range(count)]
            wrong += [(kind, str(part)) for part in parts if Part.of(str(part)) != part]
    assert wrong == []


def test_all_names_differ() -> None:
    names = [row.form for row in KINDS.values()]
    assert len(set(names)) == len(names)
    every = [Part.of(f"blocks.1.{site.name}") for site in sites.block_rows()]
    assert len({str(part) for part in every}) == len({site.name for site in sites.block_rows()})


OTHERS = {
    "L3H5": ("a3.h5", "3.5", (3, 5)), "L3.attn": ("a3", "3_attn_out", "blocks.3.hook_attn_out"),
    "L3.mlp": ("m3", "3_mlp_out", "blocks.3.hook_mlp_out"), "L3N17": ("m3.n17",), "L3B17": ("b3.n17",),
    "L3.mlp_before": ("b3", "3_mlp_before_out"), "L3.resid": ("r3", "L3.resid_pre", "blocks.3.hook_resid_pre"),
    "L0.resid": ("input",), "L3": ("3_block",), "L3.attn_bias": ("3_attn_bias",), "L3H2.q": ("a3.h2<q>",),
    "L3G1.k": ("a3.g1<k>",), "embed": ("hook_embed",), "L2.pattern": ("blocks.2.attn.hook_pattern",),
    "logits": ("unembed.hook_out",),
}  # fmt: skip


@over("name", OTHERS)
def test_other_spellings_name_the_same_part(name: str) -> None:
    assert {str(Part.of(other)) for other in OTHERS[name]} == {name}  # type: ignore[arg-type]
    assert str(Part.of(name)) == name


def test_an_edge_is_written_by_its_ends() -> None:
    for given in ("a0.h1->a1.h2<k>", "L0H1->L1H2.k"):
        assert str(Edge.of(given)) == "L0H1->L1H2.k"
    assert str(Edge.of("input->m1")) == "L0.resid->L1.mlp"
    assert Edge.of("L0.mlp->L1.mlp").receiver.site == "blocks.1.hook_mlp_in"
    assert str(Edge.of("m0->logits")) == "L0.mlp->logits"


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("L3Q5", KeyError, r"no part 'L3Q5': parts are written L3H5 \(head\).*nearest:.*L3H5"),
        ("L0.atn", KeyError, "nearest: L0.attn"),
        ("", KeyError, "no part ''"),
        ((1,), ValueError, r"got \(1,\)"),
        ((1.5, 2), ValueError, "a part is required"),
        (None, ValueError, "got None"),
        (7, ValueError, "got 7"),
    ],
)
def test_what_names_no_part_is_refused(given: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Part.of(given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "given", "error", "message"),
    [
        ("gpt2", "L2H0", IndexError, "layers are 0 to 1 in this model"),
        ("gpt2", "L0H4", IndexError, "the index of a head is 0 to 3"),
        ("gpt2", "L0N99999", IndexError, "the index of a neuron"),
        ("gpt2", "0.7", IndexError, "'0.7' means L0H7: the index of a head is 0 to 3"),
        ("attention-only", "L0.mlp", KeyError, "this model has no"),
        (
            "llama-gqa",
            "L1H3.k",
            KeyError,
            "heads share keys and values in this model; this head's are L1G1.k",
        ),
    ],
)
def test_a_part_that_a_model_lacks_is_refused(
    model: str, given: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        as_part(given, CONFIGS[model])


def test_keys_of_a_group_of_one_are_the_heads() -> None:
    assert as_part("L1G2.k", CONFIGS["gpt2"]) == Part("key", 1, 2)


def test_what_is_no_activation_has_no_site() -> None:
    with pytest.raises(ValueError, match=r"L0\.attn_bias is not an activation"):
        _ = Part.of("L0.attn_bias").site
