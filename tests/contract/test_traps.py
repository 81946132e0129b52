"""Twenty-five ways in which interpretability code has given wrong numbers without an error; each is one test here.

The comments number them; where a feature does not exist yet, the test is that nothing pretends it does.
"""

import math
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import interp
from interp import Batch, Edit, HookedTransformer, Read, observe
from interp.core import FactoredMatrix
from interp.core.patterns import repeat_scores
from interp.families.load import reading_of
from interp.model import KVCache, RMSNorm, Rotary
from interp.model.norm import Normalize
from interp.passes import HookPoint
from tests.configs import CONFIGS, build, perturbed, some_tokens
from tests.families.oracle import hf_config, hf_model
from tests.tiny import CORPUS, END, hooked
from tests.tolerances import assert_close

TOKENS = some_tokens()
ANSWER = torch.tensor([3, 14, 7])


def model(name: str = "gpt2", dtype: torch.dtype = torch.float64) -> HookedTransformer:
    return HookedTransformer(build(name, dtype))


# 1
def test_attribution_applies_gamma_and_counts_beta_as_its_own_component() -> None:
    cache = model().run_with_cache(TOKENS)[1]
    parts = cache.decompose_resid()
    logits = model()(TOKENS)[:, -1].gather(1, ANSWER[:, None])[:, 0]
    assert_close(cache.logit_attrs(parts, ANSWER).values.sum(0), logits)
    direction = model().W_U.mT[ANSWER]
    without = (parts.values[:, :, -1] / cache["ln_final.hook_scale"][:, -1] * direction).sum((0, 2))
    assert (without - logits).abs().max() > 0.1, "the sum without gamma, beta and centring is another number"


# 2
def test_attribution_freezes_the_final_norm_and_a_lens_recomputes_it() -> None:
    cache, network = model().run_with_cache(TOKENS)[1], build("gpt2")
    early = cache["resid_pre", 1]
    frozen = cache.apply_ln_to_stack(early[None])[0] + network.ln_final.bias
    assert_close(network.read_out(early), network.unembed(network.ln_final(early)))
    assert (network.unembed(frozen) - network.read_out(early)).abs().max() > 0.1
    halves = cache.apply_ln_to_stack(torch.stack((0.3 * early, 0.7 * early)))
    assert_close(halves.sum(0), cache.apply_ln_to_stack(early[None])[0])


# 3
@pytest.mark.parametrize(("name", "centres"), [("gpt2", True), ("rms-plain", False), ("llama-gqa", False)])
def test_only_layer_norm_removes_the_mean(name: str, centres: bool) -> None:
    shifted = [("blocks.1.hook_resid_post", lambda x, hook: x + 2.0)]
    change = (model(name).run_with_hooks(TOKENS, shifted) - model(name)(TOKENS)).abs().max()
    assert bool(change < 1e-9) is centres


# 3
def test_eps_stands_inside_the_root() -> None:
    norm = Normalize(RMSNorm(eps=0.5), 4, "ln1")
    x = torch.tensor([[0.1, 0.2, -0.2, 0.1]])
    assert float(norm.scale(x)) == pytest.approx(math.sqrt(0.025 + 0.5))


# 4
def test_loading_folds_centres_and_unties_nothing() -> None:
    theirs = hf_model("gpt2")
    ours = HookedTransformer.from_pretrained(theirs)
    state = theirs.state_dict()
    assert torch.equal(ours.W_E, state["transformer.wte.weight"])
    assert torch.equal(ours.W_U, ours.W_E.mT)
    assert ours.W_U.data_ptr() == ours.W_E.data_ptr()
    assert torch.equal(ours.W_in[1], state["transformer.h.1.mlp.c_fc.weight"])
    assert torch.equal(ours.b_O[1], state["transformer.h.1.attn.c_proj.bias"])
    assert torch.equal(ours.transformer.ln_final.weight, state["transformer.ln_f.weight"])
    assert ours.W_U.mean(1).abs().max() > 1e-3


# 5
def test_soft_cap_is_listed_as_inert_where_the_type_has_none() -> None:
    for key, field in {
        "final_logit_softcapping": "logit_softcap",
        "attn_logit_softcapping": "attn_softcap",
    }.items():
        llama = reading_of(hf_config("llama").to_dict() | {key: 30.0})
        assert key in llama.inert and getattr(llama.config, field) is None
        assert getattr(reading_of(hf_config("gemma2").to_dict() | {key: 30.0}).config, field) == 30.0


# 6
@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "parallel", "attention-only"])
def test_attention_out_is_what_is_added_to_the_stream(name: str) -> None:
    cache = model(name).run_with_cache(TOKENS)[1]
    for layer in range(2):
        added = cache["attn_out", layer] + (cache["mlp_out", layer] if CONFIGS[name].mlp else 0)
        assert_close(cache["resid_pre", layer] + added, cache["resid_post", layer])


