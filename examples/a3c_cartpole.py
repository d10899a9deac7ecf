"""A3C: asynchronous actor-critic workers learn to balance a pole, in a loop that is not `fit`.

    python examples/a3c_cartpole.py --workers 2             # threads of this process
    python examples/a3c_cartpole.py --simulated --workers 8
    python -m tf_dsgd.launch --workers 2 examples/a3c_cartpole.py

Each worker has a cart and a pole of its own, as TensorFlow operations. A mini-batch of this loop is
a *ticket*, the number of a rollout: whoever draws it plays at most t_max = 5 steps with the weights
just fetched, and sends the actor-critic gradient of them. The shard applies it by RMSProp, whose
one running mean of squares all workers share (Mnih et al., Asynchronous Methods for Deep
Reinforcement Learning, ICML 2016, algorithm S3). CartPole is solved when 100 episodes have a mean
return of 475, of 500 at most.
"""

import argparse
import dataclasses
import math
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import tensorflow as tf

import tf_dsgd

# -- the cart and the pole: Gymnasium's CartPole-v1 ------------------------------------------------

GRAVITY, CART_MASS, POLE_MASS, HALF_LENGTH = 9.8, 1.0, 0.1, 0.5
FORCE, SECONDS = 10.0, 0.02
MOST_POSITION, MOST_ANGLE = 2.4, 12 * 2 * math.pi / 360
MOST_STEPS = 500
SOLVED, EPISODES = 475.0, 100


def moved(state: tf.Tensor, action: tf.Tensor) -> tf.Tensor:
    """The state `[..., 4]` (position, speed, angle, its speed) after a push left (0) or right (1).

    Explicit Euler: places move by the old speeds.
    """
    position, speed, angle, turning = tf.unstack(state, axis=-1)
    force = FORCE * tf.cast(2 * action - 1, state.dtype)
    cosine, sine = tf.cos(angle), tf.sin(angle)
    total, moment = CART_MASS + POLE_MASS, POLE_MASS * HALF_LENGTH
    push = (force + moment * turning * turning * sine) / total
    resistance = HALF_LENGTH * (4.0 / 3.0 - POLE_MASS * cosine * cosine / total)
    angular = (GRAVITY * sine - cosine * push) / resistance
    linear = push - moment * angular * cosine / total
    return tf.stack(
        [
            position + SECONDS * speed,
            speed + SECONDS * linear,
            angle + SECONDS * turning,
            turning + SECONDS * angular,
        ],
        axis=-1,
    )


def fallen(state: tf.Tensor) -> tf.Tensor:
    """Whether the episode terminates: the cart is off the track, or the pole too far down."""
    return (tf.abs(state[..., 0]) > MOST_POSITION) | (tf.abs(state[..., 2]) > MOST_ANGLE)


def first_state(uniform: tf.Tensor) -> tf.Tensor:
    """Where an episode begins, from four numbers between 0 and 1: within 0.05 of upright rest."""
    return 0.1 * uniform - 0.05


# -- the actor and the critic ----------------------------------------------------------------------


def build_model(units: int) -> keras.Model:
    """From a state to the logits of the two actions, and to the value of the state."""
    state = keras.Input((4,))
    hidden = keras.layers.Dense(units, "tanh")(state)
    return keras.Model(state, [keras.layers.Dense(2)(hidden), keras.layers.Dense(1)(hidden)])


def drawn(logits: tf.Tensor, uniform: tf.Tensor) -> tf.Tensor:
    """An action for each row of logits, from one number between 0 and 1 for each."""
    return tf.cast(uniform < tf.sigmoid(logits[..., 1] - logits[..., 0]), tf.int32)


@dataclasses.dataclass
class Rollout:
    """At most t_max steps of an episode; where it ended before, the rest repeats the last state."""

    states: tf.Tensor  # [t_max + 1, 4]: before each step, and after the last
    actions: tf.Tensor  # [t_max]
    taken: tf.Tensor  # [t_max]: whether the episode still went on
    length: tf.Tensor  # steps of the episode so far
    terminated: tf.Tensor  # fallen: what would come is worth nothing
    over: tf.Tensor  # terminated, or truncated after 500 steps: what would come has its value


def play(model: keras.Model, state: tf.Tensor, length: tf.Tensor, uniform: tf.Tensor) -> Rollout:
    """Goes on from a state, `length` steps into its episode; a step for each of `uniform`."""
    states, actions, taken = [state], [], []
    over = tf.constant(False)
    for draw in tf.unstack(uniform):
        logits, _ = model(state[None])
        actions.append(drawn(logits[0], draw))
        taken.append(~over)
        state = tf.where(over, state, moved(state, actions[-1]))
        length += tf.cast(~over, length.dtype)
        over = fallen(state) | (length >= MOST_STEPS)
        states.append(state)
    stacked = (tf.stack(each) for each in (states, actions, taken))
    return Rollout(*stacked, length, fallen(state), over)


