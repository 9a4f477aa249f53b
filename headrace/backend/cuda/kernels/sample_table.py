"""Columns of the tables that sampling kernels read: one row per sampled row, per op, and so on.

A row of the first table is 32 words in one cache line; it starts with three float64 numbers.
"""

from math import inf, log
from typing import Any

import numpy as np
import triton
import triton.language as tl
from numpy.typing import NDArray

COLUMNS = tl.constexpr(32)

# In units of 8 bytes.
TEMPERATURE = tl.constexpr(0)
MIN_P_DEPTH = tl.constexpr(1)  # of the last kept logit below the top: temperature * log(min_p)
TOP_P = tl.constexpr(2)

# In units of 4 bytes.
REPETITION = tl.constexpr(6)
PRESENCE = tl.constexpr(7)
FREQUENCY = tl.constexpr(8)
SEED_LOW = tl.constexpr(9)
SEED_HIGH = tl.constexpr(10)
SEQ_INDEX = tl.constexpr(11)
TOP_K = tl.constexpr(12)  # 0: all
IS_NOISY = tl.constexpr(13)
IS_FILTERED = tl.constexpr(14)
ROW = tl.constexpr(15)  # of the logits; -1: padding
POSITION = tl.constexpr(16)
PARENT = tl.constexpr(17)  # of the row's draft node; -2: the row of the last known token
DRAFT_TOKEN = tl.constexpr(18)  # of that node
STATE = tl.constexpr(19)  # row of the state of penalties; -1: no penalties
MASK = tl.constexpr(20)  # row of the masks; -1: all tokens are allowed
FIRST_ENTRY = tl.constexpr(21)
NUM_ENTRIES = tl.constexpr(22)
IS_ADJUSTED = tl.constexpr(23)

# An op.
OP_COLUMNS = tl.constexpr(4)
FIRST_SAMPLE = tl.constexpr(0)  # -1: padding
NUM_SAMPLES = tl.constexpr(1)  # 1 + draft nodes
OP_STATE = tl.constexpr(2)
OP_INDEX = tl.constexpr(3)  # in the launch

# A token whose logit is adjusted by more than the state of penalties.
ENTRY_COLUMNS = tl.constexpr(4)
ENTRY_TOKEN = tl.constexpr(0)
ENTRY_BIAS = tl.constexpr(1)
ENTRY_COUNT = tl.constexpr(2)  # of the token on the path to a draft node
ENTRY_BAN = tl.constexpr(3)

# A row to describe.
DESCRIBED_COLUMNS = tl.constexpr(4)
DESCRIBED_ROW = tl.constexpr(0)  # of the logits; -1: padding
DESCRIBED_SAMPLE = tl.constexpr(1)  # the sample that has the token; -1: DESCRIBED_TOKEN
DESCRIBED_TOKEN = tl.constexpr(2)
DESCRIBED_TOP = tl.constexpr(3)  # number of likeliest tokens

# Added to the state of penalties for a token of the output. The lowest bit is for the prompt.
ONCE = tl.constexpr(2)

NO_TOKEN = tl.constexpr(0x7FFFFFFF)

_GREEDY_BELOW = 1e-5
"""Temperatures below this count as 0, as in csrc/sampler.cpp."""


def take_options(options: dict[str, Any], vocab: int) -> NDArray[np.int32]:  # [COLUMNS]
    """Remove the options of a native sampler that kernels implement, and return their columns.

    The columns of the other inputs of a row stay 0.
    """
    row = np.zeros(COLUMNS.value, np.int32)
    doubles, floats, words = row.view(np.float64), row.view(np.float32), row.view(np.uint32)
    temperature, top_p = options.pop("temperature"), options.pop("top_p")
    top_k, min_p = options.pop("top_k"), options.pop("min_p")
    if top_k >= vocab:
        top_k = 0
    is_noisy = temperature >= _GREEDY_BELOW

    doubles[TEMPERATURE.value] = temperature
    doubles[MIN_P_DEPTH.value] = temperature * log(min_p) if min_p > 0 else -inf
    doubles[TOP_P.value] = top_p
    floats[REPETITION.value] = options.pop("repetition_penalty")
    floats[PRESENCE.value] = options.pop("presence_penalty")
    floats[FREQUENCY.value] = options.pop("frequency_penalty")
    seed = options.pop("seed")
    words[SEED_LOW.value] = seed & 0xFFFFFFFF
    words[SEED_HIGH.value] = seed >> 32
    words[SEQ_INDEX.value] = options.pop("seq_index")
    row[TOP_K.value] = top_k
    row[IS_NOISY.value] = is_noisy
    row[IS_FILTERED.value] = is_noisy and (top_k > 0 or top_p < 1 or min_p > 0)
    return row


@triton.jit
def logits_of(logits, stride, adjusted, adjusted_stride, fields, d):
    """Address of the logits of sample `d`."""
    if tl.load(fields + IS_ADJUSTED) != 0:
        row = adjusted + d.to(tl.int64) * adjusted_stride
    else:
        row = logits + tl.load(fields + ROW).to(tl.int64) * stride
    return row
