"""Show the facts of a model: its shape and formats, the memory that it needs, the KV that fits next
to it on this machine, and its maximum speed here.

No weight is read. The speed is known after `headrace doctor` has measured the machine.
"""

import argparse
from typing import Any

from headrace.cli.arguments import (
    add_backend,
    add_json,
    add_model,
    add_parallel,
    add_rope,
    engine_options,
)

EXAMPLES = """\
  headrace show smollm2
  headrace show hf:ORG/MODEL -tp 4 --json"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_model(parser, optional=True)
    add_json(parser)
    add_backend(parser.add_argument_group("compute"))
    add_rope(parser)
    add_parallel(parser)


def run(args: argparse.Namespace) -> int:
    from headrace.measure.describe import describe
    from headrace.measure.table import print_json

    facts = describe(args.model, **engine_options(args))
    if args.json:
        print_json(facts)
    else:
        _print(facts)
    return 0


def _print(facts: dict[str, Any]) -> None:
    from headrace.measure.table import print_figures

    print_figures(facts["name"], _model_figures(facts))
    _print_fits(facts)
    if facts["ranks"]:
        _print_ranks(facts["ranks"])
    _print_limits(facts["limits"])


def _model_figures(facts: dict[str, Any]) -> dict[str, str]:
    from headrace.measure.table import size

    backend, remark = facts["backend"], facts["backend_remark"]
    return {
        "file": facts["path"],
        "architecture": facts["architecture"],
        "parameters": f"{facts['parameters'] / 1e6:,.1f} M",
        **_expert_figures(facts),
        "layers": f"{facts['layers']} of width {facts['width']:,}, feed-forward "
        f"{facts['ffn_width']:,}",
        "heads": f"{facts['heads']} of {facts['head_dim']}, over {facts['kv_heads']} KV heads",
        "vocabulary": f"{facts['vocabulary']:,}",
        "context": f"{facts['context']:,} tokens",
        "chat template": "yes" if facts["chat_template"] else "no",
        "runs on": f"{backend}; {remark}" if remark else backend,
        **_weight_figures(facts),
        **({"note": "; ".join(facts["notes"])} if facts["notes"] else {}),
        "tokenizer in memory": f"about {size(facts['tokenizer_bytes'])}",
        "KV format": facts["kv_dtype"],
        "KV per token": _sizes(facts["kv_bytes_per_token"]),
        **_kv_group_figures(facts["kv_groups"]),
        "keys": _key_figure(facts["kv_nll"]),
    }


def _expert_figures(facts: dict[str, Any]) -> dict[str, str]:
    if "experts" not in facts:
        return {}
    return {
        "experts": f"{facts['experts']} in {facts['layers_with_experts']} layers, "
        f"{facts['experts_per_token']} for each token: {facts['active_parameters'] / 1e6:,.1f} M "
        "active parameters"
    }


def _weight_figures(facts: dict[str, Any]) -> dict[str, str]:
    from headrace.measure.table import size

    if not facts["has_weights"]:
        return {"weights": f"absent; they would be {_sizes(facts['bytes_in_format'])}"}
    by_type = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in facts["bytes_by_type"].items())
    return {
        "weights": f"{size(facts['bytes'])}: {by_type}",
        "weights in memory": size(facts["bytes_in_memory"]),
    }


def _kv_group_figures(groups: list[dict[str, Any]]) -> dict[str, str]:
    if len(groups) == 1 and not groups[0]["window"]:
        return {}
    figures = {}
    for number, group in enumerate(groups, 1):
        window = f"the last {group['window']:,} tokens" if group["window"] else "all tokens"
        sizes = _sizes(group["kv_bytes_per_token"])
        figures[f"KV group {number}"] = f"{group['layers']} layers that see {window}: {sizes}"
    return figures


def _print_fits(facts: dict[str, Any]) -> None:
    from headrace.measure.table import print_figures, size

    memory = "memory that is free on the GPU" if facts["memory_of_gpu"] else "available memory"
    fits = {
        f"with {dtype} KV": f"{fit['tokens']:,} tokens at once: {fit['full_sequences']:,} "
        f"sequences of full length{_kv_loss(facts['kv_nll'], dtype)}"
        for dtype, fit in facts["fits"].items()
    }
    print_figures(f"Fits in {size(facts['memory_available'])} of {memory}", fits)


def _key_figure(measured: dict[str, Any]) -> str:
    if measured["model"]:
        return f"{measured['keys']}, as in {measured['model']}, whose NLL is below"
    return (
        f"{measured['keys']}; no such model was measured, so measure this one: headrace eval MODEL "
        "--kv-dtype FORMAT"
    )


def _kv_loss(measured: dict[str, Any], dtype: str) -> str:
    if dtype not in measured["percent"]:
        return ""
    return f"; NLL {measured['percent'][dtype]:+.1f} % on {measured['model']}"


def _print_ranks(ranks: list[dict[str, int]]) -> None:
    from headrace.measure.table import print_table, size

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
        [
            f"{number}",
            f"{rank['stage']}",
            f"{rank['layers']}",
            size(rank["bytes_in_memory"]),
            size(rank["kv_bytes_per_token"]),
            size(rank["bytes_received_decode"]),
            size(rank["bytes_received_prefill_512"]),
        ]
        for number, rank in enumerate(ranks)
    ]
    print_table(headings, rows, "Ranks")
    print()


def _print_limits(limits: dict[str, float] | None) -> None:
    from headrace.measure.describe import DEPTHS
    from headrace.measure.table import print_figures

    if limits is None:
        unknown = "unknown until `headrace doctor` has measured this machine"
        print_figures("Maximum speed", {"tokens per second": unknown})
        return
    figures = {
        f"decode at depth {depth:,}": f"{limits[f'decode_at_{depth}']:,.0f} tokens/s"
        for depth in DEPTHS
    }
    figures["prefill of 512"] = f"{limits['prefill_512']:,.0f} tokens/s"
    print_figures("Maximum speed here", figures)


def _sizes(num_bytes: dict[str, int]) -> str:
    from headrace.measure.table import size

    return ", ".join(f"{size(nbytes)} in {name}" for name, nbytes in num_bytes.items())
