"""Tokens that a step of MTP gives, from the counters of a running server."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from glm5_ascend.serve.client import Client

DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total"
#: SGLang's mean over its last steps, with --enable-metrics.
SGLANG_LENGTH = "sglang:spec_accept_length"


@dataclass(frozen=True)
class MtpCounts:
    """Counters by engine (rank of attention DP; "" if the server has one engine).

    Attributes:
        steps: steps with drafts. accepted: draft tokens accepted in them.
        sglang: SGLang's own mean of tokens per step; 0 for other servers.
    """

    steps: Mapping[str, float] = field(default_factory=dict)
    accepted: Mapping[str, float] = field(default_factory=dict)
    sglang: float = 0.0

    def since(self, earlier: MtpCounts) -> MtpCounts:
        """Counts after `earlier`; without engines that were restarted or took no step."""
        steps, accepted = {}, {}
        for engine, count in self.steps.items():
            new = self.accepted.get(engine, 0.0) - earlier.accepted.get(engine, 0.0)
            if count > earlier.steps.get(engine, math.inf) and new >= 0:
                steps[engine], accepted[engine] = count - earlier.steps[engine], new
        return MtpCounts(steps, accepted, self.sglang)

    @property
    def per_step(self) -> dict[str, float]:
        """Engine -> tokens per step; empty without MTP."""
        if self.sglang:
            return {"": self.sglang}
        return {engine: 1 + self.accepted[engine] / steps for engine, steps in self.steps.items() if steps}

    @property
    def mean(self) -> float:
        """Tokens per step of all engines together; 0 without MTP."""
        steps = sum(self.steps.values())
        return self.sglang or (1 + sum(self.accepted.values()) / steps if steps else 0.0)


def read_counts(client: Client) -> MtpCounts:
    """The counters of a server since its start; empty where it has no metrics, or no MTP."""
    steps: dict[str, float] = defaultdict(float)
    accepted: dict[str, float] = defaultdict(float)
    sglang = 0.0
    for name, engine, value in client.samples():
        if name == DRAFTS:
            steps[engine] += value
        elif name == ACCEPTED:
            accepted[engine] += value
        elif name == SGLANG_LENGTH:
            sglang = value
    return MtpCounts(steps, accepted, sglang)
