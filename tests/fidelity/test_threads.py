"""`eval` and `analyze` with any number of threads, and what they read ahead."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from glm5_ascend.checkpoint import read_ahead
from glm5_ascend.checkpoint.index import CheckpointDir
from glm5_ascend.checkpoint.shards import Shard
from glm5_ascend.checkpoint.source import Source, open_source
from glm5_ascend.fidelity.analysis.report import AnalysisReport
from glm5_ascend.fidelity.analysis.run import analyze, prepare
from glm5_ascend.fidelity.evaluation import stored_layer, stored_model
from glm5_ascend.fidelity.evaluation.compare import FidelityComparison, compare
from glm5_ascend.fidelity.options import AnalyzeOptions
from tests.support.command import in_process
from tests.support.page_cache import cached, evict
from tests.support.server_process import wait_for
from tests.support.tiny_model import write_calibration, write_tiny_model

WINDOWS = list(torch.randint(7, 263, (5, 40), generator=torch.Generator().manual_seed(8)))


def tensors(comparison: FidelityComparison) -> list[torch.Tensor]:
    assert comparison.drafts_reference is not None and comparison.drafts_quantized is not None
    shares = [share for layer in comparison.layers for share in (layer.experts, layer.indexer) if share is not None]
    drafts = [comparison.drafts_reference, comparison.drafts_quantized]
    return [comparison.kl, comparison.nll_reference, comparison.nll_quantized, comparison.same_top1, *shares, *drafts]


@pytest.mark.parametrize("threads", [2, 7])
def test_eval_gives_the_same_bits(
    threads: int, tiny_source: Path, tiny_w4a8: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_model, "VOCABULARY_BLOCK", 50)  # several blocks of everything
    monkeypatch.setattr(stored_model, "MLP_TOKENS", 33)
    monkeypatch.setattr(stored_layer, "BLOCK_WEIGHTS", 2**11)
    one, many = (
        tensors(compare(tiny_w4a8, tiny_source, WINDOWS, threads=count, drafts=True)) for count in (1, threads)
    )
    assert all(map(torch.equal, one, many))
    assert float(one[0].mean()) > 0


def test_analyze_gives_the_same_bits(tiny_source: Path, tmp_path: Path) -> None:
    options = AnalyzeOptions(tiny_source, calib=write_calibration(tmp_path / "calib.jsonl"), samples=5, seq_len=64)
    one, many = (AnalysisReport(analyze(prepare(options), threads=threads), 0).to_dict() for threads in (1, 3))
    assert one == many


class Files:
    """Records what it is asked for; tensor N has N bytes."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def read_ahead(self, name: str) -> int:
        self.asked.append(int(name))
        return int(name)


@pytest.mark.parametrize(("memory", "most"), [(10**9, 100), (200, 50), (0, 1)])
def test_reading_stays_a_bounded_way_ahead(memory: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a constant, and by a quarter of the memory that is available; without any, too, all items come."""
    monkeypatch.setattr(read_ahead, "AHEAD", 100)
    monkeypatch.setattr(read_ahead, "available_memory", lambda: memory)
    files, sizes, taken = Files(), [10, 60, 50, 5, 5, 200, 1, 1], list[int]()
    reading = read_ahead.ReadAhead(files, sizes, lambda size: [str(size)])
    assert most <= sum(files.asked) < most + max(sizes)  # before anything was taken
    for size in reading:
        taken.append(size)
        assert sum(files.asked) - sum(taken) < most + max(sizes)
        assert len(files.asked) == len(sizes) or sum(files.asked) - sum(taken) >= most
    assert files.asked == taken == sizes


@pytest.mark.parametrize("open_files", [open_source, CheckpointDir])
def test_what_is_asked_for_is_the_tensor(open_files: Callable[[Path], Source | CheckpointDir], tmp_path: Path) -> None:
    """Also a tensor that is part of another; a file that is gone is said when it is read."""
    files = open_files(write_tiny_model(tmp_path / "source"))
    name = "model.layers.1.mlp.experts.1.up_proj.weight"
    assert files.read_ahead(name) == 2 * files.read(name).numel()
    for path in (tmp_path / "source").glob("*.safetensors"):
        path.unlink()
    assert files.read_ahead(name) > 0


def test_all_of_a_large_tensor_is_read(tmp_path: Path) -> None:
    """Linux reads of one request no more than the device's read-ahead: less than a tensor."""
    save_file({"large": torch.ones(2**15, 2**10, dtype=torch.int8)}, path := tmp_path / "model.safetensors")
    content = evict(path, path.stat().st_size)
    shard = Shard(path)
    shard.read_ahead(entry := shard.entries["large"], 0, 2**25)
    wait_for(lambda: cached(content[entry.start : entry.end]) >= 2**25 - 2 * mmap.PAGESIZE, "the pages", 60)


def test_both_commands_say_their_memory_before_the_first_layer(
    tiny_source: Path, tiny_w4a8: Path, tmp_path: Path
) -> None:
    calib = write_calibration(tmp_path / "calib.jsonl")
    short = ["--windows", 2, "--window", 64, "--json"]
    for words in (
        ["eval", tiny_w4a8, "--against", tiny_source, *short],
        ["analyze", tiny_source, "--calib", calib, "--samples", 4, "--seq-len", 64, "--json"],
    ):
        done = in_process(*words)
        assert done.returncode == 0 and json.loads(done.stdout)["ok"], done.stderr
        lines = [line for line in done.stderr.splitlines() if line.startswith("layer ")]
        assert lines[0].startswith("layer 0/3") and "predicted peak memory" in lines[0]
        assert lines[1].startswith("layer 1/3") and "eta " in lines[1]
