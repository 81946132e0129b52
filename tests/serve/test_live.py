"""The live page in a real browser: an edit by a click shows the session's numbers; undo, cancel, two tabs."""

import re
from threading import Event

import pytest

pytest.importorskip("pydantic", reason="no pydantic: the extra `serve` is not installed")

from interp.cli.commands import CORRUPT, PROMPT
from interp.serve.asks import Look, parsed
from interp.serve.session import Stopped
from interp.serve.snippet import Origin, python
from tests.pages.looks import SCHEMES, WIDTHS, faults
from tests.pages.visits import NARROW, WIDE, needs_browser, numbers
from tests.serve.asking import asked, beside_random, body
from tests.serve.conftest import LONG, Live, Opener, Tab

pytestmark = needs_browser

HEAD = {"where": "L3H5", "change": "zero"}


def expected(live: Live, *edits: dict, **more: object) -> dict:
    return asked(live.session, prompt=PROMPT, second=CORRUPT, edits=list(edits), **more)


def shows(tab: Tab, found: dict) -> None:
    """The page shows these numbers: probabilities of both runs, both maps, the edits."""
    assert tab.texts("#next-tokens tbody th") == [row["token"] for row in found["next"]]
    for column, run in ((2, "clean"), (3, "edited")):
        texts = [
            text.replace("<0.001", "0.0")
            for text in tab.texts(f"#next-tokens tbody tr > :nth-child({column})")
        ]
        assert numbers(texts) == pytest.approx([row[run] for row in found["next"]], abs=6e-4)
    for run in (0, 1):
        cells = [value for row in found["attribution"]["cells"][run] for value in row]
        assert numbers(tab.texts(f"#map-{run} .cell")) == pytest.approx(cells, abs=6e-3)
        total = found["attribution"]["total"][run]
        assert numbers(tab.texts(f"#total-{run}")) == pytest.approx([total], abs=6e-4)
        assert f"{found['attribution']['rest'][run]:+.2f}".replace("-", "−") in tab.texts("#rest")[0]
    assert [text.removesuffix("×").strip() for text in tab.texts("#edits li:not(.none)")] == found["edits"]


def choose(tab: Tab, layer: int, head: int) -> None:
    tab.act(f"#map-1 [data-layer='{layer}'][data-head='{head}']")
    assert tab.texts("#part-name") == [f"L{layer}H{head}"]


def test_a_head_set_to_0_by_a_click_then_undone_and_redone(tab: Tab, live: Live) -> None:
    clean, edited = expected(live), expected(live, HEAD)
    shows(tab, clean)
    choose(tab, 3, 5)
    tab.act("[data-to=zero]")
    shows(tab, edited)
    assert tab.page.locator("#map-1 .touched").count() == 1
    tab.act("#undo")
    shows(tab, clean)
    tab.act("#redo")
    shows(tab, edited)
    tab.act("#edits button")
    shows(tab, clean)
    tab.page.locator("body").press("Control+z")
    tab.settled()
    tab.page.wait_for_timeout(50)
    tab.settled()
    shows(tab, edited)
    tab.act("#clear")
    shows(tab, clean)


