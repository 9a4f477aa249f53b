"""Chains of a drafter that grow on a device, which keeps their rows and tokens.

The host queues all depths of all chains and reads them once. Grammars, siblings and distributions
need the host at each depth: then it waits for each, and only the rows stay on the device.
"""

from collections.abc import Sequence

from headrace.backend import DeviceDrafter
from headrace.batch import RaggedBatch, ints
from headrace.kv.rows import TokenRun, batch_of_runs
from headrace.logit_ops import Expanded, LaterExpands
from headrace.speculation.proposers.chains import Chain

Pairs = tuple[Chain, Sequence[object]]
"""A chain, and the kept rows of the target for the tokens of its run."""


def grow_on_device(
    drafter: DeviceDrafter, growing: Sequence[Pairs], width: int, block_size: int
) -> None:
    """Extend the chains by `width` nodes per depth, until their budgets are spent.

    Logits that are not finite end a chain. The tables must have slots for all depths but the
    last.
    """
    if not growing:
        return
    # The chains that go on are then the first rows of each depth.
    ordered = sorted(growing, key=lambda pair: -pair[0].num_left)
    chains = [each for each, _ in ordered]
    rows = [row for _, rows in ordered for row in rows]
    runs_ahead = width == 1 and all(
        each.constraint is None and each.probabilities is None for each in chains
    )
    grow = _run_ahead if runs_ahead else _run_by_depth
    grow(drafter, chains, rows, width, block_size)


def _run_ahead(
    drafter: DeviceDrafter, chains: Sequence[Chain], rows: Sequence[object], _: int, block_size: int
) -> None:
    batch = batch_of_runs([each.run for each in chains], block_size, logits=True)
    ops = [each.expand(row, 1) for row, each in enumerate(chains)]
    launched = [(list(chains), drafter.start(batch, ops, rows))]
    for depth in range(1, chains[0].num_left):
        going = [each for each in chains if each.num_left > depth]
        later = LaterExpands(ops, depth, len(going))
        batch = _drawn(going, depth, block_size)
        launched.append((going, drafter.follow(batch, later, range(len(going)))))

    ended = set[int]()
    for going, ticket in launched:
        values = ticket.wait().values
        for each, value in zip(going, values, strict=True):
            if isinstance(value, Expanded) and id(each) not in ended:
                each.grow(value, 1)
            if not isinstance(value, Expanded) or each.num_left <= 0:
                ended.add(id(each))


def _drawn(chains: Sequence[Chain], depth: int, block_size: int) -> RaggedBatch:
    """A row per chain, whose token the last launch draws."""
    runs = [
        TokenRun([0], each.run.computed + len(each.run.tokens) + depth - 1, each.run.tables)
        for each in chains
    ]
    batch = batch_of_runs(runs, block_size, logits=True)
    return batch._replace(token_source=ints(list(range(len(runs)))))


def _run_by_depth(
    drafter: DeviceDrafter,
    chains: Sequence[Chain],
    rows: Sequence[object],
    width: int,
    block_size: int,
) -> None:
    last_rows: list[int] = []
    while chains:
        batch = batch_of_runs([each.run for each in chains], block_size, logits=True)
        ops = [each.expand(row, width) for row, each in enumerate(chains)]
        if last_rows:
            ticket = drafter.follow(batch, ops, last_rows)
        else:
            ticket = drafter.start(batch, ops, rows)
        values = ticket.wait().values

        growing, last_rows = list[Chain](), []
        for row, (each, value) in enumerate(zip(chains, values, strict=True)):
            if isinstance(value, Expanded):
                each.grow(value, width)
                if each.num_left > 0:
                    growing.append(each)
                    last_rows.append(row)
        chains = growing
