"""The counterexamples of the chapter on algorithms, by the losses themselves: what takes each ceiling away."""

import itertools
import math

import pytest
import torch

from ceilings import losses

HALF = 0.5


def vector(*values):
    return torch.tensor(values, dtype=torch.float64)


def update(loss, slopes, at):
    """Minus the derivative, in the multiplier of the slopes, of a loss of the log-probabilities of the responses."""
    theta = torch.tensor(at, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(loss((vector(*slopes) * theta).log_softmax(0)), theta)
    return -float(slope)


def of_two(loss, p=HALF):
    """The same for two responses, the first of probability p and with the parameter as its logit."""
    return update(loss, (1.0, 0.0), math.log(p / (1 - p)))


def rows(logs, picked, lengths=None):
    """Token log-probabilities of the picked responses: all of it in the first token; and the mask."""
    lengths = lengths or [1] * len(logs)
    mask = torch.tensor([[t < lengths[y] for t in range(max(lengths))] for y in picked])
    return torch.where(mask & (torch.arange(mask.shape[1]) == 0), logs[list(picked)][:, None], 0), mask


@pytest.mark.claim("prop-voids")
def test_a_second_step_on_the_same_batch():
    def step(batch, p):
        reward = vector(*[1.0 - y for y in batch])
        return of_two(lambda logs: losses.rloo_loss(*rows(logs, batch), reward, [0, 0]), p)

    first = second = roof = 0.0
    for batch in itertools.product((0, 1), repeat=2):
        reached = 0.75 if step(batch, HALF) > 0 else HALF
        first, second = first + step(batch, HALF) / 4, second + step(batch, reached) / 4
        roof += reached * (1 - reached) / 4  # σ_π(R) √F where the second step is taken
    assert first == pytest.approx(1 / 4, rel=1e-12)  # on its roof
    assert second == pytest.approx(1 / 4, rel=1e-12) and roof == pytest.approx(7 / 32, rel=1e-12)


@pytest.mark.claim("prop-voids")
@pytest.mark.parametrize("p", [0.01, 0.1, 0.5])
def test_the_deviation_of_the_group(p):
    total = 0.0
    for group in itertools.product((0, 1), repeat=3):
        mass = math.prod(p if y == 0 else 1 - p for y in group)
        reward = vector(*[1.0 - y for y in group])
        total += mass * of_two(
            lambda logs, g=group, r=reward: losses.grpo_loss(*rows(logs, g), r, [0] * 3), p
        )
    spread = p * (1 - p)
    assert total**2 == pytest.approx(4 / 3 * spread**2, rel=1e-10)
    assert spread**2 < total**2 < 2 / 3 * 3 * spread * spread


@pytest.mark.claim("prop-voids")
def test_the_length_turns_grpo_against_the_reward():
    slopes, lengths, reward = (-1.0, 2.0, 0.0, -1.0), [1, 4, 1, 4], vector(1.0, 1.0, 0.0, 0.0)
    pairs = list(itertools.product(range(4), repeat=2))

    def expected(loss):
        return update(
            lambda logs: sum(loss(*rows(logs, g, lengths), reward[list(g)], [0, 0]) for g in pairs) / 16,
            slopes,
            0.0,
        )

    assert expected(losses.rloo_loss) == pytest.approx(1 / 4, rel=1e-12)
    assert expected(losses.grpo_loss) == pytest.approx(-1 / 32 / 2**0.5, rel=1e-12)


@pytest.mark.claim("prop-voids")
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_the_clip_pushes_where_the_signal_is_a_constant(advantage):
    behaviour = vector(HALF, HALF).log()

    def expected(epsilon):
        return of_two(
            lambda logs: (
                sum(
                    losses.ppo_loss(
                        *rows(logs, (y,)), vector(advantage), behaviour[y].reshape(1, 1), epsilon=epsilon
                    )
                    for y in (0, 1)
                )
                / 2
            ),
            0.75,
        )

    assert expected(0.2) == pytest.approx(-3 / 16, rel=1e-12)
    assert expected(0.6) == pytest.approx(0, abs=1e-15)
    # The roof of what the clip has left of the signal: one of two equally likely responses, and r s = ±3/8.
    left, direction = vector(advantage, 0.0), vector(3 / 8, -3 / 8)
    roof = float(left.std(correction=0) * direction.std(correction=0))
    assert abs(expected(0.2)) == pytest.approx(roof, rel=1e-12)


@pytest.mark.claim("prop-voids")
def test_dropped_ties_and_foreign_pairs():
    for p in (0.01, 0.5):
        logs_ref = vector(p, 1 - p).log()
        found = of_two(
            lambda logs, r=logs_ref: losses.dpo_loss(logs[:1], logs[1:], r[:1], r[1:], beta=1.0), p
        )
        spread = p * (1 - p)
        assert found == pytest.approx(0.5, rel=1e-12)
        assert found > 0.5 * (2 * spread) ** 0.5
        assert found == pytest.approx(0.5 * (2 * spread / (2 * spread)) ** 0.5, rel=1e-12)
        # Of pairs of (½, ½) half are kept.
        assert p == HALF or found > 0.5 * (2 * spread / 0.5) ** 0.5


@pytest.mark.claim("prop-voids")
def test_what_is_not_centred():
    data, reference = vector(0.75, 0.25), vector(HALF, HALF).log()

    def kto(logs):
        each = [
            losses.kto_loss(logs[y : y + 1], reference[y : y + 1], torch.tensor([True]), 0.0, beta=1.0)
            for y in (0, 1)
        ]
        return data[0] * each[0] + data[1] * each[1]

    assert of_two(kto) == pytest.approx(1 / 16, rel=1e-12)
    reinforce = of_two(
        lambda logs: sum(data[y] * losses.reinforce_loss(*rows(logs, (y,)), vector(1.0)) for y in (0, 1))
    )
    assert reinforce == pytest.approx(1 / 4, rel=1e-12)


def coin(loss):
    """Mean over the pairs of two equally likely responses, of one and of two tokens, whichever the coin prefers."""
    lengths = torch.tensor([1, 2])
    return of_two(
        lambda logs: (
            sum(
                loss(logs[[y]], logs[[z]], lengths[[y]], lengths[[z]])
                for y, z in itertools.product((0, 1), repeat=2)
            )
            / 4
        )
    )


@pytest.mark.claim("prop-voids")
def test_a_coin_moves_orpo_and_simpo_to_the_shorter_response():
    likelihood = coin(lambda *pair: losses.orpo_loss(*pair, odds_weight=1e-9))
    assert likelihood == pytest.approx(1 / 8, rel=1e-6)
    assert coin(lambda *pair: losses.simpo_loss(*pair, beta=2.0, margin=0.0)) == pytest.approx(
        1 / 8, rel=1e-12
    )


@pytest.mark.claim("prop-voids")
def test_distinct_successes_count_alike():
    offset = vector(9 / 20, 1 / 20, 1 / 2).log()  # two successes and a failure

    def shifted(loss):
        theta = torch.tensor(0.0, dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(loss((offset + vector(0.0, 1.0, 0.0) * theta).log_softmax(0)), theta)
        return -float(slope)

    accepted = torch.tensor([True] * 10)
    drawn = [0] * 9 + [1]
    as_drawn = shifted(lambda logs: losses.rejection_sampling_loss(*rows(logs, drawn), accepted))
    distinct = shifted(lambda logs: losses.supervised_loss(*rows(logs, (0, 1))))
    assert as_drawn**2 == pytest.approx(1 / 400, rel=1e-10)
    assert distinct**2 == pytest.approx(81 / 400, rel=1e-10)
    assert as_drawn**2 < 19 / 400 < distinct**2


@pytest.mark.claim("prop-voids")
def test_a_learned_reward_pushes_where_all_outcomes_are_alike():
    implicit, outcome = vector(1.0, 0.0), vector(1.0, 1.0)
    found = of_two(
        lambda logs: (
            sum(
                losses.prime_loss(*rows(logs, g), implicit[list(g)][:, None], outcome, [0, 0])
                for g in itertools.product((0, 1), repeat=2)
            )
            / 4
        )
    )
    assert found == pytest.approx(1 / 4, rel=1e-12)


@pytest.mark.claim("prop-voids")
def test_held_prefixes_do_not_see_later_disagreement():
    even, teacher = vector(HALF, HALF).log(), vector(0.75, 0.25).log()
    mask = torch.tensor([[True, False], [True, True], [True, True]])  # the second option goes on
    later = float((even.exp() * (even - teacher)).sum())
    masses = (0.5, 0.25, 0.25)

    def per_token(logs):
        laws = torch.stack([logs, even]).expand(3, 2, 2)
        teachers = torch.stack([even, teacher]).expand(3, 2, 2)
        return sum(
            m * losses.reverse_kl_loss(laws[[k]], teachers[[k]], mask[[k]]) for k, m in enumerate(masses)
        )

    assert of_two(per_token) == pytest.approx(0, abs=1e-15)
    whole = of_two(lambda logs: (logs.exp() * (logs - even)).sum() + logs[1].exp() * later)
    assert whole == pytest.approx(math.log(4 / 3) / 8, rel=1e-12)
