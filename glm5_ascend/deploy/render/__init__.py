"""`glm5-ascend deploy render`: a profile as files that shells, containers, Kubernetes and systemd take."""

from __future__ import annotations

from pathlib import Path

from glm5_ascend.deploy.profiles.load import Profile
from glm5_ascend.deploy.render import compose, kubernetes, scripts, systemd
from glm5_ascend.errors import ConfigError

TARGETS = {"shell": scripts.files, "compose": compose.files, "k8s": kubernetes.files, "systemd": systemd.files}


def render(profile: Profile, target: str, model: str) -> dict[str, str]:
    """File name -> text. model: path of the checkpoint on every machine, mounted at the same place in containers.

    Raises:
        ConfigError: an unknown target, or containers for the CPU profile, which has no image.
    """
    if target not in TARGETS:
        raise ConfigError(f"--to {target}: unknown", f"one of {', '.join(TARGETS)}")
    if profile.platform == "cpu" and target in ("compose", "k8s"):
        raise ConfigError("profile cpu has no container image", "--to shell or --to systemd")
    if not Path(model).is_absolute() or any(sign in model for sign in "\"'$`\\\n "):
        raise ConfigError(
            f"--model {model!r}: not a plain absolute path", "the machines' path, without spaces or quotes"
        )
    return TARGETS[target](profile, model)
