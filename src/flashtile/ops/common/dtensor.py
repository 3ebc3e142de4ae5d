"""Calls with DTensors: each rank calls the function on its shards, and the results are DTensors again.

A function describes the dimensions of its tensors by letters. A dimension whose letter occurs in several tensors is the
same in all of them, and may be sharded: every rank then computes its part of that dimension alone. "." is a dimension
that each call needs as a whole, and "*" stands for the leading dimensions, each with a letter of its own. For example,
a norm is `{"x": "*.", "weight": "."} -> "*."`, and a linear layer `{"x": "*i", "weight": "oi", "bias": "o"} -> "*o"`.

For each dimension of the mesh one letter is chosen, the one along which most elements are sharded already. Tensors
that are not sharded along it are redistributed, as PyTorch does for its own operators. Gradients follow from the same
letters: a tensor without the letter gets a part of its gradient on every rank, and the parts are added up.

PyTorch's module of DTensors is never imported for a call without any.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

_PLAIN = (Tensor, torch.nn.Parameter, type(None))


def present(*tensors: Tensor | None) -> bool:
    """True if one of the tensors is a DTensor."""
    for tensor in tensors:  # noqa: SIM110, a generator takes longer
        if type(tensor) not in _PLAIN and _is_dtensor(tensor):
            return True
    return False


def _is_dtensor(tensor: Any) -> bool:
    module = getattr(dist, "tensor", None)
    return module is not None and isinstance(tensor, module.DTensor)


class Division:
    """How a call is divided over a mesh: a letter for each of its dimensions, or None if all ranks compute the same."""

    def __init__(self, mesh: DeviceMesh | None = None, letters: Sequence[str | None] = ()) -> None:
        self.mesh, self.letters = mesh, tuple(letters)

    def start(self, letter: str, size: int) -> int:
        """The index in the whole of this rank's first element, along a dimension of `size` elements in all."""
        start = 0
        for dim, chosen in enumerate(self.letters):
            if chosen == letter:
                assert self.mesh is not None
                size //= self.mesh.size(dim)
                start += self.mesh.get_local_rank(dim) * size
        return start

    def group(self, letter: str) -> ProcessGroup | None:
        """The ranks among which a dimension is sharded."""
        if letter not in self.letters:
            return None
        assert self.mesh is not None
        return self.mesh.get_group(self.letters.index(letter))

    def once(self, letter: str, tensor: Tensor | None) -> Tensor | None:
        """A summand of results that are added up over the shards of a dimension: on all ranks but the first it is 0."""
        if tensor is None or not self.start(letter, 2**62):
            return tensor
        return tensor.masked_fill(torch.ones((), dtype=torch.bool, device=tensor.device), 0)

    def agree(self, seed: Tensor) -> Tensor:
        """The seed of the mesh's first rank, on all of its ranks."""
        if self.mesh is None:
            return seed
        seed = seed.clone()
        for dim in range(self.mesh.ndim):
            dist.broadcast(seed, group=self.mesh.get_group(dim), group_src=0)
        return seed


def call(
    function: Callable[..., Any],
    operands: Mapping[str, tuple[Tensor | None, str]],
    results: str | Sequence[str],
    parameters: Collection[str] = (),
    complete: str = "",
) -> Any:
    """Calls a function on this rank's shards.

    If no operand is a DTensor except parameters, the other tensors are this rank's own data, as under FSDP. The
    parameters are then gathered, their gradients are the mean over the ranks, and the results are plain tensors. A
    parameter on a mesh with more dimensions than the activations have (FSDP around tensor parallelism) is gathered over
    those in the same way.

    Args:
        function: gets the `Division` and this rank's part of each operand, in their order; returns a tensor, or a tuple
            of tensors.
        operands: by name, each tensor or None with its dimensions.
        results: the dimensions of each result, or of all. A result without a letter that is sharded is a part of a sum.
        parameters: names of the operands that layers learn.
        complete: letters that leave results without them, and gradients of operands without them, complete on each
            rank: the function communicates along them (`Division.group`), or does not sum over them.

    Raises:
        TypeError: a plain tensor beside DTensors wants a gradient, which no rank would have as a whole.
        ValueError: the DTensors are on different meshes.
    """
    tensors: dict[str, Any] = {name: tensor for name, (tensor, _) in operands.items()}
    sharded = [name for name, tensor in tensors.items() if present(tensor)]
    if set(sharded) <= set(parameters):
        return function(Division(), *(_whole(t) if name in sharded else t for name, t in tensors.items()))
    first = next(name for name in sharded if name not in parameters)
    mesh = tensors[first].device_mesh
    for name, tensor in tensors.items():
        if name in sharded:
            if tensor.device_mesh != mesh:
                tensors[name] = _onto(mesh, first, name, tensor)
        elif tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            raise TypeError(
                f"{name}: expected a DTensor beside {first}, got a plain tensor that wants a gradient, of which each "
                "rank would have a part; use torch.distributed.tensor.distribute_tensor or distribute_module"
            )
    shaped = [(tensors[name], _expanded(letters, tensors[name])) for name, (_, letters) in operands.items()]
    division = Division(mesh, _letters(mesh, shaped, complete))
    found = function(division, *(_part(tensor, letters, division, complete) for tensor, letters in shaped))
    if isinstance(results, str):
        if isinstance(found, Tensor):
            return _joined(found, results, division, complete)
        results = (results,) * len(found)
    return tuple(_joined(part, letters, division, complete) for part, letters in zip(found, results, strict=True))