# 7
def test_a_value_bias_counts_as_often_as_the_pattern_says() -> None:
    """Rows that no longer sum to 1 carry less than one b_V; the split by source must say so."""

    def halve(pattern: Tensor, hook: HookPoint) -> Tensor:
        return 0.5 * pattern

    subject = model()
    with subject.hooks([("blocks.0.attn.hook_pattern", halve)]):
        cache = subject.run_with_cache(TOKENS)[1]
    moved = cache.head_source_results(0, pos=5)
    plain_v = cache["v", 0] - subject.b_V[0]
    written = torch.einsum("bk,bke,ed->bd", cache["pattern", 0][:, 2, 5], plain_v[:, :, 2], subject.W_O[0, 2])
    assert_close(moved[2].sum(0), written + 0.5 * subject.b_V[0, 2] @ subject.W_O[0, 2])


# 8
def test_a_key_value_head_serves_its_group_of_query_heads() -> None:
    subject = model("llama-gqa")
    before = subject.run_with_cache(TOKENS, "blocks.0.attn.hook_z")[1]["z", 0]

    def change_group_1(value: Tensor, hook: HookPoint) -> None:
        assert value.shape[2] == 2
        value[:, :, 1] += 1.0

    with subject.hooks([("blocks.0.attn.hook_v", change_group_1)]):
        after = subject.run_with_cache(TOKENS, "blocks.0.attn.hook_z")[1]["z", 0]
    assert ((after - before).abs().amax((0, 1, 3)) > 1e-6).tolist() == [False, False, True, True]
    assert subject.weights.kv_head().tolist() == [0, 0, 1, 1]


def content_scores(name: str, layer: int) -> tuple[Tensor, Tensor]:
    """The scores of one layer without biases and scale, from the QK circuit alone, and the model's own."""
    config = replace(CONFIGS[name], qkv_bias=False)
    torch.manual_seed(0)
    subject = HookedTransformer(perturbed(config))
    cache = subject.run_with_cache(TOKENS)[1]
    x = cache[f"blocks.{layer}.ln1.hook_normalized"][:, None]
    return x @ subject.QK[layer].AB @ x.mT, cache["attn_scores", layer] / config.score_scale(layer)


# 9
def test_the_query_key_matrix_of_a_rotary_model_holds_at_offset_0_only() -> None:
    content, scores = content_scores("llama-gqa", 1)
    # Angles are float32: a rotation is orthogonal to 1e-7.
    assert_close(content.diagonal(0, -2, -1), scores.diagonal(0, -2, -1), torch.float32)
    assert (content - scores).diagonal(-1, -2, -1).abs().max() > 1e-1


# 9
def test_the_two_ways_to_pair_rotated_dimensions_are_different_models() -> None:
    config = replace(CONFIGS["attention-only-rotary"], position=Rotary(dim=4, interleaved=False))
    other = perturbed(config)
    other.load_state_dict(build("attention-only-rotary").state_dict())
    assert (other(TOKENS) - build("attention-only-rotary")(TOKENS)).abs().max() > 1e-2


# 10
@pytest.mark.parametrize("name", ["gpt2", "scale-by-layer"])
def test_circuits_leave_the_score_scale_out(name: str) -> None:
    content, scores = content_scores(name, 1)
    seen = torch.ones(9, 9, dtype=torch.bool).tril().expand_as(content)
    assert_close(content[seen], scores[seen])
    assert CONFIGS[name].score_scale(1) == CONFIGS[name].head_width ** -0.5 / (
        2 if name == "scale-by-layer" else 1
    )


# 11
def test_the_mask_holds_however_negative_the_visible_scores_are() -> None:
    """A mask of -1e5 would let the future in here."""
    push = [("blocks.0.attn.hook_q", lambda q, hook: -1e7 * q)]
    subject = model()
    with subject.hooks(push):
        pattern = subject.run_with_cache(TOKENS, "blocks.0.attn.hook_pattern")[1]["pattern", 0]
    assert not pattern.triu(1).any()
    assert_close(pattern.sum(-1), torch.ones_like(pattern[..., 0]))


# 11
def test_a_query_that_sees_nothing_gets_nothing_and_never_nan() -> None:
    batch = Batch.of([[3, 1, 4, 1, 5], [9, 2]], side="left")
    read = Read("blocks.0.attn.hook_z")
    explicit = observe(build("gpt2"), batch, [read, Read("blocks.0.attn.hook_pattern")])
    fused = observe(build("gpt2"), batch, [read])
    for trace in (explicit.trace, fused.trace):
        assert not trace[read][1, :3].any()
    assert not explicit.trace["blocks.0.attn.hook_pattern"][1, :, :3].any()
    assert bool(explicit.output.isfinite().all())


