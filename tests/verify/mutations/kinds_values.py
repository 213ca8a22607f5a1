"""Wrong numbers in the right places: scales, offsets, derived tensors, and how INT4 is packed."""

from __future__ import annotations

from random import Random

import torch

from tests.verify.mutations.mutator import Place, kind, pick, place
from tests.verify.support.editor import Checkpoint, module_of
from tests.verify.support.integers import linear, weight_scale

INT4 = "W4A8_DYNAMIC"
FLOATS = ("BF16", "F16", "F32")


def put(ck: Checkpoint, chance: Random, name: str, value: float) -> str:
    """One element at random."""
    tensor = ck.read(name)
    tensor.view(-1)[chance.randrange(tensor.numel())] = value
    ck.store({name: tensor})
    return name


@kind()
def not_finite(ck: Checkpoint, chance: Random) -> str:
    name = pick(chance, [name for name in ck.names() if ck.facts[name]["dtype"] in FLOATS])
    return put(ck, chance, name, pick(chance, [float("nan"), float("inf"), float("-inf")]))


@kind()
def scale_not_positive(ck: Checkpoint, chance: Random) -> Place:
    name = pick(chance, ck.names(r"\.(weight_scale|input_scale|deq_scale)$"))
    put(ck, chance, name, pick(chance, [0.0, -0.0, -0.01, -1e30]))
    return place([name], ck.partner(module_of(name)))


@kind()
def offset_not_zero(ck: Checkpoint, chance: Random) -> str:
    return put(ck, chance, pick(chance, ck.names(r"\.weight_offset$")), pick(chance, [1.0, -3.0, 1e-3, 128.0]))


@kind()
def packed_byte_changed(ck: Checkpoint, chance: Random) -> list[str]:
    """One integer of one expert is one off: every other layout of the integers differs in more."""
    module = pick(chance, ck.modules(INT4))
    packed = ck.read(f"{module}.weight")
    packed.view(-1)[chance.randrange(packed.numel())] ^= pick(chance, [1, 16])
    ck.store({f"{module}.weight": packed})
    return [f"{module}.weight", f"{module}.scale_bias"]


@kind()
def scale_bias_of_another_rule(ck: Checkpoint, chance: Random) -> str:
    """Without the factor 8, from the integers alone, summed up, spread evenly, or with its columns turned."""
    name = pick(chance, ck.names(r"\.scale_bias$"))
    tensor, scale = ck.read(name), ck.read(f"{module_of(name)}.weight_scale")
    wrong = [tensor / 8, tensor * 2, -tensor, tensor / scale, torch.zeros_like(tensor), tensor.roll(1, 0)]
    if tensor.shape[1] > 1:
        total = tensor.sum(1, keepdim=True)
        wrong += [total, total.expand_as(tensor) / tensor.shape[1], tensor.roll(1, 1), tensor.flip(1)]
    ck.store({name: pick(chance, wrong)})
    return name


@kind()
def int4_scale_wrong(ck: Checkpoint, chance: Random) -> list[str]:
    """Inverted, rounded to bf16, rolled by a row, doubled."""
    module = pick(chance, ck.modules(INT4))
    scale = ck.read(f"{module}.weight_scale")
    wrong = [1 / scale, scale.bfloat16().float(), scale.roll(1, 0), scale * 2, scale.flip(0)]
    ck.store({f"{module}.weight_scale": pick(chance, wrong)})
    return [f"{module}.weight_scale", f"{module}.scale_bias"]


def static_with_scale(ck: Checkpoint) -> list[str]:
    return [module for module in ck.modules("W8A8") if f"{module}.weight_scale" in ck.file_of]


@kind()
def deq_scale_wrong(ck: Checkpoint, chance: Random) -> list[str]:
    """No longer input_scale * weight_scale; without the stored weight_scale only the source tells."""
    module = pick(chance, static_with_scale(ck))
    deq = ck.read(f"{module}.deq_scale")
    one = deq.clone()
    one[chance.randrange(len(one))] *= 1.02
    ck.store({f"{module}.deq_scale": pick(chance, [one, deq * 2, weight_scale(ck, module).flatten(), 1 / deq])})
    return [f"{module}.deq_scale"]


@kind()
def quant_bias_wrong(ck: Checkpoint, chance: Random) -> str:
    """Forgotten, with the wrong sign, of another order of rows, or one value two off."""
    name = pick(chance, [n for n in ck.names(r"\.quant_bias$") if int(ck.read(n).abs().max()) > 1])
    tensor = ck.read(name)
    one = tensor.clone()
    one[chance.randrange(len(one))] += pick(chance, [-2, 2, 1000])
    ck.store({name: pick(chance, [one, -tensor, torch.zeros_like(tensor), tensor * 2])})
    return name


@kind()
def input_offset_moved(ck: Checkpoint, chance: Random) -> Place:
    """A possible value, but quant_bias was computed from another one."""
    name = pick(chance, ck.names(r"\.input_offset$"))
    old = float(ck.read(name))
    put(ck, chance, name, pick(chance, [value for value in (-128.0, -7.0, 0.0, 30.0, 127.0) if value != old]))
    module = module_of(name)
    return place([name, f"{module}.quant_bias"], ck.partner(module))


@kind()
def input_scales_of_fused_linears_differ(ck: Checkpoint, chance: Random) -> list[str]:
    """q_a and kv_a become one module with one input scale; each is correct on its own."""
    module = pick(chance, [module for module in ck.modules("W8A8") if ck.partner(module)])
    scale = ck.read(f"{module}.input_scale")
    old = weight_scale(ck, module)
    ck.store({f"{module}.input_scale": scale * 2})
    ck.store(linear(ck, module, scale=old))
    return [f"{module}.input_scale", *ck.partner(module)]


@kind()
def input_offsets_of_fused_linears_differ(ck: Checkpoint, chance: Random) -> list[str]:
    """Change the input offset of one of two fused linears."""
    module = pick(chance, [module for module in ck.modules("W8A8") if ck.partner(module)])
    offset, old = ck.read(f"{module}.input_offset"), weight_scale(ck, module)
    ck.store({f"{module}.input_offset": offset - 1 if float(offset) > 0 else offset + 1})
    ck.store(linear(ck, module, scale=old))
    return [f"{module}.input_offset", *ck.partner(module)]
