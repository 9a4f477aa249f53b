"""Trains an EAGLE-3 drafter on recorded answers of its target (Li et al. 2025).

The drafter learns the target's distribution over its tokens, at answers alone. Its layer starts
from the target's last layer, its head and norm from the target's. The tokens of the drafter are
those most frequent in the answers.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.checkpoint.load import Checkpoint
from headrace.distil.answers import AnswerSet
from headrace.distil.draft_layer import DraftLayer
from headrace.distil.draft_loss import SoftCrossEntropy
from headrace.distil.packing import Batch, Piece, TrainingOrder, cut, packed
from headrace.errors import RequestError, UnsupportedModelError
from headrace.model.spec import DrafterSpec, ModelSpec, RopeSpec
from headrace.record import frozen

DEPTH = 4
"""Drafts in a row that are trained and evaluated."""
_STEP_DECAY = 0.8
"""Weight of a step's loss relative to the step before it, as in the authors' code."""
_MAX_ROW_LENGTH = 512
"""Tokens of a row of a batch; longer answers are cut."""
_BATCH_TOKENS = 2048
_HELD_OUT_BATCHES = 8
_CHUNK_ROWS = 4096


def draft_spec(
    target: ModelSpec, taps: Sequence[int], vocab_size: int, norm_before_residual: bool = False
) -> ModelSpec:
    """The specification of a drafter whose layer has the target's widths.

    Raises UnsupportedModelError if the target's head changes its logits otherwise than by a scale
    or a cap.
    """
    if target.head_bias:
        raise UnsupportedModelError(
            f"{target.name}: its head has a bias, which no published drafter has; choose another "
            "model"
        )
    theta = target.rope.theta if target.rope else RopeSpec.theta
    drafter = DrafterSpec(
        taps=tuple(taps),
        target_dim=target.dim,
        vocab_size=min(vocab_size, target.vocab_size),
        norm_before_residual=norm_before_residual,
    )
    return ModelSpec(
        architecture="eagle3",
        name=f"drafter of {target.name}",
        num_layers=1,
        dim=target.dim,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        ffn_dim=target.ffn_dim,
        vocab_size=target.vocab_size,
        max_context=target.max_context,
        norm_eps=target.norm_eps,
        rope=RopeSpec(target.head_dim, theta),
        drafter=drafter,
    )


def frequent_tokens(
    answers: AnswerSet, special: frozenset[int], size: int, vocab_size: int
) -> NDArray[np.int64]:
    """Return the `size` most frequent tokens of the answers, with all special tokens, ascending.

    Among equally frequent tokens, low numbers come first: tokenizers number frequent merges first.
    """
    counts = np.zeros(vocab_size, np.int64)
    for i in answers.training:
        counts += np.bincount(answers.tokens(i)[answers.answer_start(i) :], minlength=vocab_size)
    counts[[token for token in special if token < vocab_size]] = np.iinfo(np.int64).max
    order = np.lexsort((np.arange(vocab_size), -counts))
    return np.sort(order[:size])


@frozen(eq=False)
class _Inputs:
    """A batch of rows in torch."""

    embeddings: Tensor  # [rows, positions, dim] of the token after each position
    taps: Tensor  # [rows, positions, width]
    positions: Tensor  # [rows, positions]
    groups: Tensor  # [rows, positions]
    depths: Tensor
    """[rows * positions] pairs of the answer before each pair, which is the number of drafts in a
    row that may lead to it; -1: the pair is not of an answer.
    """
    final: Tensor  # [answer pairs, dim] the target's rows whose logits a pair has to predict
    num_tokens: int


class DraftStudent:
    """A drafter in training."""

    depth = DEPTH

    def __init__(
        self,
        target: Checkpoint,
        answers: AnswerSet,
        special: frozenset[int],
        *,
        vocab_size: int,
        seed: int = 0,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`dtype` is the type of products; None: bfloat16 if the processor multiplies it."""
        self.target, self.answers = target, answers
        self.spec = draft_spec(target.spec, answers.meta.taps, vocab_size)
        assert self.spec.drafter
        size = self.spec.drafter.vocab_size
        self.tokens = frequent_tokens(answers, special, size, target.spec.vocab_size)
        self.dtype = dtype or product_type()
        self._head = _matrix(target, "embed" if target.spec.tied_embeddings else "head")
        self._embedding = _matrix(target, "embed").to(self.dtype)
        self._drafted_head = self._head[torch.from_numpy(self.tokens)].to(self.dtype)
        self.module = initialised(self.spec, target, self._head, self.tokens, seed)

        longest = max(map(int, answers.lengths), default=0)
        self._row_length = min(_MAX_ROW_LENGTH, -(-longest // 64) * 64)
        training = self._pieces(answers.training)
        if not training:
            raise RequestError(
                f"{answers.folder} has no answers to train on; record at least two answers"
            )
        num_rows = _BATCH_TOKENS // self._row_length
        self._order = TrainingOrder(training, self._row_length, num_rows, seed)
        held_out = packed(self._pieces(answers.held_out), self._row_length, num_rows)
        self._held_out = held_out[:_HELD_OUT_BATCHES]
        self._best: list[Tensor] = []

    def _pieces(self, sequences: Sequence[int]) -> list[Piece]:
        lengths = [int(self.answers.lengths[i]) for i in sequences]
        return [piece for piece in cut(sequences, lengths, self._row_length) if len(piece) > 1]

    def loss(self, step: int) -> tuple[Tensor, int]:
        """Return the mean cross-entropy over all steps and answer pairs of a batch."""
        inputs = self._inputs(self._order.batch(step))
        logits = self._target_logits(inputs.final, self._drafted_head)
        probabilities = logits.softmax(-1).to(self.dtype)
        depths = inputs.depths
        number = torch.cumsum(depths >= 0, 0) - 1
        rows, index, weights = list[Tensor](), list[Tensor](), list[Tensor]()
        for i, x in enumerate(self._rows(inputs)):
            chosen = (depths >= i).nonzero().squeeze(1)
            rows.append(x[chosen])
            index.append(number[chosen])
            weights.append(torch.full((len(chosen),), _STEP_DECAY**i))
        weight = torch.cat(weights)
        weight /= weight.sum().clamp(min=1e-9)
        loss: Tensor = SoftCrossEntropy.apply(
            torch.cat(rows),
            self.module.lm_head.weight,
            probabilities,
            torch.cat(index),
            weight,
        )
        return loss, inputs.num_tokens

    @torch.no_grad()
    def evaluate(self) -> Mapping[str, float]:
        """Return the share of drafts at depths 1 to 4 that the target would write (greedy), and the
        tokens of a step with a chain of 4 drafts.
        """
        right, count = np.zeros(DEPTH), np.zeros(DEPTH)
        accepted, chains = 0, 0
        matrix = self.module.lm_head.weight.to(self.dtype)
        for number, batch in enumerate(self._held_out):
            inputs = self._inputs(batch)
            if number == len(self._best):
                self._best.append(self._best_tokens(inputs.final))
            is_answer, best = inputs.depths >= 0, torch.full_like(inputs.depths, -1)
            best[is_answer] = self._best[number]
            agreed = list[Tensor]()
            for i, x in enumerate(self._rows(inputs)):
                drafted = torch.from_numpy(self.tokens)[(x.to(self.dtype) @ matrix.T).argmax(-1)]
                chosen = inputs.depths >= i
                agreed.append((drafted == best) & chosen)
                right[i] += int(agreed[i].sum())
                count[i] += int(chosen.sum())
            # A chain that starts at pair p has the drafts of step i at pair p + i.
            alive = is_answer
            for i in range(DEPTH):
                alive = alive & _earlier(agreed[i], i)
                accepted += int(alive.sum())
            chains += int(is_answer.sum())
        shares = right / np.maximum(count, 1)
        figures = {f"acceptance_{i}": float(share) for i, share in enumerate(shares, 1)}
        return figures | {"tokens_per_step": 1 + accepted / max(chains, 1)}

    def summary(self, figures: Mapping[str, float]) -> str:
        """Return the held-out figures in a few words."""
        shares = " ".join(f"{figures[f'acceptance_{i}']:.2f}" for i in range(1, DEPTH + 1))
        return f"held-out {shares}, {figures['tokens_per_step']:.2f} tokens a step"

    def _rows(self, inputs: _Inputs) -> Iterator[Tensor]:
        """Yield the normed rows [rows * positions, dim] of each step."""
        for rows in self.module.rows(
            inputs.embeddings, inputs.taps, inputs.positions, inputs.groups, DEPTH
        ):
            yield self.module.norm(rows).flatten(0, 1)

    def _target_logits(self, final: Tensor, head: Tensor) -> Tensor:
        spec = self.target.spec
        logits = (final.to(self.dtype) @ head.T).float() * spec.logit_scale
        if spec.logit_softcap:
            logits = spec.logit_softcap * torch.tanh(logits / spec.logit_softcap)
        return logits

    def _best_tokens(self, final: Tensor) -> Tensor:
        """The likeliest token of the target for each row, over its whole vocabulary."""
        head, chunks = self._head.to(self.dtype), final.split(_CHUNK_ROWS)
        best = [self._target_logits(chunk, head).argmax(-1) for chunk in chunks]
        return torch.cat(best) if best else torch.zeros(0, dtype=torch.int64)

    def _inputs(self, batch: Batch) -> _Inputs:
        shape, width = (len(batch), self._row_length), len(self.answers.meta.taps) * self.spec.dim
        tokens, positions, groups = (np.zeros(shape, np.int64) for _ in range(3))
        depths = np.full(shape, -1)
        taps = torch.zeros(*shape, width, dtype=self.dtype)
        final = list[Tensor]()
        answers = self.answers.sequences(piece.sequence for row in batch for piece in row)
        for i, row in enumerate(batch):
            end = 0
            for group, piece in enumerate(row, 1):
                answer = next(answers)
                start, end = end, end + len(piece)
                pairs = slice(start, end - 1)  # the last token has no next row to predict
                source = slice(piece.start, piece.stop - 1)
                tokens[i, pairs] = answer.tokens[piece.start + 1 : piece.stop]
                taps[i, pairs] = torch.from_numpy(answer.taps[source]).to(self.dtype)
                positions[i, pairs] = np.arange(piece.start, piece.stop - 1)
                groups[i, start:end] = group
                # The first draft comes after the first token of the answer.
                first = max(0, answer.answer_start - 1 - piece.start)
                depths[i, start + first : end - 1] = np.arange(max(0, len(piece) - 1 - first))
                final.append(torch.from_numpy(answer.final[piece.start + 1 + first : piece.stop]))
        return _Inputs(
            embeddings=self._embedding[torch.from_numpy(tokens)],
            taps=taps,
            positions=torch.from_numpy(positions),
            groups=torch.from_numpy(groups),
            depths=torch.from_numpy(depths).flatten(),
            final=torch.cat(final),
            num_tokens=sum(len(piece) for row in batch for piece in row),
        )


def initialised(
    spec: ModelSpec, target: Checkpoint, head: Tensor, tokens: NDArray[np.int64], seed: int
) -> DraftLayer:
    """Make a drafter from parts of the target, and from random numbers by seed."""
    drafter = spec.drafter
    assert drafter
    module = DraftLayer(spec)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                deviation = 0.5 * parameter.shape[1] ** -0.5
                parameter.normal_(0, deviation, generator=generator)
        # The mixed row starts as the last tap.
        module.fc.weight.zero_()
        module.fc.weight[:, -drafter.target_dim :] = torch.eye(spec.dim)
        module.lm_head.weight.copy_(head[torch.from_numpy(tokens)])
        if target.spec.norm == "rms":
            module.norm.weight.copy_(_matrix(target, "norm").flatten())
        _copy_last_layer(module, spec, target)
    return module


def _copy_last_layer(module: DraftLayer, spec: ModelSpec, target: Checkpoint) -> None:
    """Start from the target's last layer, as far as its matrices have the drafter's shapes.

    The layer reads pairs of an embedding and a row; the target's matrices go to the rows.
    """
    layer = f"layers.{target.spec.num_layers - 1}"
    attention, mlp, dim = module.midlayer.self_attn, module.midlayer.mlp, spec.dim
    whole = {"o": attention.o_proj, "gate": mlp.gate_proj, "up": mlp.up_proj, "down": mlp.down_proj}
    for name, linear in whole.items():
        matrix = _part(target, f"{layer}.{name}")
        if matrix is not None and matrix.shape == linear.weight.shape:
            linear.weight.copy_(matrix)
    halves = {"q": attention.q_proj, "k": attention.k_proj, "v": attention.v_proj}
    for name, linear in halves.items():
        matrix = _part(target, f"{layer}.{name}")
        if matrix is not None and matrix.shape == linear.weight[:, dim:].shape:
            if name != "v":
                matrix = half_split(matrix, spec)
            linear.weight[:, dim:] = matrix
    norms = {
        "attn_norm": module.midlayer.hidden_norm,
        "mlp_norm": module.midlayer.post_attention_layernorm,
    }
    for name, norm in norms.items():
        vector = _part(target, f"{layer}.{name}")
        if vector is not None and target.spec.norm == "rms" and vector.numel() == dim:
            norm.weight.copy_(vector.flatten())


def half_split(matrix: Tensor, spec: ModelSpec) -> Tensor:
    """The rows of queries or keys as files have them: first halves of rotary pairs first."""
    heads = matrix.reshape(-1, spec.head_dim, matrix.shape[1])
    return torch.cat([heads[:, ::2], heads[:, 1::2]], 1).reshape(matrix.shape)


def product_type() -> torch.dtype:
    """bfloat16 if the processor multiplies it, otherwise float32."""
    able = torch.cpu.get_capabilities()
    return torch.bfloat16 if able.get("avx512_bf16") or able.get("amx_bf16") else torch.float32


def _part(target: Checkpoint, name: str) -> Tensor | None:
    return _matrix(target, name) if name in target.tensors else None


def _matrix(target: Checkpoint, name: str) -> Tensor:
    return torch.from_numpy(np.array(target.tensors[name].dequantise(), np.float32))


def _earlier(x: Tensor, count: int) -> Tensor:
    """Move the entries of a vector `count` places back, with False after them."""
    return torch.cat([x[count:], x.new_zeros(count)])
