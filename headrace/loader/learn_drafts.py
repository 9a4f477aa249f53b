"""Sets up a drafter that goes on learning (`learn_drafts`): checks, kept weights, the learner."""

import json
import os
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from headrace.checkpoint.drafter import Drafter
from headrace.checkpoint.drafters import open_drafter
from headrace.checkpoint.files import read_json
from headrace.checkpoint.fingerprint import fingerprint
from headrace.checkpoint.load import Checkpoint
from headrace.checkpoint.source import resolve
from headrace.checkpoint.tokenizer import Tokenizer
from headrace.config import EngineConfig, KvConfig
from headrace.errors import HeadraceError, RequestError, UnsupportedModelError
from headrace.kv.prefix import Scope
from headrace.loader.draft_format import with_format
from headrace.loader.drafts import Attachable, DraftCheckpoints, compile_drafter
from headrace.loader.memory import MaxRows
from headrace.model.spec import ModelSpec, RopeSpec
from headrace.proposer import Proposer, SequenceView
from headrace.quant.digest import tensors_digest
from headrace.record import frozen
from headrace.speculation.learning.buffer import window_bytes
from headrace.speculation.learning.learner import DraftLearner, LearnerParts
from headrace.speculation.proposers.eagle import EagleProposer
from headrace.whole_file import remove_unfinished, replace_file

IN_MEMORY = "on"
"""A `learn_drafts` that keeps nothing."""
LEARNING_RATE = 3e-4
_MIN_WINDOWS = 16
_WEIGHTS = "model.safetensors"
_RECORD = "learned.json"
_TRAINED = {"fuse", "own_fuse", "taps_norm", "norm", "head"} | {
    f"layers.0.{part}"
    for part in (
        *("attn_norm", "hidden_norm", "mlp_norm", "q", "k", "v", "o"),
        *("gate", "up", "down"),
    )
}
"""The tensors of a drafter that the training knows, besides the embedding."""


@frozen(eq=False)
class Learning:
    """A drafter that will learn, opened."""

    original: Drafter
    """The drafter of `draft_model`."""
    current: Drafter
    """The drafter to start with: an earlier run may have learned."""
    folder: Path | None
    """A copy of the files of `current`; None: `current` is the original."""
    scratch: Path
    """Temporary folder of this engine, which is removed with this object."""
    home: "KeptWeights | None"


class KeptWeights:
    """The user's folder with learned weights. `draft_model` loads it like any drafter."""

    def __init__(self, folder: Path, drafter: Path, record: dict[str, Any]) -> None:
        """`drafter` is the folder of the original, `record` says what the weights belong to.

        Raises RequestError for a folder with something else.
        """
        self._folder = folder
        self._drafter = drafter
        self._record = record
        if folder.exists() and folder.samefile(drafter):
            raise RequestError(
                f"learn_drafts '{folder}' is the folder of draft_model, which stays as it is; name "
                "another folder"
            )
        if not folder.exists() and not os.access(folder.absolute().parent, os.W_OK):
            raise RequestError(
                f"learn_drafts '{folder}' cannot be made; name a folder in one that exists and "
                "that you may write"
            )
        if folder.exists():
            self._check(folder)

    def _check(self, folder: Path) -> None:
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise RequestError(
                f"learn_drafts '{folder}' is no folder that you may write; name another one"
            )
        if not any(folder.iterdir()):
            return
        if not (folder / _RECORD).is_file():
            raise RequestError(
                f"learn_drafts '{folder}' has files, but no {_RECORD}, so they are not learned "
                "weights; name a new folder"
            )
        found = read_json(folder / _RECORD)
        for name, value in self._record.items():
            if found.get(name) != value:
                raise RequestError(
                    f"learn_drafts '{folder}' has weights that were learned with another {name}; "
                    "name a new folder"
                )

    @property
    def weights(self) -> Path | None:
        """The file of the weights, if there are any."""
        path = self._folder / _WEIGHTS
        return path if path.is_file() else None

    def keep(self, source: Path | None) -> None:
        """Replace the weights by those of the folder `source`, at once; None: remove them.

        Raises HeadraceError if the disk refuses; the earlier weights then stay.
        """
        try:
            self._folder.mkdir(exist_ok=True)
            remove_unfinished(self._folder)
            if source is None:
                (self._folder / _WEIGHTS).unlink(missing_ok=True)
                return
            files: dict[str, str | bytes] = {
                "config.json": (self._drafter / "config.json").read_bytes(),
                _RECORD: json.dumps(self._record, indent=2) + "\n",
                _WEIGHTS: (source / _WEIGHTS).read_bytes(),
            }
            for name, content in files.items():
                replace_file(self._folder / name, content, survives=True)
        except OSError as error:
            raise HeadraceError(
                f"learn_drafts '{self._folder}': {error.strerror or error}; free some space"
            ) from error


