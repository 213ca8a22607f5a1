"""How a watched server is asked, and what broken weights and caches write."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any

from glm5_ascend.serve.client import Answer, Client
from glm5_ascend.serve.smoke import ACCEPTED, DRAFTS, NO_THINKING, degenerate, user

#: Tokens of an answer, at most: what goes on after it is repeated anyway.
MAX_TOKENS = 160
_PHRASE = re.compile(r"(.{8,120}?)\1{4,}", re.DOTALL)


def repeats(text: str) -> bool:
    """One sign, piece or phrase again and again. An empty text repeats nothing."""
    stripped = text.strip()[:8000]
    return bool(stripped) and (degenerate(stripped) or _PHRASE.search(stripped) is not None)


def fresh() -> dict[str, Any]:
    """A field that keeps vLLM from answering out of its prefix cache: one made in better times would hide a fault."""
    return {"cache_salt": secrets.token_hex(8)}


def ask_canary(client: Client, question: str, **options: Any) -> Answer:
    """Greedy, without thoughts where the model can."""
    return client.chat(user(question), max_tokens=MAX_TOKENS, return_token_ids=True, **NO_THINKING, **options)


def tokens_per_step(before: Mapping[str, float], after: Mapping[str, float]) -> float | None:
    """Mean tokens per step of MTP between two readings of /metrics; None where no step was made."""
    drafts = after.get(DRAFTS, 0.0) - before.get(DRAFTS, 0.0)
    return 1 + (after.get(ACCEPTED, 0.0) - before.get(ACCEPTED, 0.0)) / drafts if drafts > 0 else None
