"""Serving many requests: memory waste, batching, pauses, priorities, KV memory, KV formats and
windows.

    python benchmarks/serving                                  everything
    python benchmarks/serving batching --requests 500
    python benchmarks/serving pauses --set max_num_batched_tokens=64

Ratios compare runs that take turns. Figures are medians (min-max).
"""

from batching import batching
from bench import main
from kv_formats import kv_formats
from memory import memory
from pauses import pauses
from priority import priority
from waste import waste
from windows import windows

_ALL = {
    "waste": waste,
    "batching": batching,
    "pauses": pauses,
    "priority": priority,
    "memory": memory,
    "kv_formats": kv_formats,
    "windows": windows,
}
main(__doc__, _ALL)
