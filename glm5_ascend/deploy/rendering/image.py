"""The container: image, devices and mounts that the engines' installation pages name, and our Dockerfile."""

from __future__ import annotations

from glm5_ascend import __version__
from glm5_ascend.deploy.profiles.load import Profile, Role
from glm5_ascend.engine_lines import SGLANG, VLLM

MANAGERS = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
#: Of the machine: path -> what it is. Where one is missing nothing may make a folder of that name.
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
#: Where compiled kernels are kept, in memory that any user may write to, whatever the root file system is.
KERNEL_CACHE = ("NUMBA_CACHE_DIR", "/dev/shm/glm5-kernels")


def node_kind(profile: Profile, role: Role) -> str:
    """a2 or a3; profiles with alternatives name their roles so."""
    return role.name if profile.alternatives else str(profile.hardware["node"])


def dies(role: Role) -> int:
    """Per machine."""
    return role.local_ranks * role.rank_dies


def tag(profile: Profile, role: Role) -> str:
    """This package's version, then the engine's: a tag that another wheel would overwrite is pulled once and kept."""
    mark = "sglang-" if profile.engine == SGLANG else ""
    return f"glm5-ascend:{__version__}-{mark}{profile.line.tags[node_kind(profile, role)]}"


def dockerfile(profile: Profile, role: Role) -> tuple[str, str]:
    """(name, text). The wheel is `make build`'s; the image keeps the versions it brings."""
    kind = node_kind(profile, role)
    what = "SGLang with this package beside it: its doctor and smoke"
    if profile.engine == VLLM:
        what = "vllm-ascend with this package beside it: its plugin, doctor and smoke"
    text = f"""\
# {what}. Put the wheel of `make build` into dist/.
FROM {profile.line.image(kind)}
COPY dist/glm5_ascend-*.whl /tmp/
RUN python -m pip install --no-cache-dir --no-deps /tmp/glm5_ascend-*.whl && rm /tmp/glm5_ascend-*.whl
ENTRYPOINT ["/bin/bash"]
"""
    return f"Dockerfile.{kind}", text
