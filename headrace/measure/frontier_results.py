"""Results of a frontier in a file, which several runs complete."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from headrace.convert.quality import Quality
from headrace.errors import RequestError
from headrace.measure.frontier_points import EarlyRows, FormScore, FormSpeed
from headrace.planner.draft_gain import Costs
from headrace.whole_file import replace_file

_VERSION = 1


class FrontierResults:
    """Scores and speeds by name of the form, and the reasons of forms that are left out."""

    def __init__(self, file: Path | None = None) -> None:
        """Without a file, results are kept in memory."""
        self.scores: dict[str, FormScore] = {}
        self.speeds: dict[str, FormSpeed] = {}
        self.left_out: dict[str, str] = {}
        self._file = file
        self._conditions: Mapping[str, object] = {}

    @classmethod
    def open(cls, file: Path, conditions: Mapping[str, object]) -> Self:
        """Open the results of earlier runs.

        `conditions`: what they depend on, as JSON. Raises RequestError if the file has others, or
        is malformed.
        """
        results = cls(file)
        results._conditions = {"version": _VERSION, **conditions}
        if not file.exists():
            return results
        try:
            facts = json.loads(file.read_text(encoding="utf-8"))
            found: Mapping[str, object] = dict(facts["conditions"])
            results.scores = {name: _score(each) for name, each in facts["scores"].items()}
            results.speeds = {name: _speed(each) for name, each in facts["speeds"].items()}
            results.left_out = dict(facts["left_out"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise RequestError(
                f"{file} is no table of an earlier run ({type(error).__name__}); remove it, or "
                "name another folder"
            ) from None
        for name, value in results._conditions.items():
            if found.get(name) != value:
                raise RequestError(
                    f"{file} has results with {name} {found.get(name)!r}, and this run has "
                    f"{value!r}; name another folder, or the same options"
                )
        return results

    def save(self) -> None:
        """Write the file, if there is one. Raises RequestError."""
        if self._file is None:
            return
        facts = {
            "conditions": dict(self._conditions),
            "scores": {name: _score_facts(score) for name, score in self.scores.items()},
            "speeds": {name: _speed_facts(speed) for name, speed in self.speeds.items()},
            "left_out": self.left_out,
        }
        try:
            replace_file(self._file, json.dumps(facts, indent=2) + "\n", survives=True)
        except OSError as error:
            raise RequestError(
                f"{self._file}: {error.strerror}; choose a folder that you may write to"
            ) from None


def _score_facts(score: FormScore) -> dict[str, Any]:
    early = score.early and vars(score.early)
    return vars(score) | {"quality": vars(score.quality), "early": early}


def _score(facts: Mapping[str, Any]) -> FormScore:
    early = facts["early"] and EarlyRows(**facts["early"])
    return FormScore(**{**facts, "quality": Quality(**facts["quality"]), "early": early})


def _speed_facts(speed: FormSpeed) -> dict[str, Any]:
    return vars(speed) | {"costs": speed.costs and speed.costs._asdict()}


def _speed(facts: Mapping[str, Any]) -> FormSpeed:
    return FormSpeed(**{**facts, "costs": facts["costs"] and Costs(**facts["costs"])})
