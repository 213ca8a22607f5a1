"""Plain torch version of KDA: one token after the other."""

from __future__ import annotations

import itertools

import torch

from glm5_kernels.kda import LENGTH_EPS, Kda


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
