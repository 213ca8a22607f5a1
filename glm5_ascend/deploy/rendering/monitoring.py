"""PodMonitor, alerts and dashboard for the metrics of vLLM and of the NPU exporter."""

from __future__ import annotations

import json
import re
from typing import Any

from glm5_ascend.deploy.profiles.load import Profile
from glm5_ascend.deploy.rendering.kubernetes_front import ANSWERS, PART_OF
from glm5_ascend.deploy.rendering.values import PodValues

#: Title -> legend -> expression. Rates are over five minutes. `selected` restricts them to the profile's servers.
PANELS: dict[str, dict[str, str]] = {
    "Requests": {
        "running": "sum(vllm:num_requests_running)",
        "waiting": "sum(vllm:num_requests_waiting)",
    },
    "Requests per second, by end": {
        "{{finished_reason}}": "sum by (finished_reason) (rate(vllm:request_success_total[5m]))"
    },
    "Time to first token (s)": {
        "median": "histogram_quantile(0.5, sum by (le) (rate(vllm:time_to_first_token_seconds_bucket[5m])))",
        "p99": "histogram_quantile(0.99, sum by (le) (rate(vllm:time_to_first_token_seconds_bucket[5m])))",
    },
    "Time per output token (s)": {
        "median": "histogram_quantile(0.5, sum by (le) (rate(vllm:request_time_per_output_token_seconds_bucket[5m])))",
        "p99": "histogram_quantile(0.99, sum by (le) (rate(vllm:request_time_per_output_token_seconds_bucket[5m])))",
    },
    "Cache in use": {"{{pod}}": "max by (pod) (vllm:kv_cache_usage_perc)"},
    "Prefix hits": {
        "share": "sum(rate(vllm:prefix_cache_hits_total[5m])) / sum(rate(vllm:prefix_cache_queries_total[5m]))"
    },
    "MTP acceptance, by position": {
        "{{position}}": (
            "sum by (position) (rate(vllm:spec_decode_num_accepted_tokens_per_pos_total[5m]))"
            " / on () group_left () sum(rate(vllm:spec_decode_num_drafts_total[5m]))"
        )
    },
    "NPU: AI core in use (%)": {"{{id}}": "npu_chip_info_utilization"},
    "NPU: memory in use (MB)": {"{{id}}": "npu_chip_info_hbm_used_memory"},
    "NPU: temperature (C)": {"{{id}}": "npu_chip_info_temperature"},
}
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
    """PodMonitor, PrometheusRule, and a ConfigMap with a label for Grafana's sidecar."""
    operator, labels = "monitoring.coreos.com/v1", {PART_OF: profile.name, **values.monitoring.labels}
    count = max(role.local_ranks if role.per_rank else 1 for role in profile.roles.values())
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
    return [
        {
            "apiVersion": operator,
            "kind": "PodMonitor",
            "metadata": {"name": profile.name, "labels": labels},
            "spec": {
                "jobLabel": PART_OF,
                "selector": {"matchLabels": {PART_OF: profile.name, ANSWERS: "yes"}},
                "podMetricsEndpoints": [
                    {"port": f"http-{i}", "path": "/metrics", "interval": "15s"} for i in range(count)
                ],
            },
        },
        {
            "apiVersion": operator,
            "kind": "PrometheusRule",
            "metadata": {"name": profile.name, "labels": labels},
            "spec": {"groups": [{"name": profile.name, "rules": rules}]},
        },
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": f"{profile.name}-dashboard", "labels": {"grafana_dashboard": "1"}},
            "data": {f"{profile.name}.json": json.dumps(dashboard(profile), indent=1) + "\n"},
        },
    ]


def dashboard(profile: Profile) -> dict[str, Any]:
    """A dashboard with two panels per row and a selectable data source."""
    source = {"type": "prometheus", "uid": "${source}"}
    panels = [
        {
            "id": number + 1,
            "type": "timeseries",
            "title": title,
            "datasource": source,
            "gridPos": {"h": 8, "w": 12, "x": 12 * (number % 2), "y": 8 * (number // 2)},
            "targets": [
                {
                    "refId": chr(ord("A") + i),
                    "datasource": source,
                    "expr": selected(expression, profile),
                    "legendFormat": legend,
                }
                for i, (legend, expression) in enumerate(queries.items())
            ],
        }
        for number, (title, queries) in enumerate(PANELS.items())
    ]
    choice = {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    return {
        "uid": f"glm5-{profile.name}"[:40],
        "title": f"GLM-5: {profile.name}",
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [choice]},
        "panels": panels,
    }
