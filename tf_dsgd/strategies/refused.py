"""What Keras allows and no worker can do: refused before anything is trained, with the remedy."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_dsgd import _tf, _tf_random, checks
from tf_dsgd._requirements import installed
from tf_dsgd.algorithm import Algorithm, Codec, Message
from tf_dsgd.algorithms.downpour import CompiledOptimizer
from tf_dsgd.arithmetic import Gradient
from tf_dsgd.compression import TopK
from tf_dsgd.compression.lossy import Lossy
from tf_dsgd.optimizers.delay import DelayTolerantOptimizer
from tf_dsgd.strategies.arguments import keeps_beside_tables
from tf_dsgd.strategies.caller import callbacks_given, model_that_calls
from tf_dsgd.strategies.capture import Application, Optimizers
from tf_dsgd.strategies.dataset import is_keras_enqueuer
from tf_dsgd.strategies.rows.tables import Part, SplitTable
from tf_dsgd.strategies.rows.touched_rows import keeps_still
from tf_dsgd.strategies.tracing import Trace
from tf_dsgd.strategies.variable import Kind, ReplicaVariable

_EXAMPLES = {"compression": "tf_dsgd.compression.Threshold(0.002)", "gradients_per_update": "2"}


def check_arguments(
    strategy: Callable[..., Any], by_place: Sequence[Any], given: Mapping[str, Any]
) -> None:
    """Names what a strategy does not take, and where it is; and what it needs.

    Raises:
        TypeError: for an argument that another one, or a cluster, or nobody has; and for one that
            is missing.
    """
    name, taken = strategy.__name__, inspect.signature(strategy).parameters
    if "num_workers" in given:
        raise TypeError(
            f"{name} has no argument 'num_workers'; its cluster knows that number: "
            f"{name}(tf_dsgd.LocalCluster(num_workers={given['num_workers']!r}))."
        )
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values())
    if "compression" in given and "compression" not in taken and not open_ended:
        raise TypeError(
            f"{name} has no argument 'compression': its workers send weights, or the gradient of "
            "all data, and a part of these is no smaller step in the same direction. Use "
            "tf_dsgd.DownpourStrategy or tf_dsgd.SoftsyncStrategy, whose workers send gradients or "
            "changes. "
            f"Received: compression={given['compression']!r}."
        )
    if "model_parallel" in given and "model_parallel" not in taken and not open_ended:
        raise TypeError(
            f"{name} has no argument 'model_parallel': its workers have no replica that could be "
            "laid over several devices, or need the gradient of all data. Use "
            "tf_dsgd.DownpourStrategy, SoftsyncStrategy, PeriodicAveragingStrategy or "
            f"ElasticAveragingStrategy. Received: model_parallel={given['model_parallel']!r}."
        )
    if "placement" in given and "placement" not in taken and not open_ended:
        raise TypeError(
            f"{name} has no argument 'placement': each of its workers has all weights, tables as "
            "well. Use tf_dsgd.DownpourStrategy, SoftsyncStrategy, PeriodicAveragingStrategy or "
            f"HogwildStrategy. Received: placement={given['placement']!r}."
        )
    checks.call(strategy, by_place, given, examples=_EXAMPLES)


def check_applied(algorithm: Algorithm, applications: Sequence[Application]) -> None:
    """Whether gradients can be applied on shards as these optimizers would on the spot.

    Raises:
        ValueError: if they can't.
    """
    one_by_one = type(algorithm.server) is CompiledOptimizer
    exchange = algorithm.exchange
    each = one_by_one and exchange.push_every == exchange.fetch_every == 1
    if not each or type(algorithm.codec) is not Codec:
        _check_not_overwritten(v for applied in applications for v in applied.variables)
    _check_codec(algorithm.codec, applications)


def _check_not_overwritten(variables: Iterable[Any]) -> None:
    """Whether these variables, of which changes are added up, have a sum of changes."""
    for variable in variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise ValueError(
                f"{variable.path!r} takes its gradient for its new value, as Keras has it of "
                "float8's scales (overwrite_with_gradient), and here gradients, or the changes "
                "that several workers make, are added up, added to the weights, or compressed. Use "
                "PeriodicAveragingStrategy without an outer optimizer; or DownpourStrategy with "
                "periods of 1 and without compression; or with one worker and "
                'local_rule="optimizer".'
            )


def _check_codec(codec: Codec, applications: Sequence[Application]) -> None:
    """Whether gradients for these optimizers, which run on shards, can be compressed."""
    if not isinstance(codec, Lossy):
        return
    for application in applications:
        tables = [weight.name for weight in application.weights if not weight.copied]
        if tables and codec.keeps:
            raise keeps_beside_tables(codec, tables[:1])
        if application.inner is not application.optimizer:
            raise ValueError(
                f"compression={codec!r} does not go with {type(application.optimizer).__name__}, "
                "which looks for gradients that are not finite, and those cannot be compressed. "
                'Use local_rule="optimizer", under which each worker looks at its own, or '
                'compression=tf_dsgd.compression.Cast("bfloat16"), or another dtype policy.'
            )
        if codec.held_back is not None and isinstance(application.inner, DelayTolerantOptimizer):
            raise ValueError(
                f"{type(application.inner).__name__} corrects a message for the delay of its "
                f"gradients, and compression={codec!r} sends what it held back of older ones, too. "
                "Use tf_dsgd.compression.QSGD or Cast, which hold nothing back, or another "
                "optimizer."
            )


def check_changes(
    codec: Codec,
    optimizers: Iterable[keras.optimizers.Optimizer],
    model: keras.Model | None,
    assigned: Sequence[str],
    workers: int,
) -> None:
    """Whether the changes that these optimizers make of a model on workers can be added up.

    And whether they can be held back, if the codec does.

    A change that is held back is still missing in the worker's copy at the next step. What adds its
    step to the weights goes on from there. What sets them, whatever they are, asks for the same
    change again at each step, until all of these are sent. `assigned` are weights that the step
    sets, as a train_step does that clips them.

    Raises:
        ValueError: if they can't.
    """
    if workers > 1 or codec.held_back is not None:
        of_optimizers = [v for optimizer in optimizers for v in _tf.built_variables(optimizer)]
        _check_not_overwritten(of_optimizers if model is None else model.trainable_variables)
    if codec.held_back is None:
        return
    setters = []
    for optimizer in optimizers:
        if isinstance(optimizer, keras.optimizers.Ftrl):
            setters.append("Ftrl")
        if optimizer.use_ema and optimizer.ema_overwrite_frequency:
            setters.append(f"ema_overwrite_frequency={optimizer.ema_overwrite_frequency}")
    for variable in () if model is None else model.trainable_variables:
        if variable.constraint is not None:
            setters.append(f"{type(variable.constraint).__name__}() of {variable.path}")
    setters += [f"the step, which assigns to {name!r}," for name in assigned]
    if setters:
        raise ValueError(
            f"compression={codec!r} holds back a part of each change of the weights, and "
            f"{setters[0]} sets them, wherever they are: it would ask for that part again at each "
            "step. Leave it out; or use tf_dsgd.compression.QSGD or Cast, which hold nothing back, "
            "or tf_dsgd.DownpourStrategy with its default local_rule, whose workers send gradients."
        )


def check_delay_is_known(optimizer: Any, message: Message | None) -> None:
    """Whether an optimizer that corrects for delays is told which message it applies."""
    if not isinstance(optimizer, DelayTolerantOptimizer):
        return
    name = type(optimizer).__name__
    if message is None:
        raise ValueError(
            f"{name} corrects the gradient of each message for that message's delay, and this "
            "algorithm applies several messages at once, or does not say which one it applies. Use "
            "tf_dsgd.DownpourStrategy, or another optimizer."
        )
    if optimizer.gradient_accumulation_steps:
        raise ValueError(
            f"{name} corrects the gradient of each message for that message's delay, and "
            "gradient_accumulation_steps would add up those of several workers. Use push_every, "
            "which adds up one worker's. Received: gradient_accumulation_steps="
            f"{optimizer.gradient_accumulation_steps}."
        )


def check_empty(application: Application, shard: int) -> None:
    """Whether an optimizer can have a shard that holds nothing of what it trains."""
    if application.inner is not application.optimizer:
        raise ValueError(
            f"Shard {shard} holds no variable that {application.optimizer.name!r} trains, so that "
            "its loss scale would not adapt there. Use fewer ps tasks for a model this small."
        )


_AT_ONCE = "Workers update the same weights at once here, without a lock"


def check_side_by_side(applications: Sequence[Application]) -> None:
    """Whether updates can be made while others are, and weights be read where they are.

    Raises:
        ValueError: if they can't.
    """
    for application in applications:
        check_adds(application.optimizer)
    _check_added_to(applications)


def check_adds(optimizer: keras.optimizers.Optimizer) -> None:
    """Whether an optimizer's updates can run side by side: they add in place, and only add.

    Raises:
        ValueError: if they can't.
    """
    kind = type(optimizer).__name__
    if hasattr(optimizer, "inner_optimizer"):
        raise ValueError(
            f"{_AT_ONCE}; {kind} adapts one loss scale for all. Use another dtype policy, such as "
            "mixed_bfloat16."
        )
    if not keeps_still(optimizer):
        momentum = f" with momentum={optimizer.momentum!r}" if kind == "SGD" else ""
        raise ValueError(
            f"{_AT_ONCE}; {kind}{momentum} reads its slots and writes them back, by which updates "
            "of others would be lost. Use keras.optimizers.SGD without momentum, or Adagrad, which "
            "add in place; or tf_dsgd.DownpourStrategy, which has a lock."
        )
    for option in ("use_ema", "gradient_accumulation_steps"):
        value = getattr(optimizer, option, None)
        if value:
            raise ValueError(
                f"{_AT_ONCE}; {option} writes over what others have added. Leave it out, or use "
                f"tf_dsgd.DownpourStrategy. Received: {option}={value!r}."
            )


def _check_added_to(applications: Sequence[Application]) -> None:
    """Whether these weights can be updated side by side, and read where they are.

    Raises:
        ValueError: if they can't.
    """
    for application in applications:
        for variable in application.variables:
            constraint = getattr(variable, "constraint", None)
            if constraint is not None:
                raise ValueError(
                    f"{_AT_ONCE}; the constraint of {variable.name!r} writes over what others have "
                    f"added. Leave it out, or use DownpourStrategy. Received: {constraint!r}."
                )
        for gradient, weight in zip(application.gradients, application.weights, strict=True):
            if isinstance(gradient, tf.IndexedSlices) and not isinstance(weight, Part):
                raise ValueError(
                    f"{_AT_ONCE}; {weight.name!r} has gradients of some rows, and is read whole, "
                    "which would copy it at each update. Name it in `placement`, as by "
                    'placement={"table/.*": tf_dsgd.Rows()}.'
                )


def check_dataset(dataset: Any) -> None:
    """Whether a dataset's mini-batches can be handed out.

    Raises:
        ImportError: if the callbacks of `fit` need TensorBoard, and it is not there.
        TypeError: if it is no `tf.data.Dataset`.
        ValueError: if Keras would give some of its mini-batches twice, and leave others out.
    """
    _check_tensorboard()
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(
            f"Expected a tf.data.Dataset of mini-batches. Received: {type(dataset).__name__}. "
            "Build one, for example by tf.data.Dataset.from_generator."
        )
    if is_keras_enqueuer(dataset):
        raise ValueError(
            "A PyDataset with workers > 1 cannot be used under a tf.distribute strategy: Keras "
            "looks at its first batch before training, and its queue then gives batches twice "
            "and leaves others out. Use workers=1 (batches are prefetched all the same), or a "
            "tf.data.Dataset. If this is a dataset of your own: Keras's queues are told by two "
            "options together, autotune.enabled=False and threading.private_threadpool_size=1; "
            "leave one of them out, or take another pool size."
        )


def _check_tensorboard() -> None:
    """Before Keras's callback fails with what TensorFlow says of its own summaries."""
    given = any(isinstance(c, keras.callbacks.TensorBoard) for c in callbacks_given())
    if given and not installed("tensorboard"):
        raise ImportError(
            "keras.callbacks.TensorBoard needs TensorBoard, which is not installed. Run: "
            'pip install "tf_dsgd[tensorboard]"'
        )


