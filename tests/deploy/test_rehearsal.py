"""What `rehearse` does around vllm-ascend's code: which ranks, and what they come to. Real ranks: tests/contract."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from glm5_ascend.cli import run
from glm5_ascend.deploy.profiles.load import load, names
from glm5_ascend.deploy.rehearsal.environment import find_environment, prepare
from glm5_ascend.deploy.rehearsal.result import PlannedRank, Rehearsal, RehearsedRank
from glm5_ascend.deploy.rehearsal.run import layout, select_ranks
from glm5_ascend.engine_lines import SGLANG
from glm5_ascend.errors import ConfigError, MissingEnvironmentError
from glm5_ascend.plan.layout import Engine
from tests.support.tiny_model import tiny_config

GOOD: dict[str, Any] = {
    "problems": [], "versions": {"vllm-ascend": "0.23.0.post1"}, "models": {"target": "A"},
    "parameter_bytes": 900, "resident_bytes": 950,
    "cache": {"bytes_per_token": 10.0, "request_bytes": 0, "tokens_per_block": 128, "blocks": 7},
}  # fmt: skip


def rank(planned: PlannedRank | None = None, **changes: Any) -> RehearsedRank:
    return RehearsedRank(role="server", rank=0, world=16, planned=planned, **GOOD | changes)


def rehearsal(*ranks: RehearsedRank) -> Rehearsal:
    return Rehearsal("a3-single-w4a8", "glm5", ranks)


def test_ranks_are_selected_by_number_or_word() -> None:
    sizes = Engine(tp=8, pp=2, dp=4)
    assert select_ranks("ends", sizes) == [0, 8, 63]
    assert select_ranks("63,5,5", sizes) == [5, 63]
    assert len(select_ranks("all", sizes)) == 64
    for wrong in ("64", "-1", "first", "1,,2", ""):
        with pytest.raises(ConfigError):
            select_ranks(wrong, sizes)


def test_flags_of_the_line_change_the_layout() -> None:
    role = load("a3-pd").role("decode")
    for flags, sizes in (
        ([], (4, 1, 8)),
        (["--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"], (2, 2, 8)),
    ):
        engine = layout(role, flags)
        assert (engine.tp, engine.pp, engine.dp) == sizes


def test_a_correct_rank_agrees_with_the_planner() -> None:
    report = rehearsal(rank(PlannedRank(900, 10.0, 2000)))
    assert report.exit_code == 0 and report.verdict.startswith("ok: 1 rank")
    assert report.ranks[0].cached_tokens == 896
    assert report.ranks[0].differences == {"parameters": 0.0, "cache": 0.0}
    off = rank(PlannedRank(800, 10.0, 2000))
    assert "896 tokens; from the planner's parameters +12.50 %, cache +0.00 %; ok" in off.line


def test_problems_are_named_once_with_their_ranks() -> None:
    problem = "load target at t: KeyError: x"
    report = rehearsal(rank(), rank(problems=[problem, "cache: too little"]), rank(problems=[problem]))
    assert report.exit_code == 1 and report.verdict.startswith("2 of 3 ranks")
    lines = list(report.lines())
    assert lines[3] == f"problem: {problem} (server 0, server 0)" and lines[-1] == report.verdict
    assert lines[1].endswith("; problems: 2") and lines[0].endswith("; ok")
    answer = json.loads(json.dumps(report.to_dict()))
    assert answer["ok"] is False and [len(one["problems"]) for one in answer["ranks"]] == [0, 2, 1]


def test_without_an_environment_it_says_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("GLM5_REHEARSAL", raising=False)
    with pytest.raises(MissingEnvironmentError):
        find_environment()
    monkeypatch.setenv("GLM5_REHEARSAL", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    assert run(["rehearse", str(tmp_path), "--profile", "a3-single-w4a8"]) == 3
    assert "rehearse --prepare" in capsys.readouterr().err
    assert run(["rehearse"]) == 2
    (tmp_path / "config.json").write_text('{"model_type": "glm4_moe"}')
    assert run(["rehearse", str(tmp_path), "--profile", "a3-single-w4a8"]) == 2
    assert "glm4_moe" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="not empty"):
        prepare(tmp_path)
    with pytest.raises(ConfigError, match="not a line"):
        prepare(tmp_path / "new", line="0.24")


@pytest.mark.parametrize("profile", [name for name in names() if load(name).engine == SGLANG] + ["cpu"])
def test_a_profile_of_another_engine_is_refused_in_one_line(
    profile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before it asks for an environment."""
    monkeypatch.delenv("GLM5_REHEARSAL", raising=False)
    assert run(["rehearse", str(tmp_path), "--profile", profile]) == 2
    engine = "vLLM on a CPU" if profile == "cpu" else "SGLang"
    assert f"profile {profile} starts {engine}: rehearse runs vllm-ascend only" in capsys.readouterr().err
