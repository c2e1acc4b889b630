"""Sums over many sequences: float32 scores must not lose the small ones behind the large."""

import pytest
import torch
from torch import nn

from ceilings import scores as engine
from ceilings.moments import ScoreMoments
from ceilings.rollouts import centred_by_group
from ceilings.score_rules import FullTerm, OuterTerm, RowsTerm
from ceilings.score_sums import ParameterSums
from ceilings.scores import ScoreAccumulator, score_moments
from ceilings.testing import assert_equal
from ceilings.transformer import TinyTransformer, TransformerConfig

F64 = torch.float64
LARGE, SMALL, MANY = 1.0, 1e-4, 8_000  # each small square, 1e-8, is below half the spacing of float32 at 1


def outer(value):
    return OuterTerm(torch.full((1, 1, 2), value), torch.ones(1, 1, 3))


def full(value):
    return FullTerm(torch.full((1, 3), value))


def rows(value):
    return RowsTerm(torch.tensor([[1]]), torch.full((1, 1, 3), value))


def one_by_one(make, shape, wide):
    """Sums after one large score and many small ones, each a batch."""
    sums, weight, reward = ParameterSums(torch.zeros(shape), 1), torch.ones(1), torch.ones(1, 1)
    if wide:
        sums.widen()
    sums.add([make(LARGE)], weight, reward)
    small = make(SMALL)
    for _ in range(MANY):
        sums.add([small], weight, reward)
    return sums


@pytest.mark.parametrize(("make", "shape"), [(outer, (2, 3)), (full, (3,)), (rows, (2, 3))])
def test_wide_sums_keep_eight_thousand_terms_that_float32_forgets(make, shape):
    wide, narrow = one_by_one(make, shape, True), one_by_one(make, shape, False)
    squares = LARGE + MANY * SMALL**2
    linear = LARGE + MANY * SMALL
    for part, exact in (("squares", squares), ("scores", linear), ("reward_scores", linear)):
        found = getattr(wide, part)
        assert found.dtype == F64
        assert_equal(found[found != 0].max(), exact, rtol=1e-7)
    # The fault that this guards against: the sum has stopped growing at its first term.
    assert float(narrow.squares.max()) == LARGE


class Coin(nn.Module):
    """After token 0, token 1 is drawn with probability 1e-4; all else follows from one bias."""

    def __init__(self, dtype):
        super().__init__()
        self.embed, self.head = nn.Embedding(2, 2, dtype=dtype), nn.Linear(2, 2, dtype=dtype)
        with torch.no_grad():
            self.embed.weight.copy_(torch.tensor([[1.0, 0.5], [0.0, 0.0]]))
            self.head.weight.zero_()
            self.head.bias.copy_(torch.tensor([9.25, 0.0]))

    def forward(self, input_ids):
        return self.head(self.embed(input_ids))


def tosses(n):
    ids = torch.zeros(n, 2, dtype=torch.long)
    ids[:3, 1] = 1
    return ids, torch.tensor([[False, True]]).expand(n, -1), (torch.arange(n) % 3).double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_engine_widens_its_sums_by_itself_and_they_are_right(monkeypatch, dtype):
    monkeypatch.setattr(engine, "_NARROW_SEQUENCES", 8)
    ids, mask, rewards = tosses(600)
    accumulator = ScoreAccumulator(Coin(dtype), batch_size=2)
    accumulator.add(ids[:6], mask[:6], rewards[:6])
    assert accumulator.moments().squares["head.bias"].dtype == torch.float32
    accumulator.add(ids[6:], mask[6:], rewards[6:])
    moments = accumulator.moments()
    exact = score_moments(Coin(F64), ids, mask, rewards).shifted(moments.reward_shift)
    # NOTE 1 − π itself has only three digits in float32 here: the tolerance is for that, not for the sums.
    precision = 3e-5 if dtype is torch.float32 else 2e-2
    for part in ("scores", "squares", "reward_scores"):
        for name in ("head.bias", "head.weight"):
            found = getattr(moments, part)[name]
            assert found.dtype == F64
            assert_equal(found, getattr(exact, part)[name], rtol=precision)


