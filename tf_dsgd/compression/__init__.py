"""One file per codec: how messages are made smaller."""
