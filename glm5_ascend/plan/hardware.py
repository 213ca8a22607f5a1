"""Machines as data, and the planner's constants; `python -m` this module writes the JSON schema of the files."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

from pydantic import Field

from glm5_ascend.errors import PlanError
from glm5_ascend.files.resources import near, write_schemas
from glm5_ascend.files.yaml_file import read_yaml
from glm5_ascend.plan.inputs import Count, Keys, NotNegative, Positive, Share, data_file


class Constants(Keys):
    """The planner's constants: shares of the peak rates of memory, and of cube and vector units, that are reached;
    seconds to launch and synchronize a layer of a captured decode step (graph) and of one without graphs (eager:
    prefill, drafts), of a token of a decode step per layer, and of a step outside of its layers."""

    memory: Positive
    compute: Positive
    graph_seconds: NotNegative
    eager_seconds: NotNegative
    token_seconds: NotNegative
    step_seconds: NotNegative = 0.0


class FittedFile(Keys):
    """data/fitted.yaml. bands: half width of a prediction's logarithm at distance 0, by output (tok_s, ttft, tpot);
    inside: share of the unseen results in them; unseen: ln(predicted / measured) by row and output, of a fit without
    the rows of its source."""

    date: str
    constants: Constants
    bands: dict[str, Positive]
    inside: Share
    unseen: dict[str, dict[str, float]]


class Rates(Keys):
    """Peaks of one die: bytes per second of memory, operations per second (two per multiply-add) of each unit."""

    memory: Positive
    bf16: Positive
    int8: Positive
    vector: Positive


class Link(Keys):
    """A link of one die, one way: bytes per second, seconds per step of a collective, nodes it joins (None: any)."""

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
        mc2: None: for every number of dies. fp8: its units multiply FP8 and MXFP4.
        host_bandwidth, pool_bandwidth: bytes per second at which a rank loads cached tokens from the host's memory (a
            guess) and from a pool (that of UCM's public runs on SSDs).
        transfer_bandwidth: the same of a prompt's cache from prefill to decode: vllm-ascend 16984 saw 1 to 7 GB/s.
    """

    name: str
    title: str
    dies_per_node: Annotated[int, Field(gt=0, le=1024)]
    memory_bytes: Positive
    rates: Rates
    links: Links
    mc2: Mc2 | None = None
    host_bandwidth: Positive = 10e9
    pool_bandwidth: Positive = 3e9
    transfer_bandwidth: Positive = 3e9
    peer_seconds: Positive
    fp8: bool = False
    little_data: str | None = None

    def link(self, dies: int) -> Link:
        """Slowest link of a group of `dies` dies that is packed into as few nodes as possible."""
        nodes, pod = -(-dies // self.dies_per_node), self.links.pod
        if nodes <= 1:
            return self.links.node
        return pod if pod is not None and nodes <= (pod.nodes or nodes) else self.links.scale_out


def machine_type(name: str) -> str:
    """Machines whose layouts and results count for the one of this name: a2 | a3 | ascend | ..."""
    return "a3" if name == "cloudmatrix384" else name.split("-")[0]


@functools.cache
def fitted() -> FittedFile:
    """The constants fitted to the public results, and their errors."""
    return read_yaml(data_file("fitted.yaml"), FittedFile)


def known_hardware() -> list[str]:
    return sorted(path.stem for path in data_file("hardware").glob("*.yaml"))


def load_hardware(name: str) -> Hardware:
    """A shipped description by name, or a YAML file by path; PlanError names what is wrong in it."""
    if name in known_hardware():
        return _shipped(name)
    if not Path(name).is_file():
        raise PlanError(f"--hardware {name}: no known machine and no file", near(name, known_hardware()))
    tip = "copy a file of glm5_ascend/plan/data/hardware and edit it"
    return read_yaml(Path(name), Hardware, error=PlanError, tip=tip)


@functools.cache
def _shipped(name: str) -> Hardware:
    return read_yaml(data_file(f"hardware/{name}.yaml"), Hardware, error=PlanError)


if __name__ == "__main__":
    write_schemas(data_file("schemas"), {"hardware.json": Hardware})
