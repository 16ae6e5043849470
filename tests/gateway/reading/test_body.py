"""What a body asks for, and the one change that is made to it."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.gateway.reading import body
from llmgw.gateway.reading.answers import Refusal

JSON = b"application/json"


def asked(data: bytes, content_type: bytes = JSON) -> body.Asked:
    found = body.read([data], content_type)
    assert isinstance(found, body.Asked), found
    return found


def renamed(data: bytes, name: str, content_type: bytes = JSON) -> bytes:
    return b"".join(body.rename([data], asked(data, content_type), name))


NOT_AN_OBJECT = [b"", b" ", b"{", b"nul", b"[]", b"3", b'"model"', b"null", b"\xff", b'{"a": 1,}', b'{"model": "a"} x']
NO_MODEL = [b"{}", b'{"model": 3}', b'{"model": null}', b'{"model": ["a"]}', b'{"model": {"a": 1}}', b'{"model": ""}']
BAD_NAMES = [b'{"model": "' + b"x" * 600 + b'"}', b'{"model": "a"', b'{"model": "\xff"}', b'{"model": "\\ud800"}']
TOO_DEEP = [b"[" * 100_000, b'{"a":' * 100_000, b'{"model":"m","a":' + b"[" * 100_000]


@pytest.mark.parametrize("data", [*NOT_AN_OBJECT, *NO_MODEL, *BAD_NAMES, *TOO_DEEP])
def test_only_what_names_no_model_or_is_no_object_is_refused(data: bytes) -> None:
    found = body.read([data], JSON)
    assert isinstance(found, Refusal) and found.status == 400 and not found.may_retry


@pytest.mark.parametrize(
    "more",
    [
        '"stream": "yes"',
        '"stream": 1',
        '"user": 5',
        '"user": null',
        '"max_tokens": "many"',
        '"max_tokens": -3',
        '"max_tokens": 1e400',
        '"max_tokens": 99999999999999999999999',
        '"messages": "none"',
        '"temperature": []',
    ],
)
def test_other_fields_are_the_engines_business(more: str) -> None:
    found = asked(f'{{"model": "m", {more}}}'.encode())
    assert (found.model, found.stream) == ("m", False)


def test_what_bears_on_the_queue_is_read() -> None:
    found = asked(b'{"model": "m", "stream": true, "user": "ada", "max_tokens": 12, "prompt": "12345678"}')
    assert (found.model, found.stream, found.user, found.max_tokens) == ("m", True, "ada", 12)
    assert asked(b'{"model": "m", "max_completion_tokens": 7}').max_tokens == 7
    assert asked(b'{"model": "m", "max_output_tokens": 9}').max_tokens == 9
    assert asked(b'{"model": "m", "x": "' + b"y" * 4000 + b'"}').estimate > 1000


def test_a_name_that_is_the_models_own_changes_no_byte() -> None:
    data = b'{ "model"\t: "m" }'
    assert renamed(data, "m") == data


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b'{"model":"a"}', b'{"model":"B"}'),
        (b'\xef\xbb\xbf{"model":"a"}', b'\xef\xbb\xbf{"model":"B"}'),
        (b'{"x":{"model":"a"},"model":"a"}', b'{"x":{"model":"a"},"model":"B"}'),
        (b'{"model":"a","model":"a"}', b'{"model":"B","model":"B"}'),
        (b'{"m\\u006fdel" : "a" }', b'{"m\\u006fdel" : "B" }'),
        (b'{"model":"\\u0061"}', b'{"model":"B"}'),
        (b'{"x":"\\"model\\":\\"a\\"","model":"a"}', b'{"x":"\\"model\\":\\"a\\"","model":"B"}'),
        (b'{"x":["model","a"],"model":\n"a"}', b'{"x":["model","a"],"model":\n"B"}'),
        (b'{"a":"model","model":"a"}', b'{"a":"model","model":"B"}'),
    ],
)
def test_an_alias_is_replaced_where_an_engine_reads_it_and_nowhere_else(data: bytes, wanted: bytes) -> None:
    assert renamed(data, "B") == wanted


@pytest.mark.parametrize(
    "data",
    [
        b'{"q":"model","model":"a"}',
        b'{"model":3,"model":"a"}',
        b'{"x":' + b"[" * 100 + b'{"model":"a"}' + b"]" * 100 + b',"model":"a"}',
        b'{"x":[' + (b"[" * 40 + b"]" * 40 + b",") * 20 + b'1],"model":"a"}',
        b'{"x":"\\\\","model":"a","y":"\\\\\\""}',
    ],
)
def test_a_model_is_found_behind_whatever_stands_before_it(data: bytes) -> None:
    assert renamed(data, "B") == b'"model":"B"'.join(data.rsplit(b'"model":"a"', 1))


def test_each_of_several_models_gets_the_name_so_that_no_engine_can_read_another() -> None:
    assert renamed(b'{"model":"b", "x":1, "model":"a"}', "B") == b'{"model":"B", "x":1, "model":"B"}'


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b'{"n":1.50,' + b'"model":"b",' * 100_000 + b'"model":"a"}', {"n": 1.5, "model": "B"}),
        (b'\xef\xbb\xbf{"x":[' + (b"[" * 40 + b"]" * 40 + b",") * 10_000 + b'1],"model":"a"}', None),
    ],
)
def test_a_body_made_to_be_slow_to_search_is_written_anew_with_the_values_that_count(
    data: bytes, wanted: dict[str, object] | None
) -> None:
    after = renamed(data, "B")
    assert json.loads(after) == (wanted or {**json.loads(data), "model": "B"})


def test_the_name_beside_a_large_image_is_found_without_memory_for_each_of_its_bytes() -> None:
    data = b'{"image":"' + b"A" * 4_000_000 + b'","model":"a"}'
    found = asked(data)
    tracemalloc.start()
    try:
        after = body.rename([data], found, "B")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after == [data[:-4] + b'"B"}']
    assert peak < 5 * len(data)


def test_a_name_with_quotes_stays_well_formed_json() -> None:
    assert json.loads(renamed(b'{"model":"a","n":1}', 'x"\\é')) == {"model": 'x"\\é', "n": 1}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["model", "a", "é", '"']), inner),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=6), VALUES, max_size=5), st.text(min_size=1, max_size=6), st.data())
@settings(max_examples=150, deadline=None)
def test_renaming_changes_the_model_and_nothing_else_however_the_body_came(
    fields: dict[str, object], model: str, data: st.DataObject
) -> None:
    fields = {**fields, "model": model}
    keys = data.draw(st.permutations(list(fields)))
    text = json.dumps(
        {key: fields[key] for key in keys},
        ensure_ascii=data.draw(st.booleans()),
        indent=data.draw(st.sampled_from([None, 1])),
    ).encode("utf-8", "surrogatepass")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found = body.read(parts, JSON)
    assert isinstance(found, body.Asked) and found.model == model
    after = b"".join(body.rename(parts, found, "another"))
    assert json.loads(after) == {**fields, "model": "another"}
    before = json.dumps(model, ensure_ascii=False), json.dumps(model)
    assert len(after) - len(b'"another"') in {len(text) - len(form.encode("utf-8", "surrogatepass")) for form in before}


@given(st.binary(max_size=60), st.sampled_from([JSON, b"", b"text/plain", b"multipart/form-data; boundary=X"]))
@settings(max_examples=200, deadline=None)
def test_no_bytes_make_it_raise(data: bytes, content_type: bytes) -> None:
    assert isinstance(body.read([data], content_type), (body.Asked, Refusal))


# -- forms -----------------------------------------------------------------------------------------------

FORM = b"multipart/form-data; boundary=XyZ"


def part(name: str, value: bytes, more: str = "") -> bytes:
    return f'--XyZ\r\ncontent-disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + value + b"\r\n"


FILE = part("file", b"RIFF\x00\xff--XyZ not quite\r\n--Xy", '; filename="a.wav"')
END = b"--XyZ--\r\n"


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (FILE + part("model", b"w") + END, FILE + part("model", b"B") + END),
        (part("model", b"w") + FILE + END, part("model", b"B") + FILE + END),
        (part("model", b"v") + part("model", b"w") + END, part("model", b"B") + part("model", b"B") + END),
    ],
)
def test_in_a_form_the_model_may_stand_before_and_after_the_file(data: bytes, wanted: bytes) -> None:
    found = asked(data, FORM)
    assert found.model == "w"
    for cut in range(0, len(data), 7):
        assert b"".join(body.rename([data[:cut], data[cut:]], found, "B")) == wanted


def test_a_file_that_is_called_model_is_no_model() -> None:
    found = body.read([part("model", b"w", '; filename="model"') + END], FORM)
    assert isinstance(found, Refusal) and found.code == "missing-model"


def test_a_form_asks_for_a_stream_in_words() -> None:
    assert asked(part("stream", b"true") + part("model", b"w") + END, FORM).stream
    assert not asked(part("stream", b"false") + part("model", b"w") + END, FORM).stream


@pytest.mark.parametrize(
    ("data", "content_type"),
    [
        (part("model", b"w"), FORM),
        (part("model", b"w") + END, b"multipart/form-data"),
        (part("model", b"w") + END, b"multipart/mixed; boundary=XyZ"),
        (part("model", b"w") + END, b"multipart/form-data; boundary=other"),
        (part("model", b"w") + END, b"multipart/form-data; boundary=" + b"x" * 300),
        (part("model", b"\xff\xfe") + END, FORM),
        (part("model", b"") + END, FORM),
        (part("model", b"x" * 10_000) + END, FORM),
        (FILE + END, FORM),
        (END, FORM),
        (b"", FORM),
    ],
)
def test_a_form_without_a_readable_model_is_refused(data: bytes, content_type: bytes) -> None:
    found = body.read([data], content_type)
    assert isinstance(found, Refusal) and found.status == 400
