"""Patterns of block-sparse attention against their definitions, pair by pair, and the pictures in their docstrings."""

import functools
import inspect
import itertools
import re

import pytest
import torch

from flashtile import patterns
from flashtile.ops.attention import tile_lists
from flashtile.testing import assert_same
from support.attention.mask_checks import check_mask, dense_of
from support.running.covering import turns

SIZES = (1, 63, 150, 210)
TILES = ((64, 64), (128, 128), (16, 256), (48, 80))


def band(seq_q, seq_k, left, right, global_tokens=0, align="bottom_right"):
    """By the contract of flashtile.attention, and of sliding_window where there are global tokens."""
    offset = seq_k - seq_q if align == "bottom_right" else 0

    def visible(b, h, q, k):
        token = q + offset
        near = (left is None or k >= token - left) and (right is None or k <= token + right)
        wide = k < global_tokens or 0 <= token < global_tokens
        return near or (wide and (right != 0 or k <= token))

    return dense_of(visible, 1, 1, seq_q, seq_k)


@pytest.mark.parametrize("align", ["bottom_right", "top_left"])
@pytest.mark.parametrize("seq_q, seq_k", [(150, None), (70, 200), (200, 70), (1, 130), (130, 1)])
def test_causal(seq_q, seq_k, align):
    mask = patterns.causal(seq_q, seq_k, align, tile=(64, 64))
    check_mask(mask, band(seq_q, seq_k or seq_q, None, 0, 0, align))


BANDS = [(0, 0), (20, 0), (3, 70), (None, 2), (2, None), (None, None), (100, 100)]


@pytest.mark.parametrize("band_of, global_tokens", turns(BANDS, [0, 5, 64, 70, 500], 3), ids=str)
def test_sliding_window(band_of, global_tokens):
    left, right = band_of
    for (seq_q, seq_k), align in zip([(190, 190), (90, 140), (140, 90)], ["top_left", "bottom_right", "bottom_right"]):
        mask = patterns.sliding_window(seq_q, seq_k, left, right, global_tokens, align, tile=(64, 64))
        check_mask(mask, band(seq_q, seq_k, left, right, global_tokens, align))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("stride, tile", [*zip([1, 3, 64, 100], TILES)], ids=str)
def test_strided(stride, tile, causal):
    def visible(b, h, q, k):
        distance = abs(q - k)
        return (distance <= stride or distance % stride == 0) and (not causal or k <= q)

    check_mask(patterns.strided(333, stride, causal, tile=tile), dense_of(visible, 1, 1, 333, 333))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "strides, tile", turns([(1, 1), (10, 3), (64, 64), (64, 8), (100, 9), (250, 1)], TILES), ids=str
)
def test_fixed(strides, tile, causal):
    stride, expressivity = strides

    def visible(b, h, q, k):
        seen = q // stride == k // stride or k % stride >= stride - expressivity
        return seen and (not causal or k <= q)

    mask = patterns.fixed(333, stride, expressivity, causal, tile=tile)
    check_mask(mask, dense_of(visible, 1, 1, 333, 333))