def open_learning(
    config: EngineConfig,
    target: Checkpoint,
    drafts: DraftCheckpoints,
    load_tokenizer: Callable[[], Tokenizer],
) -> Learning | None:
    """Open the drafter that will learn; None without the option.

    Raises RequestError or UnsupportedModelError if it cannot learn, or if the folder of
    `learn_drafts` has other weights.
    """
    if not config.learn_drafts:
        return None
    original = drafts.drafter
    if original is None or original.spec.architecture != "eagle3":
        kind = "no drafter" if original is None else f"a drafter of the kind {_kind(original)}"
        raise RequestError(
            f"learn_drafts trains EAGLE-3 drafters, and draft_model '{config.draft_model}' is "
            f"{kind}; name the folder of an EAGLE-3 drafter of the model, or leave learn_drafts out"
        )
    _check_machine(config)
    _check_layer(config.draft_model, original.spec, set(original.tensors))
    _check_bytes(config, original)
    drafter, home = resolve(config.draft_model), None
    if config.learn_drafts != IN_MEMORY:
        own = {n: t for n, t in original.tensors.items() if n != "embed"}
        record = {
            "model": fingerprint(target, load_tokenizer()),
            "drafter": tensors_digest(own),
        }
        home = KeptWeights(Path(config.learn_drafts), drafter, record)

    scratch = Path(tempfile.mkdtemp(prefix="headrace-learning-"))
    current, folder = original, None
    try:
        if home and home.weights:
            folder = scratch / "start"
            folder.mkdir()
            shutil.copy(drafter / "config.json", folder)
            shutil.copy(home.weights, folder)
            current = _opened(folder, target, original)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    learning = Learning(
        original=original, current=current, folder=folder, scratch=scratch, home=home
    )
    weakref.finalize(learning, shutil.rmtree, scratch, ignore_errors=True)
    return learning


def make_learner(
    learning: Learning,
    config: EngineConfig,
    target: Checkpoint,
    drafts: DraftCheckpoints,
    proposers: Mapping[str, Proposer],
    executable: Attachable,
    kv: KvConfig,
    rows: MaxRows,
) -> DraftLearner[Drafter]:
    """Make the learner of an engine. `kv` is the KV of the drafter, `rows` the size of its
    steps.
    """
    original, current, proposer = learning.original, drafts.drafter, proposers["draft_model"]
    assert original.spec.drafter and current and isinstance(proposer, EagleProposer)
    width = len(original.spec.drafter.taps) * original.spec.drafter.target_dim

    def install(drafter: Drafter) -> None:
        programs = compile_drafter(drafter, target.spec, executable, kv, config.draft_depth)
        for program in (programs.from_target, programs.from_itself):
            program.executable.prepare(rows.rows, rows.logit_rows)
        proposer.use(programs)

    def learns_from(seq: SequenceView) -> bool:
        scope = cast(Scope, seq.scope)
        return scope.adapter is None and (config.learn_salted or scope.salt is None)

    original_path = resolve(config.draft_model)
    parts = LearnerParts(
        weights=current,
        folder=learning.folder,
        open=lambda folder: with_format(_opened(folder, target, original), config.draft_format),
        install=install,
        keep=learning.home.keep if learning.home else lambda folder: None,
        learns_from=learns_from,
        close=lambda: shutil.rmtree(learning.scratch, ignore_errors=True),
        setup={
            "width": width,
            "num_bytes": config.learn_drafts_bytes,
            "model": str(target.path.absolute()),
            "original": str(original_path.absolute()),
            "current": str(learning.folder or original_path.absolute()),
            "out": str(learning.scratch),
            "threads": config.threads,
            "learning_rate": LEARNING_RATE,
        },
    )
    return DraftLearner(parts, width, config.learn_drafts_bytes)


