import tomllib

import pytest
from attrs import evolve
from config_texts import FACTS, codes, messages, read, rendered, shard, spec

from llmgw.config.arithmetic import Sizes, Uneven, lay_out
from llmgw.config.show import show_config
from llmgw.config.supported import not_served_yet
from llmgw.domain.fabric import Fabric, FabricInventory, FabricPort, PortKind
from llmgw.domain.hardware import Gpu, Inventory, InventoryStatus
from llmgw.domain.host import PathFact
from llmgw.domain.shard import UNSET, EngineKind, ParallelLayout, Secret

KEY = "0123456789abcdef"


def with_env(**env):
    return evolve(FACTS, env={"HOME": "/root", **env})


# ---------------------------------------------------------------------------------------------- defaults and inherit


def test_later_layers_win_and_tables_are_merged_key_by_key():
    text = """
[defaults]
load_timeout = "1m"
stop_timeout = "2m"
env = { A = "defaults", B = "defaults", C = "defaults" }
[defaults.sglang]
stop_timeout = "9m"
[defaults.vllm]
command = ["/opt/vllm", "serve"]
stop_timeout = "3m"
env = { B = "engine" }
args = { x = 1, y = 1 }
[[shard]]
name = "a"
model = "m"
gpus = [0, 1]
port = 8200
aliases = ["x"]
where = { node = "gpu-01" }
[shard.env]
C = "shard"
[[shard]]
name = "b"
inherit = "a"
gpus = [2]
aliases = []
args = { x_y = 2, x = { unset = true } }
env = { A = { unset = true } }
"""
    a, b = read(text).config.shards
    assert a.limits.load_timeout == 60
    assert a.limits.stop_timeout == 180
    assert a.command == ("/opt/vllm", "serve")
    assert a.env == {"A": "defaults", "B": "engine", "C": "shard"}
    assert b.env == {"A": UNSET, "B": "engine", "C": "shard"}
    assert (b.model, b.gpus, b.port, b.aliases) == ("m", (2,), "auto", ())
    assert b.args == {"y": 1, "x-y": 2}
    assert b.where == {"node": ("gpu-01",)}
    assert b.origins["env.C"] == "llmgw.toml:21:5"
    assert b.origins["gpus.0"] == "llmgw.toml:25:9"


def test_inheritance_goes_over_several_steps():
    text = (
        shard(replicas="3") + shard(name='"b"', inherit='"a"') + shard(name='"c"', inherit='"b"', load_timeout='"1h"')
    )
    *_, c = read(text).config.shards
    assert (c.replicas, c.limits.load_timeout) == (3, 3600)


def test_the_engine_may_be_a_default_and_be_inherited():
    assert spec("[defaults]\nengine = 'llamacpp'\n" + shard()).engine is EngineKind.LLAMACPP
    text = "[defaults.sglang]\nload_timeout = '7m'\n" + shard(engine='"sglang"') + shard(name='"b"', inherit='"a"')
    assert read(text).config.shards[1].limits.load_timeout == 420


def test_a_required_key_may_be_inherited_but_not_the_name():
    assert codes("[[shard]]\ngpus = 0\n") == ["missing-key", "missing-key"]


def test_a_mistake_in_defaults_is_told_once_and_spoils_every_shard():
    parsed = read("[defaults]\nload_timeout = 5\n" + shard() + shard(name='"b"'))
    assert [p.code for p in parsed.problems] == ["wrong-type"]
    assert parsed.specs == ()


def test_shards_without_mistakes_can_be_checked_further():
    parsed = read(shard() + shard(name='"b"', replicas="0"))
    assert [s.name for s in parsed.specs] == ["a"]
    assert parsed.config is None


def test_shards_for_other_nodes_are_judged_but_left_out():
    text = shard(where='{ rack = ["r1", "r2"] }') + shard(name='"b"', where='{ node = "gpu-02" }', gpus="[0]")
    node = "[node]\nlabels = { rack = 'r2' }\n"
    config = read(node + text).config
    assert [s.name for s in config.shards] == ["a"]
    assert config.elsewhere == ("b",)
    assert [s.name for s in read(text, node="gpu-02").config.shards] == ["b"]
    assert codes(shard(where='{ node = "x" }', replicas="0")) == ["out-of-range"]
    same = shard(gpus="[0]", where='{ node = "gpu-01" }') + shard(name='"b"', gpus="[0]", where='{ node = "gpu-02" }')
    assert codes(same) == []


