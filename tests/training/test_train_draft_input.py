# SPDX-License-Identifier: Apache-2.0
"""What scripts/train_draft.py is given: prompts, the target's own too, and mistakes."""

import json
import shutil

import pytest
from training_command import NEW, SMALL, common, fails, load_script, tiny_checkpoint
from transformers import AutoTokenizer

from torchax_dflash.checkpoints.demo import demo_target
from torchax_dflash.training.data.plain_text import add_texts
from torchax_dflash.training.data.prompts import read_prompts
from torchax_dflash.training.data.prompts_self import user_turn
from torchax_dflash.training.data.sequences import (
    SequenceStore,
    TokenSequence,
    fingerprint,
)
from torchax_dflash.training.model.feature_store import FeatureStore
from torchax_dflash.training.report import model_card as report

LIMITS = ["--max-tokens", "8", "--max-model-len", "256", "--max-num-seqs", "4"]


@pytest.fixture(scope="module")
def main():
    return load_script().main


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny-target"))


@pytest.fixture
def asked(target, tmp_path):
    """A target whose chat template shows where the user speaks."""
    folder = shutil.copytree(target, tmp_path / "asked")
    template = "<a>{% for m in messages %}{{ m.content }}{% endfor %}!"
    (folder / "chat_template.jinja").write_text(template)
    return folder


def test_the_target_writes_the_prompts(main, capsys, asked, tmp_path):
    folder = tmp_path / "run"
    command = ["generate", *common(asked, folder), "--self-prompts", *LIMITS]
    assert main([*command, "--num-prompts", "5"]) == 0
    file = folder / "data" / "prompts.jsonl"
    questions = file.read_text()
    with file.open("a") as prompts:
        prompts.write('{"prompt": "torn')
    assert main([*command, "--num-prompts", "9"]) == 0
    assert file.read_text().startswith(questions)
    texts = [prompt.text for prompt in read_prompts([file])]
    assert len(set(texts)) == len(texts) == 9
    assert not any("!" in text for text in texts)  # what follows the user's words
    store = SequenceStore(folder / "data", fingerprint(asked))
    assert {sequence.prompt for sequence in store} == set(texts)
    short = [*command, "--max-model-len", "3", "--max-tokens", "1"]
    fails(main, capsys, short, "--max-model-len: expected at least 7, for a question")
    fails(main, capsys, [*command, "--prompts", "x"], "--self-prompts", "Choose one")
    (asked / "chat_template.jinja").unlink()
    fails(main, capsys, command, "--self-prompts: expected", "Give prompts")


def test_prompts_of_the_target_that_somebody_edited(main, capsys, asked, tmp_path):
    folder = tmp_path / "run"
    file = folder / "data" / "prompts.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text('{"prompt": "a b"}\n\n{"prompt": "c\u2028d", "seed": 7}\n')
    command = ["generate", *common(asked, folder), "--self-prompts", *LIMITS]
    assert main([*command, "--num-prompts", "3"]) == 0
    texts = [prompt.text for prompt in read_prompts([file])]
    assert texts[:2] == ["a b", "c\u2028d"]
    assert len(texts) == 3
    file.write_text('{"seed": 1}\n')
    fails(main, capsys, command, "prompts.jsonl:1: expected a JSON object", "Correct")


@pytest.mark.parametrize(
    ("template", "opening", "ending"),
    [
        ("<s>[I] {{ messages[0].content }} [/I]", "<s>[I]", "[/I]"),
        ("User: {{ messages[0].content }}\nAssistant:", "User:", "Assistant:"),
        ("<|im_start|>user\n{{ messages[0].content }}<|im_end|>\n<|im_start|>assistant",
         "<|im_start|>user", 2),
    ],
)  # fmt: skip
@pytest.mark.smollm2
def test_where_a_users_turn_begins_and_ends(template, opening, ending):
    tokenizer = AutoTokenizer.from_pretrained(demo_target())
    tokenizer.chat_template = template
    turn = user_turn(tokenizer)
    assert tokenizer.decode(turn.opening).strip() == opening
    assert (*turn.stop_token_ids, *turn.stop) == (ending,)


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("empty.txt", "\n\n", "--prompts: expected files with at least one prompt"),
        ("bad.jsonl", '{"question": "x"}\n', "bad.jsonl:1: expected a JSON object"),
        ("torn.jsonl", '{"prompt": "x', "torn.jsonl:1: expected a JSON object"),
    ],
)
def test_broken_prompts(main, capsys, target, tmp_path, name, content, part):
    file = tmp_path / name
    file.write_text(content)
    command = ["generate", *common(target, tmp_path / "run"), "--prompts", str(file)]
    fails(main, capsys, [*command, "--max-model-len", "256"], part)


