"""How the two warpgroups of a Hopper kernel of float32 share 64 rows: the forward's queries, or the keys of dv.

Each has every second chunk (`float32_streams`) of the columns: it multiplies those of q and k, and sums those of the
result. The first one begins with the first chunk of q and k, the other one with the first of the result, so of three
chunks neither has two of both. Their partial scores pass through shared memory, and both add them up, so both know the
weights. Each has a warp that loads its tiles.
"""

from typing import Any, NamedTuple

from flashtile._backends.gluon import gl, gluon, mbarrier
from flashtile.ops.attention.hopper.backward_pieces import ROWS
from flashtile.ops.attention.hopper.convert import PARTS
from flashtile.ops.attention.hopper.float32_streams import load_operands, product_of_rows
from flashtile.ops.attention.hopper.pieces import Chunks, barriers, make_ring, matrix_layout

#: Warpgroups that share rows.
SHARERS = gl.constexpr(2)


class Rings(NamedTuple):
    """Tiles of a warpgroup: own chunks that stay, and its stream."""

    own: Any
    stream: Any


class PartialScores(NamedTuple):
    """A place for each warpgroup, which it writes and the other one reads. `there`, `taken`: barriers of each."""

    places: Any
    there: Any
    taken: Any


@gluon.constexpr_function
def chunks_of(first, chunks):
    """How many chunks a warpgroup has, from its first one on."""
    return (chunks + SHARERS - 1 - first) // SHARERS


@gluon.constexpr_function
def first_of_result(which):
    """The first chunk of a warpgroup in the result."""
    return SHARERS - 1 - which


@gluon.constexpr_function
def staying_of(which, staying, chunks):
    """How many own chunks of a warpgroup stay, if `staying` of each do that have so many."""
    return min(staying, chunks_of(which, chunks))


@gluon.jit
def make_rings(WHICH: gl.constexpr, loads, config, STAYING: gl.constexpr, PLACES: gl.constexpr):
    OWN: gl.constexpr = staying_of(WHICH, STAYING, config.CHUNKS)
    return Rings(
        own=make_ring(Chunks(loads.own, None), OWN * PARTS, 0),
        stream=make_ring(Chunks(loads.visited, None), PLACES, 1),
    )


@gluon.jit
def make_partial_scores():
    return PartialScores(
        places=gl.allocate_shared_memory(gl.float32, [SHARERS, ROWS, ROWS], matrix_layout(ROWS, 32)),
        there=barriers(SHARERS, 1),
        taken=barriers(SHARERS, 1),
    )


@gluon.jit
def load_share(WHICH: gl.constexpr, STAYING: gl.constexpr, config, rings, loads, problem):
    """Producer of a warpgroup: its chunks."""
    load_operands(
        staying_of(WHICH, STAYING, config.CHUNKS), WHICH, config.CHUNKS, first_of_result(WHICH), config.VALUE_CHUNKS,
        config.VALUE_CHUNKS, SHARERS, config, rings.own, rings.stream, loads, problem,
    )  # fmt: skip


@gluon.jit
def scores_of_step(WHICH: gl.constexpr, STAYING: gl.constexpr, config, rings, partial, index, read):
    """The products of own and visited rows in step `index`, of which both warpgroups get the same bits, and how many
    tiles of the stream are read after it. `read`: before."""
    OTHER: gl.constexpr = 1 - WHICH
    OWN: gl.constexpr = staying_of(WHICH, STAYING, config.CHUNKS)
    s, read = product_of_rows(rings.own, OWN, rings.stream, read, chunks_of(WHICH, config.CHUNKS))
    mbarrier.wait(partial.taken.index(WHICH), (index & 1) ^ 1)
    partial.places.index(WHICH).store(s)
    mbarrier.arrive(partial.there.index(WHICH), count=1)
    mbarrier.wait(partial.there.index(OTHER), index & 1)
    s += partial.places.index(OTHER).load(s.type.layout)
    mbarrier.arrive(partial.taken.index(OTHER), count=1)
    return s, read
