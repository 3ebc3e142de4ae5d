"""What wrong machine code looks like, on a CPU: no GPU need be there, and no interpreter can see it.

ptxas 12.8 got registers wrong in three kernels. In the Hopper backward it computed addresses ahead of one loop and used
them in the next one, although a branch may skip the first. In the portable forward it computed descriptors of `p v`
from a register of another value. In the Hopper backward of float16 it fetched half of a register from memory before it
had stored the register there (decisions/compilers.md). Four questions find such code:

- `unset_registers`: which instructions may use a uniform register that nothing has set?
- `wrong_descriptors`: which products (wgmma) take a descriptor with another high word than the PTX has?
- `shared_bases`: which addresses does the PTX put into descriptors of several kinds? ptxas 12.8 gets those wrong.
- `halves_from_memory`: which loads fetch half of a register that a thread keeps in memory?

A listing (`machine_code.sass`) becomes a graph of basic blocks, and values are followed through it as ranges. An
instruction that uses uniform registers in a way that is not known here raises an error, because its effect would be a
guess. The known ones are those of sm_75 to sm_120 that this project's kernels have.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection
from typing import NamedTuple

_LABEL = re.compile(r"\s*(\.\S+|\$\S+):$")
_LINE = re.compile(r'/\*[0-9a-f]{4,}\*/\s+(BRX .*BRANCH_TARGETS .*?"|.*?)\s*;')
#: What some listings say of the schedule.
_SCHEDULE = re.compile(r"\s+[&?].*")
_GUARD = re.compile(r"@(!?U?P[T\d]+)\s+")
_REGISTER = re.compile(r"U?R\d+")
_UNIFORM = re.compile(r"\bUR(\d+)\b")
_PREDICATE = re.compile(r"!?U?P[T\d]")

_NAME = re.compile(r"%\w+")


class UnknownInstructionError(ValueError):
    """An instruction whose use of uniform registers is not known here."""


def wrong_code(listing: str, ptx: str) -> list[str]:
    """What the four questions of this module find in a kernel, each with the name of its question."""
    return [
        *(f"register without a value: {line}" for line in unset_registers(listing)),
        *(f"descriptor that the PTX does not have: {line}" for line in wrong_descriptors(listing, ptx)),
        *(f"address in descriptors of several kinds: {line}" for line in shared_bases(ptx)),
        *(f"half of a register that was stored whole: {line}" for line in halves_from_memory(listing)),
    ]


class Instruction(NamedTuple):
    """One line of a listing: `@guard operation operand, operand, ...`."""

    text: str
    guard: str | None
    operation: str
    operands: tuple[str, ...]
    #: The operation without what qualifies it: "UIADD3" of "UIADD3.64".
    name: str


class Listing(NamedTuple):
    """A kernel's instructions, cut into basic blocks: `blocks` has the end of each, `following` the next ones, and
    `called`, of those that end with a call, the first block of the function."""

    instructions: list[Instruction]
    blocks: dict[int, int]
    following: dict[int, list[int]]
    called: dict[int, int]

    def function(self, begin: int) -> set[int]:
        """The blocks that can be reached from one."""
        found, waiting = {begin}, [begin]
        while waiting:
            new = set(self.following[waiting.pop()]) - found
            found |= new
            waiting += new
        return found


@functools.lru_cache(maxsize=2)
def parse(listing: str) -> Listing:
    """The basic blocks of a listing by the numbers of their first instructions."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := _LINE.search(line):
            instructions.append(_instruction(_SCHEDULE.sub("", found[1])))
    ends = [number + 1 for number, instruction in enumerate(instructions) if _leaps(instruction)]
    begins = sorted({0, *labels.values(), *ends} - {len(instructions)})
    blocks = dict(zip(begins, [*begins[1:], len(instructions)], strict=True))
    following = {begin: _following(instructions[end - 1], end, labels, blocks) for begin, end in blocks.items()}
    called = {begin: following[begin][0] for begin, end in blocks.items() if _calls(instructions[end - 1])}
    return Listing(instructions, blocks, following, called)


@functools.lru_cache(maxsize=2**14)
def _instruction(text: str) -> Instruction:
    guard = _GUARD.match(text)
    operation, _, operands = (text[guard.end() :] if guard else text).partition(" ")
    places = tuple(operand.strip().removesuffix(".reuse") for operand in operands.split(","))
    return Instruction(text, guard[1] if guard else None, operation, places, operation.partition(".")[0])


