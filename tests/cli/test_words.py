"""Odd words of a command line: empty, given twice, no address, with codes; and what is printed to be pasted."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from glm5_ascend.deploy.profiles.load import load
from glm5_ascend.deploy.rendering.files import rendered_texts
from glm5_ascend.errors import shell_word
from tests.support.command import assert_one_clear_line, environment, in_process, interruptible, ran, said
from tests.support.programs import PRINTS, stand_in

ODD = ["plain", "two words", "it's", "a\nb", "\x1b[2J", "caf\xe9", os.fsdecode(b"caf\xe9"), "$HOME `id` \\", "-x", ""]


@pytest.mark.parametrize("text", ODD, ids=ascii)
def test_a_shell_word_means_the_text(text: str) -> None:
    word = shell_word(text)
    assert word.isprintable()
    printed = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, check=True, env=environment())
    assert printed.stdout == os.fsencode(text)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["quantize", "x", "y", "--device", ""], "--device: an empty value"),
        (["quantize", "x", "y", "--device="], "--device: an empty value"),
        (["plan", "--layout", ""], "--layout: an empty value"),
        (["plan", "--slo", ""], "--slo: an empty value"),
        (["verify", ""], "an argument: an empty value"),
        (["serve", "x", "--head", ""], "--head: an empty value"),
        (["deploy", "render", "--profile", ""], "--profile: an empty value"),
        (["rehearse", "--prepare", "--line", "0.30"], "--prepare: no value stands before --line"),
    ],
)
def test_empty_and_missing_values(words: list[str], problem: str) -> None:
    assert_one_clear_line(in_process(*words), 2, problem)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--ip", "not-an-ip"), ("--ip", "10.0.0.1\n"), ("--ip", "1.2.3"), ("--head", "a b"), ("--head", "\x1b[31mred"),
        ("--head", "a\nb"), ("--head", "$(id)"), ("--nic", "eth0;id"), ("--host", "0.0.0.0 --x"),
    ],
)  # fmt: skip
def test_no_address(option: str, value: str, tiny_w8a8: Path) -> None:
    place = {"--head": "10.0.0.1", "--ip": "10.0.0.1", "--nic": "eth0"} | {option: value}
    words = [word for pair in place.items() for word in pair]
    done = in_process("serve", tiny_w8a8, "--profile", "a3-2node", "--dry-run", *words)
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and lines[-2].startswith(f"error: {option} "), done.stderr
    assert all(line.isprintable() for line in lines) and not done.stdout


def test_a_command_to_paste_is_no_open_server(tiny_w4a8: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run by bash with a `vllm` that tells its key."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    for program in ("vllm", "python"):
        path = stand_in(tmp_path, program, '#!/bin/sh\necho "key=$VLLM_API_KEY" "$@"\n')

    def pasted(text: str, **env: str) -> subprocess.CompletedProcess[str]:
        return ran("bash", "-c", text, env=environment(PATH=path, **env))

    plan = in_process("plan", "--quant", "w4a8").stdout.split("run it: ")[-1].split("\n\n")[0].replace("\n", " ")
    profiles = ("a3-single-w4a8", "a3-single-w4a8-sglang")
    texts = [plan, *(in_process("serve", tiny_w4a8, "--profile", name, "--dry-run").stdout for name in profiles)]
    for text in texts:
        refused = pasted(text)
        assert refused.returncode != 0 and "VLLM_API_KEY: set it" in refused.stderr and not refused.stdout, text
        started = pasted(text, VLLM_API_KEY="secret")
        assert started.returncode == 0 and started.stdout.startswith("key=secret "), started
    assert "--api-key secret" in pasted(texts[-1], VLLM_API_KEY="secret").stdout
    opened = in_process("serve", tiny_w4a8, "--profile", "a3-single-w4a8", "--dry-run", "--open")
    local = in_process("serve", tiny_w4a8, "--profile", "a3-single-w4a8", "--dry-run", "--host", "127.0.0.1")
    assert "VLLM_API_KEY" not in opened.stdout + local.stdout
    keyed = in_process("serve", tiny_w4a8, "--dry-run", "--", "--api-key", "secret").stdout
    assert "***" not in keyed and "secret" not in keyed and "${VLLM_API_KEY:?" in keyed


def test_the_proxy_takes_more_arguments(tmp_path: Path) -> None:
    script, path = rendered_texts(load("a3-pd"), "shell", "/models/x")["proxy.sh"], stand_in(tmp_path, "python", PRINTS)
    env = environment(PATH=path, PREFILL_NODES="a b", DECODE_NODES="c", PROXY="p.py")
    text = said("bash", "-c", script, "proxy.sh", "--open", "--log-level", "two words", env=env)
    assert text.splitlines()[-2:] == ["--log-level", "two words"]


def test_next_names_the_output(tiny_source: Path, tmp_path: Path) -> None:
    out = tmp_path / "it's\nmine"
    done = in_process("quantize", tiny_source, out, "--recipe", "rtn-w4a8")
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("next: ")]
    assert line == f"next: glm5-ascend verify {shell_word(str(out))}" and line.isprintable()


def test_the_key_leaves_the_command_line(tmp_path: Path) -> None:
    """The process that replaces this one has it in its environment."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif os.environ.get('VLLM_API_KEY'):\n"
        "    print(sys.orig_argv, os.environ['VLLM_API_KEY']); sys.stdout.flush(); os._exit(0)\n"
    )
    env = environment()
    env["PYTHONPATH"] = f"{tmp_path}:{env['PYTHONPATH']}"
    for words in (["--api-key", "secret"], ["--api-key=secret"], ["--seed", "1", "--api_key", "secret"]):
        text = said(sys.executable, "-m", "glm5_ascend", "serve", tmp_path, "--", *words, env=env)
        shown, _, key = text.strip().rpartition(" ")
        assert key == "secret" and "secret" not in shown and "'serve'" in shown


@pytest.mark.parametrize("key", ["schl\xfcssel", "a\nb", "\x1b"])
def test_a_key_that_cannot_be_sent(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    for words in (["smoke", "http://127.0.0.1:9"], ["chat", "http://127.0.0.1:9"]):
        assert_one_clear_line(in_process(*words), 2, "the API key has characters")


@pytest.mark.parametrize("name", ["d[bold]", "d*", os.fsdecode(b"d\xe9"), "d\x1b"], ids=ascii)
def test_a_folder_that_vllm_cannot_name(name: str, tiny_w4a8: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_w4a8, tmp_path / name))
    done = in_process("serve", folder)
    assert_one_clear_line(done, 2, "vLLM finds no weights below such a name")
    assert "ln -s" in done.stderr


def test_a_stop_after_the_last_line_changes_nothing() -> None:
    """While the interpreter ends: its own handlers are gone by then."""
    program = (
        "import os, sys, time\n"
        "class Last:\n"
        "    def __del__(self, write=os.write, sleep=time.sleep):\n"
        "        write(1, b'#'); sleep(2)\n"
        "sys.argv, sys.modules['keeps'] = ['glm5-ascend', '--version'], Last()\n"
        "import glm5_ascend.__main__ as start\n"
        "start.main()\n"
    )
    for stop in (signal.SIGINT, signal.SIGTERM):
        run = interruptible(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment(),
        )  # fmt: skip
        assert run.stdout is not None
        while run.stdout.read(1) not in ("#", ""):
            pass
        run.send_signal(stop)
        _, stderr = run.communicate(timeout=300)
        assert (run.returncode, stderr) == (0, "")
