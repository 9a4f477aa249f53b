"""Tiny random models, a vocabulary for them, and engines over both."""

import codecs
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from headrace.backend import Executable, KvBlockHost, compile_program
from headrace.checkpoint.adapter_digest import adapter_digest
from headrace.checkpoint.tokenizer import Vocabulary
from headrace.config import EngineConfig, KvConfig
from headrace.engine.engine import Engine, EngineLimits
from headrace.errors import RequestError
from headrace.kv.disk import DiskTier
from headrace.kv.folder import KvFolder
from headrace.loader.activation_sparsity import sparse_program
from headrace.loader.early_exit import with_early_exit
from headrace.model import tensor_shapes, trace_model
from headrace.model.spec import ModelSpec, RopeSpec
from headrace.outputs import RequestOutput, Update
from headrace.program.trace import Program
from headrace.proposer import Proposer
from headrace.quant.formats import StoredTensor
from headrace.sampling_params import SamplingParams
from headrace.speculation.proposers import make_proposers
from tests.backend.stored import random_stored
from tests.key_roundings import roundings
from tests.late import LateExecutable
from tests.tables import SPARSE_KINDS, random_table

BLOCK_SIZE = {"cpu": 32, "cuda": 4, "reference": 4}
"""Tokens per KV block, by backend: as few as the backend allows, so that short texts need many."""

Tensors = dict[str, StoredTensor]
Compile = Callable[..., Executable]
"""Makes an executable, as `compile_program` does."""


def tiny_model(
    seed: int,
    layers: int = 2,
    dim: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    ffn: int = 64,
    vocab: int = 61,
    window: int | tuple[int, ...] = 0,
    format: str = "F32",
    context: int = 128,
    architecture: str = "llama",
    **constants: Any,
) -> tuple[ModelSpec, Tensors]:
    """Return a random model with matrices in any stored format, and norms in F32.

    Several windows alternate from layer to layer. `architecture` is a family whose equations accept
    these shapes, and `constants` are further fields of its specification.
    """
    head_dim = dim // heads
    turns = (window,) if isinstance(window, int) else window
    spec = ModelSpec(
        architecture=architecture,
        name=f"tiny-{seed}",
        num_layers=layers,
        dim=dim,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_dim=ffn,
        vocab_size=vocab,
        max_context=context,
        norm_eps=1e-5,
        rope=RopeSpec(head_dim),
        windows=tuple(turns[layer % len(turns)] for layer in range(layers)) if any(turns) else (),
    )
    spec = replace(spec, **constants)
    return spec, random_tensors(spec, seed, format)


def random_tensors(spec: ModelSpec, seed: int, format: str = "F32") -> Tensors:
    """Return random tensors: matrices in a stored or a 2:4 format, and vectors near 1 in F32."""
    rng = np.random.default_rng(seed)
    tensors, shapes = {}, tensor_shapes(spec)
    kinds = list(dict.fromkeys(name.rpartition(".")[2] for name in shapes))
    # Drawn kind by kind, first those that no layer has: tests are tuned to these models, whatever
    # order the equations ask in.
    for name in sorted(
        shapes, key=lambda name: ("." in name, kinds.index(name.rpartition(".")[2]))
    ):
        shape = shapes[name]
        if len(shape) == 1:
            tensors[name] = StoredTensor.from_floats(
                name, (1 + 0.1 * rng.standard_normal(shape)).astype(np.float32)
            )
        else:
            gain = {"embed": shape[1] ** 0.5, "head": 3.0}.get(
                name, 1.5
            )  # logits neither flat nor certain
            scale = gain / shape[1] ** 0.5
            make = random_table if format in SPARSE_KINDS else random_stored
            tensors[name] = make(
                format, *shape, seed=int(rng.integers(2**32)), name=name, scale=scale
            )
    return tensors


class TinyVocabulary:
    """A vocabulary of letters, pairs of letters, and single bytes of longer characters."""

    def __init__(self, size: int, eos_ids: tuple[int, ...] = ()) -> None:
        letters = "abcdefghijklmnopqrst"
        pieces = [letter.encode() for letter in letters]
        pieces += [bytes([byte]) for byte in sorted({*"é€😀".encode()})]
        pieces += [(a + b).encode() for a in letters for b in letters]
        self.pieces = pieces[:size]
        self.eos_ids = frozenset(eos_ids)
        self.eos_id = min(eos_ids, default=None)
        self.prefix_ids: tuple[int, ...] = ()
        self.vocabulary = Vocabulary(byte_level=True)

    @property
    def vocab_size(self) -> int:
        return len(self.pieces)

    @property
    def special_ids(self) -> frozenset[int]:
        return self.eos_ids

    def encode(
        self, text: str, add_special: bool = False, parse_special: bool = False
    ) -> list[int]:
        """Encode greedily, longest pieces first."""
        data, ids = text.encode(), []
        while data:
            found = [
                i
                for i, piece in enumerate(self.pieces)
                if piece and data.startswith(piece) and i not in self.eos_ids
            ]
            if not found:
                raise RequestError("a character has no piece")
            ids.append(max(found, key=lambda i: len(self.pieces[i])))
            data = data[len(self.pieces[ids[-1]]) :]
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id] if token_id < len(self.pieces) else b""

    def has_control_token(self, text: str) -> bool:
        return any(self.pieces[token].decode() in text for token in self.eos_ids)

    def decoder(self, skip_special: bool, continues: bool = False) -> "_Decoder":
        return _Decoder(self, self.eos_ids if skip_special else frozenset())

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        decoder = self.decoder(skip_special)
        return "".join(decoder.push(token) for token in ids) + decoder.flush()


