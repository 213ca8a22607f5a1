"""`GLM5_COMPARE=1`: right kernels are found right and wrong ones wrong, on bf16 and int8 caches and for MLAPO.

The operators are `npu_operators`' meanings, written without our code; the calls around them are those of vllm-ascend
0.23.0's DeviceOperator. tests/contract has the same for bf16 caches with the release's own code.
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
HEADS, RANK, ROPE, NOPE, Q_LORA, HIDDEN = 4, 512, 64, 32, 96, 64
INDEX_HEADS, INDEX_DIM = 8, 128


@pytest.fixture(scope="module", autouse=True)
def operators() -> None:
    npu_operators.register()


class Operator:
    """The three calls, as far as they reach the kernels."""

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

    @staticmethod
    def sfa_preprocess_with_mlapo(
        sfa_impl: Any, hidden_states: Any, kv_cache: Any, cos: Any, sin: Any, slot_mapping: Any, num_input_tokens: int
    ) -> tuple[torch.Tensor, ...]:
        like, i = hidden_states.new_empty, sfa_impl
        out = like(num_input_tokens, HEADS, RANK), like(num_input_tokens, HEADS, ROPE), like(num_input_tokens, Q_LORA)
        torch.ops._C_ascend.mla_preprocess(
            hidden_states, i.wd_qkv, i.deq_scale_qkv, i.gamma1, i.beta1, i.wu_q, i.qb_deq_scl, i.gamma2, cos, sin,
            i.W_UK_T, kv_cache[0], kv_cache[1], slot_mapping, quant_scale0=i.quant_scale0,
            quant_offset0=i.quant_offset0, bias0=i.quant_bias_qkv, quant_scale1=i.quant_scale1,
            quant_offset1=i.quant_offset1, bias1=i.qb_qt_bias, ctkv_scale=i.one, q_nope_scale=i.one,
            cache_mode="krope_ctkv", quant_mode="per_tensor_quant_asymm", enable_inner_out=True, q_out0=out[0],
            kv_cache_out0=kv_cache[0], q_out1=out[1], kv_cache_out1=kv_cache[1], inner_out=out[2],
        )  # fmt: skip
        return hidden_states, *out


def trans_rope(x: torch.Tensor, rope: int) -> torch.Tensor:
    """vllm-ascend's trans_rope_weight on the first dimension: the last `rope` rows, even ones first."""
    return torch.cat([x[:-rope], x[-rope::2], x[-rope + 1 :: 2]])


