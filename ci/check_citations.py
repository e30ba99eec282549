#!/usr/bin/env python3
"""Checks that what docs, docstrings and comments cite is there.

Three rules, over every tracked or new file of text:
1. A path that begins with a folder of the repository's root, or with <vendor>, is that of a file or a folder. A word in
   angle brackets, and a star, stand for any name. Lines that include a header are the compiler's business.
2. A page (*.md) that names a source file alone, in backticks, names one of the tree.
3. A relative link of a page leads to a file or a folder, and its #anchor to a heading of that page.

usage: ci/check_citations.py     (prints file:line of each breach; exit status 1 when there is one)
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
PROSE = {".md", ".py", ".pyi", ".h", ".cpp", ".c", ".cu", ".hip", ".cmake", ".in", ".sh", ".toml", ".yaml", ".txt", ""}

INCLUDE = re.compile(r"\s*#\s*include\b")
FILE_NAME = re.compile(r"`([\w-]+\.(?:h|cpp|c|cu|hip|py|pyi|cmake|in|txt|csv|json|md))`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)


def tracked() -> list[str]:
    """Files that git tracks or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return sorted({name for name in listed if name and (ROOT / name).is_file()})


def anchors(page: Path) -> set[str]:
    """What a page's headings are called in links."""
    titles = (re.sub(r"[^\w\- ]", "", title.lower()) for title in HEADING.findall(page.read_text()))
    return {title.strip().replace(" ", "-") for title in titles}


class Tree:
    """The names that may be cited."""

    def __init__(self, files: list[str]) -> None:
        """From the paths of all files."""
        folders = {parent.as_posix() for name in files for parent in PurePosixPath(name).parents}
        self.paths = {*files, *folders}
        self.file_names = {PurePosixPath(name).name for name in files}
        roots = [name for name in folders if "/" not in name and not name.startswith(".")]
        self.citation = re.compile(rf"(?<![\w./<>\"'$}}-])(?:{'|'.join(roots)}|<vendor>)/[\w.*<>/-]*")

    def has(self, cited: str) -> bool:
        """Whether a path, perhaps with wildcards, is there."""
        cited = cited.rstrip("/.")
        if cited in self.paths:
            return True
        pattern = re.sub(r"<\w+>|\*", "[^/]+", cited.replace(".", r"\."))
        return pattern != cited and any(re.fullmatch(pattern, path) for path in self.paths)


def breaches(name: str, tree: Tree) -> list[str]:
    """Each breach in a file, as file:line: text."""
    page = name.endswith(".md")
    found = []
    for number, line in enumerate((ROOT / name).read_text().splitlines(), 1):
        where = f"{name}:{number}"
        if not INCLUDE.match(line):
            found += [f"{where}: no such path: {path}" for path in tree.citation.findall(line) if not tree.has(path)]
        if not page:
            continue
        found += [f"{where}: no such file: {file}" for file in FILE_NAME.findall(line) if file not in tree.file_names]
        for link in LINK.findall(line):
            if "://" in link:
                continue
            target, _, anchor = link.partition("#")
            path = (ROOT / name).parent / target if target else ROOT / name
            if not path.exists() or (anchor and anchor not in anchors(path)):
                found.append(f"{where}: link leads nowhere: {link}")
    return found


def main() -> int:
    """Command line."""
    files = tracked()
    tree = Tree(files)
    texts = [name for name in files if PurePosixPath(name).suffix in PROSE and name != "LICENSE"]
    found = [text for name in texts for text in breaches(name, tree)]
    print(*found, sep="\n", end="\n" if found else "")
    print(f"citations: {len(texts)} files, {len(found)} breaches")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
