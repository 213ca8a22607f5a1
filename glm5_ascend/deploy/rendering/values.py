"""Values of a cluster: the file of `deploy render --values FILE`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

#: Name of a Kubernetes object.
ObjectName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?$")]
Quantity = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,12}(m|Ki|Mi|Gi|Ti)?$")]
#: Used in a shell script in double quotes.
Interface = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.@-]{1,32}$")]
Plain = Annotated[str, StringConstraints(pattern=r"^[\w./:@-]{1,200}$")]
Flag = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]+$")]
Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,100}$")]
#: Resource of Ascend's device plugin.
NPU_RESOURCE = "huawei.com/Ascend910"


class _Values(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class AuthValues(_Values):
    """Access to the servers."""

    api_key_secret: ObjectName = Field(
        default="glm5-api-key", description="Secret with the API key in its field `key`."
    )
    open: bool = Field(default=False, description="Start without a key on a reachable address.")
    allow_from: list[dict[str, Any]] | None = Field(
        default=None, description="Peers of the NetworkPolicy. Default: the pods of the namespace."
    )


class ImageValues(_Values):
    """Container images."""

    registry: Plain | None = Field(default=None, description="Prefix of the names of all images.")
    digest: Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")] | None = Field(
        default=None, description="Digest of the servers' image, instead of its tag."
    )
    pull_secrets: list[ObjectName] = []


class ResourceValues(_Values):
    """Resources of one server pod. Requests equal limits for CPU and memory, so that the pod is not evicted first."""

    npu: Plain = Field(default=NPU_RESOURCE, description="huawei.com/Ascend910 or huawei.com/ascend-1980")
    cpu: Quantity | None = Field(default=None, description="Default: 8 cores per die.")
    memory: Quantity | None = Field(default=None, description="Default: 48 GiB per die, with /dev/shm.")


class NetworkValues(_Values):
    """Network of the pods, and the interface between machines."""

    nic: Interface | None = Field(default=None, description="Default: the interface of the route to the first machine.")
    host: bool | None = Field(default=None, description="Use the host's network. Default: only with several machines.")


class SchedulingValues(_Values):
    """Selection of nodes for the pods."""

    node_selector: dict[str, str] = {}
    tolerations: list[dict[str, Any]] = []
    scheduler: ObjectName | None = None
    priority_class: ObjectName | None = None
    labels: dict[str, str] = Field(default={}, description="Labels of the servers' pods, for a scheduler's plug-in.")
    annotations: dict[str, str] = Field(default={}, description="Annotations of the servers' pods.")
    pod_group: bool = Field(default=False, description="A Volcano PodGroup per role: all pods or none are scheduled.")


class StorageValues(_Values):
    """Checkpoint."""

    claim: ObjectName | None = Field(
        default=None, description="PersistentVolumeClaim with the checkpoint. Default: a hostPath."
    )
    claim_path: Plain | None = Field(default=None, description="Folder of the checkpoint in the claim.")


class LifeValues(_Values):
    """Start and end of a server."""

    check: bool = Field(default=True, description="An init container runs `verify` and `doctor` first.")
    still_minutes: int = Field(
        default=5,
        ge=0,
        le=1440,
        description="Minutes without progress of a busy engine until a restart. 0: never, if rollouts pause it.",
    )
    drain_s: int = Field(default=300, ge=0, le=7200, description="Seconds for requests in flight.")
    leave_s: int = Field(default=15, ge=0, le=600, description="Seconds between removal from the Service and SIGTERM.")


class SecurityValues(_Values):
    """User of the servers. Device files of NPUs belong to group 1000 (HwHiAiUser) with mode 0660."""

    user: int | None = Field(default=None, ge=0, description="Default: root, as in the image.")


class MonitoringValues(_Values):
    """Objects of the Prometheus operator."""

    enabled: bool = False
    labels: dict[str, str] = Field(default={}, description="Labels by which the operator selects monitors and rules.")


class ServerValues(_Values):
    """Flags and variables of the servers; they override the profile's."""

    flags: list[Flag] = Field(default=[], description="Flags of the engine, one word each.")
    env: dict[Variable, str] = Field(default={}, description="For example HCCL_IF_BASE_PORT or VLLM_LOGGING_LEVEL.")


class PodValues(_Values):
    """All values; every key has a safe default."""

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
