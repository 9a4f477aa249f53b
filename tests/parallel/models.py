"""Random models for tests of ranks."""

from hypothesis import strategies as st

from headrace.batch import RaggedBatch
from headrace.model.spec import ModelSpec, RopeSpec
from headrace.program.op import StepSize
from headrace.program.trace import Program
from tests.tiny import Tensors, tiny_model


@st.composite
def models(draw: st.DrawFn) -> tuple[ModelSpec, Tensors]:
    """A tiny Llama with random heads, windows, weight format and tied or untied embedding."""
    kv_heads, group = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    heads, head_dim = kv_heads * group, draw(st.sampled_from([4, 8, 32]))
    in_blocks = heads * head_dim % 32 == 0
    stored = draw(st.sampled_from(["Q4_0", "Q8_0"] if in_blocks else ["F32", "BF16", "I8_ROW"]))
    dim = 32 * draw(st.integers(1, 3))
    constants = {
        "head_dim": head_dim,
        "rope": RopeSpec(head_dim),
        "tied_embeddings": draw(st.booleans()),
    }
    sizes = {
        "dim": dim,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": 32 * draw(st.integers(1, 3)),
        "vocab": draw(st.integers(17, 70)),
    }
    return tiny_model(
        draw(st.integers(0, 9)),
        window=draw(st.sampled_from([0, 3, (0, 4)])),
        format=stored,
        **sizes,
        **constants,
    )


def predicted_seconds(program: Program, batch: RaggedBatch) -> float:
    """Seconds of a step on a machine that reads a byte per second."""
    rows = zip(batch.context_len, batch.row_start[1:] - batch.row_start[:-1], strict=True)
    step = StepSize(
        tuple((int(context), int(count)) for context, count in rows), len(batch.logit_rows), 4
    )
    return float(sum(op.bytes(step) for op in program.ops))
