"""The report of `accept`: one JSON object and one HTML page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from glm5_ascend.deploy.acceptance.journal import FAILED, NOT_RUN, WARNING, StepResult
from glm5_ascend.errors import EXIT_CHECK_FAILED, EXIT_OK
from glm5_ascend.report import page
from glm5_ascend.report.content import Card, Code, Page, Section, Table
from glm5_ascend.report.header import ReportHeader, without_login
from glm5_ascend.report.verdict import Grade, ReportVerdict

NAME = "accept.html"


def check_path(folder: Path) -> None:
    """Raise OutputError if the page cannot be written."""
    page.check_path(folder / NAME)


def report(results: Sequence[StepResult], header: ReportHeader, *, simulated: bool) -> dict[str, Any]:
    """Head of accept.json; `accepted`: every step ran, none failed."""
    names = {status: [r.name for r in results if r.status == status] for status in (FAILED, WARNING, NOT_RUN)}
    accepted = not names[FAILED] and not names[NOT_RUN]
    ok = accepted or (simulated and not names[FAILED])
    outcome = "accepted" if accepted else "failed" if names[FAILED] else "not accepted"
    parts = [f"{status}: {', '.join(some)}" for status, some in names.items() if some]
    passed = len(results) - len(names[FAILED]) - len(names[NOT_RUN])
    return {
        "ok": ok, "exit_code": EXIT_OK if ok else EXIT_CHECK_FAILED, "accepted": accepted,
        "verdict": "; ".join([f"{outcome}: {passed} of {len(results)} steps passed", *parts]),
        "date": header.date.isoformat(timespec="seconds"), "command_line": header.command, "machine": header.machine,
        "versions": dict(header.versions), "seconds": round(sum(result.seconds for result in results), 1),
    }  # fmt: skip


def write(
    folder: Path, results: Sequence[StepResult], header: ReportHeader, about: dict[str, Any], report: dict[str, Any]
) -> None:
    """Write the page; raises OutputError."""
    grade: Grade = "poor" if any(r.status == FAILED for r in results) else "good" if report["accepted"] else "open"
    if grade == "good" and any(r.status == WARNING for r in results):
        grade = "fair"
    title = f"{Path(about['checkpoint']).name} by profile {about['profile']}"
    sections = [_steps(results), *_sends(results), *_figures(results), _files(about)]
    verdict = ReportVerdict(grade, report["verdict"], "every step ran, none failed", "")
    intro = [f"Took {report['seconds']:.0f} s. Reference of eval: {about['against']}. Load: {about['workload']}."]
    page.write(folder / NAME, Page(title, header, verdict, intro, list(_cards(results)), sections))


def _steps(results: Sequence[StepResult]) -> Section:
    rows = [[r.name, r.status, f"{r.seconds:.1f}", r.began, without_login(r.verdict)] for r in results]
    return Section("Steps", [Table(["step", "status", "seconds", "start (UTC)", "verdict"], rows)])


def _sends(results: Sequence[StepResult]) -> Iterator[Section]:
    rows = [[result.name, result.send] for result in results if result.send]
    if rows:
        yield Section("Where to report", [Table(["step", "send"], rows)], "accept.json contains all data of this page.")


def _cards(results: Sequence[StepResult]) -> Iterator[Card]:
    figures = {result.name: result.figures for result in results}
    if kl := figures.get("eval", {}).get("kl_mean"):
        yield Card("kl", f"{kl:.4f}", "KL of the server to the reference, nats", "a lower bound")
    for name, label in (("output_tokens_per_s", "tokens per second"), ("tpot_ms", "TPOT, ms"), ("ttft_ms", "TTFT, ms")):
        measured = figures.get("load", {}).get("measured", {}).get(name)
        predicted = figures.get("load", {}).get("predicted", {}).get(name)
        if measured is not None:
            plan = f"plan: {predicted['low']:.4g} to {predicted['high']:.4g}" if predicted else ""
            yield Card(name, f"{measured:.4g}", label, plan)


def _figures(results: Sequence[StepResult]) -> Iterator[Section]:
    for result in results:
        if result.name == "doctor" and "rows" in result.figures:
            rows = [[row["item"], row["status"], row["value"], row["note"]] for row in result.figures["rows"]]
            yield Section("doctor", [Table(["item", "status", "value", "note"], rows)])
        elif result.figures:
            yield Section(result.name, [Code(json.dumps(result.figures, indent=1, ensure_ascii=False))])


def _files(about: dict[str, Any]) -> Section:
    rows = [[file["name"], f"{file['bytes']}", file.get("sha256", "see verify")] for file in about["files"]]
    return Section("Files of the checkpoint", [Table(["file", "bytes", "SHA-256"], rows)])
