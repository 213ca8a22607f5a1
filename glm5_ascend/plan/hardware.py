"""Machines as data: memory, peak rates of one die, links between dies. Every value carries its source and quality."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from glm5_ascend.errors import PlanError
from glm5_ascend.resources import data_dir

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Quality = Literal["vendor", "paper", "secondary", "derived", "measured", "guess"]


class _HardwarePart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Figure(_HardwarePart):
    """A number, how good it is, and where it is from."""

    value: Positive
    quality: Quality
    source: str


class Rates(_HardwarePart):
    """Peaks of one die: bytes per second of memory, operations per second (two per multiply-add) of each unit.

    Attributes:
        operators: what operators that were timed by themselves reach, by name, in the place of the unit's peak.
    """

    memory: Figure
    bf16: Figure
    int8: Figure
    vector: Figure
    operators: dict[str, Figure] = {}


class Link(_HardwarePart):
    """One way, one die: bytes per second, and seconds per step of a collective."""

    bandwidth: Positive
    latency: Positive
    quality: Quality
    source: str
    nodes: int | None = None  # how many nodes it joins, None: any number


class Links(_HardwarePart):
    node: Link
    pod: Link | None = None
    scale_out: Link


class Hardware(_HardwarePart):
    """A kind of node, as a file of data/hardware/ describes it.

    Attributes:
        host_ahead: the host launches the operators of a prefill while the device is still busy with earlier ones;
            false where both are one (a CPU): the times add.
        measured_on: the model that `plan --measure` served, for a machine that was measured.
    """

    name: str
    title: str
    dies_per_node: Annotated[int, Field(gt=0, le=1024)]
    memory_bytes: Figure
    rates: Rates
    links: Links
    peer_seconds: Figure
    pass_seconds_scale: Figure
    price_per_node_hour: Positive | None = None
    host_ahead: bool = True
    measured_on: str | None = None
    efficiencies: dict[str, float] | None = None  # of a machine that was measured; None: those fitted on the A3

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
    return sorted(path.stem for path in (data_dir("plan/data") / "hardware").glob("*.yaml"))


def measured_file() -> Path:
    """Where `plan --measure` writes what `--hardware cpu` reads."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "glm5-ascend" / "cpu.yaml"


def load_hardware(name: str) -> Hardware:
    """A shipped description by name, this machine's CPU (`cpu`) once it was measured, or a YAML file by path.

    Raises:
        PlanError: unknown name, unreadable file, wrong or missing key; names file and key.
    """
    path = data_dir("plan/data") / "hardware" / f"{name}.yaml"
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
            f"--hardware {name}: neither a known machine nor a file", f"known: {', '.join(known_hardware())}, cpu"
        )
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
        return Hardware.model_validate(raw)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        first = " ".join(str(error).split())
        raise PlanError(f"{path}: not YAML: {first:.150}", "copy a file of glm5_ascend/plan/data/hardware") from None
    except ValidationError as error:
        first_error = error.errors()[0]
        where = ".".join(map(str, first_error["loc"])) or "file"
        raise PlanError(
            f"{path}: {where}: {first_error['msg']}", "copy a file of glm5_ascend/plan/data/hardware and edit it"
        ) from None