def test_options_take_underscores_and_the_engines_name_of_a_key_means_the_key():
    made = spec(shard(args="{ max_model_len = 4096, quantization = 'fp8', seed_x = 1 }"))
    assert (made.max_model_len, made.quantization, made.args) == (4096, "fp8", {"seed-x": 1})
    kept = spec(shard(args="{ max_model_len = '32k' }"))
    assert (kept.max_model_len, kept.args) == (None, {"max-model-len": "32k"})


def test_everything_has_the_documented_default():
    made = spec(shard())
    assert (made.engine, made.command, made.weights) == (EngineKind.VLLM, ("vllm", "serve"), "m")
    assert made.limits.load_timeout_max == 6 * 3600
    assert made.limits.stall_timeout is None
    assert (made.restart.mode, made.restart.limit, made.restart.stable) == ("on-failure", 5, 600)
    assert (made.max_inflight, made.port, made.first_byte_timeout, made.chunk_timeout) == (None, "auto", None, 300)
    command = spec(shard(engine='"command"', command='["x"]'))
    assert (command.weights, command.gpus) == (None, 0)


# --------------------------------------------------------------------------------------------------- GPU arithmetic


@pytest.mark.parametrize(
    ("sizes", "gpus", "layout"),
    [
        (Sizes(EngineKind.VLLM), 1, (1, 1, 1)),
        (Sizes(EngineKind.VLLM, nodes=2), 2, (2, 1, 1)),
        (Sizes(EngineKind.SGLANG), 1, (1, 1, 1)),
        (Sizes(EngineKind.LLAMACPP), 0, (1, 1, 1)),
        (Sizes(EngineKind.COMMAND), 0, (1, 1, 1)),
        (Sizes(EngineKind.VLLM, gpus=(0, 1, 2, 3)), (0, 1, 2, 3), (4, 1, 1)),
        (Sizes(EngineKind.VLLM, gpus=8, pipeline=2), 8, (4, 2, 1)),
        (Sizes(EngineKind.VLLM, gpus=8, data=2, pipeline=2), 8, (2, 2, 2)),
        (Sizes(EngineKind.VLLM, tensor=4), 4, (4, 1, 1)),
        (Sizes(EngineKind.LLAMACPP, data=2), 2, (1, 1, 2)),
        (Sizes(EngineKind.VLLM, gpus=0, tensor=3), 0, (3, 1, 1)),
        (Sizes(EngineKind.VLLM, gpus=()), 0, (1, 1, 1)),
        (Sizes(EngineKind.SGLANG, gpus=16, nodes=2), 16, (16, 1, 1)),
    ],
)
def test_tensor_parallel_follows_from_the_gpus(sizes, gpus, layout):
    assert lay_out(sizes) == (gpus, ParallelLayout(*layout))


@pytest.mark.parametrize(
    ("sizes", "key", "text"),
    [
        (
            Sizes(EngineKind.VLLM, gpus=5, pipeline=2),
            "gpus",
            "gpus is 5, which pipeline_parallel x data",
        ),
        (Sizes(EngineKind.VLLM, gpus=(0, 1, 2), tensor=4), "tensor_parallel", "tensor_parallel = 4 but gpus lists 3"),
        (Sizes(EngineKind.VLLM, gpus=4, tensor=4, data=2), "tensor_parallel", "= 4 x 1 x 2 = 8 but gpus is 4"),
        (Sizes(EngineKind.VLLM, gpus=3, nodes=2), "nodes", "nodes = 2 does not divide 3 GPUs"),
    ],
)
def test_numbers_that_do_not_fit_are_named(sizes, key, text):
    found = lay_out(sizes)
    assert isinstance(found, Uneven)
    assert found.key == key
    assert text in found.message


# ------------------------------------------------------------------------------------------------------------ hashes


