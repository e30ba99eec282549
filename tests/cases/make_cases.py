#!/usr/bin/env python3
"""Writes tests/cases/decode.csv, the one case list of flash_decode: tests, support table and benchmark read it.

Tiers: `emulator` holds one small case for every kernel instance of cmake/decode_instances.txt, the options rotating
over them; `full` covers every pair of values of the dimensions below (a greedy all-pairs cover with a fixed seed);
`bench` holds the shapes that are timed. `make_cases.py --check` fails when the file is not what this script writes.
"""

import csv
import io
import itertools
import pathlib
import random
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
OUT = pathlib.Path(__file__).with_name("decode.csv")

COLUMNS = (
    "name tier q k_format v_format dk dv hq hkv q_len q_form layout page lens window softcap alibi sinks tree scales "
    "index out lse strides splits"
).split()

# Lengths of the requests of a batch, joined by '|'; "200*63" repeats. Tile edges, page edges, 0 and 1; "draft" puts
# the first new token at the edge of a leaf of 64 for q_len 1, 2, 4, 5 and 16.
LENGTHS = {
    "edges": "0|1|63|64|65",
    "draft": "64|65|67|68|79|3|16",
    "small": "2|0|130|1|17",
    "mixed": "1025|0|17|200",
    "large": "1023|1024|1025",
    "deep": "2500|1|64",
}
EMULATOR_LENGTHS = ("0|1|65|130", "64|129", "63|67|1")

DIMENSIONS = {
    "types": ["fp16/fp16", "bf16/bf16", "fp32/fp32", "fp16/fp8_e4m3", "bf16/fp8_e4m3", "bf16/fp8_e4m3fnuz",
              "fp16/q8_0", "bf16/q8_0", "fp32/q8_0"],
    "dims": ["64", "80", "96", "128", "192", "256", "512", "192x128"],
    "group": [1, 2, 3, 4, 5, 7, 8, 16, 17, 128],
    "hkv": [1, 2, 3],
    "q_len": [1, 2, 4, 5, 16],
    "q_form": ["token", "uniform", "ragged"],
    "layout": ["nhd", "hnd", "token", "block_nhd", "block_hnd", "csr_nhd", "csr_hnd"],
    "page": [1, 2, 3, 16, 64, 128],
    "lens": list(LENGTHS),
    "window": ["-1:-1", "0:-1", "17:0", "100:3"],
    "softcap": [0, 2, 30],
    "alibi": ["none", "heads", "batch"],
    "sinks": [0, 1],
    "tree": [0, 1],
    "scales": ["none", "tensor", "head"],
    "index": ["i32", "i64"],
    "out": ["same", "fp32"],
    "lse": [0, 1],
    "strides": ["dense", "q_padded", "q_inner", "kv_sliced", "kv_broadcast", "kv_odd", "out_padded"],
    "splits": [-1, 0, 1, 3, 7],
}  # fmt: skip
# Read off the others where a value has no meaning: a layout without pages has page 0, and so on.
BLOCKS = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl")  # formats of 32 values
# Those that some targets read natively, and that others widen: at every head_dim, and in cases of their own.
CODE_TYPES = ("fp16/q4_0", "bf16/q4_0")
PAIR_TYPES = ("fp16/q8_0/q4_0", "bf16/q8_0/q4_0")
NIBBLE_TYPES = ("fp16/q4_0/q8_0", "bf16/q4_0/q8_0", "fp16/iq4_nl", "bf16/iq4_nl")
BLOCK_TYPES = ("fp16/iq4_nl/q8_0", "bf16/q4_0/iq4_nl")
HEADER_TYPES = ("fp16/q4_1", "bf16/q5_0", "fp16/q5_1", "bf16/q5_0/q4_1")
SIDE_TYPES = ("fp16/fp16/q8_0", "bf16/q5_1/bf16", "fp16/iq4_nl/fp16", "bf16/bf16/q4_0")
MOST_WORK = 3e8  # multiply-adds of one case, so that the fp64 oracle takes about a second


