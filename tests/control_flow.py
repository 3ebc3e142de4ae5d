"""Registers that machine code may read before anything has set them: what a miscompilation looks like.

ptxas 12.8 was seen to compute addresses ahead of one loop and to use them in the next one, also where a branch leaps
over the first. Such a kernel is right as long as the first loop runs. Here the listing of a kernel becomes a graph of
basic blocks, and for each of them follows which uniform registers have a value on every way that leads there.
"""

from __future__ import annotations

import re

_LABEL = re.compile(r"\s*(\.L_x?\w+):")
_INSTRUCTION = re.compile(r'/\*[0-9a-f]{4,}\*/\s+(BRX .*BRANCH_TARGETS .*?"|.*?;)')
_GUARD = re.compile(r"@!?(U?P\w+)\s+")
_ENDS = re.compile(r"\b(BRA|BRX|EXIT|RET)\b")


def unset_registers(listing: str) -> list[str]:
    """The instructions of a listing (`machine_code.sass`) that may read a uniform register nothing has set."""
    lines, labels = _parse(listing)
    effects = [_effect(line) for line in lines]
    blocks, following = _blocks(lines, labels)
    known = _known(blocks, following, effects)
    suspects = []
    for begin, end in blocks.items():
        if begin not in known:
            continue
        values = set(known[begin])
        for line, (reads, writes) in zip(lines[begin:end], effects[begin:end], strict=True):
            if not reads <= values:
                suspects.append(line)
            values |= writes
    return suspects


def _parse(listing: str) -> tuple[list[str], dict[str, int]]:
    """Instructions in their order, and the number of the one that each label stands before."""
    lines: list[str] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(lines)
        elif instruction := _INSTRUCTION.search(line):
            lines.append(instruction[1].strip("; "))
    return lines, labels


def _effect(line: str) -> tuple[set[int], set[int]]:
    """The uniform registers that an instruction reads and writes; those of a pair or four by their first name."""
    operation, _, operands = _GUARD.sub("", line).partition(" ")
    places = [operand.strip() for operand in operands.split(",")]
    reads: set[int] = set()
    writes: set[int] = set()
    wide = 2 if ".64" in operation or ".WIDE" in operation else 1
    if operation == "R2UR" and places[0].startswith("P"):
        places.pop(0)  # a predicate that it writes too
    if re.fullmatch(r"UR\d+", places[0]):
        first = int(places.pop(0)[2:])
        writes = set(range(first, first + wide))
    for number, operand in enumerate(places):
        if descriptor := re.search(r"gdesc\[UR(\d+)\]", operand):
            # Of a product: two registers for each operand in shared memory; those of the second come second.
            first = int(descriptor[1])
            reads |= set(range(first if number == 1 else first + 2, first + 4))
        else:
            reads |= {int(name) for name in re.findall(r"\bUR(\d+)\b", operand)}
    return reads, writes


def _blocks(lines: list[str], labels: dict[str, int]) -> tuple[dict[int, int], dict[int, list[int]]]:
    """First instruction -> end of each basic block, and -> the blocks that may follow."""
    begins = {0, *labels.values(), *(number + 1 for number, line in enumerate(lines) if _ENDS.search(line))}
    ordered = [begin for begin in sorted(begins) if begin < len(lines)]
    blocks = dict(zip(ordered, [*ordered[1:], len(lines)], strict=True))
    following = {}
    for begin, end in blocks.items():
        last = lines[end - 1]
        targets = [labels[name] for name in re.findall(r"\.L_x?\w+", last)] if re.search(r"\bBR[AX]\b", last) else []
        conditional = _GUARD.match(last) or re.search(r"\bBRA\S*\s+!?U?P\d", last)
        if end in blocks and (conditional or not _ENDS.search(last)):
            targets.append(end)
        following[begin] = targets
    return blocks, following


def _known(
    blocks: dict[int, int], following: dict[int, list[int]], effects: list[tuple[set[int], set[int]]]
) -> dict[int, frozenset[int]]:
    """For each block that can be reached the registers that have a value at its begin, whichever way was taken."""
    known: dict[int, frozenset[int]] = {0: frozenset()}
    waiting = [0]
    while waiting:
        begin = waiting.pop()
        values = known[begin].union(*(writes for _, writes in effects[begin : blocks[begin]]))
        for target in following[begin]:
            both = values & known.get(target, values)
            if both != known.get(target):
                known[target] = both
                waiting.append(target)
    return known
