"""The registry: which implementation runs, and the message where none can."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from glm5_kernels import ops, registry
from glm5_kernels.native import library, rows, sublayer_weights, sublayers
from tests.support.command import ROOT

NO_LIBRARY = "installed without the compiled kernels (install g++, then pip install glm5-ascend again)"


@pytest.fixture(autouse=True)
def variable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test looks the ops up anew."""
    monkeypatch.delenv(registry.VARIABLE, raising=False)
    registry.select(None)
    yield
    registry.select(None)
    library.instruction_set.cache_clear()


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


def test_a_machine_that_cannot_run_compiled_code_runs_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "PATH", Path("nowhere.so"))
    library.missing.cache_clear()
    message = "installed without the compiled kernels"
    choice = registry.choose("hadamard")
    assert choice.implementation == "reference" and message in choice.why
    registry.select("cpu")
    with pytest.raises(ops.KernelUnavailableError, match=message):
        registry.choose("hadamard")
    library.missing.cache_clear()


def test_a_library_of_another_commit_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its structs may have other fields, and C++ would read past their ends."""
    header = tmp_path / "glm5_kernels.h"
    header.write_text("struct Rows { int64_t other; };")
    monkeypatch.setattr(library, "HEADER", header)
    library.missing.cache_clear()
    choice = registry.choose("hadamard")
    library.missing.cache_clear()
    assert choice.implementation == "reference" and "make kernels" in choice.why


def test_the_first_use_without_the_library_says_so_in_one_line() -> None:
    code = (
        "import pathlib, torch; from glm5_kernels import ops; from glm5_kernels.native import library\n"
        "library.PATH = pathlib.Path('nowhere.so')\n"
        "for _ in range(2): ops.v_up_proj(torch.ones(1, 1, 2), torch.ones(1, 2, 3))\n"
        "ops.rms_norm(torch.ones(1, 2), None, torch.ones(2), 1e-5)"
    )
    environment = {name: value for name, value in os.environ.items() if name != registry.VARIABLE}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == [f"ops run in plain torch, which is slow: {NO_LIBRARY}"]


def test_an_instruction_set_that_is_not_there_is_named_with_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.VARIABLE, "sse2")
    library.instruction_set.cache_clear()
    with pytest.raises(ops.KernelUnavailableError, match=f"sse2: this machine has {library.instruction_sets()[0]}"):
        library.instruction_set()


def test_operands_are_packed_as_the_header_declares_them() -> None:
    """The letters of every call in Python against the struct of glm5_kernels.h that the exported op takes."""
    header = re.sub(r"//.*", "", (ROOT / "kernels/csrc/glm5_kernels.h").read_text())
    structs: dict[str, str] = {}
    for name, body in re.findall(r"struct (\w+) \{(.*?)\};", header, re.DOTALL):
        letters = ""
        for field in filter(None, map(str.strip, body.split(";"))):
            kind, names = field.removeprefix("const ").split(maxsplit=1)
            letter = structs.get(kind) or {"double": "d"}.get(kind, "i")
            for field_name in names.split(","):
                letters += "p" if "*" in kind + field_name else letter * (2 if "[2]" in field_name else 1)
        structs[name] = letters
    exports = "".join(path.read_text() for path in (ROOT / "kernels/csrc").glob("*.cpp"))
    declared = {op: structs[name] for op, name in re.findall(r"GLM5_EXPORT\((\w+), (\w+)\)", exports)}
    sources = "".join(path.read_text() for path in (ROOT / "kernels/glm5_kernels/native").glob("*.py"))
    called = re.findall(r'function\(\s*"(\w+)", (.+?)\)(?:\(|\n)', sources)
    assert {op: eval(letters, vars(rows)) for op, letters in called} == declared
    packed = {"DecodeStep": sublayers.STEP, "MlaWeights": sublayer_weights.MLA, "MlpWeights": sublayer_weights.MLP}
    assert packed == {name: structs[name] for name in packed}
