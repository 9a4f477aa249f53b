"""What the pages say is so: the worked step of docs/architecture.md is one that the engine runs,
and what they name is there.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.batch import NO_DRAFT, Commit, DraftTree, Ints, RaggedBatch
from headrace.logit_ops import LogitOp, SampleOp, SampleResult, StepResult, Ticket
from headrace.proposer import ProposerTraits
from headrace.sampling_params import SamplingParams
from tests.engine import toy
from tests.texts import NAME, ROOT, files, texts

PAGES = sorted((ROOT / "docs").rglob("*.md"))
GENERATED = {ROOT / "docs/reference/fields.md"}
"""Pages with names of other projects; a test of their own compares them with the code."""
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()

_FILE = re.compile(r"(?![~.])[\w./-]+(/|\.(py|h|cpp|md|toml|svg))")
_CODE_NAME = re.compile(r"[A-Za-z_][\w.]*(\(\w*\))?")

TREE = DraftTree([15, 3, 16], [-1, 0, 0])
"""Below 14: 15, and after it 3 or 16. Of a model that counts 3 is wrong."""


def count_on(last: int) -> NDArray[np.float32]:
    """Logits of a model that counts: after 14 comes 15."""
    logits = np.zeros(toy.VOCAB, np.float32)
    logits[(last + 1) % toy.VOCAB] = 9
    return logits


class Scripted:
    """Proposes the tree once, after a 14, and remembers the commits."""

    traits = ProposerTraits(3, in_engine_thread=True, time_limit=None)
    commits: Sequence[Commit] = ()

    def propose(self, seqs: list[Any], budgets: list[int]) -> list[DraftTree]:
        return [TREE if seq.known[-1] == 14 else NO_DRAFT for seq in seqs]

    def observe(self, seqs: list[Any], commits: list[Commit], result: StepResult) -> None:
        self.commits = commits


class Launch(NamedTuple):
    batch: RaggedBatch
    ops: Sequence[LogitOp]
    results: Sequence[Any]


class WorkedStep:
    """An engine whose third step is the one of the page, and what went by in it."""

    def __init__(self) -> None:
        proposer = Scripted()
        engine = toy.toy_engine(block_size=4, chunked_prefill_size=2, proposer=proposer)
        self.launches: list[Launch] = []
        self.moves: list[tuple[int, int]] = []
        executable = engine._loop.executable
        launch = executable.launch

        def recorded(batch: RaggedBatch, ops: Sequence[LogitOp] = (), **wanted: bool) -> Ticket:
            ticket = launch(batch, ops, **wanted)
            self.launches.append(Launch(batch, list(ops), ticket.wait().values))
            return ticket

        def moved(group: int, source: Ints, target: Ints) -> None:
            self.moves.extend(zip(source.tolist(), target.tolist(), strict=True))

        executable.launch = recorded  # type: ignore[method-assign]
        executable.move_slots = moved  # type: ignore[method-assign]
        greedy = SamplingParams(temperature=0.0)
        engine.add_request([1, 2, 3, 4], greedy)
        engine.add_request([8, 9, 10, 11, 12], greedy)
        engine.step()
        engine.step()
        engine.add_request([17, 18, 19, 20, 21, 22], greedy)
        engine.step()
        self.commits = proposer.commits
        self.seqs = engine._scheduler.running

    def arrays(self) -> list[str]:
        batch = self.launches[-1].batch
        (kv,) = batch.kv
        assert batch.ancestors is not None
        return [
            *(f"{name} = {getattr(batch, name).tolist()}" for name in ("tokens", "positions")),
            f"slots = {kv.slots.tolist()}",
            *(
                f"{name} = {getattr(batch, name).tolist()}"
                for name in ("row_start", "context_len", "scheduled_len")
            ),
            f"block_table = {kv.block_table.tolist()}",
            f"ancestors = [{', '.join(f'0b{word:03b}' for (word,) in batch.ancestors.tolist())}]",
            *(f"{name} = {getattr(batch, name).tolist()}" for name in ("logit_rows", "seq_of")),
        ]

    def outcome(self) -> list[str]:
        launch = self.launches[-1]
        lines = []
        for op, drawn in zip(launch.ops, launch.results, strict=True):
            assert isinstance(op, SampleOp) and isinstance(drawn, SampleResult)
            draft = (
                f", draft={DraftTree.__name__}({op.draft.tokens}, {op.draft.parents})"
                if op.draft.tokens
                else ""
            )
            lines.append(
                f"SampleOp(row={op.row}, position={op.position}{draft}) -> "
                f"SampleResult(tokens={drawn.tokens}, path={drawn.path})"
            )
        lines += [
            f"Commit(source={c.source}, path={c.path}, tokens={c.tokens})"
            for c in sorted(self.commits)
        ]
        lines += [f"move slot {source} -> {target}" for source, target in self.moves]
        return [
            *lines,
            *(
                f"{name}: known = {seq.known}, computed = {seq.computed}"
                for name, seq in zip("ABC", self.seqs, strict=True)
            ),
        ]


def block(title: str) -> list[str]:
    """The lines of the code block whose first line is this remark, without remarks and layout."""
    text = next(
        text
        for text in re.findall(r"```\n(.*?)```", ARCHITECTURE, re.DOTALL)
        if text.startswith(f"# {title}")
    )
    lines = (squeezed(line.partition("#")[0]) for line in text.splitlines())
    return [line for line in lines if line]


def squeezed(line: str) -> str:
    return re.sub(r"[\s|]", "", line)


class TestTheWorkedStep:
    @pytest.fixture
    def step(self, monkeypatch: pytest.MonkeyPatch) -> WorkedStep:
        monkeypatch.setattr(toy, "hash_after", lambda text, token: token)
        monkeypatch.setattr(toy, "_logits_of", count_on)
        return WorkedStep()

    def test_the_arrays(self, step: WorkedStep) -> None:
        assert block("the batch") == list(map(squeezed, step.arrays()))

    def test_what_is_asked_answered_and_kept(self, step: WorkedStep) -> None:
        assert block("the ops on its logits") == list(map(squeezed, step.outcome()))


@cache
def names() -> set[str]:
    """Every name in the code, every string that could be one (options, keys, metrics), and what
    pyproject.toml names.
    """
    code = [
        name
        for name in files()
        if name.startswith(("headrace/", "csrc/", "benchmarks/")) and not name.endswith(".md")
    ]
    found = {
        text.text
        for name in code
        for text in texts(name, (ROOT / name).read_text())
        if text.kind == "name"
    }
    return {part for name in found for part in name.split(".")} | set(
        NAME.findall((ROOT / "pyproject.toml").read_text())
    )


def spans(page: Path) -> list[str]:
    """The code in the text of a page, whose blocks of code are left out."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


