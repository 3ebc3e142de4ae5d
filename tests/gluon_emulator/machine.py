"""Programs that run at once: who goes on next is drawn by lot, and so is when an asynchronous copy or product happens.

One thread of Python stands for one group of warps that runs the same code (a *crew*). Only one of them runs at a time,
until it comes to a place where others could be faster. Copies and products happen as late, or as early, as the hardware
may do them; what they write is poisoned from when they are started. So a barrier that is missing, or waits for the
wrong phase, gives wrong numbers in some order of events, and one that nobody completes is a deadlock, which is reported
with where everyone waits.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gluon_emulator.memory import Descriptor, Memory, Shared
from gluon_emulator.values import InFlight, Value, bfloat16, float8e4nv, float16, float32

#: How often a crew goes on where it could let others run, and how many crews are slow: they never do, and are seldom
#: drawn. So are those that look at a place in device memory until it changes.
_GOES_ON, _SLOW, _SELDOM = 0.6, 0.3, 0.05
#: How many copies and stores are late: they happen when nobody else can go on, or at last, for who waits may be awake.
_LATE, _AFTER_ALL = 0.3, 0.02
#: Steps without an end: programs wait for one another, each awake.
_TOO_MANY = 500_000


class _Stopped(BaseException):
    """Ends the threads of a machine on which something failed."""


class Barrier:
    """An mbarrier: a phase is complete after so many arrivals, and when all bytes that were announced are there.
    `copied`: what threads have copied before they arrived, in the last phase that had such."""

    def __init__(self) -> None:
        self.count = 0
        self.copied: list[Copied] = []
        self._copied_in = -1

    def init(self, count: int) -> None:
        self.count, self.missing, self.bytes, self.phase = count, count, 0, 0

    def arrive(self, count: int) -> None:
        assert self.count, "a barrier that was not initialised"
        assert self.missing >= count, "more arrivals than a barrier counts"
        self.missing -= count
        self._complete()

    def expect(self, count: int) -> None:
        self.bytes += count
        self.arrive(1)

    def deliver(self, count: int) -> None:
        self.bytes -= count
        self._complete()

    def take(self, copied: list[Copied]) -> None:
        if self._copied_in != self.phase:
            self.copied, self._copied_in = [], self.phase
        self.copied.extend(copied)

    def passed(self, parity: int) -> Callable[[], bool]:
        """Tells whether the phase of this parity is complete: the one before the present one has the other parity."""
        return lambda: self.phase % 2 != parity

    def _complete(self) -> None:
        if not self.missing and not self.bytes:
            self.missing, self.phase = self.count, self.phase + 1


class NamedBarrier:
    """A barrier of the hardware, for so many threads: some arrive and go on, others wait for all."""

    def __init__(self) -> None:
        self.arrived, self.phase = 0, 0

    def arrive(self, threads: int, expected: int) -> None:
        self.arrived += threads
        assert self.arrived <= expected, "more threads than a barrier is for"
        if self.arrived == expected:
            self.arrived, self.phase = 0, self.phase + 1


class Product:
    """`acc + a b` of a crew, computed when it is looked for, or at once."""

    def __init__(self, a: Any, b: Shared, acc: Any) -> None:
        self._a, self._b, self._acc, self._result = a, b, acc, None

    def result(self) -> torch.Tensor:
        if self._result is None:
            a, b = (operand.data.to(torch.float32) for operand in (self._a, self._b))
            self._result = a @ b
            if self._acc is not None:
                before = self._acc.product.result() if isinstance(self._acc, InFlight) else self._acc.data
                self._result = before + self._result
            self._a = self._b = self._acc = None
        return self._result


class Copy:
    """A tile on its way from device memory to shared memory, and to the barrier that counts its bytes."""

    def __init__(self, load: Callable[[], torch.Tensor], target: Shared, barrier: Barrier) -> None:
        self._load, self._target, self._barrier = load, target, barrier

    def happen(self) -> bool:
        self._target.data.copy_(self._load())
        self._barrier.deliver(self._target.data.numel() * self._target.dtype.itemsize)
        return True


class Copied:
    """A tile that threads have copied. TMA and products see it behind a fence of a crew that has waited for it."""

    def __init__(self, target: Shared) -> None:
        self._target, self._fenced = target, False
        target.unfenced.fill_(True)
        target.stores.append(None)

    def fence(self) -> None:
        if not self._fenced:
            self._target.unfenced.fill_(False)
            self._target.stores.pop()
        self._fenced = True


class ThreadCopies:
    """What threads copy to shared memory, and their arrival at a barrier when it is there."""

    def __init__(self, copies: list[tuple[Callable[[], torch.Tensor], Shared]], barrier: Barrier, threads: int) -> None:
        self._copies, self._barrier, self._threads = copies, barrier, threads

    def happen(self) -> bool:
        self.finish()
        return True

    def finish(self) -> None:
        for load, target in self._copies:
            target.data.copy_(load())
        self._barrier.take([Copied(target) for _, target in self._copies])
        self._barrier.arrive(self._threads)


class Store:
    """A tile on its way from shared memory to device memory: first it is read, later it is there."""

    def __init__(self, source: Shared, write: Callable[[torch.Tensor], None]) -> None:
        self._source, self._write, self._data = source, write, None

    def happen(self) -> bool:
        """The next step. Returns whether it was the last one."""
        if self._data is None:
            self.read()
            return False
        self.finish()
        return True

    def read(self) -> None:
        if self._data is None:
            self._data = self._source.data.clone()

    def finish(self) -> None:
        self.read()
        self._write(self._data)

    @property
    def was_read(self) -> bool:
        return self._data is not None


class Crew:
    """Warps that run the same code: a warpgroup, or the warp that loads."""

    def __init__(self, machine: Machine, program: Program, name: str, warps: int, body: Callable[[], None]) -> None:
        self.machine, self.program, self.name, self.warps = machine, program, name, warps
        self.waits_for: Callable[[], bool] | None = None
        self.waits_where = ""
        self.looks_again = False
        self._watched: int | None = None
        self.baton = threading.Lock()
        self.baton.acquire()
        self.products: list[Product] = []
        self.stores: list[Store] = []
        self.unfenced: list[Shared] = []
        self.awaited: list[Copied] = []
        self.copies: list[tuple[Callable[[], torch.Tensor], Shared]] = []
        self.copying: list[ThreadCopies] = []
        self.flags: dict[str, int | None] = {}
        self.over = False
        self.slow = machine.lots.random() < _SLOW
        self._body = body
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @torch.inference_mode()  # views take less time
    def _run(self) -> None:
        self.baton.acquire()
        _here.crew = self
        try:
            if self.machine.error is None:
                self._body()
                assert not self.products, "products in flight at the end"
                assert all(store.was_read for store in self.stores), "shared memory ends while TMA reads it"
        except _Stopped:
            pass
        except BaseException as error:
            self.machine.fail(error)
        self.over = True
        self.machine.leave(self)

    def wait_barrier(self, barrier: Barrier, parity: int, where: str) -> None:
        self.wait(barrier.passed(parity), where)
        self.awaited.extend(barrier.copied)

    def wait(self, condition: Callable[[], bool], where: str) -> None:
        """Until the condition holds; others may run before in any case."""
        self._watched = None
        if not self.slow and condition() and self.machine.lots.random() < _GOES_ON:
            return
        self.waits_for, self.waits_where = condition, where
        self.machine.switch(self)
        self.waits_for = None

    def let_others_run(self) -> None:
        self._watched = None
        if self.slow or self.machine.lots.random() >= _GOES_ON:
            self.machine.switch(self)

    def watch(self, address: int) -> None:
        """Others may run before this crew looks at a place in device memory. One that has looked there before, and has
        done nothing since, waits for it."""
        self.looks_again = address == self._watched
        if self.looks_again:
            self.machine.switch(self)
            self.looks_again = False
        else:
            self.let_others_run()
        self._watched = address

    def start_product(self, a: Any, b: Shared, acc: Any, use_acc: bool) -> InFlight:
        assert not self.awaited, "a product after a wait for what threads copy, without fence_async_shared"
        _check_operands(a, b)
        product = Product(a, b, acc if use_acc else None)
        if self.machine.lots.random() < 0.5:
            product.result()
        self.products.append(product)
        self.let_others_run()
        return InFlight(product, (a.shape[0], b.shape[1]), acc._layout)

    def wait_products(self, in_flight: int, results: Sequence[Value]) -> list[Value]:
        """The results, which must be complete when no more than so many products are in flight."""
        self.let_others_run()
        complete = max(len(self.products) - in_flight, 0)
        done, self.products = self.products[:complete], self.products[complete:]
        for product in done:
            product.result()
        settled = []
        for result in results:
            assert isinstance(result, InFlight), "waits for a product that was not started, or was waited for"
            assert result.product not in self.products, "takes the result of a product that is still in flight"
            settled.append(Value(result.product.result(), float32, result._layout))
        return settled

    def start_store(self, store: Store) -> None:
        self.stores.append(store)
        self.machine.begin(store)
        self.let_others_run()

    def wait_stores(self, unread: int) -> None:
        """Until all but so many of the stores have been read from shared memory."""
        self.let_others_run()
        for store in self.stores[: len(self.stores) - unread]:
            store.read()

    def finish_stores(self) -> None:
        """Until they are in device memory."""
        for store in self.stores:
            self.machine.finish(store)
        self.stores.clear()

    def fence(self) -> None:
        for part in self.unfenced:
            part.unfenced.fill_(False)
            part.stores.pop()
        for copied in self.awaited:
            copied.fence()
        self.unfenced.clear()
        self.awaited.clear()

    def write(self, place: Shared, value: torch.Tensor) -> None:
        place.data.copy_(value)
        place.unfenced.fill_(True)
        place.stores.append(None)
        self.unfenced.append(place)

    def start_copy(self, load: Callable[[], torch.Tensor], target: Shared) -> None:
        """A copy by all threads."""
        target.poison()
        self.copies.append((load, target))

    def arrive_after_copies(self, barrier: Barrier) -> None:
        """All threads arrive, when what they copy is there."""
        copying = ThreadCopies(self.copies, barrier, self.threads)
        self.machine.begin(copying)
        self.copying.append(copying)
        self.copies = []

    def finish_copies(self) -> None:
        """Waits for all that its threads copy."""
        assert not self.copies, "copies that no barrier follows"
        self.let_others_run()
        for copying in self.copying:
            self.machine.finish(copying)
        self.copying.clear()


def _check_operands(a: Any, b: Shared) -> None:
    assert a.shape[1] == b.shape[0] and a.shape[0] == 64, (a.shape, b.shape)
    assert a.dtype is b.dtype and a.dtype in (float16, bfloat16, float8e4nv)
    for operand in (a, b):
        if isinstance(operand, Shared):
            check_fenced(operand)


def check_fenced(tile: Shared) -> None:
    if tile.stores:
        assert not tile.unfenced.any(), "TMA or a product reads what was stored without fence_async_shared"


class Program:
    """One of the grid."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.named_barriers: dict[int, NamedBarrier] = {}


