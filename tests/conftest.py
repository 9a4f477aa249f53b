"""What all tests start from."""

import signal

# Under nohup, or started in the background by a script, a process ignores Ctrl-C, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
