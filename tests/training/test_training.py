# SPDX-License-Identifier: Apache-2.0
"""The training forward, loss and step against the generator, PyTorch and themselves."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from paged_requests import VARIANTS, Ours
from tiny_models import BLOCK, MASK_ID, VOCAB, make_torch_draft, pair
from torch.nn import functional
from training_runs import sequences

from torchax_dflash import DraftModel
from torchax_dflash.training.model.anchored import anchored_hidden_states
from torchax_dflash.training.model.loss import Batch, Vocabulary, block_targets, score
from torchax_dflash.training.model.objective import Objective
from torchax_dflash.training.model.teacher import teacher_outputs

LAYER_IDS = (0, 2, 3)
OBJECTIVE = Objective(soft=0.3)


def make_batch(target, ids, lengths, anchors):
    outputs = teacher_outputs(target, ids, lengths, layer_ids=LAYER_IDS)
    return Batch(
        token_ids=jnp.array(ids),
        lengths=jnp.array(lengths),
        features=outputs.features,
        choices=outputs.choices,
        logprobs=outputs.logprobs,
        anchors=jnp.array(anchors),
    )


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_teacher_outputs_equal_pytorch(family):
    tiny = pair(family, True)
    ids, lengths = sequences()
    outputs = teacher_outputs(tiny.target, ids, lengths, layer_ids=LAYER_IDS)
    for row, length in enumerate(lengths):
        with torch.no_grad():
            out = tiny.torch_target(
                torch.tensor(ids[row : row + 1, :length]).long(),
                output_hidden_states=True,
            )
        states = [out.hidden_states[i + 1] for i in LAYER_IDS]
        want = torch.cat(states, dim=-1)[0].numpy()
        got = outputs.features[row, :length]
        np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5)
        best, choices = out.logits[0].log_softmax(-1).topk(8)
        np.testing.assert_array_equal(outputs.choices[row, :length], choices)
        np.testing.assert_allclose(outputs.logprobs[row, :length], best, atol=1e-4)
        assert not np.asarray(outputs.features[row, length:]).any()


@pytest.mark.parametrize("variant", VARIANTS)
def test_many_anchors_at_once_equal_the_generators_steps(variant):
    """One training forward gives what ingest and draft give at each anchor."""
    module = make_torch_draft(**VARIANTS[variant])
    draft = DraftModel.from_torch(module)
    rng = np.random.default_rng(1)
    batch, length, hidden = 2, 30, draft.config.hidden_size
    shape = (batch, length, draft.config.feature_size)
    features = rng.standard_normal(shape, np.float32)
    anchors = np.array([[1, 2, 9, 30], [3, 6, 7, 28]], np.int32)
    noise = rng.standard_normal((batch, 4, BLOCK, hidden), np.float32)
    got = jax.jit(anchored_hidden_states)(draft, features, noise, anchors)
    for index in range(anchors.shape[1]):
        ours = Ours(draft, batch)
        ours.ingest([features[b, : anchors[b, index]] for b in range(batch)])
        want = ours.hidden(noise[:, index])
        np.testing.assert_allclose(got[:, index], want, atol=1e-5, rtol=0)


def test_labels_are_the_targets_choices_while_the_text_follows_them():
    ids = jnp.array([[7, 1, 2, 3, 9, 5, 0, 0]])
    choices = jnp.array([[1, 2, 3, 4, 5, 6, 0, 0]])[..., None]  # 9 was not chosen
    batch = Batch(
        token_ids=ids,
        lengths=jnp.array([6]),
        features=jnp.zeros((1, 8, 1)),
        choices=jnp.tile(choices, (1, 1, 2)),
        logprobs=jnp.log(jnp.full((1, 8, 2), 0.25)),
        anchors=jnp.array([[1, 2, 4, 0]]),
    )
    wanted = block_targets(batch, 4)
    labels, counts = wanted.labels[0], wanted.counts[0]
    np.testing.assert_array_equal(labels[0], [2, 3, 4])
    np.testing.assert_array_equal(counts[0], [True, True, True])
    np.testing.assert_array_equal(labels[1], [3, 4, 5])
    np.testing.assert_array_equal(counts[1], [True, True, False])  # after the 9
    np.testing.assert_array_equal(labels[2][:2], [5, 6])
    np.testing.assert_array_equal(counts[2], [True, True, False])  # the text ends
    assert not counts[3].any()  # padding
    np.testing.assert_allclose(wanted.probs, 0.5, rtol=1e-6)
    np.testing.assert_allclose(wanted.known, 0.5, rtol=1e-6)


def torch_loss(module, tiny, batch, block_size, gamma, soft):
    """The same loss in plain PyTorch, anchor by anchor."""
    embedding = tiny.torch_target.get_input_embeddings().weight.detach()
    head = tiny.torch_target.get_output_embeddings().weight.detach()
    total = weight = 0.0
    for row, anchors in enumerate(np.asarray(batch.anchors)):
        ids = torch.tensor(np.asarray(batch.token_ids[row])).long()
        for anchor in anchors[anchors > 0]:
            block = torch.tensor([int(ids[anchor])] + [MASK_ID] * (block_size - 1))
            hidden = module(
                target_hidden=torch.tensor(np.asarray(batch.features[row, :anchor]))[
                    None
                ],
                noise_embedding=embedding[block][None],
                position_ids=torch.arange(int(anchor) + block_size)[None],
            )[0, 1:]
            logits = module.compute_logits(hidden, lambda h: h @ head.T)
            before = ids[anchor]
            for j in range(block_size - 1):
                place = int(anchor) + j
                if place >= int(batch.lengths[row]):
                    break
                choices = torch.tensor(np.asarray(batch.choices[row, place])).long()
                probs = torch.tensor(np.exp(batch.logprobs[row, place]))
                logprobs = logits[j].log_softmax(-1)
                hard = functional.nll_loss(logprobs, choices[0])
                soft_loss = -(probs / probs.sum() * logprobs[choices]).sum()
                factor = np.exp(-j / gamma)
                total = total + factor * ((1 - soft) * hard + soft * soft_loss)
                if selector := getattr(module, "candidate_selector", None):
                    best, candidates = logits[j].topk(selector.top_k)
                    state = selector.hidden_projection(hidden[j])
                    state = state * selector.predecessor_codebook(before)
                    scores = best + selector.successor_codebook(candidates) @ state
                    if (at := (candidates == choices[0]).nonzero()).numel():
                        total = total - factor * scores.log_softmax(-1)[at[0, 0]]
                    before = choices[0]
                weight += factor
                if place + 1 < len(ids) and ids[place + 1] != choices[0]:
                    break
    return total / weight


@pytest.mark.parametrize("variant", ["full", "sliding", "DFlash-2"])
def test_loss_and_gradients_equal_pytorch_autograd(variant):
    tiny = pair("llama", False)
    module = make_torch_draft(**VARIANTS[variant]).train()
    draft = DraftModel.from_torch(module)
    ids, lengths = sequences()
    ids[0, 4:10] = follow(tiny, ids[0, :4], 6)  # so that later positions count
    anchors = np.array([[3, 4, 9], [1, 5, 11], [2, 0, 0]], np.int32)
    batch = make_batch(tiny.target, ids, lengths, anchors)

    def loss(params):
        result = score(
            replace(draft, params=params),
            tiny.target,
            batch,
            block_size=4,
            objective=OBJECTIVE,
        )
        return result.loss / result.weight

    got, grads = jax.jit(jax.value_and_grad(loss))(draft.params)
    want = torch_loss(module, tiny, batch, 4, 4.0, 0.3)
    want.backward()
    assert float(got) == pytest.approx(want.item(), rel=1e-4)
    for name, parameter in module.named_parameters():
        ours = np.asarray(grads[name])
        ours = ours.T if name in draft.module.linear_weights else ours
        theirs = parameter.grad.numpy()
        error = np.abs(ours - theirs).max() / np.abs(theirs).max()
        assert error <= 1e-4, name


def follow(tiny, prompt, count):
    """The target's greedy continuation."""
    ids = torch.tensor(np.asarray(prompt)).long()[None]
    for _ in range(count):
        with torch.no_grad():
            token = tiny.torch_target(ids).logits[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat([ids, token], dim=1)
    return ids[0, -count:].numpy()


def test_a_part_of_the_vocabulary_gives_the_same_loss_if_it_is_all_of_it():
    tiny = pair("llama", False)
    draft = tiny.draft
    ids, lengths = sequences()
    batch = make_batch(tiny.target, ids, lengths, np.array([[2, 7]] * 3, np.int32))
    order = np.random.default_rng(0).permutation(VOCAB).astype(np.int32)
    index = np.argsort(order).astype(np.int32)
    whole = Vocabulary(jnp.array(order), jnp.array(index), jnp.zeros(VOCAB))
    how = {"block_size": 4, "objective": OBJECTIVE}
    want = score(draft, tiny.target, batch, **how)
    got = score(draft, tiny.target, batch, whole, **how)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_rows_are_cut_into_slices_without_changing_anything():
    tiny = pair("llama", False)
    ids, lengths = sequences()
    batch = make_batch(tiny.target, ids, lengths, np.array([[2, 7]] * 3, np.int32))
    how = {"block_size": 4, "objective": OBJECTIVE}
    want = score(tiny.draft, tiny.target, batch, **how)
    got = score(tiny.draft, tiny.target, batch, logit_rows=5, **how)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
