"""Encoder-decoders as users hold them: texts in, logits, losses, caches and translations out, all Hugging Face's."""

import functools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, processors
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from interp import HookedEncoderDecoder, HookedTransformer
from interp.core.viewer import fitted
from interp.data.batch import Batch
from interp.dynamics import Langevin, learning_coefficient
from interp.editing import FineTuning, reinforce_z
from interp.edits import Edit, Scale
from interp.families.tokenizer import HuggingFaceTokenizer
from interp.lenses import train_tuned_lens
from interp.model import EncoderDecoder, EncoderDecoderConfig, build, sites
from interp.model.loss import mean_next_token_loss
from interp.model.tap import Tap
from interp.passes.generate import encoded, generate
from interp.passes.observe import Hook, observe
from interp.passes.sampling import Sampling
from interp.tasks.examples import Examples
from interp.verify import Contract
from tests.families.cases_others import CASES
from tests.families.oracle import SPREAD, hf_model
from tests.tiny import CORPUS, END, backend
from tests.tolerances import assert_close

EOS, PAD = 0, backend().get_vocab_size()
"""The end of every source; and padding, which is also the start token, as in T5 and Marian."""
SOURCES = ["The cat sat", CORPUS[1], "John"]
TARGETS = [CORPUS[2], "Paris", "The dog and the cat"]
BOTH = pytest.mark.parametrize("name", ["t5", "bart"])
CROSSED = "blocks.0.cross_attn.hook_pattern"
FINAL = "blocks.1.hook_resid_post"


# --- a model that speaks, and Hugging Face's of which it was made ---------------------------------------------------


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """It ends every text as T5's does."""
    ending = Tokenizer.from_str(backend().to_str())
    ending.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, EOS)])
    found = PreTrainedTokenizerFast(tokenizer_object=ending, eos_token=END, pad_token="<pad>")
    assert found.pad_token_id == PAD
    return found


@functools.cache
def theirs(name: str) -> PreTrainedModel:
    """Perturbed, so that attention is far from uniform; shared, so never write to it."""
    options = {"vocab_size": PAD + 1, "pad_token_id": PAD, "decoder_start_token_id": PAD, "eos_token_id": EOS}
    case = CASES[name].but(**options)
    torch.manual_seed(0)
    model = case.model_class(case.config()).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += SPREAD * torch.randn(parameter.shape, dtype=torch.float64)
    return model.float()


@functools.cache
def ours(name: str) -> HookedEncoderDecoder:
    return HookedEncoderDecoder.from_pretrained(theirs(name), tokenizer=tokenizer())


def inputs() -> dict[str, Tensor]:
    """The sources as their tokenizer gives them, and the targets behind the start token."""
    source = tokenizer()(SOURCES, padding=True, return_tensors="pt")
    rows = [[PAD, *tokenizer().encode(text, add_special_tokens=False)] for text in TARGETS]
    width = max(map(len, rows))
    target = torch.tensor([row + [PAD] * (width - len(row)) for row in rows])
    keep = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return {
        "input_ids": source["input_ids"], "attention_mask": source["attention_mask"],
        "decoder_input_ids": target, "decoder_attention_mask": keep,
    }  # fmt: skip


def close(actual: Tensor, expected: Tensor) -> None:
    """In float32, relative to the largest value: T5 does not scale its scores."""
    assert float((actual - expected).abs().max() / expected.abs().max()) <= 1e-4


# --- text -----------------------------------------------------------------------------------------------------------


def test_a_source_carries_the_special_tokens_that_its_tokenizer_adds() -> None:
    batch, wanted = ours("t5").to_source(SOURCES), inputs()
    assert torch.equal(batch.tokens, wanted["input_ids"])
    assert batch.keep is not None and torch.equal(batch.keep.long(), wanted["attention_mask"])
    assert all(row[keep][-1] == EOS for row, keep in zip(batch.tokens, batch.keep, strict=True))
    left = ours("t5").to_source(SOURCES, padding_side="left")
    assert left.keep is not None and bool(left.keep[:, -1].all())
    assert torch.equal(left.tokens[left.keep], batch.tokens[batch.keep])


