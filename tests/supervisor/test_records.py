"""Records, wishes and load times on disk."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from llmgw.domain.shard import ShardId, TcpEndpoint, UnixEndpoint
from llmgw.domain.status import Intent, Wish
from llmgw.supervisor.procfs import ProcessId
from llmgw.supervisor.records import LoadTimes, RecordStore, ShardRecord, ShmFile, WishStore, parse_record

RECORD = ShardRecord(
    id=ShardId("llama-70b", 1),
    generation=3,
    run_id="r1",
    leader=ProcessId("boot", 4711, 99),
    pgid=4711,
    sid=4711,
    alive_at=100,
    endpoint=TcpEndpoint("127.0.0.1", 8001),
    config_hash="abc",
    engine="vllm",
    model="llama",
    on_stop="leave",
    devices=("0", "1"),
    gpus=("0", "1"),
    gpu_uuids=("GPU-aa", "GPU-bb"),
    gpu_memory_before={"GPU-aa": 12, "GPU-bb": None},
    allowed=("fp8 below 8.9",),
    api_key="secret",
    slots=4,
    slots_from="props",
    shm=(ShmFile("psm_ab", 7),),
    tmp_dir="/state/tmp/0a1b2c3d",
    launched_at=1.5,
    ready_at=None,
)


def test_a_record_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    store = RecordStore(str(tmp_path / "state"))
    unix = evolve(RECORD, id=ShardId("llama-70b", 0), endpoint=UnixEndpoint("/run/x.sock"), ready_at=2.0)
    store.save(RECORD)
    store.save(unix)
    assert store.load_all().records == (unix, RECORD)
    store.delete(RECORD.id)
    store.delete(RECORD.id)
    assert store.load_all().records == (unix,)


def test_a_record_is_for_its_owner_alone_and_its_repr_shows_no_key(tmp_path: Path) -> None:
    store = RecordStore(str(tmp_path / "state"))
    store.save(RECORD)
    assert stat.S_IMODE(os.stat(store.path(RECORD.id)).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(store.folder).st_mode) == 0o700
    assert "secret" not in repr(RECORD)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "Expecting value"),
        (b"[]", "not a JSON object"),
        (b'{"version": 9}', "version 9"),
        (b'{"version": "\x80"}', "codec"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": "' + b"x" * (2 << 20) + b'"}', "larger than"),
    ],
)
def test_what_is_no_record_is_moved_aside_and_reported(tmp_path: Path, data: bytes, why: str) -> None:
    store = RecordStore(str(tmp_path))
    store.save(RECORD)
    bad = Path(store.folder) / "bad.0.json"
    bad.write_bytes(data)
    loaded = store.load_all()
    assert loaded.records == (RECORD,)
    assert [(problem.path, problem.kept_as) for problem in loaded.bad] == [(str(bad), f"{bad}.bad")]
    assert why in loaded.bad[0].why
    assert store.load_all().bad == ()


@pytest.mark.parametrize(
    ("key", "value"),
    [("pid", 1), ("pid", 0), ("pid", -5), ("pgid", 1), ("pid", True), ("pid", "4711"), ("on_stop", "perhaps")],
)
def test_a_record_that_could_make_llmgw_signal_everybody_is_refused(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=key):
        parse_record(json.dumps({**RECORD.as_json(), key: value}).encode())


def test_a_key_of_a_newer_llmgw_is_ignored_and_a_record_under_a_wrong_name_is_not_believed(tmp_path: Path) -> None:
    assert parse_record(json.dumps({**RECORD.as_json(), "colour": "blue"}).encode()) == RECORD
    store = RecordStore(str(tmp_path))
    store.save(RECORD)
    os.rename(store.path(RECORD.id), store.path(ShardId("other", 0)))
    assert "llama-70b/1" in store.load_all().bad[0].why


def test_a_record_of_an_older_llmgw_has_no_slots_and_is_one_all_the_same() -> None:
    older = {key: value for key, value in RECORD.as_json().items() if not key.startswith("slots")}
    assert parse_record(json.dumps(older).encode()) == evolve(RECORD, slots=None, slots_from="")
    with pytest.raises(ValueError, match="slots"):
        parse_record(json.dumps({**RECORD.as_json(), "slots": 0}).encode())


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda c: st.dictionaries(st.text(), c)))
def test_no_document_raises_anything_but_valueerror(document: object) -> None:
    for text in (document, {**RECORD.as_json(), "endpoint": document}, {**RECORD.as_json(), "shm": document}):
        refused = False
        try:
            parse_record(json.dumps(text).encode())
        except ValueError:
            refused = True
        # Nothing is what "no shm" means; everything else is refused.
        assert refused or text == {**RECORD.as_json(), "shm": None}


def test_a_save_that_fails_keeps_the_old_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RecordStore(str(tmp_path))
    store.save(RECORD)

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        store.save(evolve(RECORD, generation=4))
    monkeypatch.undo()
    assert store.load_all().records == (RECORD,)
    assert os.listdir(store.folder) == ["llama-70b.1.json"]


def test_two_shards_never_share_a_file() -> None:
    store = RecordStore("/state")
    assert store.path(ShardId("a.1", 0)) != store.path(ShardId("a", 1))
    assert len({store.path(ShardId(name, i)) for name in ("a", "a.0", "a.1", "a.0.1") for i in range(3)}) == 12


def test_wishes_of_operators_outlive_llmgw_but_not_a_reboot(tmp_path: Path) -> None:
    boots = ["one"]
    store = WishStore(str(tmp_path), boot=lambda: boots[0])
    stop = Intent(Wish.STOP, by="uid 1000 (ada)", at=5.0, operator=True)
    store.save({ShardId("a", 0): stop, ShardId("b", 0): Intent(Wish.START, by="file")})
    assert store.load() == {ShardId("a", 0): stop}
    boots[0] = "two"
    assert store.load() == {}


def test_what_is_unloaded_or_asleep_is_kept_as_no_operators_wish(tmp_path: Path) -> None:
    store = WishStore(str(tmp_path), boot=lambda: "one")
    unloaded = Intent(Wish.STOP, by="gateway, idle for 300 s", at=5.0)
    asleep = Intent(Wish.SLEEP, by="uid 1000 (ada)", at=6.0)
    others = {
        ShardId("c"): Intent(Wish.STOP, by="file"),
        ShardId("d"): Intent(Wish.START, by="gateway, 1 request waiting"),
        ShardId("e"): Intent(Wish.DRAIN, by="gateway, for a"),
    }
    store.save({ShardId("a"): unloaded, ShardId("b"): asleep, **others})
    assert store.load() == {ShardId("a"): unloaded, ShardId("b"): asleep}


def test_wishes_of_an_older_llmgw_were_all_of_operators(tmp_path: Path) -> None:
    entry = {"shard": "a", "replica": 0, "wish": "stop", "by": "uid 0 (root)", "at": 5.0}
    (tmp_path / "wishes.json").write_text(json.dumps({"boot_id": "one", "wishes": [entry]}))
    (kept,) = WishStore(str(tmp_path), boot=lambda: "one").load().values()
    assert kept.operator


def test_a_broken_wishes_file_is_no_wish(tmp_path: Path) -> None:
    (tmp_path / "wishes.json").write_text('{"boot_id": "x", "wishes": [{"shard": 3}]}')
    assert WishStore(str(tmp_path), boot=lambda: "x").load() == {}


def test_load_times_are_kept_and_forgotten_with_their_shards(tmp_path: Path) -> None:
    now = [1000.0]
    times = LoadTimes(str(tmp_path), now=lambda: now[0])
    times.put(ShardId("a", 0), 12.34)
    assert LoadTimes(str(tmp_path)).get(ShardId("a", 0)) == 12.3
    now[0] += LoadTimes.MAX_AGE + 1
    times.put(ShardId("b", 0), 1.0)
    assert times.get(ShardId("a", 0)) is None
    (tmp_path / "load-times.json").write_text('{"a/0": 3}')
    assert LoadTimes(str(tmp_path)).get(ShardId("a", 0)) is None
