"""The ops as torch sees them: each is `torch.ops.glm5_ascend.<name>`, one op for profilers, dispatch modes and graphs.

They are registered for all devices at once (CPU, and PrivateUse1, which is what torch calls an NPU); `registry` says
what then runs for the device of the first tensor. Fake versions give shapes to `torch.compile` and to meta tensors.
A `LinearWeights` is passed to torch as the list of its tensors and its quant mode, a `PagedBatch` as its fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from glm5_kernels import registry
from glm5_kernels.errors import KernelInputError
from glm5_kernels.int8 import LinearWeights
from glm5_kernels.paged_cache import PagedBatch

NAMESPACE = "glm5_ascend"
_OPS = getattr(torch.ops, NAMESPACE)
_BATCH = "Tensor query_start_loc, Tensor seq_lens, Tensor block_table"
SCHEMAS = {
    "lightning_indexer": f"(Tensor q, Tensor k_cache, Tensor weights, {_BATCH}, int topk) -> Tensor",
    "lightning_indexer_quant": (
        f"(Tensor q, Tensor k_cache, Tensor weights, Tensor q_scale, Tensor k_scale_cache, {_BATCH}, int topk)"
        " -> Tensor"
    ),
    "sparse_flash_attention": (
        "(Tensor ql_nope, Tensor q_pe, Tensor ckv_cache, Tensor kpe_cache, Tensor topk_indices,"
        f" {_BATCH}, float scale, bool round_probs=False) -> (Tensor, Tensor)"
    ),
    "sparse_flash_attention_quant": (
        f"(Tensor ql_nope, Tensor q_pe, Tensor kv_cache, Tensor topk_indices, {_BATCH}, float scale,"
        " bool round_probs=False) -> (Tensor, Tensor)"
    ),
    "mla_preprocess": (
        "(Tensor hidden_states, Tensor cos, Tensor sin, Tensor?[] qkv_a, str qkv_a_mode, Tensor?[] q_b,"
        " str q_b_mode, Tensor w_uk_t, Tensor q_a_gamma, Tensor kv_a_gamma, Tensor slot_mapping,"
        " Tensor(a!) ckv_cache, Tensor(b!) kpe_cache, float eps) -> (Tensor, Tensor, Tensor)"
    ),
    "indexer_preprocess": (
        "(Tensor q, Tensor k, Tensor norm_weight, Tensor norm_bias, float eps, Tensor cos, Tensor sin,"
        " bool interleaved, Tensor slot_mapping, Tensor(a!) k_cache) -> Tensor"
    ),
    "v_up_proj": "(Tensor latent, Tensor w_uv) -> Tensor",
    "int8_linear": "(Tensor x, Tensor?[] w, str mode) -> Tensor",
    "w4a8_moe": (
        "(Tensor x, Tensor topk_weights, Tensor topk_ids, Tensor w13, Tensor w13_scale, Tensor w2, Tensor w2_scale)"
        " -> Tensor"
    ),
}


def as_list(w: LinearWeights) -> list[torch.Tensor | None]:
    """The tensors of `LinearWeights` in field order."""
    return [w.weight, w.scale, w.input_scale, w.input_offset, w.quant_bias]


def as_linear(tensors: list[torch.Tensor | None], mode: str) -> LinearWeights:
    """The inverse of `as_list`."""
    weight, scale, input_scale, input_offset, quant_bias = tensors
    if weight is None:
        raise KernelInputError("a linear layer needs a weight")
    return LinearWeights(weight, mode, scale, input_scale, input_offset, quant_bias)


def run(op: str, *arguments: Any) -> Any:
    """Call the op through torch's dispatcher, or directly where nothing observes the dispatcher.

    The dispatcher costs about 10 us per call, and a server's decode step makes dozens of calls.
    """
    first = arguments[0]
    if first.device.type != "meta" and not watched():
        return registry.function(op, first.device.type)(*arguments)
    return getattr(_OPS, op)(*_flat(arguments))


def watched() -> bool:
    """True if a profiler, a dispatch mode, a compiler or autograd may observe torch's dispatcher."""
    if not torch.is_inference_mode_enabled():
        return True
    modes = torch._C._len_torch_dispatch_stack() or torch._C._is_torch_function_mode_enabled()
    return bool(modes) or torch._C._autograd._profiler_enabled() or torch.compiler.is_compiling()