@pytest.mark.parametrize("seq, block", turns([*SIZES, 333], [16, 48, 128, 32, 64, 16], 2))
def test_butterfly(seq, block):
    levels = {0, *(2**level for level in range(12))}

    def visible(b, h, q, k):
        return (q // block) ^ (k // block) in levels

    check_mask(patterns.butterfly(seq, block), dense_of(visible, 1, 1, seq, seq))


@pytest.mark.parametrize(
    "block, window, globals_, drawn, heads", [(16, 3, 2, 3, None), (16, 1, 0, 2, 3), (64, 5, 1, 0, 2)]
)
def test_big_bird(block, window, globals_, drawn, heads):
    seq = 333
    mask = patterns.big_bird(seq, block, window, globals_, drawn, 7, heads)
    dense, blocks = mask.to_dense(), -(-seq // block)
    check_mask(mask, dense)
    assert mask.shape == (1, heads or 1, seq, seq)
    layout = dense[..., ::block, ::block]
    whole = layout.repeat_interleave(block, 2).repeat_interleave(block, 3)[..., :seq, :seq]
    assert torch.equal(dense, whole), "blocks are visible as a whole"
    for head, i in itertools.product(range(heads or 1), range(blocks)):
        known = {j for j in range(blocks) if abs(i - j) <= window // 2 or min(i, j) < globals_}
        seen = set(layout[0, head, i].nonzero()[:, 0].tolist())
        assert known <= seen and len(seen - known) == min(drawn, blocks - len(known))


def test_big_bird_draws_by_its_seed():
    first, again, other = (patterns.big_bird(2048, heads=2, seed=seed) for seed in (1, 1, 2))
    assert first == again and first != other
    heads = first.to_dense()[0]
    assert not torch.equal(heads[0], heads[1])
    state = torch.random.get_rng_state()
    patterns.big_bird(2048)
    assert torch.equal(torch.random.get_rng_state(), state), "torch's own generator is left alone"


def test_big_bird_with_more_to_draw_than_there_is():
    assert patterns.big_bird(200, 16, random_blocks=99).to_dense().all()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_patterns_of_data_are_built_without_reading_it(device):
    """Nothing can be read on the meta device."""
    ids, lengths = (torch.arange(300) // 70).to(device).expand(2, -1), torch.tensor([20, 200]).to(device)
    for mask, counted in (
        (
            patterns.documents(ids=ids, causal=True, max_partial_tiles=20),
            lambda: patterns.documents(ids=ids, causal=True),
        ),
        (patterns.prefix_lm(300, lengths, max_partial_tiles=20), lambda: patterns.prefix_lm(300, lengths)),
    ):
        assert mask.tile_masks.shape == (20, 128, 128) and mask.device.type == device
        assert device == "meta" or mask == counted()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [[], [0], [5], [60, 4, 64, 0, 1, 130], [1] * 150], ids=len)
def test_documents_by_lengths(lengths, causal):
    ids = [document for document, length in enumerate(lengths) for _ in range(length)]
    expected = dense_of(lambda b, h, q, k: ids[q] == ids[k] and (not causal or k <= q), 1, 1, len(ids), len(ids))
    for given in (lengths, tuple(lengths), torch.tensor(lengths, dtype=torch.int32)):
        mask = patterns.documents(lengths=given, causal=causal, tile=(64, 64))
        check_mask(mask, expected)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("order", ["sorted", "random"])
def test_documents_by_ids(order, causal):
    ids = torch.randint(-1, 4, (2, 203), generator=torch.Generator().manual_seed(0))
    ids = ids.sort(dim=1).values if order == "sorted" else ids
    listed = ids.tolist()

    def visible(b, h, q, k):
        return 0 <= listed[b][q] == listed[b][k] and (not causal or k <= q)

    check_mask(patterns.documents(ids=ids, causal=causal, tile=(64, 128)), dense_of(visible, 2, 1, 203, 203))
    assert patterns.documents(ids=ids[0].int(), causal=causal) == patterns.documents(ids=ids[:1], causal=causal)


@pytest.mark.parametrize("lengths", [0, 70, 500, [3, 130], torch.tensor([64, 0, 150], dtype=torch.int32)], ids=str)
def test_prefix_lm(lengths):
    every = [lengths] if isinstance(lengths, int) else [int(length) for length in lengths]
    expected = dense_of(lambda b, h, q, k: k <= q or k < every[b], len(every), 1, 150, 150)
    check_mask(patterns.prefix_lm(150, lengths, tile=(64, 64)), expected)


@pytest.mark.parametrize("tile", [(64, 64), (16, 256)], ids=str)
@pytest.mark.parametrize("left, right, dilation", [(0, 0, 3), (3, 0, 2), (2, 5, 7), (100, 0, 3), (4, 4, 1), (1, 1, 90)])
def test_dilated(left, right, dilation, tile):
    def visible(b, h, q, k):
        return (q - k) % dilation == 0 and -right * dilation <= q - k <= left * dilation

    check_mask(patterns.dilated(333, left, right, dilation, tile=tile), dense_of(visible, 1, 1, 333, 333))


def neighbours(length, kernel, dilation, causal):
    """For each coordinate the ones that it sees, walked out as NATTEN defines them."""
    seen = []
    for place in range(length):
        line = range(place % dilation, length, dilation)
        number = line.index(place)
        if causal:
            seen.append({line[other] for other in range(max(number - kernel + 1, 0), number + 1)})
            continue
        window = list(range(number - kernel // 2, number - kernel // 2 + kernel))
        while window[0] < 0:
            window = [other + 1 for other in window]
        while window[-1] >= len(line):
            window = [other - 1 for other in window]
        seen.append({line[other] for other in window})
    return seen


@pytest.mark.parametrize("tile", [(64, 64), (128, 64)], ids=str)
@pytest.mark.parametrize(
    "size, kernel, dilation, causal",
    [
        (150, 7, 1, False), (150, 4, 1, False), (151, 5, 6, False), (151, 8, 3, True), ((9, 17), 3, 1, False),
        ((13, 16), (5, 4), (2, 3), (False, True)), ((3, 70), (3, 31), (1, 2), False),
        ((4, 6, 10), (3, 3, 5), (1, 2, 1), (True, False, False)), ((6, 5, 7), (6, 5, 7), 1, False),
        ((1, 1, 100), (1, 1, 9), 1, True),
    ],
)  # fmt: skip
def test_neighborhood(size, kernel, dilation, causal, tile):
    sizes = (size,) if isinstance(size, int) else size

    def of_each(value):
        return value if isinstance(value, tuple) else (value,) * len(sizes)

    seen = [neighbours(*axis) for axis in zip(sizes, of_each(kernel), of_each(dilation), of_each(causal))]
    places = list(itertools.product(*map(range, sizes)))

    def visible(b, h, q, k):
        return all(its in near[own] for own, its, near in zip(places[q], places[k], seen))

    mask = patterns.neighborhood(size, kernel, dilation, causal, tile=tile)
    check_mask(mask, dense_of(visible, 1, 1, len(places), len(places)))


TREES = [
    ([5], [-1]), ([70, 3, 60, 1, 90], [-1, 0, 0, 2, 1]), ([2, 2, 1, 2], [-1, 0, 1, 0]),
    ([40, 50, 30, 0, 20, 64], [-1, -1, 0, 1, 3, 0]), ([100, 100], [-1, -1]),
]  # fmt: skip


def paths(lengths, parents):
    """The tokens of each sequence from its root to a segment without children."""
    starts = [sum(lengths[:segment]) for segment in range(len(lengths))]
    every = []
    for leaf in sorted(set(range(len(lengths))) - set(parents)):
        segments, segment = [], leaf
        while segment >= 0:
            segments.insert(0, segment)
            segment = parents[segment]
        every.append([starts[s] + i for s in segments for i in range(lengths[s])])
    return every


@pytest.mark.parametrize("tile", [(64, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("lengths, parents", TREES, ids=str)
def test_tree(lengths, parents, tile):
    pairs = {(q, k) for path in paths(lengths, parents) for i, q in enumerate(path) for k in path[: i + 1]}
    tokens = sum(lengths)
    mask = patterns.tree(lengths, parents, tile=tile)
    check_mask(mask, dense_of(lambda b, h, q, k: (q, k) in pairs, 1, 1, tokens, tokens))
    positions = patterns.tree_positions(lengths, parents).tolist()
    assert all([positions[token] for token in path] == list(range(len(path))) for path in paths(lengths, parents))


@pytest.mark.parametrize(
    "build",
    [
        lambda: patterns.causal(0),
        lambda: patterns.sliding_window(0, 5, 1, 1, 2),
        lambda: patterns.sliding_window(5, 0, 1, 1, 2),
        lambda: patterns.strided(0, 3),
        lambda: patterns.fixed(0, 3, 1),
        lambda: patterns.butterfly(0),
        lambda: patterns.big_bird(0),
        lambda: patterns.documents(ids=torch.zeros(3, 0, dtype=torch.int64)),
        lambda: patterns.prefix_lm(0, [1, 2]),
        lambda: patterns.dilated(0, 1, 1, 2),
        lambda: patterns.tree([], []),
        lambda: patterns.tree([0, 0], [-1, 0]),
    ],
)
def test_nothing_to_see(build):
    mask = build()
    check_mask(mask, torch.zeros(mask.shape, dtype=torch.bool))


PICTURED = {
    "causal": [lambda: patterns.causal(4)],
    "sliding_window": [
        lambda: patterns.sliding_window(6, left=1, right=1),
        lambda: patterns.sliding_window(6, left=1, right=1, global_tokens=1),
        lambda: patterns.sliding_window(6, left=1, right=0, global_tokens=1),
    ],
    "strided": [lambda: patterns.strided(8, 3)],
    "fixed": [lambda: patterns.fixed(8, 3, 1)],
    "butterfly": [lambda: patterns.butterfly(128, 16)],
    "big_bird": [lambda: patterns.big_bird(128, 16, 3, 1, 1)],
    "documents": [
        lambda: patterns.documents(lengths=[2, 3, 1]),
        lambda: patterns.documents(lengths=[2, 3, 1], causal=True),
    ],
    "prefix_lm": [lambda: patterns.prefix_lm(5, 3)],
    "dilated": [lambda: patterns.dilated(7, 2, 0, 2)],
    "neighborhood": [
        lambda: patterns.neighborhood(6, 3),
        lambda: patterns.neighborhood(6, 2, 2),
        lambda: patterns.neighborhood(6, 3, causal=True),
    ],
    "tree": [lambda: patterns.tree([2, 2, 1, 2], [-1, 0, 1, 0])],
}


@pytest.mark.parametrize("name", PICTURED)
def test_pictures_are_true(name):
    """Every picture in a docstring, side by side ones from left to right."""
    text = inspect.getdoc(getattr(patterns, name))
    rows = [re.findall(r"[x.](?: [x.])+", line) for line in text.splitlines()]
    drawn = zip(*(row for row in rows if row))
    for picture, build in itertools.zip_longest(drawn, PICTURED[name]):
        dense = build().to_dense()[0, 0]
        dense = dense[:: dense.shape[0] // len(picture), :: dense.shape[0] // len(picture)]
        assert list(picture) == [" ".join("x" if seen else "." for seen in row) for row in dense.tolist()]


@pytest.mark.parametrize(
    "build, examined",
    [
        (lambda: patterns.causal(65536), 512),
        (lambda: patterns.sliding_window(65536, left=1024, right=0, global_tokens=64), 3 * 512),
        (lambda: patterns.strided(65536, 256), 10),
        (lambda: patterns.strided(65536, 250, causal=False), 400),
        (lambda: patterns.fixed(65536, 250, 8), 1000),
        (lambda: patterns.butterfly(65536, 16), 8),
        (lambda: patterns.big_bird(65536), 0),
        (lambda: patterns.documents(lengths=[1000] * 65, causal=True), 5 * 512),
        (lambda: patterns.prefix_lm(65536, 1000), 2 * 512),
        (lambda: patterns.dilated(65536, 16, 0, 64), 20),
        (lambda: patterns.neighborhood((128, 128), 13), 30 * 128),
        (lambda: patterns.neighborhood((16, 32, 32), (3, 5, 5)), 20 * 128),
        (lambda: patterns.tree([4096] * 16, [-1, *[0] * 8, *[1] * 7]), 3 * 512),
    ],
)
def test_long_patterns_look_at_few_tiles(build, examined, monkeypatch):
    """The elements that are made of 65,536 tokens, in neighborhoods of 16,384: about those of the tiles on the edges,
    not those of all."""
    classified, tiles = tile_lists._classified, []

    def counting(grid, cells, elements):
        tiles.append(cells.shape[0])
        return classified(grid, cells, elements)

    monkeypatch.setattr(tile_lists, "_classified", counting)
    mask = build()
    assert sum(tiles) <= examined
    assert mask.density() > 0


@pytest.mark.parametrize(
    "build, error, message",
    [
        (lambda: patterns.causal(5, align="right"), ValueError, "align: expected one of 'bottom_right', 'top_left'"),
        (lambda: patterns.causal(-1), ValueError, "seq_q: expected at least 0, got -1"),
        (lambda: patterns.causal(5, tile=(8, 8)), ValueError, "tile: expected multiples of 16, got (8, 8)"),
        (lambda: patterns.sliding_window(5, left=-1), ValueError, "left: expected at least 0, got -1; use None for"),
        (lambda: patterns.sliding_window(5, right=1.0), TypeError, "right: expected an int, got 1.0; use None for"),
        (lambda: patterns.sliding_window(5, global_tokens=True), TypeError, "global_tokens: expected an int, got True"),
        (lambda: patterns.strided(5, 0), ValueError, "stride: expected at least 1, got 0"),
        (lambda: patterns.strided(5, 2, causal=1), TypeError, "causal: expected True or False, got 1"),
        (lambda: patterns.fixed(5, 4, 5), ValueError, "expressivity: expected at most the stride, 4, got 5"),
        (lambda: patterns.butterfly(5, 24), ValueError, "block: expected a multiple of 16, got 24"),
        (lambda: patterns.big_bird(5, window_blocks=2), ValueError, "window_blocks: expected an odd number, got 2"),
        (lambda: patterns.big_bird(5, random_blocks=-1), ValueError, "random_blocks: expected at least 0, got -1"),
        (lambda: patterns.big_bird(5, heads=0), ValueError, "heads: expected at least 1, got 0; None is one pattern"),
        (lambda: patterns.dilated(5, -1, 0, 2), ValueError, "left: expected at least 0, got -1"),
        (lambda: patterns.dilated(5, 1, 0, 0), ValueError, "dilation: expected at least 1, got 0; 1 is a band without"),
        (lambda: patterns.neighborhood(5, 6), ValueError, "kernel_size: expected kernel_size · dilation of at most 5"),
        (lambda: patterns.neighborhood((5, 5), (3, 3, 3)), ValueError, "kernel_size: expected one value, or one for"),
        (lambda: patterns.neighborhood((5, 5), 3.0), TypeError, "kernel_size: expected an int, got 3.0"),
        (lambda: patterns.neighborhood(5, 3, causal=1), TypeError, "causal: expected True or False, got 1"),
        (lambda: patterns.neighborhood((), 3), ValueError, "size: expected at least one dimension, got none"),
        (lambda: patterns.tree([3], [0]), ValueError, "parents: expected segments before segment 0, or -1, got 0"),
        (lambda: patterns.tree([3], [-2]), ValueError, "parents: expected at least -1, got -2; -1 begins a sequence"),
        (lambda: patterns.tree([3, -1], [-1, 0]), ValueError, "lengths: expected at least 0, got -1"),
        (lambda: patterns.tree([3, 4], [-1]), ValueError, "parents: expected one for each of the 2 lengths, got 1"),
        (lambda: patterns.tree(torch.ones(2), [-1]), TypeError, "lengths: expected a list of ints, got Tensor"),
        (lambda: patterns.tree_positions([3], 5), TypeError, "parents: expected a list of ints, got int"),
        (lambda: patterns.documents(), ValueError, "lengths, ids: expected one of them, got neither"),
        (
            lambda: patterns.documents(lengths=[1], ids=torch.zeros(1, dtype=torch.int64)),
            ValueError,
            "lengths, ids: expected one of them, got both",
        ),
        (lambda: patterns.documents(lengths=[3, -1]), ValueError, "lengths: expected at least 0, got -1"),
        (lambda: patterns.documents(lengths=torch.tensor([3, -1])), ValueError, "lengths: expected at least 0, got -1"),
        (lambda: patterns.documents(lengths=7), TypeError, "lengths: expected a tensor or a list of ints, got int"),
        (lambda: patterns.documents(ids=[1, 2]), TypeError, "ids: expected a torch.Tensor, got list"),
        (lambda: patterns.documents(ids=torch.zeros(5)), TypeError, "ids: expected dtype int32 or int64, got torch"),
        (
            lambda: patterns.documents(ids=torch.zeros(1, 2, 3, dtype=torch.int64)),
            ValueError,
            "ids: expected shape [seq] or [batch, seq], got (1, 2, 3)",
        ),
        (lambda: patterns.prefix_lm(5, -1), ValueError, "prefix_lengths: expected at least 0, got -1"),
        (lambda: patterns.prefix_lm(5, 2.0), TypeError, "prefix_lengths: expected a tensor or a list of ints, got flo"),
        (lambda: patterns.prefix_lm(5, torch.ones(2, 2).long()), ValueError, "prefix_lengths: expected shape [batch]"),
    ],
)
def test_errors(build, error, message):
    with pytest.raises(error, match=re.escape(message)):
        build()


_BUILT_ON_A_GPU = {
    "causal": (700,),
    "sliding_window": (700, 650, 100, 3, 70),
    "strided": (700, 100),
    "fixed": (700, 100),
    "butterfly": (700, 16),
    "big_bird": (700, 16, 3, 2, 3, 5, 2),
    "documents": (),
    "prefix_lm": (700, [3, 300]),
    "dilated": (700, 90, 30, 3),
    "neighborhood": ((20, 35), (5, 7), (2, 1)),
    "tree": ([300, 200, 150, 50], [-1, 0, 1, 0]),
    "tree_positions": ([300, 200, 150, 50], [-1, 0, 1, 0]),
}


def test_every_pattern_has_a_picture_and_is_built_on_a_gpu():
    assert _BUILT_ON_A_GPU.keys() == {*PICTURED, "tree_positions"} == set(patterns.__all__)


@pytest.mark.gpu
@pytest.mark.parametrize("name", _BUILT_ON_A_GPU)
def test_built_on_a_gpu(name):
    options = {"lengths": [100, 300, 50]} if name == "documents" else {}
    build = functools.partial(getattr(patterns, name), *_BUILT_ON_A_GPU[name], **options)
    built, expected = build(device="cuda"), build()
    assert built.device.type == "cuda"
    if name == "tree_positions":
        assert_same(built.cpu(), expected)
    else:
        assert built.cpu() == expected
