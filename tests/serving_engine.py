# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM's offline engine in a process of its own: one start, several batches.

Usage: serving_engine.py JOB.json RESULT.json

The job: {"engine": {LLM arguments}, "batches": [{"prompts": [[ids]], "params": {}}],
"environment": {changes to ours}}.
The result: {"outputs": [[[ids]]], "metrics": [{counter: value}]}, one per batch.
"""

import json
import os
import sys
from pathlib import Path

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "MODEL_IMPL_TYPE": "vllm",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # every program is compiled at start-up, and a later compilation is an error
    "VLLM_XLA_CHECK_RECOMPILATION": "1",
}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    os.environ.update(ENVIRONMENT | job.get("environment", {}))
    from vllm import LLM, SamplingParams

    engine = LLM(disable_log_stats=False, **job["engine"])
    outputs, metrics = [], []
    for batch in job["batches"]:
        prompts = [{"prompt_token_ids": ids} for ids in batch["prompts"]]
        params = SamplingParams(temperature=0, **batch["params"])
        results = engine.generate(prompts, params, use_tqdm=False)
        outputs.append([list(r.outputs[0].token_ids) for r in results])
        counters = {m.name: getattr(m, "value", None) for m in engine.get_metrics()}
        metrics.append({n: v for n, v in counters.items() if isinstance(v, int)})
    result = {"outputs": outputs, "metrics": metrics}
    Path(sys.argv[2]).write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # the engine's threads need no farewell


if __name__ == "__main__":
    main()
