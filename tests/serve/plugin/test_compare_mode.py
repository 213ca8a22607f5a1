"""`GLM5_COMPARE=1`: correct kernels have a small difference, wrong ones a large one, on bf16 and int8 caches.

The operators are written without our code (`npu_operators`); the calls are those of vllm-ascend 0.23.0's
DeviceOperator. tests/contract has the same for bf16 caches with the release's own code.
"""

from __future__ import annotations

import inspect
import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from glm5_ascend.serve.plugin.ascend import calls, compare
from glm5_kernels import ops
from tests.ops.support import npu_operators

PAGE, PAGES, TOKENS, LENGTH = 128, 3, 5, 200
HEADS, RANK, ROPE, NOPE = 4, 512, 64, 32
INDEX_HEADS, INDEX_DIM = 8, 128


@pytest.fixture(scope="module", autouse=True)
def operators() -> None:
    npu_operators.register()


class Operator:
    """The calls of the kernels."""

    @staticmethod
    def indexer_select_post_process(
        sfa_impl: Any, q_li: Any, q_li_scale: Any, q_li_shape_ori: Any, weights: Any, kv_cache: Any, attn_metadata: Any,
        actual_seq_lengths_query: Any, actual_seq_lengths_key: Any, enable_sparse_li_c8: bool,
        use_torch_npu_lightning_indexer: bool,
    ) -> torch.Tensor:  # fmt: skip
        paged = {
            "actual_seq_lengths_query": actual_seq_lengths_query, "actual_seq_lengths_key": actual_seq_lengths_key,
            "block_table": attn_metadata.block_table, "layout_query": "TND", "layout_key": "PA_BSND",
            "sparse_count": 2048, "sparse_mode": 3,
        }  # fmt: skip
        at = 1 if sfa_impl.enable_sparse_sfa_c8 else 2
        if not enable_sparse_li_c8:
            return torch.ops.npu.npu_lightning_indexer(query=q_li, key=kv_cache[at], weights=weights, **paged)[0]
        return torch.ops._C_ascend.npu_lightning_indexer_quant(
            query=q_li.view(q_li_shape_ori), key=kv_cache[at], weights=weights.half(),
            query_dequant_scale=q_li_scale.view(q_li_shape_ori[:-1]), key_dequant_scale=kv_cache[at + 1].squeeze(2),
            query_quant_mode=0, key_quant_mode=0, **paged,
        )  # fmt: skip

    @staticmethod
    def execute_sparse_flash_attention_process(
        sfa_impl: Any, ql_nope: Any, q_pe: Any, kv_cache: Any, topk_indices: Any, attn_metadata: Any,
        actual_seq_lengths_query: Any, actual_seq_lengths_key: Any, *, block_table: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        kv = kv_cache[0]
        shared = {
            "key": kv, "value": kv, "sparse_indices": topk_indices, "scale_value": sfa_impl.scale,
            "sparse_block_size": 1, "block_table": attn_metadata.block_table, "layout_query": "TND",
            "actual_seq_lengths_query": actual_seq_lengths_query, "actual_seq_lengths_kv": actual_seq_lengths_key,
            "layout_kv": "PA_BSND", "sparse_mode": 3, "attention_mode": 2, "return_softmax_lse": True,
        }  # fmt: skip
        if kv.dtype != torch.int8:
            return torch.ops._C_ascend.npu_sparse_flash_attention(
                query=ql_nope, query_rope=q_pe, key_rope=kv_cache[1], **shared
            )[0]
        return torch.ops._C_ascend.npu_kv_quant_sparse_flash_attention(
            query=torch.cat([ql_nope, q_pe], -1), key_quant_mode=2, value_quant_mode=2, quant_scale_repo_mode=1,
            tile_size=128, rope_head_dim=ROPE, **shared,
        )[0]  # fmt: skip


class Situation:
    """One request of 200 tokens, five of them new."""

    def __init__(self, packed: bool, int8_keys: bool) -> None:
        self.generator = torch.Generator().manual_seed(5)
        self.layer = SimpleNamespace(
            layer_name="model.layers.3.self_attn.attn", scale=(NOPE + ROPE) ** -0.5, enable_sparse_sfa_c8=packed
        )
        self.metadata = SimpleNamespace(block_table=torch.tensor([[2, 0]], dtype=torch.int32))
        self.lengths = {
            "actual_seq_lengths_query": torch.tensor([TOKENS], dtype=torch.int32),
            "actual_seq_lengths_key": torch.tensor([LENGTH], dtype=torch.int32),
        }
        latents, rope, keys = (self.random(PAGES, PAGE, 1, width) for width in (RANK, ROPE, INDEX_DIM))
        caches = [ops.pack_latents(latents, rope)] if packed else [latents, rope]
        self.int8_keys = int8_keys
        if int8_keys:
            quantized, scales = ops.quantize_indexer(keys)
            caches += [quantized, scales[..., None]]
        else:
            caches.append(keys)
        self.caches = tuple(caches)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).bfloat16()

    def choose(self, operator: Any) -> torch.Tensor:
        q, scale, shape = self.random(TOKENS, INDEX_HEADS, INDEX_DIM), None, None
        if self.int8_keys:
            shape = q.shape
            q, scale = (tensor.flatten(0, 1) for tensor in ops.quantize_indexer(q))
        positions: torch.Tensor = operator.indexer_select_post_process(
            self.layer, q, scale, shape, self.random(TOKENS, INDEX_HEADS), self.caches, self.metadata,
            enable_sparse_li_c8=self.int8_keys, use_torch_npu_lightning_indexer=True, **self.lengths,
        )  # fmt: skip
        return positions

    def attend(self, operator: Any) -> torch.Tensor:
        topk_indices = torch.arange(50, dtype=torch.int32).expand(TOKENS, 1, 50).contiguous()
        out: torch.Tensor = operator.execute_sparse_flash_attention_process(
            self.layer, self.random(TOKENS, HEADS, RANK), self.random(TOKENS, HEADS, ROPE), self.caches, topk_indices,
            self.metadata, **self.lengths,
        )  # fmt: skip
        return out


