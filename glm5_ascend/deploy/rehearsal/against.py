"""Two rehearsals beside each other: which operators their steps call, of two versions or two profiles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from glm5_ascend.deploy.rehearsal.result import FoundWalk, RehearsedRank
from glm5_ascend.errors import ConfigError
from glm5_ascend.files.untrusted import read_json_object


class _Walked(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)
    walk: dict[str, FoundWalk]


class _OtherRank(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)
    role: str
    rank: int
    found: _Walked


class OtherRehearsal(BaseModel):
    """What `rehearse --json` wrote before."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    ranks: list[_OtherRank]


def read_other(path: Path) -> OtherRehearsal:
    """Raises `ConfigError` if it is no answer of `rehearse --json` with operators."""
    fix = "give what `glm5-ascend rehearse ... --json` printed"
    data = read_json_object(path, error=ConfigError, fix=fix)
    try:
        return OtherRehearsal.model_validate(data)
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise ConfigError(f"{path}: {where}: not a rehearsal", fix) from None


def differences(here: Sequence[RehearsedRank], there: OtherRehearsal) -> Iterator[str]:
    """A line for every operator whose number of calls differs, ranks compared in their order."""
    for ours, theirs in zip(here, there.ranks, strict=False):
        place = f"{ours.role} {ours.rank}"
        for step in dict.fromkeys([*ours.found.walk, *theirs.found.walk]):
            calls, other = (counts(walks.get(step)) for walks in (ours.found.walk, theirs.found.walk))
            for line in dict.fromkeys([*other, *calls]):
                if calls[line] != other[line]:
                    yield f"{place}, {step}: {other[line]} -> {calls[line]} x {line}"


def counts(walk: FoundWalk | None) -> Counter[str]:
    """How often each operator is called with these shapes."""
    return Counter() if walk is None else Counter(walk.operators[number] for number in walk.order)
