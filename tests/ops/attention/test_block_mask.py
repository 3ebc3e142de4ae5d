"""`BlockMask`: the lists against the dense mask, tile by tile; every way to build one; what it is as an object."""

import copy
import dataclasses
import pickle
import re
from collections.abc import Callable

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import flex_attention

from flashtile import BlockMask
from flashtile.ops.attention import tile_lists
from flashtile.testing import assert_close
from support.attention.mask_checks import check_mask
from support.running.each_case import each_case
from support.running.python import run_python

TILES = ((128, 128), (16, 256), (64, 64), (48, 80), (16, 16), (192, 64))


def blocky(shape: tuple[int, ...], seed: int = 0, block: tuple[int, int] = (64, 64)) -> Tensor:
    """A random mask with tiles that are empty, full and neither."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = -(-shape[2] // block[0]), -(-shape[3] // block[1])
    kind = torch.randint(0, 3, (*shape[:2], rows, columns), generator=generator)
    kind = kind.repeat_interleave(block[0], 2).repeat_interleave(block[1], 3)[..., : shape[2], : shape[3]]
    return (kind == 2) | (kind == 1) & (torch.rand(shape, generator=generator) < 0.5)


def indexed(dense: Tensor):
    """A mask as a predicate."""
    return lambda batch, head, q, k: dense[batch, head, q, k]


@pytest.mark.parametrize("tiles", [((64, 64), (64, 64)), ((64, 128), (192, 64)), ((16, 256), (128, 128))], ids=str)
@pytest.mark.parametrize("shapes", [((1, 1), (1, 1)), ((2, 1), (1, 3)), ((2, 3), (2, 3))], ids=str)
def test_combined(shapes, tiles):
    dense = [blocky((*shape, 300, 210), seed) for seed, shape in enumerate(shapes)]
    first, second = (BlockMask.from_dense(one, tile) for one, tile in zip(dense, tiles))
    check_mask(first & second, dense[0] & dense[1])
    check_mask(first | second, dense[0] | dense[1])
    check_mask(~first, ~dense[0])
    assert ~~first == first and (first & ~first).entries == 0
    assert (~(first | second)).to_dense().equal((~first & ~second).to_dense())


@pytest.mark.parametrize(
    ("other", "error", "message"),
    [
        (BlockMask.from_dense(blocky((1, 1, 100, 71))), ValueError, "&: expected two masks of one size, got seq_k 70"),
        (BlockMask.from_dense(blocky((3, 1, 100, 70))), ValueError, "&: expected two masks of one size, got batch 2"),
        (blocky((2, 1, 100, 70)), TypeError, "unsupported operand"),
    ],
)
def test_masks_that_do_not_combine(other, error, message):
    with pytest.raises(error, match=message):
        BlockMask.from_dense(blocky((2, 1, 100, 70))) & other


def test_a_matrix_stands_for_every_batch_and_head():
    dense = blocky((1, 1, 100, 70))
    assert BlockMask.from_dense(dense[0, 0]) == BlockMask.from_dense(dense)
    every = BlockMask.from_predicate(indexed(dense), None, None, 100, 70)
    assert every == BlockMask.from_dense(dense)


def test_stored_tiles_are_multiples_that_64_divides():
    for tile, stored in {(128, 192): (128, 192), (16, 256): (64, 256), (48, 80): (192, 320)}.items():
        assert BlockMask.from_dense(torch.ones(5, 5, dtype=torch.bool), tile).tile == stored


@st.composite
def masks(draw: st.DrawFn) -> tuple[Tensor, tuple[int, int]]:
    sides = st.integers(0, 300) | st.sampled_from([0, 1, 63, 64, 65, 127, 128, 129])
    outer = st.sampled_from([1, 2, 3, 0])
    shape = (draw(outer), draw(outer), draw(sides), draw(sides))
    block = draw(st.sampled_from([(16, 16), (64, 64), (30, 100)]))
    tile = draw(st.tuples(*(st.sampled_from([16, 32, 48, 64, 80, 128, 192, 256]),) * 2))
    return blocky(shape, draw(st.integers(0, 2**20)), block), tile


@hypothesis.settings(max_examples=80)
@hypothesis.given(masks(), st.integers(1, 3), st.integers(1, 9))
def test_any_mask(given, tiles_at_once, rows_at_once):
    """However many tiles are looked at in one go."""
    dense, tile = given
    mask = BlockMask.from_dense(dense, tile)
    check_mask(mask, dense)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tile_lists, "PAIRS_AT_ONCE", tiles_at_once * mask.tile[0] * mask.tile[1])
        patch.setattr(tile_lists, "TILES_AT_ONCE", rows_at_once)
        assert BlockMask.from_predicate(indexed(dense), *dense.shape, tile) == mask
    assert BlockMask.from_flex(mask.to_flex()) == mask


def test_patterns_with_one_hash_are_told_apart(monkeypatch):
    dense = blocky((1, 2, 300, 300))
    monkeypatch.setattr(tile_lists, "_hashed", lambda words: torch.zeros_like(words[:, 0]))
    check_mask(BlockMask.from_dense(dense), dense)


def named_pairs(layout: Tensor, tile: tuple[int, int], seq_q: int, seq_k: int) -> Tensor:
    batch, heads = layout.shape[:2]
    dense = torch.zeros(batch, heads, seq_q, seq_k, dtype=torch.bool)
    for b, h, i, j in layout.nonzero().tolist():
        dense[b, h, i * tile[0] : (i + 1) * tile[0], j * tile[1] : (j + 1) * tile[1]] = True
    return dense


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("lead", [(1, 1), (2, 3)], ids=str)
def test_from_layout(tile, lead):
    seq_q, seq_k = 333, 290
    layout = torch.rand(*lead, -(-seq_q // tile[0]), -(-seq_k // tile[1])) < 0.4
    named = named_pairs(layout, tile, seq_q, seq_k)
    check_mask(BlockMask.from_layout(layout, tile, seq_q, seq_k), named)
    assert BlockMask.from_layout(layout.int() * 7, tile, seq_q, seq_k) == BlockMask.from_dense(named, tile)
    elements = blocky((1, 1, seq_q, seq_k))
    check_mask(BlockMask.from_layout(layout, tile, seq_q, seq_k, elements), named & elements)
    of_each = torch.rand(int(layout.sum()), *tile) < 0.5
    wanted = named.clone()
    for (b, h, i, j), mask in zip(layout.nonzero().tolist(), of_each):
        cut = wanted[b, h, i * tile[0] : (i + 1) * tile[0], j * tile[1] : (j + 1) * tile[1]]
        cut &= mask[: cut.shape[0], : cut.shape[1]]
    check_mask(BlockMask.from_layout(layout, tile, seq_q, seq_k, of_each), wanted)


def test_from_layout_joins_batch_and_heads():
    layout, elements = torch.ones(3, 2, dtype=torch.bool), blocky((2, 3, 150, 100))
    check_mask(BlockMask.from_layout(layout, (64, 64), 150, 100, elements), elements)
    heads = torch.rand(1, 3, 3, 2) < 0.5
    wanted = named_pairs(heads, (64, 64), 150, 100) & elements[:, :1]
    check_mask(BlockMask.from_layout(heads, (64, 64), 150, 100, elements[:, :1]), wanted)


@pytest.mark.slow
@pytest.mark.unpoisoned
def test_long_masks_take_little_memory():
    """The matrix alone would be 1 GB, its indices 8."""
    source = (
        "import re, torch, flashtile\n"
        "mask = flashtile.BlockMask.from_predicate(lambda b, h, q, k: q >= k, None, None, 32768, 32768)\n"
        "assert mask.columns.shape[0] == 256 * 257 // 2 and mask.tile_masks.shape[0] == 1\n"
        # The peak of this program alone: `getrusage` counts what the process was before it, too.
        "print(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1])\n"
    )
    assert int(run_python("-c", source)) < 2**20


@pytest.mark.parametrize("block", [128, (32, 48), (16, 256)], ids=str)
def test_from_flex(block):
    """A mask_mod written for single numbers, on odd lengths."""
    ids = torch.arange(200) // 37
    table = torch.stack((ids, ids.flip(0)))

    def mask_mod(b, h, q, k):
        return (table[b][q] == table[b][k]) & ((k <= q) | (h == 1))

    mask = BlockMask.from_flex(flex_attention.create_block_mask(mask_mod, 2, 2, 200, 180, "cpu", BLOCK_SIZE=block))
    rows, columns = torch.arange(200)[:, None], torch.arange(180)
    same = table[:, None, :, None] == table[:, None, None, :180]
    check_mask(mask, same & ((columns <= rows) | torch.tensor([False, True]).view(1, 2, 1, 1)))


def test_from_flex_does_not_look_into_full_blocks():
    """As FlexAttention: its lists decide, a mask_mod only where they are partial."""
    number, index = torch.tensor([[[1, 1]]]), torch.tensor([[[[0, 1], [1, 0]]]])
    none = torch.zeros_like(number)
    given = flex_attention.BlockMask.from_kv_blocks(
        none, index, number, index, BLOCK_SIZE=64, mask_mod=lambda b, h, q, k: q < 0
    )
    blocks = torch.eye(2, dtype=torch.bool)[None, None]
    check_mask(BlockMask.from_flex(given), blocks.repeat_interleave(64, 2).repeat_interleave(64, 3))
    assert BlockMask.from_flex(flex_attention.BlockMask.from_kv_blocks(number, index, BLOCK_SIZE=64)) == (
        BlockMask.from_flex(given)
    )


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_to_flex_serves_a_call():
    dense = blocky((1, 1, 200, 130)) | (torch.arange(130) == 0)
    q, k = torch.randn(2, 3, 200, 16), torch.randn(2, 3, 130, 16)
    given = BlockMask.from_dense(dense, (64, 64)).to_flex()
    assert given.shape == (1, 1, 200, 130)
    out = flex_attention.flex_attention(q, k, k, block_mask=given)
    eager = functional.scaled_dot_product_attention(q, k, k, attn_mask=dense)
    oracle = functional.scaled_dot_product_attention(q.double(), k.double(), k.double(), attn_mask=dense)
    assert_close("out", out, oracle, eager)


def test_density_counts_pairs_of_stored_tiles():
    dense = torch.zeros(200, 100, dtype=torch.bool)
    dense[0, 0] = dense[199, 99] = True
    mask = BlockMask.from_dense(dense, (64, 64))
    assert mask.density() == (64 * 64 + 8 * 36) / (200 * 100)
    assert mask.sparsity() == 1 - mask.density()
    assert BlockMask.from_dense(dense[:, :0]).density() == 0


def test_equality_is_of_values():
    dense = blocky((1, 2, 130, 130))
    mask, other = BlockMask.from_dense(dense), BlockMask.from_dense(dense.clone())
    assert mask == other
    changed = dense.clone()
    changed[0, 1, 5, 5] ^= True
    assert mask != BlockMask.from_dense(changed)
    assert mask != BlockMask.from_dense(dense, (64, 64))
    assert mask != BlockMask.from_dense(dense[:, :1])
    assert mask != "mask"


def test_copies_and_moves():
    mask = BlockMask.from_dense(blocky((1, 2, 130, 130)))
    assert pickle.loads(pickle.dumps(mask)) == mask
    duplicate = copy.deepcopy(mask)
    assert duplicate == mask and duplicate.columns.data_ptr() != mask.columns.data_ptr()
    assert mask.cpu() is mask and mask.to("cpu") is mask and mask.device == torch.device("cpu")
    away = mask.to("meta")
    assert away.device.type == "meta" and away.shape == mask.shape and away.columns.shape == mask.columns.shape
    assert all(getattr(away, field.name).is_meta for field in dataclasses.fields(away)[2:])


def test_never_changes():
    mask = BlockMask.from_dense(torch.ones(5, 5, dtype=torch.bool))
    with pytest.raises(dataclasses.FrozenInstanceError):
        mask.shape = (1, 1, 6, 6)
    with pytest.raises(TypeError):
        hash(mask)


def test_repr_is_short():
    mask = BlockMask.from_predicate(lambda b, h, q, k: q >= k, None, 2, 1000, 1000)
    expected = "BlockMask(shape=(1, 2, 1000, 1000), tile=(128, 128), entries=72 of 128, patterns=2, device='cpu')"
    assert repr(mask) == expected


def test_fits():
    mask = BlockMask.from_dense(torch.ones(2, 1, 30, 50, dtype=torch.bool))
    assert mask.fits(2, 7, 30, 50) is None
    for sizes, words in (
        ((3, 7, 30, 50), "batch 2, the call has 3"),
        ((2, 7, 31, 50), "seq_q 30, the call has 31"),
        ((2, 7, 30, 49), "seq_k 50, the call has 49"),
    ):
        assert words in (mask.fits(*sizes) or "")
    assert "heads 3, the call has 4" in (BlockMask.from_dense(blocky((1, 3, 5, 5))).fits(1, 4, 5, 5) or "")


def test_torch_compile_and_func_take_a_mask():
    mask = BlockMask.from_dense(blocky((1, 2, 130, 130)))
    captured = BlockMask.from_dense(blocky((1, 2, 130, 130), seed=1))

    def f(x, block_mask):
        assert block_mask.fits(1, 2, 130, 130) is None
        return x * block_mask.columns.sum() + block_mask.tile_masks.shape[0] + captured.kinds.sum()

    x = torch.randn(3)
    assert torch.equal(torch.compile(f, fullgraph=True, backend="aot_eager")(x, mask), f(x, mask))
    assert torch.equal(torch.func.vmap(f, in_dims=(0, None))(x, mask), f(x, mask))
    leaves, form = torch.utils._pytree.tree_flatten({"mask": mask})
    assert len(leaves) == 2 and torch.utils._pytree.tree_unflatten(leaves, form)["mask"] == mask


TRUE = torch.ones(130, 130, dtype=torch.bool)


def laid_out(*element_mask: Tensor, layout: Tensor = TRUE[:3, :3]) -> BlockMask:
    return BlockMask.from_layout(layout, (64, 64), 130, 130, *element_mask)


def of_blocks(size: int) -> BlockMask:
    given = flex_attention.create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 80, 80, "cpu", BLOCK_SIZE=size)
    return BlockMask.from_flex(given)


_WRONG: dict[type[Exception], list[tuple[Callable[[], BlockMask], str]]] = {
    TypeError: [
        (lambda: BlockMask.from_dense([[True]]), "mask: expected a torch.Tensor, got list"),
        (lambda: BlockMask.from_dense(TRUE.float()), "mask: expected dtype bool"),
        (lambda: BlockMask.from_dense(TRUE, 128), "tile: expected a pair of ints (tile_q, tile_k), got 128"),
        (lambda: BlockMask.from_dense(TRUE, (128,)), "tile: expected a pair of ints"),
        (lambda: BlockMask.from_predicate(TRUE, 1, 1, 5, 5),
         "predicate: expected a function (batch, head, q_index, k_index), got Tensor"),
        (lambda: BlockMask.from_predicate(lambda q, k: q >= k, 1, 1, 5, 5), "one with the parameters (q, k)"),
        (lambda: BlockMask.from_predicate(indexed(TRUE), 1, 2.0, 5, 5), "heads: expected an int, got 2.0"),
        (lambda: laid_out(layout=TRUE.double()), "layout: expected dtype bool or an integer, got torch.float64"),
        (lambda: laid_out(TRUE.int()), "element_mask: expected dtype bool"),
        (lambda: BlockMask.from_flex(TRUE), "block_mask: expected a BlockMask of torch.nn"),
    ],
    ValueError: [
        (lambda: BlockMask.from_dense(TRUE[0]), "mask: expected shape [seq_q, seq_k] or [batch, heads,"),
        (lambda: BlockMask.from_dense(TRUE[None]), "got (1, 130, 130)"),
        (lambda: BlockMask.from_dense(TRUE, (128, 40)), "tile: expected multiples of 16, got (128"),
        (lambda: BlockMask.from_dense(TRUE, (0, 16)), "tile: expected multiples of 16, got (0, "),
        (lambda: of_blocks(40), "tile: expected multiples of 16, got (40, 40)"),
        (lambda: BlockMask.from_dense(TRUE).with_tile((192, 128)), "tile: expected multiples of the mask's (1"),
        (lambda: BlockMask.from_predicate(indexed(TRUE), 1, 1, -5, 5), "seq_q: expected at least 0"),
        (lambda: laid_out(layout=TRUE),
         "layout: expected (3, 3) tiles of (64, 64) for 130 queries and 130 keys, got (130, 130)"),
        (lambda: laid_out(TRUE[:5]), "element_mask: expected 130 × 130 pairs"),
        (lambda: laid_out(TRUE.expand(2, 1, 130, 130), layout=TRUE[:3, :3].expand(3, 1, 3, 3)),
         "element_mask: expected 130 × 130 pairs, and the batch and heads of layout, (3, 1), or 1"),
        (lambda: laid_out(TRUE.expand(8, 130, 130)[:, :64, :64]),
         "element_mask: expected (9, 64, 64), a mask for each tile that the layout names, got (8, 64, 64)"),
        (lambda: laid_out(TRUE.to("meta")), "element_mask: expected the device of layout, cpu, got meta"),
    ],
}  # fmt: skip


@each_case("error, build, message", [(error, *row) for error, rows in _WRONG.items() for row in rows])
def test_errors(error, build, message):
    with pytest.raises(error, match=re.escape(message)):
        build()


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_built_on_a_gpu(tile):
    dense = blocky((2, 3, 333, 290))
    mask = BlockMask.from_dense(dense, tile)
    there = BlockMask.from_dense(dense.cuda(), tile)
    assert there.device.type == "cuda" and there == mask.cuda()
    check_mask(there.cpu(), dense)
    on_gpu = dense.cuda()
    assert BlockMask.from_predicate(indexed(on_gpu), *dense.shape, tile, device="cuda") == there
    assert BlockMask.from_flex(there.to_flex()) == there
    assert torch.equal(there.to_dense(), on_gpu)