# 12
def test_padding_that_looks_like_bos_and_eos_is_still_padding() -> None:
    """GPT-2's one special token is all three; a mask guessed from ids would hide the real one."""
    subject = hooked()
    batch = subject.to_batch([f"{END}The cat{END}", CORPUS[2]])
    assert batch.keep is not None
    assert batch.tokens[0][batch.keep[0]].tolist() == subject.to_tokens(f"The cat{END}")[0].tolist()
    alone = subject(f"The cat{END}", return_type="loss", loss_per_token=True)
    together = subject(batch, return_type="loss", loss_per_token=True)
    assert_close(together[0, : alone.shape[1]], alone[0])
    assert not together[0, alone.shape[1] :].any()


# 13
def test_bos_comes_once_by_default_and_never_into_an_answer() -> None:
    subject = hooked()
    for prompt in (" cat", END + " cat"):
        assert subject.to_tokens(prompt)[0].tolist() == [0, subject.to_single_token(" cat")]
    answers = subject.text.targets([" cat", " dog"], 2)
    assert answers.shape == (2,) and not (answers == 0).any()


# 14
def test_window_of_4_is_the_query_and_three_before_also_with_a_cache() -> None:
    network = build("window")
    pattern = observe(network, Batch(TOKENS), [Read("blocks.0.attn.hook_pattern")]).trace[
        "blocks.0.attn.hook_pattern"
    ]
    distance = torch.arange(9)[:, None] - torch.arange(9)
    assert bool(((pattern > 0) == ((distance >= 0) & (distance < 4))).all())
    cache = KVCache(network.config, 3, 9, device=network.device, dtype=network.dtype)
    steps = torch.cat([network(part, cache=cache) for part in TOKENS.split(1, 1)], 1)
    assert_close(steps, network(TOKENS))


# 15
def test_a_parallel_block_has_no_middle_and_says_so() -> None:
    cache = model("parallel").run_with_cache(TOKENS)[1]
    assert cache.accumulated_resid(incl_mid=True).parts == ("L0.resid", "L1.resid", "L1.resid_post")
    with pytest.raises(KeyError, match=r"has no 'blocks\.0\.hook_resid_mid'"):
        model("parallel").run_with_cache(TOKENS, "blocks.0.hook_resid_mid")


# 16
def test_split_inputs_leave_the_norm_with_one_scale_per_position() -> None:
    subject, split = model(), [f"blocks.0.hook_{p}_input" for p in "qkv"]
    plain = subject.run_with_cache(TOKENS)[1]
    with subject.hooks([(split[2], lambda x, hook: x.clone())]):
        cache = subject.run_with_cache(TOKENS, [*plain, *split])[1]
    assert cache["scale", 0, "ln1"].shape == (3, 9, 1)
    assert_close(cache["scale", 0, "ln1"], plain["scale", 0, "ln1"])
    assert_close(
        cache.apply_ln_to_stack(cache.decompose_resid().values),
        plain.apply_ln_to_stack(plain.decompose_resid().values),
    )


# 17
def test_taking_a_cache_does_not_take_the_users_hooks_away() -> None:
    subject, plain = model(), model()(TOKENS)
    with subject.hooks([("blocks.0.hook_mlp_out", lambda x, hook: 0 * x)]):
        edited = subject(TOKENS)
        with pytest.raises(KeyError):
            subject.run_with_cache(TOKENS, "nothing")
        subject.run_with_cache(TOKENS)
        assert torch.equal(subject(TOKENS), edited)
    assert torch.equal(subject(TOKENS), plain)
    assert (edited - plain).abs().max() > 1e-3


# 18
@pytest.mark.parametrize(
    ("name", "site", "stop"),
    [
        ("gpt2", "blocks.0.attn.hook_patern", None),
        ("attention-only", "blocks.0.mlp.hook_post", None),
        ("gpt2", "blocks.0.attn.hook_rot_q", None),
        ("gpt2", "blocks.1.attn.hook_z", 1),
    ],
)
def test_an_edit_that_could_never_act_is_an_error(name: str, site: str, stop: int | None) -> None:
    with pytest.raises((KeyError, ValueError), match=re.escape(site)):
        observe(build(name), Batch(TOKENS), edits=[Edit(site, torch.zeros_like)], stop=stop)


# 19
def test_scoring_a_cached_pattern_leaves_it_as_it_was() -> None:
    pattern = torch.rand(2, 3, 13, 13)
    kept = pattern.clone()
    repeat_scores(pattern, 4)
    assert torch.equal(pattern, kept)