def test_every_kind_of_edit_has_its_place_on_the_page(visit: Opener, live: Live) -> None:
    tab = visit()
    choose(tab, 1, 5)
    tab.act("[data-to=resample]")
    edits = [{"where": "L1H5", "change": "resample"}]
    frame = tab.page.locator("#patterns canvas").nth(1)
    box = frame.bounding_box()
    tab.page.fill("#query", "9")
    tab.page.fill("#key", "4")
    tab.page.check("#renormalise")
    tab.act("#cut")
    assert box is not None and frame.is_visible()
    edits.append(
        {
            "where": "L1.attn_scores",
            "change": "set",
            "values": "-inf",
            "at": {"head": 5, "query": 9, "key": 4},
        }
    )
    tab.act("[data-stream='2,3']")
    edits.append({"where": "L2.resid", "change": "resample", "at": {"pos": 3}})
    tab.act("#map-0 [data-layer='2'][data-column]")
    tab.page.check("input[name=where][value=some]", force=True)
    tab.page.click("#where [data-pos='7']")
    tab.page.click("#where [data-pos='2']")
    tab.act("[data-to=mean]")
    edits.append({"where": "L2.mlp", "change": "mean", "over": "reference", "at": {"pos": [2, 7]}})
    tab.page.check("input[name=where][value=all]", force=True)
    tab.page.fill("#neuron", "17")
    tab.act("#choose-neuron")
    tab.page.fill("#value", "2.5")
    tab.act("[data-to=set]")
    edits.append({"where": "L2N17", "change": "set", "values": 2.5})
    shows(tab, expected(live, *edits, layer=2))
    assert tab.page.get_attribute("#panel [data-to=set]", "aria-pressed") == "true"
    assert tab.sent()["edits"] == edits
    tab.act("#copy")
    ask = parsed(Look, body(prompt=PROMPT, second=CORRUPT, edits=edits))
    assert tab.page.inner_text("#source").strip() == python(ask, Origin("demo-4l"), 14).strip()


def test_edge_is_cut_in_the_scores_or_in_the_pattern_and_not_in_both(visit: Opener) -> None:
    tab = visit()
    choose(tab, 1, 5)
    tab.page.fill("#query", "9")
    tab.page.fill("#key", "4")
    at = {"head": 5, "query": 9, "key": 4}
    tab.act("#cut")
    assert tab.sent()["edits"] == [{"where": "L1.pattern", "change": "set", "values": 0, "at": at}]
    assert tab.texts("#cut") == ["Restore this edge"]
    tab.act("#cut")
    tab.page.check("#renormalise")
    tab.act("#cut")
    assert tab.sent()["edits"] == [{"where": "L1.attn_scores", "change": "set", "values": "-inf", "at": at}]
    tab.page.uncheck("#renormalise")
    assert tab.texts("#cut") == ["Restore this edge"]
    tab.act("#cut")
    assert tab.sent()["edits"] == []


def test_click_in_the_pattern_cuts_that_edge_and_a_second_restores_it(tab: Tab) -> None:
    choose(tab, 3, 5)
    canvas = tab.page.locator("#patterns canvas").nth(1)
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    assert box is not None
    at = {"x": box["width"] * 0.45, "y": box["height"] * 0.6}
    canvas.click(position=at)
    tab.page.wait_for_timeout(50)
    tab.settled()
    (said,) = tab.texts("#edits li")
    query, key = tab.page.input_value("#query"), tab.page.input_value("#key")
    assert f"L3H5: {query} cut off from {key}" in said and int(key) <= int(query)
    assert "edited 0.0000" in tab.texts("#readout")[0]
    canvas.click(position=at)
    tab.page.wait_for_timeout(50)
    tab.settled()
    assert tab.texts("#edits li") == ["no edits yet"]


def test_another_token_position_and_answer_can_be_looked_at(visit: Opener, live: Live) -> None:
    tab = visit()
    tab.act("#tokens [data-pos='5']")
    shows(tab, expected(live, position=5))
    token = expected(live, position=5)["next"][3]
    tab.act(f"[data-id='{token['id']}']")
    shows(tab, expected(live, position=5, answer=token["id"]))
    assert tab.texts("#answer") == [token["token"]]


def test_both_runs_go_on_and_a_seed_repeats_them(visit: Opener) -> None:
    tab = visit()
    choose(tab, 3, 5)
    tab.act("[data-to=zero]")
    tab.act("#go-on")
    first = tab.texts("#continued dd")
    tab.act("#go-on")
    assert tab.texts("#continued dd") == first and first[0] != first[1]
    tab.page.fill("#seed", "5")
    tab.act("#go-on")
    assert tab.texts("#continued dd") != first


