"""The tables of docs/use/families.md, which are made here: `python -m tests.test_families_page`
writes them anew.
"""

from headrace.model import FAMILIES
from tests.families import VARIANTS
from tests.llama_cpp import fixtures
from tests.llama_cpp.models import CASES, NOT_CONVERTED, NOT_RUN, UNSAID
from tests.texts import ROOT

PAGE = ROOT / "docs/use/families.md"
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"


def table() -> str:
    lines = [
        "| family | `config.json` | GGUF | logits of llama.cpp | variants that tests hold |",
        "|---|---|---|---|---|",
    ]
    for name, family in FAMILIES.items():
        config, gguf = (
            f"`{layout.architectures[0]}`" if layout else "-"
            for layout in (family.config, family.gguf)
        )
        variants = ", ".join(variant for variant, made in VARIANTS.items() if made.family == name)
        lines.append(f"| {name} | {config} | {gguf} | {llama_cpp(name)} | {variants} |")
    return "\n".join([*lines, "", *exceptions()]) + "\n"


def llama_cpp(family: str) -> str:
    """The largest relative error of a row of logits, over all variants of a family that llama.cpp
    runs.
    """
    errors = [
        error
        for case, (_, error) in fixtures.verdicts().items()
        if VARIANTS[CASES[case].variant].family == family
    ]
    return f"{max(errors):.0e}" if errors else "-"


def exceptions() -> list[str]:
    """The variants that llama.cpp cannot judge, or judges by a file that differs from them."""
    judged = {name: case.why for name, case in CASES.items() if case.why}
    rows = [
        ("its converter has no place for", NOT_CONVERTED),
        ("it does not run", NOT_RUN),
        ("it does not run these parts, so the variants are judged without them", judged),
        ("a GGUF file omits, so the test judges the file", UNSAID),
    ]
    return [
        f"Exceptions in `{fixtures.package()}`:",
        "",
        *(f"* {what}: {listed(names)}" for what, names in rows),
    ]


def listed(reasons: dict[str, str]) -> str:
    return "; ".join(
        f"{reason} ({', '.join(n for n in reasons if reasons[n] == reason)})"
        for reason in dict.fromkeys(reasons.values())
    )


def page() -> tuple[str, str, str]:
    """What stands before the tables, the tables, and what stands after them."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    found, _, after = rest.partition(END)
    return before, found, after


def test_families_page_equals_the_registered_families() -> None:
    assert page()[1] == table()


if __name__ == "__main__":
    before, _, after = page()
    PAGE.write_text(before + BEGIN + table() + END + after)
