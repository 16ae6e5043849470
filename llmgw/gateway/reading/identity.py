"""Who asks: from a key, or from a header where the peer is trusted, to a tenant and the band of this request.

Keys are known as SHA-256 hashes alone. An operator's key is no tenant's and opens nothing for inference; a tenant's
key opens nothing of the operators'.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Callable, Iterable, Sequence

from attrs import frozen

from llmgw.config.model import GatewayConfig, Hash, TenantConfig
from llmgw.gateway.reading import answers
from llmgw.gateway.reading.answers import Pair, Refusal

ANONYMOUS = "anonymous"
"""The tenant of requests without a key."""

UNIX = "unix"
"""The peer of a connection over a unix socket."""

_OUR_TENANT = b"x-llmgw-tenant"
_FOREIGN_TENANTS = (b"x-gateway-inference-fairness-id", b"x-llm-d-inference-fairness-id")
"""Fairness ids of the Gateway API inference extension and of llm-d (its newer name)."""
_BAND = b"x-llmgw-priority"
_FORWARDED = (b"x-forwarded-for", b"forwarded", b"x-real-ip")
"""A proxy on this machine sets one of these: then it is not somebody on this machine who asks."""

_KNOWN_PEERS_MAX = 4096
"""Addresses that are kept with what the networks say about them."""


@frozen(eq=False)
class Caller:
    """One who may ask, and the band of this request. Made once per tenant and band, so that a request makes none."""

    tenant: str
    band: str
    models: Callable[[str], bool]
    """Whether a name is one of the tenant's; see `may_use` for a model with aliases."""
    weight: int = 1
    band_clamped: bool = False
    """The request named a band that is unknown, or that this tenant may not use; it runs in the default one."""

    def may_use(self, model: str, aliases: Iterable[str] = ()) -> bool:
        """A tenant's list may name a model or any of its aliases; either way it is the same model."""
        return self.models(model) or any(map(self.models, aliases))


class _Tenant:
    """A tenant's callers, one per band and once more for the default one when another one was asked for."""

    __slots__ = ("by_band", "clamped", "default")

    def __init__(self, name: str, bands: Sequence[str], models: Callable[[str], bool], weight: int) -> None:
        self.by_band = {band.encode().lower(): Caller(name, band, models, weight) for band in bands}
        self.default = Caller(name, bands[0], models, weight)
        self.clamped = Caller(name, bands[0], models, weight, band_clamped=True)

    def caller(self, wish: bytes | None) -> Caller:
        if wish is None:
            return self.default
        return self.by_band.get(wish.strip(b" \t").lower(), self.clamped)


