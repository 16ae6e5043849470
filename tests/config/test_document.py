import pytest
from config_texts import messages, read, rendered
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.config.render import render_problems
from llmgw.config.schema import TABLES
from llmgw.domain.problem import Problem, Where


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = yes\n", "1:5 syntax yes is not a TOML value; booleans are true and false: write true"),
        ("x = False # c\n", "1:5 syntax False is not a TOML value; booleans are true and false: write false"),
        (
            "a = 1\nlisten = 127.0.0.1:80\n",
            '2:10 syntax 127.0.0.1:80 is not a TOML value; strings need quotes: "127.0.0.1:80"',
        ),
        ("path = /etc/x\n", '1:8 syntax /etc/x is not a TOML value; strings need quotes: "/etc/x"'),
        ("t = 10m\n", '1:5 syntax 10m is not a TOML value; strings need quotes: "10m"'),
        ("t = ten minutes # c\n", '1:5 syntax ten minutes is not a TOML value; strings need quotes: "ten minutes"'),
        ("a = 1\nb = 2\na = 3\n", '3:1 syntax key "a" is given twice; first given in line 1; remove one'),
        ("a = 1\nb = 2\na = 3", '3:1 syntax key "a" is given twice; first given in line 1; remove one'),
        ("[a]\n[b]\n[a]\n", "3:1 syntax table [a] is declared twice; first in line 1; for more than one write [[…]]"),
        ('a = "x\nb = 1\n', "1:5 syntax a string is not closed; the string begun in line 1 needs its closing quote"),
        ("a = 'x\nb = 1\n", "1:5 syntax a string is not closed; the string begun in line 1 needs its closing quote"),
        (
            'z = 1\na = """x\nb = 1\n',
            "2:5 syntax a string is not closed; the string begun in line 2 needs its closing quote",
        ),
        ("a = [1,\n2\nb = 1\n", "1:5 syntax a list is not closed; the list begun in line 1 needs its closing bracket"),
        ("a = [1,\n2\n", "1:5 syntax a list is not closed; the list begun in line 1 needs its closing bracket"),
        ("m = 0644\n", '1:5 syntax 0644 is not a TOML number; modes are strings: "0644"'),
        ("m = 012345\n", "1:5 syntax 012345 is not a TOML number; remove the zero in front"),
        ("m =\n", '1:4 syntax a value is missing; write KEY = VALUE; an empty string is ""'),
        (
            "hello\n",
            "1:6 syntax Expected '=' after a key in a key/value pair; a line is KEY = VALUE, [TABLE] or [[TABLE]]",
        ),
        (
            b"\xef\xbb\xbfa = 1\n",
            "1:1 syntax the file begins with a byte order mark; save the file as UTF-8 without byte order mark",
        ),
        (b"a = 1\nb = '\xff'\n", "2:6 syntax byte 6 in line 2 is not UTF-8 (0xff); save the file as UTF-8"),
        ("a = " + "[" * 3000, "1:1 syntax values are nested too deeply"),
        ("a = " + "[" * 200 + "]" * 200, "1:1 syntax values are nested too deeply"),
    ],
)
def test_syntax_errors_have_a_place_and_a_hint(text, message):
    assert messages(text) == [message]


def test_a_date_that_does_not_exist_is_an_error_and_no_traceback():
    assert read("d = 2024-13-45\n").problems[0].code == "syntax"


def test_windows_line_ends_are_read():
    assert messages("[node]\r\nname = 'A'\r\n")[0].startswith("2:8 bad-value")


def test_a_file_of_many_mebibytes_is_refused_unread():
    assert messages(b"#" * (5 << 20)) == ["None:None file-too-large the file has 5242880 bytes; 4194304 are the most"]


def test_a_long_line_is_cut_around_the_caret_and_tabs_do_not_shift_it():
    text = "[node]\n\tgpus\t=\t[" + ", ".join(str(n) for n in range(200)) + ", 'x']\n"
    head, excerpt, caret = rendered(text).splitlines()[:3]
    assert head.startswith("llmgw.toml:2:")
    assert len(excerpt) < 120
    assert excerpt[caret.index("^")] == "'"


def test_a_problem_without_a_column_shows_its_line_and_no_caret():
    problem = Problem("x", "text", None, Where("f", 2))
    assert render_problems([problem], {"f": "one\ntwo\n"}) == (
        "f:2: error: text\n     2 | two\n1 error in f; nothing was changed\n"
    )
    assert render_problems([Problem("x", "text", severity="warning")], {}) == "warning: text\n1 warning\n"
    assert render_problems([Problem("x", "text", None, Where("f", 9, 1))], {"f": "one"}).count("\n") == 2
    assert render_problems([], {}) == ""


def test_control_characters_of_a_file_do_not_reach_the_terminal():
    text = '[[shard]]\nname = "a\\u001b[31m"\n' + "x = 1\x1b[31m\n"
    assert "\x1b" not in rendered(text)
    assert "\x1b[1;31merror:\x1b[0m" in render_problems(read(text).problems, {}, colour=True)


# ------------------------------------------------------------------------------------------------------- never raises

