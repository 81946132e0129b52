"""MEMIT: with one layer and one fact it is ROME, with more the normal equations, and the layers add up to the state."""

import functools
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from interp import Batch, HookedTransformer
from interp.editing import EditCase, Rome, WeightEdit, edit_table, key_moment, memit_edit, rome_edit
from interp.editing.rome import Keys
from interp.families.tokenizer import HuggingFaceTokenizer
from interp.zoo import shown
from interp.zoo.groundtruth import Alphabet
from tests.configs import CONFIGS, perturbed
from tests.tiny import CORPUS, backend, gpt2_tokenizer, hooked
from tests.tolerances import assert_close

FACTS = [
    EditCase("The capital of France is", " Rome", "France", {}),
    EditCase("When Mary and John went to the", " cat", "John", {}),
]
FREE = Rome(reach=1e9, decay=0.0, ridge=0.01, steps=5)
"""A search that does not hang on the length of v or of the stream, in which MEMIT's and ROME's differ."""
NOTHING = 1e-9
"""A weight of the old keys at which the new ones are met."""


def keys_of(model: HookedTransformer, layer: int = 0) -> Keys:
    return key_moment(model, list(CORPUS), layer=layer)


@functools.cache
def three_layers(name: str = "gpt2") -> HookedTransformer:
    """A model in which a subject is read after its second layer."""
    config = replace(CONFIGS[name], n_layers=3, d_vocab=backend().get_vocab_size())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return HookedTransformer(perturbed(config), HuggingFaceTokenizer(gpt2_tokenizer()))


def at_subject(model: HookedTransformer, fact: EditCase, site: str) -> Tensor:
    """What a site holds at the subject's last token, found by decoding every beginning."""
    ids = model.text.ids(fact.prompt)
    at = next(i for i in range(len(ids)) if "".join(model.text.pieces(ids[: i + 1])).endswith(fact.subject))
    return model.run_with_cache(fact.prompt)[1][site][0, at].clone()


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "parallel", "tied"])
def test_one_fact_in_one_layer_is_rome_where_the_old_keys_weigh_nothing(name: str) -> None:
    model, fact = hooked(name), FACTS[0]
    keys = keys_of(model)
    (mine,) = memit_edit(model, [fact], [keys], weight=NOTHING, search=FREE)
    rome = rome_edit(model, fact.prompt, answer=fact.answer, subject=fact.subject, keys=keys, rome=FREE)
    assert mine.name == rome.name
    torch.testing.assert_close(mine.dense, rome.dense.to(mine.dense), rtol=1e-6, atol=1e-8)
    (light,) = memit_edit(model, [fact], [keys], weight=100.0, search=FREE)
    assert float(light.dense.norm()) < float(mine.dense.norm()) / 2


def test_many_facts_in_one_layer_solve_the_normal_equations() -> None:
    """min_X weight tr(X^T C X) + |K X - R|^2, by stacked least squares; R from ROME's searches, one at a time."""
    model, weight = hooked(), 3.0
    keys = keys_of(model)
    (edit,) = memit_edit(model, FACTS, [keys], weight=weight, search=FREE)
    deltas = [
        rome_edit(
            model, fact.prompt, answer=fact.answer, subject=fact.subject, keys=keys, rome=FREE
        ).change.B[0]  # type: ignore[union-attr]
        for fact in FACTS
    ]
    key = torch.stack([at_subject(model, fact, "blocks.0.mlp.hook_post") for fact in FACTS]).double()
    damped = keys.moment + FREE.ridge * keys.moment.diagonal().mean() * torch.eye(len(keys.moment)).double()
    root = torch.linalg.cholesky(weight * damped).mT
    rows = torch.cat((root, key))
    aims = torch.cat((torch.zeros(len(root), len(deltas[0])).double(), torch.stack(deltas).double()))
    assert_close(edit.dense.double(), torch.linalg.lstsq(rows, aims).solution)
    assert edit.rank == 2


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
def test_the_layers_add_up_to_the_state_that_was_sought(name: str) -> None:
    """z = h + delta after the last layer, reached exactly where the old keys weigh nothing; half of it by the first."""
    model = three_layers(name)
    site, fact = "blocks.1.hook_resid_post", FACTS[0]
    h = at_subject(model, fact, site)
    edits = memit_edit(model, [fact], [keys_of(model, 0), keys_of(model, 1)], weight=NOTHING, search=FREE)
    (alone,) = memit_edit(model, [fact], [keys_of(model, 1)], weight=NOTHING, search=FREE)
    delta = alone.change.B[0]  # type: ignore[union-attr]
    key, before = (
        at_subject(model, fact, "blocks.0.mlp.hook_post"),
        at_subject(model, fact, "blocks.0.hook_mlp_out"),
    )
    assert_close((key @ edits[0].dense).double(), (delta / 2).double())
    with edits[0].applied(model):
        assert_close(at_subject(model, fact, "blocks.0.hook_mlp_out") - before, (delta / 2).to(before))
        with edits[1].applied(model):
            assert_close(at_subject(model, fact, site), h + delta.to(h))


