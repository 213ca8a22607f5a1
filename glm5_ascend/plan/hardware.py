"""Machines as data: memory, peak rates of one die, links between dies. Every value carries its source and quality."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from glm5_ascend.errors import PlanError
from glm5_ascend.files.resources import near
from glm5_ascend.files.yaml_file import read_yaml
from glm5_ascend.plan.data_files import EfficiencyKeys, Keys, Positive, Quality, data_file


class Figure(Keys):
    """A number, how good it is, and where it is from."""

    value: Positive
    quality: Quality
    source: str


class Rates(Keys):
    """Peaks of one die: bytes per second of memory, operations per second (two per multiply-add) of each unit.

    Attributes:
        operators: what operators that were timed by themselves reach, by name, in the place of the unit's peak.
    """

    memory: Figure
    bf16: Figure
    int8: Figure
    vector: Figure
    operators: dict[str, Figure] = Field(default_factory=dict)


class Link(Keys):
    """One way, one die: bytes per second, and seconds per step of a collective."""

    bandwidth: Positive
    latency: Positive
    quality: Quality
    source: str
    nodes: int | None = None  # how many nodes it joins, None: any number


class Links(Keys):
    node: Link
    pod: Link | None = None
    scale_out: Link


class Mc2(Keys):
    """Where the engine sends tokens to the dies of their experts; elsewhere every die gathers all tokens."""

    least_ep: Annotated[int, Field(ge=1)]
    most_local: Annotated[int, Field(ge=1)]
    source: str


class Hardware(Keys):
    """A kind of node, as a file of data/hardware/ describes it.

    Attributes:
        host_ahead: the host launches the operators of a prefill while the device is still busy with earlier ones;
            false where both are one (a CPU): the times add.
        mc2: None: whatever the number of dies.
        power_watts: of a node under load, with its share of switches and cooling where the source counts them.
        fp8: whether its units multiply FP8 and MXFP4. little_data: what is not known of it, in words for a plan.
        measured_on: the model that `plan --measure` served, for a machine that was measured.
    """

    name: str
    title: str
    dies_per_node: Annotated[int, Field(gt=0, le=1024)]
    memory_bytes: Figure
    rates: Rates
    links: Links
    mc2: Mc2 | None = None
    peer_seconds: Figure
    pass_seconds_scale: Figure
    price_per_node_hour: Positive | None = None
    power_watts: Figure | None = None
    fp8: bool = False
    little_data: str | None = None
    host_ahead: bool = True
    measured_on: str | None = None
    efficiencies: EfficiencyKeys | None = None  # of a machine that was measured; None: those fitted on the A3

    def link(self, dies: int) -> Link:
        """The slowest link a group of so many dies, packed into as few nodes as possible, goes over."""
        nodes = -(-dies // self.dies_per_node)
        if nodes <= 1:
            return self.links.node
        if self.links.pod is not None and nodes <= (self.links.pod.nodes or nodes):
            return self.links.pod
        return self.links.scale_out


@dataclass(frozen=True)
class Cluster:
    """So many nodes of one kind."""

    hardware: Hardware
    nodes: int

    @property
    def dies(self) -> int:
        return self.nodes * self.hardware.dies_per_node


def known_hardware() -> list[str]:
    return sorted(path.stem for path in data_file("hardware").glob("*.yaml"))


def measured_file() -> Path:
    """Where `plan --measure` writes what `--hardware cpu` reads."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "glm5-ascend" / "cpu.yaml"


def load_hardware(name: str) -> Hardware:
    """A shipped description by name, this machine's CPU (`cpu`) once it was measured, or a YAML file by path.

    Raises:
        PlanError: unknown name, unreadable file, wrong or missing key; names file and key.
    """
    path = data_file(f"hardware/{name}.yaml")
    if "/" in name or "." in name:
        path = Path(name)
    if name == "cpu":
        path = measured_file()
        if not path.is_file():
            raise PlanError(
                f"--hardware cpu: this machine was not measured yet ({path} does not exist)",
                "glm5-ascend plan DIR --measure",
            )
    if not path.is_file():
        raise PlanError(
            f"--hardware {name}: neither a known machine nor a file", near(name, [*known_hardware(), "cpu"])
        )
    tip = "copy a file of glm5_ascend/plan/data/hardware and edit it"
    return read_yaml(path, Hardware, error=PlanError, tip=tip)
