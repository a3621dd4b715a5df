"""The embedded model's tokenizer and chat template against transformers'."""

from __future__ import annotations

from typing import Any

import pytest

from sgl.runtime.loading.gguf_reader import GGUFFile
from sgl.runtime.loading.sources import locate
from sgl.runtime.text.tokenizer import Tokenizer
from sgl.runtime.text.transcript import Transcript

TEXTS = [
    "Hello world",
    "  two  spaces\n\n\tand tabs \r\n",
    "don't can't WE'LL",
    "x = 1; y[0] += 22 # c",
    "café 日本語 🎉👩‍👩‍👧 Ω",
    "",
    "A" * 300,
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    path = locate("smollm2-135m").path
    assert path is not None
    return Tokenizer.from_gguf(GGUFFile(path).metadata)


@pytest.fixture(scope="module")
def reference() -> Any:
    from transformers import AutoTokenizer

    path = locate("smollm2-135m").path
    assert path is not None
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal(tokenizer: Tokenizer, reference: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == reference(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids) == reference.decode(ids, clean_up_tokenization_spaces=False)


def test_vocabulary(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_ids == {0, 2}
    assert not tokenizer.add_bos
    assert [tokenizer.decode([token_id]) for token_id in tokenizer.encode("12345")] == list("12345")
    assert len(tokenizer.encode("<|im_end|>")) > 1


def test_conversation_equal(tokenizer: Tokenizer, reference: Any) -> None:
    messages = [
        {"role": "user", "content": " Say 123. "},
        {"role": "assistant", "content": "123"},
        {"role": "user", "content": "Again\n"},
    ]
    transcript = Transcript(tokenizer)
    for message in messages:
        transcript.begin(message["role"])
        transcript.add_text(message["content"])
        transcript.end()
    transcript.begin("assistant")
    text = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert transcript.text == text
    assert transcript.text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert transcript.flush() == reference(text, add_special_tokens=False).input_ids
