"""Every mistake has a message that says what to write instead, at the place where it stands."""

from pathlib import Path

import pytest
from config_texts import codes, messages, read, rendered, shard

from llmgw.domain.host import HostFacts

FIFTEEN = Path(__file__).parent / "fifteen_mistakes.toml"

FIFTEEN_ANSWERS = """\
5:10: error: 'vlm' is not one of vllm, sglang, llamacpp, command; did you mean "vllm"?   [shard "llama-70b"]
7:1: error: unknown key "tensor_paralell"; did you mean "tensor_parallel"?   [shard "llama-70b"]
8:8: error: expected an integer, "auto" or "unix", got a string '8101'; remove the quotes   [shard "llama-70b"]
11:8: error: shard name "llama-70b" is used twice (first in llmgw.toml:3)   [shard "llama-70b"]
13:9: error: GPU 3 already belongs to shard "llama-70b" (llmgw.toml:6); set share_gpus = true and gpu_memory on both \
if that is meant   [shard "llama-70b" gpus]
14:19: error: tensor_parallel = 4 but gpus lists 3; make them equal, or drop tensor_parallel (it defaults to the \
number of gpus)   [shard "llama-70b"]
15:16: error: a duration needs a unit; write "1800s" (or ms, m, h, d)   [shard "llama-70b"]
16:34: error: expected a string, got an integer 32768   [shard "llama-70b" extra_args]
18:1: error: missing required key "model"   [shard "qwen"]
21:1: error: unknown key "tp"; did you mean "tensor_parallel"?   [shard "qwen"]
22:13: error: expected true or false, got a string 'yes'; TOML booleans are true / false without quotes   \
[shard "qwen"]
23:16: error: not a duration: '10 minutes'; write "90s", "10m" or "1h30m"   [shard "qwen"]
26:12: error: environment variable HF_TOKEN_MISSING is not set (referenced as ${HF_TOKEN_MISSING}); write \
${HF_TOKEN_MISSING:-default} to allow that   [shard "qwen" env]
33:10: error: expected an integer, got a float 2.5   [gateway tenant "team-a"]
34:10: error: 'intractive' is not one of interactive, normal, batch; did you mean "interactive"?   \
[gateway tenant "team-a" bands]
"""


def test_fifteen_mistakes_are_told_in_one_go_with_line_and_caret():
    text = FIFTEEN.read_text()
    lines = rendered(text).splitlines()
    assert [line.removeprefix("llmgw.toml:") for line in lines[:-1:3]] == FIFTEEN_ANSWERS.splitlines()
    assert lines[-1] == "15 errors in llmgw.toml; nothing was changed"
    source = text.splitlines()
    for head, excerpt, caret in zip(lines[:-1:3], lines[1::3], lines[2::3], strict=False):
        number, column = (int(part) for part in head.split(":")[1:3])
        assert excerpt == f"{number:6} | {source[number - 1]}"
        assert caret == " " * 6 + " | " + " " * (column - 1) + "^"


def test_a_misspelled_key_causes_no_second_message():
    assert messages(shard(gpus="[0, 1, 2, 3]", tensor_paralell="4", pipeline_parallel="8")) == [
        '5:1 unknown-key unknown key "tensor_paralell"; did you mean "tensor_parallel"?'
    ]


@pytest.mark.parametrize(
    ("foreign", "key"),
    [
        ("tp", "tensor_parallel"),
        ("tensor-parallel-size", "tensor_parallel"),
        ("pp_size", "pipeline_parallel"),
        ("dp", "data_parallel"),
        ("gpu", "gpus"),
        ("CUDA_VISIBLE_DEVICES", "gpus"),
        ("cmd", "command"),
        ("environment", "env"),
        ("autorestart", "restart"),
        ("RestartSec", "restart_delay"),
        ("max_restarts", "restart_limit"),
        ("stopwaitsecs", "stop_timeout"),
        ("unloadTimeout", "stop_timeout"),
        ("healthCheckTimeout", "load_timeout"),
        ("checkEndpoint", "ready_path"),
        ("ttl", "idle_timeout"),
        ("concurrencyLimit", "max_inflight"),
        ("served_model_name", "model"),
        ("model-path", "weights"),
        ("ctx-size", "max_model_len"),
        ("preload", "autostart"),
        ("gpu-class", "gpu_class"),
        ("allow_weight_only_fp8", "allow"),
    ],
)
def test_words_of_other_tools_name_the_right_key(foreign, key):
    found = messages(shard(**{foreign: "1"}))
    assert f'5:1 unknown-key unknown key "{foreign}"; did you mean "{key}"?' in found


