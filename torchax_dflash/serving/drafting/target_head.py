# SPDX-License-Identifier: Apache-2.0
"""The served target's embedding and output head, as the draft borrows them."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

_EMBEDDING = (
    "embed_tokens.weight",
    "tok_embeddings.weight",
    "wte.weight",
    "embed.embedding",  # tpu-inference's Llama
)
_HEAD = ("lm_head.weight", "embed_out.weight", "model.lm_head")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ServedHead:
    """Views of arrays that the target owns; a pytree.

    Attributes:
        embedding: [V padded, D].
        head: [V padded, D], or [D, V padded]; the embedding itself if tied.
        vocab_size: V without padding (static); padded rows are never drafted.
    """

    embedding: jax.Array
    head: jax.Array
    vocab_size: int = field(metadata={"static": True})

    @classmethod
    def of(
        cls,
        arrays: dict[str, jax.Array],
        *,
        tied: bool,
        vocab_size: int,
        hidden_size: int,
    ) -> ServedHead:
        """Finds both among the runner's arrays by name.

        Args:
            arrays: `runner.state` of a PyTorch-path target.
            tied: by the config, the head is the embedding.
            vocab_size: V without padding.
            hidden_size: the draft's D.

        Raises:
            RuntimeError: there is not exactly one of each.
        """
        embedding = _the_one(arrays, _EMBEDDING, "embedding")
        if embedding is None:
            raise RuntimeError(
                f"target: expected one weight named like {_EMBEDDING[0]}, got none "
                f"among {len(arrays)}. This target is not supported with DFlash."
            )
        head = _the_one(arrays, _HEAD, "output head")
        if head is None and not tied:
            raise RuntimeError(
                f"target: expected one weight named like {_HEAD[0]} (its head is not "
                "tied), got none. This target is not supported with DFlash."
            )
        head = embedding if head is None else head
        for name, array in (("embedding", embedding), ("output head", head)):
            if hidden_size not in array.shape or array.ndim != 2:
                raise RuntimeError(
                    f"target's {name}: expected a matrix with a side of the draft's "
                    f"hidden_size, {hidden_size}, got {array.shape}. Use the target "
                    "this draft was trained for."
                )
        return cls(embedding=embedding, head=head, vocab_size=vocab_size)

    def embed(self, token_ids: jax.Array) -> jax.Array:
        """Raw embeddings, int32 [...] -> [..., D]."""
        return jnp.take(self.embedding, token_ids, axis=0)

    def project(self, hidden: jax.Array) -> jax.Array:
        """Raw logits, [..., D] -> [..., V padded]; padding is the lowest number."""
        head = self.head.T if self.head.shape[-1] == hidden.shape[-1] else self.head
        logits = hidden @ head.astype(hidden.dtype)
        real = jnp.arange(logits.shape[-1]) < self.vocab_size
        return jnp.where(real, logits, jnp.finfo(logits.dtype).min)


def _the_one(
    arrays: dict[str, jax.Array], suffixes: tuple[str, ...], what: str
) -> jax.Array | None:
    found = {name: a for name, a in arrays.items() if name.endswith(suffixes)}
    if len(found) > 1:
        raise RuntimeError(
            f"target's {what}: expected one weight named like {suffixes[0]}, got "
            f"{sorted(found)}. This target is not supported with DFlash."
        )
    return next(iter(found.values()), None)
