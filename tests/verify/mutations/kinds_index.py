"""Files that disagree: index, shards, description and config.json, each correct on its own, or cut off."""

from __future__ import annotations

from random import Random

from tests.verify.mutations.mutator import Place, kind, pick, place
from tests.verify.support.editor import DESCRIPTION, ROT, Checkpoint, module_of

TYPES = ["FLOAT", "W8A8_DYNAMIC", "W8A8", "W4A8_DYNAMIC"]


@kind()
def shard_missing(ck: Checkpoint, chance: Random) -> str:
    file = pick(chance, ck.shards)
    (ck.directory / file).unlink()
    return file


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
def description_missing(ck: Checkpoint, chance: Random) -> str:
    (ck.directory / DESCRIPTION).unlink()
    return DESCRIPTION


@kind()
def description_forgets_a_tensor(ck: Checkpoint, chance: Random) -> str:
    with ck.json(DESCRIPTION) as description:
        del description[(name := pick(chance, [name for name in ck.names() if name != ROT]))]
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
def indexer_schedule_lost(ck: Checkpoint, chance: Random) -> Place:
    """A layer without indexer weights that the engine lets compute its own top-k."""
    pick(chance, ["rope_parameters"] * ("rope_parameters" in ck.config))  # in Flash no layer shares one: refused
    with ck.model_keys() as config:
        types = config.get("indexer_types") or ["full"] * config["num_hidden_layers"]
        computing = [layer for layer, kind in enumerate(types) if kind == "full" and layer > 0]
        if "shared" in types and chance.random() < 0.5:
            del config["index_topk_freq"]
        else:
            types[pick(chance, computing)] = "shared"
            config["indexer_types"] = types
    return place(["config.json"], [key for key in ck.description if key.endswith(".quant_type")])
