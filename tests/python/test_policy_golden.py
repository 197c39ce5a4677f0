"""Golden vectors of the eviction methods: small cases worked out by hand from the formulas, so that
the reference which judges the C code is itself judged."""

import numpy as np
import pytest

from policies import formulas as f
from policies import allot


def close(found, expected, digits=4):
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.6 * 10.0 ** -digits)


# --- retention ------------------------------------------------------------------------------


@pytest.mark.parametrize("beta, horizon, golden", [
    (0.9, 1, -1.158966), (0.9, 2, -0.517112), (0.9, 16, 0.938682), (0.9, 128, 1.143618),
    (0.99, 1, -0.110554), (0.99, 2, 0.577581), (0.99, 16, 2.587731), (0.99, 128, 4.171305),
    (0.9999, 1, -0.001100), (0.9999, 2, 0.691997), (0.9999, 16, 2.770739),
    (0.9999, 128, 4.844587)])
def test_retention_scores(beta, horizon, golden):
    """The published general form with exponent 11 is ours at age 11 plus log n."""
    assert f.retention(np.log(beta), 11, horizon) + np.log(horizon) == pytest.approx(golden, abs=1e-6)
    if horizon > 1:  # t = T + 1 = 100 and pos = 90: exponent t + 1 - pos
        assert f.retention_published(np.log(beta), 9, horizon) == pytest.approx(golden, abs=1e-6)


def test_the_published_branch_for_one_step_is_off_by_one():
    assert f.retention_published(np.log(0.9), 9, 1) == pytest.approx(10 * np.log(0.9))
    assert f.retention_published(np.log(0.99), 9, np.inf) == pytest.approx(
        11 * np.log(0.99) - np.log(0.01), abs=1e-9)


def test_a_horizon_prefers_what_lasts():
    old, young = (np.log(0.999), 81), (np.log(0.96), 3)
    for horizon, golden in ((1, (-0.0810, -0.1225)), (128, (4.7081, 3.0910))):
        close([f.retention(*e, horizon) + np.log(horizon) for e in (old, young)], golden)


def test_soft_sizes():
    s = f.soft_sizes([1, .9, .5, .99])
    close(s, [1, 2, 2.9, 3.31])
    budget, t = 2, np.arange(4)
    code = np.maximum(0, (s - budget) / np.maximum(t - budget, 1))
    close(code, [0, 0, 0.9, 1.31])
    close(code[code > 0].mean(), 1.105)
    close(np.maximum(0, s - budget) / (t + 1), [0, 0, 0.3, 0.3275])


# --- attention ------------------------------------------------------------------------------


def test_history():
    past = np.array([0.9, 0.2, 0.5, np.nan, np.nan])
    local = np.array([0.10, 0.02, 0.30, 0.20, 0.06])
    now = local / local.max()
    close(now, [0.3333, 0.0667, 1, 0.6667, 0.2])
    close(f.with_history(now, past, "max", 0.8), [0.72, 0.16, 1, 0.6667, 0.2])
    close(f.with_history(now, past, "mean", 0.8), [0.7867, 0.1733, 0.6, 0.6667, 0.2])
    close(f.with_history(now, past, "sum", 0.8), [1.0533, 0.2267, 1.4, 0.6667, 0.2])


def test_teaming_counts_the_zeros_beyond_the_ends():
    x = np.array([5.0, 0, 0, 10, 0, 1])
    close(f.smooth_mean(x, 3), [5 / 3, 5 / 3, 10 / 3, 10 / 3, 11 / 3, 1 / 3])
    close(f.smooth_max(x, 3), [5, 5, 10, 10, 10, 1])
    close(f.smooth_max(-x, 5), [0, 0, 0, 0, 0, 0])


def test_softmax_of_nothing_is_nothing():
    z = np.array([[0.0, np.log(3)], [-np.inf, -np.inf]])
    close(f.softmax(z), [[0.25, 0.75], [0, 0]])


# --- redundancy ------------------------------------------------------------------------------

KEYS = np.array([(1, 0), (0.9, 0.1), (0, 1), (0.1, 0.9), (1, 0.05)])


