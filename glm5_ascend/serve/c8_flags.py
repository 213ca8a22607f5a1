"""int8 caches (C8) in both spellings of vllm-ascend: keys of --additional-config, or flags of vLLM.

A line that reads keys refuses the flags. A line that reads flags overwrites the keys without a message, so its caches
would be bf16. Our CPU server reads keys, because vLLM's own parser does not take the flags.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from glm5_ascend.serve.flags import json_of, value_of, without

SFA_KEY, LI_KEY = "enable_sparse_sfa_c8", "enable_sparse_li_c8"
CACHE, ATTENTION, INDEXER = "--kv-cache-dtype", "--attention-config", "indexer_kv_dtype"
INDEXER_FLAG = "--attention-config.indexer-kv-dtype"
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
    latents, attention = value_of(argv, CACHE) == "int8", json_of(argv, ATTENTION)
    keys = attention.pop(INDEXER, None) == "int8"
    if not latents and not keys:
        return list(argv)
    others = without(argv, *([CACHE] if latents else []), *([ATTENTION, INDEXER_FLAG] if keys else []))
    if keys and attention:
        others += [ATTENTION, json.dumps(attention)]
    switches = ({SFA_KEY: True} if latents else {}) | ({LI_KEY: True} if keys else {})
    return [*others, ADDITIONAL, json.dumps(json_of(others, ADDITIONAL) | switches)]
