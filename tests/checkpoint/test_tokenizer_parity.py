"""Token ids against transformers' own tokenizers; `python -m tests.tokenizer_parity` is the long
form.
"""

from collections.abc import Callable

import pytest

from tests.tokenizer_parity import Kind, differences, llama, qwen2, smollm2, wordpiece


@pytest.mark.parametrize("make", [smollm2, qwen2, llama, wordpiece])
def test_ids_equal_those_of_transformers(make: Callable[[], Kind]) -> None:
    assert next(differences(make(), 100), None) is None


def test_word_pieces_stream_back() -> None:
    tokenizer = wordpiece().ours
    ids = tokenizer.encode("The hello, sings")
    assert tokenizer.decode(ids) == "the hello , sings"
    decoder = tokenizer.decoder()
    assert "".join(map(decoder.push, ids)) + decoder.flush() == tokenizer.decode(ids)
