# SPDX-License-Identifier: Apache-2.0
"""DFlash in the real vLLM and tpu-inference, on JAX's CPU backend.

The engines run in processes of their own, so this file does not import vllm; the
reference is our offline generator, which other tests hold against transformers.
"""

import functools
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
from conftest import BLOCK, TARGET_LAYERS, VOCAB, pair, random_prompts
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from torchax_dflash import Generator, SamplingParams

pytestmark = pytest.mark.vllm

ENGINE = Path(__file__).parent / "serving_engine.py"
LIMITS = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 24}
PAIRS = [("llama", True), ("llama", False), ("qwen3", False)]


def run_engine(job: dict) -> dict:
    """One engine start; raises with the engine's own words if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        request, result = Path(folder) / "job.json", Path(folder) / "result.json"
        request.write_text(json.dumps(job))
        command = [sys.executable, ENGINE, request, result]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500)
        if not result.is_file():
            raise RuntimeError(done.stdout[-3000:] + done.stderr[-6000:])
        return json.loads(result.read_text())


@functools.cache
def saved(family: str, tied: bool) -> tuple[str, str]:
    """Folders of a tiny target with a tokenizer, and of its draft."""
    tiny = pair(family, tied)
    folder = tempfile.mkdtemp(prefix="serving-")
    words = {f"w{i}": i for i in range(VOCAB)}
    bare = Tokenizer(models.WordLevel(words, unk_token="w0"))
    bare.pre_tokenizer = pre_tokenizers.Whitespace()
    tiny.torch_target.save_pretrained(f"{folder}/target")
    tiny.torch_draft.save_pretrained(f"{folder}/draft")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="w2")
    tokenizer.save_pretrained(f"{folder}/target")
    return f"{folder}/target", f"{folder}/draft"


def engine_arguments(target, draft, k=BLOCK - 1, **options) -> dict:
    speculative = {"method": "dflash", "model": draft, "num_speculative_tokens": k}
    return {
        "model": str(target),
        "dtype": "float32",
        "speculative_config": speculative if draft else None,
        **LIMITS,
        **options,
    }


def batches() -> dict[str, dict]:
    """What can go wrong between requests, by name."""
    go_on = {"max_tokens": 40, "ignore_eos": True}
    prefix = random_prompts(1, seed=30, longest=2)[0] * 57
    prefix = (prefix + random_prompts(60, seed=31, longest=1)[0] * 57)[:57]
    endings = random_prompts(5, seed=32, longest=30)
    shared = [prefix + ending for ending in endings] + [[7], prefix]
    return {
        # more requests than rows, prompts longer than a chunk, joining and leaving
        "ragged": {"prompts": random_prompts(12), "params": go_on},
        "shared prefix": {"prompts": shared, "params": go_on},
        "shared prefix, cached": {"prompts": shared, "params": go_on},
        # two decoding requests take the whole token budget from the others
        "left unscheduled": {
            "prompts": [[3], [4], [7], [9], [11], [2]],
            "params": go_on,
        },
        "max_model_len": {
            "prompts": [(p * 128)[:n] for p, n in zip(
                random_prompts(4, seed=33), (120, 124, 126, 127), strict=True)],
            "params": go_on,
        },
        "stop token": {
            "prompts": random_prompts(12),
            "params": {"max_tokens": 40, "stop_token_ids": [20, 27]},
        },
    }  # fmt: skip


@functools.cache
def served(family: str, tied: bool, with_draft: bool = True) -> SimpleNamespace:
    """All batches through one engine, by name."""
    target, draft = saved(family, tied)
    jobs = batches()
    job = {
        "engine": engine_arguments(target, draft if with_draft else None),
        "batches": list(jobs.values()),
    }
    result = run_engine(job)
    return SimpleNamespace(
        outputs=dict(zip(jobs, result["outputs"], strict=True)),
        metrics=dict(zip(jobs, result["metrics"], strict=True)),
    )


def offline(tiny, batch: dict, *, with_draft: bool):
    generator = Generator(
        tiny.target,
        tiny.draft if with_draft else None,
        max_model_len=LIMITS["max_model_len"],
        max_num_seqs=4,
    )
    return generator.generate(batch["prompts"], SamplingParams(**batch["params"]))


@pytest.mark.parametrize("name", batches())
@pytest.mark.parametrize(("family", "tied"), PAIRS)
def test_outputs_equal_plain_decoding(family, tied, name):
    want = offline(pair(family, tied), batches()[name], with_draft=False)
    got = served(family, tied).outputs[name]
    assert got == [output.token_ids for output in want]


def test_outputs_equal_the_engine_without_a_draft():
    assert served("llama", False).outputs == served("llama", False, False).outputs


@pytest.mark.parametrize(("family", "tied"), PAIRS)
def test_drafts_are_as_good_as_offline(family, tied):
    """Counters of the first batch: equal, but for a step or two of each request.

    In the last one the engine verifies all drafts, the generator only what the limit
    leaves; and under async scheduling a request that was left unscheduled for a while
    comes back without its drafts.
    """
    batch = batches()["ragged"]
    outputs = offline(pair(family, tied), batch, with_draft=True)
    metrics = served(family, tied).metrics["ragged"]
    steps = sum(len(output.acceptance_lengths) for output in outputs)
    accepted = sum(sum(output.from_draft) for output in outputs)
    assert accepted > 20
    more_steps = metrics["vllm:spec_decode_num_drafts"] - steps
    more_accepted = metrics["vllm:spec_decode_num_accepted_tokens"] - accepted
    assert abs(more_steps) <= len(outputs)
    assert abs(more_accepted) <= len(outputs)


def test_the_cached_prefix_brings_the_drafts_context():
    """The same drafts are accepted, though nothing of the prefix was computed anew."""
    metrics = served("llama", False).metrics
    hits = "vllm:prefix_cache_hits"
    accepted = "vllm:spec_decode_num_accepted_tokens"
    first, second = metrics["shared prefix"], metrics["shared prefix, cached"]
    before = metrics["ragged"]
    assert second[hits] - first[hits] > 5 * 48
    assert second[accepted] - first[accepted] == first[accepted] - before[accepted]


def test_fewer_drafts_than_the_block_and_preemption():
    """K = 2, and a cache of 20 pages for four requests of up to eight pages each."""
    target, draft = saved("llama", False)
    prompts = [(p * 64)[:60] for p in random_prompts(6, seed=34)]
    batch = {"prompts": prompts, "params": {"max_tokens": 60, "ignore_eos": True}}
    options = {"num_gpu_blocks_override": 20, "block_size": 16}
    result = run_engine(
        {
            "engine": engine_arguments(target, draft, k=2, **options),
            "batches": [batch],
        }
    )
    want = offline(pair("llama", False), batch, with_draft=False)
    assert result["outputs"][0] == [output.token_ids for output in want]
    assert result["metrics"][0]["vllm:num_preemptions"] > 0


@pytest.mark.smollm2
def test_the_demo_pair(smollm2):
    """A real model, whose head_dim of 64 takes the other attention kernel."""
    questions = ["What is the capital of France?", "Count from 1 to 20.", "def f(n):"]
    prompts = [smollm2.tokenizer(question).input_ids for question in questions]
    params = {"max_tokens": 48, "ignore_eos": True}
    options = {"max_model_len": 256, "max_num_batched_tokens": 64}
    result = run_engine(
        {
            "engine": engine_arguments(
                smollm2.folder, smollm2.draft_folder, k=3, **options
            ),
            "batches": [{"prompts": prompts, "params": params}],
            # its many programs take minutes to compile: compile what is used
            "environment": {
                "SKIP_JAX_PRECOMPILE": "1",
                "VLLM_XLA_CHECK_RECOMPILATION": "0",
            },
        }
    )
    generator = Generator(
        smollm2.target, smollm2.draft, max_num_seqs=3, num_speculative_tokens=3
    )
    want = generator.generate(prompts, SamplingParams(**params))
    assert result["outputs"][0] == [output.token_ids for output in want]
    accepted = sum(sum(output.from_draft) for output in want)
    counter = "vllm:spec_decode_num_accepted_tokens"
    assert 0 <= result["metrics"][0][counter] - accepted <= 2 * len(prompts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft": "no-such-draft"}, "no-such-draft"),
        ({"k": BLOCK}, "num_speculative_tokens: expected 1 to"),
        ({"other_target": True}, "num_target_layers: expected the target's"),
        (
            {"environment": {"MODEL_IMPL_TYPE": "auto"}},
            "MODEL_IMPL_TYPE: expected vllm",
        ),
    ],
    ids=str,
)
def test_bad_input_is_refused_at_start_up(options, message, tmp_path):
    target, draft = saved("llama", False)
    if options.get("other_target"):
        config = json.loads(Path(draft, "config.json").read_text())
        config["num_target_layers"] = TARGET_LAYERS + 2
        pair("llama", False).torch_draft.save_pretrained(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps(config))
        draft = str(tmp_path)
    draft = options.get("draft", draft)
    arguments = engine_arguments(target, draft, k=options.get("k", BLOCK - 1))
    environment = options.get("environment", {})
    with pytest.raises(RuntimeError) as error:
        run_engine({"engine": arguments, "batches": [], "environment": environment})
    assert message in str(error.value)


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
    params = {"max_tokens": 30, "ignore_eos": True}
    batch = {"prompts": prompts, "params": params}
    want = offline(pair("llama", False), batch, with_draft=False)
    with ThreadPoolExecutor(8) as clients:
        got = list(clients.map(lambda p: complete(server.base, p), prompts))
    assert got == [as_words(output) for output in want]


def test_server_survives_clients_that_leave_in_mid_stream(server):
    body = {"prompt": [5, 6, 7], "max_tokens": 100, "ignore_eos": True, "stream": True}
    for _ in range(4):
        response = post(server.base, "/v1/completions", body)
        assert response.readline().startswith(b"data:")
        response.close()
    prompts = random_prompts(3, seed=36)
    batch = {"prompts": prompts, "params": {"max_tokens": 30, "ignore_eos": True}}
    want = offline(pair("llama", False), batch, with_draft=False)
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


def test_server_shuts_down_cleanly(server):
    """The last test of this module."""
    server.process.terminate()
    assert server.process.wait(timeout=60) in (0, -15)
