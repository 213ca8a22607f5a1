"""The official NPU operators as their documents describe them: schemas word for word, and a slow meaning of each.

`register()` puts them into torch where torch_npu and vllm-ascend would, so that the forwarders can be run and every
argument they pass is used. The meanings are written from the operators' documents (torch_npu 2.13
`_op_plugin_docs.py`, the READMEs in vllm-ascend 0.23.0 `csrc`), one query token at a time, and share no code with ours.
`tests/contract/test_npu_schemas.py` compares the schemas with those of the real packages.

    python -m tests.ops.support.npu_operators    # `parity` on a device of these operators: JSON lines of its rows
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from tests.ops.support import npu_mla_prolog

FAR = "9223372036854775807"
SCHEMAS = {
    "npu": [
        "npu_lightning_indexer(Tensor query, Tensor key, Tensor weights, *, Tensor? actual_seq_lengths_query=None, "
        "Tensor? actual_seq_lengths_key=None, Tensor? block_table=None, str layout_query='BSND', "
        "str layout_key='BSND', int sparse_count=2048, int sparse_mode=3, "
        f"int pre_tokens={FAR}, int next_tokens={FAR}, bool return_value=False) -> (Tensor, Tensor)",
        "npu_format_cast(Tensor self, int acl_format) -> Tensor",
        npu_mla_prolog.SCHEMA,
    ],
    "_C_ascend": [
        "npu_lightning_indexer_quant(Tensor query, Tensor key, Tensor weights, Tensor query_dequant_scale, "
        "Tensor key_dequant_scale, *, Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, "
        "Tensor? block_table=None, int query_quant_mode=0, int key_quant_mode=0, str layout_query='BSND', "
        "str layout_key='BSND', int sparse_count=2048, int sparse_mode=3) -> Tensor",
        "npu_sparse_flash_attention(Tensor query, Tensor key, Tensor value, Tensor sparse_indices, "
        "float scale_value, *, Tensor? block_table=None, Tensor? actual_seq_lengths_query=None, "
        "Tensor? actual_seq_lengths_kv=None, Tensor? query_rope=None, Tensor? key_rope=None, "
        "int sparse_block_size=1, str layout_query='BSND', str layout_kv='BSND', int sparse_mode=3, "
        f"int pre_tokens={FAR}, int next_tokens={FAR}, int attention_mode=2, bool return_softmax_lse=False) "
        "-> (Tensor attention_out, Tensor softmax_max, Tensor softmax_sum)",
        "npu_kv_quant_sparse_flash_attention(Tensor query, Tensor key, Tensor value, Tensor sparse_indices, "
        "float scale_value, *, int key_quant_mode=1, int value_quant_mode=1, Tensor? key_dequant_scale=None, "
        "Tensor? value_dequant_scale=None, Tensor? block_table=None, Tensor? actual_seq_lengths_query=None, "
        "Tensor? actual_seq_lengths_kv=None, int sparse_block_size=1, str layout_query='BSND', "
        f"str layout_kv='BSND', int sparse_mode=3, int pre_tokens={FAR}, int next_tokens={FAR}, "
        "int attention_mode=2, int quant_scale_repo_mode=1, int tile_size=128, int rope_head_dim=64, "
        "bool return_softmax_lse=False) -> (Tensor attention_out, Tensor softmax_max, Tensor softmax_sum)",
        "mla_preprocess(Tensor hiddenState, Tensor wdqkv, Tensor? descale0, Tensor gamma1, Tensor? beta1, "
        "Tensor wuq, Tensor? descale1, Tensor gamma2, Tensor cos, Tensor sin, Tensor wuk, Tensor kv_cache, "
        "Tensor kv_cache_rope, Tensor slotmapping, Tensor? quant_scale0, Tensor? quant_offset0, Tensor? bias0, "
        "Tensor? quant_scale1, Tensor? quant_offset1, Tensor? bias1, Tensor? ctkv_scale, Tensor? q_nope_scale, "
        "str? cache_mode, str? quant_mode, bool? enable_inner_out, Tensor! q_out0, Tensor! kv_cache_out0, "
        "Tensor! q_out1, Tensor! kv_cache_out1, Tensor! inner_out) -> (Tensor q_out0, Tensor kv_cache_out0, "
        "Tensor q_out1, Tensor kv_cache_out1, Tensor inner_out)",
    ],
}
_REGISTERED: list[torch.library.Library] = []


def register() -> None:
    """Define the operators of both namespaces, once per process; none of the real packages may be loaded."""
    if _REGISTERED:
        return
    for namespace, schemas in SCHEMAS.items():
        library = torch.library.Library(namespace, "FRAGMENT")
        for schema in schemas:
            library.define(schema)
            name = schema.split("(")[0]
            library.impl(name, with_defaults(namespace, name), "CPU")
        _REGISTERED.append(library)


def with_defaults(namespace: str, name: str) -> Callable[..., Any]:
    """The meaning of an operator, given every argument by name: torch drops those that equal the schema's default."""
    meaning, expected = (
        globals().get(name) or getattr(npu_mla_prolog, name),
        getattr(getattr(torch.ops, namespace), name).default._schema.arguments,
    )
    defaults = {argument.name: argument.default_value for argument in expected if argument.has_default_value()}
    return lambda *arguments, **named: meaning(*arguments, **defaults | named)


