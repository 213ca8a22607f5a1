"""Level 4 on a stored program (`executed/programs/linear.mlir`, what ascendnpu-ir 1.2.0 made of our W8A8 linear): it is
right as it is, and every planted fault is found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.proof.executed import prove
from tests.proof.executed.block import ORDERS
from tests.proof.executed.clocks import Watch
from tests.proof.executed.launch import launch
from tests.proof.executed.places import FaultError
from tests.proof.executed.text import Module, UncoveredError, parse

LINES = Path(__file__).with_name("executed").joinpath("programs", "linear.mlir").read_text().splitlines()
WAITS = [i for i, line in enumerate(LINES) if re.search(r"hir\.(wait_flag|pipe_barrier|sync_block_wait)\b", line)]
SETS = [i for i, line in enumerate(LINES) if re.search(r"hir\.(set_flag|sync_block_set)\b", line)]
FLAG, OUTSIDE = "set_flag[<PIPE_MTE2>, <PIPE_MTE1>, <EVENT_ID1>]", r"line \d+: address out of range"
#: A whole tile of 16 tokens and one of 3, two tiles of 64 columns, four steps of the sum.
TOKENS, COLUMNS, DEPTH = 19, 128, 2048


def executed(lines: list[str], order: str = "eager") -> tuple[list[str], bool]:
    """The findings of a program, and whether its numbers are right."""
    draw = torch.Generator().manual_seed(5)
    x = torch.randint(-127, 128, (TOKENS, DEPTH), dtype=torch.int8, generator=draw)
    w = torch.randint(-127, 128, (COLUMNS, DEPTH), dtype=torch.int8, generator=draw)
    per_token, per_column = torch.rand(TOKENS, generator=draw), torch.rand(COLUMNS, generator=draw)
    out = torch.full((TOKENS, COLUMNS), 7.0, dtype=torch.bfloat16)
    want = ((x.double() @ w.double().T).float() * per_token[:, None] * per_column[None]).bfloat16()
    watch, unused = Watch(), torch.zeros(1, dtype=torch.bfloat16)
    sizes = TOKENS, COLUMNS, DEPTH, DEPTH, COLUMNS
    launch(parse("\n".join(lines)), (2, 2), (x, w, per_token, per_column, unused, out, *sizes), watch, order)
    findings = [f"{kind} {line} {other}: {words}" for (kind, line, other), words in watch.findings.items()]
    return findings, torch.equal(out, want)


def without(index: int) -> list[str]:
    """The program without a line."""
    return [*LINES[:index], "", *LINES[index + 1 :]]


def changed(old: str, new: str, count: int = 1) -> list[str]:
    """The program with a text replaced, which it holds `count` times."""
    text = "\n".join(LINES)
    assert text.count(old) == count
    return text.replace(old, new).splitlines()


@pytest.mark.parametrize("order", ORDERS)
def test_the_program_gives_the_exact_product_and_nothing_is_found(order: str) -> None:
    assert executed(LINES, order) == ([], True)


@pytest.mark.parametrize("index", WAITS)
def test_a_removed_wait_or_barrier_is_found(index: int) -> None:
    findings, _ = executed(without(index))
    assert findings


@pytest.mark.parametrize("index", SETS)
def test_a_flag_that_is_waited_for_and_never_set_is_a_deadlock(index: int) -> None:
    with pytest.raises(FaultError, match="nothing can go on"):
        executed(without(index))


def test_a_race_names_both_lines() -> None:
    wait = next(i for i in WAITS if "wait_flag[<PIPE_V>, <PIPE_MTE3>" in LINES[i])
    cast = next(i for i, line in enumerate(LINES) if "call @vcast_float_to_bfloat16_t" in line)
    store = next(i for i, line in enumerate(LINES) if "call @store_ubuf_to_gm_2d" in line)
    findings, _ = executed(without(wait))
    assert f"race {store + 1} {cast + 1}: read on aiv0 MTE3 while aiv0 V writes" in findings


def test_a_flag_that_is_set_too_early_is_a_race() -> None:
    """Before the weights' copy instead of after it."""
    index = next(i for i in SETS if FLAG in LINES[i])
    assert "call @nd2nz_int8_t" in LINES[index - 1]
    findings, _ = executed([*LINES[: index - 1], LINES[index], LINES[index - 1], *LINES[index + 1 :]])
    assert any("read on aic MTE1 while aic MTE2 writes" in words for words in findings)


