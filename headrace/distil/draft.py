"""Trains an EAGLE-3 drafter on recorded answers of its target (Li et al. 2025).

The drafter learns the target's distribution over its tokens, at answers alone. Its tokens are the
most frequent ones of the answers. `draft_start.py` has its first weights.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.checkpoint.load import Checkpoint
from headrace.distil.answers import AnswerSet
from headrace.distil.draft_layer import DraftLayer, shifted
from headrace.distil.draft_loss import SoftCrossEntropy, padded
from headrace.distil.draft_start import copy_target, ridge, stored_matrix
from headrace.distil.packing import Batch, Piece, TrainingOrder, cut, packed
from headrace.errors import RequestError, UnsupportedModelError
from headrace.measure.progress import ProgressCallback, track
from headrace.model.spec import DrafterSpec, ModelSpec, RopeSpec
from headrace.record import frozen

DraftKind = Literal["joined", "eagle3"]
"""EAGLE-3's layer, or its variant whose residual stream starts with embedding and rows, joined."""
DEPTH = 4
"""Drafts in a row that are trained and evaluated."""
_STEP_DECAY = 0.8
"""Weight of a step's loss relative to the step before it, as in the authors' code."""
_MAX_ROW_LENGTH = 512
"""Tokens of a row of a batch; longer answers are cut."""
_BATCH_TOKENS = 2048
_HELD_OUT_BATCHES = 8
_START_BATCHES = 200
"""Batches from which the first linear maps are computed."""
_SCALES = 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0
_SCALE_BATCHES = 2
_CHUNK_ROWS = 4096


