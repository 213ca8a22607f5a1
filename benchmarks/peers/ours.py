"""One process of our engine for bench_peers.py, without HTTP: commands and output of client.cpp.

    python benchmarks/peers/ours.py CHECKPOINT IDS THREADS COMMAND...

In addition `mtp:DRAFTS:LENGTH:CONTEXT:STEPS`, alone: one request with the MTP layer's drafts. Ids are chosen so that
so many drafts are accepted that a step makes LENGTH tokens on average.
"""

from __future__ import annotations

import json
import os
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from glm5_ascend.deploy.profiles.load import load
from glm5_ascend.model.config_file import load_config
from glm5_ascend.serve.cores import variables
from glm5_ascend.serve.memory import cache_blocks

#: Untimed steps before the timed ones, as in client.cpp; tokens of a step, as the server's default.
WARM, TOKENS = 2, 2048
#: Bytes of the caches per token and layer by dtype, rounded up: 1152 + 256, in fp32 twice as much.
CACHE_BYTES = {"auto": 2048, "float32": 4096}


def memory() -> dict[str, float]:
    """Memory of this process in GB, and what of it is no mapped file."""
    rows = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    rss, anonymous, peak = (int(rows[name].split()[0]) * 1024 / 1e9 for name in ("VmRSS", "RssAnon", "VmHWM"))
    return {"rss_gb": rss, "own_gb": anonymous, "peak_gb": peak}


