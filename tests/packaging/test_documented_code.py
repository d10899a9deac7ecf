"""The Python code shown in the README and in docs/ runs as it stands, with warnings as errors.

The blocks of one page are one program: a later block may use what an earlier one made.
"""

import re

import pytest

from tests.packaging.repository import ROOT, run_script

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES_WITH_CODE = [page for page in PAGES if BLOCK.search(page.read_text())]
# A process imports TensorFlow for seconds: what a newcomer reads first is in the fast tier.
READ_FIRST = {"README.md", "getting_started.md", "writing_an_algorithm.md"}
MARKED = [
    pytest.param(page, marks=[] if page.name in READ_FIRST else pytest.mark.slow)
    for page in PAGES_WITH_CODE
]

QUIET = """
import warnings
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "__array__ implementation doesn't accept a copy keyword")
"""


def test_the_pages_that_show_code_are_found():
    names = {page.name for page in PAGES_WITH_CODE}
    assert names > READ_FIRST


@pytest.mark.parametrize("page", MARKED, ids=lambda page: page.name)
def test_code_runs(page, tmp_path):
    program = tmp_path / "page.py"
    program.write_text(QUIET + "\n".join(BLOCK.findall(page.read_text())))
    result = run_script(str(program), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