def check_step(fn: Any, optimizers: Optimizers) -> None:
    """Whether workers can run a step; one that is no method of a Keras model is taken as it is.

    Args:
        fn: the step.
        optimizers: those that were created in the strategy's scope.

    Raises:
        ValueError: if the model was compiled in a way that they cannot.
    """
    if optimizers.objective is not None and model_that_calls("train_on_batch") is not None:
        raise ValueError(
            "train_on_batch is no iteration of a batch method, which needs several passes over all "
            "data. Call model.fit with all of them."
        )
    model = getattr(fn, "__self__", None)
    if not isinstance(model, keras.Model):
        return
    if model.run_eagerly or tf.config.functions_run_eagerly():
        setting = "run_eagerly=True" if model.run_eagerly else "tf.config.run_functions_eagerly"
        raise ValueError(
            f"{setting} is not possible under a tf_dsgd strategy: workers run traced "
            "steps. To debug, compile the model outside the scope, or use tf.print."
        )
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and optimizer not in optimizers:
        raise of_two_scopes(model)


def of_two_scopes(model: keras.Model) -> ValueError:
    """The error of a model that was made in one place and compiled in another."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    optimizer = getattr(optimizer, "name", None)
    if any(isinstance(v.value, (ReplicaVariable, SplitTable)) for v in model.variables):
        where = (
            f"was made in a strategy's scope, and its optimizer {optimizer!r} was not created "
            "there: it was made, or compile was called, outside of it or in another strategy's."
        )
    else:
        where = (
            "was made outside the strategy's scope, and compiled or trained inside (its optimizer "
            f"is {optimizer!r})."
        )
    return ValueError(
        f"The model {model.name!r} {where} Make the model and its optimizer, and compile, inside "
        "the same `with strategy.scope():`."
    )


def check_graph(gradients: Sequence[Gradient], graph: Any) -> None:
    """Refuses gradients that were computed in a graph inside that of the step."""
    for gradient in gradients:
        tensor = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
        if getattr(tensor, "graph", graph) is not graph:
            raise ValueError(
                "optimizer.apply was called inside tf.cond, a loop or a nested tf.function, where "
                "its gradients cannot be taken out. Call it at the top level of the step; to skip "
                "a step, make the gradients zero."
            )


def warn_of_order(applications: Sequence[Application]) -> None:
    """Says what several updates of one step become where shards make them."""
    times = sum(not application.continues for application in applications)
    if times > 1:
        warnings.warn(
            f"The step applies gradients {times} times. All of them are computed on "
            "the weights that the worker has at the beginning of the step, and applied together "
            "on the shard. Where one must see the other's update (as in a GAN's step), use "
            "local_rule='optimizer'.",
            stacklevel=2,
        )


def warn_of_momentum(codec: Codec, optimizers: Iterable[keras.optimizers.Optimizer]) -> None:
    """Says that momentum acts twice: of the codec, and of the optimizer."""
    if not isinstance(codec, TopK) or not codec.momentum:
        return
    for optimizer in optimizers:
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        name = "momentum" if getattr(inner, "momentum", 0.0) else "beta_1"
        value = getattr(inner, name, 0.0)
        if value:
            warnings.warn(
                f"Momentum acts twice: {codec!r} has it, and so has {type(inner).__name__}, with "
                f"{name}={value}. Compile an optimizer without, as keras.optimizers.SGD(0.1), or "
                f"use TopK({codec.fraction}).",
                stacklevel=2,
            )


def check_foreign(graph: Any, trace: Trace, strategy: Any) -> None:
    """Refuses writes to variables of nobody's, and of another strategy's.

    Workers would overwrite each other's.
    """
    names = {id(v.handle): v for v in graph.variables if not isinstance(v, ReplicaVariable)}
    changed = [
        names[id(outside)]
        for outside, inside in graph.captures
        if id(outside) in names
        and any(op.type.startswith(("Assign", "ResourceScatter")) for op in inside.consumers())
    ]
    seeds = [v for v in trace.touched.values() if getattr(v, "kind", None) is Kind.SEED]
    for variable in [*changed, *trace.written.values(), *seeds]:
        if getattr(variable, "distribute_strategy", None) is strategy:
            continue
        if variable is _tf_random.state_without_seed():
            raise ValueError(
                "The step draws random numbers by keras.random without a seed: from a generator "
                "of Keras's own, which was created outside this strategy's scope. Pass "
                "seed=keras.random.SeedGenerator(...), created inside `with strategy.scope():`, "
                "as in a layer's __init__."
            )
        raise ValueError(
            f"The step changes the variable {variable.name!r}, which was created outside this "
            "strategy's scope, by a metric, a layer or a seed generator, or by itself. Create them "
            "and the model inside `with strategy.scope():`."
        )


def check_averaged(weights: Sequence[Any], tables: Sequence[Part]) -> None:
    """Refuses a step of which tables that are split are all that is trained."""
    if tables and not weights:
        raise ValueError(
            f"All that the step trains is split by rows (as {tables[0].table.name!r}), so that no "
            "worker has anything to average. Use tf_dsgd.DownpourStrategy, which takes the same "
            "`placement`."
        )


def check_owner(weights: Sequence[Any], strategy: Any) -> None:
    """Refuses weights that are no strategy's, or another one's."""
    for variable in weights:
        if getattr(variable, "distribute_strategy", None) is not strategy:
            raise ValueError(
                f"The trainable variable {variable.name!r} was not created in this strategy's "
                "scope. Create the model, and its optimizer, inside `with strategy.scope():`."
            )
