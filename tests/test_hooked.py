"""HookedTransformer: text, caches, weights and generation as people type them in a notebook (hooks: test_hooks.py)."""

import copy
import pickle
import re
import warnings
from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
import transformers
from torch import Tensor

import interp
from interp import HookedTransformer
from interp.data.batch import Batch
from interp.model import MLP, sites
from interp.passes import HookPoint, Sampling
from interp.passes.generate import Stop
from tests.configs import CONFIGS
from tests.tiny import CORPUS, END, backend, hooked
from tests.tolerances import assert_close

PATTERN, POST = "blocks.0.attn.hook_pattern", "blocks.0.hook_resid_post"
LINE = CORPUS[2]


# --- text ---------------------------------------------------------------------------------------------------------


def test_tokens_begin_with_bos_exactly_once_unless_switched_off() -> None:
    model, ids = hooked(), backend().encode(LINE).ids
    assert model.to_tokens(LINE).tolist() == [[0, *ids]]
    assert model.to_tokens(END + LINE).tolist() == [[0, *ids]]
    assert model.to_tokens(LINE, prepend_bos=False).tolist() == [ids]
    assert model.to_batch(LINE).bos
    assert not model.to_batch(LINE, prepend_bos=False).bos


def test_tokens_pieces_and_text_agree() -> None:
    model = hooked()
    tokens = model.to_tokens(LINE)[0]
    assert model.to_string(tokens[1:]) == LINE
    assert model.to_string(tokens) == END + LINE
    assert model.to_string(int(tokens[3])) == model.to_str_tokens(LINE)[3]
    assert model.to_str_tokens(LINE) == model.to_str_tokens(tokens)
    assert "".join(model.to_str_tokens(LINE, prepend_bos=False)) == LINE


def test_padded_texts_come_back_as_they_were() -> None:
    model, texts = hooked(), ["The cat", LINE]
    for side in ("left", "right"):
        assert model.to_texts(model.to_batch(texts, padding_side=side)) == texts
    assert model.to_texts(model.to_batch(texts, prepend_bos=False)) == texts


def test_a_single_token_is_one_or_refused() -> None:
    model = hooked()
    assert model.to_string(model.to_single_token(" cat")) == " cat"
    with pytest.raises(ValueError, match=re.escape("'The cat' must be a single token, got 2")):
        model.to_single_token("The cat")
    with pytest.raises(Exception, match=r"one prompt is required, got 2|Type-check"):
        model.to_str_tokens(torch.tensor([[1, 2], [3, 4]]))


# --- calling ------------------------------------------------------------------------------------------------------


def test_a_call_gives_logits_loss_or_both() -> None:
    model = hooked()
    tokens = model.to_tokens(LINE)
    logits, loss = model(LINE, return_type="both")
    assert_close(logits, model.transformer(tokens))
    per_token = -logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
    assert_close(loss, per_token.mean())
    assert_close(model(LINE, return_type="loss", loss_per_token=True), per_token)
    assert_close(model(tokens, return_type="loss"), loss)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
def test_texts_of_different_lengths_give_the_numbers_of_each_alone(name: str, side: str) -> None:
    model, texts = hooked(name), ["The cat", LINE]
    batch = model.to_batch(texts, padding_side=side)
    assert batch.keep is not None
    logits = model(texts, padding_side=side)
    losses = model(texts, padding_side=side, return_type="loss", loss_per_token=True)
    for row, text in enumerate(texts):
        assert_close(logits[row][batch.keep[row]], model(text)[0])
        assert_close(losses[row].sum(), model(text, return_type="loss", loss_per_token=True).sum())


def test_a_return_type_of_another_name_is_refused() -> None:
    with pytest.raises(Exception, match=r"return_type must be logits, loss or both|return_type"):
        hooked()(LINE, return_type="probs")


# --- run_with_cache -----------------------------------------------------------------------------------------------


