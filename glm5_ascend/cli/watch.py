"""`glm5-ascend watch URL`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from glm5_ascend.cli.command import Output, command
from glm5_ascend.errors import EXIT_OK, json_frame, printable
from glm5_ascend.serve.options import WatchOptions

if TYPE_CHECKING:
    from glm5_ascend.serve.watching.poll import WatchPoll

#: Polls of `--once`: a fault in one poll alone may be an accident.
ONCE = 2


@command(
    "watch", "watch http://127.0.0.1:8000 --learn canaries.json",
    "watch http://127.0.0.1:8000 --canaries canaries.json", "watch http://127.0.0.1:8000 --once", json=True,
)  # fmt: skip
def run(options: WatchOptions, output: Output) -> int:
    """Watch a server for garbage: known questions, log-probabilities, repeats, empty tool calls."""
    from glm5_ascend.serve.watching import api
    from glm5_ascend.serve.watching.canaries import learn_canaries

    url, file, key = options.url, options.learn, os.environ.get("OPENAI_API_KEY", "")
    if file is not None:
        recorded = learn_canaries(url, file, canaries=options.canaries, key=key)
        count = len(recorded.canaries)
        text = f"wrote {file}: {count} canaries; glm5-ascend watch {url} --canaries {file}"
        output.write(json_frame("watch") | {"file": str(file), "canaries": count}, [printable(text)])
        return EXIT_OK
    polls, interval = (ONCE, 0.0) if options.once else (0, api.INTERVAL_S)
    result = api.watch(
        url, canaries=options.canaries, polls=polls, interval=interval, textfile=options.textfile, key=key,
        on_poll=None if output.json else PollPrinter().show,
    )  # fmt: skip
    output.write(result.to_dict(), [printable(result.verdict)])
    return result.exit_code


class PollPrinter:
    """Prints a line for each poll with other findings than the last one."""

    def __init__(self) -> None:
        self.last: tuple[bool, frozenset[str]] | None = None

    def show(self, polls: int, poll: WatchPoll) -> None:
        current = poll.reached, frozenset(poll.findings)
        if current != self.last:
            findings = "; ".join(f"{name}: {text}" for name, text in poll.findings.items()) or "healthy"
            print(printable(f"poll {polls}: {findings if poll.reached else 'no answer'}"), flush=True)
            for line in poll.messages[:3] if poll.findings or not poll.reached else ():
                print(printable(f"  {line}"), flush=True)
        self.last = current
