"""Image, devices and mounts of containers, from the engines' installation pages, and our Dockerfile."""

from __future__ import annotations

from glm5_ascend import __version__
from glm5_ascend.deploy.profiles.load import Profile, Role
from glm5_ascend.engine_lines import SGLANG, VLLM

MANAGERS = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
#: Path on the machine -> `File` or `Directory`. With the type, Kubernetes does not create a missing one.
MOUNTS = {
    "/usr/local/dcmi": "Directory",
    "/usr/local/bin/npu-smi": "File",
    "/usr/local/Ascend/driver/lib64": "Directory",
    "/usr/local/Ascend/driver/version.info": "File",
    "/usr/local/Ascend/driver/tools/hccn_tool": "File",
    "/etc/ascend_install.info": "File",
    "/etc/hccn.conf": "File",
}
SHM_GIB = 512
#: Folder of compiled kernels, in memory that every user may write.
KERNEL_CACHE = ("NUMBA_CACHE_DIR", "/dev/shm/glm5-kernels")


def node_kind(profile: Profile, role: Role) -> str:
    """`a2` or `a3`: the name of the role in profiles with alternatives."""
    return role.name if profile.alternatives else str(profile.hardware["node"])


def dies(role: Role) -> int:
    """Dies of a role per machine."""
    return role.local_ranks * role.rank_dies


def tag(profile: Profile, role: Role) -> str:
    """Tag of our image. It has this package's version, because nodes keep an image that they have pulled."""
    mark = "sglang-" if profile.engine == SGLANG else ""
    return f"glm5-ascend:{__version__}-{mark}{profile.line.tags[node_kind(profile, role)]}"


def dockerfile(profile: Profile, role: Role) -> tuple[str, str]:
    """(name, text) of a Dockerfile that adds the wheel of `make build` and changes no version of the image."""
    kind = node_kind(profile, role)
    title = "SGLang and this package: its doctor and smoke"
    if profile.engine == VLLM:
        title = "vllm-ascend and this package: its plugin, doctor and smoke"
    text = f"""\
# {title}. Put the wheel of `make build` into dist/.
FROM {profile.line.image(kind)}
COPY dist/glm5_ascend-*.whl /tmp/
RUN python -m pip install --no-cache-dir --no-deps /tmp/glm5_ascend-*.whl && rm /tmp/glm5_ascend-*.whl
ENTRYPOINT ["/bin/bash"]
"""
    return f"Dockerfile.{kind}", text
