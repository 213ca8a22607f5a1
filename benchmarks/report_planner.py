"""Check the planner against every public number, and fit its seven constants again.

    python benchmarks/report_planner.py            # tables; exit 1 where a limit is missed
    python benchmarks/report_planner.py --write    # and write the constants and the errors to plan/data/fitted.yaml

Sizes must agree within 1 %. Throughput, TTFT and TPOT of each row are predicted by a fit that saw neither the row nor
another of its group (the same workload on the same layout, as GLM-5.1 and 5.2 both have). Other engines' rows and
those with contradictions weigh less in the fit; they are shown, not judged.
"""

from __future__ import annotations

import argparse
import datetime
import random
import sys
from pathlib import Path

import numpy as np
import yaml
from tools import known_sizes, planner_fit

from glm5_ascend.plan import distance
from glm5_ascend.plan.baselines import OUTPUTS, Baseline, cases, judged, leads
from glm5_ascend.plan.calibrate import PRIORS, Vector, errors, from_efficiencies, to_efficiencies
from glm5_ascend.plan.efficiency import fitted_efficiencies

FITTED = Path(__file__).parents[1] / "glm5_ascend" / "plan" / "data" / "fitted.yaml"
HEADING = """\
# yaml-language-server: $schema=schemas/fitted.json
# Written by benchmarks/report_planner.py --write. `bands`: half widths of a prediction's logarithm.
# `unseen`: predicted / measured by a fit that saw neither the row nor another of its group.
"""
#: Share of the unseen rows that the band of a prediction should hold.
BAND = 0.8
#: Relative growth of a band with each unit of distance. Not fitted: the rows show little of it.
SLOPE = 0.15
#: Computed prompt tokens per output token from which a row is prompt-heavy. Number of fits without a third.
HEAVY, DRAWS = 3.0, 20
SIZES, COVERED = 0.01, (0.75, 0.9)
MEDIAN = {"tok_s": 0.12, "ttft": 0.20, "tpot": 0.20}
Errors = dict[str, dict[str, float]]


def sizes() -> bool:
    print("| what | published, bytes | planner, bytes | error | source |\n|---|---|---|---|---|")
    worst = 0.0
    for size in known_sizes.sizes():
        error = size.computed / size.published - 1
        worst = max(worst, abs(error))
        values = f"{size.published:,.6g} | {size.computed:,.6g}"
        print(f"| {size.what} | {values} | {100 * error:+.2f} % | {size.source} |")
    print(f"\nworst {100 * worst:.2f} %, allowed {100 * SIZES:.0f} %\n")
    return worst <= SIZES


def quantile(scores: list[float]) -> float:
    """The score that holds BAND of the unseen rows (split-conformal: one more row than there are)."""
    rank = min(len(scores), int(np.ceil(BAND * (len(scores) + 1))))
    return sorted(scores)[rank - 1]


def group_of(case: Baseline) -> object:
    return case.row.group_key()


def expected_errors(unseen: Errors) -> Errors:
    """Expected error of each row, by the errors of the other groups' rows."""
    rows = distance.row_errors({row: {k: float(np.exp(v)) for k, v in e.items()} for row, e in unseen.items()})
    expected = {}
    for case in cases():
        others = [row for row in rows if row.group != group_of(case)]
        here = distance.case_coordinates(case)
        expected[case.row.id] = {name: distance.expected_error(name, here, others) for name in case.row.measured()}
    return expected


def bands(unseen: Errors, expected: Errors) -> dict[str, float]:
    """Half widths of the bands in units of the expected error, by output."""
    widths = {}
    for name in OUTPUTS:
        rows = [case.row.id for case in judged() if name in unseen[case.row.id]]
        widths[name] = quantile([abs(unseen[row][name]) / expected[row][name] for row in rows])
    widths["tpot"] = max(widths["tpot"], widths["tok_s"])  # few rows have it; throughput is mostly TPOT
    return widths


def table(seen: Errors, unseen: Errors, width: dict[str, float], expected: Errors) -> dict[str, tuple[int, int]]:
    """Prints every row and output; returns (inside, of) by output, of the rows judged."""
    counts = {name: [0, 0] for name in OUTPUTS}
    judged_rows = {case.row.id for case in judged()}
    head = ("row", "weight", "output", "measured", "planner", "leave group out", "band", "in band")
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for case in cases():
        for name, value in case.row.measured().items():
            error = unseen[case.row.id][name]
            inside = abs(error) <= width[name] * expected[case.row.id][name]
            if case.row.id in judged_rows:
                counts[name] = [counts[name][0] + inside, counts[name][1] + 1]
            scale = 1.0 if name == "tok_s" else 1e3
            unit = "tok/s" if name == "tok_s" else f"{name.upper()} ms"
            planner = scale * value * np.exp(seen[case.row.id][name])
            factor, in_band = np.exp(width[name] * expected[case.row.id][name]), "yes" if inside else "**no**"
            print(f"| {case.row.case} | {case.row.weight:g} | {unit} | {scale * value:,.4g} | {planner:,.4g} "
                  f"| {100 * np.expm1(error):+.0f} % | x {factor:.2f} | {in_band} |")  # fmt: skip
    return {name: (inside, total) for name, (inside, total) in counts.items()}