class Doors:
    """Who is let in, by one configuration."""

    def __init__(self, config: GatewayConfig) -> None:
        bands = [band.name for band in config.bands]
        default = next((band.name for band in config.bands if band.default), bands[0])
        self._tenants = {row.name: _tenant(row, default) for row in config.tenants}
        self._by_hash = _Hashes((key, self._tenants[row.name]) for row in config.tenants for key in row.keys)
        self._operators = _Hashes((key, _OPERATOR) for key in config.operator_keys)
        self._anonymous: _Tenant | None = None
        if config.allow_anonymous:
            # Where nobody has a key, everybody may pick a band; beside tenants the others keep to the default one.
            allowed = [default] if config.tenants else [default, *(band for band in bands if band != default)]
            self._anonymous = _Tenant(ANONYMOUS, allowed, _every, 1)
        self._trusts_unix = UNIX in config.trust_headers_from
        self._networks = tuple(
            ipaddress.ip_network(text, strict=False) for text in config.trust_headers_from if text != UNIX
        )
        self._peers: dict[str, tuple[bool, bool]] = {UNIX: (self._trusts_unix, True)}

    def caller(self, headers: Iterable[Pair], peer: str) -> Caller | Refusal:
        """The tenant that a request is for, and its band. `peer` is an address as text, or `unix`."""
        lines = dict(headers)
        trusted, _ = self._peers.get(peer) or self._judge(peer)
        if trusted:
            found = self._believed(lines)
            if found is not None:
                return found if isinstance(found, Refusal) else found.caller(lines.get(_BAND))
        key = _key(lines)
        if key is not None and self._tenants:
            tenant = self._by_hash.find(key)
            # Not the anonymous one instead: whoever sends a key means to be somebody.
            return answers.wrong_key() if tenant is None else tenant.caller(lines.get(_BAND))
        if self._anonymous is None:
            return answers.no_key() if key is None else answers.wrong_key()
        return self._anonymous.caller(lines.get(_BAND))

    def operator(self, headers: Iterable[Pair], peer: str) -> Caller | Refusal:
        """Whether metrics, the page and the engines' own pages are shown."""
        lines = dict(headers)
        key = _key(lines)
        if key is not None and self._operators.find(key) is not None:
            return OPERATOR
        _, is_local = self._peers.get(peer) or self._judge(peer)
        if is_local and not any(name in lines for name in _FORWARDED):
            return OPERATOR
        return answers.no_operator_key() if key is None else answers.operators_only()

    def is_trusted(self, peer: str) -> bool:
        """Whether this peer's words about its own clients are believed."""
        return (self._peers.get(peer) or self._judge(peer))[0]

    def _believed(self, lines: dict[bytes, bytes]) -> _Tenant | Refusal | None:
        """The tenant that a trusted peer names; None when it names none that llmgw knows."""
        ours = lines.get(_OUR_TENANT)
        if ours is not None:
            found = self._tenants.get(_text(ours))
            return answers.unknown_tenant() if found is None else found
        for name in _FOREIGN_TENANTS:
            if name in lines:
                # Such ids are whatever the other side likes; one that stands in no [[gateway.tenant]] says nothing.
                return self._tenants.get(_text(lines[name]))
        return None

    def _judge(self, peer: str) -> tuple[bool, bool]:
        """Whether a peer is trusted and whether it is on this machine. Kept: the same peers come again."""
        try:
            address = ipaddress.ip_address(peer.partition("%")[0])
        except ValueError:
            verdict = (False, False)
        else:
            mapped = getattr(address, "ipv4_mapped", None)
            address = address if mapped is None else mapped
            trusted = any(address in network for network in self._networks if network.version == address.version)
            verdict = (trusted, address.is_loopback)
        if len(self._peers) >= _KNOWN_PEERS_MAX:
            self._peers = {UNIX: (self._trusts_unix, True)}
        self._peers[peer] = verdict
        return verdict


class _Hashes:
    """Whose key has which hash. The index is on a part of the hash, the whole is compared in constant time; what an
    attacker could learn from the time is a part of the hash of a key that they know.
    """

    __slots__ = ("_rows",)

    def __init__(self, rows: Iterable[tuple[Hash, _Tenant]]) -> None:
        self._rows: dict[bytes, list[tuple[bytes, _Tenant]]] = {}
        for key, owner in rows:
            digest = bytes.fromhex(key.sha256)
            self._rows.setdefault(digest[:_INDEXED], []).append((digest, owner))

    def find(self, key: bytes) -> _Tenant | None:
        digest = hashlib.sha256(key).digest()
        for known, owner in self._rows.get(digest[:_INDEXED], ()):
            if hmac.compare_digest(known, digest):
                return owner
        return None


_INDEXED = 4
"""Bytes of a hash in the index: too few to find a key by, enough to tell ten thousand apart."""


def _key(lines: dict[bytes, bytes]) -> bytes | None:
    """The key of a request; None when it shows none."""
    value = lines.get(b"authorization")
    if value is not None:
        scheme, _, key = value.strip(b" \t").partition(b" ")
        if scheme.lower() == b"bearer":
            return key.strip(b" \t")
    value = lines.get(b"x-api-key")
    return None if value is None else value.strip(b" \t")


def _text(value: bytes) -> str:
    return value.strip(b" \t").decode("utf-8", "replace")


def _every(model: str) -> bool:
    return True


def _tenant(row: TenantConfig, default: str) -> _Tenant:
    return _Tenant(row.name, row.bands or (default,), _matcher(row.models), row.weight)


def _matcher(patterns: tuple[str, ...] | None) -> Callable[[str], bool]:
    """`*` in a pattern stands for any run of characters; None lets everything through."""
    if patterns is None:
        return _every
    texts = (".*".join(re.escape(part) for part in pattern.split("*")) for pattern in patterns)
    fits = re.compile("|".join(f"(?:{text})" for text in texts), re.DOTALL).fullmatch
    return lambda model: fits(model) is not None


_OPERATOR = _Tenant("", ("",), _every, 1)
OPERATOR = _OPERATOR.default
"""Whoever runs llmgw: no tenant, no band."""
