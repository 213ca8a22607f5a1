"""Processor seconds until the server's ops are compiled and have run, from an empty cache: per op, and total.

    OMP_NUM_THREADS=1 python benchmarks/report_compile_time.py [--ops int8_linear w4a8_moe]

Without --ops: what a server of a W4A8 checkpoint calls (int8 caches, a choice, are not among them). Each op runs the
cases of the parity suite in bf16 and in integers; making their operands is not counted, nor is again what an earlier op
has compiled.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time

SERVED = (
    "mla_preprocess", "indexer_preprocess", "lightning_indexer", "sparse_flash_attention", "v_up_proj", "int8_linear",
    "w4a8_moe",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ops", nargs="+", default=list(SERVED))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["NUMBA_CACHE_DIR"] = folder  # before numba is loaded
        from glm5_kernels import registry
        from glm5_kernels.parity.cases import cases

        compilation, total = registry.cache.compilation, 0.0
        for op in args.ops:
            calls = [case.arguments for case in cases(ops=(op,)) if "float32" not in case.variant]
            began = time.process_time()
            function = registry.load(op, "cpu")
            for arguments in calls:
                function(*arguments)
            spent = time.process_time() - began
            total += spent
            print(f"{op:24} {spent:6.2f} s", flush=True)
        print(f"{'total':24} {total:6.2f} s for {compilation.functions} functions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