VALID = b"""include = ["conf.d/*.toml"]
[node]
labels = { rack = "r12" }
gpus = [0, "GPU-0123456789"]
[supervisor]
socket_mode = "0660"
log_line_max = "8KiB"
[defaults]
env = { HF_HOME = "/x", A = { unset = true } }
[defaults.vllm]
command = ["${HOME:-/x}/vllm", "serve"]
args = { a-b = true, c = [1, 2.5], d = { e = "f" } }
[[shard]]
name = "a"
model = "m"
gpus = [0, 1]
api_key = { env = "KEY" }
port = 8200
[shard.where]
rack = ["r12"]
[[shard]]
name = "b"
inherit = "a"
gpus = 2
load_timeout = "1h30m"
extra_args = ["--x", "${llmgw.port}"]
[gateway]
listen = ["127.0.0.1:8080", "unix:/run/x.sock"]
[[gateway.band]]
name = "x"
default = true
[[gateway.tenant]]
name = "t"
keys = [{ sha256 = "6b3a55e0261b0304143f805a24924d0c1c44524821305f31d9277843b8a10f4e" }]
rate = { requests_per_minute = 5 }
[cluster]
name = "c"
etcd = ["http://127.0.0.1:2379"]
"""


def never_raises(data):
    parsed = read(data)
    assert parsed.config is not None or any(problem.is_error for problem in parsed.problems)
    assert rendered(data).count("\n") >= len(parsed.problems)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300) | st.text(max_size=200).map(lambda t: t.encode("utf-8", "replace")))
def test_no_bytes_make_the_reader_raise(data):
    never_raises(data)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_no_mutation_of_a_valid_file_makes_the_reader_raise(data):
    text = bytearray(VALID)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        match data.draw(st.integers(0, 3)):
            case 0:
                del text[at : at + data.draw(st.integers(1, 20))]
            case 1:
                text[at:at] = data.draw(
                    st.sampled_from([b"[", b"]", b'"', b"=", b"{", b"\n", b".", b"#", b"\xff", b"''"])
                )
            case 2:
                lines = bytes(text).split(b"\n")
                line = data.draw(st.integers(0, len(lines) - 1))
                lines.insert(data.draw(st.integers(0, len(lines))), lines.pop(line))
                text = bytearray(b"\n".join(lines))
            case _:
                text[at] = data.draw(st.integers(32, 126))
    never_raises(bytes(text))


ODD = st.recursive(
    st.sampled_from(
        ['""', '"x"', "0", "-1", "1.5", "true", "1979-05-27", '"off"', '"1s"', "inf", '"${x"', '"~"', '"*"']
    ),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda v: "[" + ", ".join(v) + "]")
        | st.dictionaries(
            st.sampled_from(["env", "file", "name", "unset", "value", "keys", "x.y"]), inner, max_size=3
        ).map(lambda d: "{ " + ", ".join(f'"{k}" = {v}' for k, v in d.items()) + " }")
    ),
    max_leaves=5,
)


KEY = "sk-0123456789abcdef"
WITH_SECRETS = f"""
[[shard]]
name = "a"
model = "m"
gpus = 0
api_key = "{KEY}"
[shard.env]
HF_TOKEN = "{KEY}"
OTHER = {{ value = "{KEY}" }}
[gateway]
operator_keys = ["{KEY}op"]
[[gateway.tenant]]
name = "t"
keys = [
  "{KEY}",
  {{ value = "{KEY}2" }},
]
[cluster]
name = "c"
password = "{KEY}"
"""


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_no_slip_of_the_hand_makes_a_message_show_a_secret(data):
    pieces = WITH_SECRETS.split(KEY)
    for _ in range(data.draw(st.integers(1, 3))):
        which = data.draw(st.integers(0, len(pieces) - 1))
        piece = pieces[which]
        at = data.draw(st.integers(0, max(len(piece) - 1, 0)))
        match data.draw(st.integers(0, 2)):
            case 0:
                pieces[which] = piece[:at] + piece[at + data.draw(st.integers(1, 3)) :]
            case 1:
                slip = data.draw(st.sampled_from(["x", "[", "]", '"', "=", "{", "\n", ".", "#", ",", " ", "''"]))
                pieces[which] = piece[:at] + slip + piece[at:]
            case _:
                pieces[which] = piece[:at] + data.draw(st.sampled_from("ab-_.1")) + piece[at + 1 :]
    text = KEY.join(pieces)
    assert KEY not in rendered(text)


@pytest.mark.parametrize(
    "text",
    [
        f"[shard.env]\nOTHER = {{\nvalue = a{KEY} }}\n",
        f"[[gateway.tenant]]\nkeys = [\n  {KEY},\n]\nx =\n",
        f"[shard]\nOTHER = {KEY}\n",
    ],
)
def test_a_secret_that_has_lost_its_quotes_is_not_shown_either(text):
    shown = rendered(text)
    assert KEY not in shown and shown


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_no_value_under_any_key_makes_the_reader_raise(data):
    lines = []
    for table in data.draw(st.lists(st.sampled_from(TABLES[1:]), max_size=5, unique_by=lambda t: t.title)):
        brackets = "[[{}]]" if table.array else "[{}]"
        lines.append(brackets.format(table.title))
        for key in data.draw(st.lists(st.sampled_from(table.keys), max_size=6, unique_by=lambda k: k.name)):
            lines.append(f"{key.name} = {data.draw(ODD)}")
    never_raises("\n".join(lines).encode())
