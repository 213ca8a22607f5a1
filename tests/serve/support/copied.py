"""Load a quantized model and add up what its process holds beside the mapped files.  python copied.py DIR RESULT"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from glm5_ascend.serve.plugin.mapped_files import mapped_files
from tests.serve.support.engine import start


def storages() -> dict[int, int]:
    """Bytes of all tensors of this process by address, those that share memory once."""
    gc.collect()
    tensors = (item for item in gc.get_objects() if type(item) in (torch.Tensor, torch.nn.Parameter))
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


def main() -> None:
    directory, result = map(Path, sys.argv[1:3])
    load, copied = CPUModelRunner.load_model, []

    def watched(*arguments: Any, **keywords: Any) -> None:
        before = storages()
        load(*arguments, **keywords)
        files = dict(mapped_files(directory).mappings)
        copied.extend(size for at, size in storages().items() if at not in before and at not in files)

    CPUModelRunner.load_model = watched
    drafts = {"method": "mtp", "num_speculative_tokens": 1}
    start({"model": str(directory), "quantization": "ascend", "speculative_config": drafts, "max_model_len": 256})
    result.write_text(json.dumps({"copied": sum(copied)}))
