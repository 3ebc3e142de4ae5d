"""What `control_flow` finds in listings and PTX that are written for it, and in what the installed ptxas makes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from flashtile._backends import devices

if devices.triton_missing():
    pytest.skip(devices.triton_missing(), allow_module_level=True)

from support.compilation.control_flow import (
    UnknownInstructionError,
    halves_from_memory,
    shared_bases,
    unset_registers,
    wrong_code,
    wrong_descriptors,
)
from support.compilation.machine_code import TOOLS, disassemble
from support.running.each_case import each_case

#: A value from ahead of a loop is read behind it, and a product reads two pairs of registers.
_LOOP = """
        /*0000*/                   S2UR UR4, SR_CTAID.X ;
        /*0010*/              @!P1 BRA `(.L_x_2) ;
        /*0020*/                   UIADD3 UR6, UP0, UR4, 0x2, URZ ;
.L_x_1:
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R36, gdesc[UR4], RZ, !UPT ;
        /*0040*/               @P2 BRA `(.L_x_1) ;
.L_x_2:
        /*0050*/                   UIADD3 UR9, UP0, UR6, 0x2, URZ ;
        /*0060*/                   EXIT ;
"""


def test_registers_that_a_branch_leaves_without_a_value():
    product = "HGMMA.64x64x16.F32.BF16 R36, gdesc[UR4], RZ, !UPT"
    assert unset_registers(_LOOP) == [product, "UIADD3 UR9, UP0, UR6, 0x2, URZ"]
    whole = _LOOP.replace("@!P1 BRA `(.L_x_2)", "ULDC.64 UR6, c[0x0][0x860]").replace("S2UR UR4", "ULDC.64 UR4")
    assert unset_registers(whole) == []


@each_case(
    "setting, reading, missing",
    [
        ("LDCU.128 UR4, c[0x0][0x380]", "UIADD3 UR8, UPT, UPT, UR7, 0x1, URZ", False),
        ("LDCU.64 UR4, c[0x0][0x380]", "UIADD3 UR8, UPT, UPT, UR7, 0x1, URZ", True),
        ("LDCU.64 UR4, c[0x0][0x380] &wr=0x0 ?trans1", "LDG.E R2, desc[UR4][R2.64] &req={0} ?WAIT4_END_GROUP", False),
        ("LDCU UR4, c[0x0][0x380]", "LDG.E R2, desc[UR4][R2.64]", True),
        ("UMOV.64 UR4, 0x1", "UIADD3.64 UR8, UPT, UPT, UR4, 0x2, URZ", False),
        ("UMOV UR4, 0x1", "UIADD3.64 UR8, UPT, UPT, UR4, 0x2, URZ", True),
        (
            "LDCU.128 UR4, c[0x0][0x380]",
            "UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR4], tmem[UR6], idesc[UR7], !UPT",
            False,
        ),
        ("LDCU.128 UR4, c[0x0][0x380]", "UTCHMMA gdesc[UR4], gdesc[UR7], tmem[UR4], tmem[UR6], idesc[UR7], !UPT", True),
        ("UTCATOMSWS.FIND_AND_SET.ALIGN UP0, UR4, UR3", "STS [UR4], R0", True),
        ("UIMAD.WIDE.U32 UR4, UP0, UR4, UR5, UR4", "UIADD3 UR8, UR5, 0x1, URZ", True),
    ],
)
def test_registers_of_wide_instructions(setting, reading, missing):
    """Registers of a pair or four have a value when the whole was written, and are read when the whole is read."""
    assert bool(unset_registers(_lines(setting, reading))) is missing


def test_a_copy_of_no_value_has_none_either():
    """It counts where the copy is used, not where it is made; ptxas copies pairs of which one half has a value."""
    copy, use = "UMOV UR5, UR9", "UIADD3 UR6, UR5, 0x1, URZ"
    assert unset_registers(_lines("UMOV UR5, 0x1", copy, use, "EXIT")) == [use]
    assert unset_registers(_lines(copy, "UMOV UR5, 0x1", use, "EXIT")) == []
    saved = "MOV.SPILL R4, UR9", "R2UR.FILL UR5, R4"  # as ptxas 13 writes it
    assert unset_registers(_lines(*saved, use, "EXIT")) == [use]
    assert unset_registers(_LOOP.replace("UIADD3 UR6, UP0, UR4, 0x2, URZ", "UMOV UR6, UR4")) == unset_registers(_LOOP)


@each_case(
    "setting, between, reading, missing",
    [
        ("@!P0 IMAD.MOV.U32 R5, RZ, RZ, 0x2000", "NOP", "@!P0 IADD3 R6, R5, 0x1, RZ", False),
        ("@!P0 IMAD.MOV.U32 R5, RZ, RZ, 0x2000", "NOP", "@P0 IADD3 R6, R5, 0x1, RZ", True),
        ("@!P0 IMAD.MOV.U32 R5, RZ, RZ, 0x2000", "NOP", "IADD3 R6, R5, 0x1, RZ", True),
        ("@!P0 IMAD.MOV.U32 R5, RZ, RZ, 0x2000", "ISETP.NE.AND P0, PT, R1, RZ, PT", "@!P0 IADD3 R6, R5, 0x1, RZ", True),
        (
            "@!P0 IMAD.MOV.U32 R5, RZ, RZ, 0x2000",
            "ISETP.NE.AND P1, PT, R1, RZ, PT",
            "@!P0 IADD3 R6, R5, 0x1, RZ",
            False,
        ),
        ("@!P0 IMAD.MOV.U32 R5, RZ, RZ, 0x2000", "MOV R5, UR9", "@!P0 IADD3 R6, R5, 0x1, RZ", True),
        ("@!P0 MOV R5, UR9", "NOP", "@!P0 IADD3 R6, R5, 0x1, RZ", True),
    ],
)
def test_a_register_that_is_set_and_read_under_one_guard(setting, between, reading, missing):
    """As ptxas 13.4 has it for the bytes that a barrier expects, in a register that held a copy of no value before."""
    assert bool(unset_registers(_lines("MOV R5, UR9", setting, between, reading, "EXIT"))) is missing


#: As ptxas 12.8 saves two registers that have a value only in a loop, and restores them for nobody.
_SAVED = ("MOV R14, UR5", "MOV R15, UR4", "UIMAD.WIDE.U32 UR4, UR8, 0x80, UR8", "ULEA UR6, UP1, UR4, UR5, 0x2",
          "R2UR UR5, R14", "R2UR UR4, R15")  # fmt: skip


_SUM = "IADD3 R2, R3, 0x1, RZ"


@each_case(
    "between, after, found",
    [
        (_SUM, "EXIT", None),
        ("IADD3 R2, R14, 0x1, RZ", "EXIT", "IADD3 R2, R14, 0x1, RZ"),
        ("STG.E.128 desc[UR8][R2.64], R12", "EXIT", "STG.E.128 desc[UR8][R2.64], R12"),
        ("LDSM.16.M88.4 R16, [R12]", "EXIT", None),
        ("LDSM.16.M88.4 R16, [R14]", "EXIT", "LDSM.16.M88.4 R16, [R14]"),
        ("LDG.E R2, desc[UR8][R14.64]", "EXIT", "LDG.E R2, desc[UR8][R14.64]"),
        ("LDG.E.SYS R2, [R13]", "EXIT", "LDG.E.SYS R2, [R13]"),
        (_SUM, "UIADD3 UR7, UR4, 0x1, URZ", "UIADD3 UR7, UR4, 0x1, URZ"),
        (_SUM, "IADD3 R2, R15, 0x1, RZ", "IADD3 R2, R15, 0x1, RZ"),
        ("MOV R14, 0x4", "UIADD3 UR7, UR5, 0x1, URZ", None),
        ("@P0 MOV R14, 0x4", "UIADD3 UR7, UR5, 0x1, URZ", "UIADD3 UR7, UR5, 0x1, URZ"),
    ],
)
def test_a_copy_is_as_unset_as_what_it_copies(between, after, found):
    lines = ["ULDC.64 UR8, c[0x0][0x860]", *_SAVED[:4], between, *_SAVED[4:], after]
    assert unset_registers(_lines(*lines)) == ([found] if found else [])


def test_the_other_way_of_a_conditional_branch_is_followed():
    listing = _lines("S2UR UR4, SR_CTAID.X", "BRA.U !UP0, `(.L_x_1)", "UIADD3 UR5, UR9, 0x1, URZ", "EXIT")
    assert unset_registers(listing + "\n.L_x_1:\n" + _lines("UIADD3 UR5, UR8, 0x1, URZ", "EXIT")) == [
        "UIADD3 UR5, UR9, 0x1, URZ",
        "UIADD3 UR5, UR8, 0x1, URZ",
    ]


@each_case("set_there, missing", [(True, []), (False, ["UIADD3 UR6, UR5, 0x1, URZ"] * 2)])
def test_a_function_sets_registers_of_its_callers(set_there, missing):
    """Each caller has what it had before, and what the function set."""
    call = "CALL.REL.NOINC `($divide)"
    caller = _lines(call, "UIADD3 UR6, UR5, 0x1, URZ", "UMOV UR7, 0x1", call, "UIADD3 UR6, UR5, 0x1, URZ",
                    "UIADD3 UR8, UR7, 0x1, URZ", "EXIT")  # fmt: skip
    sets = ["UMOV UR5, 0x2"] if set_there else []
    function = _lines(*sets, "RET.REL.NODEC R44 `(kernel)")
    assert unset_registers(f"{caller}\n$divide:\n{function}") == missing


def test_a_call_of_a_label_is_a_jump():
    """As ptxas 12.8 writes jumps out of the end of a loop, for sm_80 to sm_89."""
    jump = _LOOP.replace("@P2 BRA `(.L_x_1)", "@!P2 CALL.REL.NOINC `(.L_x_2) ;\n        /*0048*/ BRA `(.L_x_1)")
    assert jump != _LOOP and unset_registers(jump) == unset_registers(_LOOP)


@each_case("line", ["UNEW UR4, UR5", "UNEW.64 UP0, UR4", "NEWER UR4, R5"])
def test_an_unknown_use_of_uniform_registers_is_an_error(line):
    with pytest.raises(UnknownInstructionError, match="not known here"):
        unset_registers(_lines("ULDC.64 UR4, c[0x0][0x0]", line))


_HIGH = 0x40000040 << 32
#: A product with both operands in shared memory, at an address and 8,192 bytes behind it.
_PTX = f"""
	bfe.u32 	%r4, %r2, 4, 14;
	cvt.u64.u32 	%rd2, %r4;
	add.s32 	%r3, %r2, 8192;
	bfe.u32 	%r5, %r3, 4, 14;
	cvt.u64.u32 	%rd3, %r5;
	or.b64 	%rd4, %rd2, {_HIGH};
	add.s64 	%rd5, %rd3, {_HIGH + 2};
	wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%r20,%r21,%r22,%r23}}, %rd4, %rd5, 0, 1, 1, 0, 0;
