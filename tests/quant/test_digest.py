"""Digests of weights and adapters: any other number gives another digest."""

import numpy as np
import pytest

from headrace.checkpoint.adapter_digest import adapter_digest
from headrace.program.adapter import LowRank, OwnWeight, TokenRows
from headrace.quant.digest import tensors_digest
from headrace.quant.formats import StoredTensor


def tensor(values: np.ndarray[tuple[int, int], np.dtype[np.float32]]) -> StoredTensor:
    return StoredTensor.from_floats("a", values)


def test_any_other_number_or_order_of_rows() -> None:
    values = np.arange(40, dtype=np.float32).reshape(10, 4)
    digests = {tensors_digest({"a": tensor(values)})}
    for row in range(10):
        changed = values.copy()
        changed[row, 2] += 0.5
        digests.add(tensors_digest({"a": tensor(changed)}))
    digests.add(tensors_digest({"b": tensor(values)}))
    digests.add(tensors_digest({"a": tensor(values.reshape(5, 8))}))
    digests.add(tensors_digest({"a": tensor(values).take("a", np.arange(10)[::-1])}))
    assert len(digests) == 14
    assert tensors_digest({"a": tensor(values.copy())}) in digests


@pytest.mark.parametrize("row", [0, 33, 66, 99])
def test_some_rows_of_a_large_tensor(row: int) -> None:
    values = np.zeros((100, 8), np.float32)
    changed = values.copy()
    changed[row] = 1
    before, after = (tensors_digest({"a": tensor(each)}, 128) for each in (values, changed))
    assert before != after


def test_digest_of_an_adapter() -> None:
    def low_rank(number: float = 1.0, scale: float = 2.0) -> LowRank:
        return LowRank(np.full((1, 3), number, np.float32), np.ones((4, 1), np.float32), scale)

    values = tensor(np.ones((2, 2), np.float32))
    rows = TokenRows(np.array([1, 2]), np.ones((2, 3), np.float32))
    adapters = [
        {"q": low_rank()},
        {"k": low_rank()},
        {"q": low_rank(1.5)},
        {"q": low_rank(scale=2.5)},
        {"q": OwnWeight(delta=low_rank())},
        {"q": OwnWeight(values=values)},
        {"q": OwnWeight(rows=rows)},
        {"q": OwnWeight(added=np.ones(3, np.float32))},
        {"q": OwnWeight(row_norms=np.ones(3, np.float32))},
    ]
    assert len({adapter_digest(adapter) for adapter in adapters}) == len(adapters)
    assert adapter_digest({"q": low_rank()}) == adapter_digest({"q": low_rank()})
