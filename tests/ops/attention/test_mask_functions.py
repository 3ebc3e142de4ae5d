"""Mask functions of single indices: what they show pair by pair, and how few tiles are looked into for it."""

import re

import pytest
import torch
from torch.nn.attention import flex_attention

import flashtile
from flashtile import BlockMask
from flashtile.ops.attention import tile_lists
from flashtile.testing import assert_same
from support.attention.mask_checks import check_mask
from support.running.places import places

BATCH, HEADS, SEQ_Q, SEQ_K = 2, 2, 210, 170

IDS = torch.arange(400) // 37
STARTS = 37 * torch.arange(11)
IDS_OF_BATCH = torch.stack((IDS, IDS.flip(0)))
LENGTHS = torch.tensor([100, 250], dtype=torch.int32)
REACH = torch.tensor([5.5, 64.0, 300.0])
UNSORTED = torch.randint(0, 1000, (400,), generator=torch.Generator().manual_seed(0))
HOLES = torch.where(UNSORTED < 50, torch.nan, UNSORTED / 1000)
SHOWN = torch.rand(400, 400, generator=torch.Generator().manual_seed(1)) < 0.5
SHIFT, CONSTANT = torch.tensor(17), torch.tensor(True)


def changes_in_place(b, h, q, k):
    distance = q - k
    distance.abs_()
    return distance < 70


