"""What is set on a config or a module after building: every pass follows it, or it is refused by name."""

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from interp.compat.transformer_lens import patching
from interp.compat.transformer_lens.components import MLP, Attention, Expert, LayerNorm
from interp.compat.transformer_lens.config import FIXED, FOLLOWED, IDLE, HookedTransformerConfig
from interp.compat.transformer_lens.engine import Part
from interp.compat.transformer_lens.hooked_transformer import HookedTransformer
from tests.compat.slow_hooked import BASE, CASES, LOCAL, RMS, Fields, random_state, slow_logits
from tests.loops import over

TOKENS = torch.tensor([[1, 5, 3, 9, 2], [7, 7, 0, 4, 11]])
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
KINDS = {
    "layer-norm": BASE,
    "local": RMS | LOCAL,
    "experts": CASES["experts"],
    "log-n": RMS | {"use_logn_attn": True, "train_seq_length": 3},
}


def built(fields: Fields) -> HookedTransformer:
    """A model that has made a pass."""
    model = HookedTransformer(HookedTransformerConfig(**{**fields, "dtype": torch.float64, "device": "cpu"}))
    model.load_state_dict(random_state(fields), strict=False)
    model(TOKENS)
    return model.eval()


def like(fields: Fields, changed: Fields) -> HookedTransformer:
    """A model built with the changed fields, of the same weights."""
    model = HookedTransformer(
        HookedTransformerConfig(**{**fields, "dtype": torch.float64, "device": "cpu"} | changed)
    )
    model.load_state_dict(random_state(fields), strict=False)
    return model.eval()


# the eight edits of the issue, on every path


def everywhere(path: str, name: str, value: object) -> Callable[[HookedTransformer], None]:
    """The same attribute of the part of every block."""

    def edit(model: HookedTransformer) -> None:
        for block in model.blocks:
            setattr(block.get_submodule(path), name, value)

    return edit


def of_config(name: str, value: object) -> Callable[[HookedTransformer], None]:
    return lambda model: setattr(model.cfg, name, value)


def norms(model: HookedTransformer) -> None:
    for module in model.modules():
        if isinstance(module, LayerNorm):
            module.eps = 0.5


FOLLOWING: dict[str, tuple[Callable[[HookedTransformer], None], Fields]] = {
    "activation": (everywhere("mlp", "act_fn", torch.relu), {"act_fn": "relu"}),
    "scale": (everywhere("attn", "attn_scale", 5.0), {"attn_scale": 5.0}),
    "logit cap": (of_config("output_logits_soft_cap", 1.5), {"output_logits_soft_cap": 1.5}),
    "eps": (norms, {"eps": 0.5}),
    "direction": (of_config("attention_dir", "bidirectional"), {"attention_dir": "bidirectional"}),
    "direction of a module's config": (
        lambda model: setattr(model.blocks[1].attn.cfg, "attention_dir", "bidirectional"),
        {"attention_dir": "bidirectional"},
    ),
    "score cap": (of_config("attn_scores_soft_cap", 0.7), {"attn_scores_soft_cap": 0.7}),
    "through the dict": (
        lambda model: model.cfg.to_dict().update(attn_scores_soft_cap=0.7),
        {"attn_scores_soft_cap": 0.7},
    ),
}


def hooked(model: HookedTransformer) -> Tensor:
    return model.run_with_hooks(TOKENS, fwd_hooks=[("blocks.1.hook_resid_pre", lambda x, hook: x)])


def in_two(model: HookedTransformer) -> Tensor:
    nothing = [("blocks.0.hook_resid_pre", lambda x, hook: x)]
    return model(model.run_with_hooks(TOKENS, stop_at_layer=1, fwd_hooks=nothing), start_at_layer=1)


def alone(model: HookedTransformer) -> Tensor:
    """Each block by itself; the end in a pass, for the soft cap is no part of any module."""
    x = model.input_to_embed(TOKENS)[0]
    for block in model.blocks:
        x = block(x)
    return model(x, start_at_layer=len(model.blocks))


def called(model: HookedTransformer) -> Tensor:
    """Modules called in the place of native parts."""
    for module in model.blocks.modules():
        if isinstance(module, Part):
            module.register_forward_hook(lambda module, args, output: None)
    return model(TOKENS)


PATHS: dict[str, Callable[[HookedTransformer], Tensor]] = {
    "plain": lambda model: model(TOKENS),
    "long": lambda model: model(TOKENS.repeat(4, 1))[:2],
    "cache": lambda model: model.run_with_cache(TOKENS)[0],
    "hooks": hooked, "in two": in_two, "alone": alone, "called": called,
    "copied": lambda model: copy.deepcopy(model)(TOKENS),
}  # fmt: skip


