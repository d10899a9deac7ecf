"""What else a program does while a step is to come, or while `fit` runs in another thread."""

import contextlib
import gc
import itertools
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dsgd
from tests import helpers
from tf_dsgd.strategies import handing_out

pytestmark = pytest.mark.medium

CLUSTERS = {
    "local": lambda: tf_dsgd.LocalCluster(2),
    "simulated": lambda: tf_dsgd.SimulatedCluster(2, compute_seconds=1.0, seed=0),
}

if helpers.ON_CLUSTER:
    CLUSTERS = {"cluster": tf_dsgd.TFCluster}


@pytest.fixture(params=CLUSTERS)
def strategy(request):
    return tf_dsgd.DownpourStrategy(CLUSTERS[request.param](), push_every=2, fetch_every=2)


def counting(strategy):
    """A weight that each ticket adds itself to, and a model that predicts."""
    with strategy.scope():
        weight = tf.Variable([0.0])
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([weight])
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])

    def step(ticket):
        optimizer.apply([-tf.cast(ticket, tf.float32)[None]], [weight])

    return weight, model, step


def tickets(strategy, number):
    return strategy.experimental_distribute_dataset(tf.data.Dataset.range(1, number + 1))


def each(function, some):
    for one in some:
        function(one)


def in_a_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def failing_at_3(step):
    def failing(ticket):
        with tf.control_dependencies([tf.debugging.assert_none_equal(ticket, np.int64(3))]):
            step(tf.identity(ticket))

    return failing


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("meanwhile", ["predict", "loop", "broken", "read"])
def test_a_ticket_may_wait_for_its_step(strategy, traced, meanwhile):
    """Each of 1, ..., 7 is added once, whatever is done between a ticket and its step."""
    weight, model, step = counting(strategy)

    def call(ticket):
        strategy.run(step, args=(ticket,))

    call = tf.function(call) if traced else call

    def do():
        if meanwhile == "predict":
            model.predict(np.ones((4, 3)), batch_size=2, verbose=0)
        elif meanwhile == "loop":
            for other in tickets(strategy, 2):
                call(other)
        elif meanwhile == "broken":
            next(iter(tickets(strategy, 2)))
        else:
            weight.numpy()

    for ticket in tickets(strategy, 7):
        do()
        call(ticket)
    several = 7 * 3 if meanwhile == "loop" else 0
    assert weight.numpy() == 28 + several
    assert strategy.steps == (21 if meanwhile == "loop" else 7)
    helpers.assert_ledger_balances(strategy)


def test_a_ticket_that_is_not_used_is_skipped(strategy):
    """The others train on their own mini-batches."""
    weight, _, step = counting(strategy)
    for number, ticket in enumerate(tickets(strategy, 9)):
        if number % 3 != 1:
            strategy.run(step, args=(ticket,))
    assert weight.numpy() == 45 - 2 - 5 - 8
    assert strategy.steps == 6
    helpers.assert_ledger_balances(strategy)


def test_a_ticket_whose_step_is_not_run_is_skipped(strategy):
    """Also where a function was given it."""
    weight, _, step = counting(strategy)

    @tf.function
    def call(ticket, wanted):
        if wanted:
            strategy.run(step, args=(ticket,))

    for number, ticket in enumerate(tickets(strategy, 9)):
        call(ticket, tf.constant(number % 3 != 1))
    assert weight.numpy() == 45 - 2 - 5 - 8
    helpers.assert_ledger_balances(strategy)


def test_a_step_that_only_looks_has_its_own_batch(strategy):
    weight, _, step = counting(strategy)
    look = tf.function(lambda ticket: strategy.run(lambda x: x, args=(ticket,)))
    seen = []
    for number, ticket in enumerate(tickets(strategy, 12), 1):
        if number % 4:
            strategy.run(step, args=(ticket,))
        else:
            seen.append(int(look(ticket)))
    assert seen == [4, 8, 12]
    assert weight.numpy() == 78 - 24
    helpers.assert_ledger_balances(strategy)


