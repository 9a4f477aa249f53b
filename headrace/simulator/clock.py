class VirtualClock:
    """Seconds since the start of a simulation; stands still until it is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now
