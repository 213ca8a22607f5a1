"""Describe this machine for the planner, by measurements.

Copies, products and fused ops give the rates. The overheads of the served engine are fitted with the planner's formulas
on small sizes: single prompts of up to 512 tokens give the share of the products' rate and the host's time of a
prefill; one to four concurrent requests give the host's time of a step and of a token.
"""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import yaml

from glm5_ascend.errors import OutputError
from glm5_ascend.files.written import write_file
from glm5_ascend.plan.efficiency import Efficiencies, efficiencies_of
from glm5_ascend.plan.hardware import Hardware
from glm5_ascend.plan.layout import Engine
from glm5_ascend.plan.measure import rates
from glm5_ascend.plan.measure.served import FLAGS, Served, Timer
from glm5_ascend.plan.model import PlannedModel, from_directory
from glm5_ascend.plan.roofline import decode_step, prefill_chunk
from glm5_ascend.serve.local_server import server

#: Candidates for the share of the products' rate.
SHARES = np.geomspace(0.02, 8.0, 600)
ENGINE = Engine(tp=1, dp=1, drafts=0, split_prefill=False)


def measure(directory: Path, log: Path, rounds: int = 5) -> Hardware:
    """Serve `directory` here and describe this machine; takes about two minutes.

    Args:
        log: file for the server's output.

    Raises:
        ConfigError, CheckpointError: no GLM-5 checkpoint. MissingEnvironmentError: it cannot be served.
    """
    model = from_directory(directory)
    with server(directory, log, FLAGS) as port:
        served = Timer(f"http://127.0.0.1:{port}", token_ids(model)).measure(rounds)
    return describe(model, directory, served)


def token_ids(model: PlannedModel) -> int:
    """Number of token ids for prompts: the first ones are bytes in all of these tokenizers."""
    return min(256, model.config.vocab_size)


def describe(model: PlannedModel, directory: Path, served: Served) -> Hardware:
    """Description of this machine by its rates, measured now, and by the times of a server of `directory`."""
    torch.set_num_threads(threads())
    hardware = measure_rates(model, directory)
    return hardware.model_copy(update={"efficiencies": efficiencies(model, hardware, served).to_json()})


def threads() -> int:
    """Threads of the server: OMP_NUM_THREADS, or its default of 1."""
    text = os.environ.get("OMP_NUM_THREADS", "1")
    return int(text) if text.isdecimal() and int(text) > 0 else 1


def measure_rates(model: PlannedModel, directory: Path) -> Hardware:
    """Description of this machine without efficiencies."""
    c = model.config
    operators = {"lightning indexer": rates.indexer_rate(c), "sparse attention": rates.attention_rate(c)}
    if model.expert_type != "FLOAT":
        operators["experts"] = rates.expert_rate(c)
    memory = rates.memory_rate()
    where = f"{platform.machine()}, {threads()} thread(s), {datetime.date.today()}"
    shape = f"{rates.TOKENS} tokens at the shapes of {directory.name}"
    bf16, fp32, int8 = (rates.product_rate(c, kind) for kind in (torch.bfloat16, torch.float32, torch.int8))
    unused = {"bandwidth": memory, "latency": 1e-6, "quality": "derived", "source": "one die: no link is used"}
    return Hardware.model_validate(
        {
            "name": "cpu", "title": f"this CPU ({where})", "dies_per_node": 1,
            "memory_bytes": _figure(psutil.virtual_memory().total, "memory of the machine"),
            "rates": {
                "memory": _figure(memory, f"a copy of {rates.COPY_BYTES} bytes"),
                "bf16": _figure(bf16, f"products of {shape}; in fp32 {fp32 / 1e9:.1f}e+9"),
                "int8": _figure(int8, f"products of {shape}, inputs quantized"),
                "vector": _figure(rates.vector_rate(), "fp32 multiply-adds in the L2 cache"),
                "operators": {name: _figure(rate, f"compiled kernel, {shape}") for name, rate in operators.items()},
            },
            "links": {"node": unused, "scale_out": unused},
            "peer_seconds": _figure(1e-9, "one die: not used"),
            "pass_seconds_scale": _figure(1.0, "the overheads are this machine's"),
            "host_ahead": False,
            "measured_on": f"{directory.name}, {model.quantization}",
        }
    )  # fmt: skip


