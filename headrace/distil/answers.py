"""Folders of recorded answers: tokens of a model, with rows of its residual stream.

`meta.json` describes the recording. `shard-00000.safetensors` and its successors each have whole
sequences, in the order of their prompts, until they have `SHARD_TOKENS` tokens:

* `tokens` int32 [N], and `offsets` int64 [S + 1] of the sequences in it;
* `answer_start` int64 [S], the index in a sequence of its first answer token;
* `next_token` int32 [S], the token that was drawn after the last one;
* `prompt` int64 [S], the number of the prompt;
* `taps` bf16 [N, taps * dim], the residual stream before some layers, next to each other;
* `final` bf16 [N, dim], the row before the head, whose logits are those of the next token.

A shard appears under its name when it is complete, so that a stopped recording goes on after it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, fields, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.checkpoint.files import list_names, read_json
from headrace.checkpoint.safetensors import read_safetensors
from headrace.distil.files import DTYPES, disk_errors, write_json, write_safetensors
from headrace.errors import FormatError, RequestError
from headrace.quant.formats import StoredTensor
from headrace.record import frozen
from headrace.whole_file import remove_unfinished

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Bits = NDArray[np.uint16]

FORMAT = 1
SHARD_TOKENS = 16_384
"""Tokens after which a shard is complete."""
HELD_OUT_SHARE = 16
"""Of so many prompts, one is held out of training."""
LOOP_TOKENS = 16
"""Tokens of an answer that repeat earlier ones of it, from which on the answer counts as a loop."""
_META = "meta.json"
_SHARED = ("finished", "num_sequences", "num_tokens", "num_answer_tokens")
"""Fields of `Meta` that do not say what is recorded."""


@frozen(kw_only=True)
class Meta:
    """Description of a folder of answers."""

    fingerprint: str
    """Fingerprint of the model (`checkpoint/fingerprint.py`)."""
    taps: tuple[int, ...]
    """Layers before which rows were taken; the number of layers: after the last."""
    dim: int
    prompts: str
    """Hash of the file of prompts; empty: the model wrote them."""
    seed: int
    temperature: float
    """Temperature of the answers, except for those that are held out, which are greedy."""
    max_tokens: int
    """Maximum tokens of an answer."""
    wanted_tokens: int
    """Answer tokens after which the recording ends."""
    rationales: bool = False
    """Whether the model was told to reason first. The tokens lack that request, so the rows of the
    prompt are zero, except for the last.
    """
    version: int = FORMAT
    finished: bool = False
    num_sequences: int = 0
    num_tokens: int = 0
    num_answer_tokens: int = 0

    def check_same(self, other: "Meta", out: Path) -> None:
        """Raise RequestError if `out`, which has `other`, records something else."""
        for item in fields(self):
            mine, its = getattr(self, item.name), getattr(other, item.name)
            if item.name not in _SHARED and mine != its:
                raise RequestError(
                    f"{out} has answers with another {item.name} ({its!r}, and here it is "
                    f"{mine!r}); name another folder, or repeat the command with the old value"
                )


@frozen(eq=False)
class Answer:
    """A sequence: a prompt, and the model's answer to it."""

    tokens: Ints  # [tokens]
    answer_start: int
    """Index of the first answer token."""
    taps: Floats  # [tokens, taps * dim]
    final: Floats  # [tokens, dim]
    next_token: int
    """The token after the last one, often the end token."""

    @property
    def targets(self) -> Ints:
        """The token after each token [tokens]."""
        return np.append(self.tokens[1:], np.int32(self.next_token))


@frozen(eq=False)
class NewAnswer:
    """A sequence to store, with its rows in bf16."""

    prompt: int
    """Number of the prompt."""
    tokens: Ints  # [tokens]
    answer_start: int
    next_token: int
    taps: Bits  # [tokens, taps * dim]
    final: Bits  # [tokens, dim]

    @property
    def num_answer_tokens(self) -> int:
        """Tokens that the model wrote, with the last one, which has no row."""
        return len(self.tokens) - self.answer_start + 1


