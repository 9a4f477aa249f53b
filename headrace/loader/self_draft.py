"""The model, shortened, as its own draft model: fewer layers, or weights in fewer bytes."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from headrace.backend import lower_program
from headrace.checkpoint.load import Checkpoint, open_checkpoint
from headrace.checkpoint.source import resolve
from headrace.checkpoint.tokenizer import Tokenizer
from headrace.config import EngineConfig
from headrace.errors import RequestError
from headrace.loader.activation_sparsity import sparse_draft_program
from headrace.loader.draft_vocabulary import check_vocabulary, with_vocab_size
from headrace.loader.early_exit import with_early_exit
from headrace.loader.layers import layer_choice
from headrace.model import trace_model
from headrace.model.spec import ModelSpec
from headrace.program.trace import Program
from headrace.quant.formats import StoredTensor
from headrace.record import frozen
from headrace.speculation.proposers import REQUIRED_OPTIONS, missing_self_draft

_OWN = "draft."
"""Prefix of tensors that only the draft has."""


@frozen(eq=False)
class SelfDraft:
    """A shortened model: its layers and tensors."""

    layers: tuple[int, ...]
    spec: ModelSpec
    """With the target's early exit."""
    tensors: Mapping[str, StoredTensor]
    """By the names of the specification."""
    own: Mapping[str, StoredTensor]
    """Tensors that differ from the target's, by names that the target does not have."""

    def program(self, target: ModelSpec) -> Program:
        """Trace the layers, with the target's rotary options and context."""
        spec = replace(
            self.spec,
            rope=target.rope,
            window_rope=target.window_rope,
            max_context=target.max_context,
            context=target.context,
        )
        return with_own_names(trace_model(spec.with_layers(self.layers), self.tensors), self.own)

    def own_weight_bytes(self, backend: str, target: ModelSpec) -> int:
        """Return the bytes in the backend's memory of weights that the target does not have."""
        if not self.own:
            return 0
        program = lower_program(backend, self.program(target), {**self.tensors, **self.own})
        return sum(weight.nbytes for name, weight in program.weights.items() if name in self.own)


def open_self_draft(
    config: EngineConfig, target: Checkpoint, load_tokenizer: Callable[[], Tokenizer]
) -> SelfDraft:
    """Open what shortens `target`. Raises ModelError, and RequestError if it does not suit it."""
    if not any(getattr(config, option) for option in REQUIRED_OPTIONS["self_draft"]):
        raise RequestError(missing_self_draft())
    spec = with_early_exit(target.spec, config)
    layers = _layers(config, spec)
    if not config.draft_weights:
        return SelfDraft(layers, spec, target.tensors, own={})

    draft = open_checkpoint(
        resolve(config.draft_weights), is_absorbed=config.latent_attention == "absorbed"
    )
    if trace_model(draft.spec, draft.tensors).kv_groups != (
        trace_model(target.spec, target.tensors).kv_groups
    ):
        raise RequestError(
            f"draft_weights '{config.draft_weights}' has KV of another shape than the model; "
            "choose the same model in fewer bytes, such as a result of `headrace convert`"
        )
    check_vocabulary("draft_weights", config.draft_weights, draft, load_tokenizer())
    draft = with_vocab_size(draft, target.spec.vocab_size)
    tensors = {**draft.tensors, **_exit_maps(target)}
    own = own_tensors(tensors, target.tensors)
    return SelfDraft(layers, replace(draft.spec, early_exit=spec.early_exit), tensors, own)


def own_tensors(
    tensors: Mapping[str, StoredTensor], target: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """The tensors that the target does not have with equal content, by names of their own."""
    from headrace.quant.digest import same_content

    return {
        _OWN + name: replace(tensor, name=_OWN + name)
        for name, tensor in tensors.items()
        if name not in target or not same_content(tensor, target[name])
    }


def with_own_names(program: Program, own: Mapping[str, StoredTensor]) -> Program:
    """Let a program read the tensors of `own_tensors`, and those of the target for all others."""
    return program.with_weights(
        {
            name: replace(weight, name=_OWN + name if _OWN + name in own else name)
            for name, weight in program.weights.items()
        }
    )


def _exit_maps(target: Checkpoint) -> dict[str, StoredTensor]:
    return {name: tensor for name, tensor in target.tensors.items() if name.startswith("exit.")}


def shortened_program(config: EngineConfig, target: Checkpoint, draft: SelfDraft) -> Program:
    """Trace the program that drafts, with each option that shortens it."""
    program = draft.program(target.spec)
    program = program.with_window(config.attention_window, config.attention_sinks)
    program = program.with_top_blocks(config.draft_top_blocks or config.attention_top_blocks)
    return sparse_draft_program(config, program)


def _layers(config: EngineConfig, spec: ModelSpec) -> tuple[int, ...]:
    """The layers that draft: those before an early exit, `draft_layers`, or all layers if another
    option is set.
    """
    num_layers = spec.num_layers
    chosen = layer_choice("draft_layers", config.draft_layers)
    if spec.early_exit:
        if chosen:
            raise RequestError(
                "draft_layers is set, and with early_exit the layers before the exit draft; leave "
                "draft_layers out"
            )
        return tuple(range(spec.early_exit.num_layers))

    others = [
        option
        for option in REQUIRED_OPTIONS["self_draft"]
        if option != "draft_layers" and getattr(config, option)
    ]
    if others and not chosen:
        return tuple(range(num_layers))

    most = num_layers if others else num_layers - 1
    if isinstance(chosen, int):
        if not 1 <= chosen <= most:
            raise RequestError(
                f"draft_layers is {chosen}, but must be 1 to {most} for this model; `headrace "
                "calibrate` suggests layers"
            )
        return tuple(range(chosen))
    if chosen[-1] >= num_layers or len(chosen) > most:
        raise RequestError(
            f"draft_layers has {len(chosen)} layers up to {chosen[-1]}, but this model has layers "
            f"0 to {num_layers - 1}, and at most {most} of them draft; `headrace calibrate` "
            "suggests layers"
        )
    return chosen
