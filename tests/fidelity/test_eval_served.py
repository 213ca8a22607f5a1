"""`glm5-ascend eval --url`: a served checkpoint against its source, by the server's own log-probabilities."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.training.held_out import held_out_questions
from glm5_ascend.fidelity.evaluation.compare import compare
from glm5_ascend.fidelity.evaluation.metrics import metrics
from glm5_ascend.fidelity.evaluation.served import lower_bound
from glm5_ascend.fidelity.evaluation.windows import read_windows
from tests.serve.support.chat import API_KEY
from tests.serve.support.stub import stub_server
from tests.support.command import in_process
from tests.support.server_process import started_server

pytestmark = pytest.mark.server
WINDOW, WINDOWS = 96, 2


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", API_KEY)


@pytest.fixture(scope="module")
def source_server(trained_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The source itself behind `glm5-ascend serve`."""
    yield from started_server(trained_checkpoint, tmp_path_factory.mktemp("source-server"), [])


def test_a_server_is_as_far_as_its_files(server: str, trained_checkpoint: Path, rotated_checkpoint: Path) -> None:
    """NLL and top-1 from the server against those computed from the files it serves; it rounds to bf16, we do not."""
    arguments = ["--against", trained_checkpoint, "--window", WINDOW, "--windows", WINDOWS, "--json"]
    done = in_process("eval", *arguments, "--url", server)
    assert done.returncode == 0, done.stderr
    served = json.loads(done.stdout)
    comparison = compare(
        rotated_checkpoint, trained_checkpoint, read_windows(None, trained_checkpoint, WINDOW, WINDOWS)
    )
    here = {row.name: row.value for row in metrics(comparison)}
    assert served["nll_source"] == pytest.approx(here["nll_source"], rel=1e-6)
    assert served["nll_quantized"] == pytest.approx(here["nll_quantized"], abs=0.02)
    assert served["top1_agreement"] == pytest.approx(here["top1_agreement"], abs=0.04)
    assert served["kl_is_lower_bound"] and 0.3 * here["kl_mean"] < served["kl_mean"] < 3 * here["kl_mean"]
    assert "expert_agreement" not in served


def test_bound_against_whole_distributions() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(64, 50, generator=generator, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    kl = (p.exp() * (p - q)).sum(1)
    ids = q.topk(8, dim=1).indices
    bound = lower_bound(p.gather(1, ids), q.gather(1, ids))
    assert (bound <= kl + 1e-12).all() and (bound > 0).all()
    torch.testing.assert_close(lower_bound(p, q), kl)
    padded = torch.cat([q, torch.full((64, 1), -torch.inf, dtype=torch.float64)], 1)
    torch.testing.assert_close(lower_bound(torch.cat([p, p[:, :1]], 1), padded), kl)
    # Tails of one shape: nothing is lost.
    inside, tail = 0.7 * p[:, :10].softmax(1), 0.3 * torch.ones(64, 40, dtype=torch.float64) / 40
    other = 0.6 * q[:, :10].softmax(1)
    whole_a, whole_b = torch.cat([inside, tail], 1).log(), torch.cat([other, tail * 4 / 3], 1).log()
    want = (whole_a.exp() * (whole_a - whole_b)).sum(1)
    torch.testing.assert_close(lower_bound(whole_a[:, :10], whole_b[:, :10]), want)


@pytest.mark.long
def test_answers_of_two_servers(server: str, source_server: str, tmp_path: Path) -> None:
    """Length inflation and score on the demo model's held-out questions, both checkpoints behind real servers."""
    path, html = tmp_path / "prompts.jsonl", tmp_path / "report.html"
    questions = [q for q in held_out_questions(n=60) if q.category in ("lookup", "repeat", "tool_call")][:16]
    records = [
        {"messages": q.messages, "expected": q.expected, "task": q.category} | ({"tools": q.tools} if q.tools else {})
        for q in questions
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    both = ["--url", server, "--against-url", source_server, "--prompts", path]
    done = in_process("eval", *both, "--max-tokens", 96, "--json", "--html", html)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["prompts"] == len(questions) == 16
    assert report["length_inflation"] == pytest.approx(report["length_quantized"] / report["length_source"] - 1)
    assert 0.7 < report["score_source"] <= 1 and abs(report["score_change"]) < 0.3
    low, high = report["intervals"]["length_inflation"]
    assert low <= report["length_inflation"] <= high
    assert "longer answers" in html.read_text()
    assert set(report["tasks"]) == {"lookup", "repeat", "tool_call"}
    # The demo model calls the right function with the right arguments nearly always, quantized or not.
    assert report["tasks"]["tool_call"]["score_source"] > 0.5 and report["tool_calls_kept"] > 0.5
    assert {"tool_calls_kept", "length_inflation", "score_change"} <= {entry["metric"] for entry in report["grades"]}
    cut = json.loads(in_process("eval", *both, "--max-tokens", 2, "--json").stdout)
    assert cut["length_source"] == cut["length_quantized"] == 2 and cut["score_source"] == 0


def test_same_server_twice_is_exact(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "What is 47 + 38?", "expected": "85.", "match": "contains"}) + "\n")
    with stub_server("It is 85.") as url:
        done = in_process("eval", "--url", url, "--against-url", url, "--prompts", path, "--json")
    report = json.loads(done.stdout)
    assert (report["length_inflation"], report["score_change"], report["score_source"]) == (0, 0, 1)
