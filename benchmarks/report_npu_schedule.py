"""Time of our Triton kernels on one die of an A3, predicted from what the device's compiler made of them.

    python benchmarks/report_npu_schedule.py TOOLS [--only "attention T=8"] [--csv FILE] [--pictures FOLDER]

TOOLS is a folder for the compilers, filled if it is not (0.75 GB from PyPI and Debian). Nothing here was measured on an
NPU: the model and the source of every rate are in tests/proof/predicted. `--rates` prints the rates and ends.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
INSIDE = "GLM5_NPU_SCHEDULE"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tools", type=Path, nargs="?")
    parser.add_argument("--only", default="", help="rows whose op and shape contain these words")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--pictures", type=Path)
    parser.add_argument("--rates", action="store_true")
    args = parser.parse_args()
    sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "kernels")) if path not in sys.path]
    if args.rates:
        return print_rates()
    if args.tools is None:
        parser.error("TOOLS is missing")
    if INSIDE not in os.environ:
        return again(args.tools)
    rows = predictions(args)
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return 0


def again(tools: Path) -> int:
    """This script where `import triton` is triton-ascend: a package of the same name as upstream's."""
    from tests.proof.tools import make_tools

    ascend = make_tools(tools).triton_ascend
    paths = os.pathsep.join(map(str, (ascend, ROOT, ROOT / "kernels", ROOT / "benchmarks")))
    environment = os.environ | {INSIDE: "1", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *sys.argv], check=False, env=environment).returncode


def print_rates() -> int:
    from tests.proof.predicted.rates import RATES

    print("| what | rate | quality | source |\n|---|---|---|---|")
    for name, found in RATES.items():
        print(f"| {name} | {found.value:g} {found.unit} | {found.quality} | {found.source} |")
    return 0


def predictions(args: argparse.Namespace) -> list[dict[str, Any]]:
    import torch
    from bench_npu import operands
    from report_npu_roofline import works

    from glm5_kernels import registry
    from tests.proof.predicted.timeline import draw
    from tests.proof.predicted.works import predict_call

    compiled, rows = compiler(args.tools), []
    drawn: set[Path] = set()
    for work in works():
        if not all(word in f"{work.op} {work.shape}" for word in args.only.split()):
            continue
        torch.manual_seed(0)
        given, function = operands(work), registry.load(work.op, "triton")
        launches = predict_call(lambda: function(*given), compiled)  # noqa: B023
        total, least = sum(launch.estimate for launch in launches), max(work.seconds)
        print(
            f"\n`{work.op}` {work.shape}: {total * 1e6:.0f} us, {total / least:.1f} x the {least * 1e6:.0f} us of paper"
        )
        print("| kernel | launches | blocks | estimate | lower bound | by | busy |\n|---|---|---|---|---|---|---|")
        for row in by_kernel(launches):
            rows.append({"op": work.op, "shape": work.shape, "paper_us": round(least * 1e6, 2)} | row)
            print("| " + " | ".join(str(value) for value in row.values()) + " |", flush=True)
        for launch in launches if args.pictures else ():
            args.pictures.mkdir(parents=True, exist_ok=True)
            path = args.pictures / f"{work.op}-{launch.kernel}.svg"
            if path not in drawn:  # of the first shape
                draw(launch.record, f"{launch.kernel}: one block, {work.op} {work.shape}", path)
                drawn.add(path)
    return rows


def compiler(tools: Path) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]:
    import torch

    from tests.proof.device_compiler import DeviceCompiler
    from tests.proof.executed.text import parse
    from tests.proof.lowering import lower
    from tests.proof.tools import make_tools

    device, made = DeviceCompiler(make_tools(tools).device_compilers), {}

    def compiled(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> Any:
        types = tuple(a.dtype if isinstance(a, torch.Tensor) else type(a) for a in arguments)
        key = kernel.__name__, types, tuple(constants.items())
        if key not in made:
            found = device.compile(lower(kernel, arguments, constants))
            if found.findings():
                raise SystemExit(f"{kernel.__name__}: {found.findings()[0]}")
            made[key] = parse(found.program)
        return made[key]

    return compiled


def by_kernel(launches: list[Any]) -> list[dict[str, Any]]:
    """One row per kernel and grid, in the order of their first launch."""
    groups: dict[Any, list[Any]] = {}
    for launch in launches:
        groups.setdefault((launch.kernel, launch.blocks), []).append(launch)
    rows = []
    for (kernel, blocks), found in groups.items():
        first, total = found[-1], sum(launch.estimate for launch in found)
        busy = sorted(((share, lane) for lane, share in first.busy.items() if share >= 0.05), reverse=True)
        rows.append({
            "kernel": kernel, "launches": len(found), "blocks": blocks, "estimate_us": round(total * 1e6, 1),
            "bound_us": round(sum(launch.bound for launch in found) * 1e6, 1), "limit": first.limit,
            "busy": " ".join(f"{lane} {share:.0%}" for share, lane in busy),
        })  # fmt: skip
    return rows


if __name__ == "__main__":
    sys.exit(main())
