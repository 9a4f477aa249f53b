"""The table of docs/families.md, which is made here: `python -m tests.test_families_page` writes it anew."""

from headrace.model import FAMILIES
from tests.families import VARIANTS
from tests.texts import ROOT

PAGE = ROOT / "docs/families.md"
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"


def table() -> str:
    lines = ["| family | `config.json` | GGUF | variants that tests hold |", "|---|---|---|---|"]
    for name, family in FAMILIES.items():
        config, gguf = (f"`{layout.architectures[0]}`" if layout else "-" for layout in (family.config, family.gguf))
        variants = ", ".join(variant for variant, made in VARIANTS.items() if made.family == name)
        lines.append(f"| {name} | {config} | {gguf} | {variants} |")
    return "\n".join(lines) + "\n"


def page() -> tuple[str, str, str]:
    """What stands before the table, the table, and what stands after it."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    found, _, after = rest.partition(END)
    return before, found, after


def test_the_table_is_that_of_the_families() -> None:
    assert page()[1] == table()


if __name__ == "__main__":
    before, _, after = page()
    PAGE.write_text(before + BEGIN + table() + END + after)