def _figure(value: float, source: str) -> dict[str, Any]:
    return {"value": float(f"{value:.5g}"), "quality": "measured", "source": source}


def efficiencies(model: PlannedModel, hardware: Hardware, served: Served) -> Efficiencies:
    """Fit the planner's constants to the times of a server; relative errors count."""
    layers = model.config.num_hidden_layers
    lengths = np.array(list(served.first), dtype=float)
    first = np.array(list(served.first.values()))
    best, share, eager = np.inf, 1.0, 0.0
    for candidate in SHARES:
        constants = Efficiencies(1.0, 1.0, float(candidate), 0.0, 0.0, 0.0)
        device = np.array([prefill_chunk(model, hardware, ENGINE, constants, n, 0.0).seconds for n in lengths])
        host = max(0.0, float(np.sum((first - device) / first**2) / np.sum(layers / first**2)))
        error = float(np.sum(((device + layers * host) / first - 1.0) ** 2))
        if error < best:
            best, share, eager = error, float(candidate), host
    constants = Efficiencies(1.0, 1.0, share, 0.0, 0.0, 0.0)
    batches = np.array(list(served.step), dtype=float)
    device = np.array(
        [decode_step(model, hardware, ENGINE, constants, n, served.step_context).seconds for n in batches]
    )
    measured = np.array(list(served.step.values()))
    # Seconds of a step and of a token per layer. If one of them comes out negative, it is zero.
    steps = np.full_like(batches, layers + model.full_layers)
    parts = np.stack([steps, layers * batches], axis=1) / measured[:, None]
    target = (measured - device) / measured
    step, token = np.linalg.lstsq(parts, target, rcond=None)[0]
    if step < 0 or token < 0:
        single = [max(0.0, float(part @ target / (part @ part))) for part in parts.T]
        errors = [float(np.sum((part * value - target) ** 2)) for part, value in zip(parts.T, single, strict=True)]
        step, token = (single[0], 0.0) if errors[0] <= errors[1] else (0.0, single[1])
    return Efficiencies(1.0, 1.0, share, float(step), eager, float(token))


def summary(hardware: Hardware) -> Iterator[str]:
    """Lines for a terminal."""
    peaks = hardware.rates
    yield f"{hardware.title}, measured on {hardware.measured_on}"
    products = f"bf16 {peaks.bf16.value / 1e9:.1f}, int8 {peaks.int8.value / 1e9:.1f} GOPS"
    yield f"memory {peaks.memory.value / 1e9:.1f} GB/s; products {products}"
    yield ", ".join(f"{name} {figure.value / 1e9:.1f} GOPS" for name, figure in peaks.operators.items())
    for name, value in asdict(efficiencies_of(hardware)).items():
        yield f"{name:14} {value:.3g}" if "seconds" not in name else f"{name:14} {1e6 * value:.0f} us per layer"


def write(hardware: Hardware, path: Path, *, replace: bool) -> None:
    """Write the description as YAML.

    Raises:
        OutputError: the file exists and `replace` is false, or it cannot be written.
    """
    if path.exists() and not replace:
        raise OutputError(f"{path} exists already", "name another file, or remove it")
    heading = "# Written by `glm5-ascend plan --calibrate`: efficiencies fitted to your runs.\n"
    if hardware.measured_on is not None:
        heading = "# Written by `glm5-ascend plan --measure`. Every rate is of one die: this machine's CPU.\n"
    text = yaml.safe_dump(hardware.model_dump(mode="json", exclude_none=True), sort_keys=False, width=110)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}", "name another file") from None
    write_file(path, heading + text)
