"""The registry: which implementation runs, and the message where none can."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from glm5_kernels import ops, registry
from glm5_kernels.compiled import processor


@pytest.fixture(autouse=True)
def variable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test looks the ops up anew."""
    monkeypatch.delenv(registry.VARIABLE, raising=False)
    registry.select(None)
    yield
    registry.select(None)


def test_auto_takes_the_compiled_version_and_says_why() -> None:
    choice = registry.choose("hadamard")
    assert (choice.implementation, choice.why) == ("cpu", "the fastest that runs here")


def test_the_variable_selects_once_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(registry.VARIABLE, "reference")
    assert {choice.implementation for choice in ops.report()} == {"reference"}
    assert registry.function("hadamard") is registry.load("hadamard", "reference")
    monkeypatch.setenv(registry.VARIABLE, "cpu")
    assert registry.choose("hadamard").implementation == "reference"
    registry.select("cpu")
    assert registry.function("hadamard") is registry.load("hadamard", "cpu")


@pytest.mark.parametrize(
    ("value", "op", "device", "message"),
    [
        ("fast", "hadamard", "cpu", "GLM5_KERNELS=fast: unknown; use auto or one of reference, cpu, npu"),
        ("triton", "lightning_indexer", "cpu", "GLM5_KERNELS=triton: Triton kernels need a device"),
        ("npu", "hadamard", "cpu", "GLM5_KERNELS=npu: hadamard has no npu implementation, only reference, cpu"),
        ("cpu", "hadamard", "npu", "GLM5_KERNELS=cpu: cpu kernels cannot read tensors on npu"),
    ],
)
def test_an_impossible_choice_names_what_is_missing(
    value: str, op: str, device: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(registry.VARIABLE, value)
    with pytest.raises(ops.KernelUnavailableError, match=message):
        registry.choose(op, device)


@pytest.mark.parametrize("lacks", ["numba", "AVX2"])
def test_a_machine_that_cannot_run_compiled_code_runs_the_reference(
    lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacks == "numba":
        monkeypatch.setattr(registry, "_installed", lambda package: package != "numba")
        message = "numba is not installed"
    else:
        monkeypatch.setattr(processor, "features", lambda: frozenset({"sse2", "sse4.1"}))
        message = "this CPU has none of avx512vnni"
    choice = registry.choose("hadamard")
    assert choice.implementation == "reference" and message in choice.why
    registry.select("cpu")
    with pytest.raises(ops.KernelUnavailableError, match=message):
        registry.choose("hadamard")
