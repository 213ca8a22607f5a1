"""Lightning Indexer's scores, page by page, as a Triton kernel; `ascend/triton/lightning_indexer.py` selects by them.

Shaped for one core of a 910B/910C (64 KB L0A and L0B, 128 KB L0C, 192 KB UB), at GLM-5's 32 heads of 128:

    score_pages      [BT * H, D] x [D, PAGE]: 32 x 128 x 128 in decode, 64 x 128 x 128 where a request has several
                     tokens, which share its keys. A page is one run of memory. A program takes many pages in a loop
                     without a branch, which the device's compiler makes a pipeline: cube and vector cores take turns
                     over four workspaces. One program per core.

The vector part does only what each page needs. Rows of a page beyond a request's length may get a score, and earlier
tokens of a group get scores of keys that only later tokens see: the selection reads up to a token's length. A NaN score
means that the position has no key.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def score_pages(
    q, k, weights, q_scale, k_scale, block_table, groups, visible, out,
    s_kb, s_ks, s_table, s_out, pages,
    H: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, PAGE: tl.constexpr, INT8: tl.constexpr,
    PAGES_IN_FLIGHT: tl.constexpr,
):  # fmt: skip
    """Grid (groups, S / (pages * PAGE)). groups int32 [G, 3]: first token, number of tokens <= BT, request. q [T, H, D]
    contiguous; k [num_blocks, PAGE, D]; weights and q_scale [T, H]; k_scale [num_blocks, PAGE]; out fp32 [T, S].
    """
    g, part = tl.program_id(0), tl.program_id(1)
    first, count, request = tl.load(groups + g * 3), tl.load(groups + g * 3 + 1), tl.load(groups + g * 3 + 2)
    row, d, s, token = tl.arange(0, BT * H), tl.arange(0, D), tl.arange(0, PAGE), tl.arange(0, BT)
    is_query = row < count * H
    queries = tl.load(q + (first * H + row)[:, None] * D + d[None, :], mask=is_query[:, None], other=0)
    weight = tl.load(weights + first * H + row, mask=is_query, other=0.0).to(tl.float32)
    if INT8:
        weight *= tl.load(q_scale + first * H + row, mask=is_query, other=0.0).to(tl.float32)
    last = tl.load(visible + first + count - 1)
    end = tl.minimum((part + 1) * pages, (last + PAGE - 1) // PAGE)
    for start in range(part * pages, end, PAGES_IN_FLIGHT):
        for step in tl.static_range(PAGES_IN_FLIGHT):
            page = start + step
            block = tl.load(block_table + request * s_table + tl.minimum(page, end - 1))
            row_block = tl.maximum(block, 0)
            keys = tl.load(k + row_block * s_kb + s[:, None] * s_ks + d[None, :])
            dots = tl.dot(queries, tl.trans(keys)).to(tl.float32)
            weighted = tl.maximum(dots, 0.0, tl.PropagateNan.ALL) * weight[:, None]
            score = tl.sum(tl.reshape(weighted, (BT, H, PAGE)), axis=1)
            if INT8:
                score = score * tl.load(k_scale + row_block * PAGE + s).to(tl.float32)[None, :]
            column = page * PAGE + s
            visible_rows = tl.where((page < end) & (block >= 0), tl.minimum(last - page * PAGE, PAGE), 0)
            address = out + (first + token)[:, None] * s_out + column[None, :]
            tl.store(address, score, mask=(token < count)[:, None] & (s < visible_rows)[None, :])
