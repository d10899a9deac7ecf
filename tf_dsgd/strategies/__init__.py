"""The `tf.distribute` side: strategies, their variables, and how `fit` reaches the workers."""
