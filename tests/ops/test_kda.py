"""KDA against its recurrence in fp64 and transformers: ragged batches, every cut, a state after each draft."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from glm5_kernels import ops

pytestmark = pytest.mark.usefixtures("implementation")


def drawn(tokens: int, heads: int = 2, dim: int = 32, values: int = 16, dtype: torch.dtype = torch.float32) -> Any:
    """q, k, v, g and beta; decays of some channels leave nothing, of others nearly all."""
    q, k = (torch.randn(tokens, heads, dim).to(dtype) for _ in range(2))
    g = -5 * torch.sigmoid(4 * torch.randn(tokens, heads, dim))
    return q, k, torch.randn(tokens, heads, values).to(dtype), g, torch.rand(tokens, heads)


def recurrence(operands: Any, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [T, H, V] and the state after each token [T, H, D, V] of one sequence, in fp64."""
    q, k, v, g, beta = (x.double() for x in operands)
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    outputs, states, state = [], [], state.double()
    for t in range(len(q)):
        state = state * g[t].exp()[..., None]
        stored = torch.einsum("hd,hdv->hv", k[t], state)
        state = state + torch.einsum("hd,hv->hdv", k[t], beta[t, :, None] * (v[t] - stored))
        outputs.append(torch.einsum("hd,hdv->hv", q[t], state) * q.shape[2] ** -0.5)
        states.append(state)
    return torch.stack(outputs), torch.stack(states)


def run(operands: Any, states: torch.Tensor, lengths: list[int], initial: list[int], slots: list[int]) -> torch.Tensor:
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return ops.kda(*operands, states, starts, torch.tensor(initial).int(), torch.tensor(slots).int())


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dim", "values"), [(32, 16), (128, 128), (18, 10)])
def test_a_ragged_batch_is_its_recurrence(dim: int, values: int, dtype: torch.dtype) -> None:
    """A prompt, an empty sequence, one token, drafts with a state after each: no other slot is touched."""
    lengths, initial = [37, 0, 1, 3, 18], [-1, 3, 2, 4, 1]
    slots = [*[-1] * 36, 0, 2, 5, 4, 6, *[-1] * 18]
    operands, states = drawn(sum(lengths), 2, dim, values, dtype), torch.randn(9, 2, dim, values)
    before, start = states.clone(), 0
    out = run(operands, states, lengths, initial, slots)
    assert out.dtype == dtype
    for length, slot in zip(lengths, initial, strict=True):
        span = slice(start, start + length)
        empty = torch.zeros_like(before[0])
        if length:
            want, after = recurrence([x[span] for x in operands], before[slot] if slot >= 0 else empty)
            rounding = 2 * torch.finfo(dtype).eps if dtype == torch.bfloat16 else 2e-5
            torch.testing.assert_close(out[span].double(), want, rtol=rounding, atol=2e-5)
            for state, written in zip(after, slots[span], strict=True):
                if written >= 0:
                    torch.testing.assert_close(states[written].double(), state, rtol=2e-5, atol=2e-5)
        start += length
    untouched = [slot for slot in range(9) if slot not in slots]
    assert torch.equal(states[untouched], before[untouched])


@pytest.mark.parametrize("cut", [1, 2, 8, 15, 16, 17, 31, 32, 33, 63, 64, 69])
def test_every_cut_gives_the_same(cut: int) -> None:
    """One step, or two with the state carried over: the same bits, because a state is a sum in one order."""
    operands = drawn(70)
    states = torch.zeros(2, 2, 32, 16)
    whole = run(operands, states, [70], [-1], [*[-1] * 69, 0])
    first = run([x[:cut] for x in operands], states, [cut], [-1], [*[-1] * (cut - 1), 1])
    second = run([x[cut:] for x in operands], states, [70 - cut], [1], [*[-1] * (69 - cut), 1])
    assert torch.equal(torch.cat([first, second]), whole)
    assert torch.equal(states[0], states[1])


def test_rejected_drafts_leave_nothing() -> None:
    """After a step of four drafts, the next one begins with the state behind any of them, and rewrites its slots."""
    operands, states = drawn(8), torch.randn(5, 2, 32, 16)
    want = recurrence(operands, states[4])[0]
    run([x[:4] for x in operands], states, [4], [4], [0, 1, 2, 3])
    for accepted in (4, 2, 1):
        again = states.clone()
        span = slice(accepted, accepted + 4)
        got = run([x[span] for x in operands], again, [4], [accepted - 1], [0, 1, 2, 3])
        torch.testing.assert_close(got.double(), want[span], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("length", "cut"), [(1, 0), (16, 3), (64, 63), (65, 64), (100, 50)])
def test_transformers(length: int, cut: int) -> None:
    """Outputs and last state of transformers' chunk form, in two steps, the second from the state of the first."""
    from transformers.models.glm5_next.modeling_glm5_next import chunk_kimi_delta_attention

    operands, states = drawn(length), torch.zeros(1, 2, 32, 16)
    batched = [x[None] for x in operands]
    want, last = chunk_kimi_delta_attention(*batched, output_final_state=True, use_qk_l2norm_in_kernel=True)
    parts = []
    for span, initial in ((slice(cut), -1), (slice(cut, length), 0 if cut else -1)):
        part = [x[span] for x in operands]
        slots = [-1] * len(part[0])
        slots[-1:] = [0] * min(1, len(slots))
        parts.append(run(part, states, [len(slots)], [initial], slots))
    torch.testing.assert_close(torch.cat(parts), want[0], rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(states, last, rtol=1e-4, atol=2e-5)


def test_a_slot_that_is_not_read_may_hold_anything() -> None:
    operands, states = drawn(5), torch.full((2, 2, 32, 16), float("nan"))
    out = run(operands, states, [5], [-1], [-1, -1, -1, -1, 0])
    assert bool(out.isfinite().all())
    assert bool(states[0].isfinite().all())
    assert bool(states[1].isnan().all())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_head_and_sequence(value: float) -> None:
    operands, states = drawn(6), torch.zeros(2, 2, 32, 16)
    want = run(operands, states.clone(), [3, 3], [-1, -1], [-1, -1, 0, -1, -1, 1])
    operands[2][1, 0, 5] = value
    got = run(operands, states, [3, 3], [-1, -1], [-1, -1, 0, -1, -1, 1])
    reached = torch.zeros(6, 2, dtype=torch.bool)
    reached[1:3, 0] = True
    assert torch.equal(got.isfinite().all(-1), ~reached)
    assert torch.equal(got[~reached], want[~reached])
    assert not bool(states[0, 0].isfinite().all())
    assert bool(states[1].isfinite().all())


def test_no_tokens_and_no_sequences() -> None:
    states = torch.ones(1, 2, 32, 16)
    assert run(drawn(0), states, [], [], []).shape == (0, 2, 16)
    assert run(drawn(0), states, [0, 0], [-1, 0], []).shape == (0, 2, 16)
    assert run(drawn(1), states[:0], [1], [-1], [-1]).shape == (1, 2, 16)
    assert bool((states == 1).all())