def test_slider_adds_a_direction_beside_random_ones_as_one_step(tab: Tab, live: Live) -> None:
    clean = expected(live)
    assert tab.texts("#dosed-says") == ["Nothing is added yet."]
    slider = tab.page.locator("#dose-0")
    for dose in ("1.5", "-2.5"):  # a drag: two values, one change
        tab.page.locator("#status").evaluate("element => { element.textContent = '' }")
        slider.evaluate(f"it => {{ it.value = {dose}; it.dispatchEvent(new Event('input')) }}")
        tab.settled()
    slider.evaluate("it => it.dispatchEvent(new Event('change'))")
    edit = {"where": "L2.resid_post", "change": "add", "scale": -2.5}
    found = expected(live, edit)
    assert tab.sent()["edits"] == [edit]
    shows(tab, found)
    steered = beside_random(
        live.session, prompt=PROMPT, second=CORRUPT, edits=[edit], answer=found["answer"]["id"]
    )
    for row, name in enumerate(("probability", "kl")):
        texts = " ".join(tab.texts(f"#dosed tbody tr:nth-child({row + 1}) td")).replace("to", "")
        assert numbers(texts.replace("<0.001", "0.0").split()) == pytest.approx(steered[name], abs=6e-3)
    tab.act("#undo")
    assert tab.sent()["edits"] == []
    shows(tab, clean)
    assert slider.input_value() == "0" and tab.texts("#dosed-says") == ["Nothing is added yet."]


