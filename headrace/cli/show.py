"""Show what a model is, what it needs, how much KV fits in this machine's memory beside it, and how
fast it can be here at most.
"""

import argparse
from collections import Counter
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from headrace.backend_traits import BackendName, KvDtype, traits_of
from headrace.cli.arguments import PARALLEL, add_backend, add_json, add_model, add_parallel
from headrace.config import EngineConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.model.spec import ModelSpec
    from headrace.program.kv import KvGroup
    from headrace.program.trace import Program
    from headrace.quant.formats import StoredTensor

_FORMATS = ("BF16", "Q8_0", "Q6_K", "Q4_K", "Q4_0")
"""Formats whose size is told where there are no weights."""
_DEPTHS = (0, 2048)
_ALONE: "Mapping[str, Any]" = MappingProxyType({})
"""Options of a model that runs on one rank."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this verb."""
    add_model(parser, optional=True)
    add_json(parser)
    add_backend(parser)
    add_parallel(parser)


def run(args: argparse.Namespace) -> int:
    """Print the facts; nothing of the weights is read."""
    from headrace.cli.table import print_json

    facts = describe(args.model, {name: getattr(args, name) for name in ("backend", *PARALLEL)})
    if args.json:
        print_json(facts)
    else:
        _print(facts)
    return 0


def describe(model: str, options: "Mapping[str, Any]" = _ALONE) -> dict[str, Any]:
    """All facts, as they go to JSON: bytes, counts and tokens per second; `options`: the backend,
    and those in `arguments.PARALLEL`.
    """
    from headrace.backend import lower_program
    from headrace.checkpoint.dummy import dummy_tensors, is_config_only, open_dummy_checkpoint
    from headrace.checkpoint.load import open_checkpoint
    from headrace.checkpoint.source import resolve
    from headrace.loader.backend_choice import choose
    from headrace.loader.options import engine_config
    from headrace.model import trace_model
    from headrace.quant.formats import FORMATS

    path = resolve(model)
    bare = is_config_only(path)
    checkpoint = open_dummy_checkpoint(path) if bare else open_checkpoint(path)
    spec, tensors = checkpoint.spec, checkpoint.tensors.values()
    traced, config = trace_model(spec, checkpoint.tensors), engine_config(options)
    choice = choose(config, checkpoint)
    config = replace(config, backend=choice.backend)
    program = lower_program(config.backend, traced, checkpoint.tensors)
    formats: Counter[str] = Counter()
    for tensor in tensors:
        formats[tensor.format.name] += tensor.nbytes
    return {
        "model": model,
        "backend": choice.backend,
        "backend_remark": choice.remark,
        "path": str(checkpoint.path),
        "name": spec.name,
        "architecture": spec.architecture,
        "has_weights": not bare,
        "parameters": sum(tensor.rows * tensor.cols for tensor in tensors),
        **_experts(program, spec),
        "layers": spec.num_layers,
        "width": spec.dim,
        "heads": spec.num_heads,
        "kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "ffn_width": spec.ffn_dim,
        "vocabulary": spec.vocab_size,
        "context": spec.max_context,
        "chat_template": checkpoint.chat_template is not None,
        "bytes_by_type": dict(formats.most_common()),
        "bytes": formats.total(),
        "bytes_in_memory": program.weight_bytes,
        "bytes_in_format": {
            name: sum(t.nbytes for t in dummy_tensors(spec, FORMATS[name]).values())
            for name in _FORMATS
            if bare
        },
        "kv_groups": [_group(group, choice.backend) for group in program.kv_groups],
        **_memory(config, program, spec.max_context),
        "limits": _limits(program, choice.backend),
        "ranks": _ranks(config, traced, checkpoint.tensors),
    }


