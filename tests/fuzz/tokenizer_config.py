"""`tokenizer_config.json`, `config.json` and `generation_config.json`: special tokens, ends, chat
templates.
"""

import json
import random
from typing import Any

from headrace.checkpoint.folder import chat_template
from headrace.checkpoint.tokenizer_hf import tokenizer_from_folder
from tests.fuzz.files import scratch, use_tokenizer
from tests.fuzz.mutate import mutate_json
from tests.fuzz.tokenizer import valid_inputs

_BOS = {
    "__type": "AddedToken",
    "content": "<s>",
    "lstrip": False,
    "normalized": False,
    "rstrip": False,
    "single_word": False,
}
ORIGINALS: list[dict[str, Any]] = [
    {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "add_bos_token": True,
        "eos_token_id": [2, 1],
        "chat_template": "{{ messages[0].content }}",
    },
    {
        "bos_token": _BOS,
        "eos_token": {"content": "new"},
        "bos_token_id": 1,
        "eos_token_id": 2,
        "chat_template": [{"name": "default", "template": "a"}, {"name": "rag"}],
    },
]


def case(rng: random.Random) -> bytes:
    return mutate_json(
        rng,
        rng.choice(ORIGINALS),
        [_BOS, [["default", "x"]], {"name": "default", "template": ["x"]}],
    )


def run(case: bytes) -> None:
    path = scratch() / "configured"
    path.mkdir(exist_ok=True)
    (path / "tokenizer.json").write_text(json.dumps(valid_inputs()[1]))
    for name in ("tokenizer_config.json", "config.json", "generation_config.json"):
        (path / name).write_bytes(case)
    chat_template(path)
    use_tokenizer(tokenizer_from_folder(path))
