"""`glm5-ascend parity`: every kernel that runs here against its readable reference."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from glm5_ascend.cli.help import command
from glm5_ascend.errors import EXIT_CHECK_FAILED, EXIT_OK, Glm5Error, MissingEnvironmentError, shown


def register(app: typer.Typer) -> None:
    command(
        app, "parity", parity,
        "parity",
        "parity --op lightning_indexer --verbose",
        "parity --device npu --kernels triton",
    )  # fmt: skip


def parity(
    device: Annotated[
        str, typer.Option(metavar="NAME", help="Where the kernels under test run: cpu, npu or npu:N.")
    ] = "cpu",
    op: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this op; may be given several times.")
    ] = None,
    kernels: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only these: cpu, npu or triton; may be given several times."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the inputs.")] = 0,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="A line per result instead of one per op.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="All results as one JSON object on stdout.")] = False,
) -> int:
    """Run every op in every variant on all implementations that work here and compare them with the reference.

    Exit code 1 if one differs by more than its tolerance, 3 if there is nothing to compare.
    """
    from glm5_ascend.model.device import find_device
    from glm5_kernels import ops, registry

    where = str(find_device(device))
    unknown = sorted(set(op or ()) - set(registry.OPS))
    if unknown:
        raise Glm5Error(f"--op {shown(unknown[0])}: unknown", f"one of {', '.join(registry.OPS)}")
    strange = sorted(set(kernels or ()) - set(registry.IMPLEMENTATIONS[1:]))
    if strange:
        raise Glm5Error(f"--kernels {shown(strange[0])}: unknown", f"one of {', '.join(registry.IMPLEMENTATIONS[1:])}")
    rows = []
    for row in ops.parity(where, tuple(op or ()), seed, tuple(kernels or ())):
        rows.append(row)
        if not as_json and verbose and row.skipped:
            print(f"skip  {row.op}  {row.implementation}  {row.variant}: {row.skipped}")
        elif not as_json and (verbose or not row.ok):
            print(
                f"{'ok  ' if row.ok else 'FAIL'}  {row.op}  {row.implementation}  {row.variant}  {row.output}: "
                f"largest {row.largest:.2g}, relative {row.relative:.1e}, worst {row.worst} ({row.allowed})"
            )
    compared = [row for row in rows if not row.skipped]
    if not compared:
        raise MissingEnvironmentError(
            f"none of the kernels asked for runs on {where}"
            if kernels
            else f"no implementation but the reference runs on {where}",
            "glm5-ascend doctor says what is missing",
        )
    failed = sum(not row.ok for row in rows)
    code = EXIT_CHECK_FAILED if failed else EXIT_OK
    if as_json:
        value = {"schema_version": 1, "command": "parity", "ok": not failed, "exit_code": code, "device": where}
        print(json.dumps(value | {"rows": [asdict(row) for row in rows]}))
        return code
    groups: dict[tuple[str, str], list[ops.ParityRow]] = {}
    for row in rows:
        groups.setdefault((row.op, row.implementation), []).append(row)
    for (name, implementation), some in groups.items():
        variants, skipped = len({r.variant for r in some if not r.skipped}), sum(bool(r.skipped) for r in some)
        print(
            f"{name:28} {implementation:10} {variants:3} variants  {sum(not row.ok for row in some):3} failed  "
            f"largest relative error {max(row.relative for row in some):.1e}"
            + (f"  ({skipped} variants are not for it)" if skipped else "")
        )
    print(f"{'FAIL' if failed else 'ok'}: {len(compared)} results against the reference on {where}, {failed} failed")
    return code