@pytest.mark.parametrize("word", ["depends_on", "fallbacks", "num_retries", "stripParams", "groups"])
def test_words_without_a_counterpart_say_what_there_is_instead(word):
    assert "llmgw has no such thing" in messages(shard(**{word: "[]"}))[0]


def test_an_unrelated_key_points_to_explain():
    assert messages(shard(xyzzy="1")) == ['5:1 unknown-key unknown key "xyzzy"; llmgw explain shard lists the keys']


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[shard.qwen2.5]\nmodel = 'm'\n",
            '1:1 not-an-array [shard.qwen2.5] makes a table "qwen2" with a table "5"; '
            'write [[shard]] with name = "qwen2.5"',
        ),
        ("[shard.a]\nmodel = 'm'\n", '1:1 not-an-array [shard.a] makes a table "a"; write [[shard]] with name = "a"'),
        ("[shard]\nname = 'a'\n", "1:1 not-an-array [shard] is a single table; write [[shard]]"),
        ("shard = 3\n", "1:9 wrong-type expected tables [[shard]], got an integer 3"),
        ("shard = [1]\n", "1:10 wrong-type expected a table [[shard]], got an integer 1"),
        ("[[node]]\n", "1:1 wrong-type expected a table, got a list; write [node] once, with single brackets"),
        ("node = 'a'\n", "1:8 wrong-type expected a table, got a string 'a'"),
        ("[models]\n", '1:1 unknown-key unknown key "models"; did you mean "shard"?'),
    ],
)
def test_tables_of_the_wrong_shape_are_recognised(text, message):
    assert message in messages(text)


