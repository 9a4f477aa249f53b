"""A smaller model of the same family, as a model of transformers that the loop trains."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headrace.checkpoint.load import Checkpoint
from headrace.convert.file_tensors import file_tensors
from headrace.convert.folder.config import write_config_files
from headrace.convert.folder.writer import copy_model_files
from headrace.distil.answers import Answer, AnswerSet
from headrace.distil.student_loss import Head, HeadLoss, chunks, head_loss
from headrace.distil.student_shape import (
    Energy,
    Shape,
    row_places,
    student_config,
    student_spec,
    student_tensors,
)
from headrace.errors import RequestError, UnsupportedModelError
from headrace.model import FAMILIES
from headrace.quant.formats import StoredTensor

MAX_LENGTH = 512
"""Tokens of a sequence that are trained on."""
_BATCH_TOKENS = 1024
_SORTED_BATCHES = 8
"""Batches among which sequences are sorted by length, so that little is padded."""
_EVALUATED_TOKENS = 4096
_ENERGY_SEQUENCES = 64


class _Module(nn.Module):
    """The model, and matrices that bring its rows to the width of the teacher's."""

    def __init__(
        self, model: nn.Module, dim: int, wanted: int, columns: Tensor, count: int
    ) -> None:
        super().__init__()
        self.model = model
        self.to_teacher = nn.ModuleList(nn.Linear(dim, wanted, bias=False) for _ in range(count))
        with torch.no_grad():
            for each in self.to_teacher:
                each.weight.zero_()
                each.weight[columns, torch.arange(dim)] = 1.0


