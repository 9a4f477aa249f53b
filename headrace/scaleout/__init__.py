"""Several replicas of one model behind one server."""
