"""Copies of weights to the device: bytes as they are stored, and host work in threads."""

import time
from typing import Any

import numpy as np
import pytest
import torch

from headrace.backend.cuda.packing import pack
from headrace.backend.cuda.upload import in_threads, upload
from headrace.quant.formats import StoredTensor
from tests.backend.stored import random_stored


@pytest.mark.parametrize("dtype", ["u1", "i1", "<i2", "<f2", "<f4", "<i4"])
def test_upload_keeps_the_bytes_of_any_view(dtype: str) -> None:
    array = np.random.default_rng(0).integers(0, 255, (6, 40), np.uint8).view(dtype)
    for view in (array, array[::2], array[:, 1:4], array[:0]):
        found = upload(view).cpu()
        assert found.shape == view.shape and found.dtype.itemsize == array.itemsize
        assert found.contiguous().view(torch.uint8).numpy().tobytes() == view.tobytes()


def test_work_in_threads_keeps_its_order() -> None:
    def slow(number: int) -> int:
        time.sleep(0.002 if number % 3 == 0 else 0)
        return number

    assert list(in_threads(slow, range(40))) == list(range(40))
    with pytest.raises(ZeroDivisionError):
        list(in_threads(lambda number: 1 // number, [2, 1, 0]))


@pytest.mark.parametrize("format_name", ["F32", "F16", "BF16"])
def test_plain_weights_are_copied_as_bytes(
    format_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = random_stored(format_name, 9, 72, seed=1)
    expected = tensor.dequantise()

    def widens(*args: Any) -> Any:
        raise AssertionError("the host widens the weights")

    monkeypatch.setattr(StoredTensor, "dequantise_rows", widens)
    packed = pack([tensor])
    np.testing.assert_array_equal(packed.codes[:, :72].float().cpu().numpy(), expected)
    assert not packed.codes[:, 72:].any()
