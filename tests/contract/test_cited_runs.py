"""What a profile says of the run of vllm-ascend's CI that it follows: the file in the release, switch by switch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from glm5_ascend.deploy.profiles.command import ServerPlace, command
from glm5_ascend.deploy.profiles.load import Profile, load, names
from tests.contract.support.cited_run import only_server, servers, switches
from tests.contract.support.tiny_glm5 import tiny_glm5
from tests.contract.support.vllm_ascend import VllmAscend

pytestmark = pytest.mark.contract
CITING = [profile for profile in map(load, names()) if profile.cited is not None]


@pytest.fixture(scope="module")
def sources(vllm_ascend_030: VllmAscend, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vllm_ascend_030.sources(tmp_path_factory.mktemp("sources")).parent


def test_some_profiles_cite_a_run() -> None:
    assert {"a3-pd", "a3-single-w4a8-conservative"} <= {profile.name for profile in CITING}


@pytest.mark.parametrize("profile", CITING, ids=lambda profile: profile.name)
def test_every_difference_is_named_and_no_other(profile: Profile, sources: Path, vllm_ascend_030: VllmAscend) -> None:
    run = profile.cited
    assert run is not None and run.version == str(vllm_ascend_030.version)
    theirs = servers(sources / run.file)
    assert set(theirs) == set(profile.roles)
    for name, role in profile.roles.items():
        built = command(profile, role, ServerPlace(0, 0, "127.0.0.1", "127.0.0.1", "lo"), "DIR", [])
        ours = switches(built.env, built.argv[3:])
        other = {switch for switch in ours.keys() | theirs[name].keys() if ours.get(switch) != theirs[name].get(switch)}
        print(name, sorted(f"{switch}: {theirs[name].get(switch)} -> {ours.get(switch)}" for switch in other))
        assert other == set(run.differs.get(name, {}))


def test_the_engine_makes_the_same_of_the_conservative_profile(
    sources: Path, vllm_ascend_030: VllmAscend, tmp_path: Path
) -> None:
    """Switches that the run does not set are defaults of vLLM and vllm-ascend, read from their configuration code."""
    profile, model = load("a3-single-w4a8-conservative"), str(tiny_glm5(tmp_path))
    assert profile.cited is not None
    role = profile.role(None).for_version(vllm_ascend_030.version)
    ours = command(profile, role, ServerPlace(), model, [])
    env, line = only_server(sources / profile.cited.file)
    theirs = ["vllm", "serve", model, *("8000" if word == "$SERVER_PORT" else word for word in line)]
    asked = {"ours": {"env": ours.env, "argv": ours.argv}, "theirs": {"env": env, "argv": theirs}}
    (tmp_path / "commands.json").write_text(json.dumps(asked))
    vllm_ascend_030.run("profiles", tmp_path / "commands.json", tmp_path / "out.json")
    became = json.loads((tmp_path / "out.json").read_text())["commands"]
    assert "error" not in became["theirs"], became["theirs"]
    assert became["ours"]["became"] == became["theirs"]["became"]