@pytest.mark.parametrize("edit", FOLLOWING)
@torch.no_grad()
def test_every_path_follows_an_edit_as_the_slow_oracle_says(edit: str) -> None:
    change, fields = FOLLOWING[edit]
    want = torch.stack([slow_logits(BASE | fields, random_state(BASE), row) for row in TOKENS])
    before = torch.stack([slow_logits(BASE, random_state(BASE), row) for row in TOKENS])
    assert (want - before).abs().max() > 0.01
    for path, logits in PATHS.items():
        model = built(BASE)
        change(model)
        torch.testing.assert_close(logits(model), want, **CLOSE, msg=lambda m, p=path: f"{p}: {m}")


@pytest.mark.parametrize("edit", FOLLOWING)
@torch.no_grad()
def test_generation_and_planned_sweeps_follow_an_edit(edit: str) -> None:
    change, fields = FOLLOWING[edit]
    model, other = built(BASE), like(BASE, fields)
    change(model)
    caches = [m.run_with_cache(TOKENS.flip(1))[1] for m in (model, other)]
    found, want = (
        patching.get_act_patch_resid_pre(m, TOKENS, cache, lambda logits: logits[0, -1, 3] - logits[0, -1, 2])
        for m, cache in zip((model, other), caches, strict=True)
    )
    torch.testing.assert_close(found, want, **CLOSE)
    if "direction" in edit:
        with pytest.raises(ValueError, match="cache requires a causal"):
            model.generate(TOKENS, max_new_tokens=2, stop_at_eos=False, verbose=False)
        return
    options: dict[str, Any] = {
        "max_new_tokens": 3,
        "stop_at_eos": False,
        "verbose": False,
        "do_sample": False,
    }
    steps = [m.generate(TOKENS, output_logits=True, **options).logits for m in (model, other)]
    for ours, theirs in zip(*steps, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


def test_gradients_follow_an_edit_too() -> None:
    model, other = built(BASE), like(BASE, {"act_fn": "relu", "attn_scores_soft_cap": 0.7})
    FOLLOWING["activation"][0](model)
    FOLLOWING["score cap"][0](model)
    for m in (model, other):
        m(TOKENS, return_type="loss").backward()
    for name, weight in other.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, weight.grad, **CLOSE)


@torch.no_grad()
def test_an_edit_that_is_taken_back_leaves_no_trace() -> None:
    model = built(CASES["soft-caps"])
    before, places = model(TOKENS), [p.data_ptr() for p in model.parameters()]
    model.cfg.output_logits_soft_cap, model.blocks[0].ln1.eps = -1.0, 0.3
    point = model.run_with_cache(TOKENS)[1]["unembed.hook_out"]
    assert torch.equal(model(TOKENS), point) and not torch.allclose(point, before)
    model.cfg.output_logits_soft_cap, model.blocks[0].ln1.eps = 3.0, 1e-5
    assert torch.equal(model(TOKENS), before) and [p.data_ptr() for p in model.parameters()] == places


def test_a_module_spliced_in_stays_when_the_config_changes() -> None:
    model = built(BASE)
    model.blocks[0].hook_resid_post = Half()
    model.cfg.attn_scores_soft_cap = 0.7
    want = like(BASE, {"attn_scores_soft_cap": 0.7})
    half = [("blocks.0.hook_resid_post", lambda x, hook: x / 2)]
    torch.testing.assert_close(model(TOKENS), want.run_with_hooks(TOKENS, fwd_hooks=half))