def test_a_dotted_shard_after_a_shard_is_recognised_too():
    assert messages(shard() + "[shard.qwen2.5]\nmodel = 'm'\n") == [
        '5:1 not-an-array [shard.qwen2.5] makes a table "qwen2" with a table "5"; write [[shard]] with name = "qwen2.5"'
    ]


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"aliases": '"gpt"'}, "5:11 wrong-type expected a list, got a string 'gpt'; put it into brackets: [\"gpt\"]"),
        (
            {"command": '"vllm serve"'},
            '5:11 wrong-type expected a list, got a string \'vllm serve\'; put it into brackets: ["vllm", "serve"]',
        ),
        ({"unlisted": "0"}, "5:12 wrong-type expected true or false, got an integer 0"),
        ({"replicas": '"4"'}, "5:12 wrong-type expected an integer, got a string '4'; remove the quotes"),
        ({"replicas": "4.7"}, "5:12 wrong-type expected an integer, got a float 4.7"),
        ({"replicas": "true"}, "5:12 wrong-type expected an integer, got a boolean true"),
        ({"replicas": "0"}, "5:12 out-of-range 0 is too small; the least is 1"),
        ({"replicas": "1001"}, "5:12 out-of-range 1001 is too large; the most is 1000"),
        ({"model": "5"}, "3:9 wrong-type expected a string, got an integer 5"),
        ({"model": '""'}, "3:9 empty an empty string; write a value or remove the key"),
        (
            {"name": '"A b"'},
            "2:8 bad-value 'A b' does not fit; allowed: lower-case letters, digits and . _ - (not first), "
            "at most 63 characters",
        ),
        ({"port": "80"}, "5:8 out-of-range 80 is too small; the least is 1024"),
        (
            {"port": '"atuo"'},
            '5:8 wrong-type expected an integer, "auto" or "unix", got a string \'atuo\'; did you mean "auto"?',
        ),
        (
            {"restart": "false"},
            "5:11 wrong-type expected one of no, on-failure, always, got a boolean false; the words are strings",
        ),
        ({"restart": '"never"'}, "5:11 unknown-value 'never' is not one of no, on-failure, always"),
        ({"stop_timeout": '"10ms"'}, "5:16 out-of-range '10ms' is too short; the least is \"1s\""),
        ({"probe_timeout": '"1h"'}, "5:17 out-of-range '1h' is too long; the most is \"5m\""),
        ({"stall_timeout": "5.5"}, '5:17 wrong-type a duration needs a unit; write "5.5s" (or ms, m, h, d), or "off"'),
        ({"stop_timeout": "[]"}, '5:16 wrong-type expected a duration such as "90s", got a list'),
        (
            {"gpu_memory": "40"},
            '5:14 wrong-type a size needs a unit; write "40MiB" (or KiB, GiB, TiB, KB, MB, GB, TB, B)',
        ),
        ({"gpu_memory": '"much"'}, '5:14 not-a-size not a size: \'much\'; write "512MiB", "16GiB" or "80GB"'),
        ({"gpu_memory": '"1B"'}, "5:14 out-of-range '1B' is too small; the least is \"1MiB\""),
        ({"gpu_memory": "1979-05-27"}, '5:14 wrong-type expected a size such as "16GiB", got a date or time'),
        (
            {"gpus": '"2"'},
            "4:8 wrong-type expected a number of GPUs or a list of them, got a string '2'; remove the quotes",
        ),
        ({"gpus": "[0, 0]"}, "4:12 given-twice 0 is given twice; remove one"),
        ({"gpus": '["0"]'}, "4:9 bad-value '0' is no index, UUID or PCI bus id of a GPU; remove the quotes"),
        ({"gpus": "[-1]"}, "4:9 out-of-range -1 is not the index of a GPU; indexes begin with 0"),
        ({"gpus": "[true]"}, "4:9 wrong-type expected an index, UUID or PCI bus id, got a boolean true"),
        (
            {"args": "['--seed', '1']"},
            "5:8 wrong-type expected a table, got a list; "
            "write { enable-prefix-caching = true }, or extra_args for a list of words",
        ),
        (
            {"args": "{ --seed = 1 }"},
            '5:10 bad-value "--seed" begins with a dash; write seed = …; llmgw adds the dashes',
        ),
        (
            {"args": "{ seed = 1979-05-27 }"},
            "5:17 wrong-type expected a string, number or boolean, got a date or time; put it into quotes",
        ),
        (
            {"args": "{ seed = nan }"},
            "5:17 wrong-type expected a string, number or boolean, got a float nan; put it into quotes",
        ),
        ({"args": "{ seed = { unset = 1 } }"}, "5:17 bad-value unset stands alone and is true; write { unset = true }"),
        (
            {"args": "{ x = { env = 'HF' } }"},
            "5:14 secret-in-args a secret cannot be an option of the engine; "
            "everybody on the host can read a command line; use env or api_key",
        ),
        ({"args": '{ "a b" = 1 }'}, '5:10 bad-value "a b" cannot be the name of an option; letters, digits, - _ and .'),
        ({"env": "{ A = 1 }"}, '5:13 wrong-type expected a string, got an integer 1; write "1"'),
        (
            {"env": "{ A = [] }"},
            "5:13 wrong-type expected a string, got a list; variables of the environment are strings",
        ),
        ({"env": "{ A = true }"}, '5:13 wrong-type expected a string, got a boolean true; write "true"'),
        (
            {"env": '{ "1A" = "x" }'},
            '5:9 bad-value "1A" cannot be the name of an environment variable; '
            "letters, digits and _, not a digit first",
        ),
        (
            {"env": '{ CUDA_VISIBLE_DEVICES = "0" }'},
            "5:9 owned-variable CUDA_VISIBLE_DEVICES is set by llmgw; use gpus",
        ),
        (
            {"env": '{ LLMGW_X = "0" }'},
            "5:9 owned-variable LLMGW_X is llmgw's own; engines get these from llmgw; use another name",
        ),
        (
            {"where": '{ "a b" = "x" }'},
            '5:11 bad-value "a b" cannot be the name of a label; allowed: lower-case letters, '
            "digits and . _ - (not first), at most 63 characters",
        ),
        ({"command": "[]"}, "5:11 empty an empty list; name at least one"),
        (
            {"api_key": "5"},
            "5:11 wrong-type expected a string or { value = … }, { env = … }, { file = … } or "
            "{ credential = … }, got an integer",
        ),
        ({"api_key": "{ fil = '/x' }"}, '5:13 unknown-key unknown key "fil" in a secret; did you mean "file"?'),
        (
            {"api_key": "{}"},
            "5:11 secret-form exactly one of value, env, file, credential must say where the secret is; none is given",
        ),
        (
            {"api_key": "{ env = 'A', file = 'B' }"},
            "5:11 secret-form exactly one of value, env, file, credential must say "
            "where the secret is; 2 are given (env, file)",
        ),
        ({"api_key": "{ env = 5 }"}, "5:19 wrong-type expected a string, got an integer"),
        (
            {"api_key": "{ env = 'A B' }"},
            '5:19 bad-value not a name of an environment variable; write { env = "HF_TOKEN" }',
        ),
        (
            {"api_key": "{ credential = '../x' }"},
            "5:26 bad-value not a name of a credential; a plain name without slashes",
        ),
        ({"api_key": "''"}, "5:11 empty an empty secret; write a value or remove the key"),
    ],
)
def test_a_wrong_value_says_what_to_write_instead(written, message):
    assert messages(shard(**written)) == [message]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[node]\nengine_ports = 8101\n", '2:16 wrong-type expected a range such as "8101-8499", got an integer 8101'),
        (
            "[node]\nengine_ports = '1-2'\n",
            "2:16 out-of-range '1-2' is no range of ports; first-last, from 1024 to 65535",
        ),
        ("[node]\nengine_ports = 'a'\n", "2:16 bad-value 'a' is no range of ports; write \"8101-8499\""),
        (
            "[node]\nengine_ports = '8101-29500'\n",
            "2:16 ports-overlap engine_ports 8101-29500 and rendezvous_ports 29500-29899 overlap; move one of them",
        ),
        ("[node]\nfabric = []\n", '2:10 empty an empty list; write "none"'),
        (
            "[node]\nfabric = 'atuo'\n",
            '2:10 wrong-type expected "auto", "none" or a list, got a string \'atuo\'; did you mean "auto"?',
        ),
        (
            "[node]\nlabels = { node = 'a' }\n",
            '2:12 reserved the label "node" always holds the name of the node; choose another word',
        ),
        ("[node]\naddress = '1.2.3'\n", "2:11 bad-value '1.2.3' is no IPv4 or IPv6 address; for example 10.0.0.5"),
        (
            "[supervisor]\nsocket_mode = 660\n",
            "2:15 wrong-type expected a mode of four octal digits in quotes, got an "
            'integer 660; write "0660"; the bare number would be decimal',
        ),
        (
            "[supervisor]\nsocket_mode = '888'\n",
            "2:15 bad-value '888' is no mode; four octal digits, for example \"0660\"",
        ),
        ("[supervisor]\nsocket_group = 'lmgw'\n", '2:16 no-such-group there is no group "lmgw"; did you mean "llmgw"?'),
        (
            "[supervisor]\nsocket_group = 'zzz'\n",
            '2:16 no-such-group there is no group "zzz"; make it: groupadd --system zzz',
        ),
        (
            "[defaults]\nname = 'a'\n",
            '2:1 not-in-defaults "name" cannot stand in [defaults]; each [[shard]] has its own name',
        ),
        (
            "[defaults]\ngpus = [0]\n",
            "2:8 wrong-type [defaults] takes only a number of GPUs, got a list; name the GPUs in each [[shard]]",
        ),
        ("[defaults]\nport = 8000\n", "2:8 wrong-type expected one of auto, unix, got an integer 8000"),
        (
            "[defaults]\ncommand = ['x']\n",
            "2:11 wrong-type expected a table, got a list; write [defaults.command] once, with single brackets",
        ),
        (
            "[defaults.vllm]\nmodel = 'x'\n",
            '2:1 not-in-defaults "model" cannot stand in [defaults.vllm]; each [[shard]] names its model',
        ),
    ],
)
def test_a_wrong_table_beside_shards_says_what_to_write_instead(text, message):
    assert message in messages(text)


