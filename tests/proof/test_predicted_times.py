"""The predictor on a stored program (`executed/programs/linear.mlir`): what holds of any schedule, what slows one."""

from __future__ import annotations

import csv
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.proof.executed.block import programs
from tests.proof.executed.launch import known_values
from tests.proof.executed.places import Space, View, packed
from tests.proof.executed.steps import Instruction
from tests.proof.executed.text import Module, UncoveredError, parse
from tests.proof.predicted import costs, overlap, timeline
from tests.proof.predicted.launches import predict
from tests.proof.predicted.rates import RATES, rate
from tests.proof.predicted.timed import Memory, Record, time_block

TEXT = Path(__file__).with_name("executed").joinpath("programs", "linear.mlir").read_text()
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "report_npu_schedule.csv"
DEPTH = 4096


def arguments(tokens: int, columns: int, depth: int) -> tuple[Any, ...]:
    x, w = (torch.ones(n, depth, dtype=torch.int8) for n in (tokens, columns))
    out = torch.zeros(tokens, columns, dtype=torch.bfloat16)
    return x, w, torch.ones(tokens), torch.ones(columns), out, out, tokens, columns, depth, depth, columns


def timed(text: str, depth: int = DEPTH, cores: int = 24, lazy: bool = False) -> Record:
    """A block of 16 tokens and 64 columns."""
    module = parse(text)
    given = arguments(16, 64, depth)  # their memory is used as it lies
    known = known_values(module, programs(module)[0][1], given, (1, 1, 1), 1)
    return time_block(module, known, 0, costs.share(cores), Memory(), lazy)


def after_product(line: str) -> str:
    """The program with a line more in its loop, behind the matrix product."""
    lines = TEXT.splitlines()
    (index,) = (i for i, text in enumerate(lines) if "call @mma_tile" in text)
    return "\n".join([*lines[: index + 1], *line.splitlines(), *lines[index + 1 :]])


FLAG = """hivm.hir.set_flag[<PIPE_M>, <PIPE_MTE2>, <EVENT_ID5>]
hivm.hir.wait_flag[<PIPE_M>, <PIPE_MTE2>, <EVENT_ID5>]"""


def test_a_schedule_is_no_shorter_than_what_each_pipe_has_to_do() -> None:
    record = timed(TEXT)
    assert record.spans
    for lane, busy in record.busy().items():
        assert record.least[lane] <= busy + 1e-6 <= record.end + 1e-6


def test_no_pipe_does_two_things_at_once() -> None:
    latest: dict[tuple[int, str], float] = {}
    for core, pipe, start, end, _ in timed(TEXT).spans:
        assert start >= latest.get((core, pipe), 0.0)
        latest[core, pipe] = end


def test_loads_and_products_overlap_as_the_flags_allow() -> None:
    record = timed(TEXT)
    assert overlap.hidden(overlap.covered(record, "aic M"), overlap.covered(record, "aic MTE2")) > 0.5


@pytest.mark.parametrize("line", [FLAG, "hivm.hir.pipe_barrier[<PIPE_ALL>]"])
def test_a_flag_that_serialises_two_pipes_makes_it_slower(line: str) -> None:
    """The next copy to L1 waits for the product before it."""
    plain, slow = timed(TEXT), timed(after_product(line))
    assert slow.end > 1.05 * plain.end
    lanes = [overlap.covered(slow, lane) for lane in ("aic M", "aic MTE2")]
    assert overlap.hidden(*lanes) < overlap.hidden(*(overlap.covered(plain, f"aic {p}") for p in ("M", "MTE2")))


def test_the_time_does_not_depend_on_the_order_of_interpretation() -> None:
    assert timed(TEXT).end == timed(TEXT, lazy=True).end


def test_the_sum_s_length_is_seen() -> None:
    assert 1.5 < timed(TEXT, 2 * DEPTH).end / timed(TEXT).end < 2.5


def test_cores_share_the_memory() -> None:
    assert timed(TEXT, cores=24).end > timed(TEXT, cores=1).end


def test_what_was_read_before_comes_from_l2() -> None:
    module, memory, given = parse(TEXT), Memory(), arguments(16, 64, DEPTH)
    known = known_values(module, programs(module)[0][1], given, (1, 1, 1), 1)
    first, second = (time_block(module, known, 0, costs.share(24), memory) for _ in range(2))
    assert first.cold >= (16 + 64) * DEPTH
    assert second.cold == 0 and second.end < first.end


