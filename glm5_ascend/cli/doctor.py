"""`glm5-ascend doctor [DIR] [--profile NAME]`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from glm5_ascend.cli.command import Output, command
from glm5_ascend.deploy.options import DoctorOptions

if TYPE_CHECKING:
    from rich.text import Text

    from glm5_ascend.deploy.diagnosis.machine import DoctorRow


@command("doctor", "doctor", "doctor glm5-w4a8 --profile a3-single-w4a8 -- --max-num-seqs 8", json=True)
def run(options: DoctorOptions, output: Output) -> int:
    """Check this machine, a checkpoint, a profile: versions, engines that work here, and how to fix the rest.

    What follows `--` is checked as flags of the profile's engine that replace the profile's.
    """
    from glm5_ascend.deploy import doctor

    diagnosis = doctor(options)
    if output.json:
        print(json.dumps(diagnosis.to_dict()))
        return diagnosis.exit_code
    from glm5_ascend.report.terminal import STYLES, show, text_console

    console = text_console()
    show(([row.item, _cell(row)] for row in diagnosis.rows), console)
    style = STYLES["ok" if diagnosis.exit_code == 0 else "problem"]
    console.print(diagnosis.verdict, style=style, soft_wrap=True)
    return diagnosis.exit_code


def _cell(row: DoctorRow) -> Text:
    """Value and note of a row; for a problem or a warning the fix and the rule's source."""
    from rich.text import Text

    from glm5_ascend.report.terminal import STYLES

    style = STYLES[row.status]
    if row.status not in ("problem", "warning"):
        return Text(row.value, style).append(f"  ({row.note})" if row.note else "", "dim" if style else "")
    text = Text("" if row.item == row.status else f"{row.status}: ", style).append(row.value, style)
    text.append(f"\nfix: {row.note}" if row.note else "", "")
    return text.append(f"\nsource: {row.source}" if row.source else "", "dim")
