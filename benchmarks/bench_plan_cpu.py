"""The planner against the CPU server: tokens per second predicted from other sizes, and measured by vLLM's load.

    OMP_NUM_THREADS=1 python benchmarks/bench_plan_cpu.py --work work/plan-cpu [--rounds 5]

For the float demo model and its W4A8 output: `plan measure`, then a server and in each round 8 requests of 1024 tokens
and 64 new ones by vLLM's load generator, and what `plan --hardware FILE` says about them. Exit 1 where it is more than
20 % off the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from bench_serve import load, server

from glm5_ascend.plan import plan
from glm5_ascend.serve.cores import threads

ALLOWED = 0.20
REQUESTS, LENGTH, NEW_TOKENS = 8, 1024, 64
PROGRAM = [sys.executable, "-m", "glm5_ascend"]


def measured(model: Path, rounds: int, work: Path) -> list[float]:
    """Tokens per second of each round, after one that compiles and warms up."""
    speeds = []
    with server(model, threads(), work / f"{model.name}.log") as running:
        for _ in range(rounds + 1):
            seconds = load(running["url"], model, REQUESTS, LENGTH, NEW_TOKENS, work / "load.json")
            speeds.append(REQUESTS * NEW_TOKENS / seconds)
    return speeds[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("work/plan-cpu"))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    float_model, quantized = args.work / "demo", args.work / "w4a8"
    if not float_model.exists():
        subprocess.run([*PROGRAM, "demo-model", float_model], check=True)
    if not quantized.exists():
        subprocess.run([*PROGRAM, "quantize", float_model, quantized, "--recipe", "w4a8", "--quiet"], check=True)
    print("| model | predicted tokens/s | measured, median | lowest to highest | error |\n|---|---|---|---|---|")
    worst = 0.0
    for model in (float_model, quantized):
        file = args.work / f"{model.name}.yaml"
        file.unlink(missing_ok=True)
        subprocess.run([*PROGRAM, "plan", "measure", model, "--out", file], check=True)
        workload = f"in={LENGTH},out={NEW_TOKENS},concurrency={REQUESTS},requests={REQUESTS}"
        answer = plan(model, hardware=str(file), layout="tp=1", mtp=0, workload=workload).to_dict()
        predicted, speeds = answer["output_tokens_per_s"]["value"], measured(model, args.rounds, args.work)
        median = statistics.median(speeds)
        worst = max(worst, abs(predicted / median - 1))
        spread = f"{min(speeds):.1f} to {max(speeds):.1f}"
        print(f"| {model.name} | {predicted:.1f} | {median:.1f} | {spread} | {100 * (predicted / median - 1):+.1f} % |")
        print(json.dumps(answer["decode_step_ms"]), file=sys.stderr)
    print(f"\nworst {100 * worst:.0f} %, allowed {100 * ALLOWED:.0f} %")
    if worst > ALLOWED:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
