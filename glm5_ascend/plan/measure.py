"""This machine's CPU as the planner's hardware.

`measure` takes the rates of copies and matrix products at the model's shapes, serves the model, and fits the planner's
constants to a few small loads, as `plan calibrate` does to a user's runs.
"""

from __future__ import annotations

import datetime
import functools
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import torch
import torch.nn.functional as F

from glm5_ascend.errors import CheckFailedError
from glm5_ascend.model.config import ModelConfig
from glm5_ascend.plan.constants import Constants
from glm5_ascend.plan.evidence import Case, Row, fit
from glm5_ascend.plan.hardware import Hardware
from glm5_ascend.plan.layout import Engine, Layout
from glm5_ascend.plan.model import PlannedModel, from_directory
from glm5_ascend.plan.workload import Workload
from glm5_ascend.serve.client import Client
from glm5_ascend.serve.cores import threads
from glm5_ascend.serve.load import MeasuredLoad, run_load
from glm5_ascend.serve.local_server import server
from glm5_kernels import ops

#: Seconds of a rate's measurement; tokens of a product; bytes of a copy, more than all caches have.
SECONDS, TOKENS, COPY_BYTES = 1.0, 256, 256 * 2**20
#: Loads on the server: prompt and output tokens, clients. Single prompts show a prefill, the others a decode step.
LOADS = ((128, 1, 1), (256, 1, 1), (512, 1, 1), (256, 65, 1), (256, 65, 2), (256, 65, 4))
#: Flags of the server: no prefix cache.
FLAGS = ("--no-enable-prefix-caching", "--max-num-seqs", "8", "--max-model-len", "2048")
ENGINE = Engine(tp=1, drafts=0)
#: Constants from which the fit starts, far from those of an NPU, and how far it may go.
START = Constants(
    memory=1.0, compute=0.5, graph_seconds=1e-3, eager_seconds=1e-3, token_seconds=1e-4, step_seconds=1e-3
)
TRUST = 10.0


def measure(directory: Path, log: Path, rounds: int = 5) -> Hardware:
    """Serve `directory` here and describe this machine; takes about two minutes.

    Args:
        log: file for the server's output.

    Raises:
        ConfigError, CheckpointError: no GLM-5 checkpoint. MissingEnvironmentError: it cannot be served.
        CheckFailedError: a request failed.
    """
    model = from_directory(directory)
    hardware = measure_rates(model, directory.name)
    with server(directory, log, FLAGS) as port:
        client = Client(f"http://127.0.0.1:{port}", timeout=600)
        runs = [run_load(client, *load, requests=load[2]) for _ in range(rounds + 1) for load in LOADS]
    failed = next((run for run in runs if run.failed), None)
    if failed:
        raise CheckFailedError(f"a load failed: {failed.error}", f"see {log}")
    return describe(model, hardware, runs[len(LOADS) :])  # the first round warms up


def describe(model: PlannedModel, hardware: Hardware, runs: Sequence[MeasuredLoad]) -> Hardware:
    """The machine with constants that are fitted to the medians of loads."""
    cases = []
    for load in dict.fromkeys((run.prompt, run.output, run.concurrency) for run in runs):
        same = [run for run in runs if (run.prompt, run.output, run.concurrency) == load]
        names = {"ttft_ms": "ttft_ms"} if load[1] == 1 else {"out_tok_s": "output_tokens_per_s", "tpot_ms": "tpot_ms"}
        medians = {key: statistics.median(getattr(run, name) for run in same) for key, name in names.items()}
        row = Row(model=model.name, quant="", nodes=1, layout="", workload="", **medians)
        cases.append(Case(row, model, hardware, Layout(ENGINE), Workload(*load, requests=load[2])))
    return hardware.model_copy(update={"constants": fit(cases, START, TRUST)})


def measure_rates(model: PlannedModel, name: str) -> Hardware:
    """This machine with the rates of copies and products, without constants."""
    torch.set_num_threads(threads())
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    a, b, c = (torch.rand(2**16) for _ in range(3))
    where = f"{platform.machine()}, {threads()} thread(s), {datetime.date.today()}"
    shapes = f"products of {TOKENS} tokens at the shapes of {name}"
    memory = 2 * COPY_BYTES / seconds_of(lambda: target.copy_(source))
    values = {
        "memory": (memory, f"a copy of {COPY_BYTES} bytes"),
        "bf16": (product_rate(model.config, torch.bfloat16), shapes),
        "int8": (product_rate(model.config, torch.int8), f"{shapes}, inputs quantized"),
        "vector": (2 * 2**16 / seconds_of(lambda: torch.addcmul(a, b, c, out=a)), "fp32 multiply-adds in the L2 cache"),
        "memory_bytes": (psutil.virtual_memory().total, "memory of the machine"),
        "peer_seconds": (1e-9, "one die: not used"),
    }
    figures = {
        key: {"value": float(f"{value:.5g}"), "quality": "measured", "source": text}
        for key, (value, text) in values.items()
    }
    unused = {"bandwidth": memory, "latency": 1e-6, "quality": "derived", "source": "one die: no link is used"}
    return Hardware.model_validate({
        "name": "cpu", "title": f"this CPU ({where})", "dies_per_node": 1,
        "memory_bytes": figures.pop("memory_bytes"), "peer_seconds": figures.pop("peer_seconds"), "rates": figures,
        "links": {"node": unused, "scale_out": unused},
        "host_ahead": False, "measured_on": f"{name}, {model.quantization}",
    })  # fmt: skip


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds of the fastest call, after a first one that compiles: other processes only make calls slower."""
    work()
    seconds: list[float] = []
    while sum(seconds) < SECONDS or len(seconds) < 5:
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def product_rate(config: ModelConfig, dtype: torch.dtype) -> float:
    """Operations per second over the largest products of a layer; int8: with the quantization of the input."""
    c = config
    shapes = (
        (c.q_lora_rank + c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size),
        (c.num_attention_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim), c.q_lora_rank),
        (c.hidden_size, c.num_attention_heads * c.v_head_dim), (2 * c.moe_intermediate_size, c.hidden_size),
    )  # fmt: skip
    seconds = 0.0
    for rows, columns in shapes:
        x = torch.randn(TOKENS, columns, dtype=torch.bfloat16)
        if dtype == torch.int8:
            weight = torch.randint(-127, 128, (columns, rows), dtype=torch.int8).t()
            linear = ops.LinearWeights(weight, ops.PER_TOKEN, torch.full((rows,), 0.01))
            seconds += seconds_of(functools.partial(ops.int8_linear, x, linear))
        else:
            seconds += seconds_of(functools.partial(F.linear, x, torch.randn(rows, columns, dtype=torch.bfloat16)))
    return 2.0 * TOKENS * sum(rows * columns for rows, columns in shapes) / seconds


def summary(hardware: Hardware) -> Iterator[str]:
    """Lines for a terminal."""
    rates = hardware.rates
    yield f"{hardware.title}, measured on {hardware.measured_on}"
    products = f"bf16 {rates.bf16.value / 1e9:.1f}, int8 {rates.int8.value / 1e9:.1f} GOPS"
    yield f"memory {rates.memory.value / 1e9:.1f} GB/s; products {products}"
    for name, value in dict(hardware.constants or START).items():
        yield f"{name:14} {value:.3g}"