def test_a_launch_takes_as_many_turns_as_its_blocks_need() -> None:
    module = parse(TEXT)
    one, two = (predict(module, (1, n), arguments(16, 64 * n, DEPTH), Memory()) for n in (24, 25))
    assert 1.5 < two.estimate / one.estimate < 2.1
    for launch in (one, two):
        assert 0 < launch.bound <= launch.estimate
        assert all(share <= 1.0 + 1e-9 for share in launch.busy.values())
    assert one.limit in {*one.busy, "HBM"} and one.cold >= 24 * 64 * DEPTH


def test_a_primitive_without_a_duration_is_refused() -> None:
    with pytest.raises(UncoveredError, match="no duration of vsort_1d_float"):
        costs.vector("vsort_1d_float", instruction("ub", (64,)))


def instruction(place: str, *sizes: tuple[int, ...], kind: str = "f32") -> Instruction:
    space = Space(place, np.zeros(1 << 20, np.uint8))
    views = tuple(View(space, 0, 0, size, packed(size), kind) for size in sizes)
    return Instruction("V", views, views[:1], lambda: None)


@pytest.mark.parametrize(
    ("name", "sizes", "busy"),
    [
        ("vadd_1d_float", ((4096,), (4096,)), 64 * 2),  # 64 repeats of 256 bytes
        ("vmuls_vs_1d_float", ((4096,),), 64),
        ("enablevc_reduce_sum_r_float", ((4096,),), 64 * 7),
        ("enablevc_reduce_sum_ar_float", ((16, 128),), 16 * 2 + 16 * 7),  # a row folded once, then summed across
    ],
)
def test_cycles_of_the_vector_pipe(name: str, sizes: tuple[tuple[int, ...], ...], busy: float) -> None:
    assert costs.vector(name, instruction("ub", *sizes)).busy == busy


@pytest.mark.parametrize("name", ["vbitsort", "vmrgsort4"])
def test_cycles_of_a_sort(name: str) -> None:
    """Two keys a cycle, in proposals of 8 bytes: four fp16 each."""
    assert costs.vector(name, instruction("ub", (4 * 512,), kind="f16")).busy == 256


def test_cycles_of_a_product() -> None:
    """16 x 512 x 64: 16 x 32 x 16 int8 a cycle, 16 x 16 x 16 bf16."""
    assert costs.product(instruction("ca", (16, 512), (64, 512), kind="i8")).busy == 64
    assert costs.product(instruction("ca", (16, 512), (64, 512), kind="bf16")).busy == 128


def test_every_rate_says_where_it_comes_from() -> None:
    assert all(found.value > 0 and found.source for found in RATES.values())
    assert {found.quality for found in RATES.values()} <= {"vendor", "measured", "derived", "assumed"}


def test_time_that_lies_beside_other_work() -> None:
    outer = overlap.merged([(0.0, 4.0), (3.0, 6.0), (10.0, 12.0)])
    assert outer == [(0.0, 6.0), (10.0, 12.0)]
    assert overlap.hidden([(5.0, 7.0), (10.0, 12.0)], outer) == 0.75


def test_the_picture_shows_every_pipe_that_works(tmp_path: Path) -> None:
    timeline.draw(timed(TEXT), "linear <&>", tmp_path / "a.svg")
    words = [node.text for node in ET.parse(tmp_path / "a.svg").iter("{http://www.w3.org/2000/svg}text")]
    assert {"aic M", "aic MTE1", "aic MTE2", "aic FIX", "aiv0 V", "aiv0 MTE3"} <= set(words)
    assert (tmp_path / "a.svg").stat().st_size < 300_000


def test_no_committed_estimate_is_below_its_bound() -> None:
    with RESULTS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["op"] for row in rows} >= {"lightning_indexer", "sparse_flash_attention", "mla_preprocess"}
    assert all(0 <= float(row["bound_us"]) <= float(row["estimate_us"]) + 0.1 for row in rows)


def test_an_empty_module_has_no_time() -> None:
    with pytest.raises(UncoveredError):
        predict(Module({}, {}), (1,), (), Memory())


def test_the_clock_is_the_roofline_s() -> None:
    """The paper roofline's cube rate and this one are the same die."""
    from glm5_ascend.plan.hardware import load_hardware

    assert rate("cube cores") * rate("cube int8") * 2 * rate("clock") == pytest.approx(
        load_hardware("a3").rates.int8.value, rel=1e-3
    )
