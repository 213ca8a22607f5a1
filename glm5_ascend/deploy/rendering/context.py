"""What the templates of deploy/templates are filled with: names, images and counts of a profile's roles."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from markupsafe import Markup

from glm5_ascend import __version__
from glm5_ascend.deploy.profiles.command import heading, headless, open_command, verify_name
from glm5_ascend.deploy.profiles.load import Profile, Role
from glm5_ascend.deploy.rendering.templates import rendered
from glm5_ascend.deploy.rendering.values import PodValues
from glm5_ascend.engine_lines import CPU, SGLANG
from glm5_ascend.serve.middleware import GUARDS

ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
ROUTER_VERSION = "0.1.17"
#: Devices and mounts of containers, from the engines' installation pages.
MANAGERS = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
#: Path on the machine -> type of a hostPath.
MOUNTS = {
    "/usr/local/dcmi": "Directory",
    "/usr/local/bin/npu-smi": "File",
    "/usr/local/Ascend/driver/lib64": "Directory",
    "/usr/local/Ascend/driver/version.info": "File",
    "/usr/local/Ascend/driver/tools/hccn_tool": "File",
    "/etc/ascend_install.info": "File",
    "/etc/hccn.conf": "File",
}


@dataclass(frozen=True)
class Files:
    """The files of one profile for one cluster. model: path of the checkpoint on the machines."""

    profile: Profile
    model: str
    values: PodValues

    @property
    def machine(self) -> str:
        return str(self.profile.hardware["node"])

    @cached_property
    def servers(self) -> tuple[Server, ...]:
        return tuple(Server(self, role) for role in self.profile.roles.values())

    def text(self, template: str, **more: Any) -> str:
        profile = self.profile
        common = {
            "profile": profile, "model": self.model, "values": self.values,
            "heading": Markup("\n".join(heading(profile))),
            "cpu": profile.platform == CPU, "sglang": profile.engine == SGLANG, "servers": self.servers,
            "machine": self.machine,
            "MANAGERS": MANAGERS, "MOUNTS": MOUNTS, "ROUTER_VERSION": ROUTER_VERSION,
        }  # fmt: skip
        return rendered(template, **common, **more)

    def image(self, tag: str, digest: str | None = None) -> str:
        """Name of an image in the cluster's registry, with its digest if known."""
        registry = self.values.image.registry
        name = f"{registry.rstrip('/')}/{tag}" if registry else tag
        return f"{name.rpartition(':')[0]}@{digest}" if digest else name

    def front_script(self) -> tuple[str, str]:
        """(name, text) of the proxy of prefill and decode, or of a router for several replicas of the profile."""
        if not self.profile.proxy:
            return "router.sh", self.text("router.sh.j2")
        return "proxy.sh", self.text("pd-router.sh.j2" if self.profile.engine == SGLANG else "proxy.sh.j2")

    def front(self) -> dict[str, Any]:
        """Values of router and proxy in Kubernetes."""
        profile, first = self.profile, self.servers[0]
        values: dict[str, Any] = dict(zip(("script_name", "script"), self.front_script(), strict=True))
        if not profile.proxy:
            image = self.image(f"glm5-ascend-router:{ROUTER_VERSION}")
            more = {"name": f"{profile.name}-router", "image": image, "port": 8080, "server_port": first.role.port}
            return values | more
        hosts = {server.role.name: server.hosts() for server in self.servers}
        more = {"name": f"{profile.name}-proxy", "image": first.image, "port": profile.proxy["port"], "hosts": hosts}
        return values | more


@dataclass(frozen=True)
class Server:
    """One role of a profile."""

    files: Files
    role: Role

    @property
    def name(self) -> str:
        profile = self.files.profile
        return profile.name if len(profile.roles) == 1 else f"{profile.name}-{self.role.name}"

    @property
    def service(self) -> str:
        """Name of the Service. The workload's name is taken: a LeaderWorkerSet makes a headless Service of it."""
        return f"{self.name}-http"

    @property
    def script_name(self) -> str:
        return f"serve-{self.role.name}.sh"

    @property
    def dies(self) -> int:
        """Dies per machine."""
        return self.role.local_ranks * self.role.rank_dies

    @property
    def count(self) -> int:
        """Servers per machine, on ports from the role's on."""
        return self.role.local_ranks if self.role.per_rank else 1

    @property
    def tag(self) -> str:
        """Tag of our image. It has this package's version, because nodes keep an image that they have pulled."""
        line = self.files.profile.line
        return f"glm5-ascend:{__version__}-{'sglang-' if line.engine == SGLANG else ''}{line.tags[self.files.machine]}"

    @property
    def image(self) -> str:
        return self.files.image(self.tag, self.files.values.image.digest)

    def uses(self, word: str) -> bool:
        """True if a variable of the role needs a word in braces."""
        return any(f"{{{word}}}" in value for value in self.role.env.values())

    def hosts(self) -> list[str]:
        """DNS names of the pods that answer in group 0, from the LeaderWorkerSet's headless Service."""
        if self.role.nodes == 1:
            return [self.service]
        workers = range(1, 1 if self.role.engine == SGLANG else self.role.nodes)  # of SGLang's only node 0 answers
        return [f"{self.name}-0.{self.name}", *(f"{self.name}-0-{worker}.{self.name}" for worker in workers)]

    def script(self) -> str:
        argv = open_command(self.role, "{model}", []).argv
        return self.files.text(
            "serve.sh.j2", role=self.role, uses=self.uses, engine=ENGINES[self.role.engine], argv=argv,
            worker_argv=headless(self.role, 1, argv), guards=GUARDS,
        )  # fmt: skip

    def objects(self) -> str:
        """Kubernetes objects of the role. HCCL and Mooncake between machines use the machines' addresses."""
        files, role = self.files, self.role
        profile, host_network = files.profile, files.values.network.host
        if host_network is None:
            host_network = role.nodes > 1 or bool(profile.proxy)
        return files.text(
            "role.yaml.j2", role=role, uses=self.uses, name=self.name, service=self.service, dies=self.dies,
            count=self.count, ports=range(role.port, role.port + self.count), image=self.image,
            script_name=self.script_name, script=self.script(), health=files.text("health.sh.j2"),
            checks=files.text("checks.sh.j2"), verify_name=verify_name(role.engine, profile.platform),
            host_network=host_network, store=files.servers[0].service,
        )  # fmt: skip
