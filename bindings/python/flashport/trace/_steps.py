"""Steps of a trace: which tensors belong together, what each is to the attention, and its values in our order of axes.

A step is one output with the sources of its attention. llama.cpp's tools write the output first, then the sources in
the order of the operation; our own files say in their metadata what each tensor is. Several tensors in a row whose
names differ by links alone ("cache_k_l0 (view)", "cache_k_l0 (view) (permuted)") are one source, the last link the
operand.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from flashport.ggml._layout import Strides
from flashport.trace import _decide, _layout
from flashport.trace._container import Container, Entry
from flashport.trace._errors import TraceError

Role = Literal[
    "out", "q", "k", "v", "mask", "k_quant", "v_quant", "mask_quant", "k_first", "v_first", "sinks", "kept"
]  # fmt: skip
Values = np.ndarray[Any, Any]

_STANDARD: list[Role] = ["q", "k", "v", "mask"]
_SOURCES: dict[int, list[Role]] = {
    0: [],
    3: _STANDARD[:3],
    4: _STANDARD,
    5: [*_STANDARD[:3], "k_quant", "v_quant"],
    6: [*_STANDARD, "k_quant", "v_quant"],
    7: [*_STANDARD, "k_quant", "v_quant", "mask_quant"],
}


@dataclass
class Tensor:
    """A tensor of a step: what it is, how it lies, and its values.

    ``ne`` and ``nb`` are ggml's extents and byte strides, fastest first; ``nb`` is None where the file does not tell it
    and nothing has been read yet that decides it.
    """

    role: Role
    name: str
    entry: Entry = field(repr=False)
    candidates: list[Strides] = field(repr=False)
    is_operand: bool = True  # False for an earlier link of an operand's chain

    @property
    def type(self) -> str:
        """ggml's name of the element type: "F16", "Q4_0"."""
        return str(self.entry.type.name)

    @property
    def is_quantised(self) -> bool:
        """Whether elements come in blocks that share a scale."""
        return self.entry.block_values > 1

    @property
    def ne(self) -> tuple[int, int, int, int]:
        """Extents, fastest first."""
        return self.entry.ne

    @property
    def nb(self) -> Strides | None:
        """Byte strides, fastest first."""
        return self.candidates[0] if len(self.candidates) == 1 else None

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents in NumPy's order, slowest first."""
        return self.ne[::-1]

    @property
    def chain(self) -> str:
        """The operations that led to the tensor, such as "VIEW > PERMUTE > CPY"."""
        return _layout.parse_name(self.name).chain

    def values(self, nb: Strides | None = None) -> Values:
        """The elements in ``shape``, fp32 where NumPy does not have their type; with strides if these are undecided."""
        return _layout.values(self.entry, nb or self.candidates[0])

    def rows(self) -> Values:
        """The bytes as they are stored, those of a row along the last axis; the other axes as in ``shape``."""
        return _layout.rows(self.entry, self.candidates[0])


@dataclass
class Step:
    """One call of attention. Operands have the axes (batch, tokens, heads, head dim), as those of flashport's calls.

    ``scale`` is None where the file does not have it: then it is 1 / sqrt(head dim). ``notes`` says what had to be
    found out by trying.
    """

    path: str = field(repr=False)
    number: int
    layer: int
    tensors: list[Tensor]
    operation: str = ""
    scale: float | None = None
    softcap: float = 0.0
    max_bias: float = 0.0
    dropout_p: float = 0.0
    is_own: bool = False
    options: str = ""
    library: Literal["numpy", "torch"] = "numpy"
    notes: list[str] = field(default_factory=list)
    mask_is_hot_first: bool = False
    _is_decided: bool = field(default=False, repr=False)

    @property
    def kind(self) -> Literal["standard", "mixed", "output"]:
        """Up to four inputs are "standard", those with quantised keys "mixed", an output alone is "output"."""
        if self.find("q") is None:
            return "output"
        return "mixed" if self.find("k_quant") else "standard"

    @property
    def q(self) -> Any:
        """(batch, tokens, heads, head dim)."""
        return self._given("q")

    @property
    def k(self) -> Any:
        """(batch, keys, key-value heads, head dim); in a mixed step those of the hot part."""
        return self._given("k")

    @property
    def v(self) -> Any:
        """As ``k``."""
        return self._given("v")

    @property
    def k_quant(self) -> Any:
        """As ``k``, the older keys of a mixed step, dequantised; else None."""
        return self._given("k_quant")

    @property
    def v_quant(self) -> Any:
        """As ``k_quant``."""
        return self._given("v_quant")

    @property
    def k_first(self) -> Any:
        """As ``k``, the keys of a sequence's first tokens, before ``k_quant``; None where no part is before it."""
        return self._given("k_first")

    @property
    def v_first(self) -> Any:
        """As ``k_first``."""
        return self._given("v_first")

    @property
    def parts(self) -> list[tuple[Role, Role]]:
        """The roles of keys and values that there are, in the order of the sequence."""
        order: list[tuple[Role, Role]] = [("k_first", "v_first"), ("k_quant", "v_quant"), ("k", "v")]
        return [part for part in order if self.find(part[0])]

    @property
    def mask(self) -> Any:
        """(batch or 1, heads or 1, tokens, keys) fp32, in the order of the sequence, added to scores; None without."""
        return self._as_asked(_decide.mask(self))

    @property
    def sinks(self) -> Any:
        """(heads) fp32, or None."""
        tensor = self.find("sinks")
        return None if tensor is None else self._as_asked(tensor.values().reshape(-1))

    @property
    def kept(self) -> Any:
        """(batch, heads, tokens, keys) int8, 1 where the dropout of the call kept a weight, else 0; None without."""
        tensor = self.find("kept")
        return None if tensor is None else self._as_asked(tensor.values())

    @property
    def out(self) -> Any:
        """(batch, tokens, heads, head dim of values) fp32."""
        return self._as_asked(_decide.output(self))

    def find(self, role: Role) -> Tensor | None:
        """The operand of a role, or None."""
        return next((tensor for tensor in self.tensors if tensor.role == role and tensor.is_operand), None)

    def need(self, role: Role) -> Tensor:
        """The operand of a role, or TraceError."""
        tensor = self.find(role)
        if tensor is None:
            raise TraceError(f"{self.path}: step {self.number} has no {role}; its tensors are {self._names()}")
        return tensor

    def array(self, role: Role) -> Values | None:
        """An operand as a NumPy array, decided layout and all; None where the step has none."""
        tensor = self.find(role)
        if tensor is None:
            return None
        self.decide()
        values: Values = tensor.values().transpose(0, 2, 1, 3)
        return values

    def decide(self) -> None:
        """Finds the layout of every operand, or raises TraceError."""
        if not self._is_decided:
            _decide.decide(self)
            self._is_decided = True

    def _given(self, role: Role) -> Any:
        return self._as_asked(self.array(role))

    def _as_asked(self, array: Values | None) -> Any:
        if array is None or self.library == "numpy":
            return array
        import torch

        return torch.from_numpy(np.array(array))

    def _names(self) -> str:
        return ", ".join(repr(tensor.name) for tensor in self.tensors)


