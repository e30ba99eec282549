"""explain: how a call of an operation is cut and launched, without making it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

from flashport import _core
from flashport.typing import Operation

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Unpack

    from flashport.devices import (
        _AppendQuery,
        _AttentionCall,
        _DecodeQuery,
        _DecodeStage2Query,
        _DeltaQuery,
        _MergeQuery,
        _QuantizeQuery,
    )

    class _DecodeScheduleQuery(_DecodeQuery, total=False):
        batch: int
        num_kv_heads: int
        max_kv_len: int
        num_splits: int | None

    class _DecodeStage2ScheduleQuery(_DecodeStage2Query, total=False):
        batch: int
        num_q_heads: int

    class _AppendScheduleQuery(_AppendQuery, total=False):
        tokens: int
        num_kv_heads: int

    class _QuantizeScheduleQuery(_QuantizeQuery, total=False):
        rows: int

    class _MergeScheduleQuery(_MergeQuery, total=False):
        rows: int

    class _DeltaScheduleQuery(_DeltaQuery, total=False):
        batch: int
        num_v_heads: int

    class _DeltaChunkScheduleQuery(_DeltaScheduleQuery, total=False):
        num_heads: int
        tokens: int
        packed: bool

    class _AttentionScheduleQuery(_AttentionCall, total=False):
        batch: int
        num_q_heads: int
        num_kv_heads: int
        q_len: int
        kv_len: int
        num_splits: int | None
        window: tuple[int, int]
        total_q: int
        total_k: int
        same_offsets: bool
        seqused_q: bool
        leftpad_k: bool
        rotary: bool


class _Schedule:
    """What all schedules have."""

    text: str

    def __str__(self) -> str:
        """All of it in a sentence."""
        return self.text


@dataclass(frozen=True)
class DecodeSchedule(_Schedule):
    """How a call of flash_decode is cut, as far as shapes decide it; :func:`explain` says what each number is."""

    kernel: str
    rows: int
    keys: int
    stages: int
    threads: int
    teams: int
    blocks: int
    query_tiles: int
    shared_bytes: int
    most_chunks: int
    shortest_chunk: int
    longest_chunk: int
    combine: Literal["none", "launch", "second launch"]
    workspace_bytes: int
    text: str


@dataclass(frozen=True)
class AttentionSchedule(_Schedule):
    """How a call of attention is cut, as far as shapes decide it; :func:`explain` says what each number is."""

    kernel: str
    rows: int
    keys: int
    stages: int
    threads: int
    blocks: int
    work_tiles: int
    shared_bytes: int
    pieces: int
    workspace_bytes: int
    text: str


@dataclass(frozen=True)
class LaunchSchedule(_Schedule):
    """How a call whose blocks never meet is launched; :func:`explain` says what each number is."""

    kernel: str
    threads: int
    blocks: int
    work: int
    shared_bytes: int
    workspace_bytes: int
    text: str


@dataclass(frozen=True)
class GatedDeltaSchedule(_Schedule):
    """How a call of gated_delta_update is cut; :func:`explain` says what each number is."""

    kernel: str
    columns: int
    threads: int
    teams: int
    slices: int
    blocks: int
    shared_bytes: int
    workspace_bytes: int
    text: str


@dataclass(frozen=True)
class GatedDeltaChunkSchedule(_Schedule):
    """How a call of gated_delta_chunk is cut; :func:`explain` says what each number is."""

    kernel: str
    columns: int
    threads: int
    blocks: int
    shared_bytes: int
    prepare_kernel: str
    prepare_threads: int
    prepare_teams: int
    prepare_blocks: int
    prepare_shared_bytes: int
    chunk_tokens: int
    chunks: int
    concurrent: bool
    workspace_bytes: int
    text: str


_SCHEDULES: dict[Operation, Callable[..., _Schedule]] = {
    "decode": DecodeSchedule,
    "decode_stage2": LaunchSchedule,
    "append": LaunchSchedule,
    "merge": LaunchSchedule,
    "gated_delta": GatedDeltaSchedule,
    "gated_delta_chunk": GatedDeltaChunkSchedule,
    "attention": AttentionSchedule,
    "quantize": LaunchSchedule,
    "dequantize": LaunchSchedule,
}


@overload
def explain(operation: Literal["decode"], **options: Unpack[_DecodeScheduleQuery]) -> DecodeSchedule: ...
@overload
def explain(operation: Literal["decode_stage2"], **options: Unpack[_DecodeStage2ScheduleQuery]) -> LaunchSchedule: ...
@overload
def explain(operation: Literal["append"], **options: Unpack[_AppendScheduleQuery]) -> LaunchSchedule: ...
@overload
def explain(operation: Literal["merge"], **options: Unpack[_MergeScheduleQuery]) -> LaunchSchedule: ...
@overload
def explain(operation: Literal["gated_delta"], **options: Unpack[_DeltaScheduleQuery]) -> GatedDeltaSchedule: ...
@overload
def explain(
    operation: Literal["gated_delta_chunk"], **options: Unpack[_DeltaChunkScheduleQuery]
) -> GatedDeltaChunkSchedule: ...
@overload
def explain(operation: Literal["attention"], **options: Unpack[_AttentionScheduleQuery]) -> AttentionSchedule: ...
@overload
def explain(
    operation: Literal["quantize", "dequantize"], **options: Unpack[_QuantizeScheduleQuery]
) -> LaunchSchedule: ...
def explain(operation: Operation, **options: Any) -> _Schedule:
    """How the first device of a target cuts and launches a call of an operation, as far as shapes decide it.

    Lengths stay on the device, where the tile scheduler reads them (docs/decode-schedule.md, docs/attention.md). The
    log of calls (``FLASHPORT_LOG=calls``) has the same text of the calls that are made.

    Args:
        operation: As in :func:`supports`.
        options: Those that :func:`supports` has for the operation, without ``q_len`` and ``group_size`` of "attention",
            and the sizes of the call, each 1 unless it says otherwise.

            "decode": ``batch``; ``num_kv_heads``; ``max_kv_len``, the keys of the longest sequence that the cache or
            its table has room for (0); ``num_splits``, as ``flash_decode`` takes it (None).

            "attention": ``batch``, ``num_q_heads`` and ``num_kv_heads``; ``q_len`` and ``kv_len`` of every sequence, or
            of packed ones, and of those with lengths of their own, the most that one has; ``num_splits``, as
            ``attention`` takes it (None); ``window`` ((-1, -1)); ``total_q`` and ``total_k``, the tokens of a call with
            ``cu_seqlens_q`` and with ``cu_seqlens_k`` (0: without); ``same_offsets``, whether one array is both
            (False); ``seqused_q`` and ``leftpad_k``, whether the call has each (False); ``rotary``, whether new keys
            (``appends``) come with ``rotary_cos`` (False).

            "decode_stage2": ``batch`` and ``num_q_heads``. "append": ``tokens`` and ``num_kv_heads``. "merge",
            "quantize" and "dequantize": ``rows`` of ``head_dim`` values, for "merge" those of the result.

            "gated_delta": ``batch``, the sequences, and ``num_v_heads``. "gated_delta_chunk": also ``num_heads`` of
            queries and keys; ``tokens`` of every sequence, or with ``packed`` (False), as of a call with
            ``cu_seqlens``, of all together.

    Returns:
        A frozen object whose ``str`` is one sentence. Each has ``kernel``, the key that :func:`which_kernel` gives;
        ``blocks`` of the grid; ``threads`` and ``shared_bytes`` of a block, as the launch asks for them: on a CPU a
        block is one thread and the bytes are its scratch, and of AMD's kernels, which have shared memory of their own,
        the bytes are 0; ``workspace_bytes``, which is 0 for calls without one. Where ``teams`` is above 1, so many
        blocks of the grid are one block of the device, and ``threads`` and ``shared_bytes`` are those of that.

        "decode" (:class:`flashport.DecodeSchedule`): ``rows`` of a query tile, which the heads of a group and the new
        tokens fill; ``keys`` that a turn of the kernel's loop takes; ``stages``, the tiles of keys or values in flight
        or in use; ``query_tiles`` of all sequences, kv heads and tiles of query rows; ``most_chunks``, how many chunks
        (with ``num_splits`` splits) a query tile has at most; ``shortest_chunk`` and ``longest_chunk``, their keys, of
        which a sequence's last chunk may have fewer; ``combine``, where partial results become one: "none" where every
        tile is one chunk, "launch" in the same launch, by the last block of each tile, or "second launch".

        "attention" (:class:`flashport.AttentionSchedule`): ``rows`` of a work tile, ``keys`` of a key tile, ``stages``,
        the key tiles that are in flight or in use; ``work_tiles`` of all sequences, heads and pieces; ``pieces`` that
        the keys of a sequence are cut into, at most. Where few queries are served by flash_decode's kernels they are
        its rows, keys and stages, query tiles and chunks.

        "decode_stage2", "append", "merge", "quantize" and "dequantize" (:class:`flashport.LaunchSchedule`): ``work``,
        what the blocks share: the rows of the result of "decode_stage2" and "merge", a block for each; of the others
        units of 32 values, a thread for each, or several where there are more than 2^20 blocks of them.

        "gated_delta" (:class:`flashport.GatedDeltaSchedule`): ``columns`` of V that a block takes; ``slices`` of a
        state, which a block each takes.

        "gated_delta_chunk" (:class:`flashport.GatedDeltaChunkSchedule`): the same numbers of the second launch, which
        carries states over the chunks, ``columns`` of them a block, and with the prefix ``prepare_`` of the first,
        which prepares the ``chunks`` of ``chunk_tokens`` tokens; ``concurrent``, whether the two run side by side.

    Raises:
        ValueError, TypeError: As :func:`supports`; a number out of its range.
        NotImplementedError: No kernel serves the call, or no device of the target is here.

    Source:
        common/host/decode/explain.cpp, common/host/attention/explain.cpp, common/host/gated_delta/explain.cpp and
        common/host/launch_plan.cpp, over the plans of the launches beside them.
    """
    numbers = _core.explain(operation, options)
    return _SCHEDULES[operation](*numbers)
