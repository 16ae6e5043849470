import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.config import kinds
from llmgw.config.kinds import Refused
from llmgw.config.schema import TABLES, Record, Records
from llmgw.domain.shard import UNSET

RAW = st.recursive(
    st.none().map(lambda _: "") | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
ALL_KINDS = [k.kind for table in TABLES for k in table.keys if not isinstance(k.kind, (Record, Records))]


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(ALL_KINDS), RAW)
def test_every_kind_reads_or_refuses_with_words(kind, raw):
    refusals: tuple = ()
    try:
        value = kind.read(raw)
    except Refused as error:
        refusals = error.refusals
    if refusals:
        assert all(r.message and r.code for r in refusals)
    else:
        assert kind.read(kind.show(value)) == value or "***" in str(kind.show(value))


def refusal(kind, raw):
    with pytest.raises(Refused) as caught:
        kind.read(raw)
    return [(r.path, r.message, r.hint) for r in caught.value.refusals]


def test_long_and_unprintable_texts_are_cut_and_cleaned_in_messages():
    assert kinds.quoted("a\n" + "x" * 100) == "'a\ufffd" + "x" * 57 + "…'"
    assert kinds.described(10**30) == "an integer of many digits"
    assert refusal(kinds.Integer(high=5), 10**30) == [((), "this number is too large", "the most is 5")]


def test_texts_have_a_longest_length_and_no_nul():
    assert refusal(kinds.Text(most=3), "abcd") == [((), "a string of 4 characters", "it may have 3")]
    assert refusal(kinds.Text(), "a\0b") == [((), "a string with a NUL character", "no program can be given one")]


def test_durations_and_sizes_say_their_bounds():
    assert refusal(kinds.Duration(low=1), "1ms") == [((), "'1ms' is too short", 'the least is "1s"')]
    assert refusal(kinds.Size(high=1024), "2KiB") == [((), "'2KiB' is too large", 'the most is "1KiB"')]
    assert kinds.Duration(off=True).read("off") is None
    assert refusal(kinds.Duration(), "off")[0][1] == "not a duration: 'off'"


def test_a_list_says_all_that_is_wrong_with_its_elements():
    assert [r[0] for r in refusal(kinds.Many(kinds.Integer()), [1, "a", 2, 3.5])] == [(1,), (3,)]
    assert kinds.Many(kinds.Integer(), single=True).read(3) == (3,)


def test_tables_deep_inside_an_option_are_judged():
    entry = kinds.ArgEntry()
    assert entry.read({"a": [1, {"b": "x"}]}) == {"a": [1, {"b": "x"}]}
    assert refusal(entry, {"a": [1, {"b": "\0"}]})[0][0] == ("a", 1, "b")
    deep: object = 1
    for _ in range(30):
        deep = [deep]
    assert refusal(entry, deep)[0][1] == "tables and lists are nested too deeply"
    assert refusal(entry, float("inf"))[0][1] == "expected a string, number or boolean, got a float inf"
    assert entry.show(entry.read({"unset": True})) == {"unset": True}


def test_the_forms_of_a_secret_are_shown_without_the_secret():
    kind = kinds.SecretKind(hashes=True)
    assert kind.show(kind.read("text")) == "***"
    assert kind.show(kind.read({"value": "text"})) == "***"
    assert kind.show(kind.read({"env": "A"})) == {"env": "A"}
    assert kind.read({"sha256": "AB" * 32}).word == "ab" * 32
    assert "text" not in repr(kind.read("text"))
    assert kinds.EnvEntry().show(UNSET) == {"unset": True}


def test_addresses_to_listen_on():
    kind = kinds.ListenKind()
    for text in ("127.0.0.1:80", "[::1]:8080", "unix:/run/x.sock", "localhost:1", "[fe80::1%eth0]:1"):
        assert kind.show(kind.read(text)) == text
    for text in ("unix:", "unix:\0", "::1:80", "host", ":80", "a:99999", "a b:1"):
        assert refusal(kind, text)
    assert refusal(kind, 80)[0][1] == "expected host:port or unix:PATH, got an integer 80"
    assert [kind.read(t).is_local for t in ("127.1.2.3:1", "0.0.0.0:1", "unix:/x", "[::1]:1")] == [
        True,
        False,
        True,
        True,
    ]


def test_gpus_are_named_in_three_ways():
    kind = kinds.Gpus()
    assert kind.read([0, "GPU-5a1c0000-1111", "0000:17:00.0", "MIG-12345678"])[2] == "0000:17:00.0"
    assert kind.show((0, 1)) == [0, 1]
    assert kind.read(4) == 4
    assert refusal(kind, -1)[0][1] == "-1 is too small"
    assert kind.read([]) == ()
    assert refusal(kinds.Gpus(pinned=False), [0])


def test_the_closest_word_ignores_case_and_knows_its_limits():
    assert kinds.closest("MODEL", ["model", "mode"]) == "model"
    assert kinds.closest("zzz", ["model"]) is None