def test_two_steps_of_a_function_have_each_its_own(strategy):
    weight, _, step = counting(strategy)
    other, _, second_step = counting(strategy)

    def make():
        @tf.function
        def call(first, second):
            strategy.run(step, args=(first,))
            strategy.run(second_step, args=(second,))

        return call

    for _ in range(4):
        call, one = make(), iter(tickets(strategy, 4))
        for first, second in zip(one, one, strict=True):
            call(first, second)
    assert (weight.numpy(), other.numpy()) == (16, 24)


@pytest.mark.parametrize("order", [1, -1])
def test_a_function_trains_or_looks(strategy, order):
    """Or the one would have the other's batch."""
    weight, _, step = counting(strategy)

    @tf.function
    def call(first, second):
        both = [lambda: strategy.run(step, (first,)), lambda: strategy.run(tf.identity, (second,))]
        for one in both[::order]:
            one()

    one = iter(tickets(strategy, 4))
    with pytest.raises(ValueError, match="Write two functions"):
        call(next(one), next(one))
    assert weight.numpy() == 0


@pytest.mark.timeout(120)
def test_a_function_looks_once_at_a_ticket(strategy):
    counting(strategy)
    look = tf.function(lambda t: [strategy.run(tf.identity, (t,)) for _ in range(2)])
    with pytest.raises(RuntimeError, match="used twice"):
        each(look, tickets(strategy, 4))


def test_tickets_that_nobody_has_leave_nothing(strategy):
    counting(strategy)
    iterator = iter(tickets(strategy, 100))
    for _ in iterator:
        assert iterator.stream.tokens_batches() <= 2
        assert len(iterator._given) <= 2


def test_a_loop_that_goes_on_after_an_error_has_its_own_batches(strategy):
    weight, _, step = counting(strategy)
    failing = failing_at_3(step)
    for ticket in tickets(strategy, 8):
        strategy.run(failing, args=(ticket,))
        with contextlib.suppress(tf.errors.InvalidArgumentError):
            strategy.settle()
    assert weight.numpy() == 36 - 3


@pytest.mark.parametrize("opens", [False, True])
def test_an_error_that_another_thread_meets_ends_a_loop(strategy, opens):
    """As it reads a weight, or opens other data."""
    weight, _, step = counting(strategy)
    failing = failing_at_3(step)

    def look():
        with contextlib.suppress(tf.errors.InvalidArgumentError):
            _ = next(iter(tickets(strategy, 2))) if opens else weight.numpy()

    def call(ticket):
        strategy.run(failing, args=(ticket,))
        in_a_thread(look)

    with pytest.raises(tf.errors.InvalidArgumentError):
        each(call, tickets(strategy, 8))


@pytest.mark.timeout(120)
def test_what_is_refused_of_a_ticket_leaves_the_others_to_workers(strategy):
    """That a batch is gone shows only when its step has run, while workers have others."""
    weight, _, step = counting(strategy)
    train = tf.function(lambda ticket: strategy.run(step, args=(ticket,)))
    iterator = iter(tickets(strategy, 6))
    each(train, itertools.islice(iterator, 3))
    train(next(iterator))
    iterator.stream.drop(1)  # as a step would that nobody saw
    with pytest.raises(RuntimeError, match="used twice"):
        next(iterator)
    assert weight.numpy() == 6


def test_a_branch_may_train_and_another_one_look(strategy):
    weight, _, step = counting(strategy)

    @tf.function
    def call(ticket, trains):
        if trains:
            strategy.run(step, args=(ticket,))
            seen = tf.constant(0, tf.int64)
        else:
            seen = strategy.run(tf.identity, args=(ticket,))
        return seen

    seen = [
        int(call(ticket, tf.constant(number % 2 == 0)))
        for number, ticket in enumerate(tickets(strategy, 6))
    ]
    assert seen == [0, 2, 0, 4, 0, 6]
    assert weight.numpy() == 1 + 3 + 5


