"""Which rows make up an update, in which order, and how they are padded."""

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesp_mlx.data.batches import count_updates, epoch_order, groups, padded_widths, split_rows, updates, updates_per_epoch, usable_rows
from mesp_mlx.data.tokens import TokenSet


def make(rows):
    """A TokenSet of rows given as (ids, mask)."""
    offsets = np.concatenate(([0], np.cumsum([len(ids) for ids, _ in rows]))).astype(np.int64)
    flat = [np.concatenate([row[k] for row in rows] or [[]]) for k in (0, 1)]
    return TokenSet(flat[0].astype(np.int32), flat[1].astype(np.uint8), offsets)


def random_set(lengths, seed=0):
    rng = np.random.default_rng(seed)
    rows = [(rng.integers(1, 1000, n), rng.integers(0, 2, n)) for n in lengths]
    for _, mask in rows:
        mask[:1] = 0
    return make(rows)


def unpadded(group):
    """The rows of a group as (row, inputs, targets, supervised), and that nothing else of it is supervised."""
    found = []
    for b, (row, n) in enumerate(zip(group.rows, group.lengths, strict=True)):
        assert not group.mask[b, n:].any()
        found.append((row, tuple(group.ids[b, :n].tolist()), tuple(group.targets[b, :n].tolist()), tuple(group.mask[b, :n].tolist())))
    return found


def straight(tokens, row, limit):
    ids, mask = tokens.row(row, limit)
    return row, tuple(ids[:-1].tolist()), tuple(ids[1:].tolist()), tuple((mask[1:] == 1).tolist())


LENGTHS = st.lists(st.integers(2, 60), min_size=1, max_size=40)


@settings(deadline=None)
@given(LENGTHS, st.integers(2, 50), st.integers(1, 9), st.integers(1, 3), st.sampled_from([1, 64, 1024]))
def test_every_epoch_trains_on_every_row_once(lengths, limit, rows_per_update, epochs, tile_tokens):
    tokens = random_set(lengths)
    widths = padded_widths(tokens.lengths(limit), most=4)
    per_epoch = updates_per_epoch(len(lengths), rows_per_update)
    run = list(updates(tokens, range(len(lengths)), limit, widths, rows_per_update=rows_per_update, seed=3, stop=epochs * per_epoch, tile_tokens=tile_tokens))
    assert len(run) == epochs * per_epoch
    for epoch in range(epochs):
        part = run[epoch * per_epoch : (epoch + 1) * per_epoch]
        rows = [row for update in part for group in update for row in unpadded(group)]
        assert sorted(rows) == [straight(tokens, row, limit) for row in range(len(lengths))]
        assert [sum(len(group.rows) for group in update) for update in part[:-1]] == [rows_per_update] * (per_epoch - 1)
    for group in (group for update in run for group in update):
        assert group.ids.shape == group.targets.shape == group.mask.shape and group.ids.shape[1] in widths
        assert group.ids.dtype == group.targets.dtype == np.int32 and group.mask.dtype == bool
        assert group.ids.size <= tile_tokens or len(group.rows) == 1


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 4), st.integers(2, 4))
def test_one_batch_is_the_same_rows_as_batches_accumulated(lengths, batch, accumulation):
    tokens = random_set(lengths)
    rows, widths, steps = range(len(lengths)), padded_widths(tokens.lengths()), updates_per_epoch(len(lengths), batch * accumulation)
    whole = list(updates(tokens, rows, 60, widths, rows_per_update=batch * accumulation, seed=1, stop=steps))
    single = list(updates(tokens, rows, 60, widths, rows_per_update=1, seed=1, stop=len(lengths)))
    for k, update in enumerate(whole):
        parts = single[k * batch * accumulation : (k + 1) * batch * accumulation]
        assert Counter(row for group in update for row in unpadded(group)) == Counter(row for part in parts for group in part for row in unpadded(group))


def test_supervised_tokens_are_counted_exactly():
    tokens = random_set([5, 40, 17, 2, 33])
    found = groups(tokens, range(5), 30, padded_widths(tokens.lengths(30)))
    assert sum(int(group.mask.sum()) for group in found) == int(tokens.supervised(30).sum()) > 0


def test_a_group_written_out():
    tokens = make([([5, 6, 7, 8], [0, 0, 1, 1]), ([9, 8], [0, 1])])
    (group,) = groups(tokens, [1, 0], 10, [4])
    assert group.rows == (1, 0) and group.lengths == (1, 3)
    assert group.ids.tolist() == [[9, 9, 9, 9], [5, 6, 7, 5]]
    assert group.targets.tolist() == [[8, 9, 9, 9], [6, 7, 8, 5]]
    assert group.mask.tolist() == [[True, False, False, False], [False, True, True, False]]


