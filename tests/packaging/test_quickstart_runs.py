"""benchmarks/quickstart.py keeps what README's programs print; figures.py writes it there."""

import importlib
import json

import pytest

from tests.packaging.repository import ROOT
from tests.packaging.test_benchmarks import run_benchmark


@pytest.fixture
def program(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


def test_the_run_in_the_middle_is_shown(program):
    quickstart = program("quickstart")
    found = [{"output": f"a\nb\nratio {ratio}", "ratio": ratio} for ratio in (0.9, 1.5, 1.1, 1.2)]
    record = {"results": {"one": found}}
    assert quickstart.middle(found)["ratio"] == 1.1
    assert quickstart.shown(record, "one", -1) == "```text\nratio 1.1\n```"
    assert quickstart.shown(record, "one", 0, -1) == "```text\na\nb\n```"
    assert quickstart.ratios(record, "one") == "1.15 (0.90-1.50)"


def test_the_first_script_is_readmes_and_ends_with_its_ratio(program):
    script = program("quickstart").first_script()
    compile(script, "README.md", "exec")
    assert script.startswith("import keras\n") and "DownpourStrategy(" in script
    assert script.rstrip().splitlines()[-1].startswith("print(f") and "ratio" in script


def test_a_program_that_fails_is_named(program):
    with pytest.raises(SystemExit, match=r"^-c failed:\n") as ended:
        program("quickstart").printed(["-c", "raise ValueError('went wrong')"])
    assert str(ended.value).endswith("ValueError: went wrong\n")


def test_what_a_program_prints_is_kept(program):
    assert program("quickstart").printed(["-c", "print('x ratio 1.25')"]) == {
        "output": "x ratio 1.25",
        "ratio": 1.25,
    }


@pytest.mark.slow
def test_readmes_programs_run(tmp_path):
    written = tmp_path / "results.json"
    output = run_benchmark("quickstart.py", "--repetitions", "1", "--json", str(written))
    assert "first script, ratio " in output and "staleness          mean" in output
    results = json.loads(written.read_text())["results"]
    assert {name: len(found) for name, found in results.items()} == {
        "first script": 1,
        "quickstart": 1,
    }


def test_pages_that_differ_are_named_and_left_alone(program, monkeypatch, tmp_path):
    figures = program("figures")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    ratio = figures.single("quickstart")
    page = tmp_path / "README.md"
    assert ratio in text
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "FILES", ("README.md",))
    for changed, said in ((text, 0), (text.replace(ratio, "9.99"), "README.md")):
        page.write_text(changed, encoding="utf-8")
        monkeypatch.setattr("sys.argv", ["figures.py", "--check"])
        with pytest.raises(SystemExit) as ended:
            figures.main()
        assert ended.value.code == said or said in ended.value.code
        assert page.read_text(encoding="utf-8") == changed
    monkeypatch.setattr("sys.argv", ["figures.py", "--chek"])
    with pytest.raises(SystemExit, match="2"):
        figures.main()
    monkeypatch.setattr("sys.argv", ["figures.py"])
    figures.main()
    assert page.read_text(encoding="utf-8") == text
