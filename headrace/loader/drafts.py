"""Opens, checks and compiles draft models, drafters, self-drafts and Medusa heads.

Functions import the parts of each kind themselves, since a start without drafts needs none.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from headrace.backend import DrafterHost, Executable, lower_program
from headrace.backend_traits import traits_of
from headrace.checkpoint.draft_layers import num_draft_layers
from headrace.checkpoint.load import Checkpoint, open_checkpoint
from headrace.checkpoint.source import resolve
from headrace.checkpoint.tokenizer import Tokenizer
from headrace.config import EngineConfig, KvConfig
from headrace.errors import RequestError
from headrace.kv.manager import KvManager
from headrace.loader.activation_sparsity import sparse_program
from headrace.loader.early_exit import with_early_exit
from headrace.loader.kv_size import KvUse
from headrace.model import trace_model
from headrace.model.spec import ModelSpec
from headrace.program.trace import Program, trace
from headrace.quant.formats import StoredTensor
from headrace.record import frozen
from headrace.speculation.proposers import DraftModel, DraftModels, enabled_methods

if TYPE_CHECKING:
    from headrace.checkpoint.drafter import Drafter
    from headrace.checkpoint.translation import Translator
    from headrace.loader.self_draft import SelfDraft
    from headrace.speculation.proposers.eagle import DrafterPrograms

DRAFTS_ON_DEVICE = False
"""Whether a drafter's rows stay on a device that can keep them (`DrafterHost`). Off: drafts on the
device failed on a GPU, and no GPU has run them since the mend (docs/internals/gpu-others.md).
"""
OWN_LAYERS = "mtp"
"""A `draft_model`: the layers for drafts in the model's own files."""


class Attachable(Protocol):
    """An executable, or a rank's share of one, that other programs can be attached to."""

    def attach(
        self, program: Program, weights: Mapping[str, StoredTensor], kv: KvConfig | None = None
    ) -> Executable:
        """See `Executable.attach`."""


@frozen
class DraftCheckpoints:
    """Draft model, Medusa heads and self-draft of a configuration, opened but not compiled."""

    draft: Checkpoint | None = None
    translator: "Translator | None" = None
    """Translates for a draft model with another vocabulary."""
    drafter: "Drafter | None" = None
    heads: Mapping[str, StoredTensor] | None = None
    self_draft: "SelfDraft | None" = None

    def in_format(self, config: EngineConfig) -> "DraftCheckpoints":
        """Encode the matrices of a drafter in `draft_format`, if the backend packs them."""
        if self.drafter is None or not config.traits.packs_drafters:
            return self
        from headrace.loader.draft_format import with_format

        return replace(self, drafter=with_format(self.drafter, config.draft_format))

    def check_ranks(self, config: EngineConfig) -> None:
        """Raise RequestError for a drafter if the model's rows lie on several GPUs."""
        ranks = config.tensor_parallel_size * config.pipeline_parallel_size
        if self.drafter and ranks > 1 and config.traits.on_gpu:
            raise RequestError(
                f"draft_model '{config.draft_model}' is a drafter over rows of the model, which "
                "works on several ranks with backend 'cpu' alone, and backend is "
                f"'{config.backend}'; set tensor_parallel_size and pipeline_parallel_size to 1, or "
                "choose a draft model that reads tokens"
            )

    def kv_use(self, config: EngineConfig) -> KvUse | None:
        """Return the KV of the draft model or drafter, if there is one."""
        if self.drafter:
            from headrace.speculation.proposers.eagle import max_rows as max_pairs

            return KvUse(
                drafter_program(self.drafter).kv_groups,
                max_pairs(_max_nodes(config)),
            )
        if self.draft:
            from headrace.speculation.proposers.draft_model import max_rows

            program = draft_model_program(config, self.draft)
            return KvUse(program.kv_groups, max_rows(_max_nodes(config)))
        return None

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target before which a drafter takes rows."""
        spec = self.drafter.spec.drafter if self.drafter else None
        return spec.taps if spec else ()

    def weight_bytes(self, backend: str, target: Checkpoint, ranks: int = 1) -> int:
        """Return the bytes of their weights in the backend's memory, without the target's.

        One of several `ranks` has parts of the target's matrices, and packs a drafter's again.
        """
        total = self.self_draft.own_weight_bytes(backend, target.spec) if self.self_draft else 0
        if self.draft:
            program = trace_model(self.draft.spec, self.draft.tensors)
            total += lower_program(backend, program, self.draft.tensors).weight_bytes
        if self.drafter:
            program = lower_program(backend, drafter_program(self.drafter), self.drafter.tensors)
            total += program.weight_bytes
            if ranks == 1:
                total -= self._lent_bytes(backend, program, target)
        if self.heads:
            programs = _head_programs(target, self.heads)
            lowered = [lower_program(backend, *each) for each in programs]
            weights = {name: each for program in lowered for name, each in program.weights.items()}
            total += sum(each.nbytes for name, each in weights.items() if name in self.heads)
        return total

    def _lent_bytes(self, backend: str, program: Program, target: Checkpoint) -> int:
        """Bytes of a drafter's weights that its program shares with the target."""
        if not self.drafter or not traits_of(backend).shares_tensors:
            return 0
        used = trace_model(target.spec, target.tensors).weights
        lent = {id(target.tensors[name]) for name in used if name in target.tensors}
        return sum(
            weight.nbytes
            for name, weight in program.weights.items()
            if id(self.drafter.tensors[name]) in lent
        )