def test_a_socket_path_of_more_than_107_bytes_is_refused_with_its_length():
    text = f"[supervisor]\nsocket = '/{'x' * 130}'\n" + shard()
    assert messages(text) == [
        "2:10 path-too-long socket: path has 131 bytes, a unix socket path may have 107; choose a shorter path"
    ]


def test_a_state_dir_whose_tmpdir_is_longer_than_60_bytes_is_refused_with_its_length():
    text = f"[supervisor]\nstate_dir = '/{'x' * 60}'\n" + shard()
    assert messages(text) == [
        "2:13 path-too-long state_dir: a shard's TMPDIR below it would have 74 bytes, it may have 60; "
        "choose a shorter path: engines put sockets there"
    ]


def test_an_open_control_socket_is_a_warning():
    assert codes("[supervisor]\nsocket_mode = '0666'\n" + shard()) == ["open-socket"]


# ----------------------------------------------------------------------------------------------------- several shards


def test_nodes_above_one_name_the_missing_table():
    assert "5:9 needs-cluster nodes = 2 needs a [cluster] table" in messages(shard(nodes="2", gpus="2"))


def test_one_gpu_for_two_shards_names_the_first():
    text = shard(gpus="[3]") + shard(name='"b"', gpus="[3]")
    assert messages(text) == [
        '8:9 gpu-taken GPU 3 already belongs to shard "a" (llmgw.toml:4); '
        "set share_gpus = true and gpu_memory on both if that is meant"
    ]
    shared = {"share_gpus": "true", "gpu_memory": '"1GiB"', "gpus": "[3]"}
    assert messages(shard(**shared) + shard(name='"b"', **shared)) == []
    idle = {"idle_timeout": '"1h"', "gpus": "[3]"}
    assert codes(shard(**idle) + shard(name='"b"', **idle) + "[gateway]\n") == []


