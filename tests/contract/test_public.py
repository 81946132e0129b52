"""Every public name keeps the signature of the last release, or version and CHANGELOG say otherwise."""

import re
import tomllib
from operator import attrgetter
from pathlib import Path

import pytest
import yaml

import interp
from tests.contract.public import (
    HEADINGS,
    Change,
    Signature,
    changes,
    public,
    recorded,
    sections,
    today,
    unsaid,
)

ROOT = Path(__file__).parents[2]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
BEFORE: dict[str, Signature] = {"interp.run": ["questions", "model", "data=None", "*", "seed=0", "out=None"]}
LINES = 80


def test_every_change_of_a_public_name_is_said_in_version_and_changelog() -> None:
    """If this fails, `python -m tests.contract.public` says what CONTRIBUTING's "A release" asks."""
    assert today()[1] == []


def test_the_record_has_every_room_and_command_and_the_fields_of_records() -> None:
    _, names = recorded()
    assert len(names) > 1_500
    for room in interp.ROOMS:
        assert any(name.startswith(f"interp.{room}.") for name in names), room
    assert names["interp.ablate"][:4] == ["model", "data", "parts='head'", "*"]
    assert "each=True" in names["interp.causal.Ablate"] and "each=True" in names["interp ablate"]
    assert (names["interp.causal.ablate"], names["interp.Part.axis"]) == ("is interp.ablate", "attribute")


@pytest.mark.parametrize(
    ("after", "kind", "says"),
    [
        ("asked, model, data=None, *, seed=0, out=None", "breaking", "has no parameter 'questions' any more"),
        ("questions, model, data=None, *, seed=1, out=None", "breaking", "seed=1 was seed=0"),
        ("questions, model, data, *, seed=0, out=None", "breaking", "'data' is required"),
        (
            "model, questions, data=None, *, seed=0, out=None",
            "breaking",
            "'model' is parameter 1, was parameter 2",
        ),
        (
            "questions, model, *, data=None, seed=0, out=None",
            "breaking",
            "'data' is given by keyword, was parameter 3",
        ),
        ("questions, model, data=None, *, seed=0, out=None, by", "breaking", "has the new parameter 'by'"),
        ("questions, model, data=None, *, out=None, seed=0, by=3", "added", "has the new parameter 'by'"),
        ("questions, model=None, data=None, *, seed=0, out=None", "added", "'model' may be left out"),
        ("questions, model, data=None, seed=0, *, out=None", "added", "'seed' may be given by position"),
        ("questions, model, data=None, *, out=None, seed=0", None, ""),
    ],
)
def test_a_change_of_a_signature_is_told_by_its_kind(after: str, kind: str | None, says: str) -> None:
    found = changes(BEFORE, {"interp.run": after.split(", ")})
    assert [each.kind for each in found if each.says == says] == ([] if kind is None else [kind])
    assert kind == "breaking" or {each.kind for each in found} <= {kind}


def test_a_function_that_becomes_a_value_breaks() -> None:
    says = "is value, was (questions, model, data=None, *, seed=0, out=None)"
    assert changes(BEFORE, {"interp.run": "value"}) == [Change("interp.run", "breaking", says)]


def test_names_that_come_are_added_names_that_go_break() -> None:
    assert changes({}, BEFORE) == [Change("interp.run", "added", "is new")]
    assert changes(BEFORE, {}) == [Change("interp.run", "breaking", "is gone")]


def test_names_of_the_laboratory_are_free() -> None:
    assert changes({"interp.lab.Linear": ["eps"]}, {"interp.lab.training.train": ["model"]}) == []


def test_a_parameter_that_is_renamed_breaks_in_functions_records_methods_and_commands() -> None:
    _, names = recorded()
    for name in ("interp.patch", "interp.causal.Patch", "interp.HookedTransformer.generate", "interp report"):
        *others, last = names[name]
        found = changes(names, {**names, name: [*others, f"renamed_{last}"]})
        said = [(each.name, each.says) for each in found if each.kind == "breaking"]
        assert said == [(name, f"has no parameter {last.partition('=')[0]!r} any more")]


def test_a_parameter_that_is_renamed_in_the_code_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    _, names = recorded()
    before = {name: said for name, said in names.items() if name.startswith("interp.causal.agreement")}

    def agreement(estimate: object, truth: object, *, top: int) -> None: ...

    monkeypatch.setattr(interp.causal, "agreement", agreement)
    found = changes(before, {name: said for name, said in public().items() if name in before})
    assert found == [
        Change("interp.causal.agreement", "breaking", "has no parameter 'exact' any more"),
        Change("interp.causal.agreement", "breaking", "has the new parameter 'truth'"),
    ]


BREAKS = (Change("interp.causal.knock_out", "breaking", "is gone"),)
ADDS = (Change("interp.causal.knock_out", "added", "is new"),)


def changelog(breaking: str) -> str:
    older = "## [0.2.0] - 2026-01-01\n\n### Breaking\n- `knock_out`\n"
    return f"# Changelog\n\n## [0.3.0] - unreleased\n\n### Breaking\n{breaking}\n### Added\n- x\n\n{older}"


@pytest.mark.parametrize(
    ("found", "released", "version", "text", "asked"),
    [
        (BREAKS, "0.2.0", "0.3.0.dev0", "- `knock_out` is gone.", None),
        (BREAKS, "0.2.0", "0.3.0.dev0", "- `patch` is gone.", "a line under Breaking"),
        (BREAKS, "0.2.0", "0.2.1", "- `knock_out` is gone.", "a higher version than 0.2.1"),
        (BREAKS, "1.2.0", "1.3.0", "", "a higher version than 1.3.0 .* and a line under Breaking"),
        (ADDS, "0.2.0", "0.2.0", "", "a higher version than 0.2.0"),
        (ADDS, "1.2.0", "1.3.0", "", None),
        ((), "0.2.0", "0.2.0", "", None),
    ],
)
def test_a_change_asks_for_a_version_and_what_breaks_for_a_line(
    found: tuple[Change, ...], released: str, version: str, text: str, asked: str | None
) -> None:
    missing = unsaid(found, released, version, changelog(text))
    assert [bool(re.search(asked or "", each)) for each in missing] == ([] if asked is None else [True])


def test_the_changelog_has_eighty_lines_and_five_headings_a_version() -> None:
    assert len(CHANGELOG.splitlines()) <= LINES and all(len(line) <= 160 for line in CHANGELOG.splitlines())
    newest, *_ = found = sections(CHANGELOG)
    assert tuple(found[newest]) == HEADINGS and tuple(found)[-2:] == ("0.2.0", "0.1.0")
    for version, parts in found.items():
        lines = [line for text in parts.values() for line in text.splitlines() if line]
        assert version == "0.1.0" or (lines and all(line.startswith(("- ", "  ")) for line in lines)), version


def test_names_that_the_changelog_gives_as_there_are_there() -> None:
    newest = next(iter(sections(CHANGELOG).values()))
    text = "\n".join(newest[heading] for heading in HEADINGS if heading != "Breaking")
    named = {*re.findall(r"`interp\.([\w.]+)[`(]", text)}
    assert named and all(attrgetter(name)(interp) is not None for name in named)


def test_one_version_stands_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["dynamic"] == ["version"] and "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "interp.core.version.VERSION"}
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"]
    released = re.findall(r"^## \[(.+)\] - \d{4}-\d\d-\d\d$", CHANGELOG, re.MULTILINE)
    assert cited == recorded()[0] == released[0]
    assert next(iter(sections(CHANGELOG))) == interp.__version__.partition(".dev")[0]