def blocked(x: torch.Tensor) -> torch.Tensor:
    """Its transdata with blocks of 16 x 32, for sizes that are multiples of them."""
    rows, columns = x.shape
    return x.view(rows // 16, 16, columns // 32, 32).permute(2, 0, 1, 3).reshape(1, columns // 32, rows, 32)


def layer(generator: torch.Generator, packed: bool) -> SimpleNamespace:
    """What AscendSFAImpl holds after `_process_weights_for_fused_mlapo`, from weights in the checkpoint's order."""

    def int8(*shape: int) -> torch.Tensor:
        return torch.randint(-60, 60, shape, generator=generator, dtype=torch.int8)

    def reordered(x: torch.Tensor) -> torch.Tensor:  # q | kv | k_pe -> kv | k_pe, even ones first | q
        return torch.cat([trans_rope(x[Q_LORA:], ROPE), x[:Q_LORA]])

    def each_head(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([trans_rope(head, ROPE) for head in x.chunk(HEADS)])

    qkv, q_b = int8(Q_LORA + RANK + ROPE, HIDDEN), int8(HEADS * (NOPE + ROPE), Q_LORA)
    scales = [torch.rand(len(w), generator=generator) * 1e-3 + 1e-4 for w in (qkv, q_b)]
    biases = [-(w.int().sum(1) * 3).int() for w in (qkv, q_b)]
    return SimpleNamespace(
        layer_name="model.layers.3.self_attn.attn", scale=(NOPE + ROPE) ** -0.5, enable_sparse_sfa_c8=packed,
        q_lora_rank=Q_LORA, W_UK_T=(torch.randn(HEADS, NOPE, RANK, generator=generator) * 0.1).bfloat16(),
        wd_qkv=blocked(reordered(qkv)), deq_scale_qkv=reordered(scales[0]), quant_bias_qkv=reordered(biases[0]),
        wu_q=blocked(each_head(q_b)), qb_deq_scl=each_head(scales[1]), qb_qt_bias=each_head(biases[1]),
        gamma1=torch.rand(Q_LORA, generator=generator).bfloat16() + 0.5, beta1=torch.zeros(Q_LORA).bfloat16(),
        gamma2=torch.rand(RANK, generator=generator).bfloat16() + 0.5, one=torch.ones(1).bfloat16(),
        quant_scale0=torch.tensor([0.03125]).bfloat16(), quant_offset0=torch.tensor([3], dtype=torch.int8),
        quant_scale1=torch.tensor([0.0625]).bfloat16(), quant_offset1=torch.tensor([3], dtype=torch.int8),
    )  # fmt: skip


class Situation:
    """One request of 200 tokens, five of them new; caches full."""

    def __init__(self, packed: bool, int8_keys: bool) -> None:
        self.generator = torch.Generator().manual_seed(5)
        self.layer = layer(self.generator, packed)
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
            q, scale = (each.flatten(0, 1) for each in ops.quantize_indexer(q))
        found: torch.Tensor = operator.indexer_select_post_process(
            self.layer, q, scale, shape, self.random(TOKENS, INDEX_HEADS), self.caches, self.metadata,
            enable_sparse_li_c8=self.int8_keys, use_torch_npu_lightning_indexer=True, **self.lengths,
        )  # fmt: skip
        return found

    def attend(self, operator: Any) -> torch.Tensor:
        chosen = torch.arange(50, dtype=torch.int32).expand(TOKENS, 1, 50).contiguous()
        out: torch.Tensor = operator.execute_sparse_flash_attention_process(
            self.layer, self.random(TOKENS, HEADS, RANK), self.random(TOKENS, HEADS, ROPE), self.caches, chosen,
            self.metadata, **self.lengths,
        )  # fmt: skip
        return out

    def prepare(self, operator: Any) -> tuple[torch.Tensor, ...]:
        angle = torch.rand(TOKENS, ROPE // 2, generator=self.generator) * 6
        cos, sin = (torch.cat([half, half], -1)[:, None, None].bfloat16() for half in (angle.cos(), angle.sin()))
        out: tuple[torch.Tensor, ...] = operator.sfa_preprocess_with_mlapo(
            self.layer, self.random(TOKENS, HIDDEN), self.caches, cos, sin,
            slot_mapping=torch.tensor([5, 300, 0, 17, 129], dtype=torch.int32), num_input_tokens=TOKENS,
        )  # fmt: skip
        return out


def operator() -> Any:
    """A fresh copy, as wrapping changes it."""
    return type("Copy", (Operator,), {})


def said(records: list[logging.LogRecord]) -> list[str]:
    return [record.getMessage() for record in records if "compare" in record.getMessage()]


def error(line: str) -> float:
    found = re.search(r"(?:relative error |differ \()([\d.]+)", line)
    assert found, line
    return float(found[1])


@pytest.mark.parametrize(("packed", "int8_keys"), [(False, False), (True, False), (False, True), (True, True)])
def test_right_kernels_are_found_right_on_every_cache(
    packed: bool, int8_keys: bool, caplog: pytest.LogCaptureFixture
) -> None:
    situation, wrapped = Situation(packed, int8_keys), operator()
    compare.wrap(wrapped, 8)
    situation.choose(wrapped)
    situation.attend(wrapped)
    lines = said(caplog.records)
    assert len(lines) == 2 and all("layers.3." in line for line in lines)
    assert max(map(error, lines)) < 0.01


def test_mlapo_is_found_right(caplog: pytest.LogCaptureFixture) -> None:
    wrapped = operator()
    compare.wrap(wrapped, 8)
    Situation(False, False).prepare(wrapped)
    (line,) = said(caplog.records)
    assert error(line) < 0.03  # the kernel rounds its codes in fp16
    assert all(name in line for name in ("ql_nope", "q_pe", "q_c", "latents", "keys"))


@pytest.mark.parametrize(
    ("name", "packed"),
    [
        (calls.INDEXER, False), (calls.INDEXER, True), (calls.ATTENTION, False), (calls.ATTENTION, True),
        (calls.PREPROCESS, False),
    ],
)  # fmt: skip
def test_wrong_kernels_are_found_wrong(name: str, packed: bool, caplog: pytest.LogCaptureFixture) -> None:
    wrapped, right = operator(), getattr(Operator, name)

    def wrong(*arguments: Any, **keywords: Any) -> Any:
        answer = right(*arguments, **keywords)
        if name == calls.INDEXER:
            return torch.where(answer >= 0, (answer + 100) % 256, answer)  # others, some of them unseen
        return answer * 1.5 if name == calls.ATTENTION else (answer[0], answer[1], answer[2].flip(-1), answer[3])

    wrong.__signature__ = inspect.signature(right)  # type: ignore[attr-defined]
    setattr(wrapped, name, staticmethod(wrong))
    compare.wrap(wrapped, 8)
    situation = Situation(packed, packed)
    {calls.INDEXER: situation.choose, calls.ATTENTION: situation.attend, calls.PREPROCESS: situation.prepare}[name](
        wrapped
    )
    (line,) = said(caplog.records)
    assert error(line) > 0.2


def test_after_its_last_call_a_layer_costs_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a comparison nor the binding of arguments; and the answer is the kernel's own."""
    wrapped, bound = operator(), []
    named = compare.named
    monkeypatch.setattr(compare, "named", lambda *given: bound.append(1) or named(*given))  # type: ignore[func-returns-value]
    compare.wrap(wrapped, 2)
    for _ in range(5):
        situation = Situation(False, False)
        assert torch.equal(situation.attend(wrapped), Situation(False, False).attend(Operator))
    assert len(bound) == len(said(caplog.records)) == 2


def test_what_cannot_be_compared_is_said(caplog: pytest.LogCaptureFixture) -> None:
    situation = Situation(False, False)
    fp8 = situation.caches[0].to(torch.float8_e4m3fn)
    call = {"kv_cache": (fp8, *situation.caches[1:])}
    assert "not compared: a cache of torch.float8_e4m3fn" in compare.attention_difference(call, None)
    compare.wrap(type("Older", (), {calls.INDEXER: Operator.indexer_select_post_process,
                                    calls.ATTENTION: Operator.execute_sparse_flash_attention_process}), 1)  # fmt: skip
    assert [line for line in said(caplog.records) if calls.PREPROCESS in line and "not compared" in line]
