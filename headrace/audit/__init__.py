"""The audit of a server with OpenAI's API: do its answers depend on load, caches and streams?"""
