"""docker compose: one service per role, on the host's network. The same file goes to every machine."""

from __future__ import annotations

from typing import Any

from glm5_ascend.deploy.profiles.command import heading
from glm5_ascend.deploy.profiles.load import Profile, Role
from glm5_ascend.deploy.rendering import image, scripts
from glm5_ascend.deploy.rendering.check_scripts import HEALTH
from glm5_ascend.deploy.rendering.yaml_text import dumped
from glm5_ascend.serve.flags import KEY_VARIABLE


def files(profile: Profile, model: str) -> dict[str, str]:
    services = {role.name: service(profile, role, model) for role in profile.roles.values()}
    text = dumped([{"services": services}])
    note = ["# Start one role on a machine: NODE=0 HEAD=... IP=... NIC=... docker compose up ROLE"]
    rendered = {"compose.yaml": "\n".join([*heading(profile), *note, text])}
    rendered |= {"health.sh": HEALTH} | dict(image.dockerfile(profile, role) for role in profile.roles.values())
    return rendered | scripts.files(profile, model)


def service(profile: Profile, role: Role, model: str) -> dict[str, Any]:
    name = scripts.script_name(role)
    variables = ["NODE=${NODE:-0}", "HEAD=${HEAD:-}", "IP=${IP:-}", "NIC=${NIC:-}"] if role.nodes > 1 else []
    variables += ["STORE=${STORE:-}"] if scripts.uses_store(role) else []
    count = role.local_ranks if role.per_rank else 1
    check = f"bash /glm5/health.sh 127.0.0.1 {role.port} {count} 15"
    if not role.per_rank and role.nodes > 1:  # only the first machine has a server
        check = f'[ "$${{NODE:-0}}" -gt 0 ] || {check}'
    return {
        "image": image.tag(profile, role),
        "build": {"context": ".", "dockerfile": image.dockerfile(profile, role)[0]},
        "command": [f"/glm5/{name}"],
        "network_mode": "host",
        "shm_size": f"{image.SHM_GIB}g",
        "ulimits": {"memlock": -1, "nofile": 1048576},
        "devices": [f"/dev/davinci{i}" for i in range(image.dies(role))] + list(image.MANAGERS),
        "volumes": [f"{path}:{path}:ro" for path in (*image.MOUNTS, model)]
        + [f"./{file}:/glm5/{file}:ro" for file in (name, "health.sh")],
        "environment": [
            "=".join(image.KERNEL_CACHE),
            f"{KEY_VARIABLE}=${{{KEY_VARIABLE}:-}}",
            "OPEN=${OPEN:-0}",
            *variables,
        ],
        "stop_grace_period": "360s",
        "security_opt": ["no-new-privileges:true"],
        "init": True,
        "restart": "on-failure",
        "healthcheck": {
            "test": ["CMD-SHELL", check],
            "interval": "30s",
            "timeout": "20s",
            "retries": 3,
            "start_period": "3600s",
        },
    }
