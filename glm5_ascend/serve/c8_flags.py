"""int8 caches (C8) in both spellings of vllm-ascend: keys of --additional-config, or flags of vLLM.

A line that reads keys refuses the flags. A line that reads flags overwrites the keys without a message, so its caches
would be bf16. Our CPU server reads the keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SFA_KEY, LI_KEY = "enable_sparse_sfa_c8", "enable_sparse_li_c8"


def with_flags(args: Mapping[str, Any]) -> dict[str, Any]:
    """A profile's arguments (flags without dashes) with enabled int8 caches as flags instead of keys."""
    additional = dict(args.get("additional-config") or {})
    latents, keys = (additional.pop(name, None) is True for name in (SFA_KEY, LI_KEY))
    if additional == (args.get("additional-config") or {}):
        return dict(args)
    written = {name: value for name, value in args.items() if name != "additional-config"}
    written |= {"additional-config": additional} if additional else {}
    written |= {"kv-cache-dtype": "int8"} if latents else {}
    attention = {**(args.get("attention-config") or {}), "indexer_kv_dtype": "int8"}
    return written | ({"attention-config": attention} if keys else {})
