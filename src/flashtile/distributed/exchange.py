"""Messages between ranks, over a process group of torch.distributed: nothing here knows what they are for.

Transfers are started and waited for apart, so that a block travels while the one before it is computed: NCCL has a
stream of its own for them, and waiting makes the current stream wait, not the host.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Message(NamedTuple):
    """A contiguous tensor to a rank of the group, or its place from one."""

    rank: int
    tensor: Tensor


class TransferError(RuntimeError):
    """A transfer failed or timed out: ranks no longer know of one another."""


class Pending:
    """Transfers on their way. `received`: what they fill. `held`: what must not be freed before."""

    def __init__(self, finish: Callable[[], None], received: Sequence[Tensor], held: Sequence[Tensor] = ()) -> None:
        self._finish: Callable[[], None] | None = finish
        self._received, self._held = received, held

    def wait(self) -> Sequence[Tensor]:
        """The received tensors, ready for the current stream."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        self._held = ()
        return self._received


@contextmanager
def arriving(pending: Iterable[Pending]) -> Iterator[None]:
    """Transfers on their way arrive also where the body fails, so that the ranks are still of one mind for their next
    exchange; but not where a transfer failed."""
    try:
        yield
    except TransferError:
        raise
    except BaseException:
        for each in pending:
            each.wait()
        raise


#: Clock cycles of a GPU, about 15 µs: as long as an event needs to reach another stream, and a kernel to begin there.
_SETTLING = 30_000


def settle(device: torch.device) -> None:
    """Lets transfers that were started find their multiprocessors before the next kernel takes all. Otherwise either
    may come first: on a rank where it was the kernel, the transfer would begin when that is done, and all the time
    would hold multiprocessors of the ranks where it was the transfer."""
    if device.type == "cuda":
        torch.cuda._sleep(_SETTLING)


class GroupExchange:
    """The ranks of a process group of torch.distributed, of tensors on `device_type`."""

    def __init__(self, group: dist.ProcessGroup, device_type: str) -> None:
        self._group, self._device_type = group, device_type
        self._global = dist.get_process_group_ranks(group)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    @property
    def identity(self) -> tuple[str, int]:
        """The identity of this group in a process's life."""
        return self._group.group_name, id(self._group)

    def global_rank(self, place: int) -> int:
        return self._global[place]

    def start(self, sends: Sequence[Message], receives: Sequence[Message], where: str) -> Pending:
        """Starts sending and receiving; `where` says in an error what the rank was about."""
        if not sends and not receives:
            return Pending(lambda: None, ())
        operations = [dist.P2POp(dist.isend, m.tensor, group=self._group, group_peer=m.rank) for m in sends]
        operations += [dist.P2POp(dist.irecv, m.tensor, group=self._group, group_peer=m.rank) for m in receives]
        where = f"{where}, to {_named(sends)}, from {_named(receives)}"
        works = self._guarded(lambda: dist.batch_isend_irecv(operations), where)
        held = [m.tensor for m in sends]
        return Pending(lambda: self._guarded(lambda: _wait(works), where), [m.tensor for m in receives], held)

    def gather(self, tensor: Tensor, where: str) -> Pending:
        """The contiguous tensors of all ranks, in their order."""
        whole = tensor.new_empty(self.size, *tensor.shape)
        collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name to torch 2.12
        work = self._guarded(lambda: collective(whole.flatten(0, 1), tensor, self._group, async_op=True), where)
        return Pending(lambda: self._guarded(work.wait, where), whole.unbind(), (tensor,))

    def add_up(self, tensor: Tensor, where: str) -> None:
        """The sum over all ranks, in place."""
        self._guarded(lambda: dist.all_reduce(tensor, group=self._group), where)

    def from_first(self, tensor: Tensor, where: str) -> None:
        """The tensor of the group's first rank, in place."""
        self._guarded(lambda: dist.broadcast(tensor, self._global[0], self._group), where)

    def objects(self, mine: Any, where: str) -> list[Any]:
        """The objects of all ranks. `torch.distributed.all_gather_object` does the same, but only with numpy."""
        written = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8).to(self._device_type)
        size = torch.tensor([written.numel()], device=written.device)
        sizes = [int(each) for each in self.gather(size, where).wait()]
        padded = torch.nn.functional.pad(written, (0, max(sizes) - written.numel()))
        received = self.gather(padded, where).wait()
        return [pickle.loads(bytes(each[:size].tolist())) for each, size in zip(received, sizes)]

    def _guarded(self, action: Callable[[], Any], where: str) -> Any:
        """An error of the transport, with who was about what in front of it."""
        try:
            return action()
        except (RuntimeError, ValueError) as error:
            raise TransferError(
                f"flashtile.distributed: rank {self._global[self.rank]} (place {self.rank} of {self.size}) failed at "
                f"{where}: {error}. Another rank has ended or waits elsewhere; its own output says why"
            ) from error


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


def _named(messages: Sequence[Message]) -> str:
    ranks = dict.fromkeys(m.rank for m in messages)
    return f"place {', '.join(map(str, ranks))}" if ranks else "nobody"


class Alone:
    """A group of this rank alone: nothing travels."""

    rank, size = 0, 1

    def start(self, sends: Sequence[Message], receives: Sequence[Message], where: str) -> Pending:
        assert not sends and not receives
        return Pending(lambda: None, ())

    def gather(self, tensor: Tensor, where: str) -> Pending:
        return Pending(lambda: None, (tensor,))


Exchange = GroupExchange | Alone
