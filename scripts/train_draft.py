#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Train a DFlash draft."""

import argparse
import json
import sys
import time
from itertools import islice
from pathlib import Path

import jax
from transformers import AutoTokenizer

from torchax_dflash import Generator, TargetModel
from torchax_dflash.demo import cache_folder, demo_target
from torchax_dflash.training.answers import answer
from torchax_dflash.training.prompts import builtin_mix
from torchax_dflash.training.questions import Overlap
from torchax_dflash.training.sequences import SequenceStore, fingerprint

p = argparse.ArgumentParser()
p.add_argument("--data", type=Path)
p.add_argument("--num", type=int, default=20000)
a = p.parse_args()
jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "jax"))
folder = demo_target()
target = TargetModel.from_pretrained(folder, dtype="bfloat16")
store = SequenceStore(a.data, fingerprint(folder))
gen = Generator(
    target,
    tokenizer=AutoTokenizer.from_pretrained(folder),
    max_model_len=512,
    max_num_seqs=64,
    steps_per_visit=8,
)
gen.warm_up()
start = time.time()


def show(progress):
    if progress.answers % 20 == 0:
        s = time.time() - start
        print(
            json.dumps(vars(progress) | {"rate": round(progress.tokens / s)}),
            flush=True,
        )


answer(
    gen,
    islice(builtin_mix(), a.num),
    store,
    max_tokens=224,
    refuse=Overlap(),
    on_answer=show,
)
sys.exit()