def test_facts_of_a_planted_site_are_replaced_and_no_others() -> None:
    """Sixteen subjects, known by one neuron each: four get new objects in all prompts, twelve keep theirs."""
    made = shown.early_site(n=64)
    model = HookedTransformer(made.model, Alphabet())
    texts = [Alphabet().decode(row) for row in made.clean[:, 1:].tolist()]
    subjects = ["".join(symbol for symbol in text if symbol in "abcdefgh") for text in texts]
    chosen = {subject: subjects.index(subject) for subject in list(dict.fromkeys(subjects))[:4]}
    facts = [EditCase(texts[i], int(made.wrong[i]), subject, {}) for subject, i in chosen.items()]
    search = Rome(essence=None, rate=0.05, steps=100, decay=0.0, ridge=0.01)
    (edit,) = memit_edit(
        model, facts, [key_moment(model, Batch(made.clean), layer=0)], weight=0.1, search=search
    )
    with edit.applied(model):
        said = made.model(made.clean)[:, -1].argmax(-1).tolist()
    expected = [
        int(made.wrong[chosen[subject]]) if subject in chosen else int(answer)
        for subject, answer in zip(subjects, made.answer, strict=True)
    ]
    assert said == expected and len(set(subjects)) == 16


def test_table_takes_edits_that_belong_together_and_restores_the_weights() -> None:
    model = three_layers()
    keys = [keys_of(model), keys_of(model, 1)]
    weights = {name: p.clone() for name, p in model.transformer.named_parameters()}

    case, text = FACTS[0], CORPUS[1]

    def memit(given: object, case: EditCase) -> list[WeightEdit]:
        return memit_edit(model, [case], keys, weight=NOTHING, search=FREE)

    def perplexity(count: int) -> float:
        with ExitStack() as stack:
            for edit in memit(model, case)[:count]:
                stack.enter_context(edit.applied(model))
            tokens = model.text.batch(text).tokens
            logp = model.transformer(tokens)[0, :-1].log_softmax(-1)
        return float((-logp.gather(1, tokens[0, 1:, None]).mean()).exp())

    table = edit_table(
        model, [case], {"both": memit, "the first": lambda m, case: memit(m, case)[0]}, text=text
    )
    found = table.value.sel(score="perplexity")
    for editor, count in {"original": 0, "both": 2, "the first": 1}.items():
        assert float(found.sel(editor=editor)) == pytest.approx(perplexity(count), rel=1e-9)
    assert len(set(found.values.round(3))) == 3
    for name, parameter in model.transformer.named_parameters():
        assert torch.equal(parameter, weights[name])


def test_what_cannot_be_stored_is_refused() -> None:
    model = hooked()
    keys = keys_of(model)
    with pytest.raises(ValueError, match=r"keys of ascending layers .* got 1 facts, layers \[0, 0\]"):
        memit_edit(model, FACTS[:1], [keys, keys])
    with pytest.raises(ValueError, match="at least one fact"):
        memit_edit(model, [], [keys])
    with pytest.raises(ValueError, match="weight must be a number above 0"):
        memit_edit(model, FACTS, [keys], weight=0.0)
    with pytest.raises(ValueError, match="weight must be a number above 0"):
        memit_edit(model, FACTS, [keys], weight=float("inf"))
    with pytest.raises(ValueError, match="must mention the subject 'Spain'"):
        memit_edit(model, [EditCase("The capital of France is", " Rome", "Spain", {})], [keys])
    with pytest.raises(ValueError, match="post-norm blocks norm that sum"):
        memit_edit(hooked("post-norm"), FACTS, [keys_of(hooked("post-norm"))])
