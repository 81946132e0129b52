"""Chats as prompts: the ids are those of transformers, and the roles those of a slow reading of the text itself."""

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

import interp
from interp.core.notes import Note, note
from interp.data.batch import Batch
from interp.data.chats import ROLES, RenderedChat, is_chats, token_characters
from interp.data.stream import prompt_source
from interp.edits import Add, PerRow, Scale, Variant, Zero
from interp.families.tokenizer import HuggingFaceTokenizer
from interp.model.edits import Edit
from interp.model.tap import Read
from interp.passes.edit_text import edit_from_json, edit_to_json, edit_to_python
from interp.passes.observe import observe
from interp.passes.sweep import Sweep
from tests.configs import CONFIGS, perturbed
from tests.data.templates import CHATML, HEADERS, TEMPLATES, backend, speaking
from tests.tiny import END
from tests.tolerances import assert_close

ASK = [{"role": "user", "content": "The cat sat on the mat."}]
TALK = [
    {"role": "user", "content": "Where is Paris?"},
    {"role": "assistant", "content": "In France, Mary."},
    {"role": "user", "content": "日本語 and the  dog\nsat"},
]
LED = [{"role": "system", "content": "You are a dog."}, *TALK]
PARTIAL = [*TALK, {"role": "assistant", "content": "The dog sat"}]
CHATS = {"ask": ASK, "talk": TALK, "led": LED, "partial": PARTIAL}


def model_of(template: str | None, name: str = "llama-gqa") -> interp.HookedTransformer:
    config = replace(CONFIGS[name], d_vocab=backend().get_vocab_size(), n_ctx=256)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = perturbed(config, torch.float64)
    return interp.HookedTransformer(network, HuggingFaceTokenizer(speaking(template)), name=name)


def taken(name: str) -> dict[str, list[dict[str, str]]]:
    """The chats that a template takes."""
    return {key: chat for key, chat in CHATS.items() if (name, key) != ("turns", "led")}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_ids_of_a_chat_are_those_that_transformers_gives(name: str) -> None:
    template, _ = TEMPLATES[name]
    model, theirs = model_of(template), speaking(template)
    for chat in taken(name).values():
        continues = chat[-1]["role"] == "assistant"
        wanted = theirs.apply_chat_template(
            chat,
            tokenize=True,
            return_dict=False,
            add_generation_prompt=not continues,
            continue_final_message=continues,
        )
        batch = model.to_batch(chat=chat)
        assert batch.tokens.tolist() == [wanted]
        assert wanted.count(theirs.bos_token_id) == template.count("bos_token"), "BOS once, or not at all"
        assert model.to_batch(chat).tokens.equal(batch.tokens)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_tokens_of_each_role_spell_what_the_role_said(name: str) -> None:
    """And nothing else, but for the space before a word, which is part of its token."""
    model = model_of(TEMPLATES[name][0])
    for chat in taken(name).values():
        batch = model.to_batch(chat=chat)
        assert batch.roles is not None
        for role in {message["role"] for message in chat}:
            said = [message["content"] for message in chat if message["role"] == role]
            gap = " " if name == "instructions" else ""
            if not gap:
                assert spelled(model, batch, batch.positions(role)) == "".join(said)
            for turn in range(-len(said), len(said)):
                own = spelled(model, batch, batch.positions(role, turn))
                assert own in (said[turn], gap + said[turn])
            mine = np.flatnonzero(batch.roles[0] == role).tolist()
            assert tuple(mine) == batch.positions(role).places[0]
        every = sorted(
            i for role in (*ROLES, "template") for i in np.flatnonzero(batch.roles[0] == role).tolist()
        )
        assert every == list(range(batch.tokens.shape[1]))
        left = spelled(model, batch, batch.positions("template"))
        whole = model.to_string(batch.tokens[0])
        for message in chat:
            whole = whole.replace(message["content"], "", 1)
        assert left.replace(" ", "") == whole.replace(" ", "")


def spelled(model: interp.HookedTransformer, batch: Batch, positions: PerRow) -> str:
    assert isinstance(positions.places[0], tuple)
    return model.to_string(batch.tokens[0][batch.real[0]][list(positions.places[0])])


GENERATION = CHATML.replace(
    "+ m.content + '<|im_end|>\\n' }}{% endfor",
    "}}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}"
    "{{ m.content }}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor",
)