"""
#: Such machine code: UR4 and UR6 describe the operands.
_PRODUCT = (
    "S2UR UR12, SR_CgaCtaId",
    "USHF.R.U32.HI UR4, URZ, 0x4, UR12",
    "USGXT.U32 UR4, UR4, 0xe",
    "UIADD3 UR6, UP0, UR4, 0x202, URZ",
    "UMOV UR5, 0x40000040",
    "UIADD3.X UR7, URZ, 0x40000040, URZ, UP0, !UPT",
    "HGMMA.64x8x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT, gsb0",
    "EXIT",
)


def _lines(*instructions: str) -> str:
    return "\n".join(f"        /*{16 * number:04x}*/    {line} ;" for number, line in enumerate(instructions))


def _changed(old: str, *new: str) -> str:
    """The machine code with one instruction in another form."""
    place = _PRODUCT.index(old)
    return _lines(*_PRODUCT[:place], *new, *_PRODUCT[place + 1 :])


def test_descriptors_are_followed_to_the_constants_of_the_ptx():
    assert wrong_code(_lines(*_PRODUCT), _PTX) == []


def test_a_word_made_wide_has_a_high_word_of_zero():
    """As Triton 3.9 has it: the low word of a descriptor is a sum in 32 bits."""
    ptx = _PTX.replace("cvt.u64.u32 	%rd2, %r4;", "add.s32 	%r6, %r4, 2;\n	cvt.u64.u32 	%rd2, %r6;")
    assert ptx != _PTX and wrong_code(_lines(*_PRODUCT), ptx) == []


@each_case(
    "old, new",
    [
        (_PRODUCT[4], ["R2UR UR5, R3"]),  # a word from nowhere
        (_PRODUCT[4], ["UMOV UR5, 0x80000020"]),  # that of another swizzle
        (_PRODUCT[5], ["UIADD3.X UR7, UR4, 0x40000040, URZ, UP0, !UPT"]),  # the low word in the place of the high one
        (_PRODUCT[2], ["R2UR UR4, R3"]),  # so that the sum of the low words may carry
        (_PRODUCT[4], ["UMOV UR5, 0x40000040", "@UP1 UIADD3 UR5, UR5, 0x1, URZ"]),
        (
            _PRODUCT[4],  # read while it is exchanged
            [
                "UMOV UR8, 0x40000040",
                "ULOP3.LUT UR8, UR8, UR9, URZ, 0x3c, !UPT",
                "UMOV UR5, UR8",
                "ULOP3.LUT UR9, UR8, UR9, URZ, 0x3c, !UPT",
                "ULOP3.LUT UR8, UR8, UR9, URZ, 0x3c, !UPT",
            ],
        ),
    ],
)
def test_a_descriptor_with_another_high_word_is_seen(old, new):
    (found,) = wrong_descriptors(_changed(old, *new), _PTX)
    assert found == _PRODUCT[-2]


@each_case("written, wrong", [("UR5", 1), ("UR9", 0)])
def test_a_function_may_overwrite_a_high_word(written, wrong):
    caller = _changed(_PRODUCT[5], _PRODUCT[5], "CALL.REL.NOINC `($other)")
    function = _lines(f"R2UR {written}, R3", "RET.REL.NODEC R44 `(kernel)")
    assert len(wrong_descriptors(f"{caller}\n$other:\n{function}", _PTX)) == wrong


@each_case(
    "old, new",
    [
        (_PRODUCT[4], ["UMOV UR8, 0x40000040", "MOV R3, UR8", "R2UR UR5, R3"]),
        (_PRODUCT[4], ["MOV R3, 0x40000040", "STL [R1+0x8], R3", "CS2R R2, SRZ", "LDL R4, [R1+0x8]", "R2UR UR5, R4"]),
        (_PRODUCT[4], ["UMOV UR5, 0x40000040", "@UP1 UMOV UR5, 0x40000040"]),
        (_PRODUCT[4], ["MOV R3, 0x40000040", "IMAD.X R4, RZ, RZ, R3, UP0", "R2UR UR5, R4"]),
        (_PRODUCT[4], ["MOV R3, 0x40000000", "MOV R4, 0x40", "IMAD.IADD R5, R3, 0x1, R4", "R2UR UR5, R5"]),
        (_PRODUCT[3], ["UMOV UR8, 0xfffffdfe", "UIADD3 UR6, UP0, UR4, -UR8, URZ"]),
        (
            _PRODUCT[4],  # made in UR4, and exchanged with it
            [
                "UMOV UR5, UR4",
                "UMOV UR4, 0x40000040",
                "ULOP3.LUT UR5, UR5, UR4, URZ, 0x3c, !UPT",
                "ULOP3.LUT UR9, UR9, 0x1, URZ, 0x3c, !UPT",  # of something else
                "ULOP3.LUT UR4, UR5, UR4, URZ, 0x3c, !UPT",
                "ULOP3.LUT UR5, UR5, UR4, URZ, 0x3c, !UPT",
            ],
        ),
        (
            _PRODUCT[4],  # the same, while others are exchanged
            [
                "UMOV UR5, UR4",
                "UMOV UR4, 0x40000040",
                "ULOP3.LUT UR9, UR9, UR8, URZ, 0x3c, !UPT",
                "ULOP3.LUT UR5, UR5, UR4, URZ, 0x3c, !UPT",
                "ULOP3.LUT UR8, UR9, UR8, URZ, 0x3c, !UPT",
                "ULOP3.LUT UR4, UR5, UR4, URZ, 0x3c, !UPT",
                "ULOP3.LUT UR5, UR5, UR4, URZ, 0x3c, !UPT",
                "ULOP3.LUT UR9, UR9, UR8, URZ, 0x3c, !UPT",
            ],
        ),
        (
            _PRODUCT[4],  # the same, and UR4 is read while it has its old value, and when it has its new one
            [
                "UMOV UR5, UR4",
                "UMOV UR4, 0x40000040",
                "ULOP3.LUT UR5, UR5, UR4, URZ, 0x3c, !UPT",
                "UMOV UR9, UR4",
                "ULOP3.LUT UR4, UR5, UR4, URZ, 0x3c, !UPT",
                "UMOV UR8, UR4",
                "ULOP3.LUT UR5, UR5, UR4, URZ, 0x3c, !UPT",
                "UMOV UR4, UR8",
                "UMOV UR5, UR9",
            ],
        ),
    ],
)
def test_other_ways_to_the_same_descriptor(old, new):
    assert wrong_descriptors(_changed(old, *new), _PTX) == []


#: A loop with two products that read tiles at one address, the second with a narrower swizzle: as two tiles that are on
#: chip one after the other. The PTX adds the constants of the descriptors of each to one register.
_TWO_TILES = """.version 8.6
.target sm_90a
.address_size 64
.extern .shared .align 128 .b8 tiles[];
.visible .entry kernel(.param .u64 .ptr .global .align 1 out, .param .u32 steps) .reqntid 128 {{
	.reg .pred %p<4>;
	.reg .b32 %r<100>;
	.reg .b64 %rd<80>;
	ld.param.b64 	%rd1, [out];
	ld.param.b32 	%r1, [steps];
	mov.b32 	%r2, tiles;
	add.s32 	%r3, %r2, 8192;
	bfe.u32 	%r4, %r2, 4, 14;
	cvt.u64.u32 	%rd2, %r4;
	bfe.u32 	%r5, %r3, 4, 14;
	cvt.u64.u32 	%rd3, %r5;
{descriptors}
	mov.u32 	%r90, %tid.x;
	shl.b32 	%r91, %r90, 1;
	add.s32 	%r92, %r2, %r91;
	mov.b32 	%r6, 0;
	mov.pred 	%p1, -1;
{zeros}
LOOP:
	st.shared.b32 	[%r92+8192], %r6;
	bar.sync 	0;
	fence.proxy.async.shared::cta;
	wgmma.fence.sync.aligned;
{first}
	wgmma.commit_group.sync.aligned;
	wgmma.wait_group.sync.aligned 0;
	bar.sync 	0;
	st.shared.b32 	[%r92+8192], %r20;
	bar.sync 	0;
	fence.proxy.async.shared::cta;
	wgmma.fence.sync.aligned;
{second}
	wgmma.commit_group.sync.aligned;
	wgmma.wait_group.sync.aligned 0;
	bar.sync 	0;
	add.s32 	%r6, %r6, 1;
	setp.lt.s32 	%p2, %r6, %r1;
	@%p2 bra 	LOOP;
	mul.wide.u32 	%rd10, %r90, 32;
	add.s64 	%rd11, %rd1, %rd10;
	st.global.v4.b32 	[%rd11], {{%r10,%r11,%r12,%r13}};
	st.global.v4.b32 	[%rd11+16], {{%r14,%r15,%r16,%r17}};
	ret;
}}
"""
#: The versions with the fault: 12.8.61, 12.8.93 and 12.9.41. Neither 12.6.85 nor 12.9.86 and later ones have it.
_FAULTY = ("V12.8.", "V12.9.41")
_WIDE, _NARROW = 0x40000040, 0xC0000010  # rows of 128 bytes and of 32


def _two_tiles(first: int, second: int, steps: int = 4) -> str:
    """The PTX for two high words of descriptors."""

    def constant(word: int, low: int) -> int:
        number = word << 32 | 0x10000 | low
        return number - (number >> 63 << 64)

    sums = [
        *(f"%rd{40 + 2 * step}, %rd2, {constant(first, 2 * step)}" for step in range(steps)),
        *(f"%rd{41 + 2 * step}, %rd3, {constant(first, 2 * step)}" for step in range(steps)),
        *(f"%rd{60 + step}, %rd3, {constant(second, 32 * step)}" for step in range(steps)),
    ]
    product = "\twgmma.mma_async.sync.aligned.{};"
    shape = "m64n8k16.f32.bf16.bf16 {%r20,%r21,%r22,%r23}"
    sums_shape = "m64n16k16.f32.bf16.bf16 {%r10,%r11,%r12,%r13,%r14,%r15,%r16,%r17}, {%r20,%r21,%r22,%r23}"
    return _TWO_TILES.format(
        descriptors="\n".join(f"\tadd.s64 \t{terms};" for terms in sums),
        zeros="\n".join(f"\tmov.b32 \t%r{number}, 0f00000000;" for number in range(10, 18)),
        first="\n".join(
            product.format(f"{shape}, %rd{40 + 2 * step}, %rd{41 + 2 * step}, {'%p1' if step else 0}, 1, 1, 0, 0")
            for step in range(steps)
        ),
        second="\n".join(product.format(f"{sums_shape}, %rd{60 + step}, %p1, 1, 1, 1") for step in range(steps)),
    )


def _assembled(ptx: str, folder: Path) -> str:
    """The listing of what the installed ptxas makes of PTX."""
    source, binary = folder / "kernel.ptx", folder / "kernel.cubin"
    source.write_text(ptx)
    subprocess.run([TOOLS / "ptxas", "--gpu-name=sm_90a", source, "-o", binary], check=True)
    return disassemble(binary.read_bytes())


def test_the_fault_of_ptxas(tmp_path):
    """The machine code of those versions is found to be wrong, that of others is not. The PTX always has the cause."""
    ptx = _two_tiles(_WIDE, _NARROW)
    listing = _assembled(ptx, tmp_path)
    version = subprocess.run([TOOLS / "ptxas", "--version"], check=True, text=True, capture_output=True).stdout
    faulty = any(name in version for name in _FAULTY)
    assert bool(unset_registers(listing)) is bool(wrong_descriptors(listing, ptx)) is faulty
    assert shared_bases(ptx) == ["%rd3: 0x40000040, 0xc0000010"]


@pytest.mark.parametrize("words", [(_NARROW, _WIDE), (_WIDE, _WIDE)])
def test_tiles_at_one_address_that_ptxas_gets_right(words, tmp_path):
    ptx = _two_tiles(*words)
    assert wrong_code(_assembled(ptx, tmp_path), ptx) == []


_PAIR = ("F2FP.F16.F32.PACK_AB R6, R7, R6", "LDL.LU.S16 R17, [R1+0x8]", "STL [R1+0x8], R6", "LDL.LU.S16 R18, [R1+0xa]")


@each_case(
    "code, found",
    [
        (_PAIR, [_PAIR[1], _PAIR[3]]),
        (("STL.64 [R1], R4", "LDL.U16 R3, [R1+0x6]"), ["LDL.U16 R3, [R1+0x6]"]),
        (("STL [R1], R4", "LDL.LU R3, [R1]"), []),
        (("STL.U16 [R1+0x8], R4", "LDL.U16 R3, [R1+0x8]", "STL [R1+0xc], R4"), []),
    ],
)
def test_halves_that_come_from_memory(code, found):
    """The first listing is what ptxas 12.8 wrote: the lower half is fetched before it is there."""
    listing = _lines(*code, "EXIT")
    assert halves_from_memory(listing) == found
    assert wrong_code(listing, "") == [f"half of a register that was stored whole: {line}" for line in found]
