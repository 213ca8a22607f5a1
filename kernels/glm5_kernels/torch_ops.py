"""Registers the ops as torch custom ops, `torch.ops.glm5_ascend.<op>`, for torch.compile, profilers and dispatch modes.

The arguments are the fields of the op's contract. A nested contract is passed as its fields, whose names begin with
the name of the outer field: `batch` of the indexer becomes `batch_query_start_loc`, `batch_seq_lens` and
`batch_block_table`. The weights of experts are a list of blocks. Each op is registered for all devices (PrivateUse1 is
what torch calls an NPU) and has a fake implementation. `ops.<op>` calls the same code without torch's dispatcher,
which costs about 10 us per call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from glm5_kernels import registry
from glm5_kernels.contract import WRITTEN
from glm5_kernels.w4a8_moe import ExpertWeights

NAMESPACE = "glm5_ascend"


def _attended(o: Any) -> tuple[Tensor, Tensor]:
    return o.ql_nope.new_empty(o.ql_nope.shape), o.ql_nope.new_empty(o.ql_nope.shape[:2], dtype=torch.float32)


def _selected(o: Any) -> Tensor:
    columns = o.topk + getattr(o, "pool", 1) - 1
    selected: Tensor = o.q.new_empty((len(o.q), columns), dtype=torch.int32)
    return selected


def _preprocessed(o: Any) -> tuple[Tensor, ...]:
    tokens, (heads, _, rank) = len(o.hidden_states), o.w_uk_t.shape
    shapes = (tokens, heads, rank), (tokens, heads, o.kpe_cache.shape[2]), (tokens, len(o.q_a_gamma))
    return tuple(o.hidden_states.new_empty(shape) for shape in shapes)


def _entered(o: Any) -> tuple[Tensor, ...]:
    n, dtypes = o.streams.shape[1], (torch.float32, torch.float32, torch.float32, o.norm_weight.dtype)
    shapes = o.streams.shape, o.streams.shape[:2], (*o.streams.shape[:2], n), o.streams.shape[::2]
    return tuple(o.streams.new_empty(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True))


#: The number of results of each op, and an empty result for its operands.
RESULTS: dict[str, tuple[int, Callable[[Any], Any]]] = {
    "lightning_indexer": (1, _selected),
    "lightning_indexer_quant": (1, _selected),
    "sparse_flash_attention": (2, _attended),
    "sparse_flash_attention_quant": (2, _attended),
    "mla_preprocess": (3, _preprocessed),
    "indexer_preprocess": (1, lambda o: o.q.new_empty(o.q.shape)),
    "indexer_pool": (0, lambda o: None),
    "kda": (1, lambda o: o.q.new_empty(o.v.shape)),
    "v_up_proj": (1, lambda o: o.latent.new_empty((len(o.latent), o.w_uv.shape[0] * o.w_uv.shape[2]))),
    "int8_linear": (1, lambda o: o.x.new_empty((*o.x.shape[:-1], len(o.w.weight)))),
    "w4a8_moe": (1, lambda o: o.x.new_empty(o.x.shape)),
    "mhc": (4, _entered),
    "rms_norm": (2, lambda o: (o.x.new_empty(o.x.shape), o.x.new_empty(o.x.shape))),
}


def _arguments(contract: Any, prefix: str = "") -> Iterator[str]:
    """The fields of a contract in torch's schema language."""
    for name, hint in get_type_hints(contract, include_extras=True).items():
        if get_origin(hint) is Annotated:
            kind, _, *marks = get_args(hint)
            written = f"({prefix}{name}!)" if WRITTEN in marks else ""
            yield f"Tensor{written}{'' if kind is Tensor else '?'} {prefix}{name}"
        elif hint is ExpertWeights:
            yield f"Tensor[] {prefix}{name}"
        elif hasattr(hint, "_fields"):
            yield from _arguments(hint, f"{name}_")
        else:
            yield f"{hint.__name__} {prefix}{name}"


def operands(contract: Any, values: Iterator[Any]) -> Any:
    """The contract that the values of a call, in the order of the schema, belong to."""

    def field(hint: Any) -> Any:
        if hint is ExpertWeights:
            return ExpertWeights(next(values))
        return operands(hint, values) if hasattr(hint, "_fields") else next(values)

    return contract(*(field(hint) for hint in get_type_hints(contract).values()))


def flat(fields: Any) -> Iterator[Any]:
    """The values of a contract in the order of the schema."""
    for value in fields:
        if hasattr(value, "_fields"):
            yield from flat(value)
        else:
            yield list(value.blocks) if isinstance(value, ExpertWeights) else value


def _register(op: str) -> None:
    contract = registry.contract(op)

    def run(*values: Any) -> Any:
        return registry.function(op, values[0].device.type)(*operands(contract, iter(values)))

    def fake(*values: Any) -> Any:
        return RESULTS[op][1](operands(contract, iter(values)))

    name, results = f"{NAMESPACE}::{op}", ", ".join(["Tensor"] * RESULTS[op][0])
    schema = f"({', '.join(_arguments(contract))}) -> ({results})"
    torch.library.define(name, schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(name, "CompositeExplicitAutograd", run)
    torch.library.register_fake(name, fake)


for _op in RESULTS:
    _register(_op)
