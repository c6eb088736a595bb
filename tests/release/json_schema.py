"""The JSON schema of privacy.json, and what breaks it."""

import json
from importlib.resources import files

from jsonschema import Draft202012Validator


def privacy_schema():
    """The JSON schema of privacy.json, shipped with the package."""
    return json.loads(files("pate_verify").joinpath("privacy.schema.json").read_text(encoding="utf-8"))


def faults(value, schema):
    """What breaks the schema."""
    return [f"{fault.json_path}: {fault.message}" for fault in Draft202012Validator(schema).iter_errors(value)]
