"""The embedded model's tokenizer and chat template against transformers'."""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

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


@pytest.fixture(scope="module")
def cut_reference(reference: Any) -> tokenizers.Tokenizer:
    """transformers' conversion, with the pre-tokenizer of SmolLM2's own tokenizer.json."""
    backend = tokenizers.Tokenizer.from_str(reference.backend_tokenizer.to_str())
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.encode_special_tokens = True
    return backend


@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal(tokenizer: Tokenizer, reference: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == reference(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids) == reference.decode(ids, clean_up_tokenization_spaces=False)


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_ids_of_any_text_equal_with_the_cut_that_the_file_names(
    tokenizer: Tokenizer, reference: Any, cut_reference: Any, text: str
) -> None:
    """transformers' conversion drops `tokenizer.ggml.pre`: it cuts as GPT-2 does, and a number keeps the space before
    it. The file says `smollm`: numbers stand alone, and the spaces before one belong together, as in the model's
    training. Its conversion with that cut gives our ids for every text, and as it is for texts without numbers."""
    ids = tokenizer.encode(text)
    assert ids == cut_reference.encode(text, add_special_tokens=False).ids
    # What this Python does not know yet may be a number to the tokenizer.
    plain = "".join(char for char in text if not char.isnumeric() and unicodedata.category(char) != "Cn")
    assert tokenizer.encode(plain) == reference(plain, add_special_tokens=False).input_ids


def test_spaces_before_a_number_belong_together(tokenizer: Tokenizer, reference: Any, cut_reference: Any) -> None:
    two_spaces = tokenizer.encode("  ")
    assert len(two_spaces) == 1
    for text in ("  2", "a  2", "x = 12  34"):
        assert two_spaces[0] in tokenizer.encode(text)
        assert tokenizer.encode(text) == cut_reference.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text) != reference(text, add_special_tokens=False).input_ids


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
