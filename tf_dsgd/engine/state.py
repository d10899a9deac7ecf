"""What each worker owns: one variable per worker, and functions bound to them."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_dsgd import _tf
from tf_dsgd.engine.traffic import COLUMNS
from tf_dsgd.membership.task import Task
from tf_dsgd.transport.aside import Aside

# A worker's clock: four numbers, then, for each shard, the version that the unsent gradients began
# with, then, for each shard, the version fetched last.
WORKER, INCARNATION, SEQUENCE, STEPS = range(4)
_FIXED = 4
# The header of a message to one shard.
HEADER = ("worker", "incarnation", "sequence", "version", "steps")


class Replicated:
    """One variable per worker. Functions are traced with one of them and bound to the others.

    A worker that is not there has None.
    """

    def __init__(
        self,
        make: Callable[[int], tf.Variable | None],
        present: Sequence[bool],
        lost: Callable[[int, tf.errors.OpError], bool],
        call: Callable[[int, Callable[[], Any]], Any],
    ):
        self._make = make
        self._was_lost = lost
        self._call = call
        self.copies: list[Any] = [None] * len(present)
        self.part = 0
        """On which part of each worker they are."""
        self.owner: str | None = None
        """The id of the strategy's variable that it is the workers' copies of, if it is."""
        self._template: Any = None
        for m, here in enumerate(present):
            if here:
                self.renew(m)

    @property
    def template(self) -> tf.Variable:
        """The copy with which functions are traced: the first one made, also if it is lost.

        What belongs together may be traced at different times. With another variable in one of
        its parts TensorFlow would not see that the parts touch the same thing, and in which order.
        """
        if self._template is None:
            raise RuntimeError("No worker is there, and none has been.")
        return self._template

    def of(self, worker: int) -> tf.Variable:
        """The copy of a worker that is there."""
        copy = self.copies[worker]
        if copy is None:
            raise RuntimeError(f"Worker {worker} is not there.")
        return copy

    def present(self) -> list[tf.Variable]:
        """The copies of all workers that are there."""
        return [copy for copy in self.copies if copy is not None]

    def renew(self, worker: int) -> None:
        """Makes the copy of a worker that came, or came back."""
        self.copies[worker] = copy = self._make(worker)
        if self._template is None:
            self._template = copy

    def each(self, action: Callable[[int, tf.Variable], Any]) -> dict[int, Any]:
        """`action(m, copy)` for all workers that are there; what it gives, of those that stay."""
        results = {}
        for m, copy in enumerate(self.copies):
            if copy is None:
                continue
            try:
                results[m] = self._call(m, functools.partial(action, m, copy))
            except tf.errors.OpError as error:
                if not self._was_lost(m, error):
                    raise
        return results

    def read(self) -> dict[int, np.ndarray]:
        """The values of all workers that are there."""
        return self.each(lambda _, copy: copy.numpy())

    def drop(self, worker: int) -> Any:
        """Gives, and forgets, a lost worker's copy; functions traced with it stay valid."""
        dropped, self.copies[worker] = self.copies[worker], None
        return dropped


