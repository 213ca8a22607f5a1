"""Faults in the numbers: degenerate norms, routers, integers and scales, copies, and what only a source can tell."""

from __future__ import annotations

import torch

from tests.checkpoint.test_nonsense import ANSWER, LFS, PAGE, TABLE, with_bytes
from tests.verify.faults.row import SOURCE, VALUES, Edit, Linked, Row, tensor

N, F, Q, S, X, T = "norm", "float weight", "integers", "scale", "copy", "nonsense"
LAYER = "model.layers.1."
EXPERT = f"{LAYER}mlp.experts.2.down_proj"
Q_B = f"{LAYER}self_attn.q_b_proj"
ROUTER = f"{LAYER}mlp.gate.weight"
DEQ = f"{Q_B}.deq_scale"


def zeros(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x)


def at(value: float, *index: int) -> object:
    def edit(x: torch.Tensor) -> torch.Tensor:
        x[index] = value
        return x

    return edit


def no_weights(module: str) -> Edit:
    """Every integer 0, and the derived sums with them."""

    def edit(ck: Linked) -> None:
        names = [name for name in (f"{module}.weight", f"{module}.scale_bias") if name in ck.file_of]
        ck.store({name: zeros(ck.read(name)) for name in names})

    return edit


def dead_expert(ck: Linked) -> None:
    """Store an expert as this tool stores a dead one: zeros with scale 1."""
    no_weights(EXPERT)(ck)
    ck.change(f"{EXPERT}.weight_scale", torch.ones_like)


def copied(source: str, target: str) -> Edit:
    """All tensors of one module in the place of another's."""

    def edit(ck: Linked) -> None:
        names = [name for name in ck.names() if name.startswith(source + ".")]
        ck.store({target + name.removeprefix(source): ck.read(name) for name in names})

    return edit


def swapped(first: str, second: str) -> Edit:
    return lambda ck: ck.store({first: ck.read(second), second: ck.read(first)})


def flip(x: torch.Tensor) -> torch.Tensor:
    return -x


