"""The noise of a sample, and the noisiest token of a tile.

The random word of a token equals the native sampler's to the bit (csrc/kernels_sample.h). Its
Gumbel variate in float64 is equal but for the last bit of a logarithm. Scores in float32 find the
few tokens that may be best, and float64 compares these. Ties go to the lower id.
"""

import triton
import triton.language as tl

from headrace.backend.cuda.kernels.sample_table import (
    NO_TOKEN,
    POSITION,
    SEED_HIGH,
    SEED_LOW,
    SEQ_INDEX,
    TEMPERATURE,
)

MAX_GUMBEL = tl.constexpr(23.0)  # no word gives more
NEAR = tl.constexpr(1e-4)  # more than float32 can be wrong by in a score that may be the best
SCALE = tl.constexpr(2.0**-32)


@triton.jit
def words_of_tile(first, fields, BLOCK: tl.constexpr):
    """Words of tokens `first` (a multiple of 4) to `first + BLOCK - 1`."""
    quads = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    w0, w1, w2, w3 = _philox(quads, fields)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def word_of(ids, fields):
    """Words of these tokens."""
    w0, w1, w2, w3 = _philox((ids // 4).to(tl.uint32), fields)
    lane = ids % 4
    return tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3)))


@triton.jit
def _philox(quads, fields):
    position = tl.load(fields + POSITION).to(tl.uint32, bitcast=True) + quads * 0
    seq_index = tl.load(fields + SEQ_INDEX).to(tl.uint32, bitcast=True) + quads * 0
    low = tl.load(fields + SEED_LOW).to(tl.uint32, bitcast=True)
    high = tl.load(fields + SEED_HIGH).to(tl.uint32, bitcast=True)
    return tl.philox_impl(quads, position, seq_index, quads * 0, low, high)


@triton.jit
def gumbel(words):
    """Standard Gumbel variates in float64."""
    return -tl.log(-tl.log((words.to(tl.float64) + 0.5) * SCALE))


@triton.jit
def gumbel_in_float32(words):
    """Standard Gumbel variates within 1e-5.

    If the uniform number u is near 1, the difference 1 - u keeps the digits that u lost.
    """
    below = ((words ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * SCALE
    series = below * (
        1 + below * (1 / 2 + below * (1 / 3 + below * (1 / 4 + below * (1 / 5 + below * (1 / 6)))))
    )
    uniform = (words.to(tl.float32) + 0.5) * SCALE
    return -tl.log(tl.where(below < 0.0625, series, -tl.log(tl.minimum(uniform, 0.9999))))


@triton.jit
def score(x, top, token, doubles, fields):
    """Scores of tokens with these logits, in float64, as in the native sampler."""
    temperature = tl.load(doubles + TEMPERATURE)
    return (x.to(tl.float64) - top.to(tl.float64)) / temperature + gumbel(word_of(token, fields))


@triton.jit
def noisiest(x, ids, words, tile_top, doubles, fields):
    """The token with the best score in a tile, and its logit; NO_TOKEN if all logits are -inf.

    `tile_top` is the maximum logit.
    """
    top = tl.where(tl.abs(tile_top) < float("inf"), tile_top, 0.0)
    factor = (1 / tl.load(doubles + TEMPERATURE)).to(tl.float32)
    scores = (x - top) * factor + gumbel_in_float32(words)
    floor = tl.max(scores, 0) - NEAR
    near = (scores >= floor) & (scores > float("-inf"))
    token = tl.min(tl.where(near, ids, NO_TOKEN), 0)
    best_x = tl.max(tl.where(ids == token, x, float("-inf")), 0)
    if tl.sum(near.to(tl.int32), 0) > 1:
        best = score(best_x, top, token, doubles, fields)
        rival = tl.min(tl.where(near & (ids > token), ids, NO_TOKEN), 0)
        while rival < NO_TOKEN:
            rival_x = tl.max(tl.where(ids == rival, x, float("-inf")), 0)
            rival_score = score(rival_x, top, rival, doubles, fields)
            if rival_score > best:
                best = rival_score
                best_x = rival_x
                token = rival
            rival = tl.min(tl.where(near & (ids > rival), ids, NO_TOKEN), 0)
    return token, best_x