def test_target_begins_with_the_start_token_as_its_only_special_token() -> None:
    batch, wanted = ours("t5").to_target(TARGETS), inputs()
    assert torch.equal(batch.tokens, wanted["decoder_input_ids"])
    assert batch.keep is not None and torch.equal(batch.keep.long(), wanted["decoder_attention_mask"])
    assert ours("t5").to_target("Paris").tokens.tolist() == [[PAD, *backend().encode("Paris").ids]]


def test_ids_and_batches_stay_as_they_are() -> None:
    model, ids = ours("t5"), torch.tensor([[PAD, 5, 6]])
    assert torch.equal(model.to_target(ids).tokens, ids)
    assert torch.equal(model.to_source(ids[0]).tokens, ids)
    batch = Batch(ids)
    assert model.to_target(batch).tokens is ids
    assert model.to_source(batch).tokens is ids


def test_targets_come_back_as_the_texts_they_were() -> None:
    assert ours("t5").to_texts(ours("t5").to_target(TARGETS)) == TARGETS
    assert ours("t5").to_texts(ours("t5").to_target("Paris")) == ["Paris"]


# --- passes ---------------------------------------------------------------------------------------------------------


@BOTH
def test_logits_of_padded_texts_equal_hugging_faces(name: str) -> None:
    given = inputs()
    with torch.no_grad():
        wanted = theirs(name)(**given).logits
    keep = given["decoder_attention_mask"].bool()
    assert wanted[keep].std() > 0.1
    close(ours(name)(SOURCES, TARGETS)[keep], wanted[keep])
    ids = ours(name)(Batch(given["input_ids"], given["attention_mask"].bool()), given["decoder_input_ids"])
    close(ids[keep], wanted[keep])


@BOTH
def test_the_loss_equals_hugging_faces_with_the_same_labels(name: str) -> None:
    given = inputs()
    target, keep = given.pop("decoder_input_ids"), given.pop("decoder_attention_mask").bool()
    labels = target[:, 1:].masked_fill(~keep[:, 1:], -100)
    with torch.no_grad():
        wanted = theirs(name)(**given, labels=labels).loss
    close(ours(name).loss(SOURCES, TARGETS), wanted)


# --- run_with_cache -------------------------------------------------------------------------------------------------


@BOTH
def test_the_cache_of_each_side_holds_hugging_faces_states_and_patterns(name: str) -> None:
    given = inputs()
    with torch.no_grad():
        out = theirs(name)(**given, output_hidden_states=True, output_attentions=True)
    logits, cache = ours(name).run_with_cache(SOURCES, TARGETS)
    rows = {"encoder": given["attention_mask"].bool(), "decoder": given["decoder_attention_mask"].bool()}
    for side, keep in rows.items():
        for layer, state in enumerate(getattr(out, f"{side}_hidden_states")[:-1]):
            close(cache[side][f"blocks.{layer}.hook_resid_pre"][keep], state[keep])
    for layer, pattern in enumerate(out.cross_attentions):
        found = cache["decoder"][f"blocks.{layer}.cross_attn.hook_pattern"]
        close(found.transpose(1, 2)[rows["decoder"]], pattern.transpose(1, 2)[rows["decoder"]])
    close(logits, ours(name)(SOURCES, TARGETS))


@BOTH
def test_everything_of_both_sides_is_cached_by_default_and_its_parts_sum(name: str) -> None:
    _, cache = ours(name).run_with_cache(SOURCES, TARGETS)
    config = ours(name).model.config
    assert {side: set(found) for side, found in cache.items()} == {
        "encoder": set(sites.names(config.encoder)), "decoder": set(sites.names(config.decoder)),
    }  # fmt: skip
    for side, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        parts = cache[side].decompose_resid()
        assert parts.complete
        assert_close(parts.values.sum(0), cache[side][sites.final_stream(stack)])