@pytest.mark.parametrize("order", ORDERS)
def test_two_buffers_at_one_address_are_found(order: str) -> None:
    """The second buffer of the weights is moved onto the first one: the copy into one overtakes the other's reader."""
    findings, _ = executed(changed("pointer_cast(%c49152_i64)", "pointer_cast(%c8192_i64)"), order)
    assert any("while aic MTE1 still reads" in words or "written as another buffer" in words for words in findings)


def test_bytes_that_nobody_wrote_are_found() -> None:
    load = next(i for i, line in enumerate(LINES) if "call @load_gm_to_ubuf_1d_int32_t" in line)
    findings, right = executed(without(load))
    assert any("bytes that nobody wrote" in words for words in findings) and not right


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("constant 49152 : i64", "constant 524000 : i64", OUTSIDE),  # L1 has 524288 bytes, the tile 32768
        ("constant 2336 : i64", "constant 196600 : i64", OUTSIDE),  # UB has 196608
        ("sizes: [64, 512], strides", "sizes: [80, 512], strides", OUTSIDE),  # of 128 rows of weights
        # A result on its smaller operand: the scales of the tokens lie on the products that they are to multiply.
        ("pointer_cast(%c2048_i64)", "pointer_cast(%c0_i64)", r"line \d+: operands lie on each other"),
        (FLAG, FLAG.replace("ID1", "ID2"), r"MTE1, line .* wait MTE2 MTE1 1"),
    ],
)
def test_what_cannot_run_is_refused(old: str, new: str, complaint: str) -> None:
    with pytest.raises(FaultError, match=complaint):
        executed(changed(old, new))


@pytest.mark.parametrize(
    ("old", "new", "finding"),
    [
        # The scales of the columns come to where those of the tokens are still read.
        ("pointer_cast(%c2336_i64)", "pointer_cast(%c2048_i64)", "written while aiv0 V still reads"),
        ("-> (s0 * 4096)", "-> (s0 * 2048)", "another block touches these bytes of workspace"),
    ],
)
def test_memory_that_is_used_twice_is_found(old: str, new: str, finding: str) -> None:
    findings, _ = executed(changed(old, new))
    assert any(finding in words for words in findings)


def test_a_wrong_number_is_seen() -> None:
    assert executed(changed("call @vmul_2d_float(%cast_21", "call @vadd_2d_float(%cast_21")) == ([], False)


def test_what_is_not_covered_makes_a_kernel_not_proven() -> None:
    name = "call @vcast_int32_t_to_float_1d_with_mode"
    with pytest.raises(UncoveredError, match="vcast_int32_t_to_float_1d_to_the_moon"):
        executed(changed(name, name.replace("with_mode", "to_the_moon")))
    program = prove.Program("linear", [parse("\n".join(changed("hir.set_mask_norm", "hir.set_mask_odd", 2)))])
    sizes = TOKENS, COLUMNS, DEPTH, DEPTH, COLUMNS
    tensors = [torch.zeros(1, dtype=torch.int8)] * 2 + [torch.zeros(1)] * 2 + [torch.zeros(1, dtype=torch.bfloat16)] * 2
    with pytest.raises(UncoveredError):
        prove.run_program(program, (1,), (*tensors, *sizes), "eager")
    assert program.wrong == ["not proven: hivm.hir.set_mask_odd"]


def test_a_module_without_a_kernel_is_not_proven() -> None:
    with pytest.raises(UncoveredError):
        launch(Module({}, {}), (1,), (), Watch(), "eager")