def test_the_assistants_tokens_are_those_of_transformers_own_mask() -> None:
    model, theirs = model_of(GENERATION), speaking(GENERATION)
    chat = [*PARTIAL, {"role": "user", "content": "And John?"}]
    masked = theirs.apply_chat_template(
        chat, tokenize=True, return_dict=True, add_generation_prompt=True, return_assistant_tokens_mask=True
    )
    batch = model.to_batch(chat=chat)
    assert batch.tokens.tolist() == [masked["input_ids"]]
    assert batch.positions("assistant").places[0] == tuple(np.flatnonzero(masked["assistant_masks"]).tolist())


def test_a_content_that_the_template_trims_keeps_its_own_tokens() -> None:
    model = model_of(HEADERS)
    chat = [{"role": "user", "content": "  The cat \n"}, {"role": "assistant", "content": "\n sat  "}]
    batch = model.to_batch(chat=chat)
    assert spelled(model, batch, batch.positions("user")) == "The cat"
    assert spelled(model, batch, batch.positions("assistant")) == "sat"


def test_reasoning_that_the_template_drops_has_no_tokens_and_is_noted() -> None:
    model = model_of(TEMPLATES["thinking"][0])
    thought = {"role": "assistant", "content": "<think>\nMary is a dog.\n</think>\n\nIt is Mary."}
    note.cache_clear()
    with pytest.warns(Note, match="leaves out part of message 1, of the assistant"):
        dropped = model.to_batch(chat=[ASK[0], thought, ASK[0]])
    assert spelled(model, dropped, dropped.positions("assistant")) == "It is Mary."
    kept = model.to_batch(chat=[ASK[0], thought])
    assert spelled(model, kept, kept.positions("assistant")) == thought["content"]


SHOUTS = CHATML.replace("m.content", "(m.content | upper)")
DROPS = CHATML.replace("{%- for m in messages %}", "{%- for m in messages if m.role != 'system' %}")
LENGTH = CHATML.replace("m.content", "(m.content | length | string) + m.content")


@pytest.mark.parametrize("template", [SHOUTS, LENGTH])
def test_roles_are_refused_where_the_template_changes_what_was_said(template: str) -> None:
    model, theirs = model_of(template), speaking(template)
    note.cache_clear()
    with pytest.warns(Note, match="writes other text than the contents.*cannot be told"):
        batch = model.to_batch(chat=ASK)
    assert batch.tokens.tolist() == [
        theirs.apply_chat_template(ASK, tokenize=True, return_dict=False, add_generation_prompt=True)
    ]
    with pytest.raises(ValueError, match="tokens of chat 0 cannot be told apart by role"):
        batch.positions("user")
    assert batch.roles is not None and set(batch.roles[0]) == {""}


def test_a_message_that_the_template_leaves_out_is_noted_and_has_no_positions() -> None:
    model = model_of(DROPS)
    note.cache_clear()
    with pytest.warns(Note, match="leaves out message 0, of the system"):
        batch = model.to_batch(chat=LED)
    with pytest.raises(ValueError, match="chat 0 has no token of the system; it has user, assistant"):
        batch.positions("system")
    assert spelled(model, batch, batch.positions("user", 0)) == TALK[0]["content"]


def test_roles_are_found_where_contents_occur_in_marks_and_in_each_other() -> None:
    model = model_of(CHATML)
    chat = [
        {"role": "system", "content": "user"},
        {"role": "user", "content": "assistant"},
        {"role": "assistant", "content": "user"},
        {"role": "user", "content": "user\nassistant system"},
    ]
    batch = model.to_batch(chat=chat)
    assert spelled(model, batch, batch.positions("user")) == "assistantuser\nassistant system"
    assert spelled(model, batch, batch.positions("assistant")) == "user"


def test_random_chats_add_up_in_every_template() -> None:
    generator = np.random.default_rng(0)
    words = [
        "a",
        "user",
        " ",
        "\n",
        "the cat",
        "<think>",
        "</think>",
        "é",
        "日本",
        ".",
        "assistant",
        ".*",
        "\\1",
        "{{ x }}",
    ]
    for name, (template, _) in TEMPLATES.items():
        model = model_of(template)
        for _ in range(12):
            contents = ["".join(generator.choice(words, generator.integers(1, 7))) + "x" for _ in range(3)]
            roles = ("user", "assistant", "user")
            chat = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]
            batch = model.to_batch(chat=chat)
            for turn, text in ((0, contents[0]), (1, contents[2])):
                wanted = text.strip() if name in ("headers", "turns") else text
                own = spelled(model, batch, batch.positions("user", turn))
                assert own == wanted or (name == "instructions" and own == f" {wanted}"), (name, chat)


