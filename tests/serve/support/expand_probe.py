"""vLLM's sampler constants per draft token, by its own CPU kernel (`stock`) or with ours (`plugin`). Prints JSON."""

from __future__ import annotations

import json
import sys

import torch
from vllm.platforms import current_platform


def main() -> None:
    current_platform.import_kernels()
    if sys.argv[1] == "stock":
        from vllm.platforms.cpu import CpuPlatform

        CpuPlatform.register_triton_kernel_overrides()
    else:
        current_platform.register_triton_kernel_overrides()

    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens  # after the kernels

    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    poison = [torch.full((5,), 7.0e20) for _ in range(64)]  # what a new tensor may find in memory
    del poison
    temperature = expand_batch_to_tokens(torch.tensor([0.5, 0.7, 0.0]), ends, 5, replace_from=0, replace_to=1)
    top_k = expand_batch_to_tokens(torch.tensor([3, 4, 5], dtype=torch.int32), ends, 5)
    print(json.dumps({"temperature": temperature.tolist(), "top_k": top_k.tolist()}))


if __name__ == "__main__":
    main()
