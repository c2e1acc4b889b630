"""Ten small policies of ten families: their size, their laws, and that the shared loop trains them."""

from __future__ import annotations

import pytest
import torch

from ceilings.batches import token_laws
from ceilings.families import FAMILIES, embedding_share, family_policy, inner_matrices
from ceilings.methods import make_method
from ceilings.puzzles import sorting
from ceilings.rollouts import Rollouts
from ceilings.sources import own_samples
from ceilings.testing import assert_equal
from ceilings.training import TrainingConfig, train
from ceilings.update_rules import flat_parameters

VOCAB = 6


@pytest.mark.parametrize("name", FAMILIES)
def test_a_policy_is_small_deep_and_mostly_layers(name):
    model = family_policy(name, VOCAB)
    parameters = dict(model.named_parameters())
    assert 10_000 < sum(p.numel() for p in parameters.values()) <= 100_000
    assert {p.dtype for p in parameters.values()} == {torch.float64}
    layers = {part for n in parameters for part in n.split(".") if part.isdigit()}
    assert layers == {"0", "1"}
    # By name, where `embedding_share` goes by module.
    outside = [
        p.numel() for n, p in parameters.items() if any(k in n for k in ("embed", "wte", "wpe", "head"))
    ]
    share = sum(outside) / sum(p.numel() for p in parameters.values())
    assert_equal(torch.tensor(embedding_share(model)), torch.tensor(share))
    assert share < 0.5
    inner = inner_matrices(model)
    assert inner and all(min(parameters[n].shape) >= 8 for n in inner)
    assert not any(k in n for n in inner for k in ("embed", "wte", "wpe", "head", "norm", "bias", "ln_"))


def test_the_families_differ_in_classes_and_in_numbers():
    assert len(FAMILIES) == 10
    models = [family_policy(name, VOCAB) for name in FAMILIES]
    assert len({type(model) for model in models}) == 10
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        laws = torch.stack([model(ids).logits[0, -1].log_softmax(0) for model in models])
    assert float(torch.cdist(laws, laws).fill_diagonal_(1).min()) > 1e-3


@pytest.mark.parametrize("name", FAMILIES)
def test_padding_and_later_tokens_change_no_law(name):
    """Causal, and right-padded rows score as they do alone."""
    model = family_policy(name, VOCAB, seed=1)
    rows = Rollouts(((1, 2), (3,)), ((4, 0), (2, 5, 1, 0)), torch.ones(2), (0, 1))
    with torch.no_grad():
        laws, mask = token_laws(model, rows)
        for row, (prompt, response) in enumerate(zip(rows.prompt_ids, rows.response_ids, strict=True)):
            for step in range(len(response)):
                ids = torch.tensor([[*prompt, *response[:step]]])
                alone = model(ids).logits[0, -1].log_softmax(0)
                assert_equal(laws[row, len(prompt) - 1 + step], alone, rtol=1e-6)
            assert int(mask[row].sum()) == len(response)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_shared_loop_trains_every_tensor(name):
    puzzle, model = sorting(2, 3), family_policy(name, 5)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    source = own_samples(puzzle, prompts=9, samples=8, graded=True)
    train(
        model,
        make_method("grpo"),
        source,
        puzzle,
        TrainingConfig(3, 1e-3, evaluate_every=3, evaluation_samples=1),
    )
    still = {n for n, p in model.named_parameters() if torch.equal(p, before[n])}
    assert not still, f"{name} left {still}"


def test_weights_are_the_seed_s_whatever_the_default_type_and_the_global_generator():
    torch.manual_seed(5)
    first = flat_parameters(family_policy("Gemma", VOCAB, seed=3))
    after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(1))
    before = torch.get_default_dtype()
    try:
        for kind in (torch.float32, torch.float64):
            torch.set_default_dtype(kind)
            assert torch.equal(flat_parameters(family_policy("Gemma", VOCAB, seed=3)), first)
            assert torch.get_default_dtype() is kind
    finally:
        torch.set_default_dtype(before)
    assert not torch.equal(flat_parameters(family_policy("Gemma", VOCAB, seed=4)), first)


def test_unknown_families_and_empty_vocabularies_are_refused():
    with pytest.raises(ValueError, match="no family 'Mamba': use one of Llama"):
        family_policy("Mamba", VOCAB)
    with pytest.raises(ValueError, match="a vocabulary of 1"):
        family_policy("Llama", 1)