class TestThePages:
    @pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
    def test_size(self, page: Path) -> None:
        max_lines = {"architecture.md": 250, "glossary.md": 80, "cli.md": 2000, "fields.md": 400}
        assert len(page.read_text().splitlines()) <= max_lines.get(page.name, 200)

    @pytest.mark.parametrize(
        "page",
        [*PAGES, *ROOT.glob("*.md"), ROOT / "benchmarks/README.md"],
        ids=lambda page: page.name,
    )
    def test_links(self, page: Path) -> None:
        for target, _, anchor in (
            link.partition("#")
            for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())
            if "://" not in link
        ):
            file = page.parent / target if target else page
            assert file.exists(), target
            assert not anchor or anchor in anchors(file), f"{target}#{anchor}"

    @pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
    def test_files_that_are_named_are_there(self, page: Path) -> None:
        cuda = ROOT / "headrace" / "backend" / "cuda"
        places = [
            ROOT,
            ROOT / "csrc",
            ROOT / "headrace",
            cuda,
            cuda / "kernels",
            *(folder for folder in (ROOT / "headrace").iterdir() if folder.is_dir()),
        ]
        named = [span for span in spans(page) if _FILE.fullmatch(span)]
        assert not [span for span in named if not any((place / span).exists() for place in places)]

    @pytest.mark.parametrize(
        "page", [page for page in PAGES if page not in GENERATED], ids=lambda page: page.name
    )
    def test_names_are_there(self, page: Path) -> None:
        named = [
            span for span in spans(page) if _CODE_NAME.fullmatch(span) and not _FILE.fullmatch(span)
        ]
        assert not [span for span in named if set(NAME.findall(span)) - names()]


class TestTheSite:
    def test_it_builds_without_a_warning(self, tmp_path: Path) -> None:
        """Strict: a link to a page or a heading that does not exist ends the build."""
        config = (ROOT / "zensical.toml").read_text()
        shutil.copytree(ROOT / "docs", tmp_path / "docs")
        (tmp_path / "headrace").symlink_to(ROOT / "headrace")
        (tmp_path / "zensical.toml").write_text(config)
        command = [sys.executable, "-m", "zensical", "build", "--strict"]
        built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert built.returncode == 0, built.stdout[-3000:] + built.stderr[-3000:]
        assert "EngineConfig" in (tmp_path / "site/reference/options.html").read_text()
        assert "SamplingParams" in (tmp_path / "site/search.js").read_text()
