"""Every kind of edit against hooks written as loops, in float64; attribution that sums; no pass twice."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
import torch
from torch import Tensor

pytest.importorskip("pydantic", reason="no pydantic: the extra `serve` is not installed")

from interp import Edit, HookedTransformer, Part
from interp.causal import Subspace
from interp.data.batch import Batch
from interp.edits import Zero
from interp.families.tokenizer import HuggingFaceTokenizer
from interp.lab import AdaptiveSoftmax
from interp.passes import Sampling
from interp.passes.generate import stream
from interp.serve import session as sessions
from interp.serve.asks import Continue, Look, parsed
from interp.serve.directions import RANDOM, at_random
from interp.serve.session import Session, Stopped
from interp.serve.snippet import Origin, python
from tests.configs import CONFIGS, perturbed
from tests.loops import over
from tests.mixers import MIXERS
from tests.serve.asking import PROMPT, SECOND, asked, beside_random, body, hooks_of
from tests.tiny import gpt2_tokenizer, hooked
from tests.tolerances import assert_close

MODELS = ("gpt2", "llama-gqa", "gemma2", "macaron")
FEW = ("gpt2", "post-norm", "macaron")
EDITS: dict[str, list[dict[str, object]]] = {
    "head to 0": [{"where": "L0H1", "change": "zero"}],
    "head to its mean": [{"where": "L1H0", "change": "mean", "over": "reference"}],
    "head scaled at two": [
        {"where": "L0H0", "change": "scale", "factor": -2.5, "at": {"pos": [3, 1]}}
    ],
    "head patched": [{"where": "L1H1", "change": "resample"}],
    "head patched at one": [
        {"where": "L0H1", "change": "resample", "at": {"pos": 4}}
    ],
    "MLP to 0": [{"where": "L1.mlp", "change": "zero"}],
    "MLP to its mean at two": [
        {"where": "L0.mlp", "change": "mean", "over": "reference", "at": {"pos": [0, 5]}}
    ],
    "MLP patched": [{"where": "L0.mlp", "change": "resample"}],
    "last MLP and neuron to their means": [
        {"where": "L1.mlp", "change": "mean", "over": "reference", "at": {"pos": 3}},
        {"where": "L1N4", "change": "mean", "over": "reference"},
    ],
    "neuron patched at two": [{"where": "L0N4", "change": "resample", "at": {"pos": [2, 6]}}],
    "neuron set": [{"where": "L1N7", "change": "set", "values": 3.5}],
    "neuron scaled": [{"where": "L0N2", "change": "scale", "factor": 4.0}],
    "edge cut": [{"where": "L1.pattern", "change": "set", "values": 0.0, "at": {"head": 0, "query": 6, "key": 2}}],
    "edge cut, rest scaled up": [
        {"where": "L0.attn_scores", "change": "set", "values": "-inf", "at": {"head": 1, "query": 5, "key": 0}}
    ],
    "stream patched": [{"where": "L1.resid", "change": "resample", "at": {"pos": 2}}],
    "several": [
        {"where": "L0H1", "change": "scale", "factor": 2.0},
        {"where": "L0H1", "change": "zero", "at": {"pos": 2}},
        {"where": "L0.attn_scores", "change": "set", "values": "-inf", "at": {"head": 0, "query": 4, "key": 1}},
        {"where": "L0N3", "change": "mean", "over": "reference"},
        {"where": "L1.resid", "change": "resample", "at": {"pos": 3}},
        {"where": "L1.mlp", "change": "scale", "factor": 0.5},
    ],
}  # fmt: skip


TOGETHER = EDITS["head to 0"] + EDITS["MLP to its mean at two"] + EDITS["stream patched"]


def cut(layer: int, way: str, head: int = 0, query: int = 2, key: int = 1) -> dict[str, object]:
    """The edge from a query to a key taken away, in the pattern or in the scores."""
    values = 0.0 if way == ".pattern" else "-inf"
    at = {"head": head, "query": query, "key": key}
    return {"where": f"L{layer}{way}", "change": "set", "values": values, "at": at}


@functools.cache
def session_of(name: str) -> Session:
    """One for all tests of a model: what it keeps must never show."""
    return Session(hooked(name))


def probabilities(logits: Tensor, found: dict) -> Tensor:
    return logits.softmax(-1)[[row["id"] for row in found["next"]]]


@pytest.mark.parametrize("name", MODELS)
@over("edits", EDITS.values())
def test_both_runs_give_the_numbers_of_hooks(name: str, edits: list[dict[str, object]]) -> None:
    model = hooked(name)
    last = len(model.to_tokens(PROMPT)[0]) - 1
    hooks = hooks_of(edits, model, SECOND)
    for position in (last, 6) if name == "gpt2" else (6,):
        found = asked(session_of(name), second=SECOND, edits=edits, position=position)
        clean = model(PROMPT)[0, position]
        edited = model.run_with_hooks(PROMPT, hooks)[0, position]
        for run, logits in {"clean": clean, "edited": edited}.items():
            shown = torch.tensor([row[run] for row in found["next"]], dtype=torch.float64)
            torch.testing.assert_close(shown, probabilities(logits, found), rtol=0, atol=1e-6)  # as rounded
        exact = torch.tensor([row["logits"] for row in found["next"]], dtype=torch.float64)
        ids = [row["id"] for row in found["next"]]
        torch.testing.assert_close(exact, torch.stack([clean[ids], edited[ids]], 1), rtol=0, atol=1e-6)
        kl = (clean.softmax(-1) * (clean.log_softmax(-1) - edited.log_softmax(-1))).sum()
        assert found["kl"] == pytest.approx(float(kl), abs=2e-6)


def test_cut_scores_go_to_the_other_keys_and_the_sink_in_proportion() -> None:
    """A row of a head with a sink sums to less than 1, before and after; `knock_out` cuts edges so, too."""
    model, position = hooked("gpt-oss"), 6
    cuts = [edit for edits in EDITS.values() for edit in edits if "query" in edit.get("at", {})]
    assert len(cuts) == 3
    changed = 0
    for edit in cuts:
        where, at = Part.of(edit["where"]), edit["at"]
        found = asked(
            session_of("gpt-oss"), edits=[edit], layer=where.layer, head=at["head"], position=position
        )
        edited = model.run_with_hooks(PROMPT, hooks_of([edit], model, SECOND))[0, position]
        shown = torch.tensor([row["edited"] for row in found["next"]], dtype=torch.float64)
        torch.testing.assert_close(shown, probabilities(edited, found), rtol=0, atol=1e-6)
        before, after = (sum(found["pattern"][run][at["query"]]) for run in ("clean", "edited"))
        lost = found["pattern"]["clean"][at["query"]][at["key"]]
        assert before < 0.99
        changed += lost > 0
        share = (1 - lost) if edit["values"] == "-inf" else 1.0
        assert after == pytest.approx((before - lost) / share, abs=1e-3)
    assert changed == 2, "a window hides the key of one"


@pytest.mark.parametrize("name", MODELS)
def test_the_pattern_and_how_far_it_moved_are_those_of_hooks(name: str) -> None:
    model = hooked(name)
    edits = EDITS["MLP to 0"] + EDITS["edge cut"] + EDITS["head to 0"]
    found = asked(Session(model), edits=edits, layer=1, head=0)
    _, before = model.run_with_cache(PROMPT)
    with model.hooks(hooks_of(edits, model, SECOND)):
        _, after = model.run_with_cache(PROMPT)
    for run, cache in {"clean": before, "edited": after}.items():
        expected = cache["pattern", 1][0, 0]
        for query, row in enumerate(found["pattern"][run]):
            assert row == pytest.approx(expected[query, : query + 1].tolist(), abs=1e-4)
    for layer in range(model.cfg.n_layers):
        apart = (after["pattern", layer] - before["pattern", layer])[0].abs().sum(-1).mean(-1) / 2
        assert found["moved"][layer] == pytest.approx(apart.tolist(), abs=2e-6)


@pytest.mark.parametrize("name", [*FEW, "gemma2"])
@over("edits", EDITS.values())
def test_attribution_sums_to_the_logits_of_either_run(name: str, edits: list[dict[str, object]]) -> None:
    found = asked(session_of(name), second=SECOND, edits=edits, position=3, answer=11, wrong=17)
    split = found["attribution"]
    model = hooked(name)
    runs = [model(PROMPT)[0, 3], model.run_with_hooks(PROMPT, hooks_of(edits, model, SECOND))[0, 3]]
    for run, logits in enumerate(runs):
        parts = sum(sum(row) for row in split["cells"][run]) + split["rest"][run]
        assert split["total"][run] == pytest.approx(float(logits[11] - logits[17]), abs=2e-6)
        cap = model.cfg.logit_softcap
        before = logits if cap is None else cap * torch.atanh(logits / cap)
        assert parts == pytest.approx(float(before[11] - before[17]), abs=1e-4)
        assert (split["uncapped"] is None) == (cap is None)
        assert cap is None or parts == pytest.approx(split["uncapped"][run], abs=1e-4)


def test_head_set_to_0_adds_nothing_and_others_keep_what_they_add_before() -> None:
    found = asked(Session(hooked()), edits=EDITS["head to its mean"] + EDITS["head to 0"])
    clean, edited = found["attribution"]["cells"]
    assert edited[0][1] == 0.0 and clean[0][1] != 0.0
    assert edited[1][0] != clean[1][0]


def test_stream_patched_at_the_place_looked_at_has_the_others_parts() -> None:
    model = hooked()
    found = asked(
        Session(model),
        second=SECOND,
        edits=[{"where": "L1.resid", "change": "resample", "at": {"pos": 6}}],
        position=6,
        answer=3,
    )
    _, second = model.run_with_cache(SECOND)
    _, edited = model.run_with_cache(PROMPT)
    with model.hooks(
        hooks_of([{"where": "L1.resid", "change": "resample", "at": {"pos": 6}}], model, SECOND)
    ):
        _, edited = model.run_with_cache(PROMPT)
    z = second["blocks.0.attn.hook_z"][0, 6, 1]
    scale = edited["ln_final.hook_scale"][0, 6]
    written = z @ model.W_O[0, 1]
    direction = model.W_U[:, 3] * model.transformer.ln_final.weight
    expected = ((written - written.mean()) / scale) @ direction
    assert found["attribution"]["cells"][1][0][1] == pytest.approx(float(expected), abs=2e-6)


@pytest.mark.parametrize("name", ["gpt2", "macaron"])
def test_neurons_are_the_activation_times_what_the_direction_reads(name: str) -> None:
    model = hooked(name)
    found = asked(Session(model), edits=EDITS["neuron set"], layer=1, answer=3)
    with model.hooks(hooks_of(EDITS["neuron set"], model, SECOND)):
        _, cache = model.run_with_cache(PROMPT)
    direction = model.W_U[:, 3] * model.transformer.ln_final.weight
    for row in found["neurons"]["rows"]:
        post = cache["blocks.1.mlp.hook_post"][0, -1, row["neuron"]]
        written = model.cfg.factor("mlp_out") * post * model.W_out[1, row["neuron"]]
        expected = ((written - written.mean()) / cache["ln_final.hook_scale"][0, -1]) @ direction
        assert row["active"][1] == pytest.approx(float(post), abs=1e-6)
        assert row["added"][1] == pytest.approx(float(expected), abs=2e-6)
    assert 7 in [row["neuron"] for row in found["neurons"]["rows"]]


def test_an_edited_mlp_is_not_split_into_its_neurons() -> None:
    found = asked(Session(hooked()), edits=EDITS["MLP to 0"], layer=1)
    assert all(row["added"][1] is None and row["added"][0] is not None for row in found["neurons"]["rows"])


@pytest.mark.parametrize("name", ["gpt2", "post-norm"])
@over("edits", [[], *EDITS.values()])
def test_the_script_gives_the_same_numbers(
    name: str, edits: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, session = hooked(name), session_of(name)
    ask = parsed(Look, body(second=SECOND, edits=edits, position=7))
    pair = session.pair(ask, Event())
    opened = []
    monkeypatch.setattr(
        "interp.HookedTransformer.from_pretrained", lambda *given, **more: opened.append(given) or model
    )
    names: dict[str, Tensor] = {}
    exec(python(ask, Origin("some 'model'"), pair.position), names)
    assert opened == [("some 'model'",)]
    assert_close(names["clean"], pair.clean.logits.softmax(-1))
    assert_close(names["edited"], pair.edited.logits.softmax(-1))
    assert bool(edits) == bool((names["clean"] != names["edited"]).any())


# --- directions -------------------------------------------------------------------------------------------------------

SITES = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")


def steered(name: str, site: str) -> tuple[Session, Tensor]:
    """A session with one direction in the second layer, and the direction."""
    model = hooked(name)
    vector = torch.randn(model.cfg.d_model, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return Session(
        model, [Subspace(f"blocks.1.hook_{site}", vector[None].to(model.transformer.dtype))]
    ), vector


def adding(
    vector: Tensor, scale: float, at: tuple[int, ...] | None = None
) -> Callable[[Tensor, object], Tensor]:
    def hook(value: Tensor, hook: object) -> Tensor:
        new = value.clone()
        for pos in range(value.shape[1]) if at is None else at:
            new[0, pos] += scale * vector.to(value)
        return new

    return hook


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
@over("site", SITES)
def test_a_direction_is_added_as_a_hook_would_and_counts_in_no_map(name: str, site: str) -> None:
    session, vector = steered(name, site)
    model, part = hooked(name), str(Part.of(f"blocks.1.hook_{site}"))
    for at, position in ((None, 3), ((2, 5), 5)):
        edit = {"where": part, "change": "add", "scale": 1.5, **({"at": {"pos": list(at)}} if at else {})}
        found = asked(session, edits=[edit], position=position, answer=11, wrong=17)
        clean = model(PROMPT)[0, position]
        edited = model.run_with_hooks(PROMPT, [(f"blocks.1.hook_{site}", adding(vector, 1.5, at))])[
            0, position
        ]
        shown = torch.tensor([row["edited"] for row in found["next"]], dtype=torch.float64)
        torch.testing.assert_close(shown, probabilities(edited, found), rtol=0, atol=1e-6)
        split = found["attribution"]
        for run, logits in enumerate((clean, edited)):
            assert split["total"][run] == pytest.approx(float(logits[11] - logits[17]), abs=2e-6)
            parts = sum(sum(row) for row in split["cells"][run]) + split["rest"][run]
            assert parts == pytest.approx(split["total"][run], abs=1e-4)


@pytest.mark.parametrize("at_once", [1, 16, 100])
def test_random_directions_have_its_length_and_stand_in_its_place(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, vector = steered("gpt2", "resid_post")
    model = hooked()
    head = {"where": "L1H0", "change": "zero"}
    edits = [head, {"where": "L1.resid_post", "change": "add", "scale": -2.0}]
    ask = parsed(Look, body(edits=edits, position=4))
    pair = session.pair(ask, Event())
    drawn = at_random(pair.edits, len(pair.tokens), range(RANDOM))[1].change.values
    torch.testing.assert_close(drawn[:, 0].norm(dim=-1), vector.norm().expand(len(drawn)))
    assert bool((drawn == drawn[:, :1]).all()) and len({tuple(row) for row in drawn[:, 0].tolist()}) == RANDOM
    clean = model(PROMPT)[0, 4].log_softmax(-1)
    kls, probability = [], []
    for row in drawn[:, 0]:
        hooks = [*hooks_of([head], model, SECOND), ("blocks.1.hook_resid_post", adding(row, -2.0))]
        log = model.run_with_hooks(PROMPT, hooks)[0, 4].log_softmax(-1)
        kls.append(float((clean.exp() * (clean - log)).sum()))
        probability.append(float(log[11].exp()))
    found = asked(session, edits=edits, position=4, answer=11)
    monkeypatch.setattr(sessions, "COLUMNS", at_once * len(pair.tokens))
    said = beside_random(session, edits=edits, position=4, answer=11)
    assert said["random"] == RANDOM == 39
    assert said["kl"] == pytest.approx([0.0, found["kl"], min(kls), max(kls)], abs=2e-6)
    assert said["probability"][2:] == pytest.approx([min(probability), max(probability)], abs=1e-6)


def test_a_direction_goes_on_in_what_is_generated() -> None:
    session, vector = steered("gpt2", "resid_post")
    edit = {"where": "L1.resid_post", "change": "add", "scale": 3.0}
    ask = parsed(Continue, body(edits=[edit], tokens=5, temperature=0.0))
    _, new = session.continuations(ask, Event())
    model = hooked()
    text = model.to_tokens(PROMPT)
    for token in new:
        logits = model.run_with_hooks(text, [("blocks.1.hook_resid_post", adding(vector, 3.0))])
        assert int(logits[0, -1].argmax()) == token
        text = torch.cat((text, torch.tensor([[token]])), 1)


def test_the_script_loads_the_direction_and_gives_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, _ = steered("gpt2", "resid_pre")
    model, file = hooked(), tmp_path / "a 'direction'.safetensors"
    (direction,) = (Subspace(site, each[None]) for site, each in session.directions.items())
    direction.save(file, model)
    ask = parsed(Look, body(edits=[{"where": "L1.resid", "change": "add", "scale": 0.7, "at": {"pos": 2}}]))
    pair = session.pair(ask, Event())
    monkeypatch.setattr("interp.HookedTransformer.from_pretrained", lambda *given, **more: model)
    names: dict[str, Tensor] = {}
    script = python(ask, Origin("m", directions={"blocks.1.hook_resid_pre": str(file)}), pair.position)
    exec(script, names)
    assert_close(names["edited"], pair.edited.logits.softmax(-1))
    assert bool((names["clean"] != names["edited"]).any())


def test_a_direction_that_was_not_given_or_does_not_fit_is_refused() -> None:
    model = hooked()
    width = model.cfg.d_model
    edit = {"where": "L0.resid_post", "change": "add", "scale": 1.0}
    with pytest.raises(ValueError, match=r"edit 1 \(L0.resid_post .*start with --direction FILE"):
        asked(session_of("gpt2"), edits=[edit])
    with pytest.raises(ValueError, match=r"there are those of L1.resid_post"):
        asked(steered("gpt2", "resid_post")[0], edits=[edit])
    one = Subspace("blocks.0.hook_resid_post", torch.ones(1, width))
    for wrong in (
        [one, one], [replace(one, directions=torch.eye(width)[:2])], [replace(one, at={"pos": 2})],
        [replace(one, directions=torch.zeros(1, width))], [replace(one, site="hook_embed")],
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"directions? .*is required|one direction"):
            Session(model, wrong)


def test_text_in_a_script_stays_text() -> None:
    import ast

    nasty = "'''\"\"\"\\'); import os; os.system('true')\n#\u202e{x}\x00"
    ask = parsed(Look, body(prompt=nasty, second=nasty, edits=EDITS["head patched"]))
    tree = ast.parse(python(ask, Origin(nasty), 4))
    assert [node.names[0].name for node in ast.walk(tree) if isinstance(node, ast.Import)] == ["interp"]
    values = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    assert values.count(nasty) == 3
    assert "\u202e" not in python(ask, Origin(nasty), 4)


def test_a_script_opens_the_model_as_the_page_has_it() -> None:
    assert Origin("m").call == "interp.HookedTransformer.from_pretrained('m')"
    call = Origin("m", "cuda", "step1", "bfloat16", prepend_bos=False).call
    options = "revision='step1', dtype='bfloat16', device='cuda', default_prepend_bos=False"
    assert call == f"interp.HookedTransformer.from_pretrained('m', {options})"


PLAIN = {"scores": False, "moved": False}


def test_what_was_seen_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[str] = []

    def counted(name: str) -> None:
        real = getattr(Session, name)
        monkeypatch.setattr(Session, name, lambda *given: passes.append(name) or real(*given))

    counted("_pass")
    counted("_again")
    session, edits = Session(hooked()), EDITS["head to 0"]
    first = asked(session, edits=edits, layer=0, **PLAIN)
    assert passes == ["_pass", "_pass", "_again", "_again"]
    passes.clear()
    assert asked(session, layer=0, **PLAIN)["next"][0]["clean"] == first["next"][0]["clean"]
    assert asked(session, edits=edits, layer=0, answer=4, **PLAIN)["kl"] == first["kl"]
    asked(session, edits=edits, layer=0, position=2, **PLAIN)
    assert passes == []
    asked(session, edits=edits, layer=1, **PLAIN)
    assert passes == ["_again", "_again"]
    passes.clear()
    every = asked(session, edits=edits, layer=1)
    # Patterns of both rows for what moved, and for the scores: each row's own, from the edited layer on.
    assert passes == ["_again"] * 8 and asked(session, edits=edits, layer=1) == every
    assert len(passes) == 8
    passes.clear()
    asked(session, edits=EDITS["head to its mean"], layer=1, **PLAIN)
    assert passes == ["_pass", "_again"]
    passes.clear()
    late = [{"where": "L1.mlp", "change": "zero"}]
    found = asked(session, edits=late, layer=1)
    assert passes == ["_pass", "_again", "_again", "_again", "_again"] and set(found["moved"][0]) == {0.0}


def test_rows_before_and_after_a_with_of_edits_are_of_one_network() -> None:
    model = hooked()
    with model.hooks(edits=[Edit("L0H1", Zero())]):
        session = Session(model)
        within = asked(session, layer=0)
    assert asked(session, layer=0, prompt=SECOND)["next"] != asked(Session(model), prompt=SECOND)["next"]
    assert asked(session, layer=1) == asked(Session(model.edited([Edit("L0H1", Zero())])), layer=1)
    assert asked(session, layer=0) == within


def test_rows_are_kept_up_to_a_size_and_no_pattern_is_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(hooked())
    for factor in range(1, 20):
        asked(session, edits=[{"where": "L0.mlp", "change": "scale", "factor": float(factor)}])
    assert len(session._rows) == 20 and len(session._layers) == sessions.NEAR
    n = len(hooked().to_tokens(PROMPT)[0])
    for row in session._rows.values():
        assert not any("pattern" in site or "scores" in site for site in row.values)
        assert row.size <= n * sum(value[0].numel() * value.element_size() for value in row.values.values())
    monkeypatch.setattr(sessions, "ROOM", 5 * row.size)
    asked(session, edits=[{"where": "L0.mlp", "change": "scale", "factor": -1.0}])
    assert len(session._rows) == 5
    monkeypatch.setattr(sessions, "ROOM", 0)
    asked(session, edits=[{"where": "L0.mlp", "change": "scale", "factor": -2.0}])
    assert len(session._rows) == sessions.NEAR


def test_without_edits_both_runs_are_one() -> None:
    found = asked(Session(hooked()))
    assert found["kl"] == 0 and all(row["clean"] == row["edited"] for row in found["next"])
    assert all(x == 0 for row in found["moved"] for x in row)


def test_a_stopped_pass_ends_between_layers_and_leaves_nothing_behind() -> None:
    session, stop = Session(hooked()), Event()
    layers: list[str] = []

    class After(Event):
        def is_set(self) -> bool:
            layers.append("looked")
            return len(layers) > 3

    ask = parsed(Look, body(edits=EDITS["head to 0"]))
    with pytest.raises(Stopped):
        session.pair(ask, After())
    assert len(layers) == 4 and not session._rows
    assert session.pair(ask, stop).edited is not None
    untouched = hooked()(PROMPT)[0, -1]
    assert_close(session.pair(ask, stop).clean.logits, untouched)


@pytest.mark.parametrize("temperature", [0, 0.7])
@over("edits", [TOGETHER, *EDITS.values()])
def test_cached_continuations_are_generates_under_hooks_without_a_cache(
    temperature: float, edits: list[dict[str, object]]
) -> None:
    model = hooked()
    settings = {"tokens": 5, "temperature": temperature, "top_k": 20, "top_p": 0.9, "seed": 3}
    ask = parsed(Continue, body(second=SECOND, edits=edits, **settings))
    clean, edited = session_of("gpt2").continuations(ask, Event())
    sampling = Sampling(temperature, 20, 0.9, 3) if temperature else None
    start = len(model.to_tokens(PROMPT)[0])
    expected = model.generate(PROMPT, 5, sampling=sampling).tokens[0, start:].tolist()
    assert clean == expected
    with model.hooks(hooks_of(edits, model, SECOND)):
        changed = (
            model.generate(PROMPT, 5, sampling=sampling, use_past_kv_cache=False).tokens[0, start:].tolist()
        )
    assert edited == changed
    assert edited != clean or edits is not TOGETHER


@over("edits", EDITS.values())
def test_every_step_with_a_cache_has_the_logits_of_one_pass_under_hooks(
    edits: list[dict[str, object]],
) -> None:
    model = hooked()
    pair = session_of("gpt2").pair(parsed(Look, body(second=SECOND, edits=edits)), Event())
    steps = list(stream(model.transformer, Batch(pair.tokens[None]), 5, edits=pair.edits))
    tokens = torch.cat((pair.tokens, *(step.tokens for step in steps)))[None, :-1]
    expected = model.run_with_hooks(tokens, hooks_of(edits, model, SECOND))[0, len(pair.tokens) - 1 :]
    assert_close(torch.cat([step.logits for step in steps]), expected)
    untouched = model(tokens)[0, len(pair.tokens) - 1 :]
    assert bool((untouched != expected).any())


def test_a_stopped_continuation_ends_between_layers() -> None:
    looks: list[int] = []

    class After(Event):
        def is_set(self) -> bool:
            looks.append(1)
            return len(looks) > 9

    ask = parsed(Continue, body(edits=EDITS["head to 0"], tokens=6))
    session = Session(hooked())
    session.pair(ask, Event())  # so that no pass but those of the continuation looks
    with pytest.raises(Stopped):
        session.continuations(ask, After())
    assert len(looks) == 10


@pytest.mark.parametrize("name", ["masked-lm", "bidirectional"])
def test_models_that_the_page_cannot_show_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="requires a causal model with logits"):
        Session(hooked(name))


def test_a_model_without_mlps_has_neither_their_column_nor_neurons() -> None:
    found = asked(Session(hooked("attention-only")), edits=EDITS["head to 0"])
    assert len(found["attribution"]["cells"][0][0]) == hooked("attention-only").cfg.n_heads
    assert found["neurons"] is None
    mixture = asked(Session(hooked("granite-moe")), edits=EDITS["MLP to 0"])
    assert [row[-1] for row in mixture["attribution"]["cells"][1]][1] == 0.0 and mixture["neurons"] is None


@pytest.mark.parametrize("name", ["pool-softmax", "reformer-softmax", "smeared-rotary", "dual-chunk"])
def test_layers_of_other_mixers_show_what_they_have(name: str) -> None:
    config = replace(MIXERS[name], d_vocab=hooked().cfg.d_vocab)
    model = HookedTransformer(perturbed(config, torch.float64), HuggingFaceTokenizer(gpt2_tokenizer()))
    text = "The cat sat on the mat"
    session = Session(model)
    found = asked(session, prompt=text, edits=EDITS["head to 0"])
    edited = model.run_with_hooks(text, hooks_of(EDITS["head to 0"], model, text, text))[0, -1]
    shown = torch.tensor([row["edited"] for row in found["next"]], dtype=torch.float64)
    torch.testing.assert_close(shown, probabilities(edited, found), rtol=0, atol=1e-6)
    for layer in range(model.cfg.n_layers):
        there = layer in session.with_patterns
        assert (found["moved"][layer] is not None) == there
        assert (asked(session, prompt=text, layer=layer)["pattern"] is not None) == there
        if not there:
            for way in (".pattern", ".attn_scores"):
                with pytest.raises(ValueError, match="this model has no"):
                    asked(session, prompt=text, edits=[cut(layer, way)])


@pytest.mark.parametrize(
    "name", ["log-n", "additive-log-n", "adaptive", "dual-chunk", "synthesizer", "strided", "reformer"]
)
def test_edge_cut_in_the_scores_renormalises_the_row_of_every_mixer(name: str) -> None:
    config = replace(MIXERS[name], d_vocab=hooked().cfg.d_vocab)
    model = HookedTransformer(perturbed(config, torch.float64), HuggingFaceTokenizer(gpt2_tokenizer()))
    text = "The cat sat on the mat"
    _, cache = model.run_with_cache(text)
    query = cache["pattern", 1].shape[-1] - 1
    key = int(cache["pattern", 1][0, 2, query].argmax())
    edits = [cut(1, ".attn_scores", 2, query, key)]
    found = asked(Session(model), prompt=text, edits=edits, layer=1, head=2)
    assert found["pattern"]["scored"]
    row = cache["pattern", 1][0, 2, query].clone()
    assert 0 < row[key] < 1
    row[key] = 0.0
    assert found["pattern"]["edited"][query] == pytest.approx((row / row.sum()).tolist(), abs=1e-4)


def test_a_row_of_which_nothing_is_left_is_an_error_wherever_one_looks() -> None:
    config = replace(CONFIGS["gpt2"], d_vocab=hooked().cfg.d_vocab, window=1)
    model = HookedTransformer(perturbed(config, torch.float64), HuggingFaceTokenizer(gpt2_tokenizer()))
    for position in (3, 5):
        with pytest.raises(ArithmeticError, match="a query has no key left to look at"):
            asked(Session(model), edits=[cut(0, ".attn_scores", 0, 3, 3)], position=position)


def test_a_refined_pattern_is_cut_as_it_is_and_not_by_its_scores() -> None:
    config = replace(MIXERS["refined-simple"], d_vocab=hooked().cfg.d_vocab)
    model = HookedTransformer(perturbed(config, torch.float64), HuggingFaceTokenizer(gpt2_tokenizer()))
    session = Session(model)
    with pytest.raises(ValueError, match=r"refined after its softmax.* set the entry of L1.pattern to 0"):
        asked(session, edits=[cut(1, ".attn_scores")])
    found = asked(session, edits=[cut(1, ".pattern")], layer=1)
    assert found["pattern"]["edited"][2][1] == 0.0 and found["pattern"]["scored"] is False


def test_where_logits_are_not_linear_the_page_says_why() -> None:
    config = replace(CONFIGS["gpt2"], d_vocab=hooked().cfg.d_vocab, output=AdaptiveSoftmax((100,)))
    model = HookedTransformer(perturbed(config, torch.float64), HuggingFaceTokenizer(gpt2_tokenizer()))
    found = asked(Session(model), edits=EDITS["head to 0"])
    assert "linear in the normed stream" in found["attribution"]["why"]
    assert all(row["added"] == [None, None] for row in found["neurons"]["rows"])
    edited = model.run_with_hooks(PROMPT, hooks_of(EDITS["head to 0"], model, SECOND))[0, -1]
    assert found["next"][0]["edited"] == pytest.approx(float(edited[found["next"][0]["id"]].exp()), abs=1e-6)


LIVE = EDITS["head scaled at two"] + EDITS["MLP to its mean at two"]


def caches_of(model: HookedTransformer, edits: list[dict[str, object]]) -> list:
    """The clean and the edited run, the edits as hooks written as loops."""
    with model.hooks(fwd_hooks=hooks_of(edits, model, SECOND)):
        edited = model.run_with_cache(PROMPT)[1]
    return [model.run_with_cache(PROMPT)[1], edited]


@pytest.mark.parametrize("name", MODELS)
def test_part_from_near_is_the_one_with_the_largest_clean_logits(name: str) -> None:
    found = asked(Session(hooked(name)), edits=LIVE, answer=4, wrong=7)
    rows, near = found["attribution"]["cells"][0], found["near"]
    largest = max(abs(value) for row in rows for value in row)
    heads = hooked(name).cfg.n_heads
    column = near["head"] if near["part"] == "head" else heads
    assert abs(rows[near["layer"]][column]) == largest
    if near["part"] == "head":
        assert (found["pattern"]["layer"], found["pattern"]["head"]) == (near["layer"], near["head"])
    assert found["neurons"] is None or found["neurons"]["layer"] == near["layer"]
    one = asked(Session(hooked(name)), edits=LIVE, layer=1, head=1)
    assert one["near"] == {"part": "head", "layer": 1, "head": 1}


@pytest.mark.parametrize("name", MODELS)
def test_the_lens_reads_every_state_of_the_stream_in_both_runs(name: str) -> None:
    model = hooked(name)
    found = asked(Session(model), edits=LIVE, position=6, answer=4)
    n_layers = model.cfg.n_layers
    depths = ["embedding", *(f"after layer {i}" for i in range(n_layers - 1)), "output"]
    assert [row["depth"] for row in found["lens"]] == depths
    for run, cache in enumerate(caches_of(model, LIVE)):
        states = [cache["resid_pre", i][0, 6] for i in range(n_layers)]
        states.append(cache["resid_post", n_layers - 1][0, 6])
        for row, state in zip(found["lens"], states, strict=True):
            p = model.transformer.read_out(state[None])[0].double().softmax(-1)
            assert row["runs"][run]["top"] == pytest.approx(float(p.max()), abs=2e-6)
            assert row["runs"][run]["answer"] == pytest.approx(float(p[4]), abs=2e-6)
    last = found["lens"][-1]["runs"]
    assert [run["top"] for run in last] == pytest.approx(
        [max(row[run] for row in found["next"]) for run in ("clean", "edited")], abs=2e-6
    )


def test_scores_of_heads_are_those_of_both_runs_on_the_prompt() -> None:
    model = hooked()
    found = asked(Session(model), edits=LIVE)
    tokens = model.to_tokens(PROMPT)[0].tolist()
    again = [i for i in range(1, len(tokens)) if tokens[i] in tokens[:i]]
    assert again
    for run, cache in enumerate(caches_of(model, LIVE)):
        for layer in range(model.cfg.n_layers):
            for head in range(model.cfg.n_heads):
                rows = cache["pattern", layer][0, head].tolist()
                mass = sum(sum(rows[i][j + 1] for j in range(i) if tokens[j] == tokens[i]) for i in again)
                shown = {name: layers[layer][run][head] for name, layers in found["scores"].items()}
                assert shown["induction"] == pytest.approx(mass / len(again), abs=1e-4)
                before = [rows[i][i - 1] for i in range(1, len(tokens))]
                assert shown["previous_token"] == pytest.approx(sum(before) / len(before), abs=1e-4)
                first = [rows[i][0] for i in range(1, len(tokens))]
                assert shown["first_token"] == pytest.approx(sum(first) / len(first), abs=1e-4)


def test_a_prompt_in_which_nothing_repeats_has_no_induction_score() -> None:
    found = asked(Session(hooked()), prompt="The cat sat")
    assert {x for layer in found["scores"]["induction"] for run in layer for x in run} == {None}


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "gemma2", "bloom"])
def test_the_steps_of_a_head_are_those_of_hooks(name: str) -> None:
    model = hooked(name)
    found = asked(Session(model), edits=LIVE, layer=1, head=1, position=6)["stages"]
    assert (found["layer"], found["head"], found["query"]) == (1, 1, 6)
    rotary = "rot_" if model.cfg.rotary_dim else ""
    for run, cache in zip(("clean", "edited"), caches_of(model, LIVE), strict=True):
        q, k = (cache[f"blocks.1.attn.hook_{rotary}{side}"][0] for side in "qk")
        v, z = cache["v", 1][0], cache["z", 1][0, 6, 1]
        group = q.shape[1] // k.shape[1]
        products = (q[6, 1] @ k[:, 1 // group].T).tolist()
        pattern = cache["pattern", 1][0, 1, 6]
        scores = [None if x == -torch.inf else x for x in cache["attn_scores", 1][0, 1, 6].tolist()]
        one = found[run]
        assert one["products"] == pytest.approx(products, abs=1e-5)
        assert one["scaled"] == pytest.approx([x * one["factor"] for x in products], abs=1e-5)
        assert one["scores"] == pytest.approx(scores, abs=1e-5)
        assert one["pattern"] == pytest.approx(pattern.tolist(), abs=2e-6)
        weighted = pattern * (v[:, 1 // group] @ z) / z.norm()
        assert one["weighted"] == pytest.approx(weighted.tolist(), abs=1e-5)
        assert sum(one["weighted"]) == pytest.approx(float(z.norm()), abs=1e-4)
