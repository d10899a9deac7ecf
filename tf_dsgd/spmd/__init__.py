"""Equal processes, each with a model of its own: collectives, and what is exchanged by them."""
