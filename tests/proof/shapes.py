"""The cases of the proofs: those of the parity suite, and one of each op at GLM-5's real sizes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from glm5_kernels.int8 import PER_TENSOR, PER_TOKEN, QUANT_MODES
from glm5_kernels.lightning_indexer import quantize_indexer
from glm5_kernels.paged_cache import PagedBatch
from glm5_kernels.parity.cases import PREPROCESS_OUTPUTS, ROUNDED_CODES, Case, cases, preprocess_operands
from glm5_kernels.parity.compare import Tolerance
from glm5_kernels.sparse_flash_attention import pack_latents

REAL = "GLM-5"
HEADS, RANK, ROPE, Q_LORA, HIDDEN = 64, 512, 64, 2048, 6144
INDEX_HEADS, INDEX_DIM, TOPK, BLOCK = 32, 128, 2048, 128
#: Decode: a long request, one shorter than TOPK, and one without a key.
LENGTHS = (4096, 300, 0)
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
                yield _attention(op, generator, heads, 25, 256)
        elif op == "mla_preprocess":
            yield from (_preprocess(mode, generator, heads, tokens) for mode in QUANT_MODES for tokens in (2, 17))
    if op.startswith("lightning_indexer"):  # every rank has all heads of the indexer
        yield _indexer(op, generator)
        yield _indexer(op, generator, (3, 1, 0))


def _pages(
    generator: torch.Generator, lengths: tuple[int, ...] = LENGTHS
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """block_table [B, pages] of shuffled pages, the slots that are owned, and query_start_loc of one token each."""
    needed = [-(-length // BLOCK) for length in lengths]
    order = torch.randperm(sum(needed) + 3, generator=generator).int()
    table = torch.full((len(lengths), max(needed)), -1, dtype=torch.int32)
    owned = torch.zeros(len(order) * BLOCK, dtype=torch.bool)
    for request, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        start = sum(needed[:request])
        table[request, :count] = order[start : start + count]
        positions = torch.arange(length)
        owned[table[request].long()[positions // BLOCK] * BLOCK + positions % BLOCK] = True
    return table, owned, torch.arange(len(lengths) + 1, dtype=torch.int32)


def _cache(columns: int, owned: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    rows = torch.randn(len(owned), columns, generator=generator).bfloat16()
    rows[~owned] = float("nan")
    return rows.view(-1, BLOCK, columns)


def _indexer(
    op: str,
    generator: torch.Generator,
    counts: tuple[int, ...] = (1, 1, 1),
    seen: tuple[int, ...] = LENGTHS,
) -> Case:
    table, owned, _ = _pages(generator, seen)
    tokens, lengths = sum(counts), torch.tensor(seen, dtype=torch.int32)
    starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    q = torch.randn(tokens, INDEX_HEADS, INDEX_DIM, generator=generator).bfloat16()
    weights = torch.randn(tokens, INDEX_HEADS, generator=generator).bfloat16()
    keys = _cache(INDEX_DIM, owned, generator)
    step = PagedBatch(starts, lengths, table), TOPK
    if op == "lightning_indexer":
        return Case(op, f"{REAL}, bfloat16", (q, keys, weights, *step), gap=1e-3)
    (q_int, q_scale), (k_int, k_scale) = quantize_indexer(q), quantize_indexer(keys.nan_to_num())
    k_scale.view(-1)[~owned] = float("nan")
    return Case(op, f"{REAL}, int8", (q_int, k_int, weights.half(), q_scale, k_scale, *step), gap=1e-3)


def _attention(op: str, generator: torch.Generator, heads: int = HEADS, tokens: int = 0, topk: int = TOPK) -> Case:
    """One token of each request, or `tokens` that are the last ones of the second."""
    table, owned, starts = _pages(generator)
    lengths, seen = torch.tensor(LENGTHS, dtype=torch.int32), LENGTHS
    if tokens:
        starts = torch.tensor([0, 0, tokens, tokens], dtype=torch.int32)
        seen = tuple(range(LENGTHS[1] - tokens + 1, LENGTHS[1] + 1))
    tokens = len(seen)
    nope = (0.3 * torch.randn(tokens, heads, RANK, generator=generator)).bfloat16()
    pe = (0.3 * torch.randn(tokens, heads, ROPE, generator=generator)).bfloat16()
    selected = torch.full((tokens, topk), -1, dtype=torch.int32)
    for token, length in enumerate(seen):
        some = torch.randperm(length, generator=generator)[:topk].int()
        selected[token, : len(some)] = some
    ckv, kpe = _cache(RANK, owned, generator), _cache(ROPE, owned, generator)
    caches = (ckv, kpe) if op == "sparse_flash_attention" else (_packed(ckv, kpe, owned),)
    rounded = Tolerance(2e-2, 2e-2, "probabilities rounded to bf16 before or after they are normalised")
    outputs = ("out", rounded), ("lse", Tolerance(2e-5, 1e-5, "fp32 sums and logarithm"))
    return Case(
        op,
        f"{REAL}, bfloat16",
        (nope, pe, *caches, selected, PagedBatch(starts, lengths, table), 0.0625, True),
        outputs,
    )


def _packed(ckv: torch.Tensor, kpe: torch.Tensor, owned: torch.Tensor) -> torch.Tensor:
    packed = pack_latents(ckv.nan_to_num(), kpe.nan_to_num())
    packed.view(len(owned), -1)[~owned] = -1  # bytes 0xff: NaN as bf16 and as fp32
    return packed


def _preprocess(mode: str, generator: torch.Generator, heads: int = HEADS, tokens: int = 2) -> Case:
    arguments = preprocess_operands(mode, torch.bfloat16, tokens, generator, heads, Q_LORA, HIDDEN)
    outputs = tuple((name, ROUNDED_CODES) for name in PREPROCESS_OUTPUTS)
    return Case("mla_preprocess", f"{REAL}, {mode}, bfloat16", arguments, outputs)
