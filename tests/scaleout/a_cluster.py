"""A Ray cluster with the application of a model, ingress and replicas, until its standard input is
closed.

    python -m tests.scaleout.a_cluster PORT ARGS

`ARGS`: arguments of `ray_app.build`, as JSON. When HTTP is ready it prints the address and token of
the cluster.
"""

import json
import os
import sys

from headrace.scaleout.ray_cluster import ray_cluster


def main(port: str, args: str) -> None:
    with ray_cluster(4):
        import ray
        from ray import serve

        from headrace.scaleout.ray_app import build

        serve.start(
            proxy_location="EveryNode", http_options={"host": "127.0.0.1", "port": int(port)}
        )
        serve.run(build(json.loads(args)), name="whole", route_prefix="/")
        print(
            json.dumps([ray.get_runtime_context().gcs_address, os.environ["RAY_AUTH_TOKEN"]]),
            flush=True,
        )
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
