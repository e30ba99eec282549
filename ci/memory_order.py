"""Signals between blocks, as the instructions of a kernel send them, and whether what they announce is there by then.

A signal is what tells another block of the launch that data is there: an atomic on global memory, or a store at device
scope of at most 8 bytes; wider ones are data. What the block has written before it must be released first. Figures of
a kernel:

signals   such atomics and stores (gfx11 spells a store at device scope as any other: there, atomics alone)
releases  instructions that make writes visible to the device: buffer_wbl2 sc1; MEMBAR of scope GPU or SYS
acquires  instructions that let later loads see others' writes: buffer_inv sc1, buffer_gl1_inv; CCTL.IVALL
bare      signals that may be sent too early; the findings say why

On AMD all paths through a kernel are followed. A signal is bare where, on some path,
- a store comes before it without a buffer_wbl2 in between (gfx942, gfx950),
- nothing waits for that buffer_wbl2 (vmcnt(0)) before the signal, or before any other store,
- a store of this wave may be in flight: no wait for all stores (vmcnt(0); gfx11: vscnt 0) in between,
- a store of another wave may be: no such wait before the last barrier. A barrier does not wait for them by itself.

On NVIDIA the signal must follow its MEMBAR in a straight line, under the same predicate or none, without a store in
between: MEMBAR covers what a barrier has ordered before it.

A counter that announces nothing, a ticket, is bare too; the table of a kernel's figures says how many it has.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Instruction:
    """One line of a disassembly. `target` is the address that it may go on at, if that is not the next one's."""

    address: int
    name: str
    operands: str
    predicate: str = ""
    target: int | None = None


@dataclass
class Order:
    """What a kernel does for memory order."""

    signals: int = 0
    releases: int = 0
    acquires: int = 0
    findings: dict[int, str] = field(default_factory=dict)  # of bare signals, by address
    error: str = ""  # why the kernel could not be followed

    def figures(self) -> dict[str, int]:
        """The columns of the table."""
        return {
            "signals": self.signals,
            "releases": self.releases,
            "acquires": self.acquires,
            "bare": len(self.findings),
        }


# --- AMD -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """How a family of AMD's processors spells what matters here; patterns of "name operands"."""

    signal: re.Pattern[str]
    wait: re.Pattern[str]  # for all stores
    release: re.Pattern[str] | None  # None: a wait for all stores is all that it takes
    acquire: re.Pattern[str]
    in_flight: re.Pattern[str]  # what `wait` waits for


_CDNA = Machine(
    signal=re.compile(r"(global|flat|buffer)_(atomic_\w+ |store_(?!dwordx[34])\w+ .*\bsc1\b)"),
    wait=re.compile(r"s_waitcnt .*\bvmcnt\(0\)"),
    release=re.compile(r"buffer_wbl2 .*\bsc1\b"),
    acquire=re.compile(r"buffer_inv .*\bsc1\b"),
    in_flight=re.compile(r"(global|flat|buffer)_(store|atomic)_"),
)
_RDNA3 = Machine(
    signal=re.compile(r"(global|flat|buffer)_atomic_"),
    wait=re.compile(r"s_waitcnt_vscnt null, 0x0"),
    release=None,
    acquire=re.compile(r"buffer_gl1_inv"),
    in_flight=re.compile(r"(global|flat|buffer)_(store_|atomic_(?!.*\bglc\b))"),  # an atomic that returns is a load
)
MACHINES = {"gfx942": _CDNA, "gfx950": _CDNA, "gfx11": _RDNA3}

_AMD_SYMBOL = re.compile(r"([0-9a-f]+) <(\S+)>:")
_AMD_LINE = re.compile(r"\s+(\w+)\s*(.*?)\s*// ([0-9A-F]+):[^<]*(?:<(\S+?)(?:\+0x([0-9a-f]+))?>)?$")


def amd_instructions(listing: str) -> dict[str, list[Instruction]]:
    """The instructions of each symbol in what `llvm-objdump -d` prints."""
    symbols: dict[str, list[Instruction]] = {}
    begins: dict[str, int] = {}
    current: list[Instruction] = []
    for line in listing.splitlines():
        if match := _AMD_SYMBOL.match(line):
            begins[match[2]] = int(match[1], 16)
            current = symbols.setdefault(match[2], [])
        elif match := _AMD_LINE.match(line):
            name, operands, address, symbol, offset = match.groups()
            target = None
            if name.startswith(("s_branch", "s_cbranch")):
                target = begins[symbol] + int(offset or "0", 16)
            current.append(Instruction(int(address, 16), name, operands, target=target))
            if name == "s_setpc_b64":
                current[-1] = replace(current[-1], target=_far_target(current))
    return symbols


