"""Sizes known from elsewhere beside what the memory model computes for the same thing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from glm5_ascend.files.yaml_file import read_yaml
from glm5_ascend.plan import cache, weights
from glm5_ascend.plan.data_files import KnownSizesFile, data_file
from glm5_ascend.plan.model import named

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
    known = read_yaml(data_file("known_sizes.yaml"), KnownSizesFile)
    for whole in known.stored:
        stored = weights.stored_bytes(named(whole.model, whole.quant), whole.fp32_head)
        what = f"{whole.model} {whole.quant}, {'fp32' if whole.fp32_head else 'bf16'} head: all tensors"
        yield Known(what, whole.known, stored / _UNITS[whole.unit], whole.unit, whole.source)
    for row in known.row:
        model = named("glm-5", "w8a8", row.cache)
        nbytes = cache.attention_row(model) + cache.indexer_row(model)
        yield Known(f"cache of a token and layer, int8: {row.cache}", row.known, nbytes, "B", "vllm-ascend 182b75e")
    for token in known.token:
        taken = cache.bytes_per_token(named(token.model, "w8a8", token.cache), mtp=True)
        what = f"{token.model}: cache of a token, int8: {token.cache}"
        yield Known(what, token.known, taken, "B", token.source)
    for long in known.sequence:
        needed = cache.pages(long.tokens) * cache.bytes_per_token(named(long.model, "w8a8"), mtp=True)
        what = f"{long.model}: cache of {long.tokens:,} tokens"
        yield Known(what, long.known, needed / _UNITS[long.unit], long.unit, long.source)
    for die in known.die:
        own = sum(weights.per_die(named("glm-5", die.quant), True, die.tp, die.ep).values())
        what = f"{die.quant} TP{die.tp} EP{die.ep}: weights of a die"
        yield Known(what, die.known, own / 1e9, "GB", "tensor list, divided as vLLM does")
