"""The model's answers as text."""

from __future__ import annotations

from collections.abc import Sequence

from flashtile.io_model.devices import Device
from flashtile.io_model.shape import Shape
from flashtile.io_model.standard import standard
from flashtile.io_model.tiled import SweepPoint, tiled
from flashtile.io_model.work import Computation, Work


def comparison(shape: Shape, device: Device, *, kernels: bool = False, backend: str = "auto") -> str:
    """FLOPs, bytes, intensity and least time of a call and its gradients, standard and tiled.

    Args:
        shape: the call.
        device: the device.
        kernels: also a line for each kernel.
        backend: backend of the tiled computation, as in `flashtile.attention`.
    """
    lines = comparison_lines(shape, device, kernels=kernels, backend=backend)
    return f"forward and backward on {device.name}\n{_aligned(lines)}"


def comparison_lines(shape: Shape, device: Device, *, kernels: bool = False, backend: str = "auto") -> list[list[str]]:
    """The cells of `comparison`, headings first."""
    lines = [["", "GFLOP", "GB moved", "FLOP/byte", "least ms", "bound"]]
    for computation in (standard(shape), tiled(shape, device, backend=backend)):
        if kernels:
            lines += [_line(f"  {work.name}", work, device) for work in computation.kernels]
        lines.append(_line(computation.name, computation, device))
    return lines


def summary(computation: Computation, device: Device) -> str:
    """A line for each kernel of a computation, and one for all."""
    lines = [["", "GFLOP", "GB moved", "FLOP/byte", "least ms", "bound"]]
    lines += [_line(work.name, work, device) for work in computation.kernels]
    return _aligned([*lines, _line(computation.name, computation, device)])


def sweep_table(points: Sequence[SweepPoint]) -> str:
    """A line for each size of tiles."""
    lines = [["tile", "GB moved", "GB without cache", "KiB on chip", "least ms", "bound"]]
    for point in points:
        lines.append(
            [
                f"{point.block_q} × {point.block_k}",
                _figure(point.bytes / 1e9),
                _figure(point.requested / 1e9),
                f"{point.shared_memory / 1024:.0f}" + ("" if point.fits else " (too much)"),
                _figure(point.seconds * 1e3),
                point.bound,
            ]
        )
    return _aligned(lines)


def _line(name: str, work: Work | Computation, device: Device) -> list[str]:
    figures = (work.flops / 1e9, work.bytes / 1e9, work.intensity, work.seconds(device) * 1e3)
    return [name, *map(_figure, figures), work.bound(device)]


def _figure(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}" if value >= 1e-3 or not value else f"{value:.1e}"


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    """Columns aligned by spaces: names and bounds to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = []
    for name, *figures, bound in lines:
        middle = (figure.rjust(width) for figure, width in zip(figures, widths[1:-1], strict=True))
        texts.append("  ".join([name.ljust(widths[0]), *middle, bound]).rstrip())
    return "\n".join(texts)