def test_cancel_stops_and_the_page_goes_on(
    visit: Opener, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    from playwright.sync_api import expect

    tab = visit()
    begun: list[Look] = []
    ended: list[bool] = []

    def slow(ask: Look, stop: Event) -> object:
        begun.append(ask)
        ended.append(stop.wait(20))
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(live.session, "pair", slow)
        tab.page.click("#map-0 [data-layer='1'][data-head='1']")
        expect(tab.page.locator("#status")).to_have_text("computing …")
        expect(tab.page.locator("#cancel")).to_be_enabled()
        _wait(tab, begun)  # a question that never reached the server needs no stop there
        tab.page.click("#cancel")
        expect(tab.page.locator("#status")).to_have_text("stopped")
        expect(tab.page.locator("#cancel")).to_be_disabled()
        _wait(tab, ended)
    assert ended == [True]
    choose(tab, 3, 5)
    tab.act("[data-to=zero]")
    shows(tab, expected(live, HEAD))


def _wait(tab: Tab, happened: list) -> None:
    """Wait until something is in the list, at most ten seconds."""
    for _ in range(1000):
        if happened:
            break
        tab.page.wait_for_timeout(10)


def test_two_tabs_keep_their_own_edits(visit: Opener, live: Live) -> None:
    one, two = visit(), visit()
    choose(one, 3, 5)
    choose(two, 1, 5)
    one.page.click("[data-to=zero]")
    two.page.click("[data-to=mean]")
    for tab in (one, two):
        tab.page.wait_for_timeout(100)
        tab.settled()
    shows(one, expected(live, HEAD))
    shows(two, expected(live, {"where": "L1H5", "change": "mean", "over": "reference"}))


def test_a_script_typed_as_a_prompt_is_text(tab: Tab) -> None:
    tab.page.locator("#status").evaluate("element => { element.textContent = '' }")
    tab.page.fill("#prompt", "<script>document.title = 'x'</script><img src=x onerror=alert(1)>")
    tab.settled()
    assert "<script>document.title" in "".join(tab.texts("#tokens bdi"))
    assert tab.page.locator("main img, main script").count() == 0
    assert tab.page.title() == "demo-4l · interp serve"


def test_what_cannot_be_answered_is_said_and_mended(browser: object, visit: Opener, live: Live) -> None:
    from playwright.sync_api import expect

    tab = visit()
    for field in ("#answer-text", "#wrong-text"):
        tab.page.fill(field, " John")
    expect(tab.page.locator("#error")).to_contain_text("must be two tokens, got ' John'")
    assert [line for line in tab.complaints if "400" not in line] == []
    tab.complaints.clear()
    tab.page.fill("#wrong-text", " Mary")
    expect(tab.page.locator("#error")).to_be_hidden()
    tab.settled()
    shows(tab, expected(live, answer=" John", wrong=" Mary"))


def test_the_page_begins_at_the_part_that_adds_most_and_its_strongest_edge(tab: Tab, live: Live) -> None:
    found = expected(live)
    near = found["near"]
    name = f"L{near['layer']}H{near['head']}" if near["part"] == "head" else f"L{near['layer']}.mlp"
    assert tab.texts("#part-name") == [name]
    assert tab.page.locator("#map-0 .cell.chosen").get_attribute("aria-label") == name
    if near["part"] == "mlp":
        choose(tab, 3, 5)
        found = expected(live, layer=3, head=5)
    row = found["pattern"]["clean"][14]
    edge = (tab.page.input_value("#query"), tab.page.input_value("#key"))
    assert edge == ("14", str(row.index(max(row))))


def test_the_steps_of_the_chosen_head_and_the_lens_follow_every_edit(tab: Tab, live: Live) -> None:
    choose(tab, 3, 5)
    for edits in ([], [{"where": "L0H3", "change": "zero"}]):
        if edits:
            choose(tab, 0, 3)
            tab.act("[data-to=zero]")
            choose(tab, 3, 5)
        found = expected(live, *edits, layer=3, head=5)
        for run in ("clean", "edited"):
            for column, name in enumerate(("products", "scaled", "scores", "pattern", "weighted")):
                texts = tab.texts(f"#steps-{run} tbody td:nth-child({column + 2})")
                assert numbers(texts) == pytest.approx(found["stages"][run][name], abs=6e-3)
        for row, line in zip(found["lens"], tab.texts("#lens-table tbody tr"), strict=True):
            depth, *cells = line.split("\t")
            assert depth == row["depth"]
            assert [cells[0], cells[3]] == [run["token"] for run in row["runs"]]
            shown = [cell.replace("<0.001", "0") for cell in (cells[1], cells[2], cells[4], cells[5])]
            said = [value for run in row["runs"] for value in (run["top"], run["answer"])]
            assert numbers(shown) == pytest.approx(said, abs=6e-4)


def test_the_maps_show_a_score_of_the_heads_in_both_runs(tab: Tab, live: Live) -> None:
    choose(tab, 0, 3)
    tab.act("[data-to=zero]")
    found = expected(live, {"where": "L0H3", "change": "zero"})
    assert not tab.sent()["scores"]
    tab.page.locator("#status").evaluate("element => { element.textContent = '' }")
    tab.page.select_option("#measure", "previous_token")
    tab.settled()
    assert tab.sent()["scores"] and not tab.sent()["moved"]
    for run in (0, 1):
        values = [value for layer in found["scores"]["previous_token"] for value in layer[run]]
        assert numbers(tab.texts(f"#map-{run} .cell[data-head]")) == pytest.approx(values, abs=6e-3)
        assert set(tab.texts(f"#map-{run} .cell[data-column]")) == {"–"}
    tab.page.check("input[name=shown][value=change]", force=True)
    change = [b - a for layer in found["scores"]["previous_token"] for a, b in zip(*layer, strict=True)]
    assert numbers(tab.texts("#map-1 .cell[data-head]")) == pytest.approx(change, abs=6e-3)
    assert "attention to the token just before the current one" in tab.texts("#scored")[0]
    tab.page.select_option("#measure", "")
    tab.page.check("input[name=shown][value=edited]", force=True)
    shows(tab, found)


def test_generated_text_goes_with_the_prompt_and_edits_it_came_from(visit: Opener) -> None:
    from playwright.sync_api import expect

    tab = visit()
    for change in ("#prompt", "[data-to=zero]", "#tokens [data-pos='5']"):
        tab.act("#go-on")
        tab.act("#copy")
        expect(tab.page.locator("#continued")).to_be_visible()
        expect(tab.page.locator("#source")).to_be_visible()
        if change == "#prompt":
            tab.page.fill(change, "When Mary and John went to the shop, John gave a drink to")
        else:
            tab.page.click(change)
        expect(tab.page.locator("#continued")).to_be_hidden()
        expect(tab.page.locator("#source")).to_be_hidden()
        assert "Edits at all positions" in tab.texts("#continued-note")[0]
        tab.page.wait_for_timeout(400)
        tab.settled()


def test_an_emptied_prompt_is_told_in_words(visit: Opener) -> None:
    from playwright.sync_api import expect

    tab = visit()
    shown = tab.page.input_value("#prompt")
    tab.page.fill("#prompt", "")
    expect(tab.page.locator("#error")).to_have_text(
        f"the prompt is empty: at least 1 character is required What is shown is of the earlier prompt: {shown}"
    )
    expect(tab.page.locator("#prompt")).to_have_attribute("aria-invalid", "true")
    tab.complaints.clear()
    tab.page.fill("#prompt", "The cat")
    expect(tab.page.locator("#error")).to_be_hidden()
    expect(tab.page.locator("#prompt")).to_have_attribute("aria-invalid", "false")


@pytest.mark.parametrize("width", [NARROW, WIDE])
def test_a_prompt_of_hundreds_of_tokens_is_shown_in_blocks_and_the_largest(
    width: int, long_visit: Opener, long_live: Live
) -> None:
    tab = long_visit(width)
    tokens = tab.page.locator("#tokens .chip")
    found = asked(long_live.session, prompt=LONG, second=LONG.replace(" Mary", " John", 3), layer=1, head=0)
    n = len(found["tokens"])
    assert tokens.count() == n > 800
    choose(tab, 1, 0)
    # A square stands for a block: it says the largest weight in it, and where that is.
    canvas = tab.page.locator("#patterns canvas").nth(0)
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    tab.page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 0.7 * box["height"])
    query, key, clean = re.search(
        r"\((\d+)\) looks at .* \((\d+)\): clean ([\d.]+), edited",
        tab.texts("#readout")[0].replace("\n", " "),
        re.DOTALL,
    ).groups()
    rows = found["pattern"]["clean"]
    assert float(clean) == pytest.approx(rows[int(query)][int(key)], abs=6e-5)
    blocks = [block for block in range(2, 40) if (int(query) // block) * block + block <= n]
    assert any(
        max(
            rows[q][k]
            for q in range(int(query) // block * block, int(query) // block * block + block)
            for k in range(int(key) // block * block, min(q, int(key) // block * block + block - 1) + 1)
        )
        == rows[int(query)][int(key)]
        for block in blocks
    )
    # Of the steps those that count most; the others are one row, and the sums stay.
    lines = tab.texts("#steps-clean tbody tr")
    assert len(lines) == 41 and lines[-1].startswith(f"{n - 40} others")
    shares = [float(line.split("\t")[4]) for line in lines]
    assert sum(shares) == pytest.approx(1, abs=41 * 6e-4)
    weighted = numbers([line.split("\t")[5] for line in lines])
    assert sum(weighted) == pytest.approx(sum(found["stages"]["clean"]["weighted"]), abs=41 * 6e-3)
    # Of the stream the tokens where the prompts differ, and some around; a click patches at that position.
    assert 3 <= tab.page.locator("#stream-map thead th").count() - 1 <= 48
    assert tab.page.locator("#some-streams").is_visible()
    differ = [i for i, (a, b) in enumerate(zip(found["tokens"], found["second"], strict=True)) if a != b]
    tab.act(f'[data-stream="2,{differ[1]}"]')
    assert tab.sent()["edits"] == [{"where": "L2.resid", "change": "resample", "at": {"pos": differ[1]}}]


def test_the_tokens_of_a_new_prompt_appear_before_its_numbers(
    visit: Opener, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    from playwright.sync_api import expect

    tab, go_on, real = visit(), Event(), live.session.pair
    monkeypatch.setattr(live.session, "pair", lambda *given: go_on.wait(20) and real(*given))
    before = tab.texts("#next-tokens tbody th")
    tab.page.fill("#prompt", "The cat sat on")
    names = live.session.model.text.batch("The cat sat on").tokens[0]
    expect(tab.page.locator("#tokens .chip")).to_have_count(len(names))
    assert tab.page.locator("#cancel").is_enabled() and tab.texts("#next-tokens tbody th") == before
    go_on.set()
    tab.settled()
    assert tab.texts("#next-tokens tbody th") != before


def test_an_error_of_a_generation_does_not_mark_the_prompt(
    visit: Opener, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    from playwright.sync_api import expect

    tab = visit()
    monkeypatch.setattr(
        live.session, "continuations", lambda *given: (_ for _ in ()).throw(ValueError("no more"))
    )
    tab.page.click("#go-on")
    expect(tab.page.locator("#error")).to_have_text("no more")
    assert tab.page.locator("#prompt").get_attribute("aria-invalid") == "false"
    assert "stale" not in (tab.page.locator("main").get_attribute("class") or "")
    assert len(tab.complaints) == 1  # the browser's, of the answer 400
    tab.complaints.clear()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_live_page_has_no_fault(width: int, scheme: str, visit: Opener) -> None:
    tab = visit(width, color_scheme=scheme)
    assert faults(tab.page) == []
    choose(tab, 3, 5)
    tab.act("[data-to=zero]")
    tab.page.check("input[name=where][value=some]", force=True)
    assert faults(tab.page) == []


NAME = " Mary Ann"
"""Three tokens of this model."""


def typed(tab: Tab, selector: str, text: str) -> None:
    """Fill a field and wait for the answer."""
    tab.page.locator("#status").evaluate("element => { element.textContent = '' }")
    tab.page.fill(selector, text)
    tab.settled()


def shows_whole(tab: Tab, found: dict) -> None:
    """The page shows log p of each token of the answer and of all, and marks those that follow the prompt."""
    whole = found["whole"]
    assert tab.texts("#whole tbody th") == whole["tokens"]
    for column, run in ((2, 0), (3, 1)):
        texts = tab.texts(f"#whole :is(tbody tr, tfoot tr:first-child) > :nth-child({column})")
        assert numbers(texts) == pytest.approx([*whole["log_probs"][run], whole["log_prob"][run]], abs=6e-4)
        (product,) = numbers(tab.texts(f"#whole tfoot tr:last-child > :nth-child({column})"))
        assert product == pytest.approx(
            whole["probability"][run], rel=0.06, abs=6e-4 if product > 5e-4 else 0
        )  # as written
    assert tab.page.locator("#tokens .chip").count() == len(found["tokens"])
    assert tab.page.locator("#tokens .answers").count() == len(whole["tokens"]) - 1
    assert tab.page.locator("#tokens .chosen").get_attribute("data-pos") == str(found["position"])


def test_an_answer_of_several_tokens_is_typed_and_looked_at_token_by_token(tab: Tab, live: Live) -> None:
    typed(tab, "#answer-text", NAME)
    found = expected(live, answer=NAME)
    assert (
        found["whole"]["tokens"] == ["·Mary", "·An", "n"] and found["position"] == found["prompt_length"] - 1
    )
    shows(tab, found)
    shows_whole(tab, found)
    last = found["prompt_length"] + 1
    tab.act(f"#whole [data-look='{last}']")
    found = expected(live, answer=NAME, position=last)
    shows(tab, found)
    shows_whole(tab, found)
    assert tab.texts("#answer") + tab.texts("#step") == ["n", " (token 3 of the answer's 3)"]
    choose(tab, 3, 5)
    tab.act("[data-to=zero]")
    found = expected(live, HEAD, answer=NAME, position=last)
    shows(tab, found)
    shows_whole(tab, found)
    tab.act("#copy")
    ask = parsed(Look, body(prompt=PROMPT, second=CORRUPT, edits=[HEAD]))
    script = python(ask, Origin("demo-4l"), last, found["whole"]["ids"])
    assert tab.page.inner_text("#source").strip() == script.strip()
    tab.act("#go-on")
    assert "answer" not in tab.sent() and tab.page.locator("#continued").is_visible()


def test_another_end_of_an_answer_is_chosen_by_a_click_and_taken_back_by_typing(
    visit: Opener, live: Live
) -> None:
    tab = visit()
    typed(tab, "#answer-text", NAME)
    first = expected(live, answer=NAME)["whole"]["ids"][0]
    position = expected(live)["prompt_length"]
    tab.act(f"#tokens [data-pos='{position}']")
    other = expected(live, answer=NAME, position=position)["next"][2]["id"]
    tab.act(f"[data-id='{other}']")
    assert tab.sent()["answer"] == [first, other]
    found = expected(live, answer=[first, other], position=position)
    shows(tab, found)
    shows_whole(tab, found)
    tab.act(f"#tokens [data-pos='{position - 1}']")
    shows_whole(tab, expected(live, answer=[first, other]))
    tab.act(f"#tokens [data-pos='{position}']")
    typed(tab, "#answer-text", " Mary")
    assert tab.page.locator("#whole").is_hidden() and tab.page.locator("#tokens .answers").count() == 0
    shows(tab, expected(live, answer=" Mary"))


def test_a_wrong_answer_is_contrasted_where_the_two_differ_and_notes_say_how(
    visit: Opener, live: Live
) -> None:
    tab = visit()
    typed(tab, "#answer-text", NAME)
    typed(tab, "#wrong-text", " Mary and John")
    found = expected(live, answer=NAME, wrong=" Mary and John")
    assert found["position"] == found["prompt_length"] and found["wrong"]["token"] == "·and"
    shows(tab, found)
    shows_whole(tab, found)
    assert tab.texts("#contrast") == [" minus those to ·and"]
    said = found["notes"][0]
    assert tab.texts("#answer-notes") == [f"{said[0].upper()}{said[1:]}."]


def test_random_directions_stand_beside_the_probability_of_the_whole_answer(tab: Tab, live: Live) -> None:
    typed(tab, "#answer-text", NAME)
    tab.page.locator("#status").evaluate("element => { element.textContent = '' }")
    tab.page.locator("#dose-0").evaluate("it => { it.value = 1.5; it.dispatchEvent(new Event('input')) }")
    tab.settled()
    edit = {"where": "L2.resid_post", "change": "add", "scale": 1.5}
    steered = beside_random(live.session, prompt=PROMPT, second=CORRUPT, edits=[edit], answer=NAME)
    assert tab.texts("#dosed-answer") == ["·Mary·Ann"]
    texts = " ".join(tab.texts("#dosed tbody tr:first-child td")).replace("to", "").split()
    for shown, value in zip(numbers(texts), steered["probability"], strict=True):
        assert shown == pytest.approx(value, rel=0.06, abs=6e-4 if shown > 5e-4 else 0)


@pytest.mark.parametrize("width", [NARROW, WIDE])
def test_a_chat_says_who_speaks_and_the_answer_is_the_assistants(
    width: int, chat_visit: Opener, chat_live: Live
) -> None:
    tab = chat_visit(width)
    (roles,) = chat_live.session._roles.values()

    def spoken() -> list[str]:
        chips = tab.page.locator("#tokens .chip")
        return chips.evaluate_all("chips => chips.map((chip) => [chip.dataset.role, chip.dataset.speaker])")

    def told(roles: list[str]) -> list[list[str]]:
        return [
            [role, role if role != before else ""] for before, role in zip(["", *roles], roles, strict=False)
        ]

    assert spoken() == told(roles) and {"template", "user", "assistant"} <= set(roles)
    typed(tab, "#answer-text", "The dog sat")
    more = tab.page.locator("#whole tbody tr").count() - 1
    assert more > 0 and spoken() == told([*roles, *["assistant"] * more])
    assert tab.page.locator("#tokens .answers").count() == more
    assert faults(tab.page) == []
