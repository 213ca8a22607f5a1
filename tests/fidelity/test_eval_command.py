"""`glm5-ascend eval` as a user types it: its report, and one clear line for whatever cannot be compared."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import Copy
from tests.support.command import assert_one_clear_line, in_process
from tests.support.report_page import assert_self_contained
from tests.support.tiny_model import write_tiny_model

WORDS = "The residual stream of a transformer carries few very large channels. " * 8  # one token a byte


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": WORDS}) + "\n" for _ in range(2)))
    return path


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return in_process("eval", *arguments)


def test_the_report(tiny_source: Path, tiny_w4a8: Path, text: Path, tmp_path: Path) -> None:
    html = tmp_path / "report.html"
    done = command(tiny_w4a8, "--against", tiny_source, "--text", text, "--window", 64, "--json", "--html", html)
    report = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert {"kl_mean", "kl_p99", "top1_agreement", "nll_source", "nll_quantized", "tokens"} <= set(report)
    windows = 2 * len(WORDS) // (64 - 2)  # each begins with [gMASK]<sop>
    assert (report["ok"], report["tokens"], report["windows"]) == (True, windows * 63, windows)
    low, high = report["intervals"]["kl_mean"]
    assert 0 < low < report["kl_mean"] < high < report["kl_p99"] <= report["kl_max"]
    assert len(report["layers"]) == 3 and report["layers"][0]["expert_agreement"] is None
    lines = [line for line in done.stderr.splitlines() if line.startswith("layer ")]
    assert [line.split()[1] for line in lines] == ["0/3", "1/3", "2/3", "3/3"] and "eta" in lines[1]
    shown_text = assert_self_contained(html).text
    for part in ("glm5-ascend eval", str(text), "torch", "upper end of its 95 %"):
        assert part in shown_text, part
    # A second report replaces the first; another kind of file is kept.
    again = ["--against", tiny_source, "--text", text, "--window", 64, "--windows", 1, "--html"]
    done = command(tiny_w4a8, *again, html)
    assert done.returncode == 0 and "no intervals" in done.stdout
    assert_one_clear_line(command(tiny_w4a8, *again, text), 2, "text.jsonl", "not a report")
    assert WORDS in text.read_text()


def test_another_model(tiny_w4a8: Path, tmp_path: Path, text: Path) -> None:
    for key, value in {"vocab_size": 328, "num_hidden_layers": 4, "n_routed_experts": 8}.items():
        other = write_tiny_model(tmp_path / key, **{key: value})
        done = command(tiny_w4a8, "--against", other, "--text", text, "--window", 64)
        assert_one_clear_line(done, 2, f"{key} is", str(value))


@pytest.mark.parametrize(
    ("content", "words"),
    [("", ("0 tokens",)), ("\n\n", ("0 tokens",)), ('"short"\n', ("7 tokens", "64")), ("{]\n", ("text.jsonl:1",))],
)
def test_text_that_cannot_serve(content: str, words: tuple[str, ...], tiny_source: Path, text: Path) -> None:
    text.write_text(content)
    done = command(tiny_source, "--against", tiny_source, "--text", text, "--window", 64)
    assert_one_clear_line(done, 2, "text.jsonl", *words)


def test_other_bad_input(tiny_source: Path, tiny_w4a8: Path, text: Path, tmp_path: Path) -> None:
    against = ["--against", tiny_source]
    assert_one_clear_line(command(tmp_path / "nowhere", *against), 2, "nowhere", "no such directory")
    assert_one_clear_line(command(tiny_w4a8, *against, "--text", tmp_path / "no.txt"), 2, "no.txt")
    assert_one_clear_line(command(tiny_w4a8), 2, "--against")
    assert_one_clear_line(command(*against), 2, "DIR or --url")
    assert_one_clear_line(command(tiny_w4a8, *against, "--window", 513, "--text", text), 2, "513", "512 positions")
    done = command(*against, "--text", text, "--window", 64, "--url", "http://127.0.0.1:9")
    assert_one_clear_line(done, 3, "127.0.0.1:9", "no answer")
    assert_one_clear_line(command(*against, "--url", "127.0.0.1:9"), 2, "not a URL")
    bare = write_tiny_model(tmp_path / "bare", tokenizer=False)
    assert_one_clear_line(command(bare, "--against", bare, "--text", text, "--window", 64), 2, "tokenizer")
    assert_one_clear_line(command(tiny_source, "--against", tiny_w4a8, "--html", tmp_path / "no" / "r.html"), 2, "no")


@pytest.mark.parametrize("tensor", ["model.layers.1.mlp.shared_experts.up_proj.weight_scale", "lm_head.weight"])
def test_not_a_number_fails_the_check(
    tensor: str, tiny_source: Path, tiny_w4a8: Path, editable: Copy, text: Path
) -> None:
    broken = editable(tiny_w4a8)
    for path in broken.glob("*.safetensors"):
        tensors = load_file(path)
        if tensor in tensors:
            tensors[tensor].view(-1)[3] = torch.inf
            save_file(tensors, path, {"format": "pt"})
    done = command(broken, "--against", tiny_source, "--text", text, "--window", 64, "--json")
    assert_one_clear_line(done, 1, "NaN or infinity", *(["layer 1"] if "layers" in tensor else ["KL"]))
    assert json.loads(done.stdout)["ok"] is False


def test_the_default_text_is_held_out(tiny_source: Path, tiny_w4a8: Path) -> None:
    """Python's documentation, of which neither the calibration nor the demo model's training has seen a window."""
    from glm5_ascend.fidelity.evaluation.python_docs import documents
    from glm5_ascend.quantize.calibration.dataset import default_calibration_file

    done = command(tiny_w4a8, "--against", tiny_source, "--windows", 2, "--window", 256, "--json")
    assert json.loads(done.stdout)["tokens"] == 2 * 255
    seen = default_calibration_file().read_text() + "\n".join(documents(held_out=False))
    text = "\n\n".join(documents(held_out=True))
    pieces = [text[start : start + 200] for start in range(0, len(text) - 200, 200)]
    assert not any(piece in default_calibration_file().read_text() for piece in pieces)
    assert sum(piece in seen for piece in pieces) < 0.05 * len(pieces)  # stock phrases of generated docstrings
