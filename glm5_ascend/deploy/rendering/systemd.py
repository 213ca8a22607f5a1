"""systemd: one unit per role that runs its script; an environment file has the addresses."""

from __future__ import annotations

from glm5_ascend.deploy.profiles.load import Profile, Role
from glm5_ascend.deploy.rendering import scripts

FOLDER = "/opt/glm5-ascend"


def files(profile: Profile, model: str) -> dict[str, str]:
    units = {f"glm5-{profile.name}-{role.name}.service": unit(profile, role) for role in profile.roles.values()}
    return units | scripts.files(profile, model)


def unit(profile: Profile, role: Role) -> str:
    needs = "NODE, HEAD, IP, NIC" if role.nodes > 1 else "MODEL, PORT if they differ from the script's"
    needs = "STORE" if scripts.uses_store(role) else needs
    return f"""\
# {profile.name}: {profile.title}. Copy the script to {FOLDER}; put {needs} into /etc/glm5-ascend/{role.name}.env
# User: useradd --system glm5; on a machine with NPUs with --groups HwHiAiUser, the group of the device files.
# The environment file also has VLLM_API_KEY; only root may read it.
[Unit]
Description=GLM-5, profile {profile.name}, role {role.name}
After=network-online.target
Wants=network-online.target

[Service]
Environment=NUMBA_CACHE_DIR=%C/glm5-ascend
CacheDirectory=glm5-ascend
EnvironmentFile=-/etc/glm5-ascend/{role.name}.env
ExecStart=/bin/bash {FOLDER}/{scripts.script_name(role)}
Restart=on-failure
RestartSec=30
TimeoutStopSec=360
User=glm5
Group=glm5
NoNewPrivileges=yes
CapabilityBoundingSet=
ProtectSystem=strict
ProtectHome=yes
ProtectControlGroups=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectClock=yes
ProtectHostname=yes
PrivateTmp=yes
RestrictSUIDSGID=yes
RestrictRealtime=yes
RestrictNamespaces=yes
LockPersonality=yes
SystemCallArchitectures=native
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
UMask=0077
WorkingDirectory=%C/glm5-ascend
Environment=HOME=%C/glm5-ascend
Environment=ASCEND_PROCESS_LOG_PATH=%L/glm5-ascend
LogsDirectory=glm5-ascend
LimitMEMLOCK=infinity
LimitNOFILE=1048576

[Install]
WantedBy=multi-user.target
"""
