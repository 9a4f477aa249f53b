"""Beam search against transformers, on a tiny random model in float32."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.backend import compile_program
from headrace.checkpoint.load import open_checkpoint
from headrace.config import EngineConfig, KvConfig
from headrace.engine.engine import Engine, EngineLimits
from headrace.model import trace_model
from headrace.sampling_params import SamplingParams
from tests.tiny import TinyVocabulary, run_all

VOCAB = 61
KV = KvConfig((64,), 4, "f32")
CASES: list[tuple[dict[str, Any], tuple[int, ...]]] = [  # parameters, end tokens
    ({"beam_width": 4, "n": 4}, ()),
    ({"beam_width": 4, "n": 2}, (3, 9, 17, 25)),
    ({"beam_width": 3, "n": 3, "early_stopping": True}, (3, 9, 17, 25, 33, 41)),
    ({"beam_width": 3, "n": 3, "early_stopping": False}, (3, 9, 17, 25, 33, 41)),
    ({"beam_width": 5, "n": 5, "length_penalty": 0.0}, (5, 6, 7, 8, 10, 11)),
    ({"beam_width": 5, "n": 5, "length_penalty": 2.0}, (5, 6, 7, 8, 10, 11)),
    ({"beam_width": 2, "n": 1, "length_penalty": -1.0}, tuple(range(0, 60, 5))),
    ({"beam_width": 4, "n": 4, "min_tokens": 5}, tuple(range(0, 60, 4))),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[LlamaForCausalLM, Path]:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = LlamaConfig(
        **sizes,
        vocab_size=VOCAB,
        max_position_embeddings=128,
        initializer_range=0.3,
        attn_implementation="eager",
    )
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    model, path = LlamaForCausalLM(config).eval(), tmp_path_factory.mktemp("beam")
    model.save_pretrained(path)
    return model, path


@pytest.mark.parametrize("prompt", [[7], [1, 2, 3, 4, 5, 6, 50, 51, 52]])
@pytest.mark.parametrize(("options", "ends"), CASES)
def test_equal_to_transformers(
    saved: tuple[LlamaForCausalLM, Path],
    prompt: list[int],
    options: dict[str, Any],
    ends: tuple[int, ...],
) -> None:
    model, path = saved
    params = SamplingParams(max_tokens=12, **options)
    generated = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        num_beams=params.beam_width,
        num_return_sequences=params.n,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        max_new_tokens=params.max_tokens,
        min_new_tokens=params.min_tokens or None,
        renormalize_logits=True,
        eos_token_id=list(ends) or None,
        pad_token_id=VOCAB - 1,
        return_dict_in_generate=True,
        output_scores=True,
    )
    checkpoint = open_checkpoint(path)
    program = trace_model(checkpoint.spec, checkpoint.tensors)
    executable = compile_program("reference", program, checkpoint.tensors, KV, 1)
    engine = Engine(
        executable,
        TinyVocabulary(VOCAB, ends),
        EngineLimits(VOCAB, 128, KV, program.kv_groups),
        EngineConfig(),
    )
    (result,) = run_all(engine, [(prompt, params)])
    assert len(result.outputs) == params.n
    for output, sequence, score in zip(
        result.outputs, generated.sequences, generated.sequences_scores, strict=True
    ):
        length = len(output.token_ids)
        assert output.token_ids == sequence[len(prompt) :][:length].tolist()
        assert set(sequence[len(prompt) + length :].tolist()) <= {VOCAB - 1}
        assert output.cumulative_logprob == pytest.approx(
            float(score) * length**params.length_penalty, rel=1e-4
        )
