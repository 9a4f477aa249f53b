"""Configurations of `tests/families.py` on file, for machines without transformers.

    python -m tests.family_configs     writes tests/data/family_configs.json

The file has the fields that decide a specification, with the defaults of transformers.
"""

import json
from pathlib import Path
from typing import Any

from headrace.model import FAMILIES
from headrace.model.fields import JsonFields
from headrace.model.spec import ModelSpec

PATH = Path(__file__).parent / "data/family_configs.json"
CONFIGS: dict[str, dict[str, Any]] = json.loads(PATH.read_text())
"""The family and the configuration of each variant."""


def spec_of(name: str) -> ModelSpec:
    """Return the specification of a variant of `tests/families.py`."""
    return spec_from(**CONFIGS[name])


def spec_from(family: str, config: dict[str, Any]) -> ModelSpec:
    """Return the specification that a family reads from a configuration."""
    layout = FAMILIES[family].config
    assert layout
    return layout.spec(JsonFields(config, "config.json").named(layout.fields))


def decisive(family: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration without the fields that change no specification."""
    spec, kept = spec_from(family, config), dict(config)
    for key in config:
        fewer = {other: value for other, value in kept.items() if other != key}
        try:
            if spec_from(family, fewer) == spec:
                kept = fewer
        except Exception:
            continue  # a specification needs the field
    return kept


def main() -> None:
    from tests.families import VARIANTS, config_of

    made = {
        name: {
            "family": variant.family,
            "config": decisive(variant.family, config_of(name).to_dict()),
        }
        for name, variant in VARIANTS.items()
    }
    PATH.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
