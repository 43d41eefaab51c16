"""A training that goes on when a process is killed, and with another number of processes."""
