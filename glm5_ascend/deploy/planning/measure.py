"""This machine's CPU as the planner's hardware.

`measure` takes the rates of copies and matrix products at the model's shapes, serves the model, and fits the planner's
constants to a few small loads.
"""

from __future__ import annotations

import datetime
import functools
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F
import yaml
from torch.utils.benchmark import Timer

from glm5_ascend.deploy.planning.fit import fit
from glm5_ascend.errors import CheckFailedError
from glm5_ascend.files.written import disk_error, write_named
from glm5_ascend.plan.evidence import Case, Row
from glm5_ascend.plan.hardware import Constants, Hardware
from glm5_ascend.plan.inputs import Workload
from glm5_ascend.plan.layout import Engine, Layout
from glm5_ascend.plan.model import PlannedModel, from_directory
from glm5_ascend.serve.client import Client
from glm5_ascend.serve.cores import threads
from glm5_ascend.serve.load import MeasuredLoad, run_load
from glm5_ascend.serve.local_server import server
from glm5_kernels import ops

#: Seconds of a rate's measurement; tokens of a product; bytes of a copy, more than all caches have.
SECONDS, TOKENS, COPY_BYTES = 1.0, 256, 256 * 2**20
#: Loads on the server: prompt and output tokens, clients. Single prompts show a prefill, the others a decode step.
LOADS = ((128, 1, 1), (256, 1, 1), (512, 1, 1), (256, 65, 1), (256, 65, 2), (256, 65, 4))
#: Requests of each client.
ROUNDS = 5
#: Flags of the server: no prefix cache.
FLAGS = ("--no-enable-prefix-caching", "--max-num-seqs", "8", "--max-model-len", "2048")
ENGINE = Engine(tp=1, drafts=0)
#: Constants from which the fit starts, far from those of an NPU, and how far it may go.
START = Constants(
    memory=1.0, compute=0.5, graph_seconds=1e-3, eager_seconds=1e-3, token_seconds=1e-4, step_seconds=1e-3
)
TRUST = 10.0


def measure(directory: Path, log: Path) -> Hardware:
    """Serve `directory` here and describe this machine; takes about three minutes.

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
        runs = [run_load(client, directory, *load, requests=ROUNDS * load[2]) for load in LOADS]
    if failed := sum(run.failed for run in runs):
        raise CheckFailedError(f"{failed} requests of a load failed", f"see {log}")
    return describe(model, hardware, runs)


def describe(model: PlannedModel, hardware: Hardware, runs: Sequence[MeasuredLoad]) -> Hardware:
    """The machine with constants that are fitted to one run of each of `LOADS`."""
    cases = []
    for load, run in zip(LOADS, runs, strict=True):
        named: dict[str, Any] = {"out_tok_s": run.output_tokens_per_s, "tpot_ms": run.tpot_ms}
        if load[1] == 1:
            named = {"ttft_ms": run.ttft_ms}
        row = Row(model=model.name, quant="", nodes=1, layout="", workload="", **named)
        cases.append(Case(row, model, hardware, Layout(ENGINE), Workload(*load, requests=ROUNDS * load[2])))
    return hardware.model_copy(update={"constants": fit(cases, START, TRUST)})


def measure_rates(model: PlannedModel, name: str) -> Hardware:
    """This machine with the rates of copies and products, without constants."""
    c, source = model.config, torch.zeros(COPY_BYTES, dtype=torch.uint8)
    rows, columns = c.hidden_size, c.num_attention_heads * c.v_head_dim  # of the output projection
    target, x = torch.empty_like(source), torch.randn(TOKENS, columns, dtype=torch.bfloat16)
    numbers = torch.randint(-127, 128, (columns, rows), dtype=torch.int8).t()
    quantized = ops.LinearWeights(numbers, ops.PER_TOKEN, torch.full((rows,), 0.01))
    floats, (a, b) = torch.randn(rows, columns, dtype=torch.bfloat16), torch.rand(2, 2**16)
    products = {
        "bf16": functools.partial(F.linear, x, floats), "int8": functools.partial(ops.int8_linear, x, quantized),
    }  # fmt: skip
    rates = {dtype: 2.0 * TOKENS * rows * columns / seconds_of(product) for dtype, product in products.items()}
    memory = 2 * COPY_BYTES / seconds_of(functools.partial(target.copy_, source))
    vector = 2 * 2**16 / seconds_of(lambda: torch.addcmul(a, b, b, out=a))  # fp32 in the L2 cache
    link = {"bandwidth": memory, "latency": 1e-6}  # not used by one die
    return Hardware.model_validate({
        "name": "cpu", "title": f"this CPU ({platform.machine()}, {threads()} thread(s), {datetime.date.today()})",
        "dies_per_node": 1, "memory_bytes": psutil.virtual_memory().total, "peer_seconds": 1e-9,
        "rates": {"memory": memory, "vector": vector, **rates}, "links": {"node": link, "scale_out": link},
        "measured_on": f"{name}, {model.quantization}",
    })  # fmt: skip


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds of the fastest call, after a first one that compiles: other processes only make calls slower."""
    work()
    timer = Timer("work()", globals={"work": work}, num_threads=threads())
    return min(timer.blocked_autorange(min_run_time=SECONDS).times)


def write(hardware: Hardware, path: Path) -> None:
    """Write a machine's description as YAML for `--hardware`; raises OutputError if it cannot be written."""
    text = yaml.safe_dump(hardware.model_dump(mode="json", exclude_none=True), sort_keys=False, width=110)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(path, error) from None
    write_named(path, f"# Written by `glm5-ascend plan measure`.\n{text}")