def test_everything_is_cached_by_default_and_changes_nothing() -> None:
    model = hooked()
    logits, cache = model.run_with_cache(LINE)
    assert_close(logits, model(LINE))
    assert set(cache) == set(sites.names(model.cfg))
    assert "blocks.0.attn.hook_result" not in cache


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (POST, [POST]),
        ("blocks.0.attn.hook_result", ["blocks.0.attn.hook_result"]),
        ([PATTERN, "blocks.*.hook_resid_post"], [PATTERN, POST, "blocks.1.hook_resid_post"]),
        ("blocks.*.hook_resid_post", [POST, "blocks.1.hook_resid_post"]),
        ("blocks.[1-9].hook_resid_post", ["blocks.1.hook_resid_post"]),
        (
            re.compile(r"blocks\.\d+\.attn\.hook_[qk]"),
            [f"blocks.{i}.attn.hook_{p}" for i in (0, 1) for p in "qk"],
        ),
        (lambda name: name.endswith("pattern"), [PATTERN, "blocks.1.attn.hook_pattern"]),
        (lambda name: "hook_result" in name, [f"blocks.{i}.attn.hook_result" for i in (0, 1)]),
        ([POST, POST], [POST]),
    ],
    ids=[
        "name",
        "on-demand",
        "list",
        "glob",
        "glob-set",
        "regex",
        "predicate",
        "predicate-on-demand",
        "twice",
    ],
)
def test_names_select_sites(names: object, found: list[str]) -> None:
    _, cache = hooked().run_with_cache(LINE, names)
    assert sorted(cache) == sorted(found)
    _, whole = hooked().run_with_cache(LINE)
    for name in found:
        if name in whole:
            assert_close(cache[name], whole[name])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            "blocks.0.hook_resid_pos",
            "unknown site 'blocks.0.hook_resid_pos'; nearest: blocks.0.hook_resid_post",
        ),
        ("blocks.*.hook_resid_pots", "'blocks.*.hook_resid_pots' matches no site of this model; nearest: "),
        ("blocks.7.hook_resid_post", "layers are 0 to 1 in this model, got 7"),
        (re.compile("hook_resid_post"), "matches no site of this model; sites are named like "),
        (lambda name: False, "matches no site of this model"),
        ([POST, "blocks.0.nothing*"], "'blocks.0.nothing*' matches no site"),
    ],
)
def test_names_that_select_nothing_are_refused(names: object, message: str) -> None:
    with pytest.raises(KeyError, match=re.escape(message)):
        hooked().run_with_cache(LINE, names)


def test_a_pass_can_stop_early() -> None:
    model = hooked()
    resid, cache = model.run_with_cache(LINE, stop_at_layer=1)
    _, whole = model.run_with_cache(LINE)
    assert_close(resid, whole["blocks.1.hook_resid_pre"])
    assert not [name for name in cache if name.startswith(("blocks.1.", "ln_final"))]
    assert {n for n in whole if n.startswith(("blocks.0.", "hook_"))} == set(cache)
    for name, value in cache.items():
        assert_close(value, whole[name])
    with pytest.raises(Exception, match=r"blocks.1.hook_resid_post.*would never run|matches no site"):
        model.run_with_cache(LINE, "blocks.1.hook_resid_post", stop_at_layer=1)


@pytest.mark.parametrize("where", [0, 3, -1, slice(2, 5), slice(-3, None)])
def test_positions_are_kept_on_every_axis_that_counts_queries(where: int | slice) -> None:
    """Keys of scores and patterns stay whole: the last query still shows all that it looks at."""
    model = hooked("llama-gqa")
    logits, cache = model.run_with_cache(LINE, pos_slice=where)
    assert_close(logits, model(LINE))
    _, whole = model.run_with_cache(LINE)
    assert set(cache) == set(whole)
    for name, value in whole.items():
        axis = 2 if sites.find(name, model.cfg)[0].axes == "b h q k" else 1
        expected = value.transpose(0, axis)[where]
        expected = (expected[None] if isinstance(where, int) else expected).transpose(0, axis)
        assert_close(cache[name], expected)


@pytest.mark.parametrize("where", [99, -99, slice(50, 60)])
def test_positions_that_are_not_there_are_refused(where: int | slice) -> None:
    with pytest.raises(Exception, match=r"pos_slice .* keeps none of the \d+ positions"):
        hooked().run_with_cache(LINE, POST, pos_slice=where)


def test_the_cache_can_be_moved_and_carries_no_graph() -> None:
    _, cache = hooked().run_with_cache(LINE, POST, device="meta")
    assert cache[POST].device.type == "meta"
    _, cache = hooked().run_with_cache(LINE)
    assert not any(value.requires_grad for value in cache.values())


