"""Facts of a model: shape, memory and maximum speed."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Unpack

from headrace.backend import lower_program
from headrace.backend_traits import BackendName, KvDtype, traits_of
from headrace.checkpoint.dummy import dummy_tensors, is_config_only, open_dummy_checkpoint
from headrace.checkpoint.key_biases import has_large_key_biases
from headrace.checkpoint.load import open_checkpoint
from headrace.checkpoint.source import resolve
from headrace.config import EngineConfig
from headrace.loader.backend_choice import choose_backend, with_kv_dtype
from headrace.loader.memory import memory_for
from headrace.loader.options import engine_config
from headrace.loader.rope import with_rope_options
from headrace.measure.options import EngineOptions
from headrace.model import trace_model
from headrace.model.spec import ModelSpec
from headrace.parallel.config import mesh_of, rank_programs
from headrace.planner import hardware, roofline
from headrace.planner.fit import Fit
from headrace.program.kv import KvGroup, number_bytes, token_bytes
from headrace.program.moe import Experts
from headrace.program.op import StepSize
from headrace.program.trace import Program
from headrace.quant.formats import FORMATS, StoredTensor

DEPTHS = (0, 2048)
"""Tokens of context."""
TOKENIZER_BYTES = 750
"""Bytes of a tokenizer per token while it is built (Qwen2.5: 738, SmolLM2: 716)."""
_FORMATS = ("BF16", "Q8_0", "Q6_K", "Q4_K", "Q4_0")

KeyKind = Literal[
    "large biases",
    "no large biases, no norm",
    "a norm",
    "a latent row",
    "biases of unknown size",
]
"""What decides how much rounded keys lose (docs/internals/kv_formats.md)."""

_KV_NLL: Mapping[KeyKind, tuple[str, Mapping[KvDtype, float]]] = {
    "large biases": (
        "Qwen2.5-Coder-0.5B",
        {"bf16": 0.10, "f16": 0.00, "int8": 0.01, "k8v4": -0.02, "int4": 0.61},
    ),
    "no large biases, no norm": (
        "SmolLM2-135M",
        {"bf16": 0.03, "f16": 0.05, "int8": -0.06, "k8v4": 0.28, "int4": 0.70},
    ),
}
"""By kind of keys, the model that was measured, and percent of NLL above KV in f32."""


def describe(model: str, **options: Unpack[EngineOptions]) -> dict[str, Any]:
    """All facts as JSON, in bytes, counts and tokens/s.

    No weight is read, except a head next to a tied embedding, to compare both.
    """
    path = resolve(model)
    has_weights = not is_config_only(path)
    checkpoint = open_checkpoint(path) if has_weights else open_dummy_checkpoint(path)
    config = engine_config(options)
    checkpoint = replace(checkpoint, spec=with_rope_options(checkpoint.spec, config))
    config = with_kv_dtype(config, checkpoint)
    spec, tensors = checkpoint.spec, checkpoint.tensors.values()
    traced = trace_model(spec, checkpoint.tensors)
    choice = choose_backend(config, checkpoint)
    config = replace(config, backend=choice.backend)
    program = lower_program(config.backend, traced, checkpoint.tensors)

    bytes_by_type: Counter[str] = Counter()
    for tensor in tensors:
        bytes_by_type[tensor.format.name] += tensor.nbytes
    return {
        "model": model,
        "backend": choice.backend,
        "backend_remark": choice.remark,
        "path": str(checkpoint.path),
        "name": spec.name,
        "architecture": spec.architecture,
        "has_weights": has_weights,
        "notes": list(checkpoint.notes),
        "parameters": sum(tensor.rows * tensor.cols for tensor in tensors),
        **_expert_facts(program, spec),
        "layers": spec.num_layers,
        "width": spec.dim,
        "heads": spec.num_heads,
        "kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "ffn_width": spec.ffn_dim,
        "vocabulary": spec.vocab_size,
        "context": spec.max_context,
        "chat_template": checkpoint.chat_template is not None,
        "bytes_by_type": dict(bytes_by_type.most_common()),
        "bytes": bytes_by_type.total(),
        "bytes_in_memory": program.weight_bytes,
        "bytes_in_format": {} if has_weights else _bytes_in_formats(spec),
        "kv_groups": [_kv_group_facts(group, choice.backend) for group in program.kv_groups],
        "tokenizer_bytes": spec.vocab_size * TOKENIZER_BYTES,
        "kv_dtype": config.kv_format,
        "kv_nll": kv_nll(key_kind(spec, checkpoint.tensors if has_weights else None)),
        **_memory_facts(config, program, spec),
        "limits": _speed_limits(program, choice.backend),
        "ranks": _rank_facts(config, traced, checkpoint.tensors),
    }


def _bytes_in_formats(spec: ModelSpec) -> dict[str, int]:
    return {
        name: sum(tensor.nbytes for tensor in dummy_tensors(spec, FORMATS[name]).values())
        for name in _FORMATS
    }


def key_kind(spec: ModelSpec, tensors: Collection[str] | None) -> KeyKind:
    """Classify the keys of a model by the names of its tensors, which are None without weights."""
    if spec.mla:
        return "a latent row"
    if spec.qk_norm != "none":
        return "a norm"
    if tensors is None and spec.qkv_bias:
        return "biases of unknown size"
    is_biased = tensors is not None and has_large_key_biases(tensors)
    return "large biases" if is_biased else "no large biases, no norm"


def kv_nll(kind: KeyKind) -> dict[str, Any]:
    """The measured loss of formats of KV, on a model with such keys."""
    model, percent = _KV_NLL.get(kind, (None, {}))
    return {"keys": kind, "model": model, "percent": dict(percent)}


def _memory_facts(config: EngineConfig, program: Program, spec: ModelSpec) -> dict[str, Any]:
    memory, context = memory_for(config, program), spec.max_context
    tokenizer = 0 if memory.on_gpu else spec.vocab_size * TOKENIZER_BYTES
    groups, dtypes = program.kv_groups, config.traits.kv_dtypes
    fits = {
        dtype: Fit(
            memory=memory.available,
            weights=program.weight_bytes,
            kv_per_sequence=_sequence_bytes(groups, dtype, context, config.backend),
            context=context,
            to_run=memory.runtime + tokenizer,
        )
        for dtype in dtypes
    }
    return {
        "kv_bytes_per_token": {dtype: token_bytes(groups, dtype) for dtype in dtypes},
        "memory_available": memory.available,
        "memory_of_gpu": memory.on_gpu,
        "fits": {
            dtype: {"tokens": fit.tokens, "full_sequences": fit.sequences}
            for dtype, fit in fits.items()
        },
    }


def _kv_group_facts(group: KvGroup, backend: BackendName) -> dict[str, Any]:
    sizes = {dtype: token_bytes((group,), dtype) for dtype in traits_of(backend).kv_dtypes}
    return {"layers": len(group.layers), "window": group.window, "kv_bytes_per_token": sizes}


def _rank_facts(
    config: EngineConfig, program: Program, tensors: Mapping[str, StoredTensor]
) -> list[dict[str, int]]:
    mesh = mesh_of(config)
    if mesh.ranks == 1:
        return []
    decode, prefill = StepSize(((0, 1),), 1, 0), StepSize(((0, 512),), 1, 0)
    return [
        {
            "stage": mesh.stage(rank),
            "layers": sum(len(group.layers) for group in share.kv_groups),
            "bytes_in_memory": share.weight_bytes,
            "kv_bytes_per_token": token_bytes(share.kv_groups, config.kv_format),
            "bytes_received_decode": sum(op.link_bytes(decode) for op in share.ops),
            "bytes_received_prefill_512": sum(op.link_bytes(prefill) for op in share.ops),
        }
        for rank, share in enumerate(rank_programs(config, program, tensors))
    ]


def _expert_facts(program: Program, spec: ModelSpec) -> dict[str, int]:
    if not spec.experts:
        return {}
    ops = [op for op in program.ops if isinstance(op, Experts)]
    inactive = 0
    for op in ops:
        expert = (op.gate[0], op.up[0], op.down[0])
        expert_parameters = sum(weight.rows * weight.cols for weight in expert)
        inactive += (len(op.gate) - op.top_k) * expert_parameters
    parameters = sum(weight.rows * weight.cols for weight in program.weights.values())
    return {
        "experts": spec.experts.num_experts,
        "experts_per_token": spec.experts.top_k,
        "layers_with_experts": len(ops),
        "active_parameters": parameters - inactive,
    }


def _sequence_bytes(
    groups: Sequence[KvGroup], dtype: KvDtype, context: int, backend: BackendName
) -> int:
    max_rows, block_size = EngineConfig(backend=backend).max_rows, traits_of(backend).kv_block_size
    return sum(
        group.num_blocks(context, max_rows, block_size) * group.block_bytes(dtype, block_size)
        for group in groups
    )


def _speed_limits(program: Program, backend: BackendName) -> dict[str, float] | None:
    machine = hardware.cached_machine(backend=backend)
    if machine is None:
        return None
    kv_bytes = number_bytes(program.kv_groups, "bf16")
    limits = {
        f"decode_at_{depth}": roofline.decode_limit(program, machine, depth, kv_bytes)
        for depth in DEPTHS
    }
    return limits | {"prefill_512": roofline.prefill_limit(program, machine, 512, kv_bytes)}
