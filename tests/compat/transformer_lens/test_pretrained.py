"""Loading under TransformerLens' names: Hugging Face's logits, processed and not; what is refused is named.

The class that is filled here only keeps what it is given; its logits are those of `from_hooked_transformer`.
"""

import functools
import re
import runpy
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import interp
from interp import zoo
from interp.compat import from_hooked_transformer
from interp.compat.transformer_lens import loading_from_pretrained
from interp.compat.transformer_lens.hooked_transformer import HookedTransformer
from interp.compat.transformer_lens.loading_from_pretrained import (
    get_checkpoint_labels,
    get_official_model_name,
    get_pretrained_model_config,
    get_pretrained_state_dict,
)
from interp.compat.transformer_lens.pretrained import (
    from_pretrained,
    from_pretrained_no_processing,
    tokenizer_for,
)
from tests.compat.transformer_lens.lens_fixture import CASES, oracle
from tests.families.oracle import hf_model, new_hf_model, some_tokens
from tests.loops import over
from tests.tiny import gpt2_tokenizer
from tests.tolerances import assert_close

FAMILIES = ("gpt2", "gpt-neo", "gptj", "gpt-neox", "opt", "bloom", "llama", "mistral", "qwen2", "gemma", "gemma2",
            "olmo2")  # fmt: skip
TOKENS = some_tokens()


