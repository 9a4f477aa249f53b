"""Numbers that are not finite affect only their own rows, whose logits are not finite either, so
that only their request fails.
"""

import numpy as np
import pytest

from headrace import _native
from headrace.backend import Executable, forward
from headrace.backend.cpu import executable as cpu
from headrace.backend_traits import KvDtype, traits_of
from headrace.config import KvConfig
from headrace.model import trace_model
from headrace.quant.formats import FORMATS, StoredTensor
from tests.backend.batches import Sequence, batch_of
from tests.backend.stored import random_stored
from tests.backend.test_cpu_linear import product
from tests.backend.test_unfused_ops import op_by_op
from tests.tiny import Tensors, tiny_model

ISAS = _native.isas()
BAD = [
    np.array([bits], np.uint32).view(np.float32)[0]
    for bits in (0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800000, 0xFF800000)
]
"""NaNs of both signs, also with all bits set, and both infinities."""


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("offset", [False, True])
def test_linear_keeps_not_finite_numbers_in_their_row(
    isa: str, format_name: str, offset: bool
) -> None:
    cols = 256 if FORMATS[format_name].block > 32 else 96
    stored = random_stored(format_name, 20, cols, 0)
    x = np.random.default_rng(1).standard_normal((11, cols)).astype(np.float32)
    good = product(isa, stored, x, offset)
    for i, bad in enumerate(BAD):
        row, col = 3 * i % 11, 37 * i % cols
        spoilt = x.copy()
        spoilt[row, col] = bad
        got = product(isa, stored, spoilt, offset)
        assert not np.isfinite(got[row]).any()
        assert np.array_equal(np.delete(got, row, 0), np.delete(good, row, 0))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("wide", [5, 64, 200])
