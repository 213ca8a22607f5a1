"""The memory rule at GLM-5's own sizes: one dense and one MoE layer, 64 experts, the whole vocabulary.

The files are holes but for what decides where tokens go: embedding rows, norms and the router. They take no disk, and
reading, converting and multiplying cost what they cost with real weights.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from glm5_ascend.checkpoint.source import open_source
from tests.support.command import made_model, said

WINDOW, WINDOWS = 48, 4
GATE = "model.layers.1.mlp.gate.weight"
pytestmark = pytest.mark.long


@pytest.fixture
def source(tmp_path: Path) -> Path:
    out = made_model(tmp_path / "real", "--preset", "real", "--experts", "64", "--hollow")
    files = open_source(out).files
    for name, entry in files.entries.items():
        rows = 260 if name == "model.embed_tokens.weight" else entry.shape[0]  # the tokenizer has bytes only
        if name in (GATE, "model.embed_tokens.weight") or "layernorm" in name or name == "model.norm.weight":
            values = torch.ones(rows) if len(entry.shape) == 1 else torch.randn(rows, entry.shape[1])
            with files.shards[files.file_of[name]].path.open("r+b") as file:
                file.seek(entry.start)
                file.write(values.to(torch.bfloat16).view(torch.uint8).numpy().tobytes())
    return out


def test_no_layer_no_head_and_no_two_experts_at_once(source: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(33 + 7 * i % 90) for i in range(WINDOW * WINDOWS)))
    arguments = ["eval", source, "--against", source, "--text", text, "--window", WINDOW, "--json"]
    code = (
        "import sys; from glm5_ascend.cli import run; code = run(sys.argv[1:]); "
        "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM'))); sys.exit(code)"
    )
    shown = said(sys.executable, "-c", code, *arguments)
    report, peak = json.loads(shown.splitlines()[0]), 1024 * int(shown.split()[-2])
    assert report["tokens"] == WINDOWS * (WINDOW - 1) and report["kl_max"] == 0
    config = open_source(source).config
    expert = 4 * 3 * config.moe_intermediate_size * config.hidden_size
    dense = 4 * 3 * config.intermediate_size * config.hidden_size  # the largest piece
    head = 4 * config.vocab_size * config.hidden_size
    assert 64 * expert > 9e9 and head > 3.8e9
    assert peak < 800e6 + 1.4 * dense, f"{peak / 1e9:.2f} GB"
    assert peak < 0.6 * head
    assert os.stat(source / "model-00001.safetensors").st_blocks * 512 < 1e9  # holes
