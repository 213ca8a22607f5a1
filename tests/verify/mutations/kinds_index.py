"""Files that disagree: index, shards, description and config.json, each correct on its own, or cut off."""

from __future__ import annotations

import os
import shutil
from random import Random
from typing import Any

from tests.verify.mutations.mutator import Place, kind, pick, place
from tests.verify.support.editor import DESCRIPTION, ROT, Checkpoint, module_of

TYPES = ["FLOAT", "W8A8_DYNAMIC", "W8A8", "W4A8_DYNAMIC"]


@kind()
def shard_missing(ck: Checkpoint, chance: Random) -> str:
    file = pick(chance, ck.shards)
    (ck.directory / file).unlink()
    return file


@kind()
def shard_replaced_by_another(ck: Checkpoint, chance: Random) -> Place:
    first, second = chance.sample(ck.shards, 2) if len(ck.shards) > 1 else (pick(chance, []), "")
    shutil.copyfile(ck.directory / first, ck.directory / second)
    touched = [name for name in ck.names() if ck.file_of[name] in (first, second)]
    return place([name for name in touched if ck.file_of[name] == second], [first, second, *touched])


@kind()
def index_names_a_missing_shard(ck: Checkpoint, chance: Random) -> Place:
    name = pick(chance, ck.names())
    with ck.json(ck.index) as index:
        index["weight_map"][name] = "quant_model_weights-00009-of-00009.safetensors"
    return place(["quant_model_weights-00009-of-00009.safetensors"], [name])


@kind()
def index_places_a_tensor_in_another_shard(ck: Checkpoint, chance: Random) -> str:
    name = pick(chance, ck.names())
    with ck.json(ck.index) as index:
        index["weight_map"][name] = pick(chance, [file for file in ck.shards if file != ck.file_of[name]])
    return name


@kind()
def index_forgets_a_tensor(ck: Checkpoint, chance: Random) -> str:
    with ck.json(ck.index) as index:
        del index["weight_map"][(name := pick(chance, ck.names()))]
    return name


@kind()
def index_forgets_a_shard(ck: Checkpoint, chance: Random) -> Place:
    """The file exists; for vLLM it is a missing shard."""
    file = pick(chance, ck.shards if len(ck.shards) > 1 else [])
    with ck.json(ck.index) as index:
        index["weight_map"] = {name: home for name, home in index["weight_map"].items() if home != file}
    return place([file], [name for name, home in ck.file_of.items() if home == file])


@kind()
def index_lists_a_tensor_too_many(ck: Checkpoint, chance: Random) -> str:
    name = f"{module_of(pick(chance, ck.names()))}.zero_point"
    with ck.json(ck.index) as index:
        index["weight_map"][name] = pick(chance, ck.shards)
    return name


@kind()
def index_cut(ck: Checkpoint, chance: Random) -> str:
    path = ck.directory / ck.index
    os.truncate(path, chance.randrange(path.stat().st_size - 5))
    return ck.index


@kind()
def description_cut(ck: Checkpoint, chance: Random) -> str:
    path = ck.directory / DESCRIPTION
    os.truncate(path, chance.randrange(path.stat().st_size - 5))
    return DESCRIPTION


@kind()
def description_missing(ck: Checkpoint, chance: Random) -> str:
    (ck.directory / DESCRIPTION).unlink()
    return DESCRIPTION


@kind()
def description_forgets_a_tensor(ck: Checkpoint, chance: Random) -> str:
    with ck.json(DESCRIPTION) as description:
        del description[(name := pick(chance, [name for name in ck.names() if name != ROT]))]
    return name


@kind()
def description_lists_a_tensor_too_many(ck: Checkpoint, chance: Random) -> str:
    name = f"{module_of(pick(chance, ck.names()))}.{pick(chance, ['zero_point', 'scale', 'weight_scale_inv'])}"
    with ck.json(DESCRIPTION) as description:
        description[name] = pick(chance, TYPES)
    return name


@kind()
def described_as_another_type(ck: Checkpoint, chance: Random) -> Place:
    """One key of one tensor. A linear's own key decides what its fused partners and other tensors must be."""
    name = pick(chance, [name for name in ck.names() if name != ROT])
    with ck.json(DESCRIPTION) as description:
        description[name] = pick(chance, [kind for kind in TYPES if kind != description[name]])
    if not name.endswith(".weight"):
        return place([name])
    return place(ck.of_module(module_of(name)), ck.partner(module_of(name)))


