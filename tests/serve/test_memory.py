"""What `serve` says about memory before it loads a model: numbers, a refusal, limits of containers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from glm5_ascend.checkpoint.summary import summarize
from glm5_ascend.deploy import server
from glm5_ascend.errors import MissingEnvironmentError
from glm5_ascend.files import cgroups
from glm5_ascend.model.config_file import load_config
from glm5_ascend.serve import memory
from glm5_ascend.serve.flags import ServerCommand, value_of
from glm5_ascend.serve.local_server import free_port
from glm5_ascend.serve.options import ServeOptions
from glm5_kernels import registry
from tests.support.command import made_model
from tests.support.tiny_model import tiny_config

#: GLM-5: 78 layers and the MTP layer.
GLM5 = tiny_config(max_position_embeddings=202752) | {
    "hidden_size": 6144, "intermediate_size": 12288, "moe_intermediate_size": 2048, "num_hidden_layers": 78,
    "first_k_dense_replace": 3, "num_nextn_predict_layers": 1, "num_attention_heads": 64, "q_lora_rank": 2048,
    "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "qk_head_dim": 256, "v_head_dim": 256,
    "n_routed_experts": 256, "n_shared_experts": 1, "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048,
    "vocab_size": 154880,
}  # fmt: skip
SIZE = 418_170_000_000


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A quantized checkpoint of this size, a hole; of a CPU with instructions for bf16."""
    monkeypatch.setattr(registry, "widens_bf16", lambda: False)
    (tmp_path / "config.json").write_text(json.dumps(GLM5))
    config = load_config(tmp_path)
    types = {
        f"{prefix}{weight.name}.weight": "W4A8_DYNAMIC"
        if config.spec.is_routed(prefix + weight.name)
        else "W8A8_DYNAMIC"
        for prefix, weight, _ in config.counted_weights()
        if not prefix.startswith(config.mtp_prefixes) and prefix and weight.name not in config.engines.why_float
    }
    (tmp_path / "quant_model_description.json").write_text(json.dumps(types))
    (tmp_path / "model.safetensors").touch()
    os.truncate(tmp_path / "model.safetensors", SIZE)
    return tmp_path


def need(directory: Path, available: int, monkeypatch: pytest.MonkeyPatch, *flags: str, **env: str) -> memory.Memory:
    monkeypatch.setattr(memory, "available_memory", lambda: available)
    return memory.memory_of(summarize(directory), ServerCommand(env, ["serve", *flags]))