_NUMBER = r"(?:lit\()?(-?(?:0x)?[0-9a-f]+)\)?"
_ADD = re.compile(rf"(s\d+), \1, {_NUMBER}$")


def _far_target(listed: list[Instruction]) -> int | None:
    """Where the s_setpc at the end leads, if it is a branch farther than s_branch reaches; else None.

    Such a branch adds a constant to the address after s_getpc.
    """
    names = ["s_getpc_b64", "s_add_u32", "s_addc_u32", "s_setpc_b64"]
    if [instruction.name for instruction in listed[-4:]] != names:
        return None
    getpc, add, carry, jump = listed[-4:]
    low, high = _ADD.match(add.operands), _ADD.match(carry.operands)
    if not low or not high or not getpc.operands == jump.operands == f"s[{low[1][1:]}:{high[1][1:]}]":
        return None
    offset = (int(low[2], 0) & 0xFFFFFFFF) | (int(high[2], 0) & 0xFFFFFFFF) << 32
    return (add.address + offset) % (1 << 64)


# What may hold when an instruction is reached.
_IN_FLIGHT = 1  # a store of this wave
_UNRELEASED = 2  # a store that no release has followed
_WRITING_BACK = 4  # a release that nothing has waited for
_LATE = 8  # a store that was in flight at the last barrier

_ENDS = ("s_endpgm", "s_branch", "s_setpc")
_UNFOLLOWED = ("s_setpc", "s_swappc", "s_call", "s_cbranch_i_fork", "s_cbranch_join")


class _AmdKernel:
    """A kernel's instructions as blocks that are entered at the top alone, and what may hold on the way."""

    def __init__(self, machine: Machine, instructions: list[Instruction]) -> None:
        self.machine = machine
        self.order = Order()
        addresses = [instruction.address for instruction in instructions]
        self.instructions = instructions
        tops = {0}
        for i, instruction in enumerate(instructions):
            if instruction.target is not None:
                tops |= {bisect_left(addresses, instruction.target), i + 1}
        self.tops = sorted(top for top in tops if top < len(instructions))
        self.number = {top: block for block, top in enumerate(self.tops)}
        self.target = {i.address: bisect_left(addresses, i.target) for i in instructions if i.target is not None}
        self.count()

    def count(self) -> None:
        """The figures that need no path."""
        for instruction in self.instructions:
            text = f"{instruction.name} {instruction.operands}"
            self.order.signals += bool(self.machine.signal.match(text))
            self.order.releases += bool(self.machine.release and self.machine.release.match(text))
            self.order.acquires += bool(self.machine.acquire.match(text))
            if instruction.name.startswith(_UNFOLLOWED) and instruction.target is None:
                self.order.error = f"{instruction.name} at {instruction.address:#x} leads where the audit cannot follow"

    def check(self, instruction: Instruction, facts: int, signal: bool) -> None:
        """Notes what is wrong with a store or an atomic."""
        reason = ""
        if facts & _WRITING_BACK:
            reason = "no vmcnt(0) after buffer_wbl2"
        elif not signal:
            return
        elif facts & _UNRELEASED:
            reason = "stores before it are not released"
        elif facts & _IN_FLIGHT:
            reason = "stores of its wave may be in flight"
        elif facts & _LATE:
            reason = "stores of other waves may be in flight: no wait for them before the barrier"
        if reason:
            self.order.findings[instruction.address] = f"{instruction.name} at {instruction.address:#x}: {reason}"

    def through(self, instruction: Instruction, facts: int) -> int:
        """What may hold after an instruction."""
        machine = self.machine
        text = f"{instruction.name} {instruction.operands}"
        if instruction.name == "s_barrier":
            return facts | _LATE if facts & _IN_FLIGHT else facts & ~_LATE
        if machine.wait.match(text):
            return facts & ~(_IN_FLIGHT | _WRITING_BACK | (_UNRELEASED if facts & _WRITING_BACK else 0))
        if machine.release and machine.release.match(text):
            return facts | _WRITING_BACK
        signal = bool(machine.signal.match(text))
        writes = bool(machine.in_flight.match(text))
        if signal or writes:
            self.check(instruction, facts, signal)
        if writes:
            facts |= _IN_FLIGHT | (_UNRELEASED if machine.release and not signal else 0)
        return facts

    def follow(self) -> Order:
        """Every path, until nothing new may hold anywhere."""
        entering = [-1] * len(self.tops)  # -1: not reached
        entering[0] = 0
        waiting = [0]
        while waiting and not self.order.error:
            block = waiting.pop()
            facts = entering[block]
            end = self.tops[block + 1] if block + 1 < len(self.tops) else len(self.instructions)
            following: list[int] = [end]
            for i in range(self.tops[block], end):
                instruction = self.instructions[i]
                facts = self.through(instruction, facts)
                if instruction.target is not None:
                    following.append(self.target[instruction.address])
                if instruction.name.startswith(_ENDS):
                    following.remove(end)
                    break
            for index in following:
                if index not in self.number:
                    self.order.error = f"a path leaves the kernel at {self.instructions[end - 1].address:#x}"
                    break
                after = self.number[index]
                known = max(entering[after], 0)
                if entering[after] < 0 or facts | known != known:
                    entering[after] = known | facts
                    waiting.append(after)
        return self.order


