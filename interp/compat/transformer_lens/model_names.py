"""Short names of models, as TransformerLens' users type them, and what the hub calls these models.

Any other hub name, local folder or live model of a supported family loads too; the table only spares typing.
"""

from interp import zoo

_PYTHIAS = {
    "14m": "", "31m": "", "70m": "19m", "160m": "125m", "410m": "350m", "1b": "800m", "1.4b": "1.3b",
    "2.8b": "2.7b", "6.9b": "6.7b", "12b": "13b",
}  # fmt: skip
"""Sizes, and what they were called before 2023."""
_STORIES = {"1M": "1M", "3M": "3M", "8M": "8M", "28M": "28M", "33M": "33M", "1L-21M": "1Layer-21M"}
_SAME = {
    "EleutherAI": ("gpt-neo-125M", "gpt-neo-1.3B", "gpt-neo-2.7B", "gpt-neox-20b"),
    "facebook": ("opt-125m", "opt-1.3b", "opt-2.7b", "opt-6.7b", "opt-13b", "opt-30b", "opt-66b"),
    "bigscience": ("bloom-560m", "bloom-1b1", "bloom-1b7", "bloom-3b", "bloom-7b1"),
    "google": (
        "gemma-2b", "gemma-2b-it", "gemma-7b", "gemma-7b-it", "gemma-2-2b", "gemma-2-2b-it", "gemma-2-9b",
        "gemma-2-9b-it", "gemma-2-27b", "gemma-2-27b-it", "gemma-3-270m", "gemma-3-270m-it", "gemma-3-1b-pt",
        "gemma-3-1b-it", "gemma-3-4b-pt", "gemma-3-4b-it",
    ),
    "Qwen": (
        "Qwen2-0.5B", "Qwen2-1.5B", "Qwen2-7B", "Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-3B", "Qwen2.5-7B",
        "Qwen2.5-14B", "Qwen2.5-32B", "Qwen2.5-72B", "Qwen2-0.5B-Instruct", "Qwen2-1.5B-Instruct",
        "Qwen2-7B-Instruct", "Qwen2.5-0.5B-Instruct", "Qwen2.5-1.5B-Instruct", "Qwen2.5-3B-Instruct",
        "Qwen2.5-7B-Instruct", "Qwen3-0.6B", "Qwen3-0.6B-Base", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B",
    ),
    "microsoft": ("phi-1", "phi-1_5", "phi-2"),
}  # fmt: skip
"""Owner -> models whose short name is what follows the owner."""
_OTHERS = {
    "gpt2": ["gpt2-small"],
    "distilgpt2": ["distillgpt2", "distill-gpt2", "distil-gpt2", "gpt2-xs"],
    "EleutherAI/gpt-neo-125M": ["gpt-neo-small", "neo-small", "neo"],
    "EleutherAI/gpt-neo-1.3B": ["gpt-neo-medium", "neo-medium"],
    "EleutherAI/gpt-neo-2.7B": ["gpt-neo-large", "neo-large"],
    "EleutherAI/gpt-j-6B": ["gpt-j-6B", "gpt-j", "gptj"],
    "EleutherAI/gpt-neox-20b": ["gpt-neox", "neox"],
    "EleutherAI/pythia-70m": ["pythia"],
    "facebook/opt-125m": ["opt-small", "opt"],
    "facebook/opt-1.3b": ["opt-medium"],
    "facebook/opt-2.7b": ["opt-large"],
    "facebook/opt-6.7b": ["opt-xl"],
    "facebook/opt-13b": ["opt-xxl"],
    "meta-llama/Llama-2-7b-hf": ["Llama-2-7b"],
    "meta-llama/Llama-2-7b-chat-hf": ["Llama-2-7b-chat"],
    "meta-llama/Llama-2-13b-hf": ["Llama-2-13b"],
    "meta-llama/Llama-2-13b-chat-hf": ["Llama-2-13b-chat"],
    "microsoft/Phi-3-mini-4k-instruct": ["phi-3"],
    "mistralai/Mistral-7B-v0.1": ["mistral-7b"],
    "mistralai/Mistral-7B-Instruct-v0.1": ["mistral-7b-instruct"],
    "mistralai/Mixtral-8x7B-v0.1": ["mixtral", "mixtral-8x7b"],
    "allenai/OLMo-2-1124-7B": ["olmo-2-7b"],
    "allenai/OLMo-2-0425-1B": ["olmo-2-1b"],
}
_STATED = ("gpt2-medium", "gpt2-large", "gpt2-xl")


def _aliases() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {name: [] for name in (*zoo.DEMOS, "gpt2", *_STATED)}
    for size, old in _PYTHIAS.items():
        for kind in ("", "-deduped", "-v0", "-deduped-v0") if old else ("",):
            names = [f"pythia-{s}{kind}" for s in (size, old) if s]
            found[f"EleutherAI/{names[0]}"] = [*names, *(f"EleutherAI/{n}" for n in names[1:])]
    for ours, theirs in _STORIES.items():
        found[f"roneneldan/TinyStories-{theirs}"] = [f"tiny-stories-{ours}"]
    for owner, models in _SAME.items():
        found |= {f"{owner}/{model}": [model] for model in models}
    for name, more in _OTHERS.items():
        found[name] = found.get(name, []) + more
    return dict(sorted(found.items(), key=lambda pair: pair[0].casefold()))


MODEL_ALIASES: dict[str, list[str]] = _aliases()
"""The hub's name -> the short names that mean it."""
OFFICIAL_MODEL_NAMES: list[str] = list(MODEL_ALIASES)
"""Models with a short name, and the embedded demos; by far not all that load."""

TRANSFORMER_LENS_ONLY = ("gelu-", "solu-", "attn-only-", "redwood_attn", "othello-gpt", "NeelNanda/", "Baidicoot/",
                         "ArthurConmy/")  # fmt: skip
"""Beginnings of names of models that exist as TransformerLens' own files only."""

PYTHIA_CHECKPOINTS = [0, *(2**n for n in range(10)), *range(1000, 143_001, 1000)]
PYTHIA_V0_CHECKPOINTS = list(range(1000, 143_001, 1000))
STANFORD_CRFM_CHECKPOINTS = [
    *range(0, 100, 10), *range(100, 2000, 50), *range(2000, 20_000, 100), *range(20_000, 400_001, 1000),
]  # fmt: skip
