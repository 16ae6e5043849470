"""From where a secret is said to be, to its text. Every check of the file format's section on secrets is here."""

from __future__ import annotations

import hashlib

from llmgw.config.expand import absolute, expand_variables
from llmgw.config.kinds import SecretForm
from llmgw.config.model import Hash
from llmgw.config.reading import SECRET_MAX, Place, Reading
from llmgw.domain.shard import Secret

_UNSEEN = "not read"


def resolve_secret(reading: Reading, form: SecretForm, place: Place) -> Secret | None:
    """The secret, or None with a problem reported. What could not be looked at is an empty text for now."""
    if form.form == "value":
        return _inline(reading, form, place)
    if form.form == "env":
        return _from_env(reading, form, place)
    if form.form == "credential":
        return _from_credential(reading, form, place)
    return _from_file(reading, form, place)


def _inline(reading: Reading, form: SecretForm, place: Place) -> Secret:
    real = place.doc.file.real
    fact = reading.path(real) if real else None
    if fact is not None and fact.mode is not None and fact.mode & 0o004:
        message = f"a secret stands in {place.doc.file.path}, which every user of this host may read"
        hint = 'chmod o-r the file, or write { file = "PATH" }, { env = "NAME" } or { credential = "NAME" }'
        reading.warn(place, "secret-in-readable-file", message, hint)
    return Secret(form.word, "inline")


def _from_env(reading: Reading, form: SecretForm, place: Place) -> Secret | None:
    reading.secret_variables.add(form.word)
    text = reading.facts.env.get(form.word)
    if not text:
        if reading.offline:
            return Secret("", f"env {form.word}")
        what = "is not set" if text is None else "is empty"
        hint = "set it where llmgw run is started; this command looks in its own environment"
        reading.report(place.at("env"), "secret-missing", f"environment variable {form.word} {what}", hint)
        return None
    return Secret(text, f"env {form.word}")


def _from_file(reading: Reading, form: SecretForm, place: Place) -> Secret | None:
    at = place.at("file")
    expanded, refusals = expand_variables(form.word, reading.facts.env, at_launch=False)
    if refusals:
        reading.refuse_all(at, refusals)
        return None
    path = absolute(expanded, place.doc.file.folder, reading.facts.home)
    origin = f"file {path}"
    fact = reading.path(path)
    if fact is not None and fact.exists and fact.mode is not None and fact.mode & 0o004:
        reading.report(at, "secret-file-open", f"every user of this host may read {path}", f"chmod o-r {path}")
        return None
    return _read(reading, path, origin, at)


def _from_credential(reading: Reading, form: SecretForm, place: Place) -> Secret | None:
    at = place.at("credential")
    origin = f"credential {form.word}"
    folder = reading.facts.env.get("CREDENTIALS_DIRECTORY")
    if reading.offline:
        return Secret("", origin)
    if not folder:
        message = f"credential {form.word} cannot be seen: there is no $CREDENTIALS_DIRECTORY"
        hint = "systemd gives it to the service alone; elsewhere use { file } or { env }"
        severity = "error" if reading.running else "warning"
        reading.report(at, "credential-not-visible", message, hint, severity=severity)  # type: ignore[arg-type]
        return None if reading.running else Secret("", origin)
    plain, prefixed = f"{folder}/{form.word}", f"{folder}/llmgw_{form.word}"
    # The shipped unit passes credentials on with a prefix; a hand-written one may not.
    if isinstance(reading.content(plain), str) and isinstance(reading.content(prefixed), bytes):
        return _read(reading, prefixed, origin, at)
    return _read(reading, plain, origin, at)


def _read(reading: Reading, path: str, origin: str, at: Place) -> Secret | None:
    content = reading.content(path)
    if content is None:
        return Secret("", f"{origin} ({_UNSEEN})")
    if isinstance(content, str):
        reading.report(at, "secret-missing", f"{path} {content}", "llmgw reads it when the file is loaded")
        return None
    if len(content) > SECRET_MAX:
        reading.report(at, "secret-too-large", f"{path} has more than {SECRET_MAX} bytes", "it is no secret's file")
        return None
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        reading.report(at, "bad-value", f"{path} is not UTF-8 text", "a secret is text")
        return None
    text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        reading.report(at, "empty", f"{path} is empty", "write the secret into it")
        return None
    if "\0" in text:
        reading.report(at, "bad-value", f"{path} holds a NUL character", "a secret is text")
        return None
    return Secret(text, origin)


def is_seen(secret: Secret) -> bool:
    """False for a secret whose text this process could not look at."""
    return bool(secret.reveal())


def hash_of(secret: Secret) -> Hash:
    """The only form in which keys of clients are kept."""
    return Hash(hashlib.sha256(secret.reveal().encode()).hexdigest())
