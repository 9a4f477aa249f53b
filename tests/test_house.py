"""The house rules that a machine can check: what imports what, how long things may be, what is
never used.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from pathlib import Path

import pytest

from headrace.backend_traits import BACKENDS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "headrace"
FILES = sorted(PACKAGE.rglob("*.py"))
PYTHON_FILES = [
    *FILES,
    *sorted((ROOT / "tests").rglob("*.py")),
    *sorted((ROOT / "benchmarks").rglob("*.py")),
]
CXX_FILES = sorted(f for f in (ROOT / "csrc").rglob("*") if f.suffix in (".cpp", ".h"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
BUILD_REQUIREMENTS = PYPROJECT["build-system"]["requires"]


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def imports(file: Path) -> Iterator[str]:
    """Dotted names of all imported modules, those inside functions included."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, (
                f"{name_of(file)}:{node.lineno}: imports are absolute"
            )
            for alias in node.names:
                below = ROOT.joinpath(*node.module.split("."), alias.name)
                is_module = (
                    node.module == "headrace" or below.is_dir() or below.with_suffix(".py").exists()
                )
                yield f"{node.module}.{alias.name}" if is_module else node.module


def own_imports(file: Path) -> set[str]:
    """Imported modules of Headrace, named from the package down: `model.spec`."""
    return {
        name.removeprefix("headrace.") for name in imports(file) if name.startswith("headrace.")
    }


