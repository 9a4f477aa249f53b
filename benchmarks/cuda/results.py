"""The result file of a GPU, `benchmarks/cuda/results/<its name>.json`, with a section for each
program that ran on it.
"""

import json
import time
from pathlib import Path
from typing import Any

import torch
import triton

from headrace.backend.cuda.interpreter import is_interpreting

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """The GPU and the software of a measurement."""
    about = {
        "gpu": "interpreter",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "day": time.strftime("%Y-%m-%d"),
    }
    if is_interpreting():
        return about
    properties = torch.cuda.get_device_properties(0)
    return about | {
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
    }


class Results:
    """Sections of a result file. Each is written as it grows, so a run that is cut short keeps what
    it found.
    """

    def __init__(self, path: Path | None) -> None:
        about = machine()
        self.gpu = str(about["gpu"])
        self.path = path or RESULTS / f"{self.gpu.replace(' ', '-')}.json"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._all = json.loads(self.path.read_text()) if self.path.exists() else {}
        self._all["machine"] = about

    def write(self, section: str, rows: list[Any]) -> None:
        """Replace a section."""
        self._all[section] = rows
        self.path.write_text(json.dumps(self._all, indent=1) + "\n")