@pytest.mark.parametrize(
    ("names", "encoder", "decoder"),
    [
        ("blocks.0.hook_resid_pre", ["blocks.0.hook_resid_pre"], ["blocks.0.hook_resid_pre"]),
        (CROSSED, [], [CROSSED]),
        (
            "blocks.0.*attn.hook_pattern",
            ["blocks.0.attn.hook_pattern"],
            ["blocks.0.attn.hook_pattern", CROSSED],
        ),
        ("blocks.2.hook_resid_pre", [], ["blocks.2.hook_resid_pre"]),
        (
            re.compile(r".*cross_attn\.hook_result"),
            [],
            [f"blocks.{i}.cross_attn.hook_result" for i in range(3)],
        ),
        (lambda name: name == FINAL, [FINAL], [FINAL]),
        ([CROSSED, "hook_embed"], ["hook_embed"], [CROSSED, "hook_embed"]),
        ((), [], []),
    ],
    ids=["both", "decoder", "glob", "deeper-decoder", "on-demand", "predicate", "list", "nothing"],
)
def test_names_select_sites_on_the_sides_that_have_them(
    names: object, encoder: list[str], decoder: list[str]
) -> None:
    _, cache = ours("t5").run_with_cache("The cat", "Paris", names)
    assert {side: sorted(found) for side, found in cache.items()} == {
        "encoder": sorted(encoder), "decoder": sorted(decoder),
    }  # fmt: skip


def deep_encoder() -> HookedEncoderDecoder:
    """Three layers over two, with two vocabularies, the target's the larger one."""
    config = ours("bart").model.config
    encoder = replace(config.encoder, n_layers=3, d_vocab=17, n_ctx=9)
    pair = EncoderDecoderConfig(
        encoder,
        replace(config.decoder, n_layers=2, d_vocab=40, n_ctx=24),
        start_token=2,
        shared_embedding=False,
    )
    made = build(pair)
    assert isinstance(made, EncoderDecoder)
    return HookedEncoderDecoder(made.eval().requires_grad_(False))


def test_site_of_the_encoder_alone_can_be_named_where_it_is_deeper() -> None:
    ids = torch.tensor([[2, 3]])
    for names in ("blocks.2.hook_resid_pre", ["blocks.2.hook_resid_pre"]):
        _, cache = deep_encoder().run_with_cache(ids, ids, names)
        assert {side: list(found) for side, found in cache.items()} == {
            "encoder": ["blocks.2.hook_resid_pre"], "decoder": [],
        }  # fmt: skip


def test_target_is_checked_against_the_decoder_and_source_the_encoder() -> None:
    model = deep_encoder()
    source, target = torch.tensor([[3, 16]]), torch.tensor([[2, *range(17, 40)]])
    assert_close(model(source, target), model.model(source, target))
    with pytest.raises(ValueError, match=re.escape("must be in [0, 16], got 17")):
        model(torch.tensor([[17]]), target)
    with pytest.raises(ValueError, match=re.escape("must be in [0, 39], got 40")):
        model(source, torch.tensor([[40]]))
    with pytest.raises(ValueError, match=r"10 tokens, the model's context holds 9"):
        model(torch.ones(1, 10, dtype=torch.long), target)
    with pytest.raises(ValueError, match=r"context holds 24"):
        model(source, torch.ones(1, 25, dtype=torch.long))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("blocks.0.cross_attn.hook_patern", "nearest: blocks.0.cross_attn.hook_pattern"),
        ("blocks.7.hook_resid_post", "layers are 0 to 2 in this model, got 7"),
        ("decoder.blocks.0.hook_resid_post", "blocks.0.hook_resid_post"),
        ("*.hook_nothing", "matches no site of this model"),
        ([CROSSED, "blocks.0.hook_nothing"], "unknown site 'blocks.0.hook_nothing'"),
    ],
)  # fmt: skip
def test_a_name_that_neither_side_has_is_refused_with_the_nearest(names: object, message: str) -> None:
    with pytest.raises(KeyError, match=re.escape(message)):
        ours("t5").run_with_cache("The cat", "Paris", names)


def test_what_takes_a_transformer_takes_the_decoder_and_what_it_was_given() -> None:
    model = ours("bart")
    seen = observe(model.model.decoder, model.given(SOURCES, TARGETS))
    keep = inputs()["decoder_attention_mask"].bool()
    close(seen.output[keep], model(SOURCES, TARGETS)[keep])


# --- generation -----------------------------------------------------------------------------------------------------


