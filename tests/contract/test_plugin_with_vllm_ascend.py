"""Our package beside vllm-ascend, of both lines: both plugins active, its attention corrected or replaced.

As in test_vllm_ascend_attention the NPU's operators are stood in for; `AscendSFAImpl.forward` is the release's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from glm5_ascend.deploy.rehearsal.environment import RehearsalEnvironment, install
from glm5_ascend.errors import CheckFailedError
from tests.contract.support.plain_attention import Attention
from tests.contract.support.tiny_glm5 import SIZES
from tests.contract.test_vllm_ascend_attention import ERROR, asked, missed
from tests.ops.support.npu_operators import SCHEMAS
from tests.support.command import ROOT
from tests.support.tiny_model import quantize_tiny, write_tiny_model

pytestmark = pytest.mark.contract
Run = Callable[..., tuple[Path, dict[str, Any]]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("beside")
    return quantize_tiny(write_tiny_model(folder / "source", **SIZES), folder / "w4a8", "w4a8")


@pytest.fixture(scope="module")
def site(line: RehearsalEnvironment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """glm5-ascend as pip installs it, with its entry points, in a folder of its own."""
    folder = tmp_path_factory.mktemp("site")
    install(line.python, "--no-deps", "--target", str(folder), str(ROOT))
    return folder


@pytest.fixture(scope="module")
def run(line: RehearsalEnvironment, checkpoint: Path, site: Path) -> Run:
    """Attention over all steps with some variables set: the .safetensors file, and the plugin's report."""
    done: dict[Path, tuple[Path, dict[str, Any]]] = {}

    def ran(model: Path = checkpoint, **variables: str) -> tuple[Path, dict[str, Any]]:
        key = "-".join(f"{name}={value}" for name, value in variables.items()) or "plain"
        schemas, out = model.parent / "schemas.json", model.parent / f"{key}-{line.version}.safetensors"
        if out not in done:
            schemas.write_text(json.dumps(SCHEMAS["_C_ascend"]))
            with pytest.MonkeyPatch.context() as patch:
                for name, value in variables.items():
                    patch.setenv(name, value)
                line.run("vllm_ascend_on_cpu.plugin", model, site, schemas, out)
            done[out] = out, json.loads(out.with_suffix(".json").read_text())
        return done[out]

    return ran


def calls(out: Path) -> dict[str, int]:
    with safe_open(out, "pt") as file:
        match: dict[str, int] = json.loads(file.metadata()["calls"])
    return match


def test_both_plugins_are_found_and_ours_leaves_the_platform_alone(run: Run) -> None:
    _, report = run()
    assert set(report["platforms"]) == {"ascend", "glm5_cpu"}
    assert report["answers"]["glm5_cpu"] is None and report["answers"]["ascend"]
    assert report["platform"] == "vllm_ascend.platform.NPUPlatform"
    assert "glm5_ascend" in report["general"] and len(report["general"]) > 1


def test_it_says_what_is_wrong_and_nothing_else(run: Run) -> None:
    """Here Triton-Ascend is missing: one line, once."""
    _, report = run()
    (triton,) = report["said"]
    assert "Triton-Ascend is missing" in triton


def test_the_indexer_rotates_neighbours(run: Run, checkpoint: Path) -> None:
    """test_without_triton_its_indexer_rotates_the_wrong_pairs shows the same code without our plugin."""
    out, _ = run()
    print(f"missed {missed(out, checkpoint):.4f}")
    assert missed(out, checkpoint) < 0.02
    assert calls(out)["npu_lightning_indexer"] == calls(out)["npu_sparse_flash_attention"] == 4
    assert "npu_rotary_mul" not in calls(out)


def test_our_kernels_take_over_when_asked(run: Run, checkpoint: Path) -> None:
    out, report = run(GLM5_KERNELS="reference")
    assert "npu_lightning_indexer" not in calls(out) and "npu_sparse_flash_attention" not in calls(out)
    assert any("GLM5_KERNELS=reference" in line for line in report["said"])
    assert missed(out, checkpoint) < 0.02
    attention = Attention(checkpoint)
    for item in asked(out):
        want = attention.forward(item.states, item.positions, item.topk)
        assert float((item.output - want).norm() / want.norm()) < 1.5 * ERROR


def test_our_triton_kernels_take_over_when_asked(run: Run, tmp_path: Path) -> None:
    """Heads in sixteens, as the kernels take them; short steps, since an interpreter runs them."""
    sizes = SIZES | {"num_attention_heads": 16, "num_key_value_heads": 16, "index_n_heads": 16}
    model = quantize_tiny(write_tiny_model(tmp_path / "source", **sizes), tmp_path / "w4a8", "w4a8")
    steps = "prefill", "decode"
    out, report = run(model, GLM5_KERNELS="triton", TRITON_INTERPRET="1", GLM5_TEST_STEPS=",".join(steps))
    assert "npu_lightning_indexer" not in calls(out) and "npu_sparse_flash_attention" not in calls(out)
    assert any("GLM5_KERNELS=triton" in line for line in report["said"])
    attention = Attention(model)
    for item in asked(out, steps):
        assert torch.equal(item.topk, item.causal)
        want = attention.forward(item.states, item.positions, item.topk)
        assert float((item.output - want).norm() / want.norm()) < 1.5 * ERROR


def test_a_choice_that_an_npu_does_not_have_is_refused(run: Run) -> None:
    with pytest.raises(CheckFailedError, match="GLM5_KERNELS=cpu: not for an NPU"):
        run(GLM5_KERNELS="cpu")