def hash_of(text, **options):
    return spec(text, **options).config_hash


def test_the_hash_covers_written_engine_keys_and_no_others():
    before = hash_of(shard())
    assert len(before) == 16
    for key, value in (("aliases", '["x"]'), ("load_timeout", '"1h"'), ("autostart", "false"), ("replicas", "2")):
        assert hash_of(shard(**{key: value})) == before
    for key, value in (("quantization", '"fp8"'), ("args", "{ a = 1 }"), ("env", "{ A = 'x' }"), ("port", '"auto"')):
        assert hash_of(shard(**{key: value})) != before


def test_the_hash_does_not_care_where_a_key_is_written():
    assert hash_of("[defaults]\nquantization = 'fp8'\n" + shard()) == hash_of(shard(quantization='"fp8"'))
    assert hash_of(shard(args="{ a_b = 1, c = 2 }")) == hash_of(shard(args="{ c = 2, a-b = 1 }"))
    assert hash_of(shard(name='"z"')) == hash_of(shard())


def test_a_changed_secret_changes_the_hash_without_standing_in_it():
    text = shard(env="{ T = { env = 'TOKEN' } }", api_key="{ env = 'TOKEN' }")
    one, other = (hash_of(text, facts=with_env(TOKEN=value)) for value in ("one", "two"))
    assert one != other
    assert hash_of(text, facts=with_env(TOKEN="one")) == one


# ----------------------------------------------------------------------------------------------- variables and paths


def test_variables_are_replaced_where_the_documentation_says():
    text = shard(
        weights='"${DIR}/w"',
        command='["~/bin/${NAME:-vllm}", "a$$b${D}"]',
        workdir='"work/./x"',
        env='{ A = "${NAME:-x}-${llmgw.port}-$$", B = "${D}", C = "${EMPTY:-fallback}" }',
        args='{ x = "${llmgw.gpus}" }',
    )
    made = spec(text, facts=with_env(DIR="/models", D="$", EMPTY=""))
    assert made.weights == "/models/w"
    assert made.command == ("/root/bin/vllm", "a$$b$$")
    assert made.workdir == "/etc/llmgw/work/x"
    assert made.env == {"A": "x-${llmgw.port}-$$", "B": "$$", "C": "fallback"}
    assert made.args == {"x": "${llmgw.gpus}"}


def test_paths_are_relative_to_the_file_they_stand_in():
    parsed = read(shard(weights='"./w"'), shard(name='"b"', weights='"./w"', command='["./run", "x/y"]'))
    a, b = parsed.config.shards
    assert (a.weights, b.weights) == ("/etc/llmgw/w", "/etc/llmgw/conf.d/w")
    assert b.command == ("/etc/llmgw/conf.d/run", "x/y")
    assert spec(shard(weights='"org/name"')).weights == "org/name"


def test_a_value_that_grows_beyond_what_a_program_can_be_given_is_refused():
    assert codes(shard(env='{ A = "${BIG}" }'), facts=with_env(BIG="x" * (200 << 10))) == ["too-long"]


# ----------------------------------------------------------------------------------------------------------- secrets


def test_a_secret_comes_from_text_variable_file_or_credential():
    forms = (
        "{ A = { value = 'v' }, B = { env = 'TOKEN' }, C = { file = 's/c' }, D = { credential = 'd' }, E_TOKEN = 'e' }"
    )
    made = spec(
        shard(env=forms),
        facts=with_env(TOKEN="t", CREDENTIALS_DIRECTORY="/run/cred"),
        contents={
            "/etc/llmgw/s/c": b"from file\n",
            "/run/cred/d": "does not exist",
            "/run/cred/llmgw_d": b"from systemd",
        },
    )
    assert {k: (v.reveal(), v.origin) for k, v in made.env.items()} == {
        "A": ("v", "inline"),
        "B": ("t", "env TOKEN"),
        "C": ("from file", "file /etc/llmgw/s/c"),
        "D": ("from systemd", "credential d"),
        "E_TOKEN": ("e", "inline"),
    }


