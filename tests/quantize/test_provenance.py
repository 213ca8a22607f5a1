"""What the provenance says of the build, also where a part of it is missing."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from glm5_ascend.quantize import provenance
from glm5_kernels import registry


def test_a_missing_numba_is_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """`registry` promises the plain versions there; the provenance must not end the run."""

    def absent(distribution: str) -> str:
        raise PackageNotFoundError(distribution)

    monkeypatch.setattr(provenance, "version", absent)
    assert provenance._version_of("numba") is None


def test_every_kernel_of_a_quantization_is_asked_for() -> None:
    asked = {*provenance._OPS, *provenance._ON_HOST}
    assert asked == {"hadamard", "ssz_scale", "fake_round", "round_rows", "gptq_inverse_factors", "gptq_round"}
    assert asked <= set(registry.OPS)
