"""Profile and rules of the cases of public threads."""

from __future__ import annotations

from glm5_ascend.deploy.profiles.load import load
from glm5_ascend.deploy.rules.preflight import preflight

PROFILE = "a3-single-w4a8"


def broken(profile: str, flags: str, role: str | None = None) -> set[str]:
    """Ids of the rules that a profile with these flags breaks, apart from those that it breaks without them."""
    loaded = load(profile)
    usual, result = (preflight(loaded, None, role, words)[0] for words in ([], flags.split()))
    return {rule.id for rule in result.broken} - {rule.id for rule in usual.broken}