def test_variables_that_hold_secrets_are_known_so_that_engines_do_not_inherit_them():
    text = shard(env="{ A = { env = 'TOKEN' } }")
    assert read(text, facts=with_env(TOKEN="t")).config.secret_variables == {"TOKEN"}


FILE_SECRET = shard(api_key="{ file = '/s' }")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("does not exist", "5:20 secret-missing /s does not exist; llmgw reads it when the file is loaded"),
        (b"", "5:20 empty /s is empty; write the secret into it"),
        (b"\n", "5:20 empty /s is empty; write the secret into it"),
        (b"x" * 70000, "5:20 secret-too-large /s has more than 65536 bytes; it is no secret's file"),
        (b"\xff", "5:20 bad-value /s is not UTF-8 text; a secret is text"),
        (b"a\0b", "5:20 bad-value /s holds a NUL character; a secret is text"),
    ],
)
def test_a_secrets_file_must_be_there_and_sane(content, message):
    assert messages(FILE_SECRET, contents={"/s": content}) == [message]


def test_a_secrets_file_that_everybody_reads_is_refused():
    facts = evolve(FACTS, paths={"/s": PathFact(exists=True, mode=0o644)})
    assert messages(FILE_SECRET, facts=facts, contents={"/s": b"x"}) == [
        "5:20 secret-file-open every user of this host may read /s; chmod o-r /s"
    ]
    assert codes(FILE_SECRET, facts=evolve(FACTS, paths={"/s": PathFact(exists=True, mode=0o640)})) == []
    assert codes(shard(api_key="{ file = '/${NOPE}' }")) == ["unset-variable"]


def test_what_the_files_need_to_know_is_asked():
    asked = read(FILE_SECRET).asked
    assert asked.contents == {"/s"}
    assert {"/s", "/var/lib/llmgw", "/run/llmgw"} <= asked.paths
    assert read(FILE_SECRET, offline=True).asked.contents == frozenset()


def test_a_variable_with_a_secret_must_be_set_and_not_empty():
    text = shard(api_key="{ env = 'TOKEN' }")
    assert codes(text) == ["secret-missing"]
    assert codes(text, facts=with_env(TOKEN="")) == ["secret-missing"]
    assert codes(text, offline=True) == []


def test_credentials_are_a_warning_for_check_and_an_error_for_run():
    text = shard(api_key="{ credential = 'k' }")
    assert [p.severity for p in read(text).problems] == ["warning"]
    assert [p.severity for p in read(text, running=True).problems] == ["error"]
    assert codes(text, offline=True) == []


def test_an_inline_secret_in_a_file_that_everybody_reads_is_a_warning():
    facts = evolve(FACTS, paths={"/etc/llmgw/llmgw.toml": PathFact(exists=True, mode=0o644)})
    assert codes(shard(api_key=f"'{KEY}'"), facts=facts) == ["secret-in-readable-file"]


@pytest.mark.parametrize(
    "text",
    [
        shard(api_key=f"'{KEY}'", replicas="0"),
        f"[[shard]]\nname = 'A'\napi_key = '{KEY}'\napi_kye = '{KEY}'\nmodell = 1\n",
        shard(env=f"{{ HF_TOKEN = '{KEY}', CUDA_VISIBLE_DEVICES = '0' }}"),
        shard(env=f"{{ X = {{ value = '{KEY}' }}, 1A = '' }}"),
        shard(args=f"{{ api-key = '{KEY}' }}"),
        shard(extra_args=f'["--api-key", "{KEY}", 5, "--hf-token={KEY}"]'),
        f"[[gateway.tenant]]\nname = 'a'\nkeys = ['{KEY}', 5, '{KEY}']\nkey = '{KEY}'\n",
        f"[gateway.tenant]\nname = 'a'\nkeys = ['{KEY}']\n",
        f"[gateway]\napiKeys = ['{KEY}']\noperator_keys = '{KEY}'\n",
        f"[cluster]\npassword = {{ valeu = '{KEY}' }}\n",
        f"[shrad]\napi_key = '{KEY}'\n",
        f"[[shrad]]\napi_key = '{KEY}'\n",
        f"api_key = '{KEY}\n",
        f"api_key = '{KEY}' x\n",
        f"keys = ['{KEY}' '{KEY}']\n",
        f'keys = [\n  "{KEY}"\n  "{KEY}"\n]\n',
        f"HF_TOKEN = {KEY}\n",
        shard(env="{ HF_TOKEN = 123456789 }").replace("123456789", "1" + KEY.strip("abcdef")),
    ],
)
def test_no_message_shows_a_secret(text):
    assert KEY not in rendered(text)
    assert "10123456789" not in rendered(text)
    assert any(p.is_error for p in read(text).problems)