# 20
def test_backward_hooks_may_return_none_or_a_tensor_and_nothing_else() -> None:
    subject, site = model(), "blocks.0.hook_resid_post"
    for answer in (lambda g, hook: None, lambda g, hook: g):
        subject.run_with_hooks(TOKENS, bwd_hooks=[(site, answer)], return_type="loss").backward()
    loss = subject.run_with_hooks(TOKENS, bwd_hooks=[(site, lambda g, hook: (g,))], return_type="loss")
    with pytest.raises(Exception, match=r"hook returned 'tuple'|Type-check"):
        loss.backward()
    assert torch.is_grad_enabled()
    assert all(p.grad is None for p in subject.transformer.parameters())


# 21
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attributions_of_a_half_precision_model_are_summed_in_float32(dtype: torch.dtype) -> None:
    result = interp.attribute(model("gpt2", dtype), TOKENS, ANSWER, parts="head")
    assert result.value.dtype == "float32"
    assert result.attrs["completeness_error"] < 0.05
    wide = interp.attribute(model(), TOKENS, ANSWER, parts="head")
    assert abs(result.value - wide.value).max() < 0.3
    assert model("gpt2", dtype).OV.svd()[1].dtype == torch.float32


# 22
def test_scores_are_not_rounded_and_no_attention_is_zero_not_nan() -> None:
    pattern = torch.zeros(1, 1, 9, 9)
    pattern[0, 0, 5, 2] = 0.123456
    assert repeat_scores(pattern, 4)[0, 0].tolist() == pytest.approx([0.0, 0.0, 0.123456 / 4], rel=1e-6)
    assert not repeat_scores(torch.zeros(1, 1, 9, 9), 4).any()


# 23
def test_clean_stream_patched_into_corrupt_runs_restores_every_prompt() -> None:
    subject, site = model("llama-gqa"), "blocks.0.hook_resid_post"
    clean, corrupt = TOKENS, some_tokens(seed=1)
    cache = subject.run_with_cache(clean, site)[1]
    patched = subject.run_with_hooks(corrupt, [(site, lambda x, hook: cache[site])])
    assert_close(patched, subject(clean))
    only_row_1 = Edit(site, lambda x: cache[site][1:2], rows=(1,))
    mixed = observe(build("llama-gqa"), Batch(corrupt), edits=[only_row_1]).output
    assert_close(mixed[1], subject(clean)[1])
    assert_close(mixed[[0, 2]], subject(corrupt)[[0, 2]])


# 23
def test_a_key_head_that_does_not_exist_is_an_error_under_grouped_heads() -> None:
    def query_head_3(value: Tensor, hook: HookPoint) -> None:
        value[:, :, 3] = 0

    with pytest.raises(
        RuntimeError, match=r"the edit of blocks\.0\.attn\.hook_k failed on shape \[3, 9, 2, 10\]"
    ):
        model("llama-gqa").run_with_hooks(TOKENS, [("blocks.0.attn.hook_k", query_head_3)])


# 24
def test_equal_singular_values_give_the_matrix_and_a_copying_score_of_one() -> None:
    basis = torch.linalg.qr(torch.randn(9, 4, dtype=torch.float64))[0]
    for sign in (1.0, -1.0):
        projection = FactoredMatrix(basis, sign * basis.mT)
        u, s, v = projection.svd()
        assert_close(s, torch.ones_like(s))
        assert_close(u * s @ v.mT, projection.AB)
        values = projection.eigenvalues()
        assert float((values.sum() / values.abs().sum()).real) == pytest.approx(sign)


# 25
def test_weight_stacks_are_never_stale() -> None:
    torch.manual_seed(0)
    subject = HookedTransformer(perturbed(CONFIGS["gpt2"], torch.float32))
    before = subject.W_Q
    subject.to(torch.float64)
    assert subject.W_Q.dtype == torch.float64
    subject.transformer.blocks[1].attn.qkv.weight.zero_()
    assert not subject.W_Q[1].any() and before[1].any()
    assert torch.equal(subject.W_Q[0].float(), before[0])


# 25
def test_both_orientations_of_stored_matrices_give_the_fields_layout() -> None:
    conv, linear = hf_model("gpt2"), hf_model("llama")
    gpt2, llama = (HookedTransformer.from_pretrained(m) for m in (conv, linear))
    assert torch.equal(gpt2.W_in[0], conv.transformer.h[0].mlp.c_fc.weight)
    assert torch.equal(llama.W_in[0], linear.model.layers[0].mlp.up_proj.weight.mT)
    assert torch.equal(llama.W_gate[0], linear.model.layers[0].mlp.gate_proj.weight.mT)
