"""Machines as data, and the planner's constants: rates of one die, links between dies.

`python -m glm5_ascend.plan.hardware` writes the JSON schema of the files, for editors.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import Field

from glm5_ascend.errors import PlanError
from glm5_ascend.files.resources import near, write_schemas
from glm5_ascend.files.written import disk_error, write_named
from glm5_ascend.files.yaml_file import read_yaml
from glm5_ascend.plan.inputs import Count, Keys, NotNegative, Positive, Share, data_file


class Constants(Keys):
    """The six constants of the planner: rates that are reached, and overheads.

    Attributes:
        memory: share of the memory's peak rate.
        compute: share of the cube's and the vector units' peak rates.
        graph_seconds: launch and synchronization of a layer of a captured decode step.
        eager_seconds: the same of a layer whose operators the host launches one by one (prefill, drafts).
        token_seconds: time of a token of a decode step per layer (routing, sampling, slot tables).
        step_seconds: time of a step outside of the layers (scheduling, inputs, sampling, answers).
    """

    memory: Positive
    compute: Positive
    graph_seconds: NotNegative
    eager_seconds: NotNegative
    token_seconds: NotNegative
    step_seconds: NotNegative = 0.0


class FittedFile(Keys):
    """data/fitted.yaml, as benchmarks/report_planner.py writes it.

    Attributes:
        bands: half width of a prediction's logarithm at distance 0, by output (tok_s, ttft, tpot).
        median_error: median error of the rows that a fit did not see, by output.
        inside: share of these rows inside of their bands.
        later: errors of the rows after the date of the split, by a fit on the rows before it.
    """

    date: str
    constants: Constants
    rows: Count
    bands: dict[str, Positive]
    median_error: dict[str, NotNegative]
    inside: Share
    later: dict[str, str]


class Rates(Keys):
    """Peaks of one die: bytes per second of memory, operations per second (two per multiply-add) of each unit."""

    memory: Positive
    bf16: Positive
    int8: Positive
    vector: Positive


class Link(Keys):
    """A link of one die, in one direction: bytes per second, seconds per step of a collective, and how many nodes it
    connects (None: any number)."""

    bandwidth: Positive
    latency: Positive
    nodes: int | None = None


class Links(Keys):
    node: Link
    pod: Link | None = None
    scale_out: Link


class Mc2(Keys):
    """Sizes from which the engine sends tokens to the dies of their experts; else every die gathers all tokens."""

    min_ep: Count
    max_local_experts: Count


class Hardware(Keys):
    """A type of node, described by a file of data/hardware/.

    Attributes:
        mc2: None: for every number of dies.
        fp8: its units multiply FP8 and MXFP4. little_data: a sentence about missing data.
        measured_on: the model that `plan measure` served, for a measured CPU.
        constants: of a measured machine; None: those fitted to the public results.
    """

    name: str
    title: str
    dies_per_node: Annotated[int, Field(gt=0, le=1024)]
    memory_bytes: Positive
    rates: Rates
    links: Links
    mc2: Mc2 | None = None
    peer_seconds: Positive
    fp8: bool = False
    little_data: str | None = None
    measured_on: str | None = None
    constants: Constants | None = None

    def link(self, dies: int) -> Link:
        """Slowest link of a group of `dies` dies that is packed into as few nodes as possible."""
        nodes, pod = -(-dies // self.dies_per_node), self.links.pod
        if nodes <= 1:
            return self.links.node
        return pod if pod is not None and nodes <= (pod.nodes or nodes) else self.links.scale_out


@functools.cache
def fitted() -> FittedFile:
    """The constants fitted to the public results, and their errors."""
    return read_yaml(data_file("fitted.yaml"), FittedFile)


def known_hardware() -> list[str]:
    return sorted(path.stem for path in data_file("hardware").glob("*.yaml"))


def measured_file() -> Path:
    """File that `plan measure` writes and `--hardware cpu` reads."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "glm5-ascend" / "cpu.yaml"


def load_hardware(name: str) -> Hardware:
    """A shipped description by name, this CPU (`cpu`), or a YAML file by path; PlanError names what is wrong in it."""
    if name in known_hardware():
        return _shipped(name)
    path = measured_file() if name == "cpu" else Path(name)
    if name == "cpu" and not path.is_file():
        raise PlanError(f"--hardware cpu: this machine was not measured yet ({path} is missing)", "plan measure DIR")
    if not path.is_file():
        raise PlanError(f"--hardware {name}: no known machine and no file", near(name, [*known_hardware(), "cpu"]))
    tip = "plan measure DIR" if name == "cpu" else "copy a file of glm5_ascend/plan/data/hardware and edit it"
    return read_yaml(path, Hardware, error=PlanError, tip=tip)


@functools.cache
def _shipped(name: str) -> Hardware:
    return read_yaml(data_file(f"hardware/{name}.yaml"), Hardware, error=PlanError)


def write(hardware: Hardware, path: Path) -> None:
    """Write a machine's description as YAML for `--hardware`; raises OutputError if it cannot be written."""
    text = yaml.safe_dump(hardware.model_dump(mode="json", exclude_none=True), sort_keys=False, width=110)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(path, error) from None
    write_named(path, f"# Written by `glm5-ascend plan measure`.\n{text}")


if __name__ == "__main__":
    write_schemas(data_file("schemas"), {"hardware.json": Hardware})
