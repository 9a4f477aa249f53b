"""The files of `deploy/` match the schemas of their tools and the flags of `headrace`.

`make test-ray` runs this.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from compose_spec import PyCompose

from headrace.cli.main import make_parser
from headrace.errors import RequestError

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = "1.37"

NAME = {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$"}
TEMPLATE = {
    "type": "object",
    "required": ["spec"],
    "additionalProperties": False,
    "properties": {"metadata": {"type": "object"}, "spec": {"type": "object"}},
}
"""Template of a pod; its spec is checked by the schema of Kubernetes."""


def closed(required: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": required.split(),
        "properties": properties,
    }


TEMPLATE = closed("spec", metadata={"type": "object"}, spec={"type": "object"})
"""Template of a pod; its spec is checked by the schema of Kubernetes."""
COUNT = {"type": "integer", "minimum": 0}
STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
METADATA = closed("name", name=NAME)
LEADER_WORKER_SET = closed(  # https://lws.sigs.k8s.io/docs/reference/leaderworkerset.v1/
    "apiVersion kind metadata spec",
    apiVersion={"const": "leaderworkerset.x-k8s.io/v1"},
    kind={"const": "LeaderWorkerSet"},
    metadata=METADATA,
    spec=closed(
        "leaderWorkerTemplate",
        replicas=COUNT,
        startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
        leaderWorkerTemplate=closed(
            "size workerTemplate",
            size={"type": "integer", "minimum": 1},
            restartPolicy={"enum": ["Default", "RecreateGroupOnPodRestart", "None"]},
            leaderTemplate=TEMPLATE,
            workerTemplate=TEMPLATE,
        ),
    ),
)
RAY_SERVICE = closed(  # https://ray-project.github.io/kuberay/reference/api/
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayService"},
    metadata=METADATA,
    spec=closed(
        "serveConfigV2 rayClusterConfig",
        serveConfigV2={"type": "string"},
        rayClusterConfig=closed(
            "rayVersion headGroupSpec",
            rayVersion={"type": "string"},
            authOptions=closed("mode", mode={"enum": ["disabled", "token"]}),
            enableInTreeAutoscaling={"type": "boolean"},
            headGroupSpec=closed(
                "rayStartParams template", rayStartParams=STRINGS, template=TEMPLATE
            ),
            workerGroupSpecs={
                "type": "array",
                "items": closed(
                    "groupName rayStartParams template",
                    **dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), COUNT),
                    groupName=NAME,
                    rayStartParams=STRINGS,
                    template=TEMPLATE,
                ),
            },
        ),
    ),
)


def documents(name: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all((DEPLOY / name).read_text()) if document]


def pods(value: Any) -> Iterator[dict[str, Any]]:
    """All pod templates below a value."""
    if isinstance(value, dict):
        if isinstance(value.get("spec"), dict) and "containers" in value["spec"]:
            yield value
        for below in value.values():
            yield from pods(below)
    elif isinstance(value, list):
        for below in value:
            yield from pods(below)


def parse(words: list[str]) -> argparse.Namespace:
    """Parse a command line of `headrace`. Raises RequestError."""
    command, *rest = map(str, words)
    return make_parser(command).parse(rest)


@pytest.mark.parametrize(("name", "kinds"), [("leaderworkerset.yaml", 3), ("rayservice.yaml", 2)])
def test_kubernetes_files(name: str, kinds: int) -> None:
    schemas = {"LeaderWorkerSet": LEADER_WORKER_SET, "RayService": RAY_SERVICE}
    objects = documents(name)
    assert len(objects) == kinds
    for one in objects:
        if one["kind"] in schemas:
            jsonschema.validate(one, schemas[one["kind"]])
            templates = list(pods(one))
            assert len(templates) == 2
            for template in templates:
                pod = {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "metadata": {"name": "pod"},
                    "spec": template["spec"],
                }
                kubernetes_validate.validate(pod, KUBERNETES, strict=True)
        else:
            kubernetes_validate.validate(one, KUBERNETES, strict=True)


def test_schemas_reject_invalid_files() -> None:
    (group, *_), (on_ray, *_) = documents("leaderworkerset.yaml"), documents("rayservice.yaml")
    group["spec"]["leaderWorkerTemplate"]["restartPolicy"] = "Sometimes"
    on_ray["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["replica"] = 1
    for one, schema in ((group, LEADER_WORKER_SET), (on_ray, RAY_SERVICE)):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(one, schema)
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "pod"},
        "spec": next(pods(on_ray))["spec"] | {"container": []},
    }
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def test_compose_file() -> None:
    text = (DEPLOY / "compose.yaml").read_text()
    compose = PyCompose.from_yaml(text)
    assert sorted(compose.service_names()) == ["frontend", "worker-1", "worker-2"]
    with pytest.raises(ValueError):
        PyCompose.from_yaml(text.replace("restart: unless-stopped", "restart: seldom"))
    services = yaml.safe_load(text)["services"]
    workers = {name: one for name, one in services.items() if name != "frontend"}
    assert {parse(worker["command"]).worker for worker in workers.values()} == {True}
    frontend = parse(services["frontend"]["command"])
    assert frontend.workers == [",".join(f"http://{name}:8000" for name in workers)]
    assert {parse(one["command"]).model for one in services.values()} == {"smollm2"}


def test_commands_of_pods() -> None:
    (group, *_) = documents("leaderworkerset.yaml")
    commands = [parse(pod["spec"]["containers"][0]["args"]) for pod in pods(group)]
    assert commands[0] == commands[1], "all ranks run the same command"
    assert commands[0].tensor_parallel_size == group["spec"]["leaderWorkerTemplate"]["size"]
    with pytest.raises(RequestError):
        parse(["serve", "smollm2", "--tensor-parallel", "2"])


def test_ray_serve_config() -> None:
    from ray.serve.schema import ServeDeploySchema

    from headrace.scaleout.ray_app import build

    (on_ray, *_) = documents("rayservice.yaml")
    config = yaml.safe_load(on_ray["spec"]["serveConfigV2"])
    described = ServeDeploySchema.model_validate(config)
    (application,) = described.applications
    assert application.import_path == f"{build.__module__}:{build.__name__}"
    assert isinstance(application.args, dict)
    built = build(application.args)
    assert built._bound_deployment.name == "ingress"
    assert on_ray["spec"]["rayClusterConfig"]["rayVersion"] == _pinned()
    with pytest.raises(RequestError, match="max_num_seq"):
        build(application.args | {"engine": {"threads": 1, "max_num_seq": 3}})
    with pytest.raises(RequestError, match="threads"):
        build(application.args | {"engine": {}})
    with pytest.raises(RequestError, match="scales"):
        build(json.loads(json.dumps(application.args)) | {"scales": {}})


def _pinned() -> str:
    """The version of Ray in pyproject.toml."""
    import tomllib

    (*_, pin) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]["ray"]
    return str(pin.partition("==")[2])
