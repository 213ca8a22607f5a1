"""`python -m glm5_ascend` and the console script: signals are handled before anything large is imported."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from glm5_ascend.stop_signals import StopSignals


def _fill_closed_streams() -> None:
    """`2>&-`: no file that we open may become descriptor 1 or 2, where libraries print messages."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    if sys.stderr is None:  # `print` would take stdout instead
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115  # as long as the process


def main() -> NoReturn:
    """Run the command line from the first import to the last line of output."""
    _fill_closed_streams()
    signals = StopSignals().install()
    from glm5_ascend.cli import end

    end(signals)


if __name__ == "__main__":
    main()
