"""`deploy render --values FILE`: what a cluster is like. The file is its owner's, and rendering never writes it."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

#: A name of a Kubernetes object.
ObjectName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?$")]
Quantity = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,12}(m|Ki|Mi|Gi|Ti)?$")]
#: Goes into a shell script inside of double quotes.
Interface = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.@-]{1,32}$")]
Plain = Annotated[str, StringConstraints(pattern=r"^[\w./:@-]{1,200}$")]
Flag = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]+$")]
Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,100}$")]
Address = Annotated[str, StringConstraints(pattern=r"^https?://[\w./:-]{1,200}$")]
#: As the device plugins count them: Ascend's own, Huawei Cloud's CCE.
NPU_RESOURCE = "huawei.com/Ascend910"


class _Values(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class AuthValues(_Values):
    """Who may ask."""

    api_key_secret: ObjectName = Field(default="glm5-api-key", description="Secret with the API key, below `key`.")
    open: bool = Field(default=False, description="Start without a key on an address that others reach.")
    allow_from: list[dict[str, Any]] | None = Field(
        default=None, description="Peers of the NetworkPolicy; without it, the pods of the namespace."
    )


class ImageValues(_Values):
    """Where images come from."""

    registry: Plain | None = Field(default=None, description="Stands before the names of all images.")
    digest: Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")] | None = Field(
        default=None, description="Of the servers' image; then its tag is left out."
    )
    router_digest: Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")] | None = None
    pull_policy: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    pull_secrets: list[ObjectName] = []


class ResourceValues(_Values):
    """Of one server pod. CPU and memory are requests and limits at once, so that the pod is not the first evicted."""

    npu: Plain = Field(default=NPU_RESOURCE, description="huawei.com/Ascend910 or huawei.com/ascend-1980")
    cpu: Quantity | None = Field(default=None, description="Default: 8 cores per die.")
    memory: Quantity | None = Field(default=None, description="Default: 48 GiB per die; /dev/shm counts.")
    shm: Quantity = Field(default="256Gi", description="Size limit of /dev/shm.")
    disk: Quantity = Field(default="40Gi", description="Of the machine's disk, for logs and caches; a request alone.")


class NetworkValues(_Values):
    """Where pods listen, and by which interface machines talk to one another."""

    nic: Interface | None = Field(default=None, description="Default: found by the route to the first machine.")
    host: bool | None = Field(default=None, description="Default: only where machines talk to one another.")


class SchedulingValues(_Values):
    """Which nodes take the pods."""

    node_selector: dict[str, str] = {}
    tolerations: list[dict[str, Any]] = []
    scheduler: ObjectName | None = None
    priority_class: ObjectName | None = None
    labels: dict[str, str] = Field(default={}, description="Of the servers' pods, as a scheduler's plug-in wants them.")
    annotations: dict[str, str] = Field(default={}, description="Of the servers' pods.")
    pod_group: bool = Field(default=False, description="A Volcano PodGroup per role: all of its pods or none.")


class StorageValues(_Values):
    """The checkpoint, and logs."""

    claim: ObjectName | None = Field(
        default=None, description="PersistentVolumeClaim with the checkpoint; else hostPath."
    )
    claim_path: Plain | None = Field(default=None, description="Folder of the checkpoint within the claim.")
    logs: Quantity = "20Gi"


class LifeValues(_Values):
    """Beginning and end of a server."""

    check: bool = Field(default=True, description="An init container runs `verify` and `doctor` first.")
    start_minutes: int = Field(default=120, ge=1, le=1440)
    still_minutes: int = Field(
        default=5,
        ge=0,
        le=1440,
        description="An engine runs requests and stands still: started anew. 0: never, where roll-outs pause them.",
    )
    drain_s: int = Field(default=300, ge=0, le=7200, description="Seconds that requests in flight may still take.")
    leave_s: int = Field(default=15, ge=0, le=600, description="Seconds between leaving the Service and SIGTERM.")


class SecurityValues(_Values):
    """The servers' user. The NPU's device files belong to group 1000 (HwHiAiUser) of the machine, mode 0660."""

    user: int | None = Field(default=None, ge=0, description="Default: the image's, root.")
    device_group: int = 1000
    capabilities: list[Plain] = ["IPC_LOCK"]
    read_only_root: bool = True


class MonitoringValues(_Values):
    """Objects of the Prometheus operator, and a dashboard."""

    enabled: bool = False
    labels: dict[str, str] = Field(default={}, description="What the operator selects monitors and rules by.")


class AutoscalingValues(_Values):
    """A ScaledObject of KEDA; it asks Prometheus, so `monitoring` or scraping of your own goes with it."""

    enabled: bool = False
    minimum: int = Field(default=1, ge=1, le=1000)
    maximum: int = Field(default=4, ge=1, le=1000)
    requests: int = Field(default=16, ge=1, le=100000, description="Per replica, running and waiting ones.")
    prometheus: Address = Field(default="http://prometheus-operated.monitoring:9090", description="Its address.")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.minimum > self.maximum:
            raise ValueError("minimum is above maximum")
        return self


class ServerValues(_Values):
    """What the servers get beside the profile's; it wins."""

    flags: list[Flag] = Field(default=[], description="Of the engine, a word each.")
    env: dict[Variable, str] = Field(default={}, description="As HCCL_IF_BASE_PORT, or VLLM_LOGGING_LEVEL.")


class PodValues(_Values):
    """All of it; every key has a default that is safe."""

    namespace: ObjectName | None = None
    replicas: int = Field(default=1, ge=0, le=1000)
    server: ServerValues = ServerValues()
    auth: AuthValues = AuthValues()
    image: ImageValues = ImageValues()
    resources: ResourceValues = ResourceValues()
    network: NetworkValues = NetworkValues()
    scheduling: SchedulingValues = SchedulingValues()
    storage: StorageValues = StorageValues()
    life: LifeValues = LifeValues()
    security: SecurityValues = SecurityValues()
    monitoring: MonitoringValues = MonitoringValues()
    autoscaling: AutoscalingValues = AutoscalingValues()
