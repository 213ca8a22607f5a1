"""What a profile says of the run of vllm-ascend's CI that it follows: the file in the release, switch by switch."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm5_ascend.deploy.profiles.command import ServerPlace, command
from glm5_ascend.deploy.profiles.load import Profile, load, names
from tests.contract.support.cited_run import servers, switches
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
        other = {each for each in ours.keys() | theirs[name].keys() if ours.get(each) != theirs[name].get(each)}
        print(name, sorted(f"{each}: {theirs[name].get(each)} -> {ours.get(each)}" for each in other))
        assert other == set(run.differs.get(name, {}))
