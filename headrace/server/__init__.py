"""The HTTP server: an API process, which reads requests and writes answers, and an engine process,
which computes.
"""