@pytest.mark.skipif(helpers.ON_CLUSTER, reason="there is no Python in another process")
@pytest.mark.parametrize("in_thread", [False, True])
def test_a_weight_may_be_read_between_two_steps_of_a_function(strategy, in_thread):
    weight, _, step = counting(strategy)

    def read():
        if not in_thread:
            return np.float32(weight.numpy().sum())
        found = []
        in_a_thread(lambda: found.append(weight.numpy().sum()))
        return np.float32(found[0])

    @tf.function
    def call(first, second):
        strategy.run(step, args=(first,))
        tf.numpy_function(read, [], tf.float32)
        strategy.run(step, args=(second,))

    one = iter(tickets(strategy, 6))
    for first, second in zip(one, one, strict=True):
        call(first, second)
    assert weight.numpy() == 21
    assert strategy.steps == 6


def test_steps_have_numbers_of_their_own(strategy, monkeypatch):
    """One that is gone leaves its own to another."""
    monkeypatch.setattr(handing_out, "NUMBERS", 3)
    weight, _, step = counting(strategy)
    for k in range(8):

        @tf.function
        def call(ticket, k=k):
            strategy.run(lambda t: step(k + t), args=(ticket,))

        each(call, tickets(strategy, 1))
        assert weight.numpy() == sum(range(1, k + 2))
        del call
        gc.collect()
    for k in range(2):
        each(lambda t, k=k: strategy.run(lambda x: step(k + x), args=(t,)), tickets(strategy, 1))
    taken = list(tickets(strategy, 2))
    with pytest.raises(ValueError, match="has traced 3 training steps"):
        each(lambda k: strategy.run(lambda x: step(k + x), args=(taken[k],)), range(2))


def test_nothing_of_an_evaluation_in_another_thread_stays(strategy):
    _, model, step = counting(strategy)
    for _ in range(3):
        in_a_thread(lambda: model.predict(np.ones((4, 3)), batch_size=2, verbose=0))
    each(lambda t: strategy.run(step, args=(t,)), tickets(strategy, 2))
    strategy.settle()
    assert not strategy.batches._used


def test_tickets_may_be_taken_before_their_steps(strategy):
    weight, _, step = counting(strategy)
    taken = list(tickets(strategy, 5))
    for ticket in taken:
        strategy.run(step, args=(ticket,))
    assert weight.numpy() == 15
    taken = list(tickets(strategy, 5))
    strategy.run(step, args=(taken[0],))
    with pytest.raises(RuntimeError, match="in the order"):
        strategy.run(step, args=(taken[2],))


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.timeout(300)
def test_a_ticket_cannot_be_used_twice(strategy, trains):
    """It would wait for a batch that is not there, or have another one."""
    _, _, step = counting(strategy)

    @tf.function
    def call(ticket):
        return strategy.run(step if trains else lambda x: x, args=(ticket,))

    look = tf.function(lambda ticket: strategy.run(lambda x: x, args=(ticket,)))

    def both(ticket):
        call(ticket)
        look(ticket)

    with pytest.raises(RuntimeError, match="used twice"):
        each(both, tickets(strategy, 3))


def test_two_tickets_in_a_function_are_two_mini_batches(strategy):
    weight, _, step = counting(strategy)

    @tf.function
    def call(first, second):
        strategy.run(step, args=(first,))
        strategy.run(step, args=(second,))

    one = iter(tickets(strategy, 6))
    for first, second in zip(one, one, strict=True):
        call(first, second)
    assert weight.numpy() == 21
    assert strategy.steps == 6
    helpers.assert_ledger_balances(strategy)


@pytest.mark.parametrize("traced", [False, True])
def test_two_training_steps_of_one_ticket_are_refused(strategy, traced):
    """Or one of them would train nothing."""
    weight, _, step = counting(strategy)
    other, _, second = counting(strategy)

    def call(ticket):
        strategy.run(step, args=(ticket,))
        strategy.run(second, args=(ticket,))

    call = tf.function(call) if traced else call
    with pytest.raises(RuntimeError, match=r"2 training steps were given 1 of|used twice"):
        each(call, tickets(strategy, 3))
    assert weight.numpy() == 0 or not traced
    assert other.numpy() == 0


