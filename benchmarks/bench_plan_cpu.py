"""The planner against the CPU server: tokens per second predicted from other sizes, and measured by bench_serve's load.

    OMP_NUM_THREADS=1 python benchmarks/bench_plan_cpu.py --work work/plan-cpu [--rounds 5] [--json FILE]

For the float demo model and its W4A8 output: a server; in each round 8 requests of 1024 tokens and 64 new ones by
vLLM's load generator, and before and after them the planner's measurements (`glm5-ascend plan --measure`: prompts of
single prompts of 128 to 512 tokens; 1, 2 and 4 requests of 256), so that other load affects both. Then the
hardware file of the medians, and what `glm5-ascend plan --hardware FILE` says about the 8 requests. Exit 1 where it
is more than 20 % off the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench_serve import load, server

from glm5_ascend.plan.measure import describe
from glm5_ascend.plan.measure.served import Served, Timer
from glm5_ascend.plan.model import from_directory

ALLOWED = 0.20
REQUESTS, LENGTH, NEW_TOKENS = 8, 1024, 64


def rounds_of(model: Path, rounds: int, work: Path) -> tuple[Served, list[dict[str, float]]]:
    """The planner's measurements, medians of all rounds, and what the load generator reports in each."""
    planned, single, loads = from_directory(model), [], []
    with server(model, describe.threads(), work / f"{model.name}.log") as running:
        timer = Timer(running["url"], describe.token_ids(planned))
        for number in range(rounds + 1):
            before = timer.measure(1, warm=number == 0)
            seconds = load(running["url"], model, REQUESTS, LENGTH, NEW_TOKENS, work / "load.json")
            if number:  # the first round compiles and warms up
                single += [before, timer.measure(1, warm=False)]
                result = json.loads((work / "load.json").read_text())
                loads.append({"seconds": seconds, "ttft_ms": result["mean_ttft_ms"], "tpot_ms": result["mean_tpot_ms"]})
    first = {key: statistics.median(served.first[key] for served in single) for key in single[0].first}
    step = {key: statistics.median(served.step[key] for served in single) for key in single[0].step}
    return Served(first, step, rounds), loads


def predicted(model: Path, file: Path) -> dict[str, Any]:
    """The plan by the command line."""
    workload = f"in={LENGTH},out={NEW_TOKENS},concurrency={REQUESTS},requests={REQUESTS}"
    command = [sys.executable, "-m", "glm5_ascend", "plan", model, "--hardware", file, "--workload", workload]
    done = subprocess.run([*command, "--mtp", "0", "--json"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    plan: dict[str, Any] = json.loads(done.stdout)
    return plan


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("work/plan-cpu"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    float_model, quantized = args.work / "demo", args.work / "w4a8"
    program = [sys.executable, "-m", "glm5_ascend"]
    if not float_model.exists():
        subprocess.run([*program, "demo-model", float_model], check=True)
    if not quantized.exists():
        subprocess.run([*program, "quantize", float_model, quantized, "--recipe", "w4a8", "--quiet"], check=True)
    print(f"{REQUESTS} requests of {LENGTH} tokens, {NEW_TOKENS} new ones each, {describe.threads()} thread(s)\n")
    print(f"| model | predicted tokens/s | measured, median of {args.rounds} | lowest to highest | error |")
    print("|---|---|---|---|---|")
    report, worst = {}, 0.0
    for model in (float_model, quantized):
        served, loads = rounds_of(model, args.rounds, args.work)
        file = args.work / f"{model.name}.yaml"
        describe.write(describe.describe(from_directory(model), model, served), file, replace=True)
        plan = predicted(model, file)
        predicted_speed = plan["output_tokens_per_s"]["value"]
        speeds = [REQUESTS * NEW_TOKENS / run["seconds"] for run in loads]
        median = statistics.median(speeds)
        error = predicted_speed / median - 1
        worst = max(worst, abs(error))
        spread = f"{min(speeds):.1f} to {max(speeds):.1f}"
        print(f"| {model.name} | {predicted_speed:.1f} | {median:.1f} | {spread} | {100 * error:+.1f} % |")
        report[model.name] = {"plan": plan, "loads": loads, "first": served.first, "step": served.step}
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nworst {100 * worst:.0f} %, allowed {100 * ALLOWED:.0f} %")
    if worst > ALLOWED:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
