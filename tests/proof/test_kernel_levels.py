"""The Triton kernels on three levels (kernels/NPU.md), and that the levels can fail."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.proof import structure, tools
from tests.proof.device_compiler import TARGETS, Compiled, DeviceCompiler
from tests.proof.levels import OPS, Result, prove
from tests.proof.lowering import Lowered

#: Kernels of each op at GLM-5's sizes; MLA preprocess in two quant modes.
KERNELS = {
    "lightning_indexer": {"score_pages"},
    "lightning_indexer_quant": {"score_pages"},
    "sparse_flash_attention": {"gather_rows", "score_rows", "normalize_scores", "weigh_rows"},
    "sparse_flash_attention_quant": {"unpack_rows", "score_rows", "normalize_scores", "weigh_rows"},
    "mla_preprocess": {"quantize_rows", "linear", "absorb", "rotate", "write_latents"},
}


@pytest.fixture(scope="session")
def proof_tools(tmp_path_factory: pytest.TempPathFactory) -> tools.Tools:
    """PROOF_TOOLS names a folder that has them already (`python -m tests.proof.tools FOLDER`)."""
    named = os.environ.get("PROOF_TOOLS")
    return tools.make_tools(Path(named) if named else tmp_path_factory.mktemp("proof-tools"))


def passed(results: list[Result], level: int) -> list[Result]:
    """Return the compared rows of a level; all must be right."""
    wrong = [r for r in results if not r.ok]
    assert not wrong
    rows = [r for r in results if r.level == level and not r.skipped]
    assert rows
    return rows


#: One op in `make test`: the interpreter takes up to a minute.
LEVEL_1 = [op if op == "lightning_indexer_quant" else pytest.param(op, marks=pytest.mark.long) for op in OPS]


@pytest.mark.parametrize("op", LEVEL_1)
def test_level_1_the_interpreted_source_gives_what_the_reference_gives(op: str) -> None:
    rows = passed(prove("interpreted", op, None), 1)
    assert any(r.what.startswith("GLM-5") for r in rows)
    assert len(rows) >= 5


@pytest.mark.long
@pytest.mark.parametrize("op", OPS)
def test_level_2_the_lowered_text_is_as_expected(op: str, proof_tools: tools.Tools) -> None:
    assert {r.what.removeprefix("GLM-5: ") for r in passed(prove("lowered", op, proof_tools), 2)} == KERNELS[op]


@pytest.mark.long
@pytest.mark.parametrize("op", OPS)
def test_level_3_the_device_compiler_takes_every_kernel(op: str, proof_tools: tools.Tools) -> None:
    rows = passed(prove("compiled", op, proof_tools), 3)
    assert {r.what.split()[0] for r in rows} == KERNELS[op]
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
@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (ADD, None),
        (TOO_LARGE, "ub overflow"),
        (ADD.replace("arith.addf", "arith.addition"), "addition"),
        (ADD.replace("tensor<64x64xf32>\n", "tensor<64x32xf32>\n"), "type"),
    ],
)
def test_what_level_3_refuses(text: str, complaint: str | None, proof_tools: tools.Tools) -> None:
    compiled = DeviceCompiler(proof_tools.device_compilers).compile(Lowered("add", text, "aiv"))
    if complaint is None:
        assert compiled.findings() == []
        assert compiled.used()["ub"] >= 64 * 64 * 4
    else:
        assert complaint in compiled.findings()[0]


def test_level_3_does_not_believe_a_plan_beyond_the_memory() -> None:
    program = """
    %c0_i64 = arith.constant 0 : i64
    %c190000_i64 = arith.constant 190000 : i64
    %0 = hivm.hir.pointer_cast(%c0_i64) : memref<16x64xf32, #hivm.address_space<ub>>
    %1 = hivm.hir.pointer_cast(%c190000_i64) : memref<2048xf32, #hivm.address_space<ub>>
    """
    compiled = Compiled("k", "Ascend910B3", program, "")
    assert compiled.findings() == ["198192 bytes in UB of 196608"]


WEIGH = """
  func.func @weigh_rows(%arg0: memref<?xi8>) attributes {SyncBlockLockArg = 0 : i64} {
    %1 = linalg.matmul ins(%w, %v : tensor<64x256xbf16>, tensor<256x256xbf16>) outs(%c : tensor<64x256xf32>)
  }
"""
GATHER = """
  func.func @gather_rows(%arg0: memref<?xi8>) attributes {SyncBlockLockArg = 0 : i64} {
    scf.for %i = %c0 to %c64 step %c1 {
      memref.copy %a, %b : memref<1x512xbf16, strided<[512, 1]>> to memref<1x512xbf16, strided<[512, 1]>>
    } {ExtractedLoadOrStore, hivm.parallel_loop}
    scf.for %i = %c0 to %c64 step %c1 {
      memref.copy %a, %b : memref<1x64xbf16, strided<[64, 1]>> to memref<1x64xbf16, strided<[64, 1]>>
    } {ExtractedLoadOrStore, hivm.parallel_loop}
    %1 = arith.constant 1 : i32
  }
"""


@pytest.mark.parametrize(
    ("kernel", "change", "complaint"),
    [
        ("weigh_rows", ("", ""), None),
        ("gather_rows", ("", ""), None),
        (
            "gather_rows",
            ("%1 =", "%s = arith.select %m, %k, %z : tensor<64x512xi1>, tensor<64x512xbf16>\n    %1 ="),
            "selects over",
        ),
        ("gather_rows", (", hivm.parallel_loop", ""), "loops over single elements"),
        ("gather_rows", ("memref<1x512x", "memref<1x256x"), "gathers"),
        ("weigh_rows", ("tensor<64x256xf32>", "tensor<64x256xbf16>"), "multiplies"),
        ("weigh_rows", ("%1 =", "call @triton_sort(%x)\n    %1 ="), "calls triton_sort"),
    ],
)
def test_what_level_2_refuses(kernel: str, change: tuple[str, str], complaint: str | None) -> None:
    text, cores = (WEIGH, "mix") if kernel == "weigh_rows" else (GATHER, "aiv")
    rows = structure.findings(Lowered(kernel, text.replace(*change) if change[0] else text, cores))
    assert any(complaint in finding for finding in rows) if complaint else not rows


def test_level_2_sees_on_which_cores_a_kernel_runs() -> None:
    assert structure.findings(Lowered("weigh_rows", WEIGH, "aiv")) == ["runs on aiv, not mix"]