def rho(keys, index_zero=False):
    c = f.cosines(keys, keys)
    np.fill_diagonal(c, 0)
    return f.mean_similarity(c, f.forgiven(c, 0.5), index_zero)


def test_redundancy():
    c = f.cosines(KEYS, KEYS)
    np.fill_diagonal(c, 0)
    assert f.forgiven(c, 0.5).tolist() == [4, 4, 3, 2, 1]
    found = rho(KEYS)
    close(found, [0.4206, 0.2648, 0.0321, 0.0980, 0.0420])
    close(f.softmax(found), [0.2536, 0.2170, 0.1720, 0.1837, 0.1737])
    close(np.exp(found - found.max()), [1, 0.8557, 0.6780, 0.7242, 0.6848])


def test_an_entry_like_no_other_and_the_index_0_artefact():
    keys = np.concatenate((KEYS, [(-1, -1)]))
    rest = [0.0905, -0.0911, -0.0485, -0.0886, -0.6196]
    close(rho(keys), [0.2327, *rest])
    close(rho(keys, index_zero=True), [0.3505, *rest])


# --- shares ------------------------------------------------------------------------------------


def test_pyramid():
    small = f.pyramid_code(32, 128, 8, 8000)
    assert (small[0], small[1], small[-1], sum(small)) == (242, 235, 25, 4272)
    large = f.pyramid_code(32, 2048, 8, 3000)
    assert (large[0], large[-1], sum(large)) == (3000, 1109, 65744)


def test_whole_entries_for_real_weights():
    assert allot.largest_remainder(10, [1, 1, 1]).tolist() == [4, 3, 3]
    assert allot.largest_remainder(7, [0.5, 0.3, 0.2]).tolist() == [4, 2, 1]  # 3.5, 2.1, 1.4
    assert allot.largest_remainder(5, [0, 0]).tolist() == [3, 2]


def test_what_one_cannot_use_goes_to_the_others_by_weight():
    assert allot.split(12, [8, 2, 2], most=5).tolist() == [5, 4, 3]
    assert allot.split(12, [8, 2, 2], most=[3, 4, 9]).tolist() == [3, 4, 5]
    assert allot.split(12, [10, 1, 1], most=12, least=2).tolist() == [8, 2, 2]
    assert allot.split(99, [1, 1], most=[3, 4]).tolist() == [3, 4]


def test_the_pyramid_of_weights_is_the_published_one():
    """... but for its floored step, and with the total that was asked for."""
    parts = allot.split(32 * 2040, allot.pyramid(32, 20), most=9000)
    published = np.array(f.pyramid_code(32, 2048, 8, 100000)) - 8
    assert parts.sum() == 32 * 2040
    assert np.abs(parts - published).max() <= 1
    assert (parts[0], parts[-1]) == (3978, 102)


def test_adaptive_shares_of_the_heads():
    scores = [np.array([.50, .20, .10, .05, .01, .01]), np.array([.30, .28, .26, .24, .22, .20])]
    counts = f.adaptive_counts(scores, 3)
    assert counts.tolist() == [1, 5]
    assert f.adaptive_capacities_code(counts, 3, 0.2) == [1, 4]
    assert f.adaptive_capacities_code([160, 40], 100, 0.2) == [148, 52]


def test_d2o_layers():
    v = [0, .2, .5, .9]
    close(f.d2o_weights(v), [.3531, .2891, .2142, .1436])
    close(f.d2o_ratios_code(v, 0.2), [.2825, .2313, .1713, .1149])


def test_cake_preference():
    assert f.cake_preference(16, 8, 2, 3) == pytest.approx(8)
    p = np.array([[[0.5, 0.5], [1.0, 0.0]]])
    assert f.entropy(p) == pytest.approx(np.log(2), abs=1e-6)
    assert f.spread(p) == pytest.approx(0.25)


# --- merging -------------------------------------------------------------------------------------


def test_d2o_merge():
    center, taken = np.array([1.0, 0]), np.array([[0.8, 0.6]])
    close(f.merge_mean(center, taken, [0.8]), [0.82, 0.24])
    close(f.merge_exponential(center, taken, [0.8]), [0.9100, 0.2701])