def is_held_out(prompt: Sequence[int] | Ints) -> bool:
    """Whether the answer to a prompt, as token ids, is for evaluation only."""
    digest = blake2b(np.asarray(prompt, "<i4").tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_SHARE == 0


def loop_start(answer: Sequence[int]) -> int:
    """Return the index of the first token of an answer's first loop; its length without a loop.

    A loop begins with `LOOP_TOKENS` tokens that the answer has had before.
    """
    seen = set[tuple[int, ...]]()
    for start in range(len(answer) - LOOP_TOKENS + 1):
        run = tuple(answer[start : start + LOOP_TOKENS])
        if run in seen:
            return start
        seen.add(run)
    return len(answer)


def open_answers(folder: Path) -> "AnswerSet":
    """Open a folder of answers.

    Raises RequestError if it has none or is not finished, FormatError if a file is malformed.
    """
    meta = read_meta(folder)
    if meta is None:
        raise RequestError(f"{folder} has no recorded answers ({_META}); name such a folder")
    if not meta.finished:
        raise RequestError(
            f"the recording in {folder} is not finished; repeat the command that began it"
        )
    return AnswerSet(folder, meta)


class AnswerSet:
    """Answers of a folder. Rows are read from memory-mapped files when they are asked for."""

    def __init__(self, folder: Path, meta: Meta) -> None:
        self.folder = folder
        self.meta = meta
        self._shards = [_Shard(path, meta) for path in _whole_shards(folder)]
        self._starts = np.cumsum([0, *(len(shard) for shard in self._shards)])
        if meta.finished and len(self) != meta.num_sequences:
            raise FormatError(
                f"{folder}: {len(self):,} sequences, but {_META} counts {meta.num_sequences:,}; "
                "record the answers again, in another folder"
            )

    def __len__(self) -> int:
        """The number of sequences."""
        return int(self._starts[-1])

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sequence."""
        return np.concatenate([[0], *(np.diff(shard.offsets) for shard in self._shards)])[1:]

    @cached_property
    def held_out(self) -> tuple[int, ...]:
        """The numbers of the sequences for evaluation: by the hash of their prompts, and the last
        one if no hash chose any.
        """
        chosen = [
            i for i in range(len(self)) if is_held_out(self.tokens(i)[: self.answer_start(i)])
        ]
        return tuple(chosen or [len(self) - 1] * (len(self) > 1))

    @cached_property
    def training(self) -> tuple[int, ...]:
        """The numbers of all other sequences."""
        held_out = set(self.held_out)
        return tuple(i for i in range(len(self)) if i not in held_out)

    def tokens(self, index: int) -> Ints:
        """Return the tokens of a sequence."""
        shard, i = self._find(index)
        return shard.tokens[shard.offsets[i] : shard.offsets[i + 1]]

    def answer_start(self, index: int) -> int:
        """Return the index of the first answer token of a sequence."""
        shard, i = self._find(index)
        return int(shard.answer_start[i])

    def answer(self, index: int) -> Answer:
        """Read a sequence with its rows, widened to float32."""
        shard, i = self._find(index)
        rows = slice(shard.offsets[i], shard.offsets[i + 1])
        return Answer(
            tokens=shard.tokens[rows],
            answer_start=int(shard.answer_start[i]),
            taps=_widened(shard.taps[rows]),
            final=_widened(shard.final[rows]),
            next_token=int(shard.next_token[i]),
        )

    def sequences(self, order: Iterable[int]) -> Iterator[Answer]:
        """Yield the sequences with these numbers, one at a time."""
        return map(self.answer, order)

    @property
    def next_prompt(self) -> int:
        """The number of the prompt after the last stored one."""
        return int(self._shards[-1].prompt[-1]) + 1 if self._shards else 0

    @property
    def num_answer_tokens(self) -> int:
        """Tokens that the model wrote, in all sequences."""
        return sum(
            int((np.diff(shard.offsets) - shard.answer_start + 1).sum()) for shard in self._shards
        )

    def _find(self, index: int) -> tuple["_Shard", int]:
        shard = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._shards[shard], index - int(self._starts[shard])


class _Shard:
    """A shard, mapped into memory. Raises FormatError."""

    def __init__(self, path: Path, meta: Meta) -> None:
        tensors = read_safetensors(path)
        try:
            self.tokens: Ints = _array(tensors["tokens"])
            self.offsets: NDArray[np.int64] = _array(tensors["offsets"])
            self.answer_start: NDArray[np.int64] = _array(tensors["answer_start"])
            self.next_token: Ints = _array(tensors["next_token"])
            self.prompt: NDArray[np.int64] = _array(tensors["prompt"])
            self.final: Bits = _array(tensors["final"])
            no_taps = np.zeros((len(self.tokens), 0), np.uint16)
            self.taps: Bits = _array(tensors["taps"]) if meta.taps else no_taps
        except KeyError as error:
            raise _malformed(path, f"tensor {error} is not there") from error
        count, num_tokens = len(self.offsets) - 1, len(self.tokens)
        fits = (
            self.final.shape == (num_tokens, meta.dim)
            and self.taps.shape == (num_tokens, len(meta.taps) * meta.dim)
            and len(self.answer_start) == len(self.next_token) == len(self.prompt) == count
            and self.offsets[0] == 0
            and self.offsets[-1] == num_tokens
            and (np.diff(self.offsets) > 0).all()
            and (self.answer_start > 0).all()
            and (self.answer_start <= np.diff(self.offsets)).all()
        )
        if not fits:
            raise _malformed(path, "its tensors do not fit each other")

    def __len__(self) -> int:
        return len(self.offsets) - 1


def _malformed(path: Path, reason: str) -> FormatError:
    return FormatError(f"{path}: {reason}; record the answers again, in another folder")


def _array(tensor: StoredTensor) -> Any:
    dtype = DTYPES.get(tensor.format.name)
    if dtype is None:
        raise FormatError(
            f"tensor {tensor.name} of recorded answers is {tensor.format.name}, not one of "
            f"{', '.join(DTYPES)}; record the answers again"
        )
    codes = np.ascontiguousarray(tensor.parts["codes"]).reshape(-1)
    return codes.view(np.uint8).view(dtype).reshape(tensor.shape)


def _widened(bits: Bits) -> Floats:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def read_meta(folder: Path) -> Meta | None:
    """Read the description of a folder; None if it has none. Raises FormatError."""
    path = folder / _META
    if not path.exists():
        return None
    values = read_json(path)
    if values.get("version") != FORMAT:
        raise FormatError(
            f"{path}: version {values.get('version')!r}, and this Headrace reads {FORMAT}; record "
            "the answers again"
        )
    try:
        return Meta(**values | {"taps": tuple(values["taps"])})
    except (KeyError, TypeError) as error:
        raise _malformed(path, str(error)) from error


class AnswerWriter:
    """Writes a folder of answers, or goes on after its last whole shard."""

    def __init__(self, out: Path, meta: Meta) -> None:
        """Raises RequestError if `out` is another recording or has other files."""
        self._out = out
        self._meta = meta
        self._waiting: list[NewAnswer] = []
        with disk_errors(out):
            out.mkdir(exist_ok=True)
            found = read_meta(out)
            if found is None and list_names(out):
                raise RequestError(
                    f"{out} has other files and no {_META}; name a new folder for the answers"
                )
            if found:
                meta.check_same(found, out)
                self._meta = found
            else:
                write_json(out / _META, asdict(meta))
            remove_unfinished(out)
        stored = AnswerSet(out, replace(self._meta, finished=False))
        self._num_shards = len(_whole_shards(out))
        self._num_sequences = len(stored)
        self._num_tokens = int(stored.lengths.sum())
        self.num_answer_tokens = stored.num_answer_tokens
        """Tokens that the model wrote, so far."""
        self.next_prompt = stored.next_prompt
        """The number of the first prompt that has no stored answer."""

    @property
    def finished(self) -> bool:
        return self._meta.finished

    def add(self, answer: NewAnswer) -> None:
        """Store an answer. Its prompt comes after those of all earlier answers."""
        self._waiting.append(answer)
        self.num_answer_tokens += answer.num_answer_tokens
        if sum(len(each.tokens) for each in self._waiting) >= SHARD_TOKENS:
            self._write_shard()

    def finish(self) -> None:
        """Write the last shard, and mark the recording as finished."""
        if self._waiting:
            self._write_shard()
        self._meta = replace(
            self._meta,
            finished=True,
            num_sequences=self._num_sequences,
            num_tokens=self._num_tokens,
            num_answer_tokens=self.num_answer_tokens,
        )
        with disk_errors(self._out):
            write_json(self._out / _META, asdict(self._meta))

    def _write_shard(self) -> None:
        answers, self._waiting = self._waiting, []
        lengths = [len(answer.tokens) for answer in answers]
        arrays: dict[str, tuple[str, NDArray[Any]]] = {
            "tokens": ("I32", np.concatenate([answer.tokens for answer in answers])),
            "offsets": ("I64", np.cumsum([0, *lengths], dtype=np.int64)),
            "answer_start": ("I64", np.array([answer.answer_start for answer in answers])),
            "next_token": ("I32", np.array([answer.next_token for answer in answers])),
            "prompt": ("I64", np.array([answer.prompt for answer in answers])),
            "final": ("BF16", np.concatenate([answer.final for answer in answers])),
        }
        if self._meta.taps:
            arrays["taps"] = "BF16", np.concatenate([answer.taps for answer in answers])
        with disk_errors(self._out):
            write_safetensors(self._out / _shard_name(self._num_shards), arrays)
        self._num_shards += 1
        self._num_sequences += len(answers)
        self._num_tokens += sum(lengths)


def _shard_name(index: int) -> str:
    return f"shard-{index:05}.safetensors"


def _whole_shards(folder: Path) -> list[Path]:
    """The shards without a gap."""
    paths: list[Path] = []
    while (path := folder / _shard_name(len(paths))).exists():
        paths.append(path)
    return paths
