"""`glm5-ascend deploy render`: a profile's files for one target, written into a folder."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5_ascend.deploy.options import RenderOptions, RenderTarget
from glm5_ascend.deploy.profiles.load import Profile, load
from glm5_ascend.deploy.rendering import compose, kubernetes, kustomize, recipe, scripts
from glm5_ascend.deploy.rendering.kubernetes import DEFAULTS
from glm5_ascend.deploy.rendering.values import PodValues
from glm5_ascend.errors import ConfigError, OutputError, shown
from glm5_ascend.files.written import new_folder, write_file
from glm5_ascend.files.yaml_file import read_yaml
from glm5_ascend.options import StrPath, with_options

TARGETS = {
    RenderTarget.shell: scripts.files,
    RenderTarget.compose: compose.files,
    RenderTarget.recipe: recipe.files,
}
#: Targets that read a file of values.
WITH_VALUES = {
    RenderTarget.k8s: kubernetes.files,
    RenderTarget.kustomize: kustomize.files,
}
#: Characters with a meaning for shells, mounts or compose.
_NOT_PLAIN = re.compile(r"[^\w./@+=,%-]")


@dataclass(frozen=True)
class RenderedFiles:
    """Result of `render`. files: paths below `folder`, in rendering order."""

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


@with_options(RenderOptions)
def render(options: RenderOptions) -> RenderedFiles:
    """Write a profile as scripts, containers or Kubernetes objects.

    Raises:
        ConfigError: unknown profile or target, a path with special characters, containers for the CPU profile.
        OutputError: the directory has files already, or cannot be written; nothing is left.
    """
    values = _values(options.to, options.values)
    texts = rendered_texts(load(options.profile), options.to, options.model, values)
    folder = Path(options.out or f"{options.profile}-{options.to}")
    if (folder.is_dir() and any(folder.iterdir())) or folder.is_file():
        raise OutputError(f"{folder}: exists and is not empty", "name another directory with --out")
    with new_folder(folder) as temporary:
        for name, text in texts.items():
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            write_file(temporary / name, text)
            if name.endswith(".sh"):
                (temporary / name).chmod(0o755)
    return RenderedFiles(options.profile, options.to, options.model, folder, tuple(folder / name for name in texts))


def _values(target: str, path: StrPath | None) -> PodValues:
    """The cluster's values; raises ConfigError for targets without any."""
    if path is None:
        return DEFAULTS
    if target not in WITH_VALUES:
        raise ConfigError(
            f"--to {target}: takes no --values",
            f"they are for {', '.join(WITH_VALUES)}; scripts take --open, VLLM_API_KEY and NIC",
        )
    return read_yaml(Path(path), PodValues, tip="deploy/schemas/values.json describes the keys")


def rendered_texts(profile: Profile, target: str, model: str, values: PodValues = DEFAULTS) -> dict[str, str]:
    """File name -> text; see `render` for the arguments and the `ConfigError`s."""
    if target not in [*TARGETS, *WITH_VALUES]:
        raise ConfigError(f"--to {target}: unknown", f"one of {', '.join([*TARGETS, *WITH_VALUES])}")
    if profile.platform == "cpu" and target in ("compose", *WITH_VALUES):
        raise ConfigError("profile cpu has no container image", "--to shell")
    odd = re.search(_NOT_PLAIN, model)
    if not Path(model).is_absolute() or odd:
        what = f"{odd[0]!a} is in it" if odd else "not an absolute path"
        raise ConfigError(
            f"--model {shown(model, 200)}: {what}", "give the machines' path, of letters, digits and . _ - + = @ % , /"
        )
    if target in WITH_VALUES:
        return WITH_VALUES[RenderTarget(target)](profile, model, values)
    return TARGETS[RenderTarget(target)](profile, model)
