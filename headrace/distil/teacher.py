"""A model that answers prompts while the rows of its steps are recorded."""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path

from headrace.checkpoint.fingerprint import fingerprint
from headrace.config import EngineConfig
from headrace.distil.answers import Meta
from headrace.distil.prompts import PromptMaker, file_hash
from headrace.errors import HeadraceError, RequestError
from headrace.loader.load import load_model, open_files
from headrace.outputs import RequestOutput
from headrace.record import frozen
from headrace.sampling_params import SamplingParams
from headrace.speculation.recorder import RecordedRows, RowRecorder
from headrace.validation import integer, number

Done = Callable[[RequestOutput], None]

_ANY_LENGTH = 1 << 30


@frozen(kw_only=True)
class Recording:
    """The options of a recording."""

    taps: tuple[int, ...] = ()
    """Layers before which rows are taken; the number of layers: after the last."""
    num_tokens: int = 60_000
    """Answer tokens after which the recording ends."""
    max_tokens: int = 512
    """Maximum tokens of an answer."""
    temperature: float = 0.0
    seed: int = 0
    rationales: bool = False
    """Whether the model is asked to reason before it answers."""

    def __post_init__(self) -> None:
        integer("num_tokens", self.num_tokens, 1, 1 << 40)
        integer("max_tokens", self.max_tokens, 1, 1 << 20)
        number("temperature", self.temperature, 0.0, 100.0)
        integer("seed", self.seed, 0, 2**31 - 1)


class Teacher:
    """A model whose answers are recorded."""

    def __init__(self, model: str, recording: Recording, *, threads: int, batch: int) -> None:
        """Raises as `record_answers`."""
        spec = open_files(model, EngineConfig()).spec
        if not spec.has_head:
            raise RequestError(
                f"{model} only computes embeddings and writes no answers; choose a model that "
                "generates text"
            )
        if any(not 0 <= tap <= spec.num_layers for tap in recording.taps):
            raise RequestError(
                f"taps are {list(recording.taps)}, and the model has the layers 0 to "
                f"{spec.num_layers - 1} and the rows after them ({spec.num_layers})"
            )
        self._recorder = RowRecorder(recording.taps, spec.dim)
        config = EngineConfig(
            threads=threads,
            max_num_seqs=batch,
            prefix_cache=False,
            adaptive_speculation=False,
            chunked_prefill_size=0,
            multi_step_ms=0,
        )
        self.batch = batch
        self._recording = recording
        self._loaded = load_model(model, config, self._recorder)
        # Prompts that do not fit in the context are left out later.
        self._loaded.prompts.max_model_len = _ANY_LENGTH
        self.maker = PromptMaker(
            self._loaded.prompts, self._loaded.tokenizer, rationales=recording.rationales
        )
        self._done: dict[str, Done] = {}

    def __enter__(self) -> "Teacher":
        return self

    def __exit__(self, *error: object) -> None:
        self._loaded.engine.close()
        self._loaded.prompts.close()

    def meta(self, prompts: Path | None) -> Meta:
        """Describe the recording. Raises RequestError if the file cannot be read."""
        wanted = self._recording
        return Meta(
            fingerprint=fingerprint(self._loaded.checkpoint, self._loaded.tokenizer),
            taps=wanted.taps,
            dim=self._loaded.checkpoint.spec.dim,
            prompts=file_hash(prompts),
            seed=wanted.seed,
            temperature=float(wanted.temperature),
            max_tokens=wanted.max_tokens,
            wanted_tokens=wanted.num_tokens,
            rationales=wanted.rationales,
        )

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of a prompt with its answer."""
        return self._loaded.engine.limits.max_model_len

    @property
    def is_idle(self) -> bool:
        """Whether no request is queued or running."""
        return not self._done

    def submit(self, tokens: Sequence[int], params: SamplingParams, done: Done) -> None:
        """Queue a request; `done` gets its result."""
        request_id = self._loaded.engine.add_request(tokens, params)
        self._done[request_id] = done

    def submit_recorded(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        done: Callable[[RecordedRows], None],
    ) -> None:
        """Queue a request; `done` gets the rows of its prompt and its answer."""

        def take(result: RequestOutput) -> None:
            rows = self._recorder.take(int(result.request_id))
            if rows is None:
                raise HeadraceError("rows of an answer are incomplete; report this error")
            done(rows)

        request_id = self._loaded.engine.add_request(tokens, params)
        self._done[request_id] = take
        self._recorder.start(int(request_id))

    def step(self) -> None:
        """Run a step of the engine. Raises the error of a request that failed."""
        for update in self._loaded.engine.step():
            if result := update.result:
                if result.error:
                    raise result.error
                self._done.pop(result.request_id)(result)

    def abort(self) -> None:
        """End all requests."""
        for request_id in self._done:
            self._loaded.engine.abort(request_id)
            self._recorder.drop(int(request_id))
        self._done.clear()

    def seed(self, kind: str, index: int) -> int:
        """Return the seed of a request, which no other request shares."""
        name = f"{self._recording.seed} {kind} {index}".encode()
        return int.from_bytes(blake2b(name, digest_size=4).digest(), "little") >> 1