def _expanded(letters: str, tensor: Tensor | None) -> str:
    """The letters with one for each leading dimension in the place of "*"."""
    if tensor is None or "*" not in letters:
        return letters
    return letters.replace("*", string.ascii_uppercase[: tensor.dim() - len(letters) + 1])


def _letters(mesh: DeviceMesh, shaped: Sequence[tuple[Any, str]], complete: str) -> list[str | None]:
    """The letter of each mesh dimension: of those that it can divide, the one along which most elements are sharded."""
    from torch.distributed.tensor import Shard

    chosen: list[str | None] = []
    divisors: dict[str, int] = {}
    for dim in range(mesh.ndim):
        sharded: dict[str, int] = {}
        for tensor, letters in shaped:
            placement = tensor.placements[dim] if present(tensor) else None
            if type(placement) is Shard:
                letter = letters[placement.dim]
                sharded[letter] = sharded.get(letter, 0) + tensor.numel()
        sharded.pop(".", None)
        for letter in sorted(sharded, key=sharded.__getitem__, reverse=True):
            divisor = divisors.get(letter, 1) * mesh.size(dim)
            in_order = letter not in complete or (letter not in divisors and _in_order(mesh, dim))
            if in_order and _divides(divisor, letter, shaped):
                divisors[letter] = divisor
                chosen.append(letter)
                break
        else:
            chosen.append(None)
    return chosen


def _divides(divisor: int, letter: str, shaped: Sequence[tuple[Any, str]]) -> bool:
    """True if shards of a dimension have one size. A tensor may have size 1 there, which all shards share."""
    sizes = {
        tensor.shape[letters.index(letter)] for tensor, letters in shaped if tensor is not None and letter in letters
    }
    return sizes != {1} and all(size == 1 or size % divisor == 0 for size in sizes)


def _in_order(mesh: DeviceMesh, dim: int) -> bool:
    """True if this rank has the same number in the process group of a mesh dimension."""
    return mesh.get_group(dim).rank() == mesh.get_local_rank(dim)


def _placements(letters: str, division: Division, otherwise: Callable[[str], Placement]) -> list[Placement]:
    """`Shard` of the dimension with the letter of each mesh dimension, and without such a dimension `otherwise`."""
    from torch.distributed.tensor import Replicate, Shard

    return [
        Replicate() if letter is None else Shard(letters.index(letter)) if letter in letters else otherwise(letter)
        for letter in division.letters
    ]


def _part(tensor: Any, letters: str, division: Division, complete: str) -> Tensor | None:
    """This rank's part of an operand."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    if tensor is None:
        return None
    assert division.mesh is not None
    if not present(tensor):
        tensor = DTensor.from_local(tensor, division.mesh, [Replicate()] * division.mesh.ndim, run_check=False)
    letters = "".join("." if size == 1 else letter for size, letter in zip(tensor.shape, letters, strict=True))
    placed = tensor.redistribute(placements=_placements(letters, division, lambda _: Replicate()))
    summed = _placements(letters, division, lambda letter: Replicate() if letter in complete else Partial())
    return placed.to_local(grad_placements=summed)


def _joined(part: Tensor | None, letters: str, division: Division, complete: str) -> DTensor | None:
    """The DTensor of the ranks' parts of a result."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    if part is None:
        return None
    letters = _expanded(letters, part)
    summed = _placements(letters, division, lambda letter: Replicate() if letter in complete else Partial())
    return DTensor.from_local(part, division.mesh, summed, run_check=False)


def replicated(tensor: Any) -> Any:
    """The DTensor with its parts added up or put together on every rank."""
    from torch.distributed.tensor import Replicate

    return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)


def _whole(parameter: Any) -> Tensor:
    """All of a parameter for this rank's own data; its gradient is the mean over the ranks, as under FSDP."""
    from torch.distributed.tensor import Partial

    mesh = parameter.device_mesh
    return _mean_gradient(replicated(parameter).to_local(grad_placements=[Partial()] * mesh.ndim), mesh.size())


def _onto(mesh: DeviceMesh, first: str, name: str, parameter: Any) -> DTensor:
    """A parameter on the activations' mesh, gathered over other dimensions; ValueError if they do not fit."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    own, kept = parameter.device_mesh, mesh.mesh_dim_names or ()
    names = own.mesh_dim_names or ()
    if not kept or not set(kept) <= set(names) or own[kept] != mesh:
        raise ValueError(
            f"{name}: expected a DTensor on the mesh of {first}, {mesh}, or on one that contains it, got {own}; "
            "redistribute one of them"
        )
    placements = [placed if dim in kept else Replicate() for dim, placed in zip(names, parameter.placements)]
    gradients = [placed if dim in kept else Partial() for dim, placed in zip(names, placements)]
    part = parameter.redistribute(placements=placements).to_local(grad_placements=gradients)
    part = _mean_gradient(part, own.size() // mesh.size())
    return DTensor.from_local(part, mesh, [placements[names.index(dim)] for dim in kept], run_check=False)


def _mean_gradient(tensor: Tensor, ranks: int) -> Tensor:
    """The tensor, whose gradient is divided by the number of ranks before their gradients are added up."""
    if tensor.requires_grad:
        tensor.register_hook(lambda grad: grad / ranks)
    return tensor
