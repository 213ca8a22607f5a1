"""Mistakes that fit together: every check of the checkpoint alone passes, only its source says that it is wrong.

What is left out, because nobody can see it:
- a wrong input_scale with the deq_scale that belongs to it: the range of an activation is not in the source;
- up_proj's rows divided by a factor and down_proj's columns multiplied by it: the same function (smoothing does it);
- a change below the rounding error of the type, such as one INT8 integer one step off: only the hashes tell.
"""

from __future__ import annotations

import re
from random import Random

import torch
from safetensors.torch import load_file

from tests.verify.mutations.mutator import Place, kind, pick, place
from tests.verify.support.editor import PROVENANCE, ROT, Checkpoint, module_of
from tests.verify.support.integers import integers, linear, weight_scale


def comparable(ck: Checkpoint, modules: list[str]) -> list[str]:
    """Without our provenance nobody knows how the spaces inside the attention of a rotated model are rotated."""
    if (ck.directory / PROVENANCE).is_file() or ROT not in ck.file_of:
        return modules
    inner = re.compile(r"self_attn\.(q_[ab]_proj|q_a_layernorm|kv_a_\w+|kv_b_proj|o_proj|indexer\.wq_b)$")
    return [module for module in modules if not inner.search(module)]


def quantized(ck: Checkpoint) -> list[str]:
    return comparable(ck, [module for module in ck.modules() if ck.kind(f"{module}.weight") not in ("FLOAT", "")])


def pair(ck: Checkpoint, module: str) -> list[str]:
    """Weights that share a smoothing scale with this module: its damage may show there, too."""
    parent, _, last = module.rpartition(".")
    other = {"up_proj": "down_proj", "kv_b_proj": "o_proj"}.get(last)
    return [f"{parent}.{other}.weight"] if other else []


def wrong(ck: Checkpoint, *modules: str) -> Place:
    return place([f"{module}.weight" for module in modules], [name for m in modules for name in pair(ck, m)])


@kind(against=True)
def rows_swapped(ck: Checkpoint, chance: Random) -> Place:
    """Two rows with their scales."""
    module = pick(chance, quantized(ck))
    q, scale = integers(ck, module), weight_scale(ck, module)
    a, b = chance.sample(range(len(q)), 2)
    for tensor in (q, scale):
        tensor[[a, b]] = tensor[[b, a]]
    ck.store(linear(ck, module, q, scale))
    return wrong(ck, module)


@kind(against=True)
def row_scale_wrong(ck: Checkpoint, chance: Random) -> Place:
    """Too large, too small, tiny; up_proj's partner down_proj then has the wrong column."""
    module = pick(chance, quantized(ck))
    scale = weight_scale(ck, module)
    scale[chance.randrange(len(scale))] *= pick(chance, [2.0, 0.5, 4.0, 1e-6, 1000.0])
    ck.store(linear(ck, module, scale=scale))
    return place([f"{module}.weight", *pair(ck, module)])