def quantised(kv):
    return kv not in ("fp16", "bf16", "fp32")


def formats(types):
    """Of "q/kv", or of "q/k/v" where K and V differ: the types of q, K and V."""
    q, k_format, *v_format = types.split("/")
    return q, k_format, *(v_format or [k_format])


def paged(layout):
    return layout.startswith(("block", "csr"))


def head_dims(dims):
    dk, _, dv = dims.partition("x")
    return int(dk), int(dv or dk)


def total(lens):
    return sum(int(part.partition("*")[0]) * int(part.partition("*")[2] or 1) for part in lens.split("|"))


def valid(case):
    _, k_format, v_format = formats(case["types"])
    dk, dv = head_dims(case["dims"])
    if (k_format in BLOCKS and dk % 32) or (v_format in BLOCKS and dv % 32):
        return False
    if (case["q_form"] == "token" and case["q_len"] != 1) or (case["tree"] and case["q_len"] == 1):
        return False
    if case["scales"] != "none" and not (quantised(k_format) or quantised(v_format)):
        return False
    if (case["page"] != 0) != paged(case["layout"]):
        return False
    if case["strides"] == "kv_broadcast" and case["hkv"] == 1:
        return False
    rows = case["group"] * case["hkv"] * case["q_len"]
    return rows * total(LENGTHS.get(case["lens"], case["lens"])) * (dk + dv) <= MOST_WORK


