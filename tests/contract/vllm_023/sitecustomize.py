"""In front of vLLM 0.23's Python on torch 2.13, where its library does not load: the two of its C ops that we reach.

Read by Python at its start, because this folder comes first on PYTHONPATH.
"""

from __future__ import annotations

import torch


def slots(
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int,
) -> None:
    """slot_mapping[t]: row of the cache for each query token, in its request's block; -1 behind the last one."""
    counts = torch.diff(query_start_loc).long()
    requests = torch.repeat_interleave(torch.arange(len(counts)), counts)
    tokens = len(requests)
    rows = positions[:tokens].long()
    slot_mapping[:tokens] = block_table[requests, rows // block_size].long() * block_size + rows % block_size
    slot_mapping[tokens:] = -1


LIBRARY = torch.library.Library("_C", "FRAGMENT")
LIBRARY.define("init_cpu_memory_env(int[] nodes) -> ()")
LIBRARY.impl("init_cpu_memory_env", lambda nodes: None, "CompositeExplicitAutograd")
LIBRARY.define(
    "compute_slot_mapping_kernel_impl(Tensor query_start_loc, Tensor positions, Tensor block_table, "
    "Tensor(a!) slot_mapping, int block_size) -> ()"
)
LIBRARY.impl("compute_slot_mapping_kernel_impl", slots, "CompositeExplicitAutograd")
