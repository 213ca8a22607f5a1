"""A load that `vllm bench serve` makes on the real server."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm5_ascend.errors import CheckFailedError
from glm5_ascend.serve.client import Client
from glm5_ascend.serve.load import run_load
from tests.serve.support.chat import API_KEY

pytestmark = [pytest.mark.server, pytest.mark.long]


def test_its_figures(server: str, rotated_checkpoint: Path) -> None:
    load = run_load(Client(server, key=API_KEY), rotated_checkpoint, 32, 8, concurrency=2, requests=4)
    assert (load.output, load.concurrency, load.requests, load.failed) == (8, 2, 4, 0)
    assert abs(load.prompt - 32) <= 4 and load.per_step > 1
    assert load.output_tokens_per_s > 0 and load.ttft_ms > 0 and load.tpot_ms > 0


def test_a_refused_load_is_one_error(server: str, rotated_checkpoint: Path) -> None:
    with pytest.raises(CheckFailedError, match=r"no request of 1 was answered: .*Unauthorized"):
        run_load(Client(server, "glm-5", key="wrong"), rotated_checkpoint, 32, 8, concurrency=1, requests=1)
