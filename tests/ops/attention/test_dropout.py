"""Dropout bits: Philox itself, the layout of its words over a mask, and their statistics."""

import itertools
import math

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.ops.attention.philox import keep_threshold, keep_tile, pair_words
from flashtile.ops.common.philox import SeedBlocks, next_dropout_seed, philox_words, seeds_from
from flashtile.testing import assert_same

#: All 64 bits of the first number count, and 32 of the second.
SEED = torch.tensor([123456789 + 2**40, 42 + 2**20 + 2**32])

# Published with Random123 (file kat_vectors, philox4x32 with 10 rounds): counter, key, words.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize("counter, key, words", KNOWN_ANSWERS, ids=["zeros", "ones", "pi"])
def test_known_answers(counter, key, words):
    low, high = key
    seed = torch.tensor(low | high << 32 if high < 2**31 else (low | high << 32) - 2**64)
    found = philox_words(seed, tuple(torch.tensor(c) for c in counter))
    assert tuple(word.item() & 0xFFFFFFFF for word in found) == words


# The same, philox2x32 with 7 rounds.
KNOWN_PAIRS = [
    ((0, 0), 0, (0x257A3673, 0xCD26BE2A)),
    ((0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFF, (0xAB302C4D, 0x3DC9D239)),
    ((0x243F6A88, 0x85A308D3), 0x13198A2E, (0xBEDBBE6B, 0xE4C770B3)),
]


@pytest.mark.parametrize("counter, key, words", KNOWN_PAIRS, ids=["zeros", "ones", "pi"])
def test_known_pairs(counter, key, words):
    left, right = counter
    found = pair_words(torch.tensor(key), (torch.tensor(left), torch.tensor(right)))
    assert tuple(word.item() & 0xFFFFFFFF for word in found) == words


def mask_by_hand(seed: Tensor, p: float, sequence_head: int, row: int, column: int) -> bool:
    """One element of the mask, by the formula in the module's docstring."""
    counter = tuple(map(torch.tensor, (sequence_head, 0, 0, seed[1].item())))
    key, first_column, first_row = (word & 0xFFFFFFFF for word in philox_words(seed[0], counter)[:3])
    column_group, row_group = column // 16 * 8 + column % 8, row // 16 * 8 + row % 8
    words = pair_words(key, (column_group ^ first_column, row_group ^ first_row))
    bits = words[row // 8 % 2].item() >> 16 * (column // 8 % 2) & 0xFFFF
    return bits - 2**16 * (bits >= 2**15) >= keep_threshold(p) / 2**16


def test_mask_is_the_documented_formula():
    mask = flashtile.dropout_mask(SEED, 0.5, batch=2, heads=3, seq_q=35, seq_k=50)
    places = list(itertools.product((0, 1), (0, 2), (0, 7, 8, 15, 16, 34), (0, 8, 9, 16, 31, 49)))
    by_hand = [mask_by_hand(SEED, 0.5, b * 3 + h, row, column) for b, h, row, column in places]
    assert [mask[place].item() for place in places] == by_hand


TILES = [
    (range(0, 16), range(0, 16)), (range(3, 5), range(7, 31)), (range(15, 17), range(15, 17)),
    (range(8, 9), range(24, 25)), (range(33, 70), range(1, 90)), (range(0, 70), range(0, 90)),
    (range(64, 70), range(80, 90)), (range(5, 5), range(3, 9)), (range(5, 9), range(20, 20)),
]  # fmt: skip


@pytest.mark.parametrize("rows, columns", TILES, ids=str)
def test_tile_is_a_part_of_the_mask(rows, columns):
    mask = flashtile.dropout_mask(SEED, 0.3, batch=2, heads=2, seq_q=70, seq_k=90).flatten(0, 1)
    tile = keep_tile(SEED, 0.3, torch.tensor([2, 0]), rows, columns)
    assert torch.equal(tile, mask[[2, 0]][:, rows.start : rows.stop, columns.start : columns.stop])


def test_tile_far_from_the_start():
    # Positions past 2**31 elements are nothing special, nor are batch * heads of that size.
    rows, columns = range(2**20, 2**20 + 3), range(2**30 + 5, 2**30 + 9)
    tile = keep_tile(SEED, 0.5, torch.tensor([2**31 - 1]), rows, columns)
    by_hand = [[mask_by_hand(SEED, 0.5, 2**31 - 1, row, column) for column in columns] for row in rows]
    assert tile[0].tolist() == by_hand


# --- thresholds -----------------------------------------------------------------------------------------------------

THRESHOLDS = [
    (0.0, -(2**31)), (1e-12, -(2**31)), (2**-16, -(2**31) + 2**16), (0.1, -(2**31) + 6554 * 2**16), (0.25, -(2**30)),
    (0.5, 0), (0.75, 2**30), (1 - 1e-12, 2**31 - 2**16), (math.nextafter(1, 0), 2**31 - 2**16),
]  # fmt: skip


@pytest.mark.parametrize("p, threshold", THRESHOLDS, ids=str)
def test_threshold(p, threshold):
    assert keep_threshold(p) == threshold


def test_nothing_and_almost_everything_is_dropped():
    sizes = {"batch": 1, "heads": 1, "seq_q": 64, "seq_k": 64}
    assert flashtile.dropout_mask(SEED, 0.0, **sizes).all()
    assert not flashtile.dropout_mask(SEED, math.nextafter(1, 0), **sizes).any()


# --- seeds ----------------------------------------------------------------------------------------------------------


def test_drawn_seed_is_reproducible_and_in_range():
    torch.manual_seed(1)
    first, second = flashtile.draw_dropout_seed(), flashtile.draw_dropout_seed("cpu")
    torch.manual_seed(1)
    assert torch.equal(flashtile.draw_dropout_seed(), first)
    assert not torch.equal(first, second)
    assert (first.dtype, first.shape) == (torch.int64, (2,))
    many = torch.stack([flashtile.draw_dropout_seed() for _ in range(200)])
    assert ((many >= 0) & (many < 2**32)).all()
    assert many.max() > 2**31, "all 32 bits are drawn"


# --- statistics: bounds of five standard deviations -----------------------------------------------------------------

PROBABILITIES = (0.01, 0.1, 0.5, 0.9)


@pytest.fixture(scope="module")
def big_masks():
    return {p: flashtile.dropout_mask(SEED, p, batch=3, heads=4, seq_q=160, seq_k=176) for p in PROBABILITIES}


@pytest.mark.parametrize("p", PROBABILITIES)
@pytest.mark.parametrize("dims", [(), (0, 1), (2,), (3,), (2, 3)], ids=["all", "heads", "rows", "columns", "places"])
def test_keep_rate(big_masks, p, dims):
    kept = big_masks[p].double()
    reduced = [dim for dim in range(4) if dim not in dims]
    rates = kept.mean(dim=reduced)
    samples = math.prod(kept.shape[dim] for dim in reduced)
    # The statistic of a chi-square test over the groups, which has mean 1 and variance about 2 / groups.
    chi_square = ((rates - (1 - p)).square() / (p * (1 - p) / samples)).mean().item()
    groups = rates.numel()
    excess = (1 - 6 * p * (1 - p)) / (p * (1 - p)) / samples
    assert abs(chi_square - 1) < 5 * math.sqrt((2 + excess) / groups) or (groups == 1 and chi_square < 25)


@pytest.mark.parametrize("p", PROBABILITIES)
@pytest.mark.parametrize(
    "shift", [(0, 0, 0, 1), (0, 0, 1, 0), (0, 0, 0, 8), (0, 0, 8, 0), (0, 0, 8, 8), (0, 1, 0, 0), (1, 0, 0, 0)], ids=str
)
def test_neighbours_are_independent(big_masks, p, shift):
    # The four words of one Philox call lie 8 rows and 8 columns apart.
    kept = big_masks[p].double() - (1 - p)
    other = kept.roll(shift, dims=(0, 1, 2, 3))
    correlation = (kept * other).mean().item() / (p * (1 - p))
    assert abs(correlation) < 5 / math.sqrt(kept.numel())


class _Generator:
    """The generator of a GPU, of which a call draws the next numbers."""

    def __init__(self, seed: int, offset: int) -> None:
        self.seed, self.offset = seed, offset

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset


def test_seeds_drawn_ahead_follow_the_state_of_the_generator() -> None:
    blocks, generator, device = SeedBlocks(), _Generator(7, 4 * 4090), torch.device("cpu")

    def drawn(offset: int, seed: int = 7) -> Tensor | None:
        generator.seed, generator.offset = seed, offset
        found = blocks.draw(generator, device, 0)
        assert generator.offset == offset + 4 * (found is not None)
        return found

    first = [drawn(4 * (4000 + number)) for number in range(70)]
    assert first[:64] == [None] * 64 and None not in first[64:]
    expected = seeds_from(7, 0, device)
    for place in (4068, 0, 4095, 17):  # in any order
        assert_same(drawn(4 * place), expected[place])
    assert drawn(4 * 4096) is None and drawn(0, seed=8) is None and blocks.draw(generator, device, 1) is None


@pytest.mark.parametrize("seed, call", [(0, 0), (2**63 + 5, 4097), (11, 2**33 + 3)])
def test_seeds_drawn_ahead_are_the_second_words_of_two_threads(seed: int, call: int) -> None:
    key = torch.tensor(seed - 2**64 if seed >= 2**63 else seed)
    counters = [torch.tensor([number, number]) for number in (call % 2**32, call >> 32, 0, 0)]
    counters[2] = torch.tensor([0, 1])
    found = seeds_from(seed, call // 4096 * 4096, torch.device("cpu"))
    assert_same(found[call % 4096], philox_words(key, tuple(counters))[1] & 0xFFFFFFFF)


@pytest.mark.gpu
def test_seeds_drawn_ahead_are_those_of_single_draws() -> None:
    """Also under `torch.inference_mode`, beside other draws, and after `torch.cuda.set_rng_state`."""
    x = torch.empty(3, device="cuda")
    for seed in (3, 2**63 + 1):
        torch.cuda.manual_seed(seed)
        for number in range(200):
            if number % 7 == 0:
                torch.rand(2**20, device="cuda")
            state = torch.cuda.get_rng_state()
            expected, after = flashtile.draw_dropout_seed("cuda"), torch.cuda.get_rng_state()
            torch.cuda.set_rng_state(state)
            with torch.inference_mode(number % 2 == 0):
                assert_same(next_dropout_seed(x).clone(), expected)
            assert_same(torch.cuda.get_rng_state(), after)
