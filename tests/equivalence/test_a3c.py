"""examples/a3c_cartpole.py against twins: its pole, its returns, its gradient, and one worker.

The twin of the dynamics is NumPy's in float64, of the returns and the gradient by hand; one worker
is a loop without a strategy, in Python, step by step: an episode that ends is left by `break`.
"""

import importlib.util
import math
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.packaging.repository import ROOT

PROGRAM = ROOT / "examples" / "a3c_cartpole.py"
spec = importlib.util.spec_from_file_location("a3c_cartpole", PROGRAM)
a3c = importlib.util.module_from_spec(spec)
sys.modules["a3c_cartpole"] = a3c  # where its dataclass looks for its types
spec.loader.exec_module(a3c)


# -- the cart and the pole -------------------------------------------------------------------------


def numpy_step(state, action):
    """CartPole-v1 in float64, by the equations of Barto, Sutton and Anderson without friction."""
    x, v, theta, omega = state
    force = 10.0 if action else -10.0
    cart, pole, length, gravity = 1.0, 0.1, 0.5, 9.8
    shared = (force + pole * length * omega**2 * math.sin(theta)) / (cart + pole)
    alpha = (gravity * math.sin(theta) - math.cos(theta) * shared) / (
        length * (4 / 3 - pole * math.cos(theta) ** 2 / (cart + pole))
    )
    acceleration = shared - pole * length * alpha * math.cos(theta) / (cart + pole)
    return np.array([x, v, theta, omega]) + 0.02 * np.array([v, acceleration, omega, alpha])


def states(count=500):
    random = np.random.default_rng(3)
    return random.uniform(-1, 1, (count, 4)) * [3.0, 3.0, 0.3, 3.0], random.integers(0, 2, count)


def test_a_step_is_that_of_a_twin_in_float64():
    before, actions = states()
    expected = np.stack([numpy_step(s, a) for s, a in zip(before, actions, strict=True)])
    found = a3c.moved(tf.constant(before), tf.constant(actions)).numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-14)
    single = a3c.moved(tf.constant(before, tf.float32), tf.constant(actions)).numpy()
    np.testing.assert_allclose(single, expected, rtol=0, atol=1e-6)


def test_energy_is_kept_where_nobody_pushes(monkeypatch):
    """Without a force a frictionless cart and pole keep their energy, up to Euler's error."""
    monkeypatch.setattr(a3c, "FORCE", 0.0)
    monkeypatch.setattr(a3c, "SECONDS", 1e-4)

    def energy(state):
        _, v, theta, omega = np.asarray(state)
        forward = v**2 + v * omega * math.cos(theta) + omega**2 / 3  # of a rod, half length 0.5
        return 0.5 * v**2 + 0.05 * forward + 0.1 * 9.8 * 0.5 * math.cos(theta)

    state = tf.constant([0.0, 0.3, 0.2, -0.4], tf.float64)
    begin = energy(state)
    for _ in range(200):
        state = a3c.moved(state, tf.constant(1))
    assert abs(float(state[2]) - 0.2) > 5e-3  # it has moved
    assert energy(state) == pytest.approx(begin, abs=1e-5)


def test_an_episode_ends_off_the_track_and_beyond_twelve_degrees():
    inside = [2.3999, 9.0, math.radians(11.999), 9.0]
    cases = [inside, [2.4001, 0, 0, 0], [-2.4001, 0, 0, 0], [0, 0, 0.2095, 0], [0, 0, -0.2095, 0]]
    assert a3c.fallen(tf.constant(cases)).numpy().tolist() == [False, True, True, True, True]
    corners = a3c.first_state(tf.constant([0.0, 1.0, 0.5, 0.25])).numpy()
    np.testing.assert_allclose(corners, [-0.05, 0.05, 0.0, -0.025], atol=1e-8)


# -- returns and the gradient ----------------------------------------------------------------------


def test_returns_by_hand():
    """R = 1 + 0.5 R': to the end of a rollout that goes on at a value of 8, or that ended."""
    whole = a3c.n_step_returns(tf.constant([True] * 3), tf.constant(8.0), 0.5)
    assert whole.numpy().tolist() == [2.75, 3.5, 5.0]
    ended = a3c.n_step_returns(tf.constant([True, True, False]), tf.constant(0.0), 0.5)
    assert ended.numpy().tolist()[:2] == [1.5, 1.0]
    truncated = a3c.n_step_returns(tf.constant([True, True, False]), tf.constant(8.0), 0.5)
    assert truncated.numpy().tolist()[:2] == [3.5, 5.0]


def options(*arguments):
    return a3c.parsed(list(arguments))


