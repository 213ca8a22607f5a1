"""Sets of tensors: missing, renamed, too many, twice, of a foreign type or shape. Index and description follow."""

from __future__ import annotations

from random import Random

import torch
from safetensors.torch import save_file

from tests.verify.mutations.mutator import Place, kind, pick, place
from tests.verify.support.editor import ROT, Checkpoint, module_of
from tests.verify.support.integers import integers, weight_scale


def drop(ck: Checkpoint, names: list[str]) -> list[str]:
    ck.store(dict.fromkeys(names))
    return names


@kind()
def tensor_missing(ck: Checkpoint, chance: Random) -> list[str]:
    return drop(ck, [pick(chance, ck.names())])


@kind()
def layer_missing(ck: Checkpoint, chance: Random) -> list[str]:
    """Any layer, the MTP layer among them."""
    return drop(ck, ck.names(rf"\.layers\.{pick(chance, ck.layers)}\."))


@kind()
def unknown_tensor(ck: Checkpoint, chance: Random) -> str:
    name = pick(chance, ck.names())
    suffixes = ["zero_point", "weight_scale_inv", "g_idx", "weight_packed", "qweight"]
    new = f"{module_of(name)}.{pick(chance, suffixes)}"
    ck.store({new: ck.read(name)})
    return new


@kind()
def tensor_in_two_shards(ck: Checkpoint, chance: Random) -> str:
    """The index knows both shards and names one of the two."""
    name, more = pick(chance, ck.names()), "more.safetensors"
    other = pick(chance, [norm for norm in ck.names(r"norm\.weight$") if norm != name])
    moved = ck.read(other)
    ck.store({other: None})
    ck.store({other: moved}, file=more)
    save_file({other: moved, name: ck.read(name)}, ck.directory / more)
    with ck.json(ck.index) as index:
        index["weight_map"][name] = pick(chance, [ck.file_of[name], more])
    return name


FOREIGN = {
    "I8": [torch.int16, torch.int32, torch.uint8, torch.float32, torch.bfloat16],
    "I32": [torch.int64, torch.float32, torch.int16],
    "F32": [torch.float16, torch.bfloat16, torch.float64],
    "FLOAT": [torch.float16, torch.float64, torch.float8_e4m3fn],
}


@kind()
def dtype_foreign(ck: Checkpoint, chance: Random) -> str:
    """The values are right, their type is not."""
    name = pick(chance, ck.names())
    plain = name == ROT or ck.kind(name) == "FLOAT"
    ck.store({name: ck.read(name).to(pick(chance, FOREIGN["FLOAT" if plain else ck.facts[name]["dtype"]]))})
    return name


@kind()
def deq_scale_of_an_fp16_engine(ck: Checkpoint, chance: Random) -> str:
    """One linear alone holds its deq_scale as int64 bits."""
    name = pick(chance, ck.names(r"\.deq_scale$"))
    ck.store({name: ck.read(name).view(torch.int32).to(torch.int64)})
    return name


@kind()
def shape_wrong(ck: Checkpoint, chance: Random) -> str:
    name = pick(chance, ck.names())
    tensor = ck.read(name)
    shapes = [tensor[None], tensor[..., None], tensor[:-1], torch.cat([tensor, tensor])]
    if tensor.ndim == 2 and tensor.shape[0] != tensor.shape[1]:
        shapes += [tensor.T, tensor.flatten()]
    ck.store({name: pick(chance, shapes)})
    return name


@kind()
def module_quantized_that_must_not_be(ck: Checkpoint, chance: Random) -> Place:
    """Names, shapes and values of a correct INT8 linear, where the engine has none."""
    pattern = r"(kv_b_proj|indexer\.wk|weights_proj|mlp\.gate|eh_proj|embed_tokens|lm_head|shared_head\.head)$"
    module = pick(chance, ck.modules("FLOAT", pattern))
    weight = ck.read(f"{module}.weight").float()
    scale = weight.abs().amax(1, keepdim=True).clamp_min(1e-6) / 127
    rest = {name.rpartition(".")[2]: ck.read(name) for name in ck.of_module(module)}
    q = (weight / scale).round().to(torch.int8)
    tensors = rest | {"weight": q, "weight_scale": scale, "weight_offset": scale * 0}
    ck.retype(module, "W8A8_DYNAMIC", tensors)
    return place([f"{module}.weight"])


@kind()
def expert_typed_differently(ck: Checkpoint, chance: Random) -> Place:
    """A correct linear of another type than its siblings: the engine looks at expert 0 only."""
    module = pick(chance, ck.modules("W4A8_DYNAMIC") + ck.modules("W8A8_DYNAMIC", r"\.experts\.\d+\."))
    q, scale = integers(ck, module), weight_scale(ck, module)
    if ck.kind(f"{module}.weight") == "W4A8_DYNAMIC":
        ck.retype(module, "W8A8_DYNAMIC", {"weight": q, "weight_scale": scale, "weight_offset": scale * 0})
    else:
        ck.retype(module, "FLOAT", {"weight": (q * scale).bfloat16()})
    return place([f"{module}.weight"])


@kind()
def fused_partner_typed_differently(ck: Checkpoint, chance: Random) -> Place:
    """q_a and kv_a, gate and up become one module in the engine."""
    quantized = ck.modules("W8A8_DYNAMIC") + ck.modules("W8A8")
    module = pick(chance, [module for module in quantized if ck.partner(module)])
    ck.retype(module, "FLOAT", {"weight": (integers(ck, module) * weight_scale(ck, module)).bfloat16()})
    return place([f"{module}.weight", *ck.partner(module)])
