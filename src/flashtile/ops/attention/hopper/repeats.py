"""Query tiles that the forward computes once more, for the first time it took a chance that failed (`forward_walk`).

A consumer notes the number of such a tile; when all tiles have been computed the producer brings those again. After
`REPEATS` of them a consumer takes no more chances, so a list has as many places.
"""

from flashtile._backends.gluon import aggregate, gl, gluon
from flashtile.ops.attention.hopper.pieces import WARPGROUP, await_stores, barriers, read_number, release, write_number

#: Tiles that a consumer may have repeated.
REPEATS = gl.constexpr(4)

#: What stands in an empty place of a list.
NOTHING = gl.constexpr(-1)


@aggregate
class Repeats:
    """`REPEATS` tile numbers for each consumer, and a barrier that is complete when all have noted theirs."""

    numbers: gl.shared_memory_descriptor
    noted: gl.shared_memory_descriptor
    COUNT: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, numbers, noted, COUNT):
        self.numbers = numbers
        self.noted = noted
        self.COUNT = gl.constexpr(COUNT)


@gluon.jit
def make_repeats(CONSUMERS: gl.constexpr):
    COUNT: gl.constexpr = CONSUMERS * REPEATS
    numbers = gl.allocate_shared_memory(gl.int32, [COUNT, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for i in gl.static_range(COUNT):
        write_number(numbers.index(i), NOTHING)
    return Repeats(numbers, barriers(1, CONSUMERS * WARPGROUP), COUNT)


@gluon.jit
def note_repeat(repeats, WHICH: gl.constexpr, count, number):
    """A consumer's `count`-th."""
    write_number(repeats.numbers.index(WHICH * REPEATS + count), number)


@gluon.jit
def end_of_notes(repeats):
    """A consumer has noted what it has to. What it stored of these tiles is in place before they are stored again."""
    await_stores()
    release(repeats.noted.index(0))


@gluon.jit
def noted_repeat(repeats, place):
    return read_number(repeats.numbers.index(place))
