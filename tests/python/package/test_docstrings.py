"""Docstrings of public functions have the same parts in the same order, and name what the signature has."""

from __future__ import annotations

import importlib.util
import inspect
import re

import pytest

import flashport
from flashport import fla, flashinfer, ggml, lightllm, sglang, trace, transformers, vllm

ORDER = ["Args", "Returns", "Raises", "Source"]
MODULES = [flashport, fla, flashinfer, ggml, lightllm, sglang, trace, transformers, vllm]
if importlib.util.find_spec("torch"):  # which these import
    FLASH_ATTN = ["flash_attn_interface", "flash_attn_2_cuda", "bert_padding", "layers.rotary"]
    MODULES += [importlib.import_module(f"flashport.flash_attn.{name}") for name in FLASH_ATTN]
    MODULES.append(importlib.import_module("flashport.flash_attn_3"))
PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in MODULES
    for name in module.__all__
    if inspect.isfunction(getattr(module, name))
}
HEADING = re.compile(r"^([A-Z]\w+):$", re.MULTILINE)
ENTRY = re.compile(r"^ {4}(\w+(?:,\s+\w+)*):", re.MULTILINE)  # one name, or several that share a text


def parts(function):
    """The docstring's parts by their headings, and the headings as they come."""
    _, *rest = HEADING.split(inspect.getdoc(function).replace("Yields:", "Returns:"))
    return dict(zip(rest[::2], rest[1::2], strict=True)), rest[::2]


@pytest.mark.parametrize("name", PUBLIC)
def test_parts_come_in_one_order(name):
    found, headings = parts(PUBLIC[name])
    assert headings == [heading for heading in ORDER if heading in found]
    for heading, text in found.items():
        assert text.strip(), heading
        assert all(line.startswith("    ") for line in text.splitlines() if line), f"{heading} ends in other text"


@pytest.mark.parametrize("name", PUBLIC)
def test_no_part_is_missing(name):
    found, _ = parts(PUBLIC[name])
    signature = inspect.signature(PUBLIC[name])
    assert "Source" in found
    assert ("Args" in found) == bool(signature.parameters)
    assert ("Raises" in found) == bool(signature.parameters)
    assert ("Returns" in found) == (signature.return_annotation not in ("None", "NoReturn"))


@pytest.mark.parametrize("name", PUBLIC)
def test_arguments_are_those_of_the_signature(name):
    found, _ = parts(PUBLIC[name])
    named = [argument for entry in ENTRY.findall(found.get("Args", "")) for argument in re.split(r",\s+", entry)]
    assert named == list(inspect.signature(PUBLIC[name]).parameters)