def draft_spec(
    target: ModelSpec, taps: Sequence[int], vocab_size: int, kind: DraftKind
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
        embedding_in_residual=kind == "joined",
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
        kind: DraftKind = "joined",
        seed: int = 0,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`dtype` is the type of products; None: bfloat16 if the processor multiplies it."""
        self.target, self.answers = target, answers
        self.spec = draft_spec(target.spec, answers.meta.taps, vocab_size, kind)
        assert self.spec.drafter
        size = self.spec.drafter.vocab_size
        self.tokens = frequent_tokens(answers, special, size, target.spec.vocab_size)
        self.dtype = dtype or product_type()
        self._head = stored_matrix(target, "embed" if target.spec.tied_embeddings else "head")
        self._embedding = stored_matrix(target, "embed").to(self.dtype)
        self._drafted_head = self._head[torch.from_numpy(self.tokens)].to(self.dtype)
        self.module = DraftLayer(self.spec)
        self._seed = seed

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

    @property
    def rate_shares(self) -> dict[str, float]:
        """Shares of the learning rate for parts that start well; a coherent step of Adam changes a
        row by the rate times the width of its input.
        """
        drafter = self.spec.drafter
        assert drafter
        is_joined = drafter.embedding_in_residual
        return {"fc": 0.05, "fc_own": 0.05, "lm_head": 0.2} if is_joined else {}

    def start(self, on_progress: ProgressCallback) -> None:
        """Set the first weights: parts of the target, and the best linear maps."""
        tokens = torch.from_numpy(self.tokens)
        copy_target(self.module, self.spec, self.target, self._head[tokens], self._seed)
        drafter = self.spec.drafter
        assert drafter
        if drafter.embedding_in_residual:
            count = min(_START_BATCHES, self._order.num_batches)
            wanted_norm = self.module.norm.weight.detach().clone()
            for own in (False, True):
                steps = track(range(count), count, "first weights", on_progress)
                weight = ridge(self._start_pairs(step, wanted_norm, own=own) for step in steps)
                linear = self.module.fc_own if own else self.module.fc
                with torch.no_grad():
                    linear.weight.copy_(weight)
                if not own:
                    self._set_confidence(wanted_norm)

    @torch.no_grad()
    def _set_confidence(self, norm: Tensor) -> None:
        """Scale the norm before the head, so that the first loss is least."""

        def loss(scale: float) -> float:
            self.module.norm.weight.copy_(scale * norm)
            losses = [self.loss(step, 1)[0].item() for step in range(_SCALE_BATCHES)]
            return float(sum(losses))

        best = min(_SCALES, key=loss)
        self.module.norm.weight.copy_(best * norm)

    @torch.no_grad()
    def _start_pairs(self, step: int, norm: Tensor, *, own: bool) -> tuple[Tensor, Tensor]:
        """Inputs of a first matrix [N, width], and the rows of the target [N, dim] that they should
        give, before its last norm with the weights `norm`.
        """
        inputs = self._inputs(self._order.batch(step))
        depths, embeddings = inputs.depths, inputs.embeddings
        rows = inputs.taps
        if own:
            (rows,) = self.module.rows(embeddings, inputs.taps, inputs.positions, inputs.groups, 1)
            rows = shifted(rows, 1, 1)
        chosen = depths >= int(own)
        pairs = self.module.pairs(embeddings, rows, own=own).flatten(0, 1)[chosen].float()
        wanted = inputs.final[chosen[depths >= 0]] / norm
        return pairs, wanted

    def _pieces(self, sequences: Sequence[int]) -> list[Piece]:
        lengths = [int(self.answers.lengths[i]) for i in sequences]
        return [piece for piece in cut(sequences, lengths, self._row_length) if len(piece) > 1]

    def loss(self, step: int, num_drafts: int = DEPTH) -> tuple[Tensor, int]:
        """Return the mean cross-entropy over the drafts of all answer pairs of a batch."""
        inputs = self._inputs(self._order.batch(step))
        logits = self._target_logits(padded(inputs.final), self._drafted_head)
        probabilities = logits.softmax(-1).to(self.dtype)
        depths = inputs.depths
        number = torch.cumsum(depths >= 0, 0) - 1
        rows, index, weights = list[Tensor](), list[Tensor](), list[Tensor]()
        for i, x in enumerate(self._rows(inputs, num_drafts)):
            chosen = (depths >= i).nonzero().squeeze(1)
            rows.append(x[chosen])
            index.append(number[chosen])
            weights.append(torch.full((len(chosen),), _STEP_DECAY**i))
        weight = torch.cat(weights)
        weight /= weight.sum().clamp(min=1e-9)
        # Rows of padding have no weight.
        loss: Tensor = SoftCrossEntropy.apply(
            padded(torch.cat(rows)),
            self.module.lm_head.weight,
            probabilities,
            padded(torch.cat(index)),
            padded(weight),
        )
        return loss, inputs.num_tokens

    @torch.no_grad()
    def evaluate(self) -> Mapping[str, float]:
        """Return the share of drafts at depths 1 to 4 that the target would write (greedy), and the
        tokens of a step with chains of 4 drafts.

        As in the engine, the next chain begins after the accepted drafts of the last one. A mean
        over chains from all tokens would count texts that are easy to draft more often.
        """
        right, count = np.zeros(DEPTH), np.zeros(DEPTH)
        num_tokens, num_steps = 0, 0
        matrix = self.module.lm_head.weight.to(self.dtype)
        for number, batch in enumerate(self._held_out):
            inputs = self._inputs(batch)
            if number == len(self._best):
                self._best.append(self._best_tokens(inputs.final))
            is_answer, best = inputs.depths >= 0, torch.full_like(inputs.depths, -1)
            best[is_answer] = self._best[number]
            agreed = list[Tensor]()
            for i, x in enumerate(self._rows(inputs, DEPTH)):
                drafted = torch.from_numpy(self.tokens)[(x.to(self.dtype) @ matrix.T).argmax(-1)]
                chosen = inputs.depths >= i
                agreed.append((drafted == best) & chosen)
                right[i] += int(agreed[i].sum())
                count[i] += int(chosen.sum())
            # A chain that starts at pair p has the drafts of step i at pair p + i.
            alive, accepted = is_answer, torch.zeros_like(inputs.depths)
            for i in range(DEPTH):
                alive = alive & _earlier(agreed[i], i)
                accepted += alive
            num_tokens += int(is_answer.sum())
            num_steps += _num_steps(accepted.tolist(), inputs.depths.tolist())
        shares = right / np.maximum(count, 1)
        figures = {f"acceptance_{i}": float(share) for i, share in enumerate(shares, 1)}
        return figures | {"tokens_per_step": num_tokens / max(num_steps, 1)}

    def summary(self, figures: Mapping[str, float]) -> str:
        """Return the held-out figures in a few words."""
        shares = " ".join(f"{figures[f'acceptance_{i}']:.2f}" for i in range(1, DEPTH + 1))
        return f"held-out {shares}, {figures['tokens_per_step']:.2f} tokens a step"

    def _rows(self, inputs: _Inputs, num_drafts: int) -> Iterator[Tensor]:
        """Yield the normed rows [rows * positions, dim] of each step."""
        for rows in self.module.rows(
            inputs.embeddings, inputs.taps, inputs.positions, inputs.groups, num_drafts
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


def product_type() -> torch.dtype:
    """bfloat16 if the processor multiplies it, otherwise float32."""
    able = torch.cpu.get_capabilities()
    return torch.bfloat16 if able.get("avx512_bf16") or able.get("amx_bf16") else torch.float32


def _num_steps(accepted: Sequence[int], depths: Sequence[int]) -> int:
    """Return the number of steps that write the answers in a batch.

    `accepted` has the number of right drafts of the chain from each pair; `depths` is as in
    `_Inputs`. A step from a pair writes one token more than it accepts.
    """
    count, following = 0, 0
    for pair, depth in enumerate(depths):
        if depth == 0:
            following = pair
        if depth >= 0 and pair == following:
            count += 1
            following = pair + 1 + accepted[pair]
    return count


def _earlier(x: Tensor, count: int) -> Tensor:
    """Move the entries of a vector `count` places back, with False after them."""
    return torch.cat([x[count:], x.new_zeros(count)])
