"""The README and the pages of docs/ read well on GitHub and where Sphinx has built them.

GitHub shows a Sphinx directive or role as it stands, and has its own rule for anchors. `.ci/run`
builds the pages with warnings as errors, and looks for what a reader without a network would miss.
"""

import ast
import re
import string
from pathlib import Path

import pytest

from tests.packaging.repository import ROOT

DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks/README.md",
    *sorted(DOCS.glob("*.md")),
]
# A fence opens with a language that GitHub knows; with a word in braces it is a directive.
FENCE = re.compile(r"^ *(```+|~~~+|:::+)(.*?)\n(.*?)^ *\1 *$", re.MULTILINE | re.DOTALL)
LANGUAGES = {"", "bash", "json", "math", "py", "python", "text", "yaml"}
ROLE = re.compile(r"\{[a-z][a-z:+-]*\}`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def prose(page: Path) -> str:
    """A page without what stands in fences."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def headings(page: Path) -> list[str]:
    return re.findall(r"^#+ +(.+?) *$", prose(page), re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """GitHub's rule, and MyST's: small letters, no punctuation, a hyphen for each blank."""
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings(page)
    }


@every_page
def test_no_directive_and_no_role(page):
    opened = {language.strip() for _, language, _ in FENCE.findall(page.read_text())}
    assert opened <= LANGUAGES
    assert not ROLE.findall(prose(page))
    assert ":::" not in prose(page)
    assert "```" not in prose(page).replace("` ```math `", "")


@every_page
def test_headings_are_words(page):
    assert not [heading for heading in headings(page) if "$" in heading or "\\" in heading]


@every_page
def test_formulas_mean_the_same_on_github(page):
    """In running text Markdown eats a backslash before punctuation; a block belongs in a fence."""
    text = re.sub(r"`[^`\n]+`", "", prose(page))
    assert "$$" not in text
    for formula in re.findall(r"\$([^$]+)\$", text):
        eaten = {mark for mark in re.findall(r"\\(.)", formula) if mark in string.punctuation}
        assert not eaten, formula
        assert formula == formula.strip(), formula
        assert "\n" not in formula, formula


@every_page
def test_links_lead_somewhere(page):
    for link in LINK.findall(prose(page)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_readme_leads_to_pages_that_github_shows():
    links = [link for link in LINK.findall(prose(ROOT / "README.md")) if link.startswith("docs/")]
    assert links
    assert not [link for link in links if link.partition("#")[0].endswith(".rst")]


def test_which_page_is_for_whom_stands_on_the_first_screen():
    first = (DOCS / "index.md").read_text(encoding="utf-8").splitlines()[:40]
    assert "## Which page is for me" in first
    assert any(line.startswith("![") for line in first)


def test_every_page_has_its_place_in_the_navigation():
    """`docs/conf.py` has it, as GitHub would show a toctree; the file itself needs Sphinx."""
    text = (DOCS / "conf.py").read_text(encoding="utf-8")
    navigation = re.search(r"^NAVIGATION = (\{.*?^\})", text, re.MULTILINE | re.DOTALL)
    assert navigation
    listed = [page for pages in ast.literal_eval(navigation[1]).values() for page in pages]
    pages = [path.stem for path in DOCS.iterdir() if path.suffix in {".md", ".rst"}]
    assert sorted([*listed, "index"]) == sorted(pages)