def test_share_gpus_needs_gpu_memory():
    assert codes(shard(gpus="[3]", share_gpus="true")) == ["share-needs-memory"]


def test_one_port_for_two_shards_names_the_first():
    assert messages(shard(port="8200") + shard(name='"b"', port="8200")) == [
        '10:8 port-taken port 8200 already belongs to shard "a" (llmgw.toml:5); write port = "auto"'
    ]
    assert codes(shard(port="8200") + "[gateway]\nlisten = '127.0.0.1:8200'\n") == ["port-taken"]


def test_an_alias_leads_to_one_model():
    text = shard(aliases='["x"]') + shard(name='"b"', model='"m2"', aliases='["m", "x"]')
    assert messages(text) == [
        '10:12 alias-taken "m" is already model of shard "a"; a name leads to one model',
        '10:17 alias-taken "x" is already an alias of shard "a"; a name leads to one model',
    ]
    assert codes(shard(aliases='["x"]') + shard(name='"b"', aliases='["x"]')) == []


def test_inherit_must_name_a_shard_and_not_go_in_circles():
    assert messages(shard(inherit='"ab"') + shard(name='"abc"', inherit='"b"')) == [
        '5:11 unknown-shard there is no shard "ab"; did you mean "abc"?',
        '10:11 unknown-shard there is no shard "b"; it must be the name of a [[shard]]',
    ]
    circle = shard(inherit='"b"') + shard(name='"b"', inherit='"a"')
    assert messages(circle) == ["5:11 inherit-circle inherit goes in a circle: a -> b -> a"]
    assert codes(shard(inherit='"a"')) == ["inherit-circle"]


def test_options_that_llmgw_owns_name_the_right_key():
    assert messages(shard(args="{ tensor_parallel_size = 2, port = 1 }")) == [
        '5:10 owned-option "tensor-parallel-size" is set by llmgw; use tensor_parallel',
        '5:36 owned-option "port" is set by llmgw; use port',
    ]
    assert codes(shard(extra_args='["--tensor-parallel-size", "2"]')) == ["owned-option"]
    assert read(shard(extra_args='["--tensor-parallel-size", "2"]')).config is not None


def test_secrets_are_refused_on_the_command_line():
    for written in (
        {"args": "{ api-key = 'k' }"},
        {"args": "{ hf-token = 'k' }"},
        {"extra_args": '["--api-key", "k"]'},
        {"extra_args": '["--hf-token=k"]'},
    ):
        assert codes(shard(**written)) == ["secret-in-args"]


def test_the_engines_own_name_of_a_key_beside_the_key_is_an_error():
    assert codes(shard(args="{ max-model-len = 5 }", max_model_len="5")) == ["given-twice"]
    assert codes(shard(args="{ quantization = 'fp8' }", quantization="'fp8'")) == ["given-twice"]


