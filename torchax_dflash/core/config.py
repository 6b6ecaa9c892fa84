# SPDX-License-Identifier: Apache-2.0
"""Static configuration: quirks of Hugging Face configs are resolved here.

`checkpoints/speculators.py` translates configs of the `speculators` library first.

Dimension key, used in every shape comment of this package:

    B  requests in a batch          T  new context rows, flat and padded
    Q  rows of a block              J  drafts of a block, Q - 1
    F  tapped layers x D            D  hidden size
    N  query heads                  H  key/value heads
    K  head dim                     V  vocabulary
    P  pages of a KV pool           E  stop-token slots of a request
    S  what a docstring says it is: keys, or the tokens of a sequence

`num_speculative_tokens` is J, called K in vLLM's documentation and in ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# What the modules of the `dflash` package read from `config.dflash_config`.
_DFLASH_FIELDS = frozenset(
    {
        "mask_token_id",
        "target_layer_ids",
        "block_size",
        "input_embedding_scale",
        "output_multiplier",
        "final_logit_softcapping",
    }
)
# What DFlash-2's modules read in addition.
_DFLASH2_FIELDS = frozenset(
    {"conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"}
)
# RoPE types whose frequencies depend on the length at run time: a traced program
# cannot branch on it.
_DYNAMIC_ROPE = ("dynamic", "longrope")
# A target's vocabulary may be padded by fewer ids than this.
_MAX_VOCAB_PADDING = 1024


def config_error(field: str, expected: str, got: object, remedy: str) -> ValueError:
    """The one form of every configuration error: field, expected, got, remedy."""
    return ValueError(f"{field}: expected {expected}, got {got!r}. {remedy}")


@dataclass(frozen=True)
class TargetConfig:
    """What drafting needs to know of a target model.

    Attributes:
        vocab_size: V, rows of the target's embedding (padding included).
        hidden_size: D.
        num_hidden_layers: decoder layers.
        num_key_value_heads: H.
        head_dim: K.
        eos_token_ids: tokens that end an answer.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_key_value_heads: int
    head_dim: int
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_hf(cls, hf_config: Any, generation_config: Any = None) -> TargetConfig:
        """Reads a transformers config of a causal language model.

        Args:
            hf_config: the config as transformers gives it.
            generation_config: if it names EOS tokens, they replace the config's.

        Raises:
            ValueError: the model's RoPE changes with length at run time, or it has
                layers without full or sliding attention.
        """
        text = hf_config.get_text_config()
        eos = getattr(generation_config, "eos_token_id", None)
        if eos is None:
            eos = getattr(text, "eos_token_id", None)
        eos = [] if eos is None else eos
        _check_rope(text)
        _check_layers(text, _positive_int(text, "num_hidden_layers"))
        return cls(
            vocab_size=_positive_int(text, "vocab_size"),
            hidden_size=_positive_int(text, "hidden_size"),
            num_hidden_layers=_positive_int(text, "num_hidden_layers"),
            num_key_value_heads=_kv_heads(text),
            head_dim=_head_dim(text),
            eos_token_ids=tuple(eos) if isinstance(eos, (list, tuple)) else (eos,),
        )


