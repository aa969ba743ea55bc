"""Random JSON Schemas on random weights: answers end by themselves, and are valid.

SLOTCACHE_SCHEMAS says how many: 25 in a few seconds, if it is not set.
"""

import json
import os

import jsonschema
import pytest
from support.schemas import random_schema

FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER
SCHEMAS = int(os.environ.get("SLOTCACHE_SCHEMAS", "25"))


@pytest.mark.timeout(900 + 10 * SCHEMAS)
def test_answers_to_random_schemas_end_by_themselves_and_are_valid(server):
    ended = []
    for seed in range(SCHEMAS):
        schema, temperature = random_schema(seed), (0.0, 0.8, 1.5)[seed % 3]
        body = {"messages": [{"role": "user", "content": f"Number {seed}"}], "json_schema": schema, "max_tokens": 1500}
        answer = server.http.post("/v1/chat/completions", json=body | {"temperature": temperature, "seed": seed})
        assert answer.status_code == 200, (schema, answer.text)
        (choice,) = answer.json()["choices"]
        ended.append(choice["finish_reason"] == "stop")
        if ended[-1]:
            jsonschema.validate(json.loads(choice["message"]["content"]), schema, format_checker=FORMATS)
        else:
            print(seed, temperature, choice["message"]["content"][-100:])
    print(f"{sum(ended)} of {SCHEMAS} answers ended by themselves; each of those is valid")
    assert sum(ended) >= 0.95 * SCHEMAS
