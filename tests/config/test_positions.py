import tomllib

import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.config.positions import scan

TEXT = '''\
# comment
title = "x"
[node]
"quoted.key" = 1
labels = { rack = "r12", 'lit' = "a" } # end
[[shard]]
name = "a"
gpus = [ 0, # none
  1, [2, {deep = 3}], ]
[shard.env]
a.b . c = """
two "quotes" and \\""" inside"""
[[shard]]
name = \'\'\'b\'\'\'
[[shard.inner]]
x = 1979-05-27 07:32:00
[shard.inner.more]
y = true
'''


def places(text):
    found = scan(text)
    return {path: found.line_column(span.start) for path, span in found.spans.items()}


def test_every_key_and_element_has_its_place():
    found = places(TEXT)
    assert found[("title",)] == (2, 9)
    assert found[("node", "quoted.key")] == (4, 16)
    assert found[("node", "labels", "rack")] == (5, 19)
    assert found[("node", "labels", "lit")] == (5, 34)
    assert found[("shard", 0)] == (6, 1)
    assert found[("shard", 0, "gpus", 1)] == (9, 3)
    assert found[("shard", 0, "gpus", 2, 1, "deep")] == (9, 18)
    assert found[("shard", 0, "env", "a", "b", "c")] == (11, 11)
    assert found[("shard", 1, "name")] == (14, 8)
    assert found[("shard", 1, "inner", 0, "x")] == (16, 5)
    assert found[("shard", 1, "inner", 0, "more", "y")] == (18, 5)


def test_values_end_where_they_end():
    found = scan('a = 1 # c\nb = "x"  \nc = [1, 2]\n')
    ends = {path[0]: found.text[span.start : span.end] for path, span in found.spans.items() if len(path) == 1}
    assert ends == {"a": "1", "b": '"x"', "c": "[1, 2]"}


def test_a_table_that_is_only_implied_is_found_too():
    found = scan("[a.b.c]\nx = 1\n")
    assert found.find(("a",)) is not None
    assert found.find(("a", "b", "unwritten")) is not None
    assert found.find(("other",)) is None


def test_repeated_keys_are_noted_with_both_places():
    found = scan("a = 1\n[t]\nb = 2\nb = 3\n[u]\n[t]\n")
    assert [
        (path, found.line_column(first)[0], found.line_column(second)[0]) for path, first, second in found.repeated
    ] == [
        (("t", "b"), 3, 4),
        (("t",), 2, 6),
    ]


def test_escapes_in_quoted_keys_are_read():
    assert ("tab\t\u00e9\U0001f600",) in scan('"tab\\t\\u00e9\\U0001F600" = 1').spans
    assert ("\ufffd",) in scan('"\\UFFFFFFFF" = 1').spans


def test_what_is_no_toml_ends_the_scan_quietly():
    assert ("a",) in scan('a = 1\nb = "open\nc = 2').spans
    for text in (
        "= 1",
        "a",
        "[a",
        "a = [1, ",
        "a = {b",
        "a = 1 b = 2",
        "a =",
        "[" * 500,
        "a = " + "[" * 5000,
        "a = @\n}",
    ):
        assert scan(text).text == text


# ------------------------------------------------------------------------------------------- against the real parser


def paths_of(value, path=()):
    if path:
        yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from paths_of(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from paths_of(inner, (*path, index))


def same_paths(text):
    raw = tomllib.loads(text)
    found = scan(text)
    scanned = set(found.spans) | set(found.implied)
    assert set(paths_of(raw)) == scanned
    assert found.repeated == []


KEYS = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
SCALARS = (
    st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=("Cs",)), max_size=30)
    | st.dates()
    | st.datetimes()
    | st.times().map(lambda t: t.replace(tzinfo=None))
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=20
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(KEYS, VALUES, max_size=6), st.booleans())
def test_the_scanner_finds_the_paths_that_tomllib_finds(document, multiline):
    same_paths(tomli_w.dumps(document, multiline_strings=multiline).replace("\r\n", "\n").replace("\r", " "))


@st.composite
def written_by_hand(draw):
    """A document with the oddities that a writer library never makes: comments, dots, blanks, inline tables."""
    names = iter(f"k{n}" for n in range(1000))
    blank = st.sampled_from(["", " ", "\t", "  "])
    scalar = st.sampled_from(
        [
            "1",
            "-0.5e3",
            "true",
            '"a#b"',
            "'c]}'",
            '"""x\n"" y"""',
            "'''l\n'q'''",
            "1979-05-27T07:32:00Z",
            '"\\""',
            "0x1F",
        ]
    )

    def value(depth):
        kind = draw(st.integers(0, 3 if depth < 3 else 0))
        if kind == 1:
            items = [value(depth + 1) for _ in range(draw(st.integers(0, 3)))]
            gap = draw(st.sampled_from([" ", "\n", " # c\n"]))
            return "[" + ",".join(f"{gap}{item}{gap}" for item in items) + (gap if not items else "") + "]"
        if kind == 2:
            pairs = [f"{key()}{draw(blank)}={draw(blank)}{value(depth + 1)}" for _ in range(draw(st.integers(0, 2)))]
            inner = ", ".join(pair for pair in pairs)
            return "{ " + inner + " }"
        return draw(scalar)

    def key():
        parts = [next(names) for _ in range(draw(st.integers(1, 3)))]
        forms = [draw(st.sampled_from(["{}", '"{}"', "'{}'", '"{}.x"'])).format(part) for part in parts]
        return f"{draw(blank)}.{draw(blank)}".join(forms)

    lines = []
    for _ in range(draw(st.integers(0, 4))):
        header = draw(st.sampled_from(["", "[{}]", "[ {} ]", "[[{}]]"]))
        if header:
            lines.append(header.format(key()) + draw(st.sampled_from(["", " # c"])))
        lines += [
            f"{draw(blank)}{key()} ={draw(blank)}{value(0)}{draw(st.sampled_from(['', ' # c', ' ']))}"
            for _ in range(draw(st.integers(0, 3)))
        ]
    return "\n".join(lines) + "\n"


@settings(max_examples=300, deadline=None)
@given(written_by_hand())
def test_the_scanner_agrees_on_documents_as_people_write_them(text):
    same_paths(text)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200) | st.text(st.sampled_from("[]{}=\"'.,# \nab1\\"), max_size=60))
def test_no_text_breaks_the_scanner(text):
    assert scan(text).text == text
