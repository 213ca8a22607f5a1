"""Throughput and latency of a plan's layout under other loads, and the goodput within the SLO."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from glm5_ascend.plan.efficiency import efficiencies_of
from glm5_ascend.plan.predict import predict
from glm5_ascend.plan.result import Plan
from glm5_ascend.plan.timing import Timing

#: Loads of a sweep, as shares of the workload's clients.
SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0, 1.5, 2.0, 3.0, 4.0)

Rows = list[dict[str, Any]]


def sweep(plan: Plan) -> Rows:
    """Predict the best layout with a sixteenth to four times the clients.

    `goodput` of a row: its requests per second if the mean latencies meet the SLO, else 0.
    """
    hardware, layout = plan.cluster.hardware, plan.best.layout
    timing = Timing(plan.model, hardware, efficiencies_of(hardware))
    rows: Rows = []
    for clients in sorted({max(1, round(share * plan.workload.concurrency)) for share in SHARES}):
        load = replace(plan.workload, concurrency=float(clients), rate=None, requests=None)
        sequences = max(layout.decode.sequences, -(-clients // (layout.replicas * layout.decode.dp)))
        wider = replace(layout, decode=replace(layout.decode, sequences=sequences))
        prediction = predict(plan.model, hardware, wider, timing.efficiency, load, plan.acceptance, timing)
        if prediction is None:
            continue
        rate, met = prediction.output_per_second / load.output, plan.slo.met(prediction.tpot, prediction.ttft)
        rows.append({
            "clients": clients, "requests_per_s": round(rate, 3),
            "tokens_per_s": round(prediction.output_per_second, 1), "tpot_ms": round(1e3 * prediction.tpot, 1),
            "ttft_ms": round(1e3 * prediction.ttft), "limit": prediction.bound, "slo": "met" if met else "missed",
            "goodput": round(rate, 3) if met else 0.0,
        })  # fmt: skip
    return rows


def goodput(rows: Rows) -> str:
    """One line about the highest load that meets the SLO."""
    best = max(rows, key=lambda row: float(row["goodput"]), default=None)
    if best is None or not best["goodput"]:
        return "goodput: none of these loads meets the SLO"
    return f"goodput: {best['goodput']:g} requests per second, with {best['clients']} clients"