class Student:
    """A smaller model, the answers that it learns from, and its loss (`loop.Student`)."""

    def __init__(
        self,
        teacher: Checkpoint,
        answers: AnswerSet,
        shape: Shape,
        parts: HeadLoss,
        *,
        learns_rows: bool,
        seed: int,
    ) -> None:
        """Make a student of parts of the teacher. `learns_rows`: it learns from taps, too.

        Raises UnsupportedModelError if transformers has no such family, and RequestError if the
        answers lack the rows that the student learns from.
        """
        self.spec = student_spec(teacher.spec, shape)
        self._parts = parts
        self._seed = seed
        self._answers = answers
        self._teacher_spec = teacher.spec
        self.config = student_config(teacher, shape)
        self.dtype = product_type()
        self._places = row_places(shape) if learns_rows else ()
        self._taps = self._tap_indices(shape)

        energy = _energy(answers)
        tensors = student_tensors(teacher, shape, energy)
        model = _make_model(self.config)
        _load_weights(model, self.spec, tensors)
        columns = torch.from_numpy(energy.kept(shape.dim))
        count = len(self._places) + learns_rows
        self.module = _Module(model, shape.dim, teacher.spec.dim, columns, count)
        self._teacher = _teacher_head(teacher, self.dtype)
        order = np.array(answers.training)
        if not len(order):
            raise RequestError("the recording has no answers to train on; record more tokens")
        self._training = order
        mean = float(np.minimum(answers.lengths[order], MAX_LENGTH).mean())
        self._batch_size = min(len(order), max(1, round(_BATCH_TOKENS / mean)))
        self._epoch: tuple[int, list[NDArray[np.int64]]] = (-1, [])

    def _tap_indices(self, shape: Shape) -> tuple[int, ...]:
        """The indices among the recorded taps of the rows that the student learns from."""
        recorded, wanted = self._answers.meta.taps, [shape.layers[i] for i in self._places]
        if absent := sorted(set(wanted) - set(recorded)):
            raise RequestError(
                f"{self._answers.folder} has rows before the layers {list(recorded)}, and the "
                f"student learns from rows before {absent}; leave --answers out, or leave rows "
                "out of --learn"
            )
        return tuple(recorded.index(layer) for layer in wanted)

    def loss(self, step: int) -> tuple[Tensor, int]:
        """Return the loss of the batch of a step, and its number of tokens."""
        batch = [self._cut(self._answers.answer(int(i))) for i in self._batch(step)]
        hidden, inputs = self._forward(batch)
        places = _answer_places(batch)
        rows, final = hidden[places], _joined([answer.final for answer in batch], batch)
        targets = _joined([answer.targets for answer in batch], batch).long()
        loss = torch.zeros(())
        parts = self._parts
        if parts.outputs or parts.logits:
            loss = head_loss(
                rows, self._head_weight, self._head_bias, self._head, self._teacher, final, targets,
                parts,
            )  # fmt: skip
        if self._places:
            taps = _joined([answer.taps for answer in batch], batch)
            loss = loss + self._row_loss([each[places] for each in inputs], rows, taps, final)
        return loss, sum(len(answer.tokens) for answer in batch)

    def _row_loss(
        self, inputs: Sequence[Tensor], rows: Tensor, taps: Tensor, final: Tensor
    ) -> Tensor:
        """The mean squared error of rows, relative to the teacher's rows."""
        dim = self._teacher_spec.dim
        wanted = [taps[:, i * dim : (i + 1) * dim] for i in self._taps] + [final]
        errors = []
        for each, own, goal in zip(self.module.to_teacher, [*inputs, rows], wanted, strict=True):
            with self._products():
                projected = each(own)
            errors.append((projected.float() - goal).square().mean() / goal.square().mean())
        return torch.stack(errors).mean()

    @torch.no_grad()
    def evaluate(self) -> Mapping[str, float]:
        """Return figures over held-out answers.

        `nll` is the loss of the teacher's text in nats, `kl` the divergence from the teacher, and
        `same_top` the share of tokens at which both have the same likeliest one.
        """
        sums, count = np.zeros(3), 0
        self.module.eval()
        for index in self._answers.held_out:
            batch = [self._cut(self._answers.answer(index))]
            hidden, _ = self._forward(batch)
            rows = hidden[_answer_places(batch)]
            final = _joined([batch[0].final], batch)
            targets = _joined([batch[0].targets], batch).long()
            head = self._head(self._head_weight.to(self.dtype), self._head_bias)
            for chunk in chunks(len(rows), self.spec.vocab_size):
                own = head.logits(rows[chunk]).log_softmax(-1)
                wanted = self._teacher.logits(final[chunk]).log_softmax(-1)
                sums[0] -= float(own.gather(1, targets[chunk][:, None]).sum())
                sums[1] += float((wanted.exp() * (wanted - own)).sum())
                sums[2] += float((own.argmax(-1) == wanted.argmax(-1)).sum())
            count += len(rows)
            if count >= _EVALUATED_TOKENS:
                break
        self.module.train()
        nll, kl, same = sums / max(1, count)
        return {"nll": float(nll), "kl": float(kl), "same_top": float(same)}

    @torch.no_grad()
    def log_probabilities(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Compute the log-probabilities after each token in float32 [tokens, vocab]."""
        model: Any = self.module.model
        rows = model.base_model(input_ids=torch.tensor([tokens]), use_cache=False)
        logits = self._head(self._head_weight, self._head_bias).logits(rows.last_hidden_state[0])
        result: NDArray[np.float32] = logits.log_softmax(-1).numpy()
        return result

    def summary(self, figures: Mapping[str, float]) -> str:
        """Return the figures in a few words, for the progress."""
        return f"held-out NLL {figures['nll']:.3f}, same top {figures['same_top']:.1%}"

    def save(self, folder: Path, teacher: Checkpoint) -> None:
        """Write the model to a folder in Hugging Face layout, in bf16. Raises OSError."""
        model: Any = self.module.model
        with _quiet():
            # A tied head would be written twice: its copy in bf16 is another tensor.
            tied = {"lm_head.weight"} if self.spec.tied_embeddings else set[str]()
            state = {
                name: value.bfloat16()
                for name, value in model.state_dict().items()
                if name not in tied
            }
            model.save_pretrained(folder, state_dict=state)
        config = dict(self.config)
        if teacher.path.is_dir():
            copy_model_files(teacher, folder)
        else:
            ids = write_config_files(teacher, folder)
            config |= {name: value for name, value in ids.items() if name.endswith("token_id")}
        config.pop("dtype", None)
        text = json.dumps(config | {"torch_dtype": "bfloat16"}, indent=2)
        (folder / "config.json").write_text(f"{text}\n", encoding="utf-8")

    @property
    def _head_weight(self) -> Tensor:
        model: Any = self.module.model
        weight: Tensor = model.get_output_embeddings().weight
        return weight

    @property
    def _head_bias(self) -> Tensor | None:
        model: Any = self.module.model
        bias: Tensor | None = getattr(model.get_output_embeddings(), "bias", None)
        return bias

    def _head(self, weight: Tensor, bias: Tensor | None) -> Head:
        return Head.of(self.spec, weight, bias)

    def _forward(self, batch: Sequence[Answer]) -> tuple[Tensor, list[Tensor]]:
        """The rows before the head, and the inputs of some layers [sequences, tokens, dim].

        Padding stands after the tokens, so that no token attends to it.
        """
        length = max(len(answer.tokens) for answer in batch)
        tokens = np.zeros((len(batch), length), np.int64)
        for row, answer in zip(tokens, batch, strict=True):
            row[: len(answer.tokens)] = answer.tokens
        model: Any = self.module.model
        with self._products():
            output = model.base_model(
                input_ids=torch.from_numpy(tokens),
                use_cache=False,
                output_hidden_states=bool(self._places),
            )
        hidden: Tensor = output.last_hidden_state.float()
        return hidden, [output.hidden_states[place].float() for place in self._places]

    def _products(self) -> Any:
        return torch.autocast("cpu", self.dtype, enabled=self.dtype != torch.float32)

    def _cut(self, answer: Answer) -> Answer:
        """The first tokens of a sequence; of one with a long prompt, at least an answer token."""
        end = max(MAX_LENGTH, answer.answer_start)
        if len(answer.tokens) <= end:
            return answer
        return Answer(
            tokens=answer.tokens[:end],
            answer_start=answer.answer_start,
            taps=answer.taps[:end],
            final=answer.final[:end],
            next_token=int(answer.tokens[end]),
        )

    def _batch(self, step: int) -> NDArray[np.int64]:
        """The sequences of a step: a function of the seed and the step alone."""
        size = self._batch_size
        num_batches = len(self._training) // size
        epoch, index = divmod(step, num_batches)
        if self._epoch[0] != epoch:
            rng = np.random.default_rng([self._seed, epoch])
            order = self._training[rng.permutation(len(self._training))][: num_batches * size]
            window = size * _SORTED_BATCHES
            lengths = self._answers.lengths
            parts = [order[i : i + window] for i in range(0, len(order), window)]
            ordered = np.concatenate([part[np.argsort(lengths[part])] for part in parts])
            batches = np.split(ordered, num_batches)
            self._epoch = epoch, [batches[i] for i in rng.permutation(num_batches)]
        return self._epoch[1][index]


def product_type() -> torch.dtype:
    """bfloat16 if the processor multiplies it, otherwise float32."""
    able = torch.cpu.get_capabilities()
    return torch.bfloat16 if able.get("avx512_bf16") or able.get("amx_bf16") else torch.float32


def _answer_places(batch: Sequence[Answer]) -> tuple[Tensor, Tensor]:
    """The rows and tokens whose next tokens belong to the answers."""
    spans = [np.arange(answer.answer_start - 1, len(answer.tokens)) for answer in batch]
    rows = np.repeat(np.arange(len(batch)), [len(span) for span in spans])
    return torch.from_numpy(rows), torch.from_numpy(np.concatenate(spans))


def _joined(arrays: Sequence[NDArray[Any]], batch: Sequence[Answer]) -> Tensor:
    """The entries of `_answer_places`, of one array for each sequence."""
    parts = [array[answer.answer_start - 1 :] for array, answer in zip(arrays, batch, strict=True)]
    return torch.from_numpy(np.concatenate(parts))


def _energy(answers: AnswerSet) -> Energy:
    meta = answers.meta
    layers = [tap for tap in meta.taps] or [0]
    energy = Energy(meta.dim, layers)
    for answer in answers.sequences(answers.training[:_ENERGY_SEQUENCES]):
        start = answer.answer_start
        energy.add(answer.taps[start:] if meta.taps else answer.final[start:])
    return energy


def _make_model(config: Mapping[str, Any]) -> nn.Module:
    """A model of transformers. Raises UnsupportedModelError or RequestError."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = str(config.get("model_type"))
    fields = {name: value for name, value in config.items() if name != "model_type"}
    try:
        with _quiet():
            made = AutoConfig.for_model(kind, **fields)
            model: nn.Module = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    except (ValueError, KeyError) as error:
        if "Unrecognized" in str(error):
            raise UnsupportedModelError(
                f"transformers has no model_type {kind!r} to train; choose another teacher"
            ) from None
        raise RequestError(f"transformers refuses this shape: {error}; choose another") from error
    return model.train()


def _load_weights(model: nn.Module, spec: Any, tensors: Mapping[str, StoredTensor]) -> None:
    layout = FAMILIES[spec.architecture].config
    if layout is None:
        raise UnsupportedModelError(
            f"the family {spec.architecture} has no folder format; choose another teacher"
        )
    state = {
        name: torch.from_numpy(np.ascontiguousarray(each.values(tensors, 0, each.shape[0])))
        for name, each in file_tensors(spec, layout).items()
    }
    # In bf16, so that the first weights are those that a file can hold.
    state = {name: value.bfloat16().float() for name, value in state.items()}
    try:
        absent, unknown = model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise _other_model(spec.architecture, str(error).splitlines()[-1].strip()) from error
    tied = {"lm_head.weight"} if spec.tied_embeddings else set()
    if unknown or set(absent) - tied:
        raise _other_model(spec.architecture, f"tensors {[*unknown, *absent][:3]}")


def _other_model(family: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"transformers computes another {family} model than this one ({reason}); choose another "
        "teacher"
    )


def _teacher_head(teacher: Checkpoint, dtype: torch.dtype) -> Head:
    name = "embed" if teacher.spec.tied_embeddings else "head"
    weight = torch.from_numpy(teacher.tensors[name].dequantise()).to(dtype)
    bias = None
    if teacher.spec.head_bias:
        bias = torch.from_numpy(teacher.tensors["head_bias"].dequantise().reshape(-1))
    return Head.of(teacher.spec, weight, bias)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bars and notes of transformers."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        logging.enable_progress_bar()
