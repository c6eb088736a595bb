"""A small checker of JSON schemas, for what is written against them."""

import json
import math
import re
from importlib.resources import files

TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}


def privacy_schema():
    """The JSON schema of privacy.json, shipped with the package."""
    return json.loads(files("pate_torch.release").joinpath("privacy.schema.json").read_text(encoding="utf-8"))


def faults(value, schema, where="$"):
    """What breaks the schema. Knows the keywords the schema uses; any other is an error of the schema."""
    known = {"$schema", "title", "description", "type", "enum", "properties", "required", "additionalProperties"}
    known |= {"items", "minItems", "minLength", "pattern", "minimum", "exclusiveMinimum", "exclusiveMaximum"}
    assert set(schema) <= known, set(schema) - known
    kinds = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    if not any(isinstance(value, TYPES[k]) and not (isinstance(value, bool) and k != "boolean") for k in kinds):
        return [f"{where}: not {kinds}"]
    found = [f"{where}: not one of {schema['enum']}"] if "enum" in schema and value not in schema["enum"] else []
    if isinstance(value, dict):
        found += [f"{where}.{key}: missing" for key in schema.get("required", ()) if key not in value]
        for key, item in value.items():
            inner = schema.get("properties", {}).get(key, schema.get("additionalProperties", True))
            found += [f"{where}.{key}: unknown"] if inner is False else []
            found += faults(item, inner, f"{where}.{key}") if isinstance(inner, dict) else []
    elif isinstance(value, list):
        found += [f"{where}: too short"] if len(value) < schema.get("minItems", 0) else []
        found += [fault for i, item in enumerate(value) for fault in faults(item, schema["items"], f"{where}[{i}]")]
    elif isinstance(value, str):
        found += [f"{where}: too short"] if len(value) < schema.get("minLength", 0) else []
        found += [f"{where}: pattern"] if not re.search(schema.get("pattern", ""), value) else []
    elif value is not None and not isinstance(value, bool):
        found += [f"{where}: too small"] if value < schema.get("minimum", -math.inf) else []
        found += [f"{where}: too small"] if value <= schema.get("exclusiveMinimum", -math.inf) else []
        found += [f"{where}: too large"] if value >= schema.get("exclusiveMaximum", math.inf) else []
    return found