def operator() -> Any:
    return type("Copy", (Operator,), {})


def messages(records: list[logging.LogRecord]) -> list[str]:
    return [record.getMessage() for record in records if "compare" in record.getMessage()]


def error(line: str) -> float:
    match = re.search(r"(?:relative error |differ \()([\d.]+)", line)
    assert match, line
    return float(match[1])


@pytest.mark.parametrize(("packed", "int8_keys"), [(False, False), (True, False), (False, True), (True, True)])
def test_correct_kernels_have_a_small_difference(
    packed: bool, int8_keys: bool, caplog: pytest.LogCaptureFixture
) -> None:
    situation, wrapped = Situation(packed, int8_keys), operator()
    compare.wrap(wrapped, 8)
    situation.choose(wrapped)
    situation.attend(wrapped)
    lines = messages(caplog.records)
    assert len(lines) == 2 and all("layers.3." in line for line in lines)
    assert max(map(error, lines)) < 0.01


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", [calls.INDEXER, calls.ATTENTION])
def test_wrong_kernels_have_a_large_difference(name: str, packed: bool, caplog: pytest.LogCaptureFixture) -> None:
    wrapped, right = operator(), getattr(Operator, name)

    def wrong(*arguments: Any, **keywords: Any) -> Any:
        answer = right(*arguments, **keywords)
        if name == calls.INDEXER:
            return torch.where(answer >= 0, (answer + 100) % 256, answer)
        return answer * 1.5

    wrong.__signature__ = inspect.signature(right)  # type: ignore[attr-defined]
    setattr(wrapped, name, staticmethod(wrong))
    compare.wrap(wrapped, 8)
    situation = Situation(packed, packed)
    {calls.INDEXER: situation.choose, calls.ATTENTION: situation.attend}[name](wrapped)
    (line,) = messages(caplog.records)
    assert error(line) > 0.2


def test_only_the_first_calls_are_compared(caplog: pytest.LogCaptureFixture) -> None:
    """The result of every call is the kernel's own."""
    wrapped = operator()
    compare.wrap(wrapped, 2)
    for _ in range(4):
        assert torch.equal(Situation(False, False).attend(wrapped), Situation(False, False).attend(Operator))
    assert len(messages(caplog.records)) == 2


def test_an_fp8_cache_is_not_compared() -> None:
    situation = Situation(False, False)
    fp8 = situation.caches[0].to(torch.float8_e4m3fn)
    call = {"kv_cache": (fp8, *situation.caches[1:])}
    assert "not compared: a cache of torch.float8_e4m3fn" in compare.attention_difference(call, None)
