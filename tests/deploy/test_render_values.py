"""A cluster's own values in the rendered pods; who may ask."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from glm5_ascend.deploy import render
from glm5_ascend.deploy.profiles.load import load
from glm5_ascend.deploy.rendering.files import rendered_texts
from glm5_ascend.errors import ConfigError
from glm5_ascend.serve.local_server import free_port
from tests.deploy.support.rendered import SHAPES, objects_in, pods_in
from tests.support.command import in_process, ran
from tests.support.server_process import wait_for

VALUES = """\
namespace: models
replicas: 2
auth: {api_key_secret: keys}
image: {registry: registry.example/team, digest: "sha256:%s", pull_secrets: [pull]}
resources: {npu: huawei.com/ascend-1980, cpu: "125", memory: 512Gi}
network: {nic: bond0}
scheduling: {node_selector: {accelerator: a3}, tolerations: [{key: npu, operator: Exists}], pod_group: true}
storage: {claim: weights, claim_path: glm5}
life: {drain_s: 600, leave_s: 5}
server: {flags: [--max-num-seqs, "8"], env: {HCCL_IF_BASE_PORT: "50000"}}
""" % ("0" * 64)


def test_values_reach_every_server(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(VALUES)
    render("a3-2node", "k8s", out=tmp_path / "out", values=tmp_path / "mine.yaml")
    assert (tmp_path / "mine.yaml").read_text() == VALUES
    pods = [template["spec"] for template in pods_in(tmp_path / "out")]
    servers = [pod for pod in pods if pod["containers"][0]["name"] == "server"]
    assert len(servers) == 2
    for pod in servers:
        (container,) = pod["containers"]
        assert container["image"] == "registry.example/team/glm5-ascend@sha256:" + "0" * 64
        limits = {"huawei.com/ascend-1980": "16", "cpu": "125", "memory": "512Gi"}
        assert container["resources"] == {"limits": limits, "requests": limits | {"ephemeral-storage": "40Gi"}}
        (checks,) = pod["initContainers"]  # judge what is started
        assert checks["args"][-2:] == container["args"][-2:] == ["--max-num-seqs", "8"]
        assert {"name": "HCCL_IF_BASE_PORT", "value": "50000"} in checks["env"]
        assert {"name": "NIC", "value": "bond0"} in container["env"]
        assert pod["schedulerName"] == "volcano" and pod["nodeSelector"] == {"accelerator": "a3"}
        assert pod["terminationGracePeriodSeconds"] > 605
        assert container["args"][1:] == ["--shutdown-timeout", "600", "--max-num-seqs", "8"]
        assert {"name": "HCCL_IF_BASE_PORT", "value": "50000"} in container["env"]
        assert {"persistentVolumeClaim": {"claimName": "weights", "readOnly": True}, "name": "model"} in pod["volumes"]
    objects = objects_in(tmp_path / "out")
    assert {item["metadata"]["namespace"] for item in objects.values()} == {"models"}
    assert {"PodGroup", "PodDisruptionBudget", "NetworkPolicy"} <= {kind for kind, _ in objects}


@pytest.mark.parametrize("name", SHAPES)
def test_pods_ask_for_no_more_than_they_need(name: str, tmp_path: Path) -> None:
    render(name, "k8s", out=tmp_path / "out")
    for pod in (template["spec"] for template in pods_in(tmp_path / "out")):
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is ("serviceAccountName" in pod)
        assert pod["enableServiceLinks"] is False
        kinds = {item["hostPath"]["path"]: item["hostPath"]["type"] for item in pod["volumes"] if "hostPath" in item}
        assert set(kinds.values()) <= {"File", "Directory"}  # else a kubelet makes a folder of what is missing
        for container in (*pod["containers"], *pod.get("initContainers", [])):
            secured = container["securityContext"]
            assert secured["capabilities"]["drop"] == ["ALL"] and secured["readOnlyRootFilesystem"]
            assert not secured["allowPrivilegeEscalation"]
            requests = container["resources"]["requests"]
            assert container["resources"]["limits"].items() <= requests.items()
            assert container["command"] == ["/bin/bash"] and container["args"][0].startswith("/glm5/")
            assert any(item["name"] == "VLLM_API_KEY" for item in container["env"]) is (container["name"] != "checks")


@pytest.mark.parametrize(
    ("text", "problem"),
    [("replica: 2", "replica"), ("network: {nic: 'a b'}", "network.nic"), ("replicas: '2'", "replicas"), ("- 1", "")],
)
def test_wrong_values_are_refused(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        render("a3-2node", "k8s", out=tmp_path / "out", values=tmp_path / "mine.yaml")
    assert problem in error.value.message and "mine.yaml:1" in error.value.message
    assert not (tmp_path / "out").exists()


def test_targets_without_values_refuse_them(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(VALUES)
    with pytest.raises(ConfigError, match="takes no --values"):
        render("a3-2node", "shell", out=tmp_path / "out", values=tmp_path / "mine.yaml")


@pytest.mark.parametrize("name", ["a3-single-w4a8", "a3-2node", "a3-pd", "a3-pd-sglang", "cpu"])
def test_no_script_starts_open(name: str, tmp_path: Path) -> None:
    """Servers, router and proxy: without a key status 2 and one line, before anything is started."""
    variables = {"NODE": "0", "HEAD": "127.0.0.1", "IP": "127.0.0.1", "NIC": "lo", "STORE": "127.0.0.1"}
    environ = {**variables, "HOST": "0.0.0.0", "WORKERS": "http://a", "PATH": os.environ["PATH"]}
    for file, text in rendered_texts(load(name), "shell", "/m").items():
        if file == "health.sh" or (name, file) == ("cpu", "serve-server.sh"):  # the latter listens on 127.0.0.1
            continue
        (tmp_path / file).write_text(text)
        done = ran("bash", tmp_path / file, env=environ)
        assert done.returncode == 2 and "would answer anyone" in done.stderr and done.stdout == "", file


PROXY = """\
import argparse, uvicorn
from fastapi import FastAPI
app = FastAPI()
app.get("/healthcheck")(lambda: {"ok": True})
app.post("/v1/completions")(lambda: {"answered": True})
if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    uvicorn.run(app, host="127.0.0.1", port=parser.parse_args().port)
"""


def test_a_proxy_behind_the_gate_wants_the_key(tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    (tmp_path / "proxy.py").write_text(PROXY)
    port = free_port()
    command = [sys.executable, "-m", "glm5_ascend.deploy.gate", str(tmp_path / "proxy.py"), "--port", str(port)]
    running = subprocess.Popen(command, env={**os.environ, "VLLM_API_KEY": "secret"}, stderr=subprocess.DEVNULL)

    def status(path: str, key: str | None, data: bytes | None) -> int:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=10) as reply:
                json.load(reply)
                return int(reply.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    try:
        wait_for(lambda: status("/healthcheck", None, None) == 200, "the proxy")
        asked = [status("/v1/completions", key, b"{}") for key in (None, "wrong", "secret")]
        assert asked == [401, 401, 200]
    finally:
        running.terminate()
        running.wait(60)


@pytest.mark.parametrize(
    ("server", "code", "words"),
    [
        ('{env: {VLLM_ASCEND_EN1BLE_MLAPO: "1"}}', 0, "meant: VLLM_ASCEND_ENABLE_MLAPO?"),
        ("{env: {HCCL_BUFFSIZE: 200MB}}", 2, "HCCL_BUFFSIZE=200MB: expected a whole number"),
        ("{flags: [--enable-lora]}", 2, "error P78: --enable-lora with quantized weights"),
        ('{flags: [--max-num-seqs, "8"], env: {VLLM_LOGGING_LEVEL: DEBUG}}', 0, ""),
    ],
)
def test_values_are_judged_as_a_command_line(server: str, code: int, words: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"server: {server}\n")
    where = ["--out", tmp_path / "out", "--values", tmp_path / "mine.yaml"]
    done = in_process(
        "deploy", "render", "--profile", "a3-single-w4a8", "--to", "k8s", "--model", "/models/w4a8", *where
    )
    assert (done.returncode, words in done.stderr) == (code, True), done.stderr
    assert bool(done.stderr) is bool(words) and (tmp_path / "out").exists() is (code == 0)