@pytest.mark.parametrize(
    ("written", "code"),
    [
        ({"engine": '"command"'}, "missing-key"),
        ({"engine": '"sglang"', "model": '"a:b"'}, "bad-value"),
        ({"engine": '"sglang"', "port": '"unix"'}, "engine-cannot"),
        ({"models_path": '""'}, "engine-cannot"),
        ({"engine": '"command"', "command": '["x"]', "stall_timeout": '"1m"'}, "engine-cannot"),
        ({"engine": '"llamacpp"', "args": "{ x = { a = 1 } }"}, "wrong-type"),
        ({"host": '"0.0.0.0"'}, "open-engine"),
        ({"load_timeout": '"7h"'}, "out-of-range"),
        ({"load_timeout_max": '"1m"'}, "out-of-range"),
        ({"restart_delay_max": '"1s"'}, "out-of-range"),
        ({"idle_timeout": '"1h"'}, "needs-gateway"),
        ({"idle_action": '"sleep"', "engine": '"sglang"'}, "engine-cannot"),
        ({"idle_action": '"sleep"', "host": '"0.0.0.0"', "api_key": '"0123456789abcdef"'}, "engine-cannot"),
        ({"sleep_level": "2"}, "no-effect"),
        ({"replicas": "2", "gpus": "[0, 1]"}, "replicas-pinned"),
        ({"replicas": "2", "port": "8200"}, "replicas-pinned"),
        ({"gpus": "[0]", "gpu_class": '"x"'}, "no-effect"),
        ({"command": '["${llmgw.nope}"]'}, "unknown-variable"),
        ({"weights": '"${llmgw.port}"'}, "unknown-variable"),
        ({"args": '{ x = ["${llmgw.prot}"] }'}, "unknown-variable"),
        ({"extra_args": '["${HOME}"]'}, "variable-not-replaced"),
        ({"env": '{ A = "${env.HOME}" }'}, "unknown-variable"),
        ({"env": '{ A = "${}" }'}, "unknown-variable"),
        ({"env": '{ A = "${PORT}" }'}, "unset-variable"),
    ],
)
def test_keys_that_contradict_each_other_are_found(written, code):
    assert codes(shard(**written)) == [code]


def test_an_open_engine_is_none_when_the_gateways_key_is_made_for_it():
    gateway = "[gateway]\nlisten = '127.0.0.1:8080'\n"
    assert codes(gateway + shard(host='"0.0.0.0"')) == []
    assert codes(gateway + shard(host='"0.0.0.0"', engine='"sglang"')) == ["open-engine"]
    assert codes(gateway + shard(host='"0.0.0.0"', env="{ VLLM_API_KEY = { unset = true } }")) == ["open-engine"]


def test_a_shard_over_nodes_has_its_own_rules():
    cluster = "[cluster]\nname = 'c'\netcd = ['http://10.0.0.1:2379']\n"
    assert codes(cluster + shard(nodes="2", gpus="4")) == []
    assert codes(cluster + shard(nodes="2", gpus="[0, 1]")) == ["wrong-type"]
    assert codes(cluster + shard(nodes="2", gpus="3")) == ["uneven-gpus"]
    assert codes(cluster + shard(nodes="2", gpus="4", engine='"llamacpp"')) == ["engine-cannot"]
    assert codes(cluster + shard(nodes="2", gpus="4", engine='"sglang"', data_parallel="2")) == ["engine-cannot"]


# ------------------------------------------------------------------------------------------------------------ gateway

