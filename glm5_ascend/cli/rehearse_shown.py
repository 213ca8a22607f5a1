"""A rehearsal as a table on the console and as a page."""

from __future__ import annotations

from collections.abc import Iterator

from glm5_ascend.deploy.rehearsal.result import TOLERANCE, Rehearsal, RehearsedRank
from glm5_ascend.report.content import Page, Section, Table
from glm5_ascend.report.header import make_header
from glm5_ascend.report.verdict import ReportVerdict

HEAD = ("role", "rank", "parameters GB", "planner", "alive GB", "cache B/token", "planner", "cached tokens", "verdict")


def row(rank: RehearsedRank) -> list[str]:
    """Cells of a rank; "-" for an unknown value."""
    measured, off = rank.found, rank.differences
    cache = "-" if measured.cache is None else f"{measured.cache.bytes_per_token:,.0f}"
    tokens = "-" if rank.cached_tokens is None else f"{rank.cached_tokens:,}"
    return [
        rank.role, f"{rank.rank} of {rank.world}", _gb(measured.parameter_bytes), _percent(off.get("parameters")),
        _gb(measured.resident_bytes), cache, _percent(off.get("cache")), tokens,
        "ok" if not rank.problems else f"{len(rank.problems)} problem" + ("" if len(rank.problems) == 1 else "s"),
    ]  # fmt: skip


def show(rehearsal: Rehearsal) -> None:
    """Print the table, every problem once, and the verdict."""
    from rich.console import Console

    from glm5_ascend.report.terminal import STYLES
    from glm5_ascend.report.terminal import show as table

    console = Console(highlight=False)
    table([HEAD, *map(row, rehearsal.ranks)], console, right=(2, 3, 4, 5, 6, 7))
    for line in notes(rehearsal):
        console.print(line, markup=False, soft_wrap=True)
    style = STYLES["ok" if rehearsal.exit_code == 0 else "problem"]
    console.print(rehearsal.verdict, style=style, markup=False, soft_wrap=True)


def notes(rehearsal: Rehearsal) -> Iterator[str]:
    """Lines on problems with their ranks, and on the planner's error."""
    problems: dict[str, list[str]] = {}
    for rank in rehearsal.ranks:
        for problem in rank.problems:
            problems.setdefault(problem, []).append(f"{rank.role} {rank.rank}")
    for problem, ranks in problems.items():
        yield f"problem: {problem} ({', '.join(ranks)})"
    if rehearsal.against is not None:
        yield f"{len(rehearsal.against)} differences in operators from the other rehearsal (calls there -> here)"
        yield from rehearsal.against
    for name in ("parameters", "cache"):
        off = max((abs(rank.differences.get(name, 0.0)) for rank in rehearsal.ranks), default=0.0)
        if off > TOLERANCE:
            yield f"note: the planner's {name} are off by up to {off:.2f} %"


def page(rehearsal: Rehearsal) -> Page:
    """The report page: all ranks, their problems, and parameters that the loader left at their default."""
    defaults = [
        [f"{rank.role} {rank.rank}", name, str(model.left_at_default.count), ", ".join(model.left_at_default.first[:5])]
        for rank in rehearsal.ranks
        for name, model in rank.found.models.items()
        if model.left_at_default is not None and model.left_at_default.count
    ]
    times = [
        [f"{rank.role} {rank.rank}", f"{sum(rank.found.seconds.values()):.0f}", _gb(rank.found.peak_bytes)]
        for rank in rehearsal.ranks
    ]
    return Page(
        title=f"Rehearsal of {rehearsal.profile}",
        header=make_header(),
        verdict=ReportVerdict("good" if rehearsal.exit_code == 0 else "poor", rehearsal.verdict, "no problem in any rank", WHY),
        intro=(f"{rehearsal.checkpoint}; " + ", ".join(f"{name} {version}" for name, version in rehearsal.versions.items()),),
        sections=(
            Section("Ranks", [Table(HEAD, [row(rank) for rank in rehearsal.ranks])], after=list(notes(rehearsal))),
            Section(
                "Left at their default", [Table(("rank", "model", "parameters", "first"), defaults)],
                "Parameters with a value in the code that the checkpoint does not set.",
            ),
            Section("Time and memory of the rehearsal", [Table(("rank", "seconds", "GB"), times)]),
        ),
    )  # fmt: skip


WHY = "a server with one such rank does not start, or computes with uninitialised weights"


def _gb(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e9:.3f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2f} %"
