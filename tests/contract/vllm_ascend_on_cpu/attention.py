"""vllm-ascend's own `AscendSFAImpl.forward` over one layer of a checkpoint, step by step as a server would call it.

    python -m vllm_ascend_on_cpu.attention CHECKPOINT KERNELS SCHEMAS OUT

KERNELS is the folder of glm5_kernels, SCHEMAS a JSON list of vllm-ascend's operators. OUT, a .safetensors file, gets
per step what went in, what the indexer chose and what came out, and how often each operator was called.
GLM5_TEST_STEPS names the steps to run, separated by commas; all without it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_ascend_on_cpu.load import is_attention, load, worker  # isort: skip  # before vLLM

import torch
from safetensors.torch import save_file

LAYER = 1
PAGE = 128
#: Per step (length before, new tokens) of each request that takes part, by its number.
STEPS = {
    "prefill": {0: (0, 20), 1: (0, 17)},
    "decode": {0: (20, 1), 1: (17, 1)},
    "long prefill": {2: (0, 2300)},
    "mixed": {0: (21, 1), 2: (2300, 3), 3: (0, 30)},
}
#: Shuffled pages; those of no request are never written.
PAGES = 24
TABLE = {0: [7], 1: [3], 2: [20, 1, 19, 2, 18, 4, 17, 5, 16, 6, 15, 8, 14, 9, 13, 10, 12, 11, 0], 3: [22]}


def angles(positions: torch.Tensor, rope: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [T, 1, 1, rope], both halves alike, as vllm-ascend's metadata carries them."""
    frequency = theta ** (-torch.arange(0, rope, 2).float() / rope)
    half = positions.float()[:, None] * frequency
    both = torch.cat([half, half], dim=-1)[:, None, None]
    return both.cos().bfloat16(), both.sin().bfloat16()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("checkpoint", "kernels", "schemas", "out"):
        parser.add_argument(name, type=Path)
    options = parser.parse_args()
    with worker(str(options.checkpoint)) as config:
        model = load(config, config.model_config)
        sys.path.insert(0, str(options.kernels))
        from vllm_ascend_on_cpu import npu_kernels

        npu_kernels.define(json.loads(options.schemas.read_text()))
        outputs = run(model, config.model_config.hf_config, npu_kernels.CHOSEN)
    save_file(outputs, options.out, metadata={"calls": json.dumps(npu_kernels.CALLS)})


def own_indexer(implementation: Any) -> Any:
    """The indexer of a layer where it keeps its own cache and metadata (0.30), else None."""
    return implementation.indexer if getattr(implementation, "runtime_has_indexer", False) else None


@contextmanager
def indexers_context(indexer: Any, metadata: Any) -> Iterator[None]:
    """Metadata of the indexer's own cache, where vLLM's forward context holds it."""
    if indexer is None:
        yield
        return
    from vllm.config import get_current_vllm_config
    from vllm.forward_context import set_forward_context
    from vllm_ascend.attention.indexer import AscendSFAIndexerMetadata

    metadata_of_indexer = AscendSFAIndexerMetadata(
        num_actual_tokens=metadata.num_actual_tokens,
        slot_mapping=metadata.slot_mapping,
        seq_lens=metadata.seq_lens,
        cum_query_lens=metadata.cum_query_lens,
        block_table=metadata.block_table,
        sin=metadata.sin,
        cos=metadata.cos,
        block_size=PAGE,
        actual_seq_lengths_query=metadata.cum_query_lens,
        actual_seq_lengths_key=metadata.seq_lens,
    )
    with set_forward_context({indexer.k_cache.prefix: metadata_of_indexer}, get_current_vllm_config()):
        yield


def run(model: torch.nn.Module, hf: object, topk: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """All steps. The caches start as NaN: only what was written may be read."""
    from vllm_ascend.attention import sfa_v1
    from vllm_ascend.attention.attention_v1 import AscendAttentionState

    name = f"model.layers.{LAYER}.self_attn.attn"
    (implementation,) = (m.impl for n, m in model.named_modules() if f"layers.{LAYER}." in n and is_attention(m))
    hidden, rank, rope = hf.hidden_size, hf.kv_lora_rank, hf.qk_rope_head_dim  # type: ignore[attr-defined]
    widths = rank, rope, hf.index_head_dim  # type: ignore[attr-defined]
    caches = tuple(torch.full((PAGES, PAGE, 1, width), float("nan"), dtype=torch.bfloat16) for width in widths)
    if indexer := own_indexer(implementation):
        indexer.k_cache.kv_cache, caches = caches[2:], caches[:2]
    generator = torch.Generator().manual_seed(11)
    outputs: dict[str, torch.Tensor] = {}
    for step in os.environ.get("GLM5_TEST_STEPS", ",".join(STEPS)).split(","):
        requests = STEPS[step]
        tokens = sum(new for _, new in requests.values())
        states = torch.randn(tokens, hidden, generator=generator).bfloat16()
        positions = torch.cat([torch.arange(before, before + new) for before, new in requests.values()])
        owners = torch.cat([torch.full((new,), owner) for owner, (_, new) in requests.items()])
        table = torch.zeros(len(requests), len(TABLE[2]), dtype=torch.int32)
        for row, owner in enumerate(requests):
            table[row, : len(TABLE[owner])] = torch.tensor(TABLE[owner], dtype=torch.int32)
        row_of = torch.cat([torch.full((new,), row) for row, (_, new) in enumerate(requests.values())])
        slots = table[row_of, positions // PAGE].long() * PAGE + positions % PAGE
        cos, sin = angles(positions, rope, hf.rope_parameters["rope_theta"])  # type: ignore[attr-defined]
        lengths = torch.tensor([before + new for before, new in requests.values()], dtype=torch.int32)
        metadata = sfa_v1.AscendSFAMetadata(
            num_actual_tokens=tokens,
            num_input_tokens=tokens,
            slot_mapping=slots,
            seq_lens=lengths,
            seq_lens_cpu=lengths,
            cum_query_lens=torch.tensor([new for _, new in requests.values()]).cumsum(0).int(),
            block_table=table,
            sin=sin,
            cos=cos,
            attn_state=AscendAttentionState.DecodeOnly if step == "decode" else AscendAttentionState.ChunkedPrefill,
            block_size=PAGE,
        )
        output = torch.empty(tokens, hidden, dtype=torch.bfloat16)
        with torch.inference_mode(), indexers_context(indexer, metadata):
            implementation.forward(name, states, caches, metadata, output=output)
        values = {"states": states, "positions": positions, "owners": owners, "chosen": topk[-1], "output": output}
        outputs |= {f"{step}.{key}": value.clone() for key, value in values.items()}
    return outputs


if __name__ == "__main__":
    main()
