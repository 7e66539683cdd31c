"""The schemas of real life in benchmarks/schemas.jsonl: each compiles strictly, and takes what it should."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from grammar_helpers import accepts, backend_of, matcher_of, tiny

from aengine import StructuredOutput
from aengine.engine.structured.spec import GrammarSpec, spec_of

PATH = Path(__file__).parents[2] / "benchmarks" / "schemas.jsonl"
SCHEMAS: dict[str, Any] = {row["name"]: row["schema"] for row in map(json.loads, PATH.read_text().splitlines())}
BOUNDS = ("minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def spec(name: str) -> GrammarSpec:
    return spec_of(StructuredOutput(json_schema=SCHEMAS[name]))


def test_there_are_many_kinds_of_them() -> None:
    texts = [json.dumps(schema) for schema in SCHEMAS.values()]
    assert len(texts) == 64
    assert 0.6 < sum(any(f'"{bound}"' in text for bound in BOUNDS) for text in texts) / 64 < 0.75
    for keyword in ("$ref", "anyOf", "const", "prefixItems", "additionalProperties", "pattern", "format", "title"):
        assert sum(f'"{keyword}"' in text for text in texts) >= 2, keyword


@pytest.mark.parametrize("name", SCHEMAS)
def test_each_compiles_strictly(name: str) -> None:
    compiled = backend_of("tiny").compile(spec(name))
    assert compiled.warnings == () and not compiled.matcher().is_accepting


INVOICE = {
    "invoice_number": "2024/117",
    "issue_date": "2024-02-29",
    "due_date": None,
    "currency": "EUR",
    "vendor": {
        "name": "Müller & Söhne",
        "vat_id": "DE123456789",
        "address": {"street": "Am Markt 1", "city": "Köln", "postcode": "50667", "country": "DE"},
        "email": "rechnung@mueller.example",
    },
    "customer": {
        "name": 'The "Corner" Shop',
        "address": {"street": "1 High St", "city": "York", "postcode": "YO1 7HH", "country": "GB"},
    },
    "lines": [
        {"description": "Screws", "quantity": 2.5, "unit_price": -1, "tax_rate": 0.19, "amount": 5},
        {"description": "Freight", "quantity": 1, "unit_price": 1e1, "amount": 10.0},
    ],
    "subtotal": 15,
    "tax": 0,
    "total": 15,
    "paid": False,
}
ROUTE = {"iata": "ZRH", "terminal": None}
CASES: list[tuple[str, Any, tuple[Any, ...], Any]] = [  # schema, an instance, where it is broken, by what
    ("invoice", INVOICE, ("issue_date",), "2024-13-01"),
    ("invoice", INVOICE, ("lines", 0, "quantity"), 0),
    ("invoice", INVOICE, ("vendor", "address", "country"), "DEU"),
    ("invoice", INVOICE, ("lines",), []),
    (
        "support_ticket_triage",
        {"category": "billing", "priority": "high", "sentiment": "angry", "language": "en", "summary": "Charged twice.",
         "needs_human": True, "order_id": "AB-123456", "tags": ["refund"], "confidence": 0.93},
        ("confidence",),
        1.01,
    ),
    (
        "flight_itinerary",
        {"booking_code": "X7Y2Z9", "passengers": [{"title": "Ms", "surname": "Lovelace", "given_name": "Ada"}],
         "segments": [{"flight": "LX318", "from": ROUTE, "to": {"iata": "LHR", "terminal": "2"},
                       "departs": "2025-07-01T08:15:00Z", "arrives": "2025-07-01T09:05:00+01:00", "cabin": "economy"}],
         "total_price": {"amount": 199.5, "currency": "CHF"}},
        ("segments", 0, "from", "iata"),
        "ZURICH",
    ),
    (
        "comment_tree",
        {"author": "ada", "text": "First!", "likes": 3,
         "replies": [{"author": "bob", "text": "No.", "likes": 0, "hidden": True, "replies": []}]},
        ("replies", 0, "replies"),
        None,
    ),
    (
        "file_tree",
        {"kind": "folder", "name": "src", "children": [{"kind": "file", "name": "a.py", "bytes": 12}]},
        ("children", 0, "kind"),
        "folder",
    ),
    (
        "payment_method",
        {"amount": 12.5, "method": {"kind": "card", "last_four": "0042", "expires": "12/29", "network": "visa"}},
        ("method", "kind"),
        "wallet",
    ),
    (
        "shape_union",
        {"shapes": [{"type": "circle", "x": 1, "y": -999, "radius": 0.5},
                    {"type": "polygon", "points": [[0, 0], [1, 0], [0, 1]]}]},
        ("shapes", 1, "points", 2),
        [0, 1, 2],
    ),
    (
        "bank_transaction",
        {"id": "123e4567-e89b-12d3-a456-426614174000", "booked": "2023-12-31", "amount": -12.99, "currency": "GBP",
         "counterparty": {"name": "Corner Shop"}, "category": "groceries", "reference": None, "is_recurring": False},
        ("amount",),
        -12.999,
    ),
    (
        "network_device",
        {"hostname": "sw1.example.org", "vendor": "arista",
         "management": {"ipv4": "10.0.0.255", "ipv6": "2001:db8::1", "port": 22},
         "interfaces": [{"name": "eth0", "mac": "00:1c:73:aa:bb:cc", "mtu": 1500, "up": True, "vlans": [1, 4094]}],
         "serial": "JPE123"},
        ("management", "ipv4"),
        "10.0.0.256",
    ),
    (
        "vulnerability_report",
        {"cve": "CVE-2021-44228", "title": "Log4Shell",
         "cvss": {"score": 10, "vector": "CVSS:3.1/AV:N/AC:L/PR:N/UI:N/S:C/C:H/I:H/A:H"}, "severity": "critical",
         "affected": [{"package": "log4j-core", "ecosystem": "maven", "introduced": "2.0", "fixed": "2.15.0"}],
         "cwe": ["CWE-502"], "published": "2021-12-10T10:15:09Z", "references": ["https://nvd.nist.gov/vuln?id=1"]},
        ("cve",),
        "CVE-21-44228",
    ),
    (
        "k8s_deployment",
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web", "labels": {"app": "web"}},
         "spec": {"replicas": 3, "selector": {"matchLabels": {"app": "web"}}, "template": {"spec": {"containers": [
             {"name": "web", "image": "nginx:1.27", "ports": [{"containerPort": 80}], "env": [
                 {"name": "MODE", "value": "prod"},
                 {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "web", "key": "key"}}}],
              "resources": {"limits": {"cpu": "500m", "memory": "1Gi"}, "requests": {"cpu": "1", "memory": "64Mi"}}}
         ]}}}},
        ("spec", "template", "spec", "containers", 0, "resources", "limits", "memory"),
        "1GB",
    ),
    (
        "boolean_query",
        {"and": [{"not": {"field": "author", "match": "Knuth"}},
                 {"or": [{"field": "year", "range": {"from": 1968, "to": 1973}}, {"field": "title", "match": "art"}]}]},
        ("and", 1, "or", 0, "field"),
        "title",
    ),
    (
        "resume",
        {"full_name": "Grace Hopper", "email": None, "phone": None, "links": ["https://example.org/gh"], "summary": "",
         "experience": [{"employer": "Navy", "title": "Admiral", "start": "1943-12", "end": None, "achievements": []}],
         "education": [], "skills": [{"name": "COBOL", "level": "good", "years": 40.5}], "languages": {"en": "native"}},
        ("experience", 0, "end"),
        "today",
    ),
]  # fmt: skip


def broken(instance: Any, path: tuple[Any, ...], value: Any) -> Any:
    changed = copy.deepcopy(instance)
    at = changed
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return changed


def is_valid(name: str, instance: Any) -> bool:
    jsonschema = pytest.importorskip("jsonschema")
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    return jsonschema.Draft202012Validator(SCHEMAS[name], format_checker=checker).is_valid(instance)


@pytest.mark.parametrize(("name", "instance", "path", "value"), CASES, ids=[f"{c[0]}-{c[2][-1]}" for c in CASES])
def test_an_instance_is_taken_and_a_broken_one_is_not(
    name: str, instance: Any, path: tuple[Any, ...], value: Any
) -> None:
    backend = backend_of("tiny")
    assert is_valid(name, instance)
    assert accepts(matcher_of(backend, spec(name)), tiny(), json.dumps(instance, ensure_ascii=False))
    wrong = broken(instance, path, value)
    assert not is_valid(name, wrong)
    assert not accepts(matcher_of(backend, spec(name)), tiny(), json.dumps(wrong, ensure_ascii=False))
    assert not accepts(matcher_of(backend, spec(name)), tiny(), json.dumps(instance, ensure_ascii=False)[:-1])
