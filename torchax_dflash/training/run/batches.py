# SPDX-License-Identifier: Apache-2.0
"""From sequences to batches: which sequences, which anchors, in what order.

All randomness is seeded by (seed, epoch) or (seed, step), so a resumed run sees exactly
the batches that it would have seen without the interruption.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from torchax_dflash.core.config import config_error
from torchax_dflash.core.target import Target
from torchax_dflash.training.data.padding import pad, padded_length
from torchax_dflash.training.data.sequences import TokenSequence
from torchax_dflash.training.model.feature_store import FeatureStore
from torchax_dflash.training.model.loss import Batch
from torchax_dflash.training.model.teacher import (
    NUM_CHOICES,
    TeacherOutputs,
    teacher_outputs,
)
from torchax_dflash.training.run.mesh import DATA, shard_rows
from torchax_dflash.training.run.recipe import Recipe

_HELD_OUT = 50  # one sequence in this many is never trained on


class Batches:
    """The batches of a run.

    Attributes:
        train: indices of the sequences that are trained on.
        held_out: indices of the others.
        sequences: all sequences.
        mesh: the devices that share each batch, or None.
        steps_per_epoch: number of batches in which each sequence occurs once.
    """

    def __init__(
        self,
        sequences: Sequence[TokenSequence],
        recipe: Recipe,
        *,
        target: Target,
        layer_ids: tuple[int, ...],
        store: FeatureStore | None,
        mesh: Mesh | None = None,
    ) -> None:
        """Splits the sequences into training and held-out ones.

        Args:
            sequences: of the data folder; with a store, those that it covers.
            recipe: batch sizes and the seed.
            target: computes features where none are stored.
            layer_ids: tapped layers.
            store: stored features, or None to compute them for each batch.
            mesh: the devices that share each batch, or None.

        Raises:
            ValueError: there is no sequence to train on, or the mesh does not divide
                the batch.
        """
        self.sequences, self._recipe = sequences, recipe
        self._target, self._layer_ids, self._store = target, layer_ids, store
        self.mesh = mesh
        if mesh is not None and recipe.sequences % mesh.shape[DATA]:
            raise config_error(
                "sequences",
                f"a multiple of the mesh's first number, {mesh.shape[DATA]}",
                recipe.sequences,
                "Change one of them.",
            )
        self.train: list[int] = []
        self.held_out: list[int] = []
        for index, sequence in enumerate(sequences):
            if len(sequence.token_ids) - _first_anchor(sequence) < 2:
                continue
            # By content, so that adding data does not move it.
            digest = zlib.crc32(np.array(sequence.token_ids, np.int32).tobytes())
            is_held_out = digest % _HELD_OUT == 0
            (self.held_out if is_held_out else self.train).append(index)
        if not self.train:
            raise config_error(
                "--data",
                "sequences with answers of two tokens or more",
                f"{len(sequences)} sequences, none of them",
                "Run the step `generate` first.",
            )
        self._epoch, self._order = -1, [[0]]
        self.steps_per_epoch = len(self._epoch_order(0))

    def batch(self, step: int) -> Batch:
        """The batch of one step."""
        epoch, place = divmod(step, self.steps_per_epoch)
        indices = self._epoch_order(epoch)[place]
        rng = np.random.default_rng((self._recipe.seed, 1, step))
        return self._make(indices, rng)

    def held_out_batches(self, most: int) -> list[Batch]:
        """The same batches at every call, of up to `most` held-out sequences."""
        rng = np.random.default_rng((self._recipe.seed, 2))
        chosen = self._in_batches(self.held_out[:most])
        return [self._make(indices, rng) for indices in chosen]

    def token_counts(self, vocab_size: int) -> np.ndarray:
        """How often each token occurs in answers that are trained on, [V]."""
        counts = np.zeros(vocab_size, np.int64)
        for index in self.train:
            sequence = self.sequences[index]
            answer = sequence.token_ids[_first_anchor(sequence) :]
            np.add.at(counts, answer, 1)
        return counts

    def _epoch_order(self, epoch: int) -> list[list[int]]:
        if self._epoch != epoch:
            rng = np.random.default_rng((self._recipe.seed, 0, epoch))
            shuffled = rng.permutation(self.train).tolist()
            batches = self._in_batches(shuffled)
            self._order = [batches[i] for i in rng.permutation(len(batches))]
            self._epoch = epoch
        return self._order

    def _in_batches(self, indices: list[int]) -> list[list[int]]:
        """Groups sequences of one padded length, in the order given."""
        batches: list[list[int]] = []
        open_batches: dict[int, list[int]] = {}
        for index in indices:
            padded = padded_length(len(self.sequences[index].token_ids))
            batch = open_batches.setdefault(padded, [])
            batch.append(index)
            if len(batch) == self._recipe.sequences:
                batches.append(open_batches.pop(padded))
        return batches + list(open_batches.values())

    def _make(self, indices: list[int], rng: np.random.Generator) -> Batch:
        rows = self._recipe.sequences
        token_ids, lengths = pad([self.sequences[i] for i in indices], rows=rows)
        anchors = np.zeros((rows, self._recipe.anchors), np.int32)
        for row, index in enumerate(indices):
            sequence = self.sequences[index]
            possible = np.arange(_first_anchor(sequence), lengths[row])
            count = min(len(possible), self._recipe.anchors)
            anchors[row, :count] = np.sort(rng.choice(possible, count, replace=False))
        outputs = self._teacher_outputs(indices, token_ids, lengths)
        batch = Batch(
            token_ids=jnp.asarray(token_ids),
            lengths=jnp.asarray(lengths),
            features=outputs.features,
            choices=outputs.choices,
            logprobs=outputs.logprobs,
            anchors=jnp.asarray(anchors),
        )
        return batch if self.mesh is None else shard_rows(batch, self.mesh)

    def _teacher_outputs(
        self, indices: list[int], token_ids: np.ndarray, lengths: np.ndarray
    ) -> TeacherOutputs:
        if self._store is None:
            rows = (token_ids, lengths)
            rows = rows if self.mesh is None else shard_rows(rows, self.mesh)
            return teacher_outputs(self._target, *rows, layer_ids=self._layer_ids)
        read = [
            self._store.read(index, int(n))
            for index, n in zip(indices, lengths, strict=False)
        ]
        shape = token_ids.shape
        features = np.zeros((*shape, read[0].features.shape[1]), read[0].features.dtype)
        choices = np.zeros((*shape, NUM_CHOICES), np.int32)
        logprobs = np.zeros((*shape, NUM_CHOICES), np.float32)
        for row, stored in enumerate(read):
            n = len(stored.choices)
            features[row, :n] = stored.features
            choices[row, :n] = stored.choices
            logprobs[row, :n] = stored.logprobs
        return TeacherOutputs(*map(jnp.asarray, (features, choices, logprobs)))


def _first_anchor(sequence: TokenSequence) -> int:
    """The answer's first token; position 0 has no context to draft from."""
    return max(1, sequence.num_prompt_tokens)