class Half(nn.Module):
    """Half of what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x / 2


def test_the_mask_of_one_attention_and_its_config_are_refused() -> None:
    attn = built(BASE).blocks[0].attn
    with pytest.raises(ValueError, match=r"Attention\.apply_causal_mask"):
        attn.apply_causal_mask = lambda scores, *rest: scores
    other = HookedTransformerConfig.from_dict(attn.cfg.to_dict() | {"attention_dir": "bidirectional"})
    with pytest.raises(ValueError, match="cfg is what this Attention was built with"):
        attn.cfg = other


# all fields of the config

WORDS: dict[str, object] = {
    "attention_dir": "bidirectional", "positional_embedding_type": "rotary", "normalization_type": "RMSPre",
    "act_fn": "relu", "dtype": torch.float32, "device": torch.device("cpu", 0), "clip_qkv": 0.3, "n_key_value_heads": 2,
    "output_logits_soft_cap": 1.5, "attn_scores_soft_cap": 0.7, "attn_types": ["global", "local"],
    "original_architecture": "Olmo2ForCausalLM", "use_attn_in": True,
}  # fmt: skip


def other_value(name: str, value: object) -> object:
    """Another value of a field or an attribute."""
    if name in WORDS and value != WORDS[name]:
        return WORDS[name]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return "another" if isinstance(value, str) else 2


def test_every_field_of_a_config_is_followed_idle_or_fixed() -> None:
    names = {field.name for field in fields(HookedTransformerConfig)}
    assert FOLLOWED | IDLE & names | FIXED == names
    assert not FOLLOWED & IDLE and not FOLLOWED & FIXED and not IDLE & FIXED


@functools.cache
def shared(kind: str) -> tuple[HookedTransformer, Tensor]:
    """A model that many tests change and change back, and its logits when it was built."""
    model = built(KINDS[kind])
    return model, model(TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@over("field", sorted(field.name for field in fields(HookedTransformerConfig)))
@over("way", ["set", "dict"])
@torch.no_grad()
def test_a_field_set_after_building_is_followed_or_named_in_an_error(kind: str, field: str, way: str) -> None:
    model, plain = shared(kind)
    was = getattr(model.cfg, field)
    value = other_value(field, was)
    try:
        if field in FIXED:
            with pytest.raises(ValueError, match=rf"{field}="):
                set_and_run(model, field, value, way)
        else:
            set_and_run(model, field, value, way)
            want = plain if field in IDLE else like(KINDS[kind], {field: value})(TOKENS)
            torch.testing.assert_close(model(TOKENS), want, **CLOSE)
            assert field not in MATTERS[kind] or not torch.allclose(want, plain), field
    finally:
        set_and_run(model, field, was, way)
    torch.testing.assert_close(model(TOKENS), plain, **CLOSE)


MATTERS = {
    "layer-norm": ("output_logits_soft_cap", "attn_scores_soft_cap", "attention_dir", "clip_qkv"),
    "local": ("window_size", "attention_dir"),
    "experts": ("norm_topk_prob", "attn_scores_soft_cap"),
    "log-n": ("use_logn_attn", "train_seq_length"),
}


def set_and_run(model: HookedTransformer, field: str, value: object, way: str) -> None:
    if way == "set":
        setattr(model.cfg, field, value)
    else:
        model.cfg.to_dict()[field] = value
    model(TOKENS)


def test_config_list_that_was_written_to_is_named_by_the_next_pass() -> None:
    model = built(RMS | LOCAL | {"attn_types": ["local", "global"]})
    model.cfg.attn_types[0] = "global"
    with pytest.raises(ValueError, match="attn_types="):
        model(TOKENS)


def test_a_copy_of_a_config_is_free_and_that_of_a_copied_model_is_not() -> None:
    model = built(BASE)
    cfg = copy.deepcopy(model.cfg)
    cfg.n_layers, cfg.d_mlp = 1, 8
    assert HookedTransformer(cfg).cfg.n_layers == 1
    with pytest.raises(ValueError, match="d_mlp="):
        copy.deepcopy(model).cfg.d_mlp = 8
    with pytest.raises(ValueError, match=r"set blocks\[i\]\.attn\.attn_scale"):
        model.cfg.attn_scale = 3.0
    model.cfg.d_mlp = model.cfg.d_mlp


def test_a_dtype_that_only_the_config_has_is_refused_and_a_cast_is_not() -> None:
    model = built(BASE)
    model.cfg.dtype = torch.float32
    with pytest.raises(ValueError, match=r"model\.to\(dtype\)"):
        model(TOKENS)
    assert model.to(torch.float32, print_details=False)(TOKENS).dtype == torch.float32
    assert model.double()(TOKENS).dtype == torch.float64


# all attributes of modules

SET = {"act_fn": torch.relu, "eps": 0.5, "attn_scale": 5.0}
"""Those that passes follow."""


def plain_attributes(model: HookedTransformer) -> Iterator[tuple[str, str]]:
    """Path and name of every public attribute of a part that is neither a tensor nor a module."""
    for path, module in model.named_modules():
        if isinstance(module, Part | Expert) and path:
            for name in vars(module):
                if not name.startswith("_") and name not in ("training", "name"):
                    yield path, name


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, "grouped", "sandwich"])
@torch.no_grad()
def test_every_attribute_of_a_module_is_followed_or_refused(kind: str) -> None:
    fields = KINDS.get(kind) or CASES[kind]
    model = built(fields)
    plain, seen = model(TOKENS), set()
    for path, name in plain_attributes(model):
        module, before = model.get_submodule(path), model.get_submodule(path).__dict__[name]
        seen.add(name)
        if name not in SET:
            value = copy.deepcopy(before) if name == "cfg" else other_value(name, before)
            with pytest.raises(
                ValueError, match=f"{name} is what this {type(module).__name__} was built with"
            ):
                setattr(module, name, value)
            assert module.__dict__[name] is before
            continue
        x = torch.ones(1, model.cfg.d_model, dtype=torch.float64)
        expert = module(x) if isinstance(module, Expert) else None
        setattr(module, name, SET[name])
        if expert is None:
            assert not torch.allclose(model(TOKENS), plain), f"{path}.{name}"
        else:  # the router may not choose it
            assert not torch.allclose(module(x), expert)
        torch.testing.assert_close(called(copy.deepcopy(model)), model(TOKENS), **CLOSE)
        setattr(module, name, before)
        assert torch.equal(model(TOKENS), plain), f"{path}.{name}"
    assert seen >= {"act_fn", "eps", "attn_scale", "layer_id", "attn_type", "cfg"}


def test_an_activation_may_be_a_module_with_parameters() -> None:
    model, x = built(BASE), torch.linspace(-1, 1, 5, dtype=torch.float64)
    model.blocks[0].mlp.act_fn = nn.PReLU(dtype=torch.float64)
    model(TOKENS, return_type="loss").backward()
    assert model.blocks[0].mlp.act_fn.weight.grad.any() and model.blocks[0].mlp.act_fn(x).min() == -0.25


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        ("blocks.0.mlp", "act_fn", "relu"),
        ("blocks.0.attn", "attn_scale", torch.tensor(2.0, requires_grad=True)),
        ("ln_final", "eps", nn.Parameter(torch.tensor(2.0))),
    ],
)
def test_a_value_that_no_pass_could_follow_is_refused(path: str, name: str, value: object) -> None:
    model = built(BASE)
    before = model(TOKENS)
    with pytest.raises(ValueError, match=name):
        setattr(model.get_submodule(path), name, value)
    assert torch.equal(model(TOKENS), before)


@torch.no_grad()
def test_part_of_its_own_follows_what_is_set_around_its_first_call() -> None:
    cfg = HookedTransformerConfig(**BASE, dtype=torch.float64, device="cpu")
    x = torch.randn(2, 3, cfg.d_model, dtype=torch.float64)
    for early in (True, False):
        mlp, norm, attn = MLP(cfg), LayerNorm(cfg), Attention(cfg)
        for weight in (*mlp.parameters(), *attn.parameters()):
            nn.init.normal_(weight)
        if not early:
            plain = mlp(x), norm(x), attn(x, x, x)
        mlp.act_fn, norm.eps, attn.attn_scale = torch.relu, 0.5, 2.0
        post = torch.relu(x @ mlp.W_in + mlp.b_in)
        torch.testing.assert_close(mlp(x), post @ mlp.W_out + mlp.b_out)
        centred = x - x.mean(-1, keepdim=True)
        torch.testing.assert_close(
            norm(x), centred / (centred.var(-1, correction=0, keepdim=True) + 0.5).sqrt()
        )
        attn.hook_attn_scores.add_hook(lambda scores, hook: setattr(hook, "ctx", {"scores": scores}))
        attn(x, x, x)
        q, k, _ = attn.calculate_qkv_matrices(x, x, x)
        want = torch.einsum("bqhe,bkhe->bhqk", q, k) / 2
        torch.testing.assert_close(attn.hook_attn_scores.ctx["scores"].tril(), want.tril())
        if not early:
            assert not torch.allclose(plain[0], mlp(x)) and not torch.allclose(plain[2], attn(x, x, x))


# methods


@pytest.mark.parametrize("name", sorted(Attention.uncalled))
def test_a_method_that_no_pass_calls_cannot_be_set(name: str) -> None:
    with pytest.raises(ValueError, match=f"no pass calls Attention.{name}"):
        setattr(built(BASE).blocks[0].attn, name, lambda *args: None)


def test_class_overriding_such_a_method_is_refused_when_our_forward_runs() -> None:
    class Unmasked(Attention):
        def apply_causal_mask(self, attn_scores: Tensor, *rest: Any) -> Tensor:
            return attn_scores

    class Embedding(HookedTransformer):
        def input_to_embed(self, *args: Any, **options: Any) -> Any:
            return super().input_to_embed(*args, **options)

    model = built(BASE)
    model.blocks[0].attn = Unmasked(model.cfg)
    with pytest.raises(ValueError, match=r"Unmasked\.apply_causal_mask"):
        model(TOKENS)
    with pytest.raises(ValueError, match=r"Embedding\.input_to_embed"):
        Embedding(HookedTransformerConfig(**BASE, device="cpu"))(TOKENS)
    with pytest.raises(ValueError, match=r"HookedTransformer\.get_residual"):
        model.get_residual = lambda *args: None
    with pytest.raises(ValueError, match="cfg is what this HookedTransformer"):
        model.cfg = copy.deepcopy(model.cfg)


def test_a_forward_of_the_models_own_is_what_a_cache_runs() -> None:
    model = built(BASE)
    old = model.forward
    model.forward = lambda *args, **options: 2 * old(*args, **options)
    assert torch.equal(model.run_with_cache(TOKENS)[0], model(TOKENS))