@kind(against=True)
def column_scale_wrong(ck: Checkpoint, chance: Random) -> Place:
    """A smoothing scale on one side only: too little for the whole weight or for its rows to tell."""
    module = pick(chance, [m for m in quantized(ck) if ck.kind(f"{m}.weight") != "W4A8_DYNAMIC"])
    q = integers(ck, module)
    column = int(q.float().square().sum(0).argsort()[q.shape[1] // 2])  # a nearly empty one would say nothing
    q[:, column] = (0.8 * q[:, column].float()).round().to(torch.int8)
    ck.store(linear(ck, module, q))
    return wrong(ck, module)


@kind(against=True)
def float_weight_wrong(ck: Checkpoint, chance: Random) -> Place:
    """Turned, scaled, rows swapped, a row doubled, negated."""
    name = (
        f"{pick(chance, [m for m in comparable(ck, ck.modules('FLOAT')) if len(ck.shape(f'{m}.weight')) == 2])}.weight"
    )
    tensor = ck.read(name).float()
    a, b = chance.sample(range(len(tensor)), 2)
    swapped, doubled = tensor.clone(), tensor.clone()
    swapped[[a, b]] = swapped[[b, a]]
    doubled[a] *= 2
    choices = [tensor.roll(1, 1), tensor * 1.1, swapped, doubled, -tensor, tensor.flip(1)]
    if pair(ck, module_of(name)):  # its rows' factors are what smoothing may have moved
        choices = [tensor.roll(1, 1), swapped, tensor.flip(1)]
    ck.store({name: pick(chance, choices).to(ck.read(name).dtype)})
    return wrong(ck, module_of(name))


@kind(against=True)
def norm_gain_wrong(ck: Checkpoint, chance: Random) -> Place:
    """Seen in the linears that read the norm, which are right only together with it."""
    name = f"{pick(chance, comparable(ck, ck.modules(pattern='norm$')))}.weight"
    gain = ck.read(name)
    one = gain.clone()
    one[chance.randrange(len(one))] *= pick(chance, [2.0, -1.0, 0.0, 0.3])
    ck.store({name: pick(chance, [one, gain * 1.2])})
    layer = re.sub(r"(\.layers\.\d+)\..*", r"\1", name)
    kda = ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj")
    readers = {
        "model.norm": ["lm_head.weight"],
        "model.language_model.norm": ["lm_head.weight"],
        f"{layer}.input_layernorm": [
            f"{layer}.self_attn.{part}" for part in ("q_a_proj", "kv_a_proj", "indexer.w", *kda)
        ],
        f"{layer}.self_attn.q_a_layernorm": [f"{layer}.self_attn.{part}" for part in ("q_b_proj", "indexer.wq_b")],
        f"{layer}.self_attn.kv_a_layernorm": [f"{layer}.self_attn.kv_b_proj"],
        f"{layer}.post_attention_layernorm": [f"{layer}.mlp."],
        f"{layer}.enorm": [f"{layer}.eh_proj."],
        f"{layer}.hnorm": [f"{layer}.eh_proj."],
        f"{layer}.shared_head.norm": [f"{layer}.shared_head.head."],
    }.get(module_of(name), [])
    touched = [n for n in ck.names(r"\.weight$") if n.startswith(tuple(readers))] if readers else [name]
    return place(touched, [name, *(other for n in touched for other in pair(ck, module_of(n)))])


@kind(against=True)
def vector_wrong(ck: Checkpoint, chance: Random) -> Place:
    """The router's correction bias, the indexer's LayerNorm: nothing else reads them."""
    name = pick(chance, ck.names(r"(e_score_correction_bias|k_norm\.weight|k_norm\.bias)$"))
    tensor = ck.read(name)
    ck.store({name: pick(chance, [tensor.flip(0), tensor * 1.5, -tensor, tensor.roll(1), torch.zeros_like(tensor)])})
    return place([name])


@kind(against=True)
def rot_of_another_norm(ck: Checkpoint, chance: Random) -> Place:
    """Still symmetric, still diagonal in the source's basis."""
    rot = ck.read(pick(chance, ck.names(r"^rot\.weight$")))
    ck.store({ROT: pick(chance, [rot * 1.1, torch.eye(len(rot)).to(rot.dtype), rot.float().inverse().to(rot.dtype)])})
    return place([ROT])


@kind(against=True)
def tensor_not_rotated(ck: Checkpoint, chance: Random) -> Place:
    """A float weight of a rotated model as its source has it."""
    pick(chance, ck.names(r"^rot\.weight$"))
    assert ck.source is not None
    source = {}
    for shard in ck.source.glob("*.safetensors"):
        source |= load_file(shard)
    float_weights = [n for n in comparable(ck, ck.modules("FLOAT")) if len(ck.shape(f"{n}.weight")) == 2]
    name = f"{pick(chance, float_weights)}.weight"
    ck.store({name: source[name].to(ck.read(name).dtype)})
    return wrong(ck, module_of(name))


@kind(against=True)
def config_of_another_model(ck: Checkpoint, chance: Random) -> str:
    """The sizes are equal, the arithmetic is not: fluent text from the wrong model."""
    with ck.model_keys() as config:
        keys = ["rms_norm_eps", "routed_scaling_factor", "index_topk", "norm_topk_prob"]
        key = pick(chance, keys + ["rope_theta"] * ("rope_parameters" in config))
        if key == "rope_theta":
            config["rope_parameters"]["rope_theta"] *= pick(chance, [10, 0.5])
        elif key == "norm_topk_prob":
            config[key] = not config[key]
        else:
            config[key] *= 2
    return "config.json"
