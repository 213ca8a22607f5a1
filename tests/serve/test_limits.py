"""Flags that a CPU server refuses for a model before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from glm5_ascend.model.config_file import load_config
from glm5_ascend.serve.limits import drafts_of, refuse_flags
from tests.support.command import assert_one_clear_line, in_process
from tests.support.tiny_flash import with_floats, write_tiny_flash

pytestmark = pytest.mark.server
pytest.importorskip("vllm")


def drafting(tokens: int) -> list[str]:
    return ["--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": tokens})]


@pytest.mark.parametrize(
    ("mtp_layers", "layer_type", "flags", "words"),
    [
        (1, "", drafting(6), "num_speculative_tokens is 6: linear attention keeps states for 1 to 5 drafts"),
        (0, "", drafting(1), "the model has no MTP layer that could draft"),
        (1, "", ["--tensor-parallel-size", "2"], "linear attention is not split among ranks on a CPU yet"),
        (1, "convolution", [], "layer_types has 4 entries, expected 4 times one of linear_attention"),
    ],
    ids=["drafts", "no MTP layer", "ranks", "layer type"],
)
def test_one_line_says_what_flash_is_not_served_with(
    mtp_layers: int, layer_type: str, flags: list[str], words: str, tmp_path: Path
) -> None:
    model = with_floats(write_tiny_flash(tmp_path / "model", num_nextn_predict_layers=mtp_layers))
    if layer_type:
        path = model / "config.json"
        path.write_text(path.read_text().replace("deepseek_sparse_attention", layer_type))
    assert_one_clear_line(in_process("serve", model, "--dry-run", "--", *flags), 2, words)


def test_what_vllm_reports_itself_is_left_to_it(tmp_path: Path) -> None:
    config = load_config(write_tiny_flash(tmp_path / "model"))
    for text in ("{", "[]", '{"num_speculative_tokens": "x"}', '{"method": "mtp", "num_speculative_tokens": -1}'):
        flags = ["--speculative-config", text]
        assert drafts_of(flags) == 0
        refuse_flags(config, flags)
    refuse_flags(config, drafting(5))
