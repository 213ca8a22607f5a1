"""The residual streams against their formula in fp64 and transformers: any batch, any number of streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import rms_norm

from glm5_kernels import ops
from glm5_kernels.parity.flash import mhc_operands

pytestmark = pytest.mark.usefixtures("implementation")
NAMES = (
    "streams", "output", "post", "comb", "fn", "scale", "base", "norm_weight", "rms_eps", "hc_eps", "sinkhorn_iters",
    "norm_eps",
)  # fmt: skip


def drawn(tokens: int, n: int = 4, columns: int = 80, dtype: torch.dtype = torch.float32, joins: bool = True) -> Any:
    operands = mhc_operands(tokens, n, columns, dtype, joins, torch.Generator().manual_seed(tokens))
    return dict(zip(NAMES, operands, strict=True))


def formula(o: dict[str, Any]) -> list[torch.Tensor]:
    """The four results in fp64, a token and a stream at a time."""
    results: list[list[torch.Tensor]] = [[], [], [], []]
    for t, before in enumerate(o["streams"].double()):
        n, after = len(before), before
        if o["output"] is not None:
            comb, post, y = (o[name][t].double() for name in ("comb", "post", "output"))
            after = torch.stack([sum(comb[j, m] * before[j] for j in range(n)) + post[m] * y for m in range(n)])
        row = rms_norm(after.flatten(), (after.numel(),), eps=o["rms_eps"])
        logits = o["scale"].double().repeat_interleave(torch.tensor([n, n, n * n])) * (o["fn"].double() @ row)
        logits += o["base"].double()
        pre, post_out = logits[:n].sigmoid() + o["hc_eps"], 2 * logits[n : 2 * n].sigmoid()
        comb_out = logits[2 * n :].view(n, n).softmax(1) + o["hc_eps"]
        for step in range(2 * o["sinkhorn_iters"] - 1):  # columns, then rows and columns in turns
            comb_out = comb_out / (comb_out.sum(step % 2, keepdim=True) + o["hc_eps"])
        mixed = rms_norm(pre @ after, after.shape[1:], o["norm_weight"].double(), o["norm_eps"])
        for result, value in zip(results, (after, post_out, comb_out, mixed), strict=True):
            result.append(value)
    return [torch.stack(result) for result in results]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "columns"), [(4, 1040), (4, 20), (1, 64), (8, 528), (9, 32)])
@pytest.mark.parametrize("joins", [True, False])
def test_against_fp64(joins: bool, n: int, columns: int, dtype: torch.dtype) -> None:
    operands = drawn(18 if n == 4 else 2, n, columns, dtype, joins)
    got, rounding = ops.mhc(**operands), max(2e-5, torch.finfo(dtype).eps)
    assert [x.dtype for x in got] == [torch.float32] * 3 + [dtype]
    for result, want, allowed in zip(got, formula(operands), (1e-5, 2e-5, 2e-5, rounding), strict=True):
        torch.testing.assert_close(result.double(), want, rtol=allowed, atol=allowed)


@pytest.mark.parametrize("implementation", ["cpu"], indirect=True)
def test_threads_change_no_bit(implementation: str) -> None:
    """Of the compiled op: torch's product in the reference sums in another order on some processors."""
    before, results = torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(ops.mhc(**drawn(40, 4, 1040)))
    torch.set_num_threads(before)
    assert implementation and all(map(torch.equal, *results))


def test_transformers() -> None:
    """Two halves, the second joined by the first one's output."""
    from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextHyperConnection

    operands = drawn(11, 4, 80)
    config = Glm5NextTextConfig(hidden_size=80, hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=1e-5)
    module = Glm5NextTextHyperConnection(config)
    module.load_state_dict({name: operands[name] for name in ("fn", "base", "scale")})
    total, post, comb, entered = ops.mhc(**operands)
    want_post, want_comb, want = module(total[None])
    normed = rms_norm(want[0], want.shape[-1:], operands["norm_weight"], 1e-5)
    for a, b in ((post, want_post[0]), (comb, want_comb[0]), (entered, normed)):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


def test_a_token_is_the_same_in_every_batch(implementation: str) -> None:
    """In C++ to the bit; torch's product adds in another order."""
    operands = drawn(40, 4, 1040, torch.bfloat16)
    whole, allowed = ops.mhc(**operands), 0 if implementation == "cpu" else 1e-2
    per_token = ("streams", "output", "post", "comb")
    for t in (0, 15, 16, 39):
        alone = ops.mhc(**operands | {name: operands[name][t : t + 1] for name in per_token})
        for result, of_all in zip(alone, whole, strict=True):
            torch.testing.assert_close(result[0], of_all[t], rtol=allowed, atol=allowed)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["streams", "output", "comb"])
def test_what_is_not_finite_stays_in_its_token(name: str, value: float) -> None:
    operands = drawn(5)
    want = ops.mhc(**operands)
    operands[name][2].view(-1)[3] = value
    for got, before in zip(ops.mhc(**operands), want, strict=True):
        assert not bool(got[2].isfinite().all())
        others = torch.arange(5) != 2
        torch.testing.assert_close(got[others], before[others], rtol=0, atol=0)


def test_no_tokens() -> None:
    assert [len(x) for x in ops.mhc(**drawn(0))] == [0] * 4