def amd_order(target: str, instructions: list[Instruction]) -> Order:
    """What a kernel of an AMD target does for memory order."""
    return _AmdKernel(MACHINES[target], instructions).follow()


# --- NVIDIA ----------------------------------------------------------------------------------------------------------

_SASS_LINE = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_SASS_TARGET = re.compile(r"0x([0-9a-f]+)$")
_SASS_JUMP = re.compile(r"(BRA|BRX|BSSY|CALL|JMP|RET|EXIT)\b")
_SASS_SIGNAL = re.compile(r"ATOMG?\b|RED\b|STG?\.(?!.*\b128\b).*\bSTRONG\.(GPU|SYS)\b")
_SASS_STORE = re.compile(r"(ATOM|ATOMG|RED|ST|STG)\b")
_SASS_RELEASE = re.compile(r"MEMBAR\.\w+\.(GPU|SYS)\b")
_SASS_ACQUIRE = re.compile(r"CCTL\.IVALL\b")


def sass_instruction(line: str) -> Instruction | None:
    """The instruction on a line of `cuobjdump -sass`, if there is one."""
    match = _SASS_LINE.match(line)
    if not match:
        return None
    address, predicate, name, operands = match.groups()
    target = _SASS_TARGET.search(operands) if _SASS_JUMP.match(name) else None
    return Instruction(int(address, 16), name, operands, predicate or "", int(target[1], 16) if target else None)


def _sass_finding(instructions: list[Instruction], at: int, targets: set[int]) -> str:
    """Why the signal `at` is bare; empty where it follows its MEMBAR."""
    signal = instructions[at]
    entered = signal.address in targets
    for instruction in reversed(instructions[:at]):
        if entered or _SASS_JUMP.match(instruction.name):
            return "no MEMBAR before it on every path"
        if _SASS_RELEASE.match(instruction.name):
            fits = instruction.predicate in ("", signal.predicate)
            return "" if fits else f"its MEMBAR has another predicate, {instruction.predicate}"
        if _SASS_STORE.match(instruction.name):
            return "a store between MEMBAR and it"
        entered = instruction.address in targets
    return "no MEMBAR before it"


def sass_order(instructions: Iterable[Instruction]) -> Order:
    """What a kernel of an NVIDIA target does for memory order."""
    listed = list(instructions)
    targets = {instruction.target for instruction in listed if instruction.target is not None}
    order = Order()
    for at, instruction in enumerate(listed):
        order.releases += bool(_SASS_RELEASE.match(instruction.name))
        order.acquires += bool(_SASS_ACQUIRE.match(instruction.name))
        if not _SASS_SIGNAL.match(instruction.name):
            continue
        order.signals += 1
        if reason := _sass_finding(listed, at, targets):
            order.findings[instruction.address] = f"{instruction.name} at {instruction.address:#x}: {reason}"
    return order
