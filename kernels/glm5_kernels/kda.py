"""Kimi Delta Attention (KDA): linear attention whose state decays per key channel and learns by the delta rule.

A head of a sequence keeps a state S [D, V]. For each token t, in the order of the sequence and in fp32:

    q'     = q / sqrt(sum(q^2) + 1e-6) * D^-0.5
    k'     = k / sqrt(sum(k^2) + 1e-6)
    S      = diag(exp(g)) S
    S      = S + k' (beta * (v - S^T k'))^T
    out[t] = S^T q'                                   rounded to q's dtype

T tokens of B sequences in a row, H heads, D key dim, V value dim. Sequence b has the tokens query_start_loc[b] ..
query_start_loc[b + 1] - 1 and begins with states[initial_slots[b]], or with an empty state if that is negative. The
state after token t is written to states[state_slots[t]], or nowhere if that is negative: a prompt writes it after its
last token, drafts to be verified after each one.

A slot is written once, and not read by another sequence: what does not keep to this is refused. A sequence may write
the slot that it begins with. A NaN or an infinity stays within its head of its sequence; how it spreads there is
undefined.

Source: arXiv 2510.26692; transformers 5.19 `modeling_glm5_next.py`, behaviour, not code.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import Annotated, NamedTuple

import numpy as np
import torch
from torch import Tensor

from glm5_kernels.contract import WRITTEN, require_shape
from glm5_kernels.errors import KernelInputError
from glm5_kernels.paged_cache import ArrayKey

#: Of the squared length of a query or key, before the root.
LENGTH_EPS = 1e-6


class Kda(NamedTuple):
    """The outputs [T, H, V] in q's dtype; writes states."""

    q: Annotated[Tensor, "float [T, H, D]"]  # after convolution and SiLU, of any length
    k: Annotated[Tensor, "q [T, H, D]"]
    v: Annotated[Tensor, "q [T, H, V]"]
    g: Annotated[Tensor, "fp32 [T, H, D]"]  # logarithm of the decay, <= 0
    beta: Annotated[Tensor, "fp32 [T, H]"]  # after the sigmoid
    states: Annotated[Tensor, "fp32 [slots, H, D, V]", WRITTEN]
    query_start_loc: Annotated[Tensor, "int [starts]"]  # B + 1 prefix sums of the tokens per sequence, from 0 to T
    initial_slots: Annotated[Tensor, "int [B]"]  # negative = an empty state
    state_slots: Annotated[Tensor, "int [T]"]  # negative = not written

    def rules(self) -> None:
        require_shape("query_start_loc", self.query_start_loc, (len(self.initial_slots) + 1,))
        if 0 in self.states.shape[1:]:
            raise KernelInputError(f"states has shape {list(self.states.shape)}, expected heads, keys and values")

    def check_values(self) -> None:
        if self.states.device.type == "cpu":
            keys = map(ArrayKey.of, (self.query_start_loc, self.initial_slots, self.state_slots))
            _check_slots(*keys, len(self.states))


@lru_cache(maxsize=4)  # all layers of a step have the same ones
def _check_slots(starts_of: ArrayKey, initial_of: ArrayKey, written_of: ArrayKey, num_slots: int) -> None:
    starts, initial, written = (key.array().astype(np.int64) for key in (starts_of, initial_of, written_of))
    if starts[0] != 0 or starts[-1] != len(written) or (np.diff(starts) < 0).any():
        raise KernelInputError(f"query_start_loc {starts.tolist()} must rise from 0 to the {len(written)} tokens")
    for name, slots in (("initial_slots", initial), ("state_slots", written)):
        if slots.max(initial=-1) >= num_slots:
            raise KernelInputError(f"{name} names slot {slots.max()}, states has {num_slots}")
    owner = {}
    for sequence, slot in zip(np.repeat(np.arange(len(initial)), np.diff(starts)), written, strict=True):
        if slot >= 0 and slot in owner:
            raise KernelInputError(f"state_slots writes slot {slot} twice")
        owner[slot] = sequence
    for sequence, slot in enumerate(initial):
        if slot >= 0 and starts[sequence] < starts[sequence + 1] and owner.get(slot, sequence) != sequence:
            raise KernelInputError(f"sequence {sequence} begins with slot {slot}, which sequence {owner[slot]} writes")


def kda(operands: Kda) -> torch.Tensor:
    q, k, v, g, beta, states, query_start_loc, initial_slots, state_slots = operands
    queries, keys, values, decay = unit(q) * q.shape[2] ** -0.5, unit(k), v.float(), g.exp()
    out = torch.empty(v.shape, dtype=torch.float32)
    for (start, end), initial in zip(itertools.pairwise(query_start_loc.tolist()), initial_slots.tolist(), strict=True):
        state = states[initial] if initial >= 0 else torch.zeros(states.shape[1:])  # [H, D, V]
        for t in range(start, end):
            state = state * decay[t, :, :, None]
            change = beta[t, :, None] * (values[t] - (state * keys[t, :, :, None]).sum(1))  # [H, V]
            state = state + keys[t, :, :, None] * change[:, None]
            out[t] = (state * queries[t, :, :, None]).sum(1)
            if state_slots[t] >= 0:
                states[state_slots[t]] = state
    return out.to(q.dtype)


def unit(x: torch.Tensor) -> torch.Tensor:
    """Queries or keys [..., D] at length one, fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + LENGTH_EPS)
