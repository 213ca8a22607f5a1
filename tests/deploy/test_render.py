"""Rendered files: judged by shellcheck, docker-compose, Kubernetes' schemas and systemd, and run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from judges import checked, program, tool_environment

from glm5_ascend.errors import ConfigError
from glm5_ascend.profiles.command import Place, command
from glm5_ascend.profiles.load import Profile, Role, load, names
from glm5_ascend.render import TARGETS, render
from glm5_ascend.render.kubernetes import RESOURCE

ATLAS = [name for name in names() if load(name).platform == "npu"]
PLACES = [
    (profile, role, node, rank)
    for profile in map(load, ATLAS)
    for role in profile.roles.values()
    for node in sorted({0, role.nodes - 1})
    for rank in range(role.local_ranks if role.per_rank else 1)
]
#: Stands where vllm would: writes what it was started with. The script is what is tested.
RECORDER = """#!/usr/bin/env python3
import json, os, sys, time
out = os.path.join(os.environ["RECORD"], str(os.getpid()))
with open(out + ".part", "w") as file:
    json.dump({"argv": sys.argv[1:], "env": dict(os.environ)}, file)
os.rename(out + ".part", out + ".json")
wanted = int(os.environ.get("STAY", 0))  # the script ends all servers when one ends: wait for the others
while len([name for name in os.listdir(os.environ["RECORD"]) if name.endswith("json")]) < wanted:
    time.sleep(0.05)
"""


def written(folder: Path, profile: str, target: str) -> Path:
    folder.mkdir()
    for name, text in render(load(profile), target, "/models/glm5").items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def started(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Run a rendered script; returns what each `vllm` was started with."""

    def run(profile: Profile, role: Role, node: int, *arguments: str, **environ: str) -> list[dict[str, object]]:
        folder, record = written(tmp_path / "files", profile.name, "shell"), tmp_path / "record"
        (tmp_path / "bin").mkdir()
        record.mkdir()
        vllm = tmp_path / "bin" / "vllm"
        vllm.write_text(RECORDER)
        vllm.chmod(0o755)
        place = {"NODE": str(node), "HEAD": "10.0.0.1", "IP": "10.0.0.2", "NIC": "eth0"}
        env = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "RECORD": str(record), **place, **environ}
        if role.per_rank:
            env["STAY"] = str(role.local_ranks)
        script = folder / f"serve-{role.name}.sh"
        done = subprocess.run(
            ["bash", script, *arguments], env=env, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(path.read_text()) for path in record.glob("*.json")]

    return run


@pytest.mark.parametrize(("profile", "role", "node", "rank"), PLACES, ids=lambda v: getattr(v, "name", str(v)))
def test_the_script_starts_what_serve_starts(started, profile: Profile, role: Role, node: int, rank: int) -> None:  # type: ignore[no-untyped-def]
    want = command(profile, role, Place(node, rank, "10.0.0.1", "10.0.0.2", "eth0"), "/models/glm5", [])
    found = started(profile, role, node)
    assert len(found) == (role.local_ranks if role.per_rank else 1)
    assert want.argv[1:] in [each["argv"] for each in found]
    (mine,) = (each for each in found if each["argv"] == want.argv[1:])
    assert {name: mine["env"][name] for name in want.env} == want.env


def test_the_script_lets_the_user_win(started) -> None:  # type: ignore[no-untyped-def]
    profile = load("a3-single-w4a8")
    (found,) = started(profile, profile.role(None), 0, "--max-num-seqs", "2", HCCL_BUFFSIZE="1024", MODEL="/m")
    assert found["argv"][1] == "/m" and found["argv"][-2:] == ["--max-num-seqs", "2"]
    assert found["env"]["HCCL_BUFFSIZE"] == "1024"


@pytest.mark.parametrize("name", names())
def test_scripts_pass_shellcheck(name: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "files", name, "shell")
    checked(program("shellcheck", "shellcheck"), "--shell=bash", *sorted(folder.glob("*.sh")))


@pytest.mark.parametrize("name", ATLAS)
def test_compose_files_are_accepted(name: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "files", name, "compose")
    compose = program("docker-compose", "docker-compose")
    shown = yaml.safe_load(checked(compose, "-f", folder / "compose.yaml", "config"))
    for role in load(name).roles.values():
        service = shown["services"][role.name]
        dies = [device for device in service["devices"] if "davinci_manager" not in device and "davinci" in device]
        assert len(dies) == role.local_ranks * role.rank_dies
        assert (folder / service["build"]["dockerfile"]).is_file()
        mounted = [volume.split(":")[0] for volume in service["volumes"]]
        assert str(folder / f"serve-{role.name}.sh") in mounted and "/models/glm5" in mounted


