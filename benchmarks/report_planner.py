"""Check the planner against every public number, and fit its seven constants again.

    python benchmarks/report_planner.py            # tables; exit 1 where a limit is missed
    python benchmarks/report_planner.py --write    # and write the constants and the errors to plan/data/fitted.yaml

Sizes must agree within 1 %. Throughput, TTFT and TPOT are predicted for each row by a fit that saw neither the row nor
any other of its group (the same workload on the same layout, as GLM-5.1 and 5.2 both have). Other engines' rows and
those that contradict themselves weigh less in the fit and are shown, not judged.
"""

from __future__ import annotations

import argparse
import datetime
import random
import sys
from pathlib import Path

import numpy as np
import yaml

from glm5_ascend.plan import distance, fitting, known
from glm5_ascend.plan.baselines import OUTPUTS, Baseline, cases, judged, leads
from glm5_ascend.plan.efficiency import fitted_efficiencies

FITTED = Path(__file__).parents[1] / "glm5_ascend" / "plan" / "data" / "fitted.yaml"
HEADING = """\
# yaml-language-server: $schema=schemas/fitted.json
# Written by benchmarks/report_planner.py --write. `bands`: half widths of a prediction's logarithm.
# `unseen`: predicted / measured by a fit that saw neither the row nor another of its group.
"""
#: The band printed with a prediction is meant to hold this share of rows not seen.
BAND = 0.8
#: By how much of itself a band grows with each unit of distance. Chosen, not fitted: the rows show little of it.
SLOPE = 0.15
#: Rows are prompt-heavy from so many computed prompt tokens for each output token. How often a third is left out.
HEAVY, DRAWS = 3.0, 20
SIZES, COVERED = 0.01, (0.75, 0.9)
MEDIAN = {"tok_s": 0.12, "ttft": 0.20, "tpot": 0.20}
Errors = dict[str, dict[str, float]]


def sizes() -> bool:
    print("| what | known | planner | error | source |\n|---|---|---|---|---|")
    worst = 0.0
    for item in known.sizes():
        error = item.computed / item.known - 1
        worst = max(worst, abs(error))
        known_value, computed = f"{item.known:,.6g} {item.unit}", f"{item.computed:,.6g} {item.unit}"
        print(f"| {item.what} | {known_value} | {computed} | {100 * error:+.2f} % | {item.source} |")
    print(f"\nworst {100 * worst:.2f} %, allowed {100 * SIZES:.0f} %\n")
    return worst <= SIZES


def quantile(scores: list[float]) -> float:
    """The score that holds BAND of rows not seen (split-conformal: one more row than there are)."""
    place = min(len(scores), int(np.ceil(BAND * (len(scores) + 1))))
    return sorted(scores)[place - 1]


def group_of(case: Baseline) -> object:
    return case.row.group_key()


def spreads(unseen: Errors) -> Errors:
    """What to expect of each row, by the errors of the other groups' rows."""
    rows = distance.misses({row: {k: float(np.exp(v)) for k, v in found.items()} for row, found in unseen.items()})
    found = {}
    for case in cases():
        others = [miss for miss in rows if miss.group != group_of(case)]
        here = distance.place_of(case)
        found[case.row.id] = {name: distance.spread(name, here, others) for name in case.row.measured()}
    return found


def bands(unseen: Errors, expected: Errors) -> dict[str, float]:
    """Half widths in what is expected, by output."""
    found = {}
    for name in OUTPUTS:
        of = [case.row.id for case in judged() if name in unseen[case.row.id]]
        found[name] = quantile([abs(unseen[row][name]) / expected[row][name] for row in of])
    found["tpot"] = max(found["tpot"], found["tok_s"])  # few rows say it; throughput is mostly TPOT
    return found


def table(seen: Errors, unseen: Errors, width: dict[str, float], expected: Errors) -> dict[str, tuple[int, int]]:
    """Prints every row and output; returns (inside, of) by output, of the rows judged."""
    counts = {name: [0, 0] for name in OUTPUTS}
    wanted = {case.row.id for case in judged()}
    head = ("row", "weight", "output", "measured", "planner", "leave group out", "band", "in band")
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for case in cases():
        for name, value in case.row.measured().items():
            error = unseen[case.row.id][name]
            inside = abs(error) <= width[name] * expected[case.row.id][name]
            if case.row.id in wanted:
                counts[name] = [counts[name][0] + inside, counts[name][1] + 1]
            scale = 1.0 if name == "tok_s" else 1e3
            unit = "tok/s" if name == "tok_s" else f"{name.upper()} ms"
            planner = scale * value * np.exp(seen[case.row.id][name])
            factor, told = np.exp(width[name] * expected[case.row.id][name]), "yes" if inside else "**no**"
            print(f"| {case.row.case} | {case.row.weight:g} | {unit} | {scale * value:,.4g} | {planner:,.4g} "
                  f"| {100 * np.expm1(error):+.0f} % | x {factor:.2f} | {told} |")  # fmt: skip
    return {name: (inside, of) for name, (inside, of) in counts.items()}


