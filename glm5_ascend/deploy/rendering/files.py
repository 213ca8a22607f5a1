"""`glm5-ascend deploy render`: a profile's files for one target, written into a folder."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5_ascend.deploy.profiles.load import Profile, load
from glm5_ascend.deploy.rendering import compose, kubernetes, scripts, systemd
from glm5_ascend.deploy.target import RenderTarget
from glm5_ascend.errors import ConfigError, OutputError, shown
from glm5_ascend.files.written import new_folder, write_file

TARGETS = {
    RenderTarget.shell: scripts.files,
    RenderTarget.compose: compose.files,
    RenderTarget.k8s: kubernetes.files,
    RenderTarget.systemd: systemd.files,
}
#: A `}` ends a shell's default value, a `:` begins options of a mount, a `$` is replaced by shells and by compose.
_NOT_PLAIN = re.compile(r"[^\w./@+=,%-]")
#: Where the checkpoint lies on the machines, if nothing else is said.
MODEL = "/models/glm5"


@dataclass(frozen=True)
class RenderedFiles:
    """What was written: `files` are paths below `folder`, in the order in which they were rendered."""

    profile: str
    to: str
    model: str
    folder: Path
    files: tuple[Path, ...]

    def to_dict(self) -> dict[str, Any]:
        """The data of `--json`."""
        return {
            "schema_version": 1, "command": "deploy render", "ok": True, "exit_code": 0, "profile": self.profile,
            "to": self.to, "model": self.model, "folder": str(self.folder), "files": [str(path) for path in self.files],
        }  # fmt: skip


def render(profile: str, to: str, *, model: str = MODEL, out: str | Path | None = None) -> RenderedFiles:
    """Write a profile as scripts, containers, Kubernetes objects or units.

    Args:
        profile: its name; `glm5-ascend deploy list` shows them.
        to: shell, compose, k8s or systemd.
        model: absolute path of the checkpoint on every machine, mounted at the same place in containers.
        out: an absent or empty folder; PROFILE-TO in the working directory if left out.

    Raises:
        ConfigError: unknown profile or target, a path that is not plain, containers for the CPU profile.
        OutputError: the folder has files already, or cannot be written; nothing is left.
    """
    texts = rendered_texts(load(profile), to, model)
    folder = Path(f"{profile}-{to}") if out is None else Path(out)
    if (folder.is_dir() and any(folder.iterdir())) or folder.is_file():
        raise OutputError(f"{folder}: exists and is not empty", "name another folder with --out")
    with new_folder(folder) as aside:
        for name, text in texts.items():
            write_file(aside / name, text)
            if name.endswith(".sh"):
                (aside / name).chmod(0o755)
    return RenderedFiles(profile, to, model, folder, tuple(folder / name for name in texts))


def rendered_texts(profile: Profile, target: str, model: str) -> dict[str, str]:
    """File name -> text; see `render` for the arguments and the `ConfigError`s."""
    if target not in TARGETS:
        raise ConfigError(f"--to {target}: unknown", f"one of {', '.join(TARGETS)}")
    if profile.platform == "cpu" and target in ("compose", "k8s"):
        raise ConfigError("profile cpu has no container image", "--to shell or --to systemd")
    odd = re.search(_NOT_PLAIN, model)
    if not Path(model).is_absolute() or odd:
        what = f"{odd[0]!a} is in it" if odd else "not an absolute path"
        raise ConfigError(
            f"--model {shown(model, 200)}: {what}", "give the machines' path, of letters, digits and . _ - + = @ % , /"
        )
    return TARGETS[RenderTarget(target)](profile, model)