def test_a_last_step_in_another_thread_counts(strategy):
    weight, _, step = counting(strategy)

    def loop():
        for ticket in itertools.islice(tickets(strategy, 9), 4):
            strategy.run(step, args=(ticket,))
        done.set()
        leave.wait(60)

    done, leave = threading.Event(), threading.Event()
    thread = threading.Thread(target=loop)
    thread.start()
    assert done.wait(120)
    assert weight.numpy() == 10
    leave.set()
    thread.join()


def regression_model(strategy, *layers):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


class Reading:
    """A thread that reads a model's weights in a loop."""

    def __init__(self, model):
        self.model, self.errors, self.times = model, [], 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def _read(self):
        try:
            while not self._end.is_set():
                assert all(np.isfinite(w).all() for w in self.model.get_weights())
                self.times += 1
        except Exception as error:
            self.errors.append(error)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._end.set()
        self._thread.join(60)
        assert not self._thread.is_alive()


def test_weights_may_be_read_in_another_thread_while_fit_runs(strategy):
    model = regression_model(strategy)
    x, y = helpers.regression(1600, ids=False)
    with Reading(model) as reading:
        model.fit(x, y, batch_size=8, epochs=3, verbose=0)
    assert not reading.errors and reading.times > 3
    assert strategy.steps == 600
    helpers.assert_ledger_balances(strategy)


def test_what_a_reading_thread_meets_ends_fit(strategy):
    """The error of a step is not lost with the thread that waited for rest."""
    model = regression_model(strategy, Failing())
    x, y = helpers.regression(4000, ids=False)
    x[3100] = np.nan
    with Reading(model), pytest.raises(tf.errors.InvalidArgumentError, match="not finite"):
        model.fit(x, y, batch_size=8, epochs=3, verbose=0, shuffle=False)
    model.fit(x[:800], y[:800], batch_size=8, verbose=0)
    helpers.assert_ledger_balances(strategy)


class Same(keras.layers.Layer):
    """Calls Python code that reads nothing."""

    def call(self, inputs):
        outputs = tf.numpy_function(lambda x: x, [inputs], "float32")
        return tf.ensure_shape(tf.stop_gradient(outputs), inputs.shape)


class Failing(keras.layers.Layer):
    def call(self, inputs):
        tf.debugging.assert_all_finite(inputs, "not finite")
        return inputs


@pytest.mark.skipif(helpers.ON_CLUSTER, reason="there is no Python in another process")
@pytest.mark.timeout(300)
def test_python_code_of_a_step_cannot_read_a_weight(strategy):
    class Looks(keras.layers.Layer):
        def call(self, inputs):
            outputs = tf.numpy_function(
                lambda x: x * np.float32(seen[0].get_weights()[0].sum() * 0 + 1),
                [inputs],
                "float32",
            )
            outputs.set_shape(inputs.shape)
            return outputs

    seen = []
    model = regression_model(strategy, Looks())
    seen.append(model)
    x, y = helpers.regression(64, ids=False)
    with pytest.raises(tf.errors.OpError, match="would wait for that step"):
        model.fit(x, y, batch_size=8, verbose=0)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("layers", [(), (lambda: Same(),)])
def test_python_code_of_the_data_may_read_a_weight(strategy, layers):
    if layers and helpers.ON_CLUSTER:
        pytest.skip("There is no Python in another process.")
    model = regression_model(strategy, *(make() for make in layers))
    x, y = helpers.regression(64, ids=False)

    def generator():
        for begin in range(0, 64, 8):
            assert np.isfinite(model.get_weights()[0]).all()
            yield x[begin : begin + 8], y[begin : begin + 8]

    spec = tf.TensorSpec((None, 4), "float32"), tf.TensorSpec((None, 1), "float32")
    data = tf.data.Dataset.from_generator(generator, output_signature=spec)
    data = data.apply(tf.data.experimental.assert_cardinality(8))
    model.fit(data, epochs=2, verbose=0, shuffle=False)
    assert strategy.steps == 16
    helpers.assert_ledger_balances(strategy)
