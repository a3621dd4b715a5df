"""A tiny random model whose chat template opens reasoning, or with `enable_thinking=False` leaves it out."""

from __future__ import annotations

import json
from pathlib import Path

from support.tiny_llama import write_llama

from sgl.runtime.text.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}"
    "{% else %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}{% endif %}"
)


def write_thinker(folder: Path) -> str:
    """The model's path, once it is there."""
    write_llama(folder, vocab_size=512, max_position_embeddings=1024, eos_token_id=258)
    Tokenizer.toy()._backend.save(str(folder / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)
