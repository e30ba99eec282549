"""The rules of ci/memory_order.py on listings: what a kernel needs so that its signals are not sent too early."""

from __future__ import annotations

import pytest
from memory_order import amd_instructions, amd_order, sass_instruction, sass_order

# Decode's signal counters as clang compiles them: every wave stores, waits and joins the barrier; one lane releases,
# waits and adds, and the last one sets the counter back and acquires. Words in parentheses name lines for the tests.
CDNA = """
0000000000001000 <kernel>:
	s_cbranch_execz 1                  // 000000001000: BF880001 <kernel+0xc>
	global_store_dword v[6:7], v1, off // 000000001004: DC708000 007F0106
	s_waitcnt vmcnt(0) (stores)        // 00000000100C: BF8C0F70
	s_barrier                          // 000000001010: BF8A0000
	s_cbranch_scc1 9                   // 000000001014: BF850009 <kernel+0x50>
	buffer_wbl2 sc1                    // 000000001018: E0A08000 00000000
	s_waitcnt vmcnt(0) (release)       // 000000001020: BF8C0F70
	global_atomic_add v4, v2, v3, s[6:7] sc0 // 000000001024: DD098000 04060302
	s_waitcnt vmcnt(0)                 // 00000000102C: BF8C0F70
	s_cbranch_execz 4                  // 000000001030: BF880004 <kernel+0x50>
	global_store_dword v[2:3], v7, off sc1 // 000000001034: DE708000 007F0702
	s_waitcnt vmcnt(0)                 // 00000000103C: BF8C0F70
	buffer_inv sc1                     // 000000001040: E0A48000 00000000
	s_nop 0                            // 000000001048: BF800000
	s_nop 0                            // 00000000104C: BF800000
	s_barrier                          // 000000001050: BF8A0000
	s_cbranch_scc0 65516               // 000000001054: BF84FFEC <kernel>
	s_endpgm                           // 000000001058: BF810000
"""

RDNA3 = """
0000000000001000 <kernel>:
	s_cbranch_execz 2                  // 000000001000: BFA50002 <kernel+0xc>
	global_store_b32 v[5:6], v2, off   // 000000001004: DC6A0000 007C0205
	s_waitcnt_vscnt null, 0x0          // 00000000100C: BC7C0000
	s_barrier                          // 000000001010: BFBD0000
	s_cbranch_scc1 9                   // 000000001014: BFA20009 <kernel+0x3c>
	global_atomic_add_u32 v4, v2, v3, s[6:7] glc // 000000001018: DCD64000 04060302
	s_waitcnt vmcnt(0)                 // 000000001020: BF8903F7
	global_store_b32 v[2:3], v4, off   // 000000001024: DC6A0000 007C0402
	s_waitcnt_vscnt null, 0x0 (counter) // 00000000102C: BC7C0000
	buffer_gl1_inv                     // 000000001030: E0B00000 00000000
	s_delay_alu instid0(VALU_DEP_1) | instskip(NEXT)// 000000001038: BF870001
	s_barrier                          // 00000000103C: BFBD0000
	s_endpgm                           // 000000001040: BFB00000
"""

SASS = """
        /*0000*/                   STG.E desc[UR6][R4.64], R9 ;                          /* 0x0 */
        /*0010*/              @!P1 BAR.SYNC.DEFER_BLOCKING 0x0, R8 ;                      /* 0x0 */
        /*0020*/               @P0 BRA 0x80 ;                                             /* 0x0 */
        /*0030*/              @!P4 MEMBAR.ALL.GPU ;                                       /* 0x0 */
        /*0040*/              @!P4 ERRBAR;                                                /* 0x0 */
        /*0050*/              @!P4 ATOMG.E.ADD.STRONG.GPU PT, R6, desc[UR6][R4.64], R3 ;  /* 0x0 */
        /*0060*/                   CCTL.IVALL ;                                           /* 0x0 */
        /*0070*/                   IMAD R11, R11, R0, RZ ;                                /* 0x0 */
        /*0080*/                   EXIT ;                                                 /* 0x0 */
"""


def amd(target, listing):
    return amd_order(target, amd_instructions(listing)["kernel"])


def sass(listing):
    return sass_order(filter(None, map(sass_instruction, listing.splitlines())))


def without(listing, text):
    """The listing less the one line that has `text`."""
    lines = [line for line in listing.splitlines() if text not in line]
    assert len(lines) == len(listing.splitlines()) - 1, text
    return "\n".join(lines)


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_whole_arrival_of_cdna(target):
    assert amd(target, CDNA).figures() == {"signals": 2, "releases": 1, "acquires": 1, "bare": 0}


