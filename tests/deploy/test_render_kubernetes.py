"""Rendered Kubernetes objects: checked by schemas, by their references, and by the real router."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from glm5_ascend.deploy import render
from glm5_ascend.deploy.profiles.load import load
from glm5_ascend.deploy.rendering.context import ROUTER_VERSION
from glm5_ascend.deploy.rendering.values import NPU_RESOURCE
from glm5_ascend.errors import ConfigError
from tests.deploy.support.judges import tool_environment
from tests.deploy.support.rendered import SHAPES, objects_in, pods_in, written
from tests.support.command import ran, said
from tests.support.programs import PRINTS, stand_in


@pytest.fixture(scope="session")
def kubernetes_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_environment(tmp_path_factory.mktemp("kubernetes") / "venv", "kubernetes-validate")


def test_kubernetes_objects_fit_their_schemas(tmp_path: Path, kubernetes_python: Path) -> None:
    """Core kinds as they are; of a LeaderWorkerSet the wrapper by our schema, its pods as those of Deployments."""
    core: list[dict[str, Any]] = []
    groups: list[dict[str, Any]] = []
    for name in SHAPES:
        objects = kubernetes_objects(tmp_path / name, name).values()
        sets = [item for item in objects if item["kind"] == "LeaderWorkerSet"]
        assert len(sets) == sum(role.nodes > 1 for role in load(name).roles.values())
        groups += sets
        core += [item for item in objects if item["kind"] != "LeaderWorkerSet"]
        templates = [item["spec"]["leaderWorkerTemplate"] for item in sets]
        core += [as_deployment(template[key]) for template in templates for key in ("leaderTemplate", "workerTemplate")]
    code = (
        "import json, sys, jsonschema, kubernetes_validate\n"
        "data = json.load(sys.stdin)\n"
        "for item in data['core']: kubernetes_validate.validate(item, '1.30', strict=True)\n"
        "for item in data['groups']: jsonschema.validate(item, data['schema'])\n"
    )
    schema = json.loads((Path(__file__).parent / "support" / "leaderworkerset.json").read_text())
    said(kubernetes_python, "-c", code, input=json.dumps({"core": core, "groups": groups, "schema": schema}))
    containers = [item["spec"]["template"]["spec"]["containers"][0] for item in core if item["kind"] == "Deployment"]
    npus = {container["name"]: container["resources"]["limits"].get(NPU_RESOURCE) for container in containers}
    assert npus == {"server": "16", "router": None, "proxy": None}


def kubernetes_objects(folder: Path, name: str) -> dict[tuple[str, str], dict[str, Any]]:
    return objects_in(written(folder, name, "k8s"))


def matches(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


@pytest.mark.parametrize("name", SHAPES)
def test_kubernetes_objects_find_one_another(name: str, tmp_path: Path) -> None:
    """Services select pods that listen on their ports, and ConfigMaps have the scripts that pods run."""
    objects, profile = kubernetes_objects(tmp_path / "files", name), load(name)
    pods = pods_in(tmp_path / "files")
    for (_, title), item in objects.items():
        if item["kind"] == "Service":
            # LeaderWorkerSet's controller gives its pods DNS names by a headless Service of the set's own name.
            assert ("LeaderWorkerSet", title) not in objects
            selected = [pod for pod in pods if matches(item["spec"]["selector"], pod["metadata"]["labels"])]
            assert selected
            for pod in selected:
                (container,) = pod["spec"]["containers"]
                assert container["ports"][0]["containerPort"] in [p["targetPort"] for p in item["spec"]["ports"]]
    for pod in pods:
        (container,) = pod["spec"]["containers"]
        script = Path(container["args"][0])
        (mount,) = (m["name"] for m in container["volumeMounts"] if m["mountPath"] == str(script.parent))
        (volume,) = (v for v in pod["spec"]["volumes"] if v["name"] == mount)
        assert script.name in objects["ConfigMap", volume["configMap"]["name"]]["data"]
    if profile.proxy:
        return
    router = objects["Deployment", f"{name}-router"]["spec"]["template"]["spec"]
    (container,) = router["containers"]
    flags = container["args"]
    selector = dict(word.split("=") for word in flags[flags.index("--selector") + 1 :])
    seen = [pod for pod in pods if matches(selector, pod["metadata"]["labels"])]
    port = int(flags[flags.index("--service-discovery-port") + 1])
    assert len(seen) == len(profile.roles)
    assert {pod["spec"]["containers"][0]["ports"][0]["containerPort"] for pod in seen} == {port}
    binding = objects["RoleBinding", f"{name}-router"]
    assert binding["subjects"][0]["name"] == router["serviceAccountName"]
    assert {("ServiceAccount", router["serviceAccountName"]), ("Role", binding["roleRef"]["name"])} <= set(objects)


def call_of_proxy(objects: dict[tuple[str, str], dict[str, Any]], name: str, folder: Path) -> tuple[Any, list[str]]:
    """Variables of the proxy's container, and the words with which its script calls Python."""
    (container,) = objects["Deployment", name]["spec"]["template"]["spec"]["containers"]
    environ = {variable["name"]: variable["value"] for variable in container["env"] if "value" in variable}
    script = folder / "proxy.sh"
    script.write_text(objects["ConfigMap", name]["data"]["proxy.sh"])
    path = {"PATH": stand_in(folder / "bin", "python", PRINTS), "OPEN": "1"}
    return environ, said("bash", script, env=environ | path).split()


