"""Check the planner against every public number, and fit its six constants again.

    python benchmarks/report_planner.py            # tables; exit 1 where a limit is missed
    python benchmarks/report_planner.py --write    # and write the constants and the errors to plan/data/fitted.yaml

Sizes must agree within 1 %. Throughput is predicted for each row by a fit that saw neither the row nor any other of its
group (the same workload on the same layout, as GLM-5.1 and 5.2 both have). Rows that contradict each other by the rule
printed are shown, not judged.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from pathlib import Path

import numpy as np
import yaml

from glm5_ascend.plan import fitting, known
from glm5_ascend.plan.baselines import CONSISTENT, Baseline, cases, inconsistent
from glm5_ascend.plan.efficiency import fitted_efficiencies

FITTED = Path(__file__).parents[1] / "glm5_ascend" / "plan" / "data" / "fitted.yaml"
HEADING = """\
# yaml-language-server: $schema=schemas/fitted.json
# Written by benchmarks/report_planner.py --write. `band`: half width of a prediction's logarithm.
# `unseen`: predicted / measured by a fit that saw neither the row nor another of its group.
"""
#: Of the consistent rows' errors: the band printed with a prediction holds this share of them.
BAND = 0.9
SIZES, MEDIAN, FLOOR, COVERED = 0.01, 0.15, 0.25, 0.8


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


def quantile(errors: list[float]) -> float:
    """The error that holds BAND of rows not seen (split-conformal: one more row than there are)."""
    place = min(len(errors), int(np.ceil(BAND * (len(errors) + 1))))
    return sorted(errors)[place - 1]


def group_of(case: Baseline) -> object:
    return case.row.group_key()


def throughput(write: bool) -> bool:
    contradicted = inconsistent()
    good = [case for case in cases() if case.row.id not in contradicted]
    whole = fitting.fit(good)
    seen = dict(zip([case.row.id for case in cases()], fitting.residuals(whole, cases()), strict=True))
    one = fitting.leave_one_out(good, whole, lambda case: case.row.id)
    group = fitting.leave_one_out(good, whole, group_of)
    judged = group | {row: float(seen[row]) for row in contradicted}  # these are in no fit: always unseen
    band = quantile([abs(value) for value in group.values()])
    print("| row | measured | planner | leave one out | leave group out | in band |\n|---|---|---|---|---|---|")
    for case in cases():
        row, alone = case.row, f"{100 * np.expm1(one[case.row.id]):+.0f} %" if case.row.id in one else ""
        pair = f"{100 * np.expm1(judged[row.id]):+.0f} %" + (" (contradicted)" if row.id in contradicted else "")
        inside = "yes" if abs(judged[row.id]) <= band else "**no**"
        planner = row.out_tok_s * np.exp(seen[row.id])
        print(f"| {row.case} | {row.out_tok_s:,.0f} | {planner:,.0f} | {alone} | {pair} | {inside} |")
    shipped = fitting.from_efficiencies(fitted_efficiencies())
    print(f"\nobjective: {fitting.objective(whole, good):.4f}; of the constants in {FITTED.name}: "
          f"{fitting.objective(shipped, good):.4f}")  # fmt: skip
    medians = [float(np.median(np.abs(np.expm1(list(found.values()))))) for found in (one, group)]
    covered = float(np.mean([abs(value) <= band for value in judged.values()]))
    print(f"\ncontradicted: same machine, layout and workload, GLM-5.1 and 5.2 more than {CONSISTENT:g} times apart")
    for name, value in fitting.to_efficiencies(whole).to_json().items():
        print(f"  {name:14} {value:.4g}   (prior {fitting.PRIORS[name][0]:g})")
    print(f"median error: leave one out {100 * medians[0]:.1f} %, leave group out {100 * medians[1]:.1f} %"
          f" (wanted {100 * MEDIAN:.0f} %, floor {100 * FLOOR:.0f} %)")  # fmt: skip
    wanted = f"(wanted {100 * COVERED:.0f} %)"
    print(f"band: factor {np.exp(band):.3f}; holds {100 * covered:.0f} % of all {len(judged)} rows {wanted}")
    two, split = [c for c in good if not c.row.split and c.row.nodes <= 2], [c for c in good if c.row.split]
    narrow = fitting.fit(two, [whole, np.zeros_like(whole)])
    ahead = np.expm1(fitting.residuals(narrow, split))
    print("fit on the rows without PD only, PD rows predicted: "
          + ", ".join(f"{c.row.id} {100 * e:+.0f} %" for c, e in zip(split, ahead, strict=True))
          + f"; median {100 * np.median(np.abs(ahead)):.1f} %")  # fmt: skip
    if write:
        value = {
            "date": datetime.date.today().isoformat(),
            "fitted_on": [case.row.id for case in good],
            "contradicted": sorted(contradicted),
            "efficiencies": {k: float(f"{v:.5g}") for k, v in fitting.to_efficiencies(whole).to_json().items()},
            "band": float(f"{band:.4g}"),
            "median_error": float(f"{medians[1]:.4g}"),
            "unseen": {row: float(f"{np.exp(error):.4g}") for row, error in judged.items()},
        }
        FITTED.write_text(HEADING + yaml.safe_dump(value, sort_keys=False), encoding="utf-8")
    return medians[1] <= MEDIAN and covered >= COVERED


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write plan/data/fitted.yaml")
    arguments = parser.parse_args()
    first, second = sizes(), throughput(arguments.write)
    return 0 if first and second else 1


if __name__ == "__main__":
    sys.exit(main())
