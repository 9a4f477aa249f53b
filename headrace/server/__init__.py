"""The HTTP server: the API process, next to an engine process (`headrace.remote`)."""
