"""The command as a process: the address it prints, the interface it binds, and how it ends."""

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from interp.cli import commands, main, parsed
from interp.cli.commands import Serve


def test_options_of_the_command() -> None:
    assert parsed(["serve"]) == Serve()
    words = "serve --model demo-attn-2l --port 8123 --open --prompt a --second b --direction d e"
    asked = parsed(words.split())
    given = (Path("d"), Path("e"))
    assert asked == Serve(model="demo-attn-2l", prompt="a", second="b", direction=given, port=8123, open=True)


def test_without_the_extra_it_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "find_spec", lambda name: None if name == "uvicorn" else object())
    assert main(["serve"]) == 2
    assert re.search(r"error: interp serve requires uvicorn: pip install uvicorn$", capsys.readouterr().err)


def test_a_port_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("uvicorn", reason="no uvicorn: the extra `serve` is not installed")
    assert main(["serve", "--port", "70000"]) == 2
    assert "from 0 to 65535, got 70000" in capsys.readouterr().err


@pytest.mark.slow
def test_it_listens_on_the_loopback_only_and_ctrl_c_ends_it_quietly() -> None:
    pytest.importorskip("uvicorn", reason="no uvicorn: the extra `serve` is not installed")
    root = str(Path(__file__).parents[2])
    running = subprocess.Popen(
        [sys.executable, "-m", "interp", "serve", "--model", "groundtruth-induction", "--prompt", "abcabc"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root,
        env=os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        assert running.stdout is not None
        address = running.stdout.readline().strip()
        port = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/[\w-]{43}/", address)
        assert port is not None, address
        with urllib.request.urlopen(address, timeout=30) as answer:
            assert b"groundtruth-induction" in answer.read()
        listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        bound = [
            line[1]
            for line in listening
            if line[3] == "0A" and int(line[1].split(":")[1], 16) == int(port[1])
        ]
        assert bound == [f"0100007F:{int(port[1]):04X}"]
        with socket.create_connection(("127.0.0.1", int(port[1])), timeout=30) as line:
            line.sendall(b"\x16\x03\x01 no http at all\r\n\r\n")
            assert b"400" in line.recv(1000)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == 0
    assert err == "" and "Traceback" not in out
