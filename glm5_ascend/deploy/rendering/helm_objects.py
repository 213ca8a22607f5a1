"""The objects of `k8s` as templates of a chart: each place that a value decides gets its expression."""

from __future__ import annotations

import json
from typing import Any

from glm5_ascend.deploy.profiles.load import Profile, Role
from glm5_ascend.deploy.profiles.show import heading
from glm5_ascend.deploy.rendering import image, kubernetes
from glm5_ascend.deploy.rendering.go_template import GoTemplate
from glm5_ascend.deploy.rendering.kubernetes_front import PART_OF, full_name
from glm5_ascend.deploy.rendering.pod import SPARE_S, STARTUP_PERIOD_S, on_host_network
from glm5_ascend.deploy.rendering.script_parts import KEY_VARIABLE
from glm5_ascend.engine_lines import SGLANG

CONFIG = "glm5-ascend/config"
GRACE = f"add .Values.life.leave_s .Values.life.drain_s {SPARE_S}"
#: Beginning of a role's file: the scheduler, and the host's network by its value or else by the role.
HOST = (
    '{{{{- $scheduler := "" }}}}\n'
    '{{{{- $host := ternary {host} .Values.network.host (kindIs "invalid" .Values.network.host) }}}}\n'
    "{{{{- with .Values.scheduling }}}}\n"
    '{{{{- $scheduler = .scheduler | default (ternary "volcano" "" .pod_group) }}}}\n'
    "{{{{- end }}}}\n"
)
REFUSED = "{{- if or (gt (int .Values.replicas) 1) .Values.autoscaling.enabled }}"
OUT_OF_ORDER = (
    "{{- with .Values.autoscaling }}{{- if gt (int .minimum) (int .maximum) }}"
    '{{ fail "autoscaling: minimum is above maximum" }}{{- end }}{{- end }}\n'
)
#: Whole files, and kinds of object, that a value asks for.
FILES_WHEN = {
    "monitoring.yaml": "if .Values.monitoring.enabled",
    "autoscaling.yaml": "if .Values.autoscaling.enabled",
}
KINDS_WHEN = {"PodGroup": "if .Values.scheduling.pod_group"}


def own_parts(found: Any) -> Any:
    """A copy where nothing is shared: the same list in two containers becomes two lists."""
    if isinstance(found, dict):
        return {key: own_parts(each) for key, each in found.items()}
    return [own_parts(each) for each in found] if isinstance(found, list) else found


