"""What is made from the schema is in step with it."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from attrs import evolve
from config_texts import FACTS, read

from llmgw.config import example, json_schema, reference
from llmgw.config.explain import explain, explain_json
from llmgw.config.kinds import Refused
from llmgw.config.problem_codes import CODES
from llmgw.config.schema import DEFAULTS, ENGINE_DEFAULTS, FILE, SHARD, TABLES, Record, Records, Table

ROOT = Path(__file__).parents[2]


def test_the_example_is_what_the_schema_makes():
    made = "python -m llmgw.config.example > llmgw.toml.example"
    assert (ROOT / "llmgw.toml.example").read_text() == example.example(), made


def test_the_json_schema_is_what_the_schema_makes():
    made = "python -m llmgw.config.json_schema > llmgw.schema.json"
    assert (ROOT / "llmgw.schema.json").read_text() == json_schema.json_schema_text(), made


@pytest.mark.parametrize("name", ["config.md", "problems.md"])
def test_the_reference_pages_are_what_the_tables_make(name):
    made = "python -m llmgw.config.reference docs/reference"
    assert (ROOT / "docs" / "reference" / name).read_text() == reference.pages()[name], made


def test_the_example_is_valid_as_it_stands():
    parsed = read(example.example())
    assert parsed.problems == ()
    assert [s.name for s in parsed.config.shards] == [shard["name"] for shard in example.SHARDS]


def test_every_line_of_the_example_is_valid_when_it_is_uncommented():
    text = re.sub(r"^# (?=[\[a-z])", "", example.example().split("\n\n", 1)[1], flags=re.MULTILINE)
    raw = tomllib.loads(text)
    assert set(raw) == {"include", "node", "supervisor", "defaults", "shard", "gateway", "cluster"}
    shown = set(raw["shard"][-1])
    assert shown == {key.name for key in SHARD.keys}
    problems = read(text, facts=evolve(FACTS, env={"CREDENTIALS_DIRECTORY": "/c"}), offline=True).problems
    # The samples are one by one right; only what contradicts each other across keys may be told.
    allowed = {
        "unknown-shard",
        "given-twice",
        "duplicate-name",
        "default-band",
        "no-effect",
        "uneven-gpus",
        "unknown-model",
        "replicas-pinned",
        "engine-cannot",
        "key-taken",
        "unknown-value",
    }
    assert {p.code for p in problems if p.is_error} <= allowed


def test_every_table_and_key_is_in_the_reference_and_explained():
    page = reference.config_page()
    for table in TABLES:
        for key in table.keys:
            title = f"{table.title}.{key.name}".lstrip(".")
            assert f"`{key.name}`" in page
            assert key.meaning.strip(), title
            assert title in explain(title)


def test_explain_finds_tables_bare_keys_and_near_misses():
    assert explain("").startswith("llmgw.toml")
    assert explain("[gateway.tls]").startswith("[gateway.tls]")
    assert explain("[[shard]]").startswith("[[shard]]")
    assert explain("load_timeout") == (
        "shard.load_timeout   duration\n"
        '  default: "30m"\n'
        "  Loading: longest time without progress. A changed counter, percentage or phase starts it anew.\n"
        "  allowed: 1s or more.\n"
        "  changed: a reload applies it at once\n"
    )
    heads = [line.split("   ")[0] for line in explain("drain_timeout").splitlines() if line and line[0] != " "]
    assert heads == ["shard.drain_timeout", "gateway.drain_timeout"]
    assert explain("shard.lod_timeout").endswith("shard.lod_timeout; did you mean shard.load_timeout?\n")
    assert explain("qqqqqq") == "there is no key or table qqqqqq; llmgw explain lists all tables\n"
    assert explain_json("shard.name")[0]["required"] is True
    assert len(explain_json("gateway.tls")) == 3
    assert explain_json("qqqqqq") == []


def test_defaults_and_samples_of_all_keys_are_valid_values():
    for table in TABLES:
        for key in table.keys:
            if isinstance(key.kind, (Record, Records)):
                with pytest.raises(NotImplementedError):
                    key.kind.read({})
                continue
            for value in (key.default, key.sample):
                if value is not None:
                    assert key.kind.read(value) is not Refused
            if key.default is not None:
                assert key.kind.read(key.kind.show(key.builtin)) == key.builtin
            assert key.required or key.default_shown


def test_defaults_have_the_keys_of_a_shard():
    assert "command" not in DEFAULTS.by_name or isinstance(DEFAULTS.by_name["command"].kind, Record)
    for table in ENGINE_DEFAULTS.values():
        assert set(SHARD.by_name) - set(table.by_name) == {"name", "model", "aliases", "weights", "inherit", "engine"}


def test_every_documented_code_can_be_reported():
    sources = [p.read_text() for p in (ROOT / "llmgw" / "config").glob("*.py") if p.name != "problem_codes.py"]
    everything = "".join(sources)
    assert {code for code in CODES if f'"{code}"' not in everything} == set()


def by_schema(schema, value):
    """A JSON-schema check of the few words that the schema uses."""
    if "anyOf" in schema:
        return any(by_schema(s, value) for s in schema["anyOf"])
    if "const" in schema:
        return value == schema["const"]
    if "enum" in schema:
        return value in schema["enum"]
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    fits = {
        "string": isinstance(value, str),
        "integer": type(value) is int,
        "number": type(value) in (int, float),
        "boolean": isinstance(value, bool),
        "array": isinstance(value, list),
        "object": isinstance(value, dict),
    }
    if not any(fits[t] for t in types):
        return False
    if isinstance(value, str) and "pattern" in schema and not re.search(schema["pattern"], value):
        return False
    if isinstance(value, list) and "items" in schema:
        return all(by_schema(schema["items"], v) for v in value)
    if isinstance(value, dict) and "properties" in schema:
        return all(k in schema["properties"] and by_schema(schema["properties"][k], v) for k, v in value.items())
    return True


def test_the_json_schema_accepts_the_example_and_refuses_a_misspelled_key():
    schema = json.loads(json_schema.json_schema_text())
    assert by_schema(schema, tomllib.loads(example.example()))
    for table in TABLES:
        for key in table.keys:
            if not isinstance(key.kind, (Record, Records)):
                for value in (key.default, key.sample):
                    assert value is None or by_schema(key.kind.schema(), value), f"{table.title}.{key.name}"
    assert not by_schema(schema, {"shard": [{"nmae": "a"}]})
    assert not by_schema(schema, {"shard": [{"replicas": "a"}]})


def test_the_top_level_is_known():
    assert isinstance(FILE, Table)
    assert FILE.by_name["shard"].kind.show([]) == []
