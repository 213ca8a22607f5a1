"""What the commands print: the contract scripts rely on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from glm5_ascend.checkpoint.checks.report import Report
from glm5_ascend.cli import usage
from tests.support.command import assert_one_clear_line, glm5_ascend
from tests.support.tiny_model import write_calibration


def test_dry_run_shows_the_plan_and_writes_nothing(tiny_source: Path, tmp_path: Path) -> None:
    done = glm5_ascend("quantize", tiny_source, tmp_path / "out", "--dry-run", "--json")
    assert done.returncode == 0
    plan = json.loads(done.stdout)
    assert plan["dry_run"] is True
    assert {row["type"] for row in plan["plan"]} == {"FLOAT", "W8A8_DYNAMIC", "W4A8_DYNAMIC"}
    assert "routed experts" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_result_json_agrees_with_the_disk(tiny_source: Path, tmp_path: Path) -> None:
    calib, out = write_calibration(tmp_path / "calib.jsonl"), tmp_path / "out"
    small = ["--calib", calib, "--samples", "4", "--seq-len", "64", "--json", "--quiet"]
    done = glm5_ascend("quantize", tiny_source, out, *small)
    assert done.returncode == 0
    assert done.stderr == ""
    result = json.loads(done.stdout)
    assert result["out"] == str(out)
    planned = glm5_ascend("quantize", tiny_source, tmp_path / "other", "--dry-run", *small)
    assert json.loads(planned.stdout)["output_bytes"] == result["output_bytes"]
    on_disk = sum(path.stat().st_size for path in out.rglob("*.safetensors"))
    assert 0 <= on_disk - result["output_bytes"] < 500_000  # headers
    assert result["peak_rss_bytes"] > 0


@pytest.mark.parametrize("size", ["4000 MB", "4294967296", "4 apples", "-1", "1MB"])
def test_sizes(size: str, tiny_source: Path, tmp_path: Path) -> None:
    job = ["quantize", tiny_source, tmp_path / "out", "--recipe", "rtn-w4a8", "--dry-run"]
    done = glm5_ascend(*job, f"--max-ram={size}")
    if size.startswith("4") and "apples" not in size:
        assert done.returncode == 0 and "predicted:" in done.stderr
    else:
        assert_one_clear_line(done, 2, "--max-ram")


def test_quiet_prints_the_path_only(tiny_source: Path, tmp_path: Path) -> None:
    done = glm5_ascend("quantize", tiny_source, tmp_path / "out", "--recipe", "rtn-w4a8", "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{tmp_path / 'out'}\n", "")


def test_progress_goes_to_stderr_one_line_per_layer(tiny_source: Path, tmp_path: Path) -> None:
    done = glm5_ascend("quantize", tiny_source, tmp_path / "out", "--recipe", "rtn-w4a8")
    layers = [line for line in done.stderr.splitlines() if line.startswith("layer ")]
    assert len(layers) == 4
    assert all("eta" in line and "RSS" in line for line in layers)
    assert done.stdout == ""


def test_no_error_line_has_an_escape_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert usage.report("a \x1b[2J\nok\u202e [red]x", "b\r\ud800", 2, []) == 2
    assert capsys.readouterr().err == "error: a \\x1b[2J\\nok\\u202e [red]x\n  fix: b\\r\\ud800\n"


def test_no_finding_has_an_escape_code(tmp_path: Path) -> None:
    report = Report(tmp_path)
    report.error("a.b", "c\x1b", fix="d\x1b")
    assert all(line.isprintable() for line in report.lines())