def test_groups_are_narrow_first_and_split_at_the_tile():
    tokens = random_set([9, 30, 9, 9, 30, 9, 9])
    found = groups(tokens, range(7), 30, [8, 32], tile_tokens=24)
    assert [(group.rows, group.ids.shape[1]) for group in found] == [((0, 2, 3), 8), ((5, 6), 8), ((1,), 32), ((4,), 32)]


def test_a_run_may_start_at_any_update_and_epochs_differ():
    tokens = random_set(range(2, 30))
    widths = padded_widths(tokens.lengths())

    def rows(seed, start):
        run = updates(tokens, range(28), 40, widths, rows_per_update=5, seed=seed, start=start, stop=15)
        return [[group.rows for group in update] for update in run]

    whole = rows(seed=7, start=0)
    assert rows(seed=7, start=8) == whole[8:]
    assert whole[:6] != whole[6:12] and rows(seed=8, start=0) != whole
    assert epoch_order([4, 5, 6, 7, 8], 0, 0).tolist() == [6, 8, 7, 4, 5]  # written down, because resuming relies on it


def padding(lengths, widths):
    positions = np.asarray(lengths) - 1
    return int(np.sum(np.asarray(widths)[np.searchsorted(widths, positions)] - positions))


@given(LENGTHS, st.integers(1, 8))
def test_widths_are_few_cover_every_row_and_waste_little(lengths, most):
    widths = padded_widths(np.array(lengths), most)
    assert widths == sorted(set(widths)) and len(widths) <= most
    assert all(width % 8 == 0 for width in widths[:-1]) and max(lengths) - 1 <= widths[-1] <= max(lengths)
    candidates = padded_widths(np.array(lengths), 100)
    best = min(padding(lengths, [*chosen, candidates[-1]]) for chosen in combinations(candidates[:-1], min(most, len(candidates)) - 1))
    assert best <= padding(lengths, widths) <= 2 * best + 8 * len(lengths)


def test_widths_written_out():
    assert padded_widths(np.array([3, 9, 10, 17, 33, 100])) == [8, 16, 32, 100]
    assert padded_widths(np.array([9] * 10 + [17, 25] + [100] * 3), most=2) == [8, 100]
    assert padded_widths(np.array([9] * 10 + [17, 25] + [100] * 3), most=3) == [8, 24, 100]
    assert padded_widths(np.array([257])) == [256] and padded_widths(np.array([1])) == [1] and padded_widths(np.array([], np.int64)) == []


def test_usable_rows_counts_what_is_cut_and_what_is_left_out():
    tokens = make([([1, 2, 3], [0, 0, 1]), ([1, 2, 3, 4], [0, 0, 0, 1]), ([1], [0]), ([], []), ([1, 2, 3, 4], [0, 1, 0, 1]), ([1, 2], [0, 0])])
    usable, cut, skipped = usable_rows(tokens, 3)
    assert (usable.tolist(), cut, skipped) == ([0, 4], 2, 4)
    usable, cut, skipped = usable_rows(tokens, 4)
    assert (usable.tolist(), cut, skipped) == ([0, 1, 4], 0, 3)


@pytest.mark.parametrize("rows, held_out", [(1, 0), (2, 1), (3, 1), (9, 4), (20, 10), (99, 10), (150, 15), (1000, 100), (5000, 200)])
def test_a_tenth_is_held_out_within_bounds(rows, held_out):
    tokens = make([(np.array([i, i + 1]), np.array([0, 1])) for i in range(rows)])
    train, valid = split_rows(tokens, np.arange(rows), seed=0)
    assert len(valid) == held_out and sorted([*train, *valid]) == list(range(rows))


def test_equal_rows_stay_on_one_side_and_only_given_rows_are_split():
    tokens = make([(np.array([i % 50, 1]), np.array([0, 1])) for i in range(200)])
    train, valid = split_rows(tokens, np.arange(0, 150), seed=5)
    assert sorted([*train, *valid]) == list(range(150))
    assert len(valid) >= 15 and not {i % 50 for i in train.tolist()} & {i % 50 for i in valid.tolist()}


def test_the_split_depends_on_the_seed_and_survives_appended_rows():
    rows = [(np.array([i, 2 * i]), np.array([0, 1])) for i in range(300)]
    _, before = split_rows(make(rows[:290]), np.arange(290), seed=0)
    _, after = split_rows(make(rows), np.arange(300), seed=0)
    _, other = split_rows(make(rows), np.arange(300), seed=1)
    assert len(set(before.tolist()) & set(after.tolist())) >= 27 and set(after.tolist()) != set(other.tolist())


def test_updates_of_a_run():
    assert count_updates(10, 4, 1, epochs=3) == 9 and count_updates(10, 2, 2, epochs=3) == 9 and count_updates(8, 4, 1, epochs=1) == 2
    assert count_updates(10, 4, 4, iters=100) == 25 and count_updates(10, 4, 3, iters=100) == 34