def steps(container: Container) -> list[Step]:
    """The steps of a file of either kind."""
    if "flashport.trace.version" in container.metadata:
        from flashport.trace import _own

        return _own.steps(container)
    return _steps_of_others(container)


def _steps_of_others(container: Container) -> list[Step]:
    path, groups = container.path, list[list[Entry]]()
    for entry in container.entries:
        name = _layout.parse_name(entry.name)
        if name.is_output:
            groups.append([entry])
        elif not groups:
            raise TraceError(f"{path}: tensor {entry.name!r} comes before any kqv_out, so that no step has it")
        else:
            groups[-1].append(entry)
    if not groups:
        raise TraceError(f"{path}: no trace of attention: none of its tensors is named kqv_out")
    check_counts(container, len(groups))
    return [_step(path, place + 1, group) for place, group in enumerate(groups)]


def check_counts(container: Container, found: int) -> None:
    """Raises TraceError where the metadata says another number of tensors or steps than there are."""
    for key, count in (("tensor_count", len(container.entries)), ("total_steps", found)):
        said = container.metadata.get(f"kqv_trace.{key}", count)
        if type(said) is not int or said != count:
            raise TraceError(f"{container.path}: kqv_trace.{key} is {said!r}, and the file has {count}")


def _step(path: str, place: int, group: list[Entry]) -> Step:
    parsed = [_layout.parse_name(entry.name) for entry in group]
    number = parsed[0].step or place
    for entry, name in zip(group[1:], parsed[1:], strict=True):
        was_shortened = len(entry.name.encode()) >= _layout.LONGEST_NAME
        if name.step is not None and name.step != number and not was_shortened:
            raise TraceError(f"{path}: tensor {entry.name!r} stands among those of step {number}")
    chains: list[list[int]] = []
    for i in range(1, len(group)):
        before = parsed[chains[-1][-1]] if chains else None
        longer = before is not None and before.base == parsed[i].base and len(before.links) < len(parsed[i].links)
        if longer and before is not None and parsed[i].links[: len(before.links)] == before.links:
            chains[-1].append(i)
        else:
            chains.append([i])
    sources = [name.source for name in parsed if name.source is not None]
    if sources != sorted(sources):
        raise TraceError(f"{path}: the sources of step {number} are not in order: {sources}")
    roles = _roles(path, number, [group[chain[-1]] for chain in chains])
    layers = [name.layer for name in parsed if name.layer is not None]
    step = Step(path, number, layers[0] if layers else -1, [])
    step.tensors.append(Tensor("out", group[0].name, group[0], [_layout.dense_strides(group[0])]))
    for role, chain in zip(roles, chains, strict=True):
        for i in chain:
            dense = role in ("mask", "mask_quant", "sinks")
            candidates = [_layout.dense_strides(group[i])] if dense else _layout.told_strides(group[i], parsed[i])
            step.tensors.append(Tensor(role, group[i].name, group[i], candidates, i == chain[-1]))
    _put_heads_last(step)
    return step


def _put_heads_last(step: Step) -> None:
    """Keys and values that a file has as the cache does, [D, heads, n_kv], get the attention's [D, n_kv, heads]."""
    heads = step.need("q").ne[2] if step.find("q") else 0
    for tensor in step.tensors:
        if tensor.role not in ("k", "v", "k_quant", "v_quant") or not tensor.is_operand:
            continue
        d, first, second, batch = tensor.ne
        if first == 0 or second == 0 or heads % second == 0 or heads % first:
            continue
        tensor.entry = replace(tensor.entry, ne=(d, second, first, batch))
        tensor.candidates = [(nb[0], nb[2], nb[1], nb[3]) for nb in tensor.candidates]
        step.notes.append(f"{tensor.role} {tensor.name!r} has its heads before its tokens: {[d, first, second, batch]}")


def _roles(path: str, number: int, sources: list[Entry]) -> list[Role]:
    """What the sources of a step are, which follows from their number, and where that leaves two ways from shapes."""
    roles = _SOURCES.get(len(sources))
    if roles is None:
        raise TraceError(f"{path}: step {number} has {len(sources)} sources of its attention, expected 3 to 7")
    if len(sources) == 5 and sources[4].ne == (sources[0].ne[2], 1, 1, 1) and sources[4].type.name == "F32":
        return [*_STANDARD, "sinks"]
    return roles
