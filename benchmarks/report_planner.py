"""Check the planner against every public number, and fit its six constants again.

    python benchmarks/report_planner.py            # tables; exit 1 where a limit is missed
    python benchmarks/report_planner.py --write    # and write constants and errors to plan/data/fitted.yaml

Sizes must agree within 1 %. Three kinds of errors are printed for throughput, TTFT and TPOT: of rows published after
SPLIT by a fit on the rows before it; of the rows of a source (a repository, a pull request) by a fit on the others; of
the rows of one load and layout by a fit on the others. The first and, for rows up to SPLIT, the last give the bands.
Rows with contradictions are not judged.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import yaml
from tools import known_sizes

from glm5_ascend.plan.evidence import OUTPUTS, SLOPE, Case, cases, distance
from glm5_ascend.plan.fit import PRIORS, errors, fit, to_constants
from glm5_ascend.plan.hardware import Constants, fitted

FITTED = Path(__file__).parents[1] / "glm5_ascend" / "plan" / "data" / "fitted.yaml"
#: Last date of the rows that the first fit sees. No number of GLM-5 on vllm-ascend is older than 2026-08-07.
SPLIT = datetime.date(2026, 8, 31)
#: Share of the unseen results that the band of a prediction should hold, and what is accepted.
BAND, COVERED = 0.8, (0.75, 0.9)
#: Largest error of a size, and of the median of unseen results.
SIZES, MEDIAN = 0.01, {"tok_s": 0.20, "ttft": 0.25, "tpot": 0.25}
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


def unseen_by(key: Callable[[Case], object], whole: Constants, groups: Sequence[object] | None = None) -> Errors:
    """Errors of the rows of each group, by a fit on all other rows that starts at `whole`."""
    unseen: Errors = {}
    for group in dict.fromkeys(map(key, cases())) if groups is None else groups:
        left = [case for case in cases() if key(case) == group]
        constants = fit([case for case in cases() if key(case) != group], whole)
        unseen |= {case.row.id: error for case, error in zip(left, errors(left, constants), strict=True)}
    return unseen


def group(case: Case) -> tuple[object, ...]:
    """Runs of the same load and layout are nearly one measurement; model version and weights may differ."""
    load, sizes = case.workload, [(e.tp, e.dp, e.pp) for e in case.layout.engines.values()]
    return (case.row.hardware, case.row.layers, *sizes, load.prompt, load.output, load.concurrency, load.prefix_hit)


def fitted_to(rows: Sequence[Case]) -> Constants:
    """Constants fitted to rows, from the priors' typical values."""
    return fit(rows, to_constants(np.zeros(len(PRIORS))))


def medians(unseen: Errors, engine: str = "vllm-ascend") -> dict[str, tuple[int, float, float]]:
    """(results, median error, median error with its sign) by output, of an engine's rows."""
    values = {}
    for name in OUTPUTS:
        signed = [e[name] for case, e in of_engine(unseen, engine) if name in e]
        if signed:
            size = float(np.median([abs(np.expm1(x)) for x in signed]))
            values[name] = (len(signed), size, float(np.expm1(np.median(signed))))
    return values


def of_engine(unseen: Errors, engine: str) -> Iterator[tuple[Case, dict[str, float]]]:
    for case in cases():
        if case.row.id in unseen and case.row.engine == engine and (case.judged or engine == "sglang"):
            yield case, unseen[case.row.id]


def spoken(values: dict[str, tuple[int, float, float]]) -> str:
    words = {"tok_s": "tokens/s", "ttft": "TTFT", "tpot": "TPOT"}
    parts = [f"{words[name]} {100 * error:.0f} % ({count} results)" for name, (count, error, _) in values.items()]
    return "median error in " + ", ".join(parts)


def away(case: Case) -> float:
    """Distance of a row from the rows of other loads and layouts."""
    others = [c for c in cases() if c.judged and group(c) != group(case)]
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
    early = [case for case in cases() if case.row.date <= SPLIT]
    late = [case for case in cases() if case.row.date > SPLIT]
    by_date = dict(zip([case.row.id for case in late], errors(late, fitted_to(early)), strict=True))
    whole = fitted_to(cases())
    seen = dict(zip([case.row.id for case in cases()], errors(cases(), whole), strict=True))
    by_group, by_source = unseen_by(group, whole), unseen_by(lambda case: case.row.source, whole)
    unseen = by_group | by_date  # a later row by the fit on earlier ones: what a plan meets, too
    width = bands(unseen)
    share = table(seen, unseen, width)
    print(f"\nbands hold {100 * share:.0f} % of the judged results (expected 75 to 90 %)")
    for title, results in (("seen by the fit", seen), (f"after {SPLIT}, fit on {len(early)} rows before", by_date),
                          ("source left out", by_source), ("load and layout left out", by_group),
                          ("bands: load and layout left out, later rows by the date", unseen)):  # fmt: skip
        for engine in ("vllm-ascend", "sglang"):
            print(f"{title}; {engine}: {spoken(medians(results, engine))}")
            print(
                "   with sign:",
                {name: f"{100 * sign:+.0f} %" for name, (_, _, sign) in medians(results, engine).items()},
            )
    for name in PRIORS:
        print(f"  {name:14} {getattr(whole, name):.4g}   (prior {PRIORS[name][0]:g})")
    if write:
        value = {
            "date": datetime.date.today().isoformat(),
            "constants": {name: float(f"{getattr(whole, name):.5g}") for name in PRIORS},
            "rows": len(cases()),
            "bands": {name: float(f"{x:.4g}") for name, x in width.items()},
            "median_error": {name: float(f"{error:.4g}") for name, (_, error, _) in medians(unseen).items()},
            "inside": round(share, 3),
            "later": {engine: spoken(medians(by_date, engine)) for engine in ("vllm-ascend", "sglang")},
        }
        heading = "# Written by benchmarks/report_planner.py --write.\n"
        FITTED.write_text(heading + yaml.safe_dump(value, sort_keys=False, width=120), encoding="utf-8")
        fitted.cache_clear()
    good = all(error <= MEDIAN[name] for name, (_, error, _) in medians(unseen).items())
    return good and COVERED[0] <= share <= COVERED[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write plan/data/fitted.yaml")
    arguments = parser.parse_args()
    results = sizes(), throughput(arguments.write)
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