@functools.cache
def source(name: str) -> Any:
    """A random Hugging Face model; OLMo-2 with heads that are together as wide as the stream, as there."""
    if name != "olmo2":
        return hf_model(name, torch.float64)
    config = transformers.Olmo2Config(
        vocab_size=53, hidden_size=24, intermediate_size=36, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.Olmo2ForCausalLM(config).eval()


class Filled(nn.Module):
    """What `from_pretrained` needs of a class: a constructor and `load_state_dict`."""

    def __init__(self, cfg: Any, tokenizer: Any = None, move_to_device: bool = True, **options: Any) -> None:
        super().__init__()
        self.cfg, self.tokenizer, self.options = cfg, tokenizer, options
        self.weights: dict[str, Tensor] = {}

    def load_state_dict(self, state: dict[str, Tensor], strict: bool = True, assign: bool = False) -> Any:  # type: ignore[override]
        self.weights = state
        return [], []

    def forward(self, tokens: Tensor) -> Tensor:
        return from_hooked_transformer(self.weights, self.cfg.to_dict())(tokens)


def load(name: str = "anything", **options: Any) -> Filled:
    options = {"device": "cpu", "dtype": torch.float64, **options}
    return from_pretrained(Filled, name, **options)


def hf_logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize("name", FAMILIES)
def test_unprocessed_logits_are_hugging_faces(name: str) -> None:
    model = source(name)
    ours = from_pretrained_no_processing(
        Filled, "anything", hf_model=model, device="cpu", dtype=torch.float64
    )
    assert ours.cfg.normalization_type in ("LN", "RMS")
    assert_close(ours(TOKENS), hf_logits(model), torch.float32)


@pytest.mark.parametrize("name", FAMILIES)
def test_processed_probabilities_are_hugging_faces(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = source(name)
    ours = load(hf_model=model)
    assert_close(ours(TOKENS).log_softmax(-1), hf_logits(model).log_softmax(-1), torch.float32)
    folded = name != "olmo2"
    assert ours.cfg.normalization_type.endswith("Pre") == folded
    assert not any(n.endswith((".ln1.w", "ln_final.w")) for n in ours.weights) or not folded
    centred = ours.weights["unembed.W_U"].mean(-1).abs().max() < 1e-12
    assert centred == (name != "gemma2")
    assert ("center_unembed is left out" in caplog.text) == (name == "gemma2")
    assert ("fold_ln is left out" in caplog.text) == (name == "olmo2")


def test_what_transformer_lens_cannot_express_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="TransformerLens cannot express act='quick_gelu'"):
        load(hf_model=hf_model("gpt2-quick", torch.float64))


def test_the_config_says_what_was_loaded() -> None:
    cfg = load("some/Name", hf_model=hf_model("gpt2")).cfg
    assert (cfg.model_name, cfg.original_architecture, cfg.dtype) == (
        "Name",
        "GPT2LMHeadModel",
        torch.float64,
    )
    assert cfg.default_prepend_bos and not cfg.from_checkpoint and cfg.tokenizer_name is None
    assert not load(hf_model=hf_model("gpt-neox")).cfg.default_prepend_bos
    assert load(hf_model=hf_model("gpt-neox"), default_prepend_bos=True).cfg.default_prepend_bos
    assert load("gpt2-small", hf_model=hf_model("gpt2")).cfg.model_name == "gpt2"


def test_a_local_folder_is_loaded_with_its_tokenizer(tmp_path: Path) -> None:
    model = new_hf_model("gpt2")
    model.save_pretrained(tmp_path)
    gpt2_tokenizer().save_pretrained(tmp_path)
    ours = load(str(tmp_path), dtype="fp32")
    assert_close(ours(TOKENS).log_softmax(-1), hf_logits(model).log_softmax(-1))
    assert ours.tokenizer.encode("the cat") == gpt2_tokenizer().encode("the cat")
    assert ours.cfg.tokenizer_name == str(tmp_path)
    given = gpt2_tokenizer()
    assert load(str(tmp_path), tokenizer=given).tokenizer is given


def test_a_demo_is_loaded_with_its_tokenizer_and_its_checkpoints() -> None:
    native = interp.HookedTransformer.from_pretrained("demo-attn-2l", dtype=torch.float64)
    ours = load("demo-attn-2l", center_unembed=False)
    text = "The capital of France is Paris."
    tokens = native.to_tokens(text)
    assert [ours.tokenizer.bos_token_id, *ours.tokenizer.encode(text, add_special_tokens=False)] == tokens[
        0
    ].tolist()
    assert_close(ours(tokens), native(tokens), torch.float32)
    labels, kind = get_checkpoint_labels("demo-attn-2l")
    assert [f"step{label}" for label in labels] == zoo.revisions("demo-attn-2l") and kind == "step"
    early = [load("demo-attn-2l", **{key: v}) for key, v in (
        ("checkpoint_index", 1), ("checkpoint_value", labels[1]), ("checkpoint_label", labels[1]),
        ("revision", f"step{labels[1]}"),
    )]  # fmt: skip
    assert early[0].cfg.checkpoint_value == labels[1] and early[0].cfg.from_checkpoint
    for model in early:
        assert torch.equal(model.weights["unembed.W_U"], early[0].weights["unembed.W_U"])
    assert not torch.equal(early[0].weights["unembed.W_U"], ours.weights["unembed.W_U"])


@pytest.mark.parametrize("name", ["demo-4l", "groundtruth-induction"])
def test_the_other_demos_load_too(name: str) -> None:
    native = interp.HookedTransformer.from_pretrained(name, dtype=torch.float64)
    ours = load(name)
    tokens = torch.arange(1, 11)[None]
    assert_close(ours(tokens).log_softmax(-1), native(tokens).log_softmax(-1), torch.float32)
    assert (ours.tokenizer is None) == (name == "groundtruth-induction")


def test_fewer_layers_and_another_context_length() -> None:
    model = hf_model("gpt2", torch.float64)
    short = load(hf_model=model, first_n_layers=1, n_ctx=20, fold_ln=False)
    assert (short.cfg.n_layers, short.cfg.n_ctx) == (1, 20)
    assert short.weights["pos_embed.W_pos"].shape[0] == 20 and "blocks.1.attn.W_Q" not in short.weights
    assert short(TOKENS).shape == hf_logits(model).shape
    with pytest.raises(ValueError, match=r"first_n_layers must be in \[1, 2\], got 3"):
        load(hf_model=model, first_n_layers=3)
    with pytest.raises(ValueError, match="n_ctx must be at most"):
        load(hf_model=model, n_ctx=10_000)
    assert load(hf_model=hf_model("llama", torch.float64), n_ctx=10_000).cfg.n_ctx == 10_000


def test_half_precision_is_kept_and_advised_against(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("llama", "gemma"):  # gemma's gamma is stored as gamma - 1, which bfloat16 would round twice
        ours = load(hf_model=hf_model(name), dtype="bfloat16")
        assert {w.dtype for w in ours.weights.values()} == {torch.bfloat16}
    assert "no_processing" in caplog.text
    assert load(hf_model=hf_model("gpt2"), torch_dtype=torch.float16).cfg.dtype == torch.float16


def test_default_padding_side_is_handed_on_and_no_tokenizer_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours = load("no/such-model", hf_model=hf_model("gpt2"), default_padding_side="left")
    assert ours.options == {"default_padding_side": "left"} and ours.tokenizer is None
    assert "give tokenizer=" in caplog.text


def test_config_and_weights_come_apart_too() -> None:
    model = hf_model("llama", torch.float64)
    cfg = get_pretrained_model_config("x", hf_cfg=model.config.to_dict(), fold_ln=True, dtype=torch.float64)
    assert cfg.normalization_type == "RMSPre"
    state = get_pretrained_state_dict("x", cfg, model, dtype=torch.float64)
    assert state["blocks.0.attn.W_Q"].shape == (cfg.n_heads, cfg.d_model, cfg.d_head)
    assert loading_from_pretrained.get_num_params_of_pretrained("demo-4l") > 0
    fields = loading_from_pretrained.convert_hf_model_config("demo-4l")
    assert (fields["n_layers"], fields["normalization_type"]) == (4, "LN")


NAMES = {
    "gpt2-small": "gpt2", "gpt2-xl": "gpt2-xl", "GPT2": "gpt2", "pythia-70m": "EleutherAI/pythia-70m",
    "pythia-19m": "EleutherAI/pythia-70m", "EleutherAI/pythia-1.3b-deduped": "EleutherAI/pythia-1.4b-deduped",
    "tiny-stories-1M": "roneneldan/TinyStories-1M", "gpt-j": "EleutherAI/gpt-j-6B", "opt": "facebook/opt-125m",
    "gemma-2-2b": "google/gemma-2-2b", "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B", "some/Model": "some/Model",
    "demo-4l": "demo-4l", "Llama-2-7b": "meta-llama/Llama-2-7b-hf", "neo": "EleutherAI/gpt-neo-125M",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_short_names_mean_what_they_mean_in_transformer_lens(name: str) -> None:
    assert get_official_model_name(name) == NAMES[name]


ELSEWHERE = (
    "allenai/OLMo-1B", "allenai/OLMo-7B", "allenai/OLMoE", "allenai/Olmo-3", "bigcode/", "facebook/hubert",
    "facebook/wav2vec2", "google-bert/", "google-t5/", "llama-", "Qwen/Qwen-", "swiss-ai/",
    *loading_from_pretrained.TRANSFORMER_LENS_ONLY,
)  # fmt: skip
"""Families that we do not have, or not under this face; and names that the hub does not have."""


def test_every_name_of_their_table_means_the_same_or_is_refused_by_name() -> None:
    """The table of the installed transformer-lens (3 and 4 have it), read without importing the package."""
    found = find_spec("transformer_lens")
    if found is None or found.origin is None:
        pytest.skip("transformer-lens is not installed")
    theirs = runpy.run_path(str(Path(found.origin).with_name("supported_models.py")))
    table = {name: [] for name in theirs["OFFICIAL_MODEL_NAMES"]} | theirs["MODEL_ALIASES"]
    assert len(table) > 200
    same = 0
    for name, aliases in table.items():
        for alias in {name, name.lower(), *aliases}:
            if not name.startswith(ELSEWHERE):
                assert get_official_model_name(alias) == name, alias
                same += 1
            elif "/" not in alias:
                with pytest.raises(ValueError, match=rf"{re.escape(alias)} (not found|exists as a file)"):
                    get_official_model_name(alias)
    assert same > 450


def test_steps_of_pythia() -> None:
    steps, kind = get_checkpoint_labels("pythia-70m")
    assert kind == "step" and (steps[0], steps[1], steps[10], steps[11], steps[-1]) == (
        0,
        1,
        512,
        1000,
        143_000,
    )
    assert len(steps) == 154 and len(get_checkpoint_labels("pythia-70m-v0")[0]) == 143
    assert len(get_checkpoint_labels("stanford-crfm/alias-gpt2-small-x21")[0]) == 609


REFUSED: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "gpt3": (ValueError, r"gpt3 not found.*nearest|gpt3 not found.*gpt2", {}),
    "solu-1l": (ValueError, "load_hooked", {}),
    "t5-small": (RuntimeError, "interp.HookedEncoderDecoder", {}),
    "bert-base-cased": (RuntimeError, r"interp.HookedTransformer.from_pretrained", {}),
    "gpt2": (ValueError, "got cache_dir.*HF_HOME", {"cache_dir": "x"}),
    "gpt2 ": (AssertionError, "Quantization", {"load_in_4bit": True}),
    "gpt2-medium": (ValueError, "devices=", {"n_devices": 2}),
    "demo-4l": (ValueError, "give one of them", {"checkpoint_value": 1, "checkpoint_label": 1}),
    "demo-attn-2l": (AssertionError, "Checkpoint value 7 is not in list", {"checkpoint_value": 7}),
    "groundtruth-induction": (ValueError, "not checkpointed", {"checkpoint_index": 0}),
    "gpt2-large": (KeyError, "torch.dtype or one of", {"dtype": "int7"}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_offered_is_refused_with_the_native_way(name: str) -> None:
    error, message, options = REFUSED[name]
    with pytest.raises(error, match=message):
        load(name.strip(), **options)


def test_models_of_transformer_lens_own_are_sent_to_load_hooked() -> None:
    with pytest.raises(ValueError, match="load_hooked"):
        loading_from_pretrained.convert_neel_model_config("NeelNanda/GELU_1L512W_C4_Code")


def test_weights_that_do_not_fit_are_an_error() -> None:
    class Other(Filled):
        def load_state_dict(self, state: dict[str, Tensor], strict: bool = True, assign: bool = False) -> Any:  # type: ignore[override]
            return ["blocks.0.attn.mask", "blocks.0.attn.W_Q"], []

    with pytest.raises(ValueError, match=r"missing \['blocks.0.attn.W_Q'\]"):
        from_pretrained(Other, "x", hf_model=hf_model("gpt2"), device="cpu")


def test_loading_says_so_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    load("demo-4l")
    assert capsys.readouterr().out == "Loaded pretrained model demo-4l into HookedTransformer\n"


def test_a_subclass_own_from_pretrained_is_asked() -> None:
    class Mine(Filled):
        @classmethod
        def from_pretrained(cls, name: str, **options: Any) -> "Mine":
            return cls({"name": name, **options})

    found = from_pretrained_no_processing(Mine, "x", n_ctx=3)
    assert found.cfg["name"] == "x" and found.cfg["n_ctx"] == 3 and found.cfg["fold_ln"] is False


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "gpt-neox"])
def test_the_real_class_gives_hugging_faces_probabilities(name: str) -> None:
    hooked = pytest.importorskip("interp.compat.transformer_lens.hooked_transformer")
    model = hf_model(name, torch.float64)
    ours = from_pretrained(hooked.HookedTransformer, "x", hf_model=model, device="cpu", dtype=torch.float64)
    with torch.no_grad():
        assert_close(ours(TOKENS).log_softmax(-1), hf_logits(model).log_softmax(-1), torch.float32)


def test_the_tokenizer_that_a_config_names_is_found(tmp_path: Path) -> None:
    cfg = get_pretrained_model_config("demo-4l")
    assert cfg.tokenizer_name == "demo-4l"
    assert tokenizer_for(cfg).bos_token == "<|bos|>"
    cfg.tokenizer_name = str(tmp_path)
    assert tokenizer_for(cfg) is None
    gpt2_tokenizer().save_pretrained(tmp_path)
    assert tokenizer_for(cfg).encode("the cat") == gpt2_tokenizer().encode("the cat")
    cfg.tokenizer_name = "no/such-model"
    with pytest.raises(OSError, match=r"offline|no/such-model"):
        tokenizer_for(cfg)


# models that TransformerLens itself stored


@over("name", CASES)
def test_a_file_of_transformer_lens_gives_its_logits_in_its_own_shape(name: str) -> None:
    """Whatever TransformerLens 3.9 could be, SoLU among it; the file's device and seed are not followed."""
    theirs = oracle(name)
    config = theirs.said["config"] | {"device": "cuda", "seed": 3, "tokenizer_name": "no/such"}
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with TemporaryDirectory() as folder:
        torch.save({"model": theirs.group("state"), "config": config}, file := Path(folder) / "model.pt")
        model = HookedTransformer.load_hooked(file)
    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(model(theirs["tokens"]), theirs["logits"], **theirs.close)


def test_files_of_transformer_lens_are_complete_or_lack_a_kind_of_bias(tmp_path: Path) -> None:
    theirs = oracle("ln")
    state, config, file = theirs.group("state"), theirs.said["config"], tmp_path / "model.pt"
    plain = {n: w for n, w in state.items() if ".b_" not in n}
    torch.save(plain, file)
    model = HookedTransformer.load_hooked(file, config)
    torch.save(state | {n: torch.zeros_like(w) for n, w in state.items() if ".b_" in n}, file)
    assert torch.equal(model(theirs["tokens"]), HookedTransformer.load_hooked(file, config)(theirs["tokens"]))
    half = HookedTransformer.load_hooked(file, config, dtype=torch.float32)
    assert {p.dtype for p in half.parameters()} == {torch.float32}
    nan = {"embed.W_E": torch.full_like(state["embed.W_E"], torch.nan)}
    for message, damaged, fields in (
        (
            r"missing \['blocks.1.attn.b_Q'\]",
            {n: w for n, w in state.items() if n != "blocks.1.attn.b_Q"},
            config,
        ),
        (r"left over \['blocks.0.attn.W_X'\]", state | {"blocks.0.attn.W_X": torch.ones(1)}, config),
        (r"W_E requires shape \[7, 4\], got \[4, 7\]", state | {"embed.W_E": state["embed.W_E"].T}, config),
        (r"embed.W_E: the checkpoint holds NaN", state | nan, config),
        (r"unexpected keyword argument 'warp_drive'", state, config | {"warp_drive": True}),
        (r"holds no config", state, None),
    ):
        torch.save(damaged, file)
        with pytest.raises(ValueError, match=message):
            HookedTransformer.load_hooked(file, fields)


def test_a_subclass_loads_files_of_transformer_lens_too() -> None:
    class Mine(HookedTransformer):
        pass

    file = Path(__file__).parents[1] / "data" / "hooked_transformer_3_9.pt"
    sample = torch.load(file.with_name("hooked_transformer_3_9_logits.pt"), weights_only=True)
    model = Mine.load_hooked(file)
    assert type(model) is Mine
    assert_close(model(sample["tokens"]), sample["logits"])
