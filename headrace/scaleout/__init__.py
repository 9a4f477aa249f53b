"""Many replicas of an engine behind one frontend: which of them runs a request, and what becomes of
it when one goes away.
"""
