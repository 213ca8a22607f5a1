"""The Triton kernels on two levels (kernels/NPU.md), and that the levels can fail."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.proof import tools
from tests.proof.device_compiler import TARGETS, DeviceCompiler
from tests.proof.levels import OPS, Result, prove


@pytest.fixture(scope="session")
def proof_tools(tmp_path_factory: pytest.TempPathFactory) -> tools.Tools:
    """PROOF_TOOLS names a folder that has them already (`python -m tests.proof.tools FOLDER`)."""
    named = os.environ.get("PROOF_TOOLS")
    return tools.make_tools(Path(named) if named else tmp_path_factory.mktemp("proof-tools"))


def passed(results: list[Result]) -> list[Result]:
    """Return the compared rows; all must be right."""
    assert not [row for row in results if not row.ok]
    rows = [row for row in results if not row.skipped]
    assert rows
    return rows


#: One op in `make test`: the interpreter takes up to a minute.
LEVEL_1 = [op if op == "lightning_indexer_quant" else pytest.param(op, marks=pytest.mark.long) for op in OPS]


@pytest.mark.parametrize("op", LEVEL_1)
def test_level_1_the_interpreted_source_gives_what_the_reference_gives(op: str) -> None:
    rows = passed(prove("interpreted", op, None))
    assert any(r.what.startswith("GLM-5") for r in rows)
    assert len(rows) >= 5


@pytest.mark.long
@pytest.mark.parametrize("op", OPS)
def test_level_2_the_device_compiler_takes_every_kernel(op: str, proof_tools: tools.Tools) -> None:
    rows = passed(prove("compiled", op, proof_tools))
    assert all(any(f", {target}" in r.what for r in rows) for target in TARGETS)


ADD = """
module {
  func.func @add(%lock: memref<?xi8>, %space: memref<?xi8>, %a: memref<?xf32> {tt.divisibility = 16 : i32},
      %b: memref<?xf32>, %gx: i32, %gy: i32, %gz: i32, %x: i32, %y: i32, %z: i32)
      attributes {SyncBlockLockArgIdx = 0 : i64, WorkspaceArgIdx = 1 : i64, global_kernel = "local", mix_mode = "aiv",
      parallel_mode = "simd"} {
    %from = memref.reinterpret_cast %a to offset: [0], sizes: [64, 64], strides: [64, 1]
      : memref<?xf32> to memref<64x64xf32, strided<[64, 1]>>
    %tile = memref.alloc() : memref<64x64xf32>
    memref.copy %from, %tile : memref<64x64xf32, strided<[64, 1]>> to memref<64x64xf32>
    %value = bufferization.to_tensor %tile restrict writable : memref<64x64xf32>
    %twice = arith.addf %value, %value : tensor<64x64xf32>
    %to = memref.reinterpret_cast %b to offset: [0], sizes: [64, 64], strides: [64, 1]
      : memref<?xf32> to memref<64x64xf32, strided<[64, 1]>>
    bufferization.materialize_in_destination %twice in writable %to
      : (tensor<64x64xf32>, memref<64x64xf32, strided<[64, 1]>>) -> ()
    return
  }
}
"""
#: 256 KiB where UB has 192.
TOO_LARGE = ADD.replace("64x64", "256x256").replace("[64, 64]", "[256, 256]").replace("[64, 1]", "[256, 1]")


@pytest.mark.long
def test_what_level_2_refuses(proof_tools: tools.Tools) -> None:
    compiler = DeviceCompiler(proof_tools.device_compilers)
    right, wrong = (compiler.compile(text) for text in (ADD, TOO_LARGE))
    assert right.program and not wrong.program
    assert "ub overflow" in wrong.complaint
