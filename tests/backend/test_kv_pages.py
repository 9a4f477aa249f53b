"""KV memory is resident before its blocks are used, and not much more of it."""

import re
import time
from pathlib import Path

import numpy as np

from headrace import _native
from headrace.planner.memory import whole_pages

BLOCKS = 2048
AHEAD = 16 << 20


def resident(reserved: int) -> int:
    """Resident bytes of this process's mapping of about so many bytes."""
    mappings = re.findall(
        r"^Size: +(\d+) kB$.*?^Rss: +(\d+) kB$", Path("/proc/self/smaps").read_text(), re.M | re.S
    )
    sizes = {int(size) * 1024: int(rss) * 1024 for size, rss in mappings}
    return sizes[min(sizes, key=lambda size: abs(size - reserved))]


def wait_for(reserved: int, expected: int) -> int:
    end = time.monotonic() + 60  # the thread waits for an idle processor
    while resident(reserved) < expected and time.monotonic() < end:
        time.sleep(0.002)
    return resident(reserved)


def write_token(plan: _native.Plan, slot: int) -> None:
    """Write the KV of the first token of a sequence to a slot."""
    one, zero = np.ones(1, np.int32), np.zeros(1, np.int32)
    kv = (np.array([slot], np.int32), np.array([[slot // 32]], np.int32))
    rows = np.ones((1, 128), np.float32)
    plan.run(zero, zero, np.array([0, 1], np.int32), zero, one, [kv], None, zero[:0], inputs=rows)


def test_pages_stay_ahead_of_their_use() -> None:
    plan = _native.Plan("", 1)
    plan.add_kv_group(4, 2, 64, 64, 0, BLOCKS, "bf16")
    k = plan.add_buffer(128, "step", False)
    plan.input(k)
    plan.kv_write(k, k, (0, 0))
    block = 4 * 2 * _native.kv_block_bytes("bf16", 64, 64)
    assert _native.kv_bytes_ahead(BLOCKS * block) == AHEAD
    assert resident(BLOCKS * block) == 0

    plan.start_kv()
    assert wait_for(BLOCKS * block, AHEAD) == AHEAD

    # Eight blocks are adjacent, and block 19 is one of the third eight.
    write_token(plan, 19 * 32 + 31)
    after = whole_pages(24 * block + AHEAD)
    assert wait_for(BLOCKS * block, after) == after


def test_small_caches_have_no_page_ahead() -> None:
    assert _native.kv_bytes_ahead(15 << 20) == 0
    assert _native.kv_bytes_ahead(16 << 20) == whole_pages(1)
    assert _native.kv_bytes_ahead(1 << 40) == 64 << 20