def _leaps(instruction: Instruction) -> bool:
    return instruction.name in ("BRA", "BRX", "EXIT", "RET", "CALL")


def _calls(instruction: Instruction) -> bool:
    """Whether it calls a function. What ptxas writes as a call of a label within a function is a jump."""
    return instruction.name == "CALL" and "`($" in instruction.text


def _following(last: Instruction, end: int, labels: dict[str, int], blocks: Collection[int]) -> list[int]:
    """The blocks that may come after one that ends with an instruction. A function returns to behind its call."""
    targets = []
    if last.name in ("BRA", "BRX", "CALL"):
        targets = [labels[name] for name in re.findall(r"[.$][\w$.]+", last.text) if name in labels]
    conditional = last.guard or (last.name == "BRA" and len(last.operands) > 1)
    if end in blocks and (conditional or _calls(last) or not _leaps(last)):
        targets.append(end)
    return targets


# Which registers are read and written

#: Operations whose first operand that is no predicate is what they write, where that is a uniform register.
_WRITING = {
    "CREDUX", "ELECT", "LDCU", "R2UR", "REDUX", "S2UR", "UBREV", "UF2I", "UFADD", "UFFMA", "UFLO", "UFMUL", "UFSEL",
    "UI2F", "UI2FP", "UIADD3", "UIMAD", "UIMNMX", "ULDC", "ULEA", "ULOP3", "UMOV", "UP2UR", "UPOPC", "UPRMT",
    "USEL", "USGXT", "USHF", "UTCATOMSWS", "UVIMNMX", "VOTEU",
}  # fmt: skip
#: Operations of the uniform unit that write no uniform register, or none that counts.
_READING = {
    "UBLKCP", "UBLKPF", "UBLKRED", "UCGABAR_ARV", "UCGABAR_WAIT", "UFSETP", "UISETP", "UPLOP3", "UR2UP",
    "USETMAXREG", "UTCBAR", "UTCCP", "UTCHMMA", "UTCQMMA", "UTMACCTL", "UTMACMDFLUSH", "UTMALDG", "UTMAREDG",
    "UTMASTG", "UVIRTCOUNT",
}  # fmt: skip


@functools.lru_cache(maxsize=2**14)
def _effect(instruction: Instruction) -> tuple[set[int], set[int]]:
    """The uniform registers that an instruction reads and writes."""
    operands = [operand for operand in instruction.operands if not _PREDICATE.match(operand)]
    first = operands and re.fullmatch(r"UR(\d+)", operands[0])
    writes: set[int] = set()
    if first and instruction.name in _WRITING:
        writes = set(range(int(first[1]), int(first[1]) + _width(instruction.operation)))
        operands.pop(0)
    elif instruction.name not in _WRITING | _READING and (first or instruction.name.startswith("U")):
        raise UnknownInstructionError(f"{instruction.text}: reads or writes uniform registers in a way not known here")
    reads = set()
    for number, operand in enumerate(operands):
        for place in _UNIFORM.finditer(operand):
            begin, width = _read_with(instruction, number, operand)
            first = int(place[1]) + begin
            reads |= set(range(first, first + width))
    return reads, writes


def _width(operation: str) -> int:
    """How many registers an operation writes."""
    wide = re.search(r"\.(64|WIDE)\b", operation) or operation == "UIMNMX.S64"
    return 4 if ".128" in operation else 2 if wide else 1


def _read_with(instruction: Instruction, number: int, operand: str) -> tuple[int, int]:
    """An operand names several registers by one: the first of them, counted from that one, and how many there are."""
    if "gdesc[" in operand and instruction.name.endswith("GMMA"):
        # Two for each operand in shared memory; those of the second come second, and are named by the same register.
        return (0, 4) if number == 1 else (2, 2)
    if "gdesc[" in operand or "desc[" in operand.replace("idesc[", ""):
        return 0, 2
    if number == 0 and (dimensions := re.match(r"UTMA(LDG|STG|REDG)\.(\d)D", instruction.operation)):
        # The place in shared memory, for loads a barrier, and coordinates.
        return 0, int(dimensions[2]) + (2 if dimensions[1] == "LDG" else 1)
    if instruction.operation in ("UIADD3.64", "UMOV.64", "MOV.64", "IADD.64"):
        return 0, 2
    if instruction.name == "UIMAD" and ".WIDE" in instruction.operation and number == 2:
        return 0, 2
    return 0, 1


