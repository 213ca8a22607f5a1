"""Check the planner against every public number, and fit its six constants again.

    python benchmarks/report_planner.py            # tables; exit 1 where a limit is missed
    python benchmarks/report_planner.py --write    # and write constants and errors to plan/data/fitted.yaml

Sizes must agree within 1 %. Each row is predicted by a fit on the rows of all other sources (a repository's CI, a pull
request, a document): these errors are printed, give the bands, and stand under every plan. Rows with contradictions
are not judged.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import yaml
from tools import known_sizes
from tools.planner_fit import PRIORS, errors, fit, to_constants

from glm5_ascend.plan.evidence import OUTPUTS, SLOPE, Case, cases, distance
from glm5_ascend.plan.hardware import Constants, fitted

FITTED = Path(__file__).parents[1] / "glm5_ascend" / "plan" / "data" / "fitted.yaml"
#: Share of the unseen results that the band of a prediction should hold, and what is accepted.
BAND, COVERED = 0.8, (0.75, 0.9)
#: Largest error of a size, and of the median of unseen results.
SIZES, MEDIAN = 0.01, {"tok_s": 0.20, "ttft": 0.30, "tpot": 0.30}
Errors = dict[str, dict[str, float]]


def sizes() -> bool:
    print("| what | published, bytes | planner, bytes | error | source |\n|---|---|---|---|---|")
    worst = 0.0
    for size in known_sizes.sizes():
        error = size.computed / size.published - 1
        worst = max(worst, abs(error))
        print(f"| {size.what} | {size.published:,.6g} | {size.computed:,.6g} | {100 * error:+.2f} % | {size.source} |")
    print(f"\nworst {100 * worst:.2f} %, allowed {100 * SIZES:.0f} %\n")
    return worst <= SIZES


def unseen_by_source(whole: Constants) -> Errors:
    """Errors of the rows of each source, by a fit on all other rows that starts at `whole`."""
    unseen: Errors = {}
    for source in dict.fromkeys(case.row.source for case in cases()):
        left = [case for case in cases() if case.row.source == source]
        constants = fit([case for case in cases() if case.row.source != source], fitted_to(()), near=whole)
        unseen |= {case.row.id: error for case, error in zip(left, errors(left, constants), strict=True)}
    return unseen


def fitted_to(rows: Sequence[Case]) -> Constants:
    """Constants fitted to rows, from the priors' typical values."""
    typical = to_constants(np.zeros(len(PRIORS)))
    return fit(rows, typical) if rows else typical


def spoken(unseen: Errors, engine: str, source: str = "") -> str:
    """Median errors with and without sign of an engine's rows, and how many are in the bands."""
    texts = []
    for name in OUTPUTS:
        signed = [e[name] for c, e in of_engine(unseen, engine) if name in e and source in c.row.source]
        if signed:
            size, sign = np.median(np.abs(np.expm1(signed))), np.expm1(np.median(signed))
            texts.append(f"{name} {100 * size:.0f} % (n {len(signed)}, {100 * sign:+.0f} %)")
    return ", ".join(texts)


def of_engine(unseen: Errors, engine: str) -> Iterator[tuple[Case, dict[str, float]]]:
    for case in cases():
        if case.row.engine == engine and (case.judged or engine == "sglang"):
            yield case, unseen[case.row.id]


def away(case: Case) -> float:
    """Distance of a row from the rows of other sources."""
    others = [c for c in cases() if c.judged and c.row.source != case.row.source]
    return min(distance(c, case.model, case.hardware.name, case.layout, case.workload) for c in others)


def bands(unseen: Errors) -> dict[str, float]:
    """Half widths at distance 0: the score that holds BAND of the unseen results (split conformal)."""
    widths = {}
    for name in OUTPUTS:
        rows = [(case, e[name]) for case, e in of_engine(unseen, "vllm-ascend") if name in e]
        scores = sorted(abs(error) / (1.0 + SLOPE * away(case)) for case, error in rows)
        widths[name] = scores[min(len(scores), int(np.ceil(BAND * (len(scores) + 1)))) - 1]
    widths["tpot"] = max(widths["tpot"], widths["tok_s"])  # few rows have it; throughput is mostly TPOT
    return widths


def table(seen: Errors, unseen: Errors, width: dict[str, float]) -> float:
    """Print every row and output; returns the share of the judged results that are inside their bands."""
    print("| row | date | weight | output | measured | planner | unseen | band | in band |\n" + "|---" * 9 + "|")
    inside = []
    for case in cases():
        for name, value in case.measured.items():
            error, half = unseen[case.row.id][name], width[name] * (1.0 + SLOPE * away(case))
            if case.judged:
                inside.append(abs(error) <= half)
            scale, unit = (1.0, "tok/s") if name == "tok_s" else (1e3, f"{name.upper()} ms")
            planner = scale * value * np.exp(seen[case.row.id][name])
            mark = "yes" if abs(error) <= half else "**no**"
            print(f"| {case.row.case} | {case.row.date} | {case.row.weight:g} | {unit} | {scale * value:,.4g} | "
                  f"{planner:,.4g} | {100 * np.expm1(error):+.0f} % | x {np.exp(half):.2f} | {mark} |")  # fmt: skip
    return float(np.mean(inside))


def throughput(write: bool) -> bool:
    whole = fitted_to(cases())
    seen = dict(zip([case.row.id for case in cases()], errors(cases(), whole), strict=True))
    unseen = unseen_by_source(whole)
    width = bands(unseen)
    share = table(seen, unseen, width)
    print(f"\nbands hold {100 * share:.0f} % of the judged results (expected 75 to 90 %)\n")
    print("| engine or source, left out of the fit | median error (results, median with sign) |\n|---|---|")
    for engine in ("vllm-ascend", "sglang"):
        print(f"| **{engine}** | {spoken(unseen, engine)} |\n| {engine}, seen by the fit | {spoken(seen, engine)} |")
        for source in dict.fromkeys(case.row.source for case, _ in of_engine(unseen, engine)):
            print(f"| {source} | {spoken(unseen, engine, source)} |")
    print("\n| constant | fitted | prior |\n|---|---|---|")
    for name in PRIORS:
        print(f"| {name} | {getattr(whole, name):.4g} | {PRIORS[name][0]:g} |")
    if write:
        value = {
            "date": datetime.date.today().isoformat(),
            "constants": {name: float(f"{getattr(whole, name):.5g}") for name in PRIORS},
            "bands": {name: float(f"{x:.4g}") for name, x in width.items()},
            "inside": round(share, 3),
            "unseen": {row: {name: float(f"{x:.3g}") for name, x in e.items()} for row, e in unseen.items()},
        }
        heading = "# Written by benchmarks/report_planner.py --write.\n"
        FITTED.write_text(heading + yaml.safe_dump(value, sort_keys=False, width=120), encoding="utf-8")
        fitted.cache_clear()
    judged = [e for _, e in of_engine(unseen, "vllm-ascend")]
    good = all(np.median([abs(np.expm1(e[n])) for e in judged if n in e]) <= limit for n, limit in MEDIAN.items())
    return bool(good) and COVERED[0] <= share <= COVERED[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write plan/data/fitted.yaml")
    arguments = parser.parse_args()
    results = sizes(), throughput(arguments.write)
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
