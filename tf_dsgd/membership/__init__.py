"""Who takes part and whose mini-batches count: leases, tasks and the verdict on who is alive.

Pure Python: no TensorFlow, no thread, no clock. Time is passed in, and whoever has threads holds
one lock; verdicts on who is alive, which come from any thread, have their own. The chief of a
cluster and the simulator drive the same tasks and leases.
"""
