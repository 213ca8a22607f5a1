"""Of the kernels in C++: those that a sanitizer finds have results that may be right."""

from __future__ import annotations

from tests.support.faults.fault import Fault, fault

ADDRESS, THREAD = "test_nothing_is_found[address,undefined]", "test_nothing_is_found[thread]"

FAULTS: tuple[Fault, ...] = (
    fault(
        "kernels",
        "every draft begins with the state before the first one",
        "    slot = next;\n",
        "",
        "test_a_ragged_batch_is_its_recurrence",
    ),
    fault(
        "kernels",
        "the seventeenth token of a step begins with the state before the first one",
        "    slot = op.state_slots[first + count - 1];\n",
        "",
        "test_a_ragged_batch_is_its_recurrence",
    ),
    fault(
        "kernels",
        "sixteen biases are read where fewer columns are left",
        "load_columns<Fp32>(bias, column, count)",
        "Fp32::load(bias, column)",
        ADDRESS,
    ),
    fault(
        "kernels",
        "the end of a weight row is read as a whole step",
        "ends[l] = copies[l];",
        "ends[l] = lines[l] + column;",
        ADDRESS,
    ),
    fault(
        "kernels",
        "one count of pairs too few",
        "starts(op.experts + 2), weight",
        "starts(op.experts + 1), weight",
        ADDRESS,
    ),
    fault(
        "kernels",
        "all threads add squares in one row of scratch",
        "token, sums + op.columns * thread);",
        "token, sums);",
        THREAD,
    ),
    fault(
        "kernels",
        "all threads rotate in one row of scratch",
        "float *const row = scratch + size * thread, *const angles = row + op.dim;",
        "float *const row = scratch + size * (thread & 0), *const angles = row + op.dim;",
        THREAD,
    ),
    fault(
        "kernels",
        "all threads multiply experts in one scratch",
        "task % tasks, scratch[thread]);",
        "task % tasks, scratch[0]);",
        THREAD,
    ),
)
