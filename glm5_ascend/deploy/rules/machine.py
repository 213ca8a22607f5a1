"""This machine as facts for the rules. Loads neither torch nor vLLM."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
from pathlib import Path
from typing import Any

import psutil

from glm5_ascend.checkpoint.types import GIB

TOOLKITS = ("usr/local/Ascend/ascend-toolkit/latest", "usr/local/Ascend/latest", "usr/local/Ascend/cann")
NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "glusterfs", "fuse.sshfs", "dpc")


def facts(root: Path = Path("/")) -> dict[str, Any]:
    """Devices, memory and limits. A fact that cannot be read is left out: it is unknown."""
    shm, (open_files, _) = root / "dev/shm", resource.getrlimit(resource.RLIMIT_NOFILE)
    facts = {
        "device_count": len(list((root / "dev").glob("davinci[0-9]*"))), "cann": cann_version(root),
        "hbm_gib": hbm_gib(npu_smi()),
        "shm_gib": round(shutil.disk_usage(shm).total / GIB, 1) if shm.is_dir() else None,
        "memlock_unlimited": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == resource.RLIM_INFINITY,
        "open_files": 2**31 if open_files == resource.RLIM_INFINITY else open_files,
    }  # fmt: skip
    return {name: value for name, value in facts.items() if value is not None}


def cann_version(root: Path = Path("/")) -> str | None:
    """From the toolkit's install file, e.g. `version=9.1.0`."""
    home = os.environ.get("ASCEND_HOME_PATH")
    folders = [*([Path(home)] if home and root == Path("/") else []), *(root / name for name in TOOLKITS)]
    for folder in folders:
        for path in (*folder.glob("*-linux/ascend_toolkit_install.info"), folder / "version.cfg"):
            if version := version_in(path):
                return version
    return None


def version_in(path: Path) -> str | None:
    """The first version number after `version` and `=` on a line, in upper or lower case."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"^[\w ]*version[^=\n]*=\s*\[?[^\d\n]*(\d+(?:\.\w+)+)", text, re.MULTILINE | re.IGNORECASE)
    return match[1] if match else None


def npu_smi() -> str:
    """The output of `npu-smi info`; empty where there is none."""
    try:
        return subprocess.run(["npu-smi", "info"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def hbm_gib(text: str) -> int | None:
    """HBM per die from `npu-smi info`: the last `used / total` of a chip's row, in MB."""
    totals = [int(total) for total in re.findall(r"\d+\s*/\s*(\d{5,6})\s*\|", text)]
    return round(min(totals) / 1024) if totals else None


def on_network_mount(directory: Path) -> bool:
    """True if the file system of a directory, the last one mounted there, is a network's."""
    mounts = [mount for mount in psutil.disk_partitions(all=True) if directory.is_relative_to(mount.mountpoint)]
    nearest = max(reversed(mounts), key=lambda mount: len(mount.mountpoint), default=None)
    return nearest is not None and nearest.fstype in NETWORK_FILE_SYSTEMS