def made_rollout(terminated, taken=4):
    random = np.random.default_rng(5)
    passed = np.arange(5) < taken
    return a3c.Rollout(
        tf.constant(random.normal(0, 0.5, (6, 4)), tf.float32),
        tf.constant(random.integers(0, 2, 5), tf.int32),
        tf.constant(passed),
        tf.constant(taken),
        tf.constant(terminated),
        tf.constant(taken < 5),
    )


@pytest.mark.parametrize(("terminated", "taken"), [(True, 4), (False, 4), (False, 5)])
def test_the_gradient_is_the_papers(terminated, taken):
    """By hand: d/d logits = -(onehot - p) A + beta p (log p + H), d/d V = -A; A is no variable."""
    chosen = options("--entropy_weight", "0.3", "--discount", "0.9", "--units", "3")
    keras.utils.set_random_seed(2)
    model, rollout = a3c.build_model(3), made_rollout(terminated, taken)
    with tf.GradientTape() as tape:
        loss = a3c.loss_of(model, rollout, chosen)
    found = tape.gradient(loss, model.trainable_variables)

    w, b, policy, policy_bias, critic, critic_bias = (
        v.numpy().astype(np.float64) for v in model.trainable_variables
    )
    hidden = np.tanh(rollout.states.numpy() @ w + b)
    logits, values = hidden @ policy + policy_bias, (hidden @ critic + critic_bias)[:, 0]
    following, targets = 0.0 if terminated else values[5], np.zeros(5)
    for t in reversed(range(taken)):
        following = targets[t] = 1.0 + 0.9 * following
    passed = (np.arange(5) < taken)[:, None]
    advantage = (targets - values[:5])[:, None] * passed
    p = np.exp(logits[:5]) / np.exp(logits[:5]).sum(1, keepdims=True)
    entropy = -(p * np.log(p)).sum(1, keepdims=True)
    of_logits = -(np.eye(2)[rollout.actions.numpy()] - p) * advantage
    of_logits += 0.3 * p * (np.log(p) + entropy) * passed
    of_hidden = (of_logits @ policy.T - advantage @ critic.T) * (1 - hidden[:5] ** 2)
    expected = [
        *(rollout.states.numpy()[:5].T @ of_hidden, of_hidden.sum(0)),
        *(hidden[:5].T @ of_logits, of_logits.sum(0)),
        *(-hidden[:5].T @ advantage, -advantage.sum(0)),
    ]
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


# -- one worker ------------------------------------------------------------------------------------


def one_episode_after_another(chosen):
    """The sequential actor-critic loop; gives the weights and the lengths of the episodes."""
    keras.utils.set_random_seed(chosen.seed)
    model = a3c.build_model(chosen.units)
    rate = keras.optimizers.schedules.PolynomialDecay(chosen.rate, chosen.rollouts, 0.0)
    optimizer = keras.optimizers.RMSprop(rate, rho=0.99, epsilon=0.1, global_clipnorm=40.0)
    state, lengths, length = None, [], 0
    for number in range(chosen.rollouts):
        seed = tf.constant([chosen.seed, number], tf.int64)
        uniform = tf.random.stateless_uniform([9], seed)
        if state is None:
            state, length = 0.1 * uniform[:4] - 0.05, 0
        seen, actions, fell, over = [state], [], False, False
        for t in range(5):
            logits = model(state[None])[0][0]
            actions.append(int(uniform[4 + t] < tf.sigmoid(logits[1] - logits[0])))
            state = a3c.moved(state, tf.constant(actions[-1]))
            seen.append(state)
            length += 1
            fell = bool(abs(state[0]) > 2.4 or abs(state[2]) > math.radians(12))
            over = fell or length == a3c.MOST_STEPS
            if over:
                break
        taken = len(actions)
        gradient = gradient_of(model, seen, actions, fell, chosen)
        optimizer.apply(gradient, model.trainable_variables)
        if over:
            lengths.append(length)
            state = None
        assert taken == 5 or over
    return model.get_weights(), lengths


def gradient_of(model, seen, actions, fell, chosen):
    """With rows of nothing up to five: a product of fewer rows adds in another order."""
    taken = len(actions)
    rows = tf.stack(seen + [seen[-1]] * (5 - taken))
    following = np.float32(0.0) if fell else model(rows)[1].numpy()[-1, 0]
    returns = np.zeros(5, np.float32)
    for t in reversed(range(taken)):
        following = returns[t] = np.float32(1.0) + np.float32(chosen.discount) * following
    with tf.GradientTape() as tape:
        logits, values = model(rows)
        advantage = returns - values[:-1, 0]
        logs = tf.nn.log_softmax(logits[:-1])
        entropy = -tf.reduce_sum(tf.exp(logs) * logs, axis=1)
        taken_logs = tf.gather(logs, actions + [0] * (5 - taken), batch_dims=1)
        terms = -taken_logs * tf.stop_gradient(advantage) - chosen.entropy_weight * entropy
        terms += 0.5 * advantage**2
        loss = tf.reduce_sum(tf.constant(np.float32(np.arange(5) < taken)) * terms)
    return tape.gradient(loss, model.trainable_variables)


