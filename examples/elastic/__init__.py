"""Goes on with a training when a process is killed, and with another number of processes."""