def test_the_real_model(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache and working memory must fit, the mapped files need not."""
    needed = need(directory, 10**12, monkeypatch, VLLM_CPU_KVCACHE_SPACE="4")
    assert needed.weights == SIZE and needed.cache == 4 * 2**30
    assert 3e9 < needed.copied < 6e9 and 2e9 < needed.working < 6e9
    needed.require()
    assert str(needed).startswith("memory: weights 418.2 GB, of which ") and str(needed).endswith("available 1000.0 GB")
    small = need(directory, needed.fixed, monkeypatch, VLLM_CPU_KVCACHE_SPACE="4")
    small.require()
    assert str(small).endswith("; weights are read from disk again")
    with pytest.raises(MissingEnvironmentError, match=r"needs .* GB .* available: copied weights .*, cache 4.3 GB"):
        need(directory, needed.fixed - 1, monkeypatch, VLLM_CPU_KVCACHE_SPACE="4").require()


def test_flags_change_what_is_needed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = need(directory, 0, monkeypatch)
    stated = need(directory, 0, monkeypatch, "--kv-cache-memory-bytes", "7000", VLLM_CPU_KVCACHE_SPACE="4")
    longer = need(directory, 0, monkeypatch, "--max-num-batched-tokens=8192")
    assert stated.cache == 7000 and longer.working > 1.5 * plain.working
    mtp = "--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}'
    drafts = need(directory, 0, monkeypatch, *mtp)
    assert 0.5e9 < drafts.copied - plain.copied < 1e9  # the MTP layer's experts stay in the file
    monkeypatch.setattr(registry, "widens_bf16", lambda: True)
    assert need(directory, 0, monkeypatch, *mtp).copied < drafts.copied - 0.2e9  # its other linears, too
    monkeypatch.setattr(registry, "widens_bf16", lambda: False)
    ranks = need(directory, 0, monkeypatch, "--tensor-parallel-size", "2", "--kv-cache-memory-bytes", "7000")
    assert ranks.cache == 14000 and 9e9 < ranks.copied - plain.copied < 13e9


@pytest.mark.parametrize(
    ("left_gb", "flags", "context", "cache_gb"),
    [
        (0, [], 8192, 0.93),  # less than the weights: a short context, which must fit all the same
        (20, [], 89088, 10),
        (20, ["--max-num-seqs", "1", "--max-model-len", "16384"], 16384, 1.85),
        (20, ["--max-model-len", "202752"], 202752, 22.6),  # refused later, with the numbers
        (10_000, [], 202752, 45.2),
        (20, ["--max-model-len", "2048"], 2048, 1.07),
        (20, ["--max-model-len", "2048", "--max-num-seqs", "2"], 2048, 0.499),
        (20, ["--kv-cache-memory-bytes", "1073741824"], 9216, None),
        (20, ["--gpu-memory-utilization", "0.5"], 89088, None),
        (20, ["--tensor-parallel-size", "2"], 44032, 5),  # in each rank
    ],
)
def test_context_and_cache_by_what_is_left(
    left_gb: float, flags: list[str], context: int, cache_gb: float | None, directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A context in half of what the weights leave, a cache for two; a token of GLM-5 takes 111 kB in the 79 layers."""
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    working = need(directory, 0, monkeypatch, *flags).working
    monkeypatch.setattr(memory, "available_memory", lambda: SIZE + working + int(left_gb * 1e9))
    limits = memory.default_limits(summarize(directory), ServerCommand({}, ["serve", *flags]))
    assert limits.pop("--max-model-len", value_of(flags, "--max-model-len")) == str(context)
    sizes = [int(size) / 1e9 for size in limits.values()]
    assert sizes == ([] if cache_gb is None else [pytest.approx(cache_gb, rel=0.01)])


def test_float_weights_are_copied(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / "quant_model_description.json").unlink()
    with pytest.raises(MissingEnvironmentError, match=r"copied weights 418.2 GB"):
        need(directory, SIZE, monkeypatch).require()


def test_serve_refuses_before_it_starts(directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(server, "require_cpu_environment", lambda: None)
    monkeypatch.setattr(server, "check_directory", summarize)
    options = ServeOptions(directory, skip_verify=True, port=free_port())
    monkeypatch.setattr(memory, "available_memory", lambda: 10**9)
    with pytest.raises(MissingEnvironmentError) as error:
        server.checked_command(options)
    assert error.value.exit_code == 3
    monkeypatch.setattr(memory, "available_memory", lambda: 10**12)
    assert server.checked_command(options).argv
    assert "memory: weights 418.2 GB" in capsys.readouterr().err


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("limits", "left"),
    [((("max", 10),), 10**15), ((("5000", 3000),), 2500), ((("max", 10), ("900", 400)), 1000), ((("100", 4000),), 0)],
)
def test_limits_of_control_groups(
    limits: tuple[tuple[str, int], ...], left: int, version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tightest group counts; its cached files (500 bytes) can be given back."""
    group, path = tmp_path / ("memory" if version == 1 else ""), "/".join(f"g{i}" for i in range(len(limits)))
    names = ("limit_in_bytes", "usage_in_bytes", "total_") if version == 1 else ("max", "current", "")
    for number, (limit, used) in enumerate(limits):
        group /= f"g{number}"
        group.mkdir(parents=True)
        unlimited = str(2**63 - 4096) if version == 1 else "max"
        (group / f"memory.{names[0]}").write_text(f"{unlimited if limit == 'max' else limit}\n")
        (group / f"memory.{names[1]}").write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"anon 7\n{names[2]}inactive_file 200\n{names[2]}active_file 300\n")
    (tmp_path / "cgroup").write_text(f"9:cpu:/x\n{'4:memory' if version == 1 else '0:'}:/{path}\n")
    monkeypatch.setattr(cgroups, "_ROOT", tmp_path)
    monkeypatch.setattr(cgroups, "_OWN", tmp_path / "cgroup")
    monkeypatch.setattr(cgroups.psutil, "virtual_memory", lambda: type("", (), {"available": 10**15}))
    assert cgroups.available_memory() == left


@pytest.mark.long
@pytest.mark.server
def test_copied_bytes_at_real_widths(tmp_path: Path, run_engine: Any) -> None:
    """Layers of GLM-5 and the MTP layer: a process that loads them takes what is predicted; 60 MB are buffers."""
    sizes = ["--layers", "3", "--dense", "1", "--experts", "16", "--vocab", "2048", "--mtp", "1", "--recipe", "w4a8"]
    model = made_model(tmp_path / "model", "--preset", "real", *sizes)
    predicted = memory.copied_bytes(load_config(model), summarize(model).types, drafts=True, ranks=1)
    measured = run_engine("tests.serve.support.copied:main", str(model))["copied"]
    print(f"copied: {measured / 1e6:.0f} MB, predicted: {predicted / 1e6:.0f} MB")
    assert 0.9 * predicted < measured < 1.2 * predicted
