"""Which replicas serve together."""

import logging

import msgspec
import pytest

from headrace.remote.replica_status import ReplicaStatus
from headrace.scaleout import equal_workers
from headrace.scaleout.equal_workers import EqualWorkers
from tests.scaleout.test_proxy import STATUS

replace = msgspec.structs.replace


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("instructions", "avx2"),
        ("version", "9.9"),
        ("kv_dtype", "f32"),
        ("latent_attention", "absorbed"),
        ("acceptance_method", "typical"),
        ("activations", "f32"),
        ("lossy", "attends to less"),
    ],
)
def test_other_property_of_an_engine(field: str, value: str) -> None:
    equal = EqualWorkers("worker", 60)
    other = replace(STATUS, info=replace(STATUS.info, **{field: value}))
    assert not equal.differences(STATUS, [])
    assert f"{field} {value!r}, not " in equal.differences(other, [STATUS])
    assert not equal.differences(STATUS, [])


def test_other_weights() -> None:
    equal = EqualWorkers("worker", 60)
    assert not equal.differences(replace(STATUS, weights="a"), [])
    assert "weights 'b', not 'a'" in equal.differences(replace(STATUS, weights="b"), [])


def test_others_take_over_after_the_first_ones_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(equal_workers, "monotonic", lambda: now[0])
    equal = EqualWorkers("worker", 60)
    other = replace(STATUS, weights="other")
    assert not equal.differences(STATUS, [])
    for now[0], others, may_serve in ((50, [STATUS], False), (105, [], False), (111, [], True)):
        assert bool(equal.differences(other, others)) != may_serve
    assert equal.differences(STATUS, [other])


def test_adapter_with_other_weights_under_its_name(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "headrace.scaleout")
    equal = EqualWorkers("worker", 60)

    def with_digest(digests: dict[str, str]) -> ReplicaStatus:
        return replace(STATUS, adapters={"a": "/x"}, adapter_digests=digests)

    first, other, loading = with_digest({"a": "1"}), with_digest({"a": "2"}), with_digest({})
    statuses = {"1": first, "2": with_digest({"a": "1"}), "3": other}
    for _ in range(2):
        equal.learn_adapters(statuses)
        assert [equal.has_adapter(url, statuses[url], "a") for url in statuses] == [
            True,
            True,
            False,
        ]
        assert equal.has_adapter("4", loading, "a") and not equal.has_adapter("4", first, "b")
    assert len(caplog.records) == 1 and "3 has other weights" in caplog.text
    equal.learn_adapters({"3": other})
    assert equal.has_adapter("3", other, "a")
