"""llama.cpp's converter, on folders without a tokenizer."""

import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch

AS_PUBLISHED: dict[str, dict[str, Any]] = {
    "bloom": {"seq_length": 2048},
    "cohere2": {"rotary_pct": 1.0},
    "deepseek_v3": {"scoring_func": "sigmoid", "norm_topk_prob": True},
    "gpt_neox": {"rotary_pct": 0.25},
    "mpt": {"architectures": ["MPTForCausalLM"]},
}
"""Fields of published configurations that the converter needs and transformers 5 does
not write.
"""


def convert(source: Path, folder: Path, file: Path) -> None:
    """Convert a folder to a float32 GGUF file with the converter of llama.cpp's
    sources.

    Raises NotImplementedError for unknown architectures, ValueError for unknown
    tensors.
    """
    if str(source) not in sys.path:
        sys.path[:0] = [str(source / "gguf-py"), str(source)]
        for name in [name for name in sys.modules if name.partition(".")[0] == "gguf"]:
            del sys.modules[
                name
                # the installed one, which tests of ours read: the converter needs the one that lies
                # beside it
            ]
    import gguf
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    vocab = {"model": {"vocab": {f"t{i}": i for i in range(101)}}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(
        json.dumps(vocab)
    )  # for Gemma 3 alone, whose rows it counts there
    for logger in ("hf-to-gguf", "gguf.gguf_writer"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    hparams = _as_published(ModelBase.load_hparams(folder, False))
    known = get_model_class(get_model_architecture(hparams, ModelType.TEXT))
    made = type(known.__name__, (known,), {"model_arch": known.model_arch, "set_vocab": _set_vocab})
    with torch.inference_mode():
        # A name of its own: llama.cpp looks for special tokens in a model that is called phi-3.
        model = made(
            folder, gguf.LlamaFileType.ALL_F32, file, eager=True, model_name="tiny", hparams=hparams
        )
        model.write()


def _as_published(config: dict[str, Any]) -> dict[str, Any]:
    kind = config["model_type"]
    config |= AS_PUBLISHED.get(kind, {})
    if kind == "gpt2":
        config["n_ctx"] = config["n_positions"]
    if kind == "falcon" and not config["new_decoder_architecture"]:
        config |= {"num_kv_heads": 1, "n_head_kv": 1}
    return config


def _set_vocab(self: Any) -> None:
    """Tokens that llama.cpp accepts as a byte-level vocabulary."""
    count = self.hparams["vocab_size"]
    self.gguf_writer.add_tokenizer_model("gpt2")
    self.gguf_writer.add_tokenizer_pre("gpt-2")
    self.gguf_writer.add_token_list([f"t{i}" for i in range(count)])
    self.gguf_writer.add_token_types([1] * count)
    self.gguf_writer.add_token_merges(["t 0"])
