"""Which implementation runs is declared, and what cannot run is said."""

from __future__ import annotations

import pytest

from glm5_kernels import ops, registry


@pytest.fixture(autouse=True)
def default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(registry.VARIABLE, raising=False)


@pytest.mark.parametrize(("op", "implementation"), [(op, i) for op, found in registry.OPS.items() for i in found])
def test_every_declared_implementation_exists(op: str, implementation: str) -> None:
    assert callable(registry.load(op, implementation)) and registry.OPS[op][0] == "reference"


def test_auto_takes_the_compiled_version_and_says_why() -> None:
    choice = registry.choose("hadamard")
    assert (choice.implementation, choice.why) == ("cpu", "the fastest that runs here")


def test_the_variable_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(registry.VARIABLE, "reference")
    assert {choice.implementation for choice in ops.report()} == {"reference"}
    assert registry.function("hadamard") is registry.load("hadamard", "reference")


@pytest.mark.parametrize(
    ("value", "op", "device", "complaint"),
    [
        ("fast", "hadamard", "cpu", "GLM5_KERNELS=fast: unknown; use auto or one of reference, cpu, npu"),
        ("triton", "lightning_indexer", "cpu", "GLM5_KERNELS=triton: Triton kernels need a device"),
        ("npu", "hadamard", "cpu", "GLM5_KERNELS=npu: hadamard has no npu implementation, only reference, cpu"),
        ("cpu", "hadamard", "npu", "GLM5_KERNELS=cpu: cpu kernels cannot read tensors on npu"),
    ],
)
def test_an_impossible_choice_names_what_is_missing(
    value: str, op: str, device: str, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(registry.VARIABLE, value)
    with pytest.raises(ops.KernelUnavailableError, match=complaint):
        registry.choose(op, device)


def test_without_numba_auto_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_installed", lambda package: package != "numba")
    choice = registry.choose("hadamard")
    assert choice.implementation == "reference" and "numba is not installed" in choice.why
    monkeypatch.setenv(registry.VARIABLE, "cpu")
    with pytest.raises(ops.KernelUnavailableError, match="numba is not installed"):
        registry.choose("hadamard")