def test_a_target_without_chat_template(main, capsys, target, tmp_path):
    questions = tmp_path / "questions.txt"
    questions.write_text("what is a boat?\n")
    plain = shutil.copytree(target, tmp_path / "plain")
    (plain / "chat_template.jinja").unlink()
    command = [
        "generate",
        *common(plain, tmp_path / "run"),
        "--prompts",
        str(questions),
    ]
    fails(main, capsys, command, "chat_template: expected", "--text")


def test_training_without_data(main, capsys, target, tmp_path):
    command = ["train", *common(target, tmp_path), *NEW, *SMALL]
    fails(main, capsys, command, "--data: expected sequences", "generate")
    store = SequenceStore(tmp_path / "data", fingerprint(target))
    store.append(TokenSequence("x", "test", 0.0, 4, [3, 4, 5, 6]))
    fails(main, capsys, command, "answers of two tokens or more")


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--num-prompts", "-1"], ["--num-prompts: expected 0 or more"]),
        (["--prompts", "nowhere.txt"], []),
        (["--store-features"], ["--target-layer-ids: expected"]),
        (["--max-tokens", "64", "--max-model-len", "64"],
         ["--max-tokens: expected less than --max-model-len, 64"]),
    ],
    ids=str,
)  # fmt: skip
def test_mistakes_that_are_noticed_first(
    main, capsys, target, tmp_path, options, parts
):
    folder = tmp_path / "run"
    command = ["generate", *common(target, folder), *options]
    if parts:
        fails(main, capsys, command, *parts)
    else:
        assert main(command) == 2
        assert "nowhere.txt" in capsys.readouterr().err
    assert not list(folder.glob("data/sequences.jsonl"))


def test_prompts_that_are_left_out_are_counted(main, capsys, target, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("a boat\n" + "a long train " * 9 + "\n")
    command = ["generate", *common(target, tmp_path / "run"), "--prompts", str(file)]
    assert main([*command, "--max-tokens", "8", "--max-model-len", "64"]) == 0
    assert "1 answers, 8 tokens; 1 prompts left out" in capsys.readouterr().err


def test_answers_without_features_are_not_left_out(main, capsys, target, tmp_path):
    store = SequenceStore(tmp_path / "data", fingerprint(target))
    store.append(TokenSequence("x", "test", 0.0, 2, [3, 4, 5, 6, 7, 8]))
    FeatureStore(tmp_path / "data" / "features", fingerprint(target), (0, 2, 3))
    command = ["train", *common(target, tmp_path), *NEW, *SMALL]
    fails(main, capsys, command, "features of all 1 sequences", "--store-features")


@pytest.mark.parametrize("option", ["--checkpoint-every", "--held-out-every"])
def test_never_is_a_large_number(main, capsys, target, tmp_path, option):
    store = SequenceStore(tmp_path / "data", fingerprint(target))
    store.append(TokenSequence("x", "test", 0.0, 2, [3, 4, 5, 6, 7, 8]))
    command = ["train", *common(target, tmp_path), *NEW, *SMALL, option, "0"]
    fails(main, capsys, command, f"{option}: expected at least 1 step")


def test_an_evaluation_of_an_unknown_run(main, capsys, target, tmp_path):
    command = ["evaluate", *common(target, tmp_path), "--run", "nothing"]
    assert main(command) == 2
    assert "a run's log" in capsys.readouterr().err


def test_a_log_with_steps_done_twice(tmp_path):
    lines = [{"step": 20, "blocks": 1}, {"step": 40, "blocks": 2}, {"step": 30},
             {"step": 40, "blocks": 3}]  # fmt: skip
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    found = report.read_log(tmp_path)
    assert sorted(line["step"] for line in found) == [20, 30, 40]
    assert sum(line.get("blocks", 0) for line in found) == 4


def test_texts_of_one_name(target, tmp_path):
    store = SequenceStore(tmp_path / "data", fingerprint(target))
    files = [tmp_path / name / "part.txt" for name in "ab"]
    for file, word in zip(files, ("river ", "cloud "), strict=True):
        file.parent.mkdir()
        file.write_text(word * 5)
    tokenizer = AutoTokenizer.from_pretrained(target)
    for added in (2, 0):
        assert added == add_texts(
            files,
            store,
            tokenizer,
            length=64,
            refuse=lambda text: False,
            on_text=lambda done, total: None,
        )
