"""What the tests beside other libraries have in common."""

import pytest


@pytest.fixture
def without_avx512bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of bitsandbytes multiply in float32, also where the processor has AVX512-BF16, for
    which they would pack other weights.
    """
    for module in ("bitsandbytes.nn.modules", "bitsandbytes.backends.cpu.ops"):
        monkeypatch.setattr(f"{module}.has_avx512bf16", lambda: False)