def requests(starts: torch.Tensor, lengths: torch.Tensor) -> Any:
    """(query token, its request, positions it sees), with `starts` the sums of query tokens per request."""
    first = 0
    for request, (end, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        for token in range(first, end):
            yield token, request, max(0, length - end + token + 1)
        first = end


def rows_of(cache: torch.Tensor, table: torch.Tensor, request: int, positions: torch.Tensor) -> torch.Tensor:
    """[n, D] of a paged cache [num_blocks, block_size, 1, D]."""
    size = cache.shape[1]
    return cache[table[request].long()[positions // size], positions % size, 0]


def npu_format_cast(self: torch.Tensor, acl_format: int) -> torch.Tensor:
    assert acl_format == 29
    return self.clone()


def npu_lightning_indexer(
    query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor, *, actual_seq_lengths_query: torch.Tensor,
    actual_seq_lengths_key: torch.Tensor, block_table: torch.Tensor, layout_query: str, layout_key: str,
    sparse_count: int, sparse_mode: int, **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    assert (layout_query, layout_key, sparse_mode) == ("TND", "PA_BSND", 3)
    assert query.dtype == key.dtype == weights.dtype and query.dtype in (torch.bfloat16, torch.float16)
    return chosen(
        query.double(), key, weights.double(), None, actual_seq_lengths_query, actual_seq_lengths_key,
        block_table, sparse_count,
    ), query.new_empty(0)  # fmt: skip


def npu_lightning_indexer_quant(
    query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor, query_dequant_scale: torch.Tensor,
    key_dequant_scale: torch.Tensor, *, actual_seq_lengths_query: torch.Tensor, actual_seq_lengths_key: torch.Tensor,
    block_table: torch.Tensor, query_quant_mode: int, key_quant_mode: int, layout_query: str, layout_key: str,
    sparse_count: int, sparse_mode: int,
) -> torch.Tensor:  # fmt: skip
    assert (layout_query, layout_key, sparse_mode, query_quant_mode, key_quant_mode) == ("TND", "PA_BSND", 3, 0, 0)
    assert query.dtype == key.dtype == torch.int8
    assert weights.dtype == query_dequant_scale.dtype == key_dequant_scale.dtype == torch.float16
    q = query.double() * query_dequant_scale.double()[..., None]
    return chosen(
        q, key, weights.double(), key_dequant_scale, actual_seq_lengths_query,
        actual_seq_lengths_key, block_table, sparse_count,
    )  # fmt: skip


def chosen(
    q: torch.Tensor, key: torch.Tensor, weights: torch.Tensor, scale: torch.Tensor | None, starts: torch.Tensor,
    lengths: torch.Tensor, table: torch.Tensor, count: int,
) -> torch.Tensor:  # fmt: skip
    out = torch.full((len(q), 1, count), -1, dtype=torch.int32)
    for token, request, seen in requests(starts, lengths):
        if not seen:
            continue
        keys = rows_of(key, table, request, torch.arange(seen)).double()
        scores = (torch.einsum("hd,sd->hs", q[token], keys).clamp_min(0) * weights[token][:, None]).sum(0)
        if scale is not None:
            scores = scores * rows_of(scale[..., None], table, request, torch.arange(seen))[:, 0].double()
        best = scores.argsort(descending=True)[:count]
        out[token, 0, : len(best)] = best.int()
    return out


def npu_sparse_flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sparse_indices: torch.Tensor, scale_value: float, *,
    block_table: torch.Tensor, actual_seq_lengths_query: torch.Tensor, actual_seq_lengths_kv: torch.Tensor,
    query_rope: torch.Tensor, key_rope: torch.Tensor, sparse_block_size: int, layout_query: str, layout_kv: str,
    sparse_mode: int, attention_mode: int, return_softmax_lse: bool, **_: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    assert (layout_query, layout_kv, sparse_mode, sparse_block_size) == ("TND", "PA_BSND", 3, 1)
    assert attention_mode == 2 and return_softmax_lse and torch.equal(key, value)

    def read(request: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, rotated = (rows_of(cache, block_table, request, positions) for cache in (key, key_rope))
        return keys.double(), rotated.double()

    return attended(
        query, query_rope, sparse_indices, scale_value, actual_seq_lengths_query, actual_seq_lengths_kv, read
    )


def npu_kv_quant_sparse_flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sparse_indices: torch.Tensor, scale_value: float, *,
    key_quant_mode: int, value_quant_mode: int, block_table: torch.Tensor, actual_seq_lengths_query: torch.Tensor,
    actual_seq_lengths_kv: torch.Tensor, sparse_block_size: int, layout_query: str, layout_kv: str, sparse_mode: int,
    attention_mode: int, quant_scale_repo_mode: int, tile_size: int, rope_head_dim: int, return_softmax_lse: bool,
    **_: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    assert (layout_query, layout_kv, sparse_mode, sparse_block_size) == ("TND", "PA_BSND", 3, 1)
    assert (key_quant_mode, value_quant_mode, quant_scale_repo_mode, attention_mode) == (2, 2, 1, 2)
    assert return_softmax_lse and torch.equal(key, value) and key.dtype == torch.int8 and key.shape[-1] == 656
    rank = query.shape[-1] - rope_head_dim

    def read(request: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = rows_of(key, block_table, request, positions)
        codes, rotated, scales = rows.split([rank, 2 * rope_head_dim, 4 * rank // tile_size], dim=1)
        factors = scales.contiguous().view(torch.float32).repeat_interleave(tile_size, dim=1)
        latents = (codes.float() * factors).bfloat16()
        return latents.double(), rotated.contiguous().view(torch.bfloat16).double()

    return attended(
        query[..., :rank], query[..., rank:], sparse_indices, scale_value, actual_seq_lengths_query,
        actual_seq_lengths_kv, read,
    )  # fmt: skip


def attended(
    query: torch.Tensor, rope: torch.Tensor, indices: torch.Tensor, scale: float, starts: torch.Tensor,
    lengths: torch.Tensor, read: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    out, (tokens, heads, _) = torch.zeros_like(query), query.shape
    peak, total = torch.full((1, tokens, heads), -2e38), torch.zeros(1, tokens, heads)
    for token, request, seen in requests(starts, lengths):
        listed = indices[token, 0].tolist()[:seen]
        ended = listed.index(-1) if -1 in listed else len(listed)
        positions = torch.tensor([position for position in listed[:ended] if position < seen], dtype=torch.long)
        if not len(positions):
            continue
        keys, rotated = read(request, positions)
        scores = (query[token].double() @ keys.T + rope[token].double() @ rotated.T) * scale
        highest = scores.amax(-1, keepdim=True)
        shares = torch.exp(scores - highest)
        peak[0, token], total[0, token] = highest[:, 0].float(), shares.sum(-1).float()
        shares = (shares / shares.sum(-1, keepdim=True)).to(query.dtype).double()
        out[token] = (shares @ keys).to(query.dtype)
    return out, peak, total


def mla_preprocess(
    hidden: torch.Tensor, wdqkv: torch.Tensor, descale0: torch.Tensor, gamma1: torch.Tensor, beta1: torch.Tensor,
    wuq: torch.Tensor, descale1: torch.Tensor, gamma2: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    wuk: torch.Tensor, kv_cache: torch.Tensor, kv_cache_rope: torch.Tensor, slotmapping: torch.Tensor,
    scale0: torch.Tensor, offset0: torch.Tensor, bias0: torch.Tensor, scale1: torch.Tensor, offset1: torch.Tensor,
    bias1: torch.Tensor, ctkv_scale: torch.Tensor, q_nope_scale: torch.Tensor, cache_mode: str, quant_mode: str,
    enable_inner_out: bool, q_out0: torch.Tensor, kv_cache_out0: torch.Tensor, q_out1: torch.Tensor,
    kv_cache_out1: torch.Tensor, inner_out: torch.Tensor,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    assert (cache_mode, quant_mode, enable_inner_out) == ("krope_ctkv", "per_tensor_quant_asymm", True)
    assert bool((ctkv_scale == 1).all()) and bool((q_nope_scale == 1).all())
    heads, nope, rank = wuk.shape
    rope, tokens = cos.shape[-1], len(hidden)

    def product(x: torch.Tensor, blocks: torch.Tensor, scale: Any, offset: Any, bias: Any, descale: Any) -> Any:
        weight = torch.cat(list(blocks[0]), dim=1).long()
        codes = (x.float() / scale.float() + offset.float()).half().round().clamp(-128, 127).long()
        return ((codes @ weight.T + bias).float() * descale).to(hidden.dtype)

    def turned(x: torch.Tensor) -> torch.Tensor:
        c, s = (angles.float().view(tokens, *[1] * (x.dim() - 2), rope) for angles in (cos, sin))
        first, second = x.float().chunk(2, dim=-1)
        return (x.float() * c + torch.cat([-second, first], dim=-1) * s).to(hidden.dtype)

    y = product(hidden, wdqkv, scale0, offset0, bias0, descale0)
    q_c = npu_mla_prolog.norm(y[:, rank + rope :], gamma1, 1e-6) + beta1.float()
    z = product(q_c, wuq, scale1, offset1, bias1, descale1).view(tokens, heads, nope + rope)
    q_out0.copy_(torch.einsum("thn,hnr->thr", z[..., :nope].float(), wuk.float()))
    q_out1.copy_(turned(z[..., nope:]))
    inner_out.copy_(q_c)
    ckv, k_pe = npu_mla_prolog.norm(y[:, :rank], gamma2, 1e-6).to(hidden.dtype), turned(y[:, rank : rank + rope])
    for token, slot in enumerate(slotmapping.tolist()):
        size = kv_cache.shape[1]
        kv_cache_out0[slot // size, slot % size, 0] = ckv[token]
        kv_cache_out1[slot // size, slot % size, 0] = k_pe[token]
    return tuple(out.clone() for out in (q_out0, kv_cache_out0, q_out1, kv_cache_out1, inner_out))


if __name__ == "__main__":
    from glm5_kernels import registry
    from glm5_kernels.parity.run import parity
    from tests.quantize.support import python_device

    register()
    python_device.install()
    # The operators are there; a device that Triton could run on is not.
    registry._installed = lambda package: package != "triton"  # type: ignore[assignment]
    for row in parity("npu"):
        print(json.dumps(vars(row)))
