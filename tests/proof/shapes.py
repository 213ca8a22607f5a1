"""The cases of the proofs: those of the parity suite, and one of each op at GLM-5's real sizes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from glm5_kernels.int8 import PER_TENSOR, PER_TOKEN, QUANT_MODES
from glm5_kernels.ops import pack_latents, quantize_indexer
from glm5_kernels.paged_cache import PagedBatch
from glm5_kernels.parity.cases import PREPROCESS_OUTPUTS, ROUNDED_CODES, Case, cases, preprocess_operands
from glm5_kernels.parity.compare import Tolerance
from glm5_kernels.parity.inputs import BLOCK, HEADS, INDEX_DIM, INDEX_HEADS, RANK, ROPE, paged_batch, paged_cache

REAL = "GLM-5"
Q_LORA, HIDDEN, TOPK = 2048, 6144, 2048
#: Decode: a long request, one shorter than TOPK, and one without a key; (length, query tokens).
DECODE = [(4096, 1), (300, 1), (0, 1)]
#: Cases that take the interpreter minutes.
SLOW = ("prefill", "chunk", "40 tokens", "8 tokens")


def quick_cases(op: str) -> Iterator[Case]:
    """The parity suite's cases of an op that the interpreter gets through in seconds."""
    for case in cases(0, [op]):
        if not any(text in case.variant for text in SLOW):
            yield case


def real_cases(op: str) -> Iterator[Case]:
    """GLM-5's heads, dims, pages of 128 and 2048 positions; every unused cache row is NaN."""
    generator = torch.Generator().manual_seed(7)
    if op.startswith("lightning_indexer"):
        yield _indexer(op, generator)
    elif op.startswith("sparse_flash_attention"):
        yield _attention(op, generator)
    else:
        yield from (_preprocess(mode, generator) for mode in (PER_TOKEN, PER_TENSOR))


def launched_cases(op: str) -> Iterator[Case]:
    """The launches of a server of GLM-5, 5.1 or 5.2: a rank has 64, 32 or 16 of the heads. The number of tokens and of
    requests is a constant of `score_pages` alone, which takes one token (decode) or several at once, and of the
    products of MLA preprocess and of `weigh_rows`, which take few or many (here of 256 rows each: less to run)."""
    generator = torch.Generator().manual_seed(7)
    for heads in (64, 32, 16):
        if op.startswith("sparse_flash_attention"):
            yield _attention(op, generator, heads)
            if op == "sparse_flash_attention":  # of packed rows all but `unpack_rows` are the same kernels
                yield _attention(op, generator, heads, [(4096, 0), (300, 25), (0, 0)], 256)
        elif op == "mla_preprocess":
            yield from (_preprocess(mode, generator, heads, tokens) for mode in QUANT_MODES for tokens in (2, 17))
    if op.startswith("lightning_indexer"):  # every rank has all heads of the indexer
        yield _indexer(op, generator)
        yield _indexer(op, generator, [(4096, 3), (300, 1), (0, 0)])


def _unused_rows(batch: PagedBatch, blocks: int) -> torch.Tensor:
    """[blocks, BLOCK] bool: the rows of a cache in which no request has a key."""
    unused = torch.ones(blocks, BLOCK, dtype=torch.bool)
    for table, length in zip(batch.block_table.long(), batch.seq_lens, strict=True):
        positions = torch.arange(int(length))
        unused[table[positions // BLOCK], positions % BLOCK] = False
    return unused


def _indexer(op: str, generator: torch.Generator, requests: list[tuple[int, int]] = DECODE) -> Case:
    batch = paged_batch(requests, generator)
    tokens = int(batch.query_start_loc[-1])
    q = torch.randn(tokens, INDEX_HEADS, INDEX_DIM, generator=generator).bfloat16()
    weights = torch.randn(tokens, INDEX_HEADS, generator=generator).bfloat16()
    keys = paged_cache(batch.block_table, INDEX_DIM, torch.bfloat16, generator)
    unused = _unused_rows(batch, len(keys))
    if op == "lightning_indexer":
        keys[unused] = float("nan")
        return Case(op, f"{REAL}, bfloat16", (q, keys, weights, batch, TOPK), gap=1e-3)
    (q_int, q_scale), (k_int, k_scale) = quantize_indexer(q), quantize_indexer(keys)
    k_scale[unused] = float("nan")
    return Case(op, f"{REAL}, int8", (q_int, k_int, weights.half(), q_scale, k_scale, batch, TOPK), gap=1e-3)


def _attention(
    op: str,
    generator: torch.Generator,
    heads: int = HEADS,
    requests: list[tuple[int, int]] = DECODE,
    topk: int = TOPK,
) -> Case:
    batch = paged_batch(requests, generator)
    seen = [length - new + token + 1 if length else 0 for length, new in requests for token in range(new)]
    nope = (0.3 * torch.randn(len(seen), heads, RANK, generator=generator)).bfloat16()
    pe = (0.3 * torch.randn(len(seen), heads, ROPE, generator=generator)).bfloat16()
    selected = torch.full((len(seen), topk), -1, dtype=torch.int32)
    for token, length in enumerate(seen):
        some = torch.randperm(length, generator=generator)[:topk].int()
        selected[token, : len(some)] = some
    ckv, kpe = (paged_cache(batch.block_table, size, torch.bfloat16, generator) for size in (RANK, ROPE))
    unused = _unused_rows(batch, len(ckv))
    if op == "sparse_flash_attention":
        ckv[unused], kpe[unused] = float("nan"), float("nan")
        caches: tuple[torch.Tensor, ...] = (ckv, kpe)
    else:
        packed = pack_latents(ckv, kpe)
        packed[unused] = -1  # bytes 0xff: NaN as bf16 and as fp32
        caches = (packed,)
    rounded = Tolerance(2e-2, 2e-2, "probabilities rounded to bf16 before or after they are normalised")
    outputs = ("out", rounded), ("lse", Tolerance(2e-5, 1e-5, "fp32 sums and logarithm"))
    return Case(op, f"{REAL}, bfloat16", (nope, pe, *caches, selected, batch, 0.0625, True), outputs)


def _preprocess(mode: str, generator: torch.Generator, heads: int = HEADS, tokens: int = 2) -> Case:
    arguments = preprocess_operands(mode, torch.bfloat16, tokens, generator, heads, Q_LORA, HIDDEN)
    outputs = tuple((name, ROUNDED_CODES) for name in PREPROCESS_OUTPUTS)
    return Case("mla_preprocess", f"{REAL}, {mode}, bfloat16", arguments, outputs)