def test_rows_of_several_chats_are_those_of_each_alone() -> None:
    model = model_of(CHATML)
    chats = [ASK, TALK, LED]
    for side in ("right", "left"):
        batch = model.to_batch(chat=chats, padding_side=side)
        assert batch.turns is not None and batch.roles is not None
        for i, chat in enumerate(chats):
            alone = model.to_batch(chat=chat)
            assert alone.turns is not None
            assert batch.tokens[i][batch.real[i]].equal(alone.tokens[0])
            assert batch.turns[i][batch.real[i]].equal(alone.turns[0])
            assert (batch.roles[i][~batch.real[i].numpy()] == "").all()
            assert batch.positions("user").places[i] == alone.positions("user").places[0]


def test_a_lens_at_the_users_tokens_is_the_lens_of_each_chat_alone() -> None:
    model = model_of(CHATML)
    chats = [ASK, TALK, LED]
    batch = model.to_batch(chat=chats)
    found = interp.logit_lens(model, batch, pos=batch.positions("user"))
    for i, chat in enumerate(chats):
        places = list(batch.positions("user").places[i])  # type: ignore[arg-type]
        alone = interp.logit_lens(model, chat)
        n = len(places)
        assert found.position.values[i, :n].tolist() == places
        assert (found.position.values[i, n:] == -1).all()
        assert_close(
            torch.from_numpy(found.entropy.values[i, :, :n]),
            torch.from_numpy(alone.entropy.values[0][:, places]),
        )
        assert np.isnan(found.entropy.values[i, :, n:]).all()
        assert (found.role.values[i, :n] == "user").all() and (found.role.values[i, n:] == "").all()