@pytest.fixture(scope="session")
def kubernetes_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_environment(tmp_path_factory.mktemp("kubernetes") / "venv", "kubernetes-validate")


@pytest.mark.parametrize("name", ATLAS)
def test_kubernetes_objects_fit_their_schemas(name: str, tmp_path: Path, kubernetes_python: Path) -> None:
    """Core kinds as they are; of a LeaderWorkerSet the wrapper by a schema of our own, its pods as Deployments'."""
    folder = written(tmp_path / "files", name, "k8s")
    objects = [each for path in sorted(folder.glob("*.yaml")) for each in yaml.safe_load_all(path.read_text())]
    core = [each for each in objects if each["kind"] != "LeaderWorkerSet"]
    groups = [each for each in objects if each["kind"] == "LeaderWorkerSet"]
    for group in groups:
        template = group["spec"]["leaderWorkerTemplate"]
        core += [as_deployment(template[key]) for key in ("leaderTemplate", "workerTemplate")]
    code = (
        "import json, sys, jsonschema, kubernetes_validate\n"
        "given = json.load(sys.stdin)\n"
        "for each in given['core']: kubernetes_validate.validate(each, '1.30', strict=True)\n"
        "for each in given['groups']: jsonschema.validate(each, given['schema'])\n"
        "print(len(given['core']), len(given['groups']))\n"
    )
    schema = json.loads((Path(__file__).parent / "leaderworkerset.json").read_text())
    text = json.dumps({"core": core, "groups": groups, "schema": schema})
    assert checked(kubernetes_python, "-c", code, text=text).split() == [str(len(core)), str(len(groups))]
    roles = load(name).roles.values()
    assert len(groups) == sum(role.nodes > 1 for role in roles)
    for pod in [each["spec"]["template"] for each in core if each["kind"] == "Deployment"]:
        (container,) = pod["spec"]["containers"]
        assert int(container["resources"]["limits"][RESOURCE]) in (8, 16)


def as_deployment(template: dict) -> dict:  # type: ignore[type-arg]
    labels = template["metadata"]["labels"]
    spec = {"selector": {"matchLabels": labels}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "pods"}, "spec": spec}


def test_a_wrong_object_is_refused_by_the_same_judge(tmp_path: Path, kubernetes_python: Path) -> None:
    code = (
        "import json, sys, kubernetes_validate; kubernetes_validate.validate(json.load(sys.stdin), '1.30', strict=True)"
    )
    wrong = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}, "spec": {"port": 1}}
    done = subprocess.run(
        [kubernetes_python, "-c", code], input=json.dumps(wrong), text=True, capture_output=True, check=False
    )
    assert done.returncode != 0


@pytest.mark.parametrize("name", names())
def test_units_are_accepted(name: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "files", name, "systemd")
    units = sorted(folder.glob("*.service"))
    assert len(units) == len(load(name).roles)
    for unit in units:
        (start,) = (line for line in unit.read_text().splitlines() if line.startswith("ExecStart="))
        assert (folder / Path(start.split()[-1]).name).is_file()
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    done = subprocess.run([analyze, "verify", *units], capture_output=True, text=True, check=False)
    complaints = [line for line in done.stderr.splitlines() if folder.name in line or "glm5-" in line]
    assert not [line for line in complaints if "Unknown" in line or "Failed to parse" in line], complaints


@pytest.mark.parametrize(
    ("profile", "target", "model"),
    [("cpu", "k8s", "/m"), ("cpu", "compose", "/m"), ("a3-1m", "helm", "/m"), ("a3-1m", "shell", "a b")],
)
def test_what_cannot_be_rendered_is_refused(profile: str, target: str, model: str) -> None:
    with pytest.raises(ConfigError) as caught:
        render(load(profile), target, model)
    assert caught.value.tip


def test_the_command_writes_every_target_once(tmp_path: Path) -> None:
    from glm5_ascend.cli import run

    for target in TARGETS:
        arguments = ["deploy", "render", "--profile", "a3-pd", "--to", target, "--out", str(tmp_path / target)]
        assert run(arguments) == 0
        assert run(arguments) == 2  # the folder is no longer empty
        assert (tmp_path / target / "proxy.sh").is_file()
    assert os.access(tmp_path / "shell" / "serve-decode.sh", os.X_OK)
    assert run(["deploy", "list"]) == 0
