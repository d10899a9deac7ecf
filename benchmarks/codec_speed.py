"""How long codecs take for one large weight on one core, beside a memcpy of the same bytes.

    python benchmarks/codec_speed.py
    python benchmarks/codec_speed.py --fraction 0.01 --repetitions 20

Strom's network has 14.6 M parameters, of which a message at tau = 2 has 0.36 %. Each codec encodes
such a gradient, with its residual on the worker, and decodes what it made. TensorFlow has one
thread; the codecs and the copy take turns, so that a slow second of the machine meets all of them;
the least and the median are of all repetitions. Seconds are the processor's of this process: other
programs may run beside it, and lengthen them by what they take of caches and memory alone.
"""

import argparse
import os
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import runs
import tensorflow as tf

from tf_dsgd import compression

CODECS = {
    "Threshold": compression.Threshold(1.0),
    "Threshold, entropy": compression.Threshold(1.0, entropy=True),
    "TopK": None,
    "EFSign": compression.EFSign(),
    "OneBit": compression.OneBit(),
    "QSGD, 64 levels": compression.QSGD(64),
}


class Place:
    """A worker and a shard with one weight."""

    def __init__(self, size: int):
        self.weights = [tf.Variable(tf.zeros([size]))]
        self.cells: dict = {}

    def cell(self, name, index, *, shape=None, dtype=None):
        if name not in self.cells:
            with tf.init_scope():
                self.cells[name] = tf.Variable(
                    tf.zeros(self.weights[0].shape if shape is None else shape, dtype)
                )
        return self.cells[name]

    def encoded(self, index, emitted, square):
        """What is measured of messages."""

    def is_sparse(self, index):
        return False


def functions(codec, size: int):
    """(encode, decode), traced."""
    place = Place(size)
    encode = tf.function(lambda g: codec.encode(place, 0, g), autograph=False)
    decode = tf.function(lambda *sent: codec.decode(place, 0, sent), autograph=False)
    return place, encode, decode


def spent(action, *arguments):
    """Milliseconds of the processor, and what `action` gives."""
    began = time.process_time()
    result = action(*arguments)
    return 1e3 * (time.process_time() - began), result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=14_600_000)
    parser.add_argument("--fraction", type=float, default=0.0036, help="of elements emitted")
    parser.add_argument("--repetitions", type=int, default=11)
    parser.add_argument("--json", help="where to write all single runs")
    options = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    size = options.elements
    random = np.random.default_rng(0)
    g = (0.1 * random.standard_normal(size)).astype("float32")
    emitted = random.random(size) < options.fraction
    g[emitted] = np.where(random.random(emitted.sum()) < 0.5, 1.5, -1.5)
    gradient, copy = tf.constant(g), np.empty_like(g)
    made = {}
    for name, codec in CODECS.items():
        codec = compression.TopK(options.fraction) if codec is None else codec
        made[name] = functions(codec, size)
    times: dict[str, list] = {name: [] for name in made}
    copies = []
    for repetition in range(options.repetitions + 1):
        copying, _ = spent(np.copyto, copy, g)
        if repetition:
            copies.append(copying)
        for name, (place, encode, decode) in made.items():
            for cell in place.cells.values():
                cell.assign(tf.zeros_like(cell))
            encoding, sent = spent(encode, gradient)
            decoding, _ = spent(decode, *sent)
            sizes = sum(int(tf.size(part)) * part.dtype.size for part in sent)
            if repetition:  # the first traces
                times[name].append((encoding, decoding, sizes))
    origin = runs.provenance()
    runs.write_json(options.json, {**origin, "copies": copies, "times": times})
    print(runs.heading(origin), end="\n\n")
    print(f"{size:,} elements, {4 * size / 1e6:.1f} MB; a memcpy of it takes", end=" ")
    print(f"{min(copies):.1f} ms at least, {statistics.median(copies):.1f} in the median.\n")
    rows = []
    for name, found in times.items():
        encoding, decoding, sizes = zip(*found, strict=True)
        both = [a + b for a, b in zip(encoding, decoding, strict=True)]
        cells = [
            f"{min(part):.0f} ({statistics.median(part):.0f})"
            for part in (encoding, decoding, both)
        ]
        rows.append([name, f"{sizes[0]:,}", *cells, f"{min(both) / min(copies):.1f}"])
    heads = ["bytes", "encode, ms: least (median)", "decode, ms", "together, ms"]
    print(runs.table(["codec", *heads, "least, in memcpys"], rows))


if __name__ == "__main__":
    main()
