"""The reference page about metrics, made from the table of families, so that it cannot say anything else.

`python -m llmgw.metrics.reference > docs/reference/metrics.md` writes it; a test compares the file.
"""

from __future__ import annotations

import sys

from llmgw.metrics.families import FAMILIES, Family, Kind

_HEAD = """\
# Metrics

<!-- Made by `python -m llmgw.metrics.reference`; do not edit. -->

`GET /metrics` on the gateway, and on the control socket (`curl --unix-socket PATH http://llmgw/metrics`), answer the
same page in Prometheus' text format. On the gateway it is for operators: from this machine, or with one of
`gateway.operator_keys` as `Authorization: Bearer KEY`; `gateway.metrics = false` turns it off there.
[contrib/prometheus](../../contrib/prometheus) has a scrape configuration and alert rules,
[contrib/grafana](../../contrib/grafana) a dashboard.

- States and conditions are gauges of 0 and 1, one for each possible value: `llmgw_shard_state{state="ready"} == 1`.
- What is not known has no line; it is never shown as 0. Counters begin anew when llmgw does.
- Labels are bounded: models, tenants, bands and shards come from the file, and what the file no longer has is
  forgotten. A name that a client made up is never a label; a request for it has an empty `model`.
- Histograms carry model and band. Tenants stand on counters and gauges.
- With `gateway.engine_metrics = true` the page also has the engines' own series under their own names
  (`vllm:num_requests_running`), each with the labels `shard` and `model`; where an engine has labels of these names,
  they become `exported_shard` and `exported_model`. Series whose names llmgw uses itself (`process_*`) are left out,
  and so is an engine that does not answer in time (`llmgw_engine_metrics_up`).
- `process_*` are CPU time, memory, descriptors and start time of llmgw's own process.

"""


def page() -> str:
    """The whole page."""
    gateway = next(i for i, family in enumerate(FAMILIES) if family.name == "llmgw_requests_total")
    return (
        _HEAD
        + "## The node and its shards\n\n"
        + "\n".join(map(_row, FAMILIES[:gateway]))
        + "\n\n## The gateway\n\n"
        + "\n".join(map(_row, FAMILIES[gateway:]))
        + "\n"
    )


def _row(family: Family) -> str:
    labels = f"{{{', '.join(family.labels)}}}" if family.labels else ""
    text = f"- `{family.name}{labels}` ({family.kind.value}): {family.help}"
    if family.kind is Kind.HISTOGRAM:
        text += f" Buckets up to {', '.join(f'{bound:g}' for bound in family.bounds)} seconds."
    return text


if __name__ == "__main__":
    sys.stdout.write(page())