class Engine:
    """vLLM's engine in this process. The head is timed on its own, and what it chooses is replaced by fixed ids.

    Attributes:
        load: seconds in which the weights were loaded.
        logits: of the last step, [requests, vocabulary].
        body, draft: seconds of the layers, and of the MTP layer without its head, since they were set to 0.
        head: seconds of all heads.
        chosen, proposed: ids of the next step, and drafts after it; empty: the model's own.
    """

    load: float
    runner: Any

    def __init__(self, directory: str, requests: int, longest: int, cached: int, dtype: str, drafts: int) -> None:
        from vllm import LLM
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner

        load_model, engine = CPUModelRunner.load_model, self
        self.body, self.head, self.draft = 0.0, 0.0, 0.0
        self.chosen, self.proposed = list[int](), list[int]()

        def timed(runner: Any, *arguments: Any, **keywords: Any) -> None:
            began = time.perf_counter()
            load_model(runner, *arguments, **keywords)
            engine.load, engine.runner = time.perf_counter() - began, runner

        CPUModelRunner.load_model = timed
        quantized = (Path(directory) / "quant_model_description.json").is_file()
        config = load_config(Path(directory))
        kinds = {config.attention_kind(layer) for layer in range(config.num_hidden_layers)}
        sequence = cache_blocks(config, 4 if dtype == "float32" else 2, []).bytes_for(longest)
        layers = config.num_hidden_layers + bool(drafts)
        cache = cached * layers * CACHE_BYTES[dtype] if kinds == {"sparse"} else 2 * requests * sequence
        self.engine = LLM(
            model=directory, quantization="ascend" if quantized else None, max_model_len=longest,
            max_num_seqs=requests, max_num_batched_tokens=TOKENS, enable_prefix_caching=False,
            dtype=dtype, kv_cache_memory_bytes=cache,
            speculative_config={"method": "mtp", "num_speculative_tokens": drafts} if drafts else None,
        ).llm_engine  # fmt: skip
        self.watch_head(self.runner.model, lambda count: self.chosen[:count])
        forward = self.runner.model.forward

        def timed_forward(*arguments: Any, **keywords: Any) -> Any:
            began = time.perf_counter()
            hidden = forward(*arguments, **keywords)
            self.body += time.perf_counter() - began
            return hidden

        self.runner.model.forward = timed_forward
        if drafts:
            self.watch_head(self.runner.drafter.model, lambda count: [self.proposed.pop(0)] if self.proposed else [])
            propose = self.runner.drafter.propose

            def timed_drafts(*arguments: Any, **keywords: Any) -> Any:
                began, head = time.perf_counter(), self.head
                drafted = propose(*arguments, **keywords)
                self.draft += time.perf_counter() - began - (self.head - head)
                return drafted

            self.runner.drafter.propose = timed_drafts

    def watch_head(self, model: Any, chosen: Callable[[int], list[int]]) -> None:
        """Time the head of a model, and let it choose these ids for its rows."""
        compute_logits = model.compute_logits

        def watched(hidden: Any, *arguments: Any, **keywords: Any) -> Any:
            began = time.perf_counter()
            self.logits = compute_logits(hidden, *arguments, **keywords)
            self.head += time.perf_counter() - began
            for row, token in enumerate(chosen(len(self.logits))):
                self.logits[row, token] = 1e30
            return self.logits

        model.compute_logits = watched

    def start(self, prompts: list[list[int]], new_tokens: int) -> list[str]:
        """Add requests; returns their names."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        names = [f"{time.perf_counter_ns()}-{number}" for number in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            self.engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        return names

    def until_first_tokens(self, names: list[str]) -> None:
        """Run steps until all requests have a token."""
        begun = set[str]()
        while len(begun) < len(names):
            begun |= {out.request_id.split("-")[1] for out in self.engine.step() if out.outputs[0].token_ids}

    def prefill(self, prompt: list[int]) -> float:
        """Seconds until the prompt's first token."""
        began = time.perf_counter()
        names = self.start([prompt], 1)
        self.until_first_tokens(names)
        return time.perf_counter() - began

    def fill(self, prompts: list[list[int]], new_tokens: int) -> list[str]:
        """Requests whose prompts are in the cache without being computed: zeros, and random keys for the indexer."""
        import torch

        from glm5_ascend.serve.plugin.backend import current_metadata
        from glm5_ascend.serve.plugin.linear_attention import LinearAttention

        layers = self.runner.compilation_config.static_forward_context
        hidden = self.runner.model_config.get_hidden_size()

        def uncomputed(input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
            for name, layer in layers.items():
                if isinstance(layer, LinearAttention):  # a state is looked for by the number of its tokens
                    current_metadata(name).write_lengths(layer.kv_cache[2])
            return torch.zeros(len(input_ids), hidden, dtype=torch.bfloat16)

        self.runner._model_forward = uncomputed
        names = self.start(prompts, new_tokens)
        self.until_first_tokens(names)
        del self.runner._model_forward
        for name, layer in layers.items():
            if "indexer" in name and len(prompts[0]) > TOKENS:  # equal keys would be a special case of the selection
                layer.kv_cache.normal_()
        return names

    def decode(self, ids: list[int], batch: int, context: int, steps: int) -> dict[str, list[float]]:
        """ms of each step, and of its layers."""
        names = self.fill([ids[:context]] * batch, WARM + steps + 64)
        whole, body = list[float](), list[float]()
        for step in range(WARM + steps):
            self.chosen = [ids[(step * batch + row) % len(ids)] for row in range(batch)]
            self.body, began = 0.0, time.perf_counter()
            outputs = self.engine.step()
            spent = time.perf_counter() - began
            if len(outputs) != batch:
                raise SystemExit(f"{len(outputs)} requests of {batch} made a token in a step")
            if step >= WARM:
                whole.append(1e3 * spent)
                body.append(1e3 * self.body)
        self.chosen = []
        self.engine.abort_request(names)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return {"ms": whole, "body_ms": body}

    def decode_drafts(
        self, ids: list[int], drafts: int, length: float, context: int, steps: int
    ) -> dict[str, list[float]]:
        """Of each step with drafts: its tokens, its ms, and those of the main layers, the MTP layer and the rest."""

        def wanted(step: int) -> list[int]:
            return [ids[(step * (drafts + 1) + row) % len(ids)] for row in range(drafts + 1)]

        (name,) = self.fill([ids[:context]], (WARM + steps) * (drafts + 1) + 64)
        parts: dict[str, list[float]] = {key: [] for key in ("tokens", "ms", "body_ms", "draft_ms", "rest_ms")}
        made = 1
        for step in range(WARM + steps):
            self.chosen, following = wanted(step), wanted(step + 1)
            accepted = int((step + 2) * (length - 1)) - int((step + 1) * (length - 1))
            self.proposed = [token if row < accepted else token ^ 1 for row, token in enumerate(following[:drafts])]
            self.body, self.draft, began = 0.0, 0.0, time.perf_counter()
            (output,) = self.engine.step()
            spent, count = time.perf_counter() - began, len(output.outputs[0].token_ids)
            values = count - made, spent, self.body, self.draft, spent - self.body - self.draft
            made = count
            if step >= WARM:
                for (key, some), value in zip(parts.items(), values, strict=True):
                    some.append(value if key == "tokens" else 1e3 * value)
        self.chosen = []
        self.engine.abort_request([name])
        return parts


def answer(engine: Engine, ids: list[int], command: str) -> dict[str, Any]:
    """Run one command."""
    kind, *words = command.split(":")
    if kind == "mtp":
        return engine.decode_drafts(ids, int(words[0]), float(words[1]), int(words[2]), int(words[3]))
    if kind == "prefill":
        engine.prefill(ids[: min(int(words[0]), 512)])  # touches the memory of the results
        return {"seconds": engine.prefill(ids[: int(words[0])])}
    if kind == "decode":
        return engine.decode(ids, *(int(word) for word in words))
    length, count = int(words[0]), int(words[1])
    with Path(words[2]).open("wb") as file:
        for number in range(count):
            engine.prefill(ids[number * length : (number + 1) * length])
            file.write(engine.logits[-1].float().numpy().tobytes())
    return {}


def main() -> None:
    began = time.perf_counter()
    directory, file, threads, *commands = sys.argv[1:]
    os.environ["OMP_NUM_THREADS"] = threads
    for name, value in {**load("cpu").role(None).env, **variables(1), "VLLM_LOGGING_LEVEL": "ERROR"}.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    ids = array("i", Path(file).read_bytes()).tolist()
    decodes = [[int(word) for word in command.split(":")[1:]] for command in commands if command.startswith("decode")]
    prompts = [int(command.split(":")[1]) for command in commands if not command.startswith(("decode", "mtp"))]
    drafts = 0
    if commands[0].startswith("mtp"):
        drafts, _, context, steps = (int(float(word)) for word in commands[0].split(":")[1:])
        decodes = [[1, context, steps * (drafts + 1)]]
    longest = max([64, *prompts, *(sum(decode[1:]) for decode in decodes)]) + 128
    cached = max([longest, *(batch * (context + steps + 128) for batch, context, steps in decodes)])
    # In bf16 an activation near the border of two integers, or of two experts, goes the other way.
    dtype = "float32" if any(command.startswith("logits") for command in commands) else "auto"
    engine = Engine(directory, max([1, *(decode[0] for decode in decodes)]), longest, cached, dtype, drafts)
    ready = time.perf_counter() - began
    engine.prefill(ids[:64])
    print(json.dumps({"command": "load", "seconds": engine.load, "ready": ready} | memory()), flush=True)
    for command in commands:
        print(json.dumps({"command": command} | answer(engine, ids, command)), flush=True)
    print(json.dumps({"command": "end"} | memory()), flush=True)


if __name__ == "__main__":
    main()