# --- weights ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_weight_stacks_have_their_shapes_and_are_the_parameters(name: str) -> None:
    model, c = hooked(name), CONFIGS[name]
    n_layers, h, g, d, e = c.n_layers, c.n_heads, c.kv_heads, c.d_model, c.head_width
    shapes = {"W_Q": (h, d, e), "W_K": (g, d, e), "W_V": (g, d, e), "W_O": (h, e, d),
              "b_Q": (h, e), "b_K": (g, e), "b_V": (g, e), "b_O": (d,)}  # fmt: skip
    if isinstance(c.mlp, MLP):
        shapes |= {"W_in": (d, c.mlp.d_mlp), "W_out": (c.mlp.d_mlp, d), "b_in": (c.mlp.d_mlp,), "b_out": (d,)}
    for weight, shape in shapes.items():
        assert getattr(model, weight).shape == (n_layers, *shape), weight
    _, cache = model.run_with_cache(LINE)
    bare = not c.norms_input  # attention reads the stream as it is
    x = cache["blocks.1.hook_resid_pre"]
    x = x if bare else cache.get("blocks.1.ln1.hook_normalized", x)
    for part, sub in {"q": "Q", "k": "K", "v": "V"}.items():
        weight, bias = getattr(model, f"W_{sub}")[1], getattr(model, f"b_{sub}")[1]
        assert_close(cache[part, 1], torch.einsum("bpd,hde->bphe", x, weight) + bias)
    written = torch.einsum("bphe,hed->bphd", cache["z", 1], model.W_O[1])
    _, results = model.run_with_cache(LINE, "blocks.1.attn.hook_result")
    assert_close(results["result", 1], written)
    if not c.norms_output:
        assert_close(cache["attn_out", 1], (written.sum(2) + model.b_O[1]) * c.residual_scale)
    assert_close(model.W_E, model.transformer.embed.weight)
    assert_close(model.W_U, model.transformer.unembed.weight.mT)
    if isinstance(c.mlp, MLP) and not c.norms_output:
        out = cache["post", 1] @ model.W_out[1] + model.b_out[1]
        assert_close(cache["mlp_out", 1], out / 2 * c.residual_scale if "mlp_before" in c.mlps else out)


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "mqa", "attention-only"])
def test_circuits_are_the_dense_products_with_key_value_heads_repeated(name: str) -> None:
    model, c = hooked(name), CONFIGS[name]
    assert model.OV.shape == model.QK.shape == (2, c.n_heads, c.d_model, c.d_model)
    for layer in range(2):
        for head in range(c.n_heads):
            group = head * c.kv_heads // c.n_heads
            assert_close(model.OV[layer, head].AB, model.W_V[layer, group] @ model.W_O[layer, head])
            assert_close(model.QK[layer, head].AB, model.W_Q[layer, head] @ model.W_K[layer, group].T)


def test_unknown_attribute_names_the_nearest_and_a_missing_weight_why() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'run_with_cach'; nearest: run_with_cache"):
        hooked().run_with_cach  # noqa: B018
    with pytest.raises(AttributeError, match="no W_gate: mlp=MLP"):
        hooked().W_gate  # noqa: B018
    with pytest.raises(AttributeError, match="no W_in: mlp=None"):
        hooked("attention-only").W_in  # noqa: B018
    with pytest.raises(AttributeError, match="no W_in: mlp=MoE"):
        hooked("gpt-oss").W_in  # noqa: B018


# --- generating ---------------------------------------------------------------------------------------------------


def test_generation_continues_texts_and_gives_them_back() -> None:
    model, texts = hooked(), ["The cat", "When Mary and John"]
    batch = model.generate(texts, 5, stop_at_eos=False)
    again = model.to_texts(batch)
    for text, got in zip(texts, again, strict=True):
        assert got.startswith(text)
        alone = model.to_texts(model.generate(text, 5, stop_at_eos=False))[0]
        assert got == alone
    assert (
        model.generate(texts, 5, stop_at_eos=False, sampling=Sampling(seed=0)).tokens.shape
        == batch.tokens.shape
    )


def test_generation_stops_at_the_tokenizers_end_of_text() -> None:
    model = hooked()

    def end_now(value: Tensor, hook: HookPoint) -> None:
        value[..., 0] = 1e6

    with model.hooks([("unembed.hook_out", end_now)]):
        n = model.to_tokens(LINE).shape[1]
        assert model.generate(LINE, 3).tokens.shape == (1, n + 1)
        assert model.generate(LINE, 3, stop_at_eos=False).tokens.shape == (1, n + 3)