def test_what_trains_or_samples_keeps_the_source_of_the_rows() -> None:
    """Generated rows are read with their source; a loss of rows with another source is another one."""
    pair = ours("t5")
    decoder, given = HookedTransformer(pair.model.decoder), pair.given(SOURCES, TARGETS)
    other = pair.given(["The dog", CORPUS[1], "Mary"], TARGETS)
    written = decoder.generate(given, 2)
    assert torch.equal(written.memory.states, given.memory.states)
    assert decoder(written).shape[1] == given.tokens.shape[1] + 2
    z, rewards = reinforce_z(
        decoder, given, lambda new: new.sum(1).float(), ["blocks.0.mlp.W_out"], tuning=FineTuning(steps=1)
    )
    assert len(z) == len(rewards) == 1
    short = Langevin(chains=1, steps=2, burn_in=0)  # the first draw is the model itself, at a loss of 0
    sampled = [
        float(learning_coefficient(decoder, Examples(rows), short).loss[0, 1]) for rows in (given, other)
    ]
    trained = [train_tuned_lens(decoder, rows, steps=1).losses for rows in (given, other)]
    assert abs(sampled[0] - sampled[1]) > 1e-2 and not torch.equal(trained[0], trained[1])


@BOTH
def test_generated_tokens_are_hugging_faces(name: str) -> None:
    given = {key: inputs()[key] for key in ("input_ids", "attention_mask")}
    wanted = theirs(name).generate(
        **given, max_new_tokens=8, do_sample=False, num_beams=1, eos_token_id=EOS, pad_token_id=PAD,
        decoder_start_token_id=PAD, use_cache=False,
    )  # fmt: skip
    found = ours(name).generate(SOURCES, 8)
    for row, expected in enumerate(wanted.tolist()):
        end = expected.index(EOS) + 1 if EOS in expected else len(expected)
        tokens = found.tokens[row] if found.keep is None else found.tokens[row][found.keep[row]]
        assert tokens.tolist() == expected[:end]
    assert len({tuple(row) for row in wanted.tolist()}) > 1, "sources make a difference"


def test_generation_stops_where_told_and_its_text_has_no_start_token() -> None:
    model = ours("bart")
    free = model.generate("The cat", 6, stop_tokens=())
    ids = free.tokens[0].tolist()
    assert ids[0] == PAD and len(ids) == 7
    stopped = model.generate("The cat", 6, stop_tokens=[ids[2]])
    assert stopped.tokens[0].tolist() == ids[: ids.index(ids[2], 1) + 1]
    assert model.to_texts(free) == [tokenizer().decode(ids[1:])]


def test_the_tokenizers_end_of_text_ends_a_row_unless_told_otherwise() -> None:
    """Whichever token it is: here the second one that the model would say."""
    ids = ours("bart").generate("The cat", 6, stop_tokens=()).tokens[0].tolist()
    ending = HuggingFaceTokenizer(tokenizer())
    ending.eos_id = ids[2]
    model = HookedEncoderDecoder(ours("bart").model, ending)
    assert model.generate("The cat", 6).tokens[0].tolist() == ids[: ids.index(ids[2], 1) + 1]
    assert model.generate("The cat", 6, stop_tokens=()).tokens[0].tolist() == ids


# --- loading --------------------------------------------------------------------------------------------------------


@BOTH
def test_a_folder_with_its_tokenizer_is_the_live_model(name: str, tmp_path: Path) -> None:
    theirs(name).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    for source in (tmp_path, str(tmp_path), tmp_path / "model.safetensors"):
        model = HookedEncoderDecoder.from_pretrained(source)
        assert torch.equal(model(SOURCES, TARGETS), ours(name)(SOURCES, TARGETS))
        assert model.name == str(source)


def test_dtype_and_tokenizer_can_be_chosen() -> None:
    adapted = HuggingFaceTokenizer(tokenizer())
    model = HookedEncoderDecoder.from_pretrained(theirs("t5"), tokenizer=adapted, dtype=torch.float64)
    assert model.model.dtype == model("The cat", "Paris").dtype == torch.float64
    assert model.text.tokenizer is adapted


def test_one_stack_of_layers_is_sent_to_the_other_door_and_back(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel is one stack .* interp\.HookedTransformer"):
        HookedEncoderDecoder.from_pretrained(hf_model("gpt2"))
    hf_model("gpt2").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is one stack of layers: use interp\.HookedTransformer"):
        HookedEncoderDecoder.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"encoder-decoder"):
        HookedTransformer.from_pretrained(theirs("t5"))


