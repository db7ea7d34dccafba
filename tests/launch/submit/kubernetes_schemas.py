"""What Kubernetes and the mpi-operator accept: a wrong field, type or value is an error.

Kubernetes' schemas are the published ones, which the package kubernetes-validate carries. For an
MPIJob they say what its pods may be; the fields around the pods are listed here, from the
CustomResourceDefinition of mpi-operator 0.8.0 (Apache License 2.0) and from what its controller
refuses beyond that. With the definition itself in a file, `TFDIST_MPIJOB_CRD=FILE` has the tests
look whether the list is right, and check all MPIJobs by the definition too:

    https://raw.githubusercontent.com/kubeflow/mpi-operator/v0.8.0/manifests/base/kubeflow.org_mpijobs.yaml

For a TrainJob they are the models of Kubeflow Trainer 2.3, in the package kubeflow-trainer-api.
"""

from __future__ import annotations

import copy

import jsonschema
import pydantic
import referencing
import yaml
from kubeflow_trainer_api.models import (
    TrainerV1alpha1TrainingRuntime,
    TrainerV1alpha1TrainJob,
)
from kubernetes_validate import ValidationError, validate
from kubernetes_validate.utils import schema_contents

__all__ = ["VERSIONS", "ValidationError", "check", "check_by_definition", "differences"]

#: The oldest in which all that is written here is stable, and the newest.
VERSIONS = ("1.31", "1.37")
_DEFINITIONS = "https://kubernetes.io/api/_definitions.json"
_INTEGER, _STRING, _BOOLEAN = ({"type": kind} for kind in ("integer", "string", "boolean"))


def _object(required=(), **properties):
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _one_of(*words):
    return {"type": "string", "enum": list(words)}


_REPLICAS = _object(
    ("replicas", "restartPolicy", "template"),
    replicas={"type": "integer", "minimum": 1},
    restartPolicy=_one_of("Never", "OnFailure"),
    template={"$ref": f"{_DEFINITIONS}#/$defs/io.k8s.api.core.v1.PodTemplateSpec"},
)
_MPI_JOB = _object(
    ("mpiReplicaSpecs", "slotsPerWorker", "runPolicy"),
    launcherCreationPolicy=_one_of("AtStartup", "WaitForWorkersReady"),
    mpiImplementation=_one_of("OpenMPI", "Intel", "MPICH"),
    mpiReplicaSpecs=_object(("Launcher",), Launcher=_REPLICAS, Worker=_REPLICAS),
    runLauncherAsWorker=_BOOLEAN,
    runPolicy=_object(
        ("cleanPodPolicy",),
        activeDeadlineSeconds=_INTEGER,
        backoffLimit=_INTEGER,
        cleanPodPolicy=_one_of("None", "Running", "All"),
        managedBy=_STRING,
        schedulingPolicy={"type": "object"},
        suspend=_BOOLEAN,
        ttlSecondsAfterFinished=_INTEGER,
    ),
    slotsPerWorker=_INTEGER,
    sshAuthMountPath=_STRING,
)


def check(manifest: dict, version: str) -> None:
    """Compares an object with what a version of Kubernetes accepts.

    Raises:
        ValidationError: It would be refused.
    """
    if manifest["kind"] in _TRAINER:
        _check_by_models(manifest, version)
        return
    if manifest["kind"] != "MPIJob":
        validate(manifest, version, strict=True)
        return
    definitions = schema_contents(
        f"kubernetes-json-schema/v{version}.0-local-strict/_definitions.json", version
    )
    whole = _object(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion=_one_of("kubeflow.org/v2beta1"),
        kind=_one_of("MPIJob"),
        metadata={"$ref": f"{_DEFINITIONS}#/$defs/{_OBJECT_META}"},
        spec=_MPI_JOB,
    )
    registry = referencing.Resource.from_contents(definitions) @ referencing.Registry()
    _validate(jsonschema.Draft202012Validator(whole, registry=registry), manifest, version)


_TRAINER = {"TrainJob": TrainerV1alpha1TrainJob, "TrainingRuntime": TrainerV1alpha1TrainingRuntime}


def _check_by_models(manifest: dict, version: str) -> None:
    """Compares an object of Kubeflow Trainer with its models, which drop fields that they do not know."""
    try:
        kept = _TRAINER[manifest["kind"]].from_dict(copy.deepcopy(manifest)).to_dict()
    except (pydantic.ValidationError, AttributeError, TypeError) as error:
        raise ValidationError(jsonschema.ValidationError(str(error)), version) from error
    if kept != manifest:
        raise ValidationError(
            jsonschema.ValidationError(f"Fields were dropped: {manifest} became {kept}"), version
        )


_OBJECT_META = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"


def check_by_definition(manifest: dict, path: str) -> None:
    """Compares an MPIJob with the operator's own definition.

    Raises:
        ValidationError: It would be refused, or a field of it would be dropped.
    """
    schema = _definition(path)
    _close(schema["properties"]["spec"])
    _validate(jsonschema.Draft202012Validator(schema), manifest, "v2beta1")


def differences(path: str) -> list[str]:
    """Where the list of fields in this file is not that of the operator's own definition."""
    found: list[str] = []
    _compare(_MPI_JOB, _definition(path)["properties"]["spec"], "spec", found)
    return found


def _validate(validator, manifest: dict, version: str) -> None:
    try:
        validator.validate(manifest)
    except jsonschema.ValidationError as error:
        raise ValidationError(error, version) from error


def _definition(path: str) -> dict:
    with open(path, encoding="utf-8") as file:
        (version,) = yaml.safe_load(file)["spec"]["versions"]
    assert version["name"] == "v2beta1"
    return copy.deepcopy(version["schema"]["openAPIV3Schema"])


def _close(schema: dict) -> None:
    """Has fields that the schema does not name refused, which Kubernetes would drop."""
    properties = schema.get("properties", {})
    if properties and "x-kubernetes-preserve-unknown-fields" not in schema:
        schema.setdefault("additionalProperties", False)
    parts = [*properties.values(), schema.get("items"), schema.get("additionalProperties")]
    for part in parts:
        if isinstance(part, dict):
            _close(part)


def _compare(own: dict, theirs: dict, path: str, found: list[str]) -> None:
    if "$ref" in own:
        return
    if own["type"] != theirs.get("type"):
        found.append(f"{path} is a {theirs.get('type')}")
    if "enum" in theirs and own.get("enum") != theirs["enum"]:
        found.append(f"{path} is one of {theirs['enum']}")
    fields = theirs.get("properties", {})
    if own.get("properties") and fields and own["properties"].keys() != fields.keys():
        found.append(f"{path} has the fields {sorted(fields)}")
    for name, field in own.get("properties", {}).items():
        # What it calls a map of replicas are the launcher and the workers.
        part = fields.get(name) or theirs.get("additionalProperties")
        if part:
            _compare(field, part, f"{path}.{name}", found)
