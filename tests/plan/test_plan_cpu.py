"""This machine's CPU in the planner: the file that `plan measure` writes, and the command that reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from glm5_ascend.cli import run
from glm5_ascend.demo_model.resources import write_demo_model
from glm5_ascend.deploy.planning import measure
from glm5_ascend.deploy.planning.measure import LOADS, describe, measure_rates, write
from glm5_ascend.plan.hardware import Constants, Hardware, load_hardware
from glm5_ascend.plan.inputs import Workload
from glm5_ascend.plan.layout import Layout
from glm5_ascend.plan.model import PlannedModel, from_directory, named
from glm5_ascend.plan.operators import StepLoad, step_operators
from glm5_ascend.plan.predict import predict
from glm5_ascend.plan.steps import Steps
from glm5_ascend.serve.load import MeasuredLoad

TRUE = Constants(memory=1.0, compute=0.3, graph_seconds=2e-3, eager_seconds=4e-3, token_seconds=3e-4, step_seconds=1e-3)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_model(tmp_path_factory.mktemp("demo") / "demo")


@pytest.fixture(scope="module")
def model(directory: Path) -> PlannedModel:
    return from_directory(directory)


@pytest.fixture(scope="module")
def rates(model: PlannedModel) -> Hardware:
    """Rates of this machine, measured for a moment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "SECONDS", 0.02)
        return measure_rates(model, "demo")


def imagined(model: PlannedModel, hardware: Hardware, noise: float = 0.0) -> list[MeasuredLoad]:
    """Loads on a server with the constants TRUE."""
    loads = []
    for prompt, output, clients in LOADS:
        load = Workload(prompt, output, clients, requests=measure.ROUNDS * clients)
        p = predict(Steps(model, hardware, TRUE), Layout(measure.ENGINE), load)
        assert p is not None
        times = 1e3 * p.ttft * (1 + noise), 1e3 * p.tpot * (1 + noise)
        loads.append(MeasuredLoad(prompt, output, clients, clients, p.tok_s / (1 + noise), *times))
    return loads


def test_a_step_reads_int4_experts_as_they_are_packed() -> None:
    """GLM-5's eight experts of one token: half a byte per weight, and scales; a CPU's decode is these bytes."""
    step = StepLoad(tokens=1, requests=1, context=512)
    nbytes = {}
    for quantization in ("w4a8", "w8a8", "bf16"):
        operators = step_operators(named("glm-5", quantization), load_hardware("a3"), measure.ENGINE, step)
        nbytes[quantization] = sum(operator.nbytes for operator in operators if operator.name == "experts")
    weights = 75 * 8 * 3 * 6144 * 2048
    assert nbytes["w4a8"] == pytest.approx(weights / 2, rel=0.02)
    assert nbytes["w8a8"] == pytest.approx(weights, rel=0.01) and nbytes["bf16"] == pytest.approx(2 * weights, rel=0.01)


def test_every_rate_is_a_plausible_measurement(rates: Hardware) -> None:
    for figure in (rates.rates.memory, rates.rates.bf16, rates.rates.int8, rates.rates.vector):
        assert 1e7 < figure < 1e14
    assert rates.measured_on and rates.dies_per_node == 1


def test_the_machine_is_predicted_as_it_was_measured(model: PlannedModel, rates: Hardware) -> None:
    machine = describe(model, rates, imagined(model, rates))
    slower = describe(model, rates, imagined(model, rates, 1.0))
    speeds = []
    for hardware in (rates.model_copy(update={"constants": TRUE}), machine, slower):
        assert hardware.constants is not None
        p = predict(
            Steps(model, hardware, hardware.constants), Layout(measure.ENGINE), Workload(1024, 64, 8, requests=8)
        )
        assert p is not None
        speeds.append(p.tok_s)
    true, fitted, slow = speeds
    assert fitted == pytest.approx(true, rel=0.1) and slow < 0.7 * true


def test_the_written_file_is_hardware_cpu(
    rates: Hardware,
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`plan measure` without a server: its file, and the line that it prints."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run(["plan", str(directory), "--hardware", "cpu"]) == 2
    error = capsys.readouterr().err
    assert "not measured yet" in error and "plan measure" in error and "Traceback" not in error
    machine = rates.model_copy(update={"constants": TRUE})
    monkeypatch.setattr(measure, "measure", lambda *_: machine)
    monkeypatch.setattr("glm5_ascend.serve.environment.require_cpu_environment", lambda: None)
    assert run(["plan", "measure"]) == 0
    words = capsys.readouterr().out.splitlines()[-1].partition("use it: glm5-ascend ")[2].split()
    assert words[:4] == ["plan", "DIR", "--hardware", "cpu"] and load_hardware("cpu") == machine
    assert run([*(str(directory) if word == "DIR" else word for word in words), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["output_tokens_per_s"]["basis"] == "measured" and report["nearest"] is None
    assert report["command_lines"] == ["run it: glm5-ascend serve DIR"] and report["profile"] is None
    mine = tmp_path / "mine.yaml"
    mine.write_text("mine\n")
    assert run(["plan", "measure", "--out", str(mine)]) == 2
    assert "exists already" in capsys.readouterr().err and mine.read_text() == "mine\n"
    write(machine, tmp_path / "other.yaml")
    assert load_hardware(str(tmp_path / "other.yaml")) == machine


@pytest.mark.parametrize(("name", "machines", "token"), [("glm-5.3-flash", 1, 13_056), ("glm-5", 2, 111_232)])
def test_models_by_name_on_a_server_without_npus(
    rates: Hardware, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, machines: int, token: int
) -> None:
    """256 GB: Flash's 191 GB of W4A8 and its states fit one server, GLM-5 two."""
    server = rates.model_copy(update={"constants": TRUE, "memory_bytes": 256 * 2.0**30})
    write(server, tmp_path / "server.yaml")
    load = "in=512,out=64,concurrency=2"
    assert (
        run(["plan", "--model", name, "--hardware", str(tmp_path / "server.yaml"), "--workload", load, "--json"]) == 0
    )
    report = json.loads(capsys.readouterr().out)
    assert report["nodes"] == machines and report["kv_bytes_per_token"]["value"] == token
    assert report["output_tokens_per_s"]["basis"] == "measured" and report["output_tokens_per_s"]["value"] > 0
    # 34 layers of 64 x 128 x 128 fp32 values, now and after each draft
    assert (report["state_bytes_per_request"]["value"] > 34 * 4 * 64 * 128 * 128) == (name == "glm-5.3-flash")


def test_a_checkpoint_of_few_positions_gets_a_load_that_it_takes(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The demo has 2,048 positions, the usual load 5,000 tokens."""
    assert run(["plan", str(directory)]) == 0
    assert "1,433 tokens in, 614 out" in capsys.readouterr().out
    assert run(["plan", str(directory), "--workload", "in=3500,out=1500"]) == 2
