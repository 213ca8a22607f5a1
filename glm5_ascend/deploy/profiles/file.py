"""Keys of deploy/profiles/NAME.yaml. Every key may be missing or null: then the extended file gives it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

#: Switches that the GLM-5 report lists for serving on Ascend. A profile says for each: on, why, what it excludes.
SwitchName = Literal[
    "async_scheduling", "prefix_cache", "ram_tier", "attention_dp", "moe_ep", "flashcomm", "mtp", "graph", "mlapo"
]


class _ProfileKeys(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class HardwareKeys(_ProfileKeys):
    """Machines."""

    node: str | None = None
    nodes: int | None = None
    dies: int | None = Field(default=None, description="Of all machines together.")


class WeightKeys(_ProfileKeys):
    """Types of routed experts and attention (`any`: every type), and the recipe that produces them."""

    experts: str | None = None
    attention: str | None = None
    recipe: str | None = None


class MemoryKeys(_ProfileKeys):
    """Memory of one die."""

    weights_gib: float | None = None
    kv_bytes_per_token: int | None = None
    other_gib: float | None = Field(default=None, description="Other known memory.")


class LayerKeys(_ProfileKeys):
    """Variables and the engine's flags; null removes one."""

    port: int | None = None
    env: dict[str, str | None] | None = None
    args: dict[str, Any] | None = Field(
        default=None, description="The engine's flags without dashes; true and false: flags without a value."
    )


class RoleKeys(LayerKeys):
    """Command of the machines of one role."""

    uses: str | None = Field(default=None, description="A layer of `shared`.")
    nodes: int | None = None
    launch: Literal["per_rank"] | None = Field(default=None, description="A server per DP rank.")


class ProxyKeys(_ProfileKeys):
    """Proxy in front of prefill and decode."""

    port: int
    program: str


class SwitchKeys(_ProfileKeys):
    """One scheduling switch."""

    on: bool | list[str] = Field(default=False, description="true: all roles; false: none; or names of roles.")
    why: str = ""
    excludes: str = ""
    add: list[str] | None = Field(default=None, description="Flags that switch it on.")


class ProfileFile(_ProfileKeys):
    """A deploy profile. See deploy/README.md."""

    extends: str | None = None
    abstract: bool | None = Field(default=None, description="Can only be extended.")
    name: str | None = None
    title: str | None = None
    line: str | None = Field(default=None, description="Engine line of the profile: a row of engine_lines.py.")
    status: str | None = Field(default=None, description="How it was tested.")
    source: str | None = None
    models: list[str] | None = None
    hardware: HardwareKeys | None = None
    weights: WeightKeys | None = None
    memory: MemoryKeys | None = None
    proxy: ProxyKeys | None = None
    base: LayerKeys | None = Field(default=None, description="Applies to every role.")
    multi_node: LayerKeys | None = Field(default=None, description="Applies to roles with several machines.")
    shared: dict[str, LayerKeys] | None = None
    roles: dict[str, RoleKeys] | None = None
    scheduling: dict[SwitchName, SwitchKeys] | None = None
    on_next: list[str] | None = Field(default=None, description="Differences on the next line of vllm-ascend.")
