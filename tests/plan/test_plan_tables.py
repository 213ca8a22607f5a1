"""Tables of a plan: a load sweep with its goodput, and what other machines would do."""

from __future__ import annotations

import csv
import itertools
import json
from pathlib import Path

import pytest

from glm5_ascend.cli import run
from glm5_ascend.plan import plan
from glm5_ascend.plan.tables import goodput, sweep

ASKED = [
    "plan",
    "--model",
    "glm-5.1",
    "--quant",
    "w8a8",
    "--nodes",
    "2",
    "--workload",
    "in=3500,out=1500,concurrency=64",
]


def test_goodput_is_the_most_that_keeps_the_slo() -> None:
    made = plan(
        model="glm-5.1", quant="w8a8", nodes=2, slo="tpot=40ms", workload="in=3500,out=1500,concurrency=64"
    ).plan
    rows = sweep(made)
    speeds, waits = ([row[name] for row in rows] for name in ("tokens_per_s", "tpot_ms"))
    assert len(rows) >= 8
    for numbers in (speeds, waits):  # where it is saturated nothing grows
        assert all(after >= 0.98 * before for before, after in itertools.pairwise(numbers))
    for row in rows:
        assert row["slo"] == ("met" if row["tpot_ms"] <= 40 else "missed")
    best = max(row["requests_per_s"] for row in rows if row["slo"] == "met")
    assert f"goodput: {best:g} requests" in goodput(rows)
    assert "none" in goodput([row | {"goodput": 0.0} for row in rows])


def test_the_sweep_is_drawn_where_there_is_a_limit(tmp_path: Path) -> None:
    for name, slo in (("with.html", "tpot=40ms"), ("without.html", None)):
        plan(nodes=2, quant="w8a8", slo=slo, html=tmp_path / name)
    drawn, plain = ((tmp_path / name).read_text(encoding="utf-8") for name in ("with.html", "without.html"))
    assert "Goodput by load" in drawn and "within the SLO" in drawn and "Goodput by load" not in plain


def test_a_sweep_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sweep.csv"
    assert run([*ASKED, "--slo", "tpot=50ms", "--sweep", "--csv", str(path)]) == 0
    text = capsys.readouterr().out
    assert "goodput: " in text and "requests_per_s" in text
    rows = list(csv.DictReader(path.open(encoding="utf-8")))
    assert len(rows) >= 8 and all(row["clients"] in text for row in rows)
    assert run([*ASKED, "--sweep", "--csv", str(path)]) == 2, "a file is not written over"
    assert run([*ASKED, "--csv", str(tmp_path / "other.csv")]) == 2


def test_what_if_has_every_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*ASKED, "--what-if", "--price", "50", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["nodes"] for row in rows} == {1, 2, 4} and {row["prompt"] for row in rows} == {1750, 3500, 7000}
    assert {row["quant"] for row in rows} == {"w4a8", "w8a8", "bf16"}
    assert any(row["layout"] == "does not fit" for row in rows), "bf16 on one node"
    assert all(row["cost_per_million"] > 0 for row in rows if "tokens_per_s" in row)
