"""Tokens per second of the CPU server against transformers' `generate`, on the same model, machine and threads.

    python benchmarks/bench_serve.py --work work/bench-serve [--model DIR] [--threads 1] [--rounds 3] [--json FILE]

Without --model the shipped demo model (bf16, 27 MB) and its W4A8 output. Every configuration answers 8 prompts of the
same length with as many new tokens, greedily and all at once: transformers in one batch (eager attention, all it has
for this model), the server (`glm5-ascend serve`) by vLLM's own load generator, `vllm.benchmarks.serve`. Medians of
interleaved rounds. Also: seconds from the command to the first answer of /health, and the memory of all processes then.
Checked before: the server's greedy answer to a question is transformers'.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from glm5_ascend.serve import local_server
from glm5_ascend.serve.client import Client

SIDE = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
QUESTION = "[gMASK]<sop><|user|>Who are you?<|assistant|></think>"


def text_prompts(count: int, length: int) -> list[list[int]]:
    """Token ids below 256: different bytes of this repository's licence for each prompt."""
    text = (Path(__file__).parents[1] / "LICENSE").read_bytes() * (1 + count * length // 10000)
    return [list(text[i * length : (i + 1) * length]) for i in range(count)]


class Transformers:
    """The baseline: transformers' `generate`."""

    def __init__(self, model: Path, threads: int) -> None:
        import torch
        from transformers import AutoTokenizer, GlmMoeDsaForCausalLM

        torch.set_num_threads(threads)
        self.torch = torch
        self.model = GlmMoeDsaForCausalLM.from_pretrained(
            model, trust_remote_code=False, dtype="auto", attn_implementation="eager"
        ).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)

    def answer(self, prompt: str, new_tokens: int) -> str:
        ids = self.tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
        new_ids = self._generate(ids, new_tokens)[0, ids.shape[1] :]
        text: str = self.tokenizer.decode(new_ids, skip_special_tokens=True)
        return text

    def seconds(self, prompts: list[list[int]], new_tokens: int) -> float:
        began = time.perf_counter()
        self._generate(self.torch.tensor(prompts), new_tokens, min_new_tokens=new_tokens)
        return time.perf_counter() - began

    def _generate(self, ids: Any, new_tokens: int, **more: Any) -> Any:
        with self.torch.inference_mode():
            mask = self.torch.ones_like(ids)
            return self.model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, **more)


@contextmanager
def server(model: Path, threads: int, log: Path) -> Iterator[dict[str, Any]]:
    """Run `glm5-ascend serve`; yields its URL, start time and memory."""
    os.environ |= SIDE | {"OMP_NUM_THREADS": str(threads)}
    flags = ["--max-num-seqs", "8", "--max-model-len", "2048", "--no-enable-prefix-caching"]
    began, older = time.perf_counter(), set(psutil.Process().children(recursive=True))
    with local_server.server(model, log, flags) as port:
        started = time.perf_counter() - began
        processes = set(psutil.Process().children(recursive=True)) - older
        memory = sum(process.memory_info().rss for process in processes)
        yield {"url": f"http://127.0.0.1:{port}", "start_seconds": started, "rss_bytes": memory}


def load(url: str, model: Path, count: int, length: int, new_tokens: int, out: Path) -> float:
    """Seconds of vLLM's load generator for `count` simultaneous requests."""
    code = (
        "import argparse, sys; from vllm.benchmarks.serve import add_cli_args, main; "
        "p = argparse.ArgumentParser(); add_cli_args(p); main(p.parse_args(sys.argv[1:]))"
    )
    flags = {
        "--backend": "openai", "--base-url": url, "--endpoint": "/v1/completions", "--model": "glm-5",
        "--tokenizer": model, "--dataset-name": "random", "--random-input-len": length,
        "--random-output-len": new_tokens, "--num-prompts": count, "--seed": 1, "--result-dir": out.parent,
        "--result-filename": out.name,
    }  # fmt: skip
    command = [sys.executable, "-c", code, "--ignore-eos", "--save-result", "--disable-tqdm"]
    command += [str(word) for pair in flags.items() for word in pair]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | SIDE, check=False)
    if done.returncode:
        raise SystemExit(f"vllm.benchmarks.serve: {done.stderr[-2000:]}")
    result = json.loads(out.read_text())
    if result["completed"] != count or result["total_output_tokens"] != count * new_tokens:
        raise SystemExit(f"only {result['total_output_tokens']} tokens of {result['completed']} requests came back")
    return float(result["duration"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("work/bench-serve"))
    parser.add_argument("--model", type=Path, help="float checkpoint; default: the demo model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    model, quantized = args.model or args.work / "demo", args.work / "w4a8"
    program = [sys.executable, "-m", "glm5_ascend"]
    if not model.exists():
        subprocess.run([*program, "demo-model", model], check=True)
    if not quantized.exists():
        subprocess.run([*program, "quantize", model, quantized, "--recipe", "w4a8", "--quiet"], check=True)
    baseline = Transformers(model, args.threads)
    expected = baseline.answer(QUESTION, 16)
    seconds: dict[str, list[float]] = {"transformers": [], "server, float": [], "server, W4A8": []}
    report: dict[str, Any] = {}
    tokens = args.requests * args.new_tokens
    prompts = text_prompts(args.requests, args.length)
    with (
        server(model, args.threads, args.work / "float.log") as float_server,
        server(quantized, args.threads, args.work / "w4a8.log") as int_server,
    ):
        servers = {"server, float": float_server, "server, W4A8": int_server}
        ids = baseline.tokenizer(QUESTION, add_special_tokens=False).input_ids
        actual = Client(float_server["url"], "glm-5").complete(ids, max_tokens=16)["text"]
        if actual != expected:
            raise SystemExit(f"the server answers {actual!r}, transformers {expected!r}")
        sizes = args.requests, args.length, args.new_tokens
        for name, running in servers.items():
            load(running["url"], model, *sizes, args.work / "warm.json")
            report[name] = {key: running[key] for key in ("start_seconds", "rss_bytes")}
        baseline.seconds(prompts, 4)
        for _ in range(args.rounds):
            seconds["transformers"].append(baseline.seconds(prompts, args.new_tokens))
            for name, running in servers.items():
                seconds[name].append(load(running["url"], model, *sizes, args.work / "load.json"))
    base = statistics.median(seconds["transformers"])
    print(
        f"{args.requests} requests of {args.length} tokens, {args.new_tokens} new ones each, {args.threads} thread(s)"
    )
    for name, spent in seconds.items():
        middle = statistics.median(spent)
        start = report.get(name, {})
        more = f"start {start['start_seconds']:.0f} s, {start['rss_bytes'] / 1e9:.1f} GB" if start else ""
        print(f"{name:16} {tokens / middle:7.1f} tokens/s   {base / middle:5.1f} x   {more}")
        report.setdefault(name, {})["tokens_per_second"] = tokens / middle
    if args.json:
        args.json.write_text(json.dumps(report | {"seconds": seconds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