@pytest.mark.parametrize("side", ["right", "left"])
def test_an_edit_at_a_role_is_the_edit_of_these_tokens_in_each_chat_alone(side: str) -> None:
    model = model_of(CHATML)
    chats = [ASK, TALK, LED]
    batch = model.to_batch(chat=chats, padding_side=side)  # type: ignore[arg-type]
    vector = torch.randn(model.cfg.d_model, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for change, turn in ((Zero(), None), (Add(vector), -1), (lambda cells: 2 * cells, None)):
        found = observe(
            model, batch, edits=[Edit("L1.resid", change, {"pos": batch.positions("user", turn)})]
        ).output
        for i, chat in enumerate(chats):
            alone = model.to_batch(chat=chat)
            places = alone.positions("user", turn).places[0]
            one = observe(model, alone, edits=[Edit("L1.resid", change, {"pos": places})]).output[0]
            assert_close(found[i][batch.real[i]], one)


@pytest.mark.parametrize("turn", [None, -1])
@pytest.mark.parametrize("side", ["right", "left"])
def test_a_role_in_an_edit_names_the_positions_of_each_chat(side: str, turn: int | None) -> None:
    model = model_of(CHATML)
    batch = model.to_batch(chat=[ASK, TALK, LED], padding_side=side)  # type: ignore[arg-type]
    role = {"role": "user"} if turn is None else {"role": "user", "turn": turn}
    by_role, by_place = (
        Edit("L1.resid", Scale(0.5), {"pos": pos}) for pos in (role, batch.positions("user", turn))
    )
    seen = [Read("blocks.1.hook_resid_pre")]
    runs = [observe(model, batch, seen, [edit]) for edit in (by_role, by_place)]
    assert runs[0].output.equal(runs[1].output)
    assert runs[0].trace[seen[0]].equal(runs[1].trace[seen[0]])
    assert model.edited([by_role])(batch).equal(runs[1].output)
    assert observe(model.edited([by_role]), batch).output.equal(runs[1].output)
    swept = [
        Sweep(model.transformer, batch.with_answers(torch.tensor([5, 6, 7]), None), [Variant([edit])]).run(
            interp.logit_difference()
        )
        for edit in (by_role, by_place)
    ]
    assert swept[0].values.equal(swept[1].values) and bool(swept[0].changed.all())
    texts = [model.generate(batch, 3, edits=[edit]) for edit in (by_role, by_place)]
    assert texts[0].tokens.equal(texts[1].tokens)
    lens = interp.logit_lens(model.edited([by_role]), batch).entropy.values
    for i, chat in enumerate((ASK, TALK, LED)):
        alone = model.to_batch(chat=chat)
        places = alone.positions("user", turn).places[0]
        one = interp.logit_lens(model.edited([Edit("L1.resid", Scale(0.5), {"pos": places})]), alone).entropy
        assert_close(torch.from_numpy(lens[i, :, : one.sizes["pos"]]), torch.from_numpy(one.values[0]))


def test_a_role_as_pos_is_each_chats_own_positions() -> None:
    model = model_of(CHATML)
    batch = model.to_batch(chat=[ASK, TALK, LED])
    for turn in (None, 0):
        role = {"role": "user"} if turn is None else {"role": "user", "turn": turn}
        found = interp.logit_lens(model, batch, pos=role)
        assert found.equals(interp.logit_lens(model, batch, pos=batch.positions("user", turn)))
    last = {"role": "user", "turn": 0}
    alone = model.to_batch(chat=ASK)
    whole = Read("blocks.1.hook_resid_pre")
    some = Read("blocks.1.hook_resid_pre", pos=last)
    trace = observe(model, alone, [whole, some]).trace
    assert trace[some].equal(trace[whole][:, list(alone.positions("user", 0).places[0])])


def test_an_edit_at_a_role_is_written_and_read_back() -> None:
    for pos in ({"role": "user"}, {"role": "assistant", "turn": -1}):
        edit = Edit("L1.resid", Zero(), {"pos": pos})
        entry = json.loads(json.dumps(edit_to_json(edit)))
        assert entry["at"] == {"pos": pos}
        assert edit_from_json(entry).at == edit.at
        assert eval(edit_to_python(edit), {"interp": interp}).at == edit.at


def test_a_role_that_nothing_tells_apart_is_refused() -> None:
    model = model_of(CHATML)
    edit = Edit("L1.resid", Zero(), {"pos": {"role": "user"}})
    with pytest.raises(ValueError, match="a role is required of chats, and these prompts are none"):
        observe(model, "The cat", edits=[edit])
    with pytest.raises(ValueError, match="which this pass cannot tell apart"):
        model.transformer.edited([edit])(model.to_batch(chat=ASK).tokens)
    with pytest.raises(ValueError, match="chat 0 has no token of the tool"):
        observe(model, model.to_batch(chat=ASK), edits=[Edit("L1.resid", Zero(), {"pos": {"role": "tool"}})])
    for wrong in ({"role": 3}, {"turn": 1}, {"role": "user", "turns": 1}, {"role": "user", "turn": "a"}):
        with pytest.raises(ValueError, match="the tokens of a role are named by"):
            Edit("L1.resid", Zero(), {"pos": wrong})
    with pytest.raises(ValueError, match="requires an index"):
        Edit("L1H0", Zero(), {"d_head": {"role": "user"}})


def test_results_name_the_role_of_every_token() -> None:
    model = model_of(CHATML)
    batch = model.to_batch(chat=[TALK, ASK])
    for data in (batch, [TALK, ASK], list(batch.split(1))):
        result = interp.logit_lens(model, data)
        assert (result.role.values == batch.roles).all()
    assert (
        interp.run([interp.lenses.LogitLens()], model, batch)["logit_lens"].role.values == batch.roles
    ).all()
    assert "role" not in interp.logit_lens(model, batch.tokens[1:]).coords
    assert interp.logit_lens(model, batch, pos=-1).role.values.tolist() == [["template"], ["template"]]
    assert (interp.token_attribution(model, TALK, 5).role.values == model.to_batch(TALK).roles).all()


@pytest.mark.parametrize("name", TEMPLATES)
def test_generation_ends_where_the_template_ends_the_turn(name: str) -> None:
    """A model that always says the end of the turn, which neither its config nor its tokenizer lists as an end."""
    template, end = TEMPLATES[name]
    theirs = speaking(template)
    theirs.eos_token = END
    if "eos_token" in template:  # where it is the end of the turn
        theirs.chat_template = template.replace("eos_token", f"'{end}'")
    network = model_of(None, "gptj").transformer
    ends = HuggingFaceTokenizer(theirs).encode(end)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = perturbed(network.config, torch.float64)
    with torch.no_grad():
        network.unembed.bias[ends[0]] += 1e4
    model = interp.HookedTransformer(network, HuggingFaceTokenizer(theirs))
    assert [model.text.turn_end] == ends and ends[0] not in model.text.end_ids
    batch = model.to_batch(chat=ASK)
    n = batch.tokens.shape[1]
    for prompts in (batch, ASK):
        said = model.generate(prompts, 3)
        assert said.tokens[0, n:].tolist() == ends
        assert said.roles is not None and said.roles[0, n:].tolist() == ["template"]
    assert model.generate(batch, 3, stop_at_eos=False).tokens.shape[1] == n + 3
    assert model.generate(batch.tokens, 3).tokens.shape[1] == n + 3, "ids alone are no chat"
    assert "".join(model.stream(ASK, 3)) == end


def test_what_is_generated_after_a_chat_is_the_assistants() -> None:
    model = model_of(CHATML)
    for chat in (ASK, PARTIAL):
        batch = model.to_batch(chat=chat)
        before = batch.positions("assistant").places[0] if chat is PARTIAL else ()
        longer = model.generate(chat, 3, stop_at_eos=False)
        new = tuple(range(batch.tokens.shape[1], longer.tokens.shape[1]))
        assert longer.positions("assistant").places[0] == (*before, *new)  # type: ignore[misc]
        assert longer.positions("assistant", -1).places[0][-3:] == new  # type: ignore[index]


def test_a_chat_is_data_wherever_prompts_are() -> None:
    model = model_of(CHATML)
    batch = model.to_batch(chat=[ASK, TALK])
    assert_close(model([ASK, TALK]), model(batch))
    assert is_chats(ASK) and is_chats([ASK, TALK]) and not is_chats([{"text": "a"}]) and not is_chats(["a"])
    assert prompt_source([ASK, TALK], model.text).rows == 2
    answer = interp.attribute(model, TALK, 5).total.values
    assert answer == pytest.approx(interp.attribute(model, model.to_batch(TALK).tokens, 5).total.values)


def wrong_chats() -> Sequence[tuple[object, str]]:
    return (
        ([], "messages are required, such as"),
        ("hello", "chat must be Sequence"),
        ([[]], "chat 0: messages must be at least one"),
        ([{"role": "user"}], "chat, message 0: messages must be at least one, each with a role and content"),
        ([ASK, [*TALK, {"role": "user"}]], "chat 1, message 3"),
        ([{"role": "human", "content": "a"}], "the role must be one of system, .* got 'human'"),
        ([{"role": "user", "content": ["a"]}], "chat must be Sequence"),
        (
            [{"role": "user", "content": "a", "tool_calls": "b"}],
            "has the keys role, content, .* not 'tool_calls'",
        ),
    )


def test_what_is_no_chat_is_refused_by_message() -> None:
    model = model_of(CHATML)
    for chat, message in wrong_chats():
        with pytest.raises(ValueError, match=message):
            model.to_batch(chat=chat)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="chat, message 0: content must be a text, got"):
        model.to_batch([{"role": "user", "content": ["a"]}])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="prompts or a chat are required, got neither"):
        model.to_batch()
    with pytest.raises(ValueError, match="prompts or a chat are required, got both"):
        model.to_batch("a", chat=ASK)


