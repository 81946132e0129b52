"""Chat templates in the forms that common models have, written for these tests, and a tokenizer that speaks them."""

import functools
from collections.abc import Mapping
from types import MappingProxyType

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.tiny import CORPUS, END

MARKS = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>",
)  # fmt: skip

CHATML = """
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
HEADERS = """
{{- bos_token }}
{%- for m in messages %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + (m.content | trim) + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
TURNS = """
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('there is no role system') }}{% endif %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set speaker = 'model' if m.role == 'assistant' else m.role %}
{{- '<start_of_turn>' + speaker + '\\n' + (m.content | trim) + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
INSTRUCTIONS = """
{%- set begin = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{{- bos_token }}
{%- for m in rest %}
{%- if m.role == 'user' %}{{ '[INST] ' + (begin if loop.first else '') + m.content + '[/INST]' }}
{%- else %}{{ ' ' + m.content + eos_token }}{% endif %}
{%- endfor %}"""
BARS = """
{%- for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""
THINKING = """
{%- set last = namespace(user=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set thought, said = '', m.content %}
{%- if '</think>' in m.content %}
{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set said = m.content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > last.user and thought %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}
{{- said + '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

TEMPLATES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "chatml": (CHATML, "<|im_end|>"),
        "headers": (HEADERS, "<|eot_id|>"),
        "turns": (TURNS, "<end_of_turn>"),
        "instructions": (INSTRUCTIONS, "</s>"),
        "bars": (BARS, "<|end|>"),
        "thinking": (THINKING, "<|im_end|>"),
    }
)
"""Name -> template, and the token with which it ends a turn."""


@functools.cache
def backend() -> tokenizers.Tokenizer:
    """A byte-level tokenizer with the marks of all templates as special tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=[END, *MARKS], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer


def speaking(template: str | None) -> PreTrainedTokenizerFast:
    """A transformers tokenizer with a chat template."""
    found = PreTrainedTokenizerFast(tokenizer_object=backend(), bos_token="<s>", eos_token="</s>")
    found.chat_template = template
    return found
