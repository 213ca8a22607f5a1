"""Commands of the user that end or restart a server."""

from __future__ import annotations

import shlex
import subprocess
from urllib.parse import urlsplit

from glm5_ascend.errors import CheckFailedError, ConfigError, shown


def fill_command(command: str, worker: str) -> list[str]:
    """Split a command into words and fill in {url}, {host} and {port} of a server. No shell reads it.

    Raises:
        ConfigError: the command is empty, has an open quote, or has other words in braces.
    """
    parts = urlsplit(worker)
    fields = {"url": worker, "host": parts.hostname or "", "port": str(parts.port or 80)}
    try:
        words = [word.format(**fields) for word in shlex.split(command)]
    except (ValueError, KeyError, IndexError) as error:
        raise ConfigError(f"command {shown(command)}: {error}", "words in braces: {url} {host} {port}") from None
    if not words:
        raise ConfigError("the command is empty", "as in 'ssh {host} systemctl restart glm5'")
    return words


def run_command(command: str, worker: str) -> None:
    """Run a command for a server and wait for its end.

    Raises:
        CheckFailedError: it failed; its last line is quoted. ConfigError: it cannot be started.
    """
    words = fill_command(command, worker)
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    except OSError as error:
        raise ConfigError(f"{words[0]}: {error.strerror}", "name an installed program") from None
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise CheckFailedError(f"{words[0]} for {worker} ended with exit code {done.returncode}: {last[:300]}")