def test_narrow_and_wide_moments_merge_into_wide_ones(tmp_path, monkeypatch):
    ids, mask, rewards = tosses(40)
    narrow = score_moments(Coin(torch.float32), ids[:10], mask[:10], rewards[:10])
    monkeypatch.setattr(engine, "_NARROW_SEQUENCES", 8)
    wide = score_moments(Coin(torch.float32), ids[10:], mask[10:], rewards[10:])
    for merged in (narrow.merge(wide), wide.merge(narrow)):
        merged.save(tmp_path / "moments.safetensors")
        loaded = type(merged).load(tmp_path / "moments.safetensors")
        assert loaded.squares["head.bias"].dtype == F64
    exact = score_moments(Coin(F64), ids, mask, rewards).shifted(narrow.reward_shift)
    merged = narrow.merge(wide)
    assert_equal(merged.squares["head.bias"], exact.squares["head.bias"], rtol=1e-5)
    assert_equal(merged.reward_scores["head.bias"], exact.reward_scores["head.bias"], rtol=1e-5)


def test_slow_parameters_are_summed_wide_too(monkeypatch):
    class Scaled(Coin):
        def __init__(self, dtype):
            super().__init__(dtype)
            self.gain = nn.Parameter(torch.ones(2, dtype=dtype))

        def forward(self, input_ids):
            return self.head(self.embed(input_ids)) * self.gain

    monkeypatch.setattr(engine, "_NARROW_SEQUENCES", 8)
    ids, mask, rewards = tosses(60)
    moments = score_moments(Scaled(torch.float32), ids, mask, rewards)
    assert moments.slow_parameters == ("gain",) and moments.squares["gain"].dtype == F64
    exact = score_moments(Scaled(F64), ids, mask, rewards)
    assert_equal(moments.squares["gain"], exact.squares["gain"], rtol=1e-6)


def test_groups_that_straddle_batches_files_and_workers_are_centred_on_all_their_members(tmp_path):
    """By hand: the sum over groups of the sum over members of (R - mean of the group) s."""
    model = TinyTransformer(TransformerConfig(vocab_size=7, width=8, depth=1, heads=2, mlp_width=12))
    g, n = torch.Generator().manual_seed(0), 11
    ids, mask = torch.randint(7, (n, 6), generator=g), (torch.arange(6) > 2).expand(n, -1)
    rewards = torch.randn(n, generator=g, dtype=F64) + 3
    groups = torch.arange(n) % 3  # every batch holds parts of every group
    two = torch.stack([rewards, rewards.square() + 5], 1)
    scores = [score_moments(model, ids[k : k + 1], mask[k : k + 1], torch.zeros(1)).scores for k in range(n)]
    for size in (1, 4, n):
        found = score_moments(model, ids, mask, two, groups=groups, batch_size=size)
        for column in (0, 1):
            centred = torch.stack(
                [two[k, column] - two[groups == groups[k], column].mean() for k in range(n)]
            )
            for name in found.names:
                by_hand = sum(c * s[name] for c, s in zip(centred, scores, strict=True)) / n
                assert_equal(found.gradient(f"reward_{column}")[name], by_hand, rtol=1e-9)
    parts = []
    for some in (slice(0, 5), slice(5, n)):  # two workers, told the centred rewards
        centred = centred_by_group(two, groups)
        parts.append(score_moments(model, ids[some], mask[some], centred[some]))
        parts[-1].save(tmp_path / "part.safetensors")
        parts[-1] = ScoreMoments.load(tmp_path / "part.safetensors")
    merged = parts[0].merge(parts[1])
    for name in merged.names:
        assert_equal(merged.gradient("reward_1")[name], found.gradient("reward_1")[name], rtol=1e-9)
    with pytest.raises(ValueError, match="groups centre samples"):
        score_moments(model, ids, mask, rewards, groups=groups, weights=torch.full((n,), 1 / n))