def _memory(config: EngineConfig, program: "Program", context: int) -> dict[str, Any]:
    """The memory that the backend has, and how much KV fits in it beside the weights, by number
    format.
    """
    from headrace.loader.memory import memory_for
    from headrace.planner.fit import Fit
    from headrace.program.kv import token_bytes

    memory, groups, dtypes = (
        memory_for(config, program),
        program.kv_groups,
        config.traits.kv_dtypes,
    )
    sizes = {dtype: _sequence_bytes(groups, dtype, context, config.backend) for dtype in dtypes}
    fits = {
        dtype: Fit(memory.available, program.weight_bytes, size, context, memory.to_run)
        for dtype, size in sizes.items()
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


def _group(group: "KvGroup", backend: BackendName) -> dict[str, Any]:
    from headrace.program.kv import token_bytes

    sizes = {dtype: token_bytes((group,), dtype) for dtype in traits_of(backend).kv_dtypes}
    return {"layers": len(group.layers), "window": group.window, "kv_bytes_per_token": sizes}


def _ranks(
    config: EngineConfig, program: "Program", tensors: "Mapping[str, StoredTensor]"
) -> list[dict[str, int]]:
    """What each rank has of the model, and what it receives in a step of one row and in one of 512;
    empty for a single rank.
    """
    from headrace.parallel.config import mesh_of, rank_programs
    from headrace.program.kv import token_bytes
    from headrace.program.op import StepSize

    mesh = mesh_of(config)
    programs = rank_programs(config, program, tensors) if mesh.ranks > 1 else []
    decode, prefill = StepSize(((0, 1),), 1, 0), StepSize(((0, 512),), 1, 0)
    return [
        {
            "stage": mesh.stage(rank),
            "layers": sum(len(group.layers) for group in one.kv_groups),
            "bytes_in_memory": one.weight_bytes,
            "kv_bytes_per_token": token_bytes(one.kv_groups, config.kv_dtype),
            "bytes_received_decode": sum(op.link_bytes(decode) for op in one.ops),
            "bytes_received_prefill_512": sum(op.link_bytes(prefill) for op in one.ops),
        }
        for rank, one in enumerate(programs)
    ]


def _experts(program: "Program", spec: "ModelSpec") -> dict[str, int]:
    """The experts of a model that has any, and the parameters that a token goes through."""
    from headrace.program.moe import Experts

    if not spec.experts:
        return {}
    ops = [op for op in program.ops if isinstance(op, Experts)]
    unused = sum(
        (len(op.gate) - op.top_k) * sum(w.rows * w.cols for w in (op.gate[0], op.up[0], op.down[0]))
        for op in ops
    )
    parameters = sum(weight.rows * weight.cols for weight in program.weights.values())
    experts = {
        "experts": spec.experts.num_experts,
        "experts_per_token": spec.experts.top_k,
        "layers_with_experts": len(ops),
    }
    return experts | {"active_parameters": parameters - unused}


def _sequence_bytes(
    groups: "Sequence[KvGroup]", dtype: KvDtype, context: int, backend: BackendName
) -> int:
    """Bytes of KV that a sequence of full length holds at once."""
    rows, size = EngineConfig(backend=backend).max_rows, traits_of(backend).kv_block_size
    return sum(
        group.num_blocks(context, rows, size) * group.block_bytes(dtype, size) for group in groups
    )


def _limits(program: "Program", backend: BackendName) -> dict[str, float] | None:
    """Most tokens per second with bf16 KV, where what the backend runs on has been measured."""
    from headrace.planner import hardware, roofline
    from headrace.program.kv import number_bytes

    machine = hardware.remembered(backend=backend)
    if machine is None:
        return None
    kv_bytes = number_bytes(program.kv_groups, "bf16")
    decode = {
        f"decode_at_{depth}": roofline.decode_limit(program, machine, depth, kv_bytes)
        for depth in _DEPTHS
    }
    return decode | {"prefill_512": roofline.prefill_limit(program, machine, 512, kv_bytes)}


def _token_sizes(bytes_per_token: dict[str, int]) -> str:
    from headrace.cli.table import size

    return ", ".join(f"{size(nbytes)} in {dtype}" for dtype, nbytes in bytes_per_token.items())


def _group_sizes(groups: list[dict[str, Any]]) -> dict[str, str]:
    """A line for each group of layers that keep alike and see alike, unless all do and see
    everything.
    """
    if len(groups) == 1 and not groups[0]["window"]:
        return {}
    lines = {}
    for number, group in enumerate(groups, 1):
        seen = f"the last {group['window']:,} tokens" if group["window"] else "all tokens"
        lines[f"KV group {number}"] = (
            f"{group['layers']} layers that see {seen}: {_token_sizes(group['kv_bytes_per_token'])}"
        )
    return lines


def _weight_sizes(facts: dict[str, Any]) -> dict[str, str]:
    from headrace.cli.table import size

    if not facts["has_weights"]:
        return {
            "weights": "none are there; they would be "
            + ", ".join(f"{size(b)} in {n}" for n, b in facts["bytes_in_format"].items())
        }
    by_type = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in facts["bytes_by_type"].items())
    return {
        "weights": f"{size(facts['bytes'])}: {by_type}",
        "weights in memory": size(facts["bytes_in_memory"]),
    }