def runtime_imports(file: Path) -> set[str]:
    """Imported modules of Headrace, those inside functions included and type-only ones not."""

    def visit(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue
            if isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                yield from (f"{child.module}.{alias.name}" for alias in child.names)
                yield child.module or ""
            yield from visit(child)

    return set(visit(tree(file)))


def part_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def proposer_classes(file: Path) -> list[str]:
    """Names of the classes with the methods of a proposer."""
    classes = [node for node in tree(file).body if isinstance(node, ast.ClassDef)]
    return [
        c.name
        for c in classes
        if {"propose", "observe"} <= {n.name for n in c.body if isinstance(n, ast.FunctionDef)}
    ]


def rows_under(heading: str) -> list[tuple[str, str]]:
    """The first two cells of each row of a table in docs/architecture.md whose first cell is
    code.
    """
    text = (
        (ROOT / "docs/architecture.md")
        .read_text()
        .partition(f"\n## {heading}\n")[2]
        .partition("\n## ")[0]
    )
    return re.findall(r"^\| (`.*?) \| (.*?) \|$", text, re.MULTILINE)


def import_table() -> dict[str, set[str]]:
    """What each part may import."""
    rows = rows_under("What may import what")
    names = [
        (re.findall(r"`([\w.]+)`", left), set(re.findall(r"`([\w.]+)`", right)))
        for left, right in rows
    ]
    return {part: allowed for parts, allowed in names for part in parts}


ALLOWED = import_table()
RECORDS = {
    "batch",
    "logit_ops",
    "proposer",
    "constraint",
    "request",
    "sampling_params",
    "outputs",
    "validation",
    "structured_outputs",
    "json_schema",
    "config",
    "backend_traits",
    "stats",
    "errors",
    "messages",
    "record",
    "whole_file",
}
ALLOWED |= {"__init__": {"llm", "async_llm", "measure", "simulator", *RECORDS}, "__main__": {"cli"}}
PROPOSER_FILES = sorted((PACKAGE / "speculation/proposers").glob("*.py"))


def modules(requirements: list[str]) -> set[str]:
    """What their distributions are imported as."""
    return {
        re.sub("^(opentelemetry)-.*", r"\1", distribution).replace("-", "_")
        for distribution in names(requirements)
    }


class TestTheHouse:
    def test_every_part_is_on_the_page_and_there(self) -> None:
        """The list names what is directly in the package, and of a folder some files."""
        named = [
            (set(re.findall(r"`([\w./]+)`", parts)), re.findall(r"`([\w./]+\.py)`", what))
            for parts, what in rows_under("The house")
        ]
        listed = set().union(*(parts for parts, _ in named))
        there = {
            f"{f.name}/" if f.is_dir() else f.name
            for f in PACKAGE.iterdir()
            if f.suffix == ".py" or (f / "__init__.py").exists()
        }
        assert listed == there - {"__init__.py", "__main__.py"}
        assert not [
            f"{part}{file}"
            for parts, files in named
            for part in parts
            for file in files
            if not (PACKAGE / part / file).exists()
        ]

    def test_the_import_table_has_every_part_and_no_other(self) -> None:
        parts = {part_of(file) for file in FILES} - {"__init__", "__main__"}
        assert import_table().keys() == parts

    def test_what_may_be_imported_is_there(self) -> None:
        for name in set().union(*import_table().values()):
            module = PACKAGE.joinpath(*name.split("."))
            assert name == "_native" or module.is_dir() or module.with_suffix(".py").exists(), name

    def test_proposers_are_named_so(self) -> None:
        proposers = [name for f in PROPOSER_FILES for name in proposer_classes(f)]
        assert "SuffixProposer" in proposers and len(proposers) >= 7
        assert not [name for name in proposers if not name.endswith("Proposer")]

    def test_proposers_are_in_one_folder(self) -> None:
        """The guard wraps a proposer and has its methods; a simulated one drafts no text, and a
        recorder drafts nothing.
        """
        others = {f: proposer_classes(f) for f in set(FILES) - set(PROPOSER_FILES)}
        assert {f"{name_of(f)}: {name}" for f, names in others.items() for name in names} == {
            "headrace/proposer.py: Proposer",
            "headrace/simulator/drafts.py: ChainDrafts",
            "headrace/speculation/guard.py: Guard",
            "headrace/speculation/recorder.py: RowRecorder",
        }


class TestImports:
    def test_direction(self) -> None:
        wrong = []
        for file in FILES:
            part = part_of(file)
            assert part in ALLOWED, f"docs/architecture.md does not say what {part} may import"
            allowed = ALLOWED[part] | RECORDS | {part}
            above = {
                name
                for name in own_imports(file)
                if not any(name == a or name.startswith(a + ".") for a in allowed)
            }
            wrong += [f"{name_of(file)} imports {name}" for name in sorted(above)]
        assert not wrong, "see docs/architecture.md"

    def test_the_table_has_no_cycle(self) -> None:
        def visit(part: str, seen: tuple[str, ...]) -> None:
            assert part not in seen, f"{' -> '.join(seen)} -> {part}"
            for name in ALLOWED.get(part, set()):
                visit(name.partition(".")[0], (*seen, part))

        for part in ALLOWED:
            visit(part, ())

    def test_modules_have_no_import_cycle(self) -> None:
        """Imports under `if TYPE_CHECKING` do not count; those inside functions do."""
        modules = {module_of(file): file for file in FILES}
        graph = {name: runtime_imports(file) & modules.keys() for name, file in modules.items()}
        for name, imported in graph.items():
            # A module may import its own package, which Python has imported before the module.
            imported -= {parent for parent in imported if f"{name}.".startswith(f"{parent}.")}
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            pytest.fail(" -> ".join(error.args[1]))

    def test_proposers_do_not_know_each_other(self) -> None:
        """They may share files that hold none."""
        files = [f for f in PROPOSER_FILES if f.name != "__init__.py"]
        proposers = {f"speculation.proposers.{f.stem}" for f in files if proposer_classes(f)}
        assert "speculation.proposers.suffix" in proposers and len(proposers) >= 7
        assert proposers <= own_imports(PACKAGE / "speculation/proposers/__init__.py")
        assert not [name_of(f) for f in files if own_imports(f) & proposers]

    def test_the_engine_names_no_proposer_and_no_backend(self) -> None:
        proposers = {f.stem for f in PROPOSER_FILES if proposer_classes(f)}
        backends = {f.parent.name for f in (PACKAGE / "backend").glob("*/__init__.py")}
        assert {"suffix", "draft_model"} <= proposers
        assert {"cpu", "cuda", "reference"} <= backends
        others = proposers | backends
        files = sorted((PACKAGE / "engine").rglob("*.py"))
        assert PACKAGE / "engine/step.py" in files
        for file in files:
            words = {
                node.value
                for node in ast.walk(tree(file))
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            }
            words |= {name.rpartition(".")[2] for name in own_imports(file)}
            assert not words & others, name_of(file)

    def test_no_backend_name_is_compared_outside_backend(self) -> None:
        """Code asks for a trait of the backend (`backend_traits.py`) instead."""
        compared = [
            f"{name_of(file)}:{node.lineno}"
            for file in FILES
            if part_of(file) != "backend"
            for node in ast.walk(tree(file))
            if isinstance(node, ast.Compare | ast.MatchValue)
            for part in ast.walk(node)
            if isinstance(part, ast.Constant) and part.value in BACKENDS
        ]
        assert not compared

    def test_only_what_pyproject_names(self) -> None:
        """The packages of an extra are imported by the parts that the extra is for."""
        extras = PROJECT["optional-dependencies"]
        everywhere = modules([*PROJECT["dependencies"], *extras["hub"], *extras["structured"]])
        server = modules([*extras["server"], *extras["otel"]])
        allowed = {
            "remote": {"msgspec"},
            "server": server,
            # Ray passes errors of grpc on.
            "scaleout": server | modules(extras["route"] + extras["ray"]) | {"grpc"},
            "audit": modules(extras["audit"]),
            "parallel": modules(extras["distributed"]),
            "distil": modules(extras["train"]),
        }
        for file in FILES:
            own = allowed.get(part_of(file), set())
            if name_of(file).startswith("headrace/backend/cuda/"):
                own = modules(extras["cuda"])
            imported = {name.partition(".")[0] for name in imports(file)}
            known = everywhere | set(sys.stdlib_module_names) | {"headrace"} | own
            assert not imported - known, name_of(file)

    def test_ray_is_for_the_files_of_its_name(self) -> None:
        """So several replicas without it need none of it."""
        on_ray = {
            file
            for file in FILES
            if any(name.partition(".")[0] in ("ray", "grpc") for name in imports(file))
        }
        assert on_ray and all(file.match("scaleout/ray_*.py") for file in on_ray)
        users = {
            file
            for file in FILES
            if any(name.startswith("scaleout.ray_") for name in own_imports(file))
        } - on_ray
        assert set(map(name_of, users)) == {
            "headrace/cli/serve.py",
            "headrace/scaleout/ray_replica.py",
        }

    def test_every_dependency_is_used(self) -> None:
        used = {name.partition(".")[0] for file in FILES for name in imports(file)}
        assert not set(names(PROJECT["dependencies"])) - used


class TestSafety:
    def test_no_pickle(self) -> None:
        forbidden = {"pickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
        for file in PYTHON_FILES:
            assert not {name.partition(".")[0] for name in imports(file)} & forbidden, name_of(file)
            keywords = [
                node
                for node in ast.walk(tree(file))
                if isinstance(node, ast.keyword) and node.arg == "allow_pickle"
            ]
            assert all(getattr(node.value, "value", None) is False for node in keywords), name_of(
                file
            )

    def test_templates_run_in_one_sandbox(self) -> None:
        made = []
        for file in FILES:
            if any(name.partition(".")[0] == "jinja2" for name in imports(file)):
                calls = [node.func for node in ast.walk(tree(file)) if isinstance(node, ast.Call)]
                bases = [
                    base
                    for node in ast.walk(tree(file))
                    if isinstance(node, ast.ClassDef)
                    for base in node.bases
                ]
                names = (ast.unparse(node).rpartition(".")[2] for node in (*calls, *bases))
                made += [name for name in names if name.endswith(("Environment", "Template"))]
        assert made == ["ImmutableSandboxedEnvironment"]


class TestRecords:
    def test_large_records_are_built_by_keyword(self) -> None:
        """A record of more than four fields takes at most two positional arguments, none
        starred.
        """
        large = {name for name, fields in record_fields().items() if len(fields) > 4}
        assert large
        found = [
            f"{name_of(file)}:{call.lineno}: {name}"
            for file in FILES
            for name, call in calls_of_classes(file)
            if name in large and (len(call.args) > 2 or has_star(call))
        ]
        assert not found


class TestSizes:
    def test_python_files(self) -> None:
        too_long = [f"{name_of(f)}: {n} lines" for f in PYTHON_FILES if (n := num_lines(f)) > 800]
        assert not too_long

    def test_cxx_files(self) -> None:
        assert CXX_FILES
        assert not [f"{name_of(f)}: {n} lines" for f in CXX_FILES if (n := num_lines(f)) > 900]

    def test_functions(self) -> None:
        """A signature does not count: those of Triton kernels list every stride and constant."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        functions = [
            (file, node)
            for file in PYTHON_FILES
            for node in ast.walk(tree(file))
            if isinstance(node, kinds)
        ]
        assert not [
            f"{name_of(file)}: {f.name}"
            for file, f in functions
            if (f.end_lineno or 0) - f.body[0].lineno + 1 > 80
        ]


class TestDependencies:
    def test_each_has_its_reason(self) -> None:
        extras = chain.from_iterable(PROJECT["optional-dependencies"].values())
        listed = names([*BUILD_REQUIREMENTS, *PROJECT["dependencies"], *extras])
        cells = re.findall(r"^\|(.*)\|$", (ROOT / "docs/dependencies.md").read_text(), re.MULTILINE)
        explained = {
            word
            for row in cells
            for cell in row.split("|")[:2]
            for word in re.findall(r"[\w.-]+", cell)
        }
        assert not set(listed) - explained


def record_fields() -> dict[str, list[str]]:
    """The fields of each NamedTuple and dataclass of the package, by its dotted name."""
    classes = {
        f"{module_of(file)}.{node.name}": (file, node)
        for file in FILES
        for node in ast.walk(tree(file))
        if isinstance(node, ast.ClassDef)
    }

    def fields(name: str) -> list[str]:
        file, node = classes[name]
        bases = (dotted_name(base, file) for base in node.bases)
        inherited = chain.from_iterable(fields(base) for base in bases if base in classes)
        return [
            *inherited,
            *(
                line.target.id
                for line in node.body
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
            ),
        ]

    return {name: fields(name) for name, (_, node) in classes.items() if is_record(node)}


def is_record(node: ast.ClassDef) -> bool:
    bases = {ast.unparse(base) for base in node.bases}
    decorators = {ast.unparse(decorator).partition("(")[0] for decorator in node.decorator_list}
    return "NamedTuple" in bases or bool(decorators & {"frozen", "dataclass"})


def has_star(call: ast.Call) -> bool:
    return any(isinstance(argument, ast.Starred) for argument in call.args)


def calls_of_classes(file: Path) -> Iterator[tuple[str, ast.Call]]:
    """Calls in a file, with the dotted name of the called class; `cls` is the class around it."""

    def visit(node: ast.AST, cls: str) -> Iterator[tuple[str, ast.Call]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call):
                yield (
                    dotted_name(child.func, file) if ast.unparse(child.func) != "cls" else cls,
                    child,
                )
            inside = f"{module_of(file)}.{child.name}" if isinstance(child, ast.ClassDef) else cls
            yield from visit(child, inside)

    yield from visit(tree(file), "")


def dotted_name(node: ast.expr, file: Path) -> str:
    """The full name of a class as a file names it: `moe.Route` is headrace.program.moe.Route."""
    first, _, rest = ast.unparse(node).removesuffix("._make").partition(".")
    origin = imported_names(file).get(first, f"{module_of(file)}.{first}")
    return f"{origin}.{rest}" if rest else origin


@cache
def imported_names(file: Path) -> dict[str, str]:
    """Names that a file imports from the package, each with its full name."""
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree(file))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def num_lines(file: Path) -> int:
    return len(file.read_text().splitlines())


def names(requirements: list[str]) -> list[str]:
    """Distributions without their version bounds."""
    return [re.split(r"[\s<>=!~;\[]", requirement, maxsplit=1)[0] for requirement in requirements]
