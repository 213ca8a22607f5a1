"""`glm5-ascend parity`: every kernel that runs here against its readable reference."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from typing import TYPE_CHECKING, Annotated

from glm5_ascend.cli.command import Output, command
from glm5_ascend.errors import EXIT_CHECK_FAILED, EXIT_OK, Glm5Error, MissingEnvironmentError, json_frame, shown
from glm5_ascend.options import Option

if TYPE_CHECKING:
    from glm5_kernels import ops


@dataclass(frozen=True)
class ParityOptions:
    """Options of `parity`."""

    _: KW_ONLY
    device: Annotated[str, Option("Device of the kernels under test: cpu, npu or npu:N.", "NAME")] = "cpu"
    op: Annotated[Sequence[str], Option("Only this op; repeat for several.", "NAME")] = ()
    kernels: Annotated[Sequence[str], Option("Only these: cpu, npu or triton; repeat for several.", "NAME")] = ()
    verbose: Annotated[bool, Option("Print one line per result instead of one per op.", flags=("--verbose", "-v"))] = (
        False
    )


@command(
    "parity", "parity", "parity --op lightning_indexer --verbose", "parity --device npu --kernels triton", json=True,
)  # fmt: skip
def run(options: ParityOptions, output: Output) -> int:
    """Compare all implementations that run here with the reference, for every op and variant.

    Exit code 1 if one differs by more than its tolerance, 3 if there is nothing to compare.
    """
    from glm5_ascend.model.device import find_device
    from glm5_kernels import ops, registry

    device = str(find_device(options.device))
    _check_names("--op", options.op, registry.OPS)
    _check_names("--kernels", options.kernels, registry.IMPLEMENTATIONS[1:])
    rows = []
    for row in ops.parity(device, tuple(options.op), 0, tuple(options.kernels)):
        rows.append(row)
        if not output.json:
            _print_row(row, options.verbose)
    compared = [row for row in rows if not row.skipped]
    if not compared:
        missing = "none of the requested kernels" if options.kernels else "no implementation except the reference"
        raise MissingEnvironmentError(f"{missing} runs on {device}", "glm5-ascend doctor shows what is missing")
    failed = sum(not row.ok for row in rows)
    code = EXIT_CHECK_FAILED if failed else EXIT_OK
    if output.json:
        print(json.dumps(json_frame("parity", code) | {"device": device, "rows": [asdict(row) for row in rows]}))
    else:
        _print_summary(rows)
        print(
            f"{'FAIL' if failed else 'ok'}: {len(compared)} results against the reference on {device}, {failed} failed"
        )
    return code


def _check_names(option: str, names: Sequence[str], allowed: Iterable[str]) -> None:
    for name in sorted(set(names) - set(allowed)):
        raise Glm5Error(f"{option} {shown(name)}: unknown", f"one of {', '.join(allowed)}")


def _print_row(row: ops.ParityRow, verbose: bool) -> None:
    name = f"{row.op}  {row.implementation}  {row.variant}"
    if row.skipped and verbose:
        print(f"skip  {name}: {row.skipped}")
    elif not row.skipped and (verbose or not row.ok):
        print(
            f"{'ok  ' if row.ok else 'FAIL'}  {name}  {row.output}: largest {row.largest:.2g}, "
            f"relative {row.relative:.1e}, worst {row.worst} ({row.allowed})"
        )


def _print_summary(rows: Sequence[ops.ParityRow]) -> None:
    groups: dict[tuple[str, str], list[ops.ParityRow]] = {}
    for row in rows:
        groups.setdefault((row.op, row.implementation), []).append(row)
    for (op, implementation), members in groups.items():
        variants, skipped = len({r.variant for r in members if not r.skipped}), sum(bool(r.skipped) for r in members)
        print(
            f"{op:28} {implementation:10} {variants:3} variants  {sum(not row.ok for row in members):3} failed  "
            f"largest relative error {max(row.relative for row in members):.1e}"
            + (f"  ({skipped} variants do not apply)" if skipped else "")
        )