def test_what_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        HookedEncoderDecoder.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"config\.json is required beside the weights"):
        HookedEncoderDecoder.from_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"'demo-4l' is not in the local cache.*no encoder-decoder is embedded"
    ):
        HookedEncoderDecoder.from_pretrained("demo-4l")


def test_a_model_without_a_tokenizer_takes_ids_and_says_so_when_given_text() -> None:
    model = HookedEncoderDecoder.from_pretrained(theirs("t5"))
    ids = torch.tensor([[PAD, 5]])
    assert_close(model(ids, ids), ours("t5")(ids, ids))
    for call in (lambda: model("The cat", ids), lambda: model(ids, "Paris")):
        with pytest.raises(ValueError, match="this model has no tokenizer: pass token ids"):
            call()
    assert model.generate(ids, 2).tokens.shape == (1, 3)


def test_as_many_targets_as_sources_are_required() -> None:
    with pytest.raises(Exception, match=r"as many targets as sources|Type-check"):
        ours("t5")(SOURCES, TARGETS[:2])


# --- verify ---------------------------------------------------------------------------------------------------------


def compared(found: Contract) -> list[tuple[str, bool | None]]:
    """The lines about the whole, and whether they hold."""
    return [(line.claim.split(" = ")[0], line.passed) for line in found.lines[:2]]


@pytest.mark.parametrize("origin", ["live", "folder", "given"])
def test_verify_compares_with_the_live_model_the_folder_and_what_is_given(
    origin: str, tmp_path: Path
) -> None:
    theirs("t5").save_pretrained(tmp_path)
    found = {
        "live": lambda: ours("t5").verify(),
        "folder": lambda: HookedEncoderDecoder.from_pretrained(tmp_path).verify(),
        "given": lambda: HookedEncoderDecoder(ours("t5").model, name="bare").verify(theirs("t5")),
    }[origin]()
    assert found.passed, f"\n{found}"
    assert compared(found) == [("logits", True), ("gradients", True)]
    assert (
        found.model
        == {"live": "T5ForConditionalGeneration", "folder": str(tmp_path), "given": "bare"}[origin]
    )


def test_printing_says_how_it_was_opened_and_that_it_has_no_tokenizer() -> None:
    compiled = HookedEncoderDecoder.from_pretrained(torch.compile(theirs("t5")))  # type: ignore[arg-type]
    said = " ".join(str(compiled).split())
    assert "taken out of torch.compile" in said and "this model has no tokenizer" in said
    assert str(ours("bart")) == fitted([repr(ours("bart"))])


def test_verify_says_so_where_there_is_nothing_to_compare_with() -> None:
    found = HookedEncoderDecoder(ours("bart").model).verify()
    assert compared(found) == [("logits", None), ("gradients", None)]
    assert [line.note for line in found.lines[:2]] == ["nothing to compare with"] * 2
    assert found.passed


def test_verify_finds_a_weight_that_was_changed_since() -> None:
    model = HookedEncoderDecoder.from_pretrained(theirs("bart"))
    model.model.decoder.block(1).cross_attn.kv.weight.mul_(1.01)  # type: ignore[union-attr]
    found = model.verify()
    assert not found.passed
    assert {line.claim.split(" = ")[0] for line in found.lines if line.passed is False} == {
        "logits",
        "gradients",
    }


# --- sampling and edits ------------------------------------------------------------------------------------------


@BOTH
def test_sampled_targets_are_the_decoders_and_nearly_greedy_when_cold(name: str) -> None:
    model = ours(name)
    start = encoded(model.model, model.to_source(SOURCES))
    sampling = Sampling(temperature=1.5, seed=3)
    found = model.generate(SOURCES, 7, sampling=sampling, stop_tokens=())
    assert torch.equal(found.tokens, generate(model.model.decoder, start, 7, sampling=sampling).tokens)
    assert not torch.equal(
        found.tokens, model.generate(SOURCES, 7, sampling=replace(sampling, seed=4), stop_tokens=()).tokens
    )
    cold = model.generate(SOURCES, 7, sampling=Sampling(temperature=1e-6, seed=3), stop_tokens=())
    assert torch.equal(cold.tokens, model.generate(SOURCES, 7, stop_tokens=()).tokens)


