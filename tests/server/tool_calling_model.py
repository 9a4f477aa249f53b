"""A tiny model that calls `weather` for Bern, and reports the result of the call."""

from pathlib import Path

import numpy as np

from tests.checkpoint.conftest import SHAPE, metadata, tensors, write_tiny_gguf

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
REPLY = "It is sunny in Bern."
_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}\n{% endfor %}"
    '{% if tools %}{{ tools | tojson }} <tool_call>\n{"name": ...}\n</tool_call>{% endif %}'
    "{% if add_generation_prompt %}{{ '<told>' if messages[-1].role == 'tool' else "
    "'<asked>' }}{% endif %}"
)
_USER_DEFINED = 4


def write_caller_gguf(path: Path) -> Path:
    """Write the model: each token alone determines the next one, because no layer changes it."""
    plain = metadata("llama")
    words = ["<asked>", "<told>", CALL, REPLY]
    tokens = [*plain["tokenizer.ggml.tokens"], *words]
    embeddings = (
        np.random.default_rng(0).normal(size=(len(tokens), SHAPE["dim"])).astype(np.float32)
    )
    weights = {
        name: np.zeros_like(tensor)
        for name, tensor in tensors(len(tokens)).items()
        if "norm" not in name
    }
    output = np.zeros_like(embeddings)
    for before, after in (
        ("<asked>", CALL),
        (CALL, "<|im_end|>"),
        ("<told>", REPLY),
        (REPLY, "<|im_end|>"),
    ):
        output[tokens.index(after)] += embeddings[tokens.index(before)]
    change = {
        "tokenizer.chat_template": _TEMPLATE,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [
            *plain["tokenizer.ggml.token_type"],
            *[_USER_DEFINED] * len(words),
        ],
        "llama.context_length": 1024,
    }
    own = {
        "token_embd.weight": embeddings,
        "output.weight": output,
        "output_norm.weight": np.ones(SHAPE["dim"], np.float32),
    }
    return write_tiny_gguf(path, change, weights | own)