@dataclass(frozen=True)
class DFlashConfig:
    """A draft's configuration, checked and without the quirks of its file format.

    Attributes:
        block_size: Q of a whole block: the anchor and block_size - 1 drafts.
        mask_token_id: the token at places that are to be drafted.
        target_layer_ids: target layers whose *outputs* feed the draft, HF's
            `hidden_states[id + 1]`.
        num_target_layers: layers of the target that the draft was trained for, or None
            if its checkpoint does not say.
        vocab_size: V of the target that the draft was trained for.
        draft_vocab_size: tokens that the draft's own head knows; V unless its
            vocabulary is reduced.
        hidden_size: D, the same as the target's.
        num_hidden_layers: draft layers.
        num_key_value_heads: H of the draft.
        head_dim: K of the draft.
        input_embedding_scale: factor on the target's embeddings.
        has_selector: DFlash-2, whose drafts are chosen by a candidate selector.
        least_block_rows: the fewest rows of a block that the module runs on: as many as
            DFlash-2's convolutions look back.
    """

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_key_value_heads: int
    head_dim: int
    input_embedding_scale: float
    has_selector: bool = False
    least_block_rows: int = 1

    @property
    def feature_size(self) -> int:
        """F, the width of one context row."""
        return len(self.target_layer_ids) * self.hidden_size

    @classmethod
    def from_hf(
        cls, hf_config: Any, *, has_selector: bool = False, own_code: bool = False
    ) -> DFlashConfig:
        """Reads a draft's transformers config.

        `block_size`, `mask_token_id` and the others are looked up in `dflash_config`
        first, then at the top level.

        Args:
            hf_config: the config as transformers gives it.
            has_selector: the module is DFlash-2's.
            own_code: the checkpoint has its own module, which may read fields of
                `dflash_config` that are unknown here.

        Raises:
            ValueError: a field is missing, unknown or inconsistent.
        """
        fields = _dflash_fields(hf_config)
        known = _DFLASH_FIELDS | (_DFLASH2_FIELDS if has_selector else frozenset())
        unknown = sorted(set(fields) - known)
        if unknown and not own_code:
            raise config_error(
                "dflash_config",
                f"only {sorted(known)}",
                unknown,
                "These could change the result; update torchax-dflash or remove them.",
            )
        num_target_layers = _positive_int(
            hf_config,
            "num_target_layers",
            "Add the target's number of layers; the module needs it even when "
            "dflash_config.target_layer_ids is given.",
        )
        num_hidden_layers = _positive_int(hf_config, "num_hidden_layers")
        _check_layers(hf_config, num_hidden_layers)
        _check_rope(hf_config)
        vocab_size = _positive_int(hf_config, "vocab_size")
        config = cls(
            block_size=_lookup_int(hf_config, fields, "block_size", default=16),
            mask_token_id=_lookup_int(hf_config, fields, "mask_token_id"),
            target_layer_ids=_target_layer_ids(
                hf_config, fields, num_target_layers, num_hidden_layers
            ),
            num_target_layers=num_target_layers,
            vocab_size=vocab_size,
            draft_vocab_size=_draft_vocab_size(hf_config, vocab_size),
            hidden_size=_positive_int(hf_config, "hidden_size"),
            num_hidden_layers=num_hidden_layers,
            num_key_value_heads=_kv_heads(hf_config),
            head_dim=_head_dim(hf_config),
            input_embedding_scale=float(
                _lookup(hf_config, fields, "input_embedding_scale", 1.0)
            ),
            has_selector=has_selector,
            least_block_rows=_check_dflash2(hf_config, fields) if has_selector else 1,
        )
        if config.block_size < 2:
            raise config_error(
                "block_size",
                "an integer >= 2 (an anchor and at least one draft)",
                config.block_size,
                "Correct it in the draft's config.json.",
            )
        return config

    def check_target(self, target: TargetConfig) -> None:
        """Raises ValueError unless this draft can draft for `target`."""
        remedy = "Use the target that this draft was trained for, or another draft."
        if self.hidden_size != target.hidden_size:
            raise config_error(
                "hidden_size",
                f"the target's, {target.hidden_size}",
                self.hidden_size,
                remedy,
            )
        if self.num_target_layers is None:
            # Of the last layer, `speculators` takes the output before the final norm.
            if max(self.target_layer_ids) >= target.num_hidden_layers - 1:
                raise config_error(
                    "target_layer_ids",
                    f"layers before the target's last one, 0 to "
                    f"{target.num_hidden_layers - 2}",
                    list(self.target_layer_ids),
                    remedy,
                )
        elif self.num_target_layers != target.num_hidden_layers:
            raise config_error(
                "num_target_layers",
                f"the target's number of layers, {target.num_hidden_layers}",
                self.num_target_layers,
                remedy,
            )
        if abs(self.vocab_size - target.vocab_size) >= _MAX_VOCAB_PADDING:
            raise config_error(
                "vocab_size",
                f"the target's, {target.vocab_size}, up to padding",
                self.vocab_size,
                remedy,
            )
        if not 0 <= self.mask_token_id < target.vocab_size:
            raise config_error(
                "mask_token_id",
                f"an id of the target's embedding, 0 to {target.vocab_size - 1}",
                self.mask_token_id,
                remedy,
            )

    def check_num_speculative_tokens(self, num_speculative_tokens: int | None) -> int:
        """Returns the number of drafts a step; None means all, block_size - 1.

        Raises:
            ValueError: if it is not in 1 … block_size - 1.
        """
        most = self.block_size - 1
        if num_speculative_tokens is None:
            return most
        if not _is_int(num_speculative_tokens) or not (
            1 <= num_speculative_tokens <= most
        ):
            raise config_error(
                "num_speculative_tokens",
                f"1 to {most} (the draft's block_size is {self.block_size})",
                num_speculative_tokens,
                "Choose a number in that range.",
            )
        return num_speculative_tokens


def sliding_layers(hf_config: Any) -> frozenset[int]:
    """The layers that have a sliding window according to the config."""
    text = hf_config.get_text_config()
    layer_types = getattr(text, "layer_types", None)
    if layer_types:
        sliding = (
            i for i, kind in enumerate(layer_types) if kind.startswith("sliding")
        )
        return frozenset(sliding)
    window = getattr(text, "sliding_window", None)
    if window is None or not getattr(text, "use_sliding_window", True):
        return frozenset()
    return frozenset(range(text.num_hidden_layers))


def remote_class(hf_config: Any) -> str | None:
    """The reference to the checkpoint's own module, or None."""
    auto_map = getattr(hf_config, "auto_map", None) or {}
    return auto_map.get("AutoModel")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _dflash_fields(hf_config: Any) -> Mapping[str, Any]:
    fields = getattr(hf_config, "dflash_config", None)
    if fields is None:
        return {}
    if not isinstance(fields, Mapping):
        raise config_error(
            "dflash_config", "a mapping", fields, "Correct the draft's config.json."
        )
    return fields


