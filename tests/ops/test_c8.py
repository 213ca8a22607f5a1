"""int8 caches: rotated indexer vectors, the packed rows' layout, and attention that reads them."""

from __future__ import annotations

import pytest
import torch

from glm5_kernels import ops
from tests.ops.support.paged_batch import paged_batch


@pytest.mark.parametrize("dims", [128, 192])
def test_indexer_vectors_keep_their_dot_products(dims: int) -> None:
    """The rotation is orthogonal; int8 costs about a percent, even with a channel 50 times louder."""
    q, k = torch.randn(40, dims), torch.randn(40, dims)
    q[:, 5] *= 50
    (qi, qs), (ki, ks) = ops.quantize_indexer(q), ops.quantize_indexer(k)
    assert qi.dtype is torch.int8 and qs.dtype is torch.float16 and qs.shape == (40,)
    got = (qi.float() @ ki.float().T) * qs.float()[:, None] * ks.float()
    assert float((got - q @ k.T).norm() / (q @ k.T).norm()) < 0.02
    with pytest.raises(ops.KernelInputError, match="no Hadamard matrix of size 92"):
        ops.quantize_indexer(torch.randn(2, 92))


def test_packed_rows_have_the_documented_layout() -> None:
    ckv, kpe = torch.randn(3, 512), torch.randn(3, 64).bfloat16()
    rows = ops.pack_latents(ckv, kpe)
    assert rows.dtype is torch.int8 and rows.shape == (3, 656)
    scales = rows[:, 640:].contiguous().view(torch.float32)
    assert torch.equal(scales, ckv.view(3, 4, 128).abs().amax(-1) / 127)
    assert torch.equal(rows[:, 512:640].contiguous().view(torch.bfloat16), kpe)
    back = rows[:, :512].float().view(3, 4, 128) * scales[..., None]
    assert bool(((back.flatten(1) - ckv).abs() <= scales.repeat_interleave(128, 1) * 0.5001).all())


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_reads_what_was_packed(dtype: torch.dtype) -> None:
    """Results equal ordinary attention on the unpacked rows; unused rows (of bytes -1: NaN) and an empty request stay
    out."""
    batch = paged_batch([150, 9, 0], [2, 3, 1], block_size=16)
    packed, plain = [], []
    for length in batch.lengths:
        kpe = torch.randn(length, 32).bfloat16()
        rows = ops.pack_latents(torch.randn(length, 256), kpe)
        scale = rows[:, 320:].contiguous().view(torch.float32).repeat_interleave(128, 1)
        packed.append(rows)
        plain.append(torch.cat([(rows[:, :256].float() * scale).bfloat16().float(), kpe.float()], 1))
    cache, plain_cache = batch.cache(packed), batch.cache(plain)
    selected = torch.stack([torch.randperm(160)[:100] for _ in range(6)]).int()
    queries = torch.randn(6, 8, 256).to(dtype), torch.randn(6, 8, 32).to(dtype)
    step = selected, batch.paged, 0.06
    got, got_lse = ops.sparse_flash_attention_quant(*queries, cache, *step)
    want, want_lse = ops.sparse_flash_attention(*queries, plain_cache[..., :256], plain_cache[..., 256:], *step)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(got_lse, want_lse)
    assert (got[-1] == 0).all() and got.isfinite().all()
