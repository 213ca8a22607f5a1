"""int8 caches: LI-C8 and SFA-C8, packed layout, scales, and what they cost."""

from __future__ import annotations

import pytest
import torch

from glm5_kernels import ops
from tests.ops.support.paged_batch import paged_batch

pytestmark = pytest.mark.usefixtures("implementation")


def test_indexer_vectors_keep_their_dot_products() -> None:
    """The rotation is orthogonal; int8 costs about a percent, even with a channel 50 times louder."""
    q, k = torch.randn(40, 128), torch.randn(40, 128)
    q[:, 5] *= 50
    (qi, qs), (ki, ks) = ops.quantize_indexer(q), ops.quantize_indexer(k)
    assert qi.dtype is torch.int8 and qs.dtype is torch.float16 and qs.shape == (40,)
    got = (qi.float() @ ki.float().T) * qs.float()[:, None] * ks.float()
    assert float((got - q @ k.T).norm() / (q @ k.T).norm()) < 0.02
    with pytest.raises(ops.KernelInputError, match="power of two"):
        ops.quantize_indexer(torch.randn(2, 96))


@pytest.mark.parametrize("topk", [5, 64])
def test_indexer_scores_are_the_formula(topk: int) -> None:
    """Against a loop over positions, on a ragged batch with a missing block; scales differ from key to key."""
    batch = paged_batch([70, 3, 33], [4, 1, 2], block_size=16)
    q = torch.randint(-127, 128, (7, 8, 32), dtype=torch.int8)
    keys = [torch.randint(-127, 128, (n, 32), dtype=torch.int8) for n in (70, 3, 33)]
    scales = [(torch.rand(n, 1) + 0.1).half() for n in (70, 3, 33)]
    cache = torch.zeros(batch.num_blocks, 16, 32, dtype=torch.int8)
    for b, rows in enumerate(keys):
        for position, row in enumerate(rows):
            cache[batch.block_table[b, position // 16], position % 16] = row
    k_scale, q_scale = batch.cache(scales)[..., 0], (torch.rand(7, 8) + 0.1).half()
    weights, table = torch.randn(7, 8).half(), batch.block_table.clone()
    table[0, 1] = -1
    got = ops.lightning_indexer_quant(
        q, cache, weights, q_scale, k_scale, batch.paged._replace(block_table=table), topk
    )
    for token, (b, visible) in enumerate(batch.tokens()):
        dots = (q[token].double() @ keys[b][:visible].double().T) * q_scale[token].double()[:, None]
        score = (torch.relu(dots) * weights[token].double()[:, None]).sum(0) * scales[b][:visible, 0].double()
        there = [p for p in range(visible) if b != 0 or not 16 <= p < 32]
        want = sorted(there, key=lambda p: (-float(score[p]), p))[:topk]
        assert sorted(got[token][got[token] >= 0].tolist()) == sorted(want)


def test_packed_rows_have_the_documented_layout() -> None:
    ckv, kpe = torch.randn(3, 512), torch.randn(3, 64).bfloat16()
    rows = ops.pack_latents(ckv, kpe)
    assert rows.dtype is torch.int8 and rows.shape == (3, 656)
    scales = rows[:, 640:].contiguous().view(torch.float32)
    assert torch.equal(scales, ckv.view(3, 4, 128).abs().amax(-1) / 127)
    assert torch.equal(rows[:, 512:640].contiguous().view(torch.bfloat16), kpe)
    back = rows[:, :512].float().view(3, 4, 128) * scales[..., None]
    assert bool(((back.flatten(1) - ckv).abs() <= scales.repeat_interleave(128, 1) * 0.5001).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_reads_what_was_packed(dtype: torch.dtype) -> None:
    """Results equal ordinary attention on the unpacked rows; poisoned rows and an empty request stay out."""
    batch = paged_batch([150, 9, 0], [2, 3, 1], block_size=16)
    latents = [(torch.randn(n, 256), torch.randn(n, 32).bfloat16()) for n in (150, 9, 0)]
    packed = torch.full((batch.num_blocks, 16, 256 + 64 + 8), -1, dtype=torch.int8)  # NaN rotated keys and scales
    plain = torch.full((batch.num_blocks, 16, 288), float("nan"))
    for b, (ckv, kpe) in enumerate(latents):
        rows = ops.pack_latents(ckv, kpe)
        scale = rows[:, 320:].contiguous().view(torch.float32).repeat_interleave(128, 1)
        seen = torch.cat([(rows[:, :256].float() * scale).bfloat16().float(), kpe.float()], 1)
        for position in range(len(rows)):
            at = batch.block_table[b, position // 16], position % 16
            packed[at], plain[at] = rows[position], seen[position]
    selected = torch.stack([torch.randperm(160)[:100] for _ in range(6)]).int()
    queries = torch.randn(6, 8, 256).to(dtype), torch.randn(6, 8, 32).to(dtype)
    step = selected, batch.paged, 0.06
    got, got_lse = ops.sparse_flash_attention_quant(*queries, packed, *step)
    want, want_lse = ops.sparse_flash_attention(*queries, plain[..., :256], plain[..., 256:], *step)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(got_lse, want_lse)
    assert (got[-1] == 0).all() and got.isfinite().all()