# ------------------------------------------------------------------------------------------------ node and supervisor


def test_the_nodes_name_comes_from_option_variable_file_or_host():
    assert read(shard()).config.node.name == "gpu-01"
    named = "[node]\nname = 'written'\n" + shard()
    assert read(named).config.node.name == "written"
    assert read(named, facts=with_env(LLMGW_NODE="variable")).config.node.name == "variable"
    assert read(named, node="option").config.node.labels == {"node": "option"}
    assert read(shard(), facts=evolve(FACTS, hostname="My_Host.")).config.node.name == "my-host"
    assert codes(shard(), node="A B") == ["bad-value"]


def test_folders_follow_the_environment_and_the_file():
    config = read("[supervisor]\nstate_dir = '/s'\n" + shard()).config.supervisor
    assert (config.log_dir, config.runtime_dir, config.socket) == ("/s/logs", "/run/llmgw", "/run/llmgw/control.sock")
    user = evolve(FACTS, uid=1000, env={"XDG_RUNTIME_DIR": "/run/user/1000"}, home="/home/u")
    config = read(shard(), facts=user).config.supervisor
    assert (config.state_dir, config.runtime_dir) == ("/home/u/.local/state/llmgw", "/run/user/1000/llmgw")
    assert config.socket_mode == 0o660


@pytest.mark.parametrize(
    ("fact", "found"),
    [
        (PathFact(exists=False), []),
        (PathFact(exists=True, is_dir=True), []),
        (PathFact(exists=True), ["not-a-folder"]),
        (PathFact(exists=True, is_dir=True, network=True), ["network-folder"]),
        (PathFact(exists=True, is_dir=True, writable=False), ["not-writable"]),
    ],
)
def test_the_runtime_folder_must_be_a_local_folder_that_can_be_written(fact, found):
    text = "[supervisor]\nruntime_dir = '/r'\n" + shard()
    assert codes(text, facts=evolve(FACTS, paths={"/r": fact})) == found


def test_a_default_folder_of_somebody_else_does_not_disturb_a_check():
    facts = evolve(FACTS, paths={"/var/lib/llmgw": PathFact(exists=True, is_dir=True, writable=False)})
    assert codes(shard(), facts=facts) == []
    assert [p.severity for p in read(shard(), facts=facts, running=True).problems] == ["error"]


def test_gpus_of_the_node_must_exist():
    gpu = Gpu(0, "GPU-aaaaaaaa", "0000:17:00.0", "x", None, None, None, None)
    facts = evolve(FACTS, inventory=Inventory(InventoryStatus.OK, (gpu,)))
    text = "[node]\ngpus = {}\n" + shard()
    assert codes(text.format('[0, "GPU-aaaaaaaa"]'), facts=facts) == []
    assert codes(text.format('["17:00.0", "MIG-12345678"]'), facts=facts) == []
    assert messages(text.format("[0, 1]"), facts=facts)[0] == (
        "2:12 no-such-gpu this host has no GPU 1; indexes go from 0 to 0"
    )


def adapters() -> FabricInventory:
    active = FabricPort("mlx5_0", 1, PortKind.INFINIBAND, "ACTIVE", 400.0, True)
    down = FabricPort("mlx5_0", 2, PortKind.INFINIBAND, "DOWN", 10.0, False, reason="the port is down")
    return FabricInventory((active, down), (Fabric(PortKind.INFINIBAND, ("mlx5_0:1",)),), ("mlx5_3",))


