"""A target whose corpus has every kind of finding, to test the driver."""

import os
import random
import time

from headrace.errors import FormatError

SECONDS_PER_CASE = 1
MEMORY = 64 << 20


def case(rng: random.Random) -> bytes:
    return rng.choice([b"return", b"refuse"])


def run(case: bytes) -> None:
    match case:
        case b"refuse":
            raise FormatError("as it should")
        case b"raise":
            raise ZeroDivisionError("planted")
        case b"crash":
            os.abort()
        case b"loop":
            while True:
                pass
        case b"wait":
            time.sleep(600)
        case b"grow":
            bytearray(128 << 20)
