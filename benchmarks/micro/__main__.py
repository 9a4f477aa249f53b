"""All micro benchmarks, one after the other."""

from adapters import adapters
from attention import attention
from experts import experts
from gemm import gemm
from gemv import gemv
from harness import main
from head import head
from norm import norm
from plan import plan
from roof import roof

if __name__ == "__main__":
    main(__doc__, roof, gemv, gemm, experts, adapters, norm, attention, head, plan)