def ended(model: HookedTransformer, stop: Stop, **options: object) -> list[str]:
    """The new text of two prompts, by `generate`; `stream` gives the same of each by itself."""
    prompts = ["The cat", "When Mary and John"]
    batch = model.generate(prompts, 12, stop=stop, stop_at_eos=False, **options)
    found = [text.removeprefix(prompt) for text, prompt in zip(model.to_texts(batch), prompts, strict=True)]
    for prompt, text in zip(prompts, found, strict=True):
        assert "".join(model.stream(prompt, 12, stop=stop, stop_at_eos=False, **options)) == text
    return found


def test_generation_ends_where_the_new_text_contains_a_string_or_a_function_says_so() -> None:
    """A string may begin inside of a token and end inside of another; what stands in the prompt ends nothing."""
    model = HookedTransformer.from_pretrained("demo-4l")
    free = ended(model, ())
    pieces = [[*model.stream(prompt, 12, stop_at_eos=False)] for prompt in ("The cat", "When Mary and John")]
    assert all(len(row) > 6 for row in pieces), "the model must say something to cut"
    across = pieces[0][2][-1] + pieces[0][3][0]

    def cut(says: Callable[[str], bool]) -> list[str]:
        """The shortest beginning of each row, token by token, of which a function says that it is the end."""
        beginnings = [list(accumulate(row)) for row in pieces]
        return [next((text for text in row if says(text)), row[-1]) for row in beginnings]

    assert cut(lambda text: False) == free
    assert ended(model, across) == cut(lambda text: across in text)
    assert ended(model, lambda text: len(text) > 9) == cut(lambda text: len(text) > 9)
    both = cut(lambda text: across in text or len(text) > 9)
    assert ended(model, [across, lambda text: len(text) > 9]) == both
    (token,) = model.to_tokens(pieces[1][4], prepend_bos=False)[0, :1].tolist()
    assert ended(model, [token, across])[1] == "".join(pieces[1][: pieces[1].index(pieces[1][4]) + 1])
    assert ended(model, "The cat")[0] == free[0]
    with pytest.raises(ValueError, match="at least one character, got '' among them"):
        model.generate("The cat", stop=["a", ""])


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit the context of 24"):
        hooked().generate(LINE, 24)


# --- loading by name ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["demo-41", "dem-4l", "demo4l"])
def test_an_unknown_model_names_the_nearest_demo(name: str) -> None:
    with pytest.raises(
        ValueError,
        match=rf"^the hub cannot be reached \(HF_HUB_OFFLINE is set\), and '{name}' is not in the local cache; it is "
        r"no folder and no demo model either; demo models: .*nearest: demo-4l",
    ):
        HookedTransformer.from_pretrained(name)


def test_a_hand_built_demo_loads_by_name_and_has_no_revisions() -> None:
    model = HookedTransformer.from_pretrained("groundtruth-induction")
    assert repr(model).startswith("HookedTransformer('groundtruth-induction': 2 layers, 4 heads, d_model 256")
    assert model.to_str_tokens("ab") == ["<|bos|>", "a", "b"]
    with pytest.raises(ValueError, match="built from code and has no revision 'step1'"):
        HookedTransformer.from_pretrained("groundtruth-induction", revision="step1")


def test_a_demo_can_be_spread_over_devices() -> None:
    model = HookedTransformer.from_pretrained("groundtruth-induction", devices=["cpu", "meta"])
    assert [model.transformer.block(i).attn.out.weight.device.type for i in (0, 1)] == ["cpu", "meta"]


def test_a_bridge_is_shown_its_own_door() -> None:
    bridge = torch.nn.Module()
    bridge.original_model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"interp\.compat\.from_bridge"):
        HookedTransformer.from_pretrained(bridge)


def test_every_public_name_exists() -> None:
    assert all(hasattr(interp, name) for name in interp.HOMES)
    assert len(set(interp.HOMES)) == len(interp.HOMES)


def test_the_dtype_can_be_changed_and_weights_follow() -> None:
    model = HookedTransformer.from_pretrained("groundtruth-induction")
    assert model.to(torch.float64) is model
    assert model.W_Q.dtype == model("ab").dtype == torch.float64


