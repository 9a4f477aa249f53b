"""Requests on engines in simulated time: the real engine and router, and predicted step times."""