FUNCTIONS = {
    "causal": lambda b, h, q, k: q >= k,
    "window": lambda b, h, q, k: (q - k <= 100) & (k <= q),
    "distance": lambda b, h, q, k: abs(q - k) < 90,
    "method_distance": lambda b, h, q, k: (k - q).abs().lt(90),
    "prefix": lambda b, h, q, k: (k < LENGTHS[b]) | (k <= q),
    "documents": lambda b, h, q, k: IDS[q] == IDS[k],
    "documents_of_batch": lambda b, h, q, k: (IDS_OF_BATCH[b, q] == IDS_OF_BATCH[b, k]) & (q >= k),
    "documents_by_rows": lambda b, h, q, k: IDS_OF_BATCH[b][q] == IDS_OF_BATCH[b][k],
    "lookup_of_a_lookup": lambda b, h, q, k: q - STARTS[IDS[q]] >= k - STARTS[IDS[k]],
    "fixed_row": lambda b, h, q, k: IDS_OF_BATCH[1, q] <= IDS_OF_BATCH[0, k],
    "reach_of_head": lambda b, h, q, k: (q - k < REACH[h]) & (q >= k),
    "unsorted": lambda b, h, q, k: UNSORTED[q] < UNSORTED[k],
    "nan": lambda b, h, q, k: (HOLES[q] <= HOLES[k]) | (HOLES[k] != HOLES[k]),
    "nan_or_not": lambda b, h, q, k: ~(HOLES[q] < 2.0) & HOLES[k].bool(),
    "from_the_end": lambda b, h, q, k: UNSORTED[q - 300] < UNSORTED[k - 1],
    "any_pair": lambda b, h, q, k: SHOWN[q, k],
    "bool_table": lambda b, h, q, k: SHOWN[h, q] & ~SHOWN[h + 1, k],
    "dilated": lambda b, h, q, k: ((q - k) % 4 == 0) & (abs(q - k) <= 128),
    "neighborhood": lambda b, h, q, k: ((q // 16 - k // 16).abs() <= 2) & ((q % 16 - k % 16).abs() <= 2),
    "where": lambda b, h, q, k: torch.where(q < 100, k < 100, torch.where(h == 1, q - k, k - q) >= 0),
    "where_numbers": lambda b, h, q, k: torch.where(q >= k, 1, 0) + torch.where(k < 64, 1, 0) > 1,
    "clamped": lambda b, h, q, k: (q - k).clamp(min=-5).clamp(max=200) < torch.maximum(q - 150, k - 60),
    "floats": lambda b, h, q, k: q.float() / 3 - 0.5 * k > -(k.double() / -2),
    "rounded": lambda b, h, q, k: torch.div(q, 7, rounding_mode="floor") * 7 <= torch.floor_divide(k, 3).int(),
    "reflected": lambda b, h, q, k: (300 - q > k) & (SHIFT + k >= 2 * q),
    "negative_divisor": lambda b, h, q, k: (q // -7 <= k % -5) & (q / -2 < k),
    "divided_by_an_index": lambda b, h, q, k: q // (k + 1) > q % (h + 2),
    "wraps_around": lambda b, h, q, k: (q * 0x2545F4914F6CDD1D + k * 0x369DEA0F31A53F85) % 7 < 3,
    "narrow": lambda b, h, q, k: (q.to(torch.int8) <= k.to(torch.uint8)) | (q.to(torch.float16) * 1000 < k),
    "unknown_operation": lambda b, h, q, k: (q >= k) & (torch.sin((q - k).float()) > 0),
    "other_connectives": lambda b, h, q, k: torch.logical_or(q < 20, torch.logical_and(k < 20, ~(q == k))) ^ (k < 9),
    "python_bools": lambda b, h, q, k: True & (q >= k) | False,
    "compared_bools": lambda b, h, q, k: (q < 100) == (k < 100),
    "constant": lambda b, h, q, k: CONSTANT,
    "constant_of_head": lambda b, h, q, k: (h == 1) != (b == 1),
    "in_place": changes_in_place,
    "of_pytorch": flex_attention.and_masks(
        flex_attention.noop_mask, flex_attention.or_masks(lambda b, h, q, k: q - k < 80, lambda b, h, q, k: k < 64)
    ),
    "clamped_to_both": lambda b, h, q, k: (k - q.clamp(40, 250)).abs() <= torch.clip(h, 1, 1) * 30,
    "unknown_and": lambda b, h, q, k: ((q & 1) == 0) & ((k & 1) == 0),
    "unknown_or": lambda b, h, q, k: torch.logical_or((q >> 2) == 3, (k ^ 5) == 8),
    "unknown_xor": lambda b, h, q, k: (q**2 > 900) ^ (k**2 > 90),
    "unknown_not": lambda b, h, q, k: ~((torch.sin(q.float()) > 0) & (torch.sin(k.float()) > 0)),
    "unknown_and_more": lambda b, h, q, k: (((q | 1) == 1) & ((k << 1) == 2)) == (((q & 1) > 0) | (q >= k)),
    "unknown_and_number": lambda b, h, q, k: (True & ((q & 1) == 0)) | (((k & 1) == 0) & False),
    "device": lambda b, h, q, k: q - k >= torch.zeros((), device=q.device, dtype=q.dtype),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_shows_what_the_function_says(name):
    function = FUNCTIONS[name]
    sizes = BATCH, HEADS, SEQ_Q, SEQ_K
    indices = [torch.arange(size).view(-1, *(1,) * (3 - place)) for place, size in enumerate(sizes)]
    if name == "documents_by_rows":
        dense = FUNCTIONS["documents_of_batch"](*indices) | (indices[2] < indices[3])
        dense &= IDS_OF_BATCH[indices[0], indices[2]] == IDS_OF_BATCH[indices[0], indices[3]]
    else:
        dense = function(*indices)
    mask = BlockMask.from_predicate(function, *sizes, tile=(64, 64))
    check_mask(mask, dense.expand(sizes))


def test_what_only_vmap_serves_is_left_to_it():
    """PyTorch refuses to subtract bools from a tensor, but not under `torch.vmap`."""
    mask = BlockMask.from_predicate(lambda b, h, q, k: SHIFT - (k > 50) * (q < k) <= k, 1, 1, SEQ_Q, SEQ_K, (64, 64))
    q, k = torch.arange(SEQ_Q)[:, None], torch.arange(SEQ_K)
    check_mask(mask, (SHIFT - ((k > 50) & (q < k)).long() <= k)[None, None])


LONG = torch.repeat_interleave(torch.arange(64), 512)


@pytest.mark.parametrize(
    "function, examined",
    [
        (lambda b, h, q, k: q >= k, 256),
        (lambda b, h, q, k: (q >= k) & (q - k <= 1024), 2 * 256),
        (lambda b, h, q, k: (LONG[q] == LONG[k]) & (q >= k), 256),
        (lambda b, h, q, k: (k < LENGTHS[b]) | (q >= k), 2 * 256),
        (flex_attention.and_masks(lambda b, h, q, k: q >= k, lambda b, h, q, k: q - k.clamp(0, 9999) <= 500), 768),
        (lambda b, h, q, k: (abs(q - k) <= 128) & (torch.sin(q - k) > 0), 3 * 256),
    ],
)
def test_long_masks_look_at_few_tiles(function, examined, monkeypatch):
    classified, tiles = tile_lists._classified, []

    def counting(grid, cells, elements):
        tiles.append(cells.shape[0])
        return classified(grid, cells, elements)

    monkeypatch.setattr(tile_lists, "_classified", counting)
    BlockMask.from_predicate(function, None, None, 32768, 32768)
    assert 0 < sum(tiles) <= examined


@pytest.mark.parametrize(
    "function, error, message",
    [
        (lambda b, h, q, k: q - k, TypeError, "predicate: expected a bool tensor, True = visible, got torch.int64"),
        (lambda b, h, q, k: True, TypeError, "predicate: expected a bool tensor, True = visible, got bool"),
        (lambda b, h, q, k: SHOWN, ValueError, "predicate: expected one bool for one pair of indices, got shape (400,"),
        (lambda b, h, q, k: q >= k and k > 5, TypeError, "got __bool__, which needs the value of an index"),
        (lambda b, h, q, k: k > LENGTHS.tolist()[b], TypeError, "got __index__, which needs the value of an index"),
        (lambda b, h, q, k: q.item() > k, TypeError, "got item, which needs the value of an index"),
        (lambda b, h, q, k: IDS[q + 400] == k, IndexError, "index 400 is out of bounds"),
    ],
)
def test_errors(function, error, message):
    with pytest.raises(error, match=re.escape(message)):
        BlockMask.from_predicate(function, 1, 1, SEQ_Q, SEQ_K)


@pytest.mark.parametrize("name", ["causal", "documents_of_batch", "reach_of_head", "any_pair", "constant"])
def test_with_room_it_is_the_same_mask(name):
    sizes = BATCH, HEADS, SEQ_Q, SEQ_K
    mask = BlockMask.from_predicate(FUNCTIONS[name], *sizes, tile=(64, 64))
    with_room = BlockMask.from_predicate(FUNCTIONS[name], *sizes, tile=(64, 64), max_partial_tiles=2 * 2 * 4 * 3)
    assert with_room == mask and with_room.density() == mask.density()
    check_mask(with_room.compact(), mask.to_dense())
    check_mask(with_room.with_tile((128, 192)), mask.to_dense())
    assert with_room.to_dense().equal(mask.to_dense())
    assert (~with_room & with_room).to_dense().sum() == 0 and BlockMask.from_flex(with_room.to_flex()) == mask


IDS_WITHOUT_VALUES = IDS_OF_BATCH.to("meta")


@pytest.mark.parametrize(
    "function",
    [
        FUNCTIONS["dilated"],
        FUNCTIONS["where_numbers"],
        FUNCTIONS["unknown_operation"],
        lambda b, h, q, k: (IDS_WITHOUT_VALUES[b, q] == IDS_WITHOUT_VALUES[1, k]) & (q >= k),
    ],
)
def test_with_room_nothing_is_read_on_the_host(function):
    """Tensors without values show it: reading one raises, and so does a result whose shape depends on values."""
    sizes = {"batch": BATCH, "heads": HEADS, "seq_q": SEQ_Q, "seq_k": SEQ_K, "tile": (64, 64), "device": "meta"}
    mask = BlockMask.from_predicate(function, **sizes, max_partial_tiles=100)
    assert mask.device.type == "meta" and mask.tile_masks.shape == (100, 64, 64)
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        BlockMask.from_predicate(function, **sizes)


@pytest.mark.parametrize("room", [0, 6, 40])
def test_room_that_is_left(room):
    """Also none at all, for a mask whose tiles are all empty or full."""
    function = FUNCTIONS["causal"] if room else lambda b, h, q, k: q // 64 >= k // 64
    mask = BlockMask.from_predicate(function, None, None, SEQ_Q, SEQ_Q, (64, 64), max_partial_tiles=room)
    assert mask == BlockMask.from_predicate(function, None, None, SEQ_Q, SEQ_Q, (64, 64))
    nothing = BlockMask.from_predicate(function, 0, 2, 5, 5, (64, 64), max_partial_tiles=room)
    assert nothing.entries == 0


@places("cpu", "reference", "interpreted")
def test_calls_with_room_give_the_same(backend, device):
    function = FUNCTIONS["documents_of_batch"]
    q, k = (torch.randn(2, 100, 1, 16, requires_grad=True) for _ in range(2))
    bias = torch.randn(1, 1, 100, 1, requires_grad=True)
    results = []
    for room in (None, 20):
        mask = BlockMask.from_predicate(function, 2, 1, 100, 100, (64, 64), max_partial_tiles=room)
        out = flashtile.attention(q, k, k, block_mask=mask, bias=bias, backend=backend)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, bias))))
    assert_same(*results)


