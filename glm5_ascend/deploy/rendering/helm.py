"""A Helm chart of the same objects as `k8s`: built from them, with holes where a value decides.

`helm template` with some values gives what `deploy render --to k8s --values` gives with the same; a test compares them.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel

from glm5_ascend import __version__
from glm5_ascend.deploy.profiles.load import Profile
from glm5_ascend.deploy.rendering import image, kubernetes, kubernetes_front
from glm5_ascend.deploy.rendering.helm_objects import ChartObjects
from glm5_ascend.deploy.rendering.kubernetes_front import service_name
from glm5_ascend.deploy.rendering.values import AutoscalingValues, MonitoringValues, PodValues, SchedulingValues
from glm5_ascend.deploy.rendering.yaml_text import dumped

#: With every object there can be; the templates' conditions leave some out.
ALL = PodValues(monitoring=MonitoringValues(enabled=True), scheduling=SchedulingValues(pod_group=True))
SCALED = ALL.model_copy(update={"autoscaling": AutoscalingValues(enabled=True)})
MINE = """\
# Yours: what differs from chart/values.yaml, by the same keys. Replace `chart` by a new rendering and keep this file.
# helm upgrade --install glm5 chart --values mine.yaml
"""
HELPERS = """\
{{- /* An image in the registry, by its digest where that is known. */ -}}
{{- define "glm5.image" -}}
{{- $name := .name -}}
{{- if .values.registry -}}{{- $name = printf "%s/%s" (regexReplaceAll "/+$" .values.registry "") .name -}}{{- end -}}
{{- if .digest -}}{{- printf "%s@%s" $name .digest -}}{{- else -}}{{- printf "%s:%s" $name .tag -}}{{- end -}}
{{- end -}}

{{- /* Limits equal requests, so that the pod is not the first evicted. */ -}}
{{- define "glm5.resources" -}}
{{- $cpu := .values.cpu | default (mul 8 .dies | toString) -}}
{{- $memory := .values.memory | default (printf "%dGi" (mul 48 .dies)) -}}
{{- $needs := dict .values.npu (toString .dies) "cpu" $cpu "memory" $memory -}}
{{- dict "limits" $needs "requests" (merge (dict "ephemeral-storage" .values.disk) $needs) | toJson -}}
{{- end -}}
"""


def files(profile: Profile, model: str, values: PodValues = kubernetes.DEFAULTS) -> dict[str, str]:
    """File name -> text: a chart that rendering owns, and a file of values that is its user's."""
    kubernetes.refuse_what_the_proxy_does_not_know(profile, values)
    chart = ChartObjects(profile)
    made = {
        "chart/Chart.yaml": dumped([description(profile)]),
        "chart/values.yaml": values_text(values),
        "chart/values.schema.json": json.dumps(PodValues.model_json_schema(), indent=2) + "\n",
        "chart/templates/_helpers.tpl": HELPERS,
        "chart/templates/NOTES.txt": notes(profile),
        "mine.yaml": MINE,
    }
    for file, objects in kubernetes.grouped(profile, model, ALL if profile.proxy else SCALED).items():
        made[f"chart/templates/{file}"] = chart.template(file, objects)
    made |= {f"chart/files/{name}": text for name, text in chart.files.items()}
    for role in profile.roles.values():
        docker = image.dockerfile(profile, role)
        made[docker[0]] = docker[1]
    return made | kubernetes_front.dockerfiles(profile)


def description(profile: Profile) -> dict[str, Any]:
    return {
        "apiVersion": "v2",
        "name": profile.name,
        "description": f"GLM-5: {profile.title}",
        "type": "application",
        "version": __version__,
        "appVersion": profile.line.name,
    }


def notes(profile: Profile) -> str:
    """What `helm install` says at its end."""
    front = f"{profile.name}-proxy" if profile.proxy else f"{profile.name}-router"
    port = profile.proxy["port"] if profile.proxy else kubernetes_front.ROUTER_PORT
    first = service_name(profile, next(iter(profile.roles.values())))
    return f"""\
GLM-5, profile {profile.name}. Servers load for up to {{{{ int .Values.life.start_minutes }}}} minutes.
{{{{- if .Values.auth.open }}}}
Anyone who reaches it may ask: auth.open is true.
{{{{- else }}}}
Pods wait for the Secret {{{{ .Values.auth.api_key_secret }}}} with the API key below `key`.
{{{{- end }}}}

  kubectl get pods -l app.kubernetes.io/part-of={profile.name}
  kubectl port-forward service/{front} 8000:{port}      # of one server: service/{first}
  glm5-ascend smoke http://127.0.0.1:8000
"""


def values_text(values: BaseModel, indent: str = "") -> str:
    """Every key with what it is for."""
    lines = []
    for name, field in type(values).model_fields.items():
        value = getattr(values, name)
        said = (type(value).__doc__ or "").split("\n")[0] if isinstance(value, BaseModel) else field.description
        if said:
            lines.append(f"{indent}# {said}")
        if isinstance(value, BaseModel):
            lines += [f"{indent}{name}:", values_text(value, indent + "  ").rstrip("\n")]
        else:
            lines.append(f"{indent}{name}: {json.dumps(value, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"
