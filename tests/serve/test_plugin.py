"""The two vLLM entry points: light, idempotent, and inactive on other platforms."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from glm5_ascend.serve.environment import ENTRY_POINTS
from tests.support.command import TIMEOUT_S

PROBE = Path(__file__).parent / "support" / "plugin_probe.py"
needs_vllm = pytest.mark.server


def test_import_is_light() -> None:
    """vLLM imports this in every process, often before it has chosen a platform."""
    code = (
        "import sys, glm5_ascend.serve.plugin; from glm5_ascend.serve import serve; "
        "from glm5_ascend.deploy import doctor, render; "
        "print({'torch', 'vllm', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_entry_points_are_declared() -> None:
    for group, name in ENTRY_POINTS.items():
        (entry,) = (e for e in importlib.metadata.entry_points(group=group) if e.name == name)
        assert callable(entry.load())


@pytest.fixture(scope="module")
def seen(float_checkpoint: Path) -> dict[str, Any]:
    pytest.importorskip("vllm")
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    environment.pop("VLLM_TARGET_DEVICE", None)
    done = subprocess.run(
        [sys.executable, str(PROBE), str(float_checkpoint)],
        capture_output=True, text=True, timeout=TIMEOUT_S, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, Any] = json.loads(done.stdout.split("PROBE ", 1)[1])
    return report


@needs_vllm
def test_platform_is_chosen(seen: dict[str, Any]) -> None:
    assert seen["heavy_after_import"] == []
    assert seen["platform"] == seen["resolved"] == "glm5_ascend.serve.plugin.platform.Glm5CpuPlatform"
    assert seen["is_cpu"] is True


@needs_vllm
def test_the_worker_has_its_own_process_only_with_bound_threads(seen: dict[str, Any]) -> None:
    assert seen["executors"] == {"not_bound": "uni", "bound": "mp", "asked": "mp"}


@needs_vllm
def test_inactive_if_disabled_or_with_vllm_ascend(seen: dict[str, Any]) -> None:
    """Two active platforms are a RuntimeError in vLLM."""
    assert seen["opted_out"] is None and seen["with_vllm_ascend"] is None


@needs_vllm
def test_register_twice_leaves_one_of_each(seen: dict[str, Any]) -> None:
    assert seen["wrapper"] == "glm5_ascend.serve.plugin.mla"
    assert seen["quantization"] == "glm5_ascend.serve.plugin.quantization"
    assert set(seen["models"].values()) == {"glm5_ascend.serve.plugin.models"}


@needs_vllm
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("rope_on", "custom_ops contains +rotary_embedding"),
        ("two_ranks", "tensor_parallel_size is 2"),
        ("fp8_cache", "kv cache dtype 'fp8'"),
        ("no_description", "quant_model_description.json does not exist"),
        ("no_boolean", "enable_sparse_li_c8 is 'yes'"),
    ],
)
def test_settings_that_would_serve_wrong_numbers_are_refused(seen: dict[str, Any], case: str, message: str) -> None:
    assert message in seen[case]
