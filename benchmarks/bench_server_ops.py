"""Speed of the server with compiled ops and with reference ops, on one checkpoint.

    python benchmarks/tools/make_model.py work/mid --preset mid && glm5-ascend quantize work/mid work/mid-w4a8
    OMP_NUM_THREADS=1 python benchmarks/bench_server_ops.py work/mid-w4a8 [--requests 4] [--prompt 128] [--new 16]

Each round starts an engine with GLM5_KERNELS=reference and one with cpu, alternately, with the same prompts (random
tokens), and measures the time of the first token (prefill) and of the other tokens (decode). Greedy. It also prints the
number of equal tokens: on an untrained model rounding changes some.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

KERNELS = ("reference", "cpu")


def child(directory: str, requests: int, prompt: int, new: int) -> None:
    from glm5_ascend.serve.launch import CPU_ENVIRONMENT, ENVIRONMENT

    for name, value in {**ENVIRONMENT, **CPU_ENVIRONMENT, "VLLM_LOGGING_LEVEL": "ERROR"}.items():
        os.environ.setdefault(name, value)
    from vllm import LLM, SamplingParams

    quantized = (Path(directory) / "quant_model_description.json").is_file()
    llm = LLM(
        model=directory, quantization="ascend" if quantized else None, max_model_len=prompt + new + 16,
        max_num_seqs=requests, skip_tokenizer_init=True, enable_prefix_caching=False,
    )  # fmt: skip
    rng = random.Random(0)
    prompts = [{"prompt_token_ids": [rng.randrange(3, 250) for _ in range(prompt)]} for _ in range(requests)]

    def run(count: int) -> tuple[float, list[list[int]]]:
        began = time.perf_counter()
        greedy = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        out = llm.generate(prompts, greedy, use_tqdm=False)
        return time.perf_counter() - began, [list(request.outputs[0].token_ids) for request in out]

    run(2)
    first, _ = run(1)
    whole, tokens = run(new)
    print(json.dumps({"prefill": first, "decode": whole - first, "tokens": tokens}))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=str)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.directory, args.requests, args.prompt, args.new)
        return
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in KERNELS}
    sizes = [f"--{name}={getattr(args, name)}" for name in ("requests", "prompt", "new")]
    for number in range(args.rounds):
        for name in KERNELS if number % 2 == 0 else reversed(KERNELS):
            command = [sys.executable, __file__, args.directory, "--child", *sizes]
            out = subprocess.run(
                command, env=os.environ | {"GLM5_KERNELS": name}, stdout=subprocess.PIPE, text=True, check=True
            ).stdout
            results[name].append(json.loads(out.splitlines()[-1]))
            print(
                f"round {number + 1}: {name} " + json.dumps({k: round(results[name][-1][k], 2) for k in PHASES}),
                flush=True,
            )
    for phase, tokens in zip(PHASES, (args.requests * args.prompt, args.requests * (args.new - 1)), strict=True):
        slow, fast = (statistics.median(result[phase] for result in results[name]) for name in KERNELS)
        print(f"{phase}: {tokens / slow:.0f} -> {tokens / fast:.0f} tokens/s, {slow / fast:.2f} x")
    pairs = [
        (a, b)
        for x, y in zip(*(results[name][0]["tokens"] for name in KERNELS), strict=True)
        for a, b in zip(x, y, strict=True)
    ]
    print(f"equal tokens: {sum(a == b for a, b in pairs)} of {len(pairs)}")


PHASES = ("prefill", "decode")

if __name__ == "__main__":
    main()
