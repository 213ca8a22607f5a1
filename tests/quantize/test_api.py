"""`glm5_ascend.quantize.quantize` and the msModelSlim engine behind the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from glm5_ascend.quantize import quantize
from glm5_ascend.quantize.api import run_quantization
from glm5_ascend.quantize.options import QuantizeOptions
from tests.support.command import in_process
from tests.support.programs import stand_in
from tests.support.tiny_model import quantize_tiny, write_calibration

RECORD = "glm5_ascend_provenance.json"


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


def test_files_put_at_the_output_meanwhile_are_moved_aside(tiny_source: Path, tmp_path: Path) -> None:
    out, calib = tmp_path / "out", write_calibration(tmp_path / "calib.jsonl")

    def put(_: object) -> None:
        out.mkdir()
        (out / "thesis.txt").write_text("mine")

    options = QuantizeOptions(tiny_source, out, recipe="rtn-w4a8", calib=calib, samples=2, seq_len=16)
    done = run_quantization(options, on_plan=put)
    assert done is not None and done.result is not None and done.result.moved_aside is not None
    assert (done.result.moved_aside / "thesis.txt").read_text() == "mine"
    assert (out / "config.json").is_file() and not (out / "thesis.txt").exists()


@pytest.mark.parametrize("linked", [False, True])
def test_msmodelslims_result_moves_them_aside_too(
    linked: bool, tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of the user's, or a link to one, appears while its program runs."""
    out, mine = tmp_path / "out", tmp_path / "mine"
    target = mine if linked else out
    program = (
        f'#!/bin/sh\nwhile [ "$1" != --save_path ]; do shift; done\nmkdir "$2" "{target}"\n'
        f'echo x > "$2/a.safetensors"\necho mine > "{target}/thesis.txt"\n' + (f'ln -s "{mine}" "{out}"\n' * linked)
    )
    monkeypatch.setenv("PATH", stand_in(tmp_path / "bin", "msmodelslim", program))
    calib = write_calibration(tmp_path / "calib.jsonl")
    done = quantize(tiny_source, out, recipe="rtn-w4a8", calib=calib, samples=2, seq_len=16, engine="msmodelslim")
    assert done is not None and done.moved_aside is not None and done.to_dict()["moved_aside"] == str(done.moved_aside)
    assert done.moved_aside.is_symlink() == linked and (done.moved_aside / "thesis.txt").read_text() == "mine\n"
    described = {"README.md", "configuration.json", RECORD}
    assert {path.name for path in out.iterdir()} == {"a.safetensors", *described}
    record = json.loads((out / RECORD).read_text())
    assert record["quantizer"] == "msModelSlim" and "seed" not in record and set(record["files"]) >= described
    card = (out / "README.md").read_text()
    assert card.startswith("---\n") and "Quantized by msModelSlim, started by glm5-ascend" in card
    assert record["recipe"]["sha256"] in card and "| seed |" not in card and "Not measured" in card


def test_msmodelslim_answers_in_json(tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized = quantize_tiny(tiny_source, tmp_path / "made", "rtn-w4a8")
    program = f'#!/bin/sh\nwhile [ "$1" != --save_path ]; do shift; done\nmkdir -p "$2" && cp -r {quantized}/. "$2"\n'
    monkeypatch.setenv("PATH", stand_in(tmp_path / "bin", "msmodelslim", program))
    done = in_process(
        "quantize", tiny_source, tmp_path / "out", "--recipe", "rtn-w4a8", "--engine", "msmodelslim", "--json"
    )
    answer = json.loads(done.stdout)
    assert (answer["command"], answer["exit_code"]) == ("quantize", done.returncode)
    assert answer["verify"]["ok"] == answer["ok"] == (done.returncode == 0)
