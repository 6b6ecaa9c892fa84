# SPDX-License-Identifier: Apache-2.0
"""README and docs speak of this code: their paths, names, links and commands exist."""

import ast
import re
import shlex
from pathlib import Path

import pytest

import torchax_dflash
from torchax_dflash import cli

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
PACKAGE = ROOT / "torchax_dflash"

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def code_lines(text: str) -> list[str]:
    """Lines of code blocks, continued ones joined, comments cut off."""
    joined = re.sub(r"\\\n\s*", "", text)
    lines = (line for line in joined.splitlines() if line.startswith("    "))
    return [line.strip().split("  #")[0] for line in lines]


def in_code(text: str, pattern: str) -> list[str]:
    """Spans `like this` that match as a whole."""
    return [
        span for span in re.findall(r"`([^`\n]+)`", text) if re.fullmatch(pattern, span)
    ]


def locate(path: str) -> Path | None:
    """A path of the repository, or of the package, as the docs shorten it."""
    found = (base / path for base in (ROOT, PACKAGE))
    return next((path for path in found if path.exists()), None)


def is_ours(path: str) -> bool:
    """Whether a path with a slash begins with a folder of this repository."""
    return locate(path.split("/")[0]) is not None


def anchors(page: Path) -> set[str]:
    """Of its headings, as MkDocs and GitHub make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"\s+", "-", heading) for heading in words}


@every_page
def test_paths_exist(page):
    text = page.read_text()
    for path in in_code(text, r"[\w.-]+(/[\w.-]+)+/?"):
        if is_ours(path) and not path.startswith("runs/"):
            assert locate(path), path


@every_page
def test_names_are_in_the_files_that_are_given(page):
    for name, path in re.findall(r"`(\w+)`(?: in|,) `([\w/]+\.py)`", page.read_text()):
        file = locate(path)
        assert file, path
        assert name in defined_in(file), f"{name} in {path}"


def defined_in(file: Path) -> set[str]:
    """Functions, classes and assigned names of a module, methods included."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


@every_page
def test_links_lead_somewhere(page):
    text = page.read_text()
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(
        r"^\[.+\]: (\S+)$", text, re.M
    )
    for link in links:
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@every_page
def test_make_targets_exist(page):
    text = page.read_text()
    makefile = (ROOT / "Makefile").read_text()
    used = in_code(text, r"make [\w-]+") + [
        line for line in code_lines(text) if re.match(r"make [\w-]+", line)
    ]
    for command in used:
        target = command.split()[1]
        assert re.search(rf"^{target}:", makefile, re.M), command


@every_page
def test_commands_have_the_options_that_are_given(page, capsys):
    text = page.read_text()
    commands = in_code(text, r"torchax-dflash .+") + [
        line for line in code_lines(text) if line.startswith("torchax-dflash ")
    ]
    for command in commands:
        words = shlex.split(command.replace("…", ""))[1:]
        path = [word for word in words[: 1 + (words[0] == "train")] if word.isalpha()]
        known = help_of(path, capsys)
        for option in (word for word in words if word.startswith("--")):
            assert re.search(rf"{option}\b", known), command


def help_of(path: list[str], capsys) -> str:
    with pytest.raises(SystemExit) as exit_:
        cli.main([*path, "--help"])
    assert exit_.value.code == 0, path
    return capsys.readouterr().out


@every_page
def test_python_is_python(page):
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module == "torchax_dflash":
                for alias in node.names:
                    assert hasattr(torchax_dflash, alias.name)


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


def test_public_names_are_in_the_api_page():
    listed = re.findall(
        r"^::: torchax_dflash\.(\w+)$", (ROOT / "docs/api.md").read_text(), re.M
    )
    assert sorted(listed) == sorted(torchax_dflash.__all__)