TENANT = "[[gateway.tenant]]\nname = 'a'\nkeys = ['0123456789abcdef']\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[gateway]\nlisten = '0.0.0.0:8080'\n",
            "2:10 open-gateway 0.0.0.0:8080 is reachable from other machines, but there is no [[gateway.tenant]]; "
            "add one (llmgw key new), or allow_anonymous = true",
        ),
        (
            "[gateway]\nlisten = '0.0.0.0'\n",
            "2:10 bad-value '0.0.0.0' is no address to listen on; for example "
            '"127.0.0.1:8080", "[::1]:8080" or "unix:/run/llmgw/gateway.sock"',
        ),
        ("[gateway]\nlisten = 'a:0'\n", "2:10 out-of-range 'a:0': no such port; ports go from 1 to 65535"),
        (
            "[gateway]\nlisten = ['unix:x']\n",
            "2:11 bad-value 'unix:x' is no absolute path; write \"unix:/run/llmgw/gateway.sock\"",
        ),
        ("[gateway]\nworkers = 2\n", "2:11 not-yet workers above 1 are refused for now; write workers = 1"),
        ("[gateway]\nmax_body = '2GiB'\n", "2:12 out-of-range max_buffered is below max_body; one request must fit"),
        (
            "[gateway]\ntrust_headers_from = ['10.0.0.1/8']\n",
            '2:23 bad-value \'10.0.0.1/8\' is no network; write a network such as "10.0.0.0/8", or "unix"',
        ),
        ("[gateway.tls]\ncert = '/x'\n", '1:1 missing-key missing required key "key"'),
        ("[gateway.tls]\nkey = 'text'\n", "2:7 wrong-type expected { file = … } or { credential = … }, got a string"),
        (
            TENANT + TENANT.replace("'a'", "'b'"),
            '6:9 key-taken keys[0]: the same key belongs to tenant "a"; every key has one owner',
        ),
        (
            TENANT + "[gateway]\noperator_keys = ['0123456789abcdef']\n",
            '5:18 key-taken keys[0]: the same key belongs to tenant "a"; every key has one owner',
        ),
        (
            TENANT.replace("0123456789abcdef", "short"),
            "3:9 weak-key a key of 5 characters; 16 are the least; llmgw key new makes one",
        ),
        (
            TENANT.replace("'0123456789abcdef'", "{ sha256 = 'ab' }"),
            "3:20 bad-value not a SHA-256 hash: 2 characters, "
            "not 64 hex digits; llmgw key new prints a key and its hash",
        ),
        (
            TENANT + TENANT.replace("0123", "4567"),
            '5:8 duplicate-name tenant "a" is there twice (first in llmgw.toml:2)',
        ),
        (
            TENANT.replace("'a'", "'anonymous'"),
            '2:8 reserved "anonymous" is the name of requests without a key; choose another',
        ),
        (
            TENANT + "models = ['m*', 'zzz']\n" + shard(),
            "4:17 unknown-model 'zzz' matches no model; no [[shard]] has such a model or alias",
        ),
        (TENANT + "rate = { rpm = 5 }\n", '4:10 unknown-key unknown key "rpm"; did you mean "requests_per_minute"?'),
        ("[[gateway.band]]\nname = 'x'\n", "1:1 default-band no band has default = true; exactly one must"),
        (
            "[[gateway.band]]\nname = 'x'\ndefault = true\n[[gateway.band]]\nname = 'x'\ndefault = true\n",
            "6:11 default-band 2 bands have default = true; exactly one must",
        ),
        (
            "[[gateway.band]]\nname = 'x'\ndefault = true\n[[gateway.band]]\nname = 'x'\n",
            '5:8 duplicate-name band "x" is there twice (first in llmgw.toml:2)',
        ),
        (
            "[gateway]\nmax_inflight = 4\n[[gateway.band]]\nname = 'x'\ndefault = true\nreserved = 4\n",
            "6:12 out-of-range bands reserve 4 slots, but max_inflight of the gateway is 4; the sum must be below it",
        ),
        (
            "[[gateway.band]]\nname = 'x'\ndefault = true\npromote_after = '60s'\n",
            "4:17 out-of-range promote_after is not below queue_timeout, so no request would live to see it; "
            'shorten it, or write "off"',
        ),
        (
            "[gateway]\nlisten = '0.0.0.0:8080'\nmetrics = true\n" + TENANT,
            "3:11 needs-operator-key metrics beyond this machine needs operator_keys; add one, or metrics = false",
        ),
        ("[cluster]\nname = 'c'\n", '1:1 missing-key missing required key "etcd"'),
        (
            "[cluster]\nname = 'c'\netcd = ['ftp://x']\n",
            "3:9 bad-value 'ftp://x' does not fit; allowed: http://host:port or https://host:port",
        ),
        (
            "[cluster]\nname = 'c'\netcd = ['http://x:1']\ncert = '/x'\n",
            "4:8 missing-key cert needs key; write both or none",
        ),
        (
            "[cluster]\nname = 'c'\netcd = ['http://x:1']\n[node]\naddress = '127.0.0.1'\n",
            "5:11 bad-value other nodes cannot reach 127.0.0.1; write an address of the network",
        ),
    ],
)
def test_gateway_and_cluster_are_judged_too(text, message):
    assert message in messages(text)