def test_whole_arrival_of_rdna3():
    assert amd("gfx11", RDNA3).figures() == {"signals": 1, "releases": 0, "acquires": 1, "bare": 0}


def test_whole_arrival_of_nvidia():
    assert sass(SASS).figures() == {"signals": 1, "releases": 1, "acquires": 1, "bare": 0}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("buffer_wbl2", "global_atomic_add at 0x1024: stores before it are not released"),
        ("(release)", "global_atomic_add at 0x1024: no vmcnt(0) after buffer_wbl2"),
        (
            "(stores)",
            "global_atomic_add at 0x1024: stores of other waves may be in flight: no wait for them before the barrier",
        ),
    ],
)
def test_arrival_of_cdna_without_a_line(line, reason):
    order = amd("gfx942", without(CDNA, line))
    assert order.findings[0x1024] == reason
    assert order.figures()["bare"] >= 1


def test_partial_wait_is_none():
    order = amd("gfx942", CDNA.replace("vmcnt(0) (release)", "vmcnt(1) (release)"))
    assert list(order.findings.values()) == ["global_atomic_add at 0x1024: no vmcnt(0) after buffer_wbl2"]
    assert amd("gfx942", CDNA.replace("vmcnt(0) (release)", "vmcnt(0) lgkmcnt(0)")).findings == {}


def test_wait_on_one_path_is_not_enough():
    lines = CDNA.splitlines()
    lines[2] = "	global_store_dword v[6:7], v1, off // 000000001000: DC708000 007F0106"
    lines[3] = "	s_cbranch_scc1 0 // 000000001008: BF850000 <kernel+0x10>"  # past the wait
    assert "no wait for them before the barrier" in amd("gfx942", "\n".join(lines)).findings[0x1024]
    lines[3] = lines[3].replace("+0x10", "+0xc")
    assert amd("gfx942", "\n".join(lines)).findings == {}


def test_stores_of_an_earlier_turn_count():
    # What follows the last barrier is stored in the next turn of the loop, and released there.
    stored = "	global_store_dword v[6:7], v1, off // 000000001050: 0\n	s_cbranch_scc0 65516"
    listing = without(CDNA, "000000001050: BF8A0000").replace("	s_cbranch_scc0 65516", stored)
    assert amd("gfx942", listing).findings == {}
    assert "no wait for them" in amd("gfx942", without(listing, "(stores)")).findings[0x1024]


def test_flag_store_of_cdna_is_a_signal():
    listing = without(CDNA, "(release)").replace(
        "global_atomic_add v4, v2, v3, s[6:7] sc0", "global_store_dword v[2:3], v4, off sc1"
    )
    assert amd("gfx942", listing).findings[0x1024] == "global_store_dword at 0x1024: no vmcnt(0) after buffer_wbl2"


def test_plain_store_does_not_overtake_a_write_back():
    listing = without(CDNA, "(release)").replace(
        "global_atomic_add v4, v2, v3, s[6:7] sc0", "global_store_dword v[2:3], v4, off"
    )
    assert amd("gfx942", listing).findings[0x1024] == "global_store_dword at 0x1024: no vmcnt(0) after buffer_wbl2"


@pytest.mark.parametrize(("distance", "waits"), [("0x3", True), ("0x7", False)])
def test_far_branches_are_followed(distance, waits):
    lines = CDNA.splitlines()
    lines[2] = "	global_store_dword v[6:7], v1, off // 000000001000: DC708000 007F0106"
    lines[3] = f"""	s_getpc_b64 s[8:9] // 000000001008: 0
	s_add_u32 s8, s8, {distance} // 000000001009: 0
	s_addc_u32 s9, s9, lit(0x0) // 00000000100A: 0
	s_setpc_b64 s[8:9] // 00000000100B: 0"""
    order = amd("gfx942", "\n".join(lines))  # to the wait, or past it
    assert order.error == ""
    assert (order.findings == {}) == waits


@pytest.mark.parametrize("name", ["s_setpc_b64 s[4:5]", "s_swappc_b64 s[30:31], s[4:5]"])
def test_jumps_that_cannot_be_followed_are_errors(name):
    order = amd("gfx942", CDNA.replace("s_nop 0                            // 000000001048", f"{name} // 000000001048"))
    assert order.error == f"{name.split()[0]} at 0x1048 leads where the audit cannot follow"