@BOTH
def test_edits_of_either_side_are_those_of_its_passes(name: str) -> None:
    """Oracle: a loop of whole passes of both sides under the same edits, without a cache."""
    model, edits = ours(name), [
        Edit("encoder.blocks.0.hook_mlp_out", Scale(-20.0)),
        Edit("decoder.blocks.1.cross_attn.hook_z", Scale(-8.0)),
    ]  # fmt: skip
    source, plain = model.to_source(SOURCES[0]), model.generate(SOURCES[0], 6, stop_tokens=())
    moved = []
    for chosen in (edits[:1], edits[1:], edits):
        target = torch.tensor([[PAD]])
        for _ in range(6):
            logits = model.model(source.tokens, target, Tap(edits=chosen), source_keep=source.keep)
            target = torch.cat((target, logits[:, -1].argmax(-1, keepdim=True)), 1)
        for use_cache in (True, False):
            found = model.generate(SOURCES[0], 6, stop_tokens=(), edits=chosen, use_cache=use_cache)
            assert torch.equal(found.tokens, target)
        moved.append(not torch.equal(target, plain.tokens))
    assert any(moved)


def test_edits_of_a_generation_that_name_no_side_or_no_site_are_refused() -> None:
    model = ours("t5")
    with pytest.raises(KeyError, match=r"begin with encoder\. or decoder\., got 'blocks"):
        model.generate("The cat", 2, edits=[Edit("blocks.0.hook_mlp_out", Scale(2.0))])
    with pytest.raises(KeyError, match=re.escape("unknown site 'blocks.0.hook_nothing'")):
        model.generate("The cat", 2, edits=[Edit("decoder.blocks.0.hook_nothing", Scale(2.0))])


# --- hooks ---------------------------------------------------------------------------------------------------------


def hooked_parts(name: str) -> dict[str, tuple[torch.nn.Module, float]]:
    """Hugging Face's modules whose outputs are these sites of ours, each with a factor for it."""
    model: Any = theirs(name)
    if name == "t5":
        first, second = (
            model.encoder.block[0].layer[1].DenseReluDense,
            model.decoder.block[1].layer[1].EncDecAttention,
        )
    else:
        layer = model.model.decoder.layers[1]
        first, second = model.model.encoder.layers[0].fc2, layer.encoder_attn.out_proj
    return {
        "encoder.blocks.0.hook_mlp_out": (first, -3.0),
        "decoder.blocks.1.hook_cross_attn_out": (second, 4.0),
    }


def scaled(name: str) -> Tensor:
    """Their logits with the outputs of these modules scaled by hooks of PyTorch."""

    def times(factor: float, module: object, args: object, output: Any) -> Any:
        return (output[0] * factor, *output[1:]) if isinstance(output, tuple) else output * factor

    handles = [m.register_forward_hook(functools.partial(times, f)) for m, f in hooked_parts(name).values()]
    try:
        with torch.no_grad():
            return theirs(name)(**inputs()).logits
    finally:
        for handle in handles:
            handle.remove()


def hooks_of(name: str) -> list[Hook]:
    return [
        (site, lambda value, hook, factor=factor: value * factor)
        for site, (_, factor) in hooked_parts(name).items()
    ]


@BOTH
def test_hooks_on_both_sides_are_hugging_faces(name: str) -> None:
    model, keep = ours(name), inputs()["decoder_attention_mask"].bool()
    plain, wanted = model(SOURCES, TARGETS), scaled(name)
    found = model.run_with_hooks(SOURCES, TARGETS, hooks_of(name))
    close(found[keep], wanted[keep])
    assert float((found - plain)[keep].abs().max()) > 0.01 * float(plain.abs().max()), (
        "hooks make a difference"
    )
    assert torch.equal(model(SOURCES, TARGETS), plain), "they are gone"


