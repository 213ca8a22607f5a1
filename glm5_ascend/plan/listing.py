"""Every public result the planner knows, and what it says to each: `plan --baselines`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from glm5_ascend.plan.baselines import BaselineRow, leads, load_rows
from glm5_ascend.plan.efficiency import fitted
from glm5_ascend.report.terminal import show

if TYPE_CHECKING:
    from rich.console import Console

_UNITS = {"tok_s": ("tokens/s", 1.0), "ttft": ("TTFT ms", 1e3), "tpot": ("TPOT ms", 1e3)}


def rows() -> Iterator[dict[str, Any]]:
    """One for each output of a row: what was measured, its source, and the error of a fit that had not seen it."""
    for row in load_rows():
        for name, value in row.measured().items():
            unit, scale = _UNITS[name]
            unseen = fitted().unseen.get(row.id, {}).get(name)
            yield {
                "id": row.id, "case": row.case, "engine": row.engine, "layout": _layout(row), "unit": unit,
                "measured": float(f"{scale * value:.5g}"), "unseen_ratio": unseen, "weight": row.weight,
                "source": f"{row.source}, {row.version}", "date": row.date.isoformat(), "note": row.note,
            }  # fmt: skip


def to_json() -> dict[str, Any]:
    """What `plan --baselines --json` prints."""
    other = [lead.model_dump(mode="json") for lead in leads()]
    return {"schema_version": 1, "command": "plan", "ok": True, "exit_code": 0, "rows": list(rows()), "leads": other}


def show_baselines(console: Console) -> None:
    """A table for a terminal, and the numbers that cannot be predicted."""
    head = ("row", "measured", "unit", "planner, unseen", "weight", "layout", "source")
    show([head, *map(_line, rows())], console, right=(1, 3, 4))
    console.print()
    told = [(lead.id, f"{lead.said} ({lead.source}, {lead.date}; {lead.why})") for lead in leads()]
    show([("not predicted", ""), *told], console)


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    ratio = row["unseen_ratio"]
    error = "" if ratio is None else f"{100 * (ratio - 1):+.0f} %"
    note = f"; {row['note']}" if row["note"] else ""
    return (row["id"], f"{row['measured']:,.5g}", row["unit"], error, f"{row['weight']:g}", row["layout"],
            f"{row['source']}, {row['date']}{note}")  # fmt: skip


def _layout(row: BaselineRow) -> str:
    own = f"{row.nodes} x {row.hardware} TP{row.tp} DP{row.dp}" + (f" PP{row.pp}" if row.pp > 1 else "")
    if row.prefill_tp is None:
        return own
    stages = f" PP{row.prefill_pp}" if row.prefill_pp > 1 else ""
    return f"{own}, {row.prefills} x P TP{row.prefill_tp} DP{row.prefill_dp}{stages}"
