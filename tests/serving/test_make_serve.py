# SPDX-License-Identifier: Apache-2.0
"""`make serve`: the Makefile's own command, on a port of its own, answers."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.smollm2]

ROOT = Path(__file__).parent.parent.parent


def serve_command(port: int) -> str:
    """What `make serve` hands to the shell, with this Python's folder."""
    done = subprocess.run(
        ["make", "--dry-run", "--assume-old=.venv-serving/.installed", "serve"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    command = done.stdout[done.stdout.index("target=") :]
    command = command.replace(".venv-serving/bin", str(Path(sys.executable).parent))
    command, ports = re.subn(r"--port \d+", f"--port {port}", command)
    assert ports == 1
    return command


def test_make_serve_answers():
    port = 20_000 + os.getpid() % 2000
    base = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            ["sh", "-c", serve_command(port)],
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while True:
                if process.poll() is not None:
                    log.seek(0)
                    raise RuntimeError(log.read()[-6000:])
                try:
                    urllib.request.urlopen(f"{base}/health", timeout=5)
                    break
                except (urllib.error.URLError, OSError):
                    time.sleep(1)
            body = {
                "model": "smollm2",
                "messages": [{"role": "user", "content": "Count from 1 to 10."}],
                "max_tokens": 16,
                "temperature": 0,
            }
            request = urllib.request.Request(
                f"{base}/v1/chat/completions",
                data=json.dumps(body).encode(),
                headers={"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=300) as response:
                answer = json.load(response)
            assert answer["usage"]["completion_tokens"] == 16
            with urllib.request.urlopen(f"{base}/metrics", timeout=60) as response:
                metrics = response.read().decode()
            accepted = re.findall(
                r"^vllm:spec_decode_num_accepted_tokens_total\S* (\S+)", metrics, re.M
            )
            assert sum(map(float, accepted)) > 0
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(timeout=60)