def open_draft_checkpoints(
    config: EngineConfig, target: Checkpoint, load_tokenizer: Callable[[], Tokenizer]
) -> DraftCheckpoints:
    """Open the draft model, the heads and the draft weights of `target`, if configured.

    `load_tokenizer` returns the target's tokenizer; without drafts it is not called.
    Raises ModelError as `open_checkpoint` does. Raises RequestError if the draft model
    generates no text, the heads belong to another model, `draft_layers` exceeds the
    model's layers, or `draft_weights` is not a form of the model.
    """
    methods = enabled_methods(config)
    draft = drafter = heads = self_draft = translator = None
    if "self_draft" in methods:
        from headrace.loader.self_draft import open_self_draft

        self_draft = open_self_draft(config, target, load_tokenizer)
    if "draft_model" in methods and config.draft_model:
        drafter = _open_drafter(config.draft_model, target)
        if drafter is None:
            draft, translator = _open_draft_model(config, target, load_tokenizer())
    if "medusa" in methods and config.medusa_heads:
        from headrace.checkpoint.medusa import read_heads

        heads = read_heads(Path(config.medusa_heads), target.spec, load_tokenizer().vocab_size)
    return DraftCheckpoints(
        draft=draft, translator=translator, drafter=drafter, heads=heads, self_draft=self_draft
    )


def _open_drafter(name: str, target: Checkpoint) -> "Drafter | None":
    """Open a drafter over rows of the target; None if the files are a model."""
    if name == OWN_LAYERS:
        from headrace.checkpoint.mtp import open_mtp

        return open_mtp(target)
    from headrace.checkpoint.drafters import is_drafter, open_drafter

    path = resolve(name)
    return open_drafter(path, target) if is_drafter(path) else None


def _open_draft_model(
    config: EngineConfig, target: Checkpoint, tokenizer: Tokenizer
) -> "tuple[Checkpoint, Translator | None]":
    """Open a smaller model, and its translator if it has another vocabulary."""
    from headrace.loader.draft_vocabulary import translator_of, with_vocab_size

    path = resolve(config.draft_model)
    draft = open_checkpoint(path, is_absorbed=config.latent_attention == "absorbed")
    if not draft.spec.has_head:
        raise RequestError(
            f"draft_model '{config.draft_model}' only computes embeddings: its files have no "
            "head (lm_head.weight); choose a model that generates text"
        )
    translator = translator_of(draft, target, tokenizer)
    return (draft if translator else with_vocab_size(draft, target.spec.vocab_size)), translator


def unused_layers(config: EngineConfig, target: Checkpoint) -> str:
    """Return a note about layers for drafts in the model's files that do not draft; else ""."""
    count = 0 if config.draft_model == OWN_LAYERS else num_draft_layers(target)
    if not count:
        return ""
    layers = f"{count:,} layer{'s' if count > 1 else ''}"
    return (
        f"{target.path.name}: {layers} for drafts (multi-token prediction) in the files, not used; "
        f"draft_model={OWN_LAYERS!r} drafts with the first"
    )


def model_program(config: EngineConfig, checkpoint: Checkpoint) -> Program:
    """Trace a model, with the lossy modes and the skipped zeros of the configuration."""
    program = trace_model(with_early_exit(checkpoint.spec, config), checkpoint.tensors)
    program = program.with_window(config.attention_window, config.attention_sinks)
    return sparse_program(config, program.with_top_blocks(config.attention_top_blocks))


def draft_model_program(config: EngineConfig, draft: Checkpoint) -> Program:
    """Trace the draft model, which has the window of the target, and none of its files."""
    return model_program(replace(config, early_exit="", activation_sparsity=""), draft)


