"""Values that shells, compose and Kubernetes would read as something else are refused, or end as themselves."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from glm5_ascend.deploy import render
from glm5_ascend.errors import ConfigError
from tests.deploy.support.rendered import pods_in
from tests.support.command import ran
from tests.support.programs import PRINTS, stand_in

HOSTILE = (
    "/m}x", "/a:rw", "/a b", "/a'b", '/a"b', "/a\nb", "/$(id)", "/${HOME}", "/`id`", "/a\\b", "/a;b", "/a&b", "/a|b",
    "/a#b", "/a*b", "/a?b", "/a[b]", "/a{head}b", "/a<b", "/a>b", "/a!b", "/a\x1bb", "/a\x00b", "relative", "", "~/x",
)  # fmt: skip
PLAIN = "/models/glm-5_w4a8+x=1,y@2%n/字.d"


@pytest.mark.parametrize("model", HOSTILE)
def test_what_is_no_plain_path_is_refused(model: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        render("a3-single-w4a8", "k8s", model=model, out=tmp_path / "out")
    assert error.value.message.isprintable() and error.value.tip
    assert not (tmp_path / "out").exists()


def test_values_of_a_cluster_end_as_themselves(tmp_path: Path) -> None:
    """Texts that YAML, jinja2 or a shell could read as something else."""
    texts = [
        "{{ 7 * 7 }}",
        "{% raw %}",
        "$(id)",
        "a: b # c",
        "- x",
        "[a, b]",
        "{a: 1}",
        "yes",
        "1e3",
        "0o17",
        "~",
        "'\"",
        "&a",
        "字\u2028",
    ]
    env = {f"V{i}": f"{text}\n{text}" for i, text in enumerate(texts)}
    labels = {f"l{i}": text for i, text in enumerate(texts)}
    values = {
        "server": {"flags": ["--served-model-name", *texts], "env": env},
        "scheduling": {"labels": labels, "tolerations": [labels]},
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(values))
    render("a3-single-w4a8", "k8s", out=tmp_path / "k8s", values=tmp_path / "mine.yaml")
    objects = list(yaml.safe_load_all((tmp_path / "k8s" / "server.yaml").read_text()))
    (template,) = (item["spec"]["template"] for item in objects if item["kind"] == "Deployment")
    (server,) = template["spec"]["containers"]
    assert server["args"][-len(texts) :] == texts and template["spec"]["tolerations"] == [labels]
    assert env.items() <= {variable["name"]: variable.get("value") for variable in server["env"]}.items()
    assert labels.items() <= template["metadata"]["labels"].items()


def run_script(path: Path, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """The script with a `vllm` that prints its arguments, one a line."""
    env = {"PATH": stand_in(folder / "bin", "vllm", PRINTS), "OPEN": "1", **variables}
    return ran("bash", path, env=env)


def test_a_plain_path_ends_as_itself(tmp_path: Path) -> None:
    render("a3-single-w4a8", "shell", model=PLAIN, out=tmp_path / "shell")
    (script,) = (tmp_path / "shell").glob("serve-*.sh")
    done = run_script(script, tmp_path)
    assert done.returncode == 0 and PLAIN in done.stdout.splitlines(), done.stderr
    render("a3-single-w4a8", "compose", model=PLAIN, out=tmp_path / "compose")
    (service,) = yaml.safe_load((tmp_path / "compose" / "compose.yaml").read_text())["services"].values()
    assert f"{PLAIN}:{PLAIN}:ro" in service["volumes"]
    render("a3-single-w4a8", "k8s", model=PLAIN, out=tmp_path / "k8s")
    containers = [container for pod in pods_in(tmp_path / "k8s") for container in pod["spec"]["containers"]]
    assert PLAIN in [mount["mountPath"] for container in containers for mount in container["volumeMounts"]]


@pytest.mark.parametrize("node", ["-1", "99", "2", "x y", "1x", "$(touch executed)", "a[$(touch executed)]", "1e0"])
def test_a_node_that_the_role_does_not_have(node: str, tmp_path: Path) -> None:
    render("a3-2node", "shell", out=tmp_path / "shell")
    for script in (tmp_path / "shell").glob("serve-*.sh"):
        done = run_script(script, tmp_path, NODE=node, HEAD="10.0.0.1", IP="10.0.0.2", NIC="eth0")
        assert done.returncode == 2 and done.stdout == "", done.stdout
        assert done.stderr == f"error: NODE={node}: not a number from 0 to 1\n"
    assert not list(Path.cwd().glob("executed"))
