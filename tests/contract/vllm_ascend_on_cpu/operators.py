"""Which operators torch_npu has no kernel for: `python -m vllm_ascend_on_cpu.operators NAMES OUT`, JSON lists both.

A name that torch composes of others by itself needs none.
"""

from __future__ import annotations

from vllm_ascend_on_cpu import shim  # isort: skip  # noqa: F401  # torch_npu without CANN

import json
import sys
from pathlib import Path

import torch

KEYS = ("PrivateUse1", "CompositeImplicitAutograd", "CompositeExplicitAutograd")

names, out = map(Path, sys.argv[1:])
missing = [
    name
    for name in json.loads(names.read_text())
    if not any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in KEYS)
]
out.write_text(json.dumps(missing))