class Machine:
    """Runs a grid; `resident` programs at once, which begin in order."""

    def __init__(self, memory: Memory, lots: random.Random, resident: int) -> None:
        self.memory, self.lots, self.resident = memory, lots, resident
        self._soon: list[Copy | ThreadCopies | Store] = []
        self._late: list[Copy | ThreadCopies | Store] = []
        self.error: BaseException | None = None
        self._crews: list[Crew] = []
        self._steps = 0
        self._finished = threading.Event()

    @torch.inference_mode()
    def run(self, programs: int, warps: int, body: Callable[[], None]) -> None:
        self.programs, self._body, self._warps = programs, body, warps
        self._begun = 0
        while self._begun < min(programs, self.resident):
            self._begin()
        self._next().baton.release()
        self._finished.wait()
        if self.error is not None:
            raise self.error
        for store in self._soon + self._late:
            assert isinstance(store, Store), "a copy that nobody waited for"
            store.finish()

    def _begin(self) -> None:
        program = Program(self._begun)
        self._begun += 1
        self._crews.append(Crew(self, program, f"program {program.number}", self._warps, self._body))

    def specialize(self, parts: Sequence[tuple[Callable[..., None], tuple]], warps: Sequence[int]) -> None:
        """Runs functions side by side, each by a crew of its own, until all have ended."""
        parent = current()
        crews = [
            Crew(self, parent.program, f"{parent.name}, {function.__name__}", count, lambda f=function, a=args: f(*a))
            for (function, args), count in zip(parts, (4, *warps), strict=True)
        ]
        self._crews += crews
        parent.wait(lambda: all(crew.over for crew in crews), "the end of its parts")

    def copy(self, descriptor: Descriptor, coordinates: Sequence[Any], barrier: Barrier, target: Shared) -> None:
        """A load by TMA, at some time from now on."""
        assert list(target.shape) == list(descriptor.block_shape) and target.dtype is descriptor.dtype
        inside = descriptor.inside(coordinates)
        check_fenced(target)
        target.poison()
        self.begin(Copy(lambda: descriptor.load(self.memory, *inside), target, barrier))
        current().let_others_run()

    def begin(self, event: Copy | ThreadCopies | Store) -> None:
        (self._late if self.lots.random() < _LATE else self._soon).append(event)

    def finish(self, event: ThreadCopies | Store) -> None:
        """What someone waits for, if it is not over."""
        for events in (self._soon, self._late):
            if event in events:
                events.remove(event)
                event.finish()

    def switch(self, crew: Crew) -> None:
        """Lets whoever is drawn go on, which may be the same."""
        chosen = self._next()
        if chosen is not crew:
            chosen.baton.release()
            crew.baton.acquire()
        if self.error is not None:
            raise _Stopped

    def _next(self) -> Crew:
        while True:
            if self.error is not None:
                return self._crews[0]
            self._steps += 1
            ready = [crew for crew in self._crews if crew.waits_for is None or crew.waits_for()]
            idle = all(crew.looks_again for crew in ready)
            events = self._late if idle or self.lots.random() < _AFTER_ALL else []
            events = self._soon or events
            if self._steps > _TOO_MANY:
                self.error = AssertionError("programs wait for one another without an end")
            elif not ready and not events:
                where = "; ".join(f"{crew.name} waits for {crew.waits_where}" for crew in self._crews)
                self.error = AssertionError(f"deadlock: {where}")
            else:
                weights = [_SELDOM if crew.slow or crew.looks_again else 1 for crew in ready] + [1] * len(events)
                (drawn,) = self.lots.choices([*ready, *events], weights)
                if isinstance(drawn, Crew):
                    return drawn
                self._happen(drawn, events)

    def _happen(self, event: Copy | ThreadCopies | Store, events: list[Copy | ThreadCopies | Store]) -> None:
        try:
            if event.happen():
                events.remove(event)
        except Exception as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error

    def leave(self, crew: Crew) -> None:
        """A crew has ended: another program begins, or all is over."""
        self._crews.remove(crew)
        ends_program = crew.name == f"program {crew.program.number}"
        if ends_program and self.error is None and self._begun < self.programs:
            self._begin()
        if self._crews:
            self._next().baton.release()
        else:
            self._finished.set()


_here = threading.local()


def current() -> Crew:
    """The crew that runs."""
    return _here.crew
