"""Query tiles that the forward computes once more, for the first time it took a chance that failed (`forward_walk`).

A consumer notes the number of such a tile; when all tiles have been computed the producer brings those again. Of each
tile it is noted which one failed before it, in device memory, for all of them may fail. So how a tile is computed never
depends on others, and equal calls give equal bits, whichever program takes it.
"""

from flashtile._backends.gluon import aggregate, gl, gluon
from flashtile.ops.attention.hopper.pieces import (
    WARPGROUP,
    await_stores,
    barriers,
    number_places,
    read_number,
    release,
    write_number,
)

#: In the place of a tile's number: none.
NOTHING = gl.constexpr(-1)


@aggregate
class Repeats:
    """For each consumer the last tile that failed, and a barrier that is complete when all have said which.

    `links_ptr`: int32 `[consumers, total]`, of `total` tiles: the one that failed before each, written where it did.
    """

    last: gl.shared_memory_descriptor
    said: gl.shared_memory_descriptor
    links_ptr: gl.tensor
    total: gl.tensor

    @gluon.constexpr_function
    def __init__(self, last, said, links_ptr, total):
        self.last = last
        self.said = said
        self.links_ptr = links_ptr
        self.total = total


@gluon.jit
def make_repeats(links_ptr, total, CONSUMERS: gl.constexpr):
    return Repeats(number_places(CONSUMERS), barriers(1, CONSUMERS * WARPGROUP), links_ptr, total)


@gluon.jit
def note_repeat(repeats, WHICH: gl.constexpr, number, last, row, my_first):
    """A consumer notes a tile behind the `last` one that it noted. `row` `[M]`: its rows, from `my_first` on."""
    link = repeats.links_ptr + (WHICH * repeats.total.to(gl.int64) + number)
    gl.store(link + row * 0, row * 0 + last, mask=row == my_first)


@gluon.jit
def end_of_notes(repeats, WHICH: gl.constexpr, last):
    """A consumer says which tile it noted last. What it stored of those tiles is in place before they are stored
    again."""
    write_number(repeats.last.index(WHICH), last)
    await_stores()
    release(repeats.said.index(0))


@gluon.jit
def last_noted(repeats, which):
    return read_number(repeats.last.index(which))


@gluon.jit
def noted_before(repeats, which, number):
    return gl.load(repeats.links_ptr + (which * repeats.total.to(gl.int64) + number))