def test_a_model_without_a_template_says_what_to_do_and_takes_one() -> None:
    bare = model_of(None)
    with pytest.raises(
        ValueError, match=r"chat template, this one has none: give one, from_pretrained\(.*plain texts"
    ):
        bare.to_batch(chat=ASK)
    given = interp.HookedTransformer.from_pretrained("demo-4l")
    with pytest.raises(ValueError, match="chat template, this one has none"):
        given.to_batch(chat=ASK)
    tokenizer = speaking(None)
    with_one = HuggingFaceTokenizer(tokenizer, CHATML)
    spoken = interp.HookedTransformer(bare.transformer, with_one).to_batch(chat=ASK)
    assert spoken.tokens.equal(model_of(CHATML).to_batch(chat=ASK).tokens)
    assert tokenizer.chat_template is None, "the user's tokenizer is left alone"


def test_positions_of_roles_are_refused_where_there_are_none() -> None:
    model = model_of(CHATML)
    batch = model.to_batch(chat=TALK)
    for call, message in (
        (
            lambda: model.to_batch("The cat").positions("user"),
            "a role is required of chats, and these prompts are none",
        ),
        (lambda: batch.positions("usr"), "role must be one of .*user"),
        (lambda: batch.positions("system"), "chat 0 has no token of the system"),
        (lambda: batch.positions("user", 2), "chat 0 has 2 turns of the user, got turn 2"),
        (lambda: batch.positions("template", 0), "the template has no turns"),
        (
            lambda: interp.attribute(model, batch, 5, pos=batch.positions("user")),
            "pos is one position of every prompt",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_characters_of_tokens_are_unknown_where_they_do_not_add_up() -> None:
    tokenizer = model_of(CHATML).text.tokenizer
    ids = tokenizer.encode("日本 the cat")
    places = token_characters(tokenizer, ids, "日本 the cat")
    assert places is not None and places[0][0] == 0 and places[-1][1] == len("日本 the cat")
    assert token_characters(tokenizer, ids, "日本 the dog") is None
    assert token_characters(tokenizer, ids[:-1], "日本 the cat") is None
    assert RenderedChat("日本 the dog", (), "").codes(tokenizer, ids) is None
    assert json.dumps(places)
