from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from llmgw.gateway.metrics import rewriting
from llmgw.gateway.metrics.engines import is_reserved
from llmgw.gateway.metrics.rewriting import merged_lines

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="Qwen/Qwen2.5-32B"} 3.0
# HELP vllm:time_to_first_token_seconds Histogram of time to first token in seconds.
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="q"} 1.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="q"} 2.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="q"} 2.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="q"} 4.5
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="q"} 1.2e+06
# HELP process_resident_memory_bytes Resident memory size in bytes.
# TYPE process_resident_memory_bytes gauge
process_resident_memory_bytes 1.0e+09
"""


def merged(*pages: tuple[str, str, str]) -> str:
    return "".join(merged_lines(pages, is_reserved))


def samples(text: str) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def test_every_series_gets_shard_and_model_and_keeps_its_own_labels() -> None:
    found = samples(merged(("a", "qwen", VLLM)))
    name = "vllm:num_requests_running{engine=0,model=qwen,model_name=Qwen/Qwen2.5-32B,shard=a}"
    assert found[name] == 3.0
    assert found["vllm:prompt_tokens_total{engine=0,model=qwen,model_name=q,shard=a}"] == 1.2e6


def test_series_of_two_engines_stand_together_below_one_type_and_help() -> None:
    text = merged(("a", "qwen", VLLM), ("b", "qwen", VLLM))
    lines = text.split("\n")
    heads = [line for line in lines if line.startswith("# TYPE")]
    assert len(heads) == len(set(heads)) == 3
    first = lines.index("# TYPE vllm:num_requests_running gauge")
    assert [line.split(",")[0] for line in lines[first + 1 : first + 3]] == [
        'vllm:num_requests_running{shard="a"',
        'vllm:num_requests_running{shard="b"',
    ]


def test_all_samples_of_a_histogram_belong_to_its_family() -> None:
    families = {family.name: family for family in text_string_to_metric_families(merged(("a", "m", VLLM)))}
    histogram = families["vllm:time_to_first_token_seconds"]
    assert histogram.type == "histogram"
    assert len(histogram.samples) == 4


def test_what_llmgw_tells_of_itself_is_not_taken_from_engines() -> None:
    text = merged(("a", "m", VLLM + "llmgw_requests_total 7\n"))
    assert "process_" not in text
    assert "llmgw_requests_total" not in text


def test_labels_of_our_names_are_renamed() -> None:
    found = samples(merged(("a", "m", 'x{model="theirs",shard="s"} 1\n')))
    assert found == {"x{exported_model=theirs,exported_shard=s,model=m,shard=a}": 1.0}


def test_time_stamps_are_dropped_and_spaces_allowed() -> None:
    assert merged(("a", "m", 'x { k = "v" , } 1 1700000000000\ny\t2\n')) == (
        '# TYPE x untyped\nx{shard="a",model="m",k="v"} 1\n# TYPE y untyped\ny{shard="a",model="m"} 2\n'
    )


def test_lines_that_are_none_are_left_out() -> None:
    bad = ["<html>", "x", "x one", 'x{k="v} 1', 'x{k="v"', "{} 1", 'x{k="a",k="b"} 1', "x 1_0", "x 1 2 3", "9x 1"]
    assert merged(("a", "m", "\n".join(bad) + "\n")) == ""
    assert merged(("a", "m", "x " + "1" * rewriting.LINE_MAX)) == ""


def test_two_types_of_one_name_do_not_mix() -> None:
    one, other = "# TYPE x gauge\nx 1\n", "# TYPE x counter\nx 2\ny 3\n"
    found = samples(merged(("a", "m", one), ("b", "m", other)))
    assert found == {"x{model=m,shard=a}": 1.0, "y{model=m,shard=b}": 3.0}


def test_an_engine_cannot_fill_the_page() -> None:
    many = "".join(f'x{{i="{i}"}} 1\n' for i in range(rewriting.SERIES_MAX + 100))
    assert merged(("a", "m", many)).count("\n") == rewriting.SERIES_MAX + 1
    pages = [(f"s{i}", "m", many) for i in range(rewriting.LINES_MAX // rewriting.SERIES_MAX + 2)]
    assert merged(*pages).count("\n") == rewriting.LINES_MAX + 1
    names = "".join(f"x{i} 1\n" for i in range(rewriting.FAMILIES_MAX + 100))
    assert merged(("a", "m", names)).count("# TYPE") == rewriting.FAMILIES_MAX


def test_there_are_pauses_while_a_large_page_is_read() -> None:
    pieces = list(merged_lines([("a", "m", "x 1\n" * 1000)], is_reserved))
    assert pieces.count("") >= 1000 // rewriting.STEP


LINES = st.one_of(
    st.text(max_size=40),
    st.sampled_from(VLLM.split("\n")),
    st.from_regex(r"# TYPE [a-c](_sum)? (counter|gauge|histogram|summary)", fullmatch=True),
    st.from_regex(r'[a-c](_sum|_bucket|_count)?(\{[a-z]="[^"\n]*"\})? [0-9]+', fullmatch=True),
)


@given(st.lists(st.lists(LINES, max_size=20), max_size=4), st.text(max_size=10))
def test_whatever_engines_say_the_page_stays_readable(pages: list[list[str]], name: str) -> None:
    name = name.encode("utf-8", "replace").decode()
    text = merged(*((f"{name}{i}", name, "\n".join(lines)) for i, lines in enumerate(pages)))
    found = list(text_string_to_metric_families(text))
    assert all(
        sample.labels["model"] == name and sample.labels["shard"].startswith(name)
        for family in found
        for sample in family.samples
    )
    heads = [line for line in text.split("\n") if line.startswith("# TYPE")]
    assert len({line.split(" ")[2] for line in heads}) == len(heads)