@kind()
def module_described_as_another_type(ck: Checkpoint, chance: Random) -> Place:
    """All keys of a module."""
    module = pick(chance, ck.modules())
    with ck.json(DESCRIPTION) as description:
        new = pick(chance, [kind for kind in TYPES if kind != description[f"{module}.weight"]])
        description |= dict.fromkeys(ck.of_module(module), new)
    demanded = [f"{module}.{suffix}" for suffix in ("weight_scale", "input_scale", "deq_scale", "scale_bias")]
    return place([*ck.of_module(module), *demanded], ck.partner(module))


@kind()
def described_as_an_unknown_type(ck: Checkpoint, chance: Random) -> str:
    name = pick(chance, [name for name in ck.names() if name != ROT])
    odd: list[Any] = ["W8A16", "W4A4_DYNAMIC", "float", "", None, 8, ["FLOAT"], {"type": "FLOAT"}, True]
    with ck.json(DESCRIPTION) as description:
        description[name] = pick(chance, odd)
    return name


@kind()
def indexer_schedule_lost(ck: Checkpoint, chance: Random) -> Place:
    """A layer without indexer weights that the engine lets compute its own top-k."""
    with ck.json("config.json") as config:
        types = config.get("indexer_types") or ["full"] * config["num_hidden_layers"]
        computing = [layer for layer, kind in enumerate(types) if kind == "full" and layer > 0]
        if "shared" in types and chance.random() < 0.5:
            del config["index_topk_freq"]
        else:
            types[pick(chance, computing)] = "shared"
            config["indexer_types"] = types
    return place(["config.json"], [key for key in ck.description if key.endswith(".quant_type")])


@kind()
def config_counts_wrong(ck: Checkpoint, chance: Random) -> Place:
    """config.json of a sibling model: a count is one off, so tensors are missing or too many."""
    experts, layers = ck.config["n_routed_experts"], len(ck.layers)
    key, step = pick(chance, ["n_routed_experts", "num_nextn_predict_layers"]), pick(chance, [-1, 1])
    with ck.json("config.json") as config:
        config[key] += step
    first = {"n_routed_experts": experts, "num_nextn_predict_layers": layers}[key] + min(step, 0)
    if key == "num_nextn_predict_layers":
        pattern = f"model.layers.{first}."
        here = ck.names(rf"^model\.layers\.{layers - 1}\.")
        return place([pattern + name.split(".", 3)[3] for name in here])
    parents = {expert.rpartition(".")[0] for expert in ck.experts()}
    mine = [f"{parent}.{first}.{part}_proj" for parent in parents for part in ("gate", "up", "down")]
    suffixes = ("weight", "weight_scale", "weight_offset", "scale_bias")
    # The router has a row for every expert.
    return place([f"{m}.{suffix}" for m in mine for suffix in suffixes], ck.names(r"mlp\.gate\."))


@kind()
def config_size_wrong(ck: Checkpoint, chance: Random) -> Place:
    """One size doubled: every tensor with that dimension has the wrong shape."""
    sizes = {
        "vocab_size": r"(embed_tokens|lm_head|shared_head\.head)\.weight$",
        "q_lora_rank": r"(q_a_proj|q_a_layernorm|q_b_proj|wq_b)\.",
        "kv_lora_rank": r"(kv_a_proj_with_mqa|kv_a_layernorm|kv_b_proj)\.",
        "intermediate_size": r"layers\.\d+\.mlp\.(gate|up|down)_proj\.",
        "moe_intermediate_size": r"(\.experts\.\d+|shared_experts)\.",
    }
    key = pick(chance, sorted(sizes))
    with ck.json("config.json") as config:
        config[key] *= 2
    return place(ck.names(sizes[key]))


@kind(refused=True)
def config_cut_or_odd(ck: Checkpoint, chance: Random) -> str:
    path = ck.directory / "config.json"
    if chance.random() < 0.5:
        os.truncate(path, chance.randrange(path.stat().st_size - 5))
    else:
        keys = ["hidden_size", "rope_parameters", "n_routed_experts", "model_type", "rms_norm_eps", "index_topk"]
        with ck.json("config.json") as config:
            config[pick(chance, keys)] = pick(chance, [None, -1, "x", [1]])
    return "config.json"
