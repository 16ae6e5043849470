"""The tables beside `[[shard]]`: node, supervisor, gateway, cluster; with every check that needs more than one key."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from typing import Any

from llmgw.config.kinds import Listen, SecretForm, closest
from llmgw.config.model import (
    BandConfig,
    ClusterConfig,
    GatewayConfig,
    Hash,
    NodeConfig,
    SupervisorConfig,
    TenantConfig,
    TlsConfig,
)
from llmgw.config.reading import Place, Reading
from llmgw.config.schema import BAND, NODE, SUPERVISOR
from llmgw.config.secret_values import hash_of, is_seen, resolve_secret
from llmgw.config.written import Written
from llmgw.discovery.fabric import port_hindrance
from llmgw.domain.directories import SOCKET_NAME, log_directory, runtime_directory, state_directory
from llmgw.domain.hardware import InventoryStatus
from llmgw.domain.problem import Severity
from llmgw.domain.shard import Secret

SOCKET_PATH_MAX = 107
"""Bytes: `sun_path` of Linux has 108 with the closing NUL (unix(7))."""
TMPDIR_MAX = 60
"""Bytes: vLLM makes socket names of up to 46 characters in it."""
TMPDIR_BELOW_STATE = len("/tmp/") + 8
KEY_LEAST = 16
"""Characters of an API key that stands as text; shorter ones can be guessed."""


def _table(file: Written, name: str, table: Any) -> Written:
    return file.tables.get(name) or Written(table, Place(file.place.doc, (name,)))


# ---------------------------------------------------------------------------------------------------------------- node


def build_node(reading: Reading, file: Written, chosen: str | None) -> NodeConfig:
    """`chosen` is what `--node` said."""
    node = _table(file, "node", NODE)
    facts = reading.facts
    name = _node_name(reading, node, chosen)
    address = node.value("address")
    if address is not None and node.is_usable("address"):
        _check_address(reading, node, address, "cluster" in file.tables)
    _check_ranges(reading, node)
    _check_fabric(reading, node)
    if facts.inventory is not None and facts.inventory.status is InventoryStatus.OK and not reading.offline:
        _check_gpus(reading, node)
    return NodeConfig(
        name=name,
        labels={**node.plain("labels"), "node": name},
        gpus=node.value("gpus"),
        fabric=node.value("fabric"),
        island=node.value("island"),
        address=address,
        engine_ports=node.value("engine_ports"),
        rendezvous_ports=node.value("rendezvous_ports"),
        discovery_timeout=node.value("discovery_timeout"),
        inventory_interval=node.value("inventory_interval"),
    )


def _node_name(reading: Reading, node: Written, chosen: str | None) -> str:
    given = chosen or reading.facts.env.get("LLMGW_NODE")
    if given:
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{0,62}", given):
            source = "--node" if chosen else "LLMGW_NODE"
            hint = "lower-case letters, digits, . and -, at most 63 characters"
            reading.report(node.place, "bad-value", f"{source} is no name of a node", hint)
        return given
    written = node.value("name")
    if written is not None:
        return str(written)
    # A host's name may have capitals and underscores, which names of nodes have not.
    return re.sub(r"[^a-z0-9.-]", "-", reading.facts.hostname.lower()).strip("-.")[:63] or "localhost"


def _check_address(reading: Reading, node: Written, address: str, has_cluster: bool) -> None:
    place = node.place_of("address")
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        reading.report(place, "bad-value", f"'{address}' is no IPv4 or IPv6 address", "for example 10.0.0.5")
        return
    if has_cluster and (parsed.is_loopback or parsed.is_unspecified):
        reading.report(place, "bad-value", f"other nodes cannot reach {address}", "write an address of the network")
    elif reading.facts.addresses is not None and not reading.offline and not _is_among(parsed, reading.facts.addresses):
        known = ", ".join(sorted(reading.facts.addresses)) or "none"
        reading.report(place, "not-this-host", f"{address} is no address of this host", f"this host has {known}")


def _is_among(address: ipaddress.IPv4Address | ipaddress.IPv6Address, texts: Iterable[str]) -> bool:
    """An IPv6 address has several spellings."""
    return address.compressed in texts or address.exploded in texts


def _check_fabric(reading: Reading, node: Written) -> None:
    """Adapters that are named must exist, and their ports must be ones that engines can use."""
    written = node.value("fabric")
    has_list = isinstance(written, tuple) and node.is_usable("fabric")
    if not has_list and "island" not in node.settings:
        return
    found = reading.adapters()
    if found is None:
        return
    for index, name in enumerate(written if has_list else ()):
        why = port_hindrance(found, name)
        if why is None:
            continue
        place = node.place_of("fabric").at(index)
        is_there = any(name in (port.device, port.label) for port in found.ports)
        if is_there or name.partition(":")[0] in found.unreadable_devices:
            # A cable that is out must not keep llmgw from serving: engines on one node do without.
            severity: Severity = "warning" if reading.running else "error"
            hint = "mend it, or leave it out; `llmgw inventory` shows all ports"
            reading.report(place, "adapter-not-active", f"{name} cannot be used: {why}", hint, severity=severity)
        else:
            usable = ", ".join(port.label for port in found.ports if port.usable)
            hint = f"usable are {usable}" if usable else 'this host has no usable adapter: write "auto" or "none"'
            reading.report(place, "no-such-adapter", f"this host has no adapter {name}: {why}", hint)
    # Of a list that names nothing usable that has been told already.
    is_auto = written == "auto" and node.is_usable("fabric")
    if "island" in node.settings and is_auto and found.preferred is None:
        message = "island names nothing: there is no adapter here that engines can use"
        hint = 'remove it; or for nodes that reach each other by plain sockets, write fabric = "none" too'
        reading.warn(node.place_of("island"), "no-effect", message, hint)


def _check_ranges(reading: Reading, node: Written) -> None:
    names = ("engine_ports", "rendezvous_ports")
    if not node.is_usable(*names):
        return
    (a, b), (c, d) = (node.value(name) for name in names)
    if a <= d and c <= b:
        key = "rendezvous_ports" if "rendezvous_ports" in node.settings else "engine_ports"
        message = f"engine_ports {a}-{b} and rendezvous_ports {c}-{d} overlap"
        reading.report(node.place_of(key), "ports-overlap", message, "move one of them")
    ephemeral = reading.facts.ephemeral_ports
    if ephemeral is None or reading.offline:
        return
    for name in names:
        first, last = node.value(name)
        # Unwritten defaults lie below Linux's own range; a host with another one is worth a word, too.
        if first <= ephemeral[1] and ephemeral[0] <= last:
            message = f"{name} {first}-{last} overlaps the ephemeral range {ephemeral[0]}-{ephemeral[1]}"
            hint = "another program's outgoing connection may hold such a port"
            reading.warn(node.place_of(name), "ephemeral-port", message, hint)


def _check_gpus(reading: Reading, node: Written) -> None:
    inventory, written = reading.facts.inventory, node.value("gpus")
    if inventory is None or written == "all" or not node.is_usable("gpus"):
        return
    known = {k for gpu in inventory.gpus for k in (gpu.index, gpu.uuid, gpu.bus_id.lower())}
    for index, gpu in enumerate(written):
        if gpu not in known and not (isinstance(gpu, str) and (gpu.startswith("MIG") or _is_short(gpu, known))):
            count = len(inventory.gpus)
            hint = f"indexes go from 0 to {count - 1}" if count else "nvidia-smi lists none"
            reading.report(node.place_of("gpus").at(index), "no-such-gpu", f"this host has no GPU {gpu}", hint)


def _is_short(gpu: str, known: set[int | str]) -> bool:
    return any(isinstance(k, str) and (k.startswith(gpu) or k.endswith(gpu)) for k in known)


# ---------------------------------------------------------------------------------------------------------- supervisor


def build_supervisor(reading: Reading, file: Written) -> SupervisorConfig:
    table = _table(file, "supervisor", SUPERVISOR)
    facts = reading.facts
    state = table.value("state_dir") or state_directory(facts.env, facts.uid, facts.home)
    runtime = table.value("runtime_dir") or runtime_directory(facts.env, facts.uid, facts.home, state)
    logs = table.value("log_dir") or log_directory(facts.env, state)
    socket = table.value("socket") or f"{runtime}/{SOCKET_NAME}"
    for name, path in (("state_dir", state), ("runtime_dir", runtime), ("log_dir", logs)):
        _check_folder(reading, table, name, path)
    long = len(socket.encode())
    if long > SOCKET_PATH_MAX and table.is_usable("socket", "runtime_dir"):
        key = "socket" if "socket" in table.settings else "runtime_dir"
        message = f"path has {long} bytes, a unix socket path may have {SOCKET_PATH_MAX}"
        _report_supervisor(reading, table, key, "path-too-long", f"socket: {message}", "choose a shorter path")
    tmpdir = len(state.encode()) + TMPDIR_BELOW_STATE
    if tmpdir > TMPDIR_MAX and table.is_usable("state_dir"):
        message = f"a shard's TMPDIR below it would have {tmpdir} bytes, it may have {TMPDIR_MAX}"
        hint = "choose a shorter path: engines put sockets there"
        _report_supervisor(reading, table, "state_dir", "path-too-long", f"state_dir: {message}", hint)
    mode = table.value("socket_mode")
    if mode & 0o002:
        message = "every user of this host may control llmgw"
        reading.warn(table.place_of("socket_mode"), "open-socket", message, 'write "0660" and socket_group')
    group = table.value("socket_group")
    if group is not None and facts.groups and group not in facts.groups and not reading.offline:
        meant = closest(group, tuple(sorted(facts.groups)))
        hint = f'did you mean "{meant}"?' if meant else f"make it: groupadd --system {group}"
        reading.report(table.place_of("socket_group"), "no-such-group", f'there is no group "{group}"', hint)
    return SupervisorConfig(
        on_stop=table.value("on_stop"),
        state_dir=state,
        runtime_dir=runtime,
        log_dir=logs,
        socket=socket,
        socket_mode=mode,
        socket_group=group,
        log_lines=table.value("log_lines"),
        log_line_max=table.value("log_line_max"),
        log_file_max=table.value("log_file_max"),
        log_files=table.value("log_files"),
    )


def _report_supervisor(reading: Reading, table: Written, key: str, code: str, message: str, hint: str) -> None:
    reading.report(table.place_of(key), code, message, hint)


def _check_folder(reading: Reading, table: Written, name: str, path: str) -> None:
    """The folder may be missing: `run` makes it. What stands there must be a folder we can write to."""
    fact = reading.path(path)
    if fact is None or not fact.exists:
        return
    place = table.place_of(name)
    if not fact.is_dir:
        reading.report(place, "not-a-folder", f"{name}: {path} is not a folder", "choose another path")
    elif not fact.writable:
        if name not in table.settings and not reading.running:
            return  # `check` is often run by somebody who is not the service
        severity = "error" if reading.running else "warning"
        message = f"{name}: {path} cannot be written by this user"
        reading.report(place, "not-writable", message, "change its owner or choose another", severity=severity)  # type: ignore[arg-type]
    elif name == "runtime_dir" and fact.network:
        hint = "sockets and locks need a local one"
        reading.report(place, "network-folder", f"{name}: {path} is on a network file system", hint)


# ------------------------------------------------------------------------------------------------------------- gateway

BUILTIN_BANDS = ("interactive", "normal", "batch")


def build_gateway(reading: Reading, file: Written) -> GatewayConfig | None:
    """The gateway, or None without the table. Built even with mistakes, which are reported."""
    table = file.tables.get("gateway")
    if table is None:
        return None
    bands = _bands(reading, table)
    tenants, hashes = _tenants(reading, table, bands, file)
    operators = _operator_keys(reading, table, hashes)
    listen: tuple[Listen, ...] = table.value("listen") or ()
    _check_listen(reading, table, listen)
    is_local = all(door.is_local for door in listen)
    anonymous = table.value("allow_anonymous")
    wrote_tenants = bool(table.arrays.get("tenant")) or not table.is_usable("tenant")
    if not is_local and not wrote_tenants and anonymous is not True and table.is_usable("listen", "allow_anonymous"):
        door = next(d for d in listen if not d.is_local)
        message = f"{door} is reachable from other machines, but there is no [[gateway.tenant]]"
        hint = "add one (llmgw key new), or allow_anonymous = true"
        reading.report(table.place_of("listen"), "open-gateway", message, hint)
    if anonymous is True and not is_local:
        door = next(d for d in listen if not d.is_local)
        reading.warn(table.place_of("allow_anonymous"), "open-gateway", f"everybody who reaches {door} may use it")
    ui = table.value("ui")
    has_operator = bool(table.value("operator_keys")) or not table.is_usable("operator_keys")
    _check_operator_doors(reading, table, is_local, has_operator)
    _check_gateway_sizes(reading, table)
    if table.value("workers") > 1:
        reading.report(table.place_of("workers"), "not-yet", "workers above 1 are refused for now", "write workers = 1")
    _check_networks(reading, table)
    return GatewayConfig(
        listen=listen,
        allow_anonymous=anonymous if anonymous is not None else is_local and not wrote_tenants,
        max_inflight=table.value("max_inflight") or None,
        queue_limit=table.value("queue_limit"),
        queue_timeout=table.value("queue_timeout"),
        load_wait=table.value("load_wait"),
        routing=table.value("routing"),
        fairness=table.value("fairness"),
        operator_keys=operators,
        cors_origins=table.value("cors_origins"),
        trust_headers_from=table.value("trust_headers_from"),
        connect_timeout=table.value("connect_timeout"),
        first_byte_timeout=table.value("first_byte_timeout"),
        chunk_timeout=table.value("chunk_timeout"),
        head_timeout=table.value("head_timeout"),
        body_timeout=table.value("body_timeout"),
        write_timeout=table.value("write_timeout"),
        keepalive_timeout=table.value("keepalive_timeout"),
        drain_timeout=table.value("drain_timeout"),
        max_body=table.value("max_body"),
        max_buffered=table.value("max_buffered"),
        max_header=table.value("max_header"),
        access_log=table.value("access_log"),
        # By default only those see them who may: written, the check above has spoken.
        metrics=table.value("metrics") and (is_local or bool(operators)),
        engine_metrics=table.value("engine_metrics"),
        ui=ui if ui is not None else is_local,
        workers=table.value("workers"),
        tls=_tls(reading, table),
        bands=bands,
        tenants=tenants,
    )


def _bands(reading: Reading, table: Written) -> tuple[BandConfig, ...]:
    rows = [row for row in table.arrays.get("band", []) if "name" in row.settings]
    limit, timeout = table.value("queue_limit"), table.value("queue_timeout")
    promote = BAND.by_name["promote_after"].builtin
    if not rows:
        return tuple(BandConfig(name, name == "normal", None, 0, limit, timeout, promote) for name in BUILTIN_BANDS)
    seen: dict[str, Written] = {}
    defaults: list[Written] = []
    for row in rows:
        name = row.value("name")
        first = seen.setdefault(name, row)
        if first is not row:
            message = f'band "{name}" is there twice (first in {first.place_of("name")})'
            reading.report(row.place_of("name"), "duplicate-name", message)
        if row.value("default"):
            defaults.append(row)
        waits = row.value("queue_timeout") if "queue_timeout" in row.settings else timeout
        after = row.value("promote_after")
        written = [key for key in ("promote_after", "queue_timeout") if key in row.settings]
        if waits is not None and after is not None and after >= waits and written and row.is_usable(*written):
            message = "promote_after is not below queue_timeout, so no request would live to see it"
            reading.report(row.place_of(written[0]), "out-of-range", message, 'shorten it, or write "off"')
    if len(defaults) != 1 and all(row.is_usable("default") for row in rows):
        place = defaults[1].place_of("default") if defaults else rows[0].place
        what = f"{len(defaults)} bands have" if defaults else "no band has"
        reading.report(place, "default-band", f"{what} default = true", "exactly one must")
    reserved = sum(row.value("reserved") for row in rows)
    overall = table.value("max_inflight")
    if overall and reserved >= overall and table.is_usable("max_inflight"):
        place = next(row.place_of("reserved") for row in rows if "reserved" in row.settings)
        message = f"bands reserve {reserved} slots, but max_inflight of the gateway is {overall}"
        reading.report(place, "out-of-range", message, "the sum must be below it")
    return tuple(
        BandConfig(
            name=row.value("name"),
            default=row.value("default"),
            max_inflight=row.value("max_inflight") or None,
            reserved=row.value("reserved"),
            queue_limit=row.value("queue_limit") if "queue_limit" in row.settings else limit,
            queue_timeout=row.value("queue_timeout") if "queue_timeout" in row.settings else timeout,
            promote_after=row.value("promote_after"),
        )
        for row in rows
    )


Owners = dict[str, tuple[str, Place]]
"""Hash of a key -> whose it is, and where it stands."""


def _keys(
    reading: Reading, forms: tuple[SecretForm, ...], place: Place, owner: str, owners: Owners
) -> tuple[Hash, ...]:
    found: list[Hash] = []
    for index, form in enumerate(forms):
        at = place.at(index)
        if form.form == "sha256":
            key = Hash(form.word)
        else:
            if form.form == "value" and len(form.word) < KEY_LEAST:
                hint = "llmgw key new makes one"
                reading.report(at, "weak-key", f"a key of {len(form.word)} characters; {KEY_LEAST} are the least", hint)
                continue
            secret = resolve_secret(reading, form, at)
            if secret is None or not is_seen(secret):
                continue
            key = hash_of(secret)
        first = owners.setdefault(key.sha256, (owner, at))
        if first[1] is not at:
            whose = "is given twice" if first[0] == owner else f"belongs to {first[0]}"
            reading.report(at, "key-taken", f"keys[{index}]: the same key {whose}", "every key has one owner")
        found.append(key)
    return tuple(found)


def _tenants(
    reading: Reading, table: Written, bands: tuple[BandConfig, ...], file: Written
) -> tuple[tuple[TenantConfig, ...], Owners]:
    names = tuple(band.name for band in bands)
    default = next((band.name for band in bands if band.default), names[0])
    served = _served(file)
    owners: Owners = {}
    seen: dict[str, Written] = {}
    tenants = []
    for row in table.arrays.get("tenant", []):
        name = row.value("name") or ""
        if "name" in row.settings:
            first = seen.setdefault(name, row)
            if first is not row:
                message = f'tenant "{name}" is there twice (first in {first.place_of("name")})'
                reading.report(row.place_of("name"), "duplicate-name", message)
            if name == "anonymous":
                message = '"anonymous" is the name of requests without a key'
                reading.report(row.place_of("name"), "reserved", message, "choose another")
        keys: tuple[Hash, ...] = ()
        if "keys" in row.settings:
            keys = _keys(reading, row.value("keys"), row.place_of("keys"), f'tenant "{name}"', owners)
        for index, band in enumerate(row.value("bands") or ()):
            if band not in names and table.is_usable("band"):
                meant = closest(band, names)
                hint = f'did you mean "{meant}"?' if meant else None
                message = f"'{band}' is not one of {', '.join(names)}"
                reading.report(row.place_of("bands").at(index), "unknown-value", message, hint)
        for index, pattern in enumerate(row.value("models") or ()):
            if served is not None and not any(_fits(pattern, model) for model in served):
                meant = closest(pattern, tuple(sorted(served)))
                hint = f'did you mean "{meant}"?' if meant else "no [[shard]] has such a model or alias"
                place = row.place_of("models").at(index)
                reading.report(place, "unknown-model", f"'{pattern}' matches no model", hint)
        rate = row.tables.get("rate")
        tenants.append(
            TenantConfig(
                name=name,
                keys=keys,
                bands=row.value("bands") or (default,),
                weight=row.value("weight"),
                max_inflight=row.value("max_inflight") or None,
                queue_limit=row.value("queue_limit"),
                models=row.value("models"),
                requests_per_minute=rate.value("requests_per_minute") if rate else None,
                tokens_per_minute=rate.value("tokens_per_minute") if rate else None,
            )
        )
    return tuple(tenants), owners


def _served(file: Written) -> set[str] | None:
    """Every model and alias of the files; None when a mistake hides some."""
    found: set[str] = set()
    if not file.is_usable("shard"):
        return None
    for row in file.arrays.get("shard", []):
        found.update(row.settings["aliases"].value if "aliases" in row.settings else ())
        if "model" in row.settings:
            found.add(row.settings["model"].value)
    return found


def _fits(pattern: str, model: str) -> bool:
    return re.fullmatch(".*".join(re.escape(part) for part in pattern.split("*")), model) is not None


def _operator_keys(reading: Reading, table: Written, owners: Owners) -> tuple[Hash, ...]:
    if "operator_keys" not in table.settings:
        return ()
    return _keys(reading, table.value("operator_keys"), table.place_of("operator_keys"), "the operators", owners)


def _check_listen(reading: Reading, table: Written, listen: tuple[Listen, ...]) -> None:
    place = table.place_of("listen")
    many = isinstance(place.doc.raw.get("gateway", {}).get("listen"), list)
    for index, door in enumerate(listen):
        at = place.at(index) if many else place
        if door.path is not None:
            long = len(door.path.encode())
            if long > SOCKET_PATH_MAX:
                message = f"path has {long} bytes, a unix socket path may have {SOCKET_PATH_MAX}"
                reading.report(at, "path-too-long", message, "choose a shorter path")
            elif not door.path.startswith("/"):
                reading.report(at, "bad-value", f"'{door}' is no absolute path", 'write "unix:/run/llmgw/gateway.sock"')


def _check_operator_doors(reading: Reading, table: Written, is_local: bool, has_operator: bool) -> None:
    if is_local or has_operator:
        return
    for name in ("metrics", "ui"):
        if name in table.settings and table.value(name):
            message = f"{name} beyond this machine needs operator_keys"
            reading.report(table.place_of(name), "needs-operator-key", message, f"add one, or {name} = false")


def _check_gateway_sizes(reading: Reading, table: Written) -> None:
    if table.is_usable("max_body", "max_buffered") and table.value("max_buffered") < table.value("max_body"):
        key = "max_buffered" if "max_buffered" in table.settings else "max_body"
        hint = "one request must fit"
        reading.report(table.place_of(key), "out-of-range", "max_buffered is below max_body", hint)


def _check_networks(reading: Reading, table: Written) -> None:
    for index, network in enumerate(table.value("trust_headers_from")):
        if network == "unix":
            continue
        try:
            ipaddress.ip_network(network, strict=True)
        except ValueError:
            hint = 'write a network such as "10.0.0.0/8", or "unix"'
            place = table.place_of("trust_headers_from").at(index)
            reading.report(place, "bad-value", f"'{network[:60]}' is no network", hint)


def _tls(reading: Reading, gateway: Written) -> TlsConfig | None:
    table = gateway.tables.get("tls")
    if table is None:
        return None
    for name in ("cert", "client_ca"):
        _check_readable(reading, table, name)
    cert, key = table.value("cert"), table.value("key")
    if cert is None or key is None:
        return None
    return TlsConfig(cert, key, table.value("client_ca"))


def _check_readable(reading: Reading, table: Written, name: str) -> None:
    path = table.value(name)
    if path is None or not table.is_usable(name):
        return
    fact = reading.path(path)
    if fact is not None and not fact.exists:
        reading.report(table.place_of(name), "no-such-file", f"{path} does not exist", "write the path of a PEM file")
    elif fact is not None and not fact.readable:
        reading.report(table.place_of(name), "not-readable", f"{path} cannot be read by this user")


# ------------------------------------------------------------------------------------------------------------- cluster


def build_cluster(reading: Reading, file: Written) -> ClusterConfig | None:
    table = file.tables.get("cluster")
    if table is None:
        return None
    for name in ("ca", "cert", "key"):
        _check_readable(reading, table, name)
    for one, other in (("cert", "key"), ("key", "cert"), ("password", "user")):
        if one in table.settings and other not in table.settings and table.is_usable(other):
            message = f"{one} needs {other}"
            reading.report(table.place_of(one), "missing-key", message, "write both or none")
    password: Secret | None = table.value("password")
    return ClusterConfig(
        name=table.value("name") or "",
        etcd=table.value("etcd") or (),
        ca=table.value("ca"),
        cert=table.value("cert"),
        key=table.value("key"),
        user=table.value("user"),
        password=password,
        gateways=table.value("gateways"),
        node_grace=table.value("node_grace"),
        self_fence_after=table.value("self_fence_after"),
    )


def check_gateway_ports(reading: Reading, file: Written, ports: Mapping[int, str]) -> None:
    """`ports` are those of shards on this node, with their shards' names; a door of the gateway cannot have one."""
    table = file.tables.get("gateway")
    if table is None:
        return
    for door in table.value("listen") or ():
        if door.port is not None and door.port in ports:
            message = f'port {door.port} already belongs to shard "{ports[door.port]}"'
            reading.report(table.place_of("listen"), "port-taken", message, "change one of the two")