def n_step_returns(taken: tf.Tensor, bootstrap: tf.Tensor, discount: float) -> tf.Tensor:
    """R <- r + discount R, from the last step back to the first; every step's reward r is 1."""
    returns, following = [], bootstrap
    for goes_on in reversed(tf.unstack(taken)):
        following = tf.where(goes_on, 1.0 + discount * following, following)
        returns.append(following)
    return tf.stack(returns[::-1])


def loss_of(model: keras.Model, rollout: Rollout, options: argparse.Namespace) -> tf.Tensor:
    """-log pi(a|s) (R - V) - entropy_weight H(pi) + (R - V)^2 / 2, summed over the steps."""
    logits, values = model(rollout.states)
    values = values[:, 0]
    bootstrap = tf.where(rollout.terminated, 0.0, tf.stop_gradient(values[-1]))
    advantage = n_step_returns(rollout.taken, bootstrap, options.discount) - values[:-1]
    logs = tf.nn.log_softmax(logits[:-1])
    chosen = tf.gather(logs, rollout.actions, batch_dims=1)
    entropy = -tf.reduce_sum(tf.exp(logs) * logs, axis=1)
    actor = -chosen * tf.stop_gradient(advantage) - options.entropy_weight * entropy
    return tf.reduce_sum(tf.cast(rollout.taken, tf.float32) * (actor + 0.5 * advantage**2))


# -- what a worker does ----------------------------------------------------------------------------


def own(initial: tf.Tensor) -> tf.Variable:
    """In a strategy's scope: a variable of which each worker has its own, which never travels."""
    return tf.Variable(
        initial,
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )


class Agent:
    """The model and its optimizer, which workers share, and the episode that each of them plays.

    Make it in the strategy's scope, or, for one process without a strategy, outside of any.
    """

    def __init__(self, options: argparse.Namespace):
        self.options = options
        keras.utils.set_random_seed(options.seed)
        self.model = build_model(options.units)
        rate = keras.optimizers.schedules.PolynomialDecay(options.rate, options.rollouts, 0.0)
        self.optimizer = keras.optimizers.RMSprop(rate, rho=0.99, epsilon=0.1, global_clipnorm=40.0)
        self.optimizer.build(self.model.trainable_variables)
        self.returns = keras.metrics.Mean()  # of the episodes that ended, whoever played them
        self.state = own(tf.zeros([4]))
        self.length = own(tf.zeros([], tf.int32))  # 0: the next rollout begins an episode

    def step(self, ticket: tf.Tensor) -> dict[str, tf.Tensor]:
        """One rollout and its gradient; its random numbers are the ticket's, whoever plays."""
        options = self.options
        seed = tf.stack([tf.constant(options.seed, tf.int64), ticket])
        uniform = tf.random.stateless_uniform([4 + options.t_max], seed)
        state = tf.where(self.length > 0, self.state, first_state(uniform[:4]))
        rollout = play(self.model, state, self.length.read_value(), uniform[4:])
        with tf.GradientTape() as tape:
            loss = loss_of(self.model, rollout, options)
        weights = self.model.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.state.assign(rollout.states[-1])
        self.length.assign(tf.where(rollout.over, 0, rollout.length))
        self.returns.update_state(rollout.length, sample_weight=rollout.over)
        return {"loss": loss, "length": rollout.length}


# -- the loop --------------------------------------------------------------------------------------


def make_judge(options: argparse.Namespace):
    """A function from weights and a number to the mean return of 100 new episodes.

    A model of its own, here and outside of any scope: no worker takes part.
    """
    model = build_model(options.units)

    @tf.function
    def mean_return(seed: tf.Tensor) -> tf.Tensor:
        def step(now, state, lengths, over):
            uniform = tf.random.stateless_uniform([EPISODES], tf.stack([seed, now]))
            after = moved(state, drawn(model(state)[0], uniform))
            state = tf.where(over[:, None], state, after)
            lengths += tf.cast(~over, tf.int32)
            return now + 1, state, lengths, over | fallen(state) | (lengths >= MOST_STEPS)

        uniform = tf.random.stateless_uniform([EPISODES, 4], tf.stack([seed, -1]))
        lengths, over = tf.zeros([EPISODES], tf.int32), tf.zeros([EPISODES], tf.bool)
        begin = (tf.constant(0, tf.int64), first_state(uniform), lengths, over)
        last = tf.while_loop(lambda *now: ~tf.reduce_all(now[-1]), step, begin)
        return tf.reduce_mean(tf.cast(last[2], tf.float32))

    def judge(weights: list, number: int) -> float:
        model.set_weights(weights)
        return float(mean_return(tf.constant(number, tf.int64)))

    return judge