def test_a_model_without_a_tokenizer_says_so_when_it_is_printed() -> None:
    said = "this model has no tokenizer: pass token ids, or give a tokenizer: from_pretrained("
    assert said in " ".join(str(HookedTransformer(hooked().transformer)).split())
    assert "no tokenizer" not in str(hooked())


def test_whether_texts_begin_with_bos_is_said_of_the_model_or_of_some_data() -> None:
    plain = HookedTransformer.from_pretrained("demo-4l")
    model = HookedTransformer.from_pretrained("demo-4l", default_prepend_bos=False)
    text, other = "When Mary and John went", "When John and Mary went"
    with_bos, bare = plain.to_tokens(text), plain.to_tokens(text, prepend_bos=False)
    assert with_bos.shape[1] == bare.shape[1] + 1 and torch.equal(with_bos[:, 1:], bare)
    assert torch.equal(model.to_tokens(text), bare)
    assert torch.equal(model.to_tokens(text, prepend_bos=True), with_bos)
    assert torch.equal(model(text), plain(bare)) and torch.equal(model(with_bos), plain(text)), (
        "ids are taken as they are"
    )
    assert torch.equal(pickle.loads(pickle.dumps(model.text)).batch(text).tokens, bare)
    lens = interp.logit_lens(plain, bare)
    assert interp.logit_lens(model, text).kl.equals(lens.kl)
    assert interp.logit_lens(plain, plain.to_batch(text, prepend_bos=False)).kl.equals(lens.kl)
    rows = interp.Stream(interp.data.open_source([text]), plain.text, tokens_per_batch=64, prepend_bos=False)
    assert interp.logit_lens(plain, rows).kl.equals(lens.kl)
    metric = interp.logit_difference(" Mary", " John")
    of_ids = interp.patch(plain, bare, plain.to_tokens(other, prepend_bos=False), "z", metric=metric)
    assert interp.patch(model, text, other, "z", metric=metric).value.equals(of_ids.value)
    pairs = interp.data.Pairs([text], [other], prepend_bos=False)
    of_pairs = interp.run([interp.causal.Patch("z", metric=metric)], plain, pairs)["patch"]
    assert of_pairs.value.equals(of_ids.value)


def test_a_device_that_is_not_here_is_refused_by_name_before_anything_moves() -> None:
    model = hooked()
    for refused in (
        lambda: model.to("privateuseone"),
        lambda: model.run_with_cache(LINE, POST, device="privateuseone"),
        lambda: model.run_with_cache(LINE, POST)[1].to("privateuseone"),
        lambda: interp.run([interp.lenses.LogitLens(top=2)], model, [LINE], devices=["privateuseone"]),
        lambda: HookedTransformer.from_pretrained("groundtruth-induction", device="privateuseone"),
    ):
        with pytest.raises(ValueError, match="privateuseone is not possible here"):
            refused()
    with pytest.raises(ValueError, match=r"got 'cpu:7' .*: there is one cpu"):
        model.to("cpu:7")
    with pytest.raises(ValueError, match="device must be one that holds numbers, got meta"):
        interp.run([interp.lenses.LogitLens(top=2)], model, [LINE], devices=["meta"])
    with pytest.raises(ValueError, match=r"target must be a device .* or a torch dtype, got torch.int64"):
        model.to(torch.int64)


@pytest.mark.parametrize("kind", ["meta", "double"])
def test_a_model_without_numbers_or_of_two_dtypes_is_refused_by_name(kind: str) -> None:
    model = HookedTransformer(copy.deepcopy(hooked().transformer), hooked().text.tokenizer)
    model.to(torch.float32)
    if kind == "meta":
        model.transformer.to("meta")
    else:
        model.transformer.block(1).double()
    match = (
        "model must hold its numbers, got embed.weight on the device meta"
        if kind == "meta"
        else r"model must be of one dtype, got blocks.1\.\S+ of torch.float64 where the embedding is of torch.float32"
    )
    for asked in (
        lambda: model(LINE),
        lambda: model.run_with_cache(LINE),
        lambda: model.generate(LINE, 2),
        lambda: next(model.stream(LINE, 2)),
        lambda: model.verify(),
        lambda: interp.heads(model),
        lambda: interp.copying(model),
        lambda: interp.composition(model, "K"),
        lambda: interp.logit_lens(model, LINE),
    ):
        with pytest.raises(ValueError, match=match):
            asked()


