# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` with DFlash, as its users run it: a process and HTTP requests."""

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import serving_engine
from serving_jobs import LIMITS, engine_arguments, offline, saved
from tiny_models import pair, random_prompts

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def server():
    """`vllm serve` on a port of its own; its output goes to a file."""
    target, draft = saved("llama", False)
    speculative = engine_arguments(target, draft)["speculative_config"]
    port = 18000 + os.getpid() % 2000
    command = [Path(sys.executable).parent / "vllm", "serve", target]
    command += ["--port", str(port), "--host", "127.0.0.1", "--dtype", "float32"]
    command += ["--speculative-config", json.dumps(speculative)]
    command += ["--served-model-name", "tiny"]
    for name, value in LIMITS.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    environment = os.environ | serving_engine.ENVIRONMENT
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        base = f"http://127.0.0.1:{port}"
        try:
            for _ in range(240):
                try:
                    urllib.request.urlopen(f"{base}/health", timeout=5)
                    break
                except (urllib.error.URLError, OSError):
                    if process.poll() is not None:
                        break
                    time.sleep(1)
            else:
                raise TimeoutError
            if process.poll() is not None:
                log.seek(0)
                raise RuntimeError(log.read()[-6000:])
            yield SimpleNamespace(base=base, process=process)
        finally:
            process.terminate()
            process.wait(timeout=60)


def post(base: str, path: str, body: dict, timeout: float = 120):
    request = urllib.request.Request(
        f"{base}{path}",
        data=json.dumps({"model": "tiny", "temperature": 0} | body).encode(),
        headers={"Content-Type": "application/json"},
    )
    return urllib.request.urlopen(request, timeout=timeout)


def complete(base: str, prompt: list[int], **options) -> list[str]:
    body = {"prompt": prompt, "max_tokens": 30, "ignore_eos": True} | options
    with post(base, "/v1/completions", body) as response:
        return json.load(response)["choices"][0]["text"].split()


def as_words(output) -> list[str]:
    return [f"w{token}" for token in output.token_ids if token != 2]


def test_server_answers_eight_clients_as_offline(server):
    prompts = random_prompts(16, seed=35)
    lengths = [5 + 3 * (i % 9) for i in range(len(prompts))]
    params = {"max_tokens": 30, "ignore_eos": True}
    want = offline(pair("llama", False), {"prompts": prompts, "params": params})
    for output, length in zip(want, lengths, strict=True):
        del output.token_ids[length:]

    def ask(prompt: list[int], length: int) -> list[str]:
        return complete(server.base, prompt, max_tokens=length)

    with ThreadPoolExecutor(8) as clients:
        got = list(clients.map(ask, prompts, lengths))
    assert got == [as_words(output) for output in want]


def test_server_chats(server):
    words = ["w5", "w6", "w7", "w9"]
    body = {
        "messages": [{"role": "user", "content": " ".join(words)}],
        "max_tokens": 30,
        "ignore_eos": True,
    }
    batch = {"prompts": [[5, 6, 7, 9]], "params": {"max_tokens": 30}}
    batch["params"]["ignore_eos"] = True
    want = offline(pair("llama", False), batch)
    with post(server.base, "/v1/chat/completions", body) as response:
        answer = json.load(response)
    assert answer["usage"]["prompt_tokens"] == len(words)
    assert answer["choices"][0]["message"]["content"].split() == as_words(want[0])


def test_server_survives_clients_that_leave_in_mid_stream(server):
    body = {"prompt": [5, 6, 7], "max_tokens": 100, "ignore_eos": True, "stream": True}
    for _ in range(4):
        response = post(server.base, "/v1/completions", body)
        assert response.readline().startswith(b"data:")
        response.close()
    prompts = random_prompts(3, seed=36)
    batch = {"prompts": prompts, "params": {"max_tokens": 30, "ignore_eos": True}}
    want = offline(pair("llama", False), batch)
    assert [complete(server.base, p) for p in prompts] == [as_words(o) for o in want]


def test_server_streams_and_counts(server):
    body = {"prompt": [5, 6, 7], "max_tokens": 30, "ignore_eos": True, "stream": True}
    with post(server.base, "/v1/completions", body) as response:
        lines = [line[6:] for line in response if line.startswith(b"data: ")]
    assert lines[-1].strip() == b"[DONE]"
    text = "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])
    assert text.split() == complete(server.base, [5, 6, 7])
    with urllib.request.urlopen(f"{server.base}/metrics", timeout=30) as response:
        metrics = response.read().decode()
    counter = "vllm:spec_decode_num_accepted_tokens_total"
    values = [
        float(line.split()[-1])
        for line in metrics.splitlines()
        if line.startswith(counter)
    ]
    assert sum(values) > 0


def test_server_says_what_it_refuses(server):
    body = {"prompt": [5, 6, 7], "max_tokens": 5, "repetition_penalty": 1.1}
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(server.base, "/v1/completions", body)
    assert refused.value.code == 400
    message = json.load(refused.value)["error"]["message"]
    assert "repetition_penalty: expected 1 with DFlash, got 1.1" in message


def test_server_shuts_down_cleanly(server):
    """The last test of this module."""
    server.process.terminate()
    assert server.process.wait(timeout=60) in (0, -15)