def optimism(name: str, error: float) -> float:
    """Positive where the planner promises more than was measured: more tokens, or less time."""
    return error if name == "tok_s" else -error


def leaning(errors_of: list[tuple[Baseline, dict[str, float]]], title: str) -> None:
    """Prints median errors of the judged rows, without and with their sign; heavy: much prompt per output token."""
    print(f"{title} (median error; median with its sign, + is optimistic; of prompt-heavy rows):")
    for name in OUTPUTS:
        signed = [(case, optimism(name, e[name])) for case, e in errors_of if name in e]
        heavy = [error for case, error in signed if case.workload.fresh > HEAVY * case.workload.output]
        every = [error for _, error in signed]
        typical, side, there = (
            100 * float(np.expm1(np.median(values))) for values in (np.abs(every), every, heavy or [0.0])
        )
        print(f"  {name:5} {len(every):3} errors: {typical:.1f} %, {side:+.1f} %; {len(heavy)} heavy: {there:+.1f} %")


def thirds(every: tuple[Baseline, ...], whole: Vector) -> list[tuple[Baseline, dict[str, float]]]:
    """Errors of the judged rows of DRAWS fits, each without a random third of all groups."""
    groups, draw, left_out = list(dict.fromkeys(map(group_of, judged()))), random.Random(DRAWS), []
    for _ in range(DRAWS):
        out = draw.sample(groups, len(groups) // 3)
        unseen = planner_fit.leave_one_out(every, whole, lambda c, out=out: "out" if group_of(c) in out else c.row.id)  # type: ignore[misc]
        left_out += [(case, unseen[case.row.id]) for case in judged() if group_of(case) in out]
    return left_out


def throughput(write: bool) -> bool:
    every = cases()
    whole = planner_fit.fit(every, [np.zeros(len(PRIORS)), from_efficiencies(fitted_efficiencies())])
    seen = dict(zip([case.row.id for case in every], errors(whole, every), strict=True))
    unseen = planner_fit.leave_one_out(every, whole, group_of)
    expected = expected_errors(unseen)
    width = {name: float(f"{value:.4g}") for name, value in bands(unseen, expected).items()}
    counts = table(seen, unseen, width, expected)
    print(f"\nobjective: {planner_fit.objective(whole, every):.4f}; of the constants in {FITTED.name}: "
          f"{planner_fit.objective(from_efficiencies(fitted_efficiencies()), every):.4f}")  # fmt: skip
    for name, value in to_efficiencies(whole).to_json().items():
        print(f"  {name:14} {value:.4g}   (prior {PRIORS[name][0]:g})")
    medians, good = {}, True
    typical = {
        name: np.exp(width[name] * np.median([row[name] for row in expected.values() if name in row]))
        for name in OUTPUTS
    }
    for name in OUTPUTS:
        magnitudes = [abs(np.expm1(unseen[c.row.id][name])) for c in judged() if name in unseen[c.row.id]]
        medians[name] = float(np.median(magnitudes))
        good = good and medians[name] <= MEDIAN[name]
        print(f"{name}: {len(magnitudes)} results judged, median error of leave group out {100 * medians[name]:.1f} % "
              f"(at most {100 * MEDIAN[name]:.0f} %), band of {width[name]:.2f} expected errors "
              f"(x {typical[name]:.2f} in the middle) holds {counts[name][0]} of {counts[name][1]}")  # fmt: skip
    inside, total = (sum(count[i] for count in counts.values()) for i in (0, 1))
    print(f"bands hold {100 * inside / total:.0f} % of all {total} results judged (expected 75 to 90 %)")
    aggregated, split = [c for c in judged() if not c.row.split], [c for c in judged() if c.row.split]
    split_errors = [e["tok_s"] for e in errors(planner_fit.fit(aggregated, [whole]), split)]
    median = 100 * np.median(np.abs(np.expm1(split_errors)))
    print(f"fit on the rows without PD only: PD rows' median error {median:.1f} %")
    leaning([(case, unseen[case.row.id]) for case in judged()], "leave group out")
    leaning(thirds(every, whole), f"a third of the groups left out, {DRAWS} random draws")
    print(f"listed and not predicted: {', '.join(lead.id for lead in leads())}")
    if write:
        value = {
            "date": datetime.date.today().isoformat(),
            "fitted_on": [case.row.id for case in every],
            "efficiencies": {k: float(f"{v:.5g}") for k, v in to_efficiencies(whole).to_json().items()},
            "bands": width,
            "slope": SLOPE,
            "median_error": {name: float(f"{error:.4g}") for name, error in medians.items()},
            "unseen": {row: {k: float(f"{np.exp(v):.4g}") for k, v in e.items()} for row, e in unseen.items()},
        }
        FITTED.write_text(HEADING + yaml.safe_dump(value, sort_keys=False), encoding="utf-8")
    return good and COVERED[0] <= inside / total <= COVERED[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write plan/data/fitted.yaml")
    arguments = parser.parse_args()
    first, second = sizes(), throughput(arguments.write)
    return 0 if first and second else 1


if __name__ == "__main__":
    sys.exit(main())