def _opened(folder: Path, target: Checkpoint, original: Drafter) -> Drafter:
    """Open learned weights, which have the shapes, tokens and embedding of the original."""
    found = open_drafter(folder, target)
    tensors = {**found.tensors, "embed": original.tensors["embed"]}
    for name, tensor in original.tensors.items():
        if name not in tensors or tensors[name].shape != tensor.shape:
            raise UnsupportedModelError(
                f"{folder.name}: tensor {name} has not the shape of the drafter's; name a new "
                "folder for learn_drafts"
            )
    return replace(original, tensors=tensors)


def _kind(drafter: Drafter) -> str:
    return {"eagle1": "EAGLE-1", "mtp": "MTP"}.get(
        drafter.spec.architecture, drafter.spec.architecture
    )


def _check_machine(config: EngineConfig) -> None:
    if sys.platform != "linux":
        raise RequestError("learn_drafts needs Linux, for memory that two processes share")
    if find_spec("torch") is None:
        raise RequestError(
            "learn_drafts trains with the package torch; pip install 'headrace[train]', or leave "
            "learn_drafts out"
        )
    if config.tensor_parallel_size * config.pipeline_parallel_size > 1:
        raise RequestError(
            "learn_drafts is for one rank; set tensor_parallel_size and pipeline_parallel_size to "
            "1, or leave learn_drafts out"
        )
    if config.traits.on_gpu:
        raise RequestError(
            f"learn_drafts is for the backend cpu, and backend is {config.backend}: the rows of "
            "the model stay on the GPU; leave learn_drafts out"
        )


def _check_layer(name: str, spec: ModelSpec, tensors: set[str]) -> None:
    """Raise UnsupportedModelError for a layer that the training does not compute."""
    assert spec.drafter
    unknown = sorted(tensors - _TRAINED - {"embed"})
    plain = replace(
        _PLAIN,
        **{field: getattr(spec, field) for field in _FREE_FIELDS},
    )
    if unknown or spec != plain or spec.rope is None or spec.drafter.fuse_bias:
        what = f"tensor {unknown[0]}" if unknown else "a layer unlike Llama's"
        raise UnsupportedModelError(
            f"draft_model '{name}' has {what}, which learn_drafts does not train; leave "
            "learn_drafts out"
        )


_FREE_FIELDS = (
    *("name", "dim", "num_heads", "num_kv_heads", "head_dim", "ffn_dim", "vocab_size"),
    *("max_context", "context", "norm_eps", "rope", "drafter"),
)
_PLAIN = ModelSpec(
    architecture="eagle3",
    num_layers=1,
    dim=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=1,
    ffn_dim=1,
    vocab_size=1,
    max_context=1,
    norm_eps=1.0,
    rope=RopeSpec(1),
)
"""A Llama layer, whose fields other than `_FREE_FIELDS` a drafter must have."""


def _check_bytes(config: EngineConfig, drafter: Drafter) -> None:
    assert drafter.spec.drafter
    width = len(drafter.spec.drafter.taps) * drafter.spec.drafter.target_dim
    needed = _MIN_WINDOWS * window_bytes(width) + 64
    if config.learn_drafts_bytes < needed:
        raise RequestError(
            f"learn_drafts_bytes is {config.learn_drafts_bytes:,}, but {_MIN_WINDOWS} texts of 128 "
            f"tokens with rows of {width:,} numbers need {needed:,}; set it to {needed:,} or more"
        )