def _lookup(
    hf_config: Any, fields: Mapping[str, Any], name: str, default: Any = None
) -> Any:
    value = fields.get(name)
    if value is None:
        value = getattr(hf_config, name, None)
    return default if value is None else value


def _lookup_int(
    hf_config: Any, fields: Mapping[str, Any], name: str, default: int | None = None
) -> int:
    value = _lookup(hf_config, fields, name, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise config_error(
            name,
            "an integer",
            value,
            f"Set it in dflash_config.{name} of the draft's config.json.",
        )
    return value


def _check_dflash2(hf_config: Any, fields: Mapping[str, Any]) -> int:
    """Checks DFlash-2's fields; returns the fewest rows its convolutions can take."""
    limits = {
        "conv_kernel_size": None,
        "conv_group_size": hf_config.hidden_size,
        "selector_rank": None,
        "selector_top_k": hf_config.vocab_size,
    }
    values = {name: _lookup_int(hf_config, fields, name) for name in limits}
    remedy = "Correct dflash_config in the draft's config.json."
    for name, most in limits.items():
        if values[name] < 1 or (most and values[name] > most):
            expected = f"1 to {most}" if most else "a positive integer"
            raise config_error(name, expected, values[name], remedy)
    if hf_config.hidden_size % values["conv_group_size"]:
        raise config_error(
            "conv_group_size",
            f"a divisor of hidden_size, {hf_config.hidden_size}",
            values["conv_group_size"],
            remedy,
        )
    return max(1, values["conv_kernel_size"] - 1)


def _positive_int(
    hf_config: Any, name: str, remedy: str = "Correct it in config.json."
) -> int:
    value = getattr(hf_config, name, None)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise config_error(name, "a positive integer", value, remedy)
    return value


def _draft_vocab_size(hf_config: Any, vocab_size: int) -> int:
    size = getattr(hf_config, "draft_vocab_size", None)
    if size is None:
        return vocab_size
    if not _is_int(size) or not 1 <= size <= vocab_size:
        raise config_error(
            "draft_vocab_size",
            f"1 to vocab_size, {vocab_size}",
            size,
            "Correct it in the draft's config.json.",
        )
    return size


def _kv_heads(hf_config: Any) -> int:
    heads = getattr(hf_config, "num_key_value_heads", None)
    return heads or _positive_int(hf_config, "num_attention_heads")


def _head_dim(hf_config: Any) -> int:
    head_dim = getattr(hf_config, "head_dim", None)
    return head_dim or hf_config.hidden_size // hf_config.num_attention_heads


def _target_layer_ids(
    hf_config: Any, fields: Mapping[str, Any], num_layers: int, num_draft_layers: int
) -> tuple[int, ...]:
    ids = _lookup(hf_config, fields, "target_layer_ids")
    if ids is None:
        if num_draft_layers == 1:
            return (num_layers // 2,)
        span = num_layers - 4
        ids = [
            round(1 + i * span / (num_draft_layers - 1))
            for i in range(num_draft_layers)
        ]
    if not isinstance(ids, (list, tuple)) or not ids or not all(map(_is_int, ids)):
        raise config_error(
            "target_layer_ids",
            "a list of integers, not empty",
            ids,
            "Correct dflash_config.target_layer_ids in the draft's config.json.",
        )
    if min(ids) < 0 or max(ids) >= num_layers:
        raise config_error(
            "target_layer_ids",
            f"layer ids 0 to {num_layers - 1} (num_target_layers is {num_layers})",
            list(ids),
            "Correct dflash_config.target_layer_ids in the draft's config.json.",
        )
    return tuple(ids)


def _check_layers(hf_config: Any, num_hidden_layers: int) -> None:
    layer_types = getattr(hf_config, "layer_types", None)
    if not layer_types:
        return
    if len(layer_types) != num_hidden_layers:
        raise config_error(
            "layer_types",
            f"one entry for each of the {num_hidden_layers} layers",
            list(layer_types),
            "Correct config.json.",
        )
    unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise config_error(
            "layer_types",
            "full_attention or sliding_attention",
            unknown,
            "Models with other layers are not supported.",
        )
    window = getattr(hf_config, "sliding_window", None)
    if "sliding_attention" in layer_types and (
        not isinstance(window, int) or window < 1
    ):
        raise config_error(
            "sliding_window",
            "a positive integer (layer_types has sliding layers)",
            window,
            "Set sliding_window and use_sliding_window in config.json.",
        )


def _check_rope(hf_config: Any) -> None:
    rope = getattr(hf_config, "rope_parameters", None) or {}
    # Either one set of parameters, or one per layer type.
    for parameters in rope.values() if "rope_type" not in rope else (rope,):
        rope_type = (
            parameters.get("rope_type") if isinstance(parameters, dict) else None
        )
        if rope_type in _DYNAMIC_ROPE:
            raise config_error(
                "rope_parameters.rope_type",
                "a type whose frequencies are fixed (default, linear, yarn, llama3)",
                rope_type,
                "Such models cannot be traced into one static program.",
            )
