"""An engine in another process: the frames on the wire, the client, the host and its start."""