def test_norm_keeps_not_finite_numbers_in_their_row(isa: str, wide: int) -> None:
    """Also if the sum of squares overflows: a factor of 0 would turn the row to zeros."""
    for bad in (*BAD, np.float32(1e30)):
        x = np.ones((2, wide), np.float32)
        x[1, wide // 2] = bad
        plan = _native.Plan(isa, 1)
        loose, out = (plan.add_buffer(wide, "step", False) for _ in range(2))
        plan.embed(loose, plan.add_weight("F32", 2, wide, x.view(np.uint8).reshape(-1), None))
        plan.norm(out, loose, plan.add_vector(np.ones(wide, np.float32)), -1, "rms", wide, 1e-5)
        numbers = [np.array(one, np.int32) for one in ([0, 1], [0, 0], [0, 1, 2], [0, 0], [1, 1])]
        plan.run(*numbers, (), None, np.zeros(0, np.int32))
        rows = plan.floats(out, 2)
        assert np.isfinite(rows[0]).all() and not np.isfinite(rows[1]).any()


def spoilt_model(tensor: str, bad: float, row: int, **options: int) -> tuple[object, Tensors]:
    spec, tensors = tiny_model(3, dim=64, heads=4, kv_heads=2, vocab=40, **options)
    values = tensors[tensor].dequantise()
    values[row] = bad
    return spec, {**tensors, tensor: StoredTensor.from_floats(tensor, values)}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", traits_of("cpu").kv_dtypes)
@pytest.mark.parametrize("fused", [True, False])
def test_not_finite_token_spoils_only_rows_that_see_it(
    isa: str, dtype: KvDtype, fused: bool
) -> None:
    """Token 7 has an embedding that is not finite. Earlier rows, sibling drafts and other sequences
    keep their bits.
    """
    for bad in BAD[2:]:
        spec, tensors = spoilt_model("embed", bad, 7)
        program, kv = trace_model(spec, tensors), KvConfig((16,), 32, dtype)
        executable = (
            cpu.CpuExecutable(program, tensors, kv, 2, isa)
            if fused
            else op_by_op((spec, tensors), kv, 2, isa)
        )

        def logits(
            *prompts: list[int],
            draft: list[int] | None = None,
            chain: bool = True,
            run: Executable = executable,
        ) -> np.ndarray:
            sequences = [Sequence([3 * i + 1, 3 * i, 3 * i + 2], 32) for i in range(len(prompts))]
            trees = [
                (draft or [], [i - 1 if chain else -1 for i in range(len(draft or []))])
            ] * len(prompts)
            return forward(run, batch_of(sequences, list(prompts), trees, not chain)).logits.copy()

        prompt, good = [1 + i % 6 for i in range(45)], [8 + i % 30 for i in range(45)]
        alone, other = logits(prompt), logits(good)
        for at in (0, 7, 8, 33, 44):
            spoilt = [*prompt[:at], 7, *prompt[at + 1 :]]
            both = logits(spoilt, good)
            assert np.array_equal(both[:at], alone[:at]) and np.array_equal(both[45:], other)
            assert not np.isfinite(both[at:45]).any()
        tree = logits(prompt, draft=[9, 7, 10], chain=False)
        assert np.array_equal(
            tree[[*range(46), 47]], logits(prompt, draft=[9, 11, 10], chain=False)[[*range(46), 47]]
        )
        assert np.isnan(tree[46]).all() and np.array_equal(tree[:45], alone)
        drafted = logits(prompt, draft=[9, 7, 10])
        assert np.array_equal(drafted[:46], tree[:46]) and np.isnan(drafted[46:]).all()
        assert np.array_equal(
            logits(good), other
        )  # in blocks that held numbers that are not finite


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", traits_of("cpu").kv_dtypes)
@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("fused", [True, False])
def test_attention_with_not_finite_keys_and_values(
    isa: str, dtype: KvDtype, part: str, fused: bool
) -> None:
    """A weight row is so large that only keys or values of token 7 overflow, and only in the KV."""
    spec, tensors = tiny_model(3, layers=1, dim=64, heads=4, kv_heads=2, vocab=40)
    embed, weight = tensors["embed"].dequantise(), tensors[f"layers.0.{part}"].dequantise()
    embed[:, 5], weight[9, :] = 0, 0
    embed[7, 5], weight[9, 5] = -1, 3e38  # minus infinity, once the norm has made the -1 larger
    embed[7, :5], embed[7, 6:] = 0.01, 0.01
    tensors = {name: tensor for name, tensor in tensors.items()}
    tensors["embed"], tensors[f"layers.0.{part}"] = (
        StoredTensor.from_floats("embed", embed),
        StoredTensor.from_floats("w", weight),
    )
    kv = KvConfig((4,), 32, dtype)
    executable = (
        cpu.CpuExecutable(trace_model(spec, tensors), tensors, kv, 2, isa)
        if fused
        else op_by_op((spec, tensors), kv, 2, isa)
    )
    prompt = [1 + i % 6 for i in range(40)]
    spoilt = [*prompt[:21], 7, *prompt[22:]]

    def logits(tokens: list[int], num_chunks: int) -> np.ndarray:
        sequence, rows = Sequence([2, 0], 32), []
        for chunk in np.array_split(np.array(tokens), num_chunks):
            rows.append(
                forward(
                    executable, batch_of([sequence], [chunk.tolist()], [([], [])], False)
                ).logits.copy()
            )
            sequence.computed += len(chunk)
        return np.concatenate(rows)

    good = logits(prompt, 1)
    for num_chunks in (1, 3, 40):
        got = logits(spoilt, num_chunks)
        assert np.array_equal(got[:21], good[:21]) and not np.isfinite(got[21:]).any()
    assert np.array_equal(logits(prompt, 3), good)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", BAD[:-1])
def test_sampling_from_not_finite_logits(isa: str, bad: float) -> None:
    """Minus infinity excludes a token and is no error, unless a row has no other logit."""
    for vocab in (1, 15, 16, 17, 300):
        for at in {0, vocab // 2, vocab - 1}:
            row = np.zeros(vocab, np.float32)
            row[at] = bad
            for rows in (row, np.full(vocab, -np.inf, np.float32)):
                for temperature in (0.0, 1.0):
                    sampler = _native.Sampler(vocab, [], temperature=temperature, isa=isa)
                    with pytest.raises(Exception, match="non-finite logits"):
                        sampler.draw(rows, 0, 1)