def test_adapters_of_the_node_must_exist_and_be_active():
    facts = evolve(FACTS, fabric=adapters())
    text = "[node]\nfabric = {}\n" + shard()
    for good in ('"auto"', '"none"', '["mlx5_0"]', '["mlx5_0:1"]'):
        assert messages(text.format(good), facts=facts) == []
    assert messages(text.format('["mlx5_0", "mlx5", "mlx5_0:2", "mlx5_0:3", "mlx5_3"]'), facts=facts) == [
        "2:21 no-such-adapter this host has no adapter mlx5: there is no such device; usable are mlx5_0:1",
        "2:29 adapter-not-active mlx5_0:2 cannot be used: the port is down; mend it, or leave it out; "
        "`llmgw inventory` shows all ports",
        "2:41 no-such-adapter this host has no adapter mlx5_0:3: the device has mlx5_0:1, mlx5_0:2; "
        "usable are mlx5_0:1",
        "2:53 adapter-not-active mlx5_3 cannot be used: the device is listed, but it cannot be read; mend it, or "
        "leave it out; `llmgw inventory` shows all ports",
    ]


def test_an_adapter_that_is_down_does_not_keep_llmgw_from_running_and_one_that_is_missing_does():
    text = "[node]\nfabric = {}\n" + shard()
    facts = evolve(FACTS, fabric=adapters())
    down = read(text.format('["mlx5_0:1", "mlx5_0:2"]'), facts=facts, running=True)
    assert down.config is not None and [p.severity for p in down.problems] == ["warning"]
    assert read(text.format('["mlx4_0"]'), facts=facts, running=True).config is None


def test_adapters_are_asked_for_only_when_something_is_written_about_them():
    text = "[node]\nfabric = {}\n" + shard()
    assert not read(text.format('"auto"')).asked.adapters
    assert read(text.format('["mlx5_0"]')).asked.adapters
    assert read("[node]\nisland = 'ib-1'\n" + shard()).asked.adapters
    assert not read(text.format('["mlx5_0"]'), offline=True).asked.adapters
    # Unknown is not missing.
    assert codes(text.format('["mlx5_9"]')) == []


def test_an_empty_list_of_adapters_is_refused():
    assert [p.where.line for p in read("[node]\nfabric = []\n" + shard()).problems] == [2]


def test_an_island_without_an_adapter_names_nothing_unless_sockets_are_chosen():
    text = "[node]\nisland = 'ib-1'\n{}\n" + shard()
    bare = evolve(FACTS, fabric=FabricInventory())
    assert codes(text.format(""), facts=bare) == ["no-effect"]
    assert codes(text.format("fabric = 'none'"), facts=bare) == []
    assert codes(text.format(""), facts=evolve(FACTS, fabric=adapters())) == []


# ---------------------------------------------------------------------------------------------------- gateway, cluster


def test_a_gateway_has_three_bands_and_local_defaults():
    gateway = read("[gateway]\n").config.gateway
    assert [(b.name, b.default) for b in gateway.bands] == [("interactive", False), ("normal", True), ("batch", False)]
    assert (gateway.allow_anonymous, gateway.ui, str(gateway.listen[0])) == (True, True, "127.0.0.1:8080")
    assert gateway.max_inflight is None


def test_tenants_keep_hashes_only():
    text = f"""
[gateway]
listen = ["0.0.0.0:8443", "[::1]:1", "unix:/x"]
queue_timeout = "90s"
operator_keys = ["{KEY}op"]
[gateway.tls]
cert = "tls/cert.pem"
key = {{ file = "/k" }}
[[gateway.band]]
name = "one"
default = true
queue_limit = 5
[[gateway.tenant]]
name = "t"
keys = ["{KEY}"]
models = ["m*"]
rate = {{ requests_per_minute = 600 }}
""" + shard(idle_timeout='"off"')
    gateway = read(text, contents={"/k": b"PEM"}).config.gateway
    (tenant,) = gateway.tenants
    assert tenant.keys[0].sha256 == "9f9f5111f7b27a781f1f1ddde5ebc2dd2b796bfc7365c9c28b548e564176929f"
    assert (tenant.bands, tenant.models, tenant.requests_per_minute) == (("one",), ("m*",), 600)
    assert (gateway.bands[0].queue_limit, gateway.bands[0].queue_timeout) == (5, 90)
    assert (gateway.tls.cert, gateway.tls.key) == ("/etc/llmgw/tls/cert.pem", Secret("PEM"))
    assert (gateway.allow_anonymous, gateway.ui) == (False, False)
    assert [str(door) for door in gateway.listen] == ["0.0.0.0:8443", "[::1]:1", "unix:/x"]


