"""Lets a model answer prompts, and stores the answers with their rows (`answers.py`)."""

import json
from pathlib import Path
from typing import Protocol

import numpy as np

from headrace.convert.destination import check_disk_space
from headrace.distil.answers import (
    AnswerSet,
    AnswerWriter,
    Meta,
    NewAnswer,
    is_held_out,
    loop_start,
    open_answers,
    read_meta,
)
from headrace.distil.files import disk_errors, write_json
from headrace.distil.prompts import PromptStart, TeacherPrompt
from headrace.distil.teacher import Recording, Teacher
from headrace.errors import FormatError, RequestError
from headrace.measure.progress import ProgressCallback, ignore_progress
from headrace.outputs import RequestOutput
from headrace.sampling_params import SamplingParams
from headrace.speculation.recorder import RecordedRows

BATCH = 32
"""Answers that the engine writes at once."""
_ROUND = 64
"""Prompts that a model writes before their answers begin."""
_MAX_FAILED_ROUNDS = 8
"""Rounds without a new prompt, after which the model is given up."""
_TOP_P = 0.95
"""Probability of the tokens from which prompts are drawn."""
_STEP = "recording answers"


def record_answers(
    model: str,
    prompts: Path | None,
    out: Path,
    recording: Recording,
    *,
    threads: int = 0,
    batch: int = BATCH,
    on_progress: ProgressCallback = ignore_progress,
) -> AnswerSet:
    """Record answers of a model to the prompts of a file, or to prompts that it writes itself.

    Answers to prompts that are held out (`is_held_out`) are the likeliest tokens; others are drawn
    at the temperature of `recording`. Answers end before they begin to loop (`loop_start`).

    The result depends on the model, the prompts and `recording` alone, to the bit. An unfinished
    recording in `out` is continued after its last whole shard, a finished one is opened.

    Raises ModelError as `load_model`; RequestError if `out` holds something else, the model has
    not these taps, or a prompt is invalid; HeadraceError if the disk is full.
    """
    with Teacher(model, recording, threads=threads, batch=batch) as teacher:
        meta = teacher.meta(prompts)
        found = read_meta(out)
        if found and found.finished:
            meta.check_same(found, out)
        else:
            _record(teacher, prompts, out, meta, on_progress)
    return open_answers(out)


def _record(
    teacher: Teacher, prompts: Path | None, out: Path, meta: Meta, on_progress: ProgressCallback
) -> None:
    """Write the answers to `out`, or go on with them."""
    of_file = _FilePrompts(teacher.maker.from_file(prompts)) if prompts else None
    writer = AnswerWriter(out, meta)
    left = max(0, meta.wanted_tokens - writer.num_answer_tokens)
    check_disk_space(out, _bytes(left, meta, of_file.mean_length if of_file else 64))
    source = of_file or _WrittenPrompts(teacher, out)
    try:
        _Answers(teacher, source, writer, meta).write(on_progress)
    finally:
        teacher.abort()
    if not writer.num_answer_tokens:
        raise RequestError(
            f"the prompts of {prompts} are all longer than the model's context of "
            f"{teacher.max_model_len:,} tokens; shorten them"
        )
    writer.finish()


def _bytes(num_answer_tokens: int, meta: Meta, mean_prompt: float) -> int:
    """Estimate the bytes of answers of half the maximum length, with their prompts."""
    num_tokens = num_answer_tokens * (1 + 2 * mean_prompt / meta.max_tokens)
    return round(num_tokens * (2 * meta.dim * (len(meta.taps) + 1) + 4))


class _Prompts(Protocol):
    def get(self, index: int) -> TeacherPrompt | None:
        """Return the prompt of this number; None if there is none, or none yet."""


class _Answers:
    """The answers of a recording, stored in the order of their prompts."""

    def __init__(
        self, teacher: Teacher, source: _Prompts, writer: AnswerWriter, meta: Meta
    ) -> None:
        self._teacher = teacher
        self._source = source
        self._writer = writer
        self._meta = meta
        self._ended: dict[int, NewAnswer | None] = {}
        """By number of the prompt; None if the prompt was left out."""
        self._first = self._following = writer.next_prompt
        """The numbers of the next answer to store, and of the next prompt to answer."""

    def write(self, on_progress: ProgressCallback) -> None:
        """Store answers until there are enough tokens, or no more prompts."""
        wanted = self._meta.wanted_tokens
        on_progress(_STEP, 0.0)
        while self._writer.num_answer_tokens < wanted:
            self._submit()
            if self._teacher.is_idle and self._first not in self._ended:
                return
            self._teacher.step()
            while self._first in self._ended and self._writer.num_answer_tokens < wanted:
                if answer := self._ended.pop(self._first):
                    self._writer.add(answer)
                self._first += 1
            on_progress(_STEP, min(1.0, self._writer.num_answer_tokens / wanted))

    def _submit(self) -> None:
        """Queue enough prompts to fill the batch, but few that wait for an earlier answer."""
        while self._following < self._first + 2 * self._teacher.batch:
            prompt = self._source.get(self._following)
            if prompt is None:
                return
            if len(prompt.asked) < self._teacher.max_model_len:
                self._answer(self._following, prompt)
            else:
                self._ended[self._following] = None
            self._following += 1

    def _answer(self, index: int, prompt: TeacherPrompt) -> None:
        params = SamplingParams(
            temperature=0.0 if is_held_out(prompt.tokens) else self._meta.temperature,
            max_tokens=self._meta.max_tokens,
            seed=self._teacher.seed("answer", index),
        )

        def store(rows: RecordedRows) -> None:
            self._ended[index] = _new_answer(index, prompt, rows)

        self._teacher.submit_recorded(prompt.asked, params, store)


