"""`glm5-ascend deploy render`: a profile's files for one target, written into a folder."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from glm5_ascend.deploy.options import RenderOptions, RenderTarget
from glm5_ascend.deploy.profiles.load import Profile, load
from glm5_ascend.deploy.rendering.context import Files
from glm5_ascend.deploy.rendering.values import PodValues
from glm5_ascend.deploy.rules.preflight import preflight, print_broken
from glm5_ascend.errors import ConfigError, OutputError, json_frame, shown
from glm5_ascend.files.written import new_folder, write_file
from glm5_ascend.files.yaml_file import read_yaml
from glm5_ascend.options import StrPath, with_options

DEFAULTS = PodValues()
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
        paths = {"folder": str(self.folder), "files": [str(path) for path in self.files]}
        return json_frame("deploy render") | asdict(self) | paths


@with_options(RenderOptions)
def render(options: RenderOptions) -> RenderedFiles:
    """Write a profile as scripts, containers or Kubernetes objects.

    Raises:
        ConfigError: unknown profile or target, a path with special characters, containers for the CPU profile, flags or
            variables in `values` that the engine or a rule of `doctor` refuses; warnings of rules go to stderr.
        OutputError: the directory has files already, or cannot be written; nothing is left.
    """
    values, profile = _values(options.to, options.values), load(options.profile)
    texts = rendered_texts(profile, options.to, options.model, values)
    _judge_server(profile, values)
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
    if path is None:
        return DEFAULTS
    if target not in (RenderTarget.k8s, RenderTarget.kustomize):
        raise ConfigError(
            f"--to {target}: takes no --values",
            "they are for k8s, kustomize; scripts take --open, VLLM_API_KEY and NIC",
        )
    return read_yaml(Path(path), PodValues, tip="deploy/schemas/values.json describes the keys")


def _judge_server(profile: Profile, values: PodValues) -> None:
    """Judge the cluster's flags and variables as `serve` and `doctor` judge those of a command line."""
    server = values.server
    if not (server.flags or server.env):
        return
    roles = {name: replace(role, env={**role.env, **server.env}) for name, role in profile.roles.items()}
    broken = {
        rule.id: rule
        for result in preflight(replace(profile, roles=roles), None, extra=server.flags)
        for rule in result.broken
    }
    if errors := print_broken(broken.values()):
        raise ConfigError(f"server: known bad flags or variables ({errors})", "see the lines above")


def rendered_texts(profile: Profile, target: str, model: str, values: PodValues = DEFAULTS) -> dict[str, str]:
    """File name -> text; see `render` for the arguments and the `ConfigError`s."""
    if target not in TARGETS:
        raise ConfigError(f"--to {target}: unknown", f"one of {', '.join(TARGETS)}")
    if profile.platform == "cpu" and target != RenderTarget.shell:
        raise ConfigError("profile cpu has no container image", "--to shell")
    odd = re.search(_NOT_PLAIN, model)
    if not Path(model).is_absolute() or odd:
        what = f"{odd[0]!a} is in it" if odd else "not an absolute path"
        raise ConfigError(
            f"--model {shown(model, 200)}: {what}", "give the machines' path, of letters, digits and . _ - + = @ % , /"
        )
    if profile.proxy and values.replicas > 1:  # a second group would get no requests
        raise ConfigError("replicas: the proxy of PD knows the pods of one group", "render again for another namespace")
    return TARGETS[RenderTarget(target)](Files(profile, model, values))


def shell(files: Files) -> dict[str, str]:
    """A script per role, one for router or proxy, and the check of a server's health."""
    texts = {server.script_name: server.script() for server in files.servers}
    return texts | dict([files.front_script()]) | {"health.sh": files.text("health.sh.j2")}


def compose(files: Files) -> dict[str, str]:
    """One service per role, on the host's network; the same file goes to every machine."""
    dockerfile = {f"Dockerfile.{files.machine}": files.text("Dockerfile.j2")}
    return {"compose.yaml": files.text("compose.yaml.j2")} | dockerfile | shell(files)


def kubernetes(files: Files) -> dict[str, str]:
    """The objects with the Dockerfiles of their images, and the script of router or proxy to read."""
    return _objects(files) | _images(files) | dict([files.front_script()])


def _images(files: Files) -> dict[str, str]:
    texts = {f"Dockerfile.{files.machine}": files.text("Dockerfile.j2")}
    return texts if files.profile.proxy else texts | {"Dockerfile.router": files.text("Dockerfile.router.j2")}


def _objects(files: Files) -> dict[str, str]:
    texts = {f"{server.role.name}.yaml": server.objects() for server in files.servers}
    texts["proxy.yaml" if files.profile.proxy else "router.yaml"] = files.text("front.yaml.j2", **files.front())
    texts["network.yaml"] = files.text("network.yaml.j2")
    if files.values.monitoring.enabled:
        count = max(server.count for server in files.servers)
        texts["monitoring.yaml"] = files.text("monitoring.yaml.j2", most_servers=count)
    return texts


def kustomize(files: Files) -> dict[str, str]:
    """The objects as a base, which a new rendering replaces, and an overlay, which is the user's."""
    texts = _objects(files)
    return {
        **{f"base/{name}": text for name, text in texts.items()},
        "base/kustomization.yaml": files.text("kustomization.yaml.j2", resources=list(texts)),
        "overlays/mine/kustomization.yaml": files.text("overlay.yaml.j2"),
        "overlays/mine/api-key.env": files.text("api-key.env.j2"),
        **_images(files),
    }


TARGETS = {
    RenderTarget.shell: shell,
    RenderTarget.compose: compose,
    RenderTarget.k8s: kubernetes,
    RenderTarget.kustomize: kustomize,
}
