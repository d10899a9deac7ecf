"""Every wait of the package stands in docs/waits.md, with who wakes it and its deadline."""

import ast
import re

import pytest

from tests.packaging.repository import ROOT

WAITING = {
    *("wait", "wait_for", "join", "result", "select", "sleep", "acquire"),
    *("recv", "create_connection"),
}
# With their modules, as others of that name wait for nothing; of `get` those of queues.
FUNCTIONS = {"subprocess.run", "os.read"}
# Calls of these names that wait for nothing.
OTHERS = re.compile(
    r"shlex\.join|os\.pathsep\.join|df\.select|os\.path\.join|\bjoin\(f?['\"]|^f?['\"].*\.join\("
    r"|^(self|accrued|_applied|(Barrier)?TaskContext)\.get\("
)


def waits(path):
    """(qualified name of the function, the call) of each wait in a file."""
    found = []

    def visit(node, stack):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            stack = [*stack, node.name]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            text = ast.unparse(node)
            bytes_or_text = isinstance(node.func.value, (ast.Constant, ast.JoinedStr))
            names = WAITING | {"collect"} if "spark" in path.parts else WAITING
            waits = node.func.attr in names and not bytes_or_text and not OTHERS.search(text)
            if waits or ast.unparse(node.func) in FUNCTIONS or is_of_a_queue(node):
                found.append((".".join(stack), text))
        for child in ast.iter_child_nodes(node):
            visit(child, stack)

    visit(ast.parse(path.read_text(encoding="utf-8")), [])
    return found


def is_of_a_queue(call):
    """Whether it is a `get()` or `get(timeout=...)`; a mapping's has a key."""
    named = {keyword.arg for keyword in call.keywords}
    is_one = call.func.attr == "get" and not call.args and named <= {"timeout", "block"}
    return is_one and not OTHERS.search(ast.unparse(call))


def in_the_code():
    package = ROOT / "tf_dsgd"
    return {
        f"{'.'.join(path.relative_to(package).with_suffix('').parts)}.{function}"
        for path in package.rglob("*.py")
        for function, _ in waits(path)
    }


def rows():
    lines = (ROOT / "docs/waits.md").read_text(encoding="utf-8").splitlines()
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if "| `" in line
    ]


def test_every_wait_is_listed_and_nothing_else():
    listed = {row[0].strip("`") for row in rows()}
    assert listed == in_the_code()
    assert len(listed) == len(rows())


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0].strip("`"))
def test_each_says_what_for_who_wakes_it_and_for_how_long(row):
    _, what, woken, longest = row
    assert what and longest
    assert woken or longest.startswith(("0 s", "the time left"))


def test_deadlines_of_the_page_are_those_of_the_code():
    """In docs/waits.md by name, in docs/cluster.md with their seconds."""
    from tf_dsgd.membership import deadlines

    seconds = {name: value for name, value in vars(deadlines).items() if name.isupper()}
    named = set(re.findall(r"`([A-Z_]+_SECONDS)`", (ROOT / "docs/waits.md").read_text()))
    assert named <= seconds.keys()
    page = (ROOT / "docs/cluster.md").read_text()
    told = dict(re.findall(r"`([A-Z_]+_SECONDS)` = ([0-9.]+)", page))
    assert {name: float(value) for name, value in told.items()} == {n: seconds[n] for n in told}
    assert len(told) >= 8
