"""What ci/check_layering.py lets a room include, on includes that the tree does not have, and the graph of its own."""

from __future__ import annotations

import check_layering
import pytest


def problem(path: str, name: str) -> str | None:
    layer = check_layering.layer_of(path)
    assert layer is not None
    return check_layering.check_include(path, layer, '"', name)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("common/device/gated_delta/x.h", "common/device/core/types.h"),
        ("common/host/attention/x.cpp", "common/host/scores.h"),
        ("common/device/attention/x.h", "common/device/merge/online_softmax.h"),
        ("common/device/decode/x.h", "common/device/kv/paged_kv.h"),
        ("common/device/decode/x.h", "common/device/merge/online_softmax.h"),
        ("common/host/gated_delta/x.cpp", "common/host/contents.h"),
        ("common/host/gated_delta/x.cpp", "common/host/kv/cache_layout.h"),
        ("common/host/capi/decode.cpp", "common/host/check.h"),
        ("hip/gated_delta/x.h", "hip/arch/mfma.h"),
        ("hip/decode/x.h", "hip/kv/widen.h"),
        ("hip/decode/x.h", "hip/tuning/decode/gfx942.h"),
        ("cuda/gated_delta/x.h", "common/device/gated_delta/params.h"),
    ],
)
def test_a_room_may_include_its_own_and_what_operations_share(path, name):
    assert problem(path, name) is None


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("common/device/gated_delta/x.h", "common/device/decode/params.h"),
        ("common/host/attention/x.cpp", "common/host/decode/problem.h"),
        ("common/device/attention/x.h", "common/device/decode/params.h"),
        ("common/device/decode/x.h", "common/device/gated_delta/params.h"),
        ("common/device/core/x.h", "common/device/kv/format.h"),
        ("common/device/kv/x.h", "common/device/merge/params.h"),
        ("common/device/merge/x.h", "common/device/decode/params.h"),
        ("common/host/gated_delta/x.cpp", "common/host/decode/lengths.h"),
        ("common/host/gated_delta/x.cpp", "common/device/decode/tree_layout.h"),
        ("common/host/kv/x.cpp", "common/host/decode/problem.h"),
        ("common/host/capi/decode.cpp", "common/host/decode/problem.h"),
        ("hip/gated_delta/x.h", "hip/decode/mfma_tiles.h"),
        ("cuda/decode/x.h", "cuda/tuning/gated_delta/sm90a.h"),
        ("cuda/arch/x.h", "cuda/decode/tiles.h"),
        ("cpu/decode/x.h", "hip/decode/mfma_tiles.h"),
    ],
)
def test_no_room_may_include_another_operation_or_what_lies_above_it(path, name):
    assert problem(path, name) == f"{check_layering.layer_of(path)} may not include {name}"


def test_includes_through_macros_are_seen():
    headers = {"FLASHPORT_X_HEADER": {"hip/decode/mfma_tiles.h", "hip/gated_delta/state_tile.h"}}
    check = check_layering.check_macro_include
    breach = "may not include hip/decode/mfma_tiles.h (as FLASHPORT_X_HEADER)"
    layer = "common/device/gated_delta"
    assert check(f"{layer}/x.h", layer, "FLASHPORT_X_HEADER", headers) == [f"{layer} {breach}"]
    layer = "hip/gated_delta"
    assert check(f"{layer}/x.h", layer, "FLASHPORT_X_HEADER", headers) == [f"{layer} {breach}"]
    assert check(f"{layer}/x.h", layer, "FLASHPORT_Y_HEADER", headers) == ["no header defines FLASHPORT_Y_HEADER"]


def test_the_graph_has_one_node_a_room_and_no_arrow_that_runs_up():
    graph = check_layering.room_graph(check_layering.sources())
    folders = {path.name for path in (check_layering.ROOT / "common/device").iterdir() if path.is_dir()}
    assert set(graph) == folders
    for room, included in graph.items():
        assert included <= set(check_layering.ROOMS[room])
