"""Rules, scrape example and dashboard against the page that llmgw really serves, by Prometheus' own tools."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from exposing import Prometheus, page, prometheus, served

from llmgw.domain.status import ConditionKind, ShardState
from llmgw.metrics.families import ENGINE_METRICS_UP, FAMILIES

CONTRIB = Path(__file__).parents[2] / "contrib"
ALERTS = CONTRIB / "prometheus" / "alerts.yml"
DASHBOARD = CONTRIB / "grafana" / "llmgw.json"
NAME = re.compile(r"\b(?:llmgw|process)_[a-z0-9_]+")

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool (Debian package prometheus)"
)


def real_prometheus(test: Callable[..., None]) -> Callable[..., None]:
    """One for all of them: in one worker."""
    return pytest.mark.slow(pytest.mark.xdist_group("prometheus")(test))


def promtool(*arguments: str, text: str = "") -> str:
    done = subprocess.run(
        ["promtool", *arguments], input=text, capture_output=True, text=True, cwd=ALERTS.parent, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def expressions() -> dict[str, str]:
    """Of the dashboard, by panel and target, its variables filled in."""
    return {
        f"{panel['title']} {target['refId']}": target["expr"]
        .replace("$__rate_interval", "1m")
        .replace("$instance", ".*")
        .replace("$model", ".*")
        for panel in panels()
        for target in panel["targets"]
    }


def rules() -> dict[str, str]:
    """The expression of each alert; the file's form is simple enough to be read without a library for YAML."""
    found = {}
    for part in ALERTS.read_text().split("- alert: ")[1:]:
        name, _, rest = part.partition("\n")
        text = re.search(r"expr: (?:>\n)?(.*?)\n        (?:for|labels):", rest, re.DOTALL)
        assert text is not None, name
        found[name] = " ".join(text[1].split())
    return found


def exposed() -> set[str]:
    """Every name that a line of the page can begin with."""
    own = {name for name in NAME.findall(page()) if name.startswith("process_")}
    return own | {name for family in FAMILIES for name in family.sample_names}


def used(text: str) -> set[str]:
    return set(NAME.findall(text))


@pytest.mark.parametrize(("what", "text"), [*expressions().items(), *rules().items()])
def test_every_metric_that_is_used_is_one_that_llmgw_exposes(what: str, text: str) -> None:
    assert used(text) or text == 'up{job="llmgw"} == 0', what
    assert used(text) <= exposed()


def test_the_dashboard_names_panels_once_and_shows_what_each_is() -> None:
    found = json.loads(DASHBOARD.read_text())
    ids = [panel["id"] for panel in found["panels"]]
    assert len(set(ids)) == len(ids)
    assert len({panel["title"] for panel in panels()}) == len(panels())
    assert all(target["datasource"]["uid"] == "${datasource}" for panel in panels() for target in panel["targets"])


def test_the_page_has_every_family() -> None:
    text = page()
    missing = [family.name for family in FAMILIES if f"# TYPE {family.name} {family.kind.value}\n" not in text]
    # That one comes with engine_metrics.
    assert missing == [ENGINE_METRICS_UP.name]


@needs_promtool
def test_promtool_has_no_complaint_about_the_page() -> None:
    assert promtool("check", "metrics", text=page()) == ""


@needs_promtool
def test_promtool_accepts_the_alert_rules() -> None:
    assert f"SUCCESS: {len(rules())} rules found" in promtool("check", "rules", "alerts.yml")


@needs_promtool
def test_the_alert_rules_do_what_their_tests_say() -> None:
    assert "SUCCESS" in promtool("test", "rules", "alerts_test.yml")


@needs_promtool
def test_promtool_accepts_the_scrape_example() -> None:
    assert "SUCCESS" in promtool("check", "config", "--syntax-only", "scrape.yml")


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("needs prometheus (Debian package prometheus)")
    with served() as port, prometheus(program, tmp_path_factory.mktemp("prometheus"), port) as it:
        yield it


@real_prometheus
def test_a_real_prometheus_scrapes_the_page(scraped: Prometheus) -> None:
    (target,) = scraped.get("targets")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    known = scraped.get("metadata")
    for family in FAMILIES:
        if family is not ENGINE_METRICS_UP:
            assert known[family.name][0] == {"type": family.kind.value, "help": family.help, "unit": ""}


@real_prometheus
@pytest.mark.parametrize("what", expressions())
def test_every_panel_of_the_dashboard_has_something_to_show(scraped: Prometheus, what: str) -> None:
    assert scraped.query(expressions()[what]) or what.startswith("Conditions"), expressions()[what]


@real_prometheus
@pytest.mark.parametrize("name", rules())
def test_every_alert_can_be_evaluated(scraped: Prometheus, name: str) -> None:
    scraped.query(rules()[name])
    # Without its comparisons it has series; a label that is not there would match none.
    series = re.sub(r" (==|>=|>) [0-9.e]+", "", re.sub(r"\[\d+m\]", "[1m]", rules()[name]))
    # Nothing failed here, so that there are restarts of the other kind only.
    assert scraped.query(series.replace('reason!="wished"', 'reason="wished"')), series


@pytest.mark.parametrize(("label", "known"), [("state", set(ShardState)), ("condition", set(ConditionKind))])
def test_states_and_conditions_that_are_asked_for_exist(label: str, known: set[str]) -> None:
    found: set[str] = set()
    for text in (*expressions().values(), *rules().values()):
        for values in re.findall(rf'\b{label}=~?"([^"]*)"', text):
            found |= set(values.split("|"))
    assert found
    assert found <= known
