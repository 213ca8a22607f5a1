"""What each op refuses: shapes, dtypes and values outside its contract, before any implementation runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from glm5_kernels import registry
from glm5_kernels.contract import check
from glm5_kernels.errors import KernelInputError
from glm5_kernels.int8 import PER_TENSOR
from glm5_kernels.parity.cases import cases
from glm5_kernels.w4a8_moe import ExpertWeights
from tests.support.command import ROOT

Change = Callable[[Any], Any]
#: op, field, what becomes of it, the complaint.
REFUSED: tuple[tuple[str, str, Change, str], ...] = (
    ("lightning_indexer", "q", lambda q: q[0], r"q has shape \[32, 128\], expected \[32, 128, \*\]"),
    ("lightning_indexer", "weights", lambda w: w.long(), "weights is torch.int64, expected fp32, bf16 or fp16"),
    ("lightning_indexer", "topk", lambda _: 0, "topk is 0"),
    ("lightning_indexer", "batch", lambda b: b._replace(block_table=b.block_table + 99), "block_table names block"),
    ("lightning_indexer", "batch", lambda b: b._replace(seq_lens=b.seq_lens.float()), "batch.seq_lens is "),
    ("lightning_indexer", "batch", lambda b: b._replace(block_table=b.block_table[1:]), "batch.block_table has shape"),
    ("lightning_indexer", "pool", lambda _: 5, "pool is 5, must divide topk, 64"),
    ("indexer_pool", "tail_blocks", lambda t: t + 1, "tail_blocks names ring 4, tail_cache has 4"),
    ("indexer_pool", "tail_cache", lambda t: t[:, :, :3], "tail_cache keeps 3 tokens of a request, pools have 4"),
    ("indexer_pool", "tail_cache", lambda t: t.half(), "tail_cache is torch.float16, k is torch.float32"),
    ("indexer_pool", "pool_cache", lambda c: c[:2], r"block_table names block \d, the cache has 2"),
    ("indexer_pool", "ape", lambda a: a[:, 1:], "ape has shape"),
    ("kda", "state_slots", lambda s: s * 0, "state_slots writes slot 0 twice"),
    ("kda", "state_slots", lambda s: s + 1, "state_slots names slot 7, states has 7"),
    ("kda", "initial_slots", lambda s: s + 4, "initial_slots names slot 7, states has 7"),
    ("kda", "initial_slots", lambda s: s.new_tensor([1, 6, 2]), "sequence 1 begins with slot 6, which sequence 0 wri"),
    ("kda", "query_start_loc", lambda s: s.clamp(max=2), r"query_start_loc \[0, 1, 2, 2\] must rise from 0 to the 3"),
    ("kda", "query_start_loc", lambda s: s[1:], "query_start_loc has shape"),
    ("sparse_flash_attention_quant", "kv_cache", lambda c: c[..., :128], "kv_cache has shape"),
    ("sparse_flash_attention_quant", "ql_nope", lambda q: q[..., :100], "kv_lora_rank is 100"),
    ("mla_preprocess", "slot_mapping", lambda s: s + 256, "is outside the cache"),
    ("mla_preprocess", "q_b", lambda w: w._replace(weight=w.weight[1:]), r"q_b\.weight has shape"),
    ("mla_preprocess", "q_b", lambda w: w._replace(weight=w.weight.half()), r"q_b\.weight is torch.float16"),
    ("mla_preprocess", "w_uk_t", lambda w: w.half(), "w_uk_t is torch.float16, hidden_states is torch.float32"),
    ("indexer_preprocess", "k", lambda k: k.half(), "k is torch.float16, q is torch.float32"),
    ("indexer_preprocess", "slot_mapping", lambda s: s + 256, "is outside the cache"),
    ("v_up_proj", "w_uv", lambda w: w.half(), "w_uv is torch.float16, latent is torch.float32"),
    ("int8_linear", "w", lambda w: w._replace(scale=None), "needs scale"),
    ("int8_linear", "w", lambda w: w._replace(scale=w.scale[1:]), r"w\.scale has shape"),
    ("int8_linear", "w", lambda w: w._replace(weight=w.weight.float()), "needs int8 weights"),
    ("int8_linear", "w", lambda w: w._replace(quant_mode="int5"), "unknown quant mode 'int5'"),
    ("int8_linear", "w", lambda w: w._replace(quant_mode=PER_TENSOR), "needs scale, input_scale"),
    ("w4a8_moe", "topk_ids", lambda i: i + 8, "topk_ids names expert"),
    ("w4a8_moe", "w13", lambda w: ExpertWeights(w.blocks[1:]), r"w13 is 15 x \[128, 192\], expected 16 x"),
    ("w4a8_moe", "w2", lambda w: ExpertWeights([b.view(torch.int8) for b in w.blocks]), r"w2 is 8 x \[96, 128\], "),
    ("w4a8_moe", "w2_scale", lambda s: s[:, 1:], "w2_scale has shape"),
    ("rms_norm", "residual", lambda r: r.half(), "residual is torch.float16, x is torch.float32"),
    ("rms_norm", "weight", lambda w: w[1:], "weight has shape"),
    ("mhc", "comb", lambda _: None, "output, post and comb belong together"),
    ("mhc", "fn", lambda f: f[:, 1:], "fn has shape"),
    ("mhc", "fn", lambda f: f.double(), "fn is torch.float64, expected fp32"),
    ("mhc", "base", lambda b: b[1:], "base has shape"),
    ("mhc", "scale", lambda s: s[1:], r"scale has shape \[2\], expected \[3\]"),
    ("mhc", "norm_weight", lambda w: w[1:], "norm_weight has shape"),
    ("mhc", "sinkhorn_iters", lambda _: 0, "sinkhorn_iters is 0"),
    ("hadamard", "weight", lambda w: w[:5], "hadamard of size 5"),
    ("hadamard", "weight", lambda w: w[:3], "no Hadamard matrix of size 3"),
    ("ssz_scale", "weight", lambda w: w[:, :0], "at least one column"),
    ("round_rows", "bits", lambda _: 5, "cannot round"),
    ("round_rows", "parts", lambda _: 7, "cannot round"),
    ("gptq_inverse_factors", "damping", lambda _: 0.0, "damping > 0"),
    ("gptq_round", "perm", lambda p: p + 1, "every one of 64 columns once"),
)  # fmt: skip


def operands_of(op: str) -> Any:
    fp32 = (case for case in cases(ops=[op]) if "bfloat16" not in case.variant)
    return registry.contract(op)(*next(fp32).arguments)


@pytest.mark.parametrize(("op", "field", "change", "words"), REFUSED)
def test_operands_that_do_not_fit(op: str, field: str, change: Change, words: str) -> None:
    operands = operands_of(op)
    check(operands)
    with pytest.raises(KernelInputError, match=words):
        check(operands._replace(**{field: change(getattr(operands, field))}))


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        ([], "no weights"),
        ([torch.zeros(4, 64)], "torch.float32"),
        ([torch.zeros(64, 4, dtype=torch.int8).t()], "strides"),
        ([torch.zeros(4, 64, dtype=torch.int8), torch.zeros(4, 64, dtype=torch.uint8)], "block 1"),
        ([torch.zeros(4, 64, dtype=torch.int8), torch.zeros(4, 128, dtype=torch.int8)[:, :64]], "block 1"),
    ],
)
def test_expert_weights_that_do_not_fit(blocks: list[torch.Tensor], words: str) -> None:
    with pytest.raises(KernelInputError, match=words):
        ExpertWeights(blocks)


def test_a_query_without_heads() -> None:
    operands = operands_of("lightning_indexer")
    with pytest.raises(KernelInputError, match="at least one head and one dim"):
        check(operands._replace(q=operands.q[:, :0], weights=operands.weights[:, :0]))


def test_operands_on_two_devices() -> None:
    operands = operands_of("v_up_proj")
    with pytest.raises(KernelInputError, match="w_uv is on meta, the other arguments are on cpu"):
        check(operands._replace(w_uv=torch.empty(operands.w_uv.shape, device="meta")))


def test_kernels_need_little() -> None:
    """torch and numpy; Triton only in Triton's kernels."""
    names = set(sys.stdlib_module_names) | {"torch", "numpy", "glm5_kernels"}
    for path in (ROOT / "kernels").rglob("*.py"):
        allowed = names | ({"triton"} if path.parent.name == "kernels" else set())
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith(("import ", "from ")):
                assert line.split()[1].split(".")[0] in allowed, f"{path}: {line}"
