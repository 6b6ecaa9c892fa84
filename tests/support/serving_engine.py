# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM's offline engine in a process of its own: one start, several batches.

Usage: serving_engine.py JOB.json RESULT.json

A job of the form {"refused": [{"engine": {}, "environment": {}}]} tries to start each
of these engines; the result is {"errors": [text or null if it started]}.

A job of the form {"together": [{"engine": {}, "batches": []}], "environment": {}}
starts all of these engines, in this order, and then asks each its batches, in turn; the
result is {"together": [result]}, one for each engine, with "outputs" and "errors" as
below.

Any other job: {"engine": {LLM arguments}, "batches": [{"prompts": [[ids]], "params":
{} or one for each prompt}], "environment": {changes to ours}, "shadows": {name:
{"draft": folder, "peer": bool}}, "silent": do not record drafts, "broken": a rule of
`broken_rules.py` in the place of ours, or "tpu_inference" for what it comes with}.
The result: {"outputs": [[[ids]]], "texts": [[text]], "logprobs": [[one dictionary of
token to number for each token, or null]], "errors": [text or null], "metrics":
[{counter: value}], "drafts": [[Draft]]}, one per batch; a batch with an error has no
outputs; a Draft is [index of the prompt, context_len, anchor, [draft ids]], and
the proposer's are listed in the order of its steps. "drawn": {"used": how many drafts
were verified by a q, "others": those of them that were not drawn from it}. With shadows
also "shadows": [{name: [Draft]}], "shadow_errors": {name: text} of those that could not
be made, and "hidden_states_errors": {name: how far from the first one's}.
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
    """Listens to what the runner's proposer returns, and lets shadows draft, too."""

    def __init__(self, runner) -> None:
        self.runner, self.steps = runner, []
        self.shadows, self.errors = {}, {}
        drafter = runner.drafter
        self._prepare_inputs, self._propose = drafter.prepare_inputs, drafter.propose
        drafter.prepare_inputs, drafter.propose = self.prepare_inputs, self.propose
        self.drawn = {"used": 0, "others": 0}
        self._verify = runner.rejection_sampler._verify
        runner.rejection_sampler._verify = self.verify

    def add_shadows(self, shadows: dict[str, dict]) -> None:
        from serving_shadows import Shadow

        for name, arguments in shadows.items():
            try:
                self.shadows[name] = Shadow(self.runner, **arguments)
            except Exception as error:
                self.errors[name] = f"{type(error).__name__}: {error}"

    def prepare_inputs(self, *args):
        for shadow in self.shadows.values():
            shadow.prepare_inputs(*args)
        return self._prepare_inputs(*args)

    def propose(self, *args, **kwargs):
        for shadow in self.shadows.values():
            shadow.propose()
        anchors = kwargs["input_ids"]
        context_lens = kwargs["target_hidden_states"].context_lens
        caches, drafts = self._propose(*args, **kwargs)
        requests = list(self.runner.input_batch.req_ids)
        self.steps.append((requests, context_lens, anchors, drafts))
        return caches, drafts

    def verify(self, drafts, *args):
        """Counts drafts that are verified by a q, and those that q is not of."""
        flat, first = np.asarray(drafts.token_ids), 0
        for count, row in zip(
            np.asarray(drafts.lengths), np.asarray(drafts.q_rows), strict=True
        ):
            if row >= 0:
                verified = flat[first : first + count]
                drawn = np.asarray(self.steps[-1][-1])[row, :count]
                self.drawn["used"] += int(count)
                self.drawn["others"] += int((verified != drawn).sum())
            first += count
        return self._verify(drafts, *args)

    def take(self, request_ids: list[str]) -> tuple[list, dict[str, list]]:
        """Drafts since the last call, and those of the shadows; forgets them."""
        index = {name: i for i, name in enumerate(request_ids)}
        found, of_shadows = [], {name: [] for name in self.shadows}
        for step, (requests, *arrays) in enumerate(self.steps):
            # the engine appends a random part to the name that we know
            indices = [index[request.rpartition("-")[0]] for request in requests]
            lens, anchors, drafts = (np.asarray(array).tolist() for array in arrays)
            found += zip(indices, lens, anchors, drafts, strict=False)
            for name, shadow in self.shadows.items():
                drafts = shadow.steps[step][0].tolist()
                of_shadows[name] += zip(indices, lens, anchors, drafts, strict=False)
        for shadow in self.shadows.values():
            shadow.steps = []
        self.steps = []
        return found, of_shadows

    def hidden_states_errors(self) -> dict[str, float]:
        """How far each shadow's hidden states are from the first one's."""
        from serving_shadows import hidden_states_error

        lens = [np.asarray(step[1]) for step in self.steps]
        first = next(iter(self.shadows.values()))
        return {
            name: hidden_states_error(shadow, first, lens)
            for name, shadow in self.shadows.items()
        }


def model_runner(engine):
    """The TPU model runner of an engine that runs in this process."""
    core = engine.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker.model_runner


def refused(engines: list[dict]) -> dict:
    """Why each engine does not start."""
    errors = []
    for job in engines:
        os.environ.update(ENVIRONMENT | job.get("environment", {}))
        from vllm import LLM

        try:
            LLM(**job["engine"])
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
        else:
            errors.append(None)
    return {"errors": errors}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    if "refused" in job:
        result = refused(job["refused"])
    elif "together" in job:
        result = served_together(job)
    else:
        result = served(job)
    Path(sys.argv[2]).write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # the engine's threads need no farewell


def break_on_purpose(rule: str) -> None:
    """Before the engine starts: its accept rule becomes a wrong one."""
    import broken_rules

    from torchax_dflash.serving.verification import programs, rejection_sampler

    if rule == "tpu_inference":
        rejection_sampler.DFlashRejectionSampler.install = lambda self: None
    else:
        programs.accept_sampled = getattr(broken_rules, rule)


def sampling_params(fields: dict):
    """vLLM's, greedy unless a temperature is given."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    fields = {"temperature": 0} | fields
    if bias := fields.get("logit_bias"):  # JSON's keys are texts
        fields["logit_bias"] = {int(token): value for token, value in bias.items()}
    if structured := fields.pop("structured_outputs", None):
        fields["structured_outputs"] = StructuredOutputsParams(**structured)
    return SamplingParams(**fields)


def answer(engine, batch: dict) -> list:
    """vLLM's results of one batch."""
    prompts = [{"prompt_token_ids": ids} for ids in batch["prompts"]]
    params = batch["params"]
    if isinstance(params, list):
        params = [sampling_params(fields) for fields in params]
    else:
        params = sampling_params(params)
    return engine.generate(prompts, params, use_tqdm=False)


def answered(engine, batch: dict) -> tuple[list, str | None]:
    """vLLM's results of one batch, or why it refused it."""
    try:
        return answer(engine, batch), None
    except Exception as refusal:
        return [], str(refusal)


def logprobs_of(result) -> list[dict] | None:
    """Of each token of an output, by token."""
    given = result.outputs[0].logprobs
    if given is None:
        return None
    return [{token: entry.logprob for token, entry in at.items()} for at in given]


def served(job: dict) -> dict:
    """One engine and its batches."""
    os.environ.update(ENVIRONMENT | job.get("environment", {}))
    from vllm import LLM

    if job.get("broken"):
        break_on_purpose(job["broken"])
    speculative = job["engine"].get("speculative_config")
    engine = LLM(disable_log_stats=False, **job["engine"])
    recorder = None
    if speculative and not job.get("silent"):
        recorder = DraftRecorder(model_runner(engine))
    if shadows := job.get("shadows"):
        recorder.add_shadows(shadows)
    names = ["outputs", "texts", "logprobs", "errors", "metrics", "drafts", "shadows"]
    result = {name: [] for name in names}
    for batch in job["batches"]:
        results, error = answered(engine, batch)
        result["errors"].append(error)
        result["outputs"].append([list(r.outputs[0].token_ids) for r in results])
        result["texts"].append([r.outputs[0].text for r in results])
        result["logprobs"].append([logprobs_of(r) for r in results])
        if recorder:
            if recorder.shadows:
                result["hidden_states_errors"] = recorder.hidden_states_errors()
            drafts, of_shadows = recorder.take([r.request_id for r in results])
            result["drafts"].append(drafts)
            result["shadows"].append(of_shadows)
        counters = {m.name: getattr(m, "value", None) for m in engine.get_metrics()}
        result["metrics"].append(
            {n: v for n, v in counters.items() if isinstance(v, int)}
        )
    if recorder:
        result["shadow_errors"] = recorder.errors
        result["drawn"] = recorder.drawn
    return result


def served_together(job: dict) -> dict:
    """Several engines in this process, asked in turn."""
    os.environ.update(ENVIRONMENT | job.get("environment", {}))
    from vllm import LLM

    engines = [LLM(**one["engine"]) for one in job["together"]]
    results = [{"outputs": [], "errors": []} for _ in engines]
    rounds = zip(*(one["batches"] for one in job["together"]), strict=True)
    for batches in rounds:
        for engine, batch, result in zip(engines, batches, results, strict=True):
            outputs, error = answered(engine, batch)
            result["outputs"].append([list(o.outputs[0].token_ids) for o in outputs])
            result["errors"].append(error)
    return {"together": results}


if __name__ == "__main__":
    main()
