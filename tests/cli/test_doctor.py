"""`headrace doctor`: hints about this build."""

from headrace.cli.doctor import _missing


def test_hint_for_missing_kernels() -> None:
    built = {"isas": ["portable", "avx2"], "best_isa": "avx2"}
    assert _missing(built) == ""
    assert "no avx512 kernels" in _missing(built | {"best_isa": "avx512"})
