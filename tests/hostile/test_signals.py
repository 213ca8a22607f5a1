"""A signal at any moment after our first line ends in 130 and one line."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time

import pytest

from tests.support.command import environment, interruptible, ran


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_while_it_imports_and_works(number: signal.Signals) -> None:
    """Delays are counted from the moment the handlers are there; none of them must meet a certain import."""
    program = (
        "import os, signal, sys\n"
        "import glm5_ascend.__main__ as start\n"
        "sys.argv = ['glm5-ascend', 'plan', '--model', 'glm-5']\n"
        "class Told:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'glm5_ascend.cli': os.write(1, b'.')\n"
        "sys.meta_path.insert(0, Told())\n"
        "start.main()\n"
    )
    for delay in (0.0, 0.1, 0.4):
        run = interruptible(
            [sys.executable, "-c", program],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
        )  # fmt: skip
        assert run.stdout is not None and run.stdout.read(1) == "."
        time.sleep(delay)
        run.send_signal(number)
        _, stderr = run.communicate(timeout=300)
        assert (run.returncode, stderr) in ((130, "interrupted\n"), (0, "")), stderr  # or it had ended before


_SWALLOWS = {
    "an import that makes another error of it": """
        import pathlib, sys, tempfile
        folder = pathlib.Path(tempfile.mkdtemp())
        (folder / "swallows.py").write_text(
            "import os, signal, time\\n"
            "try:\\n    os.kill(os.getpid(), signal.SIGTERM)\\n    time.sleep(0.2)\\n"
            "except BaseException:\\n    raise ImportError('no such thing')\\n"
        )
        sys.path.insert(0, str(folder))
        import swallows
        time.sleep(60)
    """,
    "a destructor": """
        class Held:
            def __del__(self):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.2)
        Held()
        time.sleep(60)
    """,
    "a library that makes another error of it": """
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        except KeyboardInterrupt:
            raise ImportError("no such thing")
    """,
}


@pytest.mark.parametrize("ignored", ["", "signal.signal(signal.SIGINT, signal.SIG_IGN)"])
@pytest.mark.parametrize("what", _SWALLOWS)
def test_none_is_swallowed(what: str, ignored: str) -> None:
    """The command is one of ours with this body; all about it is the real thing. A shell's `&` has SIGINT ignored."""
    program = (
        f"import os, signal, sys, time\n{ignored}\n"
        "from glm5_ascend import cli\nfrom glm5_ascend.stop_signals import StopSignals\n"
        f"def run(arguments):\n{textwrap.indent(textwrap.dedent(_SWALLOWS[what]), '    ')}\n"
        "cli.run = run\n"
        "sys.exit(cli.run_process([], StopSignals().install()))\n"
    )
    run = ran(sys.executable, "-c", program)
    assert (run.returncode, run.stderr) == (130, "interrupted\n")


def test_a_closed_pipe_is_quiet() -> None:
    assert ran("sh", "-c", f"{sys.executable} -m glm5_ascend deploy list | head -c 1").stderr == ""


def test_an_ignored_signal_stays_ignored() -> None:
    run = subprocess.Popen(
        [sys.executable, "-m", "glm5_ascend", "deploy", "list"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )  # fmt: skip
    run.send_signal(signal.SIGHUP)
    _, stderr = run.communicate(timeout=300)
    assert (run.returncode, stderr) == (0, "")
