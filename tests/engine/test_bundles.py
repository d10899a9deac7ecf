"""Tensors that travel joined come out as they were."""

import numpy as np
import pytest
import tensorflow as tf

from tf_dsgd import _tf, _tf_order
from tf_dsgd.accumulators import Accumulator
from tf_dsgd.engine.bundles import Bundle
from tf_dsgd.engine.mutexes import Locks
from tf_dsgd.engine.parcels import are_rows


def gradient(number, width=3, dtype=tf.float32):
    rows = tf.random.stateless_uniform([number], [1, number], 0, 50, tf.int64)
    values = tf.cast(tf.random.stateless_normal([number, width], [2, number]), dtype)
    return tf.IndexedSlices(values, rows, tf.constant([50, width]))


def specs_of(content):
    """As traced: of rows it is not known how many there are."""
    flat = tf.nest.flatten(content, expand_composites=True)
    rows = are_rows(content)
    return [
        tf.TensorSpec([None, *t.shape[1:]] if is_rows else t.shape, t.dtype)
        for t, is_rows in zip(flat, rows, strict=True)
    ], rows


@pytest.mark.parametrize("numbers", [(5, 7), (0, 1), (0, 0)])
@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16, tf.float64])
def test_rows_of_several_gradients_and_what_is_small_are_one_tensor(numbers, dtype):
    content = [
        tf.constant([1, 2, 3, 4, 5], tf.int64),
        [gradient(numbers[0], dtype=dtype), tf.constant([[1.5, -2.0]])],
        [gradient(numbers[1], width=2), tf.constant([True, False])],
    ]
    specs, rows = specs_of(content)
    assert sum(rows) == 4

    @tf.function(input_signature=specs)
    def there(*flat):
        return Bundle.of(flat, rows=rows).pack(flat)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.uint8)])
    def back(sent):
        return Bundle.of(specs, rows=rows).unpack([sent])

    flat = tf.nest.flatten(content, expand_composites=True)
    (sent,) = there(*flat)
    for was, became in zip(flat, back(sent), strict=True):
        assert was.dtype == became.dtype
        np.testing.assert_array_equal(was.numpy(), became.numpy())


def test_rows_travel_singly_where_nobody_says_that_they_are_few():
    content = [tf.constant(1), tf.constant(2), gradient(4)]
    specs, rows = specs_of(content)
    assert len(Bundle.of(specs, rows=rows).sent) == 1
    singly = Bundle.of(specs).sent
    assert [spec.dtype for spec in singly] == [tf.uint8, tf.float32, tf.int64]


def test_what_is_sent_is_of_the_type_and_shape_that_is_said():
    tensors = [tf.constant(1.0), tf.constant([True]), tf.constant("text"), tf.zeros([1 << 20])]
    bundle = Bundle.of(tensors)
    sent = bundle.pack(tensors)
    assert [(s.shape, s.dtype) for s in bundle.sent] == [(t.shape, t.dtype) for t in sent]
    assert bundle.sent[0] == tf.TensorSpec([5], tf.uint8)


class Place:
    """A worker of one sparse weight."""

    weights = (tf.Variable(tf.zeros([50, 3])),)

    def __init__(self):
        self._cells = {}

    def is_sparse(self, index):
        return True

    def cell(self, name, index, *, shape=None, dtype=tf.float32):
        zeros = np.zeros([d or 0 for d in shape], tf.as_dtype(dtype).as_numpy_dtype)
        make = {"device": None, "dtype": dtype, "shape": shape}
        return self._cells.setdefault(name, _tf.make_variable(zeros, **make))


def test_a_sum_of_sparse_gradients_is_that_of_the_dense_ones():
    accrued, gradients = Accumulator(Place(), "accrued", 0), [gradient(n) for n in (4, 0, 9, 1)]

    @tf.function
    def several():
        for factor, each in zip((None, None, 2.0, None), gradients, strict=True):
            accrued.add(each, factor)
        return accrued.rows, accrued.take()

    for _ in range(2):  # which begins anew
        rows, total = several()
        assert len(rows) == 14 and len(np.unique(total.indices)) == len(total.indices)
        want = sum(
            f * tf.convert_to_tensor(g) for f, g in zip((1, 1, 2, 1), gradients, strict=True)
        )
        np.testing.assert_allclose(tf.convert_to_tensor(total), want, rtol=1e-6, atol=1e-6)
    assert accrued.rows.shape == [0]


def test_a_lock_is_taken_when_what_its_body_uses_is_there():
    """It waits for that, and for nothing else."""
    locks, number = Locks(1, None), _tf.make_variable(tf.zeros([]), device=None)

    @tf.function(input_signature=[tf.TensorSpec([])] * 3)
    def function(used, shown, unused):
        def body(arrived):
            number.assign_add(arrived[0])
            tf.exp(arrived[2])  # of which nothing becomes
            return arrived[1]

        return locks.held([used, shown, unused], body)

    concrete = function.get_concrete_function()
    (taken,) = (op for op in concrete.graph.get_operations() if "TakeGradient" in op.type)
    waits_for = [op.inputs[0].op.name for op in taken.control_inputs]
    assert waits_for == ["used", "shown"]
    assert _tf_order.uses(concrete)[:3] == [True, True, False]
    sent = _tf_order.without_unused(concrete, [tf.ones([])] * 3)
    assert [float(value) for value in sent] == [1.0, 1.0, 0.0]
    assert float(function(2.0, 3.0, 4.0)) == 3.0 and float(number) == 2.0
