"""Covariance, ceiling and tightness against exact fractions, complex-step derivatives and NumPy."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ceilings.ceiling import (
    explained_reward_variance,
    gradient_ceiling,
    nested_ceiling,
    reward_variance,
    score_reward_covariance,
    score_variance,
    signed_tightness,
    tightness,
)
from ceilings.fisher import exact_diagonal_fisher, fisher_matrix, score_correlation_matrix
from ceilings.policies import AutoregressivePolicy, Enumeration, SoftmaxPolicy

F64 = torch.float64
ALL = [
    score_reward_covariance,
    score_variance,
    gradient_ceiling,
    signed_tightness,
    tightness,
    explained_reward_variance,
]
sixty = settings(max_examples=60, deadline=None, derandomize=True)


def vector(*values):
    return torch.tensor(values, dtype=F64)


def close(actual, expected, rtol=1e-10):
    actual, expected = np.asarray(actual, dtype=float), np.asarray(expected, dtype=float)
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= rtol * np.abs(expected).max() + 1e-14


@st.composite
def cases(draw):
    """A random policy of at most 27 sequences, its parameters, its law and a graded or binary reward."""
    max_len, eos = draw(st.integers(1, 3)), draw(st.sampled_from([None, 0, 1, 2]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    parameters = draw(st.integers(1, 5))
    policy = AutoregressivePolicy.random(3, max_len, parameters, generator, eos)
    theta = torch.randn(parameters, generator=generator, dtype=F64)
    law = policy.enumerate(theta)
    rewards = torch.randn(len(law.probs), generator=generator, dtype=F64)
    if draw(st.booleans()):
        rewards = (rewards > 0).double()
    return policy, theta, law, rewards


def expected_reward(policy, theta, rewards, responses):
    """E[R] by products of softmax steps in NumPy; works for complex θ."""
    features, total = policy.features.numpy(), 0.0
    for y, reward in zip(responses, rewards.tolist(), strict=True):
        product = 1.0
        for t, token in enumerate(y):
            weights = np.exp(features[policy.prefixes.index(y[:t])] @ theta)
            product = product * weights[token] / weights.sum()
        total = total + product * reward
    return total


def complex_step_gradient(policy, theta, rewards, responses):
    step = 1e-30
    return [
        expected_reward(policy, theta.numpy() + 1j * step * column, rewards, responses).imag / step
        for column in np.eye(len(theta))
    ]


# A bandit in exact fractions: every quantity of the first theorem is rational.
WEIGHTS, REWARDS = (1, 2, 3, 4), (Fraction(2), Fraction(-1), Fraction(1, 2), Fraction(3))


def exact_bandit():
    probs = [Fraction(w, sum(WEIGHTS)) for w in WEIGHTS]
    scores = [[(a == i) - probs[i] for i in range(4)] for a in range(4)]
    mean = sum(p * r for p, r in zip(probs, REWARDS, strict=True))
    gradient = [sum(p * r * s[i] for p, r, s in zip(probs, REWARDS, scores, strict=True)) for i in range(4)]
    variance = sum(p * (r - mean) ** 2 for p, r in zip(probs, REWARDS, strict=True))
    fisher = [sum(p * s[i] ** 2 for p, s in zip(probs, scores, strict=True)) for i in range(4)]
    return gradient, variance, fisher


@pytest.mark.claim("thm-ceiling")
@pytest.mark.claim("thm-covariance")
def test_a_bandit_in_exact_fractions():
    law = SoftmaxPolicy(lambda z: z).enumerate(torch.log(vector(*WEIGHTS)))
    rewards = vector(*map(float, REWARDS))
    gradient, variance, fisher = exact_bandit()
    batch = (law.scores, rewards, law.probs)
    close(score_reward_covariance(*batch), [float(g) for g in gradient])
    close(reward_variance(rewards, law.probs), float(variance))
    close(score_variance(*batch), [float(f) for f in fisher])
    close(gradient_ceiling(*batch).square(), [float(variance * f) for f in fisher])
    close(
        tightness(*batch).square(),
        [float(g * g / (variance * f)) for g, f in zip(gradient, fisher, strict=True)],
    )
    assert torch.equal(signed_tightness(*batch).sign(), vector(*[1.0 if g > 0 else -1.0 for g in gradient]))
    assert all(
        g * g < variance * f for g, f in zip(gradient, fisher, strict=True)
    )  # strict: R is affine in no s_i


@pytest.mark.claim("thm-covariance")
@sixty
@given(cases())
def test_the_covariance_is_the_derivative_of_the_expected_reward(case):
    policy, theta, law, rewards = case
    gradient = score_reward_covariance(law.scores, rewards, law.probs)
    close(gradient, complex_step_gradient(policy, theta, rewards, law.responses))


@pytest.mark.claim("thm-ceiling")
@sixty
@given(cases())
def test_no_gradient_component_exceeds_its_ceiling(case):
    _, _, law, rewards = case
    gradient = score_reward_covariance(law.scores, rewards, law.probs).abs()
    ceiling = gradient_ceiling(law.scores, rewards, law.probs)
    assert bool((gradient <= ceiling + 1e-13).all())
    fisher = exact_diagonal_fisher(law.probs, law.scores)
    close(
        ceiling,
        np.sqrt(float(reward_variance(rewards, law.probs)) * fisher.numpy()),
    )
    if not bool((rewards == rewards[0]).all()):
        close(tightness(law.scores, rewards, law.probs) * ceiling, gradient)


@pytest.mark.claim("thm-ceiling")
@sixty
@given(cases(), st.sampled_from([-3.0, 0.01, 5.0]), st.floats(-10, 10))
def test_a_reward_affine_in_one_score_reaches_that_ceiling(case, slope, shift):
    _, _, law, _ = case
    rewards = shift + slope * law.scores[:, 0]
    value = float(signed_tightness(law.scores, rewards, law.probs)[0])
    assert abs(value - np.sign(slope)) < 1e-10


@pytest.mark.claim("thm-covariance")
@sixty
@given(cases(), st.sampled_from([-2.0, 0.5, 3.0]), st.floats(-100, 100))
def test_a_constant_drops_out_and_a_factor_scales(case, factor, constant):
    _, _, law, rewards = case
    changed = factor * rewards + constant
    base, new = ((law.scores, r, law.probs) for r in (rewards, changed))
    scale = 1 + abs(constant)  # rounding grows with the constant that cancels
    assert torch.allclose(
        score_reward_covariance(*new), factor * score_reward_covariance(*base), atol=1e-13 * scale
    )
    assert torch.allclose(gradient_ceiling(*new), abs(factor) * gradient_ceiling(*base), atol=1e-13 * scale)
    if not bool((rewards == rewards[0]).all()):
        assert torch.allclose(tightness(*new), tightness(*base), atol=1e-11 * scale)


def test_stretching_a_parameter_rescales_its_gradient_and_leaves_its_tightness():
    policy, law, rewards = fixed_case()
    stretch = vector(2.0, 0.1, 1.0, 5.0)
    base, new = ((scores, rewards, law.probs) for scores in (law.scores, law.scores * stretch))
    close(score_reward_covariance(*new), score_reward_covariance(*base) * stretch)
    close(tightness(*new), tightness(*base))


@sixty
@given(st.integers(0, 10**6), st.integers(2, 40))
def test_without_weights_it_is_the_population_covariance_of_numpy(seed, n):
    generator = torch.Generator().manual_seed(seed)
    scores, rewards = (
        torch.randn(n, 3, generator=generator, dtype=F64),
        torch.randn(n, generator=generator, dtype=F64),
    )
    joint = np.cov(np.column_stack([scores, rewards]).T, ddof=0)
    close(score_reward_covariance(scores, rewards), joint[:3, 3])
    close(reward_variance(rewards), joint[3, 3])
    close(score_variance(scores, rewards), np.diag(joint)[:3])
    close(signed_tightness(scores, rewards), np.corrcoef(np.column_stack([scores, rewards]).T)[:3, 3])
    same = torch.full((n,), 1 / n, dtype=F64)
    close(score_reward_covariance(scores, rewards, same), score_reward_covariance(scores, rewards))


@pytest.mark.claim("thm-ceiling")
def test_it_holds_in_every_sample_and_so_says_nothing_there():
    generator = torch.Generator().manual_seed(0)
    mixed = 0
    for _ in range(500):
        scores, rewards = (
            torch.randn(3, 1, generator=generator, dtype=F64),
            torch.randn(3, generator=generator, dtype=F64),
        )
        gradient, ceiling = score_reward_covariance(scores, rewards).abs(), gradient_ceiling(scores, rewards)
        assert bool((gradient <= ceiling * (1 + 1e-12)).all())
        mixed += int((gradient * 3 / 2 > ceiling).any())  # N − 1 in the gradient, N in the ceiling
    assert mixed > 100


def fixed_case():
    """One policy of 15 sequences that stop early, four parameters, a graded reward."""
    generator = torch.Generator().manual_seed(11)
    policy = AutoregressivePolicy.random(3, 3, 4, generator, eos=0)
    law = policy.enumerate(torch.randn(4, generator=generator, dtype=F64))
    return policy, law, torch.randn(len(law.probs), generator=generator, dtype=F64)


@pytest.mark.claim("thm-ceiling")
@pytest.mark.parametrize("constant", [0.0, 0.1, 1 / 3, -7.3, 1e8])
@pytest.mark.parametrize("seed", range(4))
def test_a_constant_reward_has_no_tightness(constant, seed):
    generator = torch.Generator().manual_seed(seed)
    law = AutoregressivePolicy.random(3, 2, 3, generator, eos=0).enumerate(
        torch.randn(3, generator=generator, dtype=F64)
    )
    rewards = torch.full_like(law.probs, constant)
    for weights in (law.probs, None):
        batch = (law.scores, rewards, weights)
        assert bool(torch.isnan(tightness(*batch)).all()) and bool(
            torch.isnan(signed_tightness(*batch)).all()
        )
        assert bool(torch.isnan(explained_reward_variance(*batch)))
        assert float(score_reward_covariance(*batch).abs().max()) <= 1e-15 * (1 + abs(constant))
        assert float(gradient_ceiling(*batch).max()) <= 1e-14 * (1 + abs(constant))


@pytest.mark.claim("thm-ceiling")
def test_a_dead_parameter_has_no_tightness_and_both_sides_are_zero():
    _, law, rewards = fixed_case()
    scores = torch.cat([law.scores, torch.zeros(len(rewards), 1, dtype=F64)], dim=1)
    batch = (scores, rewards, law.probs)
    assert torch.isnan(tightness(*batch)).tolist() == [False] * 4 + [True]
    assert float(score_reward_covariance(*batch)[4]) == 0.0 and float(gradient_ceiling(*batch)[4]) == 0.0


@pytest.mark.parametrize("n", [3, 6, 7, 10, 13])
def test_a_score_that_is_constant_up_to_rounding_has_no_tightness(n):
    rewards = torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=F64)
    weights = torch.rand(n, generator=torch.Generator().manual_seed(n), dtype=F64)
    scores = torch.full((n, 1), 0.1, dtype=F64)  # rounding alone gives it a variance of about 1e-34
    assert bool(torch.isnan(tightness(scores, rewards, weights / weights.sum())).all())


def test_small_variances_do_not_underflow_together():
    scores = torch.tensor([[1e-15], [-1e-15]], dtype=torch.float32)
    rewards = torch.tensor([1e-6, -1e-6], dtype=torch.float32)
    assert abs(float(gradient_ceiling(scores, rewards)) / 1e-21 - 1) < 1e-5
    assert float(tightness(scores, rewards)) == pytest.approx(1, abs=1e-5)


@pytest.mark.claim("cor-bounded")
@sixty
@given(cases())
def test_the_variance_of_a_bounded_reward(case):
    _, _, law, rewards = case
    mean, variance = float(law.probs @ rewards), float(reward_variance(rewards, law.probs))
    low, high = float(rewards.min()), float(rewards.max())
    assert variance <= (high - mean) * (mean - low) + 1e-14  # Bhatia-Davis
    assert variance <= (high - low) ** 2 / 4 + 1e-14  # Popoviciu
    binary = (rewards > rewards.median()).double()
    p = float(law.probs @ binary)
    close(reward_variance(binary, law.probs), p * (1 - p))


@pytest.mark.claim("thm-joint")
@sixty
@given(cases())
def test_the_explained_share_is_the_quadratic_form_of_the_pseudo_inverse(case):
    _, _, law, rewards = case
    variance = float(reward_variance(rewards, law.probs))
    share = float(explained_reward_variance(law.scores, rewards, law.probs))
    if bool((rewards == rewards[0]).all()):
        assert np.isnan(share)
        return
    gradient = score_reward_covariance(law.scores, rewards, law.probs).numpy()
    pseudo_inverse = np.linalg.pinv(fisher_matrix(law.probs, law.scores).numpy(), rcond=1e-12, hermitian=True)
    close(share, gradient @ pseudo_inverse @ gradient / variance, rtol=1e-6)
    assert share <= 1 + 1e-12
    correlations = score_correlation_matrix(law.probs, law.scores).numpy()
    rho = tightness(law.scores, rewards, law.probs).nan_to_num().numpy()
    assert (rho**2).sum() <= np.linalg.eigvalsh(correlations).max() + 1e-12
    assert (rho**2).max() <= share + 1e-10  # one score cannot explain more than all of them


@pytest.mark.claim("thm-joint")
def test_the_scores_of_a_full_table_explain_every_reward():
    law = SoftmaxPolicy(lambda z: z).enumerate(vector(0.3, -1.0, 0.8, 0.0))
    rewards = torch.randn(4, generator=torch.Generator().manual_seed(0), dtype=F64)
    close(explained_reward_variance(law.scores, rewards, law.probs), 1.0)


def test_scores_that_never_vary_explain_nothing():
    rewards = vector(0.0, 1.0, 2.0)
    assert float(explained_reward_variance(torch.zeros(3, 2, dtype=F64), rewards)) == 0.0


def nested_oracle(policy, theta, law, rewards, baseline=None):
    """Σ_t E[σ(Q_t − b | y_<t) σ(s_t | y_<t)] by recursion over prefixes, from the features."""
    features, theta = policy.features.numpy(), theta.numpy()
    reward = dict(zip(law.responses, rewards.tolist(), strict=True))

    def visit(prefix):
        if prefix in reward:
            return reward[prefix], 0.0
        rows = features[policy.prefixes.index(prefix)]
        q = np.exp(rows @ theta) / np.exp(rows @ theta).sum()
        children = [visit((*prefix, v)) for v in range(len(q))]
        values = np.array([value for value, _ in children])
        offset = 0.0 if baseline is None else baseline[prefix]
        shifted = values - offset
        spread = np.sqrt(q @ (shifted - q @ shifted) ** 2)
        score_spread = np.sqrt(q @ (rows - q @ rows) ** 2)
        below = sum(p * total for p, (_, total) in zip(q, children, strict=True))
        return q @ values, spread * score_spread + below

    return visit(())[1]


@pytest.mark.claim("thm-nested")
@sixty
@given(cases())
def test_the_nested_ceiling_lies_between_the_gradient_and_the_plain_ceiling(case):
    policy, theta, law, rewards = case
    nested = nested_ceiling(law, rewards)
    close(nested, nested_oracle(policy, theta, law, rewards))
    gradient = score_reward_covariance(law.scores, rewards, law.probs).abs()
    ceiling = gradient_ceiling(law.scores, rewards, law.probs)
    assert bool((gradient <= nested + 1e-13).all()) and bool((nested <= ceiling + 1e-13).all())
    if policy.max_len == 1:
        close(nested, ceiling)


@pytest.mark.claim("thm-nested")
@sixty
@given(cases(), st.integers(0, 10**6))
def test_the_nested_ceiling_ignores_a_baseline_of_the_prefix(case, seed):
    policy, theta, law, rewards = case
    generator = np.random.default_rng(seed)
    baseline = {prefix: generator.normal() for prefix in policy.prefixes}
    nested = nested_ceiling(law, rewards)
    close(nested, nested_oracle(policy, theta, law, rewards, baseline), rtol=1e-9)
    close(nested_ceiling(law, rewards + 3.5), nested, rtol=1e-9)


@pytest.mark.claim("thm-nested")
def test_a_bonus_for_the_first_token_is_not_a_baseline():
    _, law, rewards = fixed_case()
    bonus = vector(*[float(y[0]) for y in law.responses])
    assert float((nested_ceiling(law, rewards + bonus) - nested_ceiling(law, rewards)).abs().max()) > 0.02


@pytest.mark.claim("thm-nested")
def test_the_conditional_variances_add_up_to_the_variance_of_the_reward():
    # With one parameter a position whose score varies with standard deviation 1 at every prefix, and a reward
    # decided by the first of two tokens, all of σ(R) sits at the first position and none at the second.
    features = torch.zeros(3, 2, 2, dtype=F64)
    features[0, 1, 0], features[1:, 1, 1] = 2.0, 2.0  # a fair coin has Var ∂z = 2² / 4 = 1
    law = AutoregressivePolicy(features, 2).enumerate(vector(0.0, 0.0))
    first = vector(*[float(y[0]) for y in law.responses])
    close(nested_ceiling(law, first), [0.5, 0.0])
    close(gradient_ceiling(law.scores, first, law.probs), [0.5, 0.5])


def test_positions_that_no_response_reaches_add_nothing():
    _, law, rewards = fixed_case()
    padded = Enumeration(
        law.responses,
        law.probs,
        law.scores,
        torch.nn.functional.pad(law.token_scores, (0, 0, 0, 2)),
        torch.nn.functional.pad(law.token_log_probs, (0, 2)),
        law.lengths,
    )
    assert torch.equal(nested_ceiling(padded, rewards), nested_ceiling(law, rewards))


def prompts(seed, count=3):
    """Three prompts of unequal weight that share parameters, each with its own features and rewards."""
    generator = torch.Generator().manual_seed(seed)
    theta = torch.randn(4, generator=generator, dtype=F64)
    cases = []
    for _ in range(count):
        policy = AutoregressivePolicy.random(3, 2, 4, generator, eos=0)
        law = policy.enumerate(theta)
        cases.append((policy, law, torch.randn(len(law.probs), generator=generator, dtype=F64)))
    weights = torch.rand(count, generator=generator, dtype=F64) + 0.1
    return theta, cases, weights / weights.sum()


@pytest.mark.claim("thm-prompts")
@pytest.mark.parametrize("seed", range(10))
def test_averaging_over_prompts_loosens_the_ceiling_in_three_steps(seed):
    theta, cases, weights = prompts(seed)
    gradients = [
        complex_step_gradient(policy, theta, rewards, law.responses) for policy, law, rewards in cases
    ]
    scores = torch.cat([law.scores for _, law, _ in cases])
    rewards = torch.cat([r for _, _, r in cases])
    joint = torch.cat([x * law.probs for x, (_, law, _) in zip(weights, cases, strict=True)])
    w, g = weights.numpy(), np.array(gradients)
    variances = np.array([float(reward_variance(r, law.probs)) for _, law, r in cases])
    fishers = np.array([exact_diagonal_fisher(law.probs, law.scores).numpy() for _, law, _ in cases])

    gradient = score_reward_covariance(scores, rewards, joint)
    ceiling = gradient_ceiling(scores, rewards, joint).numpy()
    close(gradient, w @ g)  # the mean of covariances: E[s | x] = 0 for every prompt
    chain = [
        np.abs(w @ g),
        w @ np.abs(g),
        w @ (np.sqrt(variances)[:, None] * np.sqrt(fishers)),
        np.sqrt((w @ variances) * (w @ fishers)),
        ceiling,
    ]
    for lower, upper in itertools.pairwise(chain):
        assert (lower <= upper + 1e-13).all()
    means = np.array([float(law.probs @ r) for _, law, r in cases])
    between = w @ means**2 - (w @ means) ** 2
    close(
        reward_variance(rewards, joint), w @ variances + between
    )  # the third gap is the variance between prompts


@pytest.mark.claim("thm-prompts")
def test_two_prompts_whose_gradients_cancel_leave_a_ceiling_and_no_gradient():
    law = SoftmaxPolicy(lambda theta: torch.stack([theta[0], -theta[0]])).enumerate(vector(0.0))
    scores, weights = torch.cat([law.scores, law.scores]), torch.cat([law.probs, law.probs]) / 2
    rewards = vector(1.0, 0.0, 0.0, 1.0)  # what one prompt rewards the other punishes
    assert float(score_reward_covariance(scores, rewards, weights)) == 0.0
    close(gradient_ceiling(scores, rewards, weights), [0.5])
    assert float(tightness(scores, rewards, weights)) == 0.0


@pytest.mark.claim("thm-prompts")
def test_rewards_that_differ_only_between_prompts_leave_a_joint_ceiling_and_no_gradient():
    law = SoftmaxPolicy(lambda theta: torch.stack([theta[0], -theta[0]])).enumerate(vector(0.0))
    scores, weights = torch.cat([law.scores, law.scores]), torch.cat([law.probs, law.probs]) / 2
    rewards = vector(1.0, 1.0, 0.0, 0.0)  # one prompt is easy, the other hopeless
    close(gradient_ceiling(scores, rewards, weights), [0.5])
    assert float(score_reward_covariance(scores, rewards, weights)) == 0.0
    assert all(float(reward_variance(r, law.probs)) == 0 for r in rewards.view(2, 2))


@pytest.mark.parametrize("function", ALL)
@pytest.mark.parametrize(
    ("scores", "rewards", "weights", "message"),
    [
        (torch.zeros(2, 1, dtype=F64), torch.tensor([0, 1]), None, "rewards are torch.int64"),
        (torch.zeros(2, 1, dtype=F64), vector(), None, "non-empty vector"),
        (torch.zeros(2, 1, dtype=F64), vector(0, 1)[:, None], None, r"got shape \(2, 1\)"),
        (
            torch.zeros(2, 1, dtype=F64),
            vector(0, float("nan")),
            None,
            "reward 1 is nan: every response needs a finite",
        ),
        (torch.zeros(2, 1, dtype=F64), vector(float("inf"), 0), None, "reward 0 is inf"),
        (torch.zeros(3, 1, dtype=F64), vector(0, 1), None, r"2 rewards but scores of shape \(3, 1\)"),
        (torch.zeros(2, dtype=F64), vector(0, 1), None, r"expected \(N, D\)"),
        (torch.zeros(2, 1), vector(0, 1), None, "scores are torch.float32 and rewards torch.float64: cast"),
        (
            torch.tensor([[0.0], [float("-inf")]], dtype=F64),
            vector(0, 1),
            None,
            "score of response 1 is not finite",
        ),
        (torch.zeros(2, 1, dtype=F64), vector(0, 1), vector(1), "1 weights for 2 rewards"),
        (torch.zeros(2, 1, dtype=F64), vector(0, 1), vector(0.5, 0.4), "weights sums to 0.9, not 1"),
        (torch.zeros(2, 1, dtype=F64), vector(0, 1), torch.tensor([0.5, 0.5]), "weights are torch.float32"),
        (torch.zeros(2, 1, dtype=F64), vector(0, 1), vector(1.5, -0.5), "NaN or negative"),
    ],
)
def test_a_malformed_batch_is_refused(function, scores, rewards, weights, message):
    with pytest.raises(ValueError, match=message):
        function(scores, rewards, weights)


def test_the_variance_alone_refuses_the_same():
    for bad in (torch.tensor([0, 1]), vector(), vector(float("nan"))):
        with pytest.raises(ValueError, match="reward"):
            reward_variance(bad)
    with pytest.raises(ValueError, match="sums to"):
        reward_variance(vector(0, 1), vector(0.5, 0.4))


def test_the_nested_ceiling_refuses_a_reward_for_another_set():
    _, law, rewards = fixed_case()
    with pytest.raises(ValueError, match="14 rewards but scores of shape"):
        nested_ceiling(law, rewards[1:])
    with pytest.raises(ValueError, match="reward 0 is nan"):
        nested_ceiling(law, rewards * float("nan"))


def test_a_response_of_weight_zero_counts_for_nothing():
    _, law, rewards = fixed_case()
    scores = torch.cat([law.scores, torch.full((1, 4), 9.0, dtype=F64)])
    batch = (scores, torch.cat([rewards, vector(1e3)]), torch.cat([law.probs, vector(0.0)]))
    close(gradient_ceiling(*batch), gradient_ceiling(law.scores, rewards, law.probs))
    close(tightness(*batch), tightness(law.scores, rewards, law.probs))


@pytest.mark.claim("cor-two-classes")
@sixty
@given(cases())
def test_for_two_classes_squared_tightness_is_the_variance_between_them(case):
    _, _, law, rewards = case
    inside = (rewards > rewards.median()).numpy()
    if inside.all() or not inside.any():
        return
    scores, probs = law.scores.numpy(), law.probs.numpy()
    between = np.zeros(scores.shape[1])
    for members in (inside, ~inside):
        between += probs[members].sum() * (probs[members] @ scores[members] / probs[members].sum()) ** 2
    reward = torch.where(torch.from_numpy(inside), 3.0, -1.0).to(F64)  # any two values
    square = tightness(law.scores, reward, law.probs).square().numpy()
    alive = ~np.isnan(square)
    close((square * (probs @ scores**2))[alive], between[alive], rtol=1e-9)
