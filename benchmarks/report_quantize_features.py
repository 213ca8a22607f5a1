"""Time of `glm5-ascend quantize` with AVX2 only over that with all instruction sets of this processor.

    python benchmarks/tools/make_model.py work/mid && python benchmarks/report_quantize_features.py work/mid

Whole processes with one thread, interleaved rounds after one that compiles; medians. The last column is
the rate of torch's fp32 product with the same restriction, because the calibration's forward consists of such products.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from glm5_kernels.compiled.processor import restricted_to

FEATURES = {
    "native": {},
    "avx2": restricted_to("haswell") | {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
}
RATE = (
    "import time, torch; torch.set_num_threads(1); x = torch.randn(2048, 2048); x @ x; t = time.perf_counter();"
    "[x @ x for _ in range(5)]; print(5 * 2 * 2048**3 / (time.perf_counter() - t) / 1e9)"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in FEATURES}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds + 1):
            for name, restriction in FEATURES.items():
                cache, out = Path(folder, f"cache-{name}"), Path(folder, "out")
                env = os.environ | {"OMP_NUM_THREADS": "1", "NUMBA_CACHE_DIR": str(cache)} | restriction
                command = [sys.executable, "-m", "glm5_ascend", "quantize", str(args.model), str(out), "--quiet"]
                command += ["--samples", str(args.samples), "--seq-len", str(args.seq_len)]
                began = time.perf_counter()
                subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
                if number:
                    seconds[name].append(time.perf_counter() - began)
                shutil.rmtree(out)
    base = statistics.median(seconds["native"])
    for name, restriction in FEATURES.items():
        done = subprocess.run(
            [sys.executable, "-c", RATE], env=os.environ | restriction, check=True, capture_output=True, text=True
        )
        middle = statistics.median(seconds[name])
        print(f"{name:8} {middle:6.1f} s   {middle / base:4.2f} x   fp32 product {float(done.stdout):4.0f} Gop/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
