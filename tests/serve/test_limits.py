"""Flags that a CPU server refuses for a model before anything starts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glm5_ascend.model.config_file import load_config
from glm5_ascend.serve.limits import drafts_of, refuse_flags
from tests.support.command import assert_one_clear_line, in_process
from tests.support.tiny_flash import with_floats, write_tiny_flash

pytestmark = pytest.mark.server


def drafting(tokens: int) -> list[str]:
    return ["--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": tokens})]


def edited(config: str) -> str:
    """config.json with a layer type that nobody knows."""
    return config.replace("deepseek_sparse_attention", "convolution")


@pytest.mark.parametrize(
    ("keys", "edit", "flags", "words"),
    [
        ({}, str, drafting(6), "num_speculative_tokens is 6: linear attention keeps states for 1 to 5 drafts"),
        ({"num_nextn_predict_layers": 0}, str, drafting(1), "the model has no MTP layer that could draft"),
        (
            {"linear_attn_config": None, "linear_num_heads": 3},
            str,
            ["--tensor-parallel-size", "2"],
            "linear_num_heads 3 of config.json does not divide into 2 equal parts",
        ),
        ({}, edited, [], "layer_types has 4 entries, expected 4 times one of linear_attention"),
        ({"index_kpool": 8}, str, [], "index_kpool is 8, a CPU server pools 4 tokens"),
        ({"index_kpool": None}, str, [], "index_kpool is 16, a CPU server pools 4 tokens"),  # as transformers reads it
        ({}, str, ["--max-model-len", "512", "--kv-cache-memory-bytes", "90000"], "a context of 512 tokens takes "),
    ],
    ids=["drafts", "no MTP layer", "ranks", "layer type", "pools of 8", "no size of pools", "context"],
)
def test_one_line_says_what_flash_is_not_served_with(
    keys: dict[str, Any], edit: Callable[[str], str], flags: list[str], words: str, tmp_path: Path
) -> None:
    model = with_floats(write_tiny_flash(tmp_path / "model", **keys))
    path = model / "config.json"
    path.write_text(edit(path.read_text()))
    assert_one_clear_line(in_process("serve", model, "--dry-run", "--", *flags), 2, words)


def test_the_cache_that_is_named_is_large_enough(tmp_path: Path) -> None:
    model = with_floats(write_tiny_flash(tmp_path / "model"))
    context = ["--max-model-len", "512", "--kv-cache-memory-bytes"]
    refused = in_process("serve", model, "--dry-run", "--", *context, "90000")
    (size,) = re.findall(r"--kv-cache-memory-bytes (\d+)", refused.stderr)
    assert refused.returncode == 2 and int(size) > 90000
    assert in_process("serve", model, "--dry-run", "--", *context, size).returncode == 0


def test_what_vllm_reports_itself_is_left_to_it(tmp_path: Path) -> None:
    config = load_config(write_tiny_flash(tmp_path / "model"))
    for text in ("{", "[]", '{"num_speculative_tokens": "x"}', '{"method": "mtp", "num_speculative_tokens": -1}'):
        flags = ["--speculative-config", text]
        assert drafts_of(flags) == 0
        refuse_flags(config, flags)
    refuse_flags(config, drafting(5))
