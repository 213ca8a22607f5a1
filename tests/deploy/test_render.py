"""Rendered files: checked by shellcheck and docker-compose, and run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml

from glm5_ascend.deploy.profiles.command import command
from glm5_ascend.deploy.profiles.load import Profile, Role, load, names
from glm5_ascend.deploy.rendering.files import TARGETS, rendered_texts
from glm5_ascend.deploy.rendering.templates import rendered
from glm5_ascend.errors import ConfigError
from glm5_ascend.serve.middleware import GUARDS
from tests.deploy.support.judges import program
from tests.deploy.support.rendered import SHAPES, placed, written
from tests.support.command import ROOT, said
from tests.support.programs import stand_in

PLACES = [
    (profile, role, node, rank)
    for profile in map(load, SHAPES)
    for role in profile.roles.values()
    for node in sorted({0, role.nodes - 1})
    for rank in sorted({0, role.local_ranks - 1 if role.per_rank else 0})
]
#: Stub of the engine: writes its arguments and environment.
RECORDER = """#!/usr/bin/env python3
import json, os, sys, time
out = os.path.join(os.environ["RECORD"], str(os.getpid()))
with open(out + ".part", "w") as file:
    json.dump({"argv": sys.argv[1:], "env": dict(os.environ)}, file)
os.rename(out + ".part", out + ".json")
expected = int(os.environ.get("STAY", 0))  # the script ends all servers when one ends: wait for the others
while len([name for name in os.listdir(os.environ["RECORD"]) if name.endswith("json")]) < expected:
    time.sleep(0.05)
"""


@pytest.fixture
def started(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Run a rendered script; returns arguments and environment of each `vllm`."""

    def run(profile: Profile, role: Role, node: int, *arguments: str, **environ: str) -> list[dict[str, object]]:
        folder, record = written(tmp_path / "files", profile.name, "shell"), tmp_path / "record"
        record.mkdir()
        for name in ("vllm", "python"):  # SGLang's program is a module
            path = stand_in(tmp_path / "bin", name, RECORDER)
        variables = {"NODE": str(node), "HEAD": "10.0.0.1", "IP": "10.0.0.2", "NIC": "eth0", "STORE": "10.0.0.1"}
        env = {"PATH": path, "RECORD": str(record), **variables, "OPEN": "1", **environ}
        if role.per_rank:
            env["STAY"] = str(role.local_ranks)
        said("bash", folder / f"serve-{role.name}.sh", *arguments, env=env)
        return [json.loads(path.read_text()) for path in record.glob("*.json")]

    return run


@pytest.mark.parametrize(("profile", "role", "node", "rank"), PLACES, ids=lambda v: getattr(v, "name", str(v)))
def test_the_script_starts_what_serve_starts(started, profile: Profile, role: Role, node: int, rank: int) -> None:  # type: ignore[no-untyped-def]
    expected = command(profile, role, placed(node, rank), "/models/glm5", [])
    calls = started(profile, role, node)
    assert len(calls) == (role.local_ranks if role.per_rank else 1)
    (call,) = (call for call in calls if call["argv"] == expected.argv[1:])
    assert {name: call["env"][name] for name in expected.env} == expected.env


