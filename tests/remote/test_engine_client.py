from typing import Any

import pytest

from headrace.config import EngineConfig
from headrace.remote.client import EngineClient


@pytest.mark.parametrize("seed", [0, 7, None])
def test_a_restarted_engine_has_another_base_seed(seed: int | None) -> None:
    client: Any = EngineClient("model", EngineConfig(seed=seed), {}, stall_seconds=30)
    seeds = []
    for client.restarts in range(3):
        seeds.append(client._seeded_config().seed)
    if seed is None:
        assert seeds == [None] * 3  # the engine draws one
    else:
        assert seeds[0] == seed and len(set(seeds)) == 3