# Registers without a value


def unset_registers(listing: str) -> list[str]:
    """The instructions that may use a uniform register which nothing has set.

    ptxas saves uniform registers in ordinary ones while it needs them for something else, and restores them, whether
    they have a value or not. It also copies pairs of which one half has a value yet. So a copy is no use of a register:
    what it copies to is as unset as what it copies from.
    """
    parsed = parse(listing)
    effects = [_named_effect(instruction) for instruction in parsed.instructions]
    suspects = []
    for begin, unset in _unset(parsed, effects).items():
        guarded: dict[str, str | None] = {}
        for number in range(begin, parsed.blocks[begin]):
            instruction = parsed.instructions[number]
            if not _copied(instruction):
                reads = effects[number][0] | _ordinary_reads(instruction)
                if any(guarded.get(name, "") != instruction.guard for name in reads & unset):
                    suspects.append((number, instruction.text))
            _follow_guards(instruction, guarded)
            unset = _unset_after(instruction, effects[number], unset)
    return [text for _, text in sorted(suspects)]


def _follow_guards(instruction: Instruction, guarded: dict[str, str | None]) -> None:
    """Keeps the ordinary registers that a block has set under a guard, and the guard: under it they have a value."""
    for name in _overwritten(instruction):
        guarded.pop(name, None)
        for other in [other for other, guard in guarded.items() if (guard or "").lstrip("!") == name]:
            del guarded[other]
        if instruction.guard and name.startswith("R") and not _copied(instruction):
            guarded[name] = instruction.guard


#: The registers that an instruction reads and writes, by name.
Effect = tuple[frozenset[str], frozenset[str]]


def _named_effect(instruction: Instruction) -> Effect:
    reads, writes = (frozenset(f"UR{number}" for number in numbers) for numbers in _effect(instruction))
    return reads, writes


def _unset(listing: Listing, effects: list[Effect], first: int = 0) -> dict[int, frozenset[str]]:
    """For each block that can be reached from `first` the registers that may have no value at its begin, by one way at
    least: uniform ones that nothing has set since `first`, and copies of these."""
    unset: dict[int, frozenset[str]] = {first: frozenset().union(*(reads | writes for reads, writes in effects))}
    waiting = [first]
    while waiting:
        begin = waiting.pop()
        state = unset[begin]
        for number in range(begin, listing.blocks[begin]):
            state = _unset_after(listing.instructions[number], effects[number], state)
        for target in listing.following[begin]:
            here = state
            if begin in listing.called and target != listing.called[begin]:
                left = _unset_by(listing, effects, listing.called[begin])
                here = (state & left) | {name for name in state | left if not name.startswith("U")}
            either = here | unset.get(target, frozenset())
            if either != unset.get(target):
                unset[target] = either
                waiting.append(target)
    return unset


def _unset_by(listing: Listing, effects: list[Effect], function: int) -> frozenset[str]:
    """The registers that a function may return without a value if none has one when it is called; all of one that never
    returns, as where ptxas writes a call for a jump."""
    begins = _unset(listing, effects, function)
    returned: list[frozenset[str]] = []
    for begin, state in begins.items():
        if listing.instructions[listing.blocks[begin] - 1].name == "RET":
            for number in range(begin, listing.blocks[begin]):
                state = _unset_after(listing.instructions[number], effects[number], state)
            returned.append(state)
    return frozenset().union(*returned) if returned else begins[function]


def _unset_after(instruction: Instruction, effect: Effect, unset: frozenset[str]) -> frozenset[str]:
    """The registers that may have no value after an instruction."""
    copy = _copied(instruction)
    if copy:
        target, source = copy
        # One with a guard sets a uniform register, as other instructions do: whoever uses it has the guard too.
        kept = unset if instruction.guard and not target.startswith("U") else unset - {target}
        return kept | {target} if source in unset else kept
    written = effect[1]
    if not instruction.guard:
        written = written.union(name for name in _overwritten(instruction) if name.startswith("R"))
    return unset - written


def _copied(instruction: Instruction) -> tuple[str, str] | None:
    """Target and source of a copy from register to register; None for all else."""
    target, *others = instruction.operands
    moves = instruction.operation in ("MOV", "MOV.SPILL", "R2UR", "R2UR.FILL", "UMOV") or (
        instruction.operation in ("IMAD.U32", "IMAD.MOV.U32") and others[:2] == ["RZ", "RZ"]
    )
    if not moves or not all(_REGISTER.fullmatch(name) for name in (target, others[-1])):
        return None
    return target, others[-1]


