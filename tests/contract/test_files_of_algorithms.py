"""A file of an algorithm is mathematics: how gradients are stored stands elsewhere."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

import pytest

import tf_dsgd

FILES = sorted((Path(tf_dsgd.__file__).parent / "algorithms").glob("[a-z]*.py"))

# Names by which rows, and the memory of sums of rows, would come in.
STORAGE = {"IndexedSlices", "indices", "is_sparse", "scatter_add", "scatter_sub", "scatter_update"}
STORAGE |= {"unsorted_segment_sum", "unique", "dense_shape", "merged_rows"}


def is_plumbing(node):
    """Whether a statement says where things are, and not what is computed."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return True
    if not isinstance(node, ast.FunctionDef) or len(node.body) != 1:
        return False
    returned = node.body[0].value if isinstance(node.body[0], ast.Return) else None
    while isinstance(returned, (ast.ListComp, ast.GeneratorExp)):
        returned = returned.elt
    if not isinstance(returned, ast.Call):
        return False
    called = returned.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return name in {"cell", "counter", "Accumulator"}


def plumbing(source):
    """The lines of such statements, decorators included, and of lists of their arguments."""
    lines = set()
    for node in ast.walk(ast.parse(source)):
        if is_plumbing(node):
            lines |= set(range(node.lineno, node.end_lineno + 1))
    return lines


def written(source):
    """Lines with anything on them."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    empty = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines = set()
    for token in tokens:
        if token.type not in empty:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return lines


def test_there_is_a_file_for_each_algorithm():
    assert {"averaging", "downpour", "elastic", "softsync", "updates"} <= {f.stem for f in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_no_rule_knows_how_rows_are_stored(file):
    tree = ast.parse(file.read_text())
    names = {n.attr if isinstance(n, ast.Attribute) else n.id for n in ast.walk(tree)
             if isinstance(n, (ast.Attribute, ast.Name))}  # fmt: skip
    assert not names & STORAGE


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_three_quarters_are_mathematics_and_documentation(file):
    source = file.read_text()
    share = len(plumbing(source)) / len(written(source))
    assert share <= 0.25, f"{share:.0%} of the lines say where things are"


def test_the_measure_sees_imports_and_memory():
    source = '''"""A rule."""
import tensorflow as tf

def total(shard):
    return shard.counter("total")

def mean(shard):
    return total(shard) / shard.steps
'''
    assert sorted(plumbing(source)) == [2, 4, 5]
    assert sorted(written(source)) == [1, 2, 4, 5, 7, 8]
