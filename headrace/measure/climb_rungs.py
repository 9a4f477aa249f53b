"""The rungs of a climb: each adds one technique to an earlier rung.

All rungs do the same work with the same model on the `cpu` backend; only modes and options differ.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from headrace.record import frozen

Mode = Literal["recompute", "cache", "sequential", "batch"]
"""A plain loop that recomputes the context of each token; the loop with KV; the engine with one
request at a time; the engine with all requests at once.
"""
Weights = Literal["f32", "own", "int8", "int4", "w8a8", "sparse"]
LOOPS: tuple[Mode, ...] = ("recompute", "cache")


@frozen(kw_only=True)
class WeightFile:
    """A model file with the weights of some rungs."""

    weights: Weights
    path: str
    format: str
    """Format of most of its bytes, for people."""
    convert: tuple[str, ...] = ()
    """Arguments of `headrace convert` after the model and the file; empty: the model itself."""
    is_folder: bool = False


@frozen(kw_only=True)
class Rung:
    name: str
    base: str
    """Name of the rung to which this one adds; empty: the first."""
    text: str
    """Its addition, for people."""
    mode: Mode = "batch"
    weights: Weights = "f32"
    options: Mapping[str, Any]
    """Options of the engine."""
    has_slots: bool = False
    """Whether each sequence reserves KV for the longest request."""

    @property
    def is_served(self) -> bool:
        """Whether `headrace serve` runs with these settings."""
        return self.mode == "batch" and not self.has_slots

    @property
    def kernels(self) -> tuple[object, ...]:
        """Rungs with equal kernels and number formats must give equal tokens."""
        formats = (self.options.get("kv_dtype"), self.options.get("activations"))
        return self.mode in LOOPS, self.weights, *formats, self.options.get(TOP_BLOCKS)

    @property
    def is_lossy(self) -> bool:
        """Whether the rung leaves out a part of the model."""
        return self.weights == "sparse" or bool(self.options.get(TOP_BLOCKS))


TOP_BLOCKS = "attention_top_blocks"
"""Option of the rung that attends to some blocks."""
_EXACT = {"kv_dtype": "f32", "activations": "f32"}
"""Number formats that round nothing but weights."""
CACHE = "KV cache"
"""Name of the rung that computes tokens with KV in a plain loop."""
_UNSHARED = {"prefix_cache": False}
_PLAIN = "16-bit KV"


def float_rungs() -> list[Rung]:
    """Rungs with float32 weights, from a plain loop to the whole engine."""
    return [
        Rung(
            name="recompute",
            base="",
            text="float32, plain C++ on one thread, no KV: each token computes its whole context",
            mode="recompute",
            options=_EXACT,
        ),
        Rung(
            name=CACHE,
            base="recompute",
            text="keys and values of earlier tokens are kept",
            mode="cache",
            options=_EXACT,
        ),
        Rung(
            name="fused kernels, threads",
            base=CACHE,
            text="ops in fused kernels for this processor, on all cores",
            mode="sequential",
            options=_EXACT | _UNSHARED | {"max_num_seqs": 1},
        ),
        Rung(
            name="static batch",
            base="fused kernels, threads",
            text="requests start and end in batches, one in each slot",
            options=_EXACT | _UNSHARED | {"batching": "static"},
            has_slots=True,
        ),
        Rung(
            name="in-flight batch",
            base="static batch",
            text="a request takes a free slot at the next step",
            options=_EXACT | _UNSHARED,
            has_slots=True,
        ),
        Rung(
            name="paging, prefix cache",
            base="in-flight batch",
            text="the same KV memory in blocks, so more requests fit; shared prompts once",
            options=_EXACT,
        ),
    ]


def format_rungs(known: Sequence[Weights], base: str) -> list[Rung]:
    """Rungs with smaller numbers and drafts, for the weights that could be made.

    `base` is the last float32 rung.
    """
    rungs: list[Rung] = []

    def add(name: str, weights: Weights, text: str, options: Mapping[str, Any]) -> str:
        rungs.append(Rung(name=name, base=base, text=text, weights=weights, options=options))
        return name

    if "own" in known:
        base = add("the file's weights", "own", "weights in the format of the file", _EXACT)
    if "int8" in known:
        base = add("int8 weights", "int8", "weights in 8 bits, products in float32", _EXACT)
    if "w8a8" in known:
        both = {"kv_dtype": "f32", "activations": "int8"}
        add("W8A8", "w8a8", "8-bit weights by row and 8-bit activations", both)
    if "int4" in known:
        base = add("int4 weights", "int4", "weights in 4 bits, products in float32", _EXACT)
    smallest = _smallest(known)

    fast = {"kv_dtype": "f32", "activations": "int8"}
    if smallest != "f32":
        base = add("int8 activations", smallest, "products of integers", fast)
    plain = fast | {"kv_dtype": "auto"}
    base = add(_PLAIN, smallest, "keys and values in 16 bits", plain)
    small = fast | {"kv_dtype": "int8"}
    last = add("8-bit KV", smallest, "keys and values in 8 bits", small)
    drafts = {"proposer": "auto"}
    add("drafts", smallest, "tokens proposed from earlier text, if that saves time", plain | drafts)
    base = last
    add("everything", smallest, "8-bit KV and drafts, with all of the above", small | drafts)
    return rungs


def lossy_rungs(known: Sequence[Weights], num_blocks: int) -> list[Rung]:
    """Rungs that leave out a part of the model. They add to 16-bit KV.

    `num_blocks`: blocks of KV of the longest sequence.
    """
    plain = {"kv_dtype": "auto", "activations": "int8"}
    top = max(1, num_blocks // 4)
    rungs = [
        Rung(
            name="top blocks",
            base=_PLAIN,
            text=f"lossy: attention to the {top} best blocks of KV, the first and the last two",
            weights=_smallest(known),
            options=plain | {TOP_BLOCKS: top},
        )
    ]
    if "sparse" in known:
        rungs.append(
            Rung(
                name="2:4 weights",
                base=_PLAIN,
                text="lossy: two of four weights, in 4 bits",
                weights="sparse",
                options=plain,
            )
        )
    return rungs


def _smallest(known: Sequence[Weights]) -> Weights:
    return next((kind for kind in ("int4", "int8", "own") if kind in known), "f32")


def rungs_of(weights: Weights) -> list[str]:
    """Names of the rungs that are left out without these weights."""
    if weights == "f32":
        return [rung.name for rung in float_rungs()]
    names: dict[Weights, str] = {
        "own": "the file's weights",
        "int8": "int8 weights",
        "int4": "int4 weights",
        "w8a8": "W8A8",
        "sparse": "2:4 weights",
    }
    return [names[weights]]
