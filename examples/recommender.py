"""A recommender: two towers on tables that are split by rows, trained in one pass over a file.

    python examples/recommender.py
    python -m tf_dsgd.launch --workers 2 --ps 2 examples/recommender.py

Each user and each item has a hidden vector, and whether a user likes an item is drawn with the
probability sigmoid(2 u.v). So it is known how well anybody can tell the two apart: the AUC of
these probabilities themselves. The file names users and items by ids alone, which lie scattered in
tables of a million rows, as hashed ids do. A model learns of a user only by the row of that user.

Each example is read once, and the model is judged on 20,000 others: by the AUC, and by how many of
the ten items that each user likes best it retrieves. Beside it stands what the same model gives
before training, and what it gives for the users of other examples.
"""

import argparse
import os
import tempfile
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import tf_dsgd

FIELDS = 3  # of an example in the file: the user's id, the item's, whether it is liked; int32
TOP = 10


class World:
    """Users and items with hidden vectors, and ids of theirs out of `rows` many."""

    def __init__(self, users: int, items: int, rows: int):
        self.random = np.random.default_rng(0)
        self.users, self.items = (self.random.standard_normal((n, 3)) for n in (users, items))
        self.user_ids, self.item_ids = (
            self.random.choice(rows, n, replace=False).astype("int32") for n in (users, items)
        )

    def liking(self) -> np.ndarray:
        """Of every user for every item: the probability that it is liked."""
        return 1 / (1 + np.exp(-2 * self.users @ self.items.T))

    def draw(self, examples: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Users' and items' ids of random pairs, whether they are liked, and how probable it is."""
        user, item = (self.random.integers(len(v), size=examples) for v in (self.users, self.items))
        probability = self.liking()[user, item]
        liked = self.random.random(examples) < probability
        return self.user_ids[user], self.item_ids[item], liked.astype("int32"), probability

    def write(self, path: Path, examples: int) -> None:
        """A file of examples, of three numbers each."""
        np.stack(self.draw(examples)[:FIELDS], axis=1).tofile(path)


def read(path: Path, batch_size: int) -> tf.data.Dataset:
    """Mini-batches of such a file, in its order."""

    def decode(records: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        user, item, liked = tf.unstack(tf.io.decode_raw(records, tf.int32), num=FIELDS, axis=1)
        return {"user": user, "item": item}, liked

    size = 4 * FIELDS
    records = tf.data.FixedLengthRecordDataset(path, size)
    records = records.apply(tf.data.experimental.assert_cardinality(path.stat().st_size // size))
    return records.batch(batch_size).map(decode)


def build_model(rows: int, learning_rate: float) -> tuple[keras.Model, keras.Model, keras.Model]:
    """The model, and each of its towers, which it shares: ids to vectors."""
    towers = {}
    for name in ("user", "item"):
        ids = keras.Input((), dtype="int32", name=name)
        drawn = keras.initializers.RandomNormal(stddev=0.3)
        table = keras.layers.Embedding(rows, 16, name=f"{name}s", embeddings_initializer=drawn)
        vector = keras.layers.Dense(16, name=f"{name}_tower")(table(ids))
        towers[name] = keras.Model(ids, vector, name=name)
    inputs = {name: tower.input for name, tower in towers.items()}
    score = keras.layers.Dot(1)([tower.output for tower in towers.values()])
    model = keras.Model(inputs, score)
    model.compile(
        optimizer=keras.optimizers.Adagrad(learning_rate, initial_accumulator_value=1e-6),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.AUC(from_logits=True, name="auc")],
    )
    return model, towers["user"], towers["item"]


def auc(scores: np.ndarray, liked: np.ndarray) -> float:
    """How probably a pair that is liked has a higher score than one that is not."""
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores)] = np.arange(1, len(scores) + 1)
    positive = np.count_nonzero(liked)
    below = ranks[liked > 0].sum() - positive * (positive + 1) / 2
    return below / (positive * (len(scores) - positive))


def recall(scores: np.ndarray, liking: np.ndarray) -> float:
    """Which part of the items that each user likes best is among the best scores of that user."""
    best, found = (np.argsort(-values, axis=1)[:, :TOP] for values in (liking, scores))
    hits = [len(np.intersect1d(b, f)) for b, f in zip(best, found, strict=True)]
    return float(np.mean(hits)) / TOP


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=600_000, help="in the file")
    parser.add_argument("--users", type=int, default=500)
    parser.add_argument("--items", type=int, default=200)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of each of the two tables")
    parser.add_argument("--batch_size", type=int, default=512, help="of each worker")
    parser.add_argument("--period", type=int, default=5, help="mini-batches between messages")
    parser.add_argument("--learning_rate", type=float, default=0.2, help="of Adagrad")
    options = parser.parse_args()
    keras.utils.set_random_seed(1)
    world = World(options.users, options.items, options.rows)
    user, item, liked, probability = world.draw(20_000)

    # In a cluster if TF_CONFIG says so, as the launcher's does, else on threads of this process.
    strategy = tf_dsgd.DownpourStrategy(
        push_every=options.period,
        fetch_every=options.period,
        placement={"(users|items)/.*": tf_dsgd.Rows()},
    )
    with strategy.scope():
        model, user_tower, item_tower = build_model(options.rows, options.learning_rate)

    def judged(user: np.ndarray) -> float:
        scores = model.predict({"user": user, "item": item}, batch_size=4096, verbose=0)
        return auc(scores[:, 0], liked)

    untrained = judged(user)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "liked.bin"
        world.write(path, options.examples)
        model.fit(read(path, options.batch_size), shuffle=False, verbose=2)

    print(f"held-out AUC        {judged(user):.3f}")
    print(f"  best possible     {auc(probability, liked):.3f}")
    print(f"  before training   {untrained:.3f}")
    print(f"  users exchanged   {judged(np.roll(user, 1)):.3f}")
    users = user_tower.predict(world.user_ids, batch_size=4096, verbose=0)
    items = item_tower.predict(world.item_ids, batch_size=4096, verbose=0)
    found = recall(users @ items.T, world.liking())
    print(f"recall of the top {TOP}  {found:.3f}, by chance {TOP / options.items:.3f}")
    print(f"mini-batches {strategy.steps}, updates {strategy.updates}, {strategy.staleness()}")


if __name__ == "__main__":
    main()
