# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM's offline engine in a process of its own: one start, several batches.

Usage: serving_engine.py JOB.json RESULT.json

The job: {"engine": {LLM arguments}, "batches": [{"prompts": [[ids]], "params": {}}],
"environment": {changes to ours}}.
The result: {"outputs": [[[ids]]], "metrics": [{counter: value}], "drafts": [[Draft]]},
one per batch; a Draft is [index of the prompt, context_len, anchor, [draft ids]], and
the proposer's are listed in the order of its steps.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "MODEL_IMPL_TYPE": "vllm",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # every program is compiled at start-up, and a later compilation is an error
    "VLLM_XLA_CHECK_RECOMPILATION": "1",
}


class DraftRecorder:
    """Listens to what the runner's proposer returns."""

    def __init__(self, runner) -> None:
        self.runner = runner
        self.steps = []
        self._propose = runner.drafter.propose
        runner.drafter.propose = self.propose

    def propose(self, *args, **kwargs):
        anchors = kwargs["input_ids"]
        _, context_lens = kwargs["target_hidden_states"]
        caches, drafts = self._propose(*args, **kwargs)
        requests = list(self.runner.input_batch.req_ids)
        self.steps.append((requests, context_lens, anchors, drafts))
        return caches, drafts

    def take(self, request_ids: list[str]) -> list:
        """The steps since the last call, and forgets them."""
        index = {name: i for i, name in enumerate(request_ids)}
        found = []
        for requests, *arrays in self.steps:
            rows = zip(*(np.asarray(array).tolist() for array in arrays), strict=True)
            for request, row in zip(requests, rows, strict=False):
                # the engine appends a random part to the name that we know
                found.append([index[request.rpartition("-")[0]], *row])
        self.steps = []
        return found


def model_runner(engine):
    """The TPU model runner of an engine that runs in this process."""
    core = engine.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker.model_runner


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    os.environ.update(ENVIRONMENT | job.get("environment", {}))
    from vllm import LLM, SamplingParams

    speculative = job["engine"].get("speculative_config")
    engine = LLM(disable_log_stats=False, **job["engine"])
    recorder = DraftRecorder(model_runner(engine)) if speculative else None
    outputs, metrics, drafts = [], [], []
    for batch in job["batches"]:
        prompts = [{"prompt_token_ids": ids} for ids in batch["prompts"]]
        params = SamplingParams(temperature=0, **batch["params"])
        results = engine.generate(prompts, params, use_tqdm=False)
        outputs.append([list(r.outputs[0].token_ids) for r in results])
        if recorder:
            drafts.append(recorder.take([r.request_id for r in results]))
        counters = {m.name: getattr(m, "value", None) for m in engine.get_metrics()}
        metrics.append({n: v for n, v in counters.items() if isinstance(v, int)})
    result = {"outputs": outputs, "metrics": metrics, "drafts": drafts}
    Path(sys.argv[2]).write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # the engine's threads need no farewell


if __name__ == "__main__":
    main()
