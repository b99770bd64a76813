"""Schemas of the custom resources in k8s/components, with the fields that they use: an unknown field is refused.

`kubernetes-validate` knows only Kubernetes' own kinds. The schemas follow the definitions of the Prometheus Operator
(monitoring.coreos.com/v1), of KEDA (keda.sh/v1alpha1), of the Gateway API and of CloudNativePG.
"""

from typing import Any

from jsonschema import Draft202012Validator

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "minLength": 1}
SECONDS: Schema = {"type": "integer", "minimum": 0}
DURATION: Schema = {"type": "string", "pattern": r"^([0-9]+(ms|[smhdwy]))+$"}
LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}


def thing(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    """Return the schema of an object with these fields and no others."""
    return {
        "type": "object",
        "properties": required | (optional or {}),
        "required": list(required),
        "additionalProperties": False,
    }


def several(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


KEY_OF_SECRET = thing({"name": TEXT, "key": TEXT})

POD_MONITOR = thing(
    {
        "selector": thing({"matchLabels": LABELS}),
        "podMetricsEndpoints": several(
            thing(
                {"port": TEXT, "path": {"type": "string", "pattern": "^/"}},
                {"interval": DURATION, "authorization": thing({"credentials": KEY_OF_SECRET}, {"type": TEXT})},
            )
        ),
    }
)
PROMETHEUS_RULE = thing(
    {
        "groups": several(
            thing(
                {
                    "name": TEXT,
                    "rules": several(
                        thing({"alert": TEXT, "expr": TEXT}, {"for": DURATION, "labels": LABELS, "annotations": LABELS})
                    ),
                },
                {"interval": DURATION},
            )
        )
    }
)
POLICY = thing({"type": {"enum": ["Percent", "Pods"]}, "value": SECONDS, "periodSeconds": SECONDS})
BEHAVIOUR = thing({"policies": several(POLICY)}, {"stabilizationWindowSeconds": SECONDS})
SCALED_OBJECT = thing(
    {
        "scaleTargetRef": thing({"name": TEXT}, {"apiVersion": TEXT, "kind": TEXT}),
        "triggers": several(
            thing(
                {
                    "type": {"const": "postgresql"},
                    # KEDA's metadata are texts, numbers too.
                    "metadata": thing({"query": TEXT, "targetQueryValue": {"type": "string", "pattern": "^[0-9.]+$"}}),
                    "authenticationRef": thing({"name": TEXT}),
                },
                {"metricType": {"enum": ["AverageValue", "Value"]}},
            )
        ),
    },
    {
        "pollingInterval": SECONDS,
        "cooldownPeriod": SECONDS,
        "minReplicaCount": SECONDS,
        "maxReplicaCount": SECONDS,
        "advanced": thing(
            {
                "horizontalPodAutoscalerConfig": thing(
                    {"behavior": thing({"scaleUp": BEHAVIOUR, "scaleDown": BEHAVIOUR})}
                )
            }
        ),
    },
)
TRIGGER_AUTHENTICATION = thing({"secretTargetRef": several(thing({"parameter": TEXT, "name": TEXT, "key": TEXT}))})

HTTP_ROUTE = thing(
    {
        "parentRefs": several(thing({"name": TEXT}, {"namespace": TEXT, "sectionName": TEXT})),
        "rules": several(
            thing(
                {"backendRefs": several(thing({"name": TEXT, "port": {"type": "integer"}}))},
                {
                    "matches": several(
                        thing({"path": thing({"type": {"enum": ["Exact", "PathPrefix"]}, "value": TEXT})})
                    ),
                    "timeouts": thing({}, {"request": DURATION, "backendRequest": DURATION}),
                },
            )
        ),
    },
    {"hostnames": several(TEXT)},
)
CLUSTER = thing(
    {"instances": {"type": "integer", "minimum": 1}, "storage": thing({"size": TEXT})},
    {
        "postgresql": thing(
            {},
            {
                "synchronous": thing(
                    {"method": {"enum": ["any", "first"]}, "number": {"type": "integer", "minimum": 1}}
                ),
                "parameters": LABELS,
            },
        ),
        "bootstrap": thing({"initdb": thing({"database": TEXT, "owner": TEXT})}),
    },
)

SCHEMAS = {
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): HTTP_ROUTE,
    ("postgresql.cnpg.io/v1", "Cluster"): CLUSTER,
    ("monitoring.coreos.com/v1", "PodMonitor"): POD_MONITOR,
    ("monitoring.coreos.com/v1", "PrometheusRule"): PROMETHEUS_RULE,
    ("keda.sh/v1alpha1", "ScaledObject"): SCALED_OBJECT,
    ("keda.sh/v1alpha1", "TriggerAuthentication"): TRIGGER_AUTHENTICATION,
}


def is_custom(resource: dict[str, Any]) -> bool:
    return (resource["apiVersion"], resource["kind"]) in SCHEMAS


def validate(resource: dict[str, Any]) -> None:
    """Raise if a custom resource has an unknown field, lacks a required one, or has a value of another type."""
    spec = SCHEMAS[resource["apiVersion"], resource["kind"]]
    whole = thing(
        {
            "apiVersion": TEXT,
            "kind": TEXT,
            "metadata": thing({"name": TEXT}, {"labels": LABELS, "annotations": LABELS}),
            "spec": spec,
        }
    )
    Draft202012Validator(whole).validate(resource)