def test_anonymous_access_beyond_the_machine_is_said():
    assert codes("[gateway]\nlisten = '0.0.0.0:80'\nallow_anonymous = true\n") == ["open-gateway"]


def test_a_path_of_the_gateway_has_107_bytes_at_most():
    assert codes(f"[gateway]\nlisten = 'unix:/{'x' * 107}'\n") == ["path-too-long"]


# -------------------------------------------------------------------------------------------------------------- files


def test_a_key_in_two_files_shows_both_places():
    assert rendered("[gateway]\nlisten = '127.0.0.1:1'\n", "[gateway]\nlisten = '127.0.0.1:1'\n").splitlines()[0] == (
        'conf.d/1.toml:2:1: error: "gateway.listen" is already set in llmgw.toml:2; '
        "a later file never overrides: remove one of the two   [gateway]"
    )
    env = "[defaults]\nenv = { A = 'x' }\n"
    assert codes(env + shard(), env) == ["set-twice"]
    assert codes(env + shard(), env.replace("A", "B")) == []


def test_two_files_may_hold_parts_of_one_table():
    assert codes("[cluster]\nname = 'c'\n" + shard(), "[cluster]\netcd = ['http://10.0.0.1:1']\n") == []
    assert codes("[cluster]\nname = 'c'\n" + shard(), "[cluster]\nuser = 'u'\n") == ["missing-key"]


def test_one_option_in_two_spellings_is_an_error():
    assert messages(shard(args="{ a-b = 1, a_b = 2 }")) == [
        '5:19 given-twice "a_b" and "a-b" are one option; remove one'
    ]


def test_a_name_in_two_files_shows_both_places():
    first = rendered(shard(), "\n" + shard(gpus="0")).splitlines()[0]
    assert first.startswith('conf.d/1.toml:3:8: error: shard name "a" is used twice (first in llmgw.toml:2)')


def test_only_the_main_file_includes():
    assert codes(shard(), "include = ['x']\n") == ["nested-include"]


def test_a_syntax_error_ends_the_work_for_its_file_only():
    parsed = read("x = yes\n", shard(port="1"))
    assert [(p.where.file, p.code) for p in parsed.problems] == [
        ("llmgw.toml", "syntax"),
        ("conf.d/1.toml", "out-of-range"),
    ]
    assert rendered("x = yes\n", shard(port="1")).endswith("2 errors in 2 files; nothing was changed\n")


def test_a_file_without_anything_to_run_is_a_warning():
    assert codes("") == ["nothing-to-run"]
    assert codes("[gateway]\n") == []


def test_a_shards_own_port_in_the_ephemeral_range_is_a_warning_unless_offline():
    facts = HostFacts(hostname="h", env={}, ephemeral_ports=(32768, 60999))
    assert codes(shard(port="40000"), facts=facts) == ["ephemeral-port"]
    assert codes(shard(port="40000"), facts=facts, offline=True) == []
    assert codes(shard(port="32767"), facts=facts) == []


def test_facts_of_the_host_are_compared_unless_offline():
    facts = HostFacts(
        hostname="h", env={}, ephemeral_ports=(8400, 60999), addresses=frozenset({"127.0.0.1", "10.0.0.4"})
    )
    text = "[node]\naddress = '10.0.0.5'\n" + shard()
    assert codes(text, facts=facts) == ["ephemeral-port", "ephemeral-port", "not-this-host"]
    assert codes(text, facts=facts, offline=True) == []


def test_a_number_with_k_and_an_engine_that_is_none_are_told_with_what_to_write():
    (number,) = messages(shard(max_model_len='"4k"'))
    assert number.endswith("got a string '4k'; write the number: 4096, without quotes")
    (engine,) = messages(shard(engine='"tgi"'))
    assert engine.endswith('is not one of vllm, sglang, llamacpp, command; engine = "command" runs any other program')
