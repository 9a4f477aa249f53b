"""What all tests start from."""

import signal

# Under nohup, or started in the background by a script, a process ignores these, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