def text(data: bytes) -> object:
    return lambda x: with_bytes(x, data, (x.nbytes - len(data)) // 2)


def as_int64(bits: int) -> Edit:
    """deq_scale of every static linear as an engine in float16 keeps it, with other bits in one place."""

    def edit(ck: Linked) -> None:
        changes: dict[str, torch.Tensor | None] = {}
        for name in ck.names(r"\.deq_scale$"):
            changes[name] = ck.read(name).view(torch.int32).long()
        first = changes[DEQ]
        assert first is not None
        first[3] = first[3] if bits == 0 else bits
        ck.store(changes)

    return edit


def halved(ck: Linked) -> None:
    """Integers and the sums over them."""
    weight = ck.read(f"{Q_B}.weight") // 2
    sums = -int(ck.read(f"{Q_B}.input_offset")) * weight.sum(1)
    ck.store({f"{Q_B}.weight": weight, f"{Q_B}.quant_bias": sums.int()})


ROWS = [
    Row(N, "final norm zero", tensor("model.norm.weight", zeros), "every gain is zero", modes=VALUES),
    Row(
        N, "final norm doubled", tensor("model.norm.weight", lambda x: 2 * x), "differ from 1 by up to 1", modes=VALUES,
    ),
    Row(N, "one gain of the final norm", tensor("model.norm.weight", at(0.0, 5)), "differ from 1", modes=VALUES),
    Row(N, "a layer's norm zero", tensor(f"{LAYER}input_layernorm.weight", zeros), "every gain is zero", modes=VALUES),
    Row(N, "q_a_layernorm negated", tensor(f"{LAYER}self_attn.q_a_layernorm.weight", flip), "negative", modes=VALUES),
    Row(F, "router zero", tensor(ROUTER, zeros), "module computes nothing", modes=VALUES),
    Row(F, "router 2^20 times too large", tensor(ROUTER, lambda x: x * 2**20), "of its kind", "warning", modes=VALUES),
    Row(F, "router 2^20 times too large, source", tensor(ROUTER, lambda x: x * 2**20), "does not match", modes=SOURCE),
    Row(
        F, "embedding and head swapped", swapped("model.embed_tokens.weight", "lm_head.weight"),
        "two are swapped", modes=VALUES,
    ),
    Row(Q, "INT4 zero, scales of weights", no_weights(EXPERT), "rows are all zero, but have the scale", modes=VALUES),
    Row(
        Q, "INT8, one row zero", tensor(f"{Q_B}.weight", lambda x: x.index_fill_(0, torch.tensor([4]), 0)),
        "1 rows are all zero", modes=VALUES,
    ),
    Row(Q, "dead expert, as it is stored", dead_expert, "dead module", "warning", modes=VALUES),
    Row(Q, "dead expert, not in the source", dead_expert, "does not match", modes=SOURCE),
    Row(
        Q, "INT8 below 127", tensor(f"{Q_B}.weight", lambda x: x.clamp(-126, 126)),
        "no integer of 127 in any row", modes="ph",
    ),
    Row(
        Q, "INT8 halved", tensor(f"{Q_B}.weight", lambda x: x // 2),
        "48 of 48 rows reach no integer of 100", modes=VALUES,
    ),
    Row(
        Q, "INT8 -128 everywhere", tensor(f"{Q_B}.weight", lambda x: torch.where(x < -30, -128, x)),
        "saturated", modes=VALUES,
    ),
    Row(
        Q, "INT8, one -128 per row",
        tensor(f"{Q_B}.weight", lambda x: torch.where(torch.arange(x.shape[1]) == 7, -128, x)),
        "-128 in 48 of 48", modes=VALUES,
    ),
    Row(Q, "INT8, constant row", tensor(f"{Q_B}.weight", at(127, 3)), "1 of 48 rows hold one value only", modes=VALUES),
    Row(S, "1e4", tensor(f"{Q_B}.weight_scale", at(1e4, 2, 0)), "row 2 has scale 1e\\+04", modes=VALUES),
    Row(
        S, "all of a tensor 1e4", tensor(f"{Q_B}.weight_scale", lambda x: x.fill_(1e4)),
        "its size is 1e\\+04", "warning", modes=VALUES,
    ),
    Row(
        S, "not of bf16", tensor(f"{Q_B}.weight_scale", lambda x: x * 1.001),
        "not bf16-representable", "warning", modes=VALUES,
    ),
    Row(X, "two experts", copied(f"{LAYER}mlp.experts.0", f"{LAYER}mlp.experts.3"), "byte for byte", modes=VALUES),
    Row(
        X, "gate is up", copied(f"{LAYER}mlp.shared_experts.up_proj", f"{LAYER}mlp.shared_experts.gate_proj"),
        "byte for byte", modes="ph",
    ),
    Row(X, "a whole layer", copied("model.layers.1", "model.layers.2"), "byte for byte", "warning", modes=VALUES),
    Row(X, "head is embedding", copied("model.embed_tokens", "lm_head"), "byte for byte", "warning", modes="ph"),
    Row(T, "embedding", tensor("model.embed_tokens.weight", text(PAGE[:600])), "holds text, not values", modes=VALUES),
    Row(T, "a norm", tensor("model.norm.weight", text(PAGE[:128])), "holds text, not values", modes=VALUES),
    Row(T, "INT8", tensor(f"{Q_B}.weight", text(ANSWER)), "holds text, not values: '.*error", modes=VALUES),
    Row(T, "INT4", tensor(f"{EXPERT}.weight", text(LFS)), "holds text, not values: '.*git-lfs", modes=VALUES),
    Row(T, "digits", tensor("lm_head.weight", text(TABLE)), "holds text, not values", modes=VALUES),
    Row(T, "one value", tensor("lm_head.weight", at(1e33, 3, 5)), "largest value is 9.99e\\+32", modes=VALUES),
    Row(T, "one negative value", tensor(ROUTER, at(-1e5, 1, 2)), "largest value is", modes=VALUES),
    Row(T, "one gain", tensor(f"{LAYER}input_layernorm.weight", at(1e20, 3)), "largest value is 1e", modes=VALUES),
    # -- static activations
    Row(S, "int64 for bfloat16", as_int64(0), "expects float32", recipe="w8a8"),
    Row(S, "input_offset", tensor(f"{Q_B}.input_offset", at(0.5, 0)), "an integer in", modes=VALUES, recipe="w8a8"),
    Row(Q, "static INT8 halved", halved, "reach no integer of 100", modes=VALUES, recipe="w8a8"),
]  # fmt: skip
