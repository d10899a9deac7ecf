"""What is done before what in a graph that TensorFlow has optimized."""

import contextlib

import tensorflow as tf

# The graphs that ran are told of by the eager context alone. TF 2.21.
from tensorflow.python.eager import context  # noqa: TID251

WRITE = ("Assign", "Scatter", "Apply")
# Of a lock's token.
TAKEN, GIVEN = "ResourceAccumulatorTakeGradient", "ResourceAccumulatorApplyGradient"


@contextlib.contextmanager
def collected():
    """A list; afterwards it has the graphs of what ran for the first time within."""
    graphs = []
    with context.collect_graphs(optimized=True) as found:
        yield graphs
    graphs.extend(one for each in found for one in apart(each))


def apart(graph):
    """Graphs that TensorFlow made on several threads at once it tells of as one, end to end."""
    seen = set()
    for node in graph.node:
        if node.name in seen:
            break
        seen.add(node.name)
    if len(seen) == len(graph.node):
        return [graph]
    # The first ends before a name comes again, where neither asks for what only the other has.
    halves = ((_only(graph.node[:end]), _only(graph.node[end:])) for end in range(len(seen), 0, -1))
    one, others = next(pair for pair in halves if all(map(_has_its_inputs, pair)))
    return [one, *apart(others)]


def _only(nodes):
    graph = tf.compat.v1.GraphDef()
    graph.node.extend(nodes)
    return graph


def _has_its_inputs(graph):
    names = {node.name for node in graph.node}
    return all(_bare(each) in names for node in graph.node for each in node.input)


def _bare(name):
    """Of an input, as a node names it: the node that it comes from."""
    return name.removeprefix("^").partition(":")[0]


def joined(partitions):
    """The GraphDefs that TensorFlow made of a function, one for each device, as one."""
    whole, sends = tf.compat.v1.GraphDef(), {}
    for index, graph in enumerate(partitions):
        for node in graph.node:
            copy = whole.node.add()
            copy.CopyFrom(node)
            copy.name = f"{index}/{node.name}"
            del copy.input[:]
            for each in node.input:
                control = "^" if each.startswith("^") else ""
                copy.input.append(f"{control}{index}/{each.removeprefix('^')}")
            if node.op == "_Send":
                sends[node.attr["tensor_name"].s] = copy.name
    for node in whole.node:
        if node.op == "_Recv":
            node.input.append(f"^{sends[node.attr['tensor_name'].s]}")
    return whole


class Graph:
    """Of a GraphDef: operations by name, and all that must be over before one begins."""

    def __init__(self, definition):
        self._nodes = {node.name: node for node in definition.node}
        self._inputs = {
            name: [_bare(each) for each in node.input] for name, node in self._nodes.items()
        }
        self._known = {}

    def all(self, *types):
        """The operations of these types."""
        return {name for name, node in self._nodes.items() if node.op in types}

    def device(self, name):
        return self._nodes[name].device

    def on_resources(self):
        """All that reads or writes a variable."""
        return {
            name
            for name, node in self._nodes.items()
            if node.op.startswith("Resource") or node.op.endswith("VariableOp")
            if not node.op.startswith("ResourceAccumulator")
        }

    def before(self, name):
        """All that is done before it begins."""
        if name not in self._known:
            self._known[name] = set()  # of an iteration's way back
            for each in self._inputs[name]:
                self._known[name] |= {each} | self.before(each)
        return self._known[name]

    def is_under_lock(self, name):
        """Whether it begins after a lock is held, and is over before that lock is given back."""
        return any(
            taken in self.before(name) and name in self.before(self._given_back(taken))
            for taken in self.all(TAKEN)
        )

    def is_after_lock(self, name):
        """Whether it begins after a lock of its device was held and given back."""
        return any(
            self.device(taken) == self.device(name) and self._given_back(taken) in self.before(name)
            for taken in self.all(TAKEN)
        )

    def _given_back(self, taken):
        """Where a lock is given back that is taken there: the first time after that."""
        ends = [
            given
            for given in self.all(GIVEN)
            if self._inputs[given][0] == self._inputs[taken][0] and taken in self.before(given)
        ]
        return min(ends, key=lambda given: len(self.before(given)))

    def without_order(self):
        """Pairs of operations on a variable, one of which writes, that may run in either order."""
        of_variable = {}
        for name in sorted(self.on_resources()):
            of_variable.setdefault(self._variable(name), []).append(name)
        return [
            (one, other)
            for names in of_variable.values()
            for at, one in enumerate(names)
            for other in names[at + 1 :]
            if (self._writes(one) or self._writes(other))
            and one not in self.before(other)
            and other not in self.before(one)
        ]

    def _writes(self, name):
        return any(word in self._nodes[name].op for word in WRITE)

    def _variable(self, name):
        """Where the handle of a variable comes from, through branches and loops."""
        (name, *_), seen = self._inputs[name], set()
        while self._inputs.get(name) and name not in seen:
            if self._nodes[name].op not in ("Identity", "Enter", "Switch", "Merge"):
                break
            seen.add(name)
            name = self._inputs[name][0]
        return name
