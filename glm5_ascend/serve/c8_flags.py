"""int8 caches (C8) in both spellings of vllm-ascend: keys of --additional-config, or flags of vLLM.

A line that reads keys refuses the flags. A line that reads flags overwrites the keys without a message, so its caches
would be bf16. Our CPU server reads keys, because vLLM's own parser does not take the flags.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from glm5_ascend.serve.flags import json_of

SFA_KEY, LI_KEY = "enable_sparse_sfa_c8", "enable_sparse_li_c8"
CACHE, ATTENTION, INDEXER = "--kv-cache-dtype", "--attention-config", "indexer_kv_dtype"
ADDITIONAL = "--additional-config"


def with_flags(args: Mapping[str, Any]) -> dict[str, Any]:
    """A profile's arguments (flags without dashes) with enabled int8 caches as flags instead of keys."""
    additional = dict(args.get("additional-config") or {})
    latents, keys = (additional.pop(name, None) is True for name in (SFA_KEY, LI_KEY))
    if additional == (args.get("additional-config") or {}):
        return dict(args)
    written = {name: value for name, value in args.items() if name != "additional-config"}
    written |= {"additional-config": additional} if additional else {}
    written |= {"kv-cache-dtype": "int8"} if latents else {}
    attention = {**(args.get("attention-config") or {}), INDEXER: "int8"}
    return written | ({"attention-config": attention} if keys else {})


def with_keys(argv: Sequence[str]) -> list[str]:
    """A command line with the flags of int8 caches as keys of `--additional-config`."""
    others: list[str] = []
    keys: dict[str, bool] = {}
    rest = iter(argv)
    for arg in rest:
        name, equals, inline = arg.partition("=")
        flag = name.replace("_", "-")
        if flag not in (CACHE, ATTENTION, f"{ATTENTION}.{INDEXER.replace('_', '-')}"):
            others.append(arg)
            continue
        value = inline if equals else next(rest, "")
        if flag == ATTENTION:
            attention = json_of([flag, value], flag)
            if attention.get(INDEXER) == "int8":
                keys[LI_KEY] = True
                value = json.dumps({key: item for key, item in attention.items() if key != INDEXER})
            others += [arg] if equals and LI_KEY not in keys else [] if value == "{}" else [name, value]
        elif value == "int8":
            keys[SFA_KEY if flag == CACHE else LI_KEY] = True
        else:
            others += [arg] if equals else [arg, value]
    if not keys:
        return list(argv)
    return [*others, ADDITIONAL, json.dumps(json_of(others, ADDITIONAL) | keys)]