def _expert_line(facts: dict[str, Any]) -> dict[str, str]:
    if "experts" not in facts:
        return {}
    chosen = (
        f"{facts['experts']} in {facts['layers_with_experts']} layers, "
        f"{facts['experts_per_token']} of them for a token"
    )
    return {"experts": f"{chosen}: {facts['active_parameters'] / 1e6:,.1f} M active parameters"}


def _print(facts: dict[str, Any]) -> None:
    from headrace.cli.table import print_figures, print_table, size

    print_figures(
        facts["name"],
        {
            "file": facts["path"],
            "architecture": facts["architecture"],
            "parameters": f"{facts['parameters'] / 1e6:,.1f} M",
            **_expert_line(facts),
            "layers": f"{facts['layers']} of width {facts['width']:,}, feed-forward "
            f"{facts['ffn_width']:,}",
            "heads": f"{facts['heads']} of {facts['head_dim']}, over {facts['kv_heads']} KV heads",
            "vocabulary": f"{facts['vocabulary']:,}",
            "context": f"{facts['context']:,} tokens",
            "chat template": "yes" if facts["chat_template"] else "no",
            "runs on": f"{facts['backend']}{'; ' if facts['backend_remark'] else ''}{facts['backend_remark']}",
            **_weight_sizes(facts),
            "KV per token": _token_sizes(facts["kv_bytes_per_token"]),
            **_group_sizes(facts["kv_groups"]),
        },
    )
    fits = {
        f"with {dtype} KV": f"{fit['tokens']:,} tokens at once: {fit['full_sequences']:,} sequences of full "
        "length"
        for dtype, fit in facts["fits"].items()
    }
    whose = "memory that is free on the GPU" if facts["memory_of_gpu"] else "available memory"
    print_figures(f"What fits in {size(facts['memory_available'])} of {whose}", fits)
    if facts["ranks"]:
        headings = [
            "rank",
            ">stage",
            ">layers",
            ">weights",
            ">KV per token",
            ">received, 1 row",
            ">512 rows",
        ]
        rows = [
            [f"{rank}", *map(str, list(one.values())[:2]), *map(size, list(one.values())[2:])]
            for rank, one in enumerate(facts["ranks"])
        ]
        print_table(headings, rows, "Ranks")
        print()
    limits = facts["limits"]
    if limits is None:
        print_figures(
            "At most",
            {"tokens per second": "not known before `headrace doctor` has measured this machine"},
        )
    else:
        at_depth = {
            f"decode at depth {depth:,}": f"{limits[f'decode_at_{depth}']:,.0f} tokens/s"
            for depth in _DEPTHS
        }
        print_figures(
            "At most, here", at_depth | {"prefill of 512": f"{limits['prefill_512']:,.0f} tokens/s"}
        )
