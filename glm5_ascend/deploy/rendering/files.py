"""`glm5-ascend deploy render`: a profile's files for one target, written into a folder."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from glm5_ascend.deploy.profiles.load import Profile, load
from glm5_ascend.deploy.rendering import compose, kubernetes, kustomize, scripts, systemd
from glm5_ascend.deploy.rendering.kubernetes import DEFAULTS
from glm5_ascend.deploy.rendering.values import AuthValues, NetworkValues, PodValues
from glm5_ascend.deploy.target import RenderTarget
from glm5_ascend.errors import ConfigError, OutputError, shown
from glm5_ascend.files.written import new_folder, write_file
from glm5_ascend.files.yaml_file import read_yaml

TARGETS = {
    RenderTarget.shell: scripts.files,
    RenderTarget.compose: compose.files,
    RenderTarget.systemd: systemd.files,
}
#: Those that take a cluster's values.
WITH_VALUES = {
    RenderTarget.k8s: kubernetes.files,
    RenderTarget.kustomize: kustomize.files,
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


def render(
    profile: str,
    to: str,
    *,
    model: str = MODEL,
    out: str | Path | None = None,
    values: str | Path | None = None,
    api_key_secret: str | None = None,
    nic: str | None = None,
    open: bool = False,
) -> RenderedFiles:
    """Write a profile as scripts, containers, Kubernetes objects or units.

    Args:
        profile: its name; `glm5-ascend deploy list` shows them.
        to: shell, compose, k8s, kustomize or systemd.
        model: absolute path of the checkpoint on every machine, mounted at the same place in containers.
        values: YAML file of a cluster's own values (deploy/schemas/values.json), for pods; never written.
        api_key_secret: Secret with the API key below `key`; wins over the file's.
        nic: interface between machines, else it is found by the route; wins over the file's.
        open: start without a key on addresses that others reach; wins over the file's.
        out: an absent or empty folder; PROFILE-TO in the working directory if left out.

    Raises:
        ConfigError: unknown profile or target, a path that is not plain, containers for the CPU profile.
        OutputError: the folder has files already, or cannot be written; nothing is left.
    """
    texts = rendered_texts(load(profile), to, model, pod_values(to, values, api_key_secret, nic, open))
    folder = Path(f"{profile}-{to}") if out is None else Path(out)
    if (folder.is_dir() and any(folder.iterdir())) or folder.is_file():
        raise OutputError(f"{folder}: exists and is not empty", "name another folder with --out")
    with new_folder(folder) as aside:
        for name, text in texts.items():
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            write_file(aside / name, text)
            if name.endswith(".sh"):
                (aside / name).chmod(0o755)
    return RenderedFiles(profile, to, model, folder, tuple(folder / name for name in texts))


def pod_values(to: str, path: str | Path | None, secret: str | None, nic: str | None, opened: bool) -> PodValues:
    """Values of a file, and what options say beside it. Raises `ConfigError` for targets that take none."""
    if to not in WITH_VALUES and (opened or any(each is not None for each in (path, secret, nic))):
        raise ConfigError(
            f"--to {to}: takes no --values, --api-key-secret, --nic or --open",
            f"they are for {', '.join(WITH_VALUES)}; scripts take --open, VLLM_API_KEY and NIC",
        )
    if opened and secret is not None:
        raise ConfigError("--open and --api-key-secret say the opposite", "give one of them")
    found = (
        DEFAULTS if path is None else read_yaml(Path(path), PodValues, tip="deploy/schemas/values.json has the keys")
    )
    said: dict[str, Any] = {"open": True} if opened else {}
    if secret is not None:
        said = {"api_key_secret": secret, "open": False}
    try:
        auth = AuthValues.model_validate(found.auth.model_dump() | said)
        network = NetworkValues.model_validate(found.network.model_dump() | ({} if nic is None else {"nic": nic}))
    except ValidationError as error:
        if error.title == NetworkValues.__name__:
            tip = "letters, digits and _ . @ -, 32 at most"
            raise ConfigError(f"--nic {shown(nic or '', 80)}: no name of an interface", tip) from None
        tip = "small letters, digits, - and ."
        raise ConfigError(f"--api-key-secret {shown(secret or '', 80)}: no name of a Secret", tip) from None
    return found.model_copy(update={"auth": auth, "network": network})


def rendered_texts(profile: Profile, target: str, model: str, values: PodValues = DEFAULTS) -> dict[str, str]:
    """File name -> text; see `render` for the arguments and the `ConfigError`s."""
    if target not in [*TARGETS, *WITH_VALUES]:
        raise ConfigError(f"--to {target}: unknown", f"one of {', '.join([*TARGETS, *WITH_VALUES])}")
    if profile.platform == "cpu" and target in ("compose", *WITH_VALUES):
        raise ConfigError("profile cpu has no container image", "--to shell or --to systemd")
    odd = re.search(_NOT_PLAIN, model)
    if not Path(model).is_absolute() or odd:
        what = f"{odd[0]!a} is in it" if odd else "not an absolute path"
        raise ConfigError(
            f"--model {shown(model, 200)}: {what}", "give the machines' path, of letters, digits and . _ - + = @ % , /"
        )
    if target in WITH_VALUES:
        return WITH_VALUES[RenderTarget(target)](profile, model, values)
    return TARGETS[RenderTarget(target)](profile, model)
