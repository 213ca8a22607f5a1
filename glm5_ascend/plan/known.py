"""Sizes known from elsewhere beside what the memory model computes for the same thing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from glm5_ascend.plan import cache, weights
from glm5_ascend.plan.model import named
from glm5_ascend.resources import data_dir

_UNITS = {"B": 1, "GB": 10**9, "GiB": 2**30}


@dataclass(frozen=True)
class Known:
    """`known` and `computed` in `unit`."""

    what: str
    known: float
    computed: float
    unit: str
    source: str


def sizes() -> Iterator[Known]:
    """Every entry of data/known_sizes.yaml."""
    raw: dict[str, Any] = yaml.safe_load((data_dir("plan/data") / "known_sizes.yaml").read_text(encoding="utf-8"))
    for item in raw["stored"]:
        stored = weights.stored_bytes(named(item["model"], item["quant"]), item["fp32_head"])
        what = f"{item['model']} {item['quant']}, {'fp32' if item['fp32_head'] else 'bf16'} head: all tensors"
        yield Known(what, item["known"], stored / _UNITS[item["unit"]], item["unit"], item["source"])
    for item in raw["row"]:
        model = named("glm-5", "w8a8", item["cache"])
        row = cache.attention_row(model) + cache.indexer_row(model)
        yield Known(
            f"cache of a token and layer, int8: {item['cache']}", item["known"], row, "B", "vllm-ascend 182b75e"
        )
    for item in raw["token"]:
        token = cache.bytes_per_token(named(item["model"], "w8a8", item["cache"]), mtp=True)
        what = f"{item['model']}: cache of a token, int8: {item['cache']}"
        yield Known(what, item["known"], token, "B", item["source"])
    for item in raw["sequence"]:
        needed = cache.pages(item["tokens"]) * cache.bytes_per_token(named(item["model"], "w8a8"), mtp=True)
        what = f"{item['model']}: cache of {item['tokens']:,} tokens"
        yield Known(what, item["known"], needed / _UNITS[item["unit"]], item["unit"], item["source"])
    for item in raw["die"]:
        own = sum(weights.per_die(named("glm-5", item["quant"]), True, item["tp"], item["ep"]).values())
        what = f"{item['quant']} TP{item['tp']} EP{item['ep']}: weights of a die"
        yield Known(what, item["known"], own / 1e9, "GB", "tensor list, divided as vLLM does")
