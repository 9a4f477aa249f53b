"""The replicas of the benchmark: a model with 8 billion parameters in 16 bits on a large GPU.

The clock advances by the predicted time of a step: weights and context at 3 TB/s, multiply-adds at
400 TFLOPS (the longer of weights and multiply-adds counts), and 1 ms for the rest. Another speed
would scale all times.
"""

from headrace.config import EngineConfig, KvConfig
from headrace.engine.engine import EngineLimits
from headrace.program.kv import KvGroup, KvLayout
from headrace.program.op import StepSize
from headrace.simulator.replica import ReplicaSetup
from headrace.simulator.vocabulary import VOCAB_SIZE

BLOCK_SIZE = 32
NUM_BLOCKS = 1024
_MAX_MODEL_LEN = 8192
CHUNK = 512
MAX_NUM_SEQS = 64
_OTHER_SECONDS = 0.001
_WEIGHT_SECONDS = 16e9 / 3e12
_ROW_SECONDS = 16e9 / 400e12
_CONTEXT_SECONDS = 131_072 / 3e12


class _Costs:
    request_seconds = 0.0
    schedule_seconds = 0.0

    def stage_seconds(self, step: StepSize) -> list[float]:
        context = sum(context for context, _ in step.seqs)
        rows = max(_WEIGHT_SECONDS, step.rows * _ROW_SECONDS)
        return [_OTHER_SECONDS + rows + context * _CONTEXT_SECONDS]

    def host_seconds(self, step: StepSize) -> float:
        return 0.0


SETUP = ReplicaSetup(
    limits=EngineLimits(
        VOCAB_SIZE,
        _MAX_MODEL_LEN,
        KvConfig((NUM_BLOCKS,), BLOCK_SIZE),
        (KvGroup((0,), KvLayout(1, 2, 2)),),
    ),
    config=EngineConfig(
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=CHUNK + MAX_NUM_SEQS,
        chunked_prefill_size=CHUNK,
        multi_step_ms=0,
    ),
    costs=_Costs(),
    kv_bytes=2.0,
)
