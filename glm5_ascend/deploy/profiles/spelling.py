"""A profile in the spelling of the vllm-ascend that is to read it. Profiles say what 0.23 reads."""

from __future__ import annotations

from dataclasses import replace

from packaging.version import Version

from glm5_ascend.deploy.profiles.engines import VLLM
from glm5_ascend.deploy.profiles.load import Role
from glm5_ascend.serve.c8_flags import reads_flags, with_flags


def spelled_for(role: Role, version: Version | None) -> Role:
    """The same role with its int8 caches as `version` reads them; None: as the profile says them."""
    if version is None or role.engine != VLLM or not reads_flags(version):
        return role
    return replace(role, args=with_flags(role.args))