def _flat(arguments: tuple[Any, ...]) -> Iterator[Any]:
    """The arguments as the schemas have them."""
    for argument in arguments:
        if isinstance(argument, PagedBatch):
            yield from argument
        elif isinstance(argument, LinearWeights):
            yield as_list(argument)
            yield argument.quant_mode
        else:
            yield argument


def _calls(op: str) -> Callable[..., Any]:
    return lambda first, *rest: registry.function(op, first.device.type)(first, *rest)


def _calls_paged(op: str, before: int) -> Callable[..., Any]:
    """An op on a paged cache: its arguments from number `before` on are the fields of a `PagedBatch`."""
    after = before + len(PagedBatch._fields)

    def call(*args: Any) -> Any:
        batch = PagedBatch(*args[before:after])
        return registry.function(op, args[0].device.type)(*args[:before], batch, *args[after:])

    return call


def _mla_preprocess(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, qkv_a: Any, qkv_a_mode: str, q_b: Any, q_b_mode: str,
    *rest: Any,
) -> Any:  # fmt: skip
    linears = as_linear(qkv_a, qkv_a_mode), as_linear(q_b, q_b_mode)
    return registry.function("mla_preprocess", x.device.type)(x, cos, sin, *linears, *rest)


def _int8_linear(x: torch.Tensor, w: Any, mode: str) -> Any:
    return registry.function("int8_linear", x.device.type)(x, as_linear(w, mode))


def _positions(q: torch.Tensor, *rest: Any) -> torch.Tensor:
    return q.new_empty((q.shape[0], rest[-1]), dtype=torch.int32)


def _attended(ql_nope: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return ql_nope.new_empty(ql_nope.shape), ql_nope.new_empty(ql_nope.shape[:2], dtype=torch.float32)


def _preprocessed(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, qkv_a: Any, qkv_a_mode: str, q_b: Any, q_b_mode: str,
    w_uk_t: torch.Tensor, q_a_gamma: torch.Tensor, *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    heads, _nope, rank = w_uk_t.shape
    shapes = (len(x), heads, rank), (len(x), heads, 2 * cos.shape[1]), (len(x), q_a_gamma.shape[0])
    ql_nope, q_pe, q_c = (x.new_empty(shape) for shape in shapes)
    return ql_nope, q_pe, q_c


def _multiplied(x: torch.Tensor, w: Any, _: str) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], w[0].shape[0]))


def _mixed(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


_FAKES: dict[str, Callable[..., Any]] = {
    "lightning_indexer": _positions,
    "lightning_indexer_quant": _positions,
    "sparse_flash_attention": _attended,
    "sparse_flash_attention_quant": _attended,
    "mla_preprocess": _preprocessed,
    "indexer_preprocess": lambda q, *_: q.new_empty(q.shape),
    "v_up_proj": lambda latent, w_uv: latent.new_empty(len(latent), latent.shape[1] * w_uv.shape[2]),
    "int8_linear": _multiplied,
    "w4a8_moe": _mixed,
}
_SPECIAL: dict[str, Callable[..., Any]] = {
    "lightning_indexer": _calls_paged("lightning_indexer", 3),
    "lightning_indexer_quant": _calls_paged("lightning_indexer_quant", 5),
    "sparse_flash_attention": _calls_paged("sparse_flash_attention", 5),
    "sparse_flash_attention_quant": _calls_paged("sparse_flash_attention_quant", 4),
    "mla_preprocess": _mla_preprocess,
    "int8_linear": _int8_linear,
}
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
for _name, _schema in SCHEMAS.items():
    _LIBRARY.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(_name, _SPECIAL.get(_name) or _calls(_name), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _FAKES[_name], lib=_LIBRARY)