class Store:
    """All variables that workers own, and the binding of traced functions to a worker.

    Args:
        worker_devices: where the workers are.
        part_devices: of each worker the devices of its parts, if a replica is cut into parts; the
            first one is where the worker is.
        num_shards: number of shards.
        tasks: the workers; if None they are all there, and made here.
        lost: called with a worker and the error that creating a variable there raised; tells
            whether the worker was lost, in which case the others go on.
        assemble: called when no worker is there; comes back when one is.
        call: does something that calls a worker, and gives what that gives.
    """

    def __init__(
        self,
        worker_devices: Sequence[str],
        num_shards: int = 1,
        tasks: Sequence[Task] | None = None,
        lost: Callable[[int, tf.errors.OpError], bool] = lambda worker, error: False,
        assemble: Callable[[], None] = lambda: None,
        call: Callable[[int, Callable[[], Any]], Any] = lambda worker, action: action(),
        part_devices: Sequence[Sequence[str]] | None = None,
    ):
        self._was_lost = lost
        self._assemble = assemble
        self._call = call
        self.worker_devices = list(worker_devices)
        parts = [[device] for device in worker_devices] if part_devices is None else part_devices
        self.part_devices = [list(devices) for devices in parts]
        self.num_shards = num_shards
        self.tasks = [Task(m) for m in range(self.num_workers)] if tasks is None else list(tasks)
        self.present = [task.is_present for task in self.tasks]
        """Whether each worker's variables are there."""
        self.has_backup_tasks = False
        """Whether the engine lets a worker compute a straggler's mini-batches, too."""
        self.counts_fetched = False
        """Whether workers count the bytes of what they fetch."""
        self._last_sequences = [0] * self.num_workers
        self._all: list[Replicated] = []
        self._by_handle: dict[int, tuple[tf.Tensor, Replicated]] = {}
        self._cells: dict[Any, Replicated] = {}
        self._mutex = threading.Lock()
        """Of the three: models may be made in one thread while another trains."""
        self._gone: set[str] = set()
        """Ids of variables that nobody has any more, of which something may still be here."""
        self.kept: dict[str, dict[str, Replicated]] = {}
        """What codecs keep on workers, by the weight's id and the cell's name."""
        self.holds_back = False
        """Whether some of it is what was not sent yet."""
        self.residuals_lost = 0
        """How often a worker was lost, and with it what a codec had held back there."""
        self.first: Callable[[str, str, tuple[int, ...]], np.ndarray | None] = lambda *_: None
        """Of such a cell that is not made yet what each worker's begins with, if not zeros."""
        self._bound: list[weakref.WeakSet[_WorkerFunction]] = [
            weakref.WeakSet() for _ in worker_devices
        ]
        self.clock = self.replicate(self._first_clock, dtype=tf.int64, name="clock")
        """Each worker's clock: the header of its next message, and the versions it fetched."""

    def set_clock(
        self,
        clock: tf.Tensor,
        changes: Mapping[int, tf.Tensor] | None = None,
        begun: tf.Tensor | None = None,
        fetched: tf.Tensor | None = None,
    ) -> None:
        """Traces a worker's new clock: `clock` but for what is given, parts as `clock_parts`."""
        fixed, *versions = clock_parts(clock, self.num_shards)
        if changes:
            fixed = tf.stack([changes.get(i, fixed[i]) for i in range(_FIXED)])
        parts = [
            old if new is None else new for old, new in zip(versions, (begun, fetched), strict=True)
        ]
        self.clock.template.assign(tf.concat([fixed, *parts], 0), read_value=False)

    def _first_clock(self, worker: int) -> np.ndarray:
        clock = np.zeros([_FIXED + 2 * self.num_shards], np.int64)
        clock[:3] = worker, self.tasks[worker].incarnation, self._last_sequences[worker]
        return clock

    @property
    def num_workers(self) -> int:
        return len(self.worker_devices)

    @property
    def num_parts(self) -> int:
        """Devices of each worker."""
        return len(self.part_devices[0])

    def part_of(self, handle: tf.Tensor) -> int | None:
        """On which part the workers' variables are of which this is one's handle."""
        replicated = self._by_handle.get(id(handle), (None, None))[1]
        return None if replicated is None else replicated.part

    @property
    def incarnations(self) -> list[int]:
        """Each worker's."""
        return [task.incarnation for task in self.tasks]

    def replicate(
        self,
        value: Callable[[int], Any],
        *,
        dtype: Any = None,
        shape: Any = None,
        name: str,
        part: int = 0,
        owner: str | None = None,
    ) -> Replicated:
        """Creates a variable on every worker's device; worker m's is `value(m)`.

        `value` is called again for a worker that comes later, or comes back. Where a replica is cut
        into parts, the variable is on the device of that part. It is there until `forget`.
        """

        def make(m: int) -> tf.Variable | None:
            if not self.present[m]:
                return None  # lost a moment ago
            try:
                where = {"device": self.part_devices[m][part], "name": name}
                return self._call(
                    m, lambda: _tf.make_variable(value(m), dtype=dtype, shape=shape, **where)
                )
            except tf.errors.OpError as error:
                if not self._was_lost(m, error):
                    raise
                self.present[m] = False
                return None

        replicated = Replicated(make, self.present, self._was_lost, self._call)
        replicated.part, replicated.owner = part, owner
        with self._mutex:
            self._all.append(replicated)
            self._note(replicated)
        if not any(self.present):
            self._assemble()
        return replicated

    def forget(self, owners: Iterable[str]) -> bool:
        """Frees what workers have of variables that are gone, once no function uses any of it.

        That is their copies, and all cells whose key names them. Lists and tables are made anew, as
        another thread may be going through them. Gives whether something is left to forget.
        """
        with self._mutex:
            self._gone.update(owners)
            functions = [function for bound in self._bound for function in bound]
            used = {id(owner) for function in functions for owner in function.owners}
            in_use = {r.owner for r in self._all if id(r) in used}
            in_use |= {n for k, cell in self._cells.items() if id(cell) in used for n in _names(k)}
            names = self._gone - in_use
            keys = {key for key in self._cells if names.intersection(_names(key))}
            cells = {id(self._cells[key]) for key in keys}
            gone: list[Any] = [r for r in self._all if r.owner in names or id(r) in cells]
            ids = {id(r) for r in gone}
            gone += [known for known in self._by_handle.values() if id(known[1]) in ids]
            self._all = [r for r in self._all if id(r) not in ids]
            self._by_handle = {k: v for k, v in self._by_handle.items() if id(v[1]) not in ids}
            self._cells = {key: cell for key, cell in self._cells.items() if key not in keys}
            self.kept = {weight: kept for weight, kept in self.kept.items() if weight not in names}
            self._gone -= names
            left = bool(self._gone)
        if gone and any("/job:" in device for device in self.worker_devices):
            # TensorFlow frees each by a call to the worker, which may be there and not answer.
            Aside(gone.clear, "tf_dsgd frees variables")
        return left

    def copy_of(self, own: Replicated, dtype: Any, name: str) -> Replicated:
        """What each worker's variable is now, in another one of its part."""
        where = {"dtype": dtype, "name": name, "part": own.part}
        return self.replicate(lambda m: own.copies[m].read_value(), **where)

    def _note(self, replicated: Replicated) -> None:
        # Any copy may become the one with which functions are traced, once others are lost.
        for copy in replicated.present():
            handle = copy.handle
            self._by_handle[id(handle)] = (handle, replicated)

    @functools.cached_property
    def laps(self) -> Replicated:
        """Where rounds of one call add up each worker's seconds: of the fetch, of the steps."""
        with tf.init_scope():
            return self.replicate(lambda _: np.zeros([2]), dtype=tf.float64, name="laps")

    @functools.cached_property
    def fetched(self) -> Replicated:
        """Bytes of each worker's last fetch."""
        with tf.init_scope():
            return self.replicate(lambda _: np.zeros([], np.int64), dtype=tf.int64, name="fetched")

    @functools.cached_property
    def traffic(self) -> Replicated:
        """What each worker's messages were made of, in all: see `engine.traffic`."""
        with tf.init_scope():
            return self.replicate(lambda _: np.zeros([COLUMNS]), dtype=tf.float64, name="traffic")

    def cell(self, key: Any, make: Callable[[], Replicated]) -> Replicated:
        """The replicated variable known by `key`, created when first asked for."""
        if key not in self._cells:
            with tf.init_scope():
                cell = make()
            with self._mutex:
                self._cells[key] = cell
        return self._cells[key]

    def kept_cell(
        self, key: tuple[str, str, tf.DType], zeros: np.ndarray, shape: tf.TensorShape, part: int
    ) -> Replicated:
        """As `cell`, for what a codec keeps; a worker that comes back begins with zeros."""
        name, weight, dtype = key
        first = None if key in self._cells else self.first(weight, name, tuple(shape.as_list()))
        begins = {} if first is None else dict(enumerate(first))

        def make() -> Replicated:
            return self.replicate(
                lambda m: begins.pop(m, zeros), dtype=dtype, shape=shape, name=name, part=part
            )

        cell = self.cell(key, make)
        self.kept.setdefault(weight, {})[name] = cell
        return cell

    def counted(self) -> np.ndarray:
        """What each worker has counted of its messages, `[workers, COLUMNS]`; 0 if not there."""
        rows = np.zeros([self.num_workers, COLUMNS])
        if "traffic" in vars(self):  # else no message was made yet
            for m, row in self.traffic.read().items():
                rows[m] = row
        return rows

    def above(self, name: str, limit: float) -> float:
        """The share of elements, in all workers' cells of this name, that are above a limit."""
        found = total = 0
        for cells in self.kept.values():
            if name in cells:
                counts = cells[name].each(functools.partial(_above, limit))
                found += sum(counts.values())
                total += len(counts) * int(cells[name].template.shape.num_elements())
        return found / total if total else 0.0

    def norms(self, name: str | None) -> tuple[float, ...]:
        """Each worker's 2-norm of what it keeps in all cells of this name; NaN if it is not there.

        Computed there: of each cell a number travels.
        """
        squares = np.where(self.present, 0.0, np.nan)
        for cells in self.kept.values():
            if name in cells:
                found = cells[name].each(_squares)
                squares += [found.get(m, np.nan) for m in range(self.num_workers)]
        return tuple(np.sqrt(squares).tolist())

    def bind(
        self, concrete: Any, around: _tf.Around = contextlib.nullcontext
    ) -> list[_tf.BoundFunction]:
        """One callable per worker from a function traced with one worker's variables."""
        captures = concrete.captured_inputs
        owners = [self._by_handle.get(id(c), (None, None))[1] for c in captures]
        functions = [_WorkerFunction(concrete, owners, around) for _ in range(self.num_workers)]
        for m, function in enumerate(functions):
            if self.present[m]:
                function.bind(m)
            self._bound[m].add(function)
        return list(functions)

    # -- workers that come and go -----------------------------------------------------------

    def lose(self, worker: int) -> None:
        """Forgets the variables of a worker that was lost."""
        self.residuals_lost += self.holds_back and self.present[worker]
        self.present[worker] = False
        dropped = [replicated.drop(worker) for replicated in self._all]
        # TensorFlow frees each by a call to the worker, which may be there and not answer.
        Aside(dropped.clear, "tf_dsgd frees variables")

    def move(self, worker: int, part_devices: Sequence[str]) -> None:
        """A worker that comes, or comes back, is on these devices from now on."""
        self.part_devices[worker] = list(part_devices)
        self.worker_devices[worker] = part_devices[0]

    def renew(self, worker: int, sequence: int) -> None:
        """Makes all variables of a worker that came, or came back, and binds its functions.

        Its messages are numbered from `sequence` + 1 on.
        """
        self._last_sequences[worker] = sequence
        self.present[worker] = True
        for replicated in self._all:
            replicated.renew(worker)
            self._note(replicated)
        if self.present[worker]:
            for function in self._bound[worker]:
                function.bind(worker)

    @property
    def replicas(self) -> list[Replicated]:
        """All that workers own."""
        return list(self._all)

    def variables(self) -> list[Any]:
        """All variables of all workers that are there."""
        return [copy for replicated in self._all for copy in replicated.present()]

    def begun(self, worker: int) -> int:
        """The first shard's version that a worker's unsent gradients began with."""
        return int(self.clock.of(worker).numpy()[_FIXED])

    # -- numbers of messages ----------------------------------------------------------------

    def sequences(self) -> list[int]:
        """Messages that each worker has numbered so far."""
        clocks = self.clock.read()
        return [int(clocks[m][SEQUENCE]) if m in clocks else 0 for m in range(self.num_workers)]

    def restore_sequences(self, sequences: Sequence[int]) -> None:
        """Makes workers number their next messages from a checkpoint on."""
        self._last_sequences = [int(number) for number in sequences]

        def number(m: int, copy: tf.Variable) -> None:
            clock = copy.numpy()
            clock[SEQUENCE] = sequences[m]
            copy.assign(clock)

        self.clock.each(number)


