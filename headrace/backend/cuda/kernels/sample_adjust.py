"""Logits under biases, penalties, bans and masks, in the order and rounding of the native
sampler.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from headrace.backend.cuda.kernels.sample_table import (
    COLUMNS,
    ENTRY_BAN,
    ENTRY_BIAS,
    ENTRY_COLUMNS,
    ENTRY_COUNT,
    ENTRY_TOKEN,
    FIRST_ENTRY,
    FREQUENCY,
    IS_ADJUSTED,
    MASK,
    NUM_ENTRIES,
    ONCE,
    PRESENCE,
    REPETITION,
    ROW,
    STATE,
)
from headrace.backend.cuda.launch import Launch, blocks


def sample_adjust(
    logits: Any,
    table: Any,
    entries: Any,
    state: Any,
    masks: Any,
    adjusted: Any,
    block: int = 2048,
    entry_block: int = 128,
) -> list[Launch]:
    """Write the adjusted logits of the samples that need it to `adjusted` [samples, vocab].

    `state` [slots, vocab] has the counts for penalties, `masks` [masks, words] bits, `entries`
    [entries, 4] all other adjustments.
    """
    samples, vocab = len(adjusted), logits.shape[1]
    args = (
        logits,
        logits.stride(0),
        table,
        table.view(torch.float32),
        state,
        state.shape[1],
        masks,
        masks.shape[1],
        adjusted,
        adjusted.stride(0),
    )
    launches = [
        Launch(
            sample_adjust_kernel,
            (samples, blocks(vocab, block)),
            (*args, vocab),
            {"BLOCK": block, "num_warps": 8},
        )
    ]
    if len(entries):
        given = entries, entries.view(torch.float32)
        launches.append(
            Launch(
                sample_adjust_entries_kernel,
                (samples,),
                (*args, *given),
                {"BLOCK": entry_block, "num_warps": 4},
            )
        )
    return launches


@triton.jit
def sample_adjust_kernel(
    logits, stride, table, floats, state, state_stride, masks, mask_words, adjusted,
    adjusted_stride, vocab,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Adjust one block of one sample by penalties and mask."""
    d = tl.program_id(0)
    fields = table + d * COLUMNS
    if tl.load(fields + IS_ADJUSTED) != 0:
        ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = ids < vocab
        x = tl.load(
            logits + tl.load(fields + ROW).to(tl.int64) * stride + ids, mask=inside, other=0.0
        )
        slot = tl.load(fields + STATE)
        if slot >= 0:
            count = tl.load(state + slot.to(tl.int64) * state_stride + ids, mask=inside, other=0)
            x = _penalise(x, count, floats + d * COLUMNS)
        mask_row = tl.load(fields + MASK)
        if mask_row >= 0:
            allowed = _is_allowed(masks + mask_row.to(tl.int64) * mask_words, ids, inside)
            x = tl.where(allowed, x, float("-inf"))
        tl.store(adjusted + d.to(tl.int64) * adjusted_stride + ids, x, mask=inside)


@triton.jit
def sample_adjust_entries_kernel(
    logits, stride, table, floats, state, state_stride, masks, mask_words, adjusted,
    adjusted_stride, entries, entry_floats,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Adjust the tokens of one sample that have an entry; they start again from their logits."""
    d = tl.program_id(0)
    fields = table + d * COLUMNS
    if tl.load(fields + IS_ADJUSTED) != 0:
        first = tl.load(fields + FIRST_ENTRY)
        num_entries = tl.load(fields + NUM_ENTRIES)
        row = tl.load(fields + ROW).to(tl.int64)
        slot = tl.load(fields + STATE)
        mask_row = tl.load(fields + MASK)
        for begin in range(0, num_entries, BLOCK):
            entry = begin + tl.arange(0, BLOCK)
            inside = entry < num_entries
            at = (first + entry) * ENTRY_COLUMNS
            ids = tl.load(entries + at + ENTRY_TOKEN, mask=inside, other=0)
            x = tl.load(logits + row * stride + ids, mask=inside, other=0.0)
            x += tl.load(entry_floats + at + ENTRY_BIAS, mask=inside, other=0.0)
            if slot >= 0:
                count = tl.load(
                    state + slot.to(tl.int64) * state_stride + ids, mask=inside, other=0
                )
                count += ONCE * tl.load(entries + at + ENTRY_COUNT, mask=inside, other=0)
                x = _penalise(x, count, floats + d * COLUMNS)
            is_banned = tl.load(entries + at + ENTRY_BAN, mask=inside, other=0) != 0
            x = tl.where(is_banned, float("-inf"), x)
            if mask_row >= 0:
                allowed = _is_allowed(masks + mask_row.to(tl.int64) * mask_words, ids, inside)
                x = tl.where(allowed, x, float("-inf"))
            tl.store(adjusted + d.to(tl.int64) * adjusted_stride + ids, x, mask=inside)


@triton.jit
def _is_allowed(mask, ids, inside):
    """Whether a mask allows these tokens."""
    words = tl.load(mask + ids // 32, mask=inside, other=0)
    return ((words >> (ids % 32)) & 1) != 0


@triton.jit
def _penalise(x, count, floats):
    """Apply penalties to logits, by the counts in the state."""
    repetition = tl.load(floats + REPETITION)
    seen = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    x = tl.where(count != 0, seen, x)
    in_output = count // ONCE
    penalty = tl.load(floats + FREQUENCY) * in_output.to(tl.float32) + tl.load(floats + PRESENCE)
    return tl.where(in_output != 0, x - penalty, x)