def test_the_script_reads_what_the_image_has_for_terminals(started, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """CANN's files as they are: they use what is not set, may fail, and read arguments, if there are any."""
    texts = {
        "ascend-toolkit/set_env.sh": "export TOOLKIT=$NOT_SET:1\nfalse\n",
        "cann-9.1.0/share/info/ascendnpu-ir/bin/set_env.sh": "export COMPILER=1\n",
        "nnal/atb/set_env.sh": 'export ATB="$#"\n',
    }
    for name, text in texts.items():
        (tmp_path / "cann" / name).parent.mkdir(parents=True)
        (tmp_path / "cann" / name).write_text(text)
    profile = load("a3-single-w4a8")
    flags = ("--max-num-seqs", "2")
    mapped = Path("/proc/self/maps").read_text().splitlines()
    library = next(line.split()[-1] for line in mapped if "/libm" in line)  # any, in the place of jemalloc
    places = {"CANN": str(tmp_path / "cann"), "JEMALLOC": library, "LD_LIBRARY_PATH": "/a"}
    (call,) = started(profile, profile.role(None), 0, *flags, **places)
    expected = {"TOOLKIT": ":1", "COMPILER": "1", "ATB": "0"}
    expected |= {"LD_LIBRARY_PATH": "/a:/usr/local/lib", "LD_PRELOAD": library}
    assert {name: call["env"].get(name) for name in expected} == expected
    assert call["argv"][-2:] == list(flags)


def test_a_script_of_sglang_asks_for_what_it_needs() -> None:
    for profile, words in (("a3-2node-sglang", {"HEAD", "NIC"}), ("a3-pd-sglang", {"STORE"})):
        for name, text in rendered_texts(load(profile), "shell", "/m").items():
            if name.startswith("serve-"):
                asked = {line.split("=")[0] for line in text.splitlines() if ":?" in line}
                assert asked == words, name


def test_the_script_lets_the_user_win(started) -> None:  # type: ignore[no-untyped-def]
    profile = load("a3-single-w4a8")
    (call,) = started(profile, profile.role(None), 0, "--max-num-seqs", "2", HCCL_BUFFSIZE="1024", MODEL="/m")
    assert call["argv"][1] == "/m" and call["argv"][-2:] == ["--max-num-seqs", "2"]
    assert call["env"]["HCCL_BUFFSIZE"] == "1024"


def test_the_script_guards_a_server_with_a_key(started) -> None:  # type: ignore[no-untyped-def]
    """A script without a key runs in an image without this package, too."""
    profile = load("a3-single-w4a8")
    (call,) = started(profile, profile.role(None), 0, VLLM_API_KEY="k", MODEL="/m")
    assert call["argv"][-len(GUARDS) :] == list(GUARDS)


def test_scripts_pass_shellcheck(tmp_path: Path) -> None:
    folders = [written(tmp_path / name, name, "shell") for name in ("cpu", *SHAPES)]
    scripts = [script for folder in folders for script in sorted(folder.glob("*.sh"))]
    (tmp_path / "checks.sh").write_text(rendered("checks.sh.j2"))
    scripts += [tmp_path / "checks.sh", ROOT / "deploy/run-in-container.sh"]
    said(program("shellcheck", "shellcheck"), "--shell=bash", *scripts)


@pytest.mark.parametrize("name", SHAPES)
def test_compose_files_are_accepted(name: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "files", name, "compose")
    compose = program("docker-compose", "docker-compose")
    shown = yaml.safe_load(said(compose, "-f", folder / "compose.yaml", "config"))
    for role in load(name).roles.values():
        service = shown["services"][role.name]
        dies = [device for device in service["devices"] if "davinci_manager" not in device and "davinci" in device]
        assert len(dies) == role.local_ranks * role.rank_dies
        assert (folder / service["build"]["dockerfile"]).is_file()
        mounted = [volume.split(":")[0] for volume in service["volumes"]]
        assert str(folder / f"serve-{role.name}.sh") in mounted and "/models/glm5" in mounted
        servers = role.local_ranks if role.per_rank else 1
        assert f"health.sh 127.0.0.1 {role.port} {servers} " in service["healthcheck"]["test"][1]


@pytest.mark.parametrize(("profile", "target"), [("cpu", "k8s"), ("cpu", "compose"), ("a3-1m", "nomad")])
def test_what_cannot_be_rendered_is_refused(profile: str, target: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rendered_texts(load(profile), target, "/m")
    assert caught.value.tip


def test_the_command_writes_every_target_once(tmp_path: Path) -> None:
    from glm5_ascend.cli import run

    for target in TARGETS:
        arguments = ["deploy", "render", "--profile", "a3-pd", "--to", target, "--out", str(tmp_path / target)]
        assert run(arguments) == 0
        assert run(arguments) == 2  # the folder is no longer empty
        name = "base/proxy.yaml" if target == "kustomize" else "proxy.sh"
        assert (tmp_path / target / name).is_file()
    assert os.access(tmp_path / "shell" / "serve-decode.sh", os.X_OK)


def test_the_command_tells_in_json_what_the_function_returns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from glm5_ascend.cli import run
    from glm5_ascend.deploy import render

    rendered = render("a3-1m", to="shell", out=str(tmp_path / "one")).to_dict()
    assert rendered["files"] == [str(tmp_path / "one" / name) for name in ("serve-server.sh", "router.sh", "health.sh")]
    arguments = ["deploy", "render", "--profile", "a3-1m", "--to", "shell", "--out", str(tmp_path / "two"), "--json"]
    assert run(arguments) == 0
    assert json.loads(capsys.readouterr().out.replace("two", "one")) == rendered
    assert run(["deploy", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["profiles"]
    assert [profile["name"] for profile in listed] == names()
    assert "mtp" in listed[0]["on"]
    assert run(["deploy", "list"]) == 0
    assert listed[0]["title"].split()[0] in capsys.readouterr().out
