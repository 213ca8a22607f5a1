"""PodMonitor and alerts for the metrics of vLLM."""

from __future__ import annotations

import re
from typing import Any

from glm5_ascend.deploy.profiles.load import Profile
from glm5_ascend.deploy.rendering.kubernetes_front import ANSWERS, PART_OF
from glm5_ascend.deploy.rendering.values import PodValues
from glm5_ascend.deploy.rendering.yaml_text import manifest

#: Name -> (expression, duration, summary).
ALERTS: dict[str, tuple[str, str, str]] = {
    "MtpAcceptanceFell": (
        "sum by (pod) (rate(vllm:spec_decode_num_accepted_tokens_total[15m]))"
        " / sum by (pod) (rate(vllm:spec_decode_num_draft_tokens_total[15m])) < 0.3",
        "10m",
        "few draft tokens are accepted: slow answers, and often the first sign of wrong ones",
    ),
    "RequestsWait": (
        "min_over_time(sum by (pod) (vllm:num_requests_waiting)[10m:1m]) > 0",
        "5m",
        "requests waited for 10 minutes: the load is too high",
    ),
    "CacheFull": (
        "max by (pod) (vllm:kv_cache_usage_perc) > 0.95",
        "10m",
        "the cache is full: requests are preempted and recomputed",
    ),
    "StandsStill": (
        "sum by (pod) (rate(vllm:generation_tokens_total[10m]))"
        " + sum by (pod) (rate(vllm:prompt_tokens_total[10m])) == 0"
        " and sum by (pod) (vllm:num_requests_running) > 0",
        "5m",
        "requests run, but no tokens are generated: an engine or a machine of its group hangs",
    ),
    "ServerRestarted": (
        "changes(process_start_time_seconds[1h]) > 0",
        "0m",
        "the server restarted within the last hour",
    ),
    "AnswersRepeat": (
        'sum by (pod) (rate(vllm:request_success_total{finished_reason=~"length|repetition"}[15m]))'
        " / sum by (pod) (rate(vllm:request_success_total[15m])) > 0.5",
        "15m",
        "half of the answers end at the token limit or as repetitions",
    ),
}


def selected(expression: str, profile: Profile) -> str:
    """Restrict an expression to the profile's servers, whose job has the profile's name by the PodMonitor."""
    job = f'job="{profile.name}"'
    narrowed = re.sub(r"(vllm:\w+|process_start_time_seconds)\{", rf"\1{{{job},", expression)
    return re.sub(r"(vllm:\w+|process_start_time_seconds)(?![\w{])", rf"\1{{{job}}}", narrowed)


def objects(profile: Profile, values: PodValues) -> list[dict[str, Any]]:
    """PodMonitor and PrometheusRule."""
    operator, labels = "monitoring.coreos.com/v1", {PART_OF: profile.name, **values.monitoring.labels}
    count = max(role.local_ranks if role.per_rank else 1 for role in profile.roles.values())
    monitor = {
        "jobLabel": PART_OF,
        "selector": {"matchLabels": {PART_OF: profile.name, ANSWERS: "yes"}},
        "podMetricsEndpoints": [{"port": f"http-{i}", "path": "/metrics", "interval": "15s"} for i in range(count)],
    }
    rules = [
        {
            "alert": name,
            "expr": selected(expression, profile),
            "for": duration,
            "labels": {"severity": "warning"},
            "annotations": {"summary": summary},
        }
        for name, (expression, duration, summary) in ALERTS.items()
    ]
    rendered = [
        manifest(operator, "PodMonitor", profile.name, spec=monitor),
        manifest(operator, "PrometheusRule", profile.name, spec={"groups": [{"name": profile.name, "rules": rules}]}),
    ]
    for item in rendered:
        item["metadata"]["labels"] = labels
    return rendered