@BOTH
def test_every_pass_inside_of_hooks_has_them(name: str) -> None:
    model, keep = ours(name), inputs()["decoder_attention_mask"].bool()
    wanted = model.run_with_hooks(SOURCES, TARGETS, hooks_of(name))
    edits = [Edit(site, Scale(factor)) for site, (_, factor) in hooked_parts(name).items()]
    said = model.generate(SOURCES, 5, edits=edits, stop_tokens=()).tokens
    assert not torch.equal(said, model.generate(SOURCES, 5, stop_tokens=()).tokens)
    for within in (model.hooks(hooks_of(name)), model.hooks(edits=edits)):
        with within as entered:
            assert entered is model
            given = model.given(SOURCES, TARGETS)
            found = [
                model(SOURCES, TARGETS),
                model.run_with_cache(SOURCES, TARGETS, ())[0],
                observe(model.decoder, given).output,
                HookedTransformer(model.decoder)(given),
            ]
            loss, tokens = model.loss(SOURCES, TARGETS), model.generate(SOURCES, 5, stop_tokens=()).tokens
        for logits in found:
            close(logits[keep], wanted[keep])
        target = model.to_target(TARGETS)
        assert_close(loss, mean_next_token_loss(wanted, target.tokens, target.keep))
        assert torch.equal(tokens, said)


def test_backward_hooks_of_the_encoder_get_hugging_faces_gradients() -> None:
    kept: dict[str, Tensor] = {}
    module, _ = hooked_parts("bart")["encoder.blocks.0.hook_mlp_out"]

    def keep_gradient(_: object, __: object, output: Tensor) -> None:
        output.register_hook(lambda grad: kept.__setitem__("theirs", grad))

    handle = module.register_forward_hook(keep_gradient)
    mask, real = inputs()["decoder_attention_mask"].bool(), inputs()["attention_mask"].bool()
    try:
        theirs("bart")(**inputs()).logits[mask].square().sum().backward()
    finally:
        handle.remove()
        theirs("bart").zero_grad()
    hook: Hook = ("encoder.blocks.0.hook_mlp_out", lambda grad, hook: kept.__setitem__(hook.name, grad))
    ours("bart").run_with_hooks(SOURCES, TARGETS, bwd_hooks=[hook])[mask].square().sum().backward()
    close(kept["encoder.blocks.0.hook_mlp_out"][real], kept["theirs"][real])
    assert all(parameter.grad is None for parameter in ours("bart").model.parameters())
    with ours("bart").hooks(bwd_hooks=[hook]), pytest.raises(ValueError, match="a pass that keeps gradients"):
        ours("bart").run_with_cache(SOURCES, TARGETS)


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        ("decoder.blocks.*.hook_mlp_out", [f"decoder.blocks.{i}.hook_mlp_out" for i in range(3)]),
        ("*.blocks.0.hook_mlp_out", ["encoder.blocks.0.hook_mlp_out", "decoder.blocks.0.hook_mlp_out"]),
        (re.compile(r"encoder\.blocks\.1\.hook_attn_.*"), ["encoder.blocks.1.hook_attn_out"]),
        (lambda name: name.endswith("embed"), ["encoder.hook_embed", "decoder.hook_embed"]),
        (["decoder.hook_embed", f"decoder.{CROSSED}"], ["decoder.hook_embed", f"decoder.{CROSSED}"]),
    ],
    ids=["glob", "both", "regex", "predicate", "list"],
)  # fmt: skip
def test_names_of_hooks_are_those_of_both_sides(names: Any, wanted: list[str]) -> None:
    seen: list[str] = []
    ours("t5").run_with_hooks("The cat", "Paris", [(names, lambda value, hook: seen.append(hook.name))])
    assert seen == wanted
    layers: list[int] = []
    hook: Hook = ("decoder.blocks.2.hook_mlp_out", lambda value, hook: layers.append(hook.layer()))
    ours("t5").run_with_hooks("The cat", "Paris", [hook])
    assert layers == [2]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("blocks.0.hook_mlp_out", r"begin with encoder\. or decoder\., got 'blocks"),
        ("decoder.blocks.0.hook_mlp_ot", r"nearest: blocks\.0\.hook_mlp_out"),
        (
            "encoder.blocks.0.cross_attn.hook_pattern",
            r"this model has no 'blocks\.0\.cross_attn\.hook_pattern",
        ),
        ("blocks.*.hook_mlp_out", r"matches no site of this model; sites are named like encoder\."),
    ],
)
def test_hooks_at_no_site_of_either_side_are_refused(names: str, message: str) -> None:
    with pytest.raises(KeyError, match=message):
        ours("t5").run_with_hooks("The cat", "Paris", [(names, lambda value, hook: None)])
    with pytest.raises(KeyError, match="begin with encoder"):
        ours("t5").hooks(edits=[Edit("blocks.0.hook_mlp_out", Scale(2.0))]).__enter__()


