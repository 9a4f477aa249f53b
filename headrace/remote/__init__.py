"""An engine in another process."""