@pytest.fixture
def without_fusion():
    """Each operation by itself, as in Python: fused ones round otherwise."""
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})


@pytest.mark.slow
def test_one_worker_is_the_sequential_loop_bit_for_bit(monkeypatch, without_fusion):
    """Also where episodes are truncated, after 12 steps here: most of them are, and some fall."""
    monkeypatch.setattr(a3c, "MOST_STEPS", 12)
    sizes = ("--rollouts", "40", "--check_every", "16", "--units", "8")
    chosen = options("--simulated", "--workers", "1", "--seed", "4", *sizes)
    notes = []

    def note(number, returns, mean):
        notes.append((number, int(returns.count), float(returns.total)))

    result = a3c.train(a3c.make_strategy(chosen), chosen, note)
    weights, lengths = one_episode_after_another(chosen)
    for ours, theirs in zip(result["agent"].model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert [number for number, _, _ in notes] == [16, 32, 40]
    assert sum(count for _, count, _ in notes) == len(lengths) == result["episodes"]
    assert sum(total for _, _, total in notes) == sum(lengths)
    assert 0 < lengths.count(12) < len(lengths)  # both kinds of end are there
    assert result["rollouts"] == 40 and not result["solved"]


@pytest.mark.few(1)
@pytest.mark.parametrize("where", [("--simulated", "--workers", "3"), ("--workers", "2")])
def test_each_worker_plays_its_own_episode(where):
    """At a rate of nothing all play with the first weights: a recording says who played what."""
    sizes = ("--rollouts", "60", "--check_every", "25", "--units", "4")
    chosen = options(*where, "--rate", "1e-30", *sizes)
    strategy = a3c.make_strategy(chosen)
    with strategy.recording() as entries:
        agent = a3c.train(strategy, chosen, lambda *_: None)["agent"]
    model = a3c.build_model(4)
    model.set_weights(agent.model.get_weights())
    steps = [entry for entry in entries if entry[1] == "step"]
    assert sorted(t for _, _, tickets in steps for t in tickets) == list(range(60))
    states = strategy.experimental_local_results(agent.state)
    lengths = strategy.experimental_local_results(agent.length)
    for worker in range(strategy.num_workers):
        state, length = tf.zeros([4]), tf.constant(0)
        for ticket in (t for m, _, tickets in steps for t in tickets if m == worker):
            uniform = tf.random.stateless_uniform([9], tf.constant([chosen.seed, ticket], tf.int64))
            begin = a3c.first_state(uniform[:4]) if length == 0 else state
            rollout = a3c.play(model, begin, length, uniform[4:])
            state, length = rollout.states[-1], rollout.length * int(not rollout.over)
        assert int(lengths[worker]) == int(length)
        np.testing.assert_allclose(states[worker], state, atol=1e-5)
    assert len({tuple(state.numpy()) for state in states}) == strategy.num_workers


def test_the_judge_plays_whole_episodes():
    """A policy that always pushes right is done after about ten steps; one that steers, never."""
    judge = a3c.make_judge(options("--units", "2"))
    still, hidden, critic = np.zeros((4, 2)), np.zeros(2), [np.zeros((2, 1)), np.zeros(1)]

    def judged(*weights):
        return judge([np.float32(w) for w in (*weights, *critic)], 1)

    assert 8.0 < judged(still, hidden, np.zeros((2, 2)), [-50.0, 50.0]) < 11.0
    # It pushes to where the pole leans and turns, and a little to where the cart is.
    lean = np.outer([0.02, 0.05, 1.0, 0.5], [100.0, 100.0])
    assert judged(lean, hidden, [[-50.0, 50.0]] * 2, [0.0, 0.0]) == 500.0


REFUSED = [
    ("--workers", "0"),
    ("--workers", "two"),
    ("--rollouts", "0"),
    ("--t_max", "-1"),
    ("--seed", "-1"),
    ("--rate", "0"),
    ("--rate", "nan"),
    ("--discount", "1.5"),
    ("--entropy_weight", "-0.1"),
    ("--save", "model.h5"),
    ("--save", "nowhere/model.keras"),
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_a_bad_argument_is_refused_by_name(name, value, capsys):
    with pytest.raises(SystemExit):
        a3c.parsed([name, value])
    said = capsys.readouterr().err
    assert name in said and value in said
