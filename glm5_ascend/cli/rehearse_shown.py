"""A rehearsal as a table on the console and as a page."""

from __future__ import annotations

from collections.abc import Iterator

from glm5_ascend.deploy.rehearsal.result import TOLERANCE, Rehearsal, RehearsedRank
from glm5_ascend.report.content import Page, Section, Table
from glm5_ascend.report.header import make_header
from glm5_ascend.report.verdict import ReportVerdict

HEAD = ("role", "rank", "parameters GB", "planner", "alive GB", "cache B/token", "planner", "cached tokens", "verdict")


def row(rank: RehearsedRank) -> list[str]:
    """One line of the table; what is not known is a dash."""
    found, off = rank.found, rank.differences
    cache = "-" if found.cache is None else f"{found.cache.bytes_per_token:,.0f}"
    tokens = "-" if rank.cached_tokens is None else f"{rank.cached_tokens:,}"
    return [
        rank.role, f"{rank.rank} of {rank.world}", _gb(found.parameter_bytes), _percent(off.get("parameters")),
        _gb(found.resident_bytes), cache, _percent(off.get("cache")), tokens,
        "ok" if not rank.problems else f"{len(rank.problems)} problem" + ("" if len(rank.problems) == 1 else "s"),
    ]  # fmt: skip


def show(found: Rehearsal) -> None:
    """Table, then every problem once, then the verdict."""
    from rich.console import Console

    from glm5_ascend.report.terminal import STYLES
    from glm5_ascend.report.terminal import show as table

    console = Console(highlight=False)
    table([HEAD, *map(row, found.ranks)], console, right=(2, 3, 4, 5, 6, 7))
    for line in notes(found):
        console.print(line, markup=False, soft_wrap=True)
    style = STYLES["ok" if found.exit_code == 0 else "problem"]
    console.print(found.verdict, style=style, markup=False, soft_wrap=True)


def notes(found: Rehearsal) -> Iterator[str]:
    """Problems with the ranks that have them, and what the planner's numbers are off by."""
    said: dict[str, list[str]] = {}
    for rank in found.ranks:
        for problem in rank.problems:
            said.setdefault(problem, []).append(f"{rank.role} {rank.rank}")
    for problem, ranks in said.items():
        yield f"problem: {problem} ({', '.join(ranks)})"
    if found.against is not None:
        yield f"{len(found.against)} differences in operators from the other rehearsal (calls there -> here)"
        yield from found.against
    for name in ("parameters", "cache"):
        off = max((abs(rank.differences.get(name, 0.0)) for rank in found.ranks), default=0.0)
        if off > TOLERANCE:
            yield f"note: the planner's {name} are off by up to {off:.2f} %"


def page(found: Rehearsal) -> Page:
    """All ranks, their problems, and what the loader left at its default."""
    defaults = [
        [f"{rank.role} {rank.rank}", name, str(model.left_at_default.count), ", ".join(model.left_at_default.first[:5])]
        for rank in found.ranks
        for name, model in rank.found.models.items()
        if model.left_at_default is not None and model.left_at_default.count
    ]
    times = [
        [f"{rank.role} {rank.rank}", f"{sum(rank.found.seconds.values()):.0f}", _gb(rank.found.peak_bytes)]
        for rank in found.ranks
    ]
    return Page(
        title=f"Rehearsal of {found.profile}",
        header=make_header(),
        verdict=ReportVerdict("good" if found.exit_code == 0 else "poor", found.verdict, "no problem in any rank", WHY),
        intro=(f"{found.checkpoint}; " + ", ".join(f"{name} {version}" for name, version in found.versions.items()),),
        sections=(
            Section("Ranks", [Table(HEAD, [row(rank) for rank in found.ranks])], after=list(notes(found))),
            Section(
                "Left at their default", [Table(("rank", "model", "parameters", "first"), defaults)],
                "Parameters that the code makes with a value and the checkpoint says nothing about.",
            ),
            Section("Time and memory of the rehearsal", [Table(("rank", "seconds", "GB"), times)]),
        ),
    )  # fmt: skip


WHY = "a server with one such rank does not start, or starts and computes with weights that nobody wrote"


def _gb(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e9:.3f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2f} %"