def test_metrics_beyond_the_machine_are_off_without_an_operator_key():
    tenant = f"[[gateway.tenant]]\nname = 't'\nkeys = ['{KEY}']\n[gateway]\nlisten = '0.0.0.0:80'\n"
    assert read(tenant).config.gateway.metrics is False
    assert read(tenant + f"operator_keys = ['{KEY}op']\n").config.gateway.metrics is True


def test_tls_files_must_be_readable():
    text = "[gateway.tls]\ncert = '/c'\nkey = { file = '/k' }\n"
    for fact, code in (
        (PathFact(exists=False), "no-such-file"),
        (PathFact(exists=True, readable=False), "not-readable"),
    ):
        assert code in codes(text, facts=evolve(FACTS, paths={"/c": fact}), contents={"/k": b"x"})


def test_a_cluster_is_read():
    cluster = read(
        "[cluster]\nname = 'c'\netcd = ['https://10.0.0.1:2379']\nuser = 'u'\npassword = { value = 'p' }\n" + shard()
    ).config.cluster
    assert (cluster.name, cluster.etcd, cluster.node_grace) == ("c", ("https://10.0.0.1:2379",), 60)
    assert (cluster.password, cluster.self_fence_after) == (Secret("p"), None)


# ------------------------------------------------------------------------------------------------------ what run takes


def test_what_cannot_be_served_yet_is_refused_in_words():
    cluster = "[cluster]\nname = 'c'\netcd = ['http://10.0.0.1:1']\n[gateway]\nlisten = '127.0.0.1:1'\n"
    text = cluster + shard(
        gpus="4",
        nodes="2",
        share_gpus="true",
        gpu_memory='"1GiB"',
    )
    found = not_served_yet(read(text).config)
    assert all(p.code == "not-yet" and p.is_error and p.hint for p in found)
    assert [p.message.split(" ")[0] for p in found] == [
        "[cluster]",
        "nodes",
    ]
    assert str(found[1].where) == "llmgw.toml:10:9"


def test_a_number_of_gpus_and_shared_ones_are_served():
    assert not_served_yet(read("[[shard]]\nname = 'a'\nmodel = 'm'\n").config) == ()
    assert not_served_yet(read(shard(gpus="2", share_gpus="true", gpu_memory='"1GiB"')).config) == ()


# -------------------------------------------------------------------------------------------------------------- show


def test_the_merged_configuration_is_toml_with_defaults_and_without_secrets():
    text = f"""
[node]
labels = {{ rack = "r1" }}
[defaults]
env = {{ A = "x", B = {{ unset = true }} }}
[gateway]
operator_keys = ["{KEY}xx", {{ env = "OP" }}]
[[gateway.tenant]]
name = "t"
keys = ["{KEY}"]
""" + shard(api_key=f"'{KEY}'", args="{ a = { b = [1, 'x'] } }", gpu_memory='"1GiB"')
    config = read(text, facts=with_env(OP=KEY + "yy")).config
    shown = show_config(config)
    assert KEY not in shown
    back = tomllib.loads(shown)
    assert back == config.shown
    assert back["shard"][0]["env"] == {"A": "x", "B": {"unset": True}}
    assert back["shard"][0]["load_timeout"] == "30m"
    assert back["gateway"]["tenant"][0]["keys"] == ["***"]
    assert back["gateway"]["operator_keys"] == ["***", {"env": "OP"}]
    assert back["node"]["labels"] == {"rack": "r1"}
    with_origins = show_config(config, origins=True)
    assert tomllib.loads(with_origins) == config.shown
    assert 'A = "x"  # llmgw.toml:5:13' in with_origins
    assert 'load_timeout = "30m"  # default' in with_origins
