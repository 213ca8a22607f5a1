"""The charts of the plan's report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from glm5_ascend.plan.frontier import Point
from glm5_ascend.plan.memory import Memory
from glm5_ascend.plan.predict import Prediction
from glm5_ascend.plan.result import Range
from glm5_ascend.plan.workload import Slo
from glm5_ascend.report import charts
from glm5_ascend.report.content import Chart

_GB = "GB of one die"


def memory_chart(held: Memory) -> Chart:
    """What takes the memory of a die, one part after the other from zero to its whole; names as in the terminal."""
    import altair as alt

    records: list[charts.Record] = []
    at = 0.0
    for name, kind, nbytes in _parts(held):
        end = at + nbytes
        records.append(
            {"label": name, "kind": kind, "from": at / 1e9, "to": end / 1e9, "shown": f"{nbytes / 1e9:.2f} GB"}
        )
        at = end
    base = alt.Chart(charts.data(records)).encode(
        y=charts.rows_axis(),
        tooltip=[alt.Tooltip("label:N", title="of"), alt.Tooltip("shown:N", title="size"), alt.Tooltip("kind:N")],
    )
    kinds = list(dict.fromkeys(str(record["kind"]) for record in records))
    bars = base.mark_bar(height={"band": 0.7}, minBandSize=1).encode(
        x=alt.X("from:Q", title=_GB, scale=alt.Scale(domain=[0, held.total / 1e9], nice=False)),
        x2="to:Q",
        color=alt.Color("kind:N", scale=alt.Scale(domain=kinds), legend=alt.Legend(title=None)),
    )
    drawn = alt.layer(bars, charts.values_at_the_right(base)).properties(height=charts.ROW * len(records))
    return charts.finished("Memory of one die", drawn, records)


def _parts(held: Memory) -> Iterator[tuple[str, str, float]]:
    for name, nbytes in held.weights.items():
        if nbytes:
            yield name, "weights", float(nbytes)
    for name, amount in held.parts.items():
        if name != "weights" and amount > 0:
            yield name, "engine", amount
    if held.budget > 0:
        yield "left for the cache", "cache", held.budget
    yield "not used by the engine", "not used", held.total - held.usable


def share_chart(prediction: Prediction) -> Chart:
    """Operators of a decode step, longest first; those below 1 % are left out."""
    step = prediction.step_seconds
    rows = sorted(prediction.by_op.items(), key=lambda item: -item[1])
    return charts.bars(
        "What limits a decode step",
        [(name, 1e3 * s, f"{1e3 * s:.1f} ms, {100 * s / step:.0f} %") for name, s in rows if s > 0.01 * step],
        f"ms of a decode step of {1e3 * step:.0f} ms",
    )


def goodput_chart(rows: Sequence[dict[str, Any]]) -> Chart:
    """Requests per second over clients: all that are answered, and those within the SLO, from `tables.sweep`."""
    import altair as alt

    clients, rate = "clients", "requests per second"
    records: list[charts.Record] = [
        {clients: row["clients"], rate: row[key], "kind": kind, "TPOT ms": row["tpot_ms"], "TTFT ms": row["ttft_ms"]}
        for key, kind in (("requests_per_s", "answered"), ("goodput", "within the SLO"))
        for row in rows
    ]
    told = [alt.Tooltip(field=name, type="quantitative") for name in (clients, rate, "TPOT ms", "TTFT ms")]
    drawn = alt.Chart(charts.data(records)).mark_line(point=True, interpolate="linear").encode(
        x=alt.X(field=clients, type="quantitative", scale=alt.Scale(type="log", base=2)),
        y=alt.Y(field=rate, type="quantitative", scale=alt.Scale(zero=True)),
        color=alt.Color("kind:N", legend=alt.Legend(title=None)),
        strokeDash=alt.StrokeDash("kind:N", legend=alt.Legend(title=None)), tooltip=told,
    )  # fmt: skip
    return charts.finished("Goodput by load", drawn.properties(height=260), records)


_TPOT, _SPEED, _REQUESTS = "ms per output token (TPOT)", "output tokens per second", "requests at a time"


def frontier_chart(points: Sequence[Point], band: Range, slo: Slo) -> Chart:
    """Tokens per second over milliseconds per token, and the band; this workload and a limit on TPOT are marked."""
    import altair as alt

    low, high = band.low / band.value, band.high / band.value
    records: list[charts.Record] = [
        {_REQUESTS: p.concurrency, _TPOT: p.tpot_ms, _SPEED: p.output_per_second, "low": low * p.output_per_second,
         "high": high * p.output_per_second, "chosen": p.chosen,
         "shown": f"{p.concurrency:g} requests: {p.output_per_second:,.0f} tokens/s"} for p in points
    ]  # fmt: skip
    told = [
        alt.Tooltip(field=name, type="quantitative", format=".1f" if name == _TPOT else ",.0f")
        for name in (_REQUESTS, _TPOT, _SPEED, "low", "high")
    ]
    most = 1.08 * max([*(p.tpot_ms for p in points), 1e3 * (slo.tpot or 0.0)])
    x = alt.X(field=_TPOT, type="quantitative", scale=alt.Scale(domain=[0, most], nice=False))
    y = alt.Y(field=_SPEED, type="quantitative", scale=alt.Scale(zero=True), axis=alt.Axis(format=",.0f"))
    base = alt.Chart(charts.data(records)).encode(x=x)
    layers = [
        base.mark_area(opacity=0.2).encode(y=alt.Y("low:Q", title=_SPEED), y2="high:Q"),
        base.mark_line(strokeWidth=2).encode(y=y),
        base.mark_point(filled=True, size=70, opacity=1).encode(y=y, tooltip=told),
        base.transform_filter(alt.FieldEqualPredicate(field="chosen", equal=True))
        .mark_point(filled=True, size=180, opacity=1, style="chosen").encode(y=y, tooltip=told),
        base.transform_filter(alt.FieldEqualPredicate(field="chosen", equal=True))
        .mark_text(align="left", fontWeight="bold", style="chosen")
        .encode(x=alt.value(0), y=alt.value(-10), text="shown:N"),
    ]  # fmt: skip
    if slo.tpot:
        limit = alt.Chart(charts.data([{"limit": 1e3 * slo.tpot, "shown": f"SLO: {1e3 * slo.tpot:g} ms"}]))
        where = alt.X("limit:Q", title=_TPOT)
        layers.append(limit.mark_rule(strokeDash=[5, 4], strokeWidth=2, style="limit").encode(x=where))
        near = 1e3 * slo.tpot > most / 2
        layers.append(
            limit.mark_text(align="right" if near else "left", dx=-6 if near else 6, baseline="bottom", style="limit")
            .encode(x=where, y=alt.value("height"), text="shown:N", tooltip="shown:N")
        )  # fmt: skip
    return charts.finished("Throughput and latency", alt.layer(*layers).properties(height=300), records)
