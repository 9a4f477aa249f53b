"""Shared parts of the tests against other libraries."""

import pytest


@pytest.fixture
def without_avx512bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply bitsandbytes layers in float32 on all processors; with AVX512-BF16 they
    would pack other weights.
    """
    for module in ("bitsandbytes.nn.modules", "bitsandbytes.backends.cpu.ops"):
        monkeypatch.setattr(f"{module}.has_avx512bf16", lambda: False)