@pytest.mark.parametrize(
    "room, error, message",
    [
        (3, ValueError, "expected room for all tiles that are not known to be empty or full, 4, got 3"),
        (-1, ValueError, "expected at least 0, got -1"),
        (2.0, TypeError, "expected an int, got 2.0"),
    ],
)
def test_errors_of_room(room, error, message):
    with pytest.raises(error, match=f"max_partial_tiles: {message}"):
        BlockMask.from_predicate(FUNCTIONS["causal"], 1, 1, SEQ_Q, SEQ_Q, (64, 64), max_partial_tiles=room)


@pytest.mark.gpu
def test_on_a_gpu_with_room_nothing_waits():
    """Nor does it in a CUDA graph, which builds the mask anew in each replay."""
    sizes = {"batch": BATCH, "heads": None, "seq_q": SEQ_Q, "seq_k": SEQ_K, "tile": (64, 64)}
    ids = IDS_OF_BATCH.cuda()

    def build():
        return BlockMask.from_predicate(_documents_of(ids), **sizes, max_partial_tiles=60, device="cuda")

    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        mask = build()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert mask.cpu() == BlockMask.from_predicate(_documents_of(IDS_OF_BATCH), **sizes)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mask = build()
    for given in (IDS_OF_BATCH.flip(0), IDS_OF_BATCH):
        ids.copy_(given)
        graph.replay()
        assert mask.cpu() == BlockMask.from_predicate(_documents_of(given), **sizes)


def _documents_of(ids):
    return lambda b, h, q, k: (ids[b, q] == ids[b, k]) & (q >= k)
