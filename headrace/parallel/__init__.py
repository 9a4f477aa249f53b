"""Several ranks that run one model: each runs a rewritten program over its share of the weights and
of KV.
"""
