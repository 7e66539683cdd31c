"""`promptfoo`: prompts and assertions over chats, completions and responses, and a JSON schema."""

from __future__ import annotations

import json
from pathlib import Path

from harness import Session, install_from_npm, node_package

PACKAGES = ("promptfoo@0.123.1", node_package())
SERVER = "real"

SETTINGS = """
prompts: ["What is the capital of {{{{country}}}}?"]
providers:
  - {{id: "openai:chat:{model}", config: {{apiBaseUrl: "{url}/v1", temperature: 0, max_tokens: 24, seed: 1}}}}
  - {{id: "openai:completion:{model}", config: {{apiBaseUrl: "{url}/v1", temperature: 0, max_tokens: 24}}}}
  - {{id: "openai:responses:{model}", config: {{apiBaseUrl: "{url}/v1", temperature: 0, max_output_tokens: 24}}}}
  - id: "openai:chat:{model}"
    label: with a schema
    config:
      apiBaseUrl: "{url}/v1"
      temperature: 0
      max_tokens: 60
      response_format:
        type: json_schema
        json_schema:
          name: capital
          strict: true
          schema:
            type: object
            properties: {{capital: {{type: string, maxLength: 20}}}}
            required: [capital]
            additionalProperties: false
tests:
  - {{vars: {{country: France}}}}
  - {{vars: {{country: Italy}}}}
defaultTest:
  assert: [{{type: javascript, value: "['string', 'object'].includes(typeof output)"}}]
"""


def install(home: Path, constraints: Path | None) -> None:
    install_from_npm(home, *PACKAGES)


def use(session: Session) -> None:
    (session.work / "promptfooconfig.yaml").write_text(SETTINGS.format(url=session.url, model=session.model))
    modules = session.home / "node_modules"
    out = session.work / "out.json"
    env = {
        "PROMPTFOO_CONFIG_DIR": str(session.work / "promptfoo"),
        "PROMPTFOO_DISABLE_TELEMETRY": "1",
        "PROMPTFOO_DISABLE_UPDATE": "1",
        "PROMPTFOO_DISABLE_REMOTE_GENERATION": "1",
    }
    options = ["eval", "--no-cache", "--no-share", "--no-progress-bar", "-o", out]
    ran = session.run(session.node, modules / "promptfoo" / "dist" / "src" / "entrypoint.js", *options, env=env)
    command = ["promptfoo", *options]
    if not out.is_file():
        session.check("an evaluation", command, False, ran.last_line)
        return
    results = json.loads(out.read_text())["results"]["results"]
    for provider in dict.fromkeys(one["provider"].get("label") or one["provider"]["id"] for one in results):
        rows = [one for one in results if (one["provider"].get("label") or one["provider"]["id"]) == provider]
        outputs = [row.get("error") or (row.get("response") or {}).get("output") for row in rows]
        passed = all(row["success"] for row in rows)
        if provider == "with a schema":
            passed = passed and all(isinstance(one, dict) and list(one) == ["capital"] for one in outputs)
        session.check(f"{provider.rpartition(':')[0] or provider}", command, passed, str(outputs)[:200])