def drafter_program(drafter: "Drafter", *, from_itself: bool = False) -> Program:
    """Trace a drafter over rows of the target, or over its own rows."""
    from headrace.model import eagle1, eagle3, mtp

    module = {"eagle1": eagle1, "eagle3": eagle3, "mtp": mtp}[drafter.spec.architecture]
    forward = module.from_itself if from_itself else module.from_target
    program = trace(partial(forward, drafter.spec), drafter.tensors)
    # Its next drafts read the rows that its head reads, or those before the norm of the head.
    return program.with_hidden() if module is eagle1 else program.with_residual()


def target_program(
    config: EngineConfig, target: Checkpoint, taps: Sequence[int] = (), *, final: bool = False
) -> Program:
    """Trace the target model with row pooling, with its hidden rows as output for heads, and with
    its rows before the layers `taps` for a drafter; `final`: with all rows before the head, too.
    """
    if final or target.spec.num_layers in taps:
        target = replace(target, spec=replace(target.spec, keeps_rows=True))
    program = model_program(config, target).with_pooled()
    if config.draft_top_blocks:
        program = program.with_key_bounds()
    if taps or final:
        program = program.with_taps(taps, final=final)
    return program.with_hidden() if "medusa" in enabled_methods(config) else program


def compile_draft_models(
    config: EngineConfig,
    draft_checkpoints: DraftCheckpoints,
    target: Checkpoint,
    executable: Attachable,
    kv: KvConfig | None,
) -> DraftModels:
    """Compile all draft programs on the threads of the target's `executable`.

    `kv` is the KV size of the draft model or drafter; without it, neither is compiled.
    """
    draft_models = DraftModels(block_size=config.traits.kv_block_size)
    if kv and (checkpoint := draft_checkpoints.draft):
        from headrace.loader.draft_vocabulary import other_vocabulary
        from headrace.speculation.proposers.draft_model import max_rows

        program = draft_model_program(config, checkpoint)
        manager = KvManager(program.kv_groups, kv, max_rows(_max_nodes(config)))
        compiled = executable.attach(program, checkpoint.tensors, kv)
        translator = draft_checkpoints.translator
        draft_models = replace(
            draft_models,
            draft=DraftModel(
                compiled,
                manager,
                checkpoint.spec.max_context,
                other_vocabulary(translator) if translator else None,
            ),
        )
    if kv and (drafter := draft_checkpoints.drafter):
        nodes = _max_nodes(config)
        compiled_drafter = compile_drafter(drafter, target.spec, executable, kv, nodes)
        draft_models = replace(draft_models, drafter=compiled_drafter)
    if self_draft := draft_checkpoints.self_draft:
        from headrace.loader.self_draft import shortened_program

        program = shortened_program(config, target, self_draft)
        tensors = {**target.tensors, **self_draft.own}
        draft_models = replace(draft_models, self_draft=executable.attach(program, tensors))
    if heads := draft_checkpoints.heads:
        programs = _head_programs(target, heads)
        draft_models = replace(draft_models, heads=[executable.attach(*each) for each in programs])
    return draft_models


def _max_nodes(config: EngineConfig) -> int:
    """Return the maximum nodes of a draft of a sequence."""
    return config.draft_depth * config.draft_width


def compile_drafter(
    drafter: "Drafter", target: ModelSpec, executable: Attachable, kv: KvConfig, nodes: int
) -> "DrafterPrograms":
    """Compile a drafter: a program over rows of the target, and one over its own rows.

    A draft has up to `nodes` tokens.
    """
    from headrace.backend.mapped_logits import MappedLogits
    from headrace.speculation.proposers.eagle import DrafterPrograms
    from headrace.speculation.proposers.eagle import max_rows as max_pairs

    program, tensors = drafter_program(drafter), drafter.tensors
    further = drafter_program(drafter, from_itself=True)
    first = executable.attach(program, tensors, kv)
    second = first.attach(further, tensors)
    on_device = None
    if DRAFTS_ON_DEVICE and isinstance(executable, DrafterHost):
        on_device = executable.attach_drafter(first, second, drafter.tokens, target.vocab_size)
    return DrafterPrograms(
        from_target=MappedLogits(first, drafter.tokens, target.vocab_size),
        from_itself=MappedLogits(second, drafter.tokens, target.vocab_size),
        on_device=on_device,
        kv=KvManager(program.kv_groups, kv, max_pairs(nodes)),
        max_length=target.max_context,
    )


def _head_programs(
    target: Checkpoint, heads: Mapping[str, StoredTensor]
) -> Iterator[tuple[Program, Mapping[str, StoredTensor]]]:
    """The program of each head, and the tensors that it may read."""
    from headrace.checkpoint.medusa import num_heads
    from headrace.speculation.proposers.medusa import head_forward

    spec, tensors = target.spec, {**target.tensors, **heads}
    for i in range(num_heads(heads)):
        yield trace(partial(head_forward, i, spec.dim, spec.vocab_size), tensors), tensors