def test_kernel_without_an_end_is_an_error():
    assert amd("gfx942", without(CDNA, "s_endpgm")).error == "a path leaves the kernel at 0x1054"


def test_arrival_of_rdna3_without_its_wait():
    order = amd("gfx11", without(RDNA3, "00000000100C"))
    assert order.findings == {0x1018: "global_atomic_add_u32 at 0x1018: stores of its wave may be in flight"}
    # The wait of loads is none of stores.
    order = amd(
        "gfx11",
        RDNA3.replace("s_waitcnt_vscnt null, 0x0          // 00000000100C", "s_waitcnt vmcnt(0) // 00000000100C"),
    )
    assert list(order.findings) == [0x1018]
    # Waiting after the barrier is too late for other waves' stores.
    lines = RDNA3.splitlines()
    lines[4], lines[5] = lines[5], lines[4]
    order = amd(
        "gfx11",
        "\n".join(lines)
        .replace("00000000100C", "X")
        .replace("000000001010", "00000000100C")
        .replace("X", "000000001010"),
    )
    assert "no wait for them before the barrier" in order.findings[0x1018]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("@!P4 MEMBAR.ALL.GPU", "@!P4 NOP", "no MEMBAR before it on every path"),
        ("@!P4 MEMBAR.ALL.GPU", "@!P4 MEMBAR.ALL.CTA", "no MEMBAR before it on every path"),
        ("@!P4 MEMBAR.ALL.GPU", " @P3 MEMBAR.ALL.GPU", "its MEMBAR has another predicate, P3"),
        ("@!P4 ERRBAR;", "@!P4 STG.E desc[UR6][R4.64], R9 ;", "a store between MEMBAR and it"),
        ("BRA 0x80 ", "BRA 0x40 ", "no MEMBAR before it on every path"),
    ],
)
def test_arrival_of_nvidia_without_a_line(old, new, reason):
    assert old in SASS
    assert sass(SASS.replace(old, new)).findings == {0x50: f"ATOMG.E.ADD.STRONG.GPU at 0x50: {reason}"}


def test_release_under_no_predicate_covers_all():
    assert sass(SASS.replace("@!P4 MEMBAR", "MEMBAR")).findings == {}


def test_what_is_no_signal_to_other_blocks():
    listing = SASS.replace("ATOMG.E.ADD.STRONG.GPU PT, R6, desc[UR6][R4.64], R3", "ATOMS.ADD R6, [R4], R3")
    assert sass(without(listing, "MEMBAR")).figures() == {"signals": 0, "releases": 0, "acquires": 1, "bare": 0}
    listing = SASS.replace("ATOMG.E.ADD.STRONG.GPU PT, R6, desc[UR6][R4.64], R3", "REDUX.SUM UR4, R5")
    assert sass(listing).figures()["signals"] == 0


def test_wide_store_at_device_scope_is_data():
    wide = "ST{}.E.128.STRONG.GPU desc[UR6][R4.64], R8".format
    for name in ("", "G"):
        listing = SASS.replace("STG.E desc[UR6][R4.64], R9", wide(name))
        assert sass(listing).figures() == {"signals": 1, "releases": 1, "acquires": 1, "bare": 0}
        assert "a store between" in sass(SASS.replace("ERRBAR", wide(name))).findings[0x50]
    narrow = SASS.replace(
        "ATOMG.E.ADD.STRONG.GPU PT, R6, desc[UR6][R4.64], R3", "STG.E.STRONG.GPU desc[UR6][R4.64], R3"
    )
    assert sass(narrow).figures() == {"signals": 1, "releases": 1, "acquires": 1, "bare": 0}
    assert sass(without(narrow, "MEMBAR")).figures()["bare"] == 1
    listing = CDNA.replace("global_store_dword v[6:7], v1, off //", "global_store_dwordx4 v[6:7], v[0:3], off sc1 //")
    assert amd("gfx942", listing).figures() == {"signals": 2, "releases": 1, "acquires": 1, "bare": 0}
    assert "not released" in amd("gfx942", without(listing, "buffer_wbl2")).findings[0x1024]


def test_acquires_are_counted():
    assert amd("gfx942", without(CDNA, "buffer_inv")).acquires == 0
    assert amd("gfx11", without(RDNA3, "buffer_gl1_inv")).acquires == 0
    assert sass(without(SASS, "CCTL")).acquires == 0
