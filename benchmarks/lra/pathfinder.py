"""Pathfinder: are two dots the ends of one dashed path? Images as sequences of pixels, by the published definition.

An image has two long paths of dashes, which bend a little from dash to dash, and shorter ones to distract. Both dots
lie at the ends of one long path (class 1), or at an end of each (class 0). Paths do not touch. Long Range Arena has
images of 32 × 32, a sequence of 1,024 pixels.

Reference: Linsley, Kim, Veerabadran, Windolf, Serre, "Learning long-range spatial dependencies with horizontal gated
recurrent units" (2018); Tay et al., "Long Range Arena" (2021), section 2.2.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.lra.examples import Examples, in_parts

#: Tokens are brightnesses.
VOCABULARY = 256

Point = tuple[float, float]
#: From one point to another.
Dash = tuple[Point, Point]

_WIDTH, _DOT_RADIUS = 0.9, 1.6
#: Tries for a path among the others, and for a whole image.
_ATTEMPTS, _SCENES = 30, 2000


@dataclass(frozen=True)
class Drawing:
    """How images are drawn; lengths in pixels.

    Attributes:
        size: of a side.
        dashes: of a long path.
        distractors: number of shorter paths, of a third of the dashes.
        dash: length of one.
        gap: between two.
        bend: largest change of direction from dash to dash, in radians.
        distance: between two paths, at least.
    """

    size: int = 32
    dashes: int = 6
    distractors: int = 3
    dash: float = 2.6
    gap: float = 1.7
    bend: float = 0.45
    distance: float = 3.4

    def __post_init__(self) -> None:
        if self.dashes < 2 or self.dashes * (self.dash + self.gap) > 0.9 * self.size:
            raise ValueError(
                f"drawing: expected at least 2 dashes, and paths of at most nine tenths of the size, got {self}; "
                "take a larger size or another number of dashes"
            )


def make_pathfinder(count: int, seed: int, drawing: Drawing = Drawing(), workers: int = 1) -> Examples:
    """Images with their classes, the same for a seed however many processes make them."""
    return in_parts(_part, count, seed, drawing, workers)


def _part(count: int, seed: int, drawing: Drawing) -> tuple[Tensor, Tensor, Tensor]:
    random_numbers = random.Random(seed)
    labels = [random_numbers.randrange(2) for _ in range(count)]
    images = torch.stack([_render(*_scene(label, random_numbers, drawing), drawing.size) for label in labels])
    pixels = drawing.size**2
    return images.view(count, pixels), torch.full((count,), pixels, dtype=torch.int32), torch.tensor(labels)


def _scene(label: int, random_numbers: random.Random, drawing: Drawing) -> tuple[list[Dash], list[Point]]:
    """Dashes of all paths, and the two dots."""
    lengths = [drawing.dashes] * 2 + [max(2, drawing.dashes // 3)] * drawing.distractors
    for _ in range(_SCENES):
        paths: list[list[Dash]] = []
        for dashes in lengths:
            path = _path(dashes, paths, random_numbers, drawing)
            if path is None:
                break
            paths.append(path)
        if len(paths) < len(lengths):
            continue
        ends = [(path[0][0], path[-1][1]) for path in paths[:2]]
        dots = ends[0] if label else (random_numbers.choice(ends[0]), random_numbers.choice(ends[1]))
        return [dash for path in paths for dash in path], list(dots)
    raise ValueError(f"drawing: there is hardly room for {drawing}; take fewer distractors or less distance")


def _path(dashes: int, others: list[list[Dash]], random_numbers: random.Random, drawing: Drawing) -> list[Dash] | None:
    """One that keeps its distance from the others and from itself; None where none was found."""
    taken = [point for path in others for dash in path for point in _points(dash)]
    walks = (_walk(dashes, taken, random_numbers, drawing) for _ in range(_ATTEMPTS))
    return next((path for path in walks if path is not None), None)


def _walk(dashes: int, taken: list[Point], random_numbers: random.Random, drawing: Drawing) -> list[Dash] | None:
    margin = _DOT_RADIUS + 0.5
    x, y = (random_numbers.uniform(margin, drawing.size - 1 - margin) for _ in range(2))
    heading = random_numbers.uniform(0, 2 * math.pi)
    path: list[Dash] = []
    for _ in range(dashes):
        end = (x + drawing.dash * math.cos(heading), y + drawing.dash * math.sin(heading))
        dash = ((x, y), end)
        if not all(margin <= part <= drawing.size - 1 - margin for part in end):
            return None
        own = [point for earlier in path[:-1] for point in _points(earlier)]
        if any(math.dist(a, b) < drawing.distance for a in _points(dash) for b in (*taken, *own)):
            return None
        path.append(dash)
        heading += random_numbers.uniform(-drawing.bend, drawing.bend)
        x, y = (end[0] + drawing.gap * math.cos(heading), end[1] + drawing.gap * math.sin(heading))
    return path


def _points(dash: Dash) -> tuple[Point, Point, Point]:
    """Both ends and the middle."""
    (x1, y1), (x2, y2) = dash
    return (x1, y1), ((x1 + x2) / 2, (y1 + y2) / 2), (x2, y2)


def _render(dashes: list[Dash], dots: list[Point], size: int) -> Tensor:
    """uint8 `[size, size]`; edges are soft over a pixel."""
    place = torch.arange(size, dtype=torch.float32)
    pixels = torch.stack(torch.meshgrid(place, place, indexing="xy"), dim=-1).view(-1, 1, 2)  # [P, 1, (x, y)]
    starts, ends = (torch.tensor([dash[side] for dash in dashes]) for side in (0, 1))  # [N, 2]
    along = ends - starts
    share = (((pixels - starts) * along).sum(-1) / along.square().sum(-1)).clamp(0, 1)  # [P, N]
    to_dash = (pixels - starts - share[..., None] * along).norm(dim=-1).amin(-1) - _WIDTH / 2
    to_dot = (pixels - torch.tensor(dots)).norm(dim=-1).amin(-1) - _DOT_RADIUS
    brightness = (0.5 - torch.minimum(to_dash, to_dot)).clamp(0, 1)
    return (brightness * 255).round().to(torch.uint8).view(size, size)