class OtherTinyVocabulary(TinyVocabulary):
    """A vocabulary with most of the bytes and letters, and with triples of letters, in another
    order.
    """

    def __init__(self, size: int, eos_ids: tuple[int, ...] = (), shared: bool = True) -> None:
        super().__init__(size, eos_ids)
        triples = [(a + b + "a").encode() for a in "abcdefgh" for b in "abcdefghijkl"]
        own = self.pieces[: size - size // 12] if shared else self.pieces[:29]
        self.pieces = [*triples, *own][-size:][::-1]


class _Decoder:
    def __init__(self, vocabulary: TinyVocabulary, skipped: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def clone(self) -> "_Decoder":
        clone = copy(self)
        clone._utf8 = copy(self._utf8)
        return clone

    def push(self, token_id: int) -> str:
        return (
            ""
            if token_id in self._skipped
            else self._utf8.decode(self._vocabulary.token_bytes(token_id))
        )

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


def tiny_executable(
    model: tuple[ModelSpec, Tensors], backend: str, kv: KvConfig, threads: int = 1
) -> Executable:
    """Compile a model."""
    spec, tensors = model
    return compile_program(backend, trace_model(spec, tensors).with_pooled(), tensors, kv, threads)


def mode_program(model: tuple[ModelSpec, Tensors], options: EngineConfig) -> Program:
    """Trace a model with the lossy options of a configuration, as the loader does."""
    spec, tensors = model
    program = (
        trace_model(with_early_exit(spec, options), tensors)
        .with_window(options.attention_window, options.attention_sinks)
        .with_top_blocks(options.attention_top_blocks)
    )
    return sparse_program(options, program)


def tiny_engine(
    model: tuple[ModelSpec, Tensors],
    backend: str = "reference",
    *,
    proposer: Proposer | Mapping[str, Proposer] | str = "off",
    executable: Executable | None = None,
    eos_ids: tuple[int, ...] = (),
    slots: int = 256,
    max_model_len: int = 0,
    release_outside_window: bool = True,
    late: bool = False,
    vocabulary: TinyVocabulary | None = None,
    compile: Compile = compile_program,
    folder: Path | None = None,
    **config: Any,
) -> Engine:
    """Return an engine over the model, whose pools have at least `slots` slots per KV group.

    `release_outside_window` releases KV outside an attention window. `compile` makes the
    executable, if there is none. `folder` keeps the KV of this very model and program.
    """
    spec, tensors = model
    name = proposer if isinstance(proposer, str) else "off"
    own = (
        proposer
        if isinstance(proposer, Mapping)
        else {}
        if isinstance(proposer, str)
        else {"test": proposer}
    )
    defaults: dict[str, Any] = {
        "multi_step_ms": 0,
        "proposer": name,
        "adaptive_speculation": False,
        "max_draft_tokens": 128 if own else 16,
    }
    options = EngineConfig(backend=backend, **defaults | config)
    block_size = BLOCK_SIZE[backend]
    program = mode_program(model, options).with_pooled()
    groups = program.kv_groups
    rounding = roundings(program) if options.kv_format == "int4" else ()
    num_blocks = (-(-slots // block_size),) * len(groups)
    kv = KvConfig(num_blocks, block_size, options.kv_format, rounding)
    if not release_outside_window:
        groups = tuple(replace(group, window=0, num_sink_tokens=0) for group in groups)
    limits = EngineLimits(spec.vocab_size, max_model_len or spec.max_context, kv, groups)
    executable = executable or compile(
        backend, program, tensors, kv, options.threads, options.activations
    )
    disk = None
    if folder:
        assert isinstance(executable, KvBlockHost)
        identity = blake2b(repr((program, kv.dtype)).encode(), digest_size=16).digest()
        files = KvFolder(folder, identity, {"model": spec.name}, 1 << 30)
        disk = DiskTier(files, executable.kv_blocks(), block_size, adapter_digest, lambda: 0.0)
    if late:
        executable = LateExecutable(executable)
    vocabulary = vocabulary or TinyVocabulary(spec.vocab_size, eos_ids)
    return Engine(
        executable, vocabulary, limits, options, own or make_proposers(options), disk=disk
    )


def run_all(
    engine: Engine, requests: list[tuple[list[int], SamplingParams]]
) -> list[RequestOutput]:
    """Add all requests at once, and return their results in the order of the requests."""
    ids = [engine.add_request(prompt, params) for prompt, params in requests]
    results = {update.request_id: update.result for update in drain(engine) if update.result}
    return [results[request_id] for request_id in ids]


def drain(engine: Engine) -> list[Update]:
    """Step until the engine has no work, and return all updates."""
    updates = []
    while engine.has_work:
        updates += engine.step()
    return updates
