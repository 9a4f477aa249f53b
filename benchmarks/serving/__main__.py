"""What serving many requests costs and gains: memory waste, batching, pauses, KV memory, KV formats
and windows.

    python benchmarks/serving                                  everything
    python benchmarks/serving batching --requests 500          one of: waste, batching, pauses, memory, kv_formats, windows
    python benchmarks/serving pauses --set max_num_batched_tokens=64    with fields of EngineConfig; each --set is a row

Ratios are formed between runs that took turns; figures are medians, then the least and the most.
"""

from batching import batching
from bench import main
from kv_formats import kv_formats
from memory import memory
from pauses import pauses
from waste import waste
from windows import windows

_ALL = {
    "waste": waste,
    "batching": batching,
    "pauses": pauses,
    "memory": memory,
    "kv_formats": kv_formats,
    "windows": windows,
}
main(__doc__, _ALL)
