"""This machine's CPU in the planner: the file `--measure` writes, what it is made of, and the command that reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from glm5_ascend.cli import run
from glm5_ascend.demo_model.resources import write_demo_model
from glm5_ascend.plan.efficiency import Efficiencies
from glm5_ascend.plan.hardware import Hardware, load_hardware
from glm5_ascend.plan.layout import Layout
from glm5_ascend.plan.measure import describe, rates
from glm5_ascend.plan.measure.served import BATCHES, NEW_TOKENS, PROMPTS, STEP_PROMPT, Served
from glm5_ascend.plan.model import PlannedModel, from_directory
from glm5_ascend.plan.predict import predict, run_output
from glm5_ascend.plan.roofline import decode_step, prefill_chunk
from glm5_ascend.plan.workload import Workload

TRUE = Efficiencies(1.0, 1.0, 0.5, 2e-3, 4e-3, 3e-4)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_model(tmp_path_factory.mktemp("demo") / "demo")


@pytest.fixture(scope="module")
def model(directory: Path) -> PlannedModel:
    return from_directory(directory)


@pytest.fixture(scope="module")
def measured(model: PlannedModel, directory: Path) -> Hardware:
    """Rates of this machine, measured for a moment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rates, "SECONDS", 0.02)
        return describe.measure_rates(model, directory)


#: Bytes or operations per second of a laptop's core, as round numbers.
RATES = {"memory": 1.2e10, "bf16": 6e10, "int8": 1.5e11, "vector": 2e10}
OPERATORS = {"lightning indexer": 4e10, "sparse attention": 3e10}


@pytest.fixture(scope="module")
def steady(measured: Hardware) -> Hardware:
    """A description with fixed rates."""
    rates_now = measured.rates
    figures = {name: getattr(rates_now, name).model_copy(update={"value": value}) for name, value in RATES.items()}
    operators = {
        name: figure.model_copy(update={"value": OPERATORS[name]}) for name, figure in rates_now.operators.items()
    }
    return measured.model_copy(update={"rates": rates_now.model_copy(update={**figures, "operators": operators})})


def imagined(model: PlannedModel, hardware: Hardware, noise: float = 0.0) -> Served:
    """Times of a server with the constants TRUE."""
    engine = describe.ENGINE
    first = {n: prefill_chunk(model, hardware, engine, TRUE, n, 0.0).seconds for n in PROMPTS}
    context = STEP_PROMPT + NEW_TOKENS / 2
    step = {n: decode_step(model, hardware, engine, TRUE, n, context).seconds for n in BATCHES}
    return Served({n: s * (1 + noise) for n, s in first.items()}, step, 1)


def test_every_rate_is_a_plausible_measurement(measured: Hardware) -> None:
    rates_now = measured.rates
    for figure in (rates_now.memory, rates_now.bf16, rates_now.int8, rates_now.vector, *rates_now.operators.values()):
        assert figure.quality == "measured" and 1e7 < figure.value < 1e14
    assert set(rates_now.operators) == {"lightning indexer", "sparse attention"}
    assert not measured.host_ahead and measured.dies_per_node == 1


def test_the_constants_are_found_again(model: PlannedModel, steady: Hardware) -> None:
    fitted = describe.efficiencies(model, steady, imagined(model, steady))
    assert fitted.compute == pytest.approx(TRUE.compute, rel=0.02)
    for name in ("graph_seconds", "eager_seconds", "token_seconds"):
        assert getattr(fitted, name) == pytest.approx(getattr(TRUE, name), rel=0.05), name


def test_a_slower_machine_is_predicted_slower(model: PlannedModel, steady: Hardware) -> None:
    load = Workload(1024, 64, 8, requests=8)

    def speed(noise: float) -> float:
        constants = describe.efficiencies(model, steady, imagined(model, steady, noise))
        prediction = predict(model, steady, Layout(describe.ENGINE), constants, load)
        assert prediction is not None
        return run_output(prediction, load)

    assert speed(1.0) < 0.8 * speed(0.0)


def test_the_written_file_is_hardware_cpu(
    model: PlannedModel, steady: Hardware, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run(["plan", str(directory), "--hardware", "cpu"]) == 2
    error = capsys.readouterr().err
    assert "not measured yet" in error and "--measure" in error and "Traceback" not in error
    constants = describe.efficiencies(model, steady, imagined(model, steady)).to_json()
    machine = steady.model_copy(update={"efficiencies": constants})
    describe.write(machine, tmp_path / "glm5-ascend/cpu.yaml", replace=False)
    assert load_hardware("cpu") == machine
    workload = ["--workload", "in=256,out=32,concurrency=4", "--mtp", "0"]
    assert run(["plan", str(directory), "--hardware", "cpu", *workload, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["output_tokens_per_s"]["basis"] == "measured" and report["extrapolated"] == []
    assert report["command_lines"] == ["run it: glm5-ascend serve DIR"] and report["profile"] is None


def test_the_line_printed_after_measuring_can_be_run(
    model: PlannedModel, steady: Hardware, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Without DIR the demo model is served from a folder that is gone by then: the line must not name it."""
    constants = describe.efficiencies(model, steady, imagined(model, steady)).to_json()
    monkeypatch.setattr(describe, "measure", lambda *_: steady.model_copy(update={"efficiencies": constants}))
    monkeypatch.setattr("glm5_ascend.serve.environment.require_cpu_environment", lambda: None)
    out = tmp_path / "mine.yaml"
    assert run(["plan", "--measure", "--out", str(out)]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    words = line.partition("use it: glm5-ascend ")[2].split()
    assert words[:4] == ["plan", "DIR", "--hardware", str(out)]
    assert run([str(directory) if word == "DIR" else word for word in words]) == 0


def test_nothing_of_the_users_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("mine\n")
    assert run(["plan", "--measure", "--out", str(mine)]) == 2
    assert "exists already" in capsys.readouterr().err and mine.read_text() == "mine\n"
    assert run(["plan", "--out", str(mine)]) == 2
