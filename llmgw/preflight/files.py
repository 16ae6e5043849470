"""Rules about programs, folders and the files of a model."""

from __future__ import annotations

from collections.abc import Iterator

from llmgw.domain.problem import Problem
from llmgw.domain.shard import EngineKind, ShardSpec
from llmgw.engines.adapter import profile
from llmgw.preflight.needs import weights_path
from llmgw.preflight.situation import SPLITTING, Situation, is_overridden, option, problem, warning

NAMED_MOST = 3
"""Missing files that are named; the rest is counted."""


def program_missing(spec: ShardSpec, situation: Situation) -> Iterator[Problem]:
    word = spec.command[0] if spec.command else ""
    if situation.facts.programs.get(word, word) is not None:
        return
    if "/" in word:
        text, hint = f"{word} does not exist or cannot be executed", "check the path"
    else:
        text, hint = f"{word} is not on PATH", f'install it, or write its whole path: command = ["/…/{word}", …]'
    yield problem(spec, "program-missing", "command", text, hint)


def version_unreadable(spec: ShardSpec, situation: Situation) -> Iterator[Problem]:
    word = spec.command[0] if spec.command else ""
    program = situation.facts.programs.get(word)
    distribution = profile(spec.engine).distribution
    known = situation.facts.engine_versions
    if program is not None and distribution is not None and program in known and known[program] is None:
        yield warning(
            spec,
            "engine-version-unknown",
            "command",
            f"the version of {program} cannot be read: there is no {distribution} beside it",
            "options that other versions do not know are passed on as they are; name the program of the environment "
            "that the engine is installed in",
        )


def weights_missing(spec: ShardSpec, situation: Situation) -> Iterator[Problem]:
    path = weights_path(spec)
    fact = situation.facts.paths.get(path) if path is not None else None
    if fact is None:
        return
    if not fact.exists:
        yield problem(spec, "weights-missing", "weights", f"{path} does not exist", "check the path on this machine")
    elif not fact.readable:
        yield problem(
            spec,
            "weights-missing",
            "weights",
            f"{path} cannot be read by this user",
            "change its mode or owner, or run llmgw as a user who may",
        )


def workdir_missing(spec: ShardSpec, situation: Situation) -> Iterator[Problem]:
    fact = situation.facts.paths.get(spec.workdir) if spec.workdir is not None else None
    if fact is not None and not fact.is_dir:
        text = f"{spec.workdir} is no folder" if fact.exists else f"{spec.workdir} does not exist"
        yield problem(spec, "workdir-missing", "workdir", text, "create it, or leave workdir out")


def model_incomplete(spec: ShardSpec, situation: Situation) -> Iterator[Problem]:
    """A local folder that lacks what the engine will ask for after a minute of imports."""
    path = weights_path(spec)
    folder = situation.facts.model_folders.get(path) if path is not None else None
    if folder is None or path is None or spec.engine not in SPLITTING or is_overridden(spec):
        return
    if folder.config == "missing":
        yield problem(
            spec,
            "model-config-missing",
            "weights",
            f"{path} has no config.json",
            'name the folder of one model in the Hugging Face layout; for a GGUF file use engine = "llamacpp"',
        )
    elif folder.config == "unreadable":
        yield problem(
            spec,
            "model-config-missing",
            "weights",
            f"{path}/config.json cannot be read as JSON",
            "download the model again",
        )
    if folder.missing:
        names = ", ".join(folder.missing[:NAMED_MOST])
        more = len(folder.missing) - NAMED_MOST
        rest = f" and {more} more" if more > 0 else ""
        yield problem(
            spec,
            "weight-files-missing",
            "weights",
            f"{len(folder.missing)} of {folder.listed} files of its index are missing: {names}{rest}",
            "the download was not finished: download the model again",
        )
    elif folder.config == "read" and folder.weight_bytes == 0:
        yield problem(
            spec,
            "weight-files-missing",
            "weights",
            f"{path} has a config.json, but no file with weights",
            "the download was not finished: download the model again",
        )
    own_tokenizer = option(spec, "tokenizer", "tokenizer-path") is not None
    skipped = option(spec, "skip-tokenizer-init") is not None
    if folder.config == "read" and folder.tokenizer is False and not own_tokenizer and not skipped:
        yield problem(
            spec,
            "tokenizer-missing",
            "weights",
            f"{path} has no tokenizer",
            'copy the tokenizer\'s files of the model into it, or name another one: args = { tokenizer = "…" }',
        )


def gguf_broken(spec: ShardSpec, situation: Situation) -> Iterator[Problem]:
    path = weights_path(spec)
    if path is None or spec.engine is not EngineKind.LLAMACPP:
        return
    file = situation.facts.gguf_files.get(path)
    if path in situation.facts.model_folders:
        yield problem(
            spec,
            "gguf-broken",
            "weights",
            f"{path} is a folder, and llama.cpp loads one file",
            "name the .gguf file in it; of a split model the first part",
        )
    if file is None:
        return
    if not file.is_gguf:
        yield problem(
            spec,
            "gguf-broken",
            "weights",
            f"{path} is no GGUF file",
            "name the .gguf file; other formats are for vllm and sglang",
        )
    elif file.missing:
        names = ", ".join(file.missing[:NAMED_MOST])
        yield problem(
            spec,
            "gguf-broken",
            "weights",
            f"{len(file.missing)} of its parts are missing: {names}",
            "download all parts into one folder",
        )
    elif not file.is_first:
        yield problem(
            spec,
            "gguf-broken",
            "weights",
            f"{path} is not the first part of its model",
            "name the first part: …-00001-of-….gguf; llama.cpp finds the others beside it",
        )
