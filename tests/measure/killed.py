"""A process that the system kills."""

import os
import signal

os.kill(os.getpid(), signal.SIGKILL)
