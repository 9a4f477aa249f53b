"""Known losses of number formats: measured here for a model, else a range by bits."""

from collections.abc import Mapping

from headrace.backend_traits import KvDtype
from headrace.record import frozen

_PUBLISHED = (
    "llama.cpp, tools/perplexity/README.md, 2024-05 (Llama-2-7B and Llama-3-8B on WikiText-2), "
    "https://github.com/ggml-org/llama.cpp/blob/master/tools/perplexity/README.md"
)
_BY_BITS: Mapping[int, tuple[float, float]] = {
    8: (0.0004, 0.0014),
    6: (0.0021, 0.0055),
    5: (0.0108, 0.0222),
    4: (0.0127, 0.0719),
    3: (0.0872, 0.2282),
    2: (0.1089, 0.4451),
}
"""Least and largest mean KL divergence, in nats, of the formats with this number of bits."""
_MEASURED: Mapping[str, Mapping[str, float]] = {
    "smollm2 135m": {"Q8_0": 0.0045, "Q5_0": 0.0347, "Q4_0": 0.1369, "IQ4_NL": 0.0903},
}
"""KL divergence from the file, by model and format: `headrace eval smollm2 --sweep`."""
_KV: Mapping[KvDtype, float] = {"int8": 0.0002, "fp8": 0.001, "k8v4": 0.0054, "int4": 0.0218}
"""Rank of formats of KV: KL of SmolLM2-135M above bf16 (docs/internals/kv_formats.md); fp8 is an
estimate between its neighbours.
"""


@frozen
class Loss:
    """Mean KL divergence from the model's own format, in nats."""

    low: float
    high: float
    source: str

    @property
    def text(self) -> str:
        if not self.high:
            return "none"
        value = f"{self.low:g}" if self.low == self.high else f"{self.low:g} to {self.high:g}"
        return f"KL divergence of {value} nats ({self.source})"


NO_LOSS = Loss(0.0, 0.0, "")


def format_loss(model: str, format: str, bits: float) -> Loss:
    """Loss of another format than the model's own, with `bits` a number before scales."""
    if bits >= 16:
        return NO_LOSS
    for name, losses in _MEASURED.items():
        if name in model.lower() and format in losses:
            return Loss(losses[format], losses[format], f"headrace eval of {model}")
    nearest = max((known for known in _BY_BITS if known <= bits), default=min(_BY_BITS))
    return Loss(*_BY_BITS[nearest], _PUBLISHED)


def kv_rank(dtype: KvDtype) -> float:
    """Loss of a number format of KV, to compare formats by."""
    return _KV.get(dtype, 0.0)