class ChartObjects:
    """Templates of one profile, and the `files` they include."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.go = GoTemplate()
        self.files: dict[str, str] = {}
        self.roles = {full_name(profile, role): role for role in profile.roles.values()}

    def template(self, file: str, objects: list[dict[str, Any]]) -> str:
        """Text of one file below templates/."""
        head = "".join(f"{line}\n" for line in heading(self.profile)).replace("{{", '{{ "{{" }}')
        role = self.profile.roles.get(file.removesuffix(".yaml"))
        if role is not None:
            head += HOST.format(host=str(on_host_network(self.profile, role, kubernetes.DEFAULTS)).lower())
        if file == "proxy.yaml":
            head += REFUSED + '{{ fail "' + kubernetes.ONE_GROUP + '" }}{{- end }}\n'
        body = "".join(self.document(own_parts(each)) for each in objects)
        if file == "autoscaling.yaml":
            body = OUT_OF_ORDER + body
        if file in FILES_WHEN:
            body = f"{{{{- {FILES_WHEN[file]} }}}}\n{body}{{{{- end }}}}\n"
        return head + body

    def document(self, each: dict[str, Any]) -> str:
        kind = each["kind"]
        if kind == "ConfigMap":
            self.config_map(each)
        elif kind in ("Deployment", "LeaderWorkerSet"):
            self.workload(each)
        elif kind == "NetworkPolicy":
            self.network_policy(each)
        elif kind == "PodGroup":
            role = self.roles[each["metadata"]["name"]]
            each["spec"]["minMember"] = self.go.value(f"mul {role.nodes} (max 1 (int .Values.replicas))")
        elif kind == "ScaledObject":
            self.scaled(each["spec"])
        elif kind in ("PodMonitor", "PrometheusRule"):
            own = f'(dict "{PART_OF}" "{self.profile.name}")'
            each["metadata"]["labels"] = self.go.value(f"merge (dict) .Values.monitoring.labels {own} | toJson")
        for place in (each["metadata"], *each.get("subjects", [])):
            place |= self.go.when("with .Values.namespace", {"namespace": self.go.value(". | quote")})
        text = "---\n" + self.go.text([each])
        return f"{{{{- {KINDS_WHEN[kind]} }}}}\n{text}{{{{- end }}}}\n" if kind in KINDS_WHEN else text

    def config_map(self, each: dict[str, Any]) -> None:
        """Scripts lie in files of their own, which are no templates."""
        for name, text in each["data"].items():
            self.files[name] = text
            each["data"][name] = self.go.scalar(f'|\n{{{{ .Files.Get "files/{name}" | indent 4 }}}}')

    def network_policy(self, each: dict[str, Any]) -> None:
        default, said = '(list (dict "podSelector" dict))', ".Values.auth.allow_from"
        peers = f'(ternary {default} {said} (kindIs "invalid" {said}))'
        each["spec"]["ingress"] = self.go.value(
            f'ternary (list (dict "from" {peers})) list (not (empty {peers})) | toJson'
        )

    def scaled(self, spec: dict[str, Any]) -> None:
        spec["minReplicaCount"] = self.go.value("int .Values.autoscaling.minimum")
        spec["maxReplicaCount"] = self.go.value("int .Values.autoscaling.maximum")
        asked = spec["triggers"][0]["metadata"]
        asked["serverAddress"] = self.go.value(".Values.autoscaling.prometheus | quote")
        asked["threshold"] = self.go.value("int .Values.autoscaling.requests | quote")

    def workload(self, each: dict[str, Any]) -> None:
        spec, role = each["spec"], self.roles.get(each["metadata"]["name"])
        if role is None:
            self.front(spec["template"])
            return
        count = self.go.when("if not .Values.autoscaling.enabled", {"replicas": self.go.value("int .Values.replicas")})
        each["spec"] = count | {key: part for key, part in spec.items() if key != "replicas"}
        spec = each["spec"]
        if each["kind"] == "Deployment":
            spec["progressDeadlineSeconds"] = self.go.value("add (mul .Values.life.start_minutes 60) 600")
            self.pod(spec["template"], role)
        else:
            for key in ("leaderTemplate", "workerTemplate"):
                self.pod(spec["leaderWorkerTemplate"][key], role)

    def config_hash(self, *names: str) -> str:
        """An expression."""
        read = " ".join(f'(.Files.Get "files/{name}")' for name in names)
        return f"print {read} | sha256sum | trunc 16"

    def merged(self, own: dict[str, str], said: str) -> str:
        """Labels of ours, which win, and those that a value says."""
        words = " ".join(json.dumps(word) for pair in own.items() for word in pair)
        return self.go.value(f"merge (dict {words}) {said} | toJson")

    def pull_secrets(self) -> dict[str, Any]:
        go = self.go
        each = go.items("range .", [{"name": go.value(". | quote")}])
        return go.when("with .Values.image.pull_secrets", {"imagePullSecrets": each})

    def pod(self, template: dict[str, Any], role: Role) -> None:
        go, old = self.go, template["spec"]
        (server,), (checks,) = old["containers"], old["initContainers"]
        group = template["metadata"]["annotations"].pop("scheduling.k8s.io/group-name")
        script = server["args"][0].rpartition("/")[2]
        ours = f'(dict "{CONFIG}" ({self.config_hash(script, "health.sh")}))'
        gang = f'(ternary (dict "scheduling.k8s.io/group-name" "{group}") (dict) .Values.scheduling.pod_group)'
        template["metadata"] = {
            "labels": self.merged(template["metadata"]["labels"], ".Values.scheduling.labels"),
            "annotations": go.value(f"merge {gang} {ours} .Values.scheduling.annotations | toJson"),
        }
        old["securityContext"]["supplementalGroups"] = [go.value("int .Values.security.device_group")]
        template["spec"] = {
            "hostNetwork": go.value("$host"),
            "dnsPolicy": go.value('ternary "ClusterFirstWithHostNet" "ClusterFirst" $host'),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": go.value(GRACE),
            "securityContext": old["securityContext"],
            **go.when("with .Values.scheduling.node_selector", {"nodeSelector": go.value("toJson .")}),
            **go.when("with .Values.scheduling.tolerations", {"tolerations": go.value("toJson .")}),
            **go.when("with $scheduler", {"schedulerName": go.value(". | quote")}),
            **go.when("with .Values.scheduling.priority_class", {"priorityClassName": go.value(". | quote")}),
            **self.pull_secrets(),
            **go.when("if .Values.life.check", {"initContainers": [self.checks(checks, role)]}),
            "containers": [self.server(server, role)],
            "volumes": self.volumes(old["volumes"]),
        }

    def server(self, container: dict[str, Any], role: Role) -> dict[str, Any]:
        go = self.go
        if role.engine != SGLANG:
            container["args"][-1] = go.value("int .Values.life.drain_s | quote")
        container["lifecycle"]["preStop"]["exec"]["command"][-1] = go.value("int .Values.life.leave_s | quote")
        periods = f"div (mul .Values.life.start_minutes 60) {STARTUP_PERIOD_S}"
        container["startupProbe"]["failureThreshold"] = go.value(periods)
        if role.engine != SGLANG and "livenessProbe" in container:
            command = container["livenessProbe"]["exec"]["command"]
            command[-1] = f"{command[-1].rpartition(' ')[0]} {go.value('mul .Values.life.still_minutes 60')}"
        self.key(container)
        if role.nodes > 1:
            nic = [{"name": "NIC", "value": go.value(". | quote")}]
            container["env"] += go.items("with .Values.network.nic", nic)
        return self.checks(container, role)

    def checks(self, container: dict[str, Any], role: Role) -> dict[str, Any]:
        """What judges the server gets the same flags and variables."""
        go = self.go
        container["args"] += go.items("range .Values.server.flags", [go.value(". | quote")])
        variable = {"name": go.value("$name | quote"), "value": go.value("$value | quote")}
        container["env"] += go.items("range $name, $value := .Values.server.env", [variable])
        return self.container(container, role)

    def key(self, container: dict[str, Any]) -> None:
        """The key of a Secret, or the word that none is meant."""
        go, variables = self.go, container["env"]
        place = [each["name"] for each in variables].index(KEY_VARIABLE)
        variables[place]["valueFrom"]["secretKeyRef"]["name"] = go.value(".Values.auth.api_key_secret | quote")
        opened = {"name": "OPEN", "value": "1"}
        variables[place : place + 1] = go.items("if .Values.auth.open", [opened], [variables[place]])

    def container(self, container: dict[str, Any], role: Role) -> dict[str, Any]:
        """What both containers of a server's pod share."""
        go = self.go
        self.image(container, ".Values.image.digest")
        sizes = f'dict "values" .Values.resources "dies" {image.dies(role)}'
        container["resources"] = go.value(f'include "glm5.resources" ({sizes})')
        (model,) = [each for each in container["volumeMounts"] if each["name"] == "model"]
        model |= go.when("with .Values.storage.claim_path", {"subPath": go.value(". | quote")})
        user = {
            "runAsUser": go.value("int .Values.security.user"),
            "runAsNonRoot": go.value("ne (int .Values.security.user) 0"),
        }
        container["securityContext"] |= {
            "readOnlyRootFilesystem": go.value(".Values.security.read_only_root"),
            "capabilities": {"drop": ["ALL"], "add": go.value("toJson .Values.security.capabilities")},
            **go.when('if not (kindIs "invalid" .Values.security.user)', user),
        }
        return container

    def image(self, container: dict[str, Any], digest: str) -> None:
        name, _, tag = container["image"].rpartition(":")
        said = f'dict "values" .Values.image "name" "{name}" "tag" "{tag}" "digest" {digest}'
        container["image"] = self.go.value(f'include "glm5.image" ({said}) | quote')
        container["imagePullPolicy"] = self.go.value(".Values.image.pull_policy")

    def volumes(self, volumes: list[dict[str, Any]]) -> list[Any]:
        go, made = self.go, []
        for each in volumes:
            if each["name"] == "shm":
                each["emptyDir"]["sizeLimit"] = go.value(".Values.resources.shm | quote")
            elif each["name"] == "glm5":
                each["emptyDir"]["sizeLimit"] = go.value(".Values.storage.logs | quote")
            if each["name"] == "model":
                claim = {"claimName": go.value(". | quote"), "readOnly": True}
                of_claim = {"name": "model", "persistentVolumeClaim": claim}
                made += go.items("with .Values.storage.claim", [of_claim], [each])
            else:
                made.append(each)
        return made

    def front(self, template: dict[str, Any]) -> None:
        """A router or a proxy."""
        go, spec = self.go, template["spec"]
        (container,) = spec["containers"]
        digest = ".Values.image.router_digest" if container["name"] == "router" else ".Values.image.digest"
        self.image(container, digest)
        self.key(container)
        container["lifecycle"]["preStop"]["exec"]["command"][-1] = go.value("int .Values.life.leave_s | quote")
        read = self.config_hash(container["args"][0].rpartition("/")[2])
        template["metadata"]["annotations"][CONFIG] = go.value(f"{read} | quote")
        spec["terminationGracePeriodSeconds"] = go.value(GRACE)
        spec |= self.pull_secrets()
