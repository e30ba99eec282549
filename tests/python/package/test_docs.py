"""Python examples of the README and the docs run as they stand, and figures are those of the results."""

from __future__ import annotations

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


def test_readme_has_the_table_of_the_results():
    assert (ROOT / "benchmarks/results/nvidia-h200.md").read_text() in (ROOT / "README.md").read_text()


def test_readme_says_that_mla_is_not_there():
    assert "Not there yet: MLA as DeepSeek's decode has it (head dims 576/512" in (ROOT / "README.md").read_text()
    assert not flashport.supports(head_dim=576, head_dim_v=512, target="cpu")