def optimism(name: str, error: float) -> float:
    """Positive where the planner promises more than was measured: more tokens, or less time."""
    return error if name == "tok_s" else -error


def leaning(errors_of: list[tuple[Baseline, dict[str, float]]], title: str) -> None:
    """Prints medians of the rows judged, without and with their sign; heavy: much prompt for each output token."""
    print(f"{title} (median error; median with its sign, + is optimistic; of prompt-heavy rows):")
    for name in OUTPUTS:
        told = [(case, optimism(name, found[name])) for case, found in errors_of if name in found]
        heavy = [error for case, error in told if case.workload.fresh > HEAVY * case.workload.output]
        every = [error for _, error in told]
        typical, side, there = (
            100 * float(np.expm1(np.median(values))) for values in (np.abs(every), every, heavy or [0.0])
        )
        print(f"  {name:5} {len(every):3} errors: {typical:.1f} %, {side:+.1f} %; {len(heavy)} heavy: {there:+.1f} %")


def thirds(every: tuple[Baseline, ...], whole: fitting.Vector) -> list[tuple[Baseline, dict[str, float]]]:
    """Errors of rows judged where a third of all groups, drawn at random, was left out together; DRAWS times."""
    groups, draw, found = list(dict.fromkeys(map(group_of, judged()))), random.Random(DRAWS), []
    for _ in range(DRAWS):
        out = draw.sample(groups, len(groups) // 3)
        unseen = fitting.leave_one_out(every, whole, lambda c, out=out: "out" if group_of(c) in out else c.row.id)  # type: ignore[misc]
        found += [(case, unseen[case.row.id]) for case in judged() if group_of(case) in out]
    return found


def throughput(write: bool) -> bool:
    every = cases()
    whole = fitting.fit(every, [np.zeros(len(fitting.PRIORS)), fitting.from_efficiencies(fitted_efficiencies())])
    seen = dict(zip([case.row.id for case in every], fitting.errors(whole, every), strict=True))
    unseen = fitting.leave_one_out(every, whole, group_of)
    expected = spreads(unseen)
    width = {name: float(f"{value:.4g}") for name, value in bands(unseen, expected).items()}
    counts = table(seen, unseen, width, expected)
    print(f"\nobjective: {fitting.objective(whole, every):.4f}; of the constants in {FITTED.name}: "
          f"{fitting.objective(fitting.from_efficiencies(fitted_efficiencies()), every):.4f}")  # fmt: skip
    for name, value in fitting.to_efficiencies(whole).to_json().items():
        print(f"  {name:14} {value:.4g}   (prior {fitting.PRIORS[name][0]:g})")
    medians, good = {}, True
    typical = {
        name: np.exp(width[name] * np.median([found[name] for found in expected.values() if name in found]))
        for name in OUTPUTS
    }
    for name in OUTPUTS:
        found = [abs(np.expm1(unseen[c.row.id][name])) for c in judged() if name in unseen[c.row.id]]
        medians[name] = float(np.median(found))
        good = good and medians[name] <= MEDIAN[name]
        print(f"{name}: {len(found)} results judged, median error of leave group out {100 * medians[name]:.1f} % "
              f"(wanted {100 * MEDIAN[name]:.0f} %), band of {width[name]:.2f} expected errors "
              f"(x {typical[name]:.2f} in the middle) holds {counts[name][0]} of {counts[name][1]}")  # fmt: skip
    held, of = (sum(count[i] for count in counts.values()) for i in (0, 1))
    print(f"bands hold {100 * held / of:.0f} % of all {of} results judged (wanted 75 to 90 %)")
    two, split = [c for c in judged() if not c.row.split], [c for c in judged() if c.row.split]
    ahead = [e["tok_s"] for e in fitting.errors(fitting.fit(two, [whole]), split)]
    print(f"fit on the rows without PD only: PD rows' median error {100 * np.median(np.abs(np.expm1(ahead))):.1f} %")
    leaning([(case, unseen[case.row.id]) for case in judged()], "leave group out")
    leaning(thirds(every, whole), f"a third of the groups left out, {DRAWS} random draws")
    print(f"listed and not predicted: {', '.join(lead.id for lead in leads())}")
    if write:
        value = {
            "date": datetime.date.today().isoformat(),
            "fitted_on": [case.row.id for case in every],
            "efficiencies": {k: float(f"{v:.5g}") for k, v in fitting.to_efficiencies(whole).to_json().items()},
            "bands": width,
            "slope": SLOPE,
            "median_error": {name: float(f"{error:.4g}") for name, error in medians.items()},
            "unseen": {row: {k: float(f"{np.exp(v):.4g}") for k, v in e.items()} for row, e in unseen.items()},
        }
        FITTED.write_text(HEADING + yaml.safe_dump(value, sort_keys=False), encoding="utf-8")
    return good and COVERED[0] <= held / of <= COVERED[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write plan/data/fitted.yaml")
    arguments = parser.parse_args()
    first, second = sizes(), throughput(arguments.write)
    return 0 if first and second else 1


if __name__ == "__main__":
    sys.exit(main())
