"""What speaks to the tasks of a TensorFlow cluster: who they are, connections, sockets, pings."""
