"""The charts of the reports as Vega-Lite specifications, made by Altair. page.js defines the colours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from glm5_ascend.report.content import Chart

if TYPE_CHECKING:
    import altair as alt

Record = Mapping[str, str | float | bool | None]
#: Height of a row of bars, pixels.
ROW = 26


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % interval (None: unknown) and its text."""

    label: str
    value: float
    interval: tuple[float, float] | None
    text: str


def finished(title: str, chart: Any) -> Chart:
    """A chart as wide as the page."""
    value = chart.properties(
        width="container",
        autosize={"type": "fit-x", "contains": "padding"},
        padding={"left": 4, "right": 12, "top": 8, "bottom": 4},
    ).to_dict()
    for key in ("$schema", "config"):  # the page has its own
        value.pop(key, None)
    return Chart(title, value)


def data(records: Sequence[Record]) -> alt.Data:
    """Data of a chart; numbers with 5 digits."""
    import altair as alt

    values = [{key: _short(value) for key, value in record.items()} for record in records]
    return alt.Data(values=values)  # type: ignore[no-untyped-call]


def _short(value: str | float | bool | None) -> str | float | bool | None:
    if not isinstance(value, float):
        return value
    return float(f"{value:.5g}") if math.isfinite(value) else None


def rows_axis(name: str = "label") -> alt.Y:
    """Axis with one row per name, in the order of the data."""
    import altair as alt

    return alt.Y(f"{name}:N", sort=None, title=None, axis=alt.Axis(ticks=False, domain=False, labelPadding=8))


def values_at_the_right(base: alt.Chart) -> alt.Chart:
    """The text `shown` of every row, to the right of the plot, where it does not cover a mark."""
    import altair as alt

    text: alt.Chart = base.mark_text(align="left", dx=8, style="value").encode(x=alt.value("width"), text="shown:N")
    return text


def bars(title: str, rows: Sequence[tuple[str, float, str]], axis: str, percent: bool = False) -> Chart:
    """Horizontal bars of (label, value >= 0, text of the value); `axis` names the value and its unit."""
    import altair as alt

    form = ".3~%" if percent else ".4~g"
    records: list[Record] = [{"label": label, axis: value, "shown": text} for label, value, text in rows]
    base = alt.Chart(data(records)).encode(
        y=rows_axis(), tooltip=[alt.Tooltip("label:N", title="of"), alt.Tooltip("shown:N", title=axis)]
    )
    drawn = base.mark_bar(height={"band": 0.7}).encode(
        x=alt.X(field=axis, type="quantitative", scale=alt.Scale(zero=True), axis=alt.Axis(format=form))
    )
    layers = alt.layer(drawn, values_at_the_right(base)).properties(height=ROW * len(records))
    return finished(title, layers)


def intervals(title: str, rows: Sequence[Interval], axis: str, percent: bool = False) -> Chart:
    """A dot per value and a band per interval, on one axis that includes zero."""
    import altair as alt

    records = [
        {"label": row.label, "value": row.value, "low": row.interval[0] if row.interval else None,
         "high": row.interval[1] if row.interval else None, "shown": row.text} for row in rows
    ]  # fmt: skip
    form = ".3~%" if percent else ".4~g"
    tooltip = [
        alt.Tooltip("label:N", title="of"),
        alt.Tooltip("shown:N", title="value"),
        alt.Tooltip("low:Q", title="95 % from", format=form),
        alt.Tooltip("high:Q", title="to", format=form),
    ]
    base = alt.Chart(data(records)).encode(y=rows_axis(), tooltip=tooltip)
    x = alt.X("value:Q", title=axis, scale=alt.Scale(zero=True), axis=alt.Axis(format=form))
    has_interval = alt.FieldValidPredicate(field="low", valid=True)
    band = (
        base.transform_filter(has_interval)
        .mark_bar(height=9, opacity=0.4, cornerRadius=4)
        .encode(x=alt.X("low:Q", title=axis), x2="high:Q")
    )
    dot = base.mark_point(filled=True, size=80, opacity=1).encode(x=x)
    zero = alt.Chart(data([{"value": 0}])).mark_rule().encode(x="value:Q")
    layers = alt.layer(zero, band, dot, values_at_the_right(base)).properties(height=ROW * len(records))
    return finished(title, layers)


def columns(title: str, values: Sequence[float], name: str, axis: str) -> Chart:
    """Columns of values, numbered from 0; `name` is the title of the numbers."""
    import altair as alt

    records = [{name: index, axis: value} for index, value in enumerate(values)]
    x = alt.X(field=name, type="ordinal", axis=alt.Axis(labelAngle=0))
    y = alt.Y(field=axis, type="quantitative", scale=alt.Scale(zero=True))
    tooltip = [alt.Tooltip(field=name, type="ordinal"), alt.Tooltip(field=axis, type="quantitative", format=".4~g")]
    drawn = alt.Chart(data(records)).mark_bar().encode(x=x, y=y, tooltip=tooltip).properties(height=180)
    return finished(title, drawn)
