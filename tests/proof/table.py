"""All levels of all kernels: `python -m tests.proof.table TOOLS [--markdown FILE]` (`make prove-kernels`).

Exit code 1 if anything differs from what is expected.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.proof.levels import LEVELS, OPS, Result, is_known_defect, prove
from tests.proof.shapes import IN_WORDS
from tests.proof.tools import make_tools


def summary(results: list[Result]) -> list[str]:
    """One Markdown row per op: what passed at each level."""
    lines = [
        "| op | at GLM-5's sizes | 1 interpreted | 2 lowered | 3 lowered and run | 4 compiled | 5 executed | error "
        "| on an NPU |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for op in OPS:
        rows = [r for r in results if r.op == op and not r.skipped]
        levels = [[r for r in rows if r.level == level] for level in (1, 2, 3, 4, 5)]
        passed = [f"{sum(r.ok for r in level)} of {len(level)}" for level in levels]
        worst = max((r.relative for r in rows if r.relative is not None), default=0.0)
        lines.append(f"| `{op}` | {IN_WORDS[op]} | {' | '.join(passed)} | {worst:.1e} | no |")
    return lines


def all_rows(results: list[Result]) -> list[str]:
    """A Markdown table of every result."""
    lines = ["| op | level | what | error | asserted |", "|---|---|---|---|---|"]
    for r in results:
        error = "-" if r.relative is None else f"{r.relative:.1e}"
        words = f"not taken: {r.skipped}" if r.skipped else ("" if r.ok else "**FAILED** ") + r.asserted
        lines.append(f"| `{r.op}` | {r.level} | {r.what} | {error} | {words} |")
    return lines


def details(results: list[Result]) -> list[str]:
    """One line per result."""
    lines = []
    for r in results:
        state = "skip" if r.skipped else "ok  " if r.ok else "FAIL"
        error = "" if r.relative is None else f"{r.relative:.1e}  "
        words = r.skipped or (f"{error}{r.asserted}" if r.ok else f"{error}{r.worst}; expected {r.asserted}")
        lines.append(f"{state} {r.level} {r.op:28} {r.what:58} {words}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tools", type=Path, help="folder for triton-ascend and MLIR; filled if it is not")
    parser.add_argument("--markdown", type=Path, help="also write everything here")
    args = parser.parse_args()
    tools = make_tools(args.tools)
    results: list[Result] = []
    for op in OPS:
        for level in LEVELS:
            new = prove(level, op, tools)
            print("\n".join(details(new)), flush=True)
            results += new
    lines = summary(results)
    print("\n" + "\n".join(lines))
    if args.markdown:
        args.markdown.write_text("\n".join([*lines, "", *all_rows(results)]) + "\n")
    return 0 if all(r.ok or is_known_defect(r) for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
