"""`glm5-ascend eval --url`: a served checkpoint against its source, by the server's own log-probabilities."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from glm5_ascend.fidelity.evaluation.compare import compare
from glm5_ascend.fidelity.evaluation.metrics import metrics
from glm5_ascend.fidelity.evaluation.served import lower_bound
from glm5_ascend.fidelity.evaluation.windows import read_tasks
from tests.serve.support.chat import API_KEY
from tests.support.command import in_process, worked

pytestmark = pytest.mark.server
WINDOW, WINDOWS = 96, 2


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", API_KEY)


def test_a_server_is_as_far_as_its_files(server: str, trained_checkpoint: Path, rotated_checkpoint: Path) -> None:
    """NLL and top-1 from the server against those computed from the files it serves; it rounds to bf16, we do not."""
    arguments = ["--against", trained_checkpoint, "--window", WINDOW, "--windows", WINDOWS, "--json"]
    done = worked(in_process("eval", *arguments, "--url", server))
    served = json.loads(done.stdout)
    comparison = compare(
        rotated_checkpoint, trained_checkpoint, read_tasks(None, trained_checkpoint, WINDOW, WINDOWS).windows
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
