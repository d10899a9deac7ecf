"""The part of a strategy that TensorFlow and Keras call: `StrategyExtended`, contexts and scope."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_dsgd import _tf, _tf_errors, _tf_random
from tf_dsgd.strategies.caller import model_that_calls
from tf_dsgd.strategies.refused import of_two_scopes
from tf_dsgd.strategies.rows import lookups, splitting, tables
from tf_dsgd.strategies.variable import Kind, ReplicaVariable


class Context(tf.distribute.ReplicaContext):
    """What runs is one worker's step, or the shard's update: there is nobody to reduce with."""

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        del reduce_op, options
        return value


class Extended(_tf.StrategyExtended):
    """The part of a strategy that TensorFlow and Keras call."""

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        beside = kwargs.pop("colocate_with", None)
        strategy = self._container_strategy()
        if splitting.wanted(strategy.placement.split, beside, kwargs):
            lookups.answer()
            with strategy.engine.explained():
                return strategy.adopt_table(splitting.made(strategy, kwargs))
        strategy.placement.check(kwargs)
        shard = strategy.placement.place(beside, kwargs.get("synchronization"))
        create = _tf.make_variable_while_tracing if tf.inside_function() else next_creator
        with strategy.engine.explained():
            lent = strategy.lends_metrics and _is_summed(kwargs)
            home = strategy.cluster.host_device() if lent else strategy.shard_devices[shard]
            with tf.device(home):
                primary = create(**kwargs)
            variable = strategy.adopt(primary, shard, lent)
            variable.beside = beside
            return variable

    def _validate_colocate_with_variable(self, colocate_with_variable: Any) -> None:
        if not isinstance(colocate_with_variable, (ReplicaVariable, tables.SplitTable)):
            raise ValueError(
                f"The variable {colocate_with_variable.name!r} was created outside "
                "`strategy.scope()`. Create the model inside the scope."
            )

    def _call_for_each_replica(self, fn: Any, args: Any, kwargs: Any) -> Any:
        with Context(self._container_strategy(), 0):
            return fn(*args, **kwargs)

    def _update(self, var: Any, fn: Any, args: Any, kwargs: Any, group: bool) -> Any:
        if isinstance(var, tables.SplitTable):
            var.check_in_step()
        if not isinstance(var, (ReplicaVariable, tables.SplitTable)):
            raise ValueError(
                f"The variable {var.name!r} was created outside `strategy.scope()`, and its "
                "optimizer inside. Create both inside the scope."
            )
        result = fn(var, *args, **kwargs)
        return result if group else (result,)

    def _replica_ctx_update(
        self, var: Any, fn: Any, args: Any = (), kwargs: Any = None, group: bool = True
    ) -> Any:
        return self._update(var, fn, args, kwargs or {}, group)

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        return value

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        return value

    def _batch_reduce_to(self, reduce_op: Any, pairs: Any, options: Any) -> Any:
        return [value for value, _ in pairs]

    def _gather_to_implementation(
        self, value: Any, destinations: Any, axis: int, options: Any
    ) -> Any:
        return value

    def _use_merge_call(self) -> bool:
        return False

    def _get_local_replica_id(self, replica_id: int) -> int:
        return replica_id

    def _get_replica_id_in_sync_group(self, replica_id: int) -> int:
        return replica_id

    @property
    def _num_replicas_in_sync(self) -> int:
        # Each worker's mini-batch is a step of its own: Keras must not divide the loss.
        return 1

    @property
    def worker_devices(self) -> tuple[str, ...]:
        return tuple(self._container_strategy().engine.store.worker_devices)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        return tuple(self._container_strategy().shard_devices)

    def non_slot_devices(self, var_list: Any) -> tuple[str, ...]:
        return self.parameter_devices

    def _local_results(self, value: Any) -> tuple[Any, ...]:
        own = isinstance(value, ReplicaVariable) and value.kind is Kind.OWN
        return value.each_at_rest() if own else (value,)

    def value_container(self, value: Any) -> Any:
        return value

    def read_var(self, variable: Any) -> tf.Tensor:
        return variable.read_value()

    def _in_multi_worker_mode(self) -> bool:
        return False

    @property
    def experimental_between_graph(self) -> bool:
        return False

    @property
    def experimental_should_init(self) -> bool:
        return True

    @property
    def should_checkpoint(self) -> bool:
        return True

    @property
    def should_save_summary(self) -> bool:
        return True


def _is_summed(options: dict[str, Any]) -> bool:
    """Whether a variable made with these options is a metric's."""
    if options.get("synchronization") != tf.VariableSynchronization.ON_READ:
        return False
    return options.get("aggregation") != tf.VariableAggregation.ONLY_FIRST_REPLICA


class Scope:
    """A strategy's scope, with an error that says what to do when two scopes meet."""

    def __init__(self, scope: Any, strategy: Any):
        self._scope = scope
        self._strategy = strategy

    def __enter__(self) -> Any:
        try:
            entered = self._scope.__enter__()
        except RuntimeError as error:
            raise RuntimeError(
                "The scope of another tf.distribute strategy is open. Leave it first: a model is "
                "trained by one strategy."
            ) from error
        state = _tf_random.state_without_seed()
        if getattr(state, "distribute_strategy", None) not in (None, self._strategy):
            _tf_random.begin_generator_anew()  # workers would draw from another strategy's
        return entered

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> Any:
        result = self._scope.__exit__(kind, error, traceback)
        if isinstance(error, RuntimeError) and _tf_errors.says_other_strategy(error):
            model = model_that_calls("fit", "evaluate", "predict", "train_on_batch", "compile")
            if model is not None:
                raise of_two_scopes(model) from None
            raise ValueError(
                "The model or its optimizer was created outside this strategy's scope. Create "
                "the model and the optimizer, and compile, inside `with strategy.scope():`."
            ) from error
        return result
