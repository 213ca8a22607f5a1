"""A signal at any moment after our first line ends in 130 and one line."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from tests.support.command import environment, interruptible


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_while_it_imports_and_works(number: signal.Signals) -> None:
    """Delays are counted from the moment the handlers are there; none of them must meet a certain import."""
    program = (
        "import os, signal, sys\n"
        "import glm5_ascend.__main__ as start\n"
        "sys.argv = ['glm5-ascend', 'plan', '--model', 'glm-5', '--tails']\n"
        "class Told:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'glm5_ascend.cli': os.write(1, b'.')\n"
        "sys.meta_path.insert(0, Told())\n"
        "start.main()\n"
    )
    for delay in (0.0, 0.02, 0.1, 0.2, 0.4, 0.8):
        run = interruptible(
            [sys.executable, "-c", program],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
        )  # fmt: skip
        assert run.stdout is not None and run.stdout.read(1) == "."
        time.sleep(delay)
        run.send_signal(number)
        _, said = run.communicate(timeout=300)
        assert (run.returncode, said) in ((130, "interrupted\n"), (0, "")), said  # or it had ended before


def test_a_closed_pipe_is_quiet() -> None:
    run = subprocess.run(
        f"{sys.executable} -m glm5_ascend deploy list | head -c 1",
        shell=True, capture_output=True, text=True, check=False, env=environment(), timeout=300,
    )  # fmt: skip
    assert run.stderr == ""


def test_an_ignored_signal_stays_ignored() -> None:
    run = subprocess.Popen(
        [sys.executable, "-m", "glm5_ascend", "deploy", "list"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )  # fmt: skip
    run.send_signal(signal.SIGHUP)
    _, said = run.communicate(timeout=300)
    assert (run.returncode, said) == (0, "")
