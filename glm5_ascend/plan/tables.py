"""What planners ask beside the best layout: how much load keeps the SLO, and what other machines would do."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from glm5_ascend.errors import OutputError, PlanError
from glm5_ascend.plan.command import PlanRequest, run
from glm5_ascend.plan.efficiency import efficiencies_of
from glm5_ascend.plan.predict import predict
from glm5_ascend.plan.result import Plan
from glm5_ascend.plan.spending import ENERGY, WHOLE
from glm5_ascend.plan.timing import Timing

#: Loads of a sweep, in shares of the workload's clients.
SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0, 1.5, 2.0, 3.0, 4.0)
#: What a what-if table varies: nodes by factors, context by factors, weights.
FACTORS, QUANTS = (0.5, 1.0, 2.0), ("w4a8", "w8a8", "bf16")

Rows = list[dict[str, Any]]


def sweep(plan: Plan) -> Rows:
    """The chosen layout from a sixteenth to four times the clients.

    `goodput`: requests per second that are answered within the SLO, on the mean: all of them or none.
    """
    hardware, layout = plan.cluster.hardware, plan.chosen.layout
    timing = Timing(plan.model, hardware, efficiencies_of(hardware))
    rows: Rows = []
    for clients in sorted({max(1, round(share * plan.workload.concurrency)) for share in SHARES}):
        load = replace(plan.workload, concurrency=float(clients), rate=None, requests=None)
        needed = max(layout.decode.sequences, -(-clients // (layout.replicas * layout.decode.dp)))
        wider = replace(layout, decode=replace(layout.decode, sequences=needed))
        found = predict(plan.model, hardware, wider, timing.efficiency, load, plan.acceptance, timing)
        if found is None:
            continue
        rate, met = found.output_per_second / load.output, plan.slo.met(found.tpot, found.ttft)
        rows.append({
            "clients": clients, "requests_per_s": round(rate, 3), "tokens_per_s": round(found.output_per_second, 1),
            "tpot_ms": round(1e3 * found.tpot, 1), "ttft_ms": round(1e3 * found.ttft), "limit": found.bound,
            "slo": "met" if met else "missed", "goodput": round(rate, 3) if met else 0.0,
        })  # fmt: skip
    return rows


def goodput(rows: Rows) -> str:
    """The most that keeps the SLO, in a sentence."""
    best = max(rows, key=lambda row: float(row["goodput"]), default=None)
    if best is None or not best["goodput"]:
        return "goodput: none of these loads keeps the SLO"
    return f"goodput: {best['goodput']:g} requests per second, with {best['clients']} clients"


def what_if(request: PlanRequest) -> Iterator[dict[str, Any]]:
    """Half and twice the nodes, other weights, half and twice the context: the best layout of each."""
    nodes = sorted({max(1, round(request.nodes * factor)) for factor in FACTORS})
    quants = (request.quant,) if request.directory else tuple(dict.fromkeys((request.quant, *QUANTS)))
    for number in nodes:
        for quant in quants:
            for factor in FACTORS:
                load = _longer(request.workload, factor)
                row: dict[str, Any] = {"nodes": number, "quant": quant, "prompt": load[0]}
                try:
                    made = run(replace(request, nodes=number, quant=quant, workload=load[1], layout=None))
                except PlanError as error:
                    yield row | {"layout": "does not fit" if "does not fit" in error.message else error.message}
                    continue
                told = made.numbers
                yield row | {
                    "layout": str(made.chosen.layout), "tokens_per_s": round(told["output_tokens_per_s"].value),
                    "tpot_ms": round(told["tpot_ms"].value, 1), "ttft_ms": round(told["ttft_ms"].value),
                    "slo": "met" if made.within_slo else "missed",
                    **({"cost_per_million": round(told[WHOLE].value, 3)} if WHOLE in told else {}),
                    **({"kwh_per_million": round(told[ENERGY].value, 3)} if ENERGY in told else {}),
                }  # fmt: skip


def _longer(workload: str, factor: float) -> tuple[int, str]:
    """(prompt tokens, the workload with a prompt so many times as long)."""
    parts = [part.partition("=") for part in workload.split(",")]
    tokens = {key.strip(): value for key, _, value in parts}
    try:
        prompt = max(1, round(float(tokens["in"]) * factor))
    except (KeyError, ValueError):
        return 0, workload  # refused in words by whoever reads it
    return prompt, ",".join(f"{key.strip()}={prompt if key.strip() == 'in' else value}" for key, _, value in parts)


def cells(rows: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A heading and the rows, for a terminal; the layout, which is long, last."""
    names = [name for name in dict.fromkeys(key for row in rows for key in row) if name != "layout"]
    names += ["layout"] if any("layout" in row for row in rows) else []
    return [tuple(names), *(tuple(str(row.get(name, "")) for name in names) for row in rows)]


def write_csv(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Raises `OutputError` if the file is there or cannot be made."""
    if path.exists():
        raise OutputError(f"{path} exists already", "name another file, or remove it")
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(cells(rows))
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}", "name another file") from None
