"""Reads a Dockerfile and carries it out without Docker: a Debian in a folder by debootstrap, RUN by chroot."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

MIRROR = "http://deb.debian.org/debian"
#: What python:3.11-slim-bookworm has over a minimal Debian 12.
INCLUDED = "python3,python3-venv,ca-certificates"
#: $1 is the root folder; the others are bound into it from here.
ENTER = """
root="$1"; binds="$2"; user="$3"; mode="$4"; shift 4
for folder in $binds; do
  if [ -d "$folder" ]; then mkdir -p "$root$folder"; else mkdir -p "$(dirname "$root$folder")"; : >> "$root$folder"; fi
  mount --rbind "$folder" "$root$folder" || exit 99
done
if [ "$mode" = locked ]; then
  mount --bind "$root" "$root" && mount -o bind,remount,ro "$root" || exit 99
  for folder in $binds; do mount --rbind "$folder" "$root$folder" || exit 99; done
  mount -t tmpfs -o mode=1777 tmpfs "$root/tmp" || exit 99
fi
exec chroot --userspec="$user" "$root" "$@"
"""


@dataclass
class Image:
    """What the instructions say besides their steps."""

    base: str = ""
    env: dict[str, str] = field(default_factory=dict)
    user: str = "0:0"
    workdir: str = "/"
    entrypoint: list[str] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)


def instructions(text: str) -> list[tuple[str, str]]:
    """(NAME, rest) of each instruction; comments dropped, continued lines joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [
        (name.upper(), rest.strip()) for name, _, rest in (line.strip().partition(" ") for line in joined.split("\n"))
    ]


def image(text: str) -> Image:
    made = Image()
    for name, rest in instructions(text):
        if name == "FROM":
            made.base = rest
        elif name == "ENV":
            made.env |= dict(pair.split("=", 1) for pair in rest.split())
        elif name == "USER":
            made.user = rest
        elif name == "WORKDIR":
            made.workdir = rest
        elif name == "ENTRYPOINT":
            made.entrypoint = json.loads(rest)
        elif name == "HEALTHCHECK":
            made.healthcheck = json.loads(rest.partition("CMD ")[2])
    return made


class RootFolder:
    """The image's file system as a folder of this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.env = folder, {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/root"}
        self.places = ["/proc", "/sys", "/dev", "/etc/resolv.conf", *pip_places()]

    def base(self, tools: Path) -> None:
        """A minimal Debian 12 with Python 3.11; debootstrap is unpacked into `tools`, not installed."""
        subprocess.run(["apt-get", "download", "debootstrap"], cwd=tools, check=True, capture_output=True)
        (package,) = tools.glob("debootstrap_*.deb")
        subprocess.run(["dpkg", "-x", str(package), str(tools)], check=True)
        program = str(tools / "usr/sbin/debootstrap")
        command = [program, "--variant=minbase", f"--include={INCLUDED}", "bookworm", str(self.folder), MIRROR]
        share = {"DEBOOTSTRAP_DIR": str(tools / "usr/share/debootstrap")}
        done = subprocess.run(command, env=os.environ | share, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"debootstrap: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        (self.folder / "usr/local/bin/python").symlink_to("/usr/bin/python3")

    def build(self, text: str, context: Path) -> None:
        """Carry out COPY and RUN in order."""
        for name, rest in instructions(text):
            if name in ("ARG", "ENV"):
                for pair in rest.split():
                    key, _, value = pair.partition("=")
                    self.env[key] = value
            elif name == "COPY":
                *sources, target = rest.split()
                into = self.folder / target.lstrip("/")
                into.mkdir(parents=True, exist_ok=True)
                for source in sources:
                    found = sorted(context.glob(source))
                    assert found, f"COPY {source}: nothing in the context"
                    for path in found:
                        shutil.copy(path, into)
            elif name == "RUN":
                self.run(["/bin/sh", "-c", rest], pip_settings())

    def run(
        self, command: list[str], settings: Mapping[str, str] | None = None, user: str = "0:0", locked: bool = False
    ) -> str:
        """Its output. locked: the root is read-only, /tmp is memory."""
        mode = "locked" if locked else "open"
        enter = ["unshare", "--mount", "sh", "-c", ENTER, "sh", str(self.folder), " ".join(self.places), user, mode]
        variables = [f"{key}={value}" for key, value in {**self.env, **(settings or {})}.items()]
        inside = ["/usr/bin/env", "-i", *variables, *command]
        done = subprocess.run([*enter, *inside], capture_output=True, text=True, check=False, timeout=1800)
        if done.returncode:
            raise RuntimeError(f"{command}: {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        return done.stdout


def pip_settings() -> dict[str, str]:
    """How pip is configured here, as variables: the same indexes are used in the folder."""
    command = [sys.executable, "-m", "pip", "config", "list", "--disable-pip-version-check"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found = dict(line.split("=", 1) for line in listed)
    named = {f"PIP_{key.partition('.')[2].upper().replace('-', '_')}": value.strip("'") for key, value in found.items()}
    return named | {key: value for key, value in os.environ.items() if key.startswith("PIP_")}


def pip_places() -> list[str]:
    """Local folders and files that those settings name."""
    words = " ".join(pip_settings().values()).split()
    paths = [Path(word.removeprefix("file://")) for word in words if word.startswith(("/", "file://"))]
    return sorted({str(path.parent if path.name == "simple" else path) for path in paths if path.exists()})
