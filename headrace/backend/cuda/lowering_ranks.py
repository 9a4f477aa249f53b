"""Launches of the ops of one of several ranks: exchanges, and kernels for shares."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from headrace.backend.cuda.device import DEVICE
from headrace.backend.cuda.exchange import Exchange, Transport
from headrace.backend.cuda.kernels.align_experts import combine
from headrace.backend.cuda.kernels.embed import embed
from headrace.backend.cuda.kernels.exchange import choose_owned, place_columns, read_tokens
from headrace.backend.cuda.kernels.gather import gather_rows
from headrace.backend.cuda.kernels.norm import norm
from headrace.backend.cuda.launch import Launch
from headrace.program import collective
from headrace.program.collective import Columns, row_share
from headrace.program.op import Op, Value

if TYPE_CHECKING:
    from headrace.backend.cuda.lowering import Lowering


def _transport(s: "Lowering") -> Transport:
    assert s.transport, "a program with collectives needs a transport"
    return s.transport


def _numbers(numbers: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(list(numbers), dtype=dtype, device=DEVICE)


def _in_place(
    s: "Lowering", out: torch.Tensor, x: torch.Tensor, key: str, places: Iterable[tuple[int, int]]
) -> Launch:
    """out[t, c] = x[offset + t * stride], by the `places` (offset, stride) of each column.

    Equal places have one `key`, and so one table for the ops of all layers.
    """

    def tables() -> tuple[torch.Tensor, torch.Tensor]:
        offsets, strides = zip(*places, strict=True)
        return _numbers(offsets, torch.int64), _numbers(strides, torch.int64)

    return place_columns(out, x, *s.workspace.once(f"places {key}", tables))


def _adjacent(s: "Lowering", out: torch.Tensor, x: torch.Tensor, first: int = 0) -> Launch:
    """Copy the columns of x from `first` on, as many as `out` has."""
    width, stride = out.shape[1], x.stride(0)
    places = ((column, stride) for column in range(first, first + width))
    return _in_place(s, out, x, f"{first} {width} {stride}", places)


def _take_columns(s: "Lowering", op: collective.TakeColumns) -> list[Launch]:
    return [_adjacent(s, s.value(op.out), s.value(op.x), op.first)]


def _gathered(
    s: "Lowering", name: str, x: torch.Tensor, ranks: int
) -> tuple[torch.Tensor, Exchange]:
    """Memory for x of all ranks, one after the other, and the exchange that fills it."""
    rows, width = x.shape
    gathered = s.workspace.take("gathered", ranks * rows, width, x.dtype)
    return gathered, Exchange(name, partial(_transport(s).all_gather, gathered, x))


def _all_gather(s: "Lowering", op: collective.AllGather) -> list[Launch]:
    x, out = s.value(op.x), s.value(op.out)
    launches: list[Launch] = []
    rows, own_width = x.shape
    width = max(last - first for first, last in op.parts)
    if own_width < width:  # all ranks send as much as the widest
        padded = s.workspace.take("padded columns", rows, width, x.dtype)
        launches.append(_adjacent(s, padded[:, :own_width], x))
        x = padded
    gathered, exchange = _gathered(s, op.name, x, len(op.parts))
    places = (
        (rank * rows * width + column - op.parts[rank][0], width)
        for column in range(out.shape[1])
        for rank in [_first_with(op.parts, column)]
    )
    return [*launches, exchange, _in_place(s, out, gathered, f"{op.parts} {rows}", places)]


def _first_with(parts: Sequence[Columns], column: int) -> int:
    """The first rank with a column: several ranks may have the same KV head."""
    return next(rank for rank, (first, last) in enumerate(parts) if first <= column < last)


def _columns_to_rows(s: "Lowering", op: collective.ColumnsToRows) -> list[Launch]:
    x, out = s.value(op.x), s.value(op.out)
    shares = [row_share(len(out), rank, len(op.parts)) for rank in range(len(op.parts))]
    first, last = shares[op.rank]
    widths = [end - start for start, end in op.parts]
    received = s.workspace.take("received", (last - first) * out.shape[1], 1, x.dtype)
    sizes = [(last - first) * width for width in widths]
    exchange = Exchange(
        op.name,
        partial(
            _transport(s).all_to_all,
            received.reshape(-1),
            x.reshape(-1),
            sizes,
            [(end - start) * x.shape[1] for start, end in shares],
        ),
    )
    if first == last:
        return [exchange]
    places = (
        (offset + column, width)
        for offset, width in zip(accumulate(sizes, initial=0), widths, strict=False)
        for column in range(width)
    )
    key = f"{op.parts} of {last - first} own rows"
    return [exchange, _in_place(s, out[first:last], received, key, places)]


def _norm_share(s: "Lowering", op: collective.NormShare) -> list[Launch]:
    x, out = s.value(op.x), s.value(op.out)
    first, last = row_share(len(x), op.rank, op.ranks)
    if first == last:
        return []
    weight, bias = s.weights.vector(op.weight), s.weights.vector(op.bias) if op.bias else None
    return [norm(out[first:last], x[first:last], weight, bias, op.eps, op.kind, op.size)]


def _gather_shares(s: "Lowering", op: collective.GatherShares) -> list[Launch]:
    x, out = s.value(op.x), s.value(op.out)
    shares = [row_share(len(x), rank, op.ranks) for rank in range(op.ranks)]
    most = max(last - first for first, last in shares)
    first, _ = shares[op.rank]
    gathered, exchange = _gathered(s, op.name, x[first : first + most], op.ranks)
    rows = [
        rank * most + row
        for rank, (first, last) in enumerate(shares)
        for row in range(last - first)
    ]
    index = s.workspace.once(
        f"rows of shares {len(x)} {op.ranks}", lambda: _numbers(rows, torch.int32)
    )
    return [exchange, gather_rows(out, gathered, index)]


def _tokens(s: "Lowering") -> tuple[torch.Tensor, list[Launch]]:
    """The tokens of the step, [rows], and the launches that share them.

    The first rank of a stage knows the tokens that the last launch has drawn.
    """
    tokens = s.workspace.take("tokens", s.step.shape.rows, 1, torch.int32)[:, 0]
    step, share = s.step, partial(_transport(s).broadcast, tokens)
    read = read_tokens(tokens, step.tokens, step.source, step.last_tokens)
    return tokens, [read, Exchange("share_tokens", share)]


def _embed_part(s: "Lowering", op: collective.EmbedPart) -> list[Launch]:
    tokens, launches = _tokens(s)
    return [*launches, embed(s.value(op.out), s.weights.matrix(op.weight), tokens, first=op.first)]


def _owned(
    s: "Lowering", op: Op, out: Value, x: Value, parts: Sequence[Columns], numbers: torch.Tensor
) -> list[Launch]:
    gathered, exchange = _gathered(s, op.name, s.value(x), len(parts))
    ends = s.workspace.once(
        f"ends {parts}", lambda: _numbers([last for _, last in parts], torch.int32)
    )
    return [exchange, choose_owned(s.value(out), gathered, numbers, ends)]


def _owned_rows(s: "Lowering", op: collective.OwnedRows) -> list[Launch]:
    tokens = s.workspace.take("tokens", s.step.shape.rows, 1, torch.int32)
    return _owned(s, op, op.out, op.x, op.parts, tokens)


def _owned_experts(s: "Lowering", op: collective.OwnedExperts) -> list[Launch]:
    routing = s.value(op.routing)
    return _owned(s, op, op.out, op.x, op.parts, routing[:, : routing.shape[1] // 2])


def _expert_part(s: "Lowering", op: collective.ExpertPart) -> list[Launch]:
    pairs = s.value(op.out).reshape(-1, op.out.width // op.top_k)
    return s.experts(op, pairs, op.first, op.num_experts)


def _combine(s: "Lowering", op: collective.Combine) -> list[Launch]:
    pairs = s.value(op.x).reshape(-1, op.out.width)
    return [combine(s.value(op.out), pairs, s.value(op.routing))]


def _send(s: "Lowering", op: collective.Send) -> list[Launch]:
    x = s.value(op.x)
    assert x.dtype == torch.float32
    return [Exchange(op.name, partial(_transport(s).send, x, op.stage))]


def _receive(s: "Lowering", op: collective.Receive) -> list[Launch]:
    out = s.value(op.out)
    if out.dtype == torch.float32:
        return [Exchange(op.name, partial(_transport(s).receive, out, op.stage))]
    received = s.workspace.take("received", *out.shape)
    exchange = Exchange(op.name, partial(_transport(s).receive, received, op.stage))
    return [exchange, _adjacent(s, out, received)]


LOWER: dict[type[Op], Callable[["Lowering", Any], list[Launch]]] = {
    collective.AllGather: _all_gather,
    collective.EmbedPart: _embed_part,
    collective.OwnedRows: _owned_rows,
    collective.TakeColumns: _take_columns,
    collective.ColumnsToRows: _columns_to_rows,
    collective.NormShare: _norm_share,
    collective.GatherShares: _gather_shares,
    collective.ExpertPart: _expert_part,
    collective.OwnedExperts: _owned_experts,
    collective.Combine: _combine,
    collective.Send: _send,
    collective.Receive: _receive,
}
