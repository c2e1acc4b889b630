"""The exact decoder and its tree of responses: brute force, finite differences, Hugging Face's Llama."""

import itertools
import math

import pytest
import torch

from ceilings.reference import brute_force_enumeration, finite_difference_gradient, per_sequence_scores
from ceilings.testing import assert_equal
from ceilings.transformer import (
    TinyTransformer,
    TransformerConfig,
    enumerate_responses,
    enumeration,
    expected_reward,
)

F64 = torch.float64
PROMPT = (1, 3)


def tiny(tied=True, seed=0, **changes):
    shape = {"vocab_size": 4, "width": 8, "depth": 2, "heads": 2, "mlp_width": 12, "tied": tied}
    return TinyTransformer(TransformerConfig(**(shape | changes)), seed)


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def flat_grad(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def with_parameters(model, theta):
    """Copy a flat vector into the model."""
    torch.nn.utils.vector_to_parameters(theta, model.parameters())


def test_every_number_is_float64_from_token_to_logit():
    model = tiny()
    seen = []
    for module in model.modules():
        module.register_forward_hook(lambda _module, _args, output: seen.append(output.dtype))
    model(torch.tensor([[0, 1, 2]]))
    assert len(seen) > 10 and set(seen) == {F64}
    assert {p.dtype for p in model.parameters()} == {F64}


def test_weights_come_from_the_seed_alone():
    torch.manual_seed(1)
    first = flat(tiny(seed=5))
    torch.manual_seed(2)
    assert torch.equal(first, flat(tiny(seed=5)))
    assert not torch.equal(first, flat(tiny(seed=6)))


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_one_parameter(tied):
    names = [name for name, _ in tiny(tied).named_parameters()]
    assert ("lm_head.weight" in names) is not tied
    assert names[0] == "model.embed_tokens.weight"


def test_next_token_laws_are_far_from_uniform_and_a_small_init_scale_makes_them_uniform():
    ids = torch.randint(12, (40, 5), generator=torch.Generator().manual_seed(0))
    laws = [tiny(vocab_size=12, init_scale=scale)(ids).detach().softmax(-1) for scale in (1.0, 0.05)]
    entropy = [float(-(law * law.log()).sum(-1).mean()) for law in laws]
    assert entropy[0] < math.log(12) - 0.2 and entropy[1] > math.log(12) - 0.01


def test_a_later_token_changes_no_earlier_logit():
    model, ids = tiny(), torch.tensor([[0, 1, 2, 3], [0, 1, 2, 0]])
    logits = model(ids)
    assert torch.equal(logits[0, :3], logits[1, :3]) and not torch.equal(logits[0, 3], logits[1, 3])


def test_the_same_token_means_something_else_at_another_position():
    logits = tiny()(torch.tensor([[0, 1, 2, 2]]))[0].detach()
    assert float((logits[2] - logits[3]).abs().max()) > 1e-3


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_changes_no_logit_of_a_real_token(side):
    model, ids = tiny(), torch.tensor([[2, 0, 1]])
    pads = torch.tensor([[3, 3]])
    parts, ones = ([pads, ids], [0, 0, 1, 1, 1]) if side == "left" else ([ids, pads], [1, 1, 1, 0, 0])
    padded = model(torch.cat(parts, 1), torch.tensor([ones])).detach()
    assert_equal(padded[0, torch.tensor(ones).bool()], model(ids)[0].detach(), rtol=1e-12)


def test_it_is_the_llama_of_hugging_face_up_to_that_ones_float32_casts():
    transformers = pytest.importorskip("transformers")
    model = tiny(depth=2)
    config = transformers.LlamaConfig(
        vocab_size=4,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    other = transformers.LlamaForCausalLM(config).double()
    other.load_state_dict(model.state_dict())
    ids = torch.tensor([[0, 1, 2, 3, 1]])
    assert_equal(other(ids).logits.detach(), model(ids).detach(), rtol=1e-5)


def test_impossible_shapes_are_refused():
    with pytest.raises(ValueError, match="width 6 is not a multiple of 2 \\* heads = 4"):
        TransformerConfig(4, 6, 1, 2, 8)
    with pytest.raises(ValueError, match="depth is 0"):
        TransformerConfig(4, 8, 0, 2, 8)


@pytest.mark.parametrize(("eos", "max_len"), [(None, 3), (2, 3), (0, 1), (None, 1)])
def test_the_tree_is_the_law_found_by_trying_every_string(eos, max_len):
    model = tiny()
    law = enumerate_responses(model, PROMPT, max_len, eos)

    def next_token(prefix):
        return model(torch.tensor([PROMPT + prefix]))[0, -1].detach().softmax(-1)

    expected = brute_force_enumeration(next_token, 4, max_len, eos)
    assert law.responses == tuple(sorted(expected))
    assert_equal(law.probs, torch.tensor([expected[y] for y in law.responses], dtype=F64), rtol=1e-12)
    assert abs(float(law.probs.sum()) - 1) < 1e-12
    assert law.lengths.tolist() == [len(y) for y in law.responses]
    ended = torch.arange(max_len) >= law.lengths[:, None]
    assert not law.token_log_probs[ended].any() and bool((law.token_log_probs[~ended] < 0).all())


def test_a_whole_law_as_token_rows():
    law = enumerate_responses(tiny(), PROMPT, 2, eos=0)
    ids, mask = law.batch()
    for row, scored, response in zip(ids.tolist(), mask.tolist(), law.responses, strict=True):
        assert tuple(row[:2]) == PROMPT and not any(scored[:2])
        assert tuple(t for t, m in zip(row, scored, strict=True) if m) == response


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.claim("thm-zero-mean")
@pytest.mark.claim("thm-covariance")
def test_scores_have_mean_zero_and_their_covariance_is_the_gradient_through_the_tree(tied):
    model = tiny(tied)
    everything = enumeration(model, PROMPT, 3, eos=2, chunk=7)
    scale = everything.probs @ everything.scores.abs()
    assert float((everything.probs @ everything.scores).abs().max()) < 1e-12 * float(scale.max())
    rewards = everything.rewards(lambda y: len(y) + 0.3 * y[0])
    expected_reward(model, PROMPT, rewards, 3, eos=2).backward()
    assert_equal((everything.probs * rewards) @ everything.scores, flat_grad(model))


@pytest.mark.parametrize("tied", [True, False])
def test_scores_of_the_tree_are_those_of_one_backward_pass_a_response(tied):
    model = tiny(tied)
    everything = enumeration(model, PROMPT, 2, eos=1)
    ids, mask = enumerate_responses(model, PROMPT, 2, eos=1).batch()
    attention = torch.cat([torch.ones(len(ids), len(PROMPT), dtype=torch.bool), mask[:, len(PROMPT) :]], 1)
    loop = per_sequence_scores(model, ids, mask, attention)
    assert_equal(everything.scores, torch.cat([s.flatten(1) for s in loop.values()], 1))
    assert_equal(everything.token_scores.sum(1), everything.scores)


def test_the_gradient_through_the_tree_is_a_difference_quotient():
    model = tiny(width=4, depth=1, heads=1, mlp_width=4, vocab_size=3)
    theta = flat(model)

    def objective(point):
        with_parameters(model, point)
        return expected_reward(model, PROMPT[:1], lambda y: float(sum(y) == 2), 2).detach()

    numeric = finite_difference_gradient(objective, theta)
    with_parameters(model, theta)
    expected_reward(model, PROMPT[:1], lambda y: float(sum(y) == 2), 2).backward()
    assert_equal(flat_grad(model), numeric, rtol=1e-8)


@pytest.mark.claim("thm-tokens")
def test_token_scores_are_martingale_differences():
    everything = enumeration(tiny(), PROMPT, 3, eos=2)
    token_scores = everything.token_scores
    whole = everything.probs @ everything.scores.square()
    assert_equal((everything.probs[:, None, None] * token_scores.square()).sum((0, 1)), whole)
    for prefix in itertools.chain([()], [(0,), (1,), (3,)]):
        inside = torch.tensor(
            [y[: len(prefix)] == prefix and len(y) > len(prefix) for y in everything.responses]
        )
        mean = everything.probs[inside] @ token_scores[inside, len(prefix)]
        assert float(mean.abs().max()) < 1e-12 * float(token_scores.abs().max())


def test_what_cannot_be_enumerated_is_refused():
    model = tiny()
    with pytest.raises(ValueError, match="both must be at least 1"):
        enumerate_responses(model, (), 2)
    with pytest.raises(ValueError, match="both must be at least 1"):
        enumerate_responses(model, PROMPT, 0)
    with pytest.raises(ValueError, match="eos is 4, not one of the 4 tokens"):
        enumerate_responses(model, PROMPT, 2, eos=4)
    with pytest.raises(ValueError, match=r"rewards of shape \(3,\) for 16 responses"):
        expected_reward(model, PROMPT, torch.zeros(3, dtype=F64), 2)