def _names(key: Any) -> list[str]:
    """What may be a variable's id, of a cell's key."""
    return [part for part in key if isinstance(part, str)]


def _above(limit: float, worker: int, copy: tf.Variable) -> int:
    """How many elements of a copy are above a limit, of either sign."""
    with tf.device(copy.device):
        return int(tf.shape(tf.where(tf.abs(copy) > tf.cast(limit, copy.dtype)), tf.int64)[0])


def _squares(worker: int, copy: tf.Variable) -> float:
    """The sum of a copy's squares."""
    with tf.device(copy.device):
        return 2.0 * float(tf.nn.l2_loss(copy))  # which makes no square of each element first


class _WorkerFunction(_tf.BoundFunction):
    """A function of one worker, which knows whose variables it captured."""

    def __init__(self, concrete: Any, owners: Sequence[Replicated | None], around: _tf.Around):
        super().__init__(concrete, concrete.captured_inputs, around)
        self.owners = owners

    def bind(self, worker: int) -> None:
        """Makes the function act on `worker`'s variables."""
        self.captures = [
            c if owner is None else owner.of(worker).handle
            for c, owner in zip(self.captures, self.owners, strict=True)
        ]


def traced(fn: Callable[..., Any], *specs: Any, compiled: bool = False) -> Any:
    """A function of arguments of these types, traced now; `compiled` by XLA."""
    function = tf.function(fn, autograph=False, jit_compile=compiled or None)
    return function.get_concrete_function(*specs)


def headers(clock: tf.Tensor, num_shards: int) -> list[tf.Tensor]:
    """The headers of a worker's next message, one for each shard."""
    return [
        tf.stack(
            [
                clock[WORKER],
                clock[INCARNATION],
                clock[SEQUENCE] + 1,
                clock[_FIXED + s],
                clock[STEPS],
            ]
        )
        for s in range(num_shards)
    ]


def named(heads: Sequence[tf.Tensor], name: tf.Tensor) -> list[tf.Tensor]:
    """Headers under which a message counts as another's: (worker, incarnation, sequence)."""
    return [tf.concat([name, head[3:]], 0) for head in heads]


def clock_parts(clock: tf.Tensor, num_shards: int) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """(the four numbers, versions of the unsent gradients, versions fetched)."""
    return clock[:_FIXED], clock[_FIXED : _FIXED + num_shards], clock[_FIXED + num_shards :]
