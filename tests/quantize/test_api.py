"""The function `glm5_ascend.quantize.quantize` and its command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from glm5_ascend.errors import OutputError
from glm5_ascend.quantize import quantize
from glm5_ascend.quantize.api import run_quantization
from glm5_ascend.quantize.options import QuantizeOptions
from tests.support.command import in_process
from tests.support.tiny_model import write_calibration


def test_python_and_command_make_the_same(tiny_source: Path, tmp_path: Path) -> None:
    calib, heard = write_calibration(tmp_path / "calib.jsonl"), list[tuple[str, float, int]]()
    small = {"recipe": "rtn-w4a8", "calib": str(calib), "samples": 2, "seq_len": 16}
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    predicted = quantize(str(tiny_source), tmp_path / "a" / "out", **small, dry_run=True)  # type: ignore[arg-type]
    assert predicted.prediction is not None
    assert predicted.to_dict()["dry_run"]
    assert not list((tmp_path / "a").iterdir())
    options = QuantizeOptions(str(tiny_source), tmp_path / "a" / "out", **small)  # type: ignore[arg-type]
    done = run_quantization(options, lambda *event: heard.append(event))
    words = ["--recipe", "rtn-w4a8", "--calib", calib, "--samples", 2, "--seq-len", 16, "--json", "--quiet"]
    shown = json.loads(in_process("quantize", tiny_source, tmp_path / "b" / "out", *words).stdout)
    assert set(done.to_dict()) == set(shown) - {"schema_version", "command", "ok", "exit_code"}
    done_by_then = [event[1] for event in heard]
    assert done_by_then == sorted(done_by_then) and heard[-1][1] == heard[-1][2] == len(done.to_dict()["layers"])
    shards = [sorted((tmp_path / name / "out").glob("*.safetensors")) for name in "ab"]
    assert [path.read_bytes() for path in shards[0]] == [path.read_bytes() for path in shards[1]]


def test_files_put_at_the_output_meanwhile_are_not_replaced(tiny_source: Path, tmp_path: Path) -> None:
    """The finished checkpoint waits for the user to move them."""
    out, calib = tmp_path / "out", write_calibration(tmp_path / "calib.jsonl")

    def put(_: object) -> None:
        out.mkdir()
        (out / "thesis.txt").write_text("mine")

    options = QuantizeOptions(tiny_source, out, recipe="rtn-w4a8", calib=calib, samples=2, seq_len=16)
    with pytest.raises(OutputError):
        run_quantization(options, on_plan=put)
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]
    out.rename(tmp_path / "moved")
    run_quantization(options)
    assert (out / "config.json").is_file()
