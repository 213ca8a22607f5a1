"""What the commands print: the contract scripts rely on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.command import glm5_ascend
from tests.support.tiny_model import write_calibration

COMMANDS = {
    "quantize": [
        "--recipe",
        "--calib",
        "--samples",
        "--seq-len",
        "--overwrite",
        "--dry-run",
        "--json",
        "--quiet",
        "--max-ram",
        "--restart",
        "--threads",
        "--engine",
    ],
    "verify": ["--against", "--json"],
    "serve": ["--port", "--dry-run"],
    "demo-model": ["--outliers"],
    "doctor": ["--json"],
}


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_names_every_flag_of_the_contract(command: str) -> None:
    done = glm5_ascend(command, "--help", COLUMNS="200", TERM="dumb")
    assert done.returncode == 0
    for flag in COMMANDS[command]:
        assert flag in done.stdout


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
    done = glm5_ascend("quantize", tiny_source, out, "--calib", calib, "--json", "--quiet")
    assert done.returncode == 0
    assert done.stderr == ""
    result = json.loads(done.stdout)
    assert result["out"] == str(out)
    planned = glm5_ascend("quantize", tiny_source, tmp_path / "other", "--dry-run", "--json", "--quiet")
    assert json.loads(planned.stdout)["output_bytes"] == result["output_bytes"]
    on_disk = sum(path.stat().st_size for path in out.rglob("*.safetensors"))
    assert 0 <= on_disk - result["output_bytes"] < 500_000  # headers
    assert result["peak_rss_bytes"] > 0


@pytest.mark.parametrize("size", ["4GiB", "4000 MB", "4294967296"])
def test_sizes(size: str, tiny_source: Path, tmp_path: Path) -> None:
    done = glm5_ascend("quantize", tiny_source, tmp_path / "out", "--dry-run", "--max-ram", size)
    assert done.returncode == 0, done.stderr
    assert "predicted:" in done.stderr


@pytest.mark.parametrize("size", ["4 apples", "-1", "1MB"])
def test_impossible_sizes(size: str, tiny_source: Path, tmp_path: Path) -> None:
    done = glm5_ascend("quantize", tiny_source, tmp_path / "out", "--dry-run", f"--max-ram={size}")
    assert done.returncode == 2
    assert "--max-ram" in done.stderr
    assert "Traceback" not in done.stderr


def test_quiet_prints_the_path_only(tiny_source: Path, tmp_path: Path) -> None:
    done = glm5_ascend("quantize", tiny_source, tmp_path / "out", "--recipe", "rtn-w4a8", "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{tmp_path / 'out'}\n", "")


def test_progress_goes_to_stderr_one_line_per_layer(tiny_source: Path, tmp_path: Path) -> None:
    done = glm5_ascend("quantize", tiny_source, tmp_path / "out", "--recipe", "rtn-w4a8")
    layers = [line for line in done.stderr.splitlines() if line.startswith("layer ")]
    assert len(layers) == 4
    assert all("eta" in line and "RSS" in line for line in layers)
    assert done.stdout == ""


def test_verify_exit_codes_and_json(tiny_w4a8: Path, tiny_source: Path) -> None:
    done = glm5_ascend("verify", tiny_w4a8, "--against", tiny_source, "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["ok"], report["exit_code"], report["command"]) == (0, True, 0, "verify")


def test_error_is_json_too(tmp_path: Path) -> None:
    done = glm5_ascend("verify", tmp_path / "nowhere", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["fix"]


def test_serve_dry_run_prints_what_would_run(tiny_source: Path) -> None:
    done = glm5_ascend("serve", tiny_source, "--dry-run", "--port", "8123", "--", "--max-model-len", "64")
    assert done.returncode == 0
    assert "--port 8123" in done.stdout
    assert done.stdout.count("--max-model-len") == 1
    assert "--max-model-len 64" in done.stdout


def test_doctor_tells_the_truth_here() -> None:
    done = glm5_ascend("doctor", "--json")
    rows = {row["item"]: row for row in json.loads(done.stdout)["rows"]}
    import torch

    assert rows["torch"]["value"] == torch.__version__
    assert (done.returncode == 0) == all(row["status"] != "problem" for row in rows.values())
