"""The compiled indexer and attention against the plain ones, at GLM-5's head shapes and at awkward sizes."""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
import pytest
import torch
from llvmlite import binding, ir

from glm5_kernels.compiled import lightning_indexer as li_cpu
from glm5_kernels.compiled import simd
from glm5_kernels.compiled import sparse_flash_attention as sfa_cpu
from glm5_kernels.compiled.jit import kernel
from glm5_kernels.compiled.simd import WIDTH
from glm5_kernels.compiled.topk import best_positions
from glm5_kernels.parity.cases import cases
from glm5_kernels.parity.run import parity
from tests.ops.support.implementations import cpu, reference
from tests.ops.support.paged_batch import paged_batch


@pytest.fixture(params=["numbers", "pairs", "amx"], autouse=True)
def pairs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run with VDPBF16PS, with AMX, and without both; instructions that are missing here are emulated."""
    if request.param != "numbers" and simd.STEP != 32:
        pytest.skip("pairs need 512-bit registers; test_isa_levels runs them")
    for module in (li_cpu, sfa_cpu):
        monkeypatch.setattr(module, "PAIRS", request.param != "numbers")
        monkeypatch.setattr(module, "AMX", request.param == "amx")


@pytest.mark.long
@pytest.mark.parametrize("op", ["lightning_indexer", "sparse_flash_attention"])
def test_parity_at_real_head_shapes(op: str) -> None:
    """bf16, fp32 and int8 caches; the parity suite runs only the instructions of this CPU."""
    rows = list(parity(ops=(op, f"{op}_quant")))
    assert rows and not [row for row in rows if not row.ok]


@pytest.mark.parametrize(("heads", "dtype"), [(64, torch.bfloat16), (16, torch.bfloat16), (8, torch.float32)])
def test_indexer_breaks_ties_and_passes_over_missing_blocks(heads: int, dtype: torch.dtype) -> None:
    """Integers: scores are exact, so every entry is the same, ties included; no key of a block that the table does not
    name is chosen, whichever kernel takes such sizes."""
    batch = paged_batch([400, 40], [2, 40], block_size=32)
    cache = batch.cache([torch.randint(-2, 3, (length, 64)).to(dtype) for length in (400, 40)])
    batch.block_table[0, [0, 5]] = -1
    q, w = torch.randint(-2, 3, (42, heads, 64)).to(dtype), torch.randint(-2, 3, (42, heads)).float()
    got, want = (op.lightning_indexer(q, cache, w, batch.paged, 350) for op in (cpu, reference))
    first = got[:2]
    assert torch.equal(got, want) and not ((first >= 0) & ((first < 32) | (first // 32 == 5))).any()


@kernel
def _best(scores: Any, first: Any, seen: Any, out: Any, row: Any, scratch: Any) -> None:
    best_positions(scores, first, seen, out, row, scratch)


@pytest.mark.parametrize("k", [1, 7, 64, 1000])
def test_best_positions_are_the_first_of_a_stable_sort(k: int) -> None:
    """Few different values, both zeros, infinities; NaN is never chosen."""
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), 1e-40, -3.5, float("nan")])
    scores = values[torch.randint(0, 9, (700,))].numpy()
    out = np.full((2, k), 7, np.int32)
    _best(scores, 50, 600, out, 1, np.empty(2 * (600 + WIDTH), np.uint32))
    usable = [p for p in range(600) if scores[50 + p] == scores[50 + p]]
    want = sorted(sorted(usable, key=lambda p: (-float(scores[50 + p]), p))[:k])
    assert out[1].tolist() == want + [-1] * (k - len(want)) and (out[0] == 7).all()


def test_finite_numbers_do_not_need_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens with NaN are computed again by the reference: it would hide a NaN that the compiled version makes."""
    monkeypatch.setattr(sfa_cpu.reference, "sparse_flash_attention", lambda _: pytest.fail("computed again"))
    case = next(case for case in cases(ops=["sparse_flash_attention"]) if case.variant.startswith("chunk, bfloat16"))
    assert cpu.sparse_flash_attention(*case.arguments)[0].isfinite().all()


