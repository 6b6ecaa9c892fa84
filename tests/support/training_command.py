# SPDX-License-Identifier: Apache-2.0
"""The training command with a tiny target and tiny numbers."""

import importlib.util
from pathlib import Path

from tiny_models import MASK_ID, VOCAB, make_torch_target
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "train_draft.py"


LETTERS = "abcdefghijklmnopqrstuvwxyz ?!"


NEW = ["--init", "new", "--mask-token-id", str(MASK_ID), "--target-layer-ids", "0,2,3"]


SMALL = [
    *("--steps", "6", "--sequences", "2", "--anchors", "6", "--stages", "4:1"),
    *("--common-tokens", "20", "--random-tokens", "4", "--warmup-steps", "2"),
    *("--checkpoint-every", "2", "--held-out-every", "6"),
]


def load_script():
    spec = importlib.util.spec_from_file_location("train_draft", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tiny_checkpoint(folder):
    """A target's folder, with a tokenizer of single letters."""
    make_torch_target("llama", tied=False).save_pretrained(folder)
    vocabulary = {"<a>": 0, "<b>": 1, "<end>": 2}
    vocabulary |= {letter: 3 + index for index, letter in enumerate(LETTERS)}
    assert len(vocabulary) == VOCAB
    bare = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    bare.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<end>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}!"
    tokenizer.save_pretrained(folder)
    return folder


def common(target, folder):
    return ["--target", str(target), "--folder", str(folder), "--dtype", "float32"]


def fails(main, capsys, command, *parts):
    """The command ends with status 2 and an error that says all this."""
    assert main(command) == 2
    printed = " ".join(capsys.readouterr().err.split())
    for part in ("expected", "got", *parts):
        assert part in printed, printed