def test_the_proxy_is_told_of_every_pod(tmp_path: Path) -> None:
    """Two nodes per role: the names that LWS gives to group 0 of each set, and the ports of every server there."""
    objects, profile = kubernetes_objects(tmp_path / "files", "a3-pd"), load("a3-pd")
    environ, words = call_of_proxy(objects, "a3-pd-proxy", tmp_path)
    assert environ["DECODE_NODES"].split() == ["a3-pd-decode-0.a3-pd-decode", "a3-pd-decode-0-1.a3-pd-decode"]
    assert words[:2] == ["-m", "glm5_ascend.deploy.gate"]
    assert words[2].startswith("/vllm-workspace/vllm-ascend/examples/")
    for role, flag in (("prefill", "--prefiller"), ("decode", "--decoder")):
        count = profile.roles[role].nodes * profile.roles[role].local_ranks
        for option in ("hosts", "ports"):
            start = words.index(f"{flag}-{option}") + 1
            assert not any(word.startswith("--") for word in words[start : start + count])
        hosts = words[words.index(f"{flag}-hosts") + 1 :][:count]
        assert set(hosts) == set(environ[f"{role.upper()}_NODES"].split())


def test_sglangs_router_is_told_of_both_halves(tmp_path: Path) -> None:
    objects = kubernetes_objects(tmp_path / "files", "a3-pd-sglang")
    _, words = call_of_proxy(objects, "a3-pd-sglang-proxy", tmp_path)
    assert words[:3] == ["-m", "sglang_router.launch_router", "--pd-disaggregation"]
    assert words[words.index("--prefill") + 1 :][:2] == ["http://a3-pd-sglang-prefill-http:8000", "8998"]
    assert words[words.index("--decode") + 1] == "http://a3-pd-sglang-decode-http:8000"
    ports = {port["name"]: port["port"] for port in objects["Service", "a3-pd-sglang-prefill-http"]["spec"]["ports"]}
    assert ports == {"http-0": 8000, "store": 24667, "handshake": 8998}
    for half in ("prefill", "decode"):
        pod = objects["Deployment", f"a3-pd-sglang-{half}"]["spec"]["template"]["spec"]["containers"][0]
        assert {"name": "STORE", "value": "a3-pd-sglang-prefill-http"} in pod["env"]


@pytest.mark.long  # installs vllm-router
def test_the_router_accepts_its_flags(tmp_path: Path) -> None:
    """vllm-router's parser reads them; finding pods needs a cluster."""
    python = tool_environment(tmp_path / "venv", f"vllm-router=={ROUTER_VERSION}")
    objects = kubernetes_objects(tmp_path / "files", "a3-2node")
    (container,) = objects["Deployment", "a3-2node-router"]["spec"]["template"]["spec"]["containers"]
    script = tmp_path / "router.sh"
    script.write_text(objects["ConfigMap", "a3-2node-router"]["data"]["router.sh"])
    parser = (
        f"#!{python}\nimport json, sys\nfrom vllm_router.launch_router import parse_router_args\n"
        "print(json.dumps(vars(parse_router_args(sys.argv[1:])), default=str))\n"
    )
    path = {"PATH": stand_in(tmp_path / "bin", "vllm-router", parser), "OPEN": "1"}
    for arguments, environ in ((container["args"][1:], {}), ([], {"WORKERS": "http://a:8000 http://b:8000"})):
        options = json.loads(said("bash", script, *arguments, env=environ | path))
        assert options["service_discovery"] is bool(arguments)
        if arguments:
            assert options["service_discovery_port"] == 8000 and options["worker_urls"] == []
            assert options["selector"] == {"app.kubernetes.io/part-of": "a3-2node", "glm5-ascend/answers": "yes"}
        else:
            assert options["worker_urls"] == ["http://a:8000", "http://b:8000"]
    lost = ran("bash", script, env=path)
    assert lost.returncode != 0 and "WORKERS" in lost.stderr


def as_deployment(template: dict[str, Any]) -> dict[str, Any]:
    labels = template["metadata"]["labels"]
    spec = {"selector": {"matchLabels": labels}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "pods"}, "spec": spec}


@pytest.mark.parametrize("name", [name for name in SHAPES if load(name).proxy])
def test_pd_takes_no_second_group(name: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("replicas: 2")
    with pytest.raises(ConfigError, match="one group"):
        render(name, "k8s", out=tmp_path / "k8s", values=tmp_path / "mine.yaml")


@pytest.mark.parametrize("name", SHAPES)
def test_the_policy_selects_router_and_proxy(name: str, tmp_path: Path) -> None:
    """The policy selects router or proxy; it does not apply to servers on the host's network."""
    objects = kubernetes_objects(tmp_path / "files", name)
    selector = objects["NetworkPolicy", name]["spec"]["podSelector"]["matchLabels"]
    front = objects["Deployment", f"{name}-{'proxy' if load(name).proxy else 'router'}"]["spec"]["template"]
    assert matches(selector, front["metadata"]["labels"])
    (container,) = front["spec"]["containers"]
    assert container["livenessProbe"]["failureThreshold"] * container["livenessProbe"]["periodSeconds"] >= 180
