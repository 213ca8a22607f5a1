"""Time of one decode step of the CPU server, or of its prefill, by owner: our compiled code, our Python, torch, vLLM.

    OMP_NUM_THREADS=1 python benchmarks/report_server_step.py work/w4a8 [--requests 8] [--length 256] [--top 15]
    OMP_NUM_THREADS=1 python benchmarks/report_server_step.py work/w4a8 --prefill

The engine runs in this process, without HTTP. The time and the memory of loading are printed first. Steps are timed
first, then profiled by Python's profiler, which adds its own time to every call: shares of code with many calls are too
large. --prefill: the steps until every request has its first token, together. Checked: every request gets its tokens,
the same ones in both passes.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import statistics
import sys
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from glm5_ascend.serve.launch import ENVIRONMENT
from glm5_kernels import registry

#: Text in a function's file or name -> owner; the first match counts.
OWNERS = (
    (("glm5_kernels",), "our kernels: Python"),
    (("glm5_ascend",), "our plugin: Python"),
    (("vllm",), "vLLM"),
    (("torch.", "torch/", "Tensor"), "torch"),
    (("numpy",), "numpy"),
)


#: Profilers of decode steps and of the prefill.
Profile = tuple[cProfile.Profile | None, cProfile.Profile | None]


def owner(function: tuple[str, int, str], compiled: set[str]) -> str:
    file, _, name = function
    if "glm5_kernels" in file and name in compiled:
        return "our kernels: compiled"
    for marks, name_of_owner in OWNERS:
        if any(mark in f"{file} {name}" for mark in marks):
            return name_of_owner
    return "Python itself"


def compiled_functions() -> set[str]:
    """Names of the functions that numba compiles, in all modules of the kernels that are loaded."""
    modules = [module for name, module in sys.modules.items() if name.startswith("glm5_kernels")]
    return {name for module in modules for name, value in vars(module).items() if hasattr(value, "inspect_asm")}


def resident() -> str:
    """Memory of this process, of its own and of mapped files."""
    rows = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    own, files = (int(rows[name].split()[0]) / 1e6 for name in ("RssAnon", "RssFile"))
    return f"{own + files:.2f} GB resident: {own:.2f} of its own, {files:.2f} of files"


def say_how_weights_load() -> None:
    """Print the time and the memory after vLLM has loaded a model."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    load = CPUModelRunner.load_model

    def timed(*arguments: Any, **keywords: Any) -> None:
        began, before = time.perf_counter(), resident()
        load(*arguments, **keywords)
        print(f"weights loaded in {time.perf_counter() - began:.2f} s; {resident()}; before: {before}", flush=True)

    CPUModelRunner.load_model = timed


def engine(directory: Path, requests: int) -> Any:
    for name, value in {**ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the profiler sees this process only
    from vllm import LLM

    say_how_weights_load()
    quantized = (directory / "quant_model_description.json").is_file()
    return LLM(
        model=str(directory), quantization="ascend" if quantized else None, max_model_len=2048, max_num_seqs=requests,
        enable_prefix_caching=False,
    ).llm_engine  # fmt: skip


def run(running: Any, name: str, prompts: list[list[int]], new: int, profile: Profile) -> Any:
    """Seconds of the prefill, seconds of each decode step, and the tokens of every request."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=new, min_tokens=new, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        running.add_request(f"{name}-{number}", {"prompt_token_ids": prompt}, sampling)
    prefill, seconds, outputs, begun = 0.0, [], [], set[str]()
    while running.has_unfinished_requests():
        counted = profile[len(begun) < len(prompts)]
        began = time.perf_counter()
        with counted or nullcontext():
            outputs.append(running.step())
        spent = time.perf_counter() - began
        if len(begun) < len(prompts):
            prefill += spent
        else:
            seconds.append(spent)
        begun |= {out.request_id for out in outputs[-1] if out.outputs[0].token_ids}
    done = {out.request_id.split("-")[1]: out.outputs[0].token_ids for step in outputs for out in step if out.finished}
    return prefill, seconds, {number: list(tokens) for number, tokens in done.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=130)
    parser.add_argument("--prefill", action="store_true")
    parser.add_argument("--top", type=int, default=15)
    args = parser.parse_args()
    text = (Path(__file__).parents[1] / "LICENSE").read_bytes() * (1 + args.requests * args.length // 10000)
    prompts = [list(text[i * args.length : (i + 1) * args.length]) for i in range(args.requests)]
    running, profile = engine(args.directory, args.requests), cProfile.Profile()
    print(f"ready; {resident()}")
    counts: Profile = (None, profile) if args.prefill else (profile, None)
    run(running, "warm", prompts, args.new_tokens, (None, None))
    prefill, seconds, tokens = run(running, "timed", prompts, args.new_tokens, (None, None))
    prefilled, profiled, again = run(running, "profiled", prompts, args.new_tokens, counts)
    right = tokens == again and all(len(ids) == args.new_tokens for ids in tokens.values())
    compiled, shares = compiled_functions(), Counter[str]()
    stats: Any = pstats.Stats(profile)
    for function, (_, _, spent, _, _) in stats.stats.items():
        shares[owner(function, compiled)] += spent
    whole, steps = sum(shares.values()), 1 if args.prefill else len(profiled)
    step = 1e3 * (prefill if args.prefill else statistics.median(seconds))
    slowed = 1e3 * (prefilled if args.prefill else statistics.median(profiled))
    what = "the prefill" if args.prefill else f"a decode step, median of {steps}"
    print(
        f"kernels {registry.choose('mla_preprocess', 'cpu').implementation}; {args.requests} requests of {args.length}"
    )
    print(f"{what}: {step:.2f} ms, {slowed:.2f} ms profiled")
    for code, spent in shares.most_common():
        print(f"{code:26} {spent / whole:6.1%}   {spent / whole * step:5.2f} ms")
    print("\ncalls, ms (profiled), function")
    longest = sorted(stats.stats.items(), key=lambda item: -item[1][2])[: args.top]
    for (file, _, name), (_, calls, spent, _, _) in longest:
        where = Path(file).name if file != "~" else ""
        print(f"{calls / steps:7.1f} {spent / steps * 1e3:7.3f}   {where} {name}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
