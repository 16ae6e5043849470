"""The engines' own command lines: which options each knows, and how each complains about others."""

from collections.abc import Iterable


class OptionError(Exception):
    """An argument the engine would refuse; the message is worded as the engine words it."""


class Options:
    """What was given: option values by canonical name, and the positional arguments."""

    def __init__(self) -> None:
        self.values: dict[str, list[str]] = {}
        self.positional: list[str] = []

    def has(self, name: str) -> bool:
        return name in self.values

    def text(self, name: str, default: str = "") -> str:
        found = self.values.get(name)
        return found[-1] if found else default

    def many(self, name: str) -> list[str]:
        return self.values.get(name, [])

    def number(self, name: str, default: int) -> int:
        """An integer; `k`/`K`, `m`/`M` and `g`/`G` at the end multiply as the engines do."""
        text = self.text(name)
        if not text:
            return default
        factors = {"k": 1000, "K": 1024, "m": 1000_000, "M": 1024**2, "g": 10**9, "G": 1024**3}
        try:
            if text[-1] in factors:
                return int(float(text[:-1]) * factors[text[-1]])
            return int(text)
        except ValueError:
            raise OptionError(f"argument --{name}: invalid int value: {text!r}") from None


class Grammar:
    """The options of one engine. A name in `switches` takes no value, one in `lists` one or more, others one."""

    def __init__(self, valued: str, switches: str = "", lists: str = "", aliases: dict[str, str] | None = None) -> None:
        self._valued = frozenset(valued.split())
        self._switches = frozenset(switches.split())
        self._lists = frozenset(lists.split())
        self._aliases = aliases or {}

    def parse(self, argv: Iterable[str]) -> tuple[Options, list[str]]:
        """The options given and the arguments that are unknown. Raises OptionError for a missing value."""
        options = Options()
        unknown: list[str] = []
        words = list(argv)
        while words:
            word = words.pop(0)
            if not word.startswith("-") or word == "-":
                options.positional.append(word)
                continue
            name, kind, value = self._recognise(word)
            if kind == "unknown":
                unknown.append(word)
            elif kind == "switch":
                options.values[name] = []
            elif value is not None:
                options.values.setdefault(name, []).append(value)
            else:
                taken = self._take_values(words, many=kind == "list")
                if not taken:
                    raise OptionError(f"argument {word}: expected {'at least ' if kind == 'list' else ''}one argument")
                options.values.setdefault(name, []).extend(taken)
        return options, unknown

    def _recognise(self, word: str) -> tuple[str, str, str | None]:
        flag, equals, value = word.partition("=")
        name = self._aliases.get(flag, flag.lstrip("-").replace("_", "-"))
        name = self._aliases.get("--" + name, name)
        given = value if equals else None
        if name in self._lists:
            return name, "list", given
        if name in self._valued or name.partition(".")[0] in self._valued:
            return name, "valued", given
        if not equals and (name in self._switches or name.removeprefix("no-") in self._switches):
            return name, "switch", None
        return name, "unknown", given

    @staticmethod
    def _take_values(words: list[str], *, many: bool) -> list[str]:
        taken: list[str] = []
        while words and (many or not taken) and not _looks_like_option(words[0]):
            taken.append(words.pop(0))
        return taken


def _looks_like_option(word: str) -> bool:
    return word.startswith("-") and len(word) > 1 and not word[1].isdigit()


LLAMACPP = Grammar(
    valued="""
        model alias host port ctx-size threads threads-batch parallel api-key api-key-file gpu-layers n-gpu-layers
        batch-size ubatch-size cache-type-k cache-type-v split-mode tensor-split main-gpu device timeout keep
        chat-template chat-template-file hf-repo hf-file hf-token model-url lora lora-scaled seed temp top-k top-p
        min-p n-predict rope-scaling rope-scale rope-freq-base rope-freq-scale flash-attn cache-reuse log-file
        log-verbosity ssl-key-file ssl-cert-file path slot-save-path threads-http reasoning-format pooling numa
        override-tensor override-kv draft-max draft-min model-draft ctx-size-draft gpu-layers-draft defrag-thold
        slot-prompt-similarity prio cpu-mask reasoning-budget mmproj mmproj-url sleep-idle-seconds
    """,
    switches="""
        metrics slots no-slots props cont-batching no-cont-batching mlock no-mmap no-kv-offload embedding embeddings
        reranking jinja no-webui verbose log-disable log-prefix log-timestamps offline no-warmup warmup
        context-shift no-context-shift swa-full check-tensors no-perf kv-unified special ignore-eos
    """,
    aliases={
        "-m": "model", "-a": "alias", "-c": "ctx-size", "-t": "threads", "-tb": "threads-batch", "-np": "parallel",
        "-ngl": "gpu-layers", "--n-gpu-layers": "gpu-layers", "-b": "batch-size", "-ub": "ubatch-size",
        "-ctk": "cache-type-k", "-ctv": "cache-type-v", "-sm": "split-mode", "-ts": "tensor-split", "-mg": "main-gpu",
        "-dev": "device", "-to": "timeout", "-hf": "hf-repo", "-n": "n-predict", "--predict": "n-predict",
        "-fa": "flash-attn", "-v": "verbose", "-cb": "cont-batching", "-ot": "override-tensor", "-s": "seed",
        "-mu": "model-url", "-lv": "log-verbosity", "-md": "model-draft", "-kvu": "kv-unified",
    },
)  # fmt: skip