# --- what ends a text, and what torch is set to ---------------------------------------------------------------------


def test_a_stop_function_and_a_filter_of_names_must_say_true_or_false() -> None:
    model = hooked()
    for answer in (torch.tensor([True, False]), "no", 1):
        with pytest.raises(
            ValueError, match="stop: a function of the new text must return True or False, got"
        ):
            model.generate(LINE, 2, stop=lambda text, answer=answer: answer)
        with pytest.raises(
            ValueError, match="names_filter: a function of a site's name must return True or False"
        ):
            model.run_with_cache(LINE, names_filter=lambda name, answer=answer: answer)
    found = model.run_with_cache(LINE, names_filter=lambda name: re.search("hook_z$", name))[1]
    assert set(found) == {"blocks.0.attn.hook_z", "blocks.1.attn.hook_z"}, "a match is a yes, None a no"
    with pytest.raises(ValueError, match="stop must be texts, token ids or functions of the new text"):
        model.generate(LINE, 2, stop={"a": None})


def test_generation_under_autocast_says_so_and_a_plain_pass_does_not() -> None:
    model = hooked()
    interp.core.notes.note.cache_clear()
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.warns(interp.Note, match=r"generated under autocast\(bfloat16\)"):
            model.generate(LINE, 2)
        interp.core.notes.note.cache_clear()
        with pytest.warns(interp.Note, match=r"generated under autocast\(bfloat16\)"):
            list(model.stream(LINE, 2))
        interp.core.notes.note.cache_clear()
        with warnings.catch_warnings():
            warnings.simplefilter("error", interp.Note)
            model(LINE)
            model.run_with_cache(LINE)


def test_no_default_device_of_torch_changes_a_plain_pass_that_draws_and_edits() -> None:
    """On meta tensors, which hold no numbers, any tensor of ours without a device of its own would fail."""
    model, texts, draws = hooked(), ["The cat", LINE], Sampling(seed=3)
    edits = [
        interp.Edit("L0.resid", interp.edits.Scale(0.5), {"pos": interp.edits.PerRow([1, 2])}),
        interp.Edit("L0.mlp", interp.edits.Scale(0.5), {"pos": (0, 1)}, rows=(1,)),
        interp.Edit("L0.attn", interp.edits.Zero(), {"pos": "new"}),
    ]

    def answers() -> list[object]:
        edited = model.edited(interp.Edit("L0.mlp", interp.edits.Zero(), {"pos": (0, -1)}))
        with_edits = edited.run_with_cache(texts, names_filter=POST)[1][POST]
        made = model.generate(texts, 4, sampling=draws, stop_at_eos=False, edits=edits)
        return [with_edits.tolist(), made.tokens.tolist(), list(model.stream(LINE, 4, sampling=draws))]

    plain = answers()
    with torch.device("meta"):
        assert answers() == plain


def test_a_template_or_a_revision_that_nothing_takes_is_refused() -> None:
    template = "{{ messages }}"
    with pytest.raises(ValueError, match="demo-attn-2l, of this package, has no tokenizer of transformers"):
        HookedTransformer.from_pretrained("demo-attn-2l", chat_template=template)
    live = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20))
    with pytest.raises(ValueError, match="a live model has no tokenizer of transformers"):
        HookedTransformer.from_pretrained(live, chat_template=template)
    with pytest.raises(ValueError, match="no revision, got 'step3'"):
        HookedTransformer.from_pretrained(live, revision="step3")


def test_rows_of_several_continuations_keep_them_apart() -> None:
    """Each continuation's logits are those of the prompt followed by it alone."""
    model = hooked()
    tokens = model.to_tokens("The cat sat on")
    new = torch.tensor([[5, 6, 9]])
    batch = Batch(tokens).followed_by(new, torch.tensor([[1, 1, 2]]))
    found, n = model(batch), tokens.shape[1]
    assert_close(found[:, : n + 2], model(torch.cat((tokens, new[:, :2]), 1)))
    assert_close(found[:, -1], model(torch.cat((tokens, new[:, 2:]), 1))[:, -1])
    with pytest.raises(ValueError, match="give each continuation a row of its own"):
        model(batch, return_type="loss")