def test_hooks_end_with_an_exception() -> None:
    model = ours("t5")
    plain = model("The cat", "Paris")

    def failing() -> None:
        with model.hooks([("decoder.hook_embed", lambda value, hook: 0 * value)]):
            assert not torch.equal(model("The cat", "Paris"), plain)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert torch.equal(model("The cat", "Paris"), plain)


# --- the decoder as a model of its own -----------------------------------------------------------------------------


def decoder_of(name: str) -> HookedTransformer:
    return HookedTransformer(ours(name).decoder, ours(name).text.tokenizer)


@BOTH
def test_passes_of_the_decoder_on_what_it_was_given_are_the_models(name: str) -> None:
    model, decoder = ours(name), decoder_of(name)
    given, keep = model.given(SOURCES, TARGETS), inputs()["decoder_attention_mask"].bool()
    logits, loss = decoder(given, return_type="both")
    with torch.no_grad():
        close(logits[keep], theirs(name)(**inputs()).logits[keep])
    assert torch.equal(logits, model(SOURCES, TARGETS)) and torch.equal(logits, decoder(given))
    assert torch.equal(loss, model.loss(SOURCES, TARGETS))
    each = decoder(given, return_type="loss", loss_per_token=True)
    assert_close(each.sum() / (keep[:, 1:] & keep[:, :-1]).sum(), loss)
    seen, cache = decoder.run_with_cache(given, CROSSED)
    assert_close(seen, logits)
    assert_close(cache[CROSSED], model.run_with_cache(SOURCES, TARGETS, CROSSED)[1]["decoder"][CROSSED])


@BOTH
def test_hooks_of_the_decoder_on_what_it_was_given_are_the_models(name: str) -> None:
    model, decoder = ours(name), decoder_of(name)
    given = model.given(SOURCES, TARGETS)
    hook: Hook = (CROSSED, lambda value, hook: value.flip(-2))
    wanted = model.run_with_hooks(SOURCES, TARGETS, [(f"decoder.{CROSSED}", hook[1])])
    assert not torch.allclose(wanted, model(SOURCES, TARGETS))
    assert_close(decoder.run_with_hooks(given, [hook]), wanted)
    with decoder.hooks([hook]):
        assert_close(decoder(given), wanted)
        assert_close(observe(decoder, given).output, wanted)
    assert_close(decoder.edited(Edit(CROSSED, lambda value: value.flip(-2)))(given), wanted)


def test_the_decoder_continues_a_target_as_a_loop_of_whole_passes_does() -> None:
    model, decoder = ours("bart"), decoder_of("bart")
    given = model.given("The cat sat", "Paris")
    target = given.tokens
    for _ in range(5):
        target = torch.cat((target, model(model.to_source("The cat sat"), target)[:, -1:].argmax(-1)), 1)
    assert torch.equal(decoder.generate(given, 5, stop_at_eos=False).tokens, target)
    new = tokenizer().decode(target[0, given.tokens.shape[1] :])
    assert "".join(decoder.stream(given, 5, stop_at_eos=False)).strip() == new.strip()
    assert decoder.to_str_tokens(given) == decoder.text.pieces(given.tokens[0])
    assert decoder.to_batch(given).memory is given.memory


def test_the_decoder_without_its_source_says_what_it_needs() -> None:
    decoder = decoder_of("t5")
    for call in (decoder, decoder.run_with_cache, decoder.run_with_hooks, decoder.generate):
        with pytest.raises(ValueError, match=r"batch of HookedEncoderDecoder\.given\(source, target\)"):
            call(torch.tensor([[PAD, 5]]))
    with pytest.raises(ValueError, match=r"verified with its encoder: HookedEncoderDecoder\.verify"):
        decoder.verify()
    with pytest.raises(ValueError, match=r"such as model\.decoder with its batch, model\.given"):
        observe(ours("t5"), torch.tensor([[PAD, 5]]))  # type: ignore[arg-type]