def test_attention_survives_large_scores() -> None:
    """Online softmax: a later tile with far larger scores must wipe out what came before, not overflow."""
    batch = paged_batch([256], [1], block_size=128)
    keys = torch.randn(256, 48)
    keys[200] *= 100
    cache = batch.cache([keys])
    arguments = (
        torch.randn(1, 8, 32) * 10, torch.randn(1, 8, 16), cache[..., :32], cache[..., 32:],
        torch.arange(256, dtype=torch.int32)[None], batch.paged, 1.0,
    )  # fmt: skip
    (got, got_lse), (want, want_lse) = (op.sparse_flash_attention(*arguments) for op in (cpu, reference))
    torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(got_lse, want_lse, atol=1e-2, rtol=1e-5)


def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = paged_batch([300, 77], [70, 30], block_size=16)
    q, w = torch.randn(100, 16, 64), torch.randn(100, 16)
    keys = batch.cache([torch.randn(300, 64), torch.randn(77, 64)])
    results = []
    for count in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        selected = cpu.lightning_indexer(q, keys, w, batch.paged, 32)
        results.append((selected, *cpu.sparse_flash_attention(
            q, q[..., :16].contiguous(), keys, keys[..., :16], selected, batch.paged, 0.1
        )))  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["query", "key"])
@pytest.mark.parametrize("heads", [8, 4, 1])
def test_what_is_no_number_comes_through(heads: int, where: str, bad: float, dtype: torch.dtype) -> None:
    """A broken activation or cache row must be seen as the reference shows it, not become a plausible answer."""
    batch = paged_batch([200], [2], block_size=16)
    for index_heads in (heads, 4 * heads):
        q, w = torch.randn(2, index_heads, 128).to(dtype), torch.rand(2, index_heads).to(dtype)
        keys, w[:, 0] = torch.randn(200, 128).to(dtype), -1.0
        (q[1, -1] if where == "query" else keys[70])[5] = bad
        got, want = (op.lightning_indexer(q, batch.cache([keys]), w, batch.paged, 200) for op in (cpu, reference))
        assert torch.equal(got, want) and not ((got[:, :-1] < 0) & (got[:, 1:] >= 0)).any()  # -1 only at the end

    nope, pe, rows = (torch.randn(*size).to(dtype) for size in ((2, heads, 64), (2, heads, 32), (200, 96)))
    (pe[1, -1] if where == "query" else rows[70])[5] = bad
    cache = batch.cache([rows])
    arguments = nope, pe, cache[..., :64], cache[..., 64:], torch.arange(150).int().expand(2, -1), batch.paged, 0.1
    (got, got_lse), (want, want_lse) = (op.sparse_flash_attention(*arguments) for op in (cpu, reference))
    assert not want.isfinite().all()
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2, equal_nan=True)
    assert torch.equal(got_lse.isfinite(), want_lse.isfinite())


@pytest.mark.skipif(platform.machine() != "x86_64" or binding.llvm_version_info[0] < 16, reason="an x86 instruction")
def test_the_instruction_for_pairs_is_the_processors_own() -> None:
    """`add_pairs` compiles to VDPBF16PS on a processor that has it, without a library call."""
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(simd.V16, [simd.V16] * 3), "pairs")
    builder = ir.IRBuilder(function.append_basic_block())
    builder.ret(simd.Lanes(builder).add_pairs(*function.args, native=True))
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    parsed = binding.parse_assembly(str(module))
    machine = binding.Target.from_triple("x86_64-unknown-linux-gnu").create_target_machine(cpu="sapphirerapids")
    text = machine.emit_assembly(parsed)
    assert text.count("vdpbf16ps") == 1 and "call" not in text
