"""Whether it is worth waiting for a model that no engine serves at the moment. Pure."""

from __future__ import annotations

from llmgw.gateway.reading import answers
from llmgw.gateway.reading.answers import Refusal
from llmgw.gateway.routing.table import Model


def hopeless(model: Model, load_wait: float, estimate: float | None) -> Refusal | None:
    """Why a request for it is refused at once; None when it may wait. Times in seconds; `estimate` None: not known."""
    if not (model.is_coming or model.is_loadable):
        words = [f"{standing.name} is {standing.words}" for standing in model.standings]
        return answers.no_engine(model.name, "; ".join(words) or "it has no engine")
    if estimate is not None and estimate > load_wait:
        return answers.still_loading(model.name, estimate)
    return None
