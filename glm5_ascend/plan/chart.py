"""The charts of the plan's report."""

from __future__ import annotations

from collections.abc import Iterator

from glm5_ascend.plan.memory import Memory
from glm5_ascend.plan.predict import Prediction
from glm5_ascend.plan.result import Plan
from glm5_ascend.plan.sweep import Rows
from glm5_ascend.report import charts
from glm5_ascend.report.content import Chart

_GB = "GB of one die"


def memory_chart(die: Memory) -> Chart:
    """Stacked parts of a die's memory, with the names of the terminal's report."""
    import altair as alt

    records: list[charts.Record] = []
    at = 0.0
    for name, kind, nbytes in _parts(die):
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
        x=alt.X("from:Q", title=_GB, scale=alt.Scale(domain=[0, die.total / 1e9], nice=False)),
        x2="to:Q",
        color=alt.Color("kind:N", scale=alt.Scale(domain=kinds), legend=alt.Legend(title=None)),
    )
    drawn = alt.layer(bars, charts.values_at_the_right(base)).properties(height=charts.ROW * len(records))
    return charts.finished("Memory of one die", drawn)


def _parts(die: Memory) -> Iterator[tuple[str, str, float]]:
    for name, nbytes in die.weights.items():
        if nbytes:
            yield name, "weights", float(nbytes)
    for name, amount in die.parts.items():
        if name != "weights" and amount > 0:
            yield name, "engine", amount
    if die.budget > 0:
        yield "left for the cache", "cache", die.budget
    yield "not used by the engine", "not used", die.total - die.usable


def share_chart(prediction: Prediction) -> Chart:
    """Operators of a decode step, longest first, without those below 1 %."""
    step = prediction.step_seconds
    rows = sorted(prediction.by_op.items(), key=lambda item: -item[1])
    return charts.bars(
        "What limits a decode step",
        [(name, 1e3 * s, f"{1e3 * s:.1f} ms, {100 * s / step:.0f} %") for name, s in rows if s > 0.01 * step],
        f"ms of a decode step of {1e3 * step:.0f} ms",
    )


_TPOT, _SPEED, _REQUESTS = "ms per output token (TPOT)", "output tokens per second", "requests at a time"


def load_chart(plan: Plan, rows: Rows) -> Chart:
    """Throughput over TPOT by load, with the band of the prediction; the workload and the limit on TPOT are marked.

    Args:
        rows: result of `sweep.sweep`.
    """
    import altair as alt

    tpot, speed, clients = plan.numbers["tpot_ms"], plan.numbers["output_tokens_per_s"], plan.workload.concurrency
    points = [(row["clients"], row["tpot_ms"], row["tokens_per_s"]) for row in rows if row["clients"] != clients]
    points = sorted([*points, (clients, tpot.value, speed.value)])
    low, high = speed.low / speed.value, speed.high / speed.value
    records: list[charts.Record] = [
        {_REQUESTS: number, _TPOT: x, _SPEED: y, "low": low * y, "high": high * y, "workload": number == clients,
         "shown": f"{number:g} requests: {y:,.0f} tokens/s"} for number, x, y in points
    ]  # fmt: skip
    tooltip = [
        alt.Tooltip(field=name, type="quantitative", format=".1f" if name == _TPOT else ",.0f")
        for name in (_REQUESTS, _TPOT, _SPEED, "low", "high")
    ]
    limit = 1e3 * (plan.slo.tpot or 0.0)
    width = 1.08 * max([*(x for _, x, _ in points), limit])
    x = alt.X(field=_TPOT, type="quantitative", scale=alt.Scale(domain=[0, width], nice=False))
    y = alt.Y(field=_SPEED, type="quantitative", scale=alt.Scale(zero=True), axis=alt.Axis(format=",.0f"))
    base = alt.Chart(charts.data(records)).encode(x=x)
    marked = base.transform_filter(alt.FieldEqualPredicate(field="workload", equal=True))
    layers = [
        base.mark_area(opacity=0.2).encode(y=alt.Y("low:Q", title=_SPEED), y2="high:Q"),
        base.mark_line(strokeWidth=2).encode(y=y),
        base.mark_point(filled=True, size=70, opacity=1).encode(y=y, tooltip=tooltip),
        marked.mark_point(filled=True, size=180, opacity=1, style="chosen").encode(y=y, tooltip=tooltip),
        marked.mark_text(align="left", fontWeight="bold", style="chosen")
        .encode(x=alt.value(0), y=alt.value(-10), text="shown:N"),
    ]  # fmt: skip
    if limit:
        line = alt.Chart(charts.data([{"limit": limit, "shown": f"SLO: {limit:g} ms"}]))
        position = alt.X("limit:Q", title=_TPOT)
        layers.append(line.mark_rule(strokeDash=[5, 4], strokeWidth=2, style="limit").encode(x=position))
        right = limit > width / 2
        layers.append(
            line.mark_text(align="right" if right else "left", dx=-6 if right else 6, baseline="bottom", style="limit")
            .encode(x=position, y=alt.value("height"), text="shown:N", tooltip="shown:N")
        )  # fmt: skip
    return charts.finished("Throughput and latency", alt.layer(*layers).properties(height=300))