#: Operations whose addresses have 64 bits.
_DEVICE_MEMORY = {"ATOM", "ATOMG", "LD", "LDG", "RED", "REDG", "ST", "STG"}
#: Operations that read an ordinary register which is their first operand.
_READING_FIRST = {"BAR", "BRX", "CALL", "JMX", "NANOSLEEP", "RET", "WARPSYNC"}


@functools.lru_cache(maxsize=2**14)
def _ordinary_reads(instruction: Instruction) -> frozenset[str]:
    """The ordinary registers that an instruction may read: rather too many than too few. An address in brackets is one
    register, or two where it says `.64` or is one of device memory, of which sm_75 does not say it."""
    operands = instruction.operands
    if re.fullmatch(r"R\d+", operands[0]) and instruction.name not in _READING_FIRST:
        operands = operands[1:]
    width = max(_width(instruction.operation), _SEVERAL.get(instruction.name, 1))
    if product := re.search(r"GMMA\.64x(\d+)x", instruction.operation):
        width = max(4, int(product[1]) // 2)
    of_address = 2 if instruction.name in _DEVICE_MEMORY else 1
    found = set()
    for operand in operands:
        for register in re.finditer(r"(?<![A-Z])R(\d+)(\.64)?", operand):
            before = operand[: register.start()]
            mine = of_address if before.count("[") > before.count("]") else width
            found |= {f"R{int(register[1]) + number}" for number in range(max(mine, 2 if register[2] else 1))}
    return frozenset(found)


# Halves of registers

#: A load from a thread's own memory, or a store to it.
_LOCAL = re.compile(r"(LDL|STL)(\S*) .*\[R1(?:\+(0x[0-9a-f]+))?\]")

#: How many bytes an operation moves that has one of these names.
_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


def halves_from_memory(listing: str) -> list[str]:
    """The loads of half a register from a thread's own memory, where the kernel stores whole registers.

    ptxas 12.8 put such a load before the store of the register. No kernel needs any: the source takes halves apart in
    registers (`backward_pieces.unpack`)."""
    moves = [found for instruction in parse(listing).instructions if (found := _LOCAL.search(instruction.text))]
    stored = {place for move in moves if move[1] == "STL" and _moved_bytes(move) >= 4 for place in _places(move)}
    return [m.string for m in moves if m[1] == "LDL" and _moved_bytes(m) < 4 and stored.intersection(_places(m))]


def _moved_bytes(move: re.Match[str]) -> int:
    return next((_BYTES[name] for name in move[2].split(".") if name in _BYTES), 4)


def _places(move: re.Match[str]) -> range:
    first = int(move[3] or "0", 16)
    return range(first, first + _moved_bytes(move))


# Descriptors of products

#: A range of unsigned numbers; absent from a state: any.
Range = tuple[int, int]
_WORD = 2**32 - 1
_ZERO = (0, 0)
#: How often a range may grow at the begin of a block until it counts as any number.
_PATIENCE = 4


def wrong_descriptors(listing: str, ptx: str) -> list[str]:
    """The products of sm_90 with an operand whose descriptor does not have the high word that the PTX gives it.

    Followed through uniform and ordinary registers; a word that cannot be followed to one number counts as wrong. The
    PTX may have products of one shape with several descriptors: then each of them will do.
    """
    parsed = parse(listing)
    if not any(_is_product(instruction) for instruction in parsed.instructions):
        return []
    instructions = _exchanges_by_name(parsed.instructions, parsed.blocks)
    expected = _ptx_high_words(ptx)
    wrong = []
    for begin, state in _states(parsed._replace(instructions=instructions)).items():
        for number in range(begin, parsed.blocks[begin]):
            instruction = instructions[number]
            if _is_product(instruction):
                wanted = expected.get(_shape(instruction.text), set())
                if _high_words(instruction, state) not in wanted:
                    wrong.append((number, instruction.text))
            _execute(instruction, state)
    return [text for _, text in sorted(wrong)]


def _is_product(instruction: Instruction) -> bool:
    return instruction.name in ("HGMMA", "IGMMA", "QGMMA")


def _shape(product: str) -> tuple[str, ...]:
    """Rows, columns and depth of a product, of a line of either language; whether its first operand is in registers."""
    if machine := re.search(r"GMMA\.(\d+)x(\d+)x(\d+)\S* R\d+, (R?)", product):
        return (*machine.groups()[:3], "R" if machine[4] else "")
    virtual = re.search(r"\.m(\d+)n(\d+)k(\d+)\.\S+ \{[^}]*\}, (\{?)", product)
    assert virtual is not None, product
    return (*virtual.groups()[:3], "R" if virtual[4] else "")


def _high_words(product: Instruction, state: dict[str, Range]) -> tuple[int | None, ...]:
    """The high words of a product's descriptors; None: not followed to one number."""
    (place,) = (operand for operand in product.operands if operand.startswith("gdesc["))
    first = int(_UNIFORM.search(place)[1])  # type: ignore[index]
    # The second one's registers come second, also where it is the only one.
    words = [state.get(f"UR{register}") for register in (first + 1, first + 3)[product.operands[1].startswith("R") :]]
    return tuple(word[0] if word and word[0] == word[1] else None for word in words)


def _states(listing: Listing) -> dict[int, dict[str, Range]]:
    """For each block that can be reached the ranges of the registers at its begin."""
    instructions, blocks = listing.instructions, listing.blocks
    states: dict[int, dict[str, Range]] = {0: {}}
    changes = dict.fromkeys(blocks, 0)
    waiting = {0}
    while waiting:
        begin = min(waiting)  # in the order of the listing, so that few blocks are met again
        waiting.remove(begin)
        state = dict(states[begin])
        for instruction in instructions[begin : blocks[begin]]:
            _execute(instruction, state)
        for target in listing.following[begin]:
            here = state
            if begin in listing.called and target != listing.called[begin]:
                changed = _changed(listing, listing.called[begin])
                here = {name: value for name, value in state.items() if name not in changed}
            if target not in states:
                both = dict(here)
            else:
                before = states[target]
                both = {name: _hull(before[name], here[name]) for name in before.keys() & here.keys()}
                if both == before:
                    continue
                changes[target] += 1
                if changes[target] > _PATIENCE:
                    both = {name: value for name, value in both.items() if value == before[name]}
            states[target] = both
            waiting.add(target)
    return states


def _changed(listing: Listing, function: int) -> set[str]:
    """The registers that a function may write."""
    numbers = (number for begin in listing.function(function) for number in range(begin, listing.blocks[begin]))
    return {name for number in numbers for name in _overwritten(listing.instructions[number])}


def _exchanges_by_name(instructions: list[Instruction], blocks: dict[int, int]) -> list[Instruction]:
    """The instructions with one that is called EXCHANGE in the place of three that exchange two uniform registers by
    exclusive or (`a ^= b; b ^= a; a ^= b`): ranges do not tell that this restores what was there.

    Several exchanges may go on at once, each of registers of its own. Others may read b meanwhile: it has its old value
    up to the second step, in whose place EXCHANGE stands, and its new one from there on.
    """
    result = list(instructions)
    for begin, end in blocks.items():
        exchanges: dict[frozenset[str], list[tuple[int, str]]] = {}  # those that have begun: their steps so far
        for number in range(begin, end):
            instruction = instructions[number]
            target, *sources = instruction.operands
            other = next((source for source in sources[:2] if source != target), target)
            combines = instruction.name == "ULOP3" and sources[2:4] == ["URZ", "0x3c"] and target in sources[:2]
            pair = frozenset((target, other)) if combines and _UNIFORM.fullmatch(other) else frozenset()
            used, written = _uniform_registers(instruction), _overwritten(instruction)
            for begun, steps in list(exchanges.items()):
                goes_on = begun == pair and steps[-1][1] != target
                if not goes_on and (steps[0][1] in used or not begun.isdisjoint(written)):
                    del exchanges[begun]
            if not pair:
                continue
            steps = exchanges.setdefault(pair, [])
            steps.append((number, target))
            if len(steps) == 3:
                (first, _), (second, _), (third, _) = exchanges.pop(pair)
                result[first] = result[third] = Instruction("NOP", None, "NOP", (), "NOP")
                result[second] = Instruction(instructions[second].text, None, "EXCHANGE", (target, other), "EXCHANGE")
    return result


def _uniform_registers(instruction: Instruction) -> set[str]:
    """The uniform registers that an instruction reads or writes: of a product four, of a wide operand two."""
    width = 4 if _is_product(instruction) else 2 if "64" in instruction.operation else 1
    firsts = map(int, _UNIFORM.findall(instruction.text))
    return {f"UR{first + place}" for first in firsts for place in range(width)}


def _execute(instruction: Instruction, state: dict[str, Range]) -> None:
    """Changes the ranges of what an instruction writes."""
    if instruction.name == "EXCHANGE":
        first, second = instruction.operands
        written = {first: state.get(second), second: state.get(first)}
    else:
        written = _evaluate(instruction, state)
    if written is None:
        written = dict.fromkeys(_overwritten(instruction))
    for name, value in written.items():
        if instruction.guard:
            value = value and state.get(name) and _hull(value, state[name])
        if value is None:
            state.pop(name, None)
        else:
            state[name] = value


#: Ordinary registers that an operation writes, where its name does not tell.
_SEVERAL = {"CS2R": 2, "HMMA": 4, "IMMA": 4, "LDSM": 4, "DMMA": 4, "DADD": 2, "DMUL": 2, "DFMA": 2, "LDTM": 128}


@functools.lru_cache(maxsize=2**14)
def _overwritten(instruction: Instruction) -> list[str]:
    """Registers that an instruction may write whose effect on values is not followed: rather too many than too few."""
    names = []
    places = list(instruction.operands)
    while places and _PREDICATE.match(places[0]):
        names.append(places.pop(0))
    if instruction.name == "R2P":
        names += [f"P{number}" for number in range(7)]
    if instruction.name == "UR2UP":
        names += [f"UP{number}" for number in range(7)]
    if places and (register := re.fullmatch(r"(U?R)(\d+)", places[0])):
        product = re.search(r"GMMA\.64x(\d+)x", instruction.operation)
        width = int(product[1]) // 2 if product else _SEVERAL.get(instruction.name, _width(instruction.operation))
        names += [f"{register[1]}{int(register[2]) + number}" for number in range(width)]
        names += [place for place in places[1:3] if _PREDICATE.match(place)]
    return names


def _evaluate(instruction: Instruction, state: dict[str, Range]) -> dict[str, Range | None] | None:
    """The ranges that an instruction writes, where it is one of those that make addresses; else None."""
    places = list(instruction.operands)
    if instruction.name in ("LDL", "STL"):
        return _moved_by_stack(instruction, state)
    if instruction.name == "R2UR" and _PREDICATE.match(places[0]):
        places.pop(0)
    if not places or not _REGISTER.fullmatch(places[0]):
        return None
    target, *sources = places
    kind, operation = instruction.operation.removeprefix("U"), instruction.operation

    def value(operand: str) -> Range | None:
        return _operand(operand, state)

    if kind in ("MOV", "R2UR") or operation in ("IMAD.MOV.U32", "IMAD.U32"):
        if operation == "IMAD.U32" and sources[:2] != ["RZ", "RZ"]:
            return None
        return {target: value(sources[-1])}
    if kind.startswith("MOV.64"):
        return dict(zip(_pair(target), _words(sources[-1], state), strict=True))
    if operation in ("IMAD.X", "IMAD.IADD"):  # a · b + c, and what was carried: a sum where a is 0 or b is 1
        a, b, *others = sources
        terms = others if a == "RZ" else [a, *others]
        return {target: _sum([value(term) for term in terms])[0] if a == "RZ" or b == "0x1" else None}
    if kind in ("IADD3", "IADD3.X", "VIADD"):
        carries = [place for place in sources[:2] if _PREDICATE.match(place)]
        total, carry = _sum([value(term) for term in sources[len(carries) :]])
        return {target: total} | dict.fromkeys(carries, carry)
    if kind in ("IADD3.64", "IADD.64"):
        words = [_words(source, state) for source in sources if not _PREDICATE.match(source)]
        low, carry = _sum([low for low, _ in words])
        high, _ = _sum([*(high for _, high in words), carry])
        return dict(zip(_pair(target), (low, high), strict=True))
    if kind == "SHF.R.U32.HI" and sources[0] in ("URZ", "RZ"):
        amount, number = value(sources[1]), value(sources[2]) or (0, _WORD)
        return {target: amount and (number[0] >> amount[1], number[1] >> amount[0])}
    if operation == "CS2R" and sources == ["SRZ"]:
        return dict.fromkeys(_pair(target), _ZERO)
    if kind == "SGXT.U32":
        number, bits = value(sources[0]), int(sources[1], 16)
        return {target: number if number and number[1] < 2**bits else (0, 2**bits - 1)}
    if kind == "SEL":
        a, b = value(sources[0]), value(sources[1])
        return {target: a and b and _hull(a, b)}
    if kind == "LOP3.LUT" and len(sources) > 3:
        return {target: _logic(int(sources[3], 16), [value(source) for source in sources[:3]])}
    return None


def _moved_by_stack(instruction: Instruction, state: dict[str, Range]) -> dict[str, Range | None] | None:
    """What a load of spilled registers writes, or a store to their places: those are named by their offsets."""
    stores = instruction.name == "STL"
    register, place = instruction.operands[::-1] if stores else instruction.operands
    stack = re.fullmatch(r"\[R1(?:\+(0x[0-9a-f]+))?\]", place)
    named = re.fullmatch(r"R(\d+|Z)", register)
    if stack is None or named is None:
        return None
    width = _width(instruction.operation)
    places = [f"stack+{int(stack[1] or '0', 16) + 4 * number}" for number in range(width)]
    registers = ["RZ"] * width if named[1] == "Z" else [f"R{int(named[1]) + number}" for number in range(width)]
    sources, targets = (registers, places) if stores else (places, registers)
    return {target: _operand(source, state) for source, target in zip(sources, targets, strict=True)}


def _operand(operand: str, state: dict[str, Range]) -> Range | None:
    """The range of a source: a register, a predicate or a number."""
    if operand in ("RZ", "URZ", "!PT", "!UPT"):
        return _ZERO
    if operand in ("PT", "UPT"):
        return (1, 1)
    if re.fullmatch(r"-?0x[0-9a-f]+", operand):
        number = int(operand, 16) & _WORD
        return (number, number)
    known = state.get(operand.lstrip("-!"))
    if known is None or operand[0] not in "-!":
        return known
    if operand[0] == "!":
        return (1 - known[1], 1 - known[0])
    return (2**32 - known[1], 2**32 - known[0]) if known[0] > 0 else None


def _words(operand: str, state: dict[str, Range]) -> tuple[Range | None, Range | None]:
    """The ranges of the low and the high word of a source of 64 bits."""
    if re.fullmatch(r"-?0x[0-9a-f]+", operand):
        number = int(operand, 16)
    else:
        words = tuple(_operand(name, state) for name in _pair(operand.lstrip("-")))
        if not operand.startswith("-"):
            return words
        if not all(word and word[0] == word[1] for word in words):
            return None, None
        number = -(words[0][0] + (words[1][0] << 32))
    low, high = number & _WORD, number >> 32 & _WORD
    return (low, low), (high, high)


def _pair(name: str) -> tuple[str, str]:
    """The registers of a pair that is named by the first; zero is zero twice."""
    register = re.fullmatch(r"(U?R)(\d+)", name)
    return (name, f"{register[1]}{int(register[2]) + 1}") if register else (name, name)


def _hull(a: Range, b: Range) -> Range:
    return min(a[0], b[0]), max(a[1], b[1])


def _sum(terms: list[Range | None], bits: int = 32) -> tuple[Range | None, Range | None]:
    """The sum of some numbers, and what it carries: 0 or 1."""
    known = [term for term in terms if term is not None]
    if len(known) < len(terms):
        return None, None
    low, high = (sum(numbers) for numbers in zip(*known, strict=True))
    if low >> bits == high >> bits <= 1:
        whole = 2**bits - 1
        return (low & whole, high & whole), (low >> bits, low >> bits)
    return None, None


def _logic(table: int, inputs: list[Range | None]) -> Range | None:
    """The bitwise function of three numbers with that table, where it is one that makes addresses."""
    a, b, c = ((0, _WORD) if number is None else number for number in inputs)
    functions = {
        0xC0: lambda: _and(a, b),
        0xFC: lambda: _or(a, b),
        0xFE: lambda: _or(_or(a, b), c),
        0xF8: lambda: _or(a, _and(b, c)),
        0xEA: lambda: _or(_and(a, b), c),
    }
    return functions[table]() if table in functions else None


def _and(a: Range, b: Range) -> Range:
    if a[0] == a[1] and b[0] == b[1]:
        return (a[0] & b[0],) * 2
    return 0, min(a[1], b[1])


def _or(a: Range, b: Range) -> Range:
    below = [number[1] if number[0] == number[1] else 2 ** number[1].bit_length() - 1 for number in (a, b)]
    return max(a[0], b[0]), below[0] | below[1]


# The same of PTX


def shared_bases(ptx: str) -> list[str]:
    """Addresses in shared memory that PTX puts into descriptors with several high words, a larger one after a smaller.

    Two tiles that are on chip one after the other begin at one address, and have different high words if they are
    swizzled differently. ptxas 12.8 then adds the second constant to what it made of the first, for all but the first
    step of the product. In the other order of the constants it does not.
    """
    program = _Ptx(ptx)
    words: dict[str, list[int]] = {}
    for descriptor, base in program.bases():
        words.setdefault(base, []).append(program.high_word(descriptor))
    return [f"{base}: {', '.join(map(hex, dict.fromkeys(of)))}" for base, of in words.items() if of != sorted(of)[::-1]]


def _ptx_high_words(ptx: str) -> dict[tuple[str, ...], set[tuple[int, ...]]]:
    """For products of each shape, the high words of their descriptors."""
    program = _Ptx(ptx)
    words: dict[tuple[str, ...], set[tuple[int, ...]]] = {}
    for product in program.products:
        of = tuple(program.high_word(descriptor) for descriptor in program.descriptors(product))
        words.setdefault(_shape(product), set()).add(of)
    return words


class _Ptx:
    """The PTX of a kernel: its products on sm_90, and what is known of the numbers that make their descriptors."""

    def __init__(self, ptx: str) -> None:
        self.products = re.findall(r"wgmma\.mma_async\S+ .*;", ptx)
        self._definitions: dict[str, list[tuple[str, list[str]]]] = {}
        for operation, target, sources in re.findall(r"^\s+(\w[\w.]*)\s+(%\w+), (.*);", ptx, re.M):
            self._definitions.setdefault(target, []).append((operation, sources.split(", ")))
        self._ranges: dict[str, Range] = {}

    def descriptors(self, product: str) -> list[str]:
        """The registers with a product's descriptors."""
        return re.findall(r"(%rd\d+)\b", re.sub(r"\{.*?\}", "", product))

    def high_word(self, descriptor: str) -> int:
        low, high = self._range(descriptor)
        assert low >> 32 == high >> 32, f"the high word of {descriptor} is no constant: {self._definitions[descriptor]}"
        return low >> 32

    def bases(self) -> list[tuple[str, str]]:
        """Descriptors that are a register and a constant, each with that register, in the order of the PTX."""
        descriptors = {descriptor for product in self.products for descriptor in self.descriptors(product)}
        return [
            (target, sources[0])
            for target, definitions in self._definitions.items()
            for operation, sources in definitions
            if target in descriptors and operation in ("add.s64", "or.b64") and not _NAME.match(sources[1])
        ]

    def _range(self, operand: str) -> Range:
        """The range of an unsigned number, of 64 bits at most."""
        whole = 2**64 - 1
        if not operand.startswith("%"):
            number = int(operand, 0) & whole
            return (number, number)
        if operand not in self._ranges:
            self._ranges[operand] = (0, whole)  # while it is looked for: a loop leads back
            ranges = [self._result(operation, sources) for operation, sources in self._definitions.get(operand, [])]
            if ranges:
                self._ranges[operand] = functools.reduce(_hull, ranges)
        return self._ranges[operand]

    def _result(self, operation: str, sources: list[str]) -> Range:
        whole = 2**64 - 1
        anything = (0, whole)
        name, _, of = operation.partition(".")
        if name == "bfe" and of == "u32":
            return (0, 2 ** int(sources[2]) - 1)
        if name in ("mov", "cvt") and _is_number(sources[0]) and "{" not in sources[0]:
            number = self._range(sources[0])
            if of == "u64.u32":
                return _cut(number)
            return anything if of == "u32.u64" and number[1] > _WORD else number
        if name in ("add", "or", "and") and of in ("s64", "u64", "b64", "b32") and all(map(_is_number, sources)):
            a, b = (self._range(source) for source in sources)
            if name == "add":
                return _sum([a, b], 64)[0] or anything
            return _and(a, b) if name == "and" else _or(a, b)
        if name == "shr" and of.startswith("u") and not _NAME.match(sources[1]):
            number = self._range(sources[0]) if of == "u64" else _cut(self._range(sources[0]))
            return number[0] >> int(sources[1]), number[1] >> int(sources[1])
        return anything


def _is_number(operand: str) -> bool:
    return bool(re.fullmatch(r"%rs?\d+|%rd\d+|-?\d+|0x[0-9a-fA-F]+", operand))


def _cut(number: Range) -> Range:
    return number if number[1] <= _WORD else (0, _WORD)
