"""All levels of all kernels as Markdown: `python -m tests.proof.table TOOLS > FILE` (`make prove-kernels`).

Exit code 1 if anything differs from what is expected.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.proof.levels import LEVELS, OPS, Result, prove
from tests.proof.shapes import IN_WORDS
from tests.proof.tools import make_tools


def summary(results: list[Result]) -> list[str]:
    """One row per op: what passed at each level."""
    lines = [
        "| op | at GLM-5's sizes | 1 interpreted | 2 lowered | 3 compiled | error | on an NPU |",
        "|---|---|---|---|---|---|---|",
    ]
    for op in OPS:
        rows = [r for r in results if r.op == op and not r.skipped]
        levels = [[r for r in rows if r.level == level] for level in range(1, len(LEVELS) + 1)]
        passed = [f"{sum(r.ok for r in level)} of {len(level)}" for level in levels]
        worst = max((r.relative for r in rows if r.relative is not None), default=0.0)
        lines.append(f"| `{op}` | {IN_WORDS[op]} | {' | '.join(passed)} | {worst:.1e} | no |")
    return lines


def row(r: Result) -> str:
    error = "-" if r.relative is None else f"{r.relative:.1e}"
    words = r.asserted if r.ok else f"**FAILED** {r.worst}; expected {r.asserted}"
    return f"| `{r.op}` | {r.level} | {r.what} | {error} | {f'not taken: {r.skipped}' if r.skipped else words} |"


def main() -> int:
    tools = make_tools(Path(sys.argv[1]))
    results: list[Result] = []
    print("| op | level | what | error | asserted |\n|---|---|---|---|---|")
    for op in OPS:
        for level in LEVELS:
            new = prove(level, op, tools)
            print("\n".join(row(result) for result in new), flush=True)
            results += new
    print("\n" + "\n".join(summary(results)))
    return 0 if all(r.ok for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
