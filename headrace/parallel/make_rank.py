"""Makes the rank and the transport of a backend."""

from collections.abc import Mapping
from typing import Any

from headrace.backend_traits import traits_of
from headrace.parallel.process_groups import ProcessGroups
from headrace.parallel.rank import Rank, RankConfig
from headrace.program.trace import Program
from headrace.quant.formats import StoredTensor


def make_transport(config: RankConfig) -> ProcessGroups:
    if traits_of(config.backend).on_gpu:
        from headrace.parallel.device_transport import DeviceTransport

        return DeviceTransport(config.mesh, config.rank)
    from headrace.parallel.transport import GlooTransport

    return GlooTransport(config.mesh, config.rank)


def make_rank(
    config: RankConfig,
    program: Program,
    tensors: Mapping[str, StoredTensor],
    transport: ProcessGroups,
) -> Rank[Any]:
    """Compile a rank's share of a program. `transport` is of `make_transport`."""
    from headrace.parallel.transport import GlooTransport

    if isinstance(transport, GlooTransport):
        from headrace.parallel.cpu_rank import CpuRank

        return CpuRank(config, program, tensors, transport)
    from headrace.parallel.device_transport import DeviceTransport
    from headrace.parallel.gpu_rank import GpuRank

    assert isinstance(transport, DeviceTransport)
    return GpuRank(config, program, tensors, transport)
