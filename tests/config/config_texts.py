"""What the tests of this folder share: parsing texts with invented facts."""

from llmgw.config.document import SourceFile
from llmgw.config.parse import Parsed, parse
from llmgw.config.problem_codes import CODES
from llmgw.config.render import render_problems
from llmgw.domain.host import HostFacts

FACTS = HostFacts(hostname="gpu-01", uid=0, home="/root", env={"HOME": "/root"}, groups=frozenset({"root", "llmgw"}))


def read(text, *more, facts=FACTS, **options) -> Parsed:
    """Parse texts: the first is llmgw.toml in /etc/llmgw, the others are included as conf.d/N.toml."""
    files = [SourceFile("llmgw.toml", _bytes(text), "/etc/llmgw", "/etc/llmgw/llmgw.toml")]
    for number, included in enumerate(more, 1):
        path = f"conf.d/{number}.toml"
        files.append(SourceFile(path, _bytes(included), "/etc/llmgw/conf.d", f"/etc/llmgw/{path}", ("include", 0)))
    parsed = parse(files, facts, **options)
    undocumented = {problem.code for problem in parsed.problems} - set(CODES)
    assert not undocumented
    return parsed


def _bytes(text):
    return text if isinstance(text, bytes) else text.encode()


def messages(text, *more, **options) -> list[str]:
    """`LINE:COLUMN CODE TEXT` of every problem."""
    return [
        f"{p.where.line}:{p.where.column} {p.code} {p.message}" + (f"; {p.hint}" if p.hint else "")
        for p in read(text, *more, **options).problems
    ]


def codes(text, *more, **options) -> list[str]:
    return [p.code for p in read(text, *more, **options).problems]


def rendered(text, *more, **options) -> str:
    parsed = read(text, *more, **options)
    return render_problems(parsed.problems, parsed.sources)


def shard(**written):
    """A [[shard]] with these keys, values in TOML's notation."""
    written = {"name": '"a"', "model": '"m"', "gpus": "0", **written}
    return "[[shard]]\n" + "".join(f"{key} = {value}\n" for key, value in written.items())


def spec(text, *more, **options):
    """The first shard of a text that must have no errors."""
    parsed = read(text, *more, **options)
    assert parsed.config is not None, render_problems(parsed.problems, parsed.sources)
    return parsed.config.shards[0]
