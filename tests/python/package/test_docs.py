"""Python examples of the README and the docs run as they stand, and figures are those of the results."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import flashport

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
EXAMPLES = [
    pytest.param(code, id=f"{page.name}-{number}")
    for page in PAGES
    if page.exists()
    for number, code in enumerate(BLOCK.findall(page.read_text()))
]


@pytest.mark.parametrize("code", EXAMPLES)
@pytest.mark.filterwarnings("ignore")
def test_example(code):
    if "import torch" in code:
        torch = pytest.importorskip("torch")
        if '"cuda"' in code and not torch.cuda.is_available():
            pytest.skip("needs a GPU")
    exec(compile(code, "example", "exec"), {"__name__": "example"})


def test_the_performance_page_has_the_table_of_the_results():
    table = (ROOT / "benchmarks/results/nvidia-h200.md").read_text()
    page = (ROOT / "docs/performance.md").read_text()
    assert table in page
    verdicts = re.findall(r"\(at (?:most|least) [^)]*\)", table)
    missed = sum("missed" in verdict for verdict in verdicts)
    for text in (page, (ROOT / "README.md").read_text()):
        assert f"{missed} of the {len(verdicts)}" in " ".join(text.split())


def test_ahead_and_behind_are_ratios_of_the_results():
    rows = json.loads((ROOT / "benchmarks/results/nvidia-h200.json").read_text())["rows"]

    def span(kind, peers):
        """The least and the largest of our times over those peers' in rows whose title has all of the words."""
        ratios = [
            row["seconds"] / seconds
            for row in rows
            if all(word in row["title"] for word in kind)
            for peer, seconds in row["peers"].items()
            if peer in peers
        ]
        return f"{min(ratios):.2f} to {max(ratios):.2f}"

    readme, page = (" ".join((ROOT / name).read_text().split()) for name in ("README.md", "docs/performance.md"))
    prompts = f"{span(['prefill'], ['SGLang', 'FLA'])} of the time of SGLang's and flash-linear-attention's kernels"
    decoding = span(["decode", "states fp32"], ["SGLang", "SGLang packed"])
    for text in (readme, page):
        assert prompts in text
        assert decoding in text
    assert f"V first ({span(['decode', 'states fp32'], ['FLA V first'])})" in page
    large = [row for row in rows if row["bytes"] > 1.3e8 and " 256, " not in row["title"]]
    ratios = [row["seconds"] / row["peers"]["SDPA cuDNN"] for row in large if "SDPA cuDNN" in row["peers"]]
    for text in (readme, page):
        assert f"{min(ratios):.2f} to {max(ratios):.2f}" in text


def test_readme_says_that_mla_is_not_there():
    assert "Not there yet: MLA as DeepSeek's decode has it (head dims 576/512" in (ROOT / "README.md").read_text()
    assert not flashport.supports("decode", head_dim=576, head_dim_v=512, target="cpu")


# Names that one vendor alone has, by its folder; all others of the tables of verbs are in each vendor's folder.
OF_VENDOR = {"DeltaTiles": {"cpu", "hip"}, "CarryTiles": {"cuda"}, "OutputTiles": {"cuda"}}


def test_each_vendor_has_the_names_that_porting_a_target_tables():
    page = (ROOT / "docs/porting-a-target.md").read_text()
    cells = re.findall(r"^\| (`[^|]*) \|", page, re.MULTILINE)
    names = {name for cell in cells for code in re.findall(r"`([^`]+)`", cell) for name in re.findall(r"^\w+", code)}
    assert len(names) > 50
    assert names >= set(OF_VENDOR)
    for vendor in ("cpu", "cuda", "hip"):
        text = "\n".join(path.read_text() for path in sorted((ROOT / vendor).rglob("*.h")))
        words = set(re.findall(r"\w+", text))
        expected = {name for name in names if vendor in OF_VENDOR.get(name, {vendor})}
        assert expected <= words, (vendor, sorted(expected - words))
        assert not {name for name in OF_VENDOR if vendor not in OF_VENDOR[name]} & words


def test_the_glossary_has_each_word_once_in_order():
    words = []
    for section in (ROOT / "docs/glossary.md").read_text().split("\n## ")[1:]:
        own = re.findall(r"^\| ([^|]+) \| [^|]+\. \|$", section, re.MULTILINE)
        assert own == sorted(own, key=str.lower)
        assert len(own) + 2 == len(re.findall(r"^\|", section, re.MULTILINE)), "a meaning ends with a full stop"
        words += own
    assert len(words) == len(set(words)) > 50