class Cover:
    """Greedy all-pairs: keeps the pairs still to be seen; a new case is the best of a few random ones."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.todo = set()
        for a, b in itertools.combinations(DIMENSIONS, 2):
            for x, y in itertools.product(DIMENSIONS[a], DIMENSIONS[b]):
                self.todo.add((a, x, b, y))

    def pick(self, values):
        return values[int(self.random.random() * len(values))]

    def complete(self, fixed, tries=200):
        """A valid case with these values, or None."""
        for _ in range(tries):
            case = {name: fixed.get(name, self.pick(values)) for name, values in DIMENSIONS.items()}
            if "page" not in fixed and not paged(case["layout"]):
                case["page"] = 0
            if "q_form" not in fixed and case["q_len"] > 1 and case["q_form"] == "token":
                case["q_form"] = "uniform"
            if "tree" not in fixed and case["q_len"] == 1:
                case["tree"] = 0
            if "scales" not in fixed and not any(map(quantised, formats(case["types"])[1:])):
                case["scales"] = "none"
            if valid(case):
                return case
        return None

    def pairs(self, case):
        return {(a, case[a], b, case[b]) for a, b in itertools.combinations(DIMENSIONS, 2)}

    def best(self, fixed, candidates=40):
        options = [case for case in (self.complete(fixed) for _ in range(candidates)) if case]
        if not options:
            return None
        case = max(options, key=lambda c: len(self.pairs(c) & self.todo))
        self.todo -= self.pairs(case)
        return case

    def all_pairs(self):
        for pair in sorted(self.todo, key=str):
            if pair not in self.todo:
                continue
            case = self.best({pair[0]: pair[1], pair[2]: pair[3]})
            if case is None:
                self.todo.discard(pair)  # no valid case has both
            else:
                yield case


def row(prefix, number, tier, case):
    q, k_format, v_format = formats(case["types"])
    dk, dv = head_dims(case["dims"])
    kv = k_format if k_format == v_format else f"{k_format}_{v_format}"
    place = case["layout"] + (f"_p{case['page']}" if case["page"] else "")
    name = f"{prefix}{number:03d}_{q}_{kv}_d{case['dims']}_g{case['group']}_q{case['q_len']}_{place}"
    values = dict(
        case,
        name=name,
        tier=tier,
        q=q,
        k_format=k_format,
        v_format=v_format,
        dk=dk,
        dv=dv,
        hq=case["group"] * case["hkv"],
    )
    values["lens"] = LENGTHS.get(case["lens"], case["lens"])
    return {column: values[column] for column in COLUMNS}


def instances():
    """All rows but those with factors and of any (mixed_test.cpp), of code_changes() and of block_changes()."""
    text = (ROOT / "cmake" / "decode_instances.txt").read_text()
    for line in text.splitlines():
        fields = line.partition("#")[0].split()
        if fields and fields[1] not in ("any", "int8", "int4", "bytes", "q4_0", "iq4_nl"):
            yield fields


def emulator_rows():
    cover = Cover(seed=2)
    seen, number = set(), 0
    narrower = {128: ["80", "96", "128"], 256: ["192", "256"]}
    short = {(*pair, dk, dv) for _math, *pair, dk, dv, rows, _ in instances() if rows == "8"}
    for _math, k_format, v_format, dk, dv, rows, _ in instances():
        if (k_format, v_format, dk, dv, rows) in seen:  # the CPU computes in fp32 what GPUs have as a row already
            continue
        seen.add((k_format, v_format, dk, dv, rows))
        dims = [f"{dk}x{dv}"] if dk != dv else [dk] if rows == "8" else narrower.get(int(dk), [dk])
        # As many packed rows as make this the tile that is chosen.
        group, q_len = {"64": (16, 2), "128": (43, 2)}.get(rows, (4, 1))
        if rows == "16" and number % 3 == 1:
            group, q_len = (3, 4)
        elif rows == "16" and (k_format, v_format, dk, dv) in short:
            group, q_len = (16, 1)
        if k_format == "blocks":  # of formats that have no kernel of their own as a pair
            k_format = "iq4_nl"
        if v_format == "blocks":
            v_format = "q8_0"
        native = next((each for each in (k_format, v_format) if not quantised(each)), None)
        q = native or ("bf16" if number % 4 == 3 else "fp16")
        kv = k_format if k_format == v_format else f"{k_format}/{v_format}"
        fixed = {"types": f"{q}/{kv}", "group": group, "q_len": q_len, "hkv": 1 if number % 5 else 2,
                 "lens": EMULATOR_LENGTHS[number % 3], "splits": -1 if number % 4 else 3}  # fmt: skip
        for dim in dims:
            if "q8_0" in (k_format, v_format) and int(head_dims(dim)[0]) % 32:
                continue
            case = cover.best(dict(fixed, dims=dim, page=cover.pick([1, 2, 3, 16, 64, 128])) if number % 3
                              else dict(fixed, dims=dim))  # fmt: skip
            if case is None:
                case = cover.best(dict(fixed, dims=dim))
            yield row("e", number, "emulator", case)
            number += 1
    # Neighbouring heads that a block's teams copy together (sm90a).
    # The last is enough leaves for two stretches on two multiprocessors, of which one cuts a sequence.
    many_heads = {"types": "bf16/q8_0", "hkv": 4, "lens": "200|130|65|33"}
    changes = [
        {"hkv": 8, "window": "17:0"},
        {"layout": "nhd", "page": 0},
        {"types": "fp16/q8_0"},
        {"lens": "200|200|200|200|130"},
    ]
    for change in changes:
        yield row("e", number, "emulator", dict(PLAIN, **many_heads | change))
        number += 1
    # More rows than a block has threads, and chunks of several groups.
    yield row("e", number, "emulator", dict(PLAIN, group=16, hkv=1, lens="1100"))
    yield row("e", number + 1, "emulator", dict(PLAIN, types="bf16/fp8_e4m3", dims="64", group=16, hkv=1, lens="1100"))
    number += 2
    for change in [*path_changes(), *code_changes(), *pair_changes(), *block_changes()]:
        yield row("e", number, "emulator", dict(PLAIN, **change))
        number += 1


def path_changes():
    """Paths of the schedule and the tree that only a long, a large or a wide call takes, each as small as may be."""
    # Parents of two and of three levels, which one block has alone, or several: as many heads as a multiprocessor has
    # blocks, since those walk through the keys side by side.
    yield {"lens": "2200|1100", "hkv": 1}
    yield {"lens": "17000|1100", "group": 1, "hkv": 4}
    # More requests than a wave of 64 has lanes: three a lane, with lanes left over, and two.
    yield {"lens": "65*3|1*40|130|0*2|2*61|67*5|3*56", "hkv": 1, "layout": "csr_nhd", "index": "i64"}
    yield {"lens": "1*33|70|0|64*2|3*38|129*3", "hkv": 1, "layout": "csr_hnd", "page": 3, "index": "i64",
           "q_len": 4, "q_form": "ragged"}  # fmt: skip
    # Rows of several tiles, the last one not full: windows and slopes follow the token and the head.
    yield {"lens": "200|40", "group": 9, "hkv": 1, "q_len": 16, "q_form": "uniform", "window": "50:3", "alibi": "batch"}
    yield {"lens": "130|70|33", "group": 6, "hkv": 1, "q_len": 16, "q_form": "ragged", "tree": 1}
    # The same of 129 rows, by splits: the second tile has one row.
    yield {"lens": "200|65|1", "group": 43, "hkv": 1, "q_len": 3, "q_form": "ragged", "splits": 3}
    # Scales at another pitch in K than in V, in every chunk.
    yield {"types": "fp16/q8_0", "dims": "192x128", "lens": "200|65|1", "hkv": 1, "splits": 3}


def code_changes():
    """Tiles of q4_0: heads that are copied together and that are not, in units of 16, 8 and 2 bytes. Many rows."""
    fp16, bf16 = CODE_TYPES
    yield {"types": bf16, "hkv": 4, "lens": "200|130|65|33"}
    yield {"types": fp16, "hkv": 8, "lens": "300|64|1", "layout": "nhd", "page": 0}
    yield {"types": fp16, "hkv": 4, "lens": "200|200|200|200|130", "window": "17:0", "softcap": 30}
    yield {"types": bf16, "hkv": 3, "lens": "0|1|129|300", "index": "i64"}
    yield {"types": fp16, "hkv": 2, "lens": "63|128|70", "dims": "96", "layout": "hnd", "page": 0, "splits": 3}
    yield {"types": fp16, "hkv": 1, "lens": "129|64|1", "group": 16, "alibi": "heads"}
    yield {"types": bf16, "hkv": 2, "lens": "200|67|3", "q_len": 4, "q_form": "ragged", "strides": "kv_odd"}
    yield {"types": bf16, "hkv": 1, "lens": "200|65|1", "group": 16, "q_len": 2, "q_form": "uniform"}
    yield {"types": fp16, "hkv": 1, "lens": "130|3", "dims": "256", "group": 16, "q_len": 2, "q_form": "ragged"}
    *_, nibbles = NIBBLE_TYPES
    yield {"types": nibbles, "hkv": 1, "lens": "130|3", "group": 16, "q_len": 2, "q_form": "ragged", "window": "17:0"}
    yield {"types": nibbles, "hkv": 2, "lens": "130|67", "dims": "256"}
    for dims in ("64", "192x128", "256", "512"):  # the CPU has kernels of all
        yield {"types": fp16, "hkv": 2, "lens": "130|3", "dims": dims}


def team_changes(fp16, bf16, tokens_in_order):
    """Heads that are copied together, and heads that are not: `tokens_in_order` changes a call without pages."""
    yield {"types": bf16, "hkv": 4, "lens": "200|130|65|33"}
    yield {"types": fp16, "layout": "nhd", "page": 0, **tokens_in_order}
    yield {"types": bf16, "hkv": 3, "lens": "0|1|129|300", "index": "i64", "window": "17:0"}
    yield {"types": fp16, "hkv": 2, "lens": "129|64|1", "group": 16, "alibi": "heads"}
    yield {"types": fp16, "hkv": 2, "lens": "200|67|3", "q_len": 4, "q_form": "ragged", "strides": "kv_odd"}
    yield {"types": bf16, "hkv": 2, "lens": "63|128|70", "dims": "96", "layout": "hnd", "page": 0, "splits": 3}


def pair_changes():
    """Tiles of keys of q8_0 and of values of q4_0, whose rows lie at another pitch."""
    yield from team_changes(*PAIR_TYPES, {"hkv": 4, "lens": "200|200|200|200|130", "lse": 0})


def block_changes():
    """Keys of q4_0 with values of q8_0, iq4_nl, pairs of it with others, long blocks, and blocks beside 16 bits."""
    others = (*HEADER_TYPES, *SIDE_TYPES)
    for types in (NIBBLE_TYPES[:2], NIBBLE_TYPES[2:], BLOCK_TYPES, others[:2], others[2:4], others[4:6], others[6:]):
        yield from team_changes(*types, {"hkv": 8, "lens": "300|64|1", "softcap": 30})


PLAIN = {"types": "bf16/bf16", "dims": "128", "q_len": 1, "q_form": "token", "layout": "block_nhd", "page": 16,
         "window": "-1:-1", "softcap": 0, "alibi": "none", "sinks": 0, "tree": 0, "scales": "none", "index": "i32",
         "out": "same", "lse": 1, "strides": "dense", "splits": -1, "group": 4, "hkv": 8}  # fmt: skip


def core_rows():
    """Every pair of types at every head_dim, with no option in the way."""
    number = 0
    all_types = (*DIMENSIONS["types"], *CODE_TYPES, *PAIR_TYPES, *NIBBLE_TYPES, *BLOCK_TYPES,
                 *HEADER_TYPES, *SIDE_TYPES)  # fmt: skip
    for types, dims in itertools.product(all_types, DIMENSIONS["dims"]):
        change = {"types": types, "dims": dims, "hkv": 2, "lens": "0|1|63|64|65|1023|1024|1025"}
        if valid(dict(PLAIN, **change)):
            yield row("c", number, "full", dict(PLAIN, **change))
            number += 1


def bench_rows():
    changes = [
        {"lens": "8192*64"},
        {"lens": "131072"},
        {"lens": "8192*8", "group": 1, "hkv": 32},
        {"lens": "2048*256", "group": 8},
        {"lens": "1024*128"},
        {"lens": "4096*16", "dims": "64"},
        {"lens": "4096*32", "dims": "256", "group": 16, "hkv": 1},
        {"lens": "1024"},
        {"lens": "131072|200*63"},
        {"lens": "8192*64", "layout": "token", "page": 0},
        {"lens": "8192*64", "types": "bf16/fp8_e4m3"},
        {"lens": "8192*64", "types": "bf16/q8_0"},
        {"lens": "8192*4", "layout": "nhd", "page": 0},
        {"lens": "8192*4", "layout": "nhd", "page": 0, "types": "fp32/fp32"},
    ]
    for number, change in enumerate(changes):
        yield row("b", number, "bench", dict(PLAIN, lse=0, **change))


def text():
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(emulator_rows())
    writer.writerows(core_rows())
    writer.writerows(row("f", i, "full", case) for i, case in enumerate(Cover(seed=3).all_pairs()))
    writer.writerows(bench_rows())
    return out.getvalue()


def main():
    wanted = text()
    if "--check" in sys.argv:
        if OUT.read_text() != wanted:
            sys.exit(f"{OUT.name} is not what {pathlib.Path(__file__).name} writes: run it and commit the result")
        return
    OUT.write_text(wanted)
    print(f"{OUT}: {wanted.count(chr(10)) - 1} cases")


if __name__ == "__main__":
    main()