def _new_answer(index: int, prompt: TeacherPrompt, rows: RecordedRows) -> NewAnswer:
    """Join the prompt that is stored and the answer to the prompt that was asked.

    The answer ends before its first loop.
    """
    start = len(prompt.asked)
    written = [*rows.tokens[start:], rows.next_token]
    stop = start + min(len(written) - 1, max(1, loop_start(written)))
    taps, final = rows.taps[:stop], rows.final[:stop]
    if prompt.asked != prompt.tokens:
        before = ((len(prompt.tokens) - 1, 0), (0, 0))
        taps, final = np.pad(taps[start - 1 :], before), np.pad(final[start - 1 :], before)
    return NewAnswer(
        prompt=index,
        tokens=np.array([*prompt.tokens, *rows.tokens[start:stop]], np.int32),
        answer_start=len(prompt.tokens),
        next_token=written[stop - start],
        taps=taps,
        final=final,
    )


class _FilePrompts:
    """The prompts of a file."""

    def __init__(self, prompts: list[TeacherPrompt]) -> None:
        self._prompts = prompts
        self.mean_length = sum(len(prompt.asked) for prompt in prompts) / len(prompts)

    def get(self, index: int) -> TeacherPrompt | None:
        return self._prompts[index] if index < len(self._prompts) else None


class _WrittenPrompts:
    """Prompts that the model writes in rounds, each kept in a file of the recording."""

    def __init__(self, teacher: Teacher, out: Path) -> None:
        self._teacher = teacher
        self._out = out
        self._prompts: list[TeacherPrompt] = []
        self._keys = set[str]()
        self._num_rounds = 0
        self._num_failed = 0
        """Rounds without a new prompt, the last ones."""
        self._outputs: dict[int, tuple[PromptStart, RequestOutput | None]] | None = None
        """Of the round that the model writes, by number of the start; None: nothing to write."""
        while (path := self._path()).exists():
            self._add(_read_prompts(path))

    def get(self, index: int) -> TeacherPrompt | None:
        """Return a prompt. Near the last one, let the model write more."""
        if len(self._prompts) - index < self._teacher.batch and self._outputs is None:
            self._start_round()
        return self._prompts[index] if index < len(self._prompts) else None

    def _path(self) -> Path:
        return self._out / f"prompts-{self._num_rounds:05}.json"

    def _start_round(self) -> None:
        self._outputs = {}
        for index in range(self._num_rounds * _ROUND, (self._num_rounds + 1) * _ROUND):
            seed = self._teacher.seed("form", index)
            self._write_one(index, self._teacher.maker.start(index, seed))

    def _write_one(self, index: int, start: PromptStart) -> None:
        def store(result: RequestOutput | None) -> None:
            assert self._outputs is not None, "a round is open"
            self._outputs[index] = start, result
            if len(self._outputs) == _ROUND:
                self._end_round()

        if not start.max_tokens:
            store(None)
            return
        params = SamplingParams(
            temperature=start.temperature,
            top_p=_TOP_P,
            max_tokens=start.max_tokens,
            seed=self._teacher.seed("prompt", index),
        )
        self._teacher.submit(start.tokens, params, store)

    def _end_round(self) -> None:
        """Keep the prompts of a round that equal no earlier prompt."""
        assert self._outputs is not None, "a round is open"
        prompts = []
        for _, (start, result) in sorted(self._outputs.items()):
            output = result.outputs[0] if result else None
            tokens = output.token_ids if output else []
            ended = output is not None and output.finish_reason == "stop"
            prompt = self._teacher.maker.written(start, tokens, ended=ended)
            if prompt and (key := self._teacher.maker.key(prompt)) not in self._keys:
                self._keys.add(key)
                prompts.append(prompt)
        with disk_errors(self._out):
            write_json(self._path(), [[prompt.tokens, prompt.asked] for prompt in prompts])
        self._add(prompts)
        self._outputs = None

    def _add(self, prompts: list[TeacherPrompt]) -> None:
        self._prompts += prompts
        self._keys.update(map(self._teacher.maker.key, prompts))
        self._num_rounds += 1
        self._num_failed = 0 if prompts else self._num_failed + 1
        if self._num_failed == _MAX_FAILED_ROUNDS:
            raise RequestError(
                f"the model wrote no new prompt in {_MAX_FAILED_ROUNDS * _ROUND} attempts; give a "
                "file of prompts"
            )


def _read_prompts(path: Path) -> list[TeacherPrompt]:
    try:
        values = json.loads(path.read_bytes())
        return [TeacherPrompt(tuple(tokens), tuple(asked)) for tokens, asked in values]
    except (OSError, ValueError, TypeError) as error:
        raise FormatError(f"{path}: {error}; record the answers again, elsewhere") from error