def train(strategy: tf_dsgd.DownpourStrategy, options: argparse.Namespace, note) -> dict:
    """Trains until 100 new episodes have a mean return of 475; tells what it took.

    At each look `note` is called with the rollouts so far, the metric of the episodes that ended in
    them since the last look, and the mean return of the new ones.
    """
    with strategy.scope():
        agent = Agent(options)
    judge = make_judge(options)

    @tf.function
    def distributed_step(ticket):
        return strategy.run(agent.step, args=(ticket,))

    start, episodes, mean = time.perf_counter(), 0, 0.0
    tickets = tf.data.Dataset.range(options.rollouts)
    for number, ticket in enumerate(strategy.experimental_distribute_dataset(tickets), 1):
        distributed_step(ticket)
        if number % options.check_every and number < options.rollouts:
            continue
        weights = agent.model.get_weights()  # waits for all rollouts handed out
        mean = judge(weights, number)
        note(number, agent.returns, mean)
        episodes += int(agent.returns.count)
        agent.returns.reset_state()
        if mean >= SOLVED:
            break
    return {
        "solved": mean >= SOLVED,
        "rollouts": strategy.steps,
        "episodes": episodes,
        "seconds": time.perf_counter() - start,
        "agent": agent,
    }


def positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 31:
        raise argparse.ArgumentTypeError(f"must be an integer from 1 on. Received: {text}")
    return int(text)


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--workers", type=positive, help="default: one per GPU, else per core; as launched")
    add("--simulated", action="store_true", help="workers on a virtual clock, which repeats")
    add("--seed", type=int, default=1)
    add("--rollouts", type=positive, default=20_000, help="at most; the rate falls to 0 by then")
    add("--check_every", type=positive, default=500, help="rollouts")
    add("--t_max", type=positive, default=5, help="steps of a rollout")
    add("--rate", type=float, default=0.01, help="of RMSProp, at first")
    add("--discount", type=float, default=0.99, help="gamma, of a step")
    add("--entropy_weight", type=float, default=0.01, help="beta")
    add("--units", type=positive, default=64, help="of the hidden layer")
    add("--save", help="file for the model, which ends with .keras")
    options = parser.parse_args(arguments)
    if not 0 <= options.seed < 1 << 31:
        parser.error(f"--seed must be from 0 to 2**31 - 1. Received: {options.seed}")
    if not 0 < options.rate < 1e9:
        parser.error(f"--rate must be above 0, and finite. Received: {options.rate}")
    if not 0 <= options.discount <= 1:
        parser.error(f"--discount must be from 0 to 1. Received: {options.discount}")
    if not 0 <= options.entropy_weight < 1e9:
        parser.error(f"--entropy_weight must be at least 0. Received: {options.entropy_weight}")
    if options.save and not options.save.endswith(".keras"):
        parser.error(f"--save must end with .keras. Received: {options.save}")
    if options.save and not os.path.isdir(os.path.dirname(options.save) or "."):
        parser.error(f"--save must be in a folder that exists. Received: {options.save}")
    if os.environ.get("TF_CONFIG") and (options.simulated or options.workers):
        parser.error("--workers and --simulated are not for a launched script: its cluster is")
    return options


def make_strategy(options: argparse.Namespace) -> tf_dsgd.DownpourStrategy:
    """Every rollout begins with a fetch and ends with a push, as in the paper."""
    cluster = None
    if options.simulated:
        # A rollout takes a second, a message a tenth of one.
        cluster = tf_dsgd.SimulatedCluster(
            options.workers or 8, compute_seconds=1.0, network_seconds=0.1, seed=options.seed
        )
    elif options.workers:
        cluster = tf_dsgd.LocalCluster(options.workers)
    return tf_dsgd.DownpourStrategy(cluster, local_rule="none")


def show(rollouts: int, returns: keras.metrics.Mean, mean: float) -> None:
    ended, trained = int(returns.count), float(returns.result())
    print(
        f"{rollouts:6d} rollouts: {ended:4d} episodes ended, with a mean return of {trained:5.1f}; "
        f"{EPISODES} new ones: {mean:5.1f}",
        flush=True,
    )


def main() -> None:
    options = parsed()
    strategy = make_strategy(options)
    result = train(strategy, options, show)
    print("solved" if result["solved"] else "not solved")
    print(f"rollouts {strategy.steps}, updates {strategy.updates}, {strategy.staleness()}")
    print(f"episodes {result['episodes']}, seconds {result['seconds']:.1f}")
    if options.save:
        result["agent"].model.save(options.save)


if __name__ == "__main__":
    main()
