"""What the provenance says of the build, also where a part of it is missing."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from glm5_ascend.quantize import provenance


def test_a_missing_numba_is_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """`registry` promises the plain versions there; the provenance must not end the run."""

    def absent(distribution: str) -> str:
        raise PackageNotFoundError(distribution)

    monkeypatch.setattr(provenance, "version", absent)
    assert provenance._version_of("numba") is None
